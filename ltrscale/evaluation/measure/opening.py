"""The opening of a report in words: which method is best, against what is shown and trees, how sure, and on whom not.

Every sentence is made of figures that the evaluation has committed. Differences from the best method are those of
`Evaluation.leads`, in slices those from the baseline.
"""

from collections.abc import Iterator, Sequence

from ltrscale.evaluation.measure.report import Evaluation, MethodResult
from ltrscale.evaluation.measure.settings import AS_SHOWN
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.pages import estimated, number
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.statistics.summarise import Comparison, Summary
from ltrscale.ranking.choices import metric_label

FEW_GROUPS = 100
"""With fewer groups that have the metric, nothing is stated about a slice."""
_SLICES_NAMED = 3
_SURE = 0.05


def opening(evaluation: Evaluation) -> list[str]:
    """A few sentences on an evaluation: the best method, how sure that is, and on which slices it is behind."""
    best = best_of(evaluation)
    if best is None:
        return [f"No group defines {metric_label(evaluation.primary)}, so nothing can be said; evaluate other periods."]
    after = [*_ahead(evaluation, best), *_corrected(evaluation), *_sure(evaluation), *_behind(evaluation, best)]
    return [_on_the_best(evaluation, best), *after]


def best_of(evaluation: Evaluation) -> MethodResult | None:
    """The method with the highest mean, the first of equal ones; None if no group defines the metric."""
    defined = [method for method in evaluation.methods if overall(evaluation, method).mean is not None]
    return max(defined, key=lambda method: overall(evaluation, method).mean or 0.0, default=None)


def overall(evaluation: Evaluation, method: MethodResult) -> Summary:
    """The primary metric of a method over all groups."""
    return method.slices[ALL].summaries[evaluation.primary]


def rival_of(evaluation: Evaluation) -> str | None:
    """The method that the best one is measured by: the baseline, or the next best where that is the best itself."""
    best = best_of(evaluation)
    if best is None or not evaluation.leads:
        return None
    if evaluation.baseline in evaluation.leads:
        return evaluation.baseline
    return max(evaluation.leads, key=lambda name: evaluation.leads[name].difference)


def is_shown(comparison: Comparison) -> bool:
    """Whether a difference is other than 0 beyond chance, adjusted for the comparisons that were made."""
    return comparison.p_holm is not None and comparison.p_holm < _SURE


def _on_the_best(evaluation: Evaluation, best: MethodResult) -> str:
    summary, test = overall(evaluation, best), evaluation.test
    periods = " to ".join(dict.fromkeys([test.periods[0], test.periods[-1]]))
    basis = f"over {summary.groups:,} query groups of {periods}"
    figure = f"{metric_label(evaluation.primary)} {estimated(summary, '.4f')} {basis}"
    if len(evaluation.methods) == 1:
        return f"{best.name} is the only method: {figure}. Alone it is neither good nor bad."
    equal = [name for name, lead in evaluation.leads.items() if lead.difference == 0]
    if equal:
        return f"{_listed([best.name, *equal])} rank equally well: {figure}."
    if best.name == AS_SHOWN:
        return f"No method ranks better than what was shown ({AS_SHOWN}): {figure}. Its labels favour it."
    return f"{best.name} ranks best: {figure}."


def _ahead(evaluation: Evaluation, best: MethodResult) -> Iterator[str]:
    """How far the best is ahead of what was shown, of the best trees or networks, and of the next best."""
    ahead = sorted(evaluation.leads, key=lambda name: -evaluation.leads[name].difference)
    of_trees = [m.name for m in evaluation.methods if set(m.kinds) == {"trees"}]
    others = {
        "what was shown": next((name for name in ahead if name == AS_SHOWN), None),
        "trees": None if best.name in of_trees else next((name for name in ahead if name in of_trees), None),
        "the baseline": evaluation.baseline,
        "the next best": next((name for name in ahead if name != AS_SHOWN), None),
    }
    leads: dict[str, str] = {}  # by method: one that has both roles is named once
    for role, name in others.items():
        if name in evaluation.leads and name not in leads and evaluation.leads[name].difference:
            leads[name] = f"{_lead(evaluation, best, name)} {role}" + ("" if name in (AS_SHOWN, role) else f" ({name})")
    if leads:
        yield f"It is ahead by {_listed(list(leads.values()), 'and by')}."


def _lead(evaluation: Evaluation, best: MethodResult, name: str) -> str:
    """`.0200 [.0100, .0300] (+4.0%) over`."""
    lead = evaluation.leads[name]
    ends = "" if lead.low is None or lead.high is None else f" [{number(-lead.high)}, {number(-lead.low)}]"
    base = (overall(evaluation, best).mean or 0.0) + lead.difference
    percent = f" ({-lead.difference / base:+.1%})" if base > 0 else ""
    return f"{number(-lead.difference)}{ends}{percent} over"


def _corrected(evaluation: Evaluation) -> Iterator[str]:
    """Which method is best once labels are corrected for the positions at which documents were shown."""
    if evaluation.corrected is None:
        return
    k = int(evaluation.primary.rpartition("@")[2])
    shares = {m.name: m.corrected[k] for m in evaluation.corrected.methods if m.corrected[k].mean is not None}
    if not shares:
        return
    first = max(shares, key=lambda name: shares[name].mean or 0.0)
    others = "" if first == AS_SHOWN or AS_SHOWN not in shares else f", what was shown {number(shares[AS_SHOWN].mean)}"
    yield f"Corrected for positions, {first} is best: share@{k} {estimated(shares[first], '.4f')}{others}."


def _sure(evaluation: Evaluation) -> Iterator[str]:
    """Which leads are more than chance, and over what samples."""
    if not evaluation.leads:
        return
    few = {name: lead.draws for name, lead in evaluation.leads.items() if lead.p_holm is None}
    judged = {name: lead for name, lead in evaluation.leads.items() if lead.p_holm is not None}
    shown = [name for name, lead in judged.items() if is_shown(lead)]
    if len(shown) == len(evaluation.leads) > 1:
        yield "Its lead over every other method is more than chance."
    elif shown:
        yield f"More than chance is its lead over {_listed(shown)}."
    if open_ := [f"{name} (p {number(judged[name].p_holm)})" for name in judged if name not in shown]:
        yield f"It cannot be told from {_listed(open_)}: their order may be chance."
    if few:
        draws_by_name = _listed([f"{name}, {draws}" for name, draws in few.items()], "; ")
        yield f"Fewer than {FEWEST_DRAWS} shared draws of labels judge nothing ({draws_by_name})."
    if 1 in [lead.draws for lead in judged.values()]:
        yield (
            "There is one draw of labels: this holds for other queries, not for models trained on other labels or from "
            f"another seed, which {FEWEST_DRAWS} draws would judge."
        )
    elif judged:
        draws = min(lead.draws for lead in judged.values())
        yield f"{draws} draws of labels and the query groups are both samples: this holds for others of either."


def _behind(evaluation: Evaluation, best: MethodResult) -> Iterator[str]:
    """The slices on which the best method is behind the baseline; or another ahead of it, where it is the baseline."""
    rival = rival_of(evaluation)
    if evaluation.baseline is None or rival is None:
        return
    compared = rival if best.name == evaluation.baseline else best.name
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
        yield f"{of_slices} behind {rival} on none."
    if shown:
        yield f"{of_slices} worse than {rival} beyond chance on {_first_named(shown, judged)}."
    if chance := [name for name in behind if name not in shown]:
        yield f"{of_slices} behind {rival}, perhaps by chance, on {len(chance)}: {_first_named(chance, judged)}."


def _first_named(names: Sequence[str], judged: dict[str, tuple[float, Comparison]]) -> str:
    unnamed = [f"{len(names) - _SLICES_NAMED} more"] if len(names) > _SLICES_NAMED else []
    return _listed([f"{name} ({judged[name][0]:+.4f})" for name in names[:_SLICES_NAMED]] + unnamed)


def _listed(texts: Sequence[str], last: str = "and") -> str:
    """The texts with commas between them, and a word before the last.

    Example:
        >>> _listed(["a"]), _listed(["a", "b", "c"])
        ('a', 'a, b and c')
    """
    *before, end = texts
    return f"{', '.join(before)} {last} {end}" if before else end
