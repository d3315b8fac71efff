"""The row groups that a job reads, as columns, so that a million of them take little time and memory.

Shapes: R row groups.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.data.dataset.files import Columnar, DataFiles
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.scores import Found


class FileSource(NamedTuple):
    """The data set that lists a file, and the file's hash and bytes by the manifest."""

    url: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class RowGroup:
    """One Parquet row group, with its counts from the manifest.

    `gid_base` is added to `gid`, so that ids are unique over several data sets: `GID_SPAN` for each earlier data set
    that the split takes a period from, whether or not files are left out. `first_labelled` is the number of labelled
    groups before it in the split, without files left out. `scores` is the file whose row group of the same index has
    the scores that serve as labels; then all groups count as labelled. `stored` are the features in its file, which may
    differ from the served ones. `longest` is the number of documents in the file's longest group.
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
    """The values that all row groups of a file share, by the names of `RowGroup`."""

    url: str
    period: str
    gid_base: int
    scores: str | None
    source: FileSource | None
    stored: tuple[Feature, ...] | None
    longest: int


class PartToRead(NamedTuple):
    """The files of a data set that are read, and the values that their row groups share."""

    url: str
    gid_base: int
    stored: tuple[Feature, ...]
    scores: Mapping[str, Found]
    """The scores that serve as labels, by path of the data file."""
    files: DataFiles


class FilesToRead(Sequence[FileToRead]):
    """The files of several parts, concatenated; elements are made on access."""

    def __init__(self, parts: Sequence[PartToRead]) -> None:
        self.parts = parts
        self._bounds = [*itertools.accumulate((len(part.files) for part in parts), initial=0)]

    def __len__(self) -> int:
        return self._bounds[-1]

    @overload
    def __getitem__(self, index: int) -> FileToRead: ...
    @overload
    def __getitem__(self, index: slice) -> list[FileToRead]: ...
    def __getitem__(self, index: int | slice) -> FileToRead | list[FileToRead]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = bisect_right(self._bounds, index) - 1
        url, gid_base, stored, scores, files = self.parts[number]
        i = index - self._bounds[number]
        path, source = files.paths[i], FileSource(url, files.sha256[i], int(files.bytes_F[i]))
        scored, longest = scores.get(path), int(files.longest_F[i])
        file = storage.join(url, path)
        return FileToRead(file, files.period_of[i], gid_base, scored and scored.url, source, stored, longest)

    def take(self, numbers_F: NDArray[np.int64]) -> "FilesToRead":
        """The files with these sorted numbers."""
        ends, parts = np.searchsorted(numbers_F, self._bounds), list[PartToRead]()
        for part, first, (start, stop) in zip(self.parts, self._bounds, itertools.pairwise(ends), strict=False):
            files = part.files.without_row_groups().take(numbers_F[start:stop] - first)
            scores = {path: part.scores[path] for path in files.paths if path in part.scores}
            parts.append(part._replace(files=files, scores=scores))
        return FilesToRead(parts)

    def with_scores(self, scores: Mapping[str, Found]) -> "FilesToRead":
        """The same files with these scores, by path of the data file."""
        return FilesToRead([part._replace(scores=scores) for part in self.parts])


class Columns(NamedTuple):
    """Columns of row groups: number of the file, index in that file, counts, and labelled groups before it."""

    file_R: NDArray[np.int64]
    index_R: NDArray[np.int64]
    groups_R: NDArray[np.int64]
    documents_R: NDArray[np.int64]
    labelled_R: NDArray[np.int64]
    first_labelled_R: NDArray[np.int64]


class RowGroups(Columnar[RowGroup]):
    """Row groups in order, as columns; elements are made on access.

    Args:
        files: the files that contain them.
        longest_F: documents of the longest group of each file.
        columns: values that differ between row groups.

    Example:
        >>> each = (RowGroup("a", i, "p", 3, 40, 2, gid_base=0, first_labelled=2 * i) for i in range(3))
        >>> some = RowGroups.from_iterable(each)
        >>> len(some), some.documents_R, some[1:][0].index, len(some.files)
        (3, array([40, 40, 40]), 1, 1)
    """

    def __init__(self, files: Sequence[FileToRead], longest_F: NDArray[np.int64], columns: Columns) -> None:
        self.files, self.longest_F, self.columns = files, longest_F, columns

    @classmethod
    def from_iterable(cls, row_groups: Iterable[RowGroup]) -> Self:
        """The row groups as columns; columns are returned as they are."""
        if isinstance(row_groups, cls):
            return row_groups
        files: list[FileToRead] = []
        numbers: dict[tuple[object, ...], int] = {}
        rows: list[tuple[int, ...]] = []
        for r in row_groups:
            # by the features' identity, since there may be thousands
            number = numbers.setdefault((r.url, r.period, r.gid_base, r.scores, id(r.stored)), len(files))
            if number == len(files):
                files.append(FileToRead(r.url, r.period, r.gid_base, r.scores, r.source, r.stored, r.longest))
            rows.append((number, r.index, r.groups, r.documents, r.labelled, r.first_labelled))
        columns = np.array(rows, np.int64).reshape(-1, len(Columns._fields)).T
        return cls(files, np.array([file.longest for file in files], np.int64), Columns(*columns))

    def __len__(self) -> int:
        return len(self.columns.file_R)

    @overload
    def __getitem__(self, index: int) -> RowGroup: ...
    @overload
    def __getitem__(self, index: slice) -> "RowGroups": ...
    def __getitem__(self, index: int | slice) -> "RowGroup | RowGroups":
        if isinstance(index, slice):
            return RowGroups(self.files, self.longest_F, Columns(*(column[index] for column in self.columns)))
        file, number, groups, documents, labelled, first_labelled = (int(column[index]) for column in self.columns)
        url, period, gid_base, scores, source, stored, longest = self.files[file]
        counts = (groups, documents, labelled)
        return RowGroup(url, number, period, *counts, gid_base, first_labelled, scores, source, stored, longest)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with only the files of these row groups."""
        first = self.columns.file_R.min() if len(self) else 0
        from_first_R = self.columns.file_R - first  # so the cost of a part depends on its own files
        is_used_F = np.bincount(from_first_R) > 0
        used_F, file_R = first + np.flatnonzero(is_used_F), (np.cumsum(is_used_F) - 1)[from_first_R]
        if isinstance(self.files, FilesToRead):
            files: Sequence[FileToRead] = self.files.take(used_F)
        else:
            files = [self.files[i] for i in used_F.tolist()]
        return type(self), (files, self.longest_F[used_F], self.columns._replace(file_R=file_R))

    def take(self, which_R: NDArray[np.int64] | NDArray[np.bool_] | Sequence[int]) -> "RowGroups":
        """The row groups with these numbers in this order, or those that a mask selects."""
        which_R = np.asarray(which_R, None if len(which_R) else np.int64)
        return RowGroups(self.files, self.longest_F, Columns(*(column[which_R] for column in self.columns)))

    @property
    def groups_R(self) -> NDArray[np.int64]:
        """Query groups of each row group."""
        return self.columns.groups_R

    @property
    def documents_R(self) -> NDArray[np.int64]:
        """Documents of each row group."""
        return self.columns.documents_R

    @property
    def labelled_R(self) -> NDArray[np.int64]:
        """Labelled groups of each row group."""
        return self.columns.labelled_R

    @property
    def first_labelled_R(self) -> NDArray[np.int64]:
        """Labelled groups of the split before each row group."""
        return self.columns.first_labelled_R

    def with_scores(self, scores: Mapping[str, Found]) -> "RowGroups":
        """The row groups with these scores (by path of the data file) as labels, and labelled counts to match."""
        assert isinstance(self.files, FilesToRead)
        return RowGroups(self.files.with_scores(scores), self.longest_F, self.columns)

    @property
    def own_files(self) -> list[FileToRead]:
        """The files that contain them, in the order of their first row groups."""
        used, first = np.unique(self.columns.file_R, return_index=True)
        return [self.files[i] for i in used[np.argsort(first)].tolist()]

    @property
    def longest(self) -> int:
        """Documents of the longest group of the files."""
        return int(self.longest_F[self.columns.file_R].max(initial=0))

    def by_file(self) -> dict[str, "RowGroups"]:
        """The row groups of each file, by URL."""
        return self._by([file.url for file in self.files])

    def by_period(self) -> dict[str, "RowGroups"]:
        """The row groups of each period."""
        return self._by([file.period for file in self.files])

    def _by(self, names: Sequence[str]) -> dict[str, "RowGroups"]:
        """Group the row groups by the names of their files, in order of first occurrence."""
        codes = dict[str, int]()
        code_R = np.array([codes.setdefault(name, len(codes)) for name in names], np.int64)[self.columns.file_R]
        order_R = np.argsort(code_R, kind="stable")
        ends = np.searchsorted(code_R[order_R], np.arange(len(codes) + 1)).tolist()
        runs = zip(codes, itertools.pairwise(ends), strict=True)
        return {name: self.take(order_R[start:end]) for name, (start, end) in runs if end > start}
