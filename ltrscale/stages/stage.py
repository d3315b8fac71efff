"""A stage: a job that reads committed directories and commits one, unless it is up to date.

check        refuses bad settings before anything is read
identity     the settings that the output depends on: the fields, without those that are marked `Operational`
inputs       the content hashes of the inputs, which the types of the fields declare; with the identity they are the
             origin of the output
is_done      whether the output of this origin is committed
clear        removes the remains of an earlier run, if the job is to start anew
work         makes the output and commits it
"""

import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

from ltrscale import storage
from ltrscale.config import Config, Operational, is_current, is_operational, made_by, settings_of
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.split import Split, Splits, with_relative_named
from ltrscale.progress import Report, log
from ltrscale.stages.inputs import hashes_of, is_input, read_of
from ltrscale.stages.origins import Settings, with_splits
from ltrscale.stages.runs import holding, recorded

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
