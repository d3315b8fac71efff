"""Position bias: whether positions overlap, how much more often one is examined than another, and signs of trust.

Where each document keeps its position, any clicks fit any propensities: what one position loses in examination its
documents can gain in relevance. Propensities relative to each other are determined exactly within positions that a
chain of documents shown at several of them connects (Hager, Zoeter and de Rijke 2025, ICTIR, on two-tower models: swaps
across positions, or features that overlap across them).

Three estimates: the click ratio of a position takes relevance for examination, and good rankers put what is clicked
anyway on top. The other two compare a document with itself at several positions, and need positions that overlap.

In a position-based model the clicks on relevant and on irrelevant documents fall by the same factors down the list.
With trust a click has the probability `examination_p (e+_p relevance + e-_p (1 - relevance))`, and e-_p falls with p
(Agarwal et al. 2019, WWW; affine in the relevance, Vardasbi et al. 2020): clicks on irrelevant documents fall faster.

Shapes: S sessions, P positions, D pairs of query and document, M cells, E linked pairs of positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from scipy.special import stdtrit

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.clicks.models import Cells, Sessions, count, fit_product, sums
from ltrscale.progress import log


@dataclass(frozen=True, eq=False)
class Overlap:
    """How positions overlap."""

    pairs: int
    """Pairs of query and document."""
    several: int
    """Pairs that were shown at several positions."""
    impressions: float
    """Share of the impressions that show such a pair."""
    seen_P: Bools
    """Positions at which something was shown."""
    links_PP: Ints
    """Pairs shown at both positions; 0 on the diagonal."""
    linked_PP: Bools
    """Whether enough pairs link them, with clicks at both."""

    @property
    def parts(self) -> list[list[int]]:
        """The positions, from 1, in parts that no link connects; the first part has the first position shown."""
        _, part_P = connected_components(csr_array(self.linked_PP), directed=False)
        seen = np.flatnonzero(self.seen_P)
        return [(seen[part_P[seen] == part] + 1).tolist() for part in dict.fromkeys(part_P[seen].tolist())]

    @property
    def connected(self) -> bool:
        """Whether propensities of all positions can be known, relative to the first."""
        return len(self.parts) == 1 and int(self.seen_P.sum()) > 1


def overlap(cells: Cells, positions: int, *, pairs_per_link: int) -> Overlap:
    """How positions overlap; the places of the cells are positions from 0.

    Two positions are linked by at least `pairs_per_link` pairs that were shown at both.

    Example:
        >>> cells = Cells(np.array([0, 0, 1]), np.array([0, 1, 2]), np.ones(3), np.ones(3))
        >>> found = overlap(cells, 3, pairs_per_link=1)
        >>> found.pairs, found.several, found.parts
        (2, 1, [[1, 2], [3]])
    """
    shown_M, several_M = cells.shown_M, cells.several_M
    shown_DP, rate_DP = _dense(cells.keep(several_M), positions)
    seen_DP = (shown_DP > 0).astype(np.float64)
    links_PP = (seen_DP.T @ seen_DP).astype(np.int64)
    np.fill_diagonal(links_PP, 0)
    clicked_PP = rate_DP.T @ seen_DP
    return Overlap(
        pairs=len(np.unique(cells.pair_M)),
        several=len(shown_DP),
        impressions=float(shown_M[several_M].sum() / max(shown_M.sum(), 1)),
        seen_P=cells.by_place(positions)[0] > 0,
        links_PP=links_PP,
        linked_PP=(links_PP >= pairs_per_link) & (clicked_PP > 0) & (clicked_PP.T > 0),
    )


def _dense(cells: Cells, positions: int) -> tuple[Doubles, Doubles]:
    """How often each pair was shown at each position, and the share of clicks, 0 if never shown; shapes [D, P]."""
    pairs_D, row_M = np.unique(cells.pair_M, return_inverse=True)
    shown_DP, rate_DP = np.zeros((2, len(pairs_D), positions))
    shown_DP[row_M, cells.place_M] = cells.shown_M
    rate_DP[row_M, cells.place_M] = cells.clicked_M / cells.shown_M
    return shown_DP, rate_DP


_ALMOST_ONE = -1e-6
"""Logarithm of the highest probability."""


def click_ratios(cells: Cells, positions: int) -> Doubles:
    """Share of clicks by position over that of the first position, shape [P]; NaN where nothing was shown.

    `cr_p / cr_1`, the propensity of SUN23's weights (Sun et al. 2023, equation 2).

    Example:
        >>> click_ratios(Cells(np.arange(2), np.arange(2), np.full(2, 10.0), np.array([4.0, 1.0])), 2).tolist()
        [1.0, 0.25]
    """
    shown_P, clicked_P = cells.by_place(positions)
    return _relative(np.divide(clicked_P, shown_P, out=np.full(positions, np.nan), where=shown_P > 0))


def harvest(cells: Cells, positions: int) -> Doubles:
    """Propensities from documents of a query shown at several positions, relative to the first, shape [P].

    AllPairs of intervention harvesting (Agarwal et al. 2019, WSDM, section 4.2): the likelihood
    `sum over p != q of c_pq log(v_p r_pq) + (n_pq - c_pq) log(1 - v_p r_pq)`, with a relevance `r_pq = r_qp` of the
    documents shown at both p and q. Each of these enters `n_pq` and `n_qp` with the same weight, and `c_pq` with that
    weight times its share of clicks at p, so that both sides have the same documents. The weight is half the
    harmonic mean of its impressions at p and q (1 in the paper): a share of few impressions counts less, and the
    estimate stays unbiased, because the weight does not depend on clicks. In logarithms the problem is concave.

    It assumes that where a document is shown does not depend on what this user would click, as in any experiment, and
    between rankers or days if relevance does not change with them. NaN stands for a position that no chain of links
    connects with the first position shown.

    Example:
        >>> cells = Cells(np.array([0, 0]), np.array([0, 1]), np.full(2, 100.0), np.array([50.0, 10.0]))
        >>> harvest(cells, 2).round(4).tolist()
        [1.0, 0.2]
    """
    shown_DP, rate_DP = _dense(cells.keep(cells.several_M), positions)
    total_PP, clicked_PP = np.zeros((2, positions, positions))
    for p in range(positions):
        both_DP = shown_DP[:, p : p + 1] * shown_DP
        weight_DP = np.divide(both_DP, shown_DP[:, p : p + 1] + shown_DP, out=np.zeros_like(both_DP), where=both_DP > 0)
        total_PP[p], clicked_PP[p] = weight_DP.sum(axis=0), (weight_DP * rate_DP[:, p : p + 1]).sum(axis=0)
    first = int(np.argmax(cells.by_place(positions)[0] > 0))
    linked_PP = (clicked_PP > 0) & (clicked_PP.T > 0) & ~np.eye(positions, dtype=bool)
    _, part_P = connected_components(csr_array(linked_PP), directed=False)
    linked_PP &= (part_P == part_P[first])[:, None]
    values_P = np.full(positions, np.nan)
    reached_P = linked_PP.any(axis=1)
    values_P[reached_P] = _all_pairs(clicked_PP, total_PP, linked_PP)[reached_P]
    return _relative(values_P)


def _all_pairs(clicked_PP: Doubles, total_PP: Doubles, linked_PP: Bools) -> Doubles:
    """The maximum of the likelihood of `harvest`, in an arbitrary scale."""
    one_E, other_E = np.nonzero(np.triu(linked_PP))
    ends_2E = np.stack([one_E, other_E])
    clicked_2E = np.stack([clicked_PP[one_E, other_E], clicked_PP[other_E, one_E]])
    missed_2E = total_PP[one_E, other_E] - clicked_2E
    positions, scale = len(linked_PP), max(total_PP[one_E, other_E].sum(), 1.0)

    def loss(logs: Doubles) -> tuple[float, Doubles]:
        log_2E = np.minimum(logs[:positions][ends_2E] + logs[positions:], _ALMOST_ONE)
        odds_2E = missed_2E / np.expm1(-log_2E)
        value = -(clicked_2E * log_2E + missed_2E * np.log1p(-np.exp(log_2E))).sum()
        slope_2E = odds_2E - clicked_2E
        slopes = [sums(ends_2E.ravel(), slope_2E.ravel(), positions), slope_2E.sum(axis=0)]
        return value / scale, np.concatenate(slopes) / scale

    start = np.full(positions + len(one_E), -1.0)
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-13, "gtol": 1e-8}
    fit = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(None, _ALMOST_ONE)] * len(start), options=options)
    if not fit.success:
        log.warning("clicks: harvested propensities have not converged after %d rounds: %s", fit.nit, fit.message)
    return np.asarray(np.exp(fit.x[:positions]), np.float64)


def expectation_maximisation(halves: tuple[Cells, Cells], positions: int, *, impressions: float) -> Doubles:
    """Propensities of a position-based model, a click being `examination_p x attraction_d`, by EM, shape [P].

    Each pair has its own attraction, so the maximum of the likelihood is inconsistent where pairs have few impressions
    (the incidental parameters of Neyman and Scott 1948): lower positions come out too high. Only pairs shown at several
    positions and often enough are used. The remaining bias is estimated by the half-panel jackknife of Dhaene and
    Jochmans (2015), in logarithms: twice the estimate from all impressions, minus the mean of those from either half.

    Args:
        halves: cells of two random halves of the sessions, with positions from 0 as places.
        positions: P.
        impressions: the minimum for a pair to be used.

    Returns:
        The propensities relative to the first position; NaN where no used pair was shown.
    """
    whole = _joined(*halves)
    enough_D = sums(whole.pair_M, whole.shown_M, 0) >= impressions
    enough_D &= np.bincount(whole.pair_M) > 1
    logs = []
    for cells in (whole, *halves):
        used = cells.keep(enough_D[cells.pair_M])
        _, examination_P = fit_product(used, len(enough_D), positions, smoothing=0.0)
        values_P = np.where(used.by_place(positions)[0] > 0, examination_P, np.nan)
        with np.errstate(divide="ignore"):
            logs.append(np.log(_relative(values_P)))
    return np.asarray(np.exp(2 * logs[0] - (logs[1] + logs[2]) / 2))


def _joined(one: Cells, other: Cells) -> Cells:
    """The sum of the counts of both."""
    pair_N, place_N, shown_N, clicked_N = (np.concatenate(columns) for columns in zip(one, other, strict=True))
    places = int(place_N.max(initial=0)) + 1
    code_M, cell_N = np.unique(pair_N * places + place_N, return_inverse=True)
    shown_M, clicked_M = (sums(cell_N, values_N, len(code_M)) for values_N in (shown_N, clicked_N))
    return Cells(code_M // places, code_M % places, shown_M, clicked_M)


def _relative(values_P: Doubles) -> Doubles:
    """Values over the first that is known."""
    defined = np.flatnonzero(~np.isnan(values_P))
    return (
        values_P / values_P[defined[0]] if len(defined) and values_P[defined[0]] > 0 else np.full_like(values_P, np.nan)
    )


class Estimate(NamedTuple):
    """Values with the ends of their 95% intervals; NaN where they are not known."""

    values: Doubles
    low: Doubles
    high: Doubles


def jackknife(estimate: Callable[[int | None], Doubles], folds: int, *, log: bool = True) -> Estimate:
    """An estimate, with intervals from leaving out one of at least two folds at a time; None leaves out no fold.

    The variance is `(F - 1) / F sum_f (x_f - mean x)^2` over the estimates without each of F folds (the delete-a-group
    jackknife, Kott 2001), the interval that of Student's t with F - 1 degrees of freedom. Queries are the sample: the
    impressions of one are not independent. With `log` errors are those of the logarithm, as suits ratios.

    Example:
        >>> x = np.array([1.0, 2.0, 3.0, 4.0])
        >>> mean = jackknife(lambda left: np.delete(x, [] if left is None else left).mean(keepdims=True), 4, log=False)
        >>> [float(part[0].round(3)) for part in mean]
        [2.5, 0.446, 4.554]
    """
    forward, back = (np.log, np.exp) if log else (np.asarray, np.asarray)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = forward(estimate(None))
        parts_F = np.stack([forward(estimate(fold)) for fold in range(folds)])
        errors = np.sqrt((folds - 1) / folds * np.square(parts_F - parts_F.mean(axis=0)).sum(axis=0))
        half = stdtrit(folds - 1, 0.975) * errors
        return Estimate(*(np.asarray(back(values), np.float64) for values in (whole, whole - half, whole + half)))


def without(cells: Cells, folds_D: Ints, fold: int | None) -> Cells:
    """The cells of all folds but one; all for None."""
    return cells if fold is None else cells.keep(folds_D[cells.pair_M] != fold)


_CellCurve = Callable[[Cells, int], Doubles]
"""Propensities relative to the first position, from cells and the number of positions."""


def _slope(good_P: Doubles, poor_P: Doubles, weights_P: Doubles) -> float:
    """The slope of `log(poor_p / good_p)` over `log p` by weighted least squares; NaN with fewer than two positions."""
    usable_P = (good_P > 0) & (poor_P > 0) & (weights_P > 0)
    if usable_P.sum() < 2:
        return float("nan")
    x_P = np.log(np.arange(1, len(good_P) + 1)[usable_P])
    y_P = np.log(poor_P[usable_P] / good_P[usable_P])
    w_P = weights_P[usable_P] / weights_P[usable_P].sum()
    from_mean_P = x_P - w_P @ x_P
    return float((w_P * from_mean_P) @ y_P / ((w_P * from_mean_P) @ from_mean_P))


def slope_of(cells: Cells, good_D: Bools, poor_D: Bools, positions: int, folds_D: Ints, curve: _CellCurve) -> Estimate:
    """`_slope` with its interval over queries, from the curves of good and of poor documents.

    A position weighs `1 / (1 / clicks on good + 1 / clicks on poor)`, about the inverse of the variance there. A pair
    may be neither good nor poor.
    """

    def estimate(fold: int | None) -> Doubles:
        kept = without(cells, folds_D, fold)
        good_cells, poor_cells = (kept.keep(chosen_D[kept.pair_M]) for chosen_D in (good_D, poor_D))
        good_P, poor_P = (part.by_place(positions)[1] for part in (good_cells, poor_cells))
        weights_P = good_P * poor_P / np.maximum(good_P + poor_P, 1)
        return np.array([_slope(curve(good_cells, positions), curve(poor_cells, positions), weights_P)])

    return jackknife(estimate, int(folds_D.max(initial=1)) + 1, log=False)


def judged_by_clicks(half: Sessions) -> tuple[Bools, Bools]:
    """Pairs with more and with fewer clicks than others at their positions, in one random half of the sessions.

    The curves must come from the other half: the choice of pairs is independent of the clicks there, so position bias
    alone gives both the same curve. Pairs without a session in this half are neither.
    """
    cells = count(half)
    shown_P, clicked_P = cells.by_place(half.positions)
    expected_M = cells.shown_M * (clicked_P / np.maximum(shown_P, 1))[cells.place_M]
    expected_D = sums(cells.pair_M, expected_M, half.pairs)
    clicked_D = sums(cells.pair_M, cells.clicked_M, half.pairs)
    return clicked_D > expected_D, (clicked_D <= expected_D) & (expected_D > 0)
