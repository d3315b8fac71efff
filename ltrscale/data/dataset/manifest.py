"""The manifest of a data set directory: its features, files, counts and origin.

A data set consists of the files that its manifest lists. The manifest has counts per row group, so that plans and
splits can be made without opening data files.
"""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.arrays import Ints
from ltrscale.config import Strict, validate
from ltrscale.data.dataset.columns import TokenField, TokenSummary, Vocabulary
from ltrscale.data.dataset.files import ADDITION, FILE, Counts, DataFiles, ListedPath, PeriodName
from ltrscale.errors import InputError, nearest
from ltrscale.origin import Json, digest
from ltrscale.progress import log


class Feature(Strict):
    """A feature column. Categorical codes are integers below 2**24, which float32 stores exactly."""

    name: str
    kind: Literal["numeric", "categorical"] = "numeric"


def places(
    wanted: Sequence[Feature],
    there: Sequence[Feature],
    *,
    whose: str,
    where: str = "the data",
    on_purpose: bool = False,
) -> list[int] | None:
    """The positions of the wanted features in some data, matched by name; None if both are equal, order included.

    Other features of the data are ignored, which is logged once unless it is `on_purpose`, as by a trained model. In
    the error `whose` names the owner of the wanted features, and `where` the data.

    Raises:
        InputError: some features are missing or of another kind; names all of them.

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
    if not on_purpose:
        _log_ignored(whose, where, tuple(feature.name for feature in there if feature.name not in names))
    return [by_name[feature.name][0] for feature in wanted]


def stored_places(wanted: Sequence[Feature], stored: Sequence[Feature]) -> Ints | None:
    """The positions of features in a file of a data set that has them, -1 for those that the file lacks.

    None if the file has just these, in this order.

    Example:
        >>> a, b, c = (Feature(name=name) for name in "abc")
        >>> stored_places([c, a], [a, b]).tolist()
        [-1, 0]
    """
    if tuple(wanted) == tuple(stored):
        return None
    by_name = {feature.name: place for place, feature in enumerate(stored)}
    return np.array([by_name.get(feature.name, -1) for feature in wanted], np.int64)


def matching(pattern: str, features: Sequence[Feature], *, key: str) -> tuple[Feature, ...]:
    """The features that a setting names: by name, by `numeric` or `categorical` for a kind, or by a prefix and `*`.

    The first of the three that matches counts, so a feature named `numeric` stands for itself.

    Raises:
        InputError: there is no match; the message names the setting's `key` and the nearest feature.

    Example:
        >>> price, age, os = Feature(name="f_price"), Feature(name="f_age"), Feature(name="os", kind="categorical")
        >>> [feature.name for feature in matching("f_*", [price, os, age], key="leave_out")]
        ['f_price', 'f_age']
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


@dataclass(frozen=True)
class ManifestPart(storage.Placed):
    """A table of files, quarantine files and additions of the manifest; see `Manifest.parts`."""

    files: int
    additions: int


class RawColumns(Strict):
    """The form of the first file of raw rows and of the columns that features are made of."""

    rows: Literal["csv", "json", "parquet"]
    """The form of the file: text, JSON lines, or typed values."""
    reads: dict[str, Literal["number", "boolean", "integer", "text", "numbers", "value"]]
    """What each column holds, also those of tables that join; `numbers` is a list of them, and
    `value` a time, date or another type of Parquet."""


class FeatureSummary(Strict):
    """Summary of a feature: its missing values, and range, mean and deviation of the others (None without any)."""

    missing: int
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None
    unique_in_group: float | None = None
    """Share of the documents whose value no other document of their group has, of those in groups of at least two; None
    for a feature with fractions, and without such groups."""


class Accounting(Strict):
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


class Lacking(Strict):
    """Features that the files of some periods do not hold, because their rows had no such column."""

    features: tuple[str, ...]
    """By name, in the order of the data set."""
    periods: tuple[PeriodName, ...]


class Erased(Strict):
    """How much was erased from a data set, whose files do not say what it was."""

    groups: int
    """Query groups of which nothing is left; the gids of later groups count them."""
    documents: int
    periods: tuple[PeriodName, ...]


ADDED = "added"
"""The key of `made_by` with the commands of additions."""


class Manifest(Strict):
    """`manifest.json` of a data set directory."""

    format: Literal["ltrscale-dataset"] = "ltrscale-dataset"
    version: Literal[1, 2] = 1
    """2 where files may hold features as bytes (`columns`)."""
    features: tuple[Feature, ...]
    files: DataFiles
    """In order of periods and paths; those that the parts list are read with the data set."""
    parts: tuple[ManifestPart, ...] = ()
    """Tables that list the files and additions of earlier commits; see `writer.commit_dataset`."""
    lacking: tuple[Lacking, ...] = Field(default=(), exclude_if=lambda lacking: not lacking)
    """The features without values in some periods; readers serve missing values for them. Earlier versions of this
    package refuse a data set with any."""
    summaries: tuple[FeatureSummary, ...] = ()
    """One for each feature, in order."""
    goals: tuple[str, ...] = Field(default=(), exclude_if=operator.not_)
    """The labels by name, if there are several: the column `labels` has the first, and `label_NAME` each other one."""
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
    statistics: storage.Placed | None = None
    """A file with statistics of the texts, by which features were made."""
    accounting: Accounting = Accounting()
    categories: dict[str, dict[str, int]] = Field(default_factory=dict)
    """The codes of the observed texts of categorical features, by feature, but of whole numbers below 2^24, which are
    their own codes. A feature is absent if its texts are more than 4,096."""
    erased: Erased | None = Field(default=None, exclude_if=lambda erased: erased is None)
    """What `jobs.erase` has taken out; None if it has not."""
    raw: RawColumns | None = None
    """The columns of the raw rows; None if the rows were not items, one per row."""
    fills: dict[str, float] = Field(default_factory=dict)
    """The number that stands for a missing value of a feature, by feature; others stay missing."""
    query_ids: tuple[storage.Placed, ...] = ()
    """Hashes of the query ids of all groups outside fixed periods, in few files, however often periods were added.
    Empty where they are not recorded, and where there are none."""
    quarantine: tuple[ListedPath, ...] = ()
    """Quarantine files, below the same directory, but those that the parts list."""
    made_by: dict[str, Any] = Field(default_factory=dict)
    """Stage, config and input fingerprints, and under `added` those of additions, but of those that the parts list; not
    part of the hash."""

    @model_validator(mode="after")
    def _has_vocabulary(self) -> Self:
        if self.tokens and self.vocabulary is None:
            raise ValueError("tokens without a vocabulary")
        return self

    @model_validator(mode="after")
    def _lacks_its_own(self) -> Self:
        names = [feature.name for feature in self.features]
        for each in self.lacking:
            if unknown := [name for name in each.features if name not in names]:
                raise ValueError(f"lacking names {unknown[0]!r}, which is no feature")
        return self

    @property
    def hash(self) -> str:
        """Hash of the data set's content: its features, and its files in order, whatever their names."""
        return self._hash_of(self.files.content(), self.periods)

    def hash_of(self, periods: Collection[str]) -> str:
        """Hash of the content of some periods; it does not depend on the others."""
        return self._hash_of(self.files.in_periods(periods).content(), periods)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The hash of the content of each period."""
        by_period = self.files.content_by_period().items()
        return {period: self._hash_of(content, [period]) for period, content in by_period}

    @cached_property
    def stored(self) -> dict[str, tuple[Feature, ...]]:
        """The features in the files of each period that lacks some."""
        return {
            period: stored
            for each in self.lacking
            for stored in [tuple(feature for feature in self.features if feature.name not in each.features)]
            for period in each.periods
        }

    def stored_names(self, periods: Collection[str]) -> dict[str, list[str]]:
        """The names of the features in the files of those of some periods that lack any, as plain data."""
        return {period: [f.name for f in self.stored[period]] for period in sorted(self.stored.keys() & {*periods})}

    def _hash_of(self, content: Json, periods: Collection[str]) -> str:
        identity: dict[str, Any] = {
            "features": [(feature.name, feature.kind) for feature in self.features],
            "files": content,
        }
        if self.vocabulary is not None:  # so that hashes without tokens do not change
            identity |= {"tokens": [f.model_dump() for f in self.tokens], "vocabulary": self.vocabulary.identity()}
        if stored := self.stored_names(periods):
            identity["stored"] = stored
        return digest(identity)

    @property
    def names_of_categories(self) -> dict[str, dict[int, str]]:
        """The recorded texts of categorical features by their codes, by feature."""
        return {name: {code: text for text, code in codes.items()} for name, codes in self.categories.items()}

    @property
    def periods(self) -> list[str]:
        """The periods that have data, sorted."""
        return self.files.periods

    def counts(self) -> Counts:
        """Groups, documents and labelled groups of the whole data set."""
        return self.files.counts()


@dataclass(frozen=True)
class Dataset:
    """A committed data set directory, opened."""

    url: str
    manifest: Manifest


_view: ContextVar[dict[str, Dataset] | None] = ContextVar("view", default=None)


@contextmanager
def one_view(datasets: Mapping[str, Dataset] | None = None) -> Iterator[dict[str, Dataset]]:
    """Freeze each data set at its first opening while the block runs, whatever is committed later.

    A block inside another shares its view, so all stages of a job read the same data. It is for readers: open a
    data set that is made inside the block only after it was made. Yields the data sets opened so far, by absolute URL,
    from which another process continues.
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
        InputError: nothing is committed there, or not a data set in a version that this package reads.
    """
    view, place = _view.get(), storage.absolute(url)
    dataset = (view or {}).get(place) or read_dataset(url)
    if view is not None:
        view[place] = dataset
    return Dataset(url, dataset.manifest)  # with the given URL, for errors


_READS = 5
"""Attempts to read a manifest that changes while its parts are read."""


def read_dataset(url: str) -> Dataset:
    """Open a data set directory as it is now, ignoring any view; raises as `open_dataset`."""
    for attempt in range(_READS):
        values = storage.read_manifest(url)
        if values is None:
            raise InputError(f"{url}: no data set is committed there (no manifest.json); make it with jobs.prepare")
        try:
            manifest = parse_dataset_manifest(values, storage.join(url, storage.MANIFEST))
            if manifest.parts:
                files = DataFiles.joined([*(_files_of(url, part) for part in manifest.parts), manifest.files])
                if len({*files.paths}) < len(files):
                    raise InputError(f"{url}: its manifest lists a file twice; do not use the directory, make it again")
                manifest = manifest.model_copy(update={"files": files})
            return Dataset(url, manifest)
        except InputError:  # an addition may have replaced a part by a longer one
            if attempt + 1 == _READS or storage.read_manifest(url) == values:
                raise
    raise AssertionError


def parse_dataset_manifest(values: Mapping[str, Any], where: str) -> Manifest:
    """Validate a manifest read from `where`; the files of its parts are not read."""
    if values.get("format") != "ltrscale-dataset":
        raise InputError(f"{where}: not a data set but {values.get('format', 'something else')!r}; check the path")
    return validate(Manifest, values, where)


def _files_of(url: str, part: ManifestPart) -> DataFiles:
    rows = storage.read_manifest_part(url, vars(part))
    try:
        is_file = pc.equal(rows["kind"], FILE)
        is_addition = pc.equal(rows["kind"], ADDITION)
        listed = {"files": pc.sum(is_file).as_py() or 0, "additions": pc.sum(is_addition).as_py() or 0}
        if listed != (stated := {"files": part.files, "additions": part.additions}):
            raise InputError(
                f"{storage.join(url, storage.MANIFEST)}: {part.path} has {listed} where this manifest says {stated}; "
                "restore the manifest, or make the directory again"
            )
        return DataFiles.from_table(rows if pc.all(is_file).as_py() else rows.filter(is_file))  # a filter copies
    except (ValueError, KeyError, pa.ArrowException) as error:
        place = storage.join(url, part.path)
        raise InputError(f"{place}: {error}; do not use the directory, make it again") from error
