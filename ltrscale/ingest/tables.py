"""Files with one row per line or record, in any format, as Arrow batches in bounded memory; and joins of tables.

Tables join the rows of a log by a key, such as the text of a document by its id. Each process holds the table's columns
in memory and looks up all rows of a block at once. Of Parquet files one batch of rows is in memory at a time; errors
name the place of damage in a file.

Shapes: N rows of a block or batch, K rows of a table that joins.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BeforeValidator, Field, model_validator

from ltrscale import storage
from ltrscale.arrays import Bits, Bools, Ints
from ltrscale.config import Config
from ltrscale.data import columns as cols
from ltrscale.data.ids import hash_ids
from ltrscale.errors import InputError, suggestion
from ltrscale.ingest.csv_lines import CsvReader, Dialect, csv_schema
from ltrscale.ingest.json_lines import JsonReader, json_schema
from ltrscale.ingest.rows import Raw, RowTexts, damage

_READ_AHEAD = 1 << 18


@dataclass(frozen=True, eq=False)
class LakeFile:
    """What a table of a lake serves of one of its Parquet files.

    Args:
        schema: the columns of the table, in order; those that the file lacks are null.
        stored: the names of columns in the file, by their names in the table.
        values: the values of partition columns, as text, by name.
        deleted_K: the numbers of rows that the table no longer has, from 0, sorted.
    """

    schema: pa.Schema
    stored: Mapping[str, str]
    values: Mapping[str, str | None]
    deleted_K: Ints

    @property
    def is_plain(self) -> bool:
        """Whether all rows are served, with the names that their columns have in the file."""
        return not len(self.deleted_K) and all(name == stored for name, stored in self.stored.items())

    def columns(self, of_file: pa.Schema) -> pa.Schema:
        """The columns that are served of a file with these columns."""
        return pa.schema([(field.name, self._type(field, of_file)) for field in self.schema])

    def _type(self, field: pa.Field, of_file: pa.Schema) -> pa.DataType:
        if field.name in self.values:
            return pa.string()
        stored = self.stored[field.name]
        return of_file.field(stored).type if stored in of_file.names else field.type

    def rows(self, batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
        """Some columns of the table, for a batch that has those of them that the file has."""

        def column(name: str) -> pa.Array:
            if name in self.values:
                return pa.repeat(pa.scalar(self.values[name], pa.string()), len(batch))
            stored = self.stored[name]
            return batch[stored] if stored in batch.schema.names else pa.nulls(len(batch), self.schema.field(name).type)

        return pa.RecordBatch.from_arrays([column(name) for name in columns], names=list(columns))


def parquet_schema(url: str, lake: LakeFile | None = None) -> pa.Schema:
    """The columns of a Parquet file, as they are read."""
    with _open(url) as file:
        schema = cols.plain_schema(file.schema_arrow)
    return lake.columns(schema) if lake else schema


def read_parquet(url: str, columns: Sequence[str], batch_rows: int, lake: LakeFile | None = None) -> Iterator[Raw]:
    """Read batches of at most `batch_rows` rows; `columns` are in file order.

    A row group is read page by page: memory does not grow with the file or with its row groups.

    Raises:
        InputError: the file is missing or cannot be decoded; names row group and row.
    """
    with _open(url) as file:
        row, in_file = 1, list(columns)
        if lake:
            in_file = [lake.stored[name] for name in columns if lake.stored.get(name) in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            # without its offset, which is in column metadata: if that is damaged, pyarrow kills the process
            with damage(url, f"row group {group}, near row {row}"):
                batches = file.iter_batches(batch_rows, row_groups=[group], columns=in_file)
            while True:
                with damage(url, f"row group {group}, near row {row}"):
                    batch = next(batches, None)
                if batch is None:
                    break
                lines_N = np.arange(row, row + len(batch))
                row += len(batch)
                rows, share = cols.plain(batch), (row - 1) / max(row - 1, file.metadata.num_rows)
                if lake:
                    kept_N = ~np.isin(lines_N - 1, lake.deleted_K)
                    rows, lines_N = lake.rows(rows, columns).filter(pa.array(kept_N)), lines_N[kept_N]
                if not len(rows):
                    continue
                yield Raw(rows, lines_N, RowTexts(rows, lines_N), [], share)
        if row - 1 != file.metadata.num_rows:
            raise InputError(
                f"{url}: {row - 1:,} rows where its footer counts {file.metadata.num_rows:,}; "
                "write the file again or remove it"
            )


@contextmanager
def _open(url: str) -> Iterator[pq.ParquetFile]:
    with storage.open_input(url) as stream:
        if not (end := stream.seek(0, 2)):
            raise InputError(f"{url}: the file is empty (0 bytes); write it again or remove it")
        with damage(url, f"the footer before byte {end}"):
            # checksums, if any, detect a flipped bit that would still decode
            file = pq.ParquetFile(
                stream,
                pre_buffer=False,
                buffer_size=_READ_AHEAD,
                page_checksum_verification=True,
                arrow_extensions_enabled=True,  # UUIDs, which are text here
            )
            assert file.schema_arrow is not None
        yield file


_PACKED = ("", ".gz", ".xz")
_CSV = tuple(kind + packed for kind in (".csv", ".tsv") for packed in _PACKED)
_JSON = tuple(kind + packed for kind in (".jsonl", ".ndjson") for packed in _PACKED)


Form = Literal["csv", "json", "parquet"]


def file_form(url: str) -> Form:
    """The form of a file's values: text, JSON, or else typed as in Parquet."""
    return "csv" if url.endswith(_CSV) else "json" if url.endswith(_JSON) else "parquet"


def usual_delimiter(url: str, decimal: str = ".") -> str:
    """The separator of a CSV file's fields by its name, whatever folder it lies in, and by its decimal mark."""
    return "\t" if ".tsv" in url.rpartition("/")[2] else ";" if decimal == "," else ","


def read_schema(url: str, dialect: Dialect, lake: LakeFile | None = None) -> pa.Schema:
    """The columns of a file; types of text files are those of their first lines."""
    if url.endswith(".parquet"):
        return parquet_schema(url, lake)
    if url.endswith(_CSV):
        return csv_schema(url, dialect)
    if url.endswith(_JSON):
        return json_schema(url)
    kinds = ".parquet, .csv, .tsv or .jsonl, the last three perhaps with .gz or .xz"
    raise InputError(f"{url}: the name does not end in {kinds}; rename it or narrow the path")


def read_rows(
    url: str,
    schema: pa.Schema,
    columns: Sequence[str],
    *,
    numbers: Collection[str],
    query: str,
    dialect: Dialect,
    batch_rows: int,
    lake: LakeFile | None = None,
) -> Iterator[Raw]:
    """Read some columns of a file, in their order in its schema, in blocks of at most `batch_rows` rows.

    `numbers` are read as numbers if the file has only text; `query` is the column with the query id, for rejections.
    """
    if url.endswith(".parquet"):
        return read_parquet(url, columns, batch_rows, lake)
    if url.endswith(_JSON):
        return iter(JsonReader(url, schema, columns, numbers, query, batch_rows))
    return iter(CsvReader(url, schema, columns, numbers, query, batch_rows, dialect))


def typed_rows(url: str, batch_rows: int) -> Iterator[tuple[int, dict[str, Any]]] | None:
    """The rows of a file with their numbers, as typed values; None if its rows are text."""
    if file_form(url) != "parquet":
        return None
    schema, dialect = read_schema(url, Dialect()), Dialect()
    raws = read_rows(url, schema, schema.names, numbers=(), query="", dialect=dialect, batch_rows=batch_rows)
    return (row for raw in raws for row in zip(raw.lines_N.tolist(), raw.rows.to_pylist(), strict=True))


def numbers_in(
    url: str, schema: pa.Schema, form: Form, *, numbers: Collection[str], texts: Collection[str]
) -> set[str]:
    """The columns to read as numbers if the file has only text.

    Whole numbers of JSON are read unchanged if their values are also needed unchanged (`texts`).
    """
    here = {*schema.names} & {*numbers}
    both = sorted(here & {*texts})
    if both and form == "csv":
        raise InputError(
            f"{url}: column {both[0]!r} is used as a number and also as a key, id, category, time or meta column, and "
            "CSV can be read as one of them only; leave one use out, or write the file as Parquet"
        )
    return here - {name for name in both if pa.types.is_integer(schema.field(name).type)}


_BATCH_ROWS = 1 << 16
_BETWEEN = "\x1f"  # no part of an id


def _pairs(value: Any) -> Any:
    """A mapping; one name or several become a mapping to themselves."""
    names = (value,) if isinstance(value, str) else value
    return dict(zip(names, names, strict=True)) if isinstance(names, list | tuple) else names


ColumnNames = Annotated[dict[str, str], BeforeValidator(_pairs)]


class Join(Config):
    """A table whose columns join the rows of a log."""

    path: str
    """Files of the table: Parquet, CSV or JSON lines, as the log itself."""
    key: ColumnNames = Field(min_length=1)
    """The key: a column, several, or `{column of the log: column of the table}`. The table has each key once."""
    columns: ColumnNames = Field(default_factory=dict)
    """Columns to take: their names, or `{new name: column of the table}`."""
    rows: Literal["matched", "unmatched", "all"] = "matched"
    """The rows of the log to keep: those with a key of the table, those without, or all. The others are rejected."""
    header: tuple[str, ...] = ()
    """Names of the columns of CSV files whose first line is a row, as those of `columns.header`."""
    fill: dict[str, float | str] = Field(default_factory=dict)
    """Values of joined columns in rows without a key of the table; null by default. Needs `rows: all`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.fill and self.rows != "all":
            raise ValueError("fill is for rows without a key of the table; set rows: all")
        if unknown := [name for name in self.fill if name not in self.columns]:
            raise ValueError(f"fill: {unknown[0]!r} is not under columns; name a column that is joined")
        if self.rows == "unmatched" and self.columns:
            raise ValueError("rows: unmatched keeps rows that the table does not have; leave columns out")
        return self


def join_keys(joins: Sequence[Join]) -> set[str]:
    """The columns of the log that join tables."""
    return {name for join in joins for name in join.key}


@dataclass(frozen=True)
class Joined:
    """A table in memory: its keys sorted by hash, and the columns to join."""

    join: Join
    hashes_K: Bits
    keys_K: pa.Array
    columns: dict[str, pa.Array]

    def __call__(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Bools, list[str]]:
        """The rows with the columns joined, a mask of rows to reject, and the key of every row."""
        keys_N = _keys([rows.column(name) for name in self.join.key])
        place_N, matched_N = self._find(keys_N)
        index_N = pa.array(place_N, mask=~matched_N)
        for name, column in self.columns.items():
            values = column.take(index_N)
            if name in self.join.fill:
                filled = pa.scalar(self.join.fill[name]).cast(column.type)
                values = pc.if_else(pa.array(matched_N), values, filled)
            rows = rows.append_column(name, values)
        bad_N = {"matched": ~matched_N, "unmatched": matched_N, "all": np.zeros(len(rows), bool)}[self.join.rows]
        return rows, bad_N, keys_N.to_pylist()

    def _find(self, keys_N: pa.Array) -> tuple[Ints, Bools]:
        """The table row of each key, and a mask of the keys that the table has."""
        coded = keys_N.dictionary_encode()
        if not len(self.hashes_K) or not len(coded.dictionary):
            return np.zeros(len(keys_N), np.int64), np.zeros(len(keys_N), bool)
        hashes = hash_ids(coded.dictionary.to_pylist())
        place = np.minimum(np.searchsorted(self.hashes_K, hashes), len(self.hashes_K) - 1)
        same = pc.equal(self.keys_K.take(pa.array(place)), coded.dictionary).to_numpy(zero_copy_only=False)
        index_N = coded.indices.fill_null(0).to_numpy()
        valid_N = keys_N.is_valid().to_numpy(zero_copy_only=False)
        return place[index_N], same[index_N] & valid_N

    def fault(self, key: str | None) -> str:
        """The reason to reject a row with this key."""
        names = ", ".join(self.join.key)
        shown = "no value" if key is None else repr(key.replace(_BETWEEN, ", "))
        return f"{names} {shown} {'is' if self.join.rows == 'unmatched' else 'is not'} in {self.join.path}"


def with_joined(schema: pa.Schema, joins: Sequence[Join], dialect: Callable[[str], Dialect], file: str) -> pa.Schema:
    """The columns of a log with those of its tables."""
    for join in joins:
        for name in join.key:
            if name not in schema.names:
                hint = suggestion(name, schema.names, "its columns are")
                raise InputError(f"{file}: no column {name!r}, which joins {join.path}; {hint}")
        first = storage.list_files(join.path)[0]
        table = _schema(join, first, replace(dialect(first), header=join.header))
        for name, column in join.columns.items():
            if name in schema.names:
                raise InputError(f"{file}: column {name!r} is there already; join that of {join.path} by a new name")
            schema = schema.append(pa.field(name, table.field(column).type))
    return schema


def load_table(
    join: Join, dialect: Callable[[str], Dialect], *, numbers: Collection[str], texts: Collection[str]
) -> Joined:
    """Read the key and the columns of a table; `numbers` and `texts` are names in the log, as for `numbers_in`."""
    as_numbers = {column for name, column in join.columns.items() if name in numbers}
    as_texts = {column for name, column in join.columns.items() if name in texts or name not in numbers}
    as_texts |= {*join.key.values()}
    keys, columns = [], {name: list[tuple[str, pa.Array]]() for name in join.columns}
    for url in storage.list_files(join.path):
        of_url = replace(dialect(url), header=join.header)
        schema = _schema(join, url, of_url)
        needed = {*join.key.values(), *join.columns.values()}
        names = [name for name in schema.names if name in needed]
        here = numbers_in(url, schema, file_form(url), numbers=as_numbers, texts=as_texts)
        for raw in read_rows(url, schema, names, numbers=here, query=names[0], dialect=of_url, batch_rows=_BATCH_ROWS):
            if raw.rejected:
                first = raw.rejected[0]
                raise InputError(f"{url}: line {first.line}: {first.found}; a table that joins must be whole; mend it")
            keys.append(_keys([raw.rows.column(name) for name in join.key.values()]))
            for name, column in join.columns.items():
                columns[name].append((url, cols.without_dictionary(raw.rows.column(column))))
    keys_K = pa.concat_arrays(keys) if keys else pa.array([], pa.string())
    hashes_K = hash_ids([key or "" for key in keys_K.to_pylist()])
    order_K = np.argsort(hashes_K, kind="stable")
    sorted_K = keys_K.take(pa.array(order_K))
    twice = np.flatnonzero(np.diff(hashes_K[order_K].view(np.int64)) == 0)
    if len(twice):
        key = sorted_K[int(twice[0])].as_py()
        raise InputError(
            f"{join.path}: {', '.join(join.key.values())} {key!r} is there twice; keep one row of each key"
        )
    arrays = {
        name: _in_one_type(join.columns[name], parts).take(pa.array(order_K))
        for name, parts in columns.items()
        if parts
    }
    return Joined(join, hashes_K[order_K], sorted_K, arrays)


def _schema(join: Join, url: str, dialect: Dialect) -> pa.Schema:
    schema = read_schema(url, dialect)
    for name in (*join.key.values(), *join.columns.values()):
        if name not in schema.names:
            raise InputError(f"{url}: no column {name!r}; {suggestion(name, schema.names, 'its columns are')}")
    return schema


def _in_one_type(column: str, parts: Sequence[tuple[str, pa.Array]]) -> pa.Array:
    """The parts of a column (with their files) concatenated in a type that holds all their values."""
    first, kind = parts[0][0], parts[0][1].type
    for file, part in parts:
        kind = cols.wider_type(column, kind, part.type, file, first)
    return pa.concat_arrays([cols.in_type(column, part, kind, file) for file, part in parts])


def _keys(columns: Sequence[pa.Array]) -> pa.StringArray:
    """The keys of rows as texts; null if a part has no value."""
    parts = [cols.texts(column)[0] for column in columns]
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, _BETWEEN)
