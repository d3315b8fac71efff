"""The results of an evaluation and their report: one table for all methods, a page in Markdown, a picture."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.evaluation.corrected import Corrected, section
from ltrscale.evaluation.debiasing import Trained, stated
from ltrscale.evaluation.outliers import OutlierDetector
from ltrscale.evaluation.pages import (
    Cells,
    Scopes,
    against,
    against_header,
    all_comparisons,
    all_summaries,
    bullets,
    definitions,
    has_letor,
    intervals,
    markdown,
    number,
    policies,
    print_page,
    verdicts,
    with_error,
)
from ltrscale.evaluation.shown import AS_SHOWN, FAVOURED
from ltrscale.evaluation.slices import ALL, OUTLIERS
from ltrscale.evaluation.summarise import Comparison, Scope, Summary
from ltrscale.markdown import code, escape
from ltrscale.ranking.calibration import Calibration
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.findings import Findings
from ltrscale.storage import absolute, join

_RULES_SHOWN = 10


class Sliced(Config):
    """Results of a method by slice."""

    slices: dict[str, Scope]
    """`all` groups, `outliers`, those of `slices` in the config, and the values of the columns of `slice_by`."""

    @model_validator(mode="before")
    @classmethod
    def _before_slices(cls, values: Any) -> Any:
        """Earlier versions had two slices, each under a key of its own."""
        if not isinstance(values, dict) or "everywhere" not in values:
            return values
        twins = {ALL: "everywhere", OUTLIERS: "outliers"}
        kept = {key: value for key, value in values.items() if key not in twins.values()}
        return {**kept, "slices": {name: values[key] for name, key in twins.items()}}


class MethodResult(Sliced):
    """One method: its bundles, one for each trial, and its results by slice."""

    name: str
    bundles: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kind of each bundle: neural, trees or feature; `scores`; `order shown`."""
    labelled_groups: tuple[int | None, ...]
    """Number of labelled groups that each bundle was trained on; None if it does not state it."""
    validation_groups: tuple[int | None, ...] = ()
    """Number of labelled groups that each bundle was selected on; None if it does not state it."""
    labels: tuple[str | None, ...] = ()
    """Identity of the labels that each bundle was trained and selected on; None if it does not state it."""
    debiased: tuple[str | None, ...] = ()
    """How the training of each bundle corrected for positions: `dla`, `weights` or `unbiased`; None if it did not."""
    otherwise: tuple[str | None, ...] = ()
    """Identity of each bundle's settings without that correction and the seed; None for scores and the order shown."""
    calibration: tuple[Calibration | None, ...] = ()
    """Each bundle's probabilities against the clicks; None where its scores are no logits of labels 0 and 1."""


class EvaluatedData(Config):
    """The groups that the methods were evaluated on."""

    data: tuple[str, ...]
    periods: tuple[str, ...]
    hash: str
    groups: int
    documents: int
    slices: dict[str, int]
    """Groups of each slice."""
    judged: str | None = None
    """The data set with all judged documents of each query; None if the lists' own labels are all that counts."""
    unlisted: int = 0
    """Those of `groups` that are queries with judgements and without a list."""
    unshown: int = 0
    """Those of `documents` without a position, where there are positions."""

    @model_validator(mode="before")
    @classmethod
    def _before_slices(cls, values: Any) -> Any:
        """Earlier versions counted outlier groups alone."""
        if not isinstance(values, dict) or "outlier_groups" not in values:
            return values
        kept = {key: value for key, value in values.items() if key != "outlier_groups"}
        return {**kept, "slices": {ALL: values["groups"], OUTLIERS: values["outlier_groups"]}}


class Evaluation(Findings):
    """`metrics.json` of an evaluation."""

    called: ClassVar = "an evaluation"
    made_by_job: ClassVar = "jobs.evaluate"
    methods: Annotated[tuple[MethodResult, ...], Field(min_length=1)]
    baseline: str | None
    primary: str
    """The metric of the comparison column and the picture."""
    leads: dict[str, Comparison] = Field(default_factory=dict)
    """Over all groups and in the primary metric, the difference of every other method from the best one."""
    relevant_from: float
    leave_out_constant: bool = False
    """Whether groups of equal labels are left out of the means."""
    policies: dict[str, str] = Field(default_factory=dict)
    """What the formula of each metric leaves open, such as ties; empty in the first evaluations."""
    resamples: int
    test: EvaluatedData
    conditions: dict[str, str] = Field(default_factory=dict)
    """The condition of each slice that the config names."""
    validation_groups: int | None = None
    """All labelled groups of the validation split."""
    corrected: Corrected | None = None
    """The metrics corrected for positions, where they were asked for."""
    detector: OutlierDetector


def print_table(url: str) -> None:
    """Write the tables of a committed evaluation and the place of its report to standard output."""
    print_page(url, _tables(Evaluation.read(url)))


def table(evaluation: Evaluation) -> str:
    """The leaderboard as a Markdown table with aligned columns, so that it reads well in a terminal too."""
    return markdown(*leaderboard(evaluation))


def leaderboard(evaluation: Evaluation) -> Cells:
    """One row per method.

    The columns are NDCG at each cut-off, with the standard error if there are several trials, and that of clicks at the
    primary one if it was measured; the primary NDCG on outlier groups; the paired difference from the baseline with its
    interval and adjusted p value; and the numbers of groups with a defined and an undefined primary metric.
    """
    primary = evaluation.primary
    cutoffs = [name for name in _metrics(evaluation) if name.startswith("ndcg@") or name == f"click_{primary}"]
    n_outliers = evaluation.methods[0].slices[OUTLIERS].summaries[primary].groups
    header = ["method", *map(metric_label, cutoffs), f"Outlier-{metric_label(primary)} (n={n_outliers})"]
    if evaluation.baseline is not None:
        header += against_header(primary, evaluation.baseline)
    rows = []
    for method in evaluation.methods:
        summaries = method.slices[ALL].summaries
        row = [
            method.name,
            *(_mean(summaries[name]) for name in cutoffs),
            _mean(method.slices[OUTLIERS].summaries[primary]),
        ]
        if evaluation.baseline is not None:
            row += against(method.slices[ALL].comparisons.get(primary))
        rows.append([*row, f"{summaries[primary].groups:,}", f"{summaries[primary].undefined:,}"])
    return [*header, "groups", "undefined"], rows


def page(evaluation: Evaluation, *, opening: Sequence[str], picture: str, out: str) -> str:
    """The whole report in Markdown.

    Args:
        evaluation: what it shows.
        opening: the sentences that it opens with.
        picture: the file name of the plot.
        out: the directory of the report.
    """
    parts = [
        "# Evaluation",
        escape(" ".join(opening)),
        _data(evaluation),
        *_tables(evaluation),
        _how_to_read(evaluation),
        f"![{metric_label(evaluation.primary)} of each method with its interval]({picture})",
        "## All metrics",
        all_summaries(_scopes(evaluation)),
    ]
    if evaluation.baseline is not None:
        parts += [f"## Against {escape(evaluation.baseline)}", all_comparisons(_scopes(evaluation))]
    if rows := _calibrations(evaluation):
        header = ["method", "clicked", "predicted", "log loss", "calibration error", "if right"]
        parts += ["## Calibration", _CALIBRATION, markdown(header, rows)]
    if evaluation.test.slices.keys() - {ALL, OUTLIERS}:
        parts += ["## Slices", _slices(evaluation)]
    parts += ["## Outliers", _outliers(evaluation.detector), "## Methods", _methods(evaluation.methods, out)]
    return "\n\n".join(parts) + "\n"


_CALIBRATION = (
    "Probabilities are sigmoids of the scores of methods that were trained with the pointwise sigmoid loss; label 1 is "
    "a click. The log loss is the mean over documents. The calibration error is the mean distance of probability and "
    "share of clicks over ten bins of equal count. Beside it stands what it would be on average if all probabilities "
    "were right: clicks are few, so that it is never 0. Several trials enter with their mean."
)


def _calibrations(evaluation: Evaluation) -> list[list[str]]:
    """A row for each method whose scores are logits of clicks, with means over its trials."""
    rows = []
    for method in evaluation.methods:
        if known := [each for each in method.calibration if each is not None]:
            columns = zip(*((c.clicked, c.predicted, c.log_loss, c.error) for c in known), strict=True)
            right = [c.reference for c in known if c.reference is not None]
            of_right = number(sum(right) / len(right) if len(right) == len(known) else None)
            rows.append([method.name, *(number(sum(column) / len(known)) for column in columns), of_right])
    return rows


def chart(evaluation: Evaluation) -> charts.Spec:
    """The primary metric of each method with its 95% interval; on outlier groups too, if there are any."""
    methods, label = evaluation.methods, metric_label(evaluation.primary)
    shown = {label: ALL}
    if methods[0].slices[OUTLIERS].summaries[evaluation.primary].groups:
        shown[f"Outlier-{label}"] = OUTLIERS
    parts = []
    for title, name in shown.items():
        groups = methods[0].slices[name].summaries[evaluation.primary].groups
        parts.append(charts.titled(leaders_chart(evaluation, name), f"{title}, {groups:,} groups"))
    return charts.beside(*parts)


def leaders_chart(evaluation: Evaluation, slice_: str) -> charts.Spec:
    """The primary metric of each method with its 95% interval on a slice, and a line at the baseline."""
    rows = []
    for method in evaluation.methods:
        kind = "baseline" if method.name == evaluation.baseline else "method"
        rows.append(charts.interval_row(method.name, method.slices[slice_].summaries[evaluation.primary], series=kind))
    base = next((row["mean"] for row in rows if row["series"] == "baseline"), None)
    return charts.intervals(rows, title=f"{metric_label(evaluation.primary)} and its 95% interval", at=base)


def _data(evaluation: Evaluation) -> str:
    test = evaluation.test
    first, last = test.periods[0], test.periods[-1]
    periods = (
        f"period {code(first)}" if first == last else f"{len(test.periods)} periods, {code(first)} to {code(last)}"
    )
    return (
        f"Test data: {', '.join(map(code, test.data))}, {periods}; {test.groups:,} labelled query groups, "
        f"{test.documents:,} documents, {test.slices[OUTLIERS]:,} outlier groups (selection `{test.hash[:12]}`)."
    ) + _judged(test)


def _judged(test: EvaluatedData) -> str:
    """What counts as missed, where whole queries are judged."""
    if test.judged is None:
        return ""
    return (
        f" Judged are whole queries ({code(test.judged)}): a relevant document outside the list is missed. "
        f"{test.unlisted:,} of the groups are queries without a list: they count 0, and are in no slice."
    )


def _tables(evaluation: Evaluation) -> list[str]:
    """The table of methods, a table of both policies if the evaluation was under both, and what they can show."""
    means = {
        method.name: {metric: _mean(summary) for metric, summary in method.slices[ALL].summaries.items()}
        for method in evaluation.methods
    }
    primary = evaluation.primary
    compared = {method.name: method.slices[ALL].comparisons.get(primary) for method in evaluation.methods}
    shown = verdicts(compared, primary)
    return [
        table(evaluation),
        *([policies(means)] if has_letor(_metrics(evaluation)) else []),
        *([bullets(shown)] if shown else []),
        *([f"{FAVOURED}{_unshown(evaluation.test)}"] if AS_SHOWN in means else []),
        *_corrected(evaluation),
        *([bullets(lines)] if (lines := stated(_trained(evaluation), shown=AS_SHOWN in means)) else []),
    ]


def _trained(evaluation: Evaluation) -> list[Trained]:
    """The methods with bundles, and their figures."""
    primary, corrected = evaluation.primary, {}
    if evaluation.corrected is not None:
        k = int(primary.rpartition("@")[2])
        corrected = {m.name: {f"share@{k} corrected": m.corrected[k].mean} for m in evaluation.corrected.methods}
    return [
        Trained(
            method.name,
            method.debiased,
            method.otherwise,
            {metric_label(primary): method.slices[ALL].summaries[primary].mean, **corrected.get(method.name, {})},
        )
        for method in evaluation.methods
        if any(method.otherwise)
    ]


def _corrected(evaluation: Evaluation) -> list[str]:
    """The metrics corrected for positions beside the raw ones."""
    if evaluation.corrected is None:
        return []
    raw = {method.name: _mean(method.slices[ALL].summaries[evaluation.primary]) for method in evaluation.methods}
    cutoff = int(evaluation.primary.rpartition("@")[2])
    return ["## Corrected for positions", *section(evaluation.corrected, cutoff, raw, evaluation.baseline)]


def _unshown(test: EvaluatedData) -> str:
    """How many documents the order shown leaves at the end of their lists."""
    if not test.unshown:
        return ""
    return f" {test.unshown:,} of {test.documents:,} documents have no position; they come last, in random order."


def _metrics(evaluation: Evaluation) -> list[str]:
    return list(evaluation.methods[0].slices[ALL].summaries)


def _how_to_read(evaluation: Evaluation) -> str:
    lines = definitions(
        _metrics(evaluation),
        evaluation.relevant_from,
        leave_out_constant=evaluation.leave_out_constant,
        stated=evaluation.policies,
    )
    lines.append("The means with 0 and with 1 in place of undefined values stand under All metrics.")
    if any(len(method.bundles) > 1 for method in evaluation.methods):
        lines.append(
            "± is the standard error of the mean over trials, one for each bundle. It leaves out that the test groups "
            "are a sample, so intervals are wider."
        )
    scopes = [scope for method in evaluation.methods for scope in method.slices.values()]
    lines += intervals(scopes, evaluation.resamples)
    if any(None in method.labels for method in evaluation.methods if len(method.bundles) > 1):
        lines.append("Bundles that do not state their labels count as trained on the same ones.")
    lines += _validation(evaluation)
    return bullets(lines)


def _validation(evaluation: Evaluation) -> list[str]:
    """On how many labelled groups of the validation split the models were selected, as far as they state it."""
    everything = evaluation.validation_groups
    counts = sorted({n for method in evaluation.methods for n in method.validation_groups if n is not None})
    if everything is None or not counts:
        return []
    if counts == [everything]:
        return [f"Models were selected on all {everything:,} labelled groups of the validation split: fully labelled."]
    used = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    share = f"{counts[0] / everything:.1%}" if len(counts) == 1 else f"{counts[0] / everything:.1%} and more"
    return [
        f"Models were selected on {used} of the {everything:,} labelled groups of the validation split ({share}): a "
        "sample, as the training labels are."
    ]


def _scopes(evaluation: Evaluation) -> Scopes:
    scopes = {"all": {method.name: method.slices[ALL] for method in evaluation.methods}}
    if evaluation.test.slices[OUTLIERS]:
        scopes["outliers"] = {method.name: method.slices[OUTLIERS] for method in evaluation.methods}
    return scopes


def slice_rows(evaluation: Evaluation) -> Cells:
    """The primary metric of each slice and method; `metrics.json` has all metrics."""
    primary, rows = evaluation.primary, []
    for name in evaluation.test.slices:
        for method in evaluation.methods:
            scope = method.slices[name]
            s = scope.summaries[primary]
            row = [name, f"{evaluation.test.slices[name]:,}", f"{s.groups:,}", method.name, _mean(s)]
            row.append("-" if s.low is None else f"[{number(s.low)}, {number(s.high)}]")
            rows.append(row + (against(scope.comparisons.get(primary)) if evaluation.baseline is not None else []))
    header = ["slice", "groups", "defined", "method", metric_label(primary), "95% interval"]
    if evaluation.baseline is not None:
        header += against_header(primary, evaluation.baseline)
    return header, rows


def _slices(evaluation: Evaluation) -> str:
    """The table of slices, with their conditions."""
    stated = [f"{escape(name)}: {code(condition)}" for name, condition in evaluation.conditions.items()]
    text = (
        "A group may be in several slices. p is adjusted by Holm for the number of methods over all groups, and "
        "elsewhere for the methods and slices together."
    )
    return "\n\n".join([text, *([bullets(stated)] if stated else []), markdown(*slice_rows(evaluation))])


def _outliers(detector: OutlierDetector) -> str:
    """A summary of the rules; `outliers.json` has all of them."""
    how = "by the named features only" if detector.gap is None else f"beyond gaps of {detector.gap} of 100 bins"
    text = (
        f"A group with an outlier value is an outlier group. Rules were fitted on the validation split, {how}; "
        f"{detector.share:.2%} of its groups are outliers. {len(detector.rules)} of {len(detector.features)} features "
        "have a rule (all in `outliers.json`)"
    )
    lines = []
    for name, rule in list(detector.rules.items())[:_RULES_SHOWN]:
        conditions = [
            *([f"< {rule.below:g}"] if rule.below is not None else []),
            *([f">= {rule.at_least:g}"] if rule.at_least is not None else []),
            *(["missing"] if rule.missing else []),
        ]
        lines.append(f"- {code(name)}: {' or '.join(conditions)}")
    more = f", the first {_RULES_SHOWN} of them:" if len(detector.rules) > _RULES_SHOWN else ":" if lines else "."
    return "\n".join([text + more, *([""] if lines else []), *lines])


def _methods(methods: Sequence[MethodResult], out: str) -> str:
    rows = [
        [method.name, kind, *("-" if n is None else f"{n:,}" for n in counts), code(url)]
        for method in methods
        for kind, *counts, url in zip(
            method.kinds,
            method.labelled_groups,
            method.validation_groups or [None] * len(method.bundles),
            method.bundles,
            strict=True,
        )
    ]
    config = shlex.quote(join(absolute(out), "run", "config.yaml"))
    text = (
        "A job leaves its whole configuration in `run/config.yaml` beside this page. This repeats the evaluation, from "
        "the directory in which it was made, as the configuration may name others relative to that one:\n\n"
        f"```sh\ncd {shlex.quote(str(Path.cwd()))}\n"
        f"python -m jobs.evaluate --config {config} --set out=DIRECTORY\n```"
    )
    header = ["method", "kind", "labelled groups trained on", "selected on", "bundle"]
    return f"{markdown(header, rows)}\n\n{text}"


def _mean(summary: Summary) -> str:
    return with_error(summary.mean, summary.std_error)
