"""The results of looking at a click log, and their report."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from ltrscale.config import Strict
from ltrscale.evaluation.statistics.crossed import Difference
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Figure, Points, Section, Table, TableRow, Text, cell
from ltrscale.reports.findings import Findings


class Exposure(Strict):
    """Counts over all groups; those by position start with the first position."""

    groups: int
    unusable: int
    """Groups without positions, clicks or document ids; no other count includes them."""
    doubled: int
    """Groups with two documents at one position; no session includes them."""
    below: int
    """Documents shown below the depth."""
    clicked_below: int
    shown: tuple[int, ...]
    clicked: tuple[int, ...]
    last: tuple[int, ...]
    """Groups by the position of their last click."""
    clicks: tuple[int, ...]
    """Groups with 0, 1, 2, 3, and at least 4 clicks."""


class Links(Strict):
    """How positions overlap."""

    pairs: int
    """Pairs of query and document."""
    several: int
    """Pairs shown at several positions."""
    impressions: float
    """Share of these pairs in what was shown."""
    pairs_per_link: int
    links: tuple[tuple[int, ...], ...]
    """Pairs shown at both of two positions."""
    parts: tuple[tuple[int, ...], ...]
    """Positions, split into parts that no link connects."""

    @property
    def connected(self) -> bool:
        """Whether relevance and position can be separated."""
        return len(self.parts) == 1 and len(self.parts[0]) > 1


Way = Literal["harvested", "em", "ratio"]
"""How propensities were estimated."""


class Propensities(Strict):
    """Propensities by position, relative to the first, estimated in three ways."""

    ratio: tuple[Figure, ...]
    """Ratio of the shares of clicks."""
    harvested: tuple[Figure, ...] | None = None
    """Intervention harvesting; None where positions do not overlap."""
    em: tuple[Figure, ...] | None = None
    """EM of a position-based model; None as for `harvested`, or if too few documents were shown often enough."""

    def by(self, way: Way) -> tuple[Figure, ...] | None:
        """The propensities estimated in this way, if there are any."""
        return {"harvested": self.harvested, "em": self.em, "ratio": self.ratio}[way]


class Trust(Strict):
    """Whether clicks on poor documents fall faster with the position than clicks on good ones."""

    judged_by: str
    """What separates good documents from poor ones: a column of expert labels, or `clicks` of half of the sessions."""
    harvested: bool
    """Whether both curves are harvested; otherwise they are click ratios, which mix order and examination."""
    good: int
    poor: int
    slope: Figure
    """Slope of the log ratio of the curves over the log position: 0 for position bias alone, below 0 for trust."""

    @property
    def verdict(self) -> str:
        """The verdict of the interval."""
        if self.slope.low is None or self.slope.high is None:
            return "cannot judge: too few clicks on one of both kinds of documents"
        if self.slope.high < 0:
            return "a sign of trust bias: clicks on poor documents fall faster"
        return "no sign of trust bias"


class ModelResult(Strict):
    """A click model on the held-out part, and its order of documents on expert labels."""

    name: str
    perplexity: float | None = None
    """Perplexity of clicks, before the list is looked at; None if nothing was held out."""
    conditional: float | None = None
    """Perplexity of clicks, given the clicks above."""
    positions: tuple[float | None, ...] = ()
    """`perplexity` by position."""
    ndcg: Difference | None = None
    """NDCG of expert labels in the model's order, over queries; None without labels, or if it has no order."""


class UnderstoodLog(Findings):
    """`metrics.json` of a look at a click log."""

    called: ClassVar = "a look at a click log"
    made_by_job: ClassVar = "jobs.clicks"
    data: tuple[str, ...]
    sessions: int
    """Groups of the log that are in memory."""
    held_out: int
    """Groups on which click models are judged."""
    queries: int
    share: float
    """Share of the queries that was drawn."""
    labels: str | None
    """Column of expert labels."""
    relevant_from: float
    ndcg_at: int
    impressions_per_pair: int
    exposure: Exposure
    links: Links
    propensities: Propensities
    trust: Trust | None
    """None where neither labels nor overlapping positions separate good documents from poor ones."""
    models: tuple[ModelResult, ...]

    @property
    def refusal(self) -> str | None:
        """Why there are no harvested propensities, and the remedy; None if there are some."""
        if self.links.connected:
            return None
        if len(self.links.parts) < 2:
            return "Cannot estimate propensities: the log shows one position only. Log the position of each document."
        why = "no document of a query was shown at two positions"
        if self.links.several:
            parts = "; ".join(_range(part) for part in self.links.parts)
            why = f"too few documents were shown at positions of two of these parts: {parts}"
        first = self.links.parts[0]
        depth = f", or set depth to {len(first)}" if len(first) > 1 and first[-1] == len(first) else ""
        return (
            f"Cannot tell relevance from position: {why}, so no propensities by harvesting or EM. Swap neighbours at "
            f"random for a share of the traffic, or add periods or a data set with another ranking{depth}."
        )


def _range(part: Sequence[int]) -> str:
    """Positions in short, such as 1-3, 5."""
    runs: list[list[int]] = []
    for position in part:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _by_way(findings: UnderstoodLog) -> dict[str, tuple[Figure, ...]]:
    p = findings.propensities
    series = {"click ratio": p.ratio, "harvested": p.harvested, "EM of a PBM": p.em}
    return {name: figures for name, figures in series.items() if figures is not None}


def _places(findings: UnderstoodLog) -> list[int]:
    """The positions at which anything was shown, from 0."""
    return [p for p, shown in enumerate(findings.exposure.shown) if shown]


def _by_position(findings: UnderstoodLog) -> Table:
    """A row for each position: shown, clicked, last clicks, and the propensity by each way."""
    e, series = findings.exposure, _by_way(findings)
    rows: list[TableRow] = [
        {
            "position": f"{p + 1}",
            "shown": e.shown[p],
            "clicked": e.clicked[p],
            "clicked of shown": f"{e.clicked[p] / e.shown[p]:.2%}",
            "last click": f"{e.last[p] / max(sum(e.last), 1):.1%}",
            **{f"propensity: {name} [95%]": figures[p] for name, figures in series.items()},
        }
        for p in _places(findings)
    ]
    return Table.from_rows(rows, "Clicks, exposure and propensities", form=".3f")


def _model_table(findings: UnderstoodLog) -> Table:
    """A row for each click model: perplexities beside the NDCG of expert labels."""
    ndcg = f"NDCG@{findings.ndcg_at} of {findings.labels} [95%]"
    rows: list[TableRow] = [
        {
            "click model": model.name,
            "perplexity": model.perplexity,
            "given clicks above": model.conditional,
            **({ndcg: model.ndcg} if findings.labels else {}),
        }
        for model in findings.models
    ]
    return Table.from_rows(rows, "Click models")


def document(findings: UnderstoodLog) -> Document:
    """The report: what is shown and clicked by position, propensities, and click models."""
    opening: tuple[Block, ...] = (
        Text(f"Log: {', '.join(findings.data)}."),
        _counts(findings),
        _by_position(findings),
        *([] if findings.refusal is None else [Text(findings.refusal)]),
        *_trust_text(findings),
        _model_table(findings),
        *_charts(findings),
    )
    sections = [
        Section("Do positions overlap?", list(_overlap(findings))),
        Section("How to read the figures", [Points(_HOW_TO_READ)]),
    ]
    return Document("Click log", opening, sections)


def _counts(findings: UnderstoodLog) -> Table:
    """What the log has, and what of it is read."""
    e = findings.exposure
    none, one, *more = e.clicks
    counts: TableRow = {
        "groups": e.groups,
        "of these left out, without positions, clicks or document ids": e.unusable,
        "of these with two documents at one position, in counts by position only": e.doubled,
        "groups without a click": none,
        "groups with one click": one,
        "groups with several clicks": sum(more),
        "documents shown below the depth": e.below,
        "clicks on these": e.clicked_below,
        "share of the queries that is read": f"{findings.share:.1%}",
        "their queries": findings.queries,
        "their groups, for all but counts by position": findings.sessions,
        "groups on which click models are judged": findings.held_out,
    }
    return Table.from_rows([{"of the log": name, "count": count} for name, count in counts.items()])


def _overlap(findings: UnderstoodLog) -> Iterator[Block]:
    links, places = findings.links, _places(findings)
    connected = "connected: propensities can be separated from relevance" if links.connected else "not connected"
    yield Text(
        f"Of {links.pairs:,} documents of a query, {links.several:,} ({links.several / max(links.pairs, 1):.1%}) were "
        f"shown at several positions; they have {links.impressions:.1%} of the impressions. Positions are {connected}. "
        f"The table has the documents shown at both of two positions; {links.pairs_per_link} link them."
    )
    yield Table.from_rows(
        [
            {"position": f"{p + 1}", **{f"{q + 1}": links.links[p][q] if p != q else None for q in places}}
            for p in places
        ]
    )


def _trust_text(findings: UnderstoodLog) -> Iterator[Text]:
    if (trust := findings.trust) is None:
        return
    judged = (
        f"{trust.judged_by} from {findings.relevant_from:g} on" if trust.judged_by != "clicks" else "half of the clicks"
    )
    curves = "harvested curves" if trust.harvested else "click ratios, which mix order and examination"
    yield Text(
        f"Trust, from {curves} of {trust.good:,} good and {trust.poor:,} poor documents (by {judged}): slope "
        f"{cell(trust.slope, '.3f')}, {trust.verdict}."
    )


_HOW_TO_READ = (
    "Propensities are relative to the first position, their intervals those of a jackknife over folds of queries. The "
    "click ratio takes relevance for examination: below good rankers it falls faster than examination does.",
    "Harvested propensities compare each document with itself at another position (AllPairs, Agarwal et al. 2019). "
    "They hold if documents moved for reasons that have nothing to do with clicks of that moment. Where EM differs, "
    "trust harvesting; there is none by EM where too few documents that link positions were shown often.",
    "The slope of trust is that of the logarithm of clicks on poor over good documents, over the logarithm of the "
    "position. Where users trust the order, no propensity is right (Vardasbi et al. 2020).",
    "Click models are judged on groups that they were not fitted on, by default the latest periods; held_out names "
    "others. Perplexity is 2^-mean log2 P of what happened on each document shown: 1 is perfect, 2 a coin. The ratio "
    "of the position is the baseline. The second one is given the clicks above, which UBM, DBN and SDBN use. PBM and "
    "UBM smooth low positions: they predict clicks well, but their examinations are no propensities.",
    "NDCG is that of expert labels, in the order of each model; as shown is that of the mean position. Clicks well "
    "predicted are not relevance well found (Hager et al. 2024).",
)
"""What the figures mean; docs/clicks.md has the methods."""


def _charts(findings: UnderstoodLog) -> Iterator[Chart]:
    """By position: clicks and exposure, propensities with intervals, and the perplexity of each click model."""
    e, places = findings.exposure, _places(findings)
    ticks = [p + 1 for p in places]
    counts = {"shown": e.shown, "clicked": e.clicked, "last click": e.last}
    shares = [
        {"x": p + 1, "y": values[p] / max(e.groups - e.unusable, 1), "series": name}
        for name, values in counts.items()
        for p in places
    ]
    propensities = [
        row
        for name, figures in _by_way(findings).items()
        for row in charts.curve_rows(name, {p + 1: figures[p] for p in places})
    ]
    judged = [
        {"x": p + 1, "y": model.positions[p], "series": model.name}
        for model in findings.models
        for p in places
        if model.positions and model.positions[p] is not None
    ]
    spec = charts.lines(shares, x="position", y="share of groups", ticks=ticks, zero=True)
    yield Chart(spec, "what groups show and click, by position", "clicks")
    spec = charts.lines(propensities, x="position", y="propensity", ticks=ticks, zero=True)
    yield Chart(spec, "propensities by position, with 95% intervals", "propensities")
    if judged:
        spec = charts.lines(judged, x="position", y="perplexity", ticks=ticks)
        yield Chart(spec, "perplexity of each click model by position", "perplexity")
