"""Lift: by how much one of two rankers has more credit, how sure that is, and how many impressions it takes to see.

Shapes: Q query groups, 2 rankers, P pairs.
"""

import math
from typing import Self

import numpy as np
from scipy.special import ndtri

from ltrscale.arrays import Doubles
from ltrscale.config import Config
from ltrscale.evaluation.statistics.crossed import crossed_means

_ALPHA = 0.05


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
        mean, low, high, p = (None if math.isnan(x) else float(x) for x in figures)
        return cls(mean=mean, low=low, high=high, p=p)

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def lift(credit_2Q: Doubles) -> Difference:
    """The first ranker's credit minus the second's, as a share of their mean credit.

    `L = sum_q (c_0q - c_1q) / sum_q (c_0q + c_1q) / 2`, a ratio of means over query groups, which are the sample: the
    impressions of one query are not independent. The error is that of the linearised ratio, the mean of
    `L + (c_0q - c_1q - L s_q) / mean(s)` with `s_q` the mean credit of both (Cochran 1977, section 6.4). Exchanging the
    rankers negates it. Interval and p speak of other queries of the same kind.

    Args:
        credit_2Q: credit of each ranker, summed over the impressions of each query group.

    Example:
        >>> found = lift(np.array([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0]]))
        >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3)
        (0.667, -0.437, 1.771)
    """
    difference_Q, level_Q = credit_2Q[0] - credit_2Q[1], credit_2Q.mean(axis=0)
    if not level_Q.any():
        return Difference(mean=None, low=None, high=None, p=None)
    ratio = difference_Q.sum() / level_Q.sum()
    return Difference.of(ratio + (difference_Q - ratio * level_Q) / level_Q.mean())


def impressions_needed(mean: float, variance: float, *, power: float) -> float | None:
    """Impressions until a two-sided test at 5% finds a difference with the given power; None for no difference.

    `((z_.975 + z_power) / mean)^2 variance`, for impressions of independent queries (Cohen 1988).

    Args:
        mean: of the difference in an impression.
        variance: of the difference in an impression.
        power: probability of finding it.

    Example:
        >>> round(impressions_needed(0.1, 1.0, power=0.8))
        785
    """
    return ((ndtri(1 - _ALPHA / 2) + ndtri(power)) / mean) ** 2 * variance if mean else None


class MeasureAgreement(Config):
    """How far two measures agree on which of two rankers is better, over pairs of rankers."""

    pairs: int
    """Pairs on which both measures have a verdict, right or not."""
    same: int
    """Those of them for which the verdicts are the same."""
    significant: int
    """Pairs for which both intervals exclude 0."""
    significant_same: int
    """Those of them for which the verdicts are the same."""
    correlation: float | None
    """Of the differences, `sum xy / sqrt(sum x^2 sum y^2)`, which does not depend on the order within the pairs."""


def measure_agreement(one_P: list[Difference], other_P: list[Difference]) -> MeasureAgreement:
    """The agreement of two measures of the same pairs, such as a metric's difference and the lift of interleaving.

    Example:
        >>> better, worse = (Difference(mean=m, low=m - 1, high=m + 1, p=0.01) for m in (2.0, -3.0))
        >>> measure_agreement([better, better], [better, worse]).model_dump()["same"]
        1
    """
    both = [(x, y) for x, y in zip(one_P, other_P, strict=True) if x.mean and y.mean]
    sure = [(x, y) for x, y in both if x.significant and y.significant]
    values_2P = np.array([(x.mean, y.mean) for x, y in both]).T
    return MeasureAgreement(
        pairs=len(both),
        same=_same(both),
        significant=len(sure),
        significant_same=_same(sure),
        correlation=float(values_2P[0] @ values_2P[1] / math.sqrt((values_2P**2).sum(axis=1).prod())) if both else None,
    )


def _same(pairs: list[tuple[Difference, Difference]]) -> int:
    return sum((x.mean or 0) * (y.mean or 0) > 0 for x, y in pairs)
