"""Looks at a raw log: its form, its columns, and the queries and times in it."""

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.ingest import tables
from ltrscale.data.ingest.csvtext import Dialect
from ltrscale.data.ingest.lines import UTF8, read_lines
from ltrscale.data.times import ISO, Clock, instants
from ltrscale.errors import InputError

_BATCH = 1 << 16
_TRIED = 200
_DAYS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%Y%m%d", "%d %b %Y")
_FORMATS = (ISO, *(day + clock for day in _DAYS for clock in ("", " %H:%M:%S", " %H:%M", " %I:%M %p")))
_EPOCHS = 946_684_800, 2_208_988_800
"""The years 2000 to 2040, in seconds: numbers that may be times."""


@dataclass(frozen=True)
class Column:
    """A column in the first rows of a log; `formats` are those in which all its values can be read as times."""

    name: str
    type: pa.DataType
    rows: int
    missing: float
    distinct: int
    whole: bool
    least: float
    most: float
    length: float
    formats: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def numeric(self) -> bool:
        """Whether it holds numbers."""
        return cols.is_number(self.type) and not pa.types.is_null(self.type)

    @property
    def clock(self) -> bool:
        """Whether its times have hours: those of rows do, while other dates often have days only."""
        return pa.types.is_timestamp(self.type) or self.numeric or any(":" in value for value in self.values)

    @property
    def shown(self) -> str:
        """The facts in a few words."""
        missing = f", {self.missing:.0%} missing" if self.missing else ""
        if self.numeric:
            return f"{self.least:g} to {self.most:g}{missing}"
        examples = ", ".join(value[:20] for value in self.values[:3])
        return " ".join(f"{self.distinct:,} values, such as {examples}{missing}".split())


def dialect_of(url: str) -> Dialect:
    """The form of a CSV file, from its beginning."""
    piece = next(read_lines(url, size=1 << 20), None)
    if piece is None:
        raise InputError(f"{url}: the file is empty; choose another one")
    encoding = _encoding(piece.text)
    header = piece.text.partition(b"\n")[0].decode(encoding, errors="replace")
    usual = "\t" if ".tsv" in url else ","
    delimiter = max((usual, ",", ";", "\t", "|"), key=header.count)
    found = Dialect(delimiter, ".", encoding)
    if delimiter != ",":
        marks = {mark: Dialect(delimiter, mark, encoding) for mark in ".,"}
        found = max(marks.values(), key=lambda form: _numbers(tables.read_schema(url, form)))
    return found


def _encoding(text: bytes) -> str:
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:
        text.decode()
    except UnicodeDecodeError:
        return "cp1252"
    return UTF8


def _numbers(schema: pa.Schema) -> int:
    return sum(pa.types.is_floating(kind) for kind in schema.types)


def look(url: str, dialect: Dialect, rows: int) -> list[Column]:
    """The columns in the first rows of a file.

    Raises:
        InputError: the file cannot be read, or has no rows.
    """
    schema = tables.read_schema(url, dialect)
    if len(set(schema.names)) < len(schema.names):
        raise InputError(f"{url}: two columns have the same name; rename all but one")
    sample = pa.Table.from_batches(
        islice(_batches(url, schema, schema.names, dialect), max(1, -(-rows // _BATCH))),
    ).slice(0, rows)
    if not len(sample):
        raise InputError(f"{url}: no rows; choose another file")
    return columns_of(sample, schema, dialect)


def columns_of(rows: pa.Table, schema: pa.Schema, dialect: Dialect) -> list[Column]:
    """The columns of at least one row; the schema says which columns of text hold numbers."""
    kinds = zip(schema.names, schema.types, rows.columns, strict=True)
    return [_column(name, cols.value_type(kind), cols.plain(v.combine_chunks()), dialect) for name, kind, v in kinds]


def _batches(url: str, schema: pa.Schema, names: Sequence[str], dialect: Dialect) -> Iterator[pa.RecordBatch]:
    """Some columns of a file; those of a text file as text, since float32 cannot tell long ids apart."""
    ordered = [name for name in schema.names if name in names]
    raw = tables.read_rows(url, schema, ordered, numbers=(), query=ordered[0], dialect=dialect, batch_rows=_BATCH)
    return (each.rows for each in raw)


def _column(name: str, kind: pa.DataType, values: pa.Array, dialect: Dialect) -> Column:
    if pa.types.is_nested(kind):
        return Column(name, kind, len(values), 0.0, 0, False, 0.0, 0.0, 0.0, (), ())
    known = values.unique().drop_null()
    numbers_V = _values(known, dialect) if cols.is_number(kind) else np.zeros(0)
    numbers_V = numbers_V[np.isfinite(numbers_V)]
    if pa.types.is_boolean(kind):
        numbers_V = np.array([0.0, 1.0])
    texts = cols.texts(known.slice(0, _TRIED))[0].drop_null().to_pylist() if _readable(kind) else []
    return Column(
        name=name,
        type=kind,
        rows=len(values),
        missing=values.null_count / len(values),
        distinct=len(known),
        whole=bool((numbers_V == np.floor(numbers_V)).all()),
        least=float(numbers_V.min(initial=np.inf)),
        most=float(numbers_V.max(initial=-np.inf)),
        length=float(np.mean([len(text) for text in texts])) if texts else 0.0,
        formats=_formats(known.slice(0, _TRIED), kind),
        values=tuple(texts),
    )


def _values(known: pa.Array, dialect: Dialect) -> NDArray[np.float64]:
    """The numbers of a column's distinct values, NaN for what is none."""
    if not cols.is_text(known.type):
        values_V: NDArray[np.float64] = known.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return values_V
    texts = known.to_pylist()
    if dialect.decimal != ".":
        texts = [text.replace(dialect.decimal, ".") for text in texts]
    return np.array([float(text) if Dialect().number(text) else np.nan for text in texts])


def _readable(kind: pa.DataType) -> bool:
    return cols.is_text(kind) or cols.is_number(kind)


def _formats(values: pa.Array, kind: pa.DataType) -> tuple[str, ...]:
    """The formats in which every value is a time."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return (ISO,)
    if not len(values) or not _readable(kind):
        return ()
    if cols.is_number(kind):
        seconds_V, bad_V = instants(values)
        return (ISO,) if not bad_V.any() and _EPOCHS[0] <= seconds_V.min() <= seconds_V.max() <= _EPOCHS[1] else ()
    return tuple(form for form in _FORMATS if not instants(values, Clock(formats=(form,)))[1].any())


@dataclass(frozen=True)
class Lists:
    """The queries of a whole log; `times_N` are NaT-free text, by row, and `labelled_N` the rows with a label."""

    rows: int
    queries: int
    together: bool
    repeated: int
    median: int
    longest: int
    told_apart: int
    """Rows of queries whose labels differ."""
    queries_told_apart: int
    times_N: pa.Array | None
    labelled_N: NDArray[np.bool_]


def look_at_lists(urls: Sequence[str], uses: Mapping[str, str], dialect: Dialect) -> Lists:
    """Read the columns `query`, `item`, `label` and `time` of all files, as far as `uses` names them.

    Memory grows with the rows, about 100 bytes for each.
    """
    parts: dict[str, list[pa.Array]] = {use: [] for use in uses}
    for url in urls:
        schema = tables.read_schema(url, dialect)
        for batch in _batches(url, schema, list(uses.values()), dialect):
            for use, name in uses.items():
                column = batch.column(name)
                parts[use].append(column if use == "time" else cols.texts(column)[0])
    whole = {use: pa.chunked_array(chunks).combine_chunks() for use, chunks in parts.items()}
    queries_N, n = _codes(whole["query"])
    lengths_Q = np.bincount(queries_N, minlength=n)
    repeated = 0
    if "item" in whole:
        items_N, _ = _codes(whole["item"])
        pairs = (queries_N * (items_N.max() + 1) + items_N)[whole["item"].is_valid().to_numpy(zero_copy_only=False)]
        repeated = len(pairs) - len(np.unique(pairs))
    labels_N = whole.get("label")
    apart_Q = np.zeros(n, np.bool_) if labels_N is None else told_apart(queries_N, _codes(labels_N)[0], n)
    return Lists(
        rows=len(queries_N),
        queries=n,
        together=1 + int(np.count_nonzero(np.diff(queries_N))) == n,
        repeated=repeated,
        median=int(np.median(lengths_Q)),
        longest=int(lengths_Q.max()),
        told_apart=int(lengths_Q[apart_Q].sum()),
        queries_told_apart=int(apart_Q.sum()),
        times_N=whole.get("time"),
        labelled_N=np.ones(len(queries_N), bool)
        if labels_N is None
        else pc.is_valid(labels_N).to_numpy(zero_copy_only=False),
    )


def told_apart(queries_N: NDArray[np.int64], labels_N: NDArray[np.int64], queries: int) -> NDArray[np.bool_]:
    """Whether the labels of a query differ, for each of so many queries: a ranker learns from those alone.

    Example:
        >>> told_apart(np.array([0, 1, 0, 1, 2]), np.array([5, 6, 5, 7, 5]), 3).tolist()
        [False, True, False]
    """
    first_Q = np.zeros(queries, np.int64)
    first_Q[queries_N] = labels_N
    apart_Q = np.zeros(queries, np.bool_)
    apart_Q[queries_N[labels_N != first_Q[queries_N]]] = True
    return apart_Q


def _codes(texts_N: pa.StringArray) -> tuple[NDArray[np.int64], int]:
    coded = texts_N.fill_null("").dictionary_encode()
    return coded.indices.to_numpy().astype(np.int64), len(coded.dictionary)
