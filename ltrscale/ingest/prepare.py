"""Turns raw input into a data set directory: read, validate, group, partition by period, write, commit.

The input is cut into units (`inputs`), which are handled one after the other (`assembly`) or in parallel (`parallel`)
with the same output. Readers see nothing before the manifest is committed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from ltrscale import storage
from ltrscale.config import made_by
from ltrscale.data.dataset.manifest import Accounting, DataFile, Dataset, Manifest, open_dataset
from ltrscale.data.dataset.relevant import none_relevant
from ltrscale.data.dataset.summaries import FeatureStats, LabelCounts, identifying
from ltrscale.data.dataset.tokens import TokenSummary, put_vocabulary, summed
from ltrscale.data.ids import QueryIds
from ltrscale.errors import InputError
from ltrscale.ingest import additions
from ltrscale.ingest.assembly import Written, check_columns, training_texts, write_unit
from ltrscale.ingest.baidu import BaiduUltr
from ltrscale.ingest.categories import CategoryEncoder, Recorded, merged
from ltrscale.ingest.fills import filled, find_fills
from ltrscale.ingest.inputs import (
    Expected,
    PrepareConfig,
    Start,
    Unit,
    Work,
    cut_units,
    fingerprints,
    list_inputs,
    open_work,
)
from ltrscale.ingest.parallel import write_with_ray
from ltrscale.ingest.places import LikePlaces
from ltrscale.ingest.quarantine import QUARANTINE
from ltrscale.ingest.rows import Rejection
from ltrscale.ingest.sources import GroupRows, Items, Letor, Source, fills_of, raw_of, tokens_of
from ltrscale.ingest.validate import total
from ltrscale.ingest.vocabularies import Encoding, encoding_of, open_encoding
from ltrscale.progress import Advance, Report, log, progress


def _silent(_: Mapping[str, object]) -> None:
    """Ignore a report."""


def is_prepared(out: str, origin: Mapping[str, Any]) -> bool:
    """Whether `prepare` with this origin (`made_by`) has made the data set or added to it; logs it if so."""
    there = additions.holds(out, origin)
    if there:
        log.info("prepare: %s is up to date, nothing to do", out)
    return there


def prepare(
    config: PrepareConfig, out: str, *, ray: bool = False, report: Report = _silent, for_scoring: bool = False
) -> Dataset:
    """Make a data set directory at `out`, or add periods to it; readers see nothing of it until it is complete.

    It does nothing if the same config has made or added the same inputs already. Rows that cannot be used are in the
    quarantine, also if they are too many and nothing is committed. Query ids must not return within the inputs of one
    fixed period, nor within all inputs without one, including those of an existing data set that is added to.

    Args:
        config: the inputs to read, and the way to write them.
        out: the directory.
        ray: handle the units of the input in parallel, in tasks of a Ray cluster; the output is the same.
        report: receives the counts.
        for_scoring: the rows are only scored, by a job whose own keys set `config`: errors name these, and neither
            labels nor what matters for pretraining is logged.

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
        before = _before(config, out)
        work = open_work(config, files, out, taken=before.manifest.periods if before else ())
        if before is not None:
            work = replace(work, features=additions.check_addable(before, work))
        sizes = [storage.size(file.url) for file in files]
        first = additions.next_unit(before.manifest) if before else 0
        units = cut_units(files, sizes, unit_bytes=config.unit_mb * 2**20, sort=config.sort, first=first)
        work = replace(work, encoding=_encoding(work, units, before, commit, folder))
        fills = find_fills(work, units, before)
        work = replace(work, config=filled(config, fills))
        new, totals = _write(work, units, commit, folder, before, origin, ray=ray)
        _check(new.accounting, totals.first_rejections, work, key="" if for_scoring else "prepare.")
        _check_expected(config.expect, new)
        manifest = new if before is None else additions.joined(before.manifest, new)
        commit.finish(manifest.model_dump(mode="json"))
    _report(out, new, report, added=before is not None)
    if not for_scoring:
        _warn_of_labels(out, manifest, config.source)
        _log_shortcuts(new)
        _warn_of_places(out, totals.places.among(new.features))
    return Dataset(out, manifest)


def _encoding(
    work: Work, units: Sequence[Unit], before: Dataset | None, commit: storage.Commit, folder: Path
) -> Encoding | None:
    """What makes tokens of texts, its file in place: that of the data set, or a new one."""
    tokens = tokens_of(work.config.source)
    if tokens is None:
        return None
    if before is not None:
        return encoding_of(before.url)
    found = open_encoding(tokens.tokenizer, lambda: training_texts(work, units, tokens.tokenizer, folder))
    if not found.content:
        return found
    return replace(found, vocabulary=put_vocabulary(found.vocabulary, found.content, commit))


def _before(config: PrepareConfig, out: str) -> Dataset | None:
    """The data set to add to; None if there is none, or if it is replaced."""
    manifest = storage.read_manifest(out)
    if manifest is None:
        return None
    if config.add:
        return open_dataset(out)
    additions.check_nothing_added(out, manifest)
    return None


def _write(
    work: Work,
    units: Sequence[Unit],
    commit: storage.Commit,
    folder: Path,
    before: Dataset | None,
    origin: Mapping[str, Any],
    *,
    ray: bool,
) -> tuple[Manifest, "_Totals"]:
    """Put all files in place; returns the manifest of these files alone, and what it was made from."""
    ids, start, schema = QueryIds(folder), Start(), None
    if before is not None:
        groups, documents, _ = before.manifest.counts()
        start, schema = Start(groups, documents), additions.schema_of(before)
        if any(not unit.period for unit in units):
            for hashes in additions.known_ids(before):
                ids.groups.add(hashes)
    totals = _Totals(work, schema)
    with progress("prepare", sum(unit.bytes for unit in units), "rows") as advance:
        if ray:
            parts: Iterable[Written] = write_with_ray(work, units, start, commit=commit, ids=ids, advance=advance)
        else:
            parts = _write_here(work, units, start, commit=commit, ids=ids, folder=folder, advance=advance)
        for written in parts:
            totals.add(written)
    manifest = totals.manifest(origin, lost_groups=len(ids.lost()))
    commit.keep(manifest.quarantine)  # before any check: its error sends the user to these files
    return manifest, totals


def _write_here(
    work: Work,
    units: Sequence[Unit],
    start: Start,
    *,
    commit: storage.Commit,
    ids: QueryIds,
    folder: Path,
    advance: Advance,
) -> Iterator[Written]:
    """Write all units in this process, one after the other."""
    for unit in units:
        written = write_unit(work, unit, start, commit=commit, ids=ids, folder=folder, advance=advance)
        accounting = written.accounting
        start = Start(start.gid + accounting.groups_kept, start.documents + accounting.rows_kept)
        yield written


class _Totals:
    """The manifest's totals of all units, which are added in their order."""

    def __init__(self, work: Work, schema: pa.Schema | None) -> None:
        self.first_rejections: list[Rejection] = []
        self._work = work
        self._schema, self._schema_of = schema, work.out
        self._stats, self._labels = FeatureStats(len(work.features)), LabelCounts()
        self.places = LikePlaces(len(work.features))
        self._encoders: dict[str, CategoryEncoder] = {}
        self._texts: dict[str, Recorded] = {}
        self._accounting: list[Accounting] = []
        self._tokens: list[Mapping[str, TokenSummary]] = []
        self._files: list[DataFile] = []
        self._quarantine: list[str] = []

    def add(self, written: Written) -> None:
        """Add a unit."""
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
            self._texts[name] = merged(self._texts.get(name, {}), texts)
        self._accounting.append(written.accounting)
        self._tokens.append(written.tokens)
        self._files += written.files
        self._quarantine += written.quarantine
        self.first_rejections += written.first_rejections[: 5 - len(self.first_rejections)]

    def manifest(self, origin: Mapping[str, Any], *, lost_groups: int) -> Manifest:
        """The manifest of all units."""
        collisions = sum(encoder.collisions for encoder in self._encoders.values())
        tokens, encoding = tokens_of(self._work.config.source), self._work.encoding
        return Manifest(
            features=self._work.features,
            files=tuple(sorted(self._files, key=lambda file: (file.period, file.path))),
            summaries=self._stats.summaries(),
            label_counts=self._labels.counts(),
            grouped=self._stats.grouped,
            tokens=tuple(tokens.fields()) if tokens else (),
            token_summaries=summed(self._tokens),
            vocabulary=encoding.vocabulary if encoding else None,
            accounting=total(self._accounting, lost_groups=lost_groups, hash_collisions=collisions),
            categories={name: dict(sorted(texts.items())) for name, texts in self._texts.items() if texts is not None},
            raw=raw_of(self._work.config.source, self._work.features, self._work.first.url),
            fills=fills_of(self._work.config.source),
            quarantine=tuple(self._quarantine),
            made_by=dict(origin),
        )


def _check(accounting: Accounting, first_rejections: Sequence[Rejection], work: Work, *, key: str) -> None:
    """Raise InputError if there are no rows, or too few good ones; `key` is the start of the keys that it names."""
    rows, rejected, config = accounting.rows_in, accounting.rows_rejected, work.config
    if not rows:
        raise InputError(f"{', '.join(entry.path for entry in config.inputs)}: no rows; check the paths and the format")
    if rejected > config.max_rejected * rows or not accounting.rows_kept:
        first = "; ".join(f"{r.file}:{r.line} {r.rule} ({r.found or repr(r.text[:40])})" for r in first_rejections)
        sort = (
            f"set {key}sort=true if the rows of a query do not lie together, "
            if _is_scattered(accounting, work)
            else ""
        )
        raise InputError(
            f"{rejected:,} of {rows:,} rows rejected ({rejected / rows:.2%}), max_rejected is "
            f"{config.max_rejected:.2%}: {_by_rule(accounting)}; the first: {first}; all are in "
            f"{storage.join(work.out, QUARANTINE)}; {sort}mend the input or raise {key}max_rejected"
        )


def _is_scattered(accounting: Accounting, work: Work) -> bool:
    """Whether query ids returned, as they do in a log that is sorted by time and not by query."""
    return bool(accounting.rules.get("returning_query")) and not work.config.sort


def _by_rule(accounting: Accounting) -> str:
    """The number of rejected rows of each rule."""
    return ", ".join(f"{rule} {count:,}" for rule, count in accounting.rules.items()) or "none"


def _check_expected(expect: Mapping[str, Expected], manifest: Manifest) -> None:
    """Raise InputError if a period has other counts than expected."""
    wrong = []
    for period, expected in expect.items():
        cells = [cell for file in manifest.files if file.period == period for cell in file.row_groups]
        found = {"groups": sum(cell.groups for cell in cells), "documents": sum(cell.documents for cell in cells)}
        stated = {name: count for name, count in expected if count is not None}
        if any(found[name] != count for name, count in stated.items()):
            wanted = " and ".join(f"{count:,} {name}" for name, count in stated.items())
            there = " and ".join(f"{found[name]:,}" for name in stated)
            wrong.append(f"period {period!r}: expected {wanted}, found {there}")
    if wrong:
        rejected = manifest.accounting.rows_rejected
        raise InputError(
            f"{'; '.join(wrong)} ({rejected:,} rows were rejected; periods found: {', '.join(manifest.periods)}); "
            "check that each file is complete and belongs to the collection, or mend expect"
        )


def _report(out: str, new: Manifest, report: Report, *, added: bool) -> None:
    """Log and report the counts of the data set or addition."""
    a, counts = new.accounting, new.counts()
    merged = f" + {a.rows_merged:,} merged into another row of their document" if a.rows_merged else ""
    log.info(
        "prepare: %s%s: %s rows in = %s kept + %s rejected (%s)%s; %s groups in = %s kept + %s rejected; "
        "%s labelled, longest %s, %s period%s",
        *("added to " if added else "", out),
        *(f"{a.rows_in:,}", f"{a.rows_kept:,}", f"{a.rows_rejected:,}", _by_rule(a), merged),
        *(f"{a.groups_in:,}", f"{a.groups_kept:,}", f"{a.groups_rejected:,}"),
        *(f"{counts.labelled:,}", f"{new.longest:,}", f"{len(new.periods):,}", "s"[len(new.periods) == 1 :]),
    )
    for column, found in new.token_summaries.items():
        shown = (
            f"{value:,}" for value in (found.lists, found.tokens, found.longest, found.cut_lists, found.cut_tokens)
        )
        log.info("prepare: %s: %s texts, %s tokens, longest %s; %s texts cut, by %s tokens", column, *shown)
    tokens = {column: found.model_dump() for column, found in new.token_summaries.items()}
    counted = {"labelled": counts.labelled, "longest": new.longest} | ({"tokens": tokens} if tokens else {})
    report({"stage": "prepare", **a.model_dump(), **counted})


def _warn_of_labels(out: str, manifest: Manifest, source: Source) -> None:
    """Warn if no document of a labelled data set is relevant: training would refuse it."""
    if not manifest.label_counts or any(map(float, manifest.label_counts)):
        return
    match source:
        case Letor():
            label = "the first number of each line"
        case Items(columns=columns):
            label = f"column {columns.label!r}"
        case BaiduUltr():
            label = "the clicks or labels of the lines"
        case GroupRows(columns=lists):
            label = f"column {lists.labels!r}"
    wrong = none_relevant(manifest.counts().labelled)
    log.warning("prepare: %s: %s; check %s, which prepare takes as the label", out, wrong, label)


def _log_shortcuts(new: Manifest) -> None:
    """Log the features by which a document may be recognised, with what they harm and what to do about them."""
    ids, suspects = identifying(new.features, [summary.unique_in_group for summary in new.summaries])
    for found, remedy in (
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
        if found:
            shares = ", ".join(f"{name} for {share:.0%} of the documents" for name, share in found.items())
            log.info("prepare: unique within its query: %s; %s", shares, remedy)


def _warn_of_places(out: str, names: Sequence[str]) -> None:
    """Warn of features that are the place at which a document was shown, or are made from it."""
    if names:
        which = f"features {', '.join(names)} order" if len(names) > 1 else f"feature {names[0]!r} orders"
        log.warning(
            "prepare: %s: %s every list as its positions do: a place is not known before a list is ranked, and a model "
            "that has it repeats what was shown; leave it out, unless it is a score that is known then",
            out,
            which,
        )
