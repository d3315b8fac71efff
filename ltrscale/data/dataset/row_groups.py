"""The row groups that a job reads, as columns, so that a million of them take little time and memory.

Shapes: R row groups.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from ltrscale.data.dataset.manifest import Feature


class FileSource(NamedTuple):
    """The data set that lists a file, and the hash and bytes of the file by its manifest."""

    url: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class RowGroup:
    """One Parquet row group, with its counts from the manifest.

    `gid_base` is added to `gid`, so that ids are unique over several data sets: `GID_SPAN` for each earlier data set
    from which the split takes a period, whether or not files are left out. `first_labelled` is the number of labelled
    groups before it in the split, without the files left out. `scores` is the file whose row group of the same index
    has the scores that serve as labels: then all groups count as labelled. `stored` are the features in its file, which
    may differ from the ones that are served; `longest` has the documents of the file's longest group.
    """

    url: str
    index: int
    period: str
    groups: int
    documents: int
    labelled: int
    gid_base: int
    first_labelled: int
    scores: str | None = None
    source: FileSource | None = None
    """Lets a reader check that the file is still the one that was chosen."""
    stored: tuple[Feature, ...] | None = field(default=None, compare=False, repr=False)
    longest: int = field(default=0, compare=False)


class FileToRead(NamedTuple):
    """What all row groups of a file have in common, by the names of `RowGroup`."""

    url: str
    period: str
    gid_base: int
    scores: str | None
    source: FileSource | None
    stored: tuple[Feature, ...] | None
    longest: int


class RowGroups(Sequence[RowGroup]):
    """Row groups in order, as columns; an element is made when it is asked for.

    Args:
        files: the files that they lie in.
        file_R: the number of each one's file.
        counts_R5: index in the file, groups, documents, labelled groups, and labelled groups before it.

    Example:
        >>> some = RowGroups.of([RowGroup("a", i, "p", 3, 40, 2, gid_base=0, first_labelled=2 * i) for i in range(3)])
        >>> len(some), some.documents_R, some[1:][0].index, len(some.files)
        (3, array([40, 40, 40]), 1, 1)
    """

    def __init__(self, files: Sequence[FileToRead], file_R: NDArray[np.int64], counts_R5: NDArray[np.int64]) -> None:
        self.files, self.file_R, self.counts_R5 = files, file_R, counts_R5

    @classmethod
    def of(cls, row_groups: Iterable[RowGroup]) -> Self:
        """The row groups as columns; columns stay as they are."""
        if isinstance(row_groups, cls):
            return row_groups
        files: list[FileToRead] = []
        numbers: dict[tuple[object, ...], int] = {}
        file_R, counts_R5 = [], []
        for r in row_groups:
            # by the features' identity, since there may be thousands
            number = numbers.setdefault((r.url, r.period, r.gid_base, r.scores, id(r.stored)), len(files))
            if number == len(files):
                files.append(FileToRead(r.url, r.period, r.gid_base, r.scores, r.source, r.stored, r.longest))
            file_R.append(number)
            counts_R5.append((r.index, r.groups, r.documents, r.labelled, r.first_labelled))
        return cls(files, np.array(file_R, np.int64), np.array(counts_R5, np.int64).reshape(-1, 5))

    def __len__(self) -> int:
        return len(self.file_R)

    @overload
    def __getitem__(self, index: int) -> RowGroup: ...
    @overload
    def __getitem__(self, index: slice) -> "RowGroups": ...
    def __getitem__(self, index: int | slice) -> "RowGroup | RowGroups":
        if isinstance(index, slice):
            return RowGroups(self.files, self.file_R[index], self.counts_R5[index])
        url, period, gid_base, scores, source, stored, longest = self.files[self.file_R[index]]
        number, groups, documents, labelled, first_labelled = self.counts_R5[index].tolist()
        counts = (groups, documents, labelled)
        return RowGroup(url, number, period, *counts, gid_base, first_labelled, scores, source, stored, longest)

    def __iter__(self) -> Iterator[RowGroup]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(RowGroup.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process with the files that these row groups lie in, and no others."""
        used, file_R = np.unique(self.file_R, return_inverse=True)
        return type(self), ([self.files[i] for i in used.tolist()], file_R, self.counts_R5)

    def take(self, which_R: NDArray[np.int64] | NDArray[np.bool_] | Sequence[int]) -> "RowGroups":
        """The row groups with these numbers, in this order, or those that are marked."""
        which_R = np.asarray(which_R, None if len(which_R) else np.int64)
        return RowGroups(self.files, self.file_R[which_R], self.counts_R5[which_R])

    @property
    def groups_R(self) -> NDArray[np.int64]:
        """Query groups of each."""
        return self.counts_R5[:, 1]

    @property
    def documents_R(self) -> NDArray[np.int64]:
        """Documents of each."""
        return self.counts_R5[:, 2]

    @property
    def labelled_R(self) -> NDArray[np.int64]:
        """Labelled groups of each."""
        return self.counts_R5[:, 3]

    @property
    def first_labelled_R(self) -> NDArray[np.int64]:
        """Labelled groups of the split before each."""
        return self.counts_R5[:, 4]

    @cached_property
    def _first(self) -> dict[str, int]:
        """The place of the first row group of each file, by URL."""
        used, first = np.unique(self.file_R, return_index=True)
        return {self.files[i].url: place for i, place in zip(used.tolist(), first.tolist(), strict=True)}

    def at(self, url: str, index: int) -> RowGroup:
        """The row group with this index in a file, all of whose row groups are there in their order."""
        row_group = self[self._first[url] + index]
        assert (row_group.url, row_group.index) == (url, index)
        return row_group

    @property
    def own_files(self) -> list[FileToRead]:
        """The files that they lie in, in the order of their first row groups."""
        used, first = np.unique(self.file_R, return_index=True)
        return [self.files[i] for i in used[np.argsort(first)].tolist()]

    @property
    def longest(self) -> int:
        """Documents of the longest group of the files."""
        return max((self.files[i].longest for i in np.unique(self.file_R).tolist()), default=0)

    def by_file(self) -> dict[str, "RowGroups"]:
        """The row groups of each file, by URL."""
        return self._by([file.url for file in self.files])

    def by_period(self) -> dict[str, "RowGroups"]:
        """The row groups of each period."""
        return self._by([file.period for file in self.files])

    def _by(self, names: Sequence[str]) -> dict[str, "RowGroups"]:
        """The row groups by the names of their files, in order of the first of each."""
        codes = dict[str, int]()
        code_R = np.array([codes.setdefault(name, len(codes)) for name in names], np.int64)[self.file_R]
        order_R = np.argsort(code_R, kind="stable")
        ends = np.searchsorted(code_R[order_R], np.arange(len(codes) + 1)).tolist()
        runs = zip(codes, itertools.pairwise(ends), strict=True)
        return {name: self.take(order_R[start:end]) for name, (start, end) in runs if end > start}
