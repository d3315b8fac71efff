"""The inputs of a job and the hashes of their contents, which the types of its fields declare.

A field that holds the place of an input is declared as `DataUrl`, `BundleUrl` or `OutputUrl`, at any depth: in a list,
a mapping or a config below the job. Nothing else needs to be written for its content to be part of the origin.
"""

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic.fields import FieldInfo

from ltrscale import storage
from ltrscale.bundle_manifest import read_bundle_manifest
from ltrscale.config import Config, is_operational, members
from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits, SplitsWithTest, Texts, resolve_periods
from ltrscale.errors import InputError


def dataset_hashes(splits: Iterable[Split]) -> dict[str, str]:
    """Content hashes of each data set's periods that the splits read, and of the scores that serve as labels."""
    splits = list(splits)
    datasets: dict[str, Dataset] = {}
    periods: dict[str, set[str]] = {}
    for split in splits:
        for url, part in zip(split.data, resolve_periods(split), strict=True):
            datasets[url] = part.dataset
            periods.setdefault(url, set()).update(part.periods)
    hashes = {url: datasets[url].manifest.hash_of(periods[url]) for url in datasets}
    for split in splits:
        if split.scores:
            parts = [hashes[split.scores]] if split.scores in hashes else []
            hashes[split.scores] = ",".join([*parts, select(split, labelled=True).hash])
    return hashes


def bundle_hashes(urls: Iterable[str]) -> dict[str, str]:
    """Content hashes of the files of each bundle, in the form of `content_of`."""
    return {url: _file_hashes(read_bundle_manifest(url)) for url in urls}


def content_of(url: str) -> str:
    """Content hashes of the files of an evaluation or another directory; an `InputError` if it is not committed."""
    manifest = storage.read_manifest(url)
    if manifest is None:
        raise InputError(f"{url}: nothing is committed there; run the same command again, which makes it")
    return _file_hashes(manifest)


def _file_hashes(manifest: Mapping[str, Any]) -> str:
    # unlike the single hash of `bundle_manifest.content_hash`, this form shows which file changed
    return ",".join(sorted(f"{path}:{sha256}" for path, sha256 in storage.listed_in(manifest).items()))


class _InputPlace(NamedTuple):
    """Marks a field as the place of an input."""

    content: Callable[[str], str]
    """The content hash of what is there."""


_DATA = _InputPlace(lambda url: open_dataset(url).manifest.hash)

_BUNDLE = _InputPlace(lambda url: bundle_hashes([url])[url])

DataUrl = Annotated[str, _DATA]
"""The directory of a data set, which is read completely."""

BundleUrl = Annotated[str, _BUNDLE]
"""The directory of a bundle."""

BundleUrls = Annotated[Texts, _BUNDLE]
"""The directories of bundles; a single one needs no list."""

OutputUrl = Annotated[str, _InputPlace(content_of)]
"""The directory of another committed output, such as an evaluation."""


def splits_of(field: FieldInfo, value: Any) -> tuple[Split, ...]:
    """The splits that a job reads of a field: training and validation, or validation and test if it requires a test."""
    match value:
        case Split():
            return (value,)
        # the declared type counts: splits of a training job may have a test split, which it does not read
        case Splits(validation=validation, test=Split() as test) if SplitsWithTest in members(field.annotation):
            return validation, test
        case Splits(train=train, validation=validation):
            return train, validation
    return ()


def is_input(field: FieldInfo) -> bool:
    """Whether a field holds places of inputs or splits."""
    of_splits = any(issubclass(model, Split | Splits) for model in members(field.annotation))
    return of_splits or any(_marks(field.rebuild_annotation()))


def _marks(annotation: Any) -> Iterator[_InputPlace]:
    """The marks that a type mentions, at any depth."""
    yield from (mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, _InputPlace))
    for inner in typing.get_args(annotation):
        yield from _marks(inner)


def _inputs_in(config: Config) -> Iterator[Split | tuple[str, _InputPlace]]:
    """The splits and the marked places that the fields of a config name, in field order, also of nested configs."""
    for name, field in type(config).model_fields.items():
        if is_operational(field):
            continue
        for value in _single_values(getattr(config, name)):
            match value:
                case Split() | Splits():
                    yield from splits_of(field, value)
                case Config():
                    yield from _inputs_in(value)
                case str():
                    yield from ((value, mark) for mark in _marks(field.rebuild_annotation()))


def _single_values(value: Any) -> Iterator[Any]:
    """The values in a tuple or a mapping, at any depth; any other value itself."""
    if not isinstance(value, tuple | dict):
        yield value
        return
    for inner in value.values() if isinstance(value, dict) else value:
        yield from _single_values(inner)


def hashes_of(config: Config, *further: Split) -> dict[str, str]:
    """The content hash of each input of a config, by its place, and of further splits that it reads."""
    inputs = list(_inputs_in(config))
    hashes = dataset_hashes([*(each for each in inputs if isinstance(each, Split)), *further])
    places = [each for each in inputs if isinstance(each, tuple)]
    return hashes | {url: mark.content(url) for url, mark in places}
