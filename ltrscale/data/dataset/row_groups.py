"""The row groups that a job reads, as columns, so that a million take little time and memory; those with labels.

A manifest only counts the labelled groups of a row group. Which of them are relevant, and what their queries are, is
read from the files; a fold of them, or its complement, is drawn.

Shapes: R row groups, Q labelled groups of a row group.
"""

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.arrays import Bools, Ints
from ltrscale.config import Config
from ltrscale.data.dataset.columns import LabelWeights, weighed
from ltrscale.data.dataset.files import Columnar, DataFiles
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.scores import Found
from ltrscale.draws import permutation
from ltrscale.errors import InputError

T = TypeVar("T")

_THREADS = 8
_FILES_KNOWN = 4096
_COPY = re.compile(r"#\d+$")
"""The suffix that `jobs.relabel` adds to the query id of a copy."""


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


class OuterFold(Config):
    """One fold of some groups, or all others. Groups are dealt at random; fold sizes differ by at most one."""

    number: int = Field(ge=0)
    """Number of the fold, from 0."""
    of: int = Field(ge=2)
    """Number of folds."""
    held_out: bool = False
    """True serves the groups of the fold, False all others."""
    seed: int = 0
    """Seed by which groups are dealt to folds."""

    @model_validator(mode="after")
    def _is_there(self) -> Self:
        if self.number >= self.of:
            raise ValueError(f"there is no fold {self.number} of {self.of}; number them from 0 to {self.of - 1}")
        return self


class Fold(OuterFold):
    """One fold of the labelled groups, or all others. Groups are dealt at random; fold sizes differ by at most one."""

    within: OuterFold | None = None
    """Deal only the groups that this fold serves; empty for all labelled groups that are used."""


def fold_of(dealt: Fold | None, number: int, of: int, *, held_out: bool, seed: int) -> Fold:
    """A fold of the groups that a split serves, or its complement if not `held_out`; `dealt` is the split's own fold.

    Raises:
        InputError: the split serves a fold within a fold.
    """
    if dealt is not None and dealt.within is not None:
        raise InputError("train.fold.within: leave it out; the groups of train are dealt to folds once more")
    within = None if dealt is None else OuterFold(**dealt.model_dump(exclude={"within"}))
    return Fold(number=number, of=of, held_out=held_out, seed=seed, within=within)


def keep_fold(kept: Bools, fold: OuterFold, where: str) -> Bools:
    """Mask of the groups of a fold if it is `held_out`, else of the others; `kept` marks those that are dealt.

    Raises:
        InputError: there are fewer groups than folds.
    """
    if isinstance(fold, Fold) and fold.within is not None:
        kept = keep_fold(kept, fold.within, where)
    numbers = np.flatnonzero(kept)
    if len(numbers) < fold.of:
        raise InputError(f"{where}: {len(numbers)} labelled groups cannot fill {fold.of} folds; lower fold.of")
    is_in_fold = permutation(len(numbers), "fold", fold.seed) % fold.of == fold.number
    served = np.zeros_like(kept)
    served[numbers[is_in_fold == fold.held_out]] = True
    return served


def relevant_in(row_groups: Sequence[RowGroup], weights: LabelWeights, *, differing: bool = False) -> list[Bools]:
    """Which labelled groups of each row group have a relevant document: a label above 0.

    With `differing` they must have a second label too: only such groups can teach or test an order. It reads only the
    labels, once per process and file.

    Raises:
        InputError: a file cannot be read, lacks the column, or has other groups than its manifest lists.
    """
    files = {file.url: file.sha256 for file in RowGroups.from_iterable(row_groups).own_files}
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda file: _in_file(*file, weights, differing), files.items())
        by_url = dict(zip(files, found, strict=True))
    relevant = []
    for row_group in row_groups:
        url, index, labelled = row_group.file.url, row_group.index, row_group.labelled
        n = len(by_url[url][index]) if index < len(by_url[url]) else 0
        if n != labelled:
            raise InputError(
                f"{url}: row group {index} has {n} labelled groups where the manifest lists {labelled}; "
                "prepare the data set again"
            )
        relevant.append(by_url[url][index])
    return relevant


def labelled_queries(url: str) -> list[list[str]]:
    """The query ids of the labelled groups of a data file by row group; copies have the id of their original.

    Raises:
        InputError: the file cannot be read.
    """

    def query_ids(file: pq.ParquetFile, number: int) -> list[str]:
        ids = _labelled(file, number, ["query_id"])["query_id"].to_pylist()
        return [_COPY.sub("", query) for query in ids]

    return [*each_row_group(url, query_ids, "query_id")]


@lru_cache(_FILES_KNOWN)
def _in_file(
    url: str,
    sha256: str,  # noqa: ARG001 - other content, another answer
    weights: LabelWeights,
    differing: bool,
) -> list[Bools]:
    def is_counted(file: pq.ParquetFile, number: int) -> Bools:
        columns = _labelled(file, number, [name for name, _ in weights])
        labels_N = weighed(weights, lambda name: columns[name].values.to_numpy(zero_copy_only=False))
        offsets_Q1 = columns[weights[0][0]].offsets.to_numpy()
        starts_Q, ends_Q = offsets_Q1[:-1], offsets_Q1[1:]
        relevant_Q = _any_between(labels_N > 0, starts_Q, ends_Q)
        if not differing:
            return relevant_Q
        # do not compare the first document of a list with the last one of the previous list
        return relevant_Q & _any_between(np.diff(labels_N) != 0, starts_Q, np.maximum(ends_Q - 1, starts_Q))

    return [*each_row_group(url, is_counted, ", ".join(name for name, _ in weights))]


def _any_between(flags_N: Bools, starts_Q: NDArray[np.int32], ends_Q: NDArray[np.int32]) -> Bools:
    """Whether a flag is set from each start up to its end, shape [Q]."""
    set_N1 = np.concatenate([[0], np.cumsum(flags_N)])
    last = len(flags_N)  # an empty list at the end starts past all flags
    return np.asarray(set_N1[np.minimum(ends_Q, last)] > set_N1[np.minimum(starts_Q, last)])


def each_row_group(url: str, function: Callable[[pq.ParquetFile, int], T], column: str) -> Iterator[T]:
    """The results of a function of a data file for the number of each of its row groups, lazily.

    Raises:
        InputError: the file cannot be read; names the `column`.
    """
    filesystem, path = storage.arrow_filesystem(url)
    # one request per row group, retried alone: a busy store may never answer all requests in a row
    pre_buffer = not storage.is_local(url)
    try:
        with storage.named_errors(url), storage.patiently(lambda: filesystem.open_input_file(path)) as source:
            file = storage.patiently(
                lambda: pq.ParquetFile(source, pre_buffer=pre_buffer, page_checksum_verification=True)
            )
            for number in range(file.num_row_groups):
                yield storage.patiently(partial(function, file, number))
    except (pa.ArrowException, UnicodeDecodeError, KeyError) as error:
        raise InputError(
            f"{url}: its column {column!r} cannot be read ({error}); prepare the data set again"
        ) from error


def _labelled(file: pq.ParquetFile, number: int, columns: Sequence[str]) -> dict[str, pa.Array]:
    """Columns of the labelled groups of a row group."""
    table = file.read_row_group(number, columns=sorted({"labels", *columns}), use_threads=False)
    labelled = table.filter(pc.is_valid(table["labels"]))
    return {name: labelled[name].combine_chunks() for name in columns}
