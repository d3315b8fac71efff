"""CSV text: the types of a file's columns, and its rows (see `lines.TextReader`).

A line is a row: quoted fields must not contain line ends, and lines that a CSV reader could take for the start of a
longer record are rejected.

Shapes: M lines of a block.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from ltrscale.arrays import Bools, Ints
from ltrscale.data.columns import is_number_text
from ltrscale.errors import InputError
from ltrscale.ingest.lines import SNIFFED_LINES, UTF8, Lines, TextReader, line_blocks
from ltrscale.ingest.rows import Cause

NULLS = ("", "NULL", "Null", "null", "NaN", "Nan", "nan", "NAN")
"""Fields that mean a missing value, in any column."""

_TRUE, _FALSE = ("true", "yes", "t", "y"), ("false", "no", "f", "n")
"""Words for booleans, in any case. Except for true and false, a column must have both words of a pair: a column of
countries may have nothing but NO."""

_MISPLACED = "a quote, carriage return or NUL out of place, or too long a line"
_OPEN = (
    "a quoted field that does not end in its line: line ends within quotes are not read; write them as blanks, or the "
    "file as Parquet or JSON lines"
)
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'


@dataclass(frozen=True)
class Dialect:
    """The form of a CSV file: separator of fields, decimal mark, encoding, and whether quotes enclose fields.

    `header` has the column names if the first line is a row.
    """

    delimiter: str = ","
    decimal: str = "."
    encoding: str = UTF8
    quotes: bool = True
    header: tuple[str, ...] = ()

    def number(self, value: str) -> bool:
        """True if a field is a number."""
        if self.decimal != ".":
            value = value.replace(".", "_").replace(self.decimal, ".")
        return is_number_text(value)

    def value(self, text: str) -> float:
        """A field as a number, or the word of a boolean as 1 or 0; NaN for any other text.

        Example:
            >>> [Dialect(decimal=",").value(text) for text in ("1,5", "True", "no", "1.5")]
            [1.5, 1.0, 0.0, nan]
        """
        if self.number(text):
            return float(text.replace(self.decimal, "."))
        word = text.strip().lower()
        return 1.0 if word in _TRUE else 0.0 if word in _FALSE else math.nan


def csv_schema(url: str, dialect: Dialect) -> pa.Schema:
    """The columns of a CSV file, from its header (or the dialect's) and its first 1,000 lines.

    A column is float64 if more than half of its values are numbers, bool if all are true or false (or yes and no, t and
    f, y and n), null if it has no value, else text.
    """
    lines = next(line_blocks(url, dialect.encoding), None)
    if lines is None:
        raise InputError(f"{url}: the file is empty; a CSV file begins with a line of column names")
    first = _fields(lines.bytes_of(0), dialect)
    names = list(dialect.header) or first
    if not names or not all(name.isprintable() for name in names):
        raise InputError(
            f"{url}: line 1 is no line of column names in UTF-8; is this a CSV file with a header? One in another "
            "encoding needs encoding: cp1252 (of Excel in Western Europe), utf-16 or the like in source.columns"
        )
    values: list[Counter[str]] = [Counter() for _ in names]
    for index in range(0 if dialect.header else 1, min(len(lines), SNIFFED_LINES)):
        row = _fields(lines.bytes_of(index), dialect)
        if row is None or len(row) != len(names) or row == names:
            continue
        for counts, value in zip(values, row, strict=True):
            counts[value.strip()] += 1
    _check_header(url, names, first, values, dialect)
    return pa.schema([(name, _csv_type(counts, dialect)) for name, counts in zip(names, values, strict=True)])


def _check_header(
    url: str, names: Sequence[str], first: list[str] | None, values: Sequence[Counter[str]], dialect: Dialect
) -> None:
    """Raise if the first line is a row where a header is expected, or a header where a row is expected."""
    if dialect.header:
        if first == names:
            raise InputError(f"{url}: line 1 has the names that header gives; leave header out")
        if first is not None and len(first) != len(names):
            raise InputError(f"{url}: line 1 has {len(first)} columns and header {len(names)} names; name each column")
        return
    if _is_row(names, values, dialect):
        shown = dialect.delimiter.join(names)[:100]
        raise InputError(
            f"{url}: line 1 is a row and no line of column names ({shown}); name the {len(names)} columns: source."
            "columns.header, or --set 'header=[name, ...]' of jobs.init; or rename those that are numbers"
        )


def _is_row(names: Sequence[str], values: Sequence[Counter[str]], dialect: Dialect) -> bool:
    """True if a first line is a row: its numbers are not 0, 1, 2, ... or 1, 2, 3, ..., or its texts recur below."""
    numbers = [name for name in names if name.strip() not in NULLS and dialect.number(name)]
    if numbers:
        start = numbers[0]
        if not start.isdecimal() or numbers != [str(int(start) + i) for i in range(len(numbers))]:
            return True
    again = sum(name.strip() in counts for name, counts in zip(names, values, strict=True) if name not in numbers)
    return again >= (1 if numbers else 2)


def _csv_type(values: Counter[str], dialect: Dialect) -> pa.DataType:
    """The type of a column, from its values and their counts."""
    present = {value: n for value, n in values.items() if value not in NULLS}
    if not present:
        return pa.null()
    if 2 * sum(n for value, n in present.items() if dialect.number(value)) > sum(present.values()):
        return pa.float64()
    words = {value.lower() for value in present}
    pairs = map(set, zip(_TRUE, _FALSE, strict=True))
    return pa.bool_() if words <= {"true", "false"} or words in pairs else pa.string()


def _fields(line: bytes, dialect: Dialect) -> list[str] | None:
    """The fields of a line; None if it is not valid CSV."""
    try:
        text = line.decode().removesuffix("\r")
        if not dialect.quotes:
            return text.split(dialect.delimiter)
        return next(csv.reader([text], delimiter=dialect.delimiter, strict=True), None)
    except (UnicodeDecodeError, csv.Error):
        return None


def broken_lines(lines: Lines, dialect: Dialect) -> tuple[Bools, Bools]:
    """Masks of lines with a NUL, lone carriage return or misplaced quote, and of lines with a quote left open."""
    returns = np.flatnonzero(lines.text_U8 == _RETURN)
    broken = [returns[lines.text_U8[returns + 1] != _NEWLINE], np.flatnonzero(lines.text_U8 == 0)]
    quotes = np.flatnonzero(lines.text_U8 == _QUOTE)
    open_M = np.zeros(len(lines), dtype=bool)
    if len(quotes) and dialect.quotes:
        # quotes alternate, numbered from 0 per line: even ones open or end an escape (""), odd ones close or begin one
        firsts_M, quotes_M = _runs_M(quotes, lines)
        line = np.repeat(np.arange(len(lines)), quotes_M)
        ordinal = np.arange(len(quotes)) - firsts_M[line]
        before, after = lines.text_U8[quotes - 1], lines.text_U8[quotes + 1]
        opens = (
            (quotes == lines.starts_M[line]) | (before == ord(dialect.delimiter)) | ((ordinal > 0) & (before == _QUOTE))
        )
        closing = np.zeros(256, dtype=bool)
        closing[[ord(dialect.delimiter), _NEWLINE, _RETURN, _QUOTE]] = True
        closes = closing[after]
        broken.append(quotes[np.where(ordinal % 2 == 0, ~opens, ~closes)])
        last = np.append(line[1:] != line[:-1], True)
        open_M[line[last & (ordinal % 2 == 0)]] = True
    broken_M = np.zeros(len(lines), dtype=bool)
    broken_M[np.searchsorted(lines.ends_M, np.concatenate(broken))] = True
    return broken_M, open_M & ~broken_M


def _fields_M(lines: Lines, dialect: Dialect) -> Ints:
    """The number of fields of each unbroken line: delimiters outside quotes, plus one."""
    comma_U8 = lines.text_U8 == ord(dialect.delimiter)
    quote_U8 = lines.text_U8 == _QUOTE
    if not (dialect.quotes and quote_U8.any()):
        return _runs_M(np.flatnonzero(comma_U8), lines)[1] + 1
    marks = np.flatnonzero(comma_U8 | quote_U8)
    is_quote = quote_U8[marks]
    odd = np.bitwise_xor.accumulate(is_quote)  # whether the number of quotes up to here is odd
    firsts_M, marks_M = _runs_M(marks, lines)
    odd_before_M = np.append(False, odd)[firsts_M]
    if odd_before_M.any():  # after a broken line
        odd ^= np.repeat(odd_before_M, marks_M)
    fields = np.append(0, np.cumsum(~(is_quote | odd)))
    fields_M: Ints = fields[firsts_M + marks_M] - fields[firsts_M] + 1
    return fields_M


def _runs_M(places: Ints, lines: Lines) -> tuple[Ints, Ints]:
    """For each line, the number of these places before it and the number in it."""
    ends_M = np.searchsorted(places, lines.ends_M)
    counts_M = np.diff(ends_M, prepend=0)
    return ends_M - counts_M, counts_M


@dataclass
class CsvReader(TextReader):
    """Reads a CSV file (see `TextReader`); numbers are float32."""

    dialect: Dialect

    def __post_init__(self) -> None:
        self._names, self.header = list(self.schema.names), not self.dialect.header
        self.encoding = self.dialect.encoding

    def _faults(self, lines: Lines, row_M: Bools) -> dict[int, str]:
        """Lines with a quote out of place, or with another number of fields than the header."""
        broken_M, open_M = (row_M & each_M for each_M in broken_lines(lines, self.dialect))
        fields_M = _fields_M(lines, self.dialect)
        odd = np.flatnonzero(row_M & ~broken_M & ~open_M & (fields_M != len(self._names)))
        faults = {i: f"{fields_M[i]} columns where the header has {len(self._names)}" for i in odd.tolist()}
        faults |= dict.fromkeys(np.flatnonzero(open_M).tolist(), _OPEN)
        return faults | dict.fromkeys(np.flatnonzero(broken_M).tolist(), _MISPLACED)

    def _convert(self, text: pa.Buffer) -> pa.Table:
        true, false = booleans()
        return arrow_csv.read_csv(
            text,
            # one block: pyarrow must not cut the text at another place
            read_options=arrow_csv.ReadOptions(
                use_threads=False, block_size=text.size + 1, column_names=[str(i) for i in range(len(self._names))]
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=self.dialect.delimiter, quote_char='"' if self.dialect.quotes else False
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=self._types(),
                include_columns=self._types().names,
                null_values=list(NULLS),
                true_values=true,
                false_values=false,
                decimal_point=self.dialect.decimal,
                strings_can_be_null=True,
            ),
        )

    def _types(self) -> pa.Schema:
        """The types by column number, because names may repeat."""
        return pa.schema([(str(self._names.index(column)), self._type(column)) for column in self.columns])

    def _type(self, column: str) -> pa.DataType:
        if column not in self.numbers:
            return pa.string()
        is_bool = pa.types.is_boolean(self.schema.field(self._names.index(column)).type)
        return pa.bool_() if is_bool else pa.float32()

    def _query_of(self, line: bytes) -> str:
        row = _fields(line, self.dialect)
        query = row[self._names.index(self.query)] if row is not None and len(row) == len(self._names) else ""
        return "" if query in NULLS else query

    def _explain(self, message: str, line: bytes) -> tuple[str, str, Cause]:
        """The reason from pyarrow's message, with the column's name, the offending value and the cause."""
        match = re.search(r"column #(\d+).*error to (\w+)", message)
        if match is None:
            return " ".join(message.split()), "", ""
        problem, column = {"float": "not a number", "bool": "not true or false"}.get(match[2]), int(match[1])
        row = _fields(line, self.dialect)
        value = repr(row[column]) if row is not None and column < len(row) else ""
        said = f"column {self._names[column]!r} is {problem or 'not text in UTF-8'}"
        return said, value, "" if problem else "encoding"


def booleans() -> tuple[list[str], list[str]]:
    """The fields that mean true, and the fields that mean false."""
    true, false = (
        [digit, *(form for word in words for form in (word, word.upper(), word.capitalize()))]
        for digit, words in (("1", _TRUE), ("0", _FALSE))
    )
    return true, false
