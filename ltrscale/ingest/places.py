"""Finds features that follow the place at which a document was shown.

Shapes: N rows or documents, Q1 = Q + 1 offsets of groups, F features, K features that may still follow the place, P
pairs of neighbours.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa

from ltrscale.arrays import Floats, Ints
from ltrscale.data.dataset.manifest import Feature

_FEWEST = 20
"""Pairs of documents to compare; fewer may agree by chance."""


class LikePlaces:
    """Finds features that follow the place, from streamed groups; few candidates are left after the first groups."""

    def __init__(self, n_features: int) -> None:
        self._pairs = 0
        self._rises_F = np.ones(n_features, np.bool_)
        self._falls_F = np.ones(n_features, np.bool_)

    def add(self, features_NF: Floats, positions_N: pa.Array, offsets_Q1: Ints) -> None:
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
        """Add the groups of another instance."""
        self._pairs += other._pairs
        self._rises_F &= other._rises_F
        self._falls_F &= other._falls_F

    def state(self) -> dict[str, Any]:
        """All that it knows, as plain data."""
        rises, falls = (np.flatnonzero(each_F).tolist() for each_F in (self._rises_F, self._falls_F))
        return {"pairs": self._pairs, "rises": rises, "falls": falls}

    @classmethod
    def restored(cls, state: Mapping[str, Any], n_features: int) -> Self:
        """The instance that had this state."""
        restored, numbers_F = cls(n_features), np.arange(n_features)
        restored._pairs = state["pairs"]
        restored._rises_F = np.isin(numbers_F, state["rises"])
        restored._falls_F = np.isin(numbers_F, state["falls"])
        return restored

    def among(self, features: Sequence[Feature]) -> list[str]:
        """The names of the features that order every list alike."""
        alike_F = (self._rises_F | self._falls_F) if self._pairs >= _FEWEST else np.zeros(len(features), np.bool_)
        return [feature.name for feature, alike in zip(features, alike_F, strict=True) if alike]
