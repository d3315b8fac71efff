"""External sort: brings the rows of each query together, in bounded memory.

Shapes: N rows of a block, F features.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale.data.columns import in_type, wider_type
from ltrscale.errors import InputError
from ltrscale.ingest.rows import RowBlock, cut

_BATCH_ROWS = 1 << 14
_OWN = 8  # columns of the spill before those of `RowBlock.columns`
_SORTED = """
    SELECT rows.* FROM rows
    JOIN (SELECT query AS id, min(seq) AS first_seq FROM rows GROUP BY query) ON query = id
    ORDER BY first_seq, seq
"""


def sort_rows(blocks: Iterable[RowBlock], *, memory_limit: str = "512MB", scratch: Path) -> Iterator[RowBlock]:
    """Yield the rows of all blocks with those of a query together: queries by first appearance, rows by arrival.

    Rows are spilled to a file in `scratch` and sorted by DuckDB, which spills there too: memory is about `memory_limit`
    for any input size, and disk use up to three times the rows. A block holds rows of one file, so a query's rows may
    continue in the next block, of the same or another file; `lines_N` rise only within a query and file. `periods_N` is
    always set, `starts_N` and `texts` never: rows of one query are one group, and no raw input is spilled. `share` is
    the share of rows. Rejections come first, in blocks without rows, while the input is read.

    Raises:
        InputError: the disk is full, `memory_limit` is too small, or a column of two files has types that do not fit.
    """
    files: dict[str, int] = {}
    n = 0
    with closing(_Spill(scratch / "rows.parquet")) as spill:
        for block in blocks:
            if block.rejected:
                yield replace(cut(block, 0, 0), rejected=block.rejected, share=0.0)
            if not len(block):
                continue
            spill.add(_to_table(block, seq=n, file=files.setdefault(block.file, len(files))), block.file)
            n += len(block)
        if n:
            spill.finish()
            done = 0
            for batch in _sorted(spill.path, memory_limit=memory_limit, scratch=scratch):
                done += len(batch)
                for rows in _to_blocks(batch, list(files), spill.schema):
                    yield replace(rows, share=done / n)


@contextmanager
def _on_disk(scratch: Path, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Turn an error of the disk, which is one of these classes, into one line with the remedy."""
    try:
        yield
    except errors as error:
        raise InputError(f"{scratch}: cannot sort there: {error}; make room on the disk or set TMPDIR") from error


class _Spill:
    """The file of the rows; its columns are widened when a block needs it, such as text after null."""

    def __init__(self, path: Path) -> None:
        self.path, self.schema = path, pa.schema([])
        self._writer: pq.ParquetWriter | None = None
        self._first = ""

    def add(self, table: pa.Table, file: str) -> None:
        """Write rows of a file; raises InputError if a column's type does not fit that of earlier files."""
        with _on_disk(self.path.parent):
            if self._writer is None:
                self._first, self.schema = file, table.schema
                self._writer = self._open()
            schema = _wider(self.schema, table.schema, file, self._first)
            if schema != self.schema:
                self._widen(schema)
            self._writer.write_table(_in_schema(table, schema, file))

    def finish(self) -> None:
        if self._writer is not None:
            with _on_disk(self.path.parent):
                self._writer.close()

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self.path.unlink(missing_ok=True)

    def _open(self) -> pq.ParquetWriter:
        return pq.ParquetWriter(
            self.path, self.schema, compression="none", use_dictionary=False, write_statistics=False
        )

    def _widen(self, schema: pa.Schema) -> None:
        """Rewrite the rows so far with a wider schema."""
        self.finish()
        narrow = self.path.rename(self.path.with_suffix(".narrow"))
        self.schema = schema
        self._writer = self._open()
        try:
            with pq.ParquetFile(narrow) as rows:
                for batch in rows.iter_batches(_BATCH_ROWS):
                    self._writer.write_table(_in_schema(pa.Table.from_batches([batch]), schema, self._first))
        finally:
            narrow.unlink()


def _wider(schema: pa.Schema, other: pa.Schema, file: str, first: str) -> pa.Schema:
    """The columns of both schemas, each in a type that holds the values of both."""
    fields = {field.name: field.type for field in schema}
    assert fields["features"] == other.field("features").type
    for field in other:
        fields[field.name] = wider_type(field.name, fields.get(field.name, field.type), field.type, file, first)
    return pa.schema([*fields.items()])


def _in_schema(table: pa.Table, schema: pa.Schema, file: str) -> pa.Table:
    """The rows with these columns, null if missing."""
    if table.schema == schema:
        return table
    columns = {name: table[name] if name in table.schema.names else pa.nulls(len(table)) for name in schema.names}
    arrays = [in_type(name, column, schema.field(name).type, file) for name, column in columns.items()]
    return pa.Table.from_arrays(arrays, schema=schema)


def _to_table(block: RowBlock, *, seq: int, file: int) -> pa.Table:
    """The rows as a table; `seq` is the order of arrival."""
    n, n_features = block.features_NF.shape
    features = pa.py_buffer(np.ascontiguousarray(block.features_NF))
    return pa.table(
        {
            "query": block.query_ids_N,
            "seq": np.arange(seq, seq + n),
            "file": np.full(n, file),
            "line": block.lines_N,
            "features": pa.FixedSizeBinaryArray.from_buffers(pa.binary(4 * n_features), n, [None, features]),
            "label": block.labels_N,
            "period": pa.repeat(block.period, n) if block.periods_N is None else block.periods_N,
            "doc_id": pa.nulls(n, pa.string()) if block.doc_ids_N is None else block.doc_ids_N,
            **block.columns,
        }
    )


def _sorted(spill: Path, *, memory_limit: str, scratch: Path) -> Iterator[pa.RecordBatch]:
    with database(scratch, memory_limit=memory_limit) as connection:
        connection.read_parquet(str(spill)).create_view("rows")
        # directly from the relation, since `execute` would load the whole result into memory
        yield from connection.sql(_SORTED).to_arrow_reader(_BATCH_ROWS)


@contextmanager
def database(
    scratch: Path, *, memory_limit: str, key: str = "sort_memory", threads: int = 2
) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB with about this memory, the value of the setting `key`, which spills to `scratch`.

    Raises:
        InputError: the disk is full, or `memory_limit` is too small.
    """
    config = {"memory_limit": memory_limit, "temp_directory": str(scratch / "duckdb"), "threads": threads}
    # queries sort anyway, so keeping the insertion order would only cost memory; no downloads either
    config |= {"preserve_insertion_order": False, "autoinstall_known_extensions": False}
    with duckdb.connect(config=config) as connection, _on_disk(scratch, (duckdb.Error, pa.ArrowException, OSError)):
        try:
            yield connection
        except duckdb.OutOfMemoryException as error:
            raise InputError(f"not possible in {memory_limit} of memory; raise {key} ({error})") from error


def _to_blocks(batch: pa.RecordBatch, files: Sequence[str], schema: pa.Schema) -> Iterator[RowBlock]:
    """Blocks of one file each."""
    columns = {name: column.cast(schema.field(name).type) for name, column in zip(schema.names, batch, strict=True)}
    features = columns["features"]
    n_features = features.type.byte_width // 4
    values = np.frombuffer(features.buffers()[1], np.float32).reshape(-1, n_features)
    file_N = columns["file"].to_numpy()
    rows = RowBlock(
        file="",
        lines_N=columns["line"].to_numpy(),
        query_ids_N=columns["query"],
        features_NF=values[features.offset : features.offset + len(batch)],
        labels_N=columns["label"].to_numpy(),
        periods_N=columns["period"],
        doc_ids_N=columns["doc_id"] if columns["doc_id"].null_count < len(batch) else None,
        columns={name: columns[name] for name in schema.names[_OWN:]},
    )
    bounds = [0, *(np.flatnonzero(np.diff(file_N)) + 1).tolist(), len(batch)]
    for start, stop in pairwise(bounds):
        yield replace(cut(rows, start, stop), file=files[file_N[start]])
