"""Means, intervals and comparisons from the metrics of every group and trial: is one method better than another?

Trials with the same labels are averaged by group, so several seeds count as one draw of labels. Between methods of one
draw each, the query group is the unit: a result holds for other queries, not for other labels (`blocks`). Several
draws of labels are a second sample, crossed with the groups: see `crossed`. For very many groups only sums over blocks
are kept, and blocks are resampled: see `blocks`.

Shapes: Q groups, B blocks of groups, t trials of one method, T draws of labels, K methods, M metrics or columns
(methods, metrics), S resamples. NaN marks a group that a metric leaves undefined.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ltrscale.arrays import Doubles, Ints
from ltrscale.config import Strict
from ltrscale.evaluation.statistics.blocks import Blocks, all_numbers, bootstrap_means, holm, sign_flip_p
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS, crossed_means, or_none
from ltrscale.reports.document import Figure

_INTERVAL = (0.025, 0.975)
_RESAMPLED = 1 << 24
"""Means of resamples that are held at once, of all slices, methods and metrics; 8 bytes each."""
PATTERNS = 40
"""The fewest random sign patterns for each comparison that Holm adjusts with others; p can then fall to 1/40."""


class Summary(Figure):
    """A metric of one method over query groups and trials; None where no group defines it."""

    trials: tuple[float | None, ...]
    """The mean of each trial."""
    std_error: float | None
    """Standard error of the mean over trials; None with one trial."""
    groups: int
    """Groups where the metric is defined."""
    undefined: int
    """Groups where it is undefined: those without a relevant document, or with `leave_out_constant` of equal labels."""
    as_zero: float | None
    """The mean with undefined values counted as 0."""
    as_one: float | None
    """The mean with undefined values counted as 1."""
    draws: int = 1
    """Different labels among the trials; with several the interval is over groups and draws."""


class Comparison(Strict):
    """A method against the baseline, on the groups where both are defined; positive differences favour the method."""

    difference: float
    low: float | None
    """Lower end of the 95% interval of the difference; None, like all below, if the draws are too few to judge."""
    high: float | None
    p: float | None
    """Two-sided p value: of the sign-flip test for one draw, of the crossed t test for several."""
    p_holm: float | None
    """The p value, adjusted by Holm for the number of compared methods; in a slice, for that of the slices too."""
    draws: int = 1
    """Draws of labels that the methods share; a method with one draw is compared with each of the other's."""
    detectable: float | None = None
    """The smallest difference that the design would have seen (two-sided 5%, power 80%)."""
    skewed: bool = False
    """Whether the differences of several draws look skewed, so that intervals may cover less than they say."""

    @property
    def figure(self) -> Figure:
        """The difference with its interval."""
        return Figure(mean=self.difference, low=self.low, high=self.high)


class Scope(Strict):
    """Results on some of the groups, by metric."""

    summaries: dict[str, Summary]
    comparisons: dict[str, Comparison]
    """Comparisons with the baseline; none for the baseline itself, nor for a metric that no group defines."""


@dataclass(frozen=True)
class _Drawn:
    """A method's blocks by draw of labels, averaged over the trials of each draw."""

    draws: tuple[str | None, ...]
    blocks: Blocks

    @classmethod
    def from_blocks(cls, blocks: Blocks, labels_t: Sequence[str | None]) -> Self:
        """Trials with equal labels are one draw."""
        draws = tuple(dict.fromkeys(labels_t))
        of_draws = ([i for i, labels in enumerate(labels_t) if labels == draw] for draw in draws)
        sums_BTM = np.stack([blocks.sums_BTM[:, trials].mean(axis=1) for trials in of_draws], axis=1)
        return cls(draws, replace(blocks, sums_BTM=sums_BTM))

    def minus(self, other: Self) -> tuple[Blocks, int]:
        """Differences by shared draw, one draw meeting all of the other's (of means if none is shared); their count."""
        one_BTM, other_BTM = self.blocks.sums_BTM, other.blocks.sums_BTM
        shared = [draw for draw in self.draws if draw in other.draws]
        if 1 in (len(self.draws), len(other.draws)):
            n = max(len(self.draws), len(other.draws))
        elif not shared:
            one_BTM, other_BTM, n = one_BTM.mean(axis=1, keepdims=True), other_BTM.mean(axis=1, keepdims=True), 0
        else:
            one_BTM, other_BTM = (x.blocks.sums_BTM[:, [x.draws.index(draw) for draw in shared]] for x in (self, other))
            n = len(shared)
        return replace(self.blocks, sums_BTM=one_BTM - other_BTM), n


def scopes(
    slices: Sequence[Sequence[Blocks]],
    metrics: Sequence[str],
    *,
    baseline: int | None,
    samples: int,
    seed: int,
    labels_K: Sequence[Sequence[str | None]] | None = None,
    folds_Q: Ints | None = None,
    together: int | None = None,
) -> list[list[Scope]]:
    """Summaries of each method over each slice, and comparisons with the baseline, by slice and method.

    All slices share all resamples and sign patterns. Each comparison that Holm adjusts with others needs 40 patterns:
    one p is at least 1 / (patterns + 1), and Holm multiplies it by their number.

    Args:
        slices: for each slice, such as all groups, and each method the metrics of every trial, summed over the same
            blocks of groups; methods may differ in the number of trials.
        metrics: names of the M metrics.
        baseline: index of the method to compare the others with, or None.
        samples: bootstrap resamples, and the fewest random sign patterns of the test.
        seed: of the resampling.
        labels_K: for each method the identity of the labels of every trial; None if all have the same.
        folds_Q: fold of each group, if each fold has its own draws and each group is a block; None for one fold.
        together: the number of comparisons of a metric that p will be adjusted for; None for those of one slice.

    Example:
        >>> methods = [Blocks.from_values(np.zeros((9, 1, 1))), Blocks.from_values(np.ones((9, 2, 1)))]
        >>> ((worse, better),) = scopes([methods], ["map"], baseline=0, samples=99, seed=0)
        >>> better.summaries["map"].mean, better.comparisons["map"].difference
        (1.0, 1.0)
    """
    labels_K = labels_K or [[None] * blocks.sums_BTM.shape[1] for blocks in slices[0]]
    together = len(labels_K) - 1 if together is None else together
    patterns, numbers_B = max(samples, PATTERNS * together - 1), all_numbers(blocks_K[0] for blocks_K in slices)
    size = max(1, _RESAMPLED // (samples * len(labels_K) * len(metrics)))
    judged: list[list[Scope]] = []
    for first in range(0, len(slices), size):  # in parts, to save memory; each draws the same again
        some = list(enumerate(slices[first : first + size]))
        drawn = {
            (s, k): _Drawn.from_blocks(blocks, labels_K[k]) for s, blocks_K in some for k, blocks in enumerate(blocks_K)
        }
        single = {cell: of_method.blocks for cell, of_method in drawn.items() if len(of_method.draws) == 1}
        resampled = bootstrap_means(list(single.values()), samples=samples, seed=seed, numbers_B=numbers_B)
        means = dict(zip(single, resampled, strict=True))
        base = {(s, k): (s, baseline) for s, k in drawn if baseline is not None and k != baseline}
        differences = {cell: drawn[cell].minus(drawn[of_base]) for cell, of_base in base.items()}
        flipped = [cell for cell, of_base in base.items() if cell in means and of_base in means]
        blocks_of = [differences[cell][0] for cell in flipped]
        p = sign_flip_p(blocks_of, samples=patterns, seed=seed, numbers_B=numbers_B)
        flips = {cell: (means[cell] - means[base[cell]], p_M) for cell, p_M in zip(flipped, p, strict=True)}
        compared = {
            cell: _comparisons(*of_cell, folds_Q, flips.get(cell), metrics) for cell, of_cell in differences.items()
        }
        for s, blocks_K in some:
            of_slice = [
                _scope(blocks, drawn[s, k], means.get((s, k)), compared.get((s, k), {}), metrics, folds_Q)
                for k, blocks in enumerate(blocks_K)
            ]
            judged += judged_together({"alone": of_slice}).values()
    return judged


def _scope(
    blocks: Blocks,
    drawn: _Drawn,
    means_SM: Doubles | None,
    comparisons: dict[str, Comparison],
    metrics: Sequence[str],
    folds_Q: Ints | None,
) -> Scope:
    """The results of one method; intervals come from the resampled means, or if there are none from several draws."""
    ends_2M = _ends(means_SM) if means_SM is not None else crossed_means(drawn.blocks.values_BTM(), folds_Q).interval()
    summaries = {
        metric: _summary(blocks, j, (ends_2M[0][j], ends_2M[1][j]), len(drawn.draws))
        for j, metric in enumerate(metrics)
    }
    return Scope(summaries=summaries, comparisons=comparisons)


def judged_together(by_slice: Mapping[str, Sequence[Scope]]) -> dict[str, list[Scope]]:
    """The scopes of several slices, by method, with Holm's correction over slices and methods for each metric."""
    by_metric: dict[str, dict[tuple[str, int], float]] = {}
    for name, of_slice in by_slice.items():
        for k, scope in enumerate(of_slice):
            for metric, comparison in scope.comparisons.items():
                if comparison.p is not None:
                    by_metric.setdefault(metric, {})[name, k] = comparison.p
    holms = {
        metric: dict(zip(p, holm(np.array(list(p.values()))).tolist(), strict=True)) for metric, p in by_metric.items()
    }

    def judged(name: str, k: int, scope: Scope) -> Scope:
        comparisons = {
            metric: comparison.replace(p_holm=holms.get(metric, {}).get((name, k)))
            for metric, comparison in scope.comparisons.items()
        }
        return scope.replace(comparisons=comparisons)

    return {name: [judged(name, k, scope) for k, scope in enumerate(of_slice)] for name, of_slice in by_slice.items()}


def _ends(means_SM: Doubles) -> tuple[Doubles, Doubles]:
    """Ends of the bootstrap intervals; NaN for a column that no group defines."""
    low_M, high_M = np.full((2, means_SM.shape[1]), math.nan)
    for m in np.flatnonzero(~np.isnan(means_SM).all(axis=0)):
        low_M[m], high_M[m] = np.nanquantile(means_SM[:, m], _INTERVAL)
    return low_M, high_M


def _comparisons(
    differences: Blocks,
    draws: int,
    folds_Q: Ints | None,
    resampled: tuple[Doubles, Doubles] | None,
    metrics: Sequence[str],
) -> dict[str, Comparison]:
    """The paired differences of a method by metric, p not adjusted; from resampled means [S, M] and p [M] if given."""
    means = crossed_means(differences.values_BTM(), folds_Q)
    judged = {"low": means.interval()[0], "high": means.interval()[1], "p": means.p(), "detectable": means.detectable()}
    if resampled is not None:
        means_SM, judged["p"] = resampled
        judged["low"], judged["high"] = _ends(means_SM)
    elif draws < FEWEST_DRAWS:
        judged = dict.fromkeys(judged, np.full_like(means.mean_M, math.nan))
    return {
        metric: Comparison(
            difference=means.mean_M[j],
            p_holm=None,
            draws=draws,
            skewed=bool(means.skewed_M[j]),
            **{name: or_none(values_M[j]) for name, values_M in judged.items()},
        )
        for j, metric in enumerate(metrics)
        if not math.isnan(means.mean_M[j])  # some group defines it
    }


def _summary(blocks: Blocks, j: int, ends: tuple[float, float], draws: int) -> Summary:
    """Metric j of one method."""
    defined_B = blocks.defined_BM[:, j]
    n = float(defined_B.sum())
    undefined = blocks.groups - int(n)
    total_t = blocks.sums_BTM[:, :, j][defined_B > 0].sum(axis=0)
    trials = [total / n if n else math.nan for total in total_t.tolist()]
    mean = float(np.mean(trials))
    return Summary(
        mean=or_none(mean),
        low=or_none(ends[0]),
        high=or_none(ends[1]),
        trials=tuple(map(or_none, trials)),
        std_error=or_none(np.std(trials, ddof=1) / math.sqrt(len(trials))) if len(trials) > 1 else None,
        groups=int(n),
        undefined=undefined,
        as_zero=or_none(float(np.mean(total_t)) / (n + undefined)) if n + undefined else None,
        as_one=or_none((float(np.mean(total_t)) + undefined) / (n + undefined)) if n + undefined else None,
        draws=draws,
    )
