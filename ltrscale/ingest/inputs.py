"""The input of `prepare`: its config, the files that it names, and the units of work made from them.

A unit is a run of input files, handled together from reading to finished data files. The cuts depend only on the list
of files and their sizes. Given the counts of what lies before it, a unit writes the same files anywhere at any time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ltrscale import storage
from ltrscale.config import Config, validate
from ltrscale.data.dataset.manifest import Dataset, Feature
from ltrscale.data.dataset.origin import first_source, inputs_of, place_beside, read_as
from ltrscale.data.dataset.writer import Compression
from ltrscale.errors import InputError
from ltrscale.ingest.baidu import BaiduUltr
from ltrscale.ingest.events import Events, made_rows
from ltrscale.ingest.grouplogs import GroupRows
from ltrscale.ingest.items import Items
from ltrscale.ingest.lakes import Lake, table_version
from ltrscale.ingest.letor import Letor
from ltrscale.ingest.mapping import ColumnMapping, ListColumns
from ltrscale.ingest.source import Encoders, File, Reader, Source
from ltrscale.ingest.texts import Encoding
from ltrscale.ingest.validate import Duplicates

SourceConfig = Annotated[Letor | Items | GroupRows | Events | BaiduUltr, Field(discriminator="kind")]


class InputFiles(Config):
    """Files to read, in the order of their names."""

    path: str
    """A file, a directory or a pattern such as s3://bucket/log/*.parquet."""
    period: str | None = None
    """A fixed period for all rows, such as train; query ids of inputs with different fixed periods are unrelated."""
    group_sizes: str | None = None
    """A file with the number of rows of each group, one per line, for svmlight text without qid."""
    table: Lake | None = None
    """The path is a table of Delta Lake or Apache Iceberg: its directory or, for Iceberg, a metadata file."""
    version: int | None = Field(default=None, ge=0)
    """Version of a Delta table or id of an Iceberg snapshot; the newest one by default."""
    since: int | None = Field(default=None, ge=0, exclude_if=lambda since: since is None)
    """Read only the files that were added to a Delta table after this version, up to `version`: those that
    `prepare.add` adds to a data set. Periods whose rows were rewritten since are named, and stay as they are there."""

    @model_validator(mode="after")
    def _version_of_a_table(self) -> Self:
        if self.version is not None and self.table is None:
            raise ValueError("version is that of a table; set table to delta or iceberg")
        if self.since is not None and self.table != "delta":
            raise ValueError("since is a version of a Delta table; set table to delta")
        return self


def _paths(value: Any) -> Any:
    entries = [value] if isinstance(value, str | Mapping) else value
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


Inputs = Annotated[tuple[InputFiles, ...], BeforeValidator(_paths)]
"""Several inputs; a plain string is a path."""


class Expected(Config):
    """The size of a period of a known collection."""

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
    """The inputs to read, and the way to write them."""

    fixed: ClassVar = {"row_group_mb": 8, "file_mb": 256}

    inputs: Inputs = ()
    """The inputs; a plain string is a path. A pipeline or job with a synthetic log fills it in."""
    source: SourceConfig
    """The format of the inputs."""
    add: bool = False
    """Add new periods to the existing data set, which keeps its own periods; if there is none, make it."""
    sort: bool = False
    """Bring the rows of a query together first, by an external sort; otherwise the inputs must have them together."""
    sort_memory: str = Field(default="512MB", pattern=r"^[0-9]+(\.[0-9]+)? ?[KMGT]i?B$")
    """Memory of that sort, such as 512MB or 4GB; beyond it rows are spilled to the disk of TMPDIR."""
    period: str = "all"
    """The period of rows without one."""
    max_rejected: float = Field(default=0.001, ge=0, le=1)
    """Share of rejected rows above which nothing is committed."""
    expect: dict[str, Expected] = Field(default_factory=dict)
    """Counts by period, for collections whose size is known; nothing is committed if a count differs."""
    infinite: Literal["reject", "missing"] = "reject"
    """Rows with a feature too large for float32: rejected, or kept with a missing value for the feature."""
    duplicates: Duplicates = "reject"
    """Rows of a group with the same document id: `reject` keeps the first and rejects the others, which count towards
    max_rejected. The other values say which row stays, and the others are merged into it: `keep_first`, `keep_last`,
    or `max_label`, as for a log with a row for each view, cart and purchase."""
    max_group: int = Field(default=10_000, ge=1)
    """Documents of the longest group that is accepted; a longer one is rejected."""
    compression: Compression = "zstd"
    """Compression of the data files: zstd is smallest, none is read faster. lz4_bytes is read fastest: it also stores
    the features of a group as one value of bytes, which other tools have to convert."""
    unit_mb: float = Field(default=256, gt=0)
    """Megabytes of consecutive input files that one task handles. No input file is cut, and each task writes its own
    data files."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        history = self.source.known_before
        if self.add and history is not None and history.events is None:
            raise ValueError("add: the events before the added rows are elsewhere; name them as source.history.events")
        if isinstance(self.source, Events) and (fixed := [each.path for each in self.inputs if each.period]):
            raise ValueError(f"inputs: {fixed[0]} has a fixed period, and events have times; leave period out")
        match self.source:
            case Items(columns=ColumnMapping(item=None)) | Events(columns=ColumnMapping(item=None)):
                key = "item"
            case GroupRows(columns=ListColumns(docs=None)):
                key = "docs"
            case _:
                return self
        if self.duplicates != "reject":
            raise ValueError(f"duplicates: name the column with the ids of documents, source.columns.{key}")
        return self


def list_inputs(inputs: Sequence[InputFiles]) -> list[File]:
    """The files of all inputs, in order.

    Raises:
        InputError: an input is missing, a table cannot be read, or one of several files has group sizes.
    """
    if not inputs:
        raise InputError("prepare.inputs: nothing to read; name a file, a directory or a pattern")
    files = []
    for entry in inputs:
        if entry.table is not None:
            number, read, rewritten = table_version(entry.path, entry.table, entry.version, entry.since)
            version = f"{entry.table} {number}"
            for is_rewritten, of_table in ((False, read), (True, rewritten)):
                files += [File(url, entry.period, None, version, lake, is_rewritten) for url, lake in of_table]
            continue
        listed = storage.list_files(entry.path)
        if entry.group_sizes is not None and len(listed) > 1:
            raise InputError(f"inputs: group_sizes {entry.group_sizes} is for one file, {entry.path} has {len(listed)}")
        sizes = None if entry.group_sizes is None else storage.absolute(entry.group_sizes)
        files += [File(url=url, period=entry.period, group_sizes=sizes) for url in listed]
    return files


def raw_files(dataset: Dataset) -> list[str]:
    """The files of raw rows that made a data set, if they still exist; of events those of the rows that they became."""
    if read_as(dataset).get("source", {}).get("kind") == "events":
        return [file.url for file in made_rows(place_beside(first_source(dataset).url, "rows"))[0]]
    urls = []
    for entry in inputs_of(dataset):
        try:
            files = list_inputs([validate(InputFiles, entry, dataset.url)])
            urls += [f.url for f in files if not f.is_rewritten and (f.lake is None or f.lake.is_plain)]
        except InputError:
            continue
    return urls


def fingerprints(files: Sequence[File], source: Source) -> dict[str, str]:
    """A fingerprint of each file, by URL, and of other files that their source reads; it changes when the file does."""
    urls = {url: file.version for file in files for url in (file.url, file.group_sizes) if url is not None}
    urls |= dict.fromkeys(source.files_beside())
    stamps = storage.at_once(storage.fingerprint, sorted(urls))
    return {
        url: stamp + (f" of {version}" if version else "")
        for stamp, (url, version) in zip(stamps, sorted(urls.items()), strict=True)
    }


@dataclass(frozen=True)
class Unit:
    """Input files with one fixed period (or none), handled together; `bytes` is their size."""

    number: int
    files: tuple[File, ...]
    sizes: tuple[int, ...]

    @property
    def period(self) -> str:
        """The fixed period, the scope of the query ids; empty if there is none."""
        return self.files[0].period or ""

    @property
    def bytes(self) -> int:
        """Bytes of the unit's files."""
        return sum(self.sizes)

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].url}{more}"


def cut_units(
    files: Sequence[File], sizes: Sequence[int], *, unit_bytes: float, sort: bool, first: int = 0
) -> list[Unit]:
    """Cut the input into units: consecutive files of one fixed period with at most `unit_bytes`, or one larger file.

    With `sort`, all files of a fixed period are one unit, even if others lie between. Numbers begin with `first`.

    Example:
        >>> files = [File(url=name) for name in "abcd"]
        >>> [str(unit) for unit in cut_units(files, [5, 5, 20, 1], unit_bytes=10, sort=False)]
        ['a and 1 more', 'c', 'd']
    """
    runs: list[list[int]] = []
    if sort:
        runs = [[i for i, f in enumerate(files) if f.period == p] for p in dict.fromkeys(f.period for f in files)]
    else:
        remaining = 0.0
        for i, size in enumerate(sizes):
            if not i or files[i].period != files[i - 1].period or size > remaining:
                runs.append([])
                remaining = unit_bytes
            runs[-1].append(i)
            remaining -= size
    return [Unit(k, tuple(files[i] for i in run), tuple(sizes[i] for i in run)) for k, run in enumerate(runs, first)]


@dataclass(frozen=True)
class UnitSettings:
    """The settings that all units share; `taken` are the existing periods, which may not be written.

    `first` is the file that sets the features for all others; `encoding` makes tokens of texts.
    """

    config: PrepareConfig
    features: tuple[Feature, ...]
    first: File
    out: str
    taken: frozenset[str] = frozenset()
    encoding: Encoding | None = None

    def open(self, encoders: Encoders) -> Reader:
        """The reader of all files, as `Source.open`."""
        return self.config.source.open(self.features, first=self.first.url, encoders=encoders, encoding=self.encoding)
