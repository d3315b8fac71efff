"""Metrics in words and tables, in the same form for all reports."""

from collections.abc import Iterable, Mapping

from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.statistics.summarise import PATTERNS, Comparison, Scope
from ltrscale.late import Late
from ltrscale.ranking.choices import metric_class, metric_label
from ltrscale.ranking.metric import Name
from ltrscale.reports.document import Table, TableRow, cell
from ltrscale.reports.findings import Findings

special = Late("scipy.special")

_SKEWED = 5
"""Number of skewed differences that a report names."""
_LETOR_PREFIX = "letor_"
"""Prefix of the names of metrics under LETOR's policy."""


class ComparedMethods(Findings):
    """Findings that compare methods by the same metrics."""

    baseline: str | None
    primary: str
    """The metric of the comparison column and the picture."""
    leave_out_constant: bool
    """Whether groups of equal labels are left out of the means."""
    policies: dict[str, str]
    """What the formula of each metric leaves open, such as ties."""
    resamples: int
    """Bootstrap resamples of intervals."""


def definitions(policies: Mapping[str, str], *, leave_out_constant: bool) -> list[str]:
    """Definitions and policies of the metrics, in one or two sentences each."""
    kinds = {str(Name.parsed(metric)._replace(k=None)): policy for metric, policy in policies.items()}
    labels_of_policy: dict[str, list[str]] = {}
    for kind, policy in kinds.items():
        labels_of_policy.setdefault(policy, []).append(metric_label(kind))
    lines = [
        " ".join(cls.definition for cls in dict.fromkeys(map(metric_class, kinds)) if cls.definition),
        *(f"{', '.join(labels)}: {policy}." for policy, labels in labels_of_policy.items()),
        "A group without a relevant document leaves a metric undefined: it is left out of the mean and counted.",
    ]
    if leave_out_constant:
        lines[-1] += " So is a group whose labels are all equal, where any order is as good."
    if any(kind.startswith(_LETOR_PREFIX) for kind in kinds):
        lines.append(
            "The above is our policy, expected; LETOR figures follow LETOR 4.0's evaluation script (letor4), for "
            "comparison with published figures only. MeanNDCG is the mean of NDCG at all ranks of the list."
        )
    return lines


def cutoffs(metrics: Iterable[str]) -> list[str]:
    """The metrics of a table of methods: NDCG at each cut-off, and all under LETOR's policy."""
    return [name for name in metrics if name.startswith(("ndcg@", _LETOR_PREFIX))]


def with_error(mean: float | None, std_error: float | None) -> str:
    """A mean, with its standard error if it has one."""
    return cell(mean) + ("" if std_error is None else f" ± {std_error:.4f}")


def with_interval(comparison: Comparison | None) -> str:
    """The difference from the baseline with its interval; a dash for the baseline itself."""
    if comparison is None:
        return "-"
    return cell(comparison.figure, "+.4f") + (" (cannot judge)" if comparison.low is None else "")


def columns_against(metric: str, baseline: str | None, scope: Scope) -> TableRow:
    """The difference from the baseline and its adjusted p value, by column; none without a baseline."""
    if baseline is None:
        return {}
    c = scope.comparisons.get(metric)
    return {f"{metric_label(metric)} - {baseline} [95%]": with_interval(c), "p": None if c is None else c.p_holm}


def verdicts(comparisons: Mapping[str, Comparison | None]) -> list[str]:
    """What the draws of labels cannot show: a line if they are too few, and one if more look skewed than chance gives.

    Example:
        >>> few = Comparison(difference=0.1, low=None, high=None, p=None, p_holm=None, draws=3)
        >>> verdicts({"trees": None, "network": few})
        ['Cannot judge: fewer than 5 shared draws of labels (network 3); add seeds.']
    """
    compared = {name: c for name, c in comparisons.items() if c is not None}
    few = [f"{name} {c.draws}" for name, c in compared.items() if c.draws != 1 and c.draws < FEWEST_DRAWS]
    lines = [f"Cannot judge: fewer than {FEWEST_DRAWS} shared draws of labels ({', '.join(few)}); add seeds."]
    judged = {name: c.skewed for name, c in compared.items() if c.draws >= FEWEST_DRAWS}
    return [*(lines if few else []), *skewed_draws(judged)]


def skewed_draws(skewed: Mapping[str, bool]) -> list[str]:
    """A line if more differences look skewed than chance explains in 19 of 20 reports; keys name the differences.

    By chance one in 20 looks skewed (`Means.skewed_M`); their number is binomial if they are independent.
    """
    count = sum(skewed.values())
    if not count or special.bdtrc(count - 1, len(skewed), 0.05) > 0.05 + 1e-9:
        return []
    names = [name for name, is_skewed in skewed.items() if is_skewed]
    shown = ", ".join(names[:_SKEWED]) + (", ..." if count > _SKEWED else "")
    return [
        f"Draws of labels look skewed in {count} of {len(skewed)} differences ({shown}). If they are, intervals cover "
        "less than 95%: about 89% with five exponential draws, 92% with ten and 94% with twenty. Add draws."
    ]


def how_to_read(judged: ComparedMethods, scopes: Iterable[Scope]) -> list[str]:
    """Definitions of the metrics, and how the intervals and p values of these scopes were made."""
    stated = definitions(judged.policies, leave_out_constant=judged.leave_out_constant)
    return [*stated, *_how_intervals(scopes, judged.resamples)]


def _how_intervals(scopes: Iterable[Scope], resamples: int) -> list[str]:
    """How intervals and p values were made, for the kinds that occur, and what they generalise to."""
    scopes = list(scopes)
    summaries = [next(iter(scope.summaries.values())).draws for scope in scopes]
    compared = [c.draws for scope in scopes for c in scope.comparisons.values()]
    lines = []
    if 1 in (*summaries, *compared):
        lines.append(
            f"With one draw of labels, intervals are percentiles of {resamples:,} bootstrap resamples of query groups, "
            f"and p is that of the paired sign-flip test with as many patterns, at least {PATTERNS} for each "
            "comparison it is adjusted with; below about 30 groups both say little. They speak of these labels only."
        )
    if any(draws > 1 for draws in (*summaries, *compared)):
        lines.append(
            "With several draws of labels, draws and groups both count as samples: intervals and p are those of "
            "Student's t with their crossed variance, and speak of other labels and other queries. Fewer than "
            f"{FEWEST_DRAWS} draws judge nothing. A method of one draw is compared, as it is, with every draw."
        )
    if compared:
        lines.append("p is adjusted for the number of methods by Holm.")
    return lines


def metric_table(scopes: Mapping[str, Mapping[str, Scope]], baseline: str | None) -> Table:
    """A row for each metric of each method: mean, counts, undefined groups as 0 and as 1, and the comparison.

    `scopes` are results by the name of the groups and the name of the method.
    """
    rows: list[TableRow] = []
    for groups, of_methods in scopes.items():
        for metric in next(iter(of_methods.values())).summaries:
            for method, scope in of_methods.items():
                s, c = scope.summaries[metric], scope.comparisons.get(metric)
                row: TableRow = {"groups": groups, "metric": metric_label(metric), "method": method, "mean [95%]": s}
                row |= {"std. error": s.std_error, "draws": s.draws, "defined": s.groups, "undefined": s.undefined}
                row |= {"with 0": s.as_zero, "with 1": s.as_one if metric_class(metric).normalised else None}
                if c is not None:
                    row |= {f"- {baseline} [95%]": with_interval(c), "p": c.p, "p (Holm)": c.p_holm}
                    row |= {"shared draws": c.draws, "detectable": c.detectable}
                rows.append(row)
    return Table.from_rows(rows)
