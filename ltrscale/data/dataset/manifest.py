"""The manifest of a data set directory: its features, files, counts and origin.

A data set is what its manifest lists. Counts are kept per row group, so that plans and splits are made without opening
a data file.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from ltrscale import storage
from ltrscale.config import Config, digest, validate
from ltrscale.errors import InputError
from ltrscale.progress import log


class Feature(Config):
    """A feature column. Categorical codes are integers below 2**24, stored as floats, exactly."""

    name: str
    kind: Literal["numeric", "categorical"] = "numeric"


ListedPath = Annotated[str, AfterValidator(storage.listed_path)]
"""Of a file below the directory whose manifest lists it."""
Period = Annotated[str, AfterValidator(storage.period_name)]
"""The name of a period."""
_MOST_GROUPS, _MOST_DOCUMENTS = 1 << 26, 1 << 31


def places(
    wanted: Sequence[Feature], there: Sequence[Feature], *, whose: str, where: str = "the data"
) -> list[int] | None:
    """Where features stand among those that are there, by name; None where these are the same in the same order.

    What else is there is not read, which is logged once.

    Args:
        wanted: the features that are to be read, in order.
        there: the features of some data, in order.
        whose: what has the wanted features, for the error.
        where: the data.

    Raises:
        InputError: some are missing, or of another kind; all of them are named.

    Example:
        >>> a, b, c = (Feature(name=name) for name in "abc")
        >>> places([c, a], [a, b, c], whose="a bundle")
        [2, 0]
    """
    if tuple(wanted) == tuple(there):
        return None
    found = {feature.name: (place, feature.kind) for place, feature in enumerate(there)}
    lacking = []
    for feature in wanted:
        _, kind = found.get(feature.name, (0, "missing"))
        if kind != feature.kind:
            lacking.append(f"{feature.name!r} ({feature.kind}, there {kind})")
    if lacking:
        n = f"{len(lacking)} of its {len(wanted)} features are not in {where}"
        raise InputError(f"{whose}: {n}: {', '.join(lacking)}; prepare the data with these columns")
    names = {feature.name for feature in wanted}
    _log_ignored(whose, where, tuple(feature.name for feature in there if feature.name not in names))
    return [found[feature.name][0] for feature in wanted]


@cache
def _log_ignored(whose: str, where: str, names: tuple[str, ...]) -> None:
    if names:
        log.info("%s: does not read %d features of %s: %s", whose, len(names), where, ", ".join(names))


class Counts(NamedTuple):
    """What a row group holds: query groups, documents, and how many of the groups have labels."""

    groups: int
    documents: int
    labelled: int


def _of_row_group(counts: Counts) -> Counts:
    """The counts, where a row group can have them: memory is taken for what they say."""
    if not (0 <= counts.labelled <= counts.groups < _MOST_GROUPS and 0 <= counts.documents < _MOST_DOCUMENTS):
        raise ValueError(f"no row group has {', '.join(f'{n} {name}' for name, n in counts._asdict().items())}")
    return counts


class DataFile(Config):
    """One Parquet file: name in the directory, period, size, content hash, counts of each row group."""

    path: ListedPath
    period: Period
    bytes: int
    sha256: str
    row_groups: tuple[Annotated[Counts, AfterValidator(_of_row_group)], ...]

    def content(self) -> tuple[str, str, tuple[Counts, ...]]:
        """What identity depends on: all but where the file lies."""
        return self.period, self.sha256, self.row_groups


class FeatureSummary(Config):
    """What was seen of a feature: missing values, and range, mean and deviation of the others (None without any)."""

    missing: int
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None


class Accounting(Config):
    """Rows and groups that came in, were kept and were rejected; in = kept + rejected, always.

    A group is rejected when none of its rows is kept. `rules` counts rejected rows by rule; of a
    relabelled data set, what each step read, changed, dropped and added.
    """

    rows_in: int = 0
    rows_kept: int = 0
    rows_rejected: int = 0
    groups_in: int = 0
    groups_kept: int = 0
    groups_rejected: int = 0
    rules: dict[str, int] = Field(default_factory=dict)
    hash_collisions: int = 0
    """Pairs of categorical values that were hashed to the same code."""


class Manifest(Config):
    """`manifest.json` of a data set directory."""

    format: Literal["ltrscale-dataset"] = "ltrscale-dataset"
    version: Literal[1] = 1
    features: tuple[Feature, ...]
    files: tuple[DataFile, ...]
    summaries: tuple[FeatureSummary, ...] = ()
    """One for each feature, in order."""
    label_counts: dict[str, int] = Field(default_factory=dict)
    """Documents by label value, at most 64 different ones; empty when there are more."""
    longest: int = 0
    """Documents of the longest group."""
    accounting: Accounting = Accounting()
    quarantine: tuple[ListedPath, ...] = ()
    """Quarantine files, below the same directory."""
    made_by: dict[str, Any] = Field(default_factory=dict)
    """Stage, config and input fingerprints; not part of the hash."""

    @property
    def hash(self) -> str:
        """Hash of what the data set holds: features, and the files in order, whatever their names are."""
        return self.hash_of(self.periods)

    def hash_of(self, periods: Collection[str]) -> str:
        """Hash of what it holds of some periods; it does not depend on the others."""
        features = [(feature.name, feature.kind) for feature in self.features]
        return digest({"features": features, "files": [f.content() for f in self.files if f.period in periods]})

    @property
    def periods(self) -> list[str]:
        """The periods that have data, sorted."""
        return sorted({file.period for file in self.files})

    def counts(self) -> Counts:
        """Groups, documents and labelled groups of the whole data set."""
        cells = [cell for file in self.files for cell in file.row_groups]
        return Counts(*(sum(column) for column in zip(*cells, strict=True))) if cells else Counts(0, 0, 0)


@dataclass(frozen=True)
class Dataset:
    """A committed data set directory, opened."""

    url: str
    manifest: Manifest


_view: ContextVar[dict[str, Dataset] | None] = ContextVar("view", default=None)


@contextmanager
def one_view(datasets: Mapping[str, Dataset] | None = None) -> Iterator[dict[str, Dataset]]:
    """While the block runs, a data set is seen as it was when the block first opened it, whatever is committed since.

    A block inside another shares its view, so that all stages of a job read the same. It is for readers: a data set
    that is made in the block is to be opened after that only.

    Args:
        datasets: a view that another process began, to go on with.

    Yields:
        The data sets that are seen so far, by absolute URL.
    """
    view = _view.get()
    if view is not None and datasets is None:
        yield view
        return
    view = dict(datasets or {})
    token = _view.set(view)
    try:
        yield view
    finally:
        _view.reset(token)


def open_dataset(url: str) -> Dataset:
    """Open a data set directory, or look at it again within `one_view`.

    Raises:
        InputError: nothing is committed there, or it is no data set of a version that this package reads.
    """
    view, place = _view.get(), storage.absolute(url)
    dataset = (view or {}).get(place) or _open(url)
    if view is not None:
        view[place] = dataset
    return Dataset(url, dataset.manifest)


def _open(url: str) -> Dataset:
    values = storage.read_manifest(url)
    if values is None:
        raise InputError(f"{url}: no data set is committed there (no manifest.json); make it with jobs.prepare")
    return Dataset(url, parse_manifest(values, storage.join(url, storage.MANIFEST)))


def parse_manifest(values: Mapping[str, Any], where: str) -> Manifest:
    """Validate a manifest that was read from `where`."""
    if values.get("format") != "ltrscale-dataset":
        raise InputError(f"{where}: not a data set but {values.get('format', 'something else')!r}; check the path")
    return validate(Manifest, values, where)
