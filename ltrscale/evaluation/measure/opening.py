"""The opening of a report: the best model against what serves, the methods, how sure that is, and where it is behind.

Every sentence uses figures that the evaluation has committed. Differences from the best method are those of
`Evaluation.leads`; in slices and other metrics they are from the baseline. The order shown is only a reference.
"""

from collections.abc import Iterator, Sequence

from ltrscale.evaluation.measure.report import Evaluation, MethodResult, by_mean
from ltrscale.evaluation.measure.settings import AS_SHOWN, PRODUCTION
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.pages import with_interval
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.statistics.summarise import Comparison, Summary
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.document import cell

FEW_GROUPS = 100
"""With fewer groups that define the metric, nothing is stated about a slice."""
_SLICES_NAMED = 3
_SURE = 0.05


def opening(evaluation: Evaluation) -> list[str]:
    """A few sentences on an evaluation: the best method, how sure that is, and on which slices it is behind."""
    best = best_of(evaluation)
    if best is None:
        return [f"No group defines {metric_label(evaluation.primary)}, so nothing can be said; evaluate other periods."]
    of_best = [*_ahead(evaluation, best), *_corrected(evaluation), *_sure(evaluation), *_behind(evaluation, best)]
    return [_on_the_best(evaluation, best), *of_best, *_shown(evaluation, best), *_worth(evaluation)]


def headline(evaluation: Evaluation) -> str:
    """The line that decides whether to ship: the best model against the ranker in service, or as much as is known."""
    metric, best = metric_label(evaluation.primary), best_of(evaluation)
    if best is None:
        return f"No group defines {metric}"
    if (found := _standing(evaluation)) is None:
        return f"{best.name}, with nothing beside it: {metric} {cell(_overall(evaluation, best))}"
    ours, serving, lead = found
    (served,) = (method for method in evaluation.methods if method.name == serving)
    name, base = _as_served(evaluation, served), _overall(evaluation, served).mean
    percent = f" ({lead.difference / base:+.1%})" if base else ""
    figure = f"{metric} {cell(lead.figure, '+.4f')}{percent}"
    if lead.p_holm is None:
        return f"{ours} against {name}: {figure}, over too few draws of labels to judge"
    if not is_shown(lead):
        return f"{ours}, the best model, cannot be distinguished from {name}: {figure}"
    if lead.difference > 0:
        return f"{ours} ranks better than {name}: {figure}"
    return f"No model ranks better than {name}: {figure} for {ours}, the best"


def _standing(evaluation: Evaluation) -> tuple[str, str, Comparison] | None:
    """The best model, the ranker in service, and the lead of the first; None if either or the metric is missing."""
    serving = _serving(evaluation)
    others = [method for method in evaluation.ranked if method.name not in (serving, AS_SHOWN)]
    others.sort(key=lambda method: method.kinds == {"feature"})  # a score alone comes after all models
    lead = _between(evaluation, others[0].name, serving) if others and serving is not None else None
    return None if lead is None or serving is None else (others[0].name, serving, lead)


def _serving(evaluation: Evaluation) -> str | None:
    """What serves: a baseline in service or untrained, else the best score, order shown, baseline or next best."""
    kinds = {method.name: method.kinds for method in evaluation.ranked}
    baseline = evaluation.baseline
    if baseline in (AS_SHOWN, PRODUCTION) or kinds.get(baseline or "", {""}) <= {"feature", "scores"}:
        return baseline
    scores = [name for name in kinds if kinds[name] == {"feature"} and name != AS_SHOWN]
    shown = [AS_SHOWN] if AS_SHOWN in kinds else []
    return next(iter([*scores, *shown, *([baseline] if baseline else []), *[*kinds][1:]]), None)


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
    return None if _overall(evaluation, best).mean is None else best


def _overall(evaluation: Evaluation, method: MethodResult) -> Summary:
    """The primary metric of a method over all groups."""
    return method.slices[ALL].summaries[evaluation.primary]


def competitor_of(evaluation: Evaluation) -> str | None:
    """The method that the best one is compared with: the baseline, or the next best if the baseline is the best."""
    best = best_of(evaluation)
    if best is None or not evaluation.leads:
        return None
    if evaluation.baseline in evaluation.leads:
        return evaluation.baseline
    return max(evaluation.leads, key=lambda name: (name != AS_SHOWN, evaluation.leads[name].difference))


def is_shown(comparison: Comparison) -> bool:
    """Whether a difference from 0 is beyond chance, adjusted for the comparisons that were made."""
    return comparison.p_holm is not None and comparison.p_holm < _SURE


def _on_the_best(evaluation: Evaluation, best: MethodResult) -> str:
    summary, test = _overall(evaluation, best), evaluation.test
    periods = " to ".join(dict.fromkeys([test.periods[0], test.periods[-1]]))
    basis = f"over {summary.groups:,} query groups of {periods}"
    figure = f"{metric_label(evaluation.primary)} {cell(summary)} {basis}"
    if len(evaluation.methods) == 1:
        return f"{best.name} is the only method: {figure}. Alone it is neither good nor bad."
    equal = [name for name, lead in evaluation.leads.items() if lead.difference == 0 and name != AS_SHOWN]
    if equal:
        return f"{_listed([best.name, *equal])} rank equally well: {figure}."
    return f"{best.name} ranks best: {figure}."


def _ahead(evaluation: Evaluation, best: MethodResult) -> Iterator[str]:
    """How far the best is ahead of the best trees or networks, of the baseline, and of the next best."""
    ahead = sorted(evaluation.leads, key=lambda name: -evaluation.leads[name].difference)
    of_trees = [m.name for m in evaluation.methods if m.kinds == {"trees"}]
    others = {
        "trees": None if best.name in of_trees else next((name for name in ahead if name in of_trees), None),
        "the baseline": evaluation.baseline,
        "the next best": next((name for name in ahead if name != AS_SHOWN), None),
    }
    leads: dict[str, str] = {}  # by method: one with both roles is named once
    for role, name in others.items():
        if name in evaluation.leads and name not in leads and evaluation.leads[name].difference < 0:
            leads[name] = f"{_lead(evaluation, best, name)} {role}" + ("" if name == role else f" ({name})")
    if leads:
        yield f"It is ahead by {_listed(list(leads.values()), 'and by')}."


def _lead(evaluation: Evaluation, best: MethodResult, name: str) -> str:
    """`.0200 [.0100, .0300] (+4.0%) over`."""
    lead = _turned(evaluation.leads[name])
    base = (_overall(evaluation, best).mean or 0.0) - lead.difference
    percent = f" ({lead.difference / base:+.1%})" if base > 0 else ""
    return f"{cell(lead.figure)}{percent} over"


def _shown(evaluation: Evaluation, best: MethodResult) -> Iterator[str]:
    """The order shown, as a reference, compared with the best method."""
    if (lead := evaluation.leads.get(AS_SHOWN)) is None:
        return
    where, lead = ("behind", _turned(lead)) if lead.difference < 0 else ("ahead of", lead)
    by = f"{cell(lead.figure)} {where} {best.name}" if lead.difference else f"level with {best.name}"
    chance = "" if is_shown(lead) or lead.p_holm is None else ", perhaps by chance"
    yield (
        f"What was shown ({AS_SHOWN}) is {by}{chance}. It is only a reference: labels of people who saw it, "
        "such as clicks, favour it."
    )


def _corrected(evaluation: Evaluation) -> Iterator[str]:
    """Which method is best after labels are corrected for positions."""
    if evaluation.corrected is None:
        return
    k = int(evaluation.primary.rpartition("@")[2])
    shares = {m.name: m.corrected[k] for m in evaluation.corrected.methods if m.corrected[k].mean is not None}
    if not shares:
        return
    first = max(shares, key=lambda name: shares[name].mean or 0.0)
    others = "" if first == AS_SHOWN or AS_SHOWN not in shares else f", what was shown {cell(shares[AS_SHOWN].mean)}"
    yield f"Corrected for positions, {first} is best: share@{k} {cell(shares[first])}{others}."


def _sure(evaluation: Evaluation) -> Iterator[str]:
    """Which leads are beyond chance, and over which samples."""
    if not evaluation.leads:
        return
    competitors = {name: lead for name, lead in evaluation.leads.items() if name != AS_SHOWN}
    judged = {name: lead for name, lead in competitors.items() if lead.p_holm is not None}
    shown = [name for name, lead in judged.items() if is_shown(lead)]
    if len(shown) == len(competitors) > 1:
        yield "Its lead over every other method is more than chance."
    elif shown:
        yield f"More than chance is its lead over {_listed(shown)}."
    if open_ := [f"{name} (p {cell(judged[name].p_holm)})" for name in judged if name not in shown]:
        yield f"It cannot be distinguished from {_listed(open_)}: their order may be chance."
    if few := [f"{name}, {lead.draws}" for name, lead in evaluation.leads.items() if lead.p_holm is None]:
        yield f"Fewer than {FEWEST_DRAWS} shared draws of labels judge nothing ({_listed(few, '; ')})."
    draws = [lead.draws for lead in evaluation.leads.values() if lead.p_holm is not None]
    if 1 in draws:
        yield (
            "There is one draw of labels: this holds for other queries, not for models trained on other labels or from "
            f"another seed, which {FEWEST_DRAWS} draws would judge."
        )
    elif draws:
        yield f"{min(draws)} draws of labels and the query groups are both samples: this holds for others of either."


def _worth(evaluation: Evaluation) -> Iterator[str]:
    """Which method is best by the value of documents, such as revenue, where gains are set."""
    metric = gain_metric(evaluation)
    if metric is None:
        return
    best = by_mean(evaluation.methods, metric)[0]
    summary, lead = best.slices[ALL].summaries[metric], best.slices[ALL].comparisons.get(metric)
    if summary.mean is not None:
        over = "" if lead is None else f", {with_interval(lead)} over {evaluation.baseline}"
        figure = f"{metric_label(metric)} {cell(summary)}{over}"
        yield f"By what documents bring, their gains, {best.name} ranks best: {figure}."


def gain_metric(evaluation: Evaluation) -> str | None:
    """The primary metric with the gains that the evaluation names, such as revenue; None where it names none."""
    name = f"gain_{evaluation.primary}"
    return name if name in evaluation.methods[0].slices[ALL].summaries else None


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
        and scope.summaries[evaluation.primary].groups >= FEW_GROUPS
        and (c := scope.comparisons.get(evaluation.primary)) is not None
    }
    if not judged:
        yield f"No slice has {FEW_GROUPS} groups with the metric, so that it is not known on whom it is worse."
        return
    behind = sorted((name for name, (lead, _) in judged.items() if lead < 0), key=lambda name: judged[name][0])
    shown = [name for name in behind if is_shown(judged[name][1])]
    of_slices = f"Of {len(judged)} slice{'s' if len(judged) > 1 else ''} with at least {FEW_GROUPS} groups it is"
    if not behind:
        yield f"{of_slices} behind {competitor} on none."
    if shown:
        yield f"{of_slices} worse than {competitor} beyond chance on {_first_named(shown, judged)}."
    if chance := [name for name in behind if name not in shown]:
        yield f"{of_slices} behind {competitor}, perhaps by chance, on {len(chance)}: {_first_named(chance, judged)}."


def _first_named(names: Sequence[str], judged: dict[str, tuple[float, Comparison]]) -> str:
    unnamed = [f"{len(names) - _SLICES_NAMED} more"] if len(names) > _SLICES_NAMED else []
    return _listed([f"{name} ({judged[name][0]:+.4f})" for name in names[:_SLICES_NAMED]] + unnamed)


def _listed(texts: Sequence[str], last: str = "and") -> str:
    """The texts with commas between them, and a word before the last."""
    *before, end = texts
    return f"{', '.join(before)} {last} {end}" if before else end
