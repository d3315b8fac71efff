"""Features that order every list as the places do at which it was shown: the place itself, or a number made from it.

Shapes: N documents, Q1 = Q + 1 offsets of groups, F features, K of them that still may be one, P pairs of neighbours.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ltrscale.data.dataset.manifest import Feature

_FEWEST = 20
"""Pairs of documents to compare; fewer may agree by chance."""


class LikePlaces:
    """Finds such features while groups stream past; hardly any is left to look at after the first groups.

    Example:
        >>> found = LikePlaces(2)
        >>> x_NF = np.array([[0, 7], [1, 7], [2, 8]] * 10, np.float32)
        >>> found.add(x_NF, pa.array([1, 2, 3] * 10), np.arange(0, 31, 3))
        >>> found.among([Feature(name="row"), Feature(name="price")])
        ['row']
    """

    def __init__(self, n_features: int) -> None:
        self._pairs = 0
        self._rises_F = np.ones(n_features, np.bool_)
        self._falls_F = np.ones(n_features, np.bool_)

    def add(self, features_NF: NDArray[np.float32], positions_N: pa.Array, offsets_Q1: NDArray[np.int64]) -> None:
        """Add whole groups; documents without a position are left out."""
        places_N = np.asarray(positions_N.to_numpy(zero_copy_only=False), np.float64)
        group_N = np.repeat(np.arange(len(offsets_Q1) - 1), np.diff(offsets_Q1))
        order_N = np.lexsort((places_N, group_N))
        before_P, after_P = order_N[:-1], order_N[1:]
        rises_P = (group_N[before_P] == group_N[after_P]) & (places_N[before_P] < places_N[after_P])  # NaN is no place
        self._pairs += int(rises_P.sum())
        columns_K = np.flatnonzero(self._rises_F | self._falls_F)
        x_NK = features_NF[:, columns_K]
        step_PK = x_NK[after_P[rises_P]] - x_NK[before_P[rises_P]]
        self._rises_F[columns_K] &= (step_PK > 0).all(axis=0)
        self._falls_F[columns_K] &= (step_PK < 0).all(axis=0)

    def merge(self, other: "LikePlaces") -> None:
        """Add the groups of another."""
        self._pairs += other._pairs
        self._rises_F &= other._rises_F
        self._falls_F &= other._falls_F

    def among(self, features: Sequence[Feature]) -> list[str]:
        """The names of the features that order every list alike."""
        alike_F = (self._rises_F | self._falls_F) if self._pairs >= _FEWEST else np.zeros(len(features), np.bool_)
        return [feature.name for feature, alike in zip(features, alike_F, strict=True) if alike]
