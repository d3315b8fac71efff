"""Curves of a metric against the number of labelled groups: differences between methods, and where they change sign.

Shapes: Q groups, T draws of labels, G points of a grid.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from ltrscale.arrays import Doubles
from ltrscale.config import Config
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS, Spread, crossed_means, looks_skewed

_STEPS = 64
"""Points between two numbers of labelled groups at which a difference is tested."""


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
    """What would decide a difference that is judged and open; None of one that is 0."""

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
        low=_known(low[0]) if judged else None,
        high=_known(high[0]) if judged else None,
        p=_known(means.p()[0]) if judged else None,
        detectable=_known(means.detectable()[0]) if judged else None,
        over_draws=float(np.std(draws_T, ddof=1) / math.sqrt(n)) if n > 1 else None,
        draws=n,
        groups=groups,
        skewed=bool(looks_skewed(drawn.values_QT[:, :, None])[0]),
    )
    # nothing decides between two that are the same
    open_ = judged and estimated.verdict == "open" and estimated.mean != 0
    return estimated.replace(needs=_needs(drawn, estimated)) if open_ else estimated


def _needs(drawn: Drawn, estimated: MeanEstimate) -> DrawsNeeded | None:
    """What would see a difference of the size that was found."""
    if (spread := Spread.of(drawn.values_QT)) is None:
        return None
    size, n = abs(estimated.mean), estimated.draws
    more = {what: spread.times_for(size, n, more=what) for what in ("labels", "groups")}
    return DrawsNeeded(draws=spread.draws_for(size), **more)


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
    and n2.

    Args:
        differences: numbers of labelled groups, rising, with the differences there.

    Returns:
        The changes of sign, rising; none if the sign is the same in the whole range. Ends are None where the data
        reject 0 nowhere on that side, and both if the draws are too few to judge.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> ahead, behind = (Drawn(tuple(range(8)), mean + 0.05 * rng.normal(size=(400, 8))) for mean in (0.02, -0.02))
        >>> [(round(crossing.at), crossing.falls) for crossing in crossovers([(10, ahead), (1000, behind)])]
        [(99, True)]
    """
    parts = [_segment(*ends) for ends in itertools.pairwise(differences)]
    if not parts:
        return ()
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
    (n1, one), (n2, two) = left, right
    common = sorted(set(one.draws) & set(two.draws))
    log_n_G = np.linspace(math.log(n1), math.log(n2), _STEPS + 1)
    if not common:
        return log_n_G, np.full(_STEPS + 1, math.nan), np.ones(_STEPS + 1, np.bool_)
    share_G = np.linspace(0.0, 1.0, _STEPS + 1)
    values_QT1, values_QT2 = (drawn.of(common).values_QT[:, :, None] for drawn in (one, two))
    means = crossed_means(values_QT1 * (1 - share_G) + values_QT2 * share_G)
    low_G, high_G = means.interval()
    rejected_G = (low_G > 0) | (high_G < 0)
    return log_n_G, means.mean_M, ~rejected_G | (len(common) < FEWEST_DRAWS)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
