"""Means over crossed samples: every draw of labels, and every pretraining, is tested on every query group.

`x_qt = mu + a_q + b_t + e_qt`: groups and draws are both samples, so both make the mean `x` uncertain. A bootstrap of
the groups alone leaves `b` out, and more groups never make up for it. Where several pretrainings are crossed with the
draws they are a third sample, with their own effect and one with each of the other samples.

Shapes: Q groups, T draws, P pretrainings, M columns (methods, metrics), F folds, S sets of samples. NaN marks a group
that a column leaves undefined, in all draws.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.polynomial import Chebyshev

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.late import Late
from ltrscale.reports.document import Figure

special = Late("scipy.special")

_ALPHA, _POWER = 0.05, 0.8
_MANY = 1e6
"""Degrees of freedom from which on a t is taken as normal."""
_SKEWED = 0.175
"""Divided by the degrees: the extra effect that allowing for skewed draws costs; simulated for 5 to 20 draws."""
_POINTS, _DEGREE, _QUANTILES = 97, 16, 200
_MOST_INVERSE = 1.5
"""Satterthwaite's degrees are seldom below 2/3; they may be below 1 where a part of the sum is subtracted."""


def errors_to_see(df_M: Doubles) -> Doubles:
    """How many true standard errors a mean must be for a test with these degrees to find it with a power of 80%.

    The noncentrality of a t (Cohen 1988, section 2.5), and the cost of `Means.p` allowing for skewed draws.
    """
    df_M = np.minimum(df_M, _MANY)
    return np.asarray(special.nctdtrinc(df_M, 1 - _POWER, special.stdtrit(df_M, 1 - _ALPHA / 2)) * (1 + _SKEWED / df_M))


def _errors_to_promise(df_M: Doubles) -> Doubles:
    """How many estimated standard errors to promise, so that experiments see such a true mean in 80% of cases."""
    # The estimate s varies as a chi square over its degrees, so a promise of c estimates is one of `c s` true errors. c
    # solves `E[power(c s)] = 0.8`: a promise that is small by chance loses more power than a large one gains. The true
    # errors alone, 3.9 at 4 degrees, promise a mean that is found in 70% of the cases.
    inverse_G, log_factor_G = _promises()
    with np.errstate(divide="ignore"):
        inverse_M = np.minimum(1 / df_M, _MOST_INVERSE)
    factor_M = np.exp(np.interp(inverse_M, inverse_G, log_factor_G)) * (1 + _SKEWED * inverse_M)
    return np.where(np.isnan(df_M), np.nan, factor_M)


@functools.cache
def _promises() -> tuple[Doubles, Doubles]:
    """The logarithm of the factor at points of 1 / df: of a polynomial through some of them, for it is smooth."""
    inverse_G = np.linspace(0.0, _MOST_INVERSE, _POINTS)
    smooth = Chebyshev.interpolate(_log_promise, _DEGREE, domain=[1 / _MANY, _MOST_INVERSE])
    return inverse_G, smooth(np.maximum(inverse_G, 1 / _MANY))


def _log_promise(inverse_G: Doubles) -> Doubles:
    """The logarithm of the factor at some 1 / df, by the secant method."""
    df_G1 = 1 / inverse_G[:, None]
    below_U = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    found_GU = np.sqrt(special.chdtri(df_G1, 1 - below_U) / df_G1)
    limit_G1 = special.stdtrit(df_G1, 1 - _ALPHA / 2)

    def off(log_G: Doubles) -> Doubles:  # nearly a straight line, as quantiles of the normal distribution
        missed_GU = special.nctdtr(df_G1, np.exp(log_G)[:, None] * found_GU, limit_G1)
        return np.asarray(special.ndtri(missed_GU.mean(axis=1)) - special.ndtri(1 - _POWER))

    before_G, log_G = 1 + 2.85 * inverse_G, 1.05 + 2.85 * inverse_G
    off_before_G = off(before_G)
    for _ in range(4):
        off_G = off(log_G)
        before_G, log_G = log_G, log_G - off_G * (log_G - before_G) / (off_G - off_before_G)
        off_before_G = off_G
    return log_G


FEWEST_DRAWS = 5
"""With fewer draws of labels nothing is judged: their spread, and so the interval, is too uncertain."""
_GROUPS, _DRAWS = 0, 1
_SETS = [frozenset(axes) for size in (3, 2, 1) for axes in itertools.combinations(range(3), size)]
"""The sets of samples that vary together, the largest first."""


@dataclass(frozen=True)
class Means:
    """Means of M columns with standard errors, and degrees of freedom of the errors; NaN where there is none."""

    mean_M: Doubles
    std_error_M: Doubles
    df_M: Doubles
    skewness_M: Doubles
    """Skewness of the mean, from the draws, shrunk towards 0 with the weight of five draws; 0 for one draw."""
    drawn_M: Doubles
    """The part of the squared error that more draws would lower."""
    both_M: Doubles
    """The part of the squared error that more draws or more groups would lower: groups and draws vary together."""
    skewed_M: Bools
    """Whether the means of the draws are more skewed than those of 19 in 20 symmetric designs; see `_look_skewed`."""

    def interval(self) -> tuple[Doubles, Doubles]:
        """Ends of the 95% intervals: the means that `p` does not reject."""
        limit_M = special.stdtrit(self.df_M, 1 - _ALPHA / 2)
        return self.mean_M - self._t(limit_M) * self.std_error_M, self.mean_M - self._t(-limit_M) * self.std_error_M

    def p(self) -> Doubles:
        """Two-sided p values of means of 0; 1 for a mean of 0 without an error.

        By Student's t, after Hall's (1992) transformation of `t = mean / error` for the skewness k of the mean, `t + k
        t^2 / 3 + k^2 t^3 / 27 + k / 6`, which is `t` where k = 0. Student's t alone rejects true means of skewed draws
        too often.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            t_M = self.mean_M / self.std_error_M
        t_M = np.where((self.mean_M == 0) & (self.std_error_M == 0), 0.0, t_M)
        k_M = self.skewness_M
        with np.errstate(invalid="ignore"):
            hall_M = t_M + k_M * (t_M**2 / 3 + k_M * t_M**3 / 27 + 1 / 6)
        return np.asarray(2 * special.stdtr(self.df_M, -np.abs(np.where(k_M == 0, t_M, hall_M))))

    def _t(self, hall_M: Doubles) -> Doubles:
        """The inverse of the transformation, `(cbrt(1 + x) - 1) * 3 / k` with `x = k (hall - k / 6)`."""
        k_M = np.where(self.skewness_M == 0, 1.0, self.skewness_M)
        x_M = k_M * (hall_M - k_M / 6)
        # for small x, root - 1 is rounding error: the skewness of two draws is 0 only up to 1e-19
        small_M = np.expm1(np.log1p(np.clip(x_M, -0.5, 0.5)) / 3)
        root_M = np.where(np.abs(x_M) < 0.5, small_M, np.cbrt(1 + x_M) - 1)
        return np.where(self.skewness_M == 0, hall_M, root_M * 3 / k_M)

    def detectable(self) -> Doubles:
        """The smallest true means that designs like this one see with a power of 80%; see `_errors_to_promise`."""
        return np.asarray(_errors_to_promise(self.df_M) * self.std_error_M)


def crossed_means(values_QTPM: Doubles, folds_Q: Ints | None = None) -> Means:
    """Means over groups, draws and pretrainings, with errors that generalise to others of each.

    Values are of shape [Q, T, P, M], or [Q, T, M] where no pretrainings are crossed with the draws. With the mean
    squares of an analysis of variance of random effects without replication (Cornfield and Tukey 1956; Searle, Casella
    and McCulloch 1992, chapter 4), the variance of each set of samples is its mean square less those of the larger sets
    that contain it, and `Var(mean)` the sum of all over their numbers: for groups and draws `(MS_groups + MS_draws -
    MS_rest) / (Q T)`, which estimates `var a / Q + var b / T + var e / (Q T)` without bias. A set that varies less than
    those that contain it has a negative estimate, which counts as 0, so that the error never falls below that of the
    other parts. Degrees of freedom follow Satterthwaite (1946), from the mean squares as found: taking the larger one
    there would make a t of about T - 1 degrees of an error that hardly depends on the draws. Intervals cover about 95%
    from ten draws on, and at least 92% with five, wherever the variance lies, if draws are symmetric; for others see
    `_look_skewed`.

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
    values_QTPM = values_QTPM if values_QTPM.ndim == 4 else values_QTPM[:, :, None]
    n_draws, n_pretrainings, m = values_QTPM.shape[1:]
    folds_Q = np.zeros(len(values_QTPM), np.int64) if folds_Q is None else folds_Q
    with np.errstate(divide="ignore", invalid="ignore"):
        folds = [_Squares.from_values(values_QTPM[folds_Q == fold]) for fold in np.unique(folds_Q)]
        n_M = sum((fold.n_M for fold in folds), np.zeros(m))
        mean_M = sum((fold.total_M for fold in folds), np.zeros(m)) / n_M
        # the variance of a fold's mean, `MS / (n T P)`, times the square of its share of the groups, `n / sum of n`
        cells_M = n_M**2 * n_draws * n_pretrainings
        parts_FSM = np.reshape([fold.squares_SM * fold.n_M / cells_M for fold in folds], (-1, len(_SETS), m))
        dfs_FSM = np.reshape([fold.dfs_SM for fold in folds], (-1, len(_SETS), m))
        components_SM = _components(parts_FSM.sum(axis=0))
        variance_M = components_SM.sum(axis=0)
        spread_M = np.where(parts_FSM > 0, parts_FSM**2 / dfs_FSM, 0.0).sum(axis=(0, 1))
        df_M = np.where(variance_M == 0, math.inf, variance_M**2 / spread_M)
        # without shrinkage, the estimated skewness makes tests of few draws weak
        weight = n_draws / (n_draws + FEWEST_DRAWS) / math.sqrt(n_draws)
        of_draws = [
            weight * fold.skewness_M * _components(parts_SM)[_SETS.index(frozenset({_DRAWS}))] ** 1.5
            for fold, parts_SM in zip(folds, parts_FSM, strict=True)
        ]
        skewness_M = sum(of_draws, np.zeros(m)) / variance_M**1.5
    lacks_M = np.isnan(mean_M + variance_M)
    error_M, df_M = (np.where(lacks_M, math.nan, each_M) for each_M in (np.sqrt(variance_M), df_M))
    drawn_M, both_M = (
        components_SM[[of <= axes for axes in _SETS]].sum(axis=0) for of in ({_DRAWS}, {_DRAWS, _GROUPS})
    )
    skewed_M = _look_skewed(np.reshape([fold.skewness_M for fold in folds], (-1, m)), n_draws)
    return Means(mean_M, error_M, df_M, np.where(variance_M > 0, skewness_M, 0.0), drawn_M, both_M, skewed_M)


def _look_skewed(skewness_FM: Doubles, n_draws: int) -> Bools:
    """Whether draws with means of this skewness in each fold look skewed, shape [M]."""
    # The skewness `m_3 / m_2^(3/2)` of T normal values has mean 0 and variance `6 (T - 2) / ((T + 1) (T + 3))` (Fisher
    # 1930); for F folds it is the mean, with an F-th of the variance. Intervals allow for skewness, but not enough:
    # where exponential draws dominate they cover about .89 with five, .92 with ten and .94 with twenty. A sixth of
    # exponential designs look skewed with five draws, two thirds with twenty. This judges the design, not its interval:
    # intervals miss most where the rare draw is missing, and the skewness with it.
    if n_draws < FEWEST_DRAWS:
        return np.zeros(skewness_FM.shape[1], np.bool_)
    variance = 6 * (n_draws - 2) / ((n_draws + 1) * (n_draws + 3)) * len(skewness_FM)
    return np.asarray(np.abs(skewness_FM.sum(axis=0)) > special.stdtrit(np.inf, 1 - _ALPHA / 2) * math.sqrt(variance))


def _components(squares_SM: Doubles) -> Doubles:
    """The part of each mean square that is due to its set of samples alone, in the order of `_SETS`, at least 0."""
    parts: dict[frozenset[int], Doubles] = {}
    for axes, square_M in zip(_SETS, squares_SM, strict=True):
        of_larger = [part_M for larger, part_M in parts.items() if axes < larger]
        parts[axes] = np.maximum(square_M - sum(of_larger, np.zeros_like(square_M)), 0.0)
    return np.stack(list(parts.values()))


@dataclass(frozen=True)
class _Squares:
    """Mean squares of the sets of samples in one fold, in the order of `_SETS`, with their degrees of freedom."""

    n_M: Doubles
    """Groups that define the column."""
    total_M: Doubles
    """Sum over these groups of their means over draws and pretrainings."""
    squares_SM: Doubles
    """0 where a sample of the set has only one member, and NaN if a single group defines the column."""
    dfs_SM: Doubles
    skewness_M: Doubles
    """Skewness of the means of the draws."""

    @classmethod
    def from_values(cls, values_QTPM: Doubles) -> "_Squares":
        """Analysis of variance: the effect of a set is its mean less the effects of all smaller sets."""
        defined_QM = ~np.isnan(values_QTPM[:, 0, 0])
        n_M = defined_QM.sum(axis=0).astype(np.float64)
        values_QTPM = np.where(defined_QM[:, None, None], values_QTPM, 0.0)
        sizes = [n_M, *(np.full_like(n_M, size) for size in values_QTPM.shape[1:3])]
        effects: dict[frozenset[int], Doubles] = {}
        squares: dict[frozenset[int], tuple[Doubles, Doubles]] = {}
        for axes in [frozenset[int](), *reversed(_SETS)]:
            others = tuple(axis for axis in range(3) if axis not in axes)
            count_M = math.prod((sizes[axis] for axis in others), start=np.ones_like(n_M))
            df_M = math.prod((sizes[axis] - 1 for axis in axes), start=np.ones_like(n_M))
            single = any(values_QTPM.shape[axis] == 1 for axis in axes - {_GROUPS})
            with np.errstate(divide="ignore", invalid="ignore"):
                effect = values_QTPM.sum(axis=others, keepdims=True) / count_M
                for smaller, of_smaller in effects.items():
                    effect = effect - of_smaller if smaller < axes else effect
                effect = np.where(defined_QM[:, None, None], effect, 0.0) if _GROUPS in axes else effect
                square_M = np.where(n_M > 1, count_M * (effect**2).sum(axis=(0, 1, 2)) / df_M, 0.0)
            effects[axes] = effect
            squares[axes] = np.where(single, 0.0, np.where(n_M == 1, math.nan, square_M)), df_M
        squares_SM, dfs_SM = (np.stack(of_sets) for of_sets in zip(*(squares[axes] for axes in _SETS), strict=True))
        mean_M = effects[frozenset()][0, 0, 0]
        draws_TM = np.nan_to_num(mean_M + effects[frozenset({_DRAWS})][0, :, 0])
        return cls(n_M, np.where(n_M > 0, n_M * mean_M, 0.0), squares_SM, dfs_SM, _skewness(draws_TM))


def _skewness(draws_TM: Doubles) -> Doubles:
    """`m_3 / m_2^(3/2)`; 0 where the values do not vary."""
    off_TM = draws_TM - draws_TM.mean(axis=0)
    second_M, third_M = (off_TM**2).mean(axis=0), (off_TM**3).mean(axis=0)
    varies_M = second_M > (1e-9 * np.abs(draws_TM).max(axis=0)) ** 2  # else it is rounding
    return np.asarray(np.divide(third_M, second_M**1.5, out=np.zeros_like(third_M), where=varies_M))


def or_none(value: float) -> float | None:
    """The number, None for NaN."""
    return None if math.isnan(value) else float(value)


class Difference(Figure):
    """A difference with its interval and two-sided p value; None where the groups do not determine it."""

    p: float | None

    @classmethod
    def from_values(cls, values_Q: Doubles) -> Self:
        """The mean over query groups, by Student's t; NaN marks groups that do not count."""
        means = crossed_means(values_Q[:, None, None])
        low_M, high_M = means.interval()
        mean, low, high, p = map(or_none, (means.mean_M[0], low_M[0], high_M[0], means.p()[0]))
        return cls(mean=mean, low=low, high=high, p=p)
