"""Looks at a raw log: its form, its columns, and how these divide its rows.

Rows come in runs of equal values and in lists, in which a column varies or repeats.

Shapes: N rows, V different values, L rows of a sample of whole lists, Q lists in it.
"""

import codecs
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.config import MOST_BYTES
from ltrscale.data import columns as cols
from ltrscale.data.times import DAY_NUMBER, ISO, USUAL_FORMATS, Clock, instants
from ltrscale.data.vectors import Vectors, vector_size
from ltrscale.errors import InputError
from ltrscale.ingest.csvjson import Dialect, broken_lines
from ltrscale.ingest.lines import UTF8, Lines, read_lines
from ltrscale.ingest.tables import read_rows, read_schema
from ltrscale.progress import log, progress

_BATCH = 1 << 16
_TRIED = 200
_EPOCHS = 946_684_800, 2_208_988_800
"""The years 2000 to 2040, in seconds: numbers that may be times."""
_NUMBER = r"^[-+]?\d*[.,]?\d+(e[-+]?\d+)?$"
_LINE_BYTES = 12
"""Of a column in a config, beside its name."""
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")
"""Classes of characters that are no part of a line of text, in Unicode."""
_DIGITS = r"\d(\D*\d){3}"
"""The digits that every format of times reads at least."""
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
    size: int = 0
    """Numbers of each of its lists, where it holds vectors."""

    @property
    def numeric(self) -> bool:
        """Whether it holds numbers."""
        return cols.is_number(self.type) and not pa.types.is_null(self.type)

    @property
    def digits(self) -> bool:
        """Whether it holds numbers, perhaps as text."""
        return self.numeric or (
            bool(self.values) and all(value.isascii() and value.isdecimal() for value in self.values)
        )

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
        if self.size:
            return f"lists of {self.size:,} numbers{missing}"
        if self.numeric:
            return f"{self.least:g} to {self.most:g}{missing}"
        examples = ", ".join(value[:20] for value in self.values[:3])
        return " ".join(f"{self.distinct:,} values, such as {examples}{missing}".split())


def dialect_of(url: str, header: tuple[str, ...] = ()) -> Dialect:
    """The form of a CSV file, from its beginning; `header` has the names where its first line is a row."""
    piece = next(read_lines(url, size=1 << 20), None)
    if piece is None:
        raise InputError(f"{url}: the file is empty; choose another one")
    encoding = _encoding(piece.text)
    line = piece.text.partition(b"\n")[0].decode(encoding, errors="replace")
    usual = "\t" if ".tsv" in url else ","
    delimiter = max((usual, ",", ";", "\t", "|"), key=line.count)
    marks = "." if delimiter == "," else ".,"
    forms = [Dialect(delimiter, mark, encoding, header=header) for mark in marks]
    dialect = max(forms, key=lambda form: sum(map(pa.types.is_floating, read_schema(url, form).types)))
    if n := int(broken_lines(Lines(piece.text, 1, piece.share), dialect)[1].sum()):
        log.warning(
            "%s: %s of its first lines end within quotes and are rejected with those that follow: write line ends in "
            "fields as blanks, or the file as Parquet or JSON lines",
            *(url, f"{n:,}"),
        )
    return dialect


def _encoding(text: bytes) -> str:
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:
        text.decode()
    except UnicodeDecodeError:
        return "cp1252"
    return UTF8


def named_schema(url: str, dialect: Dialect) -> pa.Schema:
    """The columns of a file, whose names a config can list.

    Raises:
        InputError: as `read_schema`, a name has a character such as a line end, or there are too many.
    """
    schema = read_schema(url, dialect)
    if sum(len(name.encode()) + _LINE_BYTES for name in schema.names) > MOST_BYTES:
        raise InputError(
            f"{url}: {len(schema.names):,} columns are more than a config can name in its {MOST_BYTES:,} bytes; leave "
            "some out, or write a prepare.yaml that names them by patterns, such as features: [f_*]"
        )
    for name in schema.names:
        if not name.isprintable() and any(unicodedata.category(c) in _CONTROLS for c in name):
            raise InputError(f"{url}: the column {name[:200]!r} has a control character in its name; rename it")
    return schema


def first_columns(urls: Sequence[str], dialect: Dialect, rows: int) -> list[LogColumn]:
    """The columns of the first file, in the first rows of all.

    Raises:
        InputError: a file cannot be read or is of another kind than the first, or there are no rows.
    """
    schema = named_schema(urls[0], dialect)
    if len(set(schema.names)) < len(schema.names):
        raise InputError(f"{urls[0]}: two columns have the same name; rename all but one")
    first: list[pa.Table] = []
    rows = rows_looked_at(len(schema), rows)
    for batch in batches(urls, schema.names, dialect):
        first.append(pa.table({name: cols.without_dictionary(batch.column(name)) for name in schema.names}))
        if sum(map(len, first)) >= rows or sum(table.nbytes for table in first) >= 8 * _VALUES:  # of long lists
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
    columns = []
    with progress("columns", len(schema), "columns") as advance:
        for name, kind, values in zip(schema.names, schema.types, rows.columns, strict=True):
            plain = cols.without_dictionary(values.combine_chunks())
            columns.append(_column(name, cols.value_type(kind), plain, dialect))
            advance(1)
    return columns


def batches(urls: Sequence[str], names: Sequence[str], dialect: Dialect) -> Iterator[pa.RecordBatch]:
    """Some columns of files; those of a text file as text, since float32 cannot tell long ids apart.

    Raises:
        InputError: a file lacks a column that the first one has.
    """
    for url in urls:
        yield from batches_of(url, names, dialect, first=urls[0])


def batches_of(url: str, names: Sequence[str], dialect: Dialect, *, first: str) -> Iterator[pa.RecordBatch]:
    """As `batches`, of one file, which has the columns that the first one has."""
    schema = read_schema(url, dialect)
    wanted, present = {*names}, {*schema.names}
    if missing := [name for name in names if name not in present]:
        raise InputError(f"{url}: column {missing[0]!r} is missing, which {first} has; name files of one kind")
    ordered = [name for name in schema.names if name in wanted]
    raw = read_rows(
        url,
        schema,
        ordered,
        numbers=(),
        query=ordered[0],
        dialect=dialect,
        batch_rows=rows_looked_at(len(ordered), _BATCH),
    )
    yield from (each.rows for each in raw)


def _column(name: str, kind: pa.DataType, values: pa.Array, dialect: Dialect) -> LogColumn:
    if not cols.is_single(kind):
        return _list_column(name, kind, values)
    values = _without_nan(values)
    counted = values.drop_null().value_counts()
    distinct_values, counts_V = counted.field("values"), counted.field("counts").to_numpy()
    if not cols.is_number(kind):
        numbers_V = np.zeros(0)
    elif cols.is_text(distinct_values.type):
        texts = distinct_values.to_pylist()
        numbers_V = np.array([dialect.value(text) if dialect.number(text) else np.nan for text in texts])
    else:
        numbers_V = distinct_values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    bad_V = np.zeros(len(distinct_values), bool)
    if len(numbers_V) and not pa.types.is_boolean(kind):
        bad_V = ~np.isfinite(numbers_V)
    elif cols.is_text(kind):
        bad_V = cols.texts(distinct_values)[1]  # what is not UTF-8
    if cols.is_text(kind) and counts_V[bad_V].sum() > counts_V.sum() / 2:  # bytes that are no text
        return LogColumn(name, kind, len(values), 0.0, 0, False, 0.0, 0.0, 0.0, (), ())
    formats, seconds_V, bad_V = _times(distinct_values, kind, bad_V)
    numbers_V = numbers_V[np.isfinite(numbers_V)]
    if pa.types.is_boolean(kind):
        numbers_V = np.array([0.0, 1.0])
    texts = cols.texts(distinct_values.slice(0, _TRIED))[0].drop_null().to_pylist() if _readable(kind) else []
    return LogColumn(
        name=name,
        type=kind,
        rows=len(values),
        missing=values.null_count / len(values),
        distinct=len(distinct_values),
        whole=bool((numbers_V == np.floor(numbers_V)).all()),
        least=float(numbers_V.min(initial=np.inf)),
        most=float(numbers_V.max(initial=-np.inf)),
        length=float(np.mean([len(text) for text in texts])) if texts else 0.0,
        formats=formats,
        values=tuple(texts),
        bad=float(counts_V[bad_V].sum() / len(values)),
        days=float(np.ptp(np.quantile(seconds_V, [0.01, 0.99]))) / 86400 if len(seconds_V) else 0.0,
    )


def _list_column(name: str, kind: pa.DataType, values: pa.Array) -> LogColumn:
    column = LogColumn(name, kind, len(values), values.null_count / len(values), 0, False, 0.0, 0.0, 0.0, (), ())
    if not (size := vector_size(values)):
        return column
    found = Vectors(values)
    bad_N = found.broken_N | ((found.lengths_N >= 0) & (found.lengths_N != size))
    return replace(column, size=size, bad=float(bad_N.mean()))


def _readable(kind: pa.DataType) -> bool:
    return cols.is_text(kind) or cols.is_number(kind)


def _times(
    distinct_values: pa.Array, kind: pa.DataType, bad_V: NDArray[np.bool_]
) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.bool_]]:
    """The formats of a column's distinct values, their times in the best one, and those that are not times.

    `bad_V` are the values that are not numbers, which stay the bad ones where the column has no times.
    """
    tried, formats = distinct_values.slice(0, _TRIED), []
    if len(tried) and (_readable(kind) or _is_stamp(kind)) and _may_be_times(tried, kind):
        forms = (ISO,) if _is_stamp(kind) else (ISO, DAY_NUMBER) if cols.is_number(kind) else USUAL_FORMATS
        shares = {form: _share_of_times(tried, kind, form) for form in forms}
        formats = sorted((form for form, share in shares.items() if share >= 1 - _STRAY), key=lambda f: -shares[f])
    if not formats:
        return (), np.zeros(0, np.int64), bad_V
    seconds_V, bad_V = instants(distinct_values, Clock(formats=tuple(formats[:1])))
    return tuple(formats), seconds_V[~bad_V], bad_V


def _may_be_times(values: pa.Array, kind: pa.DataType) -> bool:
    """Whether texts have digits enough, which is soon seen; to try all formats takes long."""
    if not cols.is_text(kind):
        return True
    found_N = pc.match_substring_regex(cols.texts(values)[0], _DIGITS).fill_null(False)
    return bool(found_N.to_numpy(zero_copy_only=False).mean() >= 1 - _STRAY)


def _is_stamp(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _share_of_times(values: pa.Array, kind: pa.DataType, form: str) -> float:
    """The share of values that a format can read as times of our days."""
    if _is_stamp(kind):
        return 1.0
    seconds_N, bad_N = instants(values, Clock(formats=(form,)))
    texts_N = cols.texts(values)[0]
    number = cols.is_number(kind)
    digits_N = number | pc.match_substring_regex(texts_N, _NUMBER).fill_null(False).to_numpy(zero_copy_only=False)
    if form == DAY_NUMBER:  # strptime would read 1001 as January of the year 1001 or so
        bad_N = bad_N | ~pc.match_substring_regex(texts_N, r"^\d{8}$").fill_null(False).to_numpy(zero_copy_only=False)
    recent_N = (seconds_N >= _EPOCHS[0]) & (seconds_N <= _EPOCHS[1])  # ids are digits, too
    return float((~bad_N & (recent_N | ~digits_N)).mean())


ValueCodes = NDArray[np.int64]

_LOOKED_AT = 1 << 20
SAMPLED = 200_000
"""Rows of the lists of a key that are looked at, about."""
_VALUES = 1 << 27
"""Values in memory at once, of 8 bytes each: of a log with more than 128 columns fewer rows are looked at."""


def rows_looked_at(columns: int, most: int) -> int:
    """The rows to look at of a number of columns: `most`, or as many as memory has room for."""
    return max(1, min(most, _VALUES // max(columns, 1)))


@dataclass(frozen=True)
class KeyLists:
    """The rows of some values of a key, by these values."""

    rows_L: ValueCodes
    starts_Q: ValueCodes
    distinct: int
    """Values of the key, in all rows."""
    paired: float
    """Share of all rows whose value comes again."""
    together: float
    """Of the places where a row could stand beside one with its value, the share where it does."""
    runs: int
    """Runs of equal values, in all rows."""

    @classmethod
    def of(cls, codes_N: ValueCodes, sample: int = SAMPLED) -> "KeyLists":
        """The lists of a key, a sample of about `sample` rows; -1 means none."""
        valid_N = codes_N[codes_N >= 0]
        n, lengths_V = len(valid_N), np.bincount(valid_N)
        distinct = int(np.count_nonzero(lengths_V))
        runs = 1 + int(np.count_nonzero(np.diff(valid_N))) if n else 0
        together = (n - runs) / (n - distinct) if n > distinct else 0.0
        # whole lists of a sample of the values, list by list
        stride = -(-len(codes_N) // sample) or 1
        rows = np.flatnonzero((codes_N >= 0) & (codes_N % stride == 0))
        rows_L = rows[np.argsort(codes_N[rows], kind="stable")]
        starts_Q = np.flatnonzero(np.diff(codes_N[rows_L], prepend=-1))
        paired = float(lengths_V[lengths_V > 1].sum() / max(n, 1))
        return cls(rows_L, starts_Q, distinct, paired, together, runs)

    def constant(self, codes_N: ValueCodes) -> float:
        """Share of the lists with several rows in which a column has a single value."""
        least_Q, most_Q, several_Q = self._ends(codes_N)
        return float((least_Q == most_Q)[several_Q].mean()) if several_Q.any() else 1.0

    def spread(self, seconds_N: ValueCodes) -> float:
        """Seconds from the first to the last time of a list, the median over lists with several rows."""
        least_Q, most_Q, several_Q = self._ends(seconds_N)
        return float(np.median((most_Q - least_Q)[several_Q])) if several_Q.any() else 0.0

    def having(self, true_N: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The number of rows of each list for which something holds."""
        return np.asarray(np.add.reduceat(true_N[self.rows_L].astype(np.int64), self.starts_Q))

    def repeats(self, codes_N: ValueCodes) -> float:
        """Share of the rows with a value that another row of their list has had."""
        codes_L = codes_N[self.rows_L]
        list_L = np.repeat(np.arange(len(self.starts_Q)), self._lengths_Q)
        valid_L = codes_L >= 0
        if not valid_L.any():
            return 0.0
        pairs = np.sort(list_L[valid_L] * (int(codes_L.max()) + 1) + codes_L[valid_L])
        return float(np.count_nonzero(pairs[1:] == pairs[:-1])) / len(pairs)

    def _ends(self, values_N: ValueCodes) -> tuple[ValueCodes, ValueCodes, NDArray[np.bool_]]:
        values_L = values_N[self.rows_L]
        if not len(values_L):
            return values_L, values_L, values_L > 0
        ends = np.minimum.reduceat(values_L, self.starts_Q), np.maximum.reduceat(values_L, self.starts_Q)
        return *ends, self._lengths_Q > 1

    @property
    def _lengths_Q(self) -> ValueCodes:
        return np.diff([*self.starts_Q, len(self.rows_L)])


@dataclass(frozen=True)
class Structure:
    """Columns of many rows as numbers: equal values have equal numbers from 0 on, and -1 means none."""

    codes: Mapping[str, ValueCodes]
    values: Mapping[str, pa.Array]
    """The distinct values of each column, by number."""
    files: tuple[int, ...] = (0,)
    """The row with which each file begins."""
    whole: bool = True
    """Whether these are all rows."""
    dialect: Dialect = field(default_factory=Dialect)
    """The form in which a file of text has numbers."""
    _lists: dict[str, KeyLists] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.codes

    def lists(self, name: str) -> KeyLists:
        """The lists of a column."""
        if name not in self._lists:
            self._lists[name] = KeyLists.of(self.codes[name])
        return self._lists[name]

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, by row; NaN for what is none."""
        values = self.values[name]
        if cols.is_text(values.type):
            numbers_V = np.array([self.dialect.value(text) for text in values.to_pylist()])
        else:
            numbers_V = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return np.asarray(np.append(numbers_V, np.nan)[self.codes[name]], np.float64)

    def seconds(self, column: LogColumn) -> ValueCodes:
        """A column of times in seconds since 1970, by row, 0 for what is none."""
        seconds_V, _ = instants(self.values[column.name], Clock(formats=column.formats[:1]))
        return np.asarray(np.append(seconds_V, 0)[self.codes[column.name]])

    def decides(self, name: str, other: str) -> bool:
        """Whether each value of a column always has the same value of another; a few slips do not count."""
        codes_N, other_N = self.codes[name], self.codes[other]
        lists = self.lists(name)
        return len(lists.rows_L) > len(lists.starts_Q) and lists.constant(other_N) > 0.97 and codes_N is not other_N

    def joined(self, name: str, others: Sequence[str]) -> ValueCodes:
        """The numbers of the combinations of several columns; -1 where one of them has none."""
        codes_N = self.codes[name]
        for other in others:
            valid_N = (codes_N >= 0) & (self.codes[other] >= 0)
            pairs = codes_N[valid_N] * (int(self.codes[other].max()) + 1) + self.codes[other][valid_N]
            codes_N = np.full(len(codes_N), -1, np.int64)
            codes_N[valid_N] = np.unique(pairs, return_inverse=True)[1]
        return codes_N


def of_table(rows: pa.Table) -> Structure:
    """The structure of at least one row in memory; columns without single values, such as lists, have none."""
    plain = [each.name for each in rows.schema if cols.is_single(each.type)]
    return _built({name: [_dictionary(chunk) for chunk in rows[name].chunks] for name in plain}, [0], whole=True)


def read_structure(
    urls: Sequence[str],
    names: Sequence[str],
    dialect: Dialect,
    rows: int | None = _LOOKED_AT,
    kept_N: NDArray[np.bool_] | None = None,
) -> Structure:
    """The structure of some columns in the first rows of a log, in all of them, or in those that are kept of all.

    Memory grows with the rows that are kept, 8 bytes for each value, and with the distinct values.
    """
    parts: dict[str, list[pa.DictionaryArray]] = {name: [] for name in names}
    most = None if rows is None else rows_looked_at(len(names), rows)
    n, last = 0, most if kept_N is None else int(np.flatnonzero(kept_N).max(initial=0)) + 1
    files: list[int] = []
    for url in urls:
        files.append(n)
        for batch in batches_of(url, names, dialect, first=urls[0]):
            kept = batch if kept_N is None else batch.filter(pa.array(kept_N[n : n + len(batch)]))
            for name, chunks in parts.items():
                chunks.append(_dictionary(kept.column(name)))
            n += len(batch)
            if last is not None and n >= last:
                return replace(_built(parts, files, whole=False), dialect=dialect)
    return replace(_built(parts, files, whole=True), dialect=dialect)


def _dictionary(column: pa.Array) -> pa.DictionaryArray:
    column = cols.without_dictionary(column)
    if pa.types.is_null(column.type):
        return pa.DictionaryArray.from_arrays(pa.nulls(len(column), pa.int32()), pa.nulls(0))
    if cols.is_text(column.type):
        column = cols.texts(column)[0]
    return _without_nan(column).dictionary_encode()


def _without_nan(column: pa.Array) -> pa.Array:
    """The column with null for NaN, which is no value either."""
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)


def _built(parts: Mapping[str, Sequence[pa.DictionaryArray]], files: Sequence[int], *, whole: bool) -> Structure:
    codes, values = {}, {}
    for name, chunks in parts.items():
        one = pa.chunked_array(_alike(chunks)).unify_dictionaries().combine_chunks()
        codes[name] = one.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        values[name] = one.dictionary
    return Structure(codes, values, tuple(files), whole)


def _alike(chunks: Sequence[pa.DictionaryArray]) -> Sequence[pa.DictionaryArray]:
    """The chunks with values of one type: one file may have integers, or nothing, where another has fractions."""
    kinds = {chunk.type.value_type for chunk in chunks}
    if len(kinds) == 1:
        return chunks
    try:
        schemas = [pa.schema([("values", kind)]) for kind in kinds]
        kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowTypeError:
        kind = pa.string()  # an id is a number in one file and text in another
    return [pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(kind)) for chunk in chunks]
