"""The models of a study: the grid, the stages, and the record of training time."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, Operational, Strict
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import Dataset, one_view
from ltrscale.data.dataset.split import SplitsWithTest
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.metrics import metrics_of
from ltrscale.evaluation.measure.outliers import OutlierConfig
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.evaluation.studies.group_metrics import describe_test, measure_groups
from ltrscale.evaluation.studies.study import Design, Model, study_of
from ltrscale.evaluation.studies.study_page import document
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.origin import digest, settings_of
from ltrscale.progress import Report
from ltrscale.reports.findings import commit_report
from ltrscale.runtime.workers import ONE
from ltrscale.stages.runs import heard_by
from ltrscale.stages.stage import (
    BundleUrl,
    Origin,
    OutputUrl,
    Settings,
    Stage,
    bundle_hashes,
    dataset_hashes,
    with_splits,
)
from ltrscale.stages.unseen import check_unseen
from ltrscale.storage import join

MOST_STUDY_DRAWS = 10_000

LabelledCount = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)]


class GridConfig(Config):
    """A part of the study: every method with every number of labelled groups, in every draw of them."""

    labelled: tuple[LabelledCount, ...] = Field(min_length=1)
    """Labelled groups of the training split that are used: a number, see `counts`, or as a decimal up to 1.0 a share of
    all (HOU24: .001 to 1)."""
    draws: int = Field(5, ge=1, lt=MOST_STUDY_DRAWS)
    """Random samples of that size; fewer than five judge nothing, and ten cost twice as much for intervals that are a
    third narrower. With the same number a smaller sample is part of a larger one."""
    pretrainings: int | None = Field(None, ge=1)
    """Empty gives each draw its own pretraining, so that intervals hold for other pretrainings as for other labels.
    Where that is too dear, a number of encoders, each of which serves all draws: three give an interval, a wider one.
    With one, all that is said of pretraining holds for this encoder, and its share has no verdict."""
    methods: tuple[str, ...] = ()
    """Names of methods; empty for all. Methods that these are built on come along."""


@dataclass(frozen=True)
class Cell:
    """One model of the study."""

    labelled: LabelledCount
    draw: int
    pretraining: int | None
    """Number of the pretraining that is crossed with the draws; None for the draw's own, or without pretraining."""
    method: str

    @property
    def encoder_seed(self) -> int:
        """The seed of the pretraining that it starts from."""
        return self.draw if self.pretraining is None else self.pretraining

    @property
    def run(self) -> str:
        """The directory, below the study's, of models with the same labelled groups and pretraining."""
        crossed = [] if self.pretraining is None else [f"pretraining-{self.pretraining}"]
        return join("models", str(self.labelled), f"draw-{self.draw}", *crossed)

    @property
    def folder(self) -> str:
        """The directory of the model."""
        return join(self.run, self.method)


def shared_encoders(methods: Mapping[str, AnyMethod]) -> dict[str, AnyMethod]:
    """The methods, where those with the same pretraining share the first one's encoder."""
    owners: dict[str, str] = {}
    shared: dict[str, AnyMethod] = {}
    for name, method in methods.items():
        pretraining = method.pretraining()
        owner = name if pretraining is None else owners.setdefault(digest(pretraining), name)
        shared[name] = method if owner == name else method.starting_as(owner)
    return shared


_WRITE_S = 30.0


class TestGroups(Stage):
    """Describe the test groups."""

    stage: ClassVar = "study_test"
    splits: SplitsWithTest
    evaluate: EvaluateSettings

    def check(self) -> None:
        """Refuse splits that overlap."""
        check_disjoint(self.splits)

    def own_settings(self) -> OutlierConfig:
        """Settings of outliers."""
        return self.evaluate.outliers

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Fit the outlier rules, and commit."""
        describe_test(self.evaluate, self.splits, self.out, made_by=origin)


class Measurement(Stage):
    """Measure a model on the test groups."""

    stage: ClassVar = "measure"
    bundle: BundleUrl
    splits: SplitsWithTest
    evaluate: EvaluateSettings
    threads: Operational[int]

    def check(self) -> None:
        """Refuse a bundle that has seen test periods."""
        check_unseen(self.bundle, self.splits.test)

    def identity(self) -> Settings:
        """The metrics, and the test periods."""
        metrics = {
            "metrics": [*metrics_of(self.evaluate)],
            **self.evaluate.model_dump(mode="json", include={"relevant_from", "leave_out_constant"}),
        }
        return with_splits(metrics, self.splits.test)

    def inputs(self) -> dict[str, str]:
        """Content of the data sets and the bundle."""
        return dataset_hashes([self.splits.test]) | bundle_hashes([self.bundle])

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Measure, and commit."""
        measure_groups(self.bundle, self.splits.test, self.evaluate, self.out, threads=self.threads, made_by=origin)


class StudySummary(Stage):
    """Summarise the models measured so far."""

    stage: ClassVar = "study"
    test: OutputUrl
    design: Design
    models: tuple[Model, ...]

    def own_settings(self) -> Settings:
        """The design and the models."""
        return {"design": settings_of(self.design), "models": [settings_of(model) for model in self.models]}

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Summarise, and commit the report."""
        study = study_of(self.design, self.models, self.test)
        commit_report(self.out, study, document(study), made_by=origin)


class Spent(Strict):
    """Time and documents of a training so far; `spent.json` beside its output."""

    of: str
    """Digest of what was trained."""
    seconds: float = 0.0
    documents: int = 0
    done: bool = False

    @classmethod
    def read(cls, folder: str) -> Self | None:
        """The record of a directory; None if it has none."""
        url = join(folder, "spent.json")
        if not storage.exists(url):
            return None
        try:
            return cls.model_validate_json(storage.read_bytes(url))
        except ValueError as error:
            raise InputError(f"{url}: not a record of time ({error}); remove it") from error


@contextmanager
def timed(folder: str, of: object) -> Iterator[None]:
    """Add the time of the block, and the documents that its trainings read, to the record of a directory.

    The record is written every half minute and at the end, so a killed process loses little, and the next one adds to
    it. A block without training leaves it unchanged.
    """
    digested = digest(of)
    before = Spent.read(folder)
    if before is None or before.of != digested:
        before = Spent(of=digested)
    start, documents, written, trains = time.monotonic(), 0, time.monotonic(), False

    def write(*, done: bool) -> None:
        seconds = before.seconds + time.monotonic() - start
        spent = Spent(of=digested, seconds=round(seconds, 3), documents=before.documents + documents, done=done)
        storage.write_bytes(join(folder, "spent.json"), (spent.model_dump_json(indent=1) + "\n").encode())

    def hear(record: Mapping[str, object]) -> None:
        nonlocal documents, written, trains
        trains = True
        if "step" in record and isinstance(read := record.get("documents"), int):
            documents += read
        if time.monotonic() - written >= _WRITE_S and not before.done:
            written = time.monotonic()
            write(done=False)

    try:
        with heard_by(hear):
            yield
    except BaseException:
        if trains and not before.done:
            write(done=False)
        raise
    if trains and not before.done:
        write(done=True)


@dataclass(frozen=True)
class StudyParts:
    """The parts of a study that every process has, with the data sets as they were at its start."""

    out: str
    methods: Mapping[str, AnyMethod]
    """The methods; those with the same pretraining share an encoder."""
    splits: SplitsWithTest
    evaluate: EvaluateSettings
    threads: int
    """Threads of a task."""
    view: Mapping[str, Dataset] = field(default_factory=dict)

    def place(self, *names: str) -> str:
        """A directory of the study."""
        return join(self.out, *names)

    def encoder(self, name: str, seed: int) -> str:
        """The directory of the pretraining of a method."""
        return self.place("pretrained", f"seed-{seed}", name)

    def encoders(self, seed: int) -> SeedRun:
        """The run that pretrains with a seed, for all other runs."""
        return SeedRun(self.methods, self.splits, seed, ONE, self.place("pretrained", f"seed-{seed}"))

    def run_of(self, cell: Cell, sized: SplitsWithTest) -> SeedRun:
        """The run of a model; initial weights and data order also differ between draws."""
        methods = {name: method.with_threads(self.threads) for name, method in self.methods.items()}
        out, encoders = self.place(replace(cell, pretraining=None).run), self.encoders(cell.encoder_seed)
        own = SeedRun(methods, sized.drawn(cell.draw), cell.draw, ONE, out, encoders=encoders)
        if cell.pretraining is None:
            return own
        seed = MOST_STUDY_DRAWS * cell.pretraining + cell.draw
        return replace(own, seed=seed, out=self.place(cell.run), unpretrained=own)

    def describe_test(self) -> None:
        """Find the outliers among the test groups."""
        with one_view(self.view):
            TestGroups(out=self.place("test"), splits=self.splits, evaluate=self.evaluate).run()

    def pretrain(self, name: str, seed: int) -> None:
        """Pretrain the encoder of a method."""
        run = self.encoders(seed)
        with one_view(self.view):
            identity = [run.methods[name].model_dump(mode="json"), seed, dataset_hashes([run.splits.train])]
            with timed(self.encoder(name, seed), identity):
                run.pretrained(name)

    def train(self, cell: Cell, sized: SplitsWithTest) -> None:
        """Train a model on the sized splits, and measure it."""
        run, folder = self.run_of(cell, sized), self.place(cell.folder)
        with one_view(self.view):
            splits = (run.splits.train, run.splits.validation)
            settings = [run.methods[cell.method], *splits]
            identity = [*(c.model_dump(mode="json") for c in settings), run.seed, dataset_hashes(splits)]
            with timed(folder, identity):
                bundle = run.model(cell.method)
            Measurement(
                out=join(folder, "measured"),
                bundle=bundle,
                splits=self.splits,
                evaluate=self.evaluate,
                threads=self.threads,
            ).run()
