"""Parts of a selection, for passes that need no order, such as statistics; they run here or in tasks of a Ray cluster.

Parts are cut from the manifests alone and results come in their order. So statistics that are merged part by part are
the same for any number of processes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ltrscale.data.dataset.selection import Selection

T = TypeVar("T")
PartT = TypeVar("PartT", bound="Part")

_VALUES = 1 << 24
"""Feature values of a part (64 MiB): enough for a task, and little beside a worker's memory."""


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
