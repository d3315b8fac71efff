"""Signs of trust bias: users click what is shown on top because it is shown there, also where it is not relevant.

In a position-based model the clicks on relevant and on irrelevant documents fall by the same factors down the list.
With trust a click has the probability `examination_p (e+_p relevance + e-_p (1 - relevance))`, and e-_p falls with p
(Agarwal et al. 2019, WWW; affine in the relevance, Vardasbi et al. 2020): clicks on irrelevant documents fall faster.

Shapes: S sessions, P positions, D pairs, M cells.
"""

from collections.abc import Callable

import numpy as np

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.clicks.propensity import Estimate, jackknife, without
from ltrscale.clicks.sessions import Cells, Sessions, count, sums

CellCurve = Callable[[Cells, int], Doubles]
"""Propensities relative to the first position, from cells and the number of positions."""


def slope(good_P: Doubles, poor_P: Doubles, weights_P: Doubles) -> float:
    """How much faster clicks on poor documents fall, as a power of the position; NaN from fewer than two positions.

    The slope of `log(poor_p / good_p)` over `log p` by weighted least squares: 0 for position bias alone, below 0 with
    trust.

    Args:
        good_P: the curve of good documents.
        poor_P: that of poor ones; positions where either is 0 or NaN do not count.
        weights_P: how well the curves are known at each position.

    Example:
        >>> round(slope(np.array([1.0, 0.5, 0.25]), np.array([1.0, 0.25, 0.0625]), np.ones(3)), 3)
        -1.234
    """
    usable_P = (good_P > 0) & (poor_P > 0) & (weights_P > 0)
    if usable_P.sum() < 2:
        return float("nan")
    x_P = np.log(np.arange(1, len(good_P) + 1)[usable_P])
    y_P = np.log(poor_P[usable_P] / good_P[usable_P])
    w_P = weights_P[usable_P] / weights_P[usable_P].sum()
    from_mean_P = x_P - w_P @ x_P
    return float((w_P * from_mean_P) @ y_P / ((w_P * from_mean_P) @ from_mean_P))


def slope_of(cells: Cells, good_D: Bools, poor_D: Bools, positions: int, folds_D: Ints, curve: CellCurve) -> Estimate:
    """`slope` with its interval over queries, from the curves of good and of poor documents.

    A position weighs `1 / (1 / clicks on good + 1 / clicks on poor)`, about the inverse of the variance there.

    Args:
        cells: with positions from 0 as places.
        good_D: the good pairs.
        poor_D: the poor ones; a pair may be neither.
        positions: P.
        folds_D: folds of the jackknife.
        curve: how each curve is estimated.
    """

    def estimate(fold: int | None) -> Doubles:
        kept = without(cells, folds_D, fold)
        good, poor = (kept.keep(chosen_D[kept.pair_M]) for chosen_D in (good_D, poor_D))
        good_P, poor_P = (part.by_place(positions)[1] for part in (good, poor))
        weights_P = good_P * poor_P / np.maximum(good_P + poor_P, 1)
        return np.array([slope(curve(good, positions), curve(poor, positions), weights_P)])

    return jackknife(estimate, int(folds_D.max(initial=1)) + 1, log=False)


def judged_by_clicks(half: Sessions) -> tuple[Bools, Bools]:
    """Pairs with more and with fewer clicks than others at their positions, in one random half of the sessions.

    The curves must then come from the other half: which pairs are chosen is independent of the clicks there, so that
    position bias alone gives both the same curve. Pairs without a session in this half are neither.
    """
    cells = count(half)
    shown_P, clicked_P = cells.by_place(half.positions)
    expected_M = cells.shown_M * (clicked_P / np.maximum(shown_P, 1))[cells.place_M]
    expected_D = sums(cells.pair_M, expected_M, half.pairs)
    clicked_D = sums(cells.pair_M, cells.clicked_M, half.pairs)
    return clicked_D > expected_D, (clicked_D <= expected_D) & (expected_D > 0)
