"""The row groups that a job reads, as columns, so that a million of them take little time and memory.

Shapes: R row groups.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np

from ltrscale import storage
from ltrscale.arrays import Bools, Ints
from ltrscale.data.dataset.files import Columnar, DataFiles
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.scores import Found


@dataclass(frozen=True)
class FileToRead:
    """A Parquet file, with the values that all its row groups share.

    `gid_base` is added to `gid`, so that ids are unique over several data sets: `GID_SPAN` for each earlier data set
    that the split takes a period from, whether or not files are left out.
    """

    url: str
    period: str
    gid_base: int = 0
    scores: str | None = None
    """The file whose row groups have the scores that serve as labels; then all groups count as labelled."""
    dataset: str = ""
    """URL of the data set that lists the file, with its `sha256` and `bytes`: so that a reader can check that it is
    still the one that was chosen."""
    sha256: str = ""
    bytes: int = 0
    stored: tuple[Feature, ...] | None = field(default=None, compare=False, repr=False)
    """The features in the file, which may differ from the served ones."""
    longest: int = field(default=0, compare=False)
    """Documents of the longest group."""


@dataclass(frozen=True)
class RowGroup:
    """One Parquet row group, with its counts from the manifest."""

    file: FileToRead
    index: int
    groups: int
    documents: int
    labelled: int
    first_labelled: int = 0
    """Labelled groups before it in the split, without files left out."""


class PartToRead(NamedTuple):
    """The files of a data set that are read, and the values that their row groups share."""

    url: str
    gid_base: int
    stored: tuple[Feature, ...]
    stored_in: Mapping[str, tuple[Feature, ...]]
    """The stored features of the periods that lack some."""
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
        url, gid_base, stored, stored_in, scores, files = self.parts[number]
        i = index - self._bounds[number]
        path, bytes_, longest = files.paths[i], int(files.bytes_F[i]), int(files.longest_F[i])
        file, scored = storage.join(url, path), scores.get(path)
        of_scores = scored and scored.url
        period, sha256 = files.period_of[i], files.sha256[i]
        stored = stored_in.get(period, stored)
        return FileToRead(file, period, gid_base, of_scores, url, sha256, bytes_, stored, longest)

    def take(self, numbers_F: Ints) -> "FilesToRead":
        """The files with these sorted numbers."""
        ends, parts = np.searchsorted(numbers_F, self._bounds), list[PartToRead]()
        for part, first, (start, stop) in zip(self.parts, self._bounds, itertools.pairwise(ends), strict=False):
            files = part.files.without_row_groups().take(numbers_F[start:stop] - first)
            scores = {path: part.scores[path] for path in files.paths if path in part.scores}
            parts.append(part._replace(files=files, scores=scores))
        return FilesToRead(parts)


@dataclass(eq=False, repr=False)
class RowGroups(Columnar[RowGroup]):
    """Row groups in order, as columns; elements are made on access."""

    files: Sequence[FileToRead]
    """The files that contain them."""
    longest_F: Ints
    """Documents of the longest group of each file."""
    file_R: Ints
    """The number of each row group's file; the other columns are those of `RowGroup`."""
    index_R: Ints
    groups_R: Ints
    documents_R: Ints
    labelled_R: Ints
    first_labelled_R: Ints

    @property
    def _columns(self) -> tuple[Ints, ...]:
        counts = self.groups_R, self.documents_R, self.labelled_R
        return self.file_R, self.index_R, *counts, self.first_labelled_R

    @classmethod
    def from_iterable(cls, row_groups: Iterable[RowGroup]) -> "RowGroups":
        """The row groups as columns; columns are returned as they are."""
        if isinstance(row_groups, RowGroups):
            return row_groups
        files: dict[FileToRead, int] = {}
        rows = [
            (files.setdefault(r.file, len(files)), r.index, r.groups, r.documents, r.labelled, r.first_labelled)
            for r in row_groups
        ]
        longest_F = np.array([file.longest for file in files], np.int64)
        return cls([*files], longest_F, *np.array(rows, np.int64).reshape(-1, 6).T)

    def __len__(self) -> int:
        return len(self.file_R)

    @overload
    def __getitem__(self, index: int) -> RowGroup: ...
    @overload
    def __getitem__(self, index: slice) -> "RowGroups": ...
    def __getitem__(self, index: int | slice) -> "RowGroup | RowGroups":
        if isinstance(index, slice):
            return RowGroups(self.files, self.longest_F, *(column[index] for column in self._columns))
        file, *numbers = (int(column[index]) for column in self._columns)
        return RowGroup(self.files[file], *numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with only the files of these row groups."""
        first = self.file_R.min() if len(self) else 0
        from_first_R = self.file_R - first  # so the cost of a part depends on its own files
        is_used_F = np.bincount(from_first_R) > 0
        used_F, file_R = first + np.flatnonzero(is_used_F), (np.cumsum(is_used_F) - 1)[from_first_R]
        if isinstance(self.files, FilesToRead):
            files: Sequence[FileToRead] = self.files.take(used_F)
        else:
            files = [self.files[i] for i in used_F.tolist()]
        return type(self), (files, self.longest_F[used_F], file_R, *self._columns[1:])

    def take(self, which_R: Ints | Bools | Sequence[int]) -> "RowGroups":
        """The row groups with these numbers in this order, or those that a mask selects."""
        which_R = np.asarray(which_R, None if len(which_R) else np.int64)
        return RowGroups(self.files, self.longest_F, *(column[which_R] for column in self._columns))

    @property
    def own_files(self) -> list[FileToRead]:
        """The files that contain them, in the order of their first row groups."""
        used, first = np.unique(self.file_R, return_index=True)
        return [self.files[i] for i in used[np.argsort(first)].tolist()]

    @property
    def longest(self) -> int:
        """Documents of the longest group of the files."""
        return int(self.longest_F[self.file_R].max(initial=0))

    def by_file(self) -> dict[str, "RowGroups"]:
        """The row groups of each file, by URL."""
        return self._by([file.url for file in self.files])

    def by_period(self) -> dict[str, "RowGroups"]:
        """The row groups of each period."""
        return self._by([file.period for file in self.files])

    def _by(self, names: Sequence[str]) -> dict[str, "RowGroups"]:
        """Group the row groups by the names of their files, in order of first occurrence."""
        codes = dict[str, int]()
        code_R = np.array([codes.setdefault(name, len(codes)) for name in names], np.int64)[self.file_R]
        order_R = np.argsort(code_R, kind="stable")
        ends = np.searchsorted(code_R[order_R], np.arange(len(codes) + 1)).tolist()
        runs = zip(codes, itertools.pairwise(ends), strict=True)
        return {name: self.take(order_R[start:end]) for name, (start, end) in runs if end > start}
