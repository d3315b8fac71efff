"""Looks at the first rows of a raw log: its form, and what its columns hold.

Shapes: N rows, V different values.
"""

import codecs
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale import storage
from ltrscale.arrays import Bools, Ints
from ltrscale.data import columns as cols
from ltrscale.data.times import DAY_NUMBER, ISO, USUAL_FORMATS, Clock, instants
from ltrscale.data.vectors import Vectors, lists_of_texts, vector_size
from ltrscale.errors import InputError
from ltrscale.ingest import names
from ltrscale.ingest.csv_lines import Dialect, broken_lines
from ltrscale.ingest.lines import UTF8, line_blocks
from ltrscale.ingest.tables import read_rows, read_schema, usual_delimiter
from ltrscale.progress import log, progress
from ltrscale.texts import MOST_BYTES

_BATCH = 1 << 16
_VALUES = 1 << 27
"""Values in memory at once, 8 bytes each: with more than 128 columns, fewer rows are looked at."""
_TRIED = 200
_EPOCHS = 946_684_800, 2_208_988_800
"""The years 2000 to 2040, in seconds: numbers that may be times."""
_NUMBER = r"^[-+]?\d*[.,]?\d+(e[-+]?\d+)?$"
_LINE_BYTES = 12
"""Of a column in a config, beside its name."""
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")
"""Unicode classes of characters that do not occur in a line of text."""
_DIGITS = r"\d(\D*\d){3}"
"""The fewest digits that any time format reads."""
_STRAY = 0.05
"""Share of values in a time column that may not be times."""


@dataclass(frozen=True)
class LogColumn:
    """A column in the first rows of a log.

    `formats` are the time formats that read all but a few of its values, best first. `bad` is the share of rows with a
    value that is not a time in a time column, or not a number in a numeric one. `days` is the span of its times.
    """

    name: str
    type: pa.DataType
    rows: int
    missing: float = 0.0
    distinct: int = 0
    whole: bool = False
    least: float = 0.0
    most: float = 0.0
    length: float = 0.0
    formats: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    bad: float = 0.0
    days: float = 0.0
    lacking: str = ""
    """A file that lacks the column, if there is one."""
    size: int = 0
    """Length of its lists, if it holds vectors."""

    def like(self, *patterns: str) -> bool:
        """True if the plain form of its name matches one of the patterns."""
        return names.has(self.name, *patterns)

    @property
    def is_label(self) -> bool:
        """True if it is named like what happened after the list was shown, not before."""
        return names.label_points(self.name) > 0

    @property
    def few(self) -> bool:
        """True if it has as few distinct values as grades have."""
        return self.distinct <= names.MOST_GRADES

    @property
    def names_one(self) -> bool:
        """True if it is named like an identifier."""
        return self.like(names.IDENTIFIER, names.PERSON)

    @property
    def is_asked(self) -> bool:
        """True if it is named like the text of a query."""
        return self.like(names.ASKED)

    @property
    def is_time(self) -> bool:
        """True if it holds times; digits also need a time's name, since ids are numbers of the same size."""
        return bool(self.formats) and (not self.digits or self.like(names.TIME))

    @property
    def numeric(self) -> bool:
        """True if it holds numbers."""
        return cols.is_number(self.type) and not pa.types.is_null(self.type)

    @property
    def digits(self) -> bool:
        """True if it holds numbers, perhaps as text."""
        return self.numeric or (
            bool(self.values) and all(value.isascii() and value.isdecimal() for value in self.values)
        )

    @property
    def clock(self) -> bool:
        """True if its times have hours: row times do, while other dates often have days only."""
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
    """The dialect of a CSV file, guessed from its beginning; `header` has the names if its first line is a row."""
    lines = next(line_blocks(url, size=1 << 20), None)
    if lines is None:
        raise InputError(f"{url}: the file is empty; choose another one")
    encoding = _encoding(lines.text)
    line = lines.text.partition(b"\n")[0].decode(encoding, errors="replace")
    delimiter = max((usual_delimiter(url), ",", ";", "\t", "|"), key=line.count)
    marks = "." if delimiter == "," else ".,"
    forms = [Dialect(delimiter, mark, encoding, header=header) for mark in marks]
    dialect = max(forms, key=lambda form: sum(map(pa.types.is_floating, read_schema(url, form).types)))
    if n := int(broken_lines(lines, dialect)[1].sum()):
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
    """The columns of a file, as `read_schema` gives them; an InputError if a config cannot list their names."""
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


def files_of(urls: Sequence[str], dialect: Dialect) -> dict[str, pa.Schema]:
    """The columns of each file of a log, files with the most columns first, since later files may add some."""
    schemas = dict(zip(urls, storage.at_once(lambda url: named_schema(url, dialect), urls), strict=True))
    ordered = dict(sorted(schemas.items(), key=lambda item: -len(item[1])))
    first = next(iter(ordered))
    for url, schema in ordered.items():
        present = {*schema.names}
        if len(present) < len(schema):
            raise InputError(f"{url}: two columns have the same name; rename all but one")
        missing = [name for name in ordered[first].names if name not in present]
        if 2 * len(missing) > len(ordered[first]):
            raise InputError(f"{url}: column {missing[0]!r} is missing, which {first} has; name files of one kind")
    return ordered


def first_columns(files: Mapping[str, pa.Schema], dialect: Dialect, rows: int) -> list[LogColumn]:
    """The columns of all files (from `files_of`), from the first rows of each file, or of some if there are many."""
    schema, first = _united(files), next(iter(files))
    rows = rows_looked_at(len(schema), rows)
    looked_at, parts, size = _spread(files), list[pa.Table](), 0
    for number, url in enumerate(looked_at):
        quota = -(-(rows - sum(map(len, parts))) // (len(looked_at) - number))
        for batch in batches_of(url, schema.names, dialect, first=first):
            part = pa.table({name: cols.without_dictionary(batch.column(name)) for name in schema.names})
            parts.append(part.slice(0, quota))
            quota -= len(parts[-1])
            size += parts[-1].nbytes
            if quota <= 0 or size >= 8 * _VALUES:  # long lists fill memory early
                break
    if not sum(map(len, parts)):
        raise InputError(f"{first}: no rows; choose another file")
    try:  # one file may have integers or nulls, another fractions
        sample = pa.concat_tables(parts, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise InputError(
            f"{first}: a column has another type in other files: {error}; name files of one kind"
        ) from error
    columns = columns_of(sample, sample.schema if first.endswith(".parquet") else schema, dialect)
    lacking = {name: url for url, each in reversed([*files.items()]) for name in {*schema.names} - {*each.names}}
    return [replace(column, lacking=lacking.get(column.name, "")) for column in columns]


_FILES = 64
"""Files to read rows from, besides those that first have a column."""


def _spread(files: Mapping[str, pa.Schema]) -> list[str]:
    """Some of the files at equal distances, and the first that has each column."""
    urls = [*files]
    firsts = {name: url for url, schema in reversed([*files.items()]) for name in schema.names}
    chosen = {*firsts.values(), *urls[:: -(-len(urls) // _FILES)]}
    return [url for url in urls if url in chosen]


def _united(files: Mapping[str, pa.Schema]) -> pa.Schema:
    """The columns of all files; a column that is a number in one file and text in another is text."""
    kinds: dict[str, pa.DataType] = {}
    for schema in files.values():
        for name, kind in zip(schema.names, map(cols.value_type, schema.types), strict=True):
            try:
                kinds[name] = cols.wider_type(name, kinds.get(name, kind), kind, "", "")
            except InputError:
                kinds[name] = pa.string()
    return pa.schema(list(kinds.items()))


def columns_of(rows: pa.Table, schema: pa.Schema, dialect: Dialect) -> list[LogColumn]:
    """The columns of at least one row; the schema says which text columns hold numbers."""
    columns = []
    with progress("columns", len(schema), "columns") as advance:
        for name, kind, values in zip(schema.names, schema.types, rows.columns, strict=True):
            plain = cols.without_dictionary(values.combine_chunks())
            columns.append(_column(name, cols.value_type(kind), plain, dialect))
            advance(1)
    return columns


def batches_of(
    url: str, names: Sequence[str], dialect: Dialect, *, first: str | None = None
) -> Iterator[pa.RecordBatch]:
    """Some columns of a file, null if it lacks one that the `first` file has.

    Columns of text files stay text, since float32 cannot distinguish long ids.
    """
    schema, wanted = read_schema(url, dialect), {*names}
    ordered = [name for name in schema.names if name in wanted]
    if not ordered:
        raise InputError(f"{url}: column {names[0]!r} is missing, which {first} has; name files of one kind")
    lacking = [name for name in names if name not in {*ordered}]
    raw = read_rows(
        url,
        schema,
        ordered,
        numbers=(),
        query=ordered[0],
        dialect=dialect,
        batch_rows=rows_looked_at(len(ordered), _BATCH),
    )
    for each in raw:
        batch = each.rows
        for name in lacking:
            batch = batch.append_column(name, pa.nulls(len(batch)))
        yield batch


def _column(name: str, kind: pa.DataType, values: pa.Array, dialect: Dialect) -> LogColumn:
    if not cols.is_single(kind):
        return _list_column(name, kind, values)
    if cols.is_text(kind) and cols.is_text(values.type) and (column := _list_column(name, kind, values)).size:
        return column
    values = without_nan(values)
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
    if cols.is_text(kind) and counts_V[bad_V].sum() > counts_V.sum() / 2:  # bytes, not text
        return LogColumn(name, kind, len(values))
    formats, seconds_V, bad_V = _times(distinct_values, kind, bad_V)
    numbers_V = numbers_V[np.isfinite(numbers_V)]
    if pa.types.is_boolean(kind):
        numbers_V = np.array([0.0, 1.0])
    readable = cols.is_text(kind) or cols.is_number(kind)
    texts = cols.texts(distinct_values.slice(0, _TRIED))[0].drop_null().to_pylist() if readable else []
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
    column = LogColumn(name, kind, len(values), values.null_count / len(values))
    broken_N = np.zeros(len(values), bool)
    if cols.is_text(kind):
        if not pc.any(pc.starts_with(cols.texts(values.slice(0, _TRIED))[0], "[")).as_py():
            return column
        values, broken_N = lists_of_texts(values)
    if not (size := vector_size(values)):
        return column
    found = Vectors(values)
    bad_N = broken_N | found.broken_N | ((found.lengths_N >= 0) & (found.lengths_N != size))
    return replace(column, size=size, bad=float(bad_N.mean()))


def _times(distinct_values: pa.Array, kind: pa.DataType, bad_V: Bools) -> tuple[tuple[str, ...], Ints, Bools]:
    """The time formats of distinct values, their times in the best format, and a mask of values that are not times."""
    tried, formats = distinct_values.slice(0, _TRIED), list[str]()
    if (pa.types.is_timestamp(kind) or pa.types.is_date(kind)) and len(tried):
        formats = [ISO]
    elif len(tried) and (cols.is_number(kind) or (cols.is_text(kind) and _have_digits(tried))):
        forms = (ISO, DAY_NUMBER) if cols.is_number(kind) else USUAL_FORMATS
        shares = {form: _share_of_times(tried, kind, form) for form in forms}
        formats = sorted((form for form, share in shares.items() if share >= 1 - _STRAY), key=lambda f: -shares[f])
    if not formats:
        return (), np.zeros(0, np.int64), bad_V
    seconds_V, bad_V = instants(distinct_values, Clock(formats=tuple(formats[:1])))
    return tuple(formats), seconds_V[~bad_V], bad_V


def _have_digits(texts: pa.Array) -> bool:
    """Quickly check if texts have enough digits for times, because trying all formats takes long."""
    found_N = pc.match_substring_regex(cols.texts(texts)[0], _DIGITS).fill_null(False)
    return bool(found_N.to_numpy(zero_copy_only=False).mean() >= 1 - _STRAY)


def _share_of_times(values: pa.Array, kind: pa.DataType, form: str) -> float:
    """The share of values that a format can read as recent times."""
    seconds_N, bad_N = instants(values, Clock(formats=(form,)))
    texts_N = cols.texts(values)[0]
    number = cols.is_number(kind)
    digits_N = number | pc.match_substring_regex(texts_N, _NUMBER).fill_null(False).to_numpy(zero_copy_only=False)
    if form == DAY_NUMBER:  # strptime would read 1001 as a date around the year 1001
        bad_N = bad_N | ~pc.match_substring_regex(texts_N, r"^\d{8}$").fill_null(False).to_numpy(zero_copy_only=False)
    recent_N = (seconds_N >= _EPOCHS[0]) & (seconds_N <= _EPOCHS[1])  # ids are digits too
    return float((~bad_N & (recent_N | ~digits_N)).mean())


def rows_looked_at(columns: int, most: int) -> int:
    """The number of rows to look at: `most`, or as many as fit in memory with this number of columns."""
    return max(1, min(most, _VALUES // max(columns, 1)))


def without_nan(column: pa.Array) -> pa.Array:
    """The column with null for NaN."""
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
