"""Pre-flight: check a job's files against their manifests before any worker starts, at one of three levels of effort.

Files that are missing or differ from their manifest are reported and left out, up to a limit. The choice is frozen: a
resumed run reads the same files, even if other files have become bad or good since.

Threads examine the files, because they mostly wait for the disk or the network; the result does not depend on their
number. Requests per file on S3: none at level `sizes`, which lists the directory, a thousand files per request; three
small ones at `footers` (size, first four bytes, last 64 KiB); and one more for every 8 MiB of the file at `content`.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as arrow
from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, Strict, validate
from ltrscale.data.dataset.columns import GOAL, with_lists
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
Contents = Mapping[str, Mapping[str, Sequence[str]]]
"""Content hashes of files in order, by data set URL and period, as plain data."""

_NAMED = 3
_READ = ("gid", "features", "weights", "positions", "gains")
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
    named = [split.labels] if isinstance(split.labels, str) else split.labels
    read = [name if name in ("labels", "relevance") else f"{GOAL}{name}" for name in named]
    for (first, first_columns), (url, second_columns) in itertools.pairwise(opened):
        for column in (*_READ, *read):
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


class _Fault(Exception):  # noqa: N818 - of a file, which the check reports
    """How a file differs from its manifest: the kind, and a description."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason: Reason = reason
        self.detail = detail


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
    sizes = _list_sizes(dataset.url)
    found: list[ColumnTypes | _Fault] = []
    seen: dict[str, ColumnTypes] = {}  # the files of a data set share them
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(files), _AT_ONCE):  # in blocks, because the pool keeps all its inputs
            # a new file system, whose keys are fresh: this may take hours
            some, place = [*files[start : start + _AT_ONCE]], storage.arrow_filesystem(dataset.url)
            results = pool.map(partial(_columns_or_fault, dataset.url, place, sizes, level), some)
            for file, result in zip(some, results, strict=True):
                found.append(result if isinstance(result, _Fault) else seen.setdefault(str(result), result))
                advance(1, file.bytes)
    usual = _most_common(each for each in found if not isinstance(each, _Fault))
    bad_files = (
        BadFile(path=file.path, reason=fault.reason, detail=fault.detail, lost=total_of(file.row_groups))
        for file, each in zip(files, found, strict=True)
        if (fault := each if isinstance(each, _Fault) else _schema_fault(usual, each))
    )
    return tuple(bad_files), usual


def _list_sizes(url: str) -> dict[str, int]:
    """Bytes of all files below a directory, by name; empty if the directory is missing."""
    if not storage.is_local(url):
        return storage.sizes_below(url)
    filesystem, root = storage.arrow_filesystem(url)
    with storage.named_errors(url):  # not `sizes_below`, which does not follow links
        infos = filesystem.get_file_info(arrow.FileSelector(root, allow_not_found=True, recursive=True))
    return {info.path.removeprefix(f"{root}/"): info.size for info in infos if info.type == arrow.FileType.File}


def _columns_or_fault(
    url: str, place: tuple[Any, str], sizes: Mapping[str, int], level: CheckLevel, file: DataFile
) -> ColumnTypes | _Fault:
    """The columns of a file (empty at level `sizes`), or its fault."""
    filesystem, root = place
    opened = partial(_columns_of, filesystem, f"{root}/{file.path}", level, file)
    try:
        if file.path not in sizes:
            raise _missing()
        _check_size(sizes[file.path], file)
        if level == "sizes":
            return {}
        with storage.named_errors(storage.listed_file(url, file.path)):
            try:
                return storage.patiently(opened)
            except _Fault:
                if storage.is_local(url):
                    raise
                return storage.patiently(opened)  # pyarrow accepts an answer that is shorter than its request
    except _Fault as fault:
        return fault


def _missing() -> _Fault:
    return _Fault("missing", "not in its directory")


def _columns_of(filesystem: Any, path: str, level: CheckLevel, file: DataFile) -> ColumnTypes:
    """The columns of a file that has to be opened."""
    try:
        source = filesystem.open_input_file(path)
    except FileNotFoundError:  # deleted since the directory was listed
        raise _missing() from None
    with source:
        _check_size(source.size(), file)
        columns = _examine_footer(source, file)
        if level == "content":
            _check_content(source, file)
        return columns


def _check_size(size: int, file: DataFile) -> None:
    if size != file.bytes:
        raise _Fault("size differs", f"{size} bytes, the manifest lists {file.bytes}")


def _examine_footer(source: pa.NativeFile, file: DataFile) -> ColumnTypes:
    """The columns of an open file, whose ends, metadata and counts are checked."""
    footer = _read_footer(source)
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        columns = {field.name: _type_name(field.type) for field in with_lists(metadata.schema.to_arrow_schema())}
        _check_rows(metadata, file)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # parsed from memory, so not a fault of storage
        raise _Fault("bad footer", _printable(error)) from error
    return columns


def _read_footer(source: pa.NativeFile) -> bytes:
    """The end of a Parquet file with all of its metadata, checked for the format's marks."""
    size = source.size()
    head, tail = source.read_at(len(_MAGIC), 0), source.read_at(min(size, _TAIL), max(size - _TAIL, 0))
    if head != _MAGIC:
        raise _Fault("bad magic", f"begins with {head!r}, not {_MAGIC!r}")
    if tail[-len(_MAGIC) :] != _MAGIC:
        raise _Fault("bad footer", f"ends with {tail[-len(_MAGIC) :]!r}, not {_MAGIC!r}")
    length = int.from_bytes(tail[-8:-4], "little") + 8  # the metadata, its length in 4 bytes, and the magic in 4
    if length > size - len(_MAGIC):
        raise _Fault("bad footer", f"its length is {length} of {size} bytes")
    return bytes(tail if length <= len(tail) else source.read_at(length, size - length))


def _check_rows(metadata: pq.FileMetaData, file: DataFile) -> None:
    """Compare the row counts with the manifest, but not the columns: damaged column metadata crashes pyarrow."""
    if metadata.num_row_groups != len(file.row_groups):
        actual = f"{metadata.num_row_groups} row groups"
        raise _Fault("rows differ", f"{actual}, the manifest lists {len(file.row_groups)}")
    for index, listed in enumerate(file.row_groups):
        groups = metadata.row_group(index).num_rows
        if groups != listed.groups:
            actual = f"row group {index} has {groups} query groups"
            raise _Fault("rows differ", f"{actual}, the manifest lists {listed.groups}")


def _check_content(source: pa.NativeFile, file: DataFile) -> None:
    digest = hashlib.sha256()
    source.seek(0)
    while block := source.read(_BLOCK):
        digest.update(block)
    if digest.hexdigest() != file.sha256:
        raise _Fault("content differs", f"its SHA-256 begins with {digest.hexdigest()[:8]}, not {file.sha256[:8]}")


def _type_name(column_type: pa.DataType) -> str:
    """A type in words, without the name of list elements, which depends on the writer."""
    return f"list<{column_type.value_type}>" if pa.types.is_list(column_type) else str(column_type)


def _most_common(columns: Iterable[ColumnTypes]) -> ColumnTypes:
    """The columns of most files (in a tie, of the first) and those that every data set must have."""
    counted = Counter(tuple(sorted(of_file.items())) for of_file in columns if of_file)
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
