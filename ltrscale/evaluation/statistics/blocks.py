"""Sums of metrics over blocks of query groups: all that means, intervals and tests need of any number of groups.

A block is resampled, and has its signs flipped, as one. Up to 16,384 groups each have their own block, so that the
blocks are the groups. More are dealt to 4,096 blocks by a hash of their ids: memory then stays, while an interval is
still known to about 1% of its width (`1 / sqrt(2 blocks)`), as well as 10,000 resamples know it.

Bootstrap and sign-flip test draw the same blocks or signs for all columns, which keeps methods and metrics paired.

Shapes: Q groups, B blocks, T trials or draws of labels, M metrics or columns (methods, metrics), S resamples. NaN marks
a group that a metric leaves undefined.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ltrscale.arrays import Doubles, Ints
from ltrscale.draws import random_bits

_DRAWS = 1 << 22
"""Random signs that are drawn at once."""
_RESAMPLED = 1 << 18
"""Blocks that are drawn at once: their counts then stay in the cache."""
OWN_BLOCK = 1 << 14
"""With at most this many groups each is a block."""
BLOCKS = 1 << 12
"""Blocks of more groups than that."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Metrics of query groups, summed by block; a group that leaves a metric undefined adds nothing to its sums."""

    sums_BTM: Doubles
    defined_BM: Doubles
    """Groups that define the metric, which depends on the labels alone and is so in all trials; of a ratio over all
    groups its denominators."""
    groups: int
    """All groups."""

    @classmethod
    def of(cls, values_QTM: Doubles) -> Self:
        """The groups as blocks; NaN is undefined.

        Example:
            >>> blocks = Blocks.of(np.array([[[0.5]], [[np.nan]]]))
            >>> blocks.sums_BTM.ravel().tolist(), blocks.defined_BM.ravel().tolist()
            ([0.5, 0.0], [1.0, 0.0])
        """
        defined_QM: NDArray[np.bool_] = np.asarray(~np.isnan(values_QTM).any(axis=1))
        sums_QTM = np.where(defined_QM[:, None], values_QTM, 0.0)
        return cls(sums_QTM, defined_QM.astype(np.float64), len(values_QTM))

    def of_metric(self, column: int) -> Self:
        """One of the metrics."""
        return replace(self, sums_BTM=self.sums_BTM[..., [column]], defined_BM=self.defined_BM[:, [column]])

    def values_BTM(self) -> Doubles:
        """Values whose mean over blocks is the mean over groups; NaN where a block does not define the metric.

        A group alone has its value. A block of n groups with sum S has `m + (S - n m) / n_mean`, the ratio of sums
        linearised at the overall mean m (Cochran 1977, chapter 6), which knows that blocks differ in size.
        """
        defined_B1M = self.defined_BM[:, None]
        if not np.isin(self.defined_BM, (0, 1)).all():
            n_M = self.defined_BM.sum(axis=0)
            n_M[n_M == 0] = 1  # no block defines the metric
            blocks_M, draws = np.maximum((self.defined_BM > 0).sum(axis=0), 1), self.sums_BTM.shape[1]
            mean_M = self.sums_BTM.sum(axis=(0, 1)) / (n_M * draws)
            size_M = n_M / blocks_M
            values_BTM = mean_M + (self.sums_BTM - defined_B1M * mean_M) / size_M
        else:
            values_BTM = self.sums_BTM
        return np.where(defined_B1M > 0, values_BTM, np.nan)


class Tally:
    """Adds up the metrics of groups that arrive in parts, by block.

    Memory grows with the blocks that have a group, not with the groups. Groups are added one by one in the order of
    arrival, so that any parts of them give the same sums to the last bit.
    """

    def __init__(self, trials: int, metrics: int) -> None:
        self.groups = 0
        self._place_B = np.full(OWN_BLOCK, -1)
        self._used, self._shape = 0, (trials + 1, metrics)
        self._columns_BC = np.zeros((0, (trials + 1) * metrics))

    def add(self, blocks_Q: Ints, values_QTM: Doubles) -> None:
        """Add groups with these blocks and values, NaN where undefined."""
        self.add_sums(blocks_Q, Blocks.of(values_QTM))

    def add_sums(self, blocks_Q: Ints, part: Blocks) -> None:
        """Add groups with these blocks, each with its own sums."""
        if not len(blocks_Q):
            return
        self.groups += len(blocks_Q)
        columns_QTM = np.concatenate([part.sums_BTM, part.defined_BM[:, None]], axis=1)
        rows_Q = self._rows(blocks_Q)  # before the next line, for it may replace the array
        n_columns = self._columns_BC.shape[1]
        cells = rows_Q[:, None] * n_columns + np.arange(n_columns)
        np.add.at(self._columns_BC.reshape(-1), cells.ravel(), columns_QTM.ravel())  # in one dimension it is fast

    def _rows(self, blocks_Q: Ints) -> Ints:
        """The row of each block; those that are new get the next ones."""
        new_B = np.unique(blocks_Q[self._place_B[blocks_Q] < 0])
        self._place_B[new_B] = np.arange(self._used, self._used + len(new_B))
        self._used += len(new_B)
        if self._used > len(self._columns_BC):  # twice as many, so that rows are seldom copied
            grown_BC = np.zeros((max(self._used, 2 * len(self._columns_BC)), self._columns_BC.shape[1]))
            grown_BC[: len(self._columns_BC)] = self._columns_BC
            self._columns_BC = grown_BC
        return np.asarray(self._place_B[blocks_Q])

    def blocks(self) -> Blocks:
        """The sums so far, in the order of the blocks' numbers."""
        place_B = self._place_B[self._place_B >= 0]
        columns_BTM = self._columns_BC[place_B].reshape(-1, *self._shape)
        return Blocks(columns_BTM[:, :-1], columns_BTM[:, -1], self.groups)


def block_numbers(gids_Q: Ints, *, first: int, groups: int) -> Ints:
    """The block of each of some consecutive groups, `first` of all `groups` before them.

    It is the group's own number if all groups have their own block, otherwise one by its id.
    """
    if groups <= OWN_BLOCK:
        return np.arange(first, first + len(gids_Q))
    return (random_bits(("block",), gids_Q) % np.uint64(BLOCKS)).astype(np.int64)


def bootstrap_means(sums_BM: Doubles, defined_BM: Doubles, *, samples: int, seed: int) -> Doubles:
    """Means of each column over bootstrap resamples of the blocks, shape [S, M] (Efron 1979).

    Each resample draws B of the B blocks with replacement, and divides the sum of their values by the number of groups
    that define them; it is NaN if there are none. Percentiles of column differences give paired intervals; with fewer
    than about 30 groups these are too narrow. `defined_BM` are the groups of each block that its sum is over.

    Example:
        >>> means_SM = bootstrap_means(np.array([[0.0], [1.0]]), np.ones((2, 1)), samples=1000, seed=0)
        >>> sorted(set(means_SM[:, 0].tolist()))
        [0.0, 0.5, 1.0]
    """
    rng, (b, m) = np.random.default_rng(seed), sums_BM.shape
    if b == 0:
        return np.full((samples, m), np.nan)
    columns_B2M = np.concatenate([sums_BM, defined_BM], axis=1)
    sums_S2M = np.zeros((samples, 2 * m))
    for first, last in _bounded_parts(samples, b, _RESAMPLED):
        draws_SB = rng.integers(0, b, size=(last - first, b))
        draws_SB += np.arange(last - first)[:, None] * b  # separate ranges, so that one bincount counts all resamples
        times_SB = np.bincount(draws_SB.ravel(), minlength=draws_SB.size).reshape(draws_SB.shape)
        sums_S2M[first:last] = times_SB.astype(np.float64) @ columns_B2M
    with np.errstate(invalid="ignore"):
        return np.asarray(sums_S2M[:, :m] / sums_S2M[:, m:])


def sign_flip_p(differences_QM: Doubles, *, samples: int, seed: int) -> Doubles:
    """Two-sided p value of each column's mean difference by the paired randomisation test, shape [M] (Fisher 1935).

    If two methods are equally good, the sign of each group's difference is a coin toss. So p is the share of random
    sign patterns whose mean is at least as far from 0; the observed pattern counts as one of them, so that p is never
    0. Columns without a difference, or without a group, have p = 1.

    Example:
        >>> p_M = sign_flip_p(np.array([[1.0, 1.0], [1.0, -1.0], [1.0, 1.0], [1.0, -1.0]]), samples=10_000, seed=0)
        >>> [round(float(p), 2) for p in p_M]  # 2 of the 16 patterns are as far out as the first column
        [0.12, 1.0]
    """
    rng, (q, m) = np.random.default_rng(seed), differences_QM.shape
    filled_QM = np.nan_to_num(differences_QM, nan=0.0)
    total_M = filled_QM.sum(axis=0)
    limit_M = np.abs(total_M) * (1 - 1e-9)  # equal sums differ by rounding
    as_far_M = np.ones(m)
    for first, last in _bounded_parts(samples, q, _DRAWS):
        kept_SQ = rng.integers(0, 2, size=(last - first, q), dtype=np.int8).astype(np.float64)
        # the sum with random signs is that of the kept groups minus that of the others: twice the first minus all
        as_far_M += (np.abs(2 * kept_SQ @ filled_QM - total_M) >= limit_M).sum(axis=0)
    return np.asarray(as_far_M / (samples + 1))


def holm(p_M: Doubles) -> Doubles:
    """P values adjusted for testing several methods (Holm 1979), shape [M].

    Example:
        >>> holm(np.array([0.01, 0.04, 0.03])).tolist()
        [0.03, 0.06, 0.06]
    """
    order_M = np.argsort(p_M, kind="stable")
    factors_M = np.arange(len(p_M), 0, -1)
    adjusted_M = np.empty_like(p_M)
    adjusted_M[order_M] = np.minimum(np.maximum.accumulate(p_M[order_M] * factors_M), 1.0)
    return adjusted_M


def _bounded_parts(samples: int, groups: int, draws: int) -> Iterator[tuple[int, int]]:
    """Cut the resamples into parts that draw about so many groups each, which bounds memory."""
    size = max(1, draws // max(groups, 1))
    for first in range(0, samples, size):
        yield first, min(first + size, samples)
