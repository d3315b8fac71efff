"""Statistics of documents, gathered in parts and merged: one pass, bounded memory, any number of processes.

The same parts merged in the same order give the same statistics to the last bit, on any machine: all arithmetic is
numpy in one thread, and no sum depends on the layout of vector registers. If the documents are cut or merged
differently, counts, vocabularies and samples stay the same, and moments differ by rounding in float64.

Shapes: N documents, F features, V codes of a vocabulary, M sampled documents, K quantiles.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ltrscale.arrays import N_CODES, Moments
from ltrscale.draws import splitmix64
from ltrscale.late import Late

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Late("torch")

_GLANCE = 1 << 10  # values of a column to look at before counting all of them
_HIGHEST = 2**64 - 1

ScalarT = TypeVar("ScalarT", bound=np.generic)

Counted = tuple[NDArray[np.float32], NDArray[np.int64]]
"""The different values [V], sorted, and their counts [V]."""


class ValueCounts:
    """Exact counts of the different values of a feature, without missing ones; parts can be merged.

    Codes of categories are integers below 2**24, so memory holds at most 2**24 codes of 12 bytes whatever the number of
    documents (200 MB a feature, and about 1 GB while one feature's parts are merged). Dropping rare codes early would
    need less memory, but the result would depend on the order of the parts. `at_most` bounds the memory.

    Args:
        at_most: if there are more different values than this, none is kept and `codes` returns None.

    Example:
        >>> seen, more = ValueCounts(), ValueCounts()
        >>> seen.add(np.array([5, 2, 5], np.float32))
        >>> more.add(np.array([9, 9, np.nan, 9], np.float32))
        >>> seen.merge(more)
        >>> seen.codes(2).tolist(), seen.codes().tolist()
        ([5.0, 9.0], [2.0, 5.0, 9.0])
    """

    def __init__(self, at_most: int | None = None) -> None:
        self._at_most = at_most
        self._over = False
        self._known: Counted = _value_counts(np.zeros(0, np.float32))
        self._new: list[Counted] = []

    def add(self, values_N: NDArray[np.float32]) -> None:
        """Count one column of some documents."""
        if not self._over and self._at_most is not None:  # for most features, a few values show it
            self._over = len(_value_counts(values_N[:_GLANCE])[0]) > self._at_most
        if not self._over:
            self._take([_value_counts(values_N)])

    def merge(self, other: Self) -> None:
        """Add the counts of another vocabulary."""
        self._over |= other._over
        self._take([other._known, *other._new])

    def codes(self, limit: int | None = None) -> NDArray[np.float32] | None:
        """Sorted values, at most the `limit` most frequent ones; smaller values win ties.

        None if there are more different values than `at_most`.
        """
        self._settle()
        codes_V, counts_V = self._known
        return None if self._over else np.sort(codes_V[np.argsort(-counts_V, kind="stable")[:limit]])

    def counts(self) -> Counted:
        """All different values with their counts; none if there are more than `at_most`."""
        self._settle()
        return self._known

    def _take(self, counted: list[Counted]) -> None:
        """Collect more counts, and merge them once they outnumber the merged ones, which keeps merges rare."""
        self._new += [part for part in counted if len(part[0])]
        if sum(len(codes_V) for codes_V, _ in self._new) > len(self._known[0]):
            self._settle()

    def _settle(self) -> None:
        codes, counts = (np.concatenate(column) for column in zip(self._known, *self._new, strict=True))
        codes, counts = merged_counts(codes, counts)
        self._over |= self._at_most is not None and len(codes) > self._at_most
        self._new = []
        self._known = _value_counts(codes[:0]) if self._over else (codes, counts)


def merged_counts(values: NDArray[ScalarT], counts: NDArray[np.int64]) -> tuple[NDArray[ScalarT], NDArray[np.int64]]:
    """The different values [V], sorted, and the sum of the counts of each [V].

    Example:
        >>> [each.tolist() for each in merged_counts(np.array([5, 9, 2, 5]), np.array([1, 2, 3, 4]))]
        [[2, 5, 9], [3, 5, 2]]
    """
    order = np.argsort(values, kind="stable")  # the stable sort is fast on a sequence of sorted runs
    values, counts = values[order], counts[order]
    first_V = np.flatnonzero(np.concatenate([np.ones(min(1, len(values)), bool), values[1:] != values[:-1]]))
    return values[first_V], np.add.reduceat(counts, first_V)


class _SeenCodes:
    """The set of a category's codes, as a bitmap of 2 MiB."""

    def __init__(self) -> None:
        self._bits = np.zeros(N_CODES // 8, np.uint8)

    def add(self, values_N: NDArray[np.float32]) -> None:
        """Add the codes of some documents; other values are ignored."""
        codes_V = np.unique(values_N[(values_N >= 0) & (values_N < N_CODES)]).astype(np.int64)
        np.bitwise_or.at(self._bits, codes_V >> 3, np.left_shift(1, codes_V & 7).astype(np.uint8))

    def merge(self, other: Self) -> None:
        self._bits |= other._bits

    def codes(self) -> NDArray[np.float32]:
        places = np.flatnonzero(self._bits)
        bits = np.unpackbits(self._bits[places, None], axis=1, bitorder="little")
        of_eight = bits.nonzero()
        return (8 * places[of_eight[0]] + of_eight[1]).astype(np.float32)


def _value_counts(values_N: NDArray[np.float32]) -> Counted:
    codes_V, counts_V = np.unique(values_N[~np.isnan(values_N)] + np.float32(0), return_counts=True)  # -0 + 0 is 0
    return codes_V, counts_V


class Sample:
    """A uniform sample of documents without replacement: those whose numbers have the lowest hashes.

    It depends only on the documents and their numbers, and parts can be merged. Quantile sketches need less memory, but
    either their content depends on the order of merges and on coin flips (KLL, REQ), or they bound the error of the
    value instead of the rank (DDSketch). In a sample of M documents, the quantile at p has a standard error in p of at
    most `1 / (2 sqrt(M))`, for every feature.

    Args:
        size: documents to keep.
        documents: number of documents in all parts together, if known: a part then keeps little more than its share.
            Otherwise memory holds at most twice the size, plus the documents being added.
    """

    def __init__(self, size: int, documents: int | None = None) -> None:
        self._size = size
        # with a margin of eight standard deviations, at least `size` hashes of documents are below it
        share = (size + 8 * math.sqrt(size) + 64) / documents if documents else 1
        self._below = _HIGHEST if share >= 1 else int(share * _HIGHEST)
        self._kept: list[tuple[NDArray[np.uint64], NDArray[np.float32]]] = []

    def chosen(self, numbers_N: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True for the documents that may belong to the sample, by number, shape [N]."""
        return _hashes(numbers_N) <= np.uint64(self._below)

    def add(self, numbers_N: NDArray[np.int64], rows_NF: NDArray[np.float32]) -> None:
        """Offer the documents with these numbers."""
        chosen_N = self.chosen(numbers_N)
        self._take([(_hashes(numbers_N[chosen_N]), rows_NF[chosen_N])])

    def merge(self, other: Self) -> None:
        """Offer the documents kept by another sample, which has seen other documents."""
        self._take(other._kept)

    def rows_MF(self) -> NDArray[np.float32]:
        """The sampled documents, in the order of their hashes.

        Raises:
            ValueError: no part was added.
        """
        self._shrink()
        return self._kept[0][1]

    def _take(self, kept: list[tuple[NDArray[np.uint64], NDArray[np.float32]]]) -> None:
        self._kept += kept
        if sum(len(keys) for keys, _ in self._kept) > 2 * self._size:
            self._shrink()

    def take_MF(self) -> NDArray[np.float32]:
        """Like `rows_MF`, but empties the sample and frees its memory."""
        rows_MF = self.rows_MF()
        self._kept = []
        return rows_MF

    def _shrink(self) -> None:
        """Keep only the lowest hashes, in one array."""
        parts, self._kept = deque(self._kept), []
        keys_K = np.concatenate([keys for keys, _ in parts])
        order_M = np.argsort(keys_K)[: self._size]
        place_K = np.full(len(keys_K), -1)
        place_K[order_M] = np.arange(len(order_M))
        rows_MF = np.empty((len(order_M), parts[0][1].shape[1]), np.float32)
        first = 0
        while parts:
            _, rows = parts.popleft()  # frees each part once its rows are copied, which lowers the peak of memory
            place = place_K[first : first + len(rows)]
            rows_MF[place[place >= 0]] = rows[place >= 0]
            first += len(rows)
        self._kept = [(keys_K[order_M], rows_MF)]
        if len(order_M) == self._size:
            self._below = int(keys_K[order_M[-1]])


_SAMPLED_VALUES = 1 << 26


def sampled_documents(wanted: int, n_features: int) -> int:
    """The number of documents to sample: `wanted`, but at most 2^26 values (256 MiB).

    Example:
        >>> sampled_documents(100_000, 136), sampled_documents(100_000, 5000)
        (100000, 13421)
    """
    return min(wanted, max(2, _SAMPLED_VALUES // max(1, n_features)))


def _hashes(numbers_N: NDArray[np.int64]) -> NDArray[np.uint64]:
    return splitmix64(np.zeros(len(numbers_N), np.uint64), numbers_N.astype(np.uint64))


def quantiles(rows_MF: NDArray[np.float32], n_quantiles: int) -> Tensor:
    """Quantiles [F, K] of each feature at K evenly spaced probabilities, interpolated; 0 for a feature without values.

    Example:
        >>> quantiles(np.array([[1, np.nan], [2, np.nan], [4, np.nan]], np.float32), 5).tolist()
        [[1.0, 1.5, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0, 0.0]]
    """
    quantiles_FK = np.zeros((rows_MF.shape[1], n_quantiles))
    for feature, values_M in enumerate(rows_MF.T):
        present = np.sort(values_M[~np.isnan(values_M)])
        if len(present):
            places_K = np.linspace(0, len(present) - 1, n_quantiles)
            quantiles_FK[feature] = np.interp(places_K, np.arange(len(present)), present)
    return torch.from_numpy(quantiles_FK).float()


@dataclass(frozen=True)
class Wanted:
    """The statistics to gather.

    Args:
        numeric: whether each feature is numeric; the values of categories are counted.
        log1p: whether moments are those of `sign(x) log(1 + |x|)`.
        moments: whether to gather means and deviations.
        sample: documents to sample for quantiles; 0 for none.
        discrete_up_to: also count the values of a numeric feature that has at most this many different ones.
        most_codes: a category with more different codes is hashed, and only the set of its codes is kept.
        documents: number of documents in all parts together, if known.
    """

    numeric: tuple[bool, ...]
    log1p: bool = False
    moments: bool = True
    sample: int = 0
    discrete_up_to: int = 0
    most_codes: int | None = None
    documents: int | None = None


class FeatureStatistics:
    """Statistics of some documents; parts can be merged.

    Example:
        >>> one, other = (FeatureStatistics(Wanted(numeric=(True, False))) for _ in range(2))
        >>> one.add(0, np.array([[1, 7]], np.float32))
        >>> other.add(1, np.array([[3, 8], [5, 7]], np.float32))
        >>> one.merge(other)
        >>> one.documents, one.moments.mean_F.tolist(), one.vocabularies[1].codes().tolist()
        (3, [3.0, 7.333333333333333], [7.0, 8.0])
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.documents = 0
        self.moments = Moments.none(len(wanted.numeric))
        self.sample = Sample(wanted.sample, wanted.documents)
        self.vocabularies = {
            column: ValueCounts(wanted.discrete_up_to if numeric else wanted.most_codes)
            for column, numeric in enumerate(wanted.numeric)
            if wanted.discrete_up_to or not numeric
        }
        limited = wanted.most_codes is not None
        self.seen = {column: _SeenCodes() for column, numeric in enumerate(wanted.numeric) if limited and not numeric}

    def add(self, first: int, features_NF: NDArray[np.float32]) -> None:
        """Add documents numbered from `first`."""
        assert features_NF.shape[1] == len(self.wanted.numeric)
        self.documents += len(features_NF)
        if self.wanted.sample:
            self.sample.add(np.arange(first, first + len(features_NF)), features_NF)
        if self.wanted.moments:
            self.moments = self.moments.merge(Moments.from_values(features_NF, log1p=self.wanted.log1p))
        for column, vocabulary in self.vocabularies.items():
            vocabulary.add(features_NF[:, column])
        for column, seen in self.seen.items():
            seen.add(features_NF[:, column])

    @property
    def hashed(self) -> list[int]:
        """The categories with more than `most_codes` different codes."""
        return [column for column in self.seen if self.vocabularies[column].codes() is None]

    def merge(self, other: Self) -> None:
        """Add the statistics of other documents."""
        self.documents += other.documents
        self.sample.merge(other.sample)
        self.moments = self.moments.merge(other.moments)
        for column, vocabulary in self.vocabularies.items():
            vocabulary.merge(other.vocabularies[column])
        for column, seen in self.seen.items():
            seen.merge(other.seen[column])
