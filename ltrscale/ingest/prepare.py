"""Turns raw input into a data set directory: read, validate, group, partition by period, write, commit.

The input is cut into units (`inputs`), processed one after the other (`assembly`) or in parallel (`parallel`) with the
same output. Readers see nothing before the manifest is committed.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.data.dataset.disjoint import equal_periods
from ltrscale.data.dataset.files import DataFiles, total_of
from ltrscale.data.dataset.manifest import Accounting, Dataset, Manifest, open_dataset
from ltrscale.data.dataset.relevant import nothing_to_learn
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.dataset.summaries import identifying
from ltrscale.data.dataset.tokens import put_vocabulary
from ltrscale.data.dataset.writer import commit_dataset
from ltrscale.data.ids import QueryIds
from ltrscale.data.times import DAY_NUMBER, format_of
from ltrscale.errors import InputError
from ltrscale.ingest import additions
from ltrscale.ingest.additions import joined_manifests
from ltrscale.ingest.assembly import UnitIds, Written, write_unit
from ltrscale.ingest.inputs import (
    Expected,
    PrepareConfig,
    Unit,
    UnitSettings,
    cut_units,
    fingerprints,
    list_inputs,
)
from ltrscale.ingest.leaks import ask_of_leaks
from ltrscale.ingest.parallel import UnitsOnRay
from ltrscale.ingest.passes import find_fills, training_texts
from ltrscale.ingest.rows import QUARANTINE, Rejection
from ltrscale.ingest.source import File, Source
from ltrscale.ingest.tables import parquet_schema
from ltrscale.ingest.texts import Encoding, encoding_of
from ltrscale.ingest.unfinished import Unfinished
from ltrscale.ingest.validate import total_accounting
from ltrscale.progress import Report, log, progress
from ltrscale.simulate.synthetic import SyntheticLog, SyntheticLogConfig
from ltrscale.stages.stage import Origin, Stage


class RejectedRowsError(InputError):
    """More than `max_rejected` of the rows were rejected; `rules` counts them by rule."""

    def __init__(self, message: str, rules: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.rules = rules or {}


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
        config, files = self.own_settings(), self._files
        with storage.Commit(self.out) as commit, storage.scratch.directory() as folder:
            existing = _existing(config, self.out)
            settings, units = _settings(config, files, existing, commit, folder)
            new, totals = _write(settings, units, commit, folder, existing, origin, ray=self.ray)
            _check_rows(new.accounting, totals.first_rejections, settings, for_scoring=self.for_scoring)
            _check_expected(config.expect, new)
            manifest = new if existing is None else additions.with_addition(existing.manifest, new)
            manifest = commit_dataset(commit, manifest)
        _report_counts(self.out, new, report, added=existing is not None)
        if not self.for_scoring:
            _warn_of_labels(self.out, manifest, config.source)
            _warn_of_copies(Dataset(self.out, manifest), new.periods)
            _log_shortcuts(new, existing.manifest if existing else None)
            _warn_of_places(self.out, totals.places.among(new.features))
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


def _settings(
    config: PrepareConfig, files: Sequence[File], existing: Dataset | None, commit: storage.Commit, folder: Path
) -> tuple[UnitSettings, list[Unit]]:
    """The units, and what their work needs: the features, then the encoding of texts, then what fills gaps."""
    settings = UnitSettings(config, config.source.find_features(files), files[0], commit.url)
    first = 0
    if existing is not None:
        features, taken = additions.check_addable(existing, settings), frozenset(existing.manifest.periods)
        settings, first = replace(settings, features=features, taken=taken), additions.next_unit(existing.manifest)
    sizes = storage.at_once(storage.size, [file.url for file in files])
    units = cut_units(files, sizes, unit_bytes=config.unit_mb * 2**20, sort=config.sort, first=first)
    settings = replace(settings, encoding=_encoding(settings, units, existing, commit, folder))
    source = config.source.filled(find_fills(settings, units, existing))
    return replace(settings, config=config.replace(source=source)), units


def _encoding(
    settings: UnitSettings, units: Sequence[Unit], dataset: Dataset | None, commit: storage.Commit, folder: Path
) -> Encoding | None:
    """The encoding that makes tokens of texts, from the data set or new, with its file in place."""
    tokens = settings.config.source.token_columns
    if tokens is None:
        return None
    if dataset is not None:
        return encoding_of(dataset.url)
    new = tokens.tokenizer.open(lambda: training_texts(settings, units, tokens.tokenizer, folder))
    return replace(new, vocabulary=put_vocabulary(new.vocabulary, new.content, commit)) if new.content else new


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
    dataset: Dataset | None,
    origin: Mapping[str, Any],
    *,
    ray: bool,
) -> tuple[Manifest, Written]:
    """Put all files in place; returns the manifest of these files alone, and its totals."""
    ids, schema = QueryIds(folder), None
    if dataset is not None:
        schema = parquet_schema(storage.listed_file(dataset.url, dataset.manifest.files[0].path))
        if any(not unit.period for unit in units):
            additions.recall_ids(dataset, ids, folder)
    unfinished = Unfinished(commit, origin, dataset)
    totals = Written(len(settings.features), schema, settings.out)
    unfinished.restore(totals, ids, folder)
    earlier = (dataset.manifest if dataset else None, unfinished.manifest)
    counts_before = total_of(manifest.counts() for manifest in earlier if manifest is not None)
    units, total = units[unfinished.units :], len(units)

    def take(written: Written, new_ids: UnitIds) -> None:
        ids.kept.push(new_ids.kept)
        ids.others.push(new_ids.others)
        totals.add(written)
        if unfinished.is_due and totals.units < len(units):
            done, manifest = total - len(units) + totals.units, _manifest(totals, settings, origin, unfinished.manifest)
            unfinished.save(done, manifest, ids, totals)

    with progress("prepare", sum(unit.bytes for unit in units), "rows") as advance:
        if ray:
            UnitsOnRay(settings, units, counts_before, commit, ids, advance, take).write()
        else:
            for unit in units:
                written, new_ids = write_unit(
                    settings, unit, counts_before, commit=commit, ids=ids, folder=folder, advance=advance
                )
                counts_before = total_of([counts_before, *(files.counts() for files in written.files)])
                take(written, new_ids)
    query_ids = additions.record_ids(ids, dataset, commit, folder)
    lost = len(ids.lost())
    manifest = _manifest(totals, settings, origin, unfinished.manifest, lost_groups=lost, query_ids=query_ids)
    commit.keep(manifest.quarantine)  # before any check, because errors point the user to these files
    return manifest, totals


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
        features=settings.features,
        files=DataFiles.joined(totals.files),
        summaries=totals.stats.summaries(),
        label_counts=totals.labels.counts(),
        grouped=totals.stats.grouped,
        tokens=source.token_fields,
        token_summaries=totals.tokens,
        vocabulary=encoding.vocabulary if encoding else None,
        accounting=total_accounting([totals.accounting], lost_groups=lost_groups, hash_collisions=collisions),
        categories={name: dict(sorted(codes.items())) for name, codes in texts.items() if codes is not None},
        raw=source.raw_columns(settings.features, settings.first.url),
        fills=source.fills,
        query_ids=query_ids,
        quarantine=totals.quarantine,
        made_by=dict(origin),
    )
    return new if finished is None else joined_manifests(finished, new)


def _check_rows(
    accounting: Accounting, first_rejections: Sequence[Rejection], settings: UnitSettings, *, for_scoring: bool
) -> None:
    """Raise InputError if there are no rows, or too few good ones; the settings of rows to score have no prefix."""
    rows, rejected, config = accounting.rows_in, accounting.rows_rejected, settings.config
    if not rows:
        raise InputError(f"{', '.join(entry.path for entry in config.inputs)}: no rows; check the paths and the format")
    if rejected > config.max_rejected * rows or not accounting.rows_kept:
        first = "; ".join(f"{r.file}:{r.line} {r.rule} ({r.found or repr(r.text[:40])})" for r in first_rejections)
        remedies = "".join(
            f"{remedy}, " for remedy in _remedies(accounting.rules, first_rejections, config, for_scoring=for_scoring)
        )
        raise RejectedRowsError(
            f"{rejected:,} of {rows:,} rows rejected ({rejected / rows:.2%}), max_rejected is "
            f"{config.max_rejected:.2%}: {_by_rule(accounting)}; the first: {first}; all are in "
            f"{storage.join(settings.out, QUARANTINE)}; {remedies}mend the input "
            f"or raise {_prefix(for_scoring)}max_rejected",
            accounting.rules,
        )


def _prefix(for_scoring: bool) -> str:
    """What stands before the keys of settings in messages: rows to score have those of `prepare` as their own."""
    return "" if for_scoring else "prepare."


def _remedies(
    rules: Mapping[str, int], first_rejections: Sequence[Rejection], config: PrepareConfig, *, for_scoring: bool
) -> Iterator[str]:
    """What to do about rejected rows, by rule."""
    key = _prefix(for_scoring)
    # query ids return in a log sorted by time instead of by query
    if rules.get("returning_query") and config.add:
        yield "queries that the data set has are not replaced: leave their rows out"
    if rules.get("returning_query") and not config.sort:
        yield f"set {key}sort=true if the rows of a query do not lie together"
    # an integer of a column with a gap is read as a float
    times = [each.value.removesuffix(".0") for each in first_rejections if each.cause == "time"]
    for form in dict.fromkeys(filter(None, map(format_of, times))):
        yield f'add "{form}" to {key}source.columns.time_format{" for days as numbers" if form == DAY_NUMBER else ""}'
    causes = {each.cause for each in first_rejections if not for_scoring}
    if "encoding" in causes:
        yield f"set {key}source.columns.encoding if these are files of CSV in another one, such as cp1252"
    if "no_label" in causes:
        yield f"set {key}source.columns.unjudged to 0, or to unlabelled, if these are rows of items"
    if not for_scoring and rules.get("infinite"):
        yield f"set {key}infinite=missing if infinite numbers mean no value"


def _by_rule(accounting: Accounting) -> str:
    """The number of rejected rows of each rule."""
    return ", ".join(f"{rule} {count:,}" for rule, count in accounting.rules.items()) or "none"


def _check_expected(expect: Mapping[str, Expected], manifest: Manifest) -> None:
    """Raise InputError if the counts of a period differ from the expected ones."""
    wrong = []
    for period, expected in expect.items():
        counts = manifest.files.in_periods([period]).counts()._asdict()
        expected_by_name = {name: count for name, count in expected if count is not None}
        if any(counts[name] != count for name, count in expected_by_name.items()):
            expected_counts = " and ".join(f"{count:,} {name}" for name, count in expected_by_name.items())
            actual_counts = " and ".join(f"{counts[name]:,}" for name in expected_by_name)
            wrong.append(f"period {period!r}: expected {expected_counts}, found {actual_counts}")
    if wrong:
        rejected = manifest.accounting.rows_rejected
        raise InputError(
            f"{'; '.join(wrong)} ({rejected:,} rows were rejected; periods found: {', '.join(manifest.periods)}); "
            "check that each file is complete and belongs to the collection, or mend expect"
        )


def _report_counts(out: str, new: Manifest, report: Report, *, added: bool) -> None:
    """Log and report the counts of the data set or addition."""
    a, counts = new.accounting, new.counts()
    merged = f" + {a.rows_merged:,} merged into another row of their document" if a.rows_merged else ""
    log.info(
        "prepare: %s%s: %s rows in = %s kept + %s rejected (%s)%s; %s groups in = %s kept + %s rejected; "
        "%s labelled, longest %s, %s period%s",
        *("added to " if added else "", out),
        *(f"{a.rows_in:,}", f"{a.rows_kept:,}", f"{a.rows_rejected:,}", _by_rule(a), merged),
        *(f"{a.groups_in:,}", f"{a.groups_kept:,}", f"{a.groups_rejected:,}"),
        *(f"{counts.labelled:,}", f"{new.files.longest:,}", f"{len(new.periods):,}", "s"[len(new.periods) == 1 :]),
    )
    for column, summary in new.token_summaries.items():
        sizes = summary.lists, summary.tokens, summary.longest, summary.cut_lists, summary.cut_tokens
        shown = (f"{size:,}" for size in sizes)
        log.info("prepare: %s: %s texts, %s tokens, longest %s; %s texts cut, by %s tokens", column, *shown)
    tokens = {column: summary.model_dump() for column, summary in new.token_summaries.items()}
    figures = {"labelled": counts.labelled, "longest": new.files.longest} | ({"tokens": tokens} if tokens else {})
    report({"stage": "prepare", **a.model_dump(), **figures})


def _warn_of_labels(out: str, manifest: Manifest, source: Source) -> None:
    """Warn if no list of a labelled data set has two different labels, because training would refuse it."""
    if manifest.counts().labelled and (wrong := nothing_to_learn(select(Split(data=out), labelled=True))):
        log.warning("prepare: %s: %s; check %s and the query", out, wrong, source.label_place)


def _warn_of_copies(dataset: Dataset, new: Collection[str]) -> None:
    """Warn of new periods with the same lists as others, such as one file shipped under two names."""
    for (_, one), (_, other) in equal_periods([(dataset, dataset.manifest.periods)]):
        if {one, other}.isdisjoint(new):
            continue
        log.warning(
            "prepare: %s: periods %r and %r have the same lists, as those of one file under two names; look for the "
            "right file, for a test on the groups that chose a model says nothing",
            *(dataset.url, one, other),
        )


def _log_shortcuts(new: Manifest, before: Manifest | None) -> None:
    """Log the features that may identify a document, what they harm and what to do about them.

    For an addition, only those are logged that the data set did not have `before`.
    """
    ids, suspects = identifying(new.features, [summary.unique_in_group for summary in new.summaries])
    if before is not None:
        known = identifying(before.features, [summary.unique_in_group for summary in before.summaries])
        ids, suspects = (
            {name: share for name, share in now.items() if name not in then}
            for now, then in zip((ids, suspects), known, strict=True)
        )
    for features, remedy in (
        (
            ids,
            "pretraining hides these categories by itself; trees and networks memorise by them the documents that have "
            "labels, which is worth nothing for new ones: exclude an id or a title, unless documents return",
        ),
        (
            suspects,
            "exclude what is an id, by which pretraining solves its contrast, and trees memorise documents; what is a "
            "quantity, such as a count or a rank, may stay",
        ),
    ):
        if features:
            shares = ", ".join(f"{name} for {share:.0%} of the documents" for name, share in features.items())
            log.info("prepare: unique within its query: %s; %s", shares, remedy)


def _warn_of_places(out: str, names: Sequence[str]) -> None:
    """Warn of features that are, or are made from, the place at which a document was shown."""
    if names:
        subject = f"features {', '.join(names)} order" if len(names) > 1 else f"feature {names[0]!r} orders"
        log.warning(
            "prepare: %s: %s every list as its positions do: a place is not known before a list is ranked, and a model "
            "that has it repeats what was shown; leave it out, unless it is a score that is known then",
            out,
            subject,
        )
