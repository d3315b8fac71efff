"""A stage: a job that reads committed directories and commits one, unless it is up to date.

check        refuses bad settings before anything is computed
identity     the settings that the output depends on: the fields, without those that are marked `Operational`
inputs       the content hashes of the inputs, which the types of the fields declare; with the identity they are the
             origin of the output
is_done      whether the output of this origin is committed; tidy: finishes what a run killed then left undone
clear        removes the remains of an earlier run, if the job should start over
work         makes the output and commits it

A field that holds the place of an input is declared as `DataUrl`, `BundleUrl` or `OutputUrl`, at any depth: in a list,
a mapping or a config below the job. Nothing else needs to be written for its content to be part of the origin.
"""

import time
import typing
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic.fields import FieldInfo

from ltrscale import storage
from ltrscale.bundle import read_bundle_manifest
from ltrscale.config import Config, Operational, is_operational, members
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import Dataset, one_view, open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import (
    Split,
    Splits,
    SplitsWithTest,
    Texts,
    resolve_periods,
    with_periods_named,
    with_relative_named,
)
from ltrscale.errors import InputError
from ltrscale.origin import is_current, made_by, settings_of
from ltrscale.progress import Report, log
from ltrscale.stages.runs import holding, recorded

Settings = dict[str, Any]
"""What an output depends on besides the content of its inputs, as plain data."""


def with_splits(config: Config | Settings, *splits: Split) -> Settings:
    """The settings, and the splits with all their periods named, so that periods added later do not belong to them."""
    with_periods = [with_periods_named(split).model_dump(mode="json") for split in splits]
    return {"config": settings_of(config), "splits": with_periods}


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
    # unlike the single hash of `ltrscale.bundle.content_hash`, this form shows which file changed
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


def _splits_of(field: FieldInfo, value: Any) -> tuple[Split, ...]:
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


def _is_input(field: FieldInfo) -> bool:
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
                    yield from _splits_of(field, value)
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


Origin = Mapping[str, Any]
"""Stage, settings and inputs of an output, as its manifest records them."""


class Stage(Config):
    """A job that commits one directory; the fields of a subclass are its settings."""

    stage: ClassVar[str]
    """The name that manifests record."""
    makes_data: ClassVar[bool] = False
    """Whether the output is a data set, which must be reopened once it is made."""
    record: ClassVar[str] = storage.RUN
    """The folder of the run's record below `out`."""
    out: Operational[str]
    """Directory of the output."""

    def check(self) -> None:
        """Refuse bad settings before anything is computed."""

    def own_settings(self) -> Config | Settings:
        """The settings that the output depends on, besides the inputs and splits that are fields of the job itself.

        If the only other field is a config, such as `finetune` of `FinetuneJob`, its settings; otherwise all settings.
        """
        fields = type(self).model_fields.items()
        own_fields = [getattr(self, name) for name, field in fields if not (is_operational(field) or _is_input(field))]
        match own_fields:
            case []:
                return Config()
            case [Config() as settings]:
                return settings
        return self

    def splits_read(self) -> list[Split]:
        """The splits that are fields of the job itself, with periods that are part of the identity."""
        fields = type(self).model_fields.items()
        return [split for name, field in fields for split in _splits_of(field, getattr(self, name))]

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
        """Remove the remains of an earlier run in `out`, if this run should start over."""

    def tidy(self) -> None:
        """Finish the clean-up of a run that was killed after it had committed the output."""

    def is_done(self, origin: Origin) -> bool:
        """Whether the complete output of this origin is committed; logs it if so."""
        up_to_date = is_current(self.out, origin)
        if up_to_date:
            log.info("%s: %s is up to date", self.stage, self.out)
        return up_to_date

    def recorded_as(self) -> Config:
        """The config that repeats the run, as recorded in the run directory."""
        return self

    def run(self) -> bool:
        """Make the output unless it is up to date; returns whether it was made.

        The stage sees each data set as it was when first opened, even if it changes meanwhile. Relative periods are
        resolved at that time.

        Raises:
            InputError: `out` holds the output of another stage; or as `check` and `work`.
            Stopped: the process was asked to stop.
        """
        with nullcontext() if self.makes_data else one_view():
            job = with_relative_named(self)
            job.check()
            origin = made_by(job.stage, job.identity(), job.inputs())
            done = job.is_done(origin)
            with holding(job.out, only_left=done) as was_killed:
                if done or job.is_done(origin):  # check again: another process may have made it meanwhile
                    if was_killed:
                        job.tidy()
                    return False
                start = time.monotonic()
                with recorded(job.out, job.recorded_as(), job.stage, name=job.record, origin=origin) as report:
                    log.info("%s: writing %s", job.stage, job.out)
                    job.clear()
                    job.work(origin, report)
                    log.info("%s: done in %.1f s", job.stage, time.monotonic() - start)
            return True


class LabelledStage(Stage):
    """A stage that learns from the labels of a training split and selects on a validation split."""

    splits: Splits
    """Training and validation; the test split is not read."""

    def check(self) -> None:
        """Refuse splits that overlap."""
        check_disjoint(self.splits)
