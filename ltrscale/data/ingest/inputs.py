"""What `prepare` reads: its config, the input files that this names, and the units of work that they are cut into.

A unit is a run of input files that is handled from reading to finished data files. Where the input is cut depends on
the list of files and their sizes alone. A unit that knows where it goes on from those before it (`Start`) writes the
same files whatever machine handles it, and whenever.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.writer import Compression
from ltrscale.data.ingest.sources import File, Source, find_features
from ltrscale.errors import InputError

_PERIOD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")


class Input(Config):
    """Files to read, in the order of their names."""

    path: str
    """A file, a directory or a pattern such as s3://bucket/log/*.parquet."""
    period: str | None = None
    """A fixed period for all rows, such as train; query ids of inputs with different fixed periods are unrelated."""
    group_sizes: str | None = None
    """A file with the number of rows of each group, one a line, for svmlight text without qid."""


class Expected(Config):
    """What a period of a known collection holds."""

    groups: int | None = Field(default=None, ge=0)
    """Query groups kept."""
    documents: int | None = Field(default=None, ge=0)
    """Documents (rows) kept."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.groups is None and self.documents is None:
            raise ValueError("expect needs groups or documents of each period that it names")
        return self


class PrepareConfig(Config):
    """What to read, and how to write it."""

    inputs: tuple[Input, ...] = ()
    """What to read; a plain string is a path. A pipeline or job with a synthetic log fills it in."""
    source: Source
    """The format of the inputs."""
    add: bool = False
    """Add new periods to the data set that is there, which keeps its own; without one there it is made."""
    sort: bool = False
    """Bring the rows of a query together first, by an external sort; without it they must be together."""
    sort_memory: str = Field(default="512MB", pattern=r"^[0-9]+(\.[0-9]+)? ?[KMGT]i?B$")
    """Memory of that sort, such as 512MB or 4GB; what needs more is spilled to the disk of TMPDIR."""
    period: str = "all"
    """The period of rows that have none of their own."""
    max_rejected: float = Field(default=0.001, ge=0, le=1)
    """Share of rejected rows above which nothing is committed."""
    expect: dict[str, Expected] = Field(default_factory=dict)
    """Counts by period, for collections whose size is known; nothing is committed where one differs."""
    infinite: Literal["reject", "missing"] = "reject"
    """Rows with a feature that float32 cannot hold: rejected, or kept with that feature as a missing value."""
    max_group: int = Field(default=10_000, ge=1)
    """Documents of the longest group that is accepted."""
    compression: Compression = "zstd"
    """Compression of the data files: zstd is smallest, none is read fastest."""
    row_group_mb: float = Field(default=8, gt=0)
    """Uncompressed megabytes of a row group; small data sets get smaller ones."""
    file_mb: float = Field(default=256, gt=0)
    """Megabytes of a data file after which the next is begun."""
    unit_mb: float = Field(default=256, gt=0)
    """Megabytes of consecutive input files that one task handles; no file is cut. Each has data files of its own."""

    @field_validator("inputs", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        entries = [value] if isinstance(value, str | Mapping) else value
        return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


def list_inputs(inputs: Sequence[Input]) -> list[File]:
    """The files of all inputs, in order.

    Raises:
        InputError: an input is missing, or one of several files has group sizes.
    """
    if not inputs:
        raise InputError("prepare.inputs: nothing to read; name a file, a directory or a pattern")
    files = []
    for entry in inputs:
        urls = storage.list_files(entry.path)
        if entry.group_sizes is not None and len(urls) > 1:
            raise InputError(f"inputs: group_sizes {entry.group_sizes} is for one file, {entry.path} has {len(urls)}")
        sizes = None if entry.group_sizes is None else storage.absolute(entry.group_sizes)
        files += [File(url=url, period=entry.period, group_sizes=sizes) for url in urls]
    return files


def input_fingerprints(config: PrepareConfig) -> dict[str, str]:
    """What tells whether an input file was changed, by URL.

    Raises:
        InputError: an input is missing.
    """
    urls = {url for file in list_inputs(config.inputs) for url in (file.url, file.group_sizes) if url is not None}
    return {url: storage.fingerprint(url) for url in sorted(urls)}


def check_period(period: str, file: str) -> str:
    """The period, where it can name a directory.

    Raises:
        InputError: it cannot.
    """
    if not _PERIOD.fullmatch(period) or ".." in period:
        raise InputError(
            f"{file}: period {period[:100]!r} cannot name a directory; use letters, digits, . _ + and -, at most 100"
        )
    return period


@dataclass(frozen=True)
class Unit:
    """Input files with one fixed period (or none), handled together; `bytes` is their size."""

    number: int
    files: tuple[File, ...]
    sizes: tuple[int, ...]

    @property
    def period(self) -> str:
        """The fixed period, which is the scope of the query ids; empty where there is none."""
        return self.files[0].period or ""

    @property
    def bytes(self) -> int:
        """Bytes of its files."""
        return sum(self.sizes)

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].url}{more}"


def cut_units(
    files: Sequence[File], sizes: Sequence[int], *, unit_bytes: float, sort: bool, first: int = 0
) -> list[Unit]:
    """Cut the input into units: consecutive files of one fixed period of at most `unit_bytes`, or one larger file.

    With `sort`, all files of a fixed period are one unit, wherever they stand. Numbers begin with `first`.

    Example:
        >>> files = [File(url=name) for name in "abcd"]
        >>> [str(unit) for unit in cut_units(files, [5, 5, 20, 1], unit_bytes=10, sort=False)]
        ['a and 1 more', 'c', 'd']
    """
    runs: list[list[int]] = []
    if sort:
        runs = [[i for i, f in enumerate(files) if f.period == p] for p in dict.fromkeys(f.period for f in files)]
    else:
        room = 0.0
        for i, size in enumerate(sizes):
            if not i or files[i].period != files[i - 1].period or size > room:
                runs.append([])
                room = unit_bytes
            runs[-1].append(i)
            room -= size
    return [Unit(k, tuple(files[i] for i in run), tuple(sizes[i] for i in run)) for k, run in enumerate(runs, first)]


@dataclass(frozen=True)
class Work:
    """What all units have in common: how to read, what to write, where; `taken` are periods that may not be added to.

    `first` is the file whose features all others must have.
    """

    config: PrepareConfig
    features: tuple[Feature, ...]
    first: File
    out: str
    taken: frozenset[str] = frozenset()


def open_work(config: PrepareConfig, files: Sequence[File], out: str, taken: Iterable[str] = ()) -> Work:
    """Look at the inputs' features.

    Raises:
        InputError: they cannot be told, or differ between files.
    """
    return Work(config, find_features(config.source, files), files[0], out, frozenset(taken))


@dataclass(frozen=True)
class Start:
    """Where a unit goes on: the gid of its first group, which is the number of groups before, and their documents."""

    gid: int = 0
    documents: int = 0
