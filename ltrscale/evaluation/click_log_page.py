"""The results of looking at a click log, and their report."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from ltrscale.config import Config
from ltrscale.evaluation.pages import estimated, number
from ltrscale.evaluation.statistics.crossed import Difference
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Points, Section, Table, Text
from ltrscale.reports.findings import Findings


class Figure(Config):
    """An estimate with its 95% interval; None where unknown."""

    mean: float | None
    low: float | None
    high: float | None


class Exposure(Config):
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


class Links(Config):
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


class Propensities(Config):
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


class Trust(Config):
    """Whether clicks on poor documents fall faster with the position than clicks on good ones."""

    judged_by: str
    """What tells good from poor: a column of expert labels, or `clicks` of half of the sessions."""
    harvested: bool
    """Whether both curves are harvested; otherwise they are click ratios, which mix order and examination."""
    good: int
    poor: int
    slope: Figure
    """Slope of the log ratio of the curves over the log position: 0 for position bias alone, below 0 for trust."""

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if self.slope.low is None or self.slope.high is None:
            return "cannot judge: too few clicks on one of both kinds of documents"
        if self.slope.high < 0:
            return "a sign of trust bias: clicks on poor documents fall faster"
        return "no sign of trust bias"


class ModelResult(Config):
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
    """None where neither labels nor overlapping positions tell good documents from poor ones."""
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


def _exposure_table(findings: UnderstoodLog) -> Table:
    """A row for each position: shown, clicked, ratio, last clicks."""
    e = findings.exposure
    last = max(sum(e.last), 1)
    rows = [
        [f"{p + 1}", f"{shown:,}", f"{clicked:,}", f"{clicked / shown:.2%}", f"{e.last[p] / last:.1%}"]
        for p, (shown, clicked) in enumerate(zip(e.shown, e.clicked, strict=True))
        if shown
    ]
    return Table(["position", "shown", "clicked", "click ratio", "last click"], rows, "Clicks and exposure")


def _by_way(findings: UnderstoodLog) -> dict[str, tuple[Figure, ...]]:
    p = findings.propensities
    series = {"click ratio": p.ratio, "harvested": p.harvested, "EM of a PBM": p.em}
    return {name: figures for name, figures in series.items() if figures is not None}


def _propensity_table(findings: UnderstoodLog) -> Table:
    """A row for each position, a column for each way."""
    series = _by_way(findings)
    rows = [
        [f"{p + 1}", *(estimated(figures[p], ".3f") for figures in series.values())]
        for p, shown in enumerate(findings.exposure.shown)
        if shown
    ]
    return Table(["position", *(f"{name} [95%]" for name in series)], rows, "Propensities")


def _model_table(findings: UnderstoodLog) -> Table:
    """A row for each click model: perplexities beside the NDCG of expert labels."""
    header = ["click model", "perplexity", "given clicks above"]
    if findings.labels:
        header.append(f"NDCG@{findings.ndcg_at} of {findings.labels} [95%]")
    rows = []
    for model in findings.models:
        row = [model.name, number(model.perplexity), number(model.conditional)]
        rows.append([*row, *(["-" if model.ndcg is None else estimated(model.ndcg, ".3f")] if findings.labels else [])])
    return Table(header, rows, "Click models")


def document(findings: UnderstoodLog) -> Document:
    """The report: what is shown and clicked by position, propensities, and click models."""
    shows = "by position: clicks and exposure, propensities, perplexity of each click model"
    opening: tuple[Block, ...] = (
        Text(_about_log(findings)),
        _exposure_table(findings),
        *([] if findings.refusal is None else [Text(findings.refusal)]),
        _propensity_table(findings),
        *_trust_text(findings),
        _model_table(findings),
        Chart(_chart(findings), shows, "clicks"),
    )
    sections = [
        Section("How to read clicks and exposure", [Points(list(_habits(findings)))]),
        Section("Do positions overlap?", list(_overlap(findings))),
        Section("How to read propensities", [Points(list(_about_propensities(findings)))]),
        *([Section("How to read trust", [Text(_ABOUT_TRUST)])] if findings.trust else []),
        Section("How to read click models", [Points(list(_about_models(findings)))]),
    ]
    if findings.held_out:
        models = [model for model in findings.models if model.positions]
        places = [p for p, shown in enumerate(findings.exposure.shown) if shown]
        rows = [[f"{p + 1}", *(number(model.positions[p]) for model in models)] for p in places]
        header = ["position", *(model.name for model in models)]
        sections.append(Section("Perplexity by position", [Table(header, rows)]))
    return Document("Click log", opening, sections)


def _about_log(findings: UnderstoodLog) -> str:
    sampled = "all of their queries" if findings.share >= 1 else f"a sample of {findings.share:.1%} of their queries"
    return (
        f"Log: {', '.join(findings.data)}; {findings.exposure.groups:,} groups. Counts by position are over all "
        f"of them, everything else over {findings.sessions:,} groups of {findings.queries:,} queries, {sampled}. "
        f"Click models are judged on {findings.held_out:,} groups that they were not fitted on."
    )


def _habits(findings: UnderstoodLog) -> Iterator[str]:
    e = findings.exposure
    usable = max(e.groups - e.unusable, 1)
    none, one, *more = e.clicks
    yield f"{none / usable:.1%} of the groups have no click, {one / usable:.1%} one, {sum(more) / usable:.1%} several."
    if sum(e.last):
        mean = sum((p + 1) * n for p, n in enumerate(e.last)) / sum(e.last)
        yield f"The last click is at position {mean:.1f} on average; below it, nobody knows what was seen."
    if e.below:
        yield f"{e.below:,} documents were shown below, with {e.clicked_below:,} clicks."
    if e.unusable:
        yield f"{e.unusable:,} groups have no positions, clicks or document ids, and are left out."
    if e.doubled:
        yield f"{e.doubled:,} groups have two documents at one position, and are in these counts only."


def _overlap(findings: UnderstoodLog) -> Iterator[Block]:
    links = findings.links
    positions = [p for p, shown in enumerate(findings.exposure.shown) if shown]
    rows = [
        [f"{p + 1}", *(f"{links.links[p][other]:,}" if other != p else "-" for other in positions)] for p in positions
    ]
    connected = "connected: propensities can be told from relevance" if links.connected else "not connected"
    yield Text(
        f"Of {links.pairs:,} documents of a query, {links.several:,} ({links.several / max(links.pairs, 1):.1%}) were "
        f"shown at several positions; they have {links.impressions:.1%} of the impressions. Positions are {connected}. "
        f"The table has the documents shown at both of two positions; {links.pairs_per_link} link them."
    )
    yield Table(["position", *(f"{p + 1}" for p in positions)], rows)


def _about_propensities(findings: UnderstoodLog) -> Iterator[str]:
    yield "Propensities are relative to the first position, their intervals those of a jackknife over folds of queries."
    yield (
        "The click ratio takes relevance for examination: where a ranker puts good documents on top, it falls faster "
        "than examination does."
    )
    if findings.propensities.harvested:
        yield (
            "Harvested propensities compare each document with itself at another position (AllPairs, Agarwal et al. "
            "2019). They hold if documents moved for reasons that have nothing to do with clicks of that moment."
        )
    if findings.propensities.em:
        yield (
            f"EM uses documents shown at least {findings.impressions_per_pair} times, and is corrected for the bias "
            "that few impressions of a document leave (half-panel jackknife). Where it differs from harvesting, "
            "trust that."
        )
    elif findings.propensities.harvested:
        yield (
            f"There are none by EM: too few documents that link positions were shown {findings.impressions_per_pair} "
            "times, and with few impressions EM is biased."
        )


_ABOUT_TRUST = (
    "With position bias alone, clicks on good and on poor documents fall by the same factors. The slope is that of the "
    "logarithm of their ratio, poor over good, over the logarithm of the position. Where users trust the order, no "
    "propensity is right: clicks are an affine function of relevance, not a multiple of it (Vardasbi et al. 2020)."
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
        f"{estimated(trust.slope, '.3f')}, {trust.verdict}."
    )


def _about_models(findings: UnderstoodLog) -> Iterator[str]:
    if not findings.held_out:
        yield "Nothing is held out, for the log has one period: name later groups under held_out."
    else:
        yield (
            "Perplexity is 2^-mean log2 P of what happened on each document shown, over all of them (PyClick and CLAX "
            "average the perplexities of positions instead, another figure): 1 is perfect, 2 a coin. The ratio "
            "of the position is the baseline: a model above it knows less than the mean of all documents."
        )
        yield (
            "PBM and UBM take low positions for less examined than they are, because smoothing draws the poor "
            "documents there up to the mean. They predict clicks well so; their examinations are no propensities."
        )
        yield (
            "The second perplexity is given the clicks above. UBM, DBN and SDBN use them; to predict a list that "
            "nobody has seen yet, the first counts."
        )
    if findings.labels:
        yield (
            f"NDCG is that of the expert labels in {findings.labels} over the documents of a query that were shown, in "
            "the order of each model; as shown is that of their mean position. Clicks well predicted are not "
            "relevance well found: the two part ways on real logs (Hager et al. 2024), so choose by what you need."
        )


def _chart(findings: UnderstoodLog) -> charts.Spec:
    """By position: clicks and exposure, propensities with intervals, and the perplexity of each click model."""
    e = findings.exposure
    places = [p + 1 for p, shown in enumerate(e.shown) if shown]
    counts = {
        "groups that show it": e.shown,
        "groups that click it": e.clicked,
        "groups whose last click it is": e.last,
    }
    position_rows = [
        {"x": p, "y": values[p - 1] / max(e.groups - e.unusable, 1), "series": name}
        for name, values in counts.items()
        for p in places
    ]
    propensities = [
        {"x": p, "y": values[p - 1].mean, "low": values[p - 1].low, "high": values[p - 1].high, "series": name}
        for name, values in _by_way(findings).items()
        for p in places
        if values[p - 1].mean is not None
    ]
    judged = [
        {"x": p, "y": model.positions[p - 1], "series": model.name}
        for model in findings.models
        for p in places
        if model.positions and model.positions[p - 1] is not None
    ]
    parts = [
        charts.lines(position_rows, x="position", y="share of groups", ticks=places, zero=True),
        charts.lines(propensities, x="position", y="propensity", ticks=places, zero=True),
        *([charts.lines(judged, x="position", y="perplexity", ticks=places)] if judged else []),
    ]
    return charts.above(*parts, alike=False)
