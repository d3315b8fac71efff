"""The data files of a data set as columns, so that a hundred thousand files with a million row groups stay small.

Shapes: F files, F1 = F + 1 bounds, R row groups.
"""

import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ltrscale import storage
from ltrscale.arrays import Ints, offsets, runs
from ltrscale.origin import Json

ListedPath = Annotated[str, AfterValidator(storage.listed_path)]
"""The path of a file below the directory of the manifest that lists it."""
PeriodName = Annotated[str, AfterValidator(storage.period_name)]
"""The name of a period."""
_MOST_GROUPS, _MOST_DOCUMENTS = 1 << 26, 1 << 31
_ENTRIES = 4096
"""Files serialised at a time."""


class Counts(NamedTuple):
    """Counts of a row group: query groups, documents, and the groups among them that have labels."""

    groups: int
    documents: int
    labelled: int


def total_of(counts: Iterable[Sequence[int]]) -> Counts:
    """The sums; zeros if there are no counts."""
    return Counts(*map(sum, zip((0, 0, 0), *counts, strict=True)))


class DataFile(NamedTuple):
    """One Parquet file: name in the directory, period, size, content hash, longest group, counts of each row group."""

    path: str
    period: str
    bytes: int
    sha256: str
    longest: int
    """Documents of its longest group."""
    row_groups: tuple[Counts, ...]


FILE_SCHEMA = pa.schema(
    [
        *(("path", pa.string()), ("period", pa.string()), ("bytes", pa.int64()), ("sha256", pa.string())),
        *(("longest", pa.int64()), ("row_groups", pa.list_(pa.list_(pa.int64(), len(Counts._fields))))),
    ]
)
"""The columns of a table of files, by the fields of `DataFile`."""

RowT = TypeVar("RowT")
FILE, QUARANTINE, ADDITION = "file", "quarantine", "addition"
"""The kinds of rows of a part of a manifest."""


class Columnar(Sequence[RowT]):
    """A sequence stored as columns that makes its elements on access; it compares like a list."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]  # as of a list


class DataFiles(Columnar[DataFile]):
    """Data files in order, as columns; elements are made on access.

    The counts of the row groups of file i are the rows of `counts_R3` from `bounds_F1[i]` to `bounds_F1[i + 1]`.
    """

    def __init__(
        self,
        paths: list[str],
        period_of: list[str],
        bytes_F: Ints,
        sha256: list[str],
        longest_F: Ints,
        bounds_F1: Ints,
        counts_R3: Ints,
    ) -> None:
        self.paths, self.period_of, self.sha256 = paths, period_of, sha256
        self.bytes_F, self.longest_F = bytes_F, longest_F
        self.bounds_F1, self.counts_R3 = bounds_F1, counts_R3

    @property
    def _of_files(self) -> tuple[Any, ...]:
        """The columns with one value a file, as `DataFile` orders them."""
        return self.paths, self.period_of, self.bytes_F, self.sha256, self.longest_F

    @classmethod
    def from_iterable(cls, files: Iterable[DataFile]) -> "DataFiles":
        """The files as columns; columns are returned as they are."""
        if isinstance(files, DataFiles):
            return files
        files = list(files)
        fields: Iterable[list[Any]] = ([file[i] for file in files] for i in range(len(DataFile._fields)))
        paths, periods, bytes_, sha256, longest, row_groups = fields
        bounds_F1 = offsets(np.array([*map(len, row_groups)], np.int64))
        counts_R3 = np.array([*itertools.chain(*row_groups)], np.int64).reshape(-1, len(Counts._fields))
        return cls(
            paths, periods, np.array(bytes_, np.int64), sha256, np.array(longest, np.int64), bounds_F1, counts_R3
        )

    @classmethod
    def joined(cls, some: Sequence["DataFiles"]) -> "DataFiles":
        """All files, sorted by period and path."""
        parts = [files for files in some if len(files)] or [cls.from_iterable([])]
        together = parts[0] if len(parts) == 1 else cls._concatenated(parts)
        keys = list(zip(together.period_of, together.paths, strict=True))
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return together if order == list(range(len(keys))) else together.take(np.array(order))

    @classmethod
    def _concatenated(cls, parts: Sequence["DataFiles"]) -> "DataFiles":
        of_files = zip(*(files._of_files for files in parts), strict=True)
        columns: list[Any] = [
            np.concatenate(column) if isinstance(column[0], np.ndarray) else [*itertools.chain(*column)]
            for column in of_files
        ]
        columns.append(offsets(np.concatenate([np.diff(files.bounds_F1) for files in parts])))
        columns.append(np.concatenate([files.counts_R3 for files in parts]))
        return cls(*columns)

    @classmethod
    def from_table(cls, table: pa.Table) -> "DataFiles":
        """Read the files from a table that `table` made.

        Raises:
            ValueError: a value is missing, or a path, period, size, hash or count is invalid.
        """
        table = table.select(FILE_SCHEMA.names).cast(FILE_SCHEMA).combine_chunks()
        lists = table["row_groups"].combine_chunks()
        counts = lists.flatten()
        numbers = counts.flatten()
        if any(column.null_count for column in (*table.columns, counts, numbers)):
            raise ValueError("a file lacks a value")
        bounds_F1 = offsets(lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
        paths, sha256 = table["path"].to_pylist(), table["sha256"].to_pylist()
        bytes_F, longest_F = table["bytes"].to_numpy(), table["longest"].to_numpy()
        counts_R3 = numbers.to_numpy().reshape(-1, len(Counts._fields))
        period_of = [*map(sys.intern, table["period"].to_pylist())]  # equal names share one object
        files = cls(paths, period_of, bytes_F, sha256, longest_F, bounds_F1, counts_R3)
        files._check()
        return files

    @classmethod
    def _validated(cls, files: Any, read: Callable[[Any], Sequence[DataFile]]) -> "DataFiles":
        """The files as columns, from a sequence of them or the entries of a manifest."""
        if isinstance(files, DataFiles) or (
            isinstance(files, list | tuple) and all(isinstance(file, DataFile) for file in files)
        ):
            return cls.from_iterable(files)
        try:
            found = cls.from_iterable(read(files))
        except OverflowError as error:
            raise ValueError(f"a file has a value that does not fit ({error})") from error
        found._check()
        return found

    def table(self) -> pa.Table:
        """One row a file, with the columns of `DataFile`."""
        counts = pa.FixedSizeListArray.from_arrays(pa.array(self.counts_R3.reshape(-1)), 3)
        row_groups = pa.ListArray.from_arrays(pa.array(self.bounds_F1.astype(np.int32)), counts)
        columns = [*map(pa.array, self._of_files), row_groups.cast(FILE_SCHEMA.field("row_groups").type)]
        return pa.table(columns, schema=FILE_SCHEMA)

    def _check(self) -> None:
        """Refuse values that readers cannot rely on; they allocate memory by the counts."""
        groups_R, documents_R, labelled_R = self.counts_R3.T
        is_good_R = (labelled_R >= 0) & (labelled_R <= groups_R) & (groups_R < _MOST_GROUPS)
        is_good_R &= (documents_R >= 0) & (documents_R < _MOST_DOCUMENTS)
        for counts in self.counts_R3[~is_good_R][:1].tolist():
            of_row_group = ", ".join(f"{n} {name}" for n, name in zip(counts, Counts._fields, strict=True))
            raise ValueError(f"no row group has {of_row_group}")
        if ((self.longest_F < 0) | (self.longest_F >= _MOST_DOCUMENTS)).any():
            raise ValueError("no group has so many documents")
        if (self.bytes_F < 0).any() or not storage.are_hashes(self.sha256):
            raise ValueError("a file has no size, or no content hash of 64 digits")
        for path in self.paths:
            storage.listed_path(path)
        for period in self.periods:
            storage.period_name(period)

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> DataFile: ...
    @overload
    def __getitem__(self, index: slice) -> "DataFiles": ...
    def __getitem__(self, index: int | slice) -> "DataFile | DataFiles":
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._run(start, stop) if step == 1 and start < stop else self.take(np.arange(start, stop, step))
        i = range(len(self))[index]
        path, period, bytes_, sha256, longest = (column[i] for column in self._of_files)
        row_groups = itertools.starmap(Counts, self.counts_R3[self.bounds_F1[i] : self.bounds_F1[i + 1]].tolist())
        return DataFile(path, period, int(bytes_), sha256, int(longest), tuple(row_groups))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without cached values."""
        return type(self), (*self._of_files, self.bounds_F1, self.counts_R3)

    def without_row_groups(self) -> "DataFiles":
        """The same files without row groups, for readers that have these separately."""
        columns: list[Any] = [*self._of_files, np.zeros(len(self) + 1, np.int64), self.counts_R3[:0]]
        return DataFiles(*columns)

    def take(self, numbers_F: Ints) -> "DataFiles":
        """The files with these numbers, in this order."""
        numbers, starts_F = numbers_F.tolist(), self.bounds_F1[numbers_F]
        lengths_F = self.bounds_F1[numbers_F + 1] - starts_F
        columns: list[Any] = [
            column[numbers_F] if isinstance(column, np.ndarray) else [column[i] for i in numbers]
            for column in self._of_files
        ]
        columns += [offsets(lengths_F), self.counts_R3[runs(starts_F, lengths_F)]]
        return DataFiles(*columns)

    def _run(self, start: int, stop: int) -> "DataFiles":
        """Take consecutive files, without a copy of the counts."""
        first, last = self.bounds_F1.item(start), self.bounds_F1.item(stop)  # fast: there may be thousands of periods
        columns = [column[start:stop] for column in self._of_files]
        columns += [self.bounds_F1[start : stop + 1] - first, self.counts_R3[first:last]]
        return DataFiles(*columns)

    def where(self, is_wanted: Callable[[str], bool], column: Sequence[str]) -> "DataFiles":
        """The files with a wanted entry in a column."""
        numbers_F = np.flatnonzero(np.fromiter(map(is_wanted, column), np.bool_, len(self)))
        if len(numbers_F) == len(self):
            return self
        start, stop = (int(numbers_F[0]), int(numbers_F[-1]) + 1) if len(numbers_F) else (0, 0)
        # consecutive periods, as in most splits, are cut out without a copy
        return self._run(start, stop) if stop - start == len(numbers_F) else self.take(numbers_F)

    def in_periods(self, periods: Collection[str]) -> "DataFiles":
        """The files of some periods."""
        return self.where(frozenset(periods).__contains__, self.period_of)

    @cached_property
    def by_period(self) -> dict[str, "DataFiles"]:
        """The files of each period; periods in order of their first files."""
        runs: dict[str, list[tuple[int, int]]] = {}
        first = 0
        for period, run in itertools.groupby(self.period_of):
            runs.setdefault(period, []).append((first, first := first + len([*run])))
        together = {period: [self._run(*run) for run in of_period] for period, of_period in runs.items()}
        return {period: some[0] if len(some) == 1 else DataFiles.joined(some) for period, some in together.items()}

    @cached_property
    def periods(self) -> list[str]:
        """The periods that have files, sorted."""
        return sorted(set(self.period_of))

    @cached_property
    def file_R(self) -> Ints:
        """The number of each row group's file."""
        return np.repeat(np.arange(len(self)), np.diff(self.bounds_F1))

    @property
    def longest(self) -> int:
        """Documents of the longest group."""
        return int(self.longest_F.max(initial=0))

    def counts(self) -> Counts:
        """Groups, documents and labelled groups of all files."""
        return Counts(*self.counts_R3.sum(0).tolist())

    def content(self) -> Json:
        """The content that identifies the files: all but their places and derived values."""
        # in chunks, because reused memory costs less than new memory
        some = (self[start : start + _ENTRIES] for start in range(0, len(self), _ENTRIES))
        return Json.array([", ".join(files._entries())] for files in some)

    def content_by_period(self) -> dict[str, Json]:
        """The content of the files of each period."""
        by_period: dict[str, list[str]] = {}
        for period, entry in zip(self.period_of, self._entries(), strict=True):
            by_period.setdefault(period, []).append(entry)
        return {period: Json.array([[", ".join(entries)]]) for period, entries in by_period.items()}

    def _entries(self) -> list[str]:
        columns = [pc.cast(pa.array(column), pa.string()) for column in self.counts_R3.T]
        bounds, of_row_group = pa.array(self.bounds_F1.astype(np.int32)), pc.binary_join_element_wise(*columns, ", ")
        joined = pc.binary_join(pa.ListArray.from_arrays(bounds, of_row_group), "], [")
        of_file = pc.if_else(pc.equal(joined, ""), "", pc.binary_join_element_wise("[", joined, "]", ""))
        names = {period: f"[{json.dumps(period)}" for period in self.periods}
        periods = pa.array([names[period] for period in self.period_of], pa.string())
        # hashes are hexadecimal, so JSON needs no escapes
        hashes = pc.binary_join_element_wise('"', pa.array(self.sha256, pa.string()), '"', "")
        files = pc.binary_join_element_wise(periods, hashes, pc.binary_join_element_wise("[", of_file, "]]", ""), ", ")
        entries: list[str] = files.to_pylist()
        return entries

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read from and write to a list of files."""
        return core_schema.no_info_wrap_validator_function(
            cls._validated,
            handler(list[DataFile]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda files, info: files.table().to_pylist() if info.mode == "json" else files, info_arg=True
            ),
        )
