"""Whether files are what their manifest lists, at three levels of effort.

Threads examine the files, because they mostly wait for the disk or the network; the result does not depend on their
number. Requests per file on S3: none at level `sizes`, which lists the directory, a thousand files per request; three
small ones at `footers` (size, first four bytes, last 64 KiB); and one more for every 8 MiB of the file at `content`.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as arrow

from ltrscale import storage
from ltrscale.config import Strict
from ltrscale.data.dataset.feature_column import with_lists
from ltrscale.data.dataset.files import Counts, DataFile, ListedPath, total_of
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.progress import Advance

CheckLevel = Literal["sizes", "footers", "content"]
Reason = Literal[
    "missing", "size differs", "bad magic", "bad footer", "rows differ", "schema differs", "content differs"
]
ColumnTypes = Mapping[str, str]
"""Type of each column of a file, by name."""

_THREADS = 32
_AT_ONCE = 1024
_MAGIC = b"PAR1"
_TAIL = 64 << 10
_BLOCK = 8 << 20
_FORMAT = {"gid": "int64", "features": "list<float>", "labels": "list<float>"}


class BadFile(Strict):
    """A file that differs from its manifest, the reason, and the counts lost with it."""

    path: ListedPath
    """Below the data set directory."""
    reason: Reason
    detail: str
    lost: Counts


class _Fault(NamedTuple):
    """A fault of a file: its kind and a description."""

    reason: Reason
    detail: str


_MISSING = _Fault("missing", "not in its directory")


class _Place(NamedTuple):
    """Where a data set's files are: its URL, and pyarrow's file system and path for it."""

    url: str
    filesystem: Any
    root: str


def examine(
    dataset: Dataset, files: Sequence[DataFile], level: CheckLevel, advance: Advance
) -> tuple[tuple[BadFile, ...], ColumnTypes]:
    """Compare files of a data set with its manifest; each level includes the ones before it.

    The columns of a file must have the names and types of most files; in a tie, of the first. `advance` is called for
    every file with its bytes.

    Returns:
        The bad files, in their order, and the columns of most files (empty at level `sizes`).

    Raises:
        InputError: storage cannot be reached or denies permission, which is not a fault of a file.
    """
    sizes = _list_sizes(_place(dataset.url))
    faults: dict[str, _Fault] = {}
    columns: dict[str, ColumnTypes] = {}
    seen: dict[str, ColumnTypes] = {}  # the files of a data set share them
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(files), _AT_ONCE):  # in blocks, because the pool keeps all its inputs
            some, place = [*files[start : start + _AT_ONCE]], _place(dataset.url)  # fresh keys: this may take hours
            results = pool.map(partial(_examine_file, place, sizes, level), some)
            for file, result in zip(some, results, strict=True):
                if isinstance(result, _Fault):
                    faults[file.path] = result
                else:
                    columns[file.path] = seen.setdefault(str(result), result)
                advance(1, file.bytes)
    usual = _most_common(columns)
    faults |= {path: fault for path, of_file in columns.items() if (fault := _schema_fault(usual, of_file))}
    bad_files = (
        BadFile(path=file.path, **faults[file.path]._asdict(), lost=total_of(file.row_groups))
        for file in files
        if file.path in faults
    )
    return tuple(bad_files), usual


def _place(url: str) -> _Place:
    return _Place(url, *storage.arrow_filesystem(url))


def _list_sizes(place: _Place) -> dict[str, int]:
    """Bytes of all files below a directory, by path; empty if the directory is missing."""
    if not storage.is_local(place.url):
        return {f"{place.root}/{name}": bytes_ for name, bytes_ in storage.sizes_below(place.url).items()}
    selector = arrow.FileSelector(place.root, allow_not_found=True, recursive=True)
    with storage.named_errors(place.url):  # not `sizes_below`, which does not follow links
        infos = place.filesystem.get_file_info(selector)
    return {info.path: info.size for info in infos if info.type == arrow.FileType.File}


def _examine_file(place: _Place, sizes: Mapping[str, int], level: CheckLevel, file: DataFile) -> ColumnTypes | _Fault:
    """The columns of a file (empty at level `sizes`), or its fault."""
    path = f"{place.root}/{file.path}"
    if path not in sizes:
        return _MISSING
    fault = _size_fault(sizes[path], file)
    if fault or level == "sizes":
        return fault or {}
    with storage.named_errors(storage.listed_file(place.url, file.path)):
        result = storage.patiently(lambda: _examine_open(place.filesystem, path, level, file))
        if isinstance(result, _Fault) and not storage.is_local(place.url):
            # pyarrow accepts an answer that is shorter than its request
            result = storage.patiently(lambda: _examine_open(place.filesystem, path, level, file))
    return result


def _examine_open(filesystem: Any, path: str, level: CheckLevel, file: DataFile) -> ColumnTypes | _Fault:
    """The columns of a file that has to be opened, or its fault."""
    try:
        source = filesystem.open_input_file(path)
    except FileNotFoundError:  # deleted since the directory was listed
        return _MISSING
    with source:
        result = _size_fault(source.size(), file) or _examine_footer(source, file)
        if level == "content" and not isinstance(result, _Fault):
            return _content_fault(source, file) or result
        return result


def _size_fault(size: int, file: DataFile) -> _Fault | None:
    if size == file.bytes:
        return None
    return _Fault("size differs", f"{size} bytes, the manifest lists {file.bytes}")


def _examine_footer(source: pa.NativeFile, file: DataFile) -> ColumnTypes | _Fault:
    """The columns of an open file, or the fault of its ends, metadata or counts."""
    footer = _read_footer(source)
    if isinstance(footer, _Fault):
        return footer
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        columns = {field.name: _type_name(field.type) for field in with_lists(metadata.schema.to_arrow_schema())}
        return _rows_fault(metadata, file) or columns
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # parsed from memory, so not a fault of storage
        return _Fault("bad footer", _printable(error))


def _read_footer(source: pa.NativeFile) -> bytes | _Fault:
    """The end of a Parquet file with all of its metadata, checked for the format's marks."""
    size = source.size()
    head, tail = source.read_at(len(_MAGIC), 0), source.read_at(min(size, _TAIL), max(size - _TAIL, 0))
    if head != _MAGIC:
        return _Fault("bad magic", f"begins with {head!r}, not {_MAGIC!r}")
    if tail[-len(_MAGIC) :] != _MAGIC:
        return _Fault("bad footer", f"ends with {tail[-len(_MAGIC) :]!r}, not {_MAGIC!r}")
    length = int.from_bytes(tail[-8:-4], "little") + 8  # the metadata, its length in 4 bytes, and the magic in 4
    if length > size - len(_MAGIC):
        return _Fault("bad footer", f"its length is {length} of {size} bytes")
    return bytes(tail if length <= len(tail) else source.read_at(length, size - length))


def _rows_fault(metadata: pq.FileMetaData, file: DataFile) -> _Fault | None:
    """Compare the row counts with the manifest, but not the columns: damaged column metadata crashes pyarrow."""
    if metadata.num_row_groups != len(file.row_groups):
        actual = f"{metadata.num_row_groups} row groups"
        return _Fault("rows differ", f"{actual}, the manifest lists {len(file.row_groups)}")
    for index, listed in enumerate(file.row_groups):
        groups = metadata.row_group(index).num_rows
        if groups != listed.groups:
            actual = f"row group {index} has {groups} query groups"
            return _Fault("rows differ", f"{actual}, the manifest lists {listed.groups}")
    return None


def _content_fault(source: pa.NativeFile, file: DataFile) -> _Fault | None:
    digest = hashlib.sha256()
    source.seek(0)
    while block := source.read(_BLOCK):
        digest.update(block)
    if digest.hexdigest() == file.sha256:
        return None
    return _Fault("content differs", f"its SHA-256 begins with {digest.hexdigest()[:8]}, not {file.sha256[:8]}")


def _type_name(column_type: pa.DataType) -> str:
    """A type in words, without the name of list elements, which depends on the writer."""
    return f"list<{column_type.value_type}>" if pa.types.is_list(column_type) else str(column_type)


def _most_common(columns: Mapping[str, ColumnTypes]) -> ColumnTypes:
    """The columns of most files (in a tie, of the first) and those that every data set must have."""
    counted = Counter(tuple(sorted(of_file.items())) for of_file in columns.values() if of_file)
    return dict(counted.most_common(1)[0][0]) | _FORMAT if counted else {}


def _schema_fault(expected: ColumnTypes, actual: ColumnTypes) -> _Fault | None:
    """The first difference between a file's columns and the expected ones."""
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            own_type, usual_type = (columns.get(name, "not there") for columns in (actual, expected))
            return _Fault("schema differs", f"column {name!r} is {own_type}, in the other files {usual_type}")
    return None


def _printable(error: Exception) -> str:
    """The text of an error as one printable line, because it may quote bytes of the file."""
    return " ".join(str(error).split()).rstrip(".").encode("unicode_escape").decode()
