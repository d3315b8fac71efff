"""The results of an offline interleaving, and their report."""

from collections.abc import Iterator
from typing import ClassVar

from ltrscale.config import Config
from ltrscale.evaluation.pages import number
from ltrscale.evaluation.statistics.lift import Difference, MeasureAgreement
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Chart, Document, Points, Section, Table, Text
from ltrscale.reports.findings import Findings
from ltrscale.simulate.users import User


class InterleavedPair(Config):
    """Two rankers by one method."""

    credit: tuple[float, float]
    """Mean credit of both rankers for an impression; of `separate`, clicks on a list of the ranker alone."""
    lift: Difference
    """See `ltrscale.evaluation.statistics.lift.lift`."""
    needed: float | None
    """Impressions until the difference is found with the power that was asked for; None for no difference at all."""


class RankerPair(Config):
    """Two rankers."""

    one: str
    other: str
    metric: Difference
    """Of the offline metric, the first ranker's minus the second's, over groups that define it."""
    methods: dict[str, InterleavedPair]


class Interleaved(Findings):
    """`metrics.json` of an offline interleaving."""

    called: ClassVar = "an interleaving"
    made_by_job: ClassVar = "jobs.interleave"
    rankers: dict[str, str]
    """The bundle or scores of each ranker."""
    means: dict[str, float]
    """The offline metric of each ranker; empty if no group defines it."""
    pairs: tuple[RankerPair, ...]
    agreement: dict[str, MeasureAgreement]
    """Of the offline metric with the lift by each method, over pairs."""
    data: tuple[str, ...]
    groups: int
    defined: int
    """Groups that define the offline metric."""
    documents: int
    impressions: int
    user: User
    noise: float
    depth: int | None
    eta: float
    metric: str
    power: float


def _difference(difference: Difference, form: str) -> str:
    if difference.mean is None:
        return "-"
    if difference.low is None or difference.high is None:
        return f"{difference.mean:{form}}"
    return f"{difference.mean:{form}} [{difference.low:{form}}, {difference.high:{form}}]"


def document(found: Interleaved) -> Document:
    """The report: a row for each pair and method, and how far the methods agree with the metric."""
    label = metric_label(found.metric)
    opening = (
        Text(
            f"Test data: {', '.join(found.data)}; {found.groups:,} labelled query groups, {found.documents:,} "
            f"documents, {found.impressions:,} impressions for each pair and method. {label} is defined in "
            f"{found.defined:,} of the groups."
        ),
        Table(["ranker", label, "from"], [[n, number(found.means.get(n)), url] for n, url in found.rankers.items()]),
        _pairs(found),
        Chart(lift_chart(found), "lift of each pair by each method, and impressions needed", "lift"),
    )
    sections = (
        Section(f"Agreement of {label} with the lift", [_agreements(found)]),
        Section("How to read the tables", [Points(list(_explanations(found)))]),
    )
    return Document("Interleaving", opening, sections)


def _pairs(found: Interleaved) -> Table:
    """A row for each pair and method."""
    header = ["pair", f"{metric_label(found.metric)} [95%]", "method", "credit", "lift [95%]", "p", "needed"]
    rows = [
        [
            f"{pair.one} - {pair.other}",
            _difference(pair.metric, "+.4f"),
            method,
            " : ".join(f"{credit:.4f}" for credit in compared.credit),
            _difference(compared.lift, "+.1%"),
            number(compared.lift.p),
            "-" if compared.needed is None else f"{compared.needed:,.0f}",
        ]
        for pair in found.pairs
        for method, compared in pair.methods.items()
    ]
    return Table(header, rows)


def _agreements(found: Interleaved) -> Table:
    """A row for each method: how often the metric and the lift prefer the same ranker."""
    header = ["method", "pairs", "same ranker", "both significant", "same ranker of these", "correlation"]
    rows = [
        [method, *map(str, (a.pairs, a.same, a.significant, a.significant_same)), number(a.correlation)]
        for method, a in found.agreement.items()
    ]
    return Table(header, rows)


def _explanations(found: Interleaved) -> Iterator[str]:
    user = found.user
    depth = "the whole list" if found.depth is None else f"the first {found.depth} positions"
    yield (
        f"A simulated user sees {depth}, {user.examines}, and clicks an examined document with {found.noise:g} + "
        f"{1 - found.noise:g} times the probability of its grade{user.trusts}."
    )
    yield (
        "credit is that of both rankers for a mean impression, lift the difference as a share of their mean, so that "
        "exchanging the rankers negates it. Its interval and p are those of Student's t over query groups: they speak "
        "of other queries."
    )
    yield (
        f"needed is the number of impressions until a two-sided test at 5% finds the difference with a power of "
        f"{found.power:.0%}, if it is the true one; it says little where the interval of the lift includes 0."
    )
    yield (
        "team_draft prefers nobody if users click at random, balanced may. debiased shows the lists of balanced, and "
        "estimates the clicks on the first documents of each ranker's own list, without bias for users who examine "
        f"position p with p^-{found.eta:g}{user.beyond_credit}."
    )
    yield (
        "separate shows each user the list of one ranker, as an A/B test does: its lift is the one that the others are "
        "to predict, and its interval is narrower than an A/B test's, because both lists are shown to the same users."
    )
    yield (
        "The agreement counts the pairs on which metric and lift prefer the same ranker, and the same of those whose "
        "intervals both exclude 0. The correlation is that of the differences, without centring."
    )


def lift_chart(found: Interleaved) -> charts.Spec:
    """A row for each pair and method: the lift with its interval, and the impressions needed."""
    lifts, needed = [], []
    for pair in found.pairs:
        for method, compared in pair.methods.items():
            row = {"name": f"{pair.one} - {pair.other}: {method}", "series": method}
            lifts.append(charts.interval_row(row["name"], compared.lift, series=method))
            if compared.needed:
                needed.append({**row, "mean": compared.needed})
    parts = [charts.interval_chart(lifts, title="lift and its 95% interval", at=0.0, unit="%")]
    if needed:
        title = f"impressions needed for a power of {found.power:.0%}"
        parts.append(charts.interval_chart(needed, title=title, log=True, unit="~s"))
    return charts.chart_row(*parts)
