"""Counts of values in one pass, from which bins and the divergence of two distributions follow.

Numbers are counted in fine cells that are the same for all data, so counts need no range beforehand and may be added in
any order. Bins are runs of cells, chosen so that training has about equally many values in each.

Shapes: N rows, F columns, C cells, B bins, V codes of a vocabulary.
"""

from typing import Self

import numpy as np
from numpy.typing import NDArray

from ltrscale.models.fitting import ValueCounts

BINS = 10
"""Bins of about equal counts, with two more for values below and above all of training's and one for missing values."""
_DROPPED = 19
"""Bits of a float32 that a cell ignores: it keeps the sign, the exponent and four bits of the mantissa."""
_CELLS = 1 << (32 - _DROPPED)
_HALF = 0.5

BinCounts = NDArray[np.int64]


class Numbers:
    """Counts of each column's numbers by cell, and of its missing values.

    A cell spans at most a sixteenth of its values, whatever their scale.

    Example:
        >>> numbers = Numbers(1)
        >>> numbers.add(np.array([[1.0], [1.0], [5.0], [np.nan]], np.float32))
        >>> [bins.tolist() for bins in numbers.binned(numbers.bins())]
        [[0, 2, 1, 0, 1]]
    """

    def __init__(self, columns: int) -> None:
        self._counts_FC = np.zeros((columns, _CELLS), np.int64)
        self._missing_F = np.zeros(columns, np.int64)

    def add(self, values_NF: NDArray[np.float32]) -> None:
        """Count the values of some rows."""
        for f, values_N in enumerate(values_NF.T):
            known_N = values_N[~np.isnan(values_N)]
            self._counts_FC[f] += np.bincount(_cells(known_N), minlength=_CELLS)
            self._missing_F[f] += len(values_N) - len(known_N)

    def bins(self) -> list[BinCounts]:
        """The first cell of each bin, by column; a value that is frequent has a bin of its own."""
        return [_bins(counts_C) for counts_C in self._counts_FC]

    def binned(self, bins_F: list[BinCounts]) -> list[BinCounts]:
        """Counts [B] of each column by bin; missing values are the last."""
        columns = zip(self._counts_FC, bins_F, self._missing_F, strict=True)
        return [np.append(np.add.reduceat(counts_C, bins), missing) for counts_C, bins, missing in columns]


class Codes:
    """Counts of a categorical feature's codes, and of its missing values."""

    def __init__(self) -> None:
        self._seen = ValueCounts()
        self._missing = 0

    def add(self, values_N: NDArray[np.float32]) -> None:
        """Count the codes of some rows."""
        self._seen.add(values_N)
        self._missing += int(np.isnan(values_N).sum())

    def binned(self, reference: Self) -> BinCounts:
        """Counts of the reference's most frequent codes, of its other codes, of codes that it lacks, and missing ones.

        Example:
            >>> train, later = Codes(), Codes()
            >>> train.add(np.array([7, 7, 8], np.float32))
            >>> later.add(np.array([7, 9, np.nan], np.float32))
            >>> train.binned(train).tolist(), later.binned(train).tolist()
            ([2, 1, 0, 0, 0], [1, 0, 0, 1, 1])
        """
        codes_V, counts_V = self._seen.counts()
        bins_V = np.full(len(codes_V), -1)
        reference_codes, frequent = reference._seen.codes(), reference._seen.codes(BINS - 1)
        assert reference_codes is not None
        assert frequent is not None
        bins_V[np.isin(codes_V, reference_codes)] = len(frequent)
        places_V = np.searchsorted(frequent, codes_V)
        is_frequent_V = np.isin(codes_V, frequent)
        bins_V[is_frequent_V] = places_V[is_frequent_V]
        bins_V[bins_V < 0] = len(frequent) + 1
        return np.append(np.bincount(bins_V, counts_V, len(frequent) + 2).astype(np.int64), self._missing)


def psi(reference_B: BinCounts, other_B: BinCounts) -> float:
    """The population stability index of two histograms (Siddiqi 2006).

    `sum over bins of (p - q) ln(p / q)`, which is the symmetric divergence of Jeffreys (1946): 0 for equal shares, and
    usually read as no drift below .1 and as much drift above .25. Half a count is added to each bin, so that a bin
    which is empty on one side stays finite; a bin empty on both sides does not count. Without drift it is about
    `(B - 1) (1 / n + 1 / m)` for histograms of n and m independent values (Yurdakul 2018).

    Example:
        >>> round(psi(np.array([50, 50]), np.array([80, 20])), 2), psi(np.array([3, 4]), np.array([3, 4]))
        (0.41, 0.0)
    """
    there_B = (reference_B > 0) | (other_B > 0)
    p_B, q_B = ((counts_B[there_B] + _HALF) for counts_B in (reference_B, other_B))
    p_B, q_B = p_B / p_B.sum(), q_B / q_B.sum()
    return float(((p_B - q_B) * np.log(p_B / q_B)).sum())


def chance_psi(reference_B: BinCounts, other_B: BinCounts, *, values: tuple[int, int]) -> float:
    """What `psi` is on average without drift: `(B - 1) (1 / n + 1 / m)` over the B bins that a side fills.

    Args:
        reference_B: one histogram.
        other_B: the other one.
        values: how many of their values are independent, m and n, each at least 1.

    Example:
        >>> round(chance_psi(np.array([50, 50, 0]), np.array([80, 20, 0]), values=(100, 100)), 3)
        0.02
    """
    bins = int(((reference_B > 0) | (other_B > 0)).sum())
    return (bins - 1) * sum(1 / n for n in values)


def _cells(values_N: NDArray[np.float32]) -> NDArray[np.int64]:
    """The cell of each number; a larger number has no lower cell."""
    bits_N = (values_N + np.float32(0)).view(np.uint32)  # -0 + 0 is 0
    # the bits of floats rise with the value once those of negative ones are inverted
    rising_N = np.where(bits_N >> 31, ~bits_N, bits_N | np.uint32(1 << 31))
    return (rising_N >> _DROPPED).astype(np.int64)


def _bins(counts_C: BinCounts) -> BinCounts:
    seen = np.flatnonzero(counts_C)
    if not len(seen):
        return np.zeros(1, np.int64)
    before_C = counts_C.cumsum() - counts_C
    tenths = BINS * before_C[seen] // counts_C.sum()
    starts = seen[np.diff(tenths, prepend=-1) > 0]
    return np.unique([0, *starts, seen[-1] + 1])
