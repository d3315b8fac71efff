"""Histograms of a feature's values by which later periods are compared with training.

Values are counted in one pass. Bins are chosen so that training has about equally many numbers in each. To find the
bins, numbers are counted in cells, as fine as the limit on their number allows, so no range is needed beforehand.

Shapes: N values, C cells, B bins.
"""

from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from ltrscale.arrays import Ints
from ltrscale.models.fitting import merged_counts

_BINS = 10
"""Bins of about equal counts, plus two for values below and above all of training's, and one for missing values."""
_CELLS = 1 << 14
"""Cells of a feature, at most: 200 kB. This is enough for the sign, exponent and five bits of the mantissa of every
float32, so a cell is never wider than a 32nd of its values."""

BinCounts = Ints
_FloatBits = NDArray[np.uint32]


class BinnedValues:
    """Counts of a feature's values by bin; those of later periods are counted in the bins of training.

    Numbers are counted in cells, runs of neighbouring float32. Their width is the lowest power of two at which at most
    `_CELLS` cells hold a number. So cells are small relative to the spread of the numbers, wherever these lie, and do
    not depend on the order of the rows. Bins are runs of cells with about a tenth of training's numbers each, one below
    and one above all of these. Bins of codes are the most frequent codes of training, its other codes, and codes that
    it lacks. Missing values are the last bin.
    """

    def __init__(self, kind: Literal["numeric", "categorical"] = "numeric", train: Self | None = None) -> None:
        self.kind, self._train = kind, self if train is None else train
        self._width, self._missing = np.uint32(1), 0
        self._cells_C, self._counts_C = np.zeros(0, np.uint32), np.zeros(0, np.int64)

    def later(self) -> Self:
        """Empty counts in the bins of these values, which are training's."""
        return type(self)(self.kind, self)

    def add(self, values_N: NDArray[np.float32]) -> None:
        """Count the values of some rows."""
        known_N = values_N[~np.isnan(values_N)]
        self._missing += len(values_N) - len(known_N)
        first_N = _rising_bits(known_N)
        if self.kind == "numeric" and self._train is not self:
            starts_B = self._train._starts()
            first_N = starts_B[np.searchsorted(starts_B, first_N, side="right") - 1]
        cells, counts = np.unique(first_N - first_N % self._width, return_counts=True)
        cells, counts = np.concatenate([self._cells_C, cells]), np.concatenate([self._counts_C, counts])
        cells, counts = merged_counts(cells, counts)
        while self.kind == "numeric" and np.count_nonzero(np.diff(cells // self._width)) >= _CELLS:
            self._width *= np.uint32(2)
        self._cells_C, self._counts_C = merged_counts(cells - cells % self._width, counts)

    def _starts(self) -> _FloatBits:
        """The first number of each bin: cells at which a tenth of the numbers is reached, between two open ends."""
        tenths_C = _BINS * (self._counts_C.cumsum() - self._counts_C) // max(1, self._counts_C.sum())
        starts = self._cells_C[np.diff(tenths_C, prepend=-1) > 0]
        above = self._cells_C[-1:] + self._width
        return np.concatenate([np.zeros(1, np.uint32), starts, above])

    def counts_B(self) -> BinCounts:
        """Counts by bin, shape [B]."""
        train, cells_C = self._train, self._cells_C
        if self.kind == "numeric":
            starts_B = train._starts()
            bin_C, bins = np.searchsorted(starts_B, cells_C, side="right") - 1, len(starts_B)
        else:
            frequent = np.sort(train._cells_C[np.argsort(-train._counts_C, kind="stable")[: _BINS - 1]])
            bin_C = np.where(np.isin(cells_C, train._cells_C), len(frequent), len(frequent) + 1)
            bin_C = np.where(np.isin(cells_C, frequent), np.searchsorted(frequent, cells_C), bin_C)
            bins = len(frequent) + 2
        return np.append(np.bincount(bin_C, self._counts_C, bins).astype(np.int64), self._missing)


def _rising_bits(values_N: NDArray[np.float32]) -> _FloatBits:
    """The bits of each number, mapped so that they rise with the number."""
    bits_N = (values_N + np.float32(0)).view(np.uint32)  # -0 + 0 is 0
    # the bits of floats rise with the value once those of negative ones are inverted
    return np.where(bits_N >> 31, ~bits_N, bits_N | np.uint32(1 << 31))


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
    filled_B = (reference_B > 0) | (other_B > 0)
    p_B, q_B = (counts_B[filled_B] + 0.5 for counts_B in (reference_B, other_B))
    p_B, q_B = p_B / p_B.sum(), q_B / q_B.sum()
    return float(((p_B - q_B) * np.log(p_B / q_B)).sum())


def chance_psi(reference_B: BinCounts, other_B: BinCounts, *, values: tuple[int, int]) -> float:
    """What `psi` is without drift: `(B - 1) (1 / n + 1 / m)` over B filled bins, for n and m independent values."""
    bins = int(((reference_B > 0) | (other_B > 0)).sum())
    return (bins - 1) * sum(1 / n for n in values)
