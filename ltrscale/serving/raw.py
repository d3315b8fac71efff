"""The transformer of raw rows in every export of an item model, so that a service makes features as training did.

raw_rows.py      the transformer: a copy of the module of that name, which needs only Python
raw_rows.json    its recipe: the columns of a raw row, and how to make each feature of the model from them
raw_rows_*.jsonl a small table to join with the rows: a list of key and values per line

history.*.sql    statements of two dialects that add the features of `history` to the rows, if the model has any

`write_raw` and `write_history` make these files. `sample_raw` reads raw rows that `prepare` accepts, on which an export
is checked.

Shapes: N rows, F raw features, K rows of a joined table, Q1 = queries + 1 offsets.
"""

import importlib.util
import inspect
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle
from ltrscale.data.columns import is_list
from ltrscale.data.dataset.manifest import Feature, RawColumns, open_dataset
from ltrscale.data.dataset.origin import RAW, read_as
from ltrscale.errors import InputError
from ltrscale.ingest.assembly import completed
from ltrscale.ingest.csv_lines import NULLS, booleans
from ltrscale.ingest.history import SqlDialect
from ltrscale.ingest.inputs import PrepareConfig, raw_files
from ltrscale.ingest.items import Items, load_tables
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.rows import RowBlock, concat, cut, keep
from ltrscale.ingest.source import File
from ltrscale.ingest.tables import Join, Joined, typed_rows
from ltrscale.progress import log
from ltrscale.serving import raw_rows
from ltrscale.serving.columns import reading_raw, recorded_source
from ltrscale.serving.format import Files

CODE = "raw_rows.py"
NO_ITEMS = "was not trained on rows that have one item and all features each"
"""Why an export lacks it."""
_MOST_ROWS, _MOST_NUMBERS = 200_000, 5_000_000
"""Limits of an exported table, and of the numbers in its lists: about 100 MB of text."""
_MOST_BYTES = 1 << 30
_ROWS_AT_ONCE = 1 << 12


def write_raw(bundle: Bundle, names: Sequence[str]) -> Files:
    """The files of the transformer for an exported model's columns, in their order; empty if `reading_raw` is None.

    Raises:
        InputError: a joined table cannot be read.
    """
    reading = reading_raw(bundle, names)
    if reading is None:
        return {}
    config, features = reading
    source = config.source
    assert isinstance(source, Items)
    columns, raw = source.columns, RawColumns.model_validate(bundle.read_as[RAW])
    joined = load_tables(source.joins, columns, features)
    tables = {f"raw_rows_{number}.jsonl": _table(each) for number, each in enumerate(joined, 1)}
    by_name, derived = {feature.name: feature for feature in features}, _derived(columns)
    dated = sorted({derived[name]["column"] for name in names if "part" in derived.get(name, {})})
    recipe = {
        "format": "ltrscale-raw-rows",
        "version": 1,
        "about": _ABOUT,
        "rows": raw.rows,
        "csv": {
            "delimiter": columns.delimiter,
            "decimal": columns.decimal,
            "encoding": columns.encoding,
            "quotes": columns.quotes,
            "header": list(columns.header),
            "missing": list(NULLS),
            **dict(zip(("true", "false"), booleans(), strict=True)),
        },
        "times": {
            "zone": columns.time_zone,
            "formats": list(columns.time_format),
            "row": columns.time,
            "columns": [name for name in dict.fromkeys([columns.time, *dated]) if name],
        },
        "vectors": columns.vector_columns,
        "infinite": config.infinite,
        "columns": _columns(columns, source.joins, [by_name[name] for name in names], raw),
        "joins": [_join(each.join, tables, name) for each, name in zip(joined, tables, strict=True)],
        "features": [_feature(by_name[name], columns, derived) for name in names],
    }
    files = {name: table for name, table in tables.items() if table is not None}
    text = json.dumps(recipe, indent=1, ensure_ascii=False) + "\n"
    return {CODE: inspect.getsource(raw_rows).encode(), raw_rows.RECIPE: text.encode(), **files}


HISTORY = "history.{}.sql"
_DIALECTS: tuple[SqlDialect, ...] = ("duckdb", "bigquery")


def write_history(bundle: Bundle, names: Sequence[str]) -> Files:
    """The statements that give rows the features of history among an exported model's columns."""
    source = recorded_source(bundle)
    if not isinstance(source, Items) or source.history is None or not {*names} & source.history.features.keys():
        return {}
    history, time = source.history.only(names), source.columns.time
    assert time is not None
    return {HISTORY.format(dialect): history.sql(time, dialect).encode() for dialect in _DIALECTS}


_ABOUT = {
    "rows": "the form of the log's files: csv, json (lines) or parquet",
    "csv": "how values are written in CSV text; `missing` are words for no value, `true` and `false` for booleans",
    "times": "the zone of times without one, the formats that are tried in order, the time of the row itself",
    "vectors": "the columns with lists of numbers, with their length; null where it is that of the list beside it",
    "columns": "what the log has in each column of a row; `table` is the number of the table that has the column; a "
    "row may lack an `optional` one",
    "features": "in the order of features.json: `column` has the value, as it is (a number in single precision; the "
    "code of a category: a whole number below 2^24 is its own, other text is hashed), `part` of it (of a time), the "
    "number at `place` of its list, from 0, or the `similarity` of its list to that of `other`; "
    "`fill` stands for a missing value",
}


def _columns(
    columns: ColumnMapping, joins: Sequence[Join], features: Sequence[Feature], raw: RawColumns
) -> dict[str, dict[str, Any]]:
    """The columns that features, times and joins read, and those from tables."""
    tables = {name: i for i, join in enumerate(joins, 1) for name in join.columns}
    used = columns.sources_of(feature.name for feature in features)
    used |= dict.fromkeys([columns.time] if columns.time else [])
    used |= dict.fromkeys(name for join in joins for name in (*join.key, *join.columns))
    return {
        name: {
            "reads": raw.reads.get(name, "value"),
            **({"table": tables[name]} if name in tables else {}),
            **({"optional": True} if name in columns.optional else {}),
        }
        for name in used
    }


def _join(join: Join, tables: Mapping[str, bytes | None], name: str) -> dict[str, Any]:
    """A table to join; without the name of a file if it is too large to export."""
    file = None if tables[name] is None else name
    return {**join.model_dump(mode="json"), "columns": list(join.columns), "key": list(join.key), "table": file}


def _feature(feature: Feature, columns: ColumnMapping, derived: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    fill = columns.fill_of(feature)
    of = derived.get(feature.name, {"column": feature.name})
    return {"name": feature.name, "kind": feature.kind, **of, **({} if fill is None else {"fill": fill})}


def _derived(columns: ColumnMapping) -> dict[str, dict[str, Any]]:
    """The sources of features that are not columns themselves."""
    derived: dict[str, dict[str, Any]] = {}
    derived |= {name: {"column": column, "part": part} for name, (column, part) in columns.date_features().items()}
    derived |= {name: {"column": column, "place": i} for name, (column, i) in columns.vector_features().items()}
    return derived | {
        name: {"column": one, "similarity": kind, "other": other}
        for name, (kind, one, other) in columns.similarity_features().items()
    }


def _table(joined: Joined) -> bytes | None:
    """A table's rows as lists of key and values, one per line; None if too many, or of a type that JSON lacks."""
    if len(joined.keys_K) > _MOST_ROWS or not all(_is_plain(array.type) for array in joined.columns.values()):
        return None
    if sum(len(array.flatten()) for array in joined.columns.values() if is_list(array.type)) > _MOST_NUMBERS:
        return None
    rows = zip(joined.keys_K.to_pylist(), *(array.to_pylist() for array in joined.columns.values()), strict=True)
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows if row[0] is not None).encode()


def _is_plain(kind: pa.DataType) -> bool:
    types = pa.types
    kind = kind.value_type if is_list(kind) else kind
    numeric = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    return bool(numeric or types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind))


@dataclass(frozen=True)
class RawSample:
    """Raw rows of a file that `prepare` accepts, sorted by query, with their prepared features."""

    file: str
    lines_N: NDArray[np.int64]
    rows: list[Mapping[str, Any]]
    groups: QueryGroups
    """The bundle's features of the rows."""
    transformer: Any
    """The exported `raw_rows.py`, as a module."""


def sample_raw(bundle: Bundle, export: Path, files: Sequence[str], rows: int) -> RawSample | None:
    """The first rows of the first file with rows that `prepare` accepts for this bundle; None without one.

    `export` is the folder of the exported files.

    Raises:
        InputError: a file is missing, damaged or lacks columns.
    """
    reading = reading_raw(bundle, [feature.name for feature in bundle.features])
    assert reading is not None
    blocks = ((url, _first_rows(url, *reading, rows)) for url in files)
    url, block = next((found for found in blocks if found[1] is not None), ("", None))
    if block is None:
        return None
    transformer = _imported(export)
    make: raw_rows.RawRows = transformer.beside(str(export))
    query_N = block.query_ids_N.dictionary_encode().indices.to_numpy()
    order_N = np.argsort(query_N, kind="stable")
    offsets_Q1 = np.concatenate([[0], np.cumsum(np.bincount(query_N))])
    groups = QueryGroups(torch.from_numpy(block.features_NF[order_N]), torch.from_numpy(offsets_Q1))
    lines_N = block.lines_N[order_N]
    raw_N = _rows_at(url, lines_N, make)
    if any(join["table"] is None for join in make.recipe["joins"]):
        raw_N = _with_tables(raw_N, *reading)
    return RawSample(url, lines_N, raw_N, groups, transformer)


def raw_files_of(raw_rows: str | None, data: str) -> list[str]:
    """The files of raw rows to check: the named ones, or those of the data set that still exist.

    Raises:
        InputError: the named files are missing.
    """
    if raw_rows is not None:
        return storage.list_files(raw_rows)
    dataset = open_dataset(data)
    if read_as(dataset).get("source", {}).get("history"):
        log.warning("export: the raw rows of %s have no features of history; name rows that have them as raw", data)
        return []
    if not (urls := raw_files(dataset)):
        log.warning(
            "export: the raw rows of %s are not there any more; name some as raw, to check the transformer", data
        )
    return urls


def _imported(folder: Path) -> Any:
    """The transformer of a folder as a module, imported as a service does."""
    spec = importlib.util.spec_from_file_location("exported_raw_rows", folder / CODE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _first_rows(url: str, config: PrepareConfig, features: tuple[Feature, ...], rows: int) -> RowBlock | None:
    """The first rows of a file that `prepare` accepts; None without any."""
    read = config.source.open(features, first=url, encoders={})
    blocks: list[RowBlock] = []
    n = 0
    for block in read(File(url=url)):
        whole = completed(block, config, features)
        whole = keep(whole, np.asarray(~np.isinf(whole.features_NF).any(1)))
        blocks.append(cut(whole, 0, min(len(whole), rows - n)))
        n += len(blocks[-1])
        if n >= rows:
            break
    return concat(blocks) if n else None


def _rows_at(url: str, lines_N: NDArray[np.int64], make: raw_rows.RawRows) -> list[Any]:
    """The raw rows of a file at these lines, in this order."""
    wanted, found = set(lines_N.tolist()), {}
    with storage.scratch.directory() as folder:
        for line, row in typed_rows(url, _ROWS_AT_ONCE) or _text_rows(url, make, folder):
            if line in wanted:
                found[line] = row
            if len(found) == len(wanted):
                break
    return [found[line] for line in lines_N.tolist()]


def _text_rows(url: str, make: raw_rows.RawRows, folder: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a text file with their line numbers, as the transformer reads them."""
    path = Path(url)
    if not path.exists():
        if storage.size(url) > _MOST_BYTES:
            raise InputError(f"{url}: more than 1 GB, and raw rows are copied here to be checked; name fewer as raw")
        path = folder / url.rpartition("/")[2]
        with storage.open_input(url) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    yield from make.numbered(path)


def _with_tables(rows: list[Any], config: PrepareConfig, features: Sequence[Feature]) -> list[Any]:
    """Rows with the columns of joined tables, which a service supplies if a table is too large to export."""
    source = config.source
    assert isinstance(source, Items)
    for table in load_tables(source.joins, source.columns, features):
        keys = pa.RecordBatch.from_pydict({name: [row.get(name) for row in rows] for name in table.join.key})
        joined = table(keys)[0].select([*table.join.columns]).to_pylist()
        rows = [{**row, **more} for row, more in zip(rows, joined, strict=True)]
    return rows
