"""Looks at a raw log: its form, its columns, and the queries and times in it."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.times import ISO, Clock, instants
from ltrscale.errors import InputError
from ltrscale.ingest import tables
from ltrscale.ingest.csvtext import Dialect
from ltrscale.ingest.lines import UTF8, read_lines

_BATCH = 1 << 16
_TRIED = 200
_DIGITS = "%Y%m%d"
_DAYS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", _DIGITS, "%d %b %Y")
_FORMATS = (ISO, *(day + clock for day in _DAYS for clock in ("", " %H:%M:%S", " %H:%M", " %I:%M %p")))
_EPOCHS = 946_684_800, 2_208_988_800
"""The years 2000 to 2040, in seconds: numbers that may be times."""
_NUMBER = r"^[-+]?\d*[.,]?\d+(e[-+]?\d+)?$"
_STRAY = 0.05
"""Share of values that may be no times in a column of times."""


@dataclass(frozen=True)
class LogColumn:
    """A column in the first rows of a log.

    `formats` are those in which all but a few of its values can be read as times, the best first; `bad` is the share of
    the rows with a value that is no such time, or no number in a column of numbers; `days` is the span of its times.
    """

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
    bad: float = 0.0
    days: float = 0.0

    @property
    def numeric(self) -> bool:
        """Whether it holds numbers."""
        return cols.is_number(self.type) and not pa.types.is_null(self.type)

    @property
    def digits(self) -> bool:
        """Whether it holds numbers, perhaps as text."""
        return self.numeric or (bool(self.values) and all(value.isdecimal() for value in self.values))

    @property
    def clock(self) -> bool:
        """Whether its times have hours: those of rows do, while other dates often have days only."""
        if self.numeric:
            return self.formats[:1] == (ISO,)
        return pa.types.is_timestamp(self.type) or any(":" in value for value in self.values)

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


def first_columns(urls: Sequence[str], dialect: Dialect, rows: int) -> list[LogColumn]:
    """The columns of the first file, in the first rows of all.

    Raises:
        InputError: a file cannot be read or is of another kind than the first, or there are no rows.
    """
    schema = tables.read_schema(urls[0], dialect)
    if len(set(schema.names)) < len(schema.names):
        raise InputError(f"{urls[0]}: two columns have the same name; rename all but one")
    first: list[pa.Table] = []
    for batch in batches(urls, schema.names, dialect):
        first.append(pa.table({name: cols.without_dictionary(batch.column(name)) for name in schema.names}))
        if sum(map(len, first)) >= rows:
            break
    if not sum(map(len, first)):
        raise InputError(f"{urls[0]}: no rows; choose another file")
    try:  # one file may have integers, or nothing, where another has fractions
        sample = pa.concat_tables(first, promote_options="permissive").slice(0, rows)
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise InputError(
            f"{urls[0]}: a column has another type in other files: {error}; name files of one kind"
        ) from error
    return columns_of(sample, sample.schema if urls[0].endswith(".parquet") else schema, dialect)


def columns_of(rows: pa.Table, schema: pa.Schema, dialect: Dialect) -> list[LogColumn]:
    """The columns of at least one row; the schema says which columns of text hold numbers."""
    kinds = zip(schema.names, schema.types, rows.columns, strict=True)
    return [
        _column(name, cols.value_type(kind), cols.without_dictionary(v.combine_chunks()), dialect)
        for name, kind, v in kinds
    ]


def batches(urls: Sequence[str], names: Sequence[str], dialect: Dialect) -> Iterator[pa.RecordBatch]:
    """Some columns of files; those of a text file as text, since float32 cannot tell long ids apart.

    Raises:
        InputError: a file lacks a column that the first one has.
    """
    for url in urls:
        yield from batches_of(url, names, dialect, first=urls[0])


def batches_of(url: str, names: Sequence[str], dialect: Dialect, *, first: str) -> Iterator[pa.RecordBatch]:
    """As `batches`, of one file, which has the columns that the first one has."""
    schema = tables.read_schema(url, dialect)
    if missing := [name for name in names if name not in schema.names]:
        raise InputError(f"{url}: column {missing[0]!r} is missing, which {first} has; name files of one kind")
    ordered = [name for name in schema.names if name in names]
    raw = tables.read_rows(url, schema, ordered, numbers=(), query=ordered[0], dialect=dialect, batch_rows=_BATCH)
    yield from (each.rows for each in raw)


def _column(name: str, kind: pa.DataType, values: pa.Array, dialect: Dialect) -> LogColumn:
    if pa.types.is_nested(kind):
        return LogColumn(name, kind, len(values), 0.0, 0, False, 0.0, 0.0, 0.0, (), ())
    counted = values.drop_null().value_counts()
    known, counts_V = counted.field("values"), counted.field("counts").to_numpy()
    numbers_V = _values(known, dialect) if cols.is_number(kind) else np.zeros(0)
    bad_V = np.zeros(len(known), bool)
    if len(numbers_V) and not pa.types.is_boolean(kind):
        bad_V = ~np.isfinite(numbers_V)
    elif cols.is_text(kind):
        bad_V = cols.texts(known)[1]  # what is not UTF-8
    formats, seconds_V, bad_V = _times(known, kind, bad_V)
    numbers_V = numbers_V[np.isfinite(numbers_V)]
    if pa.types.is_boolean(kind):
        numbers_V = np.array([0.0, 1.0])
    texts = cols.texts(known.slice(0, _TRIED))[0].drop_null().to_pylist() if _readable(kind) else []
    return LogColumn(
        name=name,
        type=kind,
        rows=len(values),
        missing=values.null_count / len(values),
        distinct=len(known),
        whole=bool((numbers_V == np.floor(numbers_V)).all()),
        least=float(numbers_V.min(initial=np.inf)),
        most=float(numbers_V.max(initial=-np.inf)),
        length=float(np.mean([len(text) for text in texts])) if texts else 0.0,
        formats=formats,
        values=tuple(texts),
        bad=float(counts_V[bad_V].sum() / len(values)),
        days=float(np.ptp(np.quantile(seconds_V, [0.01, 0.99]))) / 86400 if len(seconds_V) else 0.0,
    )


def _values(known: pa.Array, dialect: Dialect) -> NDArray[np.float64]:
    """The numbers of a column's distinct values, NaN for what is none."""
    if not cols.is_text(known.type):
        values_V: NDArray[np.float64] = known.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return values_V
    return np.array([dialect.value(text) if dialect.number(text) else np.nan for text in known.to_pylist()])


def _readable(kind: pa.DataType) -> bool:
    return cols.is_text(kind) or cols.is_number(kind)


def _times(
    known: pa.Array, kind: pa.DataType, bad_V: NDArray[np.bool_]
) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.bool_]]:
    """The formats of a column's distinct values, their times in the best one, and those that are none.

    `bad_V` are the values that are no numbers, which stay the bad ones where the column is none of times.
    """
    tried, formats = known.slice(0, _TRIED), []
    if len(tried) and (_readable(kind) or _is_stamp(kind)):
        shares = {form: _share_of_times(tried, kind, form) for form in _forms_of(kind)}
        formats = sorted((form for form, share in shares.items() if share >= 1 - _STRAY), key=lambda f: -shares[f])
    if not formats:
        return (), np.zeros(0, np.int64), bad_V
    seconds_V, bad_V = instants(known, Clock(formats=tuple(formats[:1])))
    return tuple(formats), seconds_V[~bad_V], bad_V


def _is_stamp(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _forms_of(kind: pa.DataType) -> tuple[str, ...]:
    if _is_stamp(kind):
        return (ISO,)
    return (ISO, _DIGITS) if cols.is_number(kind) else _FORMATS


def _share_of_times(values: pa.Array, kind: pa.DataType, form: str) -> float:
    """The share of values that a format can read as times of our days."""
    if _is_stamp(kind):
        return 1.0
    seconds_N, bad_N = instants(values, Clock(formats=(form,)))
    texts_N = cols.texts(values)[0]
    number = cols.is_number(kind)
    digits_N = number | pc.match_substring_regex(texts_N, _NUMBER).fill_null(False).to_numpy(zero_copy_only=False)
    if form == _DIGITS:  # strptime would read 1001 as January of the year 1001 or so
        bad_N = bad_N | ~pc.match_substring_regex(texts_N, r"^\d{8}$").fill_null(False).to_numpy(zero_copy_only=False)
    recent_N = (seconds_N >= _EPOCHS[0]) & (seconds_N <= _EPOCHS[1])  # ids are digits, too
    return float((~bad_N & (recent_N | ~digits_N)).mean())
