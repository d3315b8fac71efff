"""Means over draws of labels and query groups, which are crossed: every draw is tested on every group.

`x_qt = mu + a_q + b_t + e_qt`: groups and draws are both samples, so both make the mean `x` uncertain. A bootstrap of
the groups alone leaves `b` out, and more groups never make up for it.

Shapes: Q groups, T draws, M columns (methods, metrics), F folds. NaN marks a group that a column leaves undefined, in
all draws.
"""

import math
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, nctdtrinc, stdtr, stdtrit

from ltrscale.arrays import Doubles

FEWEST_DRAWS = 5
"""With fewer draws of labels nothing is judged: their spread, and so the interval, is known too badly."""
_ALPHA, _POWER = 0.05, 0.8
_MANY = 1e6
"""Degrees of freedom from which on a t is a normal variable."""
MOST_DRAWS = 1000
"""More are not proposed."""


@dataclass(frozen=True)
class Means:
    """Means of M columns with standard errors, and degrees of freedom of the errors; NaN where there is none."""

    mean_M: Doubles
    std_error_M: Doubles
    df_M: Doubles

    def interval(self) -> tuple[Doubles, Doubles]:
        """Ends of the 95% intervals, from Student's t."""
        half_M = stdtrit(self.df_M, 1 - _ALPHA / 2) * self.std_error_M
        return self.mean_M - half_M, self.mean_M + half_M

    def p(self) -> Doubles:
        """Two-sided p values of means of 0; 1 for a mean of 0 without an error."""
        with np.errstate(divide="ignore", invalid="ignore"):
            t_M = np.abs(self.mean_M) / self.std_error_M
        t_M = np.where((self.mean_M == 0) & (self.std_error_M == 0), 0.0, t_M)
        return np.asarray(2 * stdtr(self.df_M, -t_M))

    def detectable(self) -> Doubles:
        """The smallest true means that this design would probably have seen.

        `d SE / sqrt(m / df)`: a test at 5% finds a mean of d true errors with a power of 80%, where d is the
        noncentrality of a t of df degrees (Cohen 1988, section 2.5), and the error as found is below the true one in
        half of all experiments after division by the root of the median m of chi square over df. Without both, few
        draws promise too much.
        """
        return np.asarray(_errors(self.df_M) * self.std_error_M * np.sqrt(_inflation(self.df_M)))


def _errors(df_M: Doubles) -> Doubles:
    """The true errors that a mean must have for a test at 5% to find it with a power of 80%."""
    df_M = np.minimum(df_M, _MANY)
    return np.asarray(nctdtrinc(df_M, 1 - _POWER, stdtrit(df_M, 1 - _ALPHA / 2)))


def _inflation(df_M: Doubles) -> Doubles:
    """The factor by which a variance as found is multiplied, so that it is below the true one in half of all cases."""
    df_M = np.minimum(df_M, _MANY)
    return np.asarray(df_M / chdtri(df_M, 0.5))


@dataclass(frozen=True)
class Spread:
    """Why the mean of a difference is uncertain, and so what a design with other numbers of draws and labels would see.

    `Var(mean) = groups + draws / T`.
    """

    draws: float
    """The variance that one draw of labels gives the mean; T draws give it a T-th."""
    groups: float
    """The variance that the groups alone give it, which no number of draws lowers."""
    n_groups: int

    @classmethod
    def of(cls, values_QT: Doubles) -> Self | None:
        """That of a difference, from the mean squares of `crossed_means`; None with fewer than two groups or draws.

        Both parts are above the found ones, as in `Means.detectable`: few draws promise too much.
        """
        n, n_draws = int((~np.isnan(values_QT[:, 0])).sum()), values_QT.shape[1]
        if n < 2 or n_draws < 2:
            return None
        of_groups, of_draws, rest = _Squares.of(values_QT[..., None]).squares_3M[:, 0].tolist()
        more = float(_inflation(crossed_means(values_QT[..., None]).df_M)[0])
        return cls(more * max(of_draws, rest) / n, more * max(of_groups - rest, 0.0) / (n * n_draws), n)

    def detectable(self, draws: int) -> float:
        """The smallest difference that so many draws would see with a power of 80%, by a test at 5%."""
        return float(self._detectable(np.array([draws]))[0])

    def draws_for(self, difference: float) -> int | None:
        """The fewest draws, five at least, that would see a difference; None if a thousand would not.

        Example:
            >>> spread = Spread(draws=0.014**2, groups=0.002**2, n_groups=5000)
            >>> round(spread.detectable(5), 3), spread.draws_for(0.01), spread.draws_for(0.005)
            (0.023, 24, None)
        """
        draws_T = np.arange(FEWEST_DRAWS, MOST_DRAWS + 1)
        enough_T = self._detectable(draws_T) <= difference
        return int(draws_T[enough_T.argmax()]) if enough_T.any() else None

    def times_for(self, difference: float, draws: int, *, more: Literal["labels", "groups"]) -> float | None:
        """How many times the labels, or the test groups, so many draws need to see a difference; None if none suffice.

        The variance over draws is taken to fall as the labels grow, which is what was found from 100 labelled groups
        on; that of the groups falls as they grow.

        Example:
            >>> spread = Spread(draws=0.014**2, groups=0.002**2, n_groups=5000)
            >>> round(spread.times_for(0.01, 5, more="labels"), 1), spread.times_for(0.01, 5, more="groups")
            (6.1, None)
        """

        def sees(times: float) -> bool:
            labels, groups = (times, 1.0) if more == "labels" else (1.0, times)
            grown = Spread(self.draws / labels, self.groups / groups, round(self.n_groups * groups))
            return grown.detectable(draws) <= difference

        low, high = 1.0, 1e6
        if not sees(high):
            return None
        for _ in range(40):  # bisection of the logarithm: what is detectable falls
            middle = math.sqrt(low * high)
            low, high = (low, middle) if sees(middle) else (middle, high)
        return high

    def _detectable(self, draws_T: NDArray[np.int64]) -> Doubles:
        drawn_T = self.draws / draws_T
        variance_T = self.groups + drawn_T
        spread_T = self.groups**2 / (self.n_groups - 1) + drawn_T**2 / (draws_T - 1)
        df_T = np.divide(variance_T**2, spread_T, out=np.full(len(draws_T), math.inf), where=spread_T > 0)
        return np.asarray(_errors(df_T) * np.sqrt(variance_T))


def crossed_means(values_QTM: Doubles, folds_Q: NDArray[np.int64] | None = None) -> Means:
    """Means over groups and draws, with errors that hold for other groups and other draws of labels.

    With the mean squares of a two-way analysis of variance without replication (Cornfield and Tukey 1956; Searle,
    Casella and McCulloch 1992, chapter 4), `Var(mean) = (MS_groups + MS_draws - MS_rest) / (Q T)`, which estimates
    `var a / Q + var b / T + var e / (Q T)` without bias. Where the draws (or the groups) vary less than the rest, the
    estimate of their variance is negative and counts as 0: `max(MS_draws, MS_rest)` in place of `MS_draws`, so that
    the error never falls below that of the other parts. Degrees of freedom follow Satterthwaite (1946), from the mean
    squares as found: taking the larger one there would make a t of about T - 1 degrees of an error that hardly depends
    on the draws. Intervals cover about 95% from ten draws on, and at least 93% with five, wherever the variance lies,
    if draws are symmetric; `looks_skewed` has what others cost.

    With one draw only the groups vary: the mean and its error are those of Student's test of Q values.

    Args:
        values_QTM: the values.
        folds_Q: fold of each group, if each fold has draws of its own: the mean squares are taken fold by fold, and
            the variances of the folds' means are added. None for one fold.

    Returns:
        Means over the groups where a column is defined. Without two of these in each fold there is no error.

    Example:
        >>> values_QTM = np.array([[0.1, 0.3], [0.2, 0.4], [0.6, 0.9]])[..., None]
        >>> means = crossed_means(values_QTM)
        >>> [round(float(x[0]), 3) for x in (means.mean_M, means.std_error_M, means.df_M)]
        [0.417, 0.205, 2.959]
    """
    n_draws, m = values_QTM.shape[1:]
    folds_Q = np.zeros(len(values_QTM), np.int64) if folds_Q is None else folds_Q
    with np.errstate(divide="ignore", invalid="ignore"):
        folds = [_Squares.of(values_QTM[folds_Q == fold]) for fold in np.unique(folds_Q)]
        n_M = sum((fold.n_M for fold in folds), np.zeros(m))
        mean_M = sum((fold.total_M for fold in folds), np.zeros(m)) / n_M
        # the variance of a fold's mean, `MS / (n T)`, times the square of its share of the groups, `n / sum of n`
        parts_F3M = np.reshape([fold.squares_3M * fold.n_M / (n_M**2 * n_draws) for fold in folds], (-1, 3, m))
        dfs_F3M = np.reshape([fold.dfs_3M for fold in folds], (-1, 3, m))
        groups_M, draws_M, rest_M = parts_F3M.sum(axis=0)
        variance_M = np.maximum(groups_M, rest_M) + np.maximum(draws_M, rest_M) - rest_M
        spread_M = np.where(parts_F3M > 0, parts_F3M**2 / dfs_F3M, 0.0).sum(axis=(0, 1))
        df_M = np.where(variance_M == 0, math.inf, variance_M**2 / spread_M)
    lacks_M = np.isnan(mean_M + variance_M)
    return Means(mean_M, np.where(lacks_M, math.nan, np.sqrt(variance_M)), np.where(lacks_M, math.nan, df_M))


def looks_skewed(values_QTM: Doubles, folds_Q: NDArray[np.int64] | None = None) -> NDArray[np.bool_]:
    """Whether the means of the draws are more skewed than those of 19 in 20 symmetric designs, shape [M].

    The skewness `m_3 / m_2^(3/2)` of T normal values has mean 0 and variance `6 (T - 2) / ((T + 1) (T + 3))` (Fisher
    1930); of F folds it is the mean, with an F-th of the variance. Intervals of skewed draws cover too little: where
    exponential draws dominate, about .88 with five, .90 with ten and .92 with twenty. Five draws seldom show it: a
    sixth of exponential designs does, and two thirds with twenty. It is the design that is judged, not its interval:
    intervals miss most where the rare draw is missing, and with it the skewness.

    Example:
        >>> draws_T = np.array([0.0, 0.01, 0.02, 0.03, 0.9])
        >>> looks_skewed(np.stack([draws_T, draws_T**0.1], axis=-1)[None]).tolist()
        [True, False]
    """
    n_draws = values_QTM.shape[1]
    if n_draws < FEWEST_DRAWS:
        return np.zeros(values_QTM.shape[2], np.bool_)
    folds_Q = np.zeros(len(values_QTM), np.int64) if folds_Q is None else folds_Q
    folds = np.unique(folds_Q)
    skewness_M = np.zeros(values_QTM.shape[2])
    for fold in folds:
        own_QTM = values_QTM[folds_Q == fold]
        defined_QTM = ~np.isnan(own_QTM)
        draws_TM = np.where(defined_QTM, own_QTM, 0.0).sum(axis=0) / np.maximum(defined_QTM.sum(axis=0), 1)
        off_TM = draws_TM - draws_TM.mean(axis=0)
        second_M, third_M = (off_TM**2).mean(axis=0), (off_TM**3).mean(axis=0)
        varies_M = second_M > (1e-9 * np.abs(draws_TM).max(axis=0)) ** 2  # else it is rounding
        skewness_M += np.divide(third_M, second_M**1.5, out=np.zeros_like(third_M), where=varies_M)
    variance = 6 * (n_draws - 2) / ((n_draws + 1) * (n_draws + 3)) * len(folds)
    return np.asarray(np.abs(skewness_M) > stdtrit(np.inf, 1 - _ALPHA / 2) * math.sqrt(variance))


@dataclass(frozen=True)
class _Squares:
    """Mean squares of groups, draws and the rest in one fold, with their degrees of freedom."""

    n_M: Doubles
    """Groups that define the column."""
    total_M: Doubles
    """Sum over these groups of their means over draws."""
    squares_3M: Doubles
    dfs_3M: Doubles

    @classmethod
    def of(cls, values_QTM: Doubles) -> "_Squares":
        """0 for draws and rest if there is one draw, and NaN for the mean squares of one group."""
        n_draws = values_QTM.shape[1]
        defined_QM = ~np.isnan(values_QTM[:, 0])
        n_M = defined_QM.sum(axis=0).astype(np.float64)
        groups_QM = np.where(defined_QM, values_QTM.mean(axis=1), 0.0)
        draws_TM = np.nansum(values_QTM, axis=0) / n_M
        mean_M = draws_TM.mean(axis=0)
        off_QM = np.where(defined_QM, groups_QM - mean_M, 0.0)
        rest_M = np.zeros_like(n_M)
        for t, draw_M in enumerate(draws_TM):  # one by one, which bounds memory
            rest_M += np.nansum((values_QTM[:, t] - groups_QM - draw_M + mean_M) ** 2, axis=0)
        sums_3M = np.stack([n_draws * (off_QM**2).sum(axis=0), n_M * ((draws_TM - mean_M) ** 2).sum(axis=0), rest_M])
        dfs_3M = np.stack([n_M - 1, np.full_like(n_M, n_draws - 1), (n_M - 1) * (n_draws - 1)])
        squares_3M = np.where(n_M > 1, sums_3M / dfs_3M, np.where(n_M == 1, math.nan, 0.0))
        if n_draws == 1:
            squares_3M[1:] = 0.0
        return cls(n_M, groups_QM.sum(axis=0), squares_3M, dfs_3M)
