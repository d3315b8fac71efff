"""The manifest of a data set directory: its features, files, counts and origin.

A data set consists of the files that its manifest lists. The manifest has counts per row group, so that plans and
splits can be made without opening a data file.
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
from ltrscale.data.dataset.tokens import TokenField, TokenSummary, Vocabulary
from ltrscale.errors import InputError, nearest
from ltrscale.progress import log


class Feature(Config):
    """A feature column. Categorical codes are integers below 2**24, which float32 stores exactly."""

    name: str
    kind: Literal["numeric", "categorical"] = "numeric"


ListedPath = Annotated[str, AfterValidator(storage.listed_path)]
"""The path of a file below the directory whose manifest lists it."""
PeriodName = Annotated[str, AfterValidator(storage.period_name)]
"""The name of a period."""
_MOST_GROUPS, _MOST_DOCUMENTS = 1 << 26, 1 << 31


def places(
    wanted: Sequence[Feature], there: Sequence[Feature], *, whose: str, where: str = "the data"
) -> list[int] | None:
    """The places of the wanted features among those of some data, by name; None if both are equal, order included.

    Further features of the data are ignored, which is logged once.

    Args:
        wanted: the features to read, in order.
        there: the features of the data, in order.
        whose: the owner of the wanted features, for the error.
        where: the data, for the error.

    Raises:
        InputError: some features are missing or of another kind; names them all.

    Example:
        >>> a, b, c = (Feature(name=name) for name in "abc")
        >>> places([c, a], [a, b, c], whose="a bundle")
        [2, 0]
    """
    if tuple(wanted) == tuple(there):
        return None
    by_name = {feature.name: (place, feature.kind) for place, feature in enumerate(there)}
    missing = []
    for feature in wanted:
        _, kind = by_name.get(feature.name, (0, "missing"))
        if kind != feature.kind:
            missing.append(f"{feature.name!r} ({feature.kind}, there {kind})")
    if missing:
        n = f"{len(missing)} of its {len(wanted)} features are not in {where}"
        raise InputError(f"{whose}: {n}: {', '.join(missing)}; prepare the data with these columns, and leave none out")
    names = {feature.name for feature in wanted}
    _log_ignored(whose, where, tuple(feature.name for feature in there if feature.name not in names))
    return [by_name[feature.name][0] for feature in wanted]


def matching(pattern: str, features: Sequence[Feature], *, key: str) -> tuple[Feature, ...]:
    """The features that a setting names: by name, by `numeric` or `categorical` for a kind, or by a prefix and `*`.

    The first of the three that fits counts, so a feature named `numeric` stands for itself.

    Args:
        pattern: the text in the setting.
        features: those of the data.
        key: the setting's key, for the error.

    Raises:
        InputError: none is named so; the message names the nearest.

    Example:
        >>> price, age, os = Feature(name="f_price"), Feature(name="f_age"), Feature(name="os", kind="categorical")
        >>> [feature.name for feature in matching("f_*", [price, os, age], key="leave_out")]
        ['f_price', 'f_age']
        >>> matching("f_prize", [price, os, age], key="leave_out")
        Traceback (most recent call last):
        ltrscale.errors.InputError: leave_out: no feature matches 'f_prize'; the nearest is 'f_price'
    """
    by_name = tuple(feature for feature in features if feature.name == pattern)
    by_kind = tuple(feature for feature in features if feature.kind == pattern)
    by_prefix = tuple(f for f in features if pattern.endswith("*") and f.name.startswith(pattern[:-1]))
    if matches := by_name or by_kind or by_prefix:
        return matches
    closest = nearest(pattern, [feature.name for feature in features])
    raise InputError(f"{key}: no feature matches {pattern!r}; the nearest is {closest!r}")


@cache  # so that each line is logged once in a process
def _log_ignored(whose: str, where: str, names: tuple[str, ...]) -> None:
    if names:
        log.info("%s: does not read %d features of %s: %s", whose, len(names), where, ", ".join(names))


class Counts(NamedTuple):
    """Counts of a row group: query groups, documents, and the groups among them that have labels."""

    groups: int
    documents: int
    labelled: int


def _of_row_group(counts: Counts) -> Counts:
    """The counts, if a row group can have them: a reader allocates memory according to them."""
    if not (0 <= counts.labelled <= counts.groups < _MOST_GROUPS and 0 <= counts.documents < _MOST_DOCUMENTS):
        raise ValueError(f"no row group has {', '.join(f'{n} {name}' for name, n in counts._asdict().items())}")
    return counts


class DataFile(Config):
    """One Parquet file: name in the directory, period, size, content hash, longest group, counts of each row group."""

    path: ListedPath
    period: PeriodName
    bytes: int
    sha256: str
    longest: int = Field(ge=0, lt=_MOST_DOCUMENTS)
    """Documents of its longest group."""
    row_groups: tuple[Annotated[Counts, AfterValidator(_of_row_group)], ...]

    def content(self) -> tuple[str, str, tuple[Counts, ...]]:
        """The parts that make up the file's identity: all but its place, and what follows from them."""
        return self.period, self.sha256, self.row_groups


class ListedFile(Config):
    """A further file of the directory."""

    path: ListedPath
    bytes: int
    sha256: str


class RawColumns(Config):
    """How the first file of raw rows has the columns that features are made of."""

    rows: Literal["csv", "json", "parquet"]
    """The form of the file: text, JSON lines, or typed values."""
    reads: dict[str, Literal["number", "boolean", "integer", "text", "value"]]
    """What each column holds, also those of tables that join; `value` is a time, date or another type of Parquet."""


class FeatureSummary(Config):
    """Summary of a feature: its missing values, and range, mean and deviation of the others (None without any)."""

    missing: int
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None
    unique_in_group: float | None = None
    """Share of the documents whose value no other document of their group has, of those in groups of at least two; None
    for a feature with fractions, and without such groups."""


class Accounting(Config):
    """Rows and groups that were read, kept, rejected and merged; always in = kept + rejected + merged.

    A group is rejected when none of its rows is kept. `rules` counts rejected rows by rule; for a relabelled data
    set, what each step read, changed, dropped and added.
    """

    rows_in: int = 0
    rows_kept: int = 0
    rows_rejected: int = 0
    rows_merged: int = 0
    """Rows left out in favour of another row of the same document, as `duplicates` asks."""
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
    grouped: int = 0
    """Documents in groups of at least two."""
    tokens: tuple[TokenField, ...] = ()
    """Fields with the tokens of queries and documents."""
    token_summaries: dict[str, TokenSummary] = Field(default_factory=dict)
    """One for each token field, by its column."""
    vocabulary: Vocabulary | None = None
    """The vocabulary of all token fields; there is one if there are any."""
    statistics: ListedFile | None = None
    """A file with statistics of the texts, by which features were made."""
    accounting: Accounting = Accounting()
    categories: dict[str, dict[str, int]] = Field(default_factory=dict)
    """The codes of the observed texts of categorical features, by feature, but of whole numbers below 2^24, which are
    their own codes. A feature is absent if its texts are more than 4,096."""
    raw: RawColumns | None = None
    """The columns of the raw rows; None if the rows were not items, one per row."""
    fills: dict[str, float] = Field(default_factory=dict)
    """The number that stands for a missing value of a feature, by feature; others stay missing."""
    query_ids: tuple[ListedFile, ...] = ()
    """Hashes of the query ids of all groups outside fixed periods, a file for each time that periods were added. Empty
    where they are not recorded, and where there are none."""
    quarantine: tuple[ListedPath, ...] = ()
    """Quarantine files, below the same directory."""
    made_by: dict[str, Any] = Field(default_factory=dict)
    """Stage, config and input fingerprints; not part of the hash."""

    @property
    def hash(self) -> str:
        """Hash of the data set's content: its features, and its files in order, whatever their names."""
        return self.hash_of(self.periods)

    def hash_of(self, periods: Collection[str]) -> str:
        """Hash of the content of some periods; it does not depend on the others."""
        features = [(feature.name, feature.kind) for feature in self.features]
        identity = {"features": features, "files": [f.content() for f in self.files if f.period in periods]}
        return digest(identity | self.text_identity())

    def text_identity(self) -> dict[str, object]:
        """The fields of tokens and their vocabulary; empty without tokens, so that a hash does not depend on them."""
        if self.vocabulary is None:
            return {}
        return {"tokens": [f.model_dump() for f in self.tokens], "vocabulary": self.vocabulary.identity()}

    @property
    def periods(self) -> list[str]:
        """The periods that have data, sorted."""
        return sorted({file.period for file in self.files})

    @property
    def longest(self) -> int:
        """Documents of the longest group."""
        return max((file.longest for file in self.files), default=0)

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
    """Freeze each data set at its first opening while the block runs, whatever is committed later.

    A block inside another shares its view, so that all stages of a job read the same data. It is for readers: open a
    data set that is made inside the block only after it was made.

    Args:
        datasets: the view of another process, to continue.

    Yields:
        The data sets opened so far, by absolute URL.
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
    """Open a data set directory; within `one_view` the manifest is read once.

    Raises:
        InputError: nothing is committed there, or no data set of a version that this package reads.
    """
    view, place = _view.get(), storage.absolute(url)
    dataset = (view or {}).get(place) or _open(url)
    if view is not None:
        view[place] = dataset
    return Dataset(url, dataset.manifest)  # with the URL as it was given, for errors


def _open(url: str) -> Dataset:
    values = storage.read_manifest(url)
    if values is None:
        raise InputError(f"{url}: no data set is committed there (no manifest.json); make it with jobs.prepare")
    return Dataset(url, parse_dataset_manifest(values, storage.join(url, storage.MANIFEST)))


def parse_dataset_manifest(values: Mapping[str, Any], where: str) -> Manifest:
    """Validate a manifest that was read from `where`."""
    if values.get("format") != "ltrscale-dataset":
        raise InputError(f"{where}: not a data set but {values.get('format', 'something else')!r}; check the path")
    return validate(Manifest, values, where)
