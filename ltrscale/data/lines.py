"""Text files as runs of whole lines: plain, gzip or xz, told apart by content, in bounded memory."""

import codecs
import lzma
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain

from ltrscale import storage
from ltrscale.errors import InputError

LONGEST_LINE = 1 << 24
"""A longer line is cut to its first bytes and a NUL word, which no row of text data has."""

_KEPT_OF_LONG = 4000
_CUT_MARK = b" \0"
_GZIP_MAGIC = b"\x1f\x8b"
_XZ_MAGIC = b"\xfd7zXZ\0"
_GZIP_FORMAT = 31  # of zlib: a gzip header, the largest window


def read_lines(url: str, *, size: int) -> Iterator[bytes]:
    """Yield a file's text in pieces of whole lines, each piece about `size` bytes, each line ending in a newline.

    A piece is longer where a line is. A byte order mark is left out, and a last line without newline gets one.

    Raises:
        InputError: the file is missing, or its compressed data is cut, corrupt or followed by something else.
    """
    pieces = _whole_lines(_content(url, size))
    for first in pieces:
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from pieces


def _whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    carry = bytearray()
    for chunk in chunks:
        if cut := chunk.rfind(b"\n") + 1:
            yield bytes(carry) + chunk[:cut]
            carry = bytearray(chunk[cut:])
        else:
            carry += chunk
        if len(carry) > LONGEST_LINE:
            carry[_KEPT_OF_LONG:] = _CUT_MARK
    if carry:
        yield bytes(carry) + b"\n"


def _content(url: str, size: int) -> Iterator[bytes]:
    """The file's bytes, decompressed."""
    with storage.open_input(url) as stream:

        def read(n: int = size) -> bytes:
            with storage.named_errors(url):
                return stream.read(n)

        magic = read(len(_XZ_MAGIC))
        chunks = chain([magic], iter(read, b""))
        if magic.startswith(_GZIP_MAGIC):
            yield from _gunzip(url, chunks, size)
        elif magic == _XZ_MAGIC:
            yield from _unxz(url, chunks, size)
        else:
            yield from chunks


def _gunzip(url: str, chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Decompress one gzip member after the other, `size` bytes at a time whatever the compression ratio."""
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
            yield text
            chunk = decoder.unconsumed_tail or decoder.unused_data
    if not decoder.eof:
        raise InputError(
            f"{url}: gzip data ends too early, at byte {read} of the file, {written} bytes of text came before; "
            "copy or compress the file again"
        )


def _unxz(url: str, chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Decompress one xz stream after the other, `size` bytes at a time whatever the compression ratio."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    read = written = 0
    for chunk in chunks:
        read += len(chunk)
        while chunk or not (decoder.eof or decoder.needs_input):
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
            yield text
            chunk = decoder.unused_data if decoder.eof else b""
    if not decoder.eof:
        raise InputError(
            f"{url}: xz data ends too early, at byte {read} of the file, {written} bytes of text came before; "
            "copy or compress the file again"
        )
