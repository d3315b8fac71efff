"""Text files as runs of whole lines, plain, gzip or xz by their content, and as Arrow tables with one row per line.

A line is a row or a rejection, and every row has its line number. numpy cuts the text into blocks of whole lines; a
reader of a format names the lines that cannot be rows, and pyarrow parses the others. If pyarrow finds a value that
does not fit, the block is halved until the line is found.

Shapes: U8 bytes, M lines of a block, N rows.
"""

import codecs
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pyarrow as pa

from ltrscale import storage
from ltrscale.arrays import Bools, Ints
from ltrscale.errors import InputError
from ltrscale.ingest.rows import TEXT_LENGTH, Cause, Raw, Rejection

_LONGEST_LINE = 1 << 24
"""Longer lines are cut and end in a NUL word, so they are rejected: no row of text data has a NUL."""

UTF8 = "utf-8"
_KEPT_OF_LONG = 4000
_CUT_MARK = b" \0"
_GZIP_MAGIC = b"\x1f\x8b"
_XZ_MAGIC = b"\xfd7zXZ\0"
_GZIP_FORMAT = 31  # zlib's code for a gzip header and the largest window


_Piece = tuple[bytes, float]
"""Some of a file's text, and the share of the file's (compressed) bytes read so far, from 0 to 1."""


def shown_line(line: bytes) -> str:
    """A line as shown to people."""
    # 4 bytes are the most that UTF-8 needs for a character
    return line[: 4 * TEXT_LENGTH].decode(errors="replace").rstrip("\r")[:TEXT_LENGTH]


def _whole_lines(chunks: Iterable[_Piece]) -> Iterator[_Piece]:
    carry = bytearray()
    for chunk, share in chunks:
        if cut := chunk.rfind(b"\n") + 1:
            yield b"".join((carry, memoryview(chunk)[:cut])), share
            carry = bytearray(chunk[cut:])
        else:
            carry += chunk
        if len(carry) > _LONGEST_LINE:
            carry[_KEPT_OF_LONG:] = _CUT_MARK
    if carry:
        yield bytes(carry) + b"\n", 1.0


def _recoded(url: str, chunks: Iterator[_Piece], encoding: str) -> Iterator[_Piece]:
    """The text in UTF-8."""
    if codecs.lookup(encoding).name == UTF8:  # unchanged: faults are reported line by line
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
    try:
        for text, share in chunks:
            yield decoder.decode(text).encode(errors="surrogateescape"), share
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise InputError(f"{url}: not text in {encoding} ({error}); set the encoding that it has") from error


def _content(url: str, size: int) -> Iterator[_Piece]:
    """The file's bytes, decompressed."""
    with storage.open_input(url) as stream:
        length = stream.seek(0, 2)
        stream.seek(0)

        def read(n: int = size) -> bytes:
            with storage.named_errors(url):
                return stream.read(n)

        # not gzip.GzipFile or lzma.LZMAFile: GzipFile reads ahead and cannot name the place of the damage, and LZMAFile
        # skips whatever follows the last stream, such as the rest of a damaged one
        first = read(max(size, len(_XZ_MAGIC)))
        chunks = chain([first], iter(read, b""))
        if first.startswith(_GZIP_MAGIC):
            decoded = _gunzip(url, chunks, size)
        elif first.startswith(_XZ_MAGIC):
            decoded = _unxz(url, chunks, size)
        else:
            decoded = ((chunk, stream.tell()) for chunk in chunks)
        for text, position in decoded:
            yield text, min(1.0, position / max(1, length))  # a file may grow while it is read


def _gunzip(url: str, chunks: Iterable[bytes], size: int) -> Iterator[tuple[bytes, int]]:
    """Decompress concatenated gzip members, at most `size` bytes at a time; yields texts and compressed positions."""
    decoder = zlib.decompressobj(_GZIP_FORMAT)
    read = written = 0
    for chunk in chunks:
        read += len(chunk)
        while chunk:
            if decoder.eof:
                decoder = zlib.decompressobj(_GZIP_FORMAT)
            try:
                text = decoder.decompress(chunk, size)
            except zlib.error as error:
                where = f"at or after byte {read - len(chunk)} of the file ({error})"
                raise _broken(url, f"corrupt gzip data {where}", written) from error
            written += len(text)
            chunk = decoder.unconsumed_tail or decoder.unused_data  # the rest of this member, or the next one
            yield text, read - len(chunk)
    if not decoder.eof:
        raise _broken(url, f"gzip data ends too early, at byte {read} of the file", written)


def _unxz(url: str, chunks: Iterable[bytes], size: int) -> Iterator[tuple[bytes, int]]:
    """Decompress concatenated xz streams, like `_gunzip`; positions are the ends of the chunks."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    read = written = 0
    for chunk in chunks:
        read += len(chunk)
        while chunk or not (decoder.eof or decoder.needs_input):  # the decoder keeps the input beyond `size` bytes
            if decoder.eof:
                decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            try:
                text = decoder.decompress(chunk, size)
            except lzma.LZMAError as error:
                where = f"at or before byte {read} of the file ({error})"
                raise _broken(url, f"corrupt xz data {where}", written) from error
            written += len(text)
            yield text, read
            chunk = decoder.unused_data if decoder.eof else b""
    if not decoder.eof:
        raise _broken(url, f"xz data ends too early, at byte {read} of the file", written)


def _broken(url: str, fault: str, written: int) -> InputError:
    return InputError(f"{url}: {fault}, {written} bytes of text came before; copy or compress the file again")


SNIFFED_LINES = 1000
"""Number of lines that decide the types of a file's columns."""

_BLOCK = 1 << 22
_NEWLINE, _RETURN = b"\n\r"


class Lines:
    """A block of whole lines: `text[starts_M[i]:ends_M[i]]` is line `first + i` without its line end.

    `share` is the share of the file read up to the block's end.
    """

    def __init__(self, text: bytes, first: int, share: float = 1.0) -> None:
        self.text, self.first, self.share = text, first, share
        self.text_U8 = np.frombuffer(text, np.uint8)
        self.ends_M = np.flatnonzero(self.text_U8 == _NEWLINE)
        self.starts_M = np.concatenate([[0], self.ends_M[:-1] + 1])

    def __len__(self) -> int:
        return len(self.ends_M)

    def __call__(self, line: int) -> str:
        """The text of one line, cut at 1,000 characters."""
        return shown_line(self.bytes_of(line - self.first))

    def bytes_of(self, index: int) -> bytes:
        """One line, by its index in the block."""
        return self.text[self.starts_M[index] : self.ends_M[index]]

    def blank_M(self) -> Bools:
        """A mask of blank lines, which are not rows."""
        lengths_M = self.ends_M - self.starts_M
        return np.asarray((lengths_M == 0) | ((lengths_M == 1) & (self.text_U8[self.starts_M] == _RETURN)))


def line_blocks(url: str, encoding: str = UTF8, *, size: int = _BLOCK) -> Iterator[Lines]:
    """Yield a file's text in blocks of whole lines, each block about `size` bytes, each line ending in a newline.

    A longer line makes a longer block. A byte order mark is dropped, and a last line without newline gets one. Text in
    another encoding is converted to UTF-8; bytes that the encoding does not define stay, as invalid UTF-8.

    Raises:
        InputError: the file is missing or not in that encoding, or its compressed data is cut, corrupt or followed by
            something else.
    """
    first = 1
    for text, share in _whole_lines(_recoded(url, _content(url, size), encoding)):
        lines = Lines(text.removeprefix(codecs.BOM_UTF8) if first == 1 else text, first, share)
        yield lines
        first += len(lines)


@dataclass
class TextReader(ABC):
    """Reads some columns of a file with one row per line: `numbers` as numbers or booleans, others as text.

    `query` is the column with the query id; a rejected line states its id if it can be read.
    """

    url: str
    schema: pa.Schema
    columns: Sequence[str]
    numbers: Collection[str]
    query: str
    batch_rows: int
    encoding: str = field(default=UTF8, init=False)
    header: bool = field(default=False, init=False)
    """True if the first line has the names of the columns."""

    def __iter__(self) -> Iterator[Raw]:
        """The tables of the file, in order, each of at most `batch_rows` lines."""
        for lines in line_blocks(self.url, self.encoding, size=_BLOCK):
            row_M = ~lines.blank_M()
            row_M[0] &= lines.first > 1 or not self.header
            faults = self._faults(lines, row_M)
            row_M[list(faults)] = False
            bad_lines = np.array(sorted(faults), np.int64)
            for start in range(0, len(lines), self.batch_rows):
                stop = start + self.batch_rows
                rejected: list[Rejection] = []
                for i in bad_lines[(bad_lines >= start) & (bad_lines < stop)].tolist():
                    self._reject(rejected, lines, i, faults[i])
                good_lines = start + np.flatnonzero(row_M[start:stop])
                parts = list(self._parse(lines, good_lines, rejected)) or [
                    (self._types().empty_table(), good_lines[:0])
                ]
                table = pa.concat_tables([rows for rows, _ in parts])
                batch = pa.record_batch([column.combine_chunks() for column in table.columns], list(self.columns))
                lines_N = lines.first + np.concatenate([numbers for _, numbers in parts])
                rejected.sort(key=lambda rejection: rejection.line)
                yield Raw(batch, lines_N, lines, rejected, lines.share)

    def _faults(self, lines: Lines, row_M: Bools) -> dict[int, str]:  # noqa: ARG002
        """The lines that cannot be rows, by index, with the reason."""
        return {}

    @abstractmethod
    def _convert(self, text: pa.Buffer) -> pa.Table:
        """The rows of a text with these types; raises ArrowInvalid if a value does not fit."""

    @abstractmethod
    def _types(self) -> pa.Schema:
        """The columns and their types."""

    @abstractmethod
    def _explain(self, message: str, line: bytes) -> tuple[str, str, Cause]:
        """The reason to reject a line, from pyarrow's message, the offending value (empty if not known) and cause."""

    @abstractmethod
    def _query_of(self, line: bytes) -> str:
        """The query id of a line, empty if it cannot be read."""

    def _parse(self, lines: Lines, good_lines: Ints, rejected: list[Rejection]) -> Iterator[tuple[pa.Table, Ints]]:
        """Tables and line indices of `good_lines`; a block is halved until a value that does not fit is found."""
        if not len(good_lines):
            return
        try:
            table = self._convert(_text_of(lines, good_lines))
            if len(table) != len(good_lines):
                raise pa.ArrowInvalid("not one row per line")
        except pa.ArrowInvalid as error:
            if len(good_lines) == 1:
                index = int(good_lines[0])
                self._reject(rejected, lines, index, *self._explain(str(error), lines.bytes_of(index)))
                return
            middle = len(good_lines) // 2
            yield from self._parse(lines, good_lines[:middle], rejected)
            yield from self._parse(lines, good_lines[middle:], rejected)
        else:
            yield table, good_lines

    def _reject(
        self, rejected: list[Rejection], lines: Lines, index: int, reason: str, value: str = "", cause: Cause = ""
    ) -> None:
        number, query = lines.first + index, self._query_of(lines.bytes_of(index))
        text, finding = f"{reason}: {lines(number)}"[:TEXT_LENGTH], f"{reason} ({value})" if value else reason
        rejected.append(Rejection(self.url, number, "unparsable", text, query, found=finding, cause=cause))


def _text_of(lines: Lines, good_lines: Ints) -> pa.Buffer:
    """The text of these lines, without a copy if they are consecutive."""
    first, last = int(good_lines[0]), int(good_lines[-1])
    text_U8 = lines.text_U8[lines.starts_M[first] : lines.ends_M[last] + 1]
    if last - first + 1 > len(good_lines):
        is_good_M = np.zeros(last - first + 1, dtype=bool)
        is_good_M[good_lines - first] = True
        text_U8 = text_U8[
            np.repeat(is_good_M, np.diff(lines.ends_M[first : last + 1], prepend=lines.starts_M[first] - 1))
        ]
    return pa.py_buffer(text_U8)
