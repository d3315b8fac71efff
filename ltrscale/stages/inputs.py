"""What a job reads, found by the types of its fields: splits, data sets, bundles, and other committed outputs.

A field that holds a place is declared as `DataUrl`, `BundleUrl` or `OutputUrl`, at any depth: in a list, a mapping or a
config below the job. Nothing else needs to be written for its content to be part of an output's origin.
"""

import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

from pydantic.fields import FieldInfo

from ltrscale.config import Config, is_operational, models_in
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.split import Split, Splits, SplitsWithTest, Texts
from ltrscale.stages.origins import bundle_hashes, content_of, dataset_hashes


class _Place(NamedTuple):
    """The mark of a field that holds the place of an input."""

    content: Callable[[str], str]
    """The content hash of what is there."""


_DATA = _Place(lambda url: open_dataset(url).manifest.hash)
_BUNDLE = _Place(lambda url: bundle_hashes([url])[url])
DataUrl = Annotated[str, _DATA]
"""The directory of a data set, all of which is read."""
BundleUrl = Annotated[str, _BUNDLE]
"""The directory of a bundle."""
BundleUrls = Annotated[Texts, _BUNDLE]
"""The directories of bundles; one alone needs no list."""
OutputUrl = Annotated[str, _Place(content_of)]
"""The directory of another committed output, such as an evaluation."""


class Input(NamedTuple):
    """A split that is read, or the place of an input with its mark."""

    what: Split | str
    place: _Place | None = None


def read_of(field: FieldInfo, value: Any) -> tuple[Split, ...]:
    """The splits that a job reads of a field: training and validation, or validation and test if it demands a test.

    What is declared counts: the splits of a job that trains may have a test split, which it does not read.
    """
    match value:
        case Split():
            return (value,)
        case Splits(validation=validation, test=Split() as test) if SplitsWithTest in models_in(field.annotation):
            return validation, test
        case Splits(train=train, validation=validation):
            return train, validation
    return ()


def is_input(field: FieldInfo) -> bool:
    """Whether a field holds nothing but places of inputs or splits."""
    return any(isinstance(mark, _Place) for mark in field.metadata) or _is_input(field.annotation)


def _is_input(declared: Any) -> bool:
    if declared in (None, type(None), Ellipsis, str):
        return declared is not str
    if inspect.isclass(declared) and issubclass(declared, Split | Splits):
        return True
    inner = typing.get_args(declared)
    if typing.get_origin(declared) is Annotated:
        return any(isinstance(mark, _Place) for mark in inner[1:])
    if typing.get_origin(declared) is dict:
        inner = inner[1:]  # the keys are names
    return bool(inner) and all(map(_is_input, inner))


def inputs_in(config: Config) -> Iterator[Input]:
    """All that the fields of a config name as input, in their order, also in configs below it.

    Example:
        >>> class Job(Config):
        ...     models: dict[str, tuple[BundleUrl, ...]]
        ...     name: str = "no input"
        >>> [found.what for found in inputs_in(Job(models={"a": ("runs/a",), "b": ("runs/b", "runs/c")}))]
        ['runs/a', 'runs/b', 'runs/c']
    """
    for name, field in type(config).model_fields.items():
        if not is_operational(field):
            yield from _inputs_in(field, getattr(config, name))


def _inputs_in(field: FieldInfo, value: Any) -> Iterator[Input]:
    """The inputs in the value of a field, or in an item of it."""
    match value:
        case Split() | Splits():
            yield from map(Input, read_of(field, value))
        case Config():
            yield from inputs_in(value)
        case str():
            marks = [mark for mark in field.metadata if isinstance(mark, _Place)]
            yield from (Input(value, mark) for mark in (*marks, *_marks(field.annotation)))
        case tuple():
            yield from (found for item in value for found in _inputs_in(field, item))
        case dict():
            yield from (found for item in value.values() for found in _inputs_in(field, item))


def _marks(declared: Any) -> Iterator[_Place]:
    """The marks that a type mentions, at any depth."""
    yield from (mark for mark in getattr(declared, "__metadata__", ()) if isinstance(mark, _Place))
    for inner in typing.get_args(declared):
        yield from _marks(inner)


def hashes_of(config: Config, *further: Split) -> dict[str, str]:
    """The content hash of each input of a config, by its place, and of further splits that it reads.

    Raises:
        InputError: an input is not there.
    """
    inputs = list(inputs_in(config))
    hashes = dataset_hashes([*(each.what for each in inputs if isinstance(each.what, Split)), *further])
    return hashes | {what: place.content(what) for what, place in inputs if isinstance(what, str) and place}
