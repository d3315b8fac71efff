"""Whether the Parquet files of a data set are what its manifest lists, at three levels of effort.

Files are examined by threads, which mostly wait for the disk or the network; what is found does not depend on them. A
file on S3 takes no request at the level `sizes`, which lists the directory, a thousand files a request; at `footers`
three small ones (its size, its first four bytes, its last 64 KiB); at `content` one more for every 8 MiB of it.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as arrow

from ltrscale import storage
from ltrscale.data.dataset.manifest import DataFile, Dataset
from ltrscale.progress import Advance

Level = Literal["sizes", "footers", "content"]
Reason = Literal[
    "missing", "size differs", "bad magic", "bad footer", "rows differ", "schema differs", "content differs"
]
Columns = Mapping[str, str]
"""Type of each column of a file, by name."""

_THREADS = 32
_MAGIC = b"PAR1"
_TAIL = 64 << 10
_BLOCK = 8 << 20
_FORMAT = {"gid": "int64", "features": "list<float>", "labels": "list<float>"}


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file: the kind of fault, and what was found."""

    reason: Reason
    detail: str


_MISSING = Fault("missing", "not in its directory")


@dataclass(frozen=True)
class _Place:
    """Where the files of a data set lie: its URL, and the same as pyarrow says it."""

    url: str
    filesystem: Any
    root: str


def examine(
    dataset: Dataset, files: Sequence[DataFile], level: Level, advance: Advance
) -> tuple[dict[str, Fault], Columns]:
    """Compare files of a data set with its manifest.

    The columns of a file must have the names and types that most of the files have; of as many, those of the first.

    Args:
        dataset: an opened data set.
        files: those of its files to look at.
        level: each level includes the ones before it.
        advance: told of every file, with its bytes.

    Returns:
        The faults by path, in the order of the files, and the columns of most files; at level `sizes` it is empty.

    Raises:
        InputError: storage cannot be reached or gives no permission; that is no fault of a file.
    """
    filesystem, root = storage.arrow_filesystem(dataset.url)
    place = _Place(dataset.url, filesystem, root)
    sizes = _list_sizes(place)
    faults: dict[str, Fault] = {}
    columns: dict[str, Columns] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(partial(_examine_file, place, sizes, level), files)
        for file, result in zip(files, found, strict=True):
            if isinstance(result, Fault):
                faults[file.path] = result
            else:
                columns[file.path] = result
            advance(1, file.bytes)
    wanted = _most_common(columns)
    faults |= {path: fault for path, of_file in columns.items() if (fault := _schema_fault(wanted, of_file))}
    return {file.path: faults[file.path] for file in files if file.path in faults}, wanted


def _list_sizes(place: _Place) -> dict[str, int]:
    """Bytes of all files below a directory, by path; none where there is no directory."""
    everything = arrow.FileSelector(place.root, allow_not_found=True, recursive=True)
    with storage.named_errors(place.url):
        found = storage.patiently(lambda: place.filesystem.get_file_info(everything))
    return {info.path: info.size for info in found if info.type == arrow.FileType.File}


def _examine_file(place: _Place, sizes: Mapping[str, int], level: Level, file: DataFile) -> Columns | Fault:
    """The columns of a file, none at level `sizes`, or what is wrong with it."""
    path = f"{place.root}/{file.path}"
    if path not in sizes:
        return _MISSING
    fault = _size_fault(sizes[path], file)
    if fault or level == "sizes":
        return fault or {}
    with storage.named_errors(storage.listed_file(place.url, file.path)):
        return storage.patiently(lambda: _examine_open(place.filesystem, path, level, file))


def _examine_open(filesystem: Any, path: str, level: Level, file: DataFile) -> Columns | Fault:
    """The columns of a file that has to be opened, or what is wrong with it."""
    try:
        source = filesystem.open_input_file(path)
    except FileNotFoundError:  # it went since it was listed
        return _MISSING
    with source:
        found = _size_fault(source.size(), file) or _examine_footer(source, file)
        if level == "content" and not isinstance(found, Fault):
            return _content_fault(source, file) or found
        return found


def _size_fault(size: int, file: DataFile) -> Fault | None:
    if size == file.bytes:
        return None
    return Fault("size differs", f"{size} bytes, the manifest lists {file.bytes}")


def _examine_footer(source: pa.NativeFile, file: DataFile) -> Columns | Fault:
    """The columns of an open file, or what is wrong with its ends, metadata or counts."""
    footer = _read_footer(source)
    if isinstance(footer, Fault):
        return footer
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        columns = {field.name: _type_name(field.type) for field in metadata.schema.to_arrow_schema()}
        return _rows_fault(metadata, file) or columns
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # all from memory: no fault of the storage
        return Fault("bad footer", _one_line(error))


def _read_footer(source: pa.NativeFile) -> bytes | Fault:
    """The end of a Parquet file with all of its metadata, checked for the format's marks."""
    size = source.size()
    head, tail = source.read_at(len(_MAGIC), 0), source.read_at(min(size, _TAIL), max(size - _TAIL, 0))
    if head != _MAGIC:
        return Fault("bad magic", f"begins with {head!r}, not {_MAGIC!r}")
    if tail[-len(_MAGIC) :] != _MAGIC:
        return Fault("bad footer", f"ends with {tail[-len(_MAGIC) :]!r}, not {_MAGIC!r}")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > size - len(_MAGIC):
        return Fault("bad footer", f"its length is {length} of {size} bytes")
    return bytes(tail if length <= len(tail) else source.read_at(length, size - length))


def _rows_fault(metadata: pq.FileMetaData, file: DataFile) -> Fault | None:
    """What differs between the rows of the row groups and the manifest.

    Nothing is asked of a row group's columns: where these are damaged, pyarrow ends the process.
    """
    if metadata.num_row_groups != len(file.row_groups):
        found = f"{metadata.num_row_groups} row groups"
        return Fault("rows differ", f"{found}, the manifest lists {len(file.row_groups)}")
    for index, listed in enumerate(file.row_groups):
        groups = metadata.row_group(index).num_rows
        if groups != listed.groups:
            found = f"row group {index} has {groups} query groups"
            return Fault("rows differ", f"{found}, the manifest lists {listed.groups}")
    return None


def _content_fault(source: pa.NativeFile, file: DataFile) -> Fault | None:
    digest = hashlib.sha256()
    source.seek(0)
    while block := source.read(_BLOCK):
        digest.update(block)
    if digest.hexdigest() == file.sha256:
        return None
    return Fault("content differs", f"its SHA-256 begins with {digest.hexdigest()[:8]}, not {file.sha256[:8]}")


def _type_name(found: pa.DataType) -> str:
    """A type in words; what a list calls its elements, which depends on the writer, is left out."""
    return f"list<{found.value_type}>" if pa.types.is_list(found) else str(found)


def _most_common(columns: Mapping[str, Columns]) -> Columns:
    """The columns that most files have, of as many those of the first file, with what every data set has to have."""
    counted = Counter(tuple(sorted(of_file.items())) for of_file in columns.values() if of_file)
    return dict(counted.most_common(1)[0][0]) | _FORMAT if counted else {}


def _schema_fault(wanted: Columns, found: Columns) -> Fault | None:
    """The first difference between the columns of a file and what they have to be."""
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            ours, others = (of.get(name, "not there") for of in (found, wanted))
            return Fault("schema differs", f"column {name!r} is {ours}, in the other files {others}")
    return None


def _one_line(error: Exception) -> str:
    """What an error says, which may have bytes of the file in it."""
    return " ".join(str(error).split()).rstrip(".").encode("unicode_escape").decode()
