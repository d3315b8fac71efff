"""Readers: from a plan of row groups to their tables, in the plan's order, one table per row group.

`read_direct` reads with pyarrow in this process, `read_on_spare_cores` in its threads, and
`runtime.on_ray.read_with_ray` on the CPUs of a Ray cluster; all return the same tables. A column that a file lacks is
left out. Page checksums are verified: a flipped bit is an error.

The column `scores` comes from the score file that a row group names; its query groups must be the same.

`cached` keeps row groups that were decoded once as Arrow files on the local disk, which later epochs read by memory
map. All processes of a user on a machine share it, later runs too. A file's name says what it holds: the content of the
Parquet file, the row group, and the columns. It ends with a checksum: one that is damaged is read from Parquet again.
"""

import errno
import functools
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as arrow_fs

from ltrscale import storage
from ltrscale.data.dataset import scores
from ltrscale.data.dataset.columns import as_lists
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import read_dataset
from ltrscale.data.dataset.row_groups import RowGroup, RowGroups
from ltrscale.data.dataset.scores import SCORES
from ltrscale.errors import InputError
from ltrscale.processor import cores
from ltrscale.progress import log
from ltrscale.storage import scratch

RowGroupReader = Callable[[Sequence[RowGroup], Sequence[str]], Iterator[pa.Table]]
"""Takes row groups and column names (`scores` only together with `gid`); yields one table per row group, in order."""

OPEN_FILES = 64
REQUESTS = 4
"""Requests at a time of a process that reads remote files."""
_READS = 3
"""Reads of a remote row group that cannot be decoded, before it counts as damaged."""
_BUSY, _MOST_THREADS = 2, 8
"""Cores kept for training and for the thread that cuts batches; with more threads, that thread is the limit."""
_CHECKSUM_BYTES = 8
_SHARE_LEFT_FREE = 0.1
"""Share of the disk that is left to others."""
_UNUSED_S = 24 * 3600.0
"""Files that nobody has read for so long make room for new ones."""
_GONE = re.compile("^FileNotFoundError|NO_SUCH_KEY|RESOURCE_NOT_FOUND|HTTP status 404")


class PlannedRead(NamedTuple):
    """A row group to read, its number of query groups by the manifest, and its score file or "".

    `dataset` is the data set that listed the file when it was chosen, or ""; `sha256` and `bytes` are the file's.
    """

    url: str
    number: int
    groups: int
    scores: str
    dataset: str
    sha256: str
    bytes: int


class ParquetReads(NamedTuple):
    """A Parquet file: size, metadata, and a function from a row group's number and column names to its table."""

    bytes: int
    metadata: pq.FileMetaData
    read: Callable[[int, Sequence[str]], pa.Table]


def read_direct(row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read row groups with pyarrow in this process; remote storage gets several requests at a time.

    Raises:
        InputError: a file is missing, damaged or differs from its manifest.
    """
    return _read(row_groups, columns, spare=0)


def read_on_spare_cores(row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Like `read_direct`, but decode local files in threads where this worker has cores to spare.

    This is the main wait of a worker with a GPU: a core decodes some 500,000 documents of 136 features a second.
    """
    spare = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - _BUSY
    return _read(row_groups, columns, spare=min(spare, _MOST_THREADS))


def _read(row_groups: Sequence[RowGroup], columns: Sequence[str], *, spare: int) -> Iterator[pa.Table]:
    files, plan = RowGroups.from_iterable(row_groups).own_files, plan_reads(row_groups)
    is_local = all(storage.is_local(url) for file in files for url in (file.url, file.scores or ""))
    if is_local and spare >= 2:
        # per thread, because only one thread at a time can read a file
        opened = functools.lru_cache(2 * OPEN_FILES)(lambda url, _thread: open_parquet(url))
        return read_planned(plan, columns, lambda url: opened(url, threading.get_ident()), threads=spare)
    # a cache, because a shuffled plan returns to each file again and again
    open_file = functools.lru_cache(OPEN_FILES)(open_parquet)
    return read_planned(plan, columns, open_file, threads=0 if is_local else REQUESTS)


def plan_reads(row_groups: Iterable[RowGroup]) -> Iterator[PlannedRead]:
    """Reduce each row group to what a process needs to read it, without the rest of its selection."""
    for row_group in row_groups:
        file = row_group.file
        of_scores = file.scores or ""
        yield PlannedRead(file.url, row_group.index, row_group.groups, of_scores, file.dataset, file.sha256, file.bytes)


def read_planned(
    plan: Iterable[PlannedRead], columns: Sequence[str], open_file: Callable[[str], ParquetReads], *, threads: int
) -> Iterator[pa.Table]:
    """The tables of a plan. Each thread reads one row group ahead; without threads, no row group is read ahead."""
    read = functools.partial(_read_item, columns=columns, open_file=open_file)
    return _ahead(read, plan, threads) if threads else map(read, plan)


def _ahead(read: Callable[[PlannedRead], pa.Table], plan: Iterable[PlannedRead], threads: int) -> Generator[pa.Table]:
    """`map(read, plan)` in threads, each one row group ahead; closing it ends them."""
    waiting: deque[Future[pa.Table]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read")
    try:
        for item in plan:
            waiting.append(pool.submit(read, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read_item(item: PlannedRead, columns: Sequence[str], open_file: Callable[[str], ParquetReads]) -> pa.Table:
    """The table of a row group, with the scores of its documents if they are requested and exist."""
    try:
        table = _read_row_group(item.url, item, [name for name in columns if name != SCORES], open_file, PREPARE_AGAIN)
    except InputError as error:
        _check_listed(item, error)
        raise
    if SCORES not in columns or not item.scores:
        return table
    of_scores = _read_row_group(item.scores, item, ["gid", SCORES], open_file, scores.SCORE_AGAIN)
    if not of_scores.column("gid").equals(table.column("gid")) or of_scores.column(SCORES).null_count:
        problem = f"row group {item.number} does not have a list of scores for each query group of {item.url}, in order"
        raise InputError(f"{item.scores}: {problem}; {scores.SCORE_AGAIN}")
    return table.append_column(SCORES, of_scores.column(SCORES))


def _check_listed(item: PlannedRead, error: InputError) -> None:
    """Check that the data set still lists an unreadable file with the same content."""
    # unreachable storage says nothing about the data set, but a missing file does
    cause = error.__cause__
    if not item.dataset or (cause and storage.is_fault(cause) and not _GONE.search(f"{type(cause).__name__} {cause}")):
        return
    files = (
        read_dataset(item.dataset).manifest.files
        if storage.read_manifest(item.dataset)
        else DataFiles.from_iterable([])
    )
    listed = {storage.join(item.dataset, path): sha256 for path, sha256 in zip(files.paths, files.sha256, strict=True)}
    if listed.get(item.url) != item.sha256:
        raise InputError(
            f"{item.dataset}: the data set was replaced since the run began, and no longer lists {item.url}; put it "
            "back, or give the command again to read the data set as it is now"
        ) from error


def _read_row_group(
    url: str, item: PlannedRead, columns: Sequence[str], open_file: Callable[[str], ParquetReads], remedy: str
) -> pa.Table:
    """Read columns of one row group, a remote one up to three times, because pyarrow does not notice short answers."""
    for _ in range(0 if storage.is_local(url) else _READS - 1):
        try:
            return _read_once(url, item, columns, open_file, remedy)
        except InputError as error:
            if error.__cause__ and storage.is_fault(error.__cause__):
                raise
            log.warning("%s: row group %d could not be decoded; reading it again", url, item.number)
        open_file = open_parquet  # the footer again too: a cached one may hold foreign bytes
    return _read_once(url, item, columns, open_file, remedy)


def _read_once(
    url: str, item: PlannedRead, columns: Sequence[str], open_file: Callable[[str], ParquetReads], remedy: str
) -> pa.Table:
    number = item.number
    with storage.named_errors(url), _damage(url, remedy):
        file = open_file(url)
    if item.dataset and url == item.url and file.bytes != item.bytes:
        raise InputError(f"{url}: it has {file.bytes} bytes where the manifest lists {item.bytes}; {remedy}")
    groups = file.metadata.row_group(number).num_rows if number < file.metadata.num_row_groups else 0
    if groups != item.groups:
        expected = f"the manifest lists {item.groups}"
        raise InputError(f"{url}: row group {number} has {groups} query groups where {expected}; {remedy}")
    with storage.named_errors(url), _damage(url, remedy):
        table = storage.patiently(functools.partial(file.read, number, columns))
    try:
        return as_lists(table)
    except pa.ArrowInvalid as error:
        raise InputError(f"{url}: row group {number}: {error}; {remedy}") from error


def open_parquet(url: str) -> ParquetReads:
    """Open a Parquet file on any storage."""
    filesystem, path = storage.arrow_filesystem(url)
    open_it = _open_local if storage.is_local(url) else _open_remote
    return storage.patiently(functools.partial(open_it, path, filesystem))


def column_names(url: str) -> list[str]:
    """The names of a Parquet file's columns."""
    filesystem, path = storage.arrow_filesystem(url)
    with storage.named_errors(url):
        names: list[str] = storage.patiently(lambda: pq.read_schema(path, filesystem=filesystem)).names
    return names


def _open_local(path: str, filesystem: arrow_fs.FileSystem) -> ParquetReads:
    file = pq.ParquetFile(path, filesystem=filesystem, page_checksum_verification=True)
    one_at_a_time = threading.Lock()  # several threads read a local file if its scores are remote

    def read(number: int, columns: Sequence[str]) -> pa.Table:
        with one_at_a_time:
            return file.read_row_group(number, columns=list(columns), use_threads=False)

    return ParquetReads(Path(path).stat().st_size, file.metadata, read)


def _open_remote(path: str, filesystem: arrow_fs.FileSystem) -> ParquetReads:
    """Open a file for concurrent reads of its row groups, each with as few requests as possible."""
    from pyarrow import dataset as arrow_dataset  # imported late: it loads pandas, and local files do without

    info = filesystem.get_file_info(path)
    if not info.is_file:
        raise FileNotFoundError(errno.ENOENT, "no such file", path)
    options = arrow_dataset.ParquetFragmentScanOptions(pre_buffer=True, page_checksum_verification=True)
    parquet = arrow_dataset.ParquetFileFormat(default_fragment_scan_options=options)
    file = parquet.make_fragment(path, filesystem, file_size=info.size)

    def read(number: int, columns: Sequence[str]) -> pa.Table:
        present = [name for name in columns if name in file.physical_schema.names]
        return file.subset(row_group_ids=[number]).to_table(columns=present, use_threads=False)

    return ParquetReads(info.size, file.metadata, read)


PREPARE_AGAIN = "prepare the data set again"


@contextmanager
def _damage(url: str, remedy: str) -> Iterator[None]:
    """Turn pyarrow's decoding error into one line that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if storage.is_fault(error):
            raise
        raise InputError(f"{url}: damaged ({str(error).rstrip('.')}); {remedy}") from error


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
        names = [_file_name(row_group, columns) for row_group in row_groups]
        missing = [number for number, name in enumerate(names) if name not in cache.files]
        anew, to_read = set(missing), reader(row_groups.take(missing), columns)
        for number, name in enumerate(names):
            table = None if number in anew else cache.table(name)
            if table is None:
                table = next(to_read if number in anew else reader(row_groups.take([number]), columns))
                cache.keep(name, table)
            yield table

    return read


def _file_name(row_group: RowGroup, columns: Sequence[str]) -> str:
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
