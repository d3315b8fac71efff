"""Turns raw input into a data set directory: read, validate, group, partition by period, write, commit.

The input is cut into units (`inputs`), processed one after the other (`assembly`) or in parallel (`parallel`) with the
same output. Texts to learn from, and medians that fill gaps, are looked for first. Readers see nothing before the
manifest is committed.

Shapes: N rows, F features.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from ltrscale import storage
from ltrscale.arrays import Bools, Floats
from ltrscale.config import Operational
from ltrscale.data.dataset.columns import put_vocabulary
from ltrscale.data.dataset.files import Counts, DataFiles, total_of
from ltrscale.data.dataset.manifest import Dataset, Manifest, open_dataset
from ltrscale.data.dataset.origin import place_beside
from ltrscale.data.dataset.writer import commit_dataset
from ltrscale.data.ids import QueryIds, SeenHashes, hash_ids
from ltrscale.errors import InputError
from ltrscale.ingest import additions
from ltrscale.ingest.assembly import Written, write_units
from ltrscale.ingest.event_rows import EventRows
from ltrscale.ingest.events import made_rows
from ltrscale.ingest.history_log import HistoryLog
from ltrscale.ingest.inputs import PrepareConfig, Unit, UnitSettings, cut_units, fingerprints, list_inputs
from ltrscale.ingest.mapping import Fill
from ltrscale.ingest.parallel import UnitsOnRay, run_tasks
from ltrscale.ingest.remarks import (
    check_events,
    check_expected,
    check_rows,
    log_shortcuts,
    report_counts,
    warn_of_copies,
    warn_of_labels,
    warn_of_places,
)
from ltrscale.ingest.rows import RowBlock, row_periods
from ltrscale.ingest.source import File
from ltrscale.ingest.texts import Encoding, TokenizerConfig, encoding_of
from ltrscale.ingest.validate import total_accounting, with_counts
from ltrscale.progress import Report, log, progress
from ltrscale.runtime.engine import ray_cluster
from ltrscale.simulate.synthetic import SyntheticLog, SyntheticLogConfig
from ltrscale.stages.stage import Origin, Stage

_MOST_VALUES = 1 << 20
"""Values of a feature that are kept for its median."""


class PrepareJob(Stage):
    """Turn raw logs into a data set directory."""

    stage: ClassVar = "prepare"
    makes_data: ClassVar = True
    for_scoring: ClassVar[bool] = False
    """True if the rows are only scored, by a job with the settings of `prepare` as its own keys: errors name those, and
    nothing is said of labels or pretraining."""
    out: Operational[str]
    """Directory of the data set."""
    prepare: PrepareConfig
    synthetic: SyntheticLogConfig | None = None
    """Make this synthetic log first, below `out` with `-log` appended, and read it as input."""
    ray: Operational[bool] = False
    """Handle the units of the input in parallel on a Ray cluster; the output is the same."""

    def run(self) -> bool:
        """Make the synthetic log, if there is one, then the data set."""
        if self.synthetic is not None:
            SyntheticLog(out=self._log, log=self.synthetic).run()
        return super().run()

    def own_settings(self) -> PrepareConfig:
        """All settings of the data set."""
        if self.synthetic is None:
            return self.prepare
        return self.prepare.replace(inputs=[{"path": storage.join(self._log, "*", "*.parquet")}])

    def inputs(self) -> dict[str, str]:
        """Fingerprints of the input files, and of other files that their source reads."""
        return fingerprints(self._files, self.own_settings().source)

    def is_done(self, origin: Origin) -> bool:
        """True if the data set holds the inputs, possibly with others that were added; logs it if so."""
        done = additions.holds_inputs(self.out, origin)
        if done:
            log.info("prepare: %s is up to date, nothing to do", self.out)
        return done

    def work(self, origin: Origin, report: Report) -> None:
        """Make the data set, or add periods to it; readers see nothing of it until it is complete.

        Unusable rows are in the quarantine, even if there are too many and nothing is committed. Query ids must not
        return within the inputs of one fixed period, or within all inputs without one, including those of an existing
        data set that is added to.

        Raises:
            RejectedRowsError: more than `max_rejected` of the rows are rejected.
            InputError: an input is missing, cannot be decoded or has other features than the first; there are no rows;
                a period has other counts than expected; an addition does not fit the data set, or making the data set
                again would delete additions.
        """
        with ray_cluster(1) if self.ray else nullcontext(), storage.scratch.directory() as folder:
            config, files, events = self._rows()
            with storage.Commit(self.out) as commit:
                existing = _existing(config, self.out)
                read = [file for file in files if not file.is_rewritten]
                settings, units = _settings(config, read, existing, commit, folder, late=bool(events))
                additions.check_rewritten(settings, files, existing)
                new, totals = _write(settings, units, commit, folder, existing, origin, ray=self.ray)
                check_rows(new.accounting, totals.first_rejections, settings, for_scoring=self.for_scoring)
                check_expected(config.expect, new)
                manifest = new.model_copy(update={"accounting": with_counts(new.accounting, events)})
                if existing is not None:
                    manifest = additions.with_addition(existing.manifest, manifest)
                manifest = commit_dataset(commit, manifest)
        report_counts(self.out, new, report, added=existing is not None)
        if not self.for_scoring:
            warn_of_labels(self.out, manifest, config.source)
            warn_of_copies(Dataset(self.out, manifest), new.periods)
            log_shortcuts(new, existing.manifest if existing else None)
            warn_of_places(self.out, totals.places.among(new.features))
            if manifest.counts().labelled:
                from ltrscale.ingest.leaks import ask_of_leaks  # imports torch, which nothing before needs

                ask_of_leaks(self.out)

    def _rows(self) -> tuple[PrepareConfig, list[File], dict[str, int]]:
        """The settings and files of rows, once they are made, and the counts of the events that they are made of."""
        config = self.own_settings()
        if self._first is not None:
            self._first.run()
        match self._first:
            case EventRows(out=out, source=source):
                files, counts = made_rows(out)
                check_events(out, counts, config.max_rejected)
                return config.replace(source=source.rows), files, counts
            case HistoryLog() as history:
                return config, history.known(), {}
        return config, self._listed, {}

    @cached_property
    def _listed(self) -> list[File]:
        """The files of the inputs, listed once."""
        return self._first.files if self._first else list_inputs(self.own_settings().inputs)

    @cached_property
    def _first(self) -> EventRows | HistoryLog | None:
        """What makes rows of events, or computes the features of earlier ones."""
        config = self.own_settings()
        if config.source.rows is not config.source:
            shared = {"source": config.source, "unit_mb": config.unit_mb, "memory": config.sort_memory, "ray": self.ray}
            return EventRows.model_validate({"out": place_beside(self.out, "rows"), "read": config.inputs, **shared})
        if config.source.known_before is not None:
            return HistoryLog(out=place_beside(self.out, "history"), prepare=config, ray=self.ray)
        return None

    @property
    def _files(self) -> list[File]:
        """Those that are read, which the origin names."""
        return [file for file in self._listed if not file.is_rewritten]

    @property
    def _log(self) -> str:
        return f"{self.out.rstrip('/')}-log"


class RowsJob(PrepareJob):
    """Turn rows to score into a data set directory."""

    for_scoring: ClassVar = True


def _settings(
    config: PrepareConfig,
    files: Sequence[File],
    existing: Dataset | None,
    commit: storage.Commit,
    folder: Path,
    *,
    late: bool,
) -> tuple[UnitSettings, list[Unit]]:
    """The units, and what their work needs: the features, then the encoding of texts, then what fills gaps.

    Groups may join existing periods of the same features if they come of `late` events.
    """
    if existing is not None:
        additions.check_types(existing, config.source, files[0])
    settings = UnitSettings(config, config.source.find_features(files), files[0], commit.url)
    first = 0
    if existing is not None:
        features = additions.check_addable(existing, settings)
        taken = additions.taken_periods(existing.manifest, features, late=late)
        settings = replace(settings, features=features, taken=taken)
        first = additions.next_unit(existing.manifest)
    sizes = storage.at_once(storage.size, [file.url for file in files])
    units = cut_units(files, sizes, unit_bytes=config.unit_mb * 2**20, sort=config.sort, first=first)
    settings = replace(settings, encoding=_encoding(settings, units, existing, commit, folder))
    source = config.source.filled(_find_fills(settings, units, existing))
    return replace(settings, config=config.replace(source=source)), units


def _encoding(
    settings: UnitSettings, units: Sequence[Unit], existing: Dataset | None, commit: storage.Commit, folder: Path
) -> Encoding | None:
    """The encoding that makes tokens of texts, from the data set or new, with its file in place."""
    tokens = settings.config.source.token_columns
    if tokens is None:
        return None
    if existing is not None:
        return encoding_of(existing.url)
    new = tokens.tokenizer.open(lambda: _training_texts(settings, units, tokens.tokenizer, folder))
    return replace(new, vocabulary=put_vocabulary(new.vocabulary, new.content, commit)) if new.content else new


def _training_texts(
    settings: UnitSettings, units: Sequence[Unit], tokenizer: TokenizerConfig, folder: Path
) -> Iterator[list[str]]:
    """The texts of all token fields in the periods that a tokenizer is trained on, each distinct text once."""
    if not tokenizer.learns_from:
        return
    fields = {field.column for field in settings.config.source.token_fields}
    seen = SeenHashes(folder)
    for block, wanted_N in _in_periods(settings, units, tokenizer.learns_from):
        for column in (column for name, column in block.columns.items() if name in fields):
            texts = column.filter(pa.array(wanted_N)).unique().drop_null().to_pylist()
            new = ~seen.add(hash_ids(texts))
            yield [text for text, is_new in zip(texts, new.tolist(), strict=True) if is_new]


def _find_fills(settings: UnitSettings, units: Sequence[Unit], existing: Dataset | None) -> dict[str, float]:
    """The fill value of each filled feature; from the data set that is added to, if there is one."""
    mapping = settings.config.source.mapping
    fills = mapping.fills_of(settings.features) if mapping else {}
    if existing is not None:
        _check_same(existing, fills)
        return existing.manifest.fills
    constants = {name: float(np.float32(value)) for name, value in fills.items() if value != "median"}
    return constants | _medians([name for name, value in fills.items() if value == "median"], settings, units)


def _check_same(dataset: Dataset, new_fills: Mapping[str, Fill]) -> None:
    old_fills = dataset.manifest.fills
    for name in sorted(new_fills.keys() | old_fills.keys()):
        new, old = new_fills.get(name), old_fills.get(name)
        same = new == "median" or (new is not None and float(np.float32(new)) == old)
        if (new is None) != (old is None) or not same:
            state = "stay missing" if old is None else f"are {old:g}"
            raise InputError(
                f"{dataset.url}: missing values of {name!r} {state} there; prepare with the same fill, or into another "
                "directory"
            )


def _medians(names: Sequence[str], settings: UnitSettings, units: Sequence[Unit]) -> dict[str, float]:
    """The medians of some features over rows of the configured periods, by default over all rows."""
    if not names:
        return {}
    assert settings.config.source.mapping is not None
    periods = settings.config.source.mapping.fill_periods
    places = [[feature.name for feature in settings.features].index(name) for name in names]
    values = [_Values() for _ in names]
    for block, wanted_N in _in_periods(settings, units, periods):
        rows_NF = block.features_NF[wanted_N]
        for place, each in zip(places, values, strict=True):
            each.add(rows_NF[:, place])
    if empty := [name for name, each in zip(names, values, strict=True) if not each.seen]:
        where = f" in {', '.join(periods)}" if periods else ""
        raise InputError(f"fill: {empty[0]!r} has no value{where}, so no median; give a number, or other fill_periods")
    return {name: each.median() for name, each in zip(names, values, strict=True)}


def _in_periods(
    settings: UnitSettings, units: Sequence[Unit], wanted: Sequence[str]
) -> Iterator[tuple[RowBlock, Bools]]:
    """The rows, with a mask of those in some periods, given by name or as ranges A..B; all if none are given."""
    read = settings.open({})
    ranges = [(first, last if dots else first) for first, dots, last in (each.partition("..") for each in wanted)]
    for unit in units:
        for block in chain.from_iterable(map(read, unit.files)):
            coded = row_periods(block, unit.period, settings.config.period).dictionary_encode()
            names = coded.dictionary.to_pylist()
            inside = [not ranges or any(first <= name <= last for first, last in ranges) for name in names]
            yield block, np.array(inside, bool)[coded.indices.to_numpy()]


class _Values:
    """Values of a feature for their median; beyond a million, only every second, fourth, ... value."""

    def __init__(self) -> None:
        self.seen, self._step, self._kept = 0, 1, [np.empty(0, np.float32)]

    def add(self, values_N: Floats) -> None:
        """Add the finite ones."""
        values_n = values_N[np.isfinite(values_N)]
        self._kept.append(values_n[-self.seen % self._step :: self._step].copy())
        self.seen += len(values_n)
        while sum(map(len, self._kept)) > _MOST_VALUES:
            self._kept, self._step = [np.concatenate(self._kept)[::2]], 2 * self._step

    def median(self) -> float:
        return float(np.float32(np.median(np.concatenate(self._kept).astype(np.float64))))


def _existing(config: PrepareConfig, out: str) -> Dataset | None:
    """The data set to add to; None if there is none or it is replaced."""
    manifest = storage.read_manifest(out)
    if manifest is None:
        return None
    if config.add:
        return open_dataset(out)
    additions.check_nothing_added(out, manifest)
    return None


def _write(
    settings: UnitSettings,
    units: Sequence[Unit],
    commit: storage.Commit,
    folder: Path,
    existing: Dataset | None,
    origin: Mapping[str, Any],
    *,
    ray: bool,
) -> tuple[Manifest, Written]:
    """Put all files in place; returns the manifest of these files alone, and its totals."""
    ids, totals = QueryIds(folder), Written(len(settings.features), settings.out)
    if existing is not None:
        totals.schema = additions.schema_of_groups(existing.url, existing.manifest)
        if any(not unit.period for unit in units):
            additions.recall_ids(existing, ids, folder)
    unfinished = additions.Unfinished(commit, origin, existing)
    unfinished.restore(totals, ids, folder)
    before, units = _counts_before(existing, unfinished.manifest), units[unfinished.units :]

    def take(written: Written) -> None:
        ids.kept.push(written.kept_ids)
        ids.others.push(written.other_ids)
        totals.add(written)
        if unfinished.is_due and totals.units < len(units):
            done, manifest = unfinished.units + totals.units, _manifest(totals, settings, origin, unfinished.manifest)
            unfinished.save(done, manifest, ids, totals)

    with progress("prepare", sum(unit.bytes for unit in units), "rows") as advance:
        if ray:
            run_tasks(UnitsOnRay(settings, units, before, commit, ids, advance, take).following)
        else:
            write_units(settings, units, before, commit=commit, ids=ids, folder=folder, advance=advance, take=take)
    query_ids = additions.record_ids(ids, existing, commit, folder)
    lost = len(ids.lost())
    manifest = _manifest(totals, settings, origin, unfinished.manifest, lost_groups=lost, query_ids=query_ids)
    commit.keep(manifest.quarantine)  # before any check, because errors point the user to these files
    return manifest, totals


def _counts_before(existing: Dataset | None, finished: Manifest | None) -> Counts:
    """The counts of the data set and of what an interrupted run has finished, so that no gid is given twice."""
    counts = [finished.counts()] if finished is not None else []
    if existing is not None:
        counts += [existing.manifest.counts()]
        counts += [Counts(erased.groups, 0, 0)] if (erased := existing.manifest.erased) else []
    return total_of(counts)


def _manifest(
    totals: Written,
    settings: UnitSettings,
    origin: Mapping[str, Any],
    finished: Manifest | None,
    *,
    lost_groups: int = 0,
    query_ids: tuple[storage.Placed, ...] = (),
) -> Manifest:
    """The manifest of all units, including those that an interrupted run has `finished`."""
    collisions = sum(encoder.collisions for encoder in totals.encoders.values())
    texts = {name: encoder.texts for name, encoder in totals.encoders.items()}
    source, encoding = settings.config.source, settings.encoding
    new = Manifest(
        version=2 if settings.config.compression == "lz4_bytes" else 1,
        features=settings.features,
        files=DataFiles.joined(totals.files),
        summaries=totals.stats.summaries(),
        goals=source.goals,
        label_counts=totals.labels.counts(),
        grouped=totals.stats.grouped,
        tokens=source.token_fields,
        token_summaries=totals.tokens,
        vocabulary=encoding.vocabulary if encoding else None,
        accounting=total_accounting([totals.accounting], lost_groups=lost_groups, hash_collisions=collisions),
        categories={name: dict(sorted(codes.items())) for name, codes in texts.items() if codes is not None},
        raw=source.raw_columns(settings.features, settings.first),
        fills=source.fills,
        query_ids=query_ids,
        quarantine=totals.quarantine,
        made_by=dict(origin),
    )
    return new if finished is None else additions.joined_manifests(finished, new)
