"""CSV text as Arrow tables with the line number of every row, and a rejection for every line that is no row.

A line is a row: quoted fields must not contain line ends. numpy cuts the text into blocks of whole lines; lines that a
CSV reader could take for the start of a longer record are rejected; pyarrow parses the other lines. If pyarrow finds a
value that does not fit, the block is halved until the line is found.

Shapes: U8 bytes, M lines of a block, N rows.
"""

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from ltrscale.data.ingest.lines import LineTexts, read_lines, shown
from ltrscale.data.ingest.rows import TEXT_LENGTH, Rejection
from ltrscale.errors import InputError

NULLS = ("", "NULL", "Null", "null", "NaN", "Nan", "nan", "NAN")
"""Fields that mean a missing value, in any column."""

_BLOCK = 1 << 22
_SNIFFED_LINES = 1000
_MISPLACED = "a quote, carriage return or NUL out of place, or too long a line"
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'


@dataclass(frozen=True)
class Table:
    """The rows of some lines with their line numbers, and the lines that were rejected."""

    rows: pa.RecordBatch
    lines_N: NDArray[np.int64]
    rejected: list[Rejection]
    lines: "Lines"


class Lines(LineTexts):
    """A block of whole lines: `text[starts_M[i]:ends_M[i]]` is line `first + i` without its line end.

    `share` is the share of the file that was read at the block's end.
    """

    def __init__(self, text: bytes, first: int, share: float) -> None:
        super().__init__(text, first)
        self.share = share
        self.text_U8 = np.frombuffer(text, np.uint8)
        self.ends_M = np.flatnonzero(self.text_U8 == _NEWLINE)
        self.starts_M = np.concatenate([[0], self.ends_M[:-1] + 1])

    def __len__(self) -> int:
        return len(self.ends_M)

    def __call__(self, line: int) -> str:
        """The text of one line."""
        return shown(self.text[self.starts_M[line - self.first] : self.ends_M[line - self.first]])

    def blank_M(self) -> NDArray[np.bool_]:
        """Lines without any text; they are no rows."""
        lengths_M = self.ends_M - self.starts_M
        blank_M: NDArray[np.bool_] = (lengths_M == 0) | ((lengths_M == 1) & (self.text_U8[self.starts_M] == _RETURN))
        return blank_M

    def broken_M(self, delimiter: str) -> NDArray[np.bool_]:
        """Lines with a NUL or a lone carriage return, or with a quote that does not open, close or escape."""
        returns = np.flatnonzero(self.text_U8 == _RETURN)
        broken = [returns[self.text_U8[returns + 1] != _NEWLINE], np.flatnonzero(self.text_U8 == 0)]
        quotes = np.flatnonzero(self.text_U8 == _QUOTE)
        if len(quotes):
            # quotes alternate, from 0 in each line: even ones open or end an escape (""), odd ones close or begin one
            line = np.searchsorted(self.ends_M, quotes)
            ordinal = np.arange(len(quotes)) - np.searchsorted(quotes, self.starts_M)[line]
            before, after = self.text_U8[quotes - 1], self.text_U8[quotes + 1]
            opens = (quotes == self.starts_M[line]) | (before == ord(delimiter)) | ((ordinal > 0) & (before == _QUOTE))
            closes = np.isin(after, [ord(delimiter), _NEWLINE, _RETURN, _QUOTE])
            broken.append(quotes[np.where(ordinal % 2 == 0, ~opens, ~closes)])
            last = np.append(line[1:] != line[:-1], True)
            broken.append(quotes[last & (ordinal % 2 == 0)])  # a quote that never closes
        broken_M = np.zeros(len(self), dtype=bool)
        broken_M[np.searchsorted(self.ends_M, np.concatenate(broken))] = True
        return broken_M

    def fields_M(self, delimiter: str) -> NDArray[np.int64]:
        """The number of fields of each line that is not broken: delimiters outside quotes, plus one."""
        commas = np.flatnonzero(self.text_U8 == ord(delimiter))
        commas_M = np.diff(np.searchsorted(commas, self.ends_M), prepend=0)
        quotes = np.flatnonzero(self.text_U8 == _QUOTE)
        if len(quotes):
            before = np.searchsorted(quotes, commas) - np.repeat(np.searchsorted(quotes, self.starts_M), commas_M)
            commas_M = np.diff(np.searchsorted(commas[before % 2 == 0], self.ends_M), prepend=0)
        return commas_M + 1


def _blocks(url: str) -> Iterator[Lines]:
    first = 1
    for text, share in read_lines(url, size=_BLOCK):
        lines = Lines(text, first, share)
        yield lines
        first += len(lines)


def read_schema(url: str, delimiter: str) -> pa.Schema:
    """The columns of a CSV file, from its header and first 1,000 lines.

    A column is float64 if more than half of its values are numbers, null if it has no value, else text.

    Raises:
        InputError: the file is missing, empty or damaged, or its first line is no header.
    """
    lines = next(_blocks(url), None)
    if lines is None:
        raise InputError(f"{url}: the file is empty; a CSV file begins with a line of column names")
    names = _header(url, lines, delimiter)
    values, numbers = [0] * len(names), [0] * len(names)
    for number in range(2, min(len(lines), _SNIFFED_LINES) + 1):
        row = _fields(lines.text[lines.starts_M[number - 1] : lines.ends_M[number - 1]], delimiter)
        if row is None or len(row) != len(names):
            continue
        for i, value in enumerate(row):
            values[i] += value.strip() not in NULLS
            numbers[i] += value.strip() not in NULLS and _is_float(value)
    kinds = [
        pa.null() if not n else pa.float64() if 2 * m > n else pa.string() for n, m in zip(values, numbers, strict=True)
    ]
    return pa.schema(list(zip(names, kinds, strict=True)))


def _header(url: str, lines: Lines, delimiter: str) -> list[str]:
    names = _fields(lines.text[: lines.ends_M[0]].removeprefix(b"\xef\xbb\xbf"), delimiter)
    if not names or not all(name.isprintable() for name in names):
        raise InputError(f"{url}: line 1 is no line of column names in UTF-8; is this a CSV file with a header?")
    return names


def _fields(line: bytes, delimiter: str) -> list[str] | None:
    """The fields of one line; None if it is no CSV."""
    try:
        return next(csv.reader([line.decode().removesuffix("\r")], delimiter=delimiter, strict=True), None)
    except (UnicodeDecodeError, csv.Error):
        return None


def _is_float(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return "_" not in value  # Python reads 1_000 as a number, other tools do not


@dataclass
class CsvReader:
    """Reads some columns of a CSV file: those in `numbers` as float32, the others as text.

    `query` is the column with the query id, which rejections of a line state if the line can be read.
    """

    url: str
    names: Sequence[str]
    columns: Sequence[str]
    numbers: Collection[str]
    query: str
    delimiter: str
    batch_rows: int
    _indices: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._indices = [self.names.index(column) for column in self.columns]

    def __iter__(self) -> Iterator[Table]:
        """The tables of the file, in order, each of at most `batch_rows` lines.

        Raises:
            InputError: the file is damaged.
        """
        for lines in _blocks(self.url):
            row_M = ~lines.blank_M()
            row_M[0] &= lines.first > 1  # line 1 is the header
            broken_M = row_M & lines.broken_M(self.delimiter)
            fields_M = np.where(broken_M, len(self.names), lines.fields_M(self.delimiter))
            odd_M = row_M & (fields_M != len(self.names))
            for start in range(0, len(lines), self.batch_rows):
                part = slice(start, start + self.batch_rows)
                rejected: list[Rejection] = []
                for i in start + np.flatnonzero(broken_M[part]):
                    self._reject(rejected, lines, int(i), _MISPLACED)
                for i in start + np.flatnonzero(odd_M[part]):
                    reason = f"{fields_M[i]} columns where the header has {len(self.names)}"
                    self._reject(rejected, lines, int(i), reason)
                good = start + np.flatnonzero((row_M & ~broken_M & ~odd_M)[part])
                parts = list(self._parse(lines, good, rejected)) or [(self._empty(), good[:0])]
                table = pa.concat_tables([rows for rows, _ in parts])
                batch = pa.record_batch([column.combine_chunks() for column in table.columns], list(self.columns))
                lines_N = lines.first + np.concatenate([numbers for _, numbers in parts])
                yield Table(batch, lines_N, sorted(rejected, key=lambda rejection: rejection.line), lines)

    def _parse(
        self, lines: Lines, good: NDArray[np.int64], rejected: list[Rejection]
    ) -> Iterator[tuple[pa.Table, NDArray[np.int64]]]:
        """Tables and line indices of the lines `good`; a block with a value that does not fit is halved until found."""
        if not len(good):
            return
        try:
            table = self._convert(_text_of(lines, good))
            if len(table) != len(good):
                raise pa.ArrowInvalid("not one row per line")
        except pa.ArrowInvalid as error:
            if len(good) == 1:
                self._reject(rejected, lines, int(good[0]), *self._explain(str(error)))
                return
            middle = len(good) // 2
            yield from self._parse(lines, good[:middle], rejected)
            yield from self._parse(lines, good[middle:], rejected)
        else:
            yield table, good

    def _convert(self, text: pa.Buffer) -> pa.Table:
        return arrow_csv.read_csv(
            text,
            # one block: pyarrow must not cut the text at another place
            read_options=arrow_csv.ReadOptions(
                use_threads=False, block_size=text.size + 1, column_names=[str(i) for i in range(len(self.names))]
            ),
            parse_options=arrow_csv.ParseOptions(delimiter=self.delimiter),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict(zip(self._keys(), self._types(), strict=True)),
                include_columns=self._keys(),
                null_values=list(NULLS),
                strings_can_be_null=True,
            ),
        )

    def _keys(self) -> list[str]:
        """The columns' numbers, which stand for their names here, since names may repeat."""
        return [str(i) for i in self._indices]

    def _types(self) -> list[pa.DataType]:
        return [pa.float32() if column in self.numbers else pa.string() for column in self.columns]

    def _empty(self) -> pa.Table:
        return pa.schema(list(zip(self._keys(), self._types(), strict=True))).empty_table()

    def _reject(
        self, rejected: list[Rejection], lines: Lines, index: int, reason: str, column: int | None = None
    ) -> None:
        number = lines.first + index
        row = _fields(lines.text[lines.starts_M[index] : lines.ends_M[index]], self.delimiter)
        query = row[self.names.index(self.query)] if row is not None and len(row) == len(self.names) else ""
        text = f"{reason}: {lines(number)}"[:TEXT_LENGTH]
        found = reason if column is None or row is None else f"{reason} ({row[column]!r})"
        query = "" if query in NULLS else query
        rejected.append(Rejection(self.url, number, "unparsable", text, query, found=found))

    def _explain(self, message: str) -> tuple[str, int | None]:
        """The error of pyarrow for a value that does not fit, with the column's name, and the column's number."""
        found = re.search(r"column #(\d+).*error to (\w+)", message)
        if found is None:
            return " ".join(message.split()), None
        what, column = "not a number" if found[2] == "float" else "not text in UTF-8", int(found[1])
        return f"column {self.names[column]!r} is {what}", column


def _text_of(lines: Lines, good: NDArray[np.int64]) -> pa.Buffer:
    """The text of these lines; not a copy if they are consecutive."""
    first, last = int(good[0]), int(good[-1])
    text_U8 = lines.text_U8[lines.starts_M[first] : lines.ends_M[last] + 1]
    if last - first + 1 > len(good):
        wanted_M = np.zeros(last - first + 1, dtype=bool)
        wanted_M[good - first] = True
        text_U8 = text_U8[
            np.repeat(wanted_M, np.diff(lines.ends_M[first : last + 1], prepend=lines.starts_M[first] - 1))
        ]
    return pa.py_buffer(text_U8)
