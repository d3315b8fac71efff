"""Numbers of the documents of query groups that lie end to end.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ltrscale.arrays import Ints

Bits = NDArray[np.uint64]


def offsets(lengths_Q: Ints) -> Ints:
    """Offsets of groups with these lengths, shape [Q + 1].

    Example:
        >>> offsets(np.array([2, 3])).tolist()
        [0, 2, 5]
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_Q)])


def maximum(values_N: NDArray[Any], offsets_Q1: Ints) -> NDArray[Any]:
    """The largest value of each group, shape [Q]; no group is empty."""
    return np.asarray(np.maximum.reduceat(values_N, offsets_Q1[:-1]))


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
