"""Pre-flight: check a job's files against their manifests before any worker starts.

Files that are missing or differ from their manifest are reported and left out, up to a limit. The choice is frozen: a
resumed run reads the same files, even if other files have become bad or good since.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, Strict, validate
from ltrscale.data.dataset.files import Counts, DataFiles, total_of
from ltrscale.data.dataset.goals import GOAL
from ltrscale.data.dataset.integrity import BadFile, CheckLevel, ColumnTypes, examine
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.periods import SplitPart, resolve_periods
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError
from ltrscale.origin import is_current, made_by
from ltrscale.progress import Report, log, progress

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
