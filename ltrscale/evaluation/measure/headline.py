"""What an evaluation says in a few sentences: the best model against what serves, how sure that is, where it is behind.

Every sentence uses figures that the evaluation has committed. Differences from the best method are those of
`Evaluation.leads`; in slices they are from the baseline. The order shown is only a reference.
"""

from collections.abc import Iterator, Sequence

from ltrscale.evaluation.measure.report import Evaluation, MethodResult
from ltrscale.evaluation.measure.settings import AS_SHOWN, PRODUCTION
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.statistics.summarise import Comparison, Summary
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.document import cell, span

FEW_GROUPS = 100
"""With fewer groups that define the metric, nothing is stated about a slice."""
_SLICES_NAMED = 3
_SURE = 0.05


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
        and scope.summaries[evaluation.primary].groups >= FEW_GROUPS
        and (c := scope.comparisons.get(evaluation.primary)) is not None
    }
    if not judged:
        yield f"No slice has {FEW_GROUPS} groups with the metric, so that it is not known on whom it is worse."
        return
    behind = sorted((name for name, (lead, _) in judged.items() if lead < 0), key=lambda name: judged[name][0])
    worse = [name for name in behind if is_beyond_chance(judged[name][1])]
    of_slices = f"Of {len(judged)} slice{'s' if len(judged) > 1 else ''} with at least {FEW_GROUPS} groups it is"
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
