"""Few shapes for lists of many lengths: where sorted lists are cut into chunks, and shapes that serve all batches.

Shapes: Q groups; G sorted lists or places of lists, M lists of a chunk with L slots each; C candidates of cuts.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNKS_ON_A_GPU = 5
"""Lengths to which lists are padded on a GPU: more would pad less and launch more kernels."""
_CUTS = 64
"""Candidates for these lengths."""
_LENGTHS, _ROOM = 8, 1.5
"""Lengths of a frame, and standard deviations of the number of lists of each for which it has room; a list also finds
room among longer ones."""


class Frame(NamedTuple):
    """Shapes that the batches of a training are padded to, so that the same operations serve each of them.

    After its own groups a padded batch has empty ones, and last a group of the documents that are padding.
    """

    documents: int
    """Of a batch, those of padding included."""
    shapes: tuple[tuple[int, int], ...]
    """Lists and slots (M, L) of each chunk, short lists first."""

    @property
    def groups(self) -> int:
        """Groups of a batch: one for each place of a list, and that of padding."""
        return sum(m for m, _ in self.shapes) + 1

    @property
    def least(self) -> int:
        """Documents that a batch must have: a fuller one has no room for another list."""
        return max(2, self.documents - self.shapes[-1][1])

    def dealt(self, lengths_Q: NDArray[np.int64], copies: int = 1) -> NDArray[np.int64] | None:
        """The group in each place of a list, shape [G], -1 where there is none; None if the groups do not fit.

        Example:
            >>> Frame(9, ((1, 2), (2, 4))).dealt(np.array([3, 2, 0, 1])).tolist()
            [3, 1, 0]
        """
        order_G, first = lengths_Q.argsort(kind="stable")[(lengths_Q == 0).sum() :], 0
        places = []
        for m, length in self.shapes:  # a list may also have a place of longer ones
            fitting = int(lengths_Q[order_G].searchsorted(length, side="right"))
            taken_M = order_G[first : min(first + m * copies, fitting)]
            places.append(np.pad(taken_M, (0, m * copies - len(taken_M)), constant_values=-1))
            first += len(taken_M)
        return np.concatenate(places) if first == len(order_G) else None


def frame_of(lengths_Q: NDArray[np.int64], *, documents: int, longest: int, entries: int) -> Frame:
    """A frame with room for nearly every batch of this many documents.

    Args:
        lengths_Q: documents of some groups; those of a batch are taken to have the same distribution.
        documents: the most that a batch has.
        longest: documents of the longest group; a place is reserved for two up to twice as long as any of `lengths_Q`.
        entries: the most that a chunk may have, M * L * L; longer lists do not fit the frame.

    Example:
        >>> frame_of(np.full(50, 10), documents=100, longest=12, entries=1000)
        Frame(documents=100, shapes=((10, 10), (6, 10), (2, 12)))
    """
    most = math.isqrt(entries)
    lengths_G = np.sort(lengths_Q[(lengths_Q > 0) & (lengths_Q <= most)])
    groups, classes = documents / max(1.0, float(lengths_Q[lengths_Q > 0].mean())), []
    for first, end in pairwise([0, *best_cuts(lengths_G, 2, entries * len(lengths_G), _LENGTHS)]):
        expected = groups * (end - first) / len(lengths_Q)
        classes.append((math.ceil(expected + _ROOM * math.sqrt(expected) + 1), int(lengths_G[end - 1])))
    if (longer := min(longest, most, 2 * int(lengths_G.max(initial=1)))) > lengths_G.max(initial=0):
        classes.append((2, longer))
    shapes = []
    for lists, length in classes:
        full, rest = divmod(lists, max(1, entries // length**2))
        shapes += [(max(1, entries // length**2), length)] * full + ([(rest, length)] if rest else [])
    return Frame(documents, tuple(shapes))


def filled(lengths_G: NDArray[np.int64], power: int, budget: int) -> list[int]:
    """Ends of chunks that each hold as many lists as the budget allows, at least one."""
    ends, first = [], 0
    while first < len(lengths_G):
        # the entries of a chunk grow with its last list
        entries_G = (np.arange(first, len(lengths_G)) + 1 - first) * lengths_G[first:] ** power
        first += max(1, int(entries_G.searchsorted(budget, side="right")))
        ends.append(first)
    return ends


def best_cuts(lengths_G: NDArray[np.int64], power: int, budget: int, number: int = CHUNKS_ON_A_GPU) -> list[int]:
    """Ends of a number of chunks with the least padding; a chunk beyond the budget is cut again."""
    if not len(lengths_G):
        return []
    bounds_C = _candidates(lengths_G)
    sizes_CC = np.maximum(0, bounds_C - bounds_C[:, None])
    cost_CC = sizes_CC * np.concatenate([[0], lengths_G[bounds_C[1:] - 1]]) ** power
    cost_CC[sizes_CC == 0] = np.iinfo(np.int64).max // 4
    total_C, back = cost_CC[0], []
    for _ in range(min(number, len(bounds_C) - 1) - 1):  # one more chunk: from the best place to begin it
        totals_CC = np.minimum(total_C[:, None] + cost_CC, np.iinfo(np.int64).max // 4)
        back.append(totals_CC.argmin(0))
        total_C = totals_CC.min(0)
    ends = [len(bounds_C) - 1]
    for best_C in reversed(back):
        ends.append(int(best_C[ends[-1]]))
    first, cuts = 0, []
    for end in bounds_C[ends[::-1]].tolist():
        step = max(1, budget // int(lengths_G[end - 1]) ** power)
        cuts += [*range(first + step, end, step), end]
        first = end
    return cuts


def _candidates(lengths_G: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places where a chunk may begin or end: between lists of different length, thinned out to some dozens."""
    between = np.flatnonzero(np.diff(lengths_G)) + 1
    kept = between[np.unique(np.linspace(0, len(between) - 1, _CUTS).astype(np.int64))] if len(between) else between
    return np.concatenate([[0], kept, [len(lengths_G)]])
