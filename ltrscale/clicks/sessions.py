"""Sessions: shown lists with their clicks, and how often each pair was shown and clicked at each place.

A pair is a document of a query. Pairs are numbered from 0; D, one past the last, stands for every unseen pair, and -1
for a position without a document.

Shapes: S sessions, P positions, D pairs, M cells (a pair at a place), K places.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ltrscale.arrays import Bools, Doubles, Ints


@dataclass(frozen=True, eq=False)
class Sessions:
    """Lists that were shown, position by position; entry p of the second axis is position p + 1."""

    pairs_SP: Ints
    clicks_SP: Bools
    queries_S: Ints
    """The number of each session's query."""
    pairs: int
    """D; numbers of pairs are at most D."""

    def __len__(self) -> int:
        return len(self.pairs_SP)

    @property
    def positions(self) -> int:
        """Number of positions, P."""
        return int(self.pairs_SP.shape[1])

    @property
    def shown_SP(self) -> Bools:
        """Where a document was shown."""
        return self.pairs_SP >= 0

    @property
    def last_SP(self) -> Ints:
        """The position of the last click at or above each position, from 1; 0 for none."""
        places_P = np.arange(1, self.positions + 1)
        return np.asarray(np.maximum.accumulate(np.where(self.clicks_SP, places_P, 0), axis=1))

    @property
    def last_S(self) -> Ints:
        """The position of the last click, from 1; 0 without a click."""
        return self.last_SP[:, -1]

    def take(self, keep_S: Bools) -> "Sessions":
        """Some of the sessions; pairs keep their numbers."""
        return Sessions(self.pairs_SP[keep_S], self.clicks_SP[keep_S], self.queries_S[keep_S], self.pairs)

    def folds_D(self, folds: int) -> Ints:
        """The fold of each pair, from 0: that of its query, so that folds are independent; 0 for an unshown pair."""
        fold_D = np.zeros(self.pairs, np.int64)
        row_M, column_M = np.nonzero(self.shown_SP & (self.pairs_SP < self.pairs))
        fold_D[self.pairs_SP[row_M, column_M]] = self.queries_S[row_M] % folds
        return fold_D


def sums(index_N: Ints, values_N: Doubles | Bools, size: int) -> Doubles:
    """The sum of the values of each index below `size`.

    Example:
        >>> sums(np.array([1, 1]), np.array([0.5, 2.0]), 3).tolist()
        [0.0, 2.5, 0.0]
    """
    return np.asarray(np.bincount(index_N, values_N, size), np.float64)


class Cells(NamedTuple):
    """How often each pair was shown and clicked at each place; a cell that was never shown is left out."""

    pair_M: Ints
    place_M: Ints
    shown_M: Doubles
    clicked_M: Doubles

    def keep(self, keep_M: Bools) -> "Cells":
        """Some of the cells."""
        return Cells(self.pair_M[keep_M], self.place_M[keep_M], self.shown_M[keep_M], self.clicked_M[keep_M])

    @property
    def several_M(self) -> Bools:
        """Cells of pairs that were shown at several places."""
        return np.asarray(np.bincount(self.pair_M)[self.pair_M] > 1) if len(self.pair_M) else np.zeros(0, np.bool_)

    def by_place(self, places: int) -> tuple[Doubles, Doubles]:
        """How often documents were shown and clicked at each place, shapes [K]."""
        return sums(self.place_M, self.shown_M, places), sums(self.place_M, self.clicked_M, places)


def count(sessions: Sessions, place_SP: Ints | None = None) -> Cells:
    """The cells of sessions; the place of a document is its position, from 0, unless it is given.

    Example:
        >>> both = Sessions(np.array([[0, 1], [1, -1]]), np.array([[True, False], [False, False]]), np.zeros(2), 2)
        >>> [column.tolist() for column in count(both)]
        [[0, 1, 1], [0, 0, 1], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    """
    if place_SP is None:
        place_SP = np.broadcast_to(np.arange(sessions.positions), sessions.pairs_SP.shape)
    shown_SP = sessions.shown_SP
    places = int(place_SP.max(initial=0)) + 1
    code_N, cell_N = np.unique(sessions.pairs_SP[shown_SP] * places + place_SP[shown_SP], return_inverse=True)
    shown_M = np.bincount(cell_N, minlength=len(code_N)).astype(np.float64)
    clicked_M = sums(cell_N, sessions.clicks_SP[shown_SP], len(code_N))
    return Cells(code_N // places, code_N % places, shown_M, clicked_M)
