"""Row groups decoded once and kept as Arrow files on the local disk, which later epochs read by memory map.

A table from the cache is the one that Parquet would give, so order, batches and accounting do not depend on it. All
processes of a user on a machine share it, later runs too. A file's name says what it holds: the content of the Parquet
file, the row group, and the columns. It ends with a checksum: one that is damaged is read from Parquet again.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from ltrscale.data.dataset.row_groups import RowGroup, RowGroups
from ltrscale.data.dataset.scores import SCORES
from ltrscale.data.stream.readers import RowGroupReader
from ltrscale.progress import log
from ltrscale.storage import scratch

_CHECKSUM_BYTES = 8
_SHARE_LEFT_FREE = 0.1
"""Share of the disk that is left to others."""
_UNUSED_S = 24 * 3600.0
"""Files that nobody has read for so long make room for new ones."""


def cached(reader: RowGroupReader, gigabytes: float, folder: Path | None = None) -> RowGroupReader:
    """The same tables as from the reader, kept on the local disk where they were read before.

    Scores that serve as labels, and files without a content hash, are always read anew. A disk that cannot be used
    costs a warning and the speed.

    Args:
        reader: reads what is not kept.
        gigabytes: about the most that the cache may hold, in 10^9 bytes. It stops growing where less than a tenth of
            the disk would be free; the next epoch that begins with less than half of that gives some back.
        folder: where it lies; by default beside the scratch directories of this user.
    """
    state = _State()

    def read(row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
        row_groups = RowGroups.from_iterable(row_groups)
        try:
            cache = _Cache(folder or scratch.lasting("decoded"), round(1e9 * gigabytes), state)
        except OSError as error:
            state.say(f"decoded row groups cannot be kept: {error}")
            yield from reader(row_groups, columns)
            return
        names = [_name(row_group, columns) for row_group in row_groups]
        missing = [number for number, name in enumerate(names) if name not in cache.files]
        anew, to_read = set(missing), reader(row_groups.take(missing), columns)
        for number, name in enumerate(names):
            table = None if number in anew else cache.table(name)
            if table is None:
                table = next(to_read if number in anew else reader(row_groups.take([number]), columns))
                cache.keep(name, table)
            yield table

    return read


def _name(row_group: RowGroup, columns: Sequence[str]) -> str:
    """The name of the file of a row group's columns; empty if it is not kept."""
    file = row_group.file
    if not file.sha256 or (file.scores and SCORES in columns):
        return ""
    # of a table, pyarrow's versions may read types of their own
    content = (pa.__version__, file.sha256, row_group.index, *columns)
    return hashlib.sha256(repr(content).encode()).hexdigest()


class _State:
    """What the epochs of a process know of the cache."""

    def __init__(self) -> None:
        self.verified: set[str] = set()
        """Files whose checksum was right."""
        self._said: set[str] = set()

    def say(self, warning: str) -> None:
        """Log a warning once."""
        if warning not in self._said:
            log.warning(warning)
        self._said.add(warning)


class _Cache:
    """The files of the cache, as an epoch finds and leaves them."""

    def __init__(self, folder: Path, limit: int, state: _State) -> None:
        self.folder, self.limit, self.state = folder, limit, state
        self.folder.mkdir(exist_ok=True)
        self._is_full = False
        self._look()
        while self._free_bytes() < self._reserve() / 2 and self.files:  # others need the disk
            self._remove(next(iter(self.files)))

    def _look(self) -> None:
        """Find the files, those that were not read for longest first."""
        found = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process has just removed it
                status = path.stat()
                found.append((status.st_mtime, path.name, status.st_size))
        self.files = {name: (read_at, size) for read_at, name, size in sorted(found)}
        self._bytes, self._written = sum(size for _, size in self.files.values()), 0

    def table(self, name: str) -> pa.Table | None:
        """The table of a file; None if there is no such file any more, or it is damaged."""
        path = self.folder / name
        try:
            whole = pa.memory_map(str(path)).read_buffer()
            os.utime(path)
        except FileNotFoundError:
            self._remove(name)
            return None
        except (OSError, pa.ArrowException):  # an empty file cannot be mapped
            whole = pa.py_buffer(b"")
        content = whole.slice(0, max(0, whole.size - _CHECKSUM_BYTES))
        with suppress(pa.ArrowException):
            if name in self.state.verified or _checksum(content) == whole.slice(content.size).to_pybytes():
                table = pa.ipc.open_file(content).read_all()
                self.state.verified.add(name)
                return table
        log.warning("%s: damaged, perhaps by a crash; its row group is read again", path)
        self._remove(name)
        return None

    def keep(self, name: str, table: pa.Table) -> None:
        """Write a table to its file if there is room; other processes may write the same one."""
        if not name or self._is_full or name in self.files:
            return
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        content = sink.getvalue()
        try:
            if self._has_room(name, content.size + _CHECKSUM_BYTES):
                self._write(name, content)
            else:
                self._is_full = True
                self.state.say(f"{self.folder}: full; the rest is read from Parquet (stream.cache_gb)")
        except OSError as error:
            self._is_full = True
            self.state.say(f"{self.folder}: cannot be written ({error.strerror}); the rest is read from Parquet")

    def _write(self, name: str, content: pa.Buffer) -> None:
        descriptor, unfinished = tempfile.mkstemp(prefix=".", dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines([content, _checksum(content)])
            Path(unfinished).replace(self.folder / name)
        except OSError:
            Path(unfinished).unlink(missing_ok=True)
            raise

    def _has_room(self, name: str, size: int) -> bool:
        """Whether a file fits, after those that nobody reads any more have made room; it counts from now on."""
        looked = self._written > self.limit // 100
        if looked:
            self._look()  # what other processes have written counts too
        while self._bytes + size > self.limit or self._free_bytes() - size < self._reserve():
            if not looked:  # another process may have read the oldest meanwhile
                self._look()
                looked = True
            elif self.files and time.time() - next(iter(self.files.values()))[0] > _UNUSED_S:
                self._remove(next(iter(self.files)))
            else:
                return False
        self.files[name] = time.time(), size
        self._bytes, self._written = self._bytes + size, self._written + size
        return True

    def _remove(self, name: str) -> None:
        self._bytes -= self.files.pop(name, (0.0, 0))[1]
        self.state.verified.discard(name)
        (self.folder / name).unlink(missing_ok=True)

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _reserve(self) -> float:
        return _SHARE_LEFT_FREE * shutil.disk_usage(self.folder).total


def _checksum(content: pa.Buffer) -> bytes:
    """The size and the sum of the words of 64 bits, three times as fast as a CRC: a page that is lost changes it."""
    words = content.size // 8
    total = int(np.frombuffer(content, np.uint64, words).sum()) + int.from_bytes(
        bytes(memoryview(content)[8 * words :])
    )
    return ((int(content.size) + total) % (1 << 64)).to_bytes(_CHECKSUM_BYTES)
