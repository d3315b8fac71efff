"""Sums of metrics over blocks of query groups: enough for means, intervals and tests of any number of groups.

A block is resampled, and its signs are flipped, as a unit. With up to 16,384 groups each group is a block. More groups
are assigned to 4,096 blocks by a hash of their ids. Memory is then constant, and an interval is still known to about 1%
of its width (`1 / sqrt(2 blocks)`), as well as from 10,000 resamples.

Bootstrap and sign-flip test draw once from all blocks: the same resamples and signs serve all slices, methods and
metrics, which keeps them paired.

Shapes: Q groups, B blocks, T trials or draws of labels, M metrics or columns (methods, metrics), S resamples. NaN marks
a group that a metric leaves undefined.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.draws import random_bits
from ltrscale.late import Late

if TYPE_CHECKING:
    import torch
else:
    torch = Late("torch")

_DRAWN = 1 << 18
"""Blocks or signs drawn at once, few enough that the results stay in the cache."""
_ROTATED = 1 << 10
"""From this many blocks on, a draw serves several resamples."""
_OWN_BLOCK = 1 << 14
"""With at most this many groups each is a block."""
_BLOCKS = 1 << 12
"""Number of blocks for more groups than that."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Metrics of query groups, summed by block; a group that leaves a metric undefined adds nothing to its sums."""

    sums_BTM: Doubles
    defined_BM: Doubles
    """Groups that define the metric. This depends on the labels alone, so it is the same in all trials. For a ratio
    over all groups, its denominators."""
    groups: int
    """All groups."""
    numbers_B: Ints
    """The numbers of the blocks, rising; a slice has only some of them."""

    @classmethod
    def from_values(cls, values_QTM: Doubles) -> Self:
        """The groups as blocks; NaN is undefined."""
        defined_QM: Bools = np.asarray(~np.isnan(values_QTM).any(axis=1))
        sums_QTM = np.where(defined_QM[:, None], values_QTM, 0.0)
        return cls(sums_QTM, defined_QM.astype(np.float64), len(values_QTM), np.arange(len(values_QTM)))

    def values_BTM(self) -> Doubles:
        """Values whose mean over blocks is the mean over groups; NaN where a block does not define the metric.

        A block of one group has its value. A block of n groups with sum S has `m + (S - n m) / n_mean`, the ratio of
        sums linearised at the overall mean m (Cochran 1977, chapter 6), which allows for blocks of different sizes.
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
    arrival, so the sums are the same to the last bit however the groups are split into parts.
    """

    def __init__(self, trials: int, metrics: int) -> None:
        self.groups = 0
        self._place_B = np.full(_OWN_BLOCK, -1)
        self._used, self._shape = 0, (trials + 1, metrics)
        self._columns_CB = np.zeros(((trials + 1) * metrics, 0))

    def add(self, blocks_Q: Ints, part: Blocks) -> None:
        """Add groups with these blocks, each with its own sums."""
        rows_Q, columns = self._rows(blocks_Q), len(self._columns_CB)
        columns_QC = np.concatenate([part.sums_BTM, part.defined_BM[:, None]], axis=1).reshape(-1, columns)
        for column_B, column_Q in zip(self._columns_CB, columns_QC.T, strict=True):
            np.add.at(column_B, rows_Q, column_Q)  # add.at is fast in one dimension

    def _rows(self, blocks_Q: Ints) -> Ints:
        """The row of each group's block; new blocks get the next rows."""
        self.groups += len(blocks_Q)
        new_B = np.unique(blocks_Q[self._place_B[blocks_Q] < 0])
        self._place_B[new_B] = np.arange(self._used, self._used + len(new_B))
        self._used += len(new_B)
        if self._used > self._columns_CB.shape[1]:  # doubled, so that rows are seldom copied
            more = max(self._used, 2 * self._columns_CB.shape[1]) - self._columns_CB.shape[1]
            self._columns_CB = np.pad(self._columns_CB, ((0, 0), (0, more)))
        return np.asarray(self._place_B[blocks_Q])

    def blocks(self) -> Blocks:
        """The sums so far, in the order of the blocks' numbers."""
        numbers_B = np.flatnonzero(self._place_B >= 0)
        columns_BTM = self._columns_CB[:, self._place_B[numbers_B]].T.reshape(-1, *self._shape)
        return Blocks(columns_BTM[:, :-1], columns_BTM[:, -1], self.groups, numbers_B)


def block_numbers(gids_Q: Ints, *, first: int, groups: int) -> Ints:
    """The block of each of some consecutive groups: `first` groups come before them, of `groups` in all.

    It is the group's own number if every group has its own block, otherwise it follows from the id.
    """
    if groups <= _OWN_BLOCK:
        return np.arange(first, first + len(gids_Q))
    return (random_bits(("block",), gids_Q) % np.uint64(_BLOCKS)).astype(np.int64)


def all_numbers(parts: Iterable[Blocks]) -> Ints:
    """The numbers of all blocks of some parts, rising."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(part.numbers_B for part in parts)]))


def bootstrap_means(
    parts: Sequence[Blocks], *, samples: int, seed: int, numbers_B: Ints | None = None
) -> list[Doubles]:
    """Means of the first trial of each part over bootstrap resamples of all blocks, shape [S, M] each (Efron 1979).

    Parts are slices and methods. Each resample draws B of the B blocks `numbers_B` (None for those that some part has)
    with replacement, for all parts, and divides the sum of a part's values by the number of groups that define them; it
    is NaN if there are none. Percentiles of differences give paired intervals; with fewer than about 30 groups these
    are too narrow.

    Example:
        >>> (means_SM,) = bootstrap_means([Blocks.from_values(np.array([[[0.0]], [[1.0]]]))], samples=1000, seed=0)
        >>> sorted(set(means_SM[:, 0].tolist()))
        [0.0, 0.5, 1.0]
    """
    if not parts:
        return []
    numbers_B = all_numbers(parts) if numbers_B is None else numbers_B
    rng, b = np.random.default_rng(seed), len(numbers_B)
    defined = [_distinct(part.defined_BM) for part in parts]
    columns = [np.hstack([part.sums_BTM[:, 0], of[0]]) for part, of in zip(parts, defined, strict=True)]
    products = _Products(numbers_B, parts, columns)
    sums = [np.zeros((samples, of_part_BC.shape[1])) for of_part_BC in columns]
    for first, last in _bounded_parts(samples, b):
        times_SB = _times(rng, last - first, b)
        for sums_SC, product_SC in zip(sums, products.sums(times_SB), strict=True):
            sums_SC[first:last] = product_SC
    with np.errstate(invalid="ignore"):
        return [
            sums_SC[:, : len(where_M)] / sums_SC[:, len(where_M) :][:, where_M]
            for sums_SC, (_, where_M) in zip(sums, defined, strict=True)
        ]


def _times(rng: np.random.Generator, samples: int, blocks: int) -> Doubles:
    """How often each block is drawn in each resample, shape [S, B]."""
    # Drawing is the slow part, so a draw from many blocks serves eight resamples, each shifted by an eighth of the
    # blocks. Each is a draw with replacement, and any two are nearly independent: a block's counts come from blocks
    # that are far apart.
    rotations = 8 if blocks >= _ROTATED else 1
    n = -(-samples // rotations)
    times_SB = np.empty((rotations * n, blocks))
    draws_SB = rng.integers(0, max(blocks, 1), size=(n, blocks), dtype=np.min_scalar_type(blocks))
    for times_B, draws_B in zip(times_SB, draws_SB, strict=False):
        times_B[:] = np.bincount(draws_B, minlength=blocks)
    for rotation in range(1, rotations):
        times_SB[rotation * n : (rotation + 1) * n] = np.roll(times_SB[:n], rotation * blocks // rotations, axis=1)
    return times_SB[:samples]


def _distinct(columns_BM: Doubles) -> tuple[Doubles, list[int]]:
    """The distinct columns, and the place of each column among them: most metrics are defined on the same groups."""
    places: dict[bytes, int] = {}
    place_M = [places.setdefault(column_B.tobytes(), len(places)) for column_B in columns_BM.T]
    return columns_BM[:, [place_M.index(place) for place in places.values()]], place_M


def sign_flip_p(parts: Sequence[Blocks], *, samples: int, seed: int, numbers_B: Ints | None = None) -> list[Doubles]:
    """Two-sided p value of each column's mean difference by the paired randomisation test, shape [M] (Fisher 1935).

    If two methods are equally good, the sign of each group's difference is a coin toss. So p is the share of random
    sign patterns whose mean is at least as far from 0; the observed pattern counts as one of them, so that p is never
    0. Columns without a difference, or without a group, have p = 1. The differences are those of the first trial of
    each part; the same patterns, of all blocks, serve all parts. Arguments are those of `bootstrap_means`.
    """
    if not parts:
        return []
    numbers_B = all_numbers(parts) if numbers_B is None else numbers_B
    rng, b = np.random.default_rng(seed), len(numbers_B)
    columns = [part.sums_BTM[:, 0] for part in parts]
    products = _Products(numbers_B, parts, columns)
    totals = [of_part_BM.sum(axis=0) for of_part_BM in columns]
    as_far = [np.ones(of_part_BM.shape[1]) for of_part_BM in columns]
    for first, last in _bounded_parts(samples, b):
        bits = np.frombuffer(rng.bytes((last - first) * -(-b // 8)), np.uint8).reshape(last - first, -1)
        kept_SB = np.unpackbits(bits, axis=1, count=b).astype(np.float64)
        for as_far_M, total_M, kept_SM in zip(as_far, totals, products.sums(kept_SB), strict=True):
            # sum with random signs = kept - others = 2 kept - total
            limit_M = np.abs(total_M) * (1 - 1e-9)  # equal sums differ by rounding
            as_far_M += (np.abs(2 * kept_SM - total_M) >= limit_M).sum(axis=0)
    return [as_far_M / (samples + 1) for as_far_M in as_far]


class _Products:
    """Sums of each part's columns, weighted by block; torch's products take half the time of numpy's."""

    # Equal columns of two methods must give equal sums, so torch allocates all tensors: same memory layout.

    def __init__(self, numbers_B: Ints, parts: Sequence[Blocks], columns: Sequence[Doubles]) -> None:
        places = [np.searchsorted(numbers_B, part.numbers_B) for part in parts]
        self._places = [None if len(place_B) == len(numbers_B) else torch.tensor(place_B) for place_B in places]
        self._columns = [torch.tensor(columns_BC) for columns_BC in columns]

    def sums(self, factors_SB: Doubles) -> Iterator[Doubles]:
        """The sums of each part, shape [S, C], with these factors of all blocks."""
        factors = torch.from_numpy(factors_SB)
        for place_B, columns_BC in zip(self._places, self._columns, strict=True):
            yield ((factors if place_B is None else factors[:, place_B]) @ columns_BC).numpy()


def holm(p_M: Doubles) -> Doubles:
    """P values adjusted for testing several methods (Holm 1979), shape [M]."""
    order_M = np.argsort(p_M, kind="stable")
    factors_M = np.arange(len(p_M), 0, -1)
    adjusted_M = np.empty_like(p_M)
    adjusted_M[order_M] = np.minimum(np.maximum.accumulate(p_M[order_M] * factors_M), 1.0)
    return adjusted_M


def _bounded_parts(samples: int, blocks: int) -> Iterator[tuple[int, int]]:
    """Cut the resamples into parts that fit the cache."""
    size = max(1, _DRAWN // max(blocks, 1))
    for first in range(0, samples, size):
        yield first, min(first + size, samples)
