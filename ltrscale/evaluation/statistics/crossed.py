"""Means over draws of labels and query groups, which are crossed: every draw is tested on every group.

`x_qt = mu + a_q + b_t + e_qt`: groups and draws are both samples, so both make the mean `x` uncertain. A bootstrap of
the groups alone leaves `b` out, and more groups never make up for it. The same holds along a curve of a metric, or of
its difference between methods, against the number of labelled groups.

Shapes: Q groups, T draws, M columns (methods, metrics), F folds, G points of a grid. NaN marks a group that a column
leaves undefined, in all draws.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, nctdtrinc, stdtr, stdtrit

from ltrscale.arrays import Doubles
from ltrscale.config import Config

FEWEST_DRAWS = 5
"""With fewer draws of labels nothing is judged: their spread, and so the interval, is known too badly."""
_ALPHA, _POWER = 0.05, 0.8
_MANY = 1e6
"""Degrees of freedom from which on a t is a normal variable."""
MOST_DRAWS = 1000
"""More are not proposed."""
_STEPS = 64
"""Points between two numbers of labelled groups at which a difference is tested."""


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

        Both parts are above the estimated ones, as in `Means.detectable`: few draws promise too much.
        """
        n, n_draws = int((~np.isnan(values_QT[:, 0])).sum()), values_QT.shape[1]
        if n < 2 or n_draws < 2:
            return None
        of_groups, of_draws, of_cells = _Squares.of(values_QT[..., None]).squares_3M[:, 0].tolist()
        inflation = float(_inflation(crossed_means(values_QT[..., None]).df_M)[0])
        groups = inflation * max(of_groups - of_cells, 0.0) / (n * n_draws)
        return cls(inflation * max(of_draws, of_cells) / n, groups, n)

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

    Means are over the groups where a column is defined; without two of these in each fold there is no error. If each
    fold has its own draws, `folds_Q` is the fold of each group: the mean squares are taken fold by fold, and the
    variances of the folds' means are added.

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


def or_none(value: float) -> float | None:
    """The number, None for NaN."""
    return None if math.isnan(value) else float(value)


class Difference(Config):
    """A difference with its 95% interval and two-sided p value; None where the groups do not determine it."""

    mean: float | None
    low: float | None
    high: float | None
    p: float | None

    @classmethod
    def of(cls, values_Q: Doubles) -> Self:
        """The mean over query groups, by Student's t; NaN marks groups that do not count."""
        means = crossed_means(values_Q[:, None, None])
        low_M, high_M = means.interval()
        figures = (means.mean_M[0], low_M[0], high_M[0], means.p()[0])
        mean, low, high, p = map(or_none, figures)
        return cls(mean=mean, low=low, high=high, p=p)

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Drawn:
    """A metric of every group, from models trained on several draws of the same number of labelled groups."""

    draws: tuple[int, ...]
    values_QT: Doubles
    """NaN where the group leaves the metric undefined, in all draws."""

    def of(self, draws: Sequence[int]) -> Self:
        """The values of some of the draws, in their order."""
        return type(self)(tuple(draws), self.values_QT[:, [self.draws.index(draw) for draw in draws]])

    def minus(self, other: "Drawn") -> Self | None:
        """The paired differences, of the draws that both have; None if they have none in common."""
        common = sorted(set(self.draws) & set(other.draws))
        if not common:
            return None
        return type(self)(tuple(common), self.of(common).values_QT - other.of(common).values_QT)


class DrawsNeeded(Config):
    """What would see an undecided difference if it is in truth as found: each alone, None where it would not do."""

    draws: int | None
    """Draws of labels."""
    labels: float | None
    """How many times the labelled groups, with as many draws."""
    groups: float | None
    """How many times the test groups, with as many draws."""


class MeanEstimate(Config):
    """The mean of a metric, or of a difference, over groups and draws of labels."""

    mean: float
    low: float | None
    """Lower end of the 95% interval, which holds for other groups and other draws; None, as is all that judges, with
    fewer than five draws or two groups."""
    high: float | None
    """Upper end."""
    p: float | None
    """Two-sided p value of a mean of 0, by Student's t with Satterthwaite's degrees of freedom."""
    detectable: float | None
    """The smallest true mean other than 0 that this design would see with a power of 80%."""
    over_draws: float | None
    """Standard error over the means of the draws; None with one draw."""
    draws: int
    groups: int
    """Groups where the metric is defined."""
    skewed: bool = False
    """Whether the means of the draws look skewed, so that intervals may cover less than they say."""
    needs: DrawsNeeded | None = None
    """What would decide a difference that is judged and open; None if the difference is 0."""

    @property
    def verdict(self) -> Literal["above", "below", "open"]:
        """Whether a difference is above 0, or below; open if the interval contains 0 or the draws are too few."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return "open"
        return "above" if self.mean > 0 else "below"


def estimate(drawn: Drawn) -> MeanEstimate | None:
    """The mean over groups and draws with its crossed interval; None if no group defines the metric.

    Example:
        >>> estimated = estimate(Drawn((0, 1), np.array([[0.1, 0.3], [0.2, 0.4], [0.6, 0.9]])))
        >>> round(estimated.mean, 3), estimated.draws, estimated.groups, estimated.verdict
        (0.417, 2, 3, 'open')
    """
    groups, n = int((~np.isnan(drawn.values_QT[:, 0])).sum()), len(drawn.draws)
    if not groups:
        return None
    draws_T = np.nanmean(drawn.values_QT, axis=0)
    means = crossed_means(drawn.values_QT[:, :, None])
    low, high = means.interval()
    judged = n >= FEWEST_DRAWS
    estimated = MeanEstimate(
        mean=float(means.mean_M[0]),
        low=or_none(low[0]) if judged else None,
        high=or_none(high[0]) if judged else None,
        p=or_none(means.p()[0]) if judged else None,
        detectable=or_none(means.detectable()[0]) if judged else None,
        over_draws=float(np.std(draws_T, ddof=1) / math.sqrt(n)) if n > 1 else None,
        draws=n,
        groups=groups,
        skewed=bool(looks_skewed(drawn.values_QT[:, :, None])[0]),
    )
    # nothing decides between two that are the same
    open_ = judged and estimated.verdict == "open" and estimated.mean != 0
    if not open_ or (spread := Spread.of(drawn.values_QT)) is None:
        return estimated
    size = abs(estimated.mean)
    needed = {unit: spread.times_for(size, n, more=unit) for unit in ("labels", "groups")}
    return estimated.replace(needs=DrawsNeeded(draws=spread.draws_for(size), **needed))


class Crossover(Config):
    """A number of labelled groups at which the difference between two methods changes its sign."""

    at: float
    """Where the difference is 0, interpolated linearly in the logarithm of the number of labelled groups."""
    falls: bool
    """Whether the difference is positive before and negative after."""
    low: float | None
    """Lower end of the 95% interval; None if it reaches below the smallest number."""
    high: float | None
    """Upper end; None if it reaches above the largest number."""


def crossovers(differences: Sequence[tuple[float, Drawn]]) -> tuple[Crossover, ...]:
    """Where a curve of differences changes its sign, with intervals.

    Between two numbers n1 < n2 of labelled groups each group's difference is interpolated in log n, so that its mean
    and crossed interval at any n follow from the same draws and groups. The interval of a crossover are the n around
    it at which 0 is not rejected (Fieller 1954). It therefore knows that the same groups and nested labels enter at n1
    and n2. Numbers and crossovers rise; ends are None where the data reject 0 nowhere on that side, and both if the
    draws are too few to judge.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> ahead, behind = (Drawn(tuple(range(8)), mean + 0.05 * rng.normal(size=(400, 8))) for mean in (0.02, -0.02))
        >>> [(round(crossing.at), crossing.falls) for crossing in crossovers([(10, ahead), (1000, behind)])]
        [(99, True)]
    """
    if len(differences) < 2:
        return ()
    parts = [_segment(*ends) for ends in itertools.pairwise(differences)]
    log_n_G, mean_G, open_G = (np.concatenate(column) for column in zip(*parts, strict=True))
    crossings = []
    clear_G = ~np.isnan(mean_G) & (mean_G != 0)  # a difference that is exactly 0 has no side
    log_n_G, mean_G, open_G = log_n_G[clear_G], mean_G[clear_G], open_G[clear_G]
    for i in np.flatnonzero((mean_G[:-1] > 0) != (mean_G[1:] > 0)):
        x = log_n_G[i] + (log_n_G[i + 1] - log_n_G[i]) * mean_G[i] / (mean_G[i] - mean_G[i + 1])
        rejected_below, rejected_above = np.flatnonzero(~open_G[: i + 1]), np.flatnonzero(~open_G[i + 1 :])
        crossings.append(
            Crossover(
                at=math.exp(x),
                falls=bool(mean_G[i] > 0),
                low=math.exp(log_n_G[rejected_below[-1]]) if len(rejected_below) else None,
                high=math.exp(log_n_G[i + 1 + rejected_above[0]]) if len(rejected_above) else None,
            )
        )
    return tuple(crossings)


def _segment(left: tuple[float, Drawn], right: tuple[float, Drawn]) -> tuple[Doubles, Doubles, np.ndarray]:
    """Log n, the mean difference, and whether it may be 0, at points from one number of labelled groups to the next."""
    (n1, left_drawn), (n2, right_drawn) = left, right
    common = sorted(set(left_drawn.draws) & set(right_drawn.draws))
    log_n_G = np.linspace(math.log(n1), math.log(n2), _STEPS + 1)
    if not common:
        return log_n_G, np.full(_STEPS + 1, math.nan), np.ones(_STEPS + 1, np.bool_)
    share_G = np.linspace(0.0, 1.0, _STEPS + 1)
    values_QT1, values_QT2 = (drawn.of(common).values_QT[:, :, None] for drawn in (left_drawn, right_drawn))
    means = crossed_means(values_QT1 * (1 - share_G) + values_QT2 * share_G)
    low_G, high_G = means.interval()
    rejected_G = (low_G > 0) | (high_G < 0)
    return log_n_G, means.mean_M, ~rejected_G | (len(common) < FEWEST_DRAWS)
