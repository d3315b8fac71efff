"""Parts of a selection, and running a function on each: in this process or in tasks of a Ray cluster.

Parts are cut from the manifests alone, so they do not depend on the processes that work on them, and results come in
their order. Statistics that are computed part by part and merged in that order are the same for any number of
processes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ltrscale.data.dataset.selection import Selection

_VALUES = 1 << 24

T = TypeVar("T")
PartT = TypeVar("PartT", bound="Part")


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive row groups of a selection, as a selection, and the number of documents before them."""

    selection: Selection
    first: int
    documents: int


class Run(Protocol):
    """Runs a function on each part; yields the results in the order of the parts, as soon as they are ready."""

    def __call__(self, function: Callable[[PartT], T], parts: Iterable[PartT]) -> Iterator[T]:
        """Ray sends the function to other processes: use a module-level one, or a `partial` of one."""
        ...


def cut_into_parts(selection: Selection, *, values: int = _VALUES) -> list[Part]:
    """As `parts_of`, in a list."""
    return list(parts_of(selection, values=values))


def parts_of(selection: Selection, *, values: int = _VALUES) -> Iterator[Part]:
    """Cut a selection into parts of whole row groups, each of about `values` feature values (64 MiB).

    Documents are those of the row groups, whether or not all of them are served.
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
    """A sample of about this many documents: whole row groups, at equal distances over a selection of all groups."""
    row_groups = selection.row_groups
    number = min(len(row_groups), -(-len(row_groups) * documents // max(1, selection.n_documents)))
    return selection.only(row_groups.take([i * len(row_groups) // number for i in range(number)]))


def run_here(function: Callable[[PartT], T], parts: Iterable[PartT]) -> Iterator[T]:
    """Run a function on each part in the calling thread, lazily: each when the caller asks for its result."""
    return map(function, parts)
