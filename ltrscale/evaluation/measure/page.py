"""The report of an evaluation: the best model against what serves in a few sentences, tables, charts, how to read them.

Every figure is one that the evaluation has committed. Differences from the best method are those of
`Evaluation.leads`; in slices they are from the baseline. The order shown is only a reference.
"""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ltrscale.evaluation.measure.corrected import section
from ltrscale.evaluation.measure.outliers import OUTLIER_BINS, OutlierDetector
from ltrscale.evaluation.measure.periods import drifted, period_blocks
from ltrscale.evaluation.measure.report import EvaluatedData, Evaluation, MethodResult
from ltrscale.evaluation.measure.settings import AS_SHOWN, POSITIONS, PRODUCTION
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
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.statistics.summarise import Comparison, Summary
from ltrscale.progress import called
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import (
    Block,
    Chart,
    Command,
    Document,
    Points,
    Section,
    Table,
    TableRow,
    Text,
    cell,
    span,
)
from ltrscale.storage import absolute, join

_FEW_GROUPS = 100
"""With fewer groups that define the metric, nothing is stated about a slice."""
_SLICES_NAMED, _RULES_SHOWN = 3, 10
_SURE = 0.05


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


def opening(evaluation: Evaluation) -> list[str]:
    """A few sentences on an evaluation: the best method, how sure that is, and on which slices it is behind."""
    best = best_of(evaluation)
    if best is None:
        return [f"No group defines {metric_label(evaluation.primary)}, so nothing can be said; evaluate other periods."]
    return [_on_the_best(evaluation, best), *_sure(evaluation), *_behind(evaluation, best)]


def headline(evaluation: Evaluation) -> str:
    """The line that decides whether to ship: the best model against the ranker in service, or as much as is known."""
    metric, best = metric_label(evaluation.primary), best_of(evaluation)
    if best is None:
        return f"No group defines {metric}"
    if (found := _standing(evaluation)) is None:
        return f"{best.name}, with nothing beside it: {metric} {cell(primary_of(evaluation, best))}"
    ours, serving, lead = found
    (served,) = (method for method in evaluation.methods if method.name == serving)
    name, base = _as_served(evaluation, served), primary_of(evaluation, served).mean
    percent = f" ({lead.difference / base:+.1%})" if base else ""
    figure = f"{metric} {cell(lead.figure, '+.4f')}{percent}"
    if lead.p_holm is None:
        return f"{ours} against {name}: {figure}, over too few draws of labels to judge"
    if not is_beyond_chance(lead):
        return f"{ours}, the best model, cannot be distinguished from {name}: {figure}"
    if lead.difference > 0:
        return f"{ours} ranks better than {name}: {figure}"
    return f"No model ranks better than {name}: {figure} for {ours}, the best"


def _standing(evaluation: Evaluation) -> tuple[str, str, Comparison] | None:
    """The best model, the ranker in service, and the lead of the first; None if either or the metric is missing."""
    serving = serving_of(evaluation)
    others = [method for method in evaluation.ranked if method.name not in (serving, AS_SHOWN)]
    others.sort(key=lambda method: method.kinds == {"feature"})  # a score alone comes after all models
    lead = _between(evaluation, others[0].name, serving) if others and serving is not None else None
    return None if lead is None or serving is None else (others[0].name, serving, lead)


def serving_of(evaluation: Evaluation) -> str | None:
    """What serves: a baseline in service or untrained, else the best score, order shown, baseline or next best."""
    kinds = {method.name: method.kinds for method in evaluation.ranked}
    baseline, untrained = evaluation.baseline, [name for name in kinds if kinds[name] <= {"feature", "scores"}]
    if baseline in (AS_SHOWN, PRODUCTION, *untrained):
        return baseline
    if scores := [name for name in kinds if kinds[name] == {"feature"} and name != AS_SHOWN]:
        return scores[0]
    if AS_SHOWN in kinds:
        return AS_SHOWN
    return baseline or next(iter([*kinds][1:]), None)


def _as_served(evaluation: Evaluation, serving: MethodResult) -> str:
    if serving.name == AS_SHOWN:
        return f"what was shown ({AS_SHOWN}), which labels such as clicks favour"
    if serving.kinds == {"feature"}:
        return f"{serving.name}, the order of a score alone"
    if serving.name == PRODUCTION:
        return "production"
    return f"{serving.name}, the {'baseline' if serving.name == evaluation.baseline else 'next best'}"


def _between(evaluation: Evaluation, one: str, other: str) -> Comparison | None:
    """How far one method is ahead of another, in the primary metric over all groups; None if nothing compares them."""
    best = evaluation.ranked[0].name
    if one == best and other in evaluation.leads:
        return _turned(evaluation.leads[other])
    if other == best and one in evaluation.leads:
        return evaluation.leads[one]
    compared = {m.name: m.slices[ALL].comparisons.get(evaluation.primary) for m in evaluation.methods}
    return compared[one] if other == evaluation.baseline else None


def _turned(lead: Comparison) -> Comparison:
    """The difference with its sign turned."""
    low, high = (None if end is None else 0.0 - end for end in (lead.high, lead.low))  # and 0 stays 0
    return lead.replace(difference=0.0 - lead.difference, low=low, high=high)


def best_of(evaluation: Evaluation) -> MethodResult | None:
    """The method with the highest mean, the first among equals; the order shown only if it is alone.

    None if no group defines the metric.
    """
    best = evaluation.ranked[0]
    return None if primary_of(evaluation, best).mean is None else best


def primary_of(evaluation: Evaluation, method: MethodResult, slice_: str = ALL) -> Summary:
    """The primary metric of a method over all groups, or those of a slice."""
    return method.slices[slice_].summaries[evaluation.primary]


def competitor_of(evaluation: Evaluation) -> str | None:
    """The method that the best one is compared with: the baseline, or the next best if the baseline is the best."""
    best = best_of(evaluation)
    if best is None or not evaluation.leads:
        return None
    if evaluation.baseline in evaluation.leads:
        return evaluation.baseline
    return max(evaluation.leads, key=lambda name: (name != AS_SHOWN, evaluation.leads[name].difference))


def is_beyond_chance(comparison: Comparison) -> bool:
    """Whether a difference from 0 is beyond chance, adjusted for the comparisons that were made."""
    return comparison.p_holm is not None and comparison.p_holm < _SURE


def _on_the_best(evaluation: Evaluation, best: MethodResult) -> str:
    summary = primary_of(evaluation, best)
    basis = f"over {summary.groups:,} query groups of {span(evaluation.test.periods)}"
    figure = f"{metric_label(evaluation.primary)} {cell(summary)} {basis}"
    if len(evaluation.methods) == 1:
        return f"{best.name} is the only method: {figure}. Alone it is neither good nor bad."
    equal = [name for name, lead in evaluation.leads.items() if lead.difference == 0 and name != AS_SHOWN]
    if equal:
        return f"{_listed([best.name, *equal])} rank equally well: {figure}."
    return f"{best.name} ranks best: {figure}."


def _sure(evaluation: Evaluation) -> Iterator[str]:
    """Whether the leads of the best are beyond chance, and over which samples."""
    judged = {name: lead for name, lead in evaluation.leads.items() if lead.p_holm is not None}
    open_ = [
        f"{name} (p {cell(c.p_holm)})" for name, c in judged.items() if name != AS_SHOWN and not is_beyond_chance(c)
    ]
    if open_:
        yield f"It cannot be distinguished from {_listed(open_)}: their order may be chance."
    elif behind := [name for name in judged if name != AS_SHOWN]:
        every = judged.keys() == evaluation.leads.keys()
        yield f"Its lead over {'every other model' if every else _listed(behind)} is more than chance."
        if not every:
            yield f"The others have fewer than {FEWEST_DRAWS} draws of labels, too few to judge."
    if any(lead.draws == 1 for lead in judged.values()):
        yield (
            "There is one draw of labels: this holds for other queries, not for models trained on other labels or from "
            f"another seed, which {FEWEST_DRAWS} draws would judge."
        )


def _behind(evaluation: Evaluation, best: MethodResult) -> Iterator[str]:
    """The slices on which the best method is behind the baseline, or if it is the baseline, behind another."""
    competitor = competitor_of(evaluation)
    if evaluation.baseline is None or competitor is None:
        return
    compared = competitor if best.name == evaluation.baseline else best.name
    sign = -1 if best.name == evaluation.baseline else 1  # in slices, differences are from the baseline
    (slices,) = (method.slices for method in evaluation.methods if method.name == compared)
    judged = {
        name: (sign * c.difference, c)
        for name, scope in slices.items()
        if name != ALL
        and scope.summaries[evaluation.primary].groups >= _FEW_GROUPS
        and (c := scope.comparisons.get(evaluation.primary)) is not None
    }
    if not judged:
        yield f"No slice has {_FEW_GROUPS} groups with the metric, so that it is not known on whom it is worse."
        return
    behind = sorted((name for name, (lead, _) in judged.items() if lead < 0), key=lambda name: judged[name][0])
    worse = [name for name in behind if is_beyond_chance(judged[name][1])]
    of_slices = f"Of {len(judged)} slice{'s' if len(judged) > 1 else ''} with at least {_FEW_GROUPS} groups it is"
    if not behind:
        yield f"{of_slices} behind {competitor} on none."
    if worse:
        yield f"{of_slices} worse than {competitor} beyond chance on {_first_named(worse, judged)}."
    if chance := [name for name in behind if name not in worse]:
        yield f"{of_slices} behind {competitor}, perhaps by chance, on {len(chance)}: {_first_named(chance, judged)}."


def _first_named(names: Sequence[str], judged: dict[str, tuple[float, Comparison]]) -> str:
    unnamed = [f"{len(names) - _SLICES_NAMED} more"] if len(names) > _SLICES_NAMED else []
    return _listed([f"{name} ({judged[name][0]:+.4f})" for name in names[:_SLICES_NAMED]] + unnamed)


def _listed(texts: Sequence[str]) -> str:
    """The texts with commas between them, and "and" before the last."""
    *before, end = texts
    return f"{', '.join(before)} and {end}" if before else end


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


def leaderboard(evaluation: Evaluation) -> Table:
    """A row for each method, the best first, against the baseline and the best.

    The columns are NDCG at each cut-off, the primary one by gains, on clicks, and on outlier groups if there are any.
    """
    primary, best, rows = evaluation.primary, evaluation.ranked[0].name, []
    metrics = evaluation.methods[0].slices[ALL].summaries
    names = [*cutoffs(metrics), *(name for name in (f"gain_{primary}", f"click_{primary}") if name in metrics)]
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


def slices(evaluation: Evaluation) -> Iterator[Block]:
    """Each method by slice: differences from the baseline, or means without one; `metrics.json` has all metrics."""
    primary, baseline, label = evaluation.primary, evaluation.baseline, metric_label(evaluation.primary)
    rows: list[TableRow] = []
    drawn = []
    for name, groups in evaluation.test.slices.items():
        for method in evaluation.methods:
            scope = method.slices[name]
            summary, c = scope.summaries[primary], scope.comparisons.get(primary)
            row: TableRow = {"slice": name, "groups": groups, "defined": summary.groups, "method": method.name}
            rows.append({**row, f"{label} [95%]": summary, **columns_against(primary, baseline, scope)})
            figure = summary if c is None else c.figure
            if not name.startswith(OF_PERIOD) and figure.mean is not None and (c is not None or baseline is None):
                faded = summary.groups < _FEW_GROUPS
                drawn.append(charts.interval_row(name, figure, series=method.name, faded=faded))
    if drawn:
        title = label if baseline is None else f"{label} - {baseline}"
        shows = f"{title} by slice, with 95% intervals; slices of fewer than {_FEW_GROUPS} groups are faded"
        at, order = None if baseline is None else 0.0, [method.name for method in evaluation.methods]
        yield Chart(charts.interval_chart(drawn, title=title, at=at, order=order), shows, "slices")
    yield Table.from_rows(rows, "All slices and methods", folded=True)
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
