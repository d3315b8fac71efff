"""Turns raw input into a data set directory: read, validate, group, partition by period, write, commit.

The input is cut into units (`inputs`), processed one after the other (`assembly`) or in parallel (`parallel`) with the
same output. Readers see nothing before the manifest is committed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from ltrscale import storage
from ltrscale.arrays import Bits
from ltrscale.config import Operational
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import Accounting, Dataset, Manifest, open_dataset
from ltrscale.data.dataset.summaries import FeatureStats, LabelCounts
from ltrscale.data.dataset.tokens import TokenSummary, put_vocabulary, summed
from ltrscale.data.dataset.writer import commit_dataset
from ltrscale.data.ids import QueryIds
from ltrscale.ingest.additions import (
    Unfinished,
    check_addable,
    check_nothing_added,
    holds_inputs,
    joined_manifests,
    next_unit,
    recall_ids,
    record_ids,
    with_addition,
)
from ltrscale.ingest.assembly import LikePlaces, Written, check_columns, training_texts, write_unit
from ltrscale.ingest.categories import CategoryEncoder, RecordedCodes, merged_texts
from ltrscale.ingest.checks import (
    check_expected,
    check_rows,
    find_fills,
    log_shortcuts,
    report_counts,
    warn_of_copies,
    warn_of_labels,
    warn_of_places,
)
from ltrscale.ingest.inputs import (
    PrepareConfig,
    Unit,
    UnitSettings,
    UnitStart,
    cut_units,
    fingerprints,
    list_inputs,
)
from ltrscale.ingest.leaks import ask_of_leaks
from ltrscale.ingest.parallel import UnitsOnRay
from ltrscale.ingest.rows import Rejection
from ltrscale.ingest.source import File
from ltrscale.ingest.tables import parquet_schema
from ltrscale.ingest.texts import Encoding, encoding_of
from ltrscale.ingest.validate import total_accounting
from ltrscale.progress import Report, log, progress
from ltrscale.simulate.synthetic import SyntheticLog, SyntheticLogConfig
from ltrscale.stages.stage import Origin, Stage


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
        done = holds_inputs(self.out, origin)
        if done:
            log.info("prepare: %s is up to date, nothing to do", self.out)
        return done

    def work(self, origin: Origin, report: Report) -> None:
        """Make the data set, or add periods to it; readers see nothing of it until it is complete.

        Unusable rows are in the quarantine, even if there are too many and nothing is committed. Query ids must not
        return within the inputs of one fixed period, or within all inputs without one, including those of an existing
        data set that is added to.

        Raises:
            InputError: an input is missing, cannot be decoded or has other features than the first; there are no rows;
                more than `max_rejected` of the rows are rejected; a period has other counts than expected; an addition
                does not fit the data set, or making the data set again would delete additions.
        """
        config, files = self.own_settings(), self._files
        with storage.Commit(self.out) as commit, storage.scratch.directory() as folder:
            existing_dataset = _before(config, self.out)
            work = UnitSettings(config, config.source.find_features(files), files[0], self.out)
            if existing_dataset is not None:
                existing_periods = frozenset(existing_dataset.manifest.periods)
                work = replace(work, features=check_addable(existing_dataset, work), taken=existing_periods)
            sizes = storage.at_once(storage.size, [file.url for file in files])
            first = next_unit(existing_dataset.manifest) if existing_dataset else 0
            units = cut_units(files, sizes, unit_bytes=config.unit_mb * 2**20, sort=config.sort, first=first)
            work = replace(work, encoding=_encoding(work, units, existing_dataset, commit, folder))
            source = config.source.filled(find_fills(work, units, existing_dataset))
            work = replace(work, config=config.replace(source=source))
            new, totals = _write(work, units, commit, folder, existing_dataset, origin, ray=self.ray)
            check_rows(new.accounting, totals.first_rejections, work, key="" if self.for_scoring else "prepare.")
            check_expected(config.expect, new)
            manifest = new if existing_dataset is None else with_addition(existing_dataset.manifest, new)
            manifest = commit_dataset(commit, manifest)
        report_counts(self.out, new, report, added=existing_dataset is not None)
        if not self.for_scoring:
            warn_of_labels(self.out, manifest, config.source)
            warn_of_copies(Dataset(self.out, manifest), new.periods)
            log_shortcuts(new, None if existing_dataset is None else existing_dataset.manifest)
            warn_of_places(self.out, totals.places.among(new.features))
            if manifest.counts().labelled:
                ask_of_leaks(self.out)

    @cached_property
    def _files(self) -> list[File]:
        """The files of the inputs, listed once: the origin names those that are read."""
        return list_inputs(self.own_settings().inputs)

    @property
    def _log(self) -> str:
        return f"{self.out.rstrip('/')}-log"


class RowsJob(PrepareJob):
    """Turn rows to score into a data set directory."""

    for_scoring: ClassVar = True


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
        start = start.after(groups, documents)
        schema = parquet_schema(storage.listed_file(dataset.url, dataset.manifest.files[0].path))
        if any(not unit.period for unit in units):
            recall_ids(dataset, ids, folder)
    unfinished = Unfinished(commit, origin, dataset)
    if unfinished.manifest is not None:
        groups, documents, _ = unfinished.manifest.counts()
        start = start.after(groups, documents)
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
            for unit in units:
                written = write_unit(work, unit, start, commit=commit, ids=ids, folder=folder, advance=advance)
                start = start.after(written.accounting.groups_kept, written.accounting.rows_kept)
                take(written)
    query_ids = record_ids(ids, dataset, commit, folder)
    manifest = totals.manifest(origin, lost_groups=len(ids.lost()), query_ids=query_ids)
    commit.keep(manifest.quarantine)  # before any check, because errors point the user to these files
    return manifest, totals


class _Totals:
    """The manifest's totals, summed in unit order; `before` and `categories` are from units of an interrupted run."""

    def __init__(
        self,
        work: UnitSettings,
        schema: pa.Schema | None,
        before: Manifest | None,
        categories: Mapping[str, Bits],
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

    def categories(self) -> dict[str, Bits]:
        """The values of each categorical feature, as `Written.categories`."""
        return {name: encoder.known for name, encoder in self._encoders.items()}

    def manifest(
        self, origin: Mapping[str, Any], *, lost_groups: int = 0, query_ids: tuple[storage.Placed, ...] = ()
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
