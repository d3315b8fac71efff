"""A stage: a job that reads committed directories and commits one, unless it is up to date.

check        refuses bad settings before anything is computed
identity     the settings that the output depends on: the fields, without those that are marked `Operational`
inputs       the content hashes of the inputs, which the types of the fields declare; with the identity they are the
             origin of the output
is_done      whether the output of this origin is committed
tidy         finishes what a run that was killed just after its commit left undone
clear        removes the remains of an earlier run, if the job should start over
work         makes the output and commits it
"""

import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

from ltrscale import storage
from ltrscale.config import Config, Operational, is_operational
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.split import Split, Splits, with_periods_named, with_relative_named
from ltrscale.origin import is_current, made_by, settings_of
from ltrscale.progress import Report, log
from ltrscale.stages.inputs import hashes_of, is_input, splits_of
from ltrscale.stages.runs import holding, recorded

Settings = dict[str, Any]
"""What an output depends on besides the content of its inputs, as plain data."""


def with_splits(config: Config | Settings, *splits: Split) -> Settings:
    """The settings, and the splits with all their periods named, so that periods added later do not belong to them."""
    with_periods = [with_periods_named(split).model_dump(mode="json") for split in splits]
    return {"config": settings_of(config), "splits": with_periods}


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
        own_fields = [getattr(self, name) for name, field in fields if not (is_operational(field) or is_input(field))]
        match own_fields:
            case []:
                return Config()
            case [Config() as settings]:
                return settings
        return self

    def splits_read(self) -> list[Split]:
        """The splits that are fields of the job itself, with periods that are part of the identity."""
        fields = type(self).model_fields.items()
        return [split for name, field in fields for split in splits_of(field, getattr(self, name))]

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
