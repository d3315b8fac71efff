"""The report of an evaluation: one table for all methods, charts, and how to read them.

It opens with the sentences of `headline`. Every figure is one that the evaluation has committed.
"""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ltrscale.evaluation.measure.corrected import section
from ltrscale.evaluation.measure.headline import FEW_GROUPS, headline, opening, primary_of
from ltrscale.evaluation.measure.outliers import OUTLIER_BINS, OutlierDetector
from ltrscale.evaluation.measure.periods import drifted, period_blocks
from ltrscale.evaluation.measure.report import EvaluatedData, Evaluation, MethodResult
from ltrscale.evaluation.measure.settings import AS_SHOWN, POSITIONS
from ltrscale.evaluation.measure.slices import ALL, OF_PERIOD, OUTLIERS
from ltrscale.evaluation.pages import (
    columns_against,
    cutoffs,
    how_to_read,
    metric_table,
    verdicts,
    with_error,
    with_interval,
)
from ltrscale.evaluation.statistics.summarise import Summary
from ltrscale.progress import called
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Command, Document, Points, Section, Table, TableRow, Text
from ltrscale.storage import absolute, join

_RULES_SHOWN = 10


def document(evaluation: Evaluation, out: str) -> Document:
    """The report; `out` is its directory."""
    scopes = {"all": {method.name: method.slices[ALL] for method in evaluation.methods}}
    if evaluation.test.slices[OUTLIERS]:
        scopes["outliers"] = {method.name: method.slices[OUTLIERS] for method in evaluation.methods}
    sections = [
        Section("How to read the tables", [Points(how_to_read_evaluation(evaluation))]),
        Section("All metrics", [metric_table(scopes, evaluation.baseline)]),
    ]
    if rows := _calibrations(evaluation):
        sections.append(Section("Calibration", [Text(_CALIBRATION), Table.from_rows(rows)]))
    if evaluation.test.slices.keys() - {ALL, OUTLIERS}:
        sections.append(Section("Slices", list(slices(evaluation))))
    if evaluation.by_period is not None or evaluation.drift_failed is not None:
        sections.append(Section("Periods", list(period_blocks(evaluation))))
    sections += [
        Section("Outliers", list(outlier_rules(evaluation.detector))),
        Section("Methods", list(_methods(evaluation.methods, out))),
    ]
    texts = [f"{headline(evaluation)}.", " ".join(opening(evaluation)), " ".join(_test_data(evaluation.test))]
    if evaluation.by_period is not None:
        texts.append(drifted(evaluation.by_period))
    return Document("Evaluation", [*map(Text, texts), *results(evaluation)], sections)


_CALIBRATION = (
    "Probabilities are sigmoids of the scores of methods trained with the pointwise sigmoid loss; label 1 is a click. "
    "The calibration error is the mean distance of probability and share of clicks over ten bins of equal count; "
    "beside it stands what it would be on average if all probabilities were right. Trials enter with their mean."
)


def _calibrations(evaluation: Evaluation) -> list[TableRow]:
    """A row for each method whose scores are logits of clicks, with means over its trials."""
    rows: list[TableRow] = []
    for method in evaluation.methods:
        if found := [trial.calibration for trial in method.trials if trial.calibration is not None]:
            columns = zip(*((c.clicked, c.predicted, c.log_loss, c.error, c.reference) for c in found), strict=True)
            means = [None if None in of else sum(filter(None, of)) / len(of) for of in columns]
            names = ("clicked", "predicted", "log loss", "calibration error", "if right")
            rows.append({"method": method.name, **dict(zip(names, means, strict=True))})
    return rows


def _charts(evaluation: Evaluation) -> Iterator[Chart]:
    """The primary metric of each method and a line at the baseline; of outlier groups too, if there are any."""
    label, first = metric_label(evaluation.primary), evaluation.methods[0]
    groups = {name: first.slices[name].summaries[evaluation.primary].groups for name in (ALL, OUTLIERS)}
    for title, name, file in ((label, ALL, "ndcg"), (f"Outlier-{label}", OUTLIERS, "ndcg-outliers")):
        if groups[name] or name == ALL:
            rows = []
            for method in evaluation.ranked:
                kind = "reference" if method.name == AS_SHOWN else "method"
                kind = "baseline" if method.name == evaluation.baseline else kind
                rows.append(charts.interval_row(method.name, primary_of(evaluation, method, name), series=kind))
            base = next((row["mean"] for row in rows if row["series"] == "baseline"), None)
            spec = charts.interval_chart(rows, title=f"{label} and its 95% interval", at=base)
            yield Chart(spec, f"{title} of each method with its 95% interval, {groups[name]:,} groups", file)


def _test_data(test: EvaluatedData) -> Iterator[str]:
    yield test.described
    if test.unshown:
        yield f"{test.unshown:,} documents have no position (`{POSITIONS}`): in {AS_SHOWN} they are last, in any order."
    if test.judged is not None:
        yield (
            f"Judged are whole queries ({test.judged}): a relevant document outside the list is missed. "
            f"{test.unlisted:,} of the groups are queries without a list: they count 0, and are in no slice."
        )


def _gain_metric(evaluation: Evaluation) -> str | None:
    """The primary metric with the gains that the evaluation names, such as revenue; None where it names none."""
    name = f"gain_{evaluation.primary}"
    return name if name in evaluation.methods[0].slices[ALL].summaries else None


def leaderboard(evaluation: Evaluation) -> Table:
    """A row for each method, the best first, against the baseline and the best.

    The columns are NDCG at each cut-off, the primary one by gains, on clicks, and on outlier groups if there are any.
    """
    primary, best, rows = evaluation.primary, evaluation.ranked[0].name, []
    metrics = evaluation.methods[0].slices[ALL].summaries
    names = [*cutoffs(metrics), *(name for name in (_gain_metric(evaluation), f"click_{primary}") if name in metrics)]
    n_outliers = evaluation.methods[0].slices[OUTLIERS].summaries[primary].groups
    for method in evaluation.ranked:
        scope = method.slices[ALL]
        row: TableRow = {"method": method.name}
        row |= {metric_label(name): _mean(scope.summaries[name]) for name in names}
        if n_outliers:
            label = f"Outlier-{metric_label(primary)} (n={n_outliers})"
            row[label] = _mean(primary_of(evaluation, method, OUTLIERS))
        row |= columns_against(primary, evaluation.baseline, scope)
        if evaluation.leads and evaluation.baseline != best:
            row[f"{metric_label(primary)} - {best} [95%]"] = with_interval(evaluation.leads.get(method.name))
        of_primary = scope.summaries[primary]
        rows.append({**row, "groups": of_primary.groups, "undefined": of_primary.undefined})
    return Table.from_rows(rows)


def results(evaluation: Evaluation) -> Iterator[Block]:
    """The methods in a chart and a table, the section corrected for positions, and what the comparisons can show."""
    primary = evaluation.primary
    yield from _charts(evaluation)
    compared = {method.name: method.slices[ALL].comparisons.get(primary) for method in evaluation.methods}
    yield leaderboard(evaluation)
    if lines := verdicts(compared):
        yield Points(lines)
    if evaluation.corrected is not None:
        k = int(primary.rpartition("@")[2])
        raw = {method.name: _mean(primary_of(evaluation, method)) for method in evaluation.methods}
        yield from section(evaluation.corrected, k, raw, evaluation.baseline)


def how_to_read_evaluation(evaluation: Evaluation) -> list[str]:
    """What the metrics, intervals and p values of an evaluation mean, and the order that was shown."""
    lines = how_to_read(evaluation, (scope for method in evaluation.methods for scope in method.slices.values()))
    several = [method for method in evaluation.methods if len(method.trials) > 1]
    if several:
        lines.append("± is the standard error of the mean over trials, one for each bundle; intervals are wider.")
    if any(trial.labels is None for method in several for trial in method.trials):
        lines.append("Bundles that do not state their labels count as trained on the same ones.")
    if AS_SHOWN in (method.name for method in evaluation.methods):
        lines.append(f"{AS_SHOWN} is only a reference: labels of people who saw that order, such as clicks, favour it.")
    return lines


def _slice_rows(evaluation: Evaluation) -> list[TableRow]:
    """The primary metric of each slice and method; `metrics.json` has all metrics."""
    primary = evaluation.primary
    return [
        {
            "slice": name,
            "groups": evaluation.test.slices[name],
            "defined": method.slices[name].summaries[primary].groups,
            "method": method.name,
            f"{metric_label(primary)} [95%]": method.slices[name].summaries[primary],
            **columns_against(primary, evaluation.baseline, method.slices[name]),
        }
        for name in evaluation.test.slices
        for method in evaluation.methods
    ]


def slices(evaluation: Evaluation) -> Iterator[Block]:
    """Each method by slice: differences from the baseline, or means without one."""
    baseline, title, rows = evaluation.baseline, metric_label(evaluation.primary), []
    for name in evaluation.test.slices:
        for method in evaluation.methods:
            scope = method.slices[name]
            summary, c = scope.summaries[evaluation.primary], scope.comparisons.get(evaluation.primary)
            figure = summary if c is None else c.figure
            if not name.startswith(OF_PERIOD) and figure.mean is not None and (c is not None or baseline is None):
                faded = summary.groups < FEW_GROUPS
                rows.append(charts.interval_row(name, figure, series=method.name, faded=faded))
    if rows:
        title = title if baseline is None else f"{title} - {baseline}"
        shows = f"{title} by slice, with 95% intervals; slices of fewer than {FEW_GROUPS} groups are faded"
        at, order = None if baseline is None else 0.0, [method.name for method in evaluation.methods]
        yield Chart(charts.interval_chart(rows, title=title, at=at, order=order), shows, "slices")
    yield Table.from_rows(_slice_rows(evaluation), "All slices and methods", folded=True)
    if evaluation.conditions:
        yield Points([f"{name}: {condition}" for name, condition in evaluation.conditions.items()])
    yield Text(
        "A group may be in several slices. p is adjusted by Holm for the number of methods over all groups, and "
        "elsewhere for the methods and slices together."
    )


def outlier_rules(detector: OutlierDetector) -> Iterator[Block]:
    """A summary of the rules; `outliers.json` has all of them."""
    how = (
        "by the named features only" if detector.gap is None else f"beyond {detector.gap} empty bins of {OUTLIER_BINS}"
    )
    yield Text(
        f"A group with an outlier value is an outlier group. Rules were fitted on the validation split, {how}; "
        f"{detector.share:.2%} of its groups are outliers. {len(detector.rules)} of {len(detector.features)} features "
        "have a rule (all in outliers.json)."
    )
    lines = []
    for name, rule in list(detector.rules.items())[:_RULES_SHOWN]:
        below = [] if rule.below is None else [f"< {rule.below:g}"]
        above = [] if rule.at_least is None else [f">= {rule.at_least:g}"]
        lines.append(f"{name}: {' or '.join([*below, *above, *(['missing'] if rule.missing else [])])}")
    if lines:
        are_cut = len(detector.rules) > _RULES_SHOWN
        yield Points(lines, caption=f"The first {_RULES_SHOWN} rules" if are_cut else "The rules")


def _methods(methods: Sequence[MethodResult], out: str) -> Iterator[Block]:
    yield Table.from_rows(
        [
            {
                "method": method.name,
                "kind": trial.kind,
                "labelled groups trained on": trial.labelled_groups,
                "selected on": trial.validation_groups,
                "corrected for positions by": trial.debiased,
                "bundle": trial.url,
            }
            for method in methods
            for trial in method.trials
        ]
    )
    yield Text(
        "A job leaves its whole configuration in run/config.yaml beside this page. This repeats the evaluation, from "
        "the directory in which it was made, as the configuration may name others relative to that one:"
    )
    config = shlex.quote(join(absolute(out), "run", "config.yaml"))
    yield Command(f"cd {shlex.quote(str(Path.cwd()))}\n{called('evaluate')} --config {config} --set out=DIRECTORY")


def _mean(summary: Summary) -> str:
    return with_error(summary.mean, summary.std_error)
