"""Text files as runs of whole lines: plain, gzip or xz, distinguished by content, in bounded memory."""

import codecs
import lzma
import zlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.errors import InputError
from ltrscale.ingest.rows import TEXT_LENGTH, KeptTexts

LONGEST_LINE = 1 << 24
"""A longer line is cut to its first bytes and a NUL word; no row of text data has a NUL, so it is rejected."""

UTF8 = "utf-8"
_KEPT_OF_LONG = 4000
_CUT_MARK = b" \0"
_GZIP_MAGIC = b"\x1f\x8b"
_XZ_MAGIC = b"\xfd7zXZ\0"
_GZIP_FORMAT = 31  # zlib's code for a gzip header and the largest window


class Piece(NamedTuple):
    """Some of a file's text, and the share of the file's (compressed) bytes read so far, from 0 to 1."""

    text: bytes
    share: float


class LineTexts:
    """The lines of a text by their number, cut at 1,000 characters."""

    def __init__(self, text: bytes, first: int) -> None:
        self.text, self.first = text, first

    @cached_property
    def _lines(self) -> list[bytes]:
        return self.text.split(b"\n")

    def __call__(self, line: int) -> str:
        """The text of one line."""
        return shown_line(self._lines[line - self.first])

    def only(self, lines_N: NDArray[np.int64]) -> KeptTexts:
        """The texts of these lines, without the rest of the text in memory."""
        return KeptTexts({line: self(line) for line in lines_N.tolist()})


def shown_line(line: bytes) -> str:
    """A line in the form in which people see it."""
    # 4 bytes are the most that UTF-8 needs for a character
    return line[: 4 * TEXT_LENGTH].decode(errors="replace").rstrip("\r")[:TEXT_LENGTH]


def read_lines(url: str, *, size: int, encoding: str = UTF8) -> Iterator[Piece]:
    """Yield a file's text in pieces of whole lines, each piece about `size` bytes, each line ending in a newline.

    A longer line makes a longer piece. A byte order mark is dropped, and a last line without newline gets one. Text in
    another encoding comes as UTF-8; bytes that it does not define stay, and so are no UTF-8.

    Raises:
        InputError: the file is missing or not in that encoding, or its compressed data is cut, corrupt or followed by
            something else.
    """
    pieces = _whole_lines(_recoded(url, _content(url, size), encoding))
    for first in pieces:  # the body runs once: only the first piece may begin with a byte order mark
        yield first._replace(text=first.text.removeprefix(codecs.BOM_UTF8))
        yield from pieces


def _whole_lines(chunks: Iterable[Piece]) -> Iterator[Piece]:
    carry = bytearray()
    for chunk, share in chunks:
        if cut := chunk.rfind(b"\n") + 1:
            yield Piece(b"".join((carry, memoryview(chunk)[:cut])), share)
            carry = bytearray(chunk[cut:])
        else:
            carry += chunk
        if len(carry) > LONGEST_LINE:
            carry[_KEPT_OF_LONG:] = _CUT_MARK
    if carry:
        yield Piece(bytes(carry) + b"\n", 1.0)


def _recoded(url: str, chunks: Iterator[Piece], encoding: str) -> Iterator[Piece]:
    """The text in UTF-8."""
    if codecs.lookup(encoding).name == UTF8:  # as it is: its faults are those of single lines
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
    try:
        for text, share in chunks:
            yield Piece(decoder.decode(text).encode(errors="surrogateescape"), share)
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise InputError(f"{url}: not text in {encoding} ({error}); set the encoding that it has") from error


def _content(url: str, size: int) -> Iterator[Piece]:
    """The file's bytes, decompressed."""
    with storage.open_input(url) as stream:
        length = stream.seek(0, 2)
        stream.seek(0)

        def read(n: int = size) -> bytes:
            with storage.named_errors(url):
                return stream.read(n)

        # not gzip.GzipFile and lzma.LZMAFile: the first has read ahead and cannot name the place of the damage, and
        # the second skips whatever follows the last stream, such as the rest of a damaged one
        first = read(max(size, len(_XZ_MAGIC)))
        chunks = chain([first], iter(read, b""))
        if first.startswith(_GZIP_MAGIC):
            decoded = _gunzip(url, chunks, size)
        elif first.startswith(_XZ_MAGIC):
            decoded = _unxz(url, chunks, size)
        else:
            decoded = ((chunk, stream.tell()) for chunk in chunks)
        for text, position in decoded:
            yield Piece(text, min(1.0, position / max(1, length)))  # a file may grow while it is read


def _gunzip(url: str, chunks: Iterable[bytes], size: int) -> Iterator[tuple[bytes, int]]:
    """Decompress one gzip member after the other, at most `size` bytes at a time whatever the compression ratio.

    It yields each text with the number of bytes of the file that it and the texts before it took.
    """
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
                raise InputError(
                    f"{url}: corrupt gzip data at or after byte {read - len(chunk)} of the file ({error}), {written} "
                    "bytes of text came before; copy or compress the file again"
                ) from error
            written += len(text)
            chunk = decoder.unconsumed_tail or decoder.unused_data  # the rest of this member, or the next one
            yield text, read - len(chunk)
    if not decoder.eof:
        raise InputError(
            f"{url}: gzip data ends too early, at byte {read} of the file, {written} bytes of text came before; "
            "copy or compress the file again"
        )


def _unxz(url: str, chunks: Iterable[bytes], size: int) -> Iterator[tuple[bytes, int]]:
    """Decompress one xz stream after the other, like `_gunzip`; positions are the ends of the chunks."""
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
                raise InputError(
                    f"{url}: corrupt xz data at or before byte {read} of the file ({error}), {written} bytes of text "
                    "came before; copy or compress the file again"
                ) from error
            written += len(text)
            yield text, read
            chunk = decoder.unused_data if decoder.eof else b""
    if not decoder.eof:
        raise InputError(
            f"{url}: xz data ends too early, at byte {read} of the file, {written} bytes of text came before; "
            "copy or compress the file again"
        )
