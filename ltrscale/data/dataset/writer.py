"""Write query groups as the Parquet files of a data set directory, period by period, in bounded memory.

A row group has about 8 MB. A small data set gets smaller row groups, so that it can also fill the canonical streams.
The rules count groups in order of arrival, over all periods:

- The first 4 MB of the data set are its head: cut evenly into 64 row groups, and between periods. If the head has
  fewer than 64 groups, each becomes a row group, and another head follows with 64 KB per row group missing to 64.
- After the head, a row group ends with the group that brings it to 1/64 of the data set so far, at least 64 KB and
  at most the full size.

So a data set of T bytes has at least 64 row groups, or one per query group; and at most `64 + I(T) + 2 P`, where `I(T)`
is the integral of `dt / min(max(t / 64, 64 KB), 8 MB)` from 0 to T: T / 64 KB up to 4 MB, then 64 for each e-fold up to
512 MB, and one for each 8 MB beyond. P counts the periods of each writer: the last row group of a period may not be
full, in the head and at the end. (One exception: when over 256 MB wait in many open periods, the largest period is
written early.) The cuts depend only on the rows, not on how the rows are divided into tables.

Each commit of an addition writes a new manifest, which stays short: above `_FEW_FILES` files it moves them to a part,
together with the quarantine and the additions. A new part absorbs the previous one while that is less than twice as
long, as in a log-structured merge tree. So n files need at most log2(n) parts, and an addition writes at most log2(n)
times its own size in the long run.

Shapes: Q groups, N documents, F features.
"""

import itertools
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.arrays import Bools, Ints, offsets
from ltrscale.data.dataset.columns import FEATURES, GOAL, as_bytes, token_bytes
from ltrscale.data.dataset.files import ADDITION, FILE, FILE_SCHEMA, QUARANTINE, Counts, DataFile, DataFiles
from ltrscale.data.dataset.manifest import ADDED, Manifest, ManifestPart
from ltrscale.origin import as_text

MIN_ROW_GROUPS = 64
ROW_GROUP_BYTES, FILE_BYTES = 8 << 20, 256 << 20
"""Small enough to shuffle and share among workers; large enough for few requests to object storage."""
Compression = Literal["zstd", "lz4", "none", "lz4_bytes"]
"""The codec of data files; with `lz4_bytes` their features are bytes instead of lists (`columns`)."""
_SMALLEST = 64 << 10
_BUFFERS_BYTES = 256 << 20
_OPEN_FILES = 64
BESIDE_LABELS = ("positions", "clicks", "weights", "gains")
PER_DOCUMENT = ("labels", "relevance", *BESIDE_LABELS)
"""Columns with one number per document, in the order they are written."""
_FEW_FILES, _FEW_ROW_GROUPS = 256, 1 << 14
_PART = pa.schema([pa.field("kind", pa.string()), *FILE_SCHEMA, pa.field("made_by", pa.string())])


def per_document(names: Collection[str]) -> list[str]:
    """Those of some columns with one number per document: of `PER_DOCUMENT`, then the goals by name."""
    return [*(name for name in PER_DOCUMENT if name in names), *sorted(n for n in names if n.startswith(GOAL))]


def plain_columns(schema: pa.Schema) -> tuple[str, ...]:
    """The columns of data files whose values seldom repeat; see `parquet_writer`."""
    return ("gid", FEATURES, *per_document(schema.names))


@dataclass(eq=False)
class _Period:
    """The state of one period: rows not written yet, and its open file."""

    name: str
    waiting: list[pa.Table] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Numbers of further waiting rows in the current table."""
    waiting_bytes: int = 0
    parts: int = 0
    row_groups: list[Counts] = field(default_factory=list)
    """Counts of the row groups of the open file."""
    longest: int = 0
    """Documents of the longest group in the open file."""
    stack: ExitStack = field(default_factory=ExitStack)
    sink: pa.OSFile | None = None
    writer: pq.ParquetWriter | None = None


class DatasetWriter:
    """Takes tables of whole groups, and puts finished files in place through a commit.

    The tables have the columns of the data set directory and the same schema. `close` returns the files; without it
    only the commit's staging area is left. A row group ends at `row_group_bytes` (`ROW_GROUP_BYTES`) uncompressed, and
    a file at `file_bytes` (`FILE_BYTES`) as written; small data sets get smaller row groups. `before` counts the
    earlier groups and documents of the data set; file names begin with `prefix`.
    """

    def __init__(
        self,
        commit: storage.Commit,
        *,
        n_features: int,
        compression: Compression = "zstd",
        row_group_bytes: int | None = None,
        file_bytes: int | None = None,
        prefix: str = "part",
        before: tuple[int, int] = (0, 0),
    ) -> None:
        self.files: list[DataFile] = []
        self._commit = commit
        self._n_features = n_features
        self._compression = compression
        self._row_group_bytes = row_group_bytes or ROW_GROUP_BYTES
        self._smallest = min(_SMALLEST, self._row_group_bytes)
        self._file_bytes = file_bytes or FILE_BYTES
        self._prefix = prefix
        groups, documents = before
        self._lacking = max(0, MIN_ROW_GROUPS - groups)
        self._written_bytes = documents * 4 * (n_features + 1)  # of the whole data set, waiting rows included
        self._periods: dict[str, _Period] = {}
        self._open: list[_Period] = []
        self._waiting_bytes = 0
        self._table: pa.Table = None

    def add(self, periods: str | pa.StringArray, table: pa.Table) -> None:
        """Append groups, all of one period or each with its own; period names must be valid directory names."""
        names = [periods] * len(table) if isinstance(periods, str) else periods.to_pylist()
        self._table = table
        for row, (name, size) in enumerate(zip(names, self._sizes(table).tolist(), strict=True)):
            state = self._periods.get(name) or self._periods.setdefault(name, _Period(name))
            state.rows.append(row)
            state.waiting_bytes += size
            self._waiting_bytes += size
            self._written_bytes += size
            if self._lacking:
                if self._waiting_bytes >= self._lacking * self._smallest:
                    self._write_head()
            elif state.waiting_bytes >= self._target():
                self._write(state, self._take_waiting(state))
            elif self._waiting_bytes > _BUFFERS_BYTES:
                largest = max(self._periods.values(), key=lambda p: p.waiting_bytes)
                self._write(largest, self._take_waiting(largest))
        for state in self._periods.values():
            if state.rows:
                state.waiting.append(self._rows(state, copy=True))
        self._table = None

    def close(self) -> DataFiles:
        """Write the waiting rows and put the last files in place; returns all files, by period and part."""
        if self._lacking:
            self._write_head()
        for state in self._periods.values():
            if state.waiting:
                self._write(state, self._take_waiting(state))
            self._close_file(state)
        return DataFiles.from_iterable(sorted(self.files, key=lambda file: (file.period, file.path)))

    def _sizes(self, table: pa.Table) -> Ints:
        """Bytes of each group's features, labels and tokens, uncompressed."""
        return self._lengths(table) * 4 * (self._n_features + 1) + token_bytes(table)

    def _lengths(self, table: pa.Table) -> Ints:
        return np.asarray(pc.list_value_length(table.column(FEATURES)), dtype=np.int64) // self._n_features

    def _target(self) -> int:
        """The size in bytes of a complete row group at this point of the data set."""
        return min(max(self._written_bytes // MIN_ROW_GROUPS, self._smallest), self._row_group_bytes)

    def _rows(self, state: _Period, *, copy: bool) -> pa.Table:
        """A period's rows of the current table; `copy` rows to keep, because a slice keeps the whole table alive."""
        rows, state.rows = state.rows, []
        if len(rows) == len(self._table) or (not copy and rows[-1] - rows[0] + 1 == len(rows)):
            return self._table.slice(rows[0], len(rows))
        return self._table.take(pa.array(rows))

    def _take_waiting(self, state: _Period) -> pa.Table:
        """All waiting rows of a period as one chunk, because Parquet pages end where chunks do."""
        parts = [*state.waiting, self._rows(state, copy=False)] if state.rows else state.waiting
        table = pa.concat_tables(parts).combine_chunks()
        self._waiting_bytes -= state.waiting_bytes
        state.waiting, state.waiting_bytes = [], 0
        return table

    def _write_head(self) -> None:
        """Write all waiting rows as the missing row groups, of about equal bytes, or one per query group."""
        waiting = [state for state in self._periods.values() if state.waiting_bytes]
        tables = [self._take_waiting(state) for state in waiting]
        if not tables:
            return
        sizes_Q = np.concatenate([self._sizes(table) for table in tables])
        cuts = _split_evenly(sizes_Q, self._lacking)
        self._lacking = max(0, self._lacking - len(sizes_Q))
        first = 0
        for state, table in zip(waiting, tables, strict=True):
            stop = first + len(table)
            for a, b in itertools.pairwise([first, *(cut for cut in cuts if first < cut < stop), stop]):
                self._write(state, table.slice(a - first, b - a))
            first = stop

    def _write(self, state: _Period, table: pa.Table) -> None:
        """Write one row group; close the file where it is large enough."""
        stored = as_bytes(table) if self._compression == "lz4_bytes" else table
        if state.writer is None:
            self._open_file(state, stored.schema)
        assert state.writer is not None
        assert state.sink is not None
        with storage.named_errors(self._commit.url, "write"):
            state.writer.write_table(stored, row_group_size=len(stored))
        labelled = len(table) - table.column("labels").null_count
        lengths_Q = self._lengths(table)
        state.row_groups.append(Counts(len(table), int(lengths_Q.sum()), labelled))
        state.longest = max(state.longest, int(lengths_Q.max()))
        if state.sink.tell() >= self._file_bytes:
            self._close_file(state)

    def _open_file(self, state: _Period, schema: pa.Schema) -> None:
        if len(self._open) == _OPEN_FILES:  # the number of open files and their buffers is bounded
            self._close_file(self._open[0])
        self._open.append(state)
        path = self._commit.file(f"period={state.name}/{self._prefix}-{state.parts:05}-{{hash}}.parquet")
        state.sink = state.stack.enter_context(pa.OSFile(str(state.stack.enter_context(path)), "wb"))
        plain = plain_columns(schema)
        state.writer = parquet_writer(state.sink, schema, plain=plain, compression=self._compression)
        state.parts += 1

    def _close_file(self, state: _Period) -> None:
        if state.writer is None:
            return
        with storage.named_errors(self._commit.url, "write"):
            state.writer.close()
            state.stack.close()
        self._open.remove(state)
        placed = self._commit.files[-1]  # the end of the file's block has put it there
        row_groups = tuple(state.row_groups)
        self.files.append(DataFile(**vars(placed), period=state.name, longest=state.longest, row_groups=row_groups))
        state.writer, state.sink, state.row_groups, state.longest = None, None, [], 0


def parquet_writer(
    sink: pa.OSFile | str, schema: pa.Schema, *, plain: Collection[str], compression: Compression = "zstd"
) -> pq.ParquetWriter:
    """A writer of Parquet with page checksums and the statistics of the groups' ids, which alone are read.

    The columns `plain` are numbers, to be read without decoding; dictionaries save space for ids, which repeat.
    """
    names = [name for name in schema.names if name not in plain]
    columns = [f"{name}.list.element" if pa.types.is_list(schema.field(name).type) else name for name in names]
    statistics = [name for name in ("gid", "query_id") if name in schema.names][:1]
    return pq.ParquetWriter(
        sink,
        schema,
        compression="lz4" if compression == "lz4_bytes" else compression,
        use_dictionary=columns,
        write_statistics=statistics,
        write_page_checksum=True,
    )


def to_lists(values: pa.Array, lengths_Q: Ints, present_Q: Bools) -> pa.ListArray:
    """Values as one list per group; an absent group has null, and its values are dropped."""
    if present_Q.all():
        return pa.ListArray.from_arrays(_bounds(lengths_Q), values)
    values = values.filter(pa.array(np.repeat(present_Q, lengths_Q)))
    bounds_Q1 = _bounds(np.where(present_Q, lengths_Q, 0))
    return pa.ListArray.from_arrays(bounds_Q1, values, mask=pa.array(~present_Q))


def _bounds(lengths_Q: Ints) -> pa.Int32Array:
    return pa.array(offsets(lengths_Q), pa.int32())


def _split_evenly(sizes_Q: Ints, parts: int) -> list[int]:
    """The bounds, 0 to Q, of `parts` consecutive non-empty runs of about equal sums; fewer if Q is smaller."""
    n, parts = len(sizes_Q), min(parts, len(sizes_Q))
    ends_Q = np.cumsum(sizes_Q)
    k = np.arange(1, parts)
    cuts = np.searchsorted(ends_Q, ends_Q[-1] * k / parts) + 1
    cuts = np.maximum.accumulate(cuts - k) + k  # rising: no run is empty
    cuts = np.minimum(cuts, n - parts + k)
    return [0, *cuts.tolist(), n]


def commit_dataset(commit: storage.Commit, manifest: Manifest) -> Manifest:
    """Commit a data set whose manifest has all files, those of its parts too; returns it with its new parts."""
    files = manifest.files
    if manifest.parts:  # which list all but the previous manifest's own files and the new ones
        unlisted = commit.replaced.keys() | {placed.path for placed in commit.files}
        files = files.where(unlisted.__contains__, files.paths)
        assert len(files) + sum(part.files for part in manifest.parts) == len(manifest.files)
    own = manifest.model_copy(update={"files": files})
    if len(files) > _FEW_FILES or len(files.counts_R3) > _FEW_ROW_GROUPS:
        own = _moved_to_part(commit, own)
    commit.finish(own.model_dump(mode="json"))
    return own.model_copy(update={"files": manifest.files})


def _moved_to_part(commit: storage.Commit, manifest: Manifest) -> Manifest:
    """Move files, quarantine and additions of the manifest to a part; the newest addition stays, for look-ups."""
    added, parts = manifest.made_by.get(ADDED, []), list(manifest.parts)
    table = _part_table(manifest.files, manifest.quarantine, map(as_text, added[:-1]))
    files, n_additions = len(manifest.files), len(added[:-1])
    while parts and parts[-1].files < 2 * files:
        last = parts.pop()
        table = pa.concat_tables([storage.read_manifest_part(commit.url, vars(last)), table])
        files, n_additions = files + last.files, n_additions + last.additions
    with commit.file("parts/part-{hash}.parquet") as path:
        pq.write_table(table, path, compression="zstd")
    parts.append(ManifestPart(**vars(commit.files[-1]), files=files, additions=n_additions))
    made_by = {**manifest.made_by, **({ADDED: added[-1:]} if added else {})}
    return manifest.model_copy(
        update={"files": DataFiles.from_iterable([]), "parts": tuple(parts), "quarantine": (), "made_by": made_by}
    )


def _part_table(files: DataFiles, quarantine: Iterable[str], additions: Iterable[str]) -> pa.Table:
    """The table of a manifest part: rows of files, of quarantine paths, and of commands of additions as JSON."""
    of_files = files.table().append_column("kind", pa.array([FILE] * len(files), pa.string()))
    others = [{"kind": QUARANTINE, "path": path} for path in quarantine]
    others += [{"kind": ADDITION, "made_by": made_by} for made_by in additions]
    tables = [_PART.empty_table(), of_files, pa.Table.from_pylist(others, schema=_PART)]
    return pa.concat_tables(tables, promote_options="default")
