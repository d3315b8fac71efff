"""Type names of numpy arrays, bounds of values, moments of features that merge, and documents that lie group by group.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features, X features with missing values.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bits = NDArray[np.uint64]

N_CODES = 1 << 24
"""Codes of categories are integers below this, which float32 represents exactly."""
HIGHEST_LABEL = 1000
"""The gains of larger labels, or their sum, overflow float64: NDCG would be undefined."""

_VALUES = 1 << 17  # per block, so that its arithmetic stays in a core's cache


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of the values that are not missing, in float64; parts merge.

    Merging is Chan, Golub and LeVeque's (1979): `M2 = M2_a + M2_b + d^2 n_a n_b / n`, where d is the difference of the
    means and M2 a sum of squared deviations.

    Example:
        >>> parts = [Moments.from_values(np.array(x, np.float32)) for x in ([[1.0], [np.nan]], [[3.0]])]
        >>> moments = parts[0].merge(parts[1])
        >>> moments.mean_F.tolist(), moments.scale_F().tolist()
        ([2.0], [1.0])
    """

    count_F: NDArray[np.int64]
    mean_F: NDArray[np.float64]
    squares_F: NDArray[np.float64]

    @staticmethod
    def none(n_features: int) -> "Moments":
        """Moments of no document."""
        return Moments(np.zeros(n_features, np.int64), np.zeros(n_features), np.zeros(n_features))

    @staticmethod
    def from_values(features_NF: NDArray[np.float32], *, log1p: bool = False) -> "Moments":
        """Moments of some documents' values x, or of `sign(x) log(1 + |x|)` with `log1p`."""
        n_features = features_NF.shape[1]
        moments, step = Moments.none(n_features), max(1, _VALUES // max(1, n_features))
        for first in range(0, len(features_NF), step):
            x_NF = features_NF[first : first + step]
            moments = moments.merge(_block_moments(np.copysign(np.log1p(np.abs(x_NF)), x_NF) if log1p else x_NF))
        return moments

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both parts together."""
        count_F = self.count_F + other.count_F
        share_F = other.count_F / np.maximum(count_F, 1)
        delta_F = other.mean_F - self.mean_F
        squares_F = self.squares_F + (other.squares_F + delta_F * delta_F * self.count_F * share_F)
        return Moments(count_F, self.mean_F + delta_F * share_F, squares_F)

    def std_F(self) -> NDArray[np.float64]:
        """Standard deviations, of the population; 0 where there is no value."""
        return np.asarray(np.sqrt(self.squares_F / np.maximum(self.count_F, 1)))

    def scale_F(self) -> NDArray[np.float64]:
        """Standard deviations; 1 where they are below float32's resolution, since dividing would amplify rounding."""
        std_F = self.std_F()
        floor_F = np.maximum(1e-7 * np.abs(self.mean_F), np.finfo(np.float32).tiny)
        return np.where(std_F > floor_F, std_F, 1.0)


def _block_moments(x_NF: NDArray[np.float32]) -> Moments:
    y_NF = x_NF.astype(np.float64)
    sum_F = y_NF.sum(0)
    count_F = np.full(len(sum_F), len(y_NF))
    missing = np.flatnonzero(np.isnan(sum_F))  # mostly few features: a second pass for these alone is cheaper
    absent_NX = np.isnan(y_NF[:, missing])
    count_F[missing] -= absent_NX.sum(0)
    there_NX = np.where(absent_NX, 0, y_NF[:, missing])
    # added in the order in which numpy adds a whole block of this layout, since another order rounds differently
    sum_F[missing] = there_NX.sum(0) if y_NF.flags.f_contiguous else there_NX.cumsum(0)[-1]
    mean_F = sum_F / np.maximum(count_F, 1)
    y_NF -= mean_F
    if len(missing):
        y_NF[:, missing] = np.where(absent_NX, 0, y_NF[:, missing])
    return Moments(count_F, mean_F, np.einsum("nf,nf->f", y_NF, y_NF))


def offsets(lengths_Q: Ints) -> Ints:
    """Offsets of groups with these lengths, shape [Q + 1].

    Example:
        >>> offsets(np.array([2, 3])).tolist()
        [0, 2, 5]
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_Q)])


def runs(starts_Q: Ints, lengths_Q: Ints) -> Ints:
    """The indices of runs with these starts and lengths, concatenated.

    Example:
        >>> runs(np.array([7, 0]), np.array([2, 3])).tolist()
        [7, 8, 0, 1, 2]
    """
    index_N: Ints = np.repeat(starts_Q - offsets(lengths_Q)[:-1], lengths_Q)
    index_N += np.arange(len(index_N))
    return index_N


def maximum(values_N: NDArray[Any], offsets_Q1: Ints) -> NDArray[Any]:
    """The largest value of each group, shape [Q]; no group is empty."""
    return np.asarray(np.maximum.reduceat(values_N, offsets_Q1[:-1]))


def softmax_by_group(values_N: Doubles, offsets_Q1: Ints) -> Doubles:
    """The softmax of each group's values, shape [N], without overflow; values of -inf get 0, and no group is empty.

    Example:
        >>> softmax_by_group(np.array([1000.0, 1000.0, -np.inf, 3.0]), np.array([0, 3, 4])).tolist()
        [0.5, 0.5, 0.0, 1.0]
    """
    lengths_Q = np.diff(offsets_Q1)
    weights_N = np.exp(values_N - np.repeat(maximum(values_N, offsets_Q1), lengths_Q))
    return np.asarray(weights_N / np.repeat(np.add.reduceat(weights_N, offsets_Q1[:-1]), lengths_Q))


def place_in_group(offsets_Q1: Ints, *sort_keys_N: NDArray[Any]) -> Ints:
    """The place of each document in its group, from 0, after sorting by keys; the first key is the primary one.

    Example:
        >>> place_in_group(np.array([0, 3, 4]), np.array([5.0, 1.0, 3.0, 2.0])).tolist()
        [2, 0, 1, 0]
    """
    lengths_Q = np.diff(offsets_Q1)
    group_N = np.repeat(np.arange(len(lengths_Q)), lengths_Q)
    order_N = np.lexsort((*reversed(sort_keys_N), group_N))
    place_N = np.empty(len(order_N), np.int64)
    place_N[order_N] = np.arange(len(order_N)) - np.repeat(offsets_Q1[:-1], lengths_Q)
    return place_N
