"""What a click log can teach: exposure, overlap of positions, propensities, signs of trust, and click models.

Shapes: S sessions, P positions, D pairs of query and document, Q queries.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from ltrscale.arrays import Doubles, Ints
from ltrscale.batch import to_offsets
from ltrscale.clicks.log import ClickLog, LogSettings, LogTally, read_log
from ltrscale.clicks.models import (
    Cells,
    ClickModel,
    DocumentRatio,
    DynamicBayesian,
    PositionBasedModel,
    PositionRatio,
    Sessions,
    UserBrowsing,
    count,
    perplexity,
    sums,
)
from ltrscale.clicks.propensity import (
    Estimate,
    Overlap,
    click_ratios,
    expectation_maximisation,
    harvest,
    jackknife,
    judged_by_clicks,
    overlap,
    slope_of,
    without,
)
from ltrscale.draws import random_bits
from ltrscale.evaluation.click_log_page import (
    Exposure,
    Links,
    ModelResult,
    Propensities,
    Trust,
    UnderstoodLog,
    document,
)
from ltrscale.evaluation.statistics.crossed import Difference, or_none
from ltrscale.progress import Report, log
from ltrscale.ranking.choices import metric_named
from ltrscale.reports.document import Document, Figure
from ltrscale.reports.findings import ReportStage, commit_report
from ltrscale.stages.stage import Origin

_FOLDS = 10
_PAIRS_PER_LINK = 10
"""Documents that were shown at both of two positions, with clicks at both, which link these. Without a chain of links
from the first position to every other, no propensities are harvested."""
_IMPRESSIONS_PER_PAIR = 20
"""Of a document that counts for the propensities by EM: with few, EM is biased."""
_SMOOTHING = 4.0
"""Examinations of average clicks that click models add to each document of a query."""


class ClicksJob(LogSettings, ReportStage):
    """Look at a click log before training on it: exposure, overlap, propensities, trust, click models."""

    stage: ClassVar = "clicks"
    fixed: ClassVar = {"pairs_per_link": 10, "impressions_per_pair": 20, "smoothing": 4.0}
    relevant_from: float = Field(default=1.0, gt=0)
    """Lowest expert label of a relevant document; clicks on the others are checked for trust."""
    ndcg_at: int = Field(default=10, ge=1)
    """Cut-off of the NDCG of expert labels in the order of each click model."""

    def page(self) -> Document:
        """The report of the committed findings."""
        return document(UnderstoodLog.read(self.out))

    def work(self, origin: Origin, report: Report) -> None:
        """Look at the log, and commit the report."""
        findings = self.understood()
        commit_report(self.out, findings, document(findings), made_by=origin)
        for model in findings.models:
            report({"model": model.name, "perplexity": model.perplexity, "conditional": model.conditional})

    def understood(self) -> UnderstoodLog:
        """Look at a click log.

        Counts by position are over all groups; everything else is over the sampled sessions, which stay in memory.

        Raises:
            InputError: as `read_log`.
        """
        read = read_log(self)
        sessions = read.sessions.take(read.in_log_S)
        queries = len(np.unique(sessions.queries_S))
        first, second = map(count, _halves(sessions))
        cells, folds_D = count(sessions), sessions.folds_D(_FOLDS)
        shared = overlap(cells, sessions.positions, pairs_per_link=_PAIRS_PER_LINK)
        log.info("clicks: %s sessions of %s queries", f"{len(sessions):,}", f"{queries:,}")
        return UnderstoodLog(
            data=self.log.data,
            held_out=len(read.sessions.take(read.held_out_S)),
            sessions=len(sessions),
            queries=queries,
            share=read.share,
            labels=read.labels,
            relevant_from=self.relevant_from,
            ndcg_at=self.ndcg_at,
            impressions_per_pair=_IMPRESSIONS_PER_PAIR,
            exposure=_exposure(read.tally),
            links=Links(
                pairs=shared.pairs,
                several=shared.several,
                impressions=shared.impressions,
                pairs_per_link=_PAIRS_PER_LINK,
                links=tuple(map(tuple, shared.links_PP.tolist())),
                parts=tuple(map(tuple, shared.parts)),
            ),
            propensities=_propensities(cells, (first, second), folds_D, shared),
            trust=_trust(read, sessions, folds_D, shared, self),
            models=_models(read, self),
        )


def _halves(sessions: Sessions) -> tuple[Sessions, Sessions]:
    """Two random halves of the sessions."""
    half_S = random_bits(("half of the sessions",), np.arange(len(sessions))) < np.uint64(1 << 63)
    return sessions.take(half_S), sessions.take(~half_S)


def _exposure(tally: LogTally) -> Exposure:
    return Exposure(
        groups=tally.groups,
        unusable=tally.unusable,
        doubled=tally.doubled,
        below=tally.below,
        clicked_below=tally.clicked_below,
        shown=_whole(tally.shown_P),
        clicked=_whole(tally.clicked_P),
        last=_whole(tally.last_P),
        clicks=_whole(tally.clicks),
    )


def _whole(values: Doubles) -> tuple[int, ...]:
    return tuple(values.astype(np.int64).tolist())


def _figures(estimate: Estimate) -> tuple[Figure, ...]:
    """Values with intervals; None where unknown."""
    rows = zip(*(part.tolist() for part in estimate), strict=True)
    finite = [[value if np.isfinite(value) else None for value in row] for row in rows]
    return tuple(Figure(mean=mean, low=low, high=high) for mean, low, high in finite)


def _propensities(cells: Cells, halves: tuple[Cells, Cells], folds_D: Ints, shared: Overlap) -> Propensities:
    """Propensities estimated in three ways; two of them are None where positions do not overlap."""
    positions = len(shared.seen_P)

    def estimated(curve: Callable[[Cells, int], Doubles]) -> tuple[Figure, ...]:
        return _figures(jackknife(lambda fold: curve(without(cells, folds_D, fold), positions), _FOLDS))

    def by_em(fold: int | None) -> Doubles:
        other_folds = without(halves[0], folds_D, fold), without(halves[1], folds_D, fold)
        return expectation_maximisation(other_folds, positions, impressions=_IMPRESSIONS_PER_PAIR)

    ratio = estimated(click_ratios)
    if not shared.connected:
        return Propensities(ratio=ratio)
    shown_D = sums(cells.pair_M, cells.shown_M, len(folds_D))
    often = cells.keep(shown_D[cells.pair_M] >= _IMPRESSIONS_PER_PAIR)
    em = None
    if overlap(often, positions, pairs_per_link=_PAIRS_PER_LINK).parts == shared.parts:
        em = _figures(jackknife(by_em, _FOLDS))
    return Propensities(ratio=ratio, harvested=estimated(harvest), em=em)


def _trust(read: ClickLog, sessions: Sessions, folds_D: Ints, shared: Overlap, job: ClicksJob) -> Trust | None:
    """Whether clicks on poor documents fall faster than clicks on good ones; None without labels and overlap."""
    if read.labels is not None:
        good_D, poor_D = read.labels_D >= job.relevant_from, read.labels_D < job.relevant_from
        cells = count(sessions)
    elif shared.connected:
        judging, rest = _halves(sessions)
        good_D, poor_D = judged_by_clicks(judging)
        cells = count(rest)
    else:
        return None
    curve = harvest if shared.connected else click_ratios
    estimate = slope_of(cells, good_D, poor_D, sessions.positions, folds_D, curve)
    return Trust(
        judged_by=read.labels or "clicks",
        harvested=shared.connected,
        good=int(good_D.sum()),
        poor=int(poor_D.sum()),
        slope=_figures(estimate)[0],
    )


def _models(read: ClickLog, job: ClicksJob) -> tuple[ModelResult, ...]:
    """Fit click models without the held-out part, and judge them on that part and on expert labels."""
    fitted = read.sessions.take(read.in_log_S & ~read.held_out_S)
    held_out = read.sessions.take(read.held_out_S)
    fits: dict[str, Callable[[Sessions], ClickModel]] = {
        "ratio of the position": PositionRatio.fit,
        "ratio of the document": partial(DocumentRatio.fit, smoothing=_SMOOTHING),
        "PBM": partial(PositionBasedModel.fit, smoothing=_SMOOTHING),
        "UBM": partial(UserBrowsing.fit, smoothing=_SMOOTHING),
        "SDBN": partial(DynamicBayesian.simplified, smoothing=_SMOOTHING),
        "DBN": partial(DynamicBayesian.fit, smoothing=_SMOOTHING),
    }
    judge = _judge(read, fitted, job.ndcg_at) if read.labels else None
    results = []
    if judge:
        cells = count(fitted)
        shown_D = sums(cells.pair_M, cells.shown_M, fitted.pairs)
        position_D = sums(cells.pair_M, cells.shown_M * cells.place_M, fitted.pairs) / np.maximum(shown_D, 1)
        results.append(ModelResult(name="as shown", ndcg=judge(-position_D)))
    for name, fit in fits.items():
        log.info("clicks: fitting %s", name)
        model = fit(fitted)
        order_D1 = model.relevance_D1
        ndcg = None if judge is None or order_D1 is None else judge(order_D1[:-1])
        result = ModelResult(name=name, ndcg=ndcg)
        if len(held_out):
            alone, given = (perplexity(model.probabilities(held_out, conditional=c), held_out) for c in (False, True))
            positions = tuple(map(or_none, alone.positions_P.tolist()))
            result = result.replace(perplexity=alone.overall, conditional=given.overall, positions=positions)
        results.append(result)
    return tuple(results)


def _judge(read: ClickLog, fitted: Sessions, at: int) -> Callable[[Doubles], Difference]:
    """The NDCG of the expert labels in an order of the fitted pairs, over queries with a relevant document."""
    query_D = np.full(fitted.pairs, -1)
    rows, columns = np.nonzero(fitted.shown_SP)
    query_D[fitted.pairs_SP[rows, columns]] = fitted.queries_S[rows]
    known_N = np.flatnonzero((query_D >= 0) & ~np.isnan(read.labels_D))
    pairs_N = known_N[np.argsort(query_D[known_N], kind="stable")]
    lengths_Q = np.unique(query_D[pairs_N], return_counts=True)[1]
    labels_N, offsets_Q1 = torch.from_numpy(read.labels_D[pairs_N]), to_offsets(torch.from_numpy(lengths_Q))
    metric = metric_named(f"ndcg@{at}")
    return lambda order_D: Difference.from_values(
        metric.values(torch.from_numpy(order_D[pairs_N]), labels_N, offsets_Q1).numpy()
    )
