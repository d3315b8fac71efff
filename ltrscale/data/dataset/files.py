"""The data files of a data set as columns, so that a hundred thousand files with a million row groups stay small.

Shapes: F files, F1 = F + 1 bounds, R row groups.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Self, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ltrscale import storage
from ltrscale.config import Strict
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


def _checked_counts(counts: Counts) -> Counts:
    """Validate the counts of a row group, because readers allocate memory according to them."""
    if not (0 <= counts.labelled <= counts.groups < _MOST_GROUPS and 0 <= counts.documents < _MOST_DOCUMENTS):
        raise ValueError(f"no row group has {', '.join(f'{n} {name}' for name, n in counts._asdict().items())}")
    return counts


class DataFile(Strict):
    """One Parquet file: name in the directory, period, size, content hash, longest group, counts of each row group."""

    path: ListedPath
    period: PeriodName
    bytes: int
    sha256: str
    longest: int = Field(ge=0, lt=_MOST_DOCUMENTS)
    """Documents of its longest group."""
    row_groups: tuple[Annotated[Counts, AfterValidator(_checked_counts)], ...]


_SCHEMA = pa.schema(
    [
        *(("path", pa.string()), ("period", pa.string()), ("bytes", pa.int64()), ("sha256", pa.string())),
        *(("longest", pa.int64()), ("row_groups", pa.list_(pa.list_(pa.int64(), len(Counts._fields))))),
    ]
)


RowT = TypeVar("RowT")
FILE, QUARANTINE, ADDITION = "file", "quarantine", "addition"
"""The kinds of rows of a part of a manifest."""
_PART = pa.schema([pa.field("kind", pa.string()), *_SCHEMA, pa.field("made_by", pa.string())])


def part_table(files: "DataFiles", quarantine: Iterable[str], additions: Iterable[str]) -> pa.Table:
    """The table of a manifest part: rows of files, of quarantine paths, and of commands of additions as JSON."""
    of_files = files.table()
    others = [{"kind": QUARANTINE, "path": path} for path in quarantine]
    others += [{"kind": ADDITION, "made_by": made_by} for made_by in additions]
    table = of_files.add_column(0, "kind", pa.array([FILE] * len(files), pa.string()))
    table = table.append_column("made_by", pa.nulls(len(files), pa.string()))
    return pa.concat_tables([table.cast(_PART), pa.Table.from_pylist(others, schema=_PART)])


class Columnar(Sequence[RowT]):
    """A sequence stored as columns that makes its elements on access; it compares like a list."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]  # as of a list


class DataFiles(Columnar[DataFile]):
    """Data files in order, as columns; elements are made on access.

    Example:
        >>> file = DataFile(path="a", period="p", bytes=1, sha256="", longest=2, row_groups=[(3, 4, 0)])
        >>> files = DataFiles.from_iterable([file])
        >>> len(files), files.periods, files.counts(), files[0].row_groups
        (1, ['p'], Counts(groups=3, documents=4, labelled=0), (Counts(groups=3, documents=4, labelled=0),))
    """

    def __init__(
        self,
        paths: list[str],
        period_of: list[str],
        bytes_F: NDArray[np.int64],
        sha256: list[str],
        longest_F: NDArray[np.int64],
        bounds_F1: NDArray[np.int64],
        counts_R3: NDArray[np.int64],
    ) -> None:
        self.paths, self.period_of, self.sha256 = paths, period_of, sha256
        self.bytes_F, self.longest_F = bytes_F, longest_F
        self.bounds_F1, self.counts_R3 = bounds_F1, counts_R3

    @classmethod
    def from_iterable(cls, files: Iterable[DataFile]) -> Self:
        """The files as columns; columns are returned as they are."""
        if isinstance(files, cls):
            return files
        files = list(files)
        return cls(
            [file.path for file in files],
            [file.period for file in files],
            np.array([file.bytes for file in files], np.int64),
            [file.sha256 for file in files],
            np.array([file.longest for file in files], np.int64),
            np.cumsum([0, *(len(file.row_groups) for file in files)], dtype=np.int64),
            np.array([counts for file in files for counts in file.row_groups], np.int64).reshape(-1, 3),
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
        bounds = np.cumsum([0, *(len(files.counts_R3) for files in parts)])
        return cls(
            [path for files in parts for path in files.paths],
            [period for files in parts for period in files.period_of],
            np.concatenate([files.bytes_F for files in parts]),
            [sha256 for files in parts for sha256 in files.sha256],
            np.concatenate([files.longest_F for files in parts]),
            np.concatenate(
                [[0], *(files.bounds_F1[1:] + first for files, first in zip(parts, bounds[:-1], strict=True))]
            ),
            np.concatenate([files.counts_R3 for files in parts]),
        )

    @classmethod
    def from_table(cls, table: pa.Table) -> "DataFiles":
        """Read the files from a table that `table` made.

        Raises:
            ValueError: a value is missing, or a path, period, size, hash or count is invalid.
        """
        table = table.select(_SCHEMA.names).cast(_SCHEMA).combine_chunks()
        if any(column.null_count for column in table.columns):
            raise ValueError("a file lacks a value")
        lists = table["row_groups"].combine_chunks()
        bounds_F1 = np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))])
        files = cls(
            table["path"].to_pylist(),
            _shared(table["period"]),
            table["bytes"].to_numpy(),
            table["sha256"].to_pylist(),
            table["longest"].to_numpy(),
            bounds_F1.astype(np.int64),
            lists.flatten().flatten().to_numpy(zero_copy_only=False).reshape(-1, 3),
        )
        files.check()
        return files

    def table(self) -> pa.Table:
        """One row a file, with the columns of `DataFile`."""
        counts = pa.FixedSizeListArray.from_arrays(pa.array(self.counts_R3.reshape(-1)), 3)
        row_groups = pa.ListArray.from_arrays(pa.array(self.bounds_F1.astype(np.int32)), counts)
        columns = [self.paths, self.period_of, self.bytes_F, self.sha256, self.longest_F]
        return pa.table([*map(pa.array, columns), row_groups.cast(_SCHEMA.field("row_groups").type)], schema=_SCHEMA)

    def check(self) -> None:
        """Check the values that readers rely on, as `DataFile` does.

        Raises:
            ValueError: a path, period, size, hash or count is invalid.
        """
        groups_R, documents_R, labelled_R = self.counts_R3.T
        is_good_R = (labelled_R >= 0) & (labelled_R <= groups_R) & (groups_R < _MOST_GROUPS)
        is_good_R &= (documents_R >= 0) & (documents_R < _MOST_DOCUMENTS)
        for counts in self.counts_R3[~is_good_R][:1].tolist():
            _checked_counts(Counts(*counts))
        if ((self.longest_F < 0) | (self.longest_F >= _MOST_DOCUMENTS)).any():
            raise ValueError("no group has so many documents")
        if (self.bytes_F < 0).any() or not storage.are_hashes(self.sha256):
            raise ValueError("a file has no size, or no content hash of 64 digits")
        storage.check_listed_paths(self.paths)
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
        return DataFile.model_construct(
            path=self.paths[i],
            period=self.period_of[i],
            bytes=int(self.bytes_F[i]),
            sha256=self.sha256[i],
            longest=int(self.longest_F[i]),
            row_groups=tuple(Counts(*counts) for counts in self.row_groups_of(i).tolist()),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without cached values."""
        of_files = (self.paths, self.period_of, self.bytes_F, self.sha256, self.longest_F)
        return type(self), (*of_files, self.bounds_F1, self.counts_R3)

    def without_row_groups(self) -> "DataFiles":
        """The same files without row groups, for readers that have these separately."""
        none, of_none = np.zeros(len(self) + 1, np.int64), self.counts_R3[:0]
        return DataFiles(self.paths, self.period_of, self.bytes_F, self.sha256, self.longest_F, none, of_none)

    def row_groups_of(self, i: int) -> NDArray[np.int64]:
        """The counts of the row groups of file i, shape [row groups, 3]."""
        return self.counts_R3[self.bounds_F1[i] : self.bounds_F1[i + 1]]

    def take(self, numbers_F: NDArray[np.int64]) -> "DataFiles":
        """The files with these numbers, in this order."""
        rows_R, bounds_F1 = rows_of_runs(self.bounds_F1, numbers_F)
        numbers = numbers_F.tolist()
        return DataFiles(
            [self.paths[i] for i in numbers],
            [self.period_of[i] for i in numbers],
            self.bytes_F[numbers_F],
            [self.sha256[i] for i in numbers],
            self.longest_F[numbers_F],
            bounds_F1,
            self.counts_R3[rows_R],
        )

    def _run(self, start: int, stop: int) -> "DataFiles":
        """Take consecutive files, without a copy of the counts."""
        first, last = self.bounds_F1.item(start), self.bounds_F1.item(stop)  # fast: there may be thousands of periods
        return DataFiles(
            self.paths[start:stop],
            self.period_of[start:stop],
            self.bytes_F[start:stop],
            self.sha256[start:stop],
            self.longest_F[start:stop],
            self.bounds_F1[start : stop + 1] - first,
            self.counts_R3[first:last],
        )

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
    def file_R(self) -> NDArray[np.int64]:
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
        entries = core_schema.no_info_after_validator_function(cls.from_iterable, handler(tuple[DataFile, ...]))
        return core_schema.json_or_python_schema(
            json_schema=entries,
            python_schema=core_schema.no_info_wrap_validator_function(
                lambda files, read: files if isinstance(files, cls) else read(files), entries
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda files, info: [file.model_dump(mode="json") for file in files] if info.mode == "json" else files,
                info_arg=True,
            ),
        )


def rows_of_runs(
    bounds_F1: NDArray[np.int64], numbers_F: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of some runs, and the bounds of these runs among them.

    Example:
        >>> rows_of_runs(np.array([0, 2, 2, 5]), np.array([2, 0]))
        (array([2, 3, 4, 0, 1]), array([0, 3, 5]))
    """
    lengths_F = bounds_F1[numbers_F + 1] - bounds_F1[numbers_F]
    bounds = np.concatenate([[0], np.cumsum(lengths_F)])
    return np.arange(bounds[-1]) + np.repeat(bounds_F1[numbers_F] - bounds[:-1], lengths_F), bounds


def _shared(column: pa.ChunkedArray) -> list[str]:
    """The texts of a column; equal texts share one object."""
    coded = column.combine_chunks().dictionary_encode()
    names = coded.dictionary.to_pylist()
    return [names[i] for i in coded.indices.to_pylist()]
