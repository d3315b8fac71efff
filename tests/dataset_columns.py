"""Adds columns to data set directories, besides those that `make_dataset` of known_datasets writes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.data.dataset.columns import as_bytes


def add_column(url: str, name: str, kind: pa.DataType, value: Callable[[int], Any]) -> None:
    """Add a column to all files; `value` maps a gid to the column's value."""
    for path in sorted(Path(url).glob("period=*/*.parquet")):
        with pq.ParquetFile(path) as file:
            tables = [file.read_row_group(i) for i in range(file.num_row_groups)]
        column = [pa.array([value(gid) for gid in table["gid"].to_pylist()], kind) for table in tables]
        tables = [table.append_column(name, values) for table, values in zip(tables, column, strict=True)]
        with pq.ParquetWriter(path, tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=len(table))
    update_manifest(url)


def store_as_bytes(url: str, periods: Sequence[str] = ("*",), kind: pa.DataType | None = None) -> None:
    """Rewrite the files of some periods as `lz4_bytes` has them, or with bytes of another type."""
    for path in (path for period in periods for path in Path(url).glob(f"period={period}/*.parquet")):
        with pq.ParquetFile(path) as file:
            tables = [as_bytes(file.read_row_group(i)) for i in range(file.num_row_groups)]
        write_row_groups(path, [table if kind is None else features_cast(table, kind) for table in tables])
    update_manifest(url)


def features_cast(table: pa.Table, kind: pa.DataType) -> pa.Table:
    return table.set_column(table.schema.get_field_index("features"), "features", table["features"].cast(kind))


def write_row_groups(path: Path, tables: Sequence[pa.Table]) -> None:
    with pq.ParquetWriter(path, tables[0].schema, compression="lz4", write_page_checksum=True) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=len(table))


def update_manifest(url: str) -> None:
    """Update sizes and hashes in the manifest of a data set to its current files."""
    path = Path(url) / storage.MANIFEST
    manifest = json.loads(path.read_text())
    for file in manifest["files"]:
        data = Path(url) / file["path"]
        file.update(bytes=data.stat().st_size, sha256=storage.sha256(data))
    path.write_text(json.dumps(manifest))
