"""A study: methods at several numbers of labelled groups, over several draws of these groups.

Each model is a cell: a number of labelled groups, a draw, a pretraining and a method. Below `out` are

    test/                                    the test groups, and which of them are outliers
    pretrained/seed-3/METHOD/pretrained/     encoders, of draw 3 unless the grid crosses pretrainings with draws
    models/100/draw-3/METHOD/model/          bundles, as a pipeline makes them
    models/100/draw-3/METHOD/measured/       every metric of every test group
    summary/report.md                        rewritten as models finish

Encoders, models and measurements are stages. Those that are up to date are skipped, so a stopped study resumes.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.config import Config, Operational
from ltrscale.data.dataset.disjoint import check_splits
from ltrscale.data.dataset.manifest import Dataset, one_view
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, SplitsWithTest, with_relative_named
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.evaluation.studies.measured import Measurement, TestGroups
from ltrscale.evaluation.studies.study import Cost, Design, Model, Study
from ltrscale.evaluation.studies.study_page import SUMMARY, StudySummary, document
from ltrscale.experiments.methods.base import (
    Method,
    MethodName,
    SeedRun,
    check_methods,
    is_pretrained,
    with_foundations,
)
from ltrscale.experiments.methods.composed import AnyMethod
from ltrscale.experiments.methods.single import pretrained, sharing_encoders
from ltrscale.experiments.records import Spent, timed
from ltrscale.progress import log, progress
from ltrscale.reports.findings import print_report
from ltrscale.runtime.workers import ONE
from ltrscale.stages.inputs import dataset_hashes
from ltrscale.stages.runs import recorded
from ltrscale.stages.tasks import Costs, Task, TaskWorkers, TaskWorkersConfig, run_all
from ltrscale.storage import join

MOST_STUDY_DRAWS = 10_000
"""Upper limit of draws; pretrainings that are crossed with the draws have seeds at this distance."""

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


_REPORT_S = 60.0


class StudyJob(Config):
    """Methods at several numbers of labelled groups."""

    out: Operational[str]
    """Directory for everything; the report is `summary/report.md`."""
    data: str | None = None
    """A data set directory that jobs.prepare made, for the splits that name none."""
    splits: SplitsWithTest
    """Training, validation and test. Pretraining reads all groups of the training split."""
    methods: dict[MethodName, AnyMethod] = Field(min_length=1)
    """Methods to compare, by their name in the report."""
    grid: tuple[GridConfig, ...] = Field(min_length=1)
    """The models to train: those of all parts, each once."""
    counts: Literal["relevant", "labelled"] = "relevant"
    """What a number of labelled groups counts: groups with a relevant document, with which those without one come along
    in their natural share, or all labelled groups. Groups without a relevant document teach a ranker little."""
    validation_share: float | None = Field(None, gt=0)
    """Validation labels as a share of the training labels, drawn anew with them, as where labels are few everywhere.
    Empty takes all labels of the validation split, as the papers do."""
    control: str | dict[str, str] | None = None
    """The method without pretraining whose settings are otherwise those of the pretrained ones: differences from it are
    pretraining's own share. Where pretrained methods differ in more than that, each by name with its own control,
    `{simclr: scratch, heads: scratch_heads}`; only these are compared, as far as the grid has them."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Metrics, baseline and outliers. `resamples` and `seed` have no effect: intervals are Student's."""
    workers: TaskWorkers = TaskWorkersConfig()
    """Models that are trained at once."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        numbers = {number for part in self.grid for number in part.labelled}
        if len({type(number) for number in numbers}) > 1:
            raise ValueError("grid: labelled mixes counts with shares; write all as counts, or all as decimals")
        for name in (name for part in self.grid for name in part.methods):
            if name not in self.methods:
                raise ValueError(f"grid: {name!r} is not among the methods {', '.join(self.methods)}")
        if self.splits.train.size:
            raise ValueError(
                f"splits.train.{min(self.splits.train.size)}: leave it out; grid says how many labels to use"
            )
        if self.validation_share is not None and self.splits.validation.size:
            raise ValueError(
                f"validation_share and splits.validation.{min(self.splits.validation.size)}: leave one out"
            )
        for key, value in (("judged", self.evaluate.judged), ("propensities", self.evaluate.propensities)):
            if value is not None:
                raise ValueError(f"evaluate.{key}: a study does not read it; leave it out, or compare in a pipeline")
        check_methods(self.methods, ONE)
        self._check_compared()
        self._check_pretrainings()
        return self

    def _check_pretrainings(self) -> None:
        """Check that a method has the same pretrainings in all parts of the grid with the same number of labels."""
        asked: dict[tuple[int | float, str], int | None] = {}
        for part in self.grid:
            for number, name in itertools.product(part.labelled, self._names(part)):
                before = asked.setdefault((number, name), part.pretrainings)
                if before != part.pretrainings and is_pretrained(name, self.methods):
                    raise ValueError(
                        f"grid: {name} at {number} has pretrainings {before or 'empty'} in one part and "
                        f"{part.pretrainings or 'empty'} in another; give both the same"
                    )

    def _check_compared(self) -> None:
        """Check that baseline and controls are trained, and that controls are not pretrained."""
        compared = {"evaluate.baseline": self.evaluate.baseline}
        if isinstance(self.control, dict):
            if unknown := self.control.keys() - self.methods.keys():
                raise ValueError(f"control: {min(unknown)!r} is not among the methods {', '.join(self.methods)}")
            compared |= {f"control.{name}": control for name, control in self.controls.items()}
        else:
            compared["control"] = self.control
        trained = self.trained
        for key, other in compared.items():
            if other not in (None, *trained):
                names = ", ".join(trained)
                raise ValueError(f"{key} {other!r} is not among the methods of the grid, {names}; or set null")
        for name, control in self.controls.items():
            if self._family(name) not in ("pretrained", "mixed"):
                raise ValueError(f"control.{name}: {name!r} is not pretrained, so it has no control; leave it out")
            if control == name or self._family(control) == "pretrained":
                raise ValueError(
                    f"control {control!r} of {name!r} is pretrained; name a method that is not, or set null"
                )

    @property
    def trained(self) -> tuple[str, ...]:
        """The methods of the grid, each after the methods that it is built on."""
        return tuple(dict.fromkeys(name for part in self.grid for name in self._names(part)))

    def _names(self, part: GridConfig) -> tuple[str, ...]:
        """The methods of a part of the grid, each after the methods that it is built on."""
        return with_foundations(part.methods or tuple(self.methods), self.methods)

    def _family(self, name: str) -> str:
        return self.methods[name].about(self.methods).family

    @property
    def controls(self) -> dict[str, str]:
        """The control of each method that has one; a single name is the control of every pretrained method."""
        if self.control is None:
            return {}
        trained = self.trained
        if isinstance(self.control, dict):
            return {name: control for name, control in self.control.items() if name in trained}
        return dict.fromkeys((name for name in trained if self._family(name) == "pretrained"), self.control)

    def sized(self, labelled: int | float) -> SplitsWithTest:
        """The splits with a number of training labels, and the validation labels that go with it."""
        splits = self.splits.replace(train=self._sized(self.splits.train, labelled))
        if self.validation_share is None:
            return splits
        share = labelled * self.validation_share
        number = max(1, round(share)) if isinstance(labelled, int) else min(1.0, share)
        return splits.replace(validation=self._sized(splits.validation, number))

    def _sized(self, split: Split, number: int | float) -> Split:
        if isinstance(number, float):
            return split.replace(labelled_fraction=number)
        return split.replace(**{f"{self.counts}_groups": number})

    @property
    def numbers(self) -> list[int | float]:
        """The numbers of labelled groups, ascending."""
        return sorted({number for part in self.grid for number in part.labelled})

    @property
    def cells(self) -> list[Cell]:
        """All models; every draw is complete before the next begins."""
        cells = set()
        for part in self.grid:
            for number, draw, name in itertools.product(part.labelled, range(part.draws), self._names(part)):
                crossed = part.pretrainings is not None and is_pretrained(name, self.methods)
                pretrainings = range(part.pretrainings or 0) if crossed else [None]
                cells |= {Cell(number, draw, pretraining, name) for pretraining in pretrainings}
        order = {name: place for place, name in enumerate(with_foundations(tuple(self.methods), self.methods))}
        return sorted(cells, key=lambda cell: (cell.draw, cell.pretraining or 0, cell.labelled, order[cell.method]))

    def run(self) -> None:
        """Pretrain, train and measure every model, and report; skips what is up to date.

        The report is rewritten as models finish. A failed task does not end the others.

        Raises:
            InputError: splits overlap or have too few labelled groups, before training; or some tasks failed, at the
                end.
            Stopped: the process was asked to stop; the same command resumes.
        """
        study = self if self.data is None else self.replace(splits=self.splits.on(self.data))
        with recorded(self.out, study, "study"), one_view() as view:
            study = with_relative_named(study)
            check_splits(study.splits)
            for sized in map(study.sized, study.numbers):
                for split in (sized.train, sized.validation):
                    select(split, labelled=True)
            failed = study._run_tasks(study._tasks(view))
        if storage.read_manifest(summary := join(self.out, SUMMARY)) is not None:
            print_report(summary, document(Study.read(summary)))
        if failed:
            first = next(iter(failed))
            raise InputError(
                f"{self.out}: {len(failed)} tasks failed, the first is {first} ({failed[first]}); the report names "
                "all, and the same command tries them again"
            )

    @cached_property
    def shared(self) -> dict[str, Method]:
        """The methods; those with the same pretraining share an encoder."""
        return sharing_encoders(self.methods)

    def encoder(self, name: str, seed: int) -> str:
        """The directory of the pretraining of a method."""
        return join(self.out, "pretrained", f"seed-{seed}", name)

    def _encoders(self, seed: int) -> SeedRun:
        """The run that pretrains with a seed, for all other runs."""
        return SeedRun(self.shared, self.splits, seed, ONE, join(self.out, "pretrained", f"seed-{seed}"))

    def _run_of(self, cell: Cell) -> SeedRun:
        """The run of a model; initial weights and data order also differ between draws."""
        methods = {name: method.with_threads(self.workers.threads) for name, method in self.shared.items()}
        out, splits = join(self.out, replace(cell, pretraining=None).run), self.sized(cell.labelled).drawn(cell.draw)
        own = SeedRun(methods, splits, cell.draw, ONE, out, encoders=self._encoders(cell.encoder_seed))
        if cell.pretraining is None:
            return own
        seed = MOST_STUDY_DRAWS * cell.pretraining + cell.draw
        return replace(own, seed=seed, out=join(self.out, cell.run), unpretrained=own)

    # what the tasks do, in other processes

    def _pretrain(self, name: str, seed: int) -> None:
        run = self._encoders(seed)
        identity = [run.methods[name].model_dump(mode="json"), seed, dataset_hashes([run.splits.train])]
        with timed(self.encoder(name, seed), identity):
            pretrained(run, name)

    def _train(self, cell: Cell) -> None:
        """Train a model, and measure it."""
        run, folder = self._run_of(cell), join(self.out, cell.folder)
        splits = (run.splits.train, run.splits.validation)
        settings = [config.model_dump(mode="json") for config in (run.methods[cell.method], *splits)]
        with timed(folder, [*settings, run.seed, dataset_hashes(splits)]):
            bundle = run.model(cell.method)
        Measurement(
            out=join(folder, "measured"),
            bundle=bundle,
            splits=self.splits,
            evaluate=self.evaluate,
            threads=self.workers.threads,
        ).run()

    # the tasks, and the report of those that have ended

    def _tasks(self, view: Mapping[str, Dataset]) -> list[Task]:
        """All tasks, on the data sets as they are now; each draw starts with its pretrainings, which take longest."""
        described = TestGroups(out=join(self.out, "test"), splits=self.splits, evaluate=self.evaluate)
        test = Task("test groups", partial(_seeing, view, described.run))
        tasks = {test.name: test}
        for _, of_draw in itertools.groupby(self.cells, key=lambda cell: cell.draw):
            models: dict[str, Task] = {}
            for cell in of_draw:
                method, needs = self.shared[cell.method], [test.name]
                for name in method.built_on():
                    pretraining = cell.pretraining if is_pretrained(name, self.shared) else None
                    needs.append(replace(cell, method=name, pretraining=pretraining).folder)
                if (encoder := method.encoder(cell.method, self.shared)) is not None:
                    kind, seed = f"pretraining of {encoder}", cell.encoder_seed
                    call, folder = partial(self._pretrain, encoder, seed), self.encoder(encoder, seed)
                    task = Task(f"{kind}, seed {seed}", partial(_seeing, view, call), kind=kind, folder=folder)
                    tasks[task.name] = task
                    needs.append(task.name)
                call, folder = partial(self._train, cell), join(self.out, cell.folder)
                call, size = partial(_seeing, view, call), float(cell.labelled)
                models[cell.folder] = Task(cell.folder, call, tuple(needs), cell.method, size, folder)
            tasks |= models
        return [*tasks.values()]

    def _run_tasks(self, tasks: list[Task]) -> dict[str, str]:
        """Run all tasks, and write the report from time to time; returns the failures."""
        done: set[str] = set()
        failed: dict[str, str] = {}
        costs, share = Costs(tasks), 0.0
        start = reported = time.monotonic()
        with progress("study", 1.0, "tasks") as advance:

            def ended(task: Task, failure: str | None, seconds: float) -> None:
                nonlocal reported, share
                if failure is None:
                    done.add(task.name)
                else:
                    failed[task.name] = failure
                    log.warning("study: %s failed: %s", task.name, failure)
                spent = Spent.read(task.folder) if task.folder else None
                before, share = share, costs.done(task, seconds, max(seconds, spent.seconds if spent else 0.0))
                advance(1, share - before)
                log.info("study: %d of %d, %s", len(done) + len(failed), len(tasks), task.name)
                if time.monotonic() - reported >= _REPORT_S:
                    self._summarise(done, failed)
                    reported = time.monotonic()

            run_all(tasks, self.workers, ended)
        log.info("study: %d of %d done in %.0f s", len(done), len(tasks), time.monotonic() - start)
        self._summarise(done, failed)
        return failed

    def _summarise(self, done: set[str], failed: Mapping[str, str]) -> None:
        """Write the report of the models measured so far."""
        cells = self.cells
        models = []
        for cell in (cell for cell in cells if cell.folder in done):
            spent = Spent.read(join(self.out, cell.folder)) or Spent(of="")
            url = join(self.out, cell.folder, "measured")
            costs = {"seconds": spent.seconds if spent.done else None, "documents": spent.documents}
            models.append(Model(**asdict(cell) | costs | {"labelled": str(cell.labelled), "url": url}))
        if not models:
            return
        encoders = {name: method.encoder(name, self.shared) for name, method in self.shared.items()}
        design = Design(
            labelled={str(n): float(n) if isinstance(n, int) else None for n in self.numbers},
            methods={name: method.about(self.methods) for name, method in self.methods.items() if name in self.trained},
            baseline=self.evaluate.baseline,
            controls=self.controls,
            counts=self.counts,
            validation_share=self.validation_share,
            validation_size=self.splits.validation.size,
            primary=self.evaluate.primary,
            policies={name: metric.policy for name, metric in self.evaluate.measured.items()},
            leave_out_constant=self.evaluate.leave_out_constant,
            planned=len(cells),
            failed=dict(failed),
            pretraining={name: self._pretraining_cost(encoder) for name, encoder in encoders.items() if encoder},
        )
        out, test = join(self.out, SUMMARY), join(self.out, "test")
        StudySummary(out=out, test=test, design=design, models=tuple(models)).run()

    def _pretraining_cost(self, name: str) -> Cost:
        folders = [self.encoder(name, seed) for seed in {cell.encoder_seed for cell in self.cells}]
        records = [record for folder in folders if (record := Spent.read(folder)) is not None and record.done]
        seconds = sum(each.seconds for each in records)
        if not seconds:
            return Cost()
        return Cost(
            pretraining_minutes=seconds / len(records) / 60,
            pretraining_documents_per_s=sum(each.documents for each in records) / seconds,
        )


def _seeing(view: Mapping[str, Dataset], call: Callable[[], object]) -> None:
    """Call with the data sets of a view, in whatever process."""
    with one_view(view):
        call()
