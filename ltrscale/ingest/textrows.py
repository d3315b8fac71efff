"""Text with one row per line as Arrow tables: a line is a row or a rejection, and every row has its line number.

numpy cuts the text into blocks of whole lines; a reader of a format names the lines that cannot be rows, and pyarrow
parses the others. If pyarrow finds a value that does not fit, the block is halved until the line is found.

Shapes: U8 bytes, M lines of a block, N rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ltrscale.ingest.lines import UTF8, LineTexts, read_lines, shown_line
from ltrscale.ingest.rows import TEXT_LENGTH, Rejection

SNIFFED_LINES = 1000
"""Lines that decide on the types of a file's columns."""

_BLOCK = 1 << 22
_NEWLINE, _RETURN = b"\n\r"


@dataclass(frozen=True)
class LineTable:
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
        return shown_line(self.text[self.starts_M[line - self.first] : self.ends_M[line - self.first]])

    def bytes_of(self, index: int) -> bytes:
        """One line of the block, by its index there."""
        return self.text[self.starts_M[index] : self.ends_M[index]]

    def blank_M(self) -> NDArray[np.bool_]:
        """Lines without any text; they are no rows."""
        lengths_M = self.ends_M - self.starts_M
        blank_M: NDArray[np.bool_] = (lengths_M == 0) | ((lengths_M == 1) & (self.text_U8[self.starts_M] == _RETURN))
        return blank_M


def line_blocks(url: str, encoding: str = UTF8) -> Iterator[Lines]:
    """The lines of a file in blocks of a few megabytes."""
    first = 1
    for text, share in read_lines(url, size=_BLOCK, encoding=encoding):
        lines = Lines(text, first, share)
        yield lines
        first += len(lines)


@dataclass
class TextReader(ABC):
    """Reads some columns of a file with one row per line: those in `numbers` as numbers or booleans, others as text.

    `query` is the column with the query id, which rejections of a line state if it can be read.
    """

    url: str
    schema: pa.Schema
    columns: Sequence[str]
    numbers: Collection[str]
    query: str
    batch_rows: int
    header: ClassVar[bool] = False
    """Whether the first line has the names of the columns."""

    def __iter__(self) -> Iterator[LineTable]:
        """The tables of the file, in order, each of at most `batch_rows` lines.

        Raises:
            InputError: the file is damaged.
        """
        for lines in line_blocks(self.url, self._encoding()):
            row_M = ~lines.blank_M()
            row_M[0] &= lines.first > 1 or not self.header
            faults = self._faults(lines, row_M)
            row_M[list(faults)] = False
            bad = np.array(sorted(faults), np.int64)
            for start in range(0, len(lines), self.batch_rows):
                stop = start + self.batch_rows
                rejected: list[Rejection] = []
                for i in bad[(bad >= start) & (bad < stop)].tolist():
                    self._reject(rejected, lines, i, faults[i])
                good = start + np.flatnonzero(row_M[start:stop])
                parts = list(self._parse(lines, good, rejected)) or [(self._empty(), good[:0])]
                table = pa.concat_tables([rows for rows, _ in parts])
                batch = pa.record_batch([column.combine_chunks() for column in table.columns], list(self.columns))
                lines_N = lines.first + np.concatenate([numbers for _, numbers in parts])
                yield LineTable(batch, lines_N, sorted(rejected, key=lambda rejection: rejection.line), lines)

    def _encoding(self) -> str:
        return UTF8

    def _faults(self, lines: Lines, row_M: NDArray[np.bool_]) -> dict[int, str]:  # noqa: ARG002
        """The lines that cannot be rows, by index, with the reason."""
        return {}

    @abstractmethod
    def _convert(self, text: pa.Buffer) -> pa.Table:
        """The rows of a text with a table of the types of `_empty`; raises ArrowInvalid where one does not fit."""

    @abstractmethod
    def _empty(self) -> pa.Table:
        """A table of the columns without rows."""

    @abstractmethod
    def _explain(self, message: str, line: bytes) -> tuple[str, str]:
        """The reason to reject a line, from pyarrow's message, and the offending value, empty if it is not known."""

    @abstractmethod
    def _query_of(self, line: bytes) -> str:
        """The query id of a line, empty if it cannot be read."""

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
                reason, value = self._explain(str(error), lines.bytes_of(int(good[0])))
                self._reject(rejected, lines, int(good[0]), reason, value)
                return
            middle = len(good) // 2
            yield from self._parse(lines, good[:middle], rejected)
            yield from self._parse(lines, good[middle:], rejected)
        else:
            yield table, good

    def _reject(self, rejected: list[Rejection], lines: Lines, index: int, reason: str, value: str = "") -> None:
        number, query = lines.first + index, self._query_of(lines.bytes_of(index))
        text, found = f"{reason}: {lines(number)}"[:TEXT_LENGTH], f"{reason} ({value})" if value else reason
        rejected.append(Rejection(self.url, number, "unparsable", text, query, found=found))


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
