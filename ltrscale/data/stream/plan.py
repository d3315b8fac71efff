"""What is read when: the order of an epoch, and parts of a selection for passes that need no order.

The order is a pure function of (seed, epoch, key): no data, no state, no dependence on the workers. Row groups are
permuted and dealt to C canonical streams; a stream is read in windows of some row groups, and the groups of a window
(with `regroup` its documents too) are permuted. Worker r of W serves the streams c with c mod W = r, so the order does
not depend on W.

Parts are for passes such as statistics, here or in tasks of a Ray cluster. They are cut from the manifests alone and
results come in their order. So statistics that are merged part by part are the same for any number of processes.

Shapes: Q groups.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ltrscale.arrays import Doubles, Ints
from ltrscale.data.dataset.selection import Selection
from ltrscale.draws import mix, permutation, uniforms

T = TypeVar("T")
PartT = TypeVar("PartT", bound="Part")

_A_TURN = 1 << 16
"""Row groups that are dealt at a time: a million Python numbers at once would take much memory."""
_LARGE = 1 << 22
"""Feature values (16 MiB) of each row group of a full window, on average; a window with more ends earlier."""
_VALUES = 1 << 24
"""Feature values of a part (64 MiB): enough for a task, and little beside a worker's memory."""


def step_seed(seed: int, step: int, stream: int) -> int:
    """The random seed of one micro-batch: one stream in one step."""
    return mix("step", seed, step, stream)


def canonical_streams(
    documents_R: Sequence[int] | Ints,
    *,
    seed: int,
    epoch: int,
    key: str,
    streams: int,
    shuffle: bool = True,
) -> list[Ints]:
    """Deal row groups to C = `streams` streams that are balanced by documents; returns the numbers of each in order.

    The row groups are permuted, by seed, epoch and `key`, the hash of the selection (in file order without `shuffle`).
    Each in turn goes to the stream with the fewest documents so far, or the lowest number in a tie. So two streams
    differ by at most the largest row group.

    Example:
        >>> canonical_streams([5, 1, 1, 1, 1], seed=0, epoch=0, key="", streams=2, shuffle=False)
        [array([0]), array([1, 2, 3, 4])]
    """
    n, documents_R = len(documents_R), np.asarray(documents_R, np.int64)
    order_R = permutation(n, "deal", seed, epoch, key) if shuffle else np.arange(n)
    stream_R = np.empty(n, np.min_scalar_type(streams))  # narrow numbers are sorted in linear time
    # a heap of `load * streams + stream`, ordered by load and then by number; pairs would take three times as long
    loads = list(range(streams))
    for first in range(0, n, _A_TURN):
        turn = slice(first, first + _A_TURN)
        added = (documents_R[order_R[turn]] * streams).tolist()
        stream_R[turn] = np.array([heapq.heapreplace(loads, loads[0] + load) for load in added]) % streams
    ends = np.cumsum(np.bincount(stream_R, minlength=streams))
    return np.split(order_R[np.argsort(stream_R, kind="stable")], ends[:-1])


def windows(row_groups: Sequence[T], window: int, values: Callable[[T], int]) -> list[list[T]]:
    """Cut a stream into windows of at most `window` row groups; one ends earlier where row groups are very large.

    It ends with the row group that brings it to 2^22 values (16 MiB of features) per row group that it could have.
    """
    cut, total = list[list[T]](), 0
    for row_group in row_groups:
        if not cut or len(cut[-1]) == window or total >= window * _LARGE:
            cut.append([])
            total = 0
        cut[-1].append(row_group)
        total += values(row_group)
    return cut


def window_order(groups: int, *, seed: int, epoch: int, stream: int, window: int, shuffle: bool = True) -> Ints:
    """The order in which the groups of a window are served, shape [groups]; file order without `shuffle`."""
    return permutation(groups, "window", seed, epoch, stream, window) if shuffle else np.arange(groups)


def document_order(documents: int, *, seed: int, epoch: int, stream: int, window: int) -> Ints:
    """The order in which a window's documents are dealt to new groups (`regroup`), shape [documents]."""
    return permutation(documents, "documents", seed, epoch, stream, window)


def times_served(mean_times_Q: Doubles, ids_Q: Ints, *, seed: int, epoch: int) -> Ints:
    """The number of times to serve each group in an epoch, `mean_times_Q` on average, shape [Q].

    This is the whole part of the mean, plus one with the probability of the fraction. It is a function of seed, epoch
    and group id, so it depends neither on other groups nor on the layout of the files.
    """
    whole_Q = np.floor(mean_times_Q)
    once_more_Q = uniforms(("times", seed, epoch), ids_Q) < mean_times_Q - whole_Q
    return (whole_Q + once_more_Q).astype(np.int64)


def streams_within(streams: int, *, budget: int, longest: int) -> int:
    """The number of streams that can each serve the longest group while a step stays within its budget of documents.

    It is the largest such divisor of `streams`, at least 1, so that the workers stay as evenly loaded as possible. It
    depends on data and settings alone, never on the workers.

    Example:
        >>> [streams_within(8, budget=4096, longest=longest) for longest in (512, 513, 1366, 2048, 2049, 5772)]
        [8, 4, 2, 2, 1, 1]
    """
    return max(n for n in range(1, streams + 1) if n == 1 or (streams % n == 0 and n * longest <= budget))


def read_order(window_documents: Mapping[int, Iterable[int]]) -> list[tuple[int, int]]:
    """Interleave the windows of several streams in the order in which they will be needed.

    Streams are consumed at the same rate, so a window is needed when its stream has used up the documents before it.
    Takes the documents of each window by stream; returns pairs (stream, number of the window among those given).

    Example:
        >>> read_order({0: [10, 10], 1: [3, 3, 20]})
        [(0, 0), (1, 0), (1, 1), (1, 2), (0, 1)]
    """
    needed = []
    for stream, documents in window_documents.items():
        documents_before = 0
        for window, n in enumerate(documents):
            needed.append((documents_before, window, stream))
            documents_before += n
    return [(stream, window) for _, window, stream in sorted(needed)]


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive row groups of a selection, as a selection, and the number of documents before them."""

    selection: Selection
    first: int
    documents: int


class Run(Protocol):
    """Run a function on each part; yields the results in the order of the parts, as soon as they are ready."""

    def __call__(self, function: Callable[[PartT], T], parts: Iterable[PartT]) -> Iterator[T]:
        """Use a module-level function or a `partial` of one, because Ray sends it to other processes."""
        ...


def parts_of(selection: Selection, *, values: int = _VALUES) -> Iterator[Part]:
    """Cut a selection into parts of whole row groups, each of about `values` feature values (64 MiB).

    This counts all documents of the row groups, served or not.
    """
    budget = values // max(1, len(selection.features))
    ends_R = np.cumsum(selection.row_groups.documents_R)
    first = start = 0
    while start < len(ends_R):
        stop = min(max(start, int(np.searchsorted(ends_R, first + budget))) + 1, len(ends_R))
        documents = int(ends_R[stop - 1]) - first
        yield Part(selection.only(selection.row_groups[start:stop]), first, documents)
        first, start = first + documents, stop


def spread(selection: Selection, *, documents: int) -> Selection:
    """A sample of about this many documents: whole row groups, evenly spaced over a selection of all groups."""
    row_groups = selection.row_groups
    number = min(len(row_groups), -(-len(row_groups) * documents // max(1, selection.n_documents)))
    return selection.only(row_groups.take([i * len(row_groups) // number for i in range(number)]))


def run_here(function: Callable[[PartT], T], parts: Iterable[PartT]) -> Iterator[T]:
    """Run a function on each part in the calling thread, lazily."""
    return map(function, parts)
