"""The results of an offline interleaving, and their report."""

from collections.abc import Iterator
from typing import ClassVar

from ltrscale.config import Strict
from ltrscale.evaluation.impressions import MeasureAgreement
from ltrscale.evaluation.statistics.crossed import Difference
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Points, Section, Table, Text, cell
from ltrscale.reports.findings import Findings
from ltrscale.simulate.users import User


class InterleavedPair(Strict):
    """Two rankers by one method."""

    credit: tuple[float, float]
    """Mean credit of both rankers for an impression; for `separate`, clicks on the ranker's own list."""
    lift: Difference
    """Relative difference in credit, first ranker minus second."""
    needed: float | None
    """Impressions until the difference is found with the required power; None for no difference at all."""


class RankerPair(Strict):
    """Two rankers."""

    one: str
    other: str
    metric: Difference
    """Difference in the offline metric, first ranker minus second, over the groups that define it."""
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
    """Agreement of the offline metric with the lift of each method, over pairs."""
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


def document(result: Interleaved) -> Document:
    """The report: a row for each pair and method, and how far the methods agree with the metric."""
    label = metric_label(result.metric)
    opening: tuple[Block, ...] = (
        Text(
            f"Test data: {', '.join(result.data)}; {result.groups:,} labelled query groups, {result.documents:,} "
            f"documents, {result.impressions:,} impressions for each pair and method. {label} is defined in "
            f"{result.defined:,} of the groups."
        ),
        Table.from_rows(
            [{"ranker": name, label: result.means.get(name), "from": url} for name, url in result.rankers.items()]
        ),
        _table_of_pairs(result),
        _chart(result),
    )
    agreements = [
        {
            "method": method,
            "pairs": a.pairs,
            "same ranker": a.same,
            "both significant": a.significant,
            "same ranker of these": a.significant_same,
            "correlation": a.correlation,
        }
        for method, a in result.agreement.items()
    ]
    sections = (
        Section(f"Agreement of {label} with the lift", [Table.from_rows(agreements)]),
        Section("How to read the tables", [Points(list(_explanations(result)))]),
    )
    return Document("Interleaving", opening, sections)


def _table_of_pairs(result: Interleaved) -> Table:
    return Table.from_rows(
        [
            {
                "pair": f"{pair.one} - {pair.other}",
                f"{metric_label(result.metric)} [95%]": cell(pair.metric, "+.4f"),
                "method": method,
                "credit": " : ".join(map(cell, compared.credit)),
                "lift [95%]": cell(compared.lift, "+.1%"),
                "p": compared.lift.p,
                "needed": cell(compared.needed, ",.0f"),
            }
            for pair in result.pairs
            for method, compared in pair.methods.items()
        ]
    )


def _explanations(result: Interleaved) -> Iterator[str]:
    user = result.user
    depth = "the whole list" if result.depth is None else f"the first {result.depth} positions"
    yield (
        f"A simulated user sees {depth}, {user.examines}, and clicks an examined document with {result.noise:g} + "
        f"{1 - result.noise:g} times the probability of its grade{user.trusts}."
    )
    yield (
        "credit is that of both rankers for a mean impression, lift the difference as a share of their mean, with an "
        f"interval over query groups. needed are the impressions that find it with a power of {result.power:.0%}, if "
        "it is the true one."
    )
    yield (
        "debiased estimates the clicks on each ranker's own list, without bias for users who examine position p with "
        f"p^-{result.eta:g}{user.beyond_credit}. separate shows each user the list of one ranker, as an A/B test does: "
        "its lift is the one that the others are to predict. docs/methods.md defines all four."
    )


def _chart(result: Interleaved) -> Chart:
    """A row for each pair and method: the lift with its interval."""
    rows = [
        charts.interval_row(f"{pair.one} - {pair.other}: {method}", compared.lift, series=method)
        for pair in result.pairs
        for method, compared in pair.methods.items()
    ]
    spec = charts.interval_chart(rows, title="lift and its 95% interval", at=0.0, unit="%")
    return Chart(spec, "lift of each pair by each method", "lift")
