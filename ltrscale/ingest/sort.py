"""External sort: brings the rows of each query together, in bounded memory.

Shapes: N rows of a block, F features.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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
    whatever the input's size, disk use up to three times the rows. A block holds rows of one file, so the rows of a
    query may continue in the next block, of the same or of another file; `lines_N` rise within a query and file only.
    `periods_N` is always set, `starts_N` and `texts` never: rows of one query are one group, and no raw input is
    spilled. `share` is that of the rows. Rejections come first, in blocks without rows, while the input is read.

    Raises:
        InputError: the disk is full, or `memory_limit` is too small.

    Example:
        >>> import tempfile
        >>> ids, one_N = pa.array(["b", "a", "b"]), np.ones(3, np.float32)
        >>> block = RowBlock("log.csv", np.array([2, 3, 4]), ids, one_N[:, None], one_N, period="2026-W07")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [rows] = sort_rows([block], scratch=Path(folder))
        >>> rows.query_ids_N.to_pylist(), rows.lines_N.tolist()
        (['b', 'b', 'a'], [2, 4, 3])
    """
    spill = scratch / "rows.parquet"
    files: dict[str, int] = {}
    schema: pa.Schema | None = None
    n = 0
    with ExitStack() as stack:
        stack.callback(spill.unlink, missing_ok=True)
        for block in blocks:
            if block.rejected:
                yield replace(cut(block, 0, 0), rejected=block.rejected, share=0.0)
            if not len(block):
                continue
            table = _to_table(block, seq=n, file=files.setdefault(block.file, len(files)), schema=schema)
            if schema is None:
                schema = table.schema
                writer = stack.enter_context(
                    pq.ParquetWriter(spill, schema, compression="none", use_dictionary=False, write_statistics=False)
                )
            writer.write_table(table)
            n += len(block)
        if schema is not None:
            writer.close()
            done = 0
            for batch in _sorted(spill, memory_limit=memory_limit, scratch=scratch):
                done += len(batch)
                for rows in _to_blocks(batch, list(files), schema):
                    yield replace(rows, share=done / n)


def _to_table(block: RowBlock, *, seq: int, file: int, schema: pa.Schema | None) -> pa.Table:
    """The rows as a table whose `seq` is the order of arrival, with the first table's schema if there is one."""
    n, n_features = block.features_NF.shape
    features = pa.py_buffer(np.ascontiguousarray(block.features_NF))
    table = pa.table(
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
    if schema is None:
        return table
    assert table.schema.field("features") == schema.field("features")
    missing = [name for name in schema.names if name not in table.schema.names]
    for name in missing:
        table = table.append_column(name, pa.nulls(n, schema.field(name).type))
    return table.select(schema.names).cast(schema)


def _sorted(spill: Path, *, memory_limit: str, scratch: Path) -> Iterator[pa.RecordBatch]:
    config = {"memory_limit": memory_limit, "temp_directory": str(scratch / "duckdb"), "threads": 2}
    # the query sorts anyway, so keeping the order of insertion would only cost memory; and no downloads
    config |= {"preserve_insertion_order": False, "autoinstall_known_extensions": False}
    with duckdb.connect(config=config) as connection:
        try:
            connection.read_parquet(str(spill)).create_view("rows")
            # directly from the relation: the result of `execute` would be in memory as a whole
            yield from connection.sql(_SORTED).to_arrow_reader(_BATCH_ROWS)
        except duckdb.OutOfMemoryException as error:
            raise InputError(f"sort: not possible in {memory_limit} of memory; raise sort_memory ({error})") from error
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise InputError(f"{scratch}: cannot sort there: {error}; make room on the disk or set TMPDIR") from error


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
