"""Findings of a study on a method or a difference: its mean over groups, draws and pretrainings, and sign changes.

Shapes: Q groups, T draws, P pretrainings that are crossed with all draws, G points between numbers of labelled groups.
NaN marks a group that leaves a metric undefined, in all draws.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.config import Strict
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS, crossed_means, errors_to_see, or_none
from ltrscale.reports.document import Figure

MOST_DRAWS = 1000
"""The largest number of draws that is proposed."""
_STEPS = 64
"""Points between two numbers of labelled groups at which a difference is tested."""


@dataclass(frozen=True)
class Spread:
    """The sources of a mean difference's variance, which predict what other numbers of draws and labels would see.

    `Var(mean) = groups + (draws + both) / T`.
    """

    draws: float
    """Variance of the mean from one draw of labels alone; T draws divide it by T."""
    groups: float
    """Variance from the groups alone, which no number of draws lowers."""
    n_groups: int
    both: float = 0.0
    """Variance from how one draw differs from group to group; more groups lower it, too."""

    @classmethod
    def from_values(cls, values_QT: Doubles) -> Self | None:
        """The spread of a difference, by the mean squares of `crossed_means`; None with fewer than two groups or draws.

        Both parts are above the estimates, as in `Means.detectable`, because few draws promise too much.
        """
        n, n_draws = int((~np.isnan(values_QT[:, 0])).sum()), values_QT.shape[1]
        if n < 2 or n_draws < 2:
            return None
        means = crossed_means(values_QT[..., None])
        promised = float((means.detectable() / errors_to_see(means.df_M))[0]) ** 2
        per_error = promised / float(means.std_error_M[0]) ** 2 if promised else 0.0
        drawn, both = per_error * float(means.drawn_M[0]), per_error * float(means.both_M[0])
        return cls((drawn - both) * n_draws, promised - drawn, n, both * n_draws)

    def detectable(self, draws_T: Ints) -> Doubles:
        """The smallest differences that these numbers of draws would see with a power of 80%, by a test at 5%."""
        drawn_T = (self.draws + self.both) / draws_T
        variance_T = self.groups + drawn_T
        spread_T = self.groups**2 / (self.n_groups - 1) + drawn_T**2 / (draws_T - 1)
        df_T = np.divide(variance_T**2, spread_T, out=np.full(len(draws_T), math.inf), where=spread_T > 0)
        return np.asarray(errors_to_see(df_T) * np.sqrt(variance_T))

    def draws_for(self, difference: float) -> int | None:
        """The fewest draws, at least five, that would see a difference; None if a thousand would not.

        Example:
            >>> spread = Spread(draws=0.014**2, groups=0.002**2, n_groups=5000)
            >>> spread.detectable(np.array([5])).round(3), spread.draws_for(0.01), spread.draws_for(0.005)
            (array([0.024]), 24, None)
        """
        draws_T = np.arange(FEWEST_DRAWS, MOST_DRAWS + 1)
        enough_T = self.detectable(draws_T) <= difference
        return int(draws_T[enough_T.argmax()]) if enough_T.any() else None

    def times_for(self, difference: float, draws: int, *, more: Literal["labels", "groups"]) -> float | None:
        """The factor on labels or test groups at which this many draws see a difference; None if no factor suffices.

        The variance over draws is assumed to fall as the labels grow, as found from 100 labelled groups on; that of the
        groups falls as they grow.
        """

        def sees(times: float) -> bool:
            labels, groups = (times, 1.0) if more == "labels" else (1.0, times)
            n_groups, both = round(self.n_groups * groups), self.both / labels / groups
            grown = Spread(self.draws / labels, self.groups / groups, n_groups, both)
            return bool(grown.detectable(np.array([draws])) <= difference)

        low, high = 1.0, 1e6
        if not sees(high):
            return None
        for _ in range(40):  # bisection of the logarithm: the detectable difference falls
            middle = math.sqrt(low * high)
            low, high = (low, middle) if sees(middle) else (middle, high)
        return high


@dataclass(frozen=True)
class Drawn:
    """A metric of every group, from models trained on several draws of the same number of labelled groups."""

    draws: tuple[int, ...]
    values_QTP: Doubles
    """NaN where the group leaves the metric undefined, in all draws."""
    pretrainings: tuple[int, ...] | None = None
    """Pretrainings that are crossed with all draws; None, with P = 1, if each draw has its own or none."""

    def minus(self, other: "Drawn") -> Self | None:
        """The paired differences on the draws and pretrainings that both have; None if they have none in common.

        A method whose pretrainings are not crossed is compared with each of the other's.
        """
        if (both := _on_common([self, other])) is None:
            return None
        one, two = both
        names = two.pretrainings if one.pretrainings is None else one.pretrainings
        return type(self)(one.draws, one.values_QTP - two.values_QTP, names)


def _on_common(drawn: Sequence[Drawn]) -> list[Drawn] | None:
    """The values on the draws and crossed pretrainings that all have in common; None if there are none."""
    draws = sorted(set.intersection(*(set(of.draws) for of in drawn)))
    crossed = [set(of.pretrainings) for of in drawn if of.pretrainings is not None]
    pretrainings = sorted(set.intersection(*crossed)) if crossed else []
    if not draws or (crossed and not pretrainings):
        return None
    common = []
    for of in drawn:
        values_QTP = of.values_QTP[:, [of.draws.index(draw) for draw in draws]]
        if of.pretrainings is not None:
            values_QTP = values_QTP[..., [of.pretrainings.index(name) for name in pretrainings]]
        common.append(Drawn(tuple(draws), values_QTP, None if of.pretrainings is None else tuple(pretrainings)))
    return common


class DrawsNeeded(Strict):
    """What would decide an open difference if it is truly as found: each alone, None where it would not suffice."""

    draws: int | None
    """Draws of labels."""
    labels: float | None
    """How many times the labelled groups, with as many draws."""
    groups: float | None
    """How many times the test groups, with as many draws."""


class MeanEstimate(Figure):
    """The mean of a metric, or of a difference, over groups and draws of labels.

    The interval holds for other groups, draws and pretrainings. There is none, nor anything else that judges, with
    fewer than five draws or two groups, or for the share of a single pretraining.
    """

    mean: float
    p: float | None
    """Two-sided p value of a mean of 0, by Student's t with Satterthwaite's degrees of freedom."""
    detectable: float | None
    """The smallest true mean other than 0 that this design would see with a power of 80%."""
    over_draws: float | None
    """Standard error over the means of the draws; None with one draw."""
    draws: int
    groups: int
    """Groups where the metric is defined."""
    pretrainings: int | None = None
    """Pretrainings that are crossed with all draws; None if each draw has its own or none."""
    skewed: bool = False
    """Whether the means of the draws look skewed, so that intervals may cover less than they say."""
    needs: DrawsNeeded | None = None
    """What would decide a difference that is judged and open; None if the difference is 0, or pretrainings are crossed
    with the draws."""

    @property
    def verdict(self) -> Literal["above", "below", "open"]:
        """Whether a difference is above 0, or below; open if the interval contains 0 or the draws are too few."""
        if not self.excludes_zero:
            return "open"
        return "above" if self.mean > 0 else "below"


def estimate(drawn: Drawn, *, judges: bool = True) -> MeanEstimate | None:
    """The mean over groups, draws and pretrainings with its crossed interval; None if no group defines the metric.

    Args:
        drawn: the metric, or a difference.
        judges: whether there are enough samples to judge, apart from the five draws.
    """
    groups, n = int((~np.isnan(drawn.values_QTP[:, 0, 0])).sum()), len(drawn.draws)
    if not groups:
        return None
    pretrainings = None if drawn.pretrainings is None else len(drawn.pretrainings)
    draws_T = np.nanmean(drawn.values_QTP, axis=(0, 2))
    means = crossed_means(drawn.values_QTP[..., None])
    low, high = means.interval()
    judged = judges and n >= FEWEST_DRAWS
    estimated = MeanEstimate(
        mean=float(means.mean_M[0]),
        low=or_none(low[0]) if judged else None,
        high=or_none(high[0]) if judged else None,
        p=or_none(means.p()[0]) if judged else None,
        detectable=or_none(means.detectable()[0]) if judged else None,
        over_draws=float(np.std(draws_T, ddof=1) / math.sqrt(n)) if n > 1 else None,
        draws=n,
        groups=groups,
        pretrainings=pretrainings,
        skewed=bool(means.skewed_M[0]),
    )
    # two equal methods stay open whatever the design
    open_ = judged and estimated.verdict == "open" and estimated.mean != 0 and pretrainings is None
    if not open_ or (spread := Spread.from_values(drawn.values_QTP[:, :, 0])) is None:
        return estimated
    size = abs(estimated.mean)
    needed = {unit: spread.times_for(size, n, more=unit) for unit in ("labels", "groups")}
    return estimated.replace(needs=DrawsNeeded(draws=spread.draws_for(size), **needed))


class Crossover(Strict):
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
    it at which 0 is not rejected (Fieller 1954), so it accounts for the same groups and nested labels at n1 and n2.
    The whole curve uses the draws and pretrainings that all numbers have: a number with more of them would have two
    means, one for each side. Numbers and crossovers rise. An end is None where the data reject 0 nowhere on that side;
    both are None if the draws are too few to judge.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> noise_QTP = 0.05 * rng.normal(size=(400, 8, 1))
        >>> ahead, behind = (Drawn(tuple(range(8)), noise_QTP + mean) for mean in (0.02, -0.02))
        >>> [(round(crossing.at), crossing.falls) for crossing in crossovers([(10, ahead), (1000, behind)])]
        [(85, True)]
    """
    common = _on_common([drawn for _, drawn in differences]) if len(differences) > 1 else None
    if common is None:
        return ()
    curve = [(n, drawn) for (n, _), drawn in zip(differences, common, strict=True)]
    parts = [_segment(*ends) for ends in itertools.pairwise(curve)]
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


def _segment(left: tuple[float, Drawn], right: tuple[float, Drawn]) -> tuple[Doubles, Doubles, Bools]:
    """Log n, the mean difference, and whether it may be 0, at points from one number of labelled groups to the next."""
    (n1, left_drawn), (n2, right_drawn) = left, right
    log_n_G = np.linspace(math.log(n1), math.log(n2), _STEPS + 1)
    share_G = np.linspace(0.0, 1.0, _STEPS + 1)
    values_QTP1, values_QTP2 = (drawn.values_QTP[..., None] for drawn in (left_drawn, right_drawn))
    means = crossed_means(values_QTP1 * (1 - share_G) + values_QTP2 * share_G)
    low_G, high_G = means.interval()
    rejected_G = (low_G > 0) | (high_G < 0)
    return log_n_G, means.mean_M, ~rejected_G | (len(left_drawn.draws) < FEWEST_DRAWS)
