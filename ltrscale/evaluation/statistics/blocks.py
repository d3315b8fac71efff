"""Sums of metrics over blocks of query groups: all that means, intervals and tests need of any number of groups.

A block is resampled, and has its signs flipped, as one. Up to 16,384 groups each have a block of their own, so that the
blocks are the groups. More are dealt to 4,096 blocks by a hash of their ids: memory then stays, while an interval is
still known to about 1% of its width (`1 / sqrt(2 blocks)`), as well as 10,000 resamples know it.

Shapes: Q groups, B blocks, T trials or draws of labels, M metrics.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ltrscale.arrays import Doubles, Ints
from ltrscale.draws import random_bits

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

    Args:
        trials: number of trials.
        metrics: number of metrics.
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
            more = np.zeros((max(self._used, 2 * len(self._columns_BC)), self._columns_BC.shape[1]))
            more[: len(self._columns_BC)] = self._columns_BC
            self._columns_BC = more
        return np.asarray(self._place_B[blocks_Q])

    def blocks(self) -> Blocks:
        """The sums so far, in the order of the blocks' numbers."""
        place_B = self._place_B[self._place_B >= 0]
        columns_BTM = self._columns_BC[place_B].reshape(-1, *self._shape)
        return Blocks(columns_BTM[:, :-1], columns_BTM[:, -1], self.groups)


def block_numbers(gids_Q: Ints, *, first: int, groups: int) -> Ints:
    """The block of each group: its own number if all groups have a block of their own, else one by its id.

    Args:
        gids_Q: ids of consecutive groups.
        first: number of groups before them.
        groups: number of all groups.
    """
    if groups <= OWN_BLOCK:
        return np.arange(first, first + len(gids_Q))
    return (random_bits(("block",), gids_Q) % np.uint64(BLOCKS)).astype(np.int64)
