"""What `prepare` checks and reports about the data set that it makes, and its numbers for missing values.

These are constants, and medians of the first rows, which stay with a data set for later rows.

Shapes: N rows, F features.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from ltrscale import storage
from ltrscale.arrays import Floats
from ltrscale.data.dataset.disjoint import equal_periods
from ltrscale.data.dataset.manifest import Accounting, Dataset, Manifest
from ltrscale.data.dataset.selection import nothing_to_learn, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.dataset.summaries import identifying
from ltrscale.data.times import DAY_NUMBER, format_of
from ltrscale.errors import InputError
from ltrscale.ingest.assembly import in_periods
from ltrscale.ingest.inputs import Expected, PrepareConfig, Unit, UnitSettings
from ltrscale.ingest.mapping import Fill
from ltrscale.ingest.rows import QUARANTINE, Rejection
from ltrscale.ingest.source import Source
from ltrscale.progress import Report, log


def check_rows(accounting: Accounting, first_rejections: Sequence[Rejection], work: UnitSettings, *, key: str) -> None:
    """Raise InputError if there are no rows, or too few good ones; `key` is the prefix of the keys in messages."""
    rows, rejected, config = accounting.rows_in, accounting.rows_rejected, work.config
    if not rows:
        raise InputError(f"{', '.join(entry.path for entry in config.inputs)}: no rows; check the paths and the format")
    if rejected > config.max_rejected * rows or not accounting.rows_kept:
        first = "; ".join(f"{r.file}:{r.line} {r.rule} ({r.found or repr(r.text[:40])})" for r in first_rejections)
        remedies = "".join(f"{remedy}, " for remedy in _remedies(accounting.rules, first_rejections, config, key))
        raise InputError(
            f"{rejected:,} of {rows:,} rows rejected ({rejected / rows:.2%}), max_rejected is "
            f"{config.max_rejected:.2%}: {_by_rule(accounting)}; the first: {first}; all are in "
            f"{storage.join(work.out, QUARANTINE)}; {remedies}mend the input "
            f"or raise {key}max_rejected"
        )


def _remedies(
    rules: Mapping[str, int], first_rejections: Sequence[Rejection], config: PrepareConfig, key: str
) -> Iterator[str]:
    """What to do about rejected rows, by rule; `key` is empty if rows are to be scored."""
    # query ids return in a log sorted by time instead of by query
    if rules.get("returning_query") and config.add:
        yield "queries that the data set has are not replaced: leave their rows out"
    if rules.get("returning_query") and not config.sort:
        yield f"set {key}sort=true if the rows of a query do not lie together"
    for form in dict.fromkeys(filter(None, (_unread_format(rejection.found) for rejection in first_rejections))):
        yield f'add "{form}" to {key}source.columns.time_format{" for days as numbers" if form == DAY_NUMBER else ""}'
    if key and any(each.found.endswith(" is not text in UTF-8") for each in first_rejections):
        yield f"set {key}source.columns.encoding if these are files of CSV in another one, such as cp1252"
    if key and any(each.rule == "bad_label" and each.found == "no label" for each in first_rejections):
        yield f"set {key}source.columns.unjudged to 0, or to unlabelled, if these are rows of items"
    if key and rules.get("infinite"):
        yield f"set {key}infinite=missing if infinite numbers mean no value"


def _unread_format(found: str) -> str | None:
    """The usual time format of a rejected value, if there is one."""
    shown = re.search(r" is not a time .*?\('?(.*?)(?:\.0)?'?\)$", found)
    return None if shown is None else format_of(shown[1])


def _by_rule(accounting: Accounting) -> str:
    """The number of rejected rows of each rule."""
    return ", ".join(f"{rule} {count:,}" for rule, count in accounting.rules.items()) or "none"


def check_expected(expect: Mapping[str, Expected], manifest: Manifest) -> None:
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


def report_counts(out: str, new: Manifest, report: Report, *, added: bool) -> None:
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


def warn_of_labels(out: str, manifest: Manifest, source: Source) -> None:
    """Warn if no list of a labelled data set has two different labels, because training would refuse it."""
    if manifest.counts().labelled and (wrong := nothing_to_learn(select(Split(data=out), labelled=True))):
        log.warning("prepare: %s: %s; check %s and the query", out, wrong, source.label_place)


def warn_of_copies(dataset: Dataset, new: Collection[str]) -> None:
    """Warn of new periods with the same lists as others, such as one file shipped under two names."""
    for (_, one), (_, other) in equal_periods([(dataset, dataset.manifest.periods)]):
        if {one, other}.isdisjoint(new):
            continue
        log.warning(
            "prepare: %s: periods %r and %r have the same lists, as those of one file under two names; look for the "
            "right file, for a test on the groups that chose a model says nothing",
            *(dataset.url, one, other),
        )


def log_shortcuts(new: Manifest, before: Manifest | None = None) -> None:
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


def warn_of_places(out: str, names: Sequence[str]) -> None:
    """Warn of features that are, or are made from, the place at which a document was shown."""
    if names:
        subject = f"features {', '.join(names)} order" if len(names) > 1 else f"feature {names[0]!r} orders"
        log.warning(
            "prepare: %s: %s every list as its positions do: a place is not known before a list is ranked, and a model "
            "that has it repeats what was shown; leave it out, unless it is a score that is known then",
            out,
            subject,
        )


_MOST_VALUES = 1 << 20


def find_fills(work: UnitSettings, units: Sequence[Unit], before: Dataset | None) -> dict[str, float]:
    """The fill value of each filled feature; from the data set that is added to, if there is one.

    Raises:
        InputError: no numeric feature has the name; a feature has no values for a median; the existing data set fills
            other features, or uses other numbers.
    """
    mapping = work.config.source.mapping
    fills = mapping.fills_of(work.features) if mapping else {}
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
