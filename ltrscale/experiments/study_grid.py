"""The grid of a study: which models it trains, what they share, and how the report sorts their methods."""

import itertools
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ltrscale.config import Config, digest
from ltrscale.data.dataset.split import Split, SplitsWithTest
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.experiments.methods.base import AnyMethod
from ltrscale.experiments.methods.choices import Method, MethodName, check_methods, with_foundations
from ltrscale.launch.workers import ONE
from ltrscale.stages.tasks import TaskWorkers, TaskWorkersConfig
from ltrscale.storage import join

MOST_DRAWS = 10_000

Labelled = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)]


class GridConfig(Config):
    """A part of the study: every method with every number of labelled groups, draw and seed."""

    labelled: tuple[Labelled, ...] = Field(min_length=1)
    """Labelled groups of the training split that are used: a number, see `counts`, or as a decimal up to 1.0 a share of
    all (HOU24: .001 to 1)."""
    draws: int = Field(5, ge=1, lt=MOST_DRAWS)
    """Random samples of that size; fewer than five judge nothing, and ten cost twice as much for intervals that are a
    third narrower. With the same number a smaller sample is part of a larger one."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """Of pretraining; finetuning and trees mix the draw in. Several are averaged for each draw."""
    methods: tuple[str, ...] = ()
    """Names of methods; empty for all. Methods that these are built on come along."""


class StudyConfig(Config):
    """Methods at several numbers of labelled groups."""

    out: str
    """Directory for everything; the report is `summary/report.md`."""
    data: str | None = None
    """A data set directory that jobs.prepare made, for the splits that name none."""
    splits: SplitsWithTest
    """Training, validation and test. Pretraining reads all groups of the training split."""
    methods: dict[MethodName, Method] = Field(min_length=1)
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
    pretraining's own share. Where pretrained methods differ in more than that, each by name with a control of its own,
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
        return self

    def _check_compared(self) -> None:
        """Check that the methods that others are compared with are trained, and that controls are not pretrained."""
        named = {"evaluate.baseline": self.evaluate.baseline}
        if isinstance(self.control, dict):
            if unknown := self.control.keys() - self.methods.keys():
                raise ValueError(f"control: {min(unknown)!r} is not among the methods {', '.join(self.methods)}")
            named |= {f"control.{name}": own for name, own in self.controls.items()}
        else:
            named["control"] = self.control
        trained = self.trained
        for key, other in named.items():
            if other not in (None, *trained):
                among = ", ".join(trained)
                raise ValueError(f"{key} {other!r} is not among the methods of the grid, {among}; or set null")
        for name, own in self.controls.items():
            if self.methods[name].about(self.methods).family not in ("pretrained", "mixed"):
                raise ValueError(f"control.{name}: {name!r} is not pretrained, so it has no control; leave it out")
            if own == name or self.methods[own].about(self.methods).family == "pretrained":
                raise ValueError(f"control {own!r} of {name!r} is pretrained; name a method that is not, or set null")

    @property
    def trained(self) -> tuple[str, ...]:
        """The methods of the grid, each after those that it is built on."""
        return with_foundations(tuple(n for part in self.grid for n in part.methods or self.methods), self.methods)

    @property
    def controls(self) -> dict[str, str]:
        """The control of each method of the grid that has one; a single name is that of every pretrained method."""
        if self.control is None:
            return {}
        trained = self.trained
        if isinstance(self.control, dict):
            return {name: own for name, own in self.control.items() if name in trained}
        pretrained = (name for name in trained if self.methods[name].about(self.methods).family == "pretrained")
        return dict.fromkeys(pretrained, self.control)

    def sized(self, labelled: int | float) -> SplitsWithTest:
        """The splits with that many training labels, and as many validation labels as belong to them."""
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
        """The numbers of labelled groups, rising."""
        return sorted({number for part in self.grid for number in part.labelled})


class Cell(Config):
    """One model of the study."""

    labelled: Labelled
    draw: int
    seed: int
    method: str

    @property
    def run(self) -> str:
        """The directory of the models that share labelled groups and seed, below that of the study."""
        return join("models", str(self.labelled), f"draw-{self.draw}", f"seed-{self.seed}")

    @property
    def folder(self) -> str:
        """The directory of the model."""
        return join(self.run, self.method)


def cells_of(config: StudyConfig) -> list[Cell]:
    """All models of a study, draw after draw, so that every draw is complete before the next begins."""
    cells = {
        Cell(labelled=number, draw=draw, seed=seed, method=name)
        for part in config.grid
        for number, draw, seed in itertools.product(part.labelled, range(part.draws), part.seeds)
        for name in with_foundations(part.methods or tuple(config.methods), config.methods)
    }
    order = {name: i for i, name in enumerate(with_foundations(tuple(config.methods), config.methods))}
    return sorted(cells, key=lambda cell: (cell.draw, cell.seed, cell.labelled, order[cell.method]))


def shared_encoders(methods: Mapping[str, AnyMethod]) -> dict[str, AnyMethod]:
    """The methods, of which those with the same pretraining share the encoder of the first."""
    owners: dict[str, str] = {}
    shared: dict[str, AnyMethod] = {}
    for name, method in methods.items():
        pretraining = method.pretraining()
        owner = name if pretraining is None else owners.setdefault(digest(pretraining), name)
        shared[name] = method if owner == name else method.starting_as(owner)
    return shared
