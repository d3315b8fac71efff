"""The report of an evaluation: one table for all methods, charts, and how to read them."""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ltrscale.evaluation.measure.corrected import section
from ltrscale.evaluation.measure.opening import gain_metric, headline, opening
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.report import Evaluation, MethodResult
from ltrscale.evaluation.measure.settings import AS_SHOWN, POSITIONS
from ltrscale.evaluation.measure.slices import ALL, OUTLIERS
from ltrscale.evaluation.pages import (
    Scopes,
    TableCells,
    against,
    against_header,
    all_comparisons,
    all_summaries,
    definitions,
    has_letor,
    how_intervals,
    number,
    policies,
    verdicts,
    with_error,
)
from ltrscale.evaluation.statistics.summarise import Summary
from ltrscale.progress import called
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Command, Document, Points, Section, Table, Text
from ltrscale.storage import absolute, join

_RULES_SHOWN = 10
_FAVOURED = (
    f"`{AS_SHOWN}` is the order in which the lists were shown, by the column `{POSITIONS}`. Labels of people who saw "
    "it, such as clicks and purchases, favour it: what stands on top is looked at most, whatever it is worth. A ranker "
    "that is level with it may well be better."
)


def document(evaluation: Evaluation, out: str) -> Document:
    """The report; `out` is its directory."""
    scopes, shows = (
        _both_scopes(evaluation),
        f"{metric_label(evaluation.primary)} of each method with its interval",
    )
    sections = [
        Section("How to read the tables", [Points(_how_to_read(evaluation))]),
        Section("All metrics", [all_summaries(scopes)]),
    ]
    if evaluation.baseline is not None:
        sections.append(Section(f"Against {evaluation.baseline}", [all_comparisons(scopes)]))
    if rows := _calibrations(evaluation):
        header = ["method", "clicked", "predicted", "log loss", "calibration error", "if right"]
        sections.append(Section("Calibration", [Text(_CALIBRATION), Table(header, rows)]))
    if evaluation.test.slices.keys() - {ALL, OUTLIERS}:
        sections.append(Section("Slices", list(_slice_blocks(evaluation))))
    sections += [
        Section("Outliers", list(_outliers(evaluation.detector))),
        Section("Methods", list(_methods(evaluation.methods, out))),
    ]
    blocks = [*_results(evaluation), Chart(_chart(evaluation), shows, "ndcg")]
    texts = [Text(f"{headline(evaluation)}."), Text(" ".join(opening(evaluation))), Text(_test_data(evaluation))]
    return Document("Evaluation", [*texts, *blocks], sections)


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
        if calibrations := [each for each in method.calibration if each is not None]:
            columns = zip(*((c.clicked, c.predicted, c.log_loss, c.error) for c in calibrations), strict=True)
            right = [c.reference for c in calibrations if c.reference is not None]
            of_right = number(sum(right) / len(right) if len(right) == len(calibrations) else None)
            rows.append([method.name, *(number(sum(column) / len(calibrations)) for column in columns), of_right])
    return rows


def _chart(evaluation: Evaluation) -> charts.Spec:
    """The primary metric of each method with its 95% interval; on outlier groups too, if there are any."""
    label, parts = metric_label(evaluation.primary), []
    for title, name in ((label, ALL), (f"Outlier-{label}", OUTLIERS)):
        groups = evaluation.methods[0].slices[name].summaries[evaluation.primary].groups
        if groups or name == ALL:
            parts.append(charts.titled(leaders_chart(evaluation, name), f"{title}, {groups:,} groups"))
    return charts.chart_row(*parts)


def leaders_chart(evaluation: Evaluation, slice_: str) -> charts.Spec:
    """The primary metric of each method with its 95% interval on a slice, and a line at the baseline."""
    rows = []
    for method in evaluation.ranked:
        kind = "reference" if method.name == AS_SHOWN else "method"
        kind = "baseline" if method.name == evaluation.baseline else kind
        rows.append(charts.interval_row(method.name, method.slices[slice_].summaries[evaluation.primary], series=kind))
    base = next((row["mean"] for row in rows if row["series"] == "baseline"), None)
    return charts.interval_chart(rows, title=f"{metric_label(evaluation.primary)} and its 95% interval", at=base)


def _test_data(evaluation: Evaluation) -> str:
    test = evaluation.test
    first, last = test.periods[0], test.periods[-1]
    periods = f"period {first}" if first == last else f"{len(test.periods)} periods, {first} to {last}"
    text = (
        f"Test data: {', '.join(test.data)}, {periods}; {test.groups:,} labelled query groups, "
        f"{test.documents:,} documents, {test.slices[OUTLIERS]:,} outlier groups (selection {test.hash[:12]})."
    )
    if test.judged is None:
        return text
    return (
        f"{text} Judged are whole queries ({test.judged}): a relevant document outside the list is missed. "
        f"{test.unlisted:,} of the groups are queries without a list: they count 0, and are in no slice."
    )


def leaderboard(evaluation: Evaluation) -> TableCells:
    """A row for each method, the best first, against the baseline.

    The columns are NDCG at each cut-off, the primary one by gains, on clicks, and on outlier groups if there are any.
    """
    primary = evaluation.primary
    also = (gain_metric(evaluation), f"click_{primary}")
    cutoffs = [name for name in _metric_names(evaluation) if name.startswith("ndcg@") or name in also]
    n_outliers = evaluation.methods[0].slices[OUTLIERS].summaries[primary].groups
    of_outliers = [f"Outlier-{metric_label(primary)} (n={n_outliers})"] if n_outliers else []
    header = ["method", *map(metric_label, cutoffs), *of_outliers, *against_header(primary, evaluation.baseline)]
    rows = []
    for method in evaluation.ranked:
        summaries = method.slices[ALL].summaries
        outliers = [_mean(method.slices[OUTLIERS].summaries[primary])] if n_outliers else []
        row = [method.name, *(_mean(summaries[name]) for name in cutoffs), *outliers]
        if evaluation.baseline is not None:
            row += against(method.slices[ALL].comparisons.get(primary))
        rows.append([*row, f"{summaries[primary].groups:,}", f"{summaries[primary].undefined:,}"])
    return [*header, "groups", "undefined"], rows


def _results(evaluation: Evaluation) -> Iterator[Block]:
    """The table of methods, a table of both policies if both were evaluated, and what the comparisons can show."""
    primary = evaluation.primary
    summaries = {method.name: method.slices[ALL].summaries for method in evaluation.methods}
    compared = {method.name: method.slices[ALL].comparisons.get(primary) for method in evaluation.methods}
    yield Table(*leaderboard(evaluation))
    if has_letor(_metric_names(evaluation)):
        yield policies(
            {name: {metric: _mean(s) for metric, s in of_method.items()} for name, of_method in summaries.items()}
        )
    if lines := verdicts(compared, primary):
        yield Points(lines)
    if AS_SHOWN in summaries:
        test = evaluation.test
        last = f" {test.unshown:,} of {test.documents:,} documents have no position; they come last, in random order."
        yield Text(_FAVOURED + (last if test.unshown else ""))
    figures = {name: {metric_label(primary): of_method[primary].mean} for name, of_method in summaries.items()}
    if evaluation.corrected is not None:
        k = int(primary.rpartition("@")[2])
        raw = {name: _mean(of_method[primary]) for name, of_method in summaries.items()}
        yield from section(evaluation.corrected, k, raw, evaluation.baseline)
        for method in evaluation.corrected.methods:
            figures[method.name][f"share@{k} corrected"] = method.corrected[k].mean
    with_bundles = [method for method in evaluation.methods if any(method.otherwise)]
    if lines := debiasing(with_bundles, figures, shown=AS_SHOWN in summaries):
        yield Points(lines)


def debiasing(
    methods: Sequence[MethodResult], figures: Mapping[str, Mapping[str, float | None]], *, shown: bool
) -> list[str]:
    """Which trainings corrected for positions, and its effect for methods with and without it.

    Args:
        methods: those with bundles.
        figures: of each method, by their names in the report.
        shown: whether the order that was shown is known; if not, and no training corrected for it, the result is empty.
    """
    how = {method.name: " and ".join(dict.fromkeys(each for each in method.debiased if each)) for method in methods}
    corrected, uncorrected = [m for m in methods if how[m.name]], [m for m in methods if not how[m.name]]
    if not corrected:
        line = "No training corrected for positions: networks do with debias (dla or weights), trees with unbiased."
        return [line] if shown and methods else []
    names = ", ".join(f"{method.name} ({how[method.name]})" for method in corrected)
    others = ", ".join(method.name for method in uncorrected) or "none"
    lines = [f"Trained with a correction for positions: {names}; without: {others}."]
    for one, other in itertools.product(corrected, uncorrected):
        if one.otherwise == other.otherwise and all(one.debiased):
            pairs = ((name, mean, figures[other.name][name]) for name, mean in figures[one.name].items())
            changes = ", ".join(f"{name} {a - b:+.4f}" for name, a, b in pairs if a is not None and b is not None)
            lines.append(
                f"{one.name} has the settings of {other.name}, and the correction: {changes}. Raw figures reward the "
                "order that was shown, so a correction that works may lower them."
            )
    return lines


def _metric_names(evaluation: Evaluation) -> list[str]:
    return list(evaluation.methods[0].slices[ALL].summaries)


def _how_to_read(evaluation: Evaluation) -> list[str]:
    lines = definitions(
        _metric_names(evaluation),
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
    lines += how_intervals(scopes, evaluation.resamples)
    if any(None in method.labels for method in evaluation.methods if len(method.bundles) > 1):
        lines.append("Bundles that do not state their labels count as trained on the same ones.")
    return [*lines, *_selected_on(evaluation)]


def _selected_on(evaluation: Evaluation) -> list[str]:
    """The number of labelled validation groups that the models were selected on, as far as they state it."""
    n_groups = evaluation.validation_groups
    counts = sorted({n for method in evaluation.methods for n in method.validation_groups if n is not None})
    if not counts:
        return []
    if counts == [n_groups]:
        return [f"Models were selected on all {n_groups:,} labelled groups of the validation split: fully labelled."]
    used = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    share = f"{counts[0] / n_groups:.1%}" if len(counts) == 1 else f"{counts[0] / n_groups:.1%} and more"
    return [
        f"Models were selected on {used} of the {n_groups:,} labelled groups of the validation split ({share}): a "
        "sample, as the training labels are."
    ]


def _both_scopes(evaluation: Evaluation) -> Scopes:
    scopes = {"all": {method.name: method.slices[ALL] for method in evaluation.methods}}
    if evaluation.test.slices[OUTLIERS]:
        scopes["outliers"] = {method.name: method.slices[OUTLIERS] for method in evaluation.methods}
    return scopes


def slice_rows(evaluation: Evaluation) -> TableCells:
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
    return header + against_header(primary, evaluation.baseline), rows


def _slice_blocks(evaluation: Evaluation) -> Iterator[Block]:
    yield Text(
        "A group may be in several slices. p is adjusted by Holm for the number of methods over all groups, and "
        "elsewhere for the methods and slices together."
    )
    if evaluation.conditions:
        yield Points([f"{name}: {condition}" for name, condition in evaluation.conditions.items()])
    yield Table(*slice_rows(evaluation))


def _outliers(detector: OutlierDetector) -> Iterator[Block]:
    """A summary of the rules; `outliers.json` has all of them."""
    how = "by the named features only" if detector.gap is None else f"beyond gaps of {detector.gap} of 100 bins"
    yield Text(
        f"A group with an outlier value is an outlier group. Rules were fitted on the validation split, {how}; "
        f"{detector.share:.2%} of its groups are outliers. {len(detector.rules)} of {len(detector.features)} features "
        "have a rule (all in outliers.json)."
    )
    lines = []
    for name, rule in list(detector.rules.items())[:_RULES_SHOWN]:
        conditions = [
            *([f"< {rule.below:g}"] if rule.below is not None else []),
            *([f">= {rule.at_least:g}"] if rule.at_least is not None else []),
            *(["missing"] if rule.missing else []),
        ]
        lines.append(f"{name}: {' or '.join(conditions)}")
    if lines:
        are_cut = len(detector.rules) > _RULES_SHOWN
        yield Points(lines, caption=f"The first {_RULES_SHOWN} rules" if are_cut else "The rules")


def _methods(methods: Sequence[MethodResult], out: str) -> Iterator[Block]:
    rows = [
        [m.name, kind, *("-" if n is None else f"{n:,}" for n in counts), url]
        for m in methods
        for kind, *counts, url in zip(m.kinds, m.labelled_groups, m.validation_groups, m.bundles, strict=True)
    ]
    yield Table(["method", "kind", "labelled groups trained on", "selected on", "bundle"], rows)
    yield Text(
        "A job leaves its whole configuration in run/config.yaml beside this page. This repeats the evaluation, from "
        "the directory in which it was made, as the configuration may name others relative to that one:"
    )
    config = shlex.quote(join(absolute(out), "run", "config.yaml"))
    yield Command(f"cd {shlex.quote(str(Path.cwd()))}\n{called('evaluate')} --config {config} --set out=DIRECTORY")


def _mean(summary: Summary) -> str:
    return with_error(summary.mean, summary.std_error)
