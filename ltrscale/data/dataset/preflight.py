"""Pre-flight: check a job's files against their manifests before any worker starts.

Files that are missing or differ from their manifest are reported and left out, up to a limit. The choice is frozen: a
resumed run reads the same files, even if other files have become bad or good since.

Files are compared at three levels of effort. Threads examine the files, because they mostly wait for the disk or the
network; the result does not depend on their number. Requests per file on S3: none at level `sizes`, which lists the
directory, a thousand files per request; three small ones at `footers` (size, first four bytes, last 64 KiB); and one
more for every 8 MiB of the file at `content`.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as arrow
from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, Strict, validate
from ltrscale.data.dataset.files import Counts, DataFile, DataFiles, ListedPath, total_of
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.split import Split, SplitPart, resolve_periods
from ltrscale.errors import InputError
from ltrscale.origin import is_current, made_by
from ltrscale.progress import Advance, Report, log, progress

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
        columns = {field.name: _type_name(field.type) for field in metadata.schema.to_arrow_schema()}
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


_NAMED = 3
_READ = ("gid", "features", "weights", "positions", "gains")


Contents = Mapping[str, Mapping[str, Sequence[str]]]
"""Content hashes of files in order, by data set URL and period, as plain data."""


class PreflightConfig(Config):
    """The check of files before training, and the share that may be left out."""

    check: CheckLevel = "footers"
    """`sizes` lists directories; `footers` also reads each file's Parquet metadata; `content` also all its bytes."""
    max_bad: float = Field(0.0, ge=0, le=1)
    """Share of a split's query groups that may be in bad files, which are left out; above it the job stops."""


class _CheckedDataset(Strict):
    """The checked files of a data set, with their counts by the manifest."""

    url: str
    hash: str
    files: int
    counts: Counts
    bad: tuple[BadFile, ...]
    """Files that are left out, in the order of the manifest; all others are good."""


class Preflight(Strict):
    """The result of a pre-flight."""

    check: CheckLevel
    datasets: tuple[_CheckedDataset, ...]
    read: dict[str, dict[str, list[str]]]
    """All files that were chosen, bad ones too: content hashes by URL and period; see `contents_of_read`."""

    @property
    def bad(self) -> dict[str, BadFile]:
        """The files that are left out, by URL."""
        return {storage.join(dataset.url, bad.path): bad for dataset in self.datasets for bad in dataset.bad}

    @property
    def without(self) -> frozenset[str]:
        """URLs of the files to leave out, for `select`."""
        return frozenset(self.bad)

    def record(self) -> dict[str, object]:
        """The counts as a record of metrics."""
        bad_files = list(self.bad.values())
        total, lost = total_of(dataset.counts for dataset in self.datasets), total_of(file.lost for file in bad_files)
        files = sum(dataset.files for dataset in self.datasets)
        return {
            "preflight": self.check,
            "files": files,
            "files_good": files - len(bad_files),
            "files_quarantined": len(bad_files),
            "reasons": dict(Counter(file.reason for file in bad_files)),
            **{name: getattr(total, name) for name in Counts._fields},
            **{f"{name}_left_out": getattr(lost, name) for name in Counts._fields},
        }

    def __str__(self) -> str:
        """One line: the files, and the groups left out with bad files."""
        record = self.record()
        if not self.bad:
            return f"{record['files']:,} files, all good"
        return (
            f"{record['files']:,} files, {record['files_good']:,} good, {record['files_quarantined']:,} quarantined: "
            f"{_named(self.bad)}; {record['groups_left_out']:,} of {record['groups']:,} groups left out"
        )


def checked(
    splits: Mapping[str, Split],
    config: PreflightConfig,
    url: str,
    origin: Mapping[str, Any],
    *,
    report: Report,
) -> Preflight:
    """Load the pre-flight frozen at a URL for the run of this origin, or make it and commit it there.

    `report` receives a record with the counts. Raises as `preflight`.
    """
    identity = {**made_by("preflight", config, {}), "run": dict(origin)}
    if is_current(url, identity):
        result = validate(Preflight, (storage.read_manifest(url) or {})["preflight"], url)
        log.info("pre-flight, as this run began: %s", result)
    else:
        result = preflight(splits, config)
        with storage.Commit(url) as commit:
            commit.finish({"made_by": identity, "preflight": result.model_dump(mode="json")})
        (log.warning if result.bad else log.info)("pre-flight: %s", result)
    report(result.record())
    return result


def contents_of_read(splits: Iterable[Split]) -> Contents:
    """The content hashes of the files that some splits read together; raises as `resolve_periods`."""
    contents: dict[str, dict[str, list[str]]] = {}
    for split in splits:
        for url, part in zip(split.data, resolve_periods(split), strict=True):
            for period, of_period in part.files.by_period.items():
                contents.setdefault(url, {})[period] = of_period.sha256
    return contents


def difference(before: Contents, now: Contents) -> str:
    """How a run that read `before` first differs from one that reads `now`, with the remedy; "" if it does not.

    Data sets in only one of the two are skipped.
    """
    for url, periods in now.items():
        read = before.get(url, periods)
        if added := periods.keys() - read.keys():
            return f"did not read period {min(added)!r} of {url}: name the periods that it read to go on with it"
        if removed := read.keys() - periods.keys():
            return f"read period {min(removed)!r} of {url} too: put it back, or name it, to go on with it"
        for period, files in periods.items():
            if list(files) != list(read[period]):
                return f"read other files of period {period!r} of {url}: put them back to go on with it"
    return ""


def read_by(url: str) -> Contents:
    """The files chosen by the run with a pre-flight at a URL; empty if there is none."""
    manifest = storage.read_manifest(url)
    return {} if manifest is None else validate(Preflight, manifest["preflight"], url).read


def preflight(splits: Mapping[str, Split], config: PreflightConfig) -> Preflight:
    """Check the files that some splits read, each file once.

    Raises:
        InputError: bad files hold more of a split than the limit allows (names the first), its data sets do not have
            the same columns, or storage cannot be reached.
    """
    chosen = {name: resolve_periods(split) for name, split in splits.items()}
    files_to_check = _wanted(part for of_split in chosen.values() for part in of_split)
    datasets: list[_CheckedDataset] = []
    columns: dict[str, ColumnTypes] = {}
    size = sum(int(files.bytes_F.sum()) for _, files in files_to_check)
    with progress("pre-flight", size, unit="files") as advance:
        for dataset, files in files_to_check:
            bad_files, columns[dataset.url] = examine(dataset, files, config.check, advance)
            checked_dataset = _CheckedDataset(
                url=dataset.url,
                hash=dataset.manifest.hash_of(files.periods),
                files=len(files),
                counts=files.counts(),
                bad=bad_files,
            )
            datasets.append(checked_dataset)
    result = Preflight(check=config.check, datasets=tuple(datasets), read=contents_of_read(splits.values()))
    for name, of_split in chosen.items():
        _check_limit(name, of_split, result.bad, config.max_bad)
        _check_columns(name, {part.dataset.url: columns[part.dataset.url] for part in of_split}, splits[name])
    return result


def _wanted(parts: Iterable[SplitPart]) -> list[tuple[Dataset, DataFiles]]:
    """Each data set once, with all its files that any split reads, in the order of the manifest."""
    datasets: dict[str, Dataset] = {}
    periods: dict[str, set[str]] = {}
    for part in parts:
        datasets.setdefault(part.dataset.url, part.dataset)
        periods.setdefault(part.dataset.url, set()).update(part.periods)
    return [(dataset, dataset.manifest.files.in_periods(periods[url])) for url, dataset in datasets.items()]


def _check_limit(name: str, of_split: Sequence[SplitPart], bad_files: Mapping[str, BadFile], max_bad: float) -> None:
    """Check that bad files hold at most the allowed share of a split's query groups."""
    urls = {url for part in of_split for url in part.urls}
    bad_of_split = {url: bad for url, bad in bad_files.items() if url in urls}
    lost = total_of(file.lost for file in bad_of_split.values()).groups
    total = total_of(part.files.counts() for part in of_split).groups
    if lost > max_bad * total:
        raise InputError(
            f"{name}: {len(bad_of_split)} of {len(urls)} files, with {lost:,} of {total:,} query groups, are not "
            f"what the manifest lists: {_named(bad_of_split)}; restore them or prepare the data set again, or set "
            f"preflight.max_bad above {max_bad:g} to go on without them"
        )


def _check_columns(name: str, columns: Mapping[str, ColumnTypes], split: Split) -> None:
    """Check that the data sets of a split agree in the columns that are read together."""
    opened = [(url, of_dataset) for url, of_dataset in columns.items() if of_dataset]  # the others had no file opened
    for (first, first_columns), (url, second_columns) in itertools.pairwise(opened):
        for column in (*_READ, split.labels):
            if first_columns.get(column) != second_columns.get(column):
                types = [of_dataset.get(column, "not there") for of_dataset in (second_columns, first_columns)]
                raise InputError(
                    f"{name}: column {column!r} is {types[0]} in {url} and {types[1]} in {first}; "
                    "prepare both with the same columns"
                )


def _named(bad_files: Mapping[str, BadFile]) -> str:
    """The first bad files with their faults."""
    first = [f"{url} ({file.reason}: {file.detail})" for url, file in list(bad_files.items())[:_NAMED]]
    ending = [f"and {len(bad_files) - _NAMED} more"] if len(bad_files) > _NAMED else []
    return ", ".join(first + ending)
