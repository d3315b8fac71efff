"""A stage: a job that reads committed directories and commits one, unless it is up to date.

check        refuses bad settings before anything is read
identity     the settings that the output depends on: the fields, without those that are marked `Operational`
inputs       the content hashes of the inputs, which the types of the fields declare; with the identity they are the
             origin of the output
is_done      whether the output of this origin is committed
clear        removes the remains of an earlier run, if the job is to start anew
work         makes the output and commits it

A field that holds the place of an input is declared as `DataUrl`, `BundleUrl` or `OutputUrl`, at any depth: in a list,
a mapping or a config below the job. Nothing else needs to be written for its content to be part of an output's origin.
"""

import inspect
import time
import typing
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic.fields import FieldInfo

from ltrscale import storage
from ltrscale.config import Config, Operational, is_current, is_operational, made_by, models_in, settings_of
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import one_view, open_dataset
from ltrscale.data.dataset.periods import with_relative_named
from ltrscale.data.dataset.split import Split, Splits, SplitsWithTest, Texts
from ltrscale.progress import Report, log
from ltrscale.stages.origins import Settings, bundle_hashes, content_of, dataset_hashes, with_splits
from ltrscale.stages.runs import holding, recorded


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


Origin = Mapping[str, Any]
"""Stage, settings and inputs of an output, as its manifest records them."""


class Stage(Config):
    """A job that commits one directory; the fields of a subclass are its settings.

    Running it again with the same settings and the same inputs does nothing but log that.
    """

    stage: ClassVar[str]
    """The name that manifests record."""
    makes_data: ClassVar[bool] = False
    """Whether the output is a data set, which must be opened anew once it is made."""
    record: ClassVar[str] = storage.RUN
    """The folder of the run's record below `out`."""
    out: Operational[str]
    """Directory of the output."""

    def check(self) -> None:
        """Refuse bad settings before anything is read."""

    def own_settings(self) -> Config:
        """The settings that the output depends on, besides the inputs and splits that are fields of the job itself.

        They are those of the only other field, where it is a config, such as `finetune` of `FinetuneJob`; else all.
        """
        fields = type(self).model_fields.items()
        own = [getattr(self, name) for name, field in fields if not (is_operational(field) or is_input(field))]
        match own:
            case []:
                return Config()
            case [Config() as settings]:
                return settings
        return self

    def splits_read(self) -> list[Split]:
        """The splits that are fields of the job itself, whose periods are part of the identity."""
        fields = type(self).model_fields.items()
        return [split for name, field in fields for split in read_of(field, getattr(self, name))]

    def identity(self) -> Settings:
        """The settings that the output depends on, and the periods of the splits."""
        splits = self.splits_read()
        return with_splits(self.own_settings(), *splits) if splits else settings_of(self.own_settings())

    def inputs(self) -> dict[str, str]:
        """The content hash of each input, by its place."""
        return hashes_of(self)

    @abstractmethod
    def work(self, origin: Origin, report: Report) -> object:
        """Make the output and commit it with this origin; `report` receives metrics."""

    def clear(self) -> None:
        """Remove the remains of an earlier run in `out`, if this run is to start anew."""

    def is_done(self, origin: Origin) -> bool:
        """Whether the complete output of this origin is committed; logs it if so."""
        done = is_current(self.out, origin)
        if done:
            log.info("%s: %s is up to date", self.stage, self.out)
        return done

    def recorded_as(self) -> Config:
        """The config that repeats the run; the run directory keeps it."""
        return self

    def run(self) -> bool:
        """Make the output unless it is up to date; returns whether it was made.

        The stage sees each data set as it was when first opened, even if it changes meanwhile, and relative periods are
        those of then.

        Raises:
            InputError: `out` holds the output of another stage; or as `check` and `work`.
            Stopped: the process was asked to stop.
        """
        with nullcontext() if self.makes_data else one_view():
            return with_relative_named(self)._run()

    def _run(self) -> bool:
        """Make the output unless it is up to date."""
        self.check()
        origin = made_by(self.stage, self.identity(), self.inputs())
        if self.is_done(origin):
            return False
        with holding(self.out):
            if self.is_done(origin):  # again: another process may have made it while this one waited
                return False
            start = time.monotonic()
            with recorded(self.out, self.recorded_as(), self.stage, name=self.record) as report:
                log.info("%s: writing %s", self.stage, self.out)
                self.clear()
                self.work(origin, report)
                log.info("%s: done in %.1f s", self.stage, time.monotonic() - start)
        return True


class LabelledStage(Stage):
    """A stage that learns from the labels of a training split and selects on a validation split."""

    splits: Splits
    """Training and validation; the test split is not read."""

    def check(self) -> None:
        """Refuse splits that overlap."""
        check_disjoint(self.splits)
