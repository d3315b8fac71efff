"""Turns raw input into a data set directory: read, validate, group, partition by period, write, commit.

The input is cut into units (`inputs`), processed one after the other (`assembly`) or in parallel (`parallel`) with the
same output. Readers see nothing before the manifest is committed. Fill values (constants, and medians of the first
rows) stay with a data set for all later rows.

Shapes: N rows, F features.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.data.dataset.commits import commit_dataset
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import Accounting, Dataset, ListedFile, Manifest, open_dataset
from ltrscale.data.dataset.summaries import FeatureStats, LabelCounts
from ltrscale.data.dataset.tokens import TokenSummary, put_vocabulary, summed
from ltrscale.data.ids import QueryIds
from ltrscale.errors import InputError
from ltrscale.ingest.additions import (
    check_addable,
    check_nothing_added,
    holds_inputs,
    joined_manifests,
    next_unit,
    recall_ids,
    record_ids,
    schema_of,
    with_addition,
)
from ltrscale.ingest.assembly import LikePlaces, Written, check_columns, training_texts, write_unit
from ltrscale.ingest.categories import CategoryEncoder, RecordedCodes, merged_texts
from ltrscale.ingest.inputs import (
    PrepareConfig,
    Unit,
    UnitSettings,
    UnitStart,
    cut_units,
    fingerprints,
    input_fingerprints,
    list_inputs,
)
from ltrscale.ingest.mapping import Fill
from ltrscale.ingest.outcome import (
    ask_of_leaks,
    check_expected,
    check_rows,
    log_shortcuts,
    report_counts,
    warn_of_copies,
    warn_of_labels,
    warn_of_places,
)
from ltrscale.ingest.parallel import UnitsOnRay
from ltrscale.ingest.rows import Rejection, RowBlock
from ltrscale.ingest.texts import Encoding, encoding_of
from ltrscale.ingest.unfinished import Unfinished
from ltrscale.ingest.validate import total_accounting
from ltrscale.origin import made_by
from ltrscale.progress import Advance, Report, log, progress
from ltrscale.simulate.synthetic import SyntheticLog, SyntheticLogConfig
from ltrscale.stages.stage import Origin, Stage

_MOST_VALUES = 1 << 20


class PrepareJob(Stage):
    """Turn raw logs into a data set directory."""

    stage: ClassVar = "prepare"
    makes_data: ClassVar = True
    for_scoring: ClassVar[bool] = False
    """True if the rows are only scored, by a job with the settings of `prepare` as its own keys."""
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
        """Fingerprints of the input files."""
        return input_fingerprints(self.own_settings())

    def is_done(self, origin: Origin) -> bool:
        """True if the data set holds the inputs, possibly with others that were added."""
        return is_prepared(self.out, origin)

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Make the data set or add to it, then ask about features that may be known only after users have acted."""
        dataset = prepare(self.own_settings(), self.out, ray=self.ray, report=report, for_scoring=self.for_scoring)
        if not self.for_scoring and dataset.manifest.counts().labelled:
            ask_of_leaks(self.out)

    @property
    def _log(self) -> str:
        return f"{self.out.rstrip('/')}-log"


class RowsJob(PrepareJob):
    """Turn rows to score into a data set directory."""

    for_scoring: ClassVar = True


def is_prepared(out: str, origin: Mapping[str, Any]) -> bool:
    """True if `prepare` with this origin (`made_by`) has made the data set or added to it; if so, it is logged."""
    done = holds_inputs(out, origin)
    if done:
        log.info("prepare: %s is up to date, nothing to do", out)
    return done


def prepare(
    config: PrepareConfig, out: str, *, ray: bool = False, report: Report = lambda _: None, for_scoring: bool = False
) -> Dataset:
    """Make a data set directory at `out`, or add periods to it; readers see nothing of it until it is complete.

    It does nothing if the same config has made or added the same inputs already. Unusable rows are in the quarantine,
    even if there are too many and nothing is committed. Query ids must not return within the inputs of one fixed
    period, or within all inputs without one, including those of an existing data set that is added to.

    Args:
        config: the inputs to read, and the way to write them.
        out: the directory.
        ray: process the units in parallel, in tasks of a Ray cluster; the output is the same.
        report: receives the counts.
        for_scoring: the rows are only scored, by a job with its own keys for `config`: errors name those keys, and
            nothing about labels or pretraining is logged.

    Raises:
        InputError: an input is missing, cannot be decoded or has other features than the first; there are no rows;
            more than `max_rejected` of the rows are rejected; a period has other counts than expected; an addition
            does not fit the data set, or making the data set again would delete additions.
    """
    files = list_inputs(config.inputs)
    origin = made_by("prepare", config, fingerprints(files, config.source))
    if is_prepared(out, origin):
        return open_dataset(out)
    with storage.Commit(out) as commit, storage.scratch.directory() as folder:
        existing_dataset = _before(config, out)
        work = UnitSettings(config, config.source.find_features(files), files[0], out)
        if existing_dataset is not None:
            existing_periods = frozenset(existing_dataset.manifest.periods)
            work = replace(work, features=check_addable(existing_dataset, work), taken=existing_periods)
        sizes = storage.at_once(storage.size, [file.url for file in files])
        first = next_unit(existing_dataset.manifest) if existing_dataset else 0
        units = cut_units(files, sizes, unit_bytes=config.unit_mb * 2**20, sort=config.sort, first=first)
        work = replace(work, encoding=_encoding(work, units, existing_dataset, commit, folder))
        source = config.source.filled(find_fills(work, units, existing_dataset))
        work = replace(work, config=config.replace(source=source))
        new, totals = _write(work, units, commit, folder, existing_dataset, origin, ray=ray)
        check_rows(new.accounting, totals.first_rejections, work, key="" if for_scoring else "prepare.")
        check_expected(config.expect, new)
        manifest = new if existing_dataset is None else with_addition(existing_dataset.manifest, new)
        manifest = commit_dataset(commit, manifest)
    report_counts(out, new, report, added=existing_dataset is not None)
    if not for_scoring:
        warn_of_labels(out, manifest, config.source)
        warn_of_copies(Dataset(out, manifest), new.periods)
        log_shortcuts(new, None if existing_dataset is None else existing_dataset.manifest)
        warn_of_places(out, totals.places.among(new.features))
    return Dataset(out, manifest)


def _encoding(
    work: UnitSettings, units: Sequence[Unit], dataset: Dataset | None, commit: storage.Commit, folder: Path
) -> Encoding | None:
    """The encoding that makes tokens of texts, from the data set or new, with its file in place."""
    tokens = work.config.source.token_columns
    if tokens is None:
        return None
    if dataset is not None:
        return encoding_of(dataset.url)
    new = tokens.tokenizer.open(lambda: training_texts(work, units, tokens.tokenizer, folder))
    return replace(new, vocabulary=put_vocabulary(new.vocabulary, new.content, commit)) if new.content else new


def _before(config: PrepareConfig, out: str) -> Dataset | None:
    """The data set to add to; None if there is none or it is replaced."""
    manifest = storage.read_manifest(out)
    if manifest is None:
        return None
    if config.add:
        return open_dataset(out)
    check_nothing_added(out, manifest)
    return None


def _write(
    work: UnitSettings,
    units: Sequence[Unit],
    commit: storage.Commit,
    folder: Path,
    dataset: Dataset | None,
    origin: Mapping[str, Any],
    *,
    ray: bool,
) -> tuple[Manifest, "_Totals"]:
    """Put all files in place; returns the manifest of these files alone, and its totals."""
    ids, start, schema = QueryIds(folder), UnitStart(), None
    if dataset is not None:
        groups, documents, _ = dataset.manifest.counts()
        start, schema = UnitStart(groups, documents), schema_of(dataset)
        if any(not unit.period for unit in units):
            recall_ids(dataset, ids, folder)
    unfinished = Unfinished(commit, origin, dataset)
    if unfinished.manifest is not None:
        groups, documents, _ = unfinished.manifest.counts()
        start = UnitStart(start.gid + groups, start.documents + documents)
        unfinished.restore(ids, folder)
    totals = _Totals(work, schema, unfinished.manifest, unfinished.categories(folder))
    units, total = units[unfinished.units :], len(units)

    def take(written: Written) -> None:
        ids.kept.push(written.kept)
        ids.others.push(written.others)
        totals.add(written)
        if unfinished.is_due and totals.units < len(units):
            done = total - len(units) + totals.units
            unfinished.save(done, totals.manifest(origin), ids, totals.categories())

    with progress("prepare", sum(unit.bytes for unit in units), "rows") as advance:
        if ray:
            UnitsOnRay(work, units, start, commit, ids, advance, take).write()
        else:
            for written in _write_here(work, units, start, commit=commit, ids=ids, folder=folder, advance=advance):
                take(written)
    query_ids = record_ids(ids, dataset, commit, folder)
    manifest = totals.manifest(origin, lost_groups=len(ids.lost()), query_ids=query_ids)
    commit.keep(manifest.quarantine)  # before any check, because errors point the user to these files
    return manifest, totals


def _write_here(
    work: UnitSettings,
    units: Sequence[Unit],
    start: UnitStart,
    *,
    commit: storage.Commit,
    ids: QueryIds,
    folder: Path,
    advance: Advance,
) -> Iterator[Written]:
    for unit in units:
        written = write_unit(work, unit, start, commit=commit, ids=ids, folder=folder, advance=advance)
        accounting = written.accounting
        start = UnitStart(start.gid + accounting.groups_kept, start.documents + accounting.rows_kept)
        yield written


class _Totals:
    """The manifest's totals, summed in unit order; `before` and `categories` are from units of an interrupted run."""

    def __init__(
        self,
        work: UnitSettings,
        schema: pa.Schema | None,
        before: Manifest | None,
        categories: Mapping[str, NDArray[np.uint64]],
    ) -> None:
        self.units = 0
        self._before = before
        self.first_rejections: list[Rejection] = []
        self._work = work
        self._schema, self._schema_of = schema, work.out
        self._stats, self._labels = FeatureStats(len(work.features)), LabelCounts()
        self.places = LikePlaces(len(work.features))
        self._encoders = {name: CategoryEncoder(values) for name, values in categories.items()}
        self._texts: dict[str, RecordedCodes] = {}
        self._accounting: list[Accounting] = []
        self._tokens: list[Mapping[str, TokenSummary]] = []
        self._files: list[DataFiles] = []
        self._quarantine: list[str] = []

    def add(self, written: Written) -> None:
        self.units += 1
        if written.schema is not None:
            if self._schema is None:
                self._schema, self._schema_of = written.schema, str(written.unit)
            check_columns(self._schema, written.schema, str(written.unit), self._schema_of)
        self._stats.merge(written.stats)
        self.places.merge(written.places)
        self._labels.merge(written.labels)
        for name, values in written.categories.items():
            self._encoders.setdefault(name, CategoryEncoder()).note(values)
        for name, texts in written.texts.items():
            self._texts[name] = merged_texts(self._texts.get(name, {}), texts)
        self._accounting.append(written.accounting)
        self._tokens.append(written.tokens)
        self._files.append(written.files)
        self._quarantine += written.quarantine
        self.first_rejections += written.first_rejections[: 5 - len(self.first_rejections)]

    def categories(self) -> dict[str, NDArray[np.uint64]]:
        """The values of each categorical feature, as `Written.categories`."""
        return {name: encoder.known for name, encoder in self._encoders.items()}

    def manifest(
        self, origin: Mapping[str, Any], *, lost_groups: int = 0, query_ids: tuple[ListedFile, ...] = ()
    ) -> Manifest:
        """The manifest of all units, including those that an interrupted run finished."""
        collisions = sum(encoder.collisions for encoder in self._encoders.values())
        tokens, encoding = self._work.config.source.token_columns, self._work.encoding
        new = Manifest(
            features=self._work.features,
            files=DataFiles.joined(self._files),
            summaries=self._stats.summaries(),
            label_counts=self._labels.counts(),
            grouped=self._stats.grouped,
            tokens=tuple(tokens.fields()) if tokens else (),
            token_summaries=summed(self._tokens),
            vocabulary=encoding.vocabulary if encoding else None,
            accounting=total_accounting(self._accounting, lost_groups=lost_groups, hash_collisions=collisions),
            categories={name: dict(sorted(texts.items())) for name, texts in self._texts.items() if texts is not None},
            raw=self._work.config.source.raw_columns(self._work.features, self._work.first.url),
            fills=self._work.config.source.fills,
            query_ids=query_ids,
            quarantine=tuple(self._quarantine),
            made_by=dict(origin),
        )
        return new if self._before is None else joined_manifests(self._before, new)


def find_fills(work: UnitSettings, units: Sequence[Unit], before: Dataset | None) -> dict[str, float]:
    """The fill value of each filled feature; from the data set that is added to, if there is one.

    Raises:
        InputError: no numeric feature has the name; a feature has no values for a median; the existing data set fills
            other features, or uses other numbers.
    """
    fills = work.config.source.wanted_fills(work.features)
    if before is not None:
        _check_same(before, fills)
        return before.manifest.fills
    constants = {name: float(np.float32(value)) for name, value in fills.items() if value != "median"}
    return constants | _medians([name for name, value in fills.items() if value == "median"], work, units)


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


def _medians(names: Sequence[str], work: UnitSettings, units: Sequence[Unit]) -> dict[str, float]:
    """The medians of some features over rows of the configured periods, by default over all rows."""
    if not names:
        return {}
    source = work.config.source
    assert source.mapping is not None
    periods = source.mapping.fill_periods
    places = [[feature.name for feature in work.features].index(name) for name in names]
    values = [_Values() for _ in names]
    read = source.open(work.features, first=work.first.url, encoders={}, encoding=work.encoding)
    for unit in units:
        for file in unit.files:
            for block in read(file):
                rows_NF = block.features_NF[in_periods(block, unit, work.config.period, periods)]
                for place, each in zip(places, values, strict=True):
                    each.add(rows_NF[:, place])
    if empty := [name for name, each in zip(names, values, strict=True) if not each.seen]:
        where = f" in {', '.join(periods)}" if periods else ""
        raise InputError(f"fill: {empty[0]!r} has no value{where}, so no median; give a number, or other fill_periods")
    return {name: each.median() for name, each in zip(names, values, strict=True)}


def in_periods(block: RowBlock, unit: Unit, default: str, wanted: Sequence[str]) -> NDArray[np.bool_]:
    """A mask of the rows in some periods, given by name or as ranges A..B; all rows if none are given."""
    if not wanted:
        return np.ones(len(block), bool)
    ranges = [(first, last if dots else first) for first, dots, last in (each.partition("..") for each in wanted)]
    if unit.period or block.periods_N is None:
        names, index_N = [unit.period or block.period or default], np.zeros(len(block), np.int64)
    else:
        coded = block.periods_N.fill_null(default).dictionary_encode()
        names, index_N = coded.dictionary.to_pylist(), coded.indices.to_numpy()
    inside = np.array([any(first <= name <= last for first, last in ranges) for name in names], bool)
    return inside[index_N] if len(block) else np.zeros(0, bool)


class _Values:
    """Values of a feature for their median; beyond a million, only every second, fourth, ... value."""

    def __init__(self) -> None:
        self.seen, self._step, self._kept = 0, 1, [np.empty(0, np.float32)]

    def add(self, values_N: NDArray[np.float32]) -> None:
        """Add the finite ones."""
        values_n = values_N[np.isfinite(values_N)]
        self._kept.append(values_n[-self.seen % self._step :: self._step].copy())
        self.seen += len(values_n)
        while sum(map(len, self._kept)) > _MOST_VALUES:
            self._kept, self._step = [np.concatenate(self._kept)[::2]], 2 * self._step

    def median(self) -> float:
        return float(np.float32(np.median(np.concatenate(self._kept).astype(np.float64))))
