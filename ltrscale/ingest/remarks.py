"""What `prepare` says of what it has read: errors of too many bad rows, counts, and warnings of what harms a model."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from ltrscale import storage
from ltrscale.data.dataset.disjoint import equal_periods
from ltrscale.data.dataset.manifest import Accounting, Dataset, Manifest
from ltrscale.data.dataset.selection import nothing_to_learn, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.dataset.summaries import identifying
from ltrscale.data.times import DAY_NUMBER, format_of
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import Expected, PrepareConfig, UnitSettings
from ltrscale.ingest.rows import QUARANTINE, Rejection
from ltrscale.ingest.source import Source
from ltrscale.progress import Report, log


class RejectedRowsError(InputError):
    """More than `max_rejected` of the rows were rejected; `rules` counts them by rule."""

    def __init__(self, message: str, rules: Mapping[str, int]) -> None:
        super().__init__(message)
        self.rules = rules


def check_rows(
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


def check_events(rows: str, counts: Mapping[str, int], max_rejected: float) -> None:
    """Raise InputError if too many of the events that rows were made of cannot be read; others may be left over."""
    events, broken = counts["in"], counts.get("left_over_unparsable", 0)
    if broken > max_rejected * events:
        raise RejectedRowsError(
            f"{broken:,} of {events:,} events cannot be read ({broken / events:.2%}), max_rejected is "
            f"{max_rejected:.2%}: they are in {storage.join(rows, 'left-over')} as unparsable; mend the input or raise "
            "prepare.max_rejected",
            {"unparsable": broken},
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
        labels = "the labels"
        if source.uses is not None:
            labels = f"column {source.uses.label_column!r}, which prepare takes as the label,"
        log.warning("prepare: %s: %s; check %s and the query", out, wrong, labels)


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


def log_shortcuts(new: Manifest, before: Manifest | None) -> None:
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
