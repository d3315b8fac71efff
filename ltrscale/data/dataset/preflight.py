"""Pre-flight: the manifests of what a job reads, checked against the files before a worker is taken.

Files that are missing or are not what their manifest lists are named and left out, up to a limit. What is left is
frozen: a run that is resumed reads the same files, even if others turn bad or good again meanwhile.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, is_current, made_by, validate
from ltrscale.data.dataset.integrity import Columns, Level, Reason, examine
from ltrscale.data.dataset.manifest import Counts, DataFile, Dataset, ListedPath
from ltrscale.data.dataset.split import Split, chosen_files
from ltrscale.errors import InputError
from ltrscale.progress import Advance, Report, log, progress

_NAMED = 3
_READ = ("gid", "features", "weights", "positions")


Contents = Mapping[str, Mapping[str, Sequence[str]]]
"""Content hashes of files in order, by the URL of their data set and by period; plain data."""


class PreflightConfig(Config):
    """How files are checked before training, and how many may be left out."""

    check: Level = "footers"
    """`sizes` lists directories; `footers` also reads each file's Parquet metadata; `content` also all of its bytes."""
    max_bad: float = Field(0.0, ge=0, le=1)
    """Share of a split's query groups that may be in bad files, which are left out; beyond it the job stops."""


class BadFile(Config):
    """A file that is not what its manifest lists, why, and the counts that are lost with it."""

    path: ListedPath
    """Below the data set directory."""
    reason: Reason
    detail: str
    lost: Counts


class CheckedDataset(Config):
    """The files of a data set that were checked, with what the manifest says that they hold."""

    url: str
    hash: str
    files: int
    counts: Counts
    bad: tuple[BadFile, ...]
    """Files that are left out, in the order of the manifest; all others are good."""


class Preflight(Config):
    """What a pre-flight found."""

    check: Level
    datasets: tuple[CheckedDataset, ...]
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
        bad = list(self.bad.values())
        listed, lost = _total(dataset.counts for dataset in self.datasets), _total(file.lost for file in bad)
        files = sum(dataset.files for dataset in self.datasets)
        return {
            "preflight": self.check,
            "files": files,
            "files_good": files - len(bad),
            "files_quarantined": len(bad),
            "reasons": dict(Counter(file.reason for file in bad)),
            **{name: getattr(listed, name) for name in Counts._fields},
            **{f"{name}_left_out": getattr(lost, name) for name in Counts._fields},
        }

    def __str__(self) -> str:
        """One line: files, and what is left out with the bad ones."""
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
    fresh: bool = False,
) -> Preflight:
    """The pre-flight that is frozen at a URL for this very run; it is made, and committed there, if there is none.

    Args:
        splits: what the run reads, by the names that errors call them.
        config: level and limit.
        url: directory of the result, below the run's own.
        origin: what tells the run from another: its config and the hashes of its data sets.
        report: receives a record with the counts.
        fresh: make it anew in any case.

    Raises:
        InputError: as `preflight`.
    """
    identity = {**made_by("preflight", config, {}), "run": dict(origin)}
    if not fresh and is_current(url, identity):
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
    """What some splits read together, file by file.

    Raises:
        InputError: as `select`, before files are opened.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for split in splits:
        for url, (_, files) in zip(split.data, chosen_files(split), strict=True):
            for period in {file.period for file in files}:
                found.setdefault(url, {})[period] = [file.sha256 for file in files if file.period == period]
    return found


def difference(before: Contents, now: Contents) -> str:
    """What a run that read `before` did otherwise than one that reads `now`, and the way back to it; "" for nothing.

    Data sets of which only one of the two tells are passed over.
    """
    for url, periods in now.items():
        read = before.get(url, periods)
        if added := periods.keys() - read.keys():
            return f"did not read period {min(added)!r} of {url}: name the periods that it read to go on with it"
        if gone := read.keys() - periods.keys():
            return f"read period {min(gone)!r} of {url} too: put it back, or name it, to go on with it"
        for period, files in periods.items():
            if list(files) != list(read[period]):
                return f"read other files of period {period!r} of {url}: put them back to go on with it"
    return ""


def read_by(url: str) -> Contents:
    """What was chosen by the run that a pre-flight is frozen for at a URL; nothing where none is, or it tells not."""
    found: Contents = (storage.read_manifest(url) or {}).get("preflight", {}).get("read", {})
    return found


def preflight(splits: Mapping[str, Split], config: PreflightConfig) -> Preflight:
    """Check the files that some splits read; each file is checked once.

    Args:
        splits: by the names that errors call them.
        config: level and limit.

    Raises:
        InputError: more of a split is in bad files than the limit allows (names the first), its data sets do not have
            the same columns, or storage cannot be reached.
    """
    chosen = {name: chosen_files(split) for name, split in splits.items()}
    wanted = _wanted(files for of_split in chosen.values() for files in of_split)
    found: list[CheckedDataset] = []
    columns: dict[str, Columns] = {}
    with progress("pre-flight", sum(file.bytes for _, files in wanted for file in files), unit="files") as advance:
        for dataset, files in wanted:
            of_dataset, columns[dataset.url] = _check_dataset(dataset, files, config.check, advance)
            found.append(of_dataset)
    result = Preflight(check=config.check, datasets=tuple(found), read=contents_of_read(splits.values()))
    for name, of_split in chosen.items():
        _check_limit(name, of_split, result.bad, config.max_bad)
        _check_columns(name, {dataset.url: columns[dataset.url] for dataset, _ in of_split}, splits[name])
    return result


def _wanted(parts: Iterable[tuple[Dataset, Sequence[DataFile]]]) -> list[tuple[Dataset, list[DataFile]]]:
    """Every data set once, with all of its files that some split reads, in the order of the manifest."""
    datasets: dict[str, Dataset] = {}
    paths: dict[str, set[str]] = {}
    for dataset, files in parts:
        datasets.setdefault(dataset.url, dataset)
        paths.setdefault(dataset.url, set()).update(file.path for file in files)
    return [(d, [file for file in d.manifest.files if file.path in paths[url]]) for url, d in datasets.items()]


def _check_dataset(
    dataset: Dataset, files: Sequence[DataFile], level: Level, advance: Advance
) -> tuple[CheckedDataset, Columns]:
    """What was found of a data set, and the columns of most of its files."""
    faults, columns = examine(dataset, files, level, advance)
    bad = tuple(
        BadFile(path=file.path, reason=fault.reason, detail=fault.detail, lost=_counts([file]))
        for file in files
        if (fault := faults.get(file.path))
    )
    checked_ = CheckedDataset(
        url=dataset.url,
        hash=dataset.manifest.hash_of({file.period for file in files}),
        files=len(files),
        counts=_counts(files),
        bad=bad,
    )
    return checked_, columns


def _check_limit(
    name: str, of_split: Sequence[tuple[Dataset, Sequence[DataFile]]], bad: Mapping[str, BadFile], max_bad: float
) -> None:
    """Check that no more of a split's query groups are in bad files than the limit allows."""
    urls = {storage.join(dataset.url, file.path): file for dataset, files in of_split for file in files}
    its_bad = {url: bad[url] for url in urls if url in bad}
    lost, listed = _total(file.lost for file in its_bad.values()).groups, _counts(urls.values()).groups
    if lost > max_bad * listed:
        raise InputError(
            f"{name}: {len(its_bad)} of {len(urls)} files, with {lost:,} of {listed:,} query groups, are not what the "
            f"manifest lists: {_named(its_bad)}; restore them or prepare the data set again, or set preflight.max_bad "
            f"above {max_bad:g} to go on without them"
        )


def _check_columns(name: str, columns: Mapping[str, Columns], split: Split) -> None:
    """Check that the data sets of a split have the same columns of those that are read together."""
    known = [(url, of_dataset) for url, of_dataset in columns.items() if of_dataset]  # no file was read of the others
    for (first, ours), (url, theirs) in itertools.pairwise(known):
        for column in (*_READ, split.labels):
            if ours.get(column) != theirs.get(column):
                types = [of_dataset.get(column, "not there") for of_dataset in (theirs, ours)]
                raise InputError(
                    f"{name}: column {column!r} is {types[0]} in {url} and {types[1]} in {first}; "
                    "prepare both with the same columns"
                )


def _counts(files: Iterable[DataFile]) -> Counts:
    """What some files hold together."""
    return _total(counts for file in files for counts in file.row_groups)


def _total(counts: Iterable[Counts]) -> Counts:
    columns = list(zip(*counts, strict=True))
    return Counts(*map(sum, columns)) if columns else Counts(0, 0, 0)


def _named(bad: Mapping[str, BadFile]) -> str:
    """The first bad files with what is wrong with them."""
    first = [f"{url} ({file.reason}: {file.detail})" for url, file in list(bad.items())[:_NAMED]]
    more = [f"and {len(bad) - _NAMED} more"] if len(bad) > _NAMED else []
    return ", ".join(first + more)
