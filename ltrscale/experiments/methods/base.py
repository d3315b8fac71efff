"""The interface of a pipeline's methods, the students that some train first, and the run that trains with one seed."""

import typing
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ltrscale.config import Config, overlay
from ltrscale.data.dataset.columns import Labels
from ltrscale.data.dataset.row_groups import Fold
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits, Texts
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.draws import mix
from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.ranking.loss import SquaredErrorConfig
from ltrscale.ranking.loss_choices import LossConfig
from ltrscale.runtime.workers import WorkersConfig
from ltrscale.storage import join
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.settings import OptimizerConfig, Preset, TrainingConfig
from ltrscale.trees.gbdt import TreesStudent
from ltrscale.tuning.searched import Searched


class NetworkStudent(Config):
    """How a network learns a teacher's scores; the rest is that of the method that it is trained as."""

    fixed: ClassVar = {
        "seed": 0,
        "device": "auto",
        "precision": "float32",
        "compile": False,
        "deterministic": False,
        "checkpoint_minutes": 10.0,
        "checkpoint_failures": 3,
        "preflight": {"check": "footers", "max_bad": 0.0},
        "debias": None,
        "negatives": 0,
        "relevant_only": False,
        "average": 0.0,
        "validation_metric": "ndcg@5",
    }
    needs: ClassVar = "a neural method"
    """Kind of method that can be such a student, for error messages."""
    kind: Literal["network"] = "network"
    loss: LossConfig = SquaredErrorConfig(standardise=True)
    """Squared error against scores standardised per group; `list_net` learns their softmax over each list instead."""
    epochs: int = Field(20, ge=1)
    """Maximum number of epochs; 20 as for the network that `jobs.distill` trains."""
    patience: int = Field(5, ge=1)
    """Stop after this many epochs without a better validation metric: that of the method, on the true labels."""
    minutes: float | None = Field(None, gt=0)
    """Also end after the epoch that ends later than this; empty for no limit."""
    stream: StreamConfig = StreamConfig(docs_per_batch=4096, streams=1)
    """Batch size and order of the data."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)

    def streams(self) -> list[StreamConfig]:
        return [self.stream]

    def finetuning(self, method: FinetuneConfig) -> FinetuneConfig:
        """The settings that train a method's network on scores: all layers at once, because there are many scores."""
        network = {"network", "head", "context", "projector_layers", "noise"}
        alike = {*TrainingConfig.model_fields, *network, "validation_metric"}
        own = self.model_dump(exclude={"kind"})
        return FinetuneConfig.model_validate({**method.model_dump(include=alike), **own, "head_epochs": 0})


Student = Annotated[NetworkStudent | TreesStudent, Field(discriminator="kind")]


MethodName = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]
"""Also a directory's name."""


class Method(Config):
    """A method of a pipeline; kinds override the defaults, and a hook together with the flag before it."""

    can_teach: ClassVar[bool] = True
    """Whether a self-trained method may learn its scores."""
    can_be_member: ClassVar[bool] = True
    """Whether a stack may have it as a member."""

    @property
    def labels_from(self) -> str | None:
        """The entry of `learn_from` with its labels; None for those of `splits`."""
        return None

    def built_on(self) -> tuple[str, ...]:
        """The methods of the same run that must be trained first."""
        return ()

    def check(self, where: str, name: str, methods: Mapping[str, "Method"]) -> None:
        """Raise a ValueError, starting with `where`, unless it builds on existing methods of the right kind."""

    def check_differs(self, where: str) -> None:
        """Raise a ValueError, starting with `where`, unless other seeds give other models."""

    def check_inputs(self, splits: Splits) -> None:
        """Raise an `InputError` unless the features and bundles that it names exist and fit the splits."""

    def streams(self) -> Sequence[StreamConfig]:
        """The streams of data that its stages read."""
        return ()

    def splits_in(self, run: "SeedRun") -> Splits:
        """The splits that it learns from."""
        return run.splits

    def encoder(self, name: str, methods: Mapping[str, "Method"]) -> str | None:
        """The method whose pretrained encoder it starts from, which may be itself; None without one."""
        return None

    def with_threads(self, threads: int) -> Self:
        """The method with a number of threads for trees that would take all cores."""
        return self

    def keeping(self, production: str) -> Self:
        """The method, keeping what it must keep of the bundle in service."""
        return self

    @classmethod
    def with_preset(cls, preset: Preset, given: Mapping[str, Any], methods: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings, as in a config, with the shared preset if the kind has presets and none is named."""
        return given

    @abstractmethod
    def about(self, methods: Mapping[str, "Method"]) -> MethodTraits:
        """The traits by which a study sorts its tables."""

    @abstractmethod
    def train(self, run: "SeedRun", name: str, out: str) -> None:
        """Train with the seed and labelled groups of a run, and commit the bundle in `out`."""

    @property
    def is_one_model(self) -> bool:
        """Whether it makes one network, tree model or in-context ranker, as refits and means of runs need."""
        return False

    def average(self, run: "SeedRun", bundles: Sequence[str], out: str) -> None:
        """Commit the mean of several runs, if it makes one model."""
        raise NotImplementedError

    @property
    def is_searchable(self) -> bool:
        """Whether a search may vary its settings."""
        return False

    def search_job(self, run: "SeedRun", name: str) -> Searched:
        """The job to search the settings of, if it is searchable."""
        raise NotImplementedError

    def takes(self, student: Student) -> bool:
        """Whether it can train this student."""
        return False

    def train_student(self, student: Student, run: "SeedRun", name: str, scores: Splits, start: str, out: str) -> None:
        """Train a student in `start` on `scores`, a teacher's for the training groups, then in `out` on the labels."""
        raise NotImplementedError


class ReadingMethod(Method):
    """A method that reads features, not only scores of other methods."""

    preset: Preset | None = None
    """Start from published settings of the whole method, which its own settings override: `paper` as HOU24's text has
    them, `hou24` as its public code does."""
    leave_out: Texts = ()
    """Features that this method does not read: names, prefixes with * such as c_*, or `categorical` for all of that
    kind. So one report can compare a method with and without them."""
    labels: Labels | None = Field(default=None, exclude_if=lambda labels: labels is None)
    """Labels of training and validation, instead of those of `splits`: a goal, or a weighted sum of goals."""
    learns_from: str | None = None
    """Learn the labels of this entry of the pipeline's `learn_from`, such as clicks; empty for those of `splits`."""

    @model_validator(mode="before")
    @classmethod
    def _over_the_preset(cls, values: Any) -> Any:
        """Let the method's settings override its preset."""
        if not isinstance(values, Mapping) or values.get("preset") not in typing.get_args(Preset):
            return values  # no preset, or an unknown one, which field validation refuses
        settings = {"kind": cls.model_fields["kind"].default, **values}
        return overlay(cls.preset_settings(values["preset"], values), settings)

    @classmethod
    def preset_settings(cls, preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a preset for this kind; some depend on the given ones, as in a config."""
        return {}

    @classmethod
    def with_preset(cls, preset: Preset, given: Mapping[str, Any], methods: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"preset": preset, **given}

    @property
    def labels_from(self) -> str | None:
        return self.learns_from

    def check_inputs(self, splits: Splits) -> None:
        if self.leave_out or self.labels is not None:
            select(self._read(splits).train, labelled=True)

    def splits_in(self, run: "SeedRun") -> Splits:
        return self._read(run.splits if self.learns_from is None else run.learn_from[self.learns_from])

    def _read(self, splits: Splits) -> Splits:
        """The splits with this method's labels and features."""
        if self.labels is not None:
            train, validation = (split.replace(labels=self.labels) for split in (splits.train, splits.validation))
            splits = splits.replace(train=train, validation=validation)
        return splits.leaving_out(self.leave_out)


@dataclass(frozen=True)
class SeedRun:
    """All methods trained with one seed, each once, after the methods that it builds on."""

    methods: Mapping[str, Method]
    splits: Splits
    """With the seed's sample of labelled groups."""
    seed: int
    """Replaces the seeds of the stages."""
    workers: WorkersConfig
    """Data-parallel workers of the neural stages."""
    out: str
    """Directory for everything: `METHOD/model`, `METHOD/pretrained`, `METHOD/scores`, `METHOD/student`,
    `METHOD/search`, `folds/K-of-N/METHOD/model`, `runs/K/METHOD/model`."""
    encoders: "SeedRun | None" = None
    """The run that pretrains for this one; None to pretrain here. Encoders see no labels, so all folds, further runs
    and samples of labelled groups can share them."""
    learn_from: Mapping[str, Splits] = field(default_factory=dict)
    """Other labels than those of `splits`, by name; sampling and folds of `splits` do not change them."""
    searches: "SeedRun | None" = None
    """The run whose searches for settings this one shares; None to search here."""
    unpretrained: "SeedRun | None" = None
    """The run that trains the methods without an encoder, once for several pretrainings; None to train all here."""

    def model(self, name: str) -> str:
        """Train a method; returns its bundle's directory."""
        if self.unpretrained is not None and not is_pretrained(name, self.methods):
            return self.unpretrained.model(name)
        out = self.place(name, "model")
        self.methods[name].train(self, name, out)
        return out

    def place(self, *names: str) -> str:
        """A directory of the run."""
        return join(self.out, *names)

    def learns_elsewhere(self, name: str) -> bool:
        """Whether a method, and what it starts from, learns only from `learn_from`."""
        method = self.methods[name]
        return method.labels_from is not None and all(map(self.learns_elsewhere, method.built_on()))

    def without(self, fold: Fold) -> "SeedRun":
        """The run on all labelled groups except those of a fold."""
        splits = self.splits.replace(train=self.splits.train.replace(fold=fold))
        out = self.place("folds", f"{fold.number}-of-{fold.of}")
        return replace(self, splits=splits, out=out, encoders=self.encoders or self, searches=None, unpretrained=None)

    def repeated(self, name: str, number: int) -> list[str]:
        """`number` models of a method: one with this seed, others with other seeds and the same encoder and search."""
        runs = [self]
        for repeat in range(1, number):
            seed, out = mix("run", self.seed, repeat) % 2**31, self.place("runs", str(repeat))
            encoders, searches = self.encoders or self, self.searches or self
            again = replace(self, seed=seed, out=out, encoders=encoders, searches=searches, unpretrained=None)
            runs.append(again)
        return [run.model(name) for run in runs]


def check_methods(methods: Mapping[str, Method], workers: WorkersConfig, *, learn_from: Collection[str] = ()) -> None:
    """Raise a ValueError unless each method builds on methods of the right kind, and has labels and enough streams.

    `learn_from` has the names of labels besides those of the splits.
    """
    # foundations first, so that a method reports its own mistake
    for name in with_foundations(tuple(methods), methods):
        method = methods[name]
        method.check(f"methods.{name}", name, methods)
        if method.labels_from not in (None, *learn_from):
            names = ", ".join(learn_from) or "empty; only a pipeline has it"
            raise ValueError(
                f"methods.{name}.learns_from {method.labels_from!r} is not in learn_from, which is {names}"
            )
        for stream in method.streams():
            if stream.streams < workers.most:
                raise ValueError(
                    f"methods.{name} has {stream.streams} streams for {workers.most} workers; "
                    f"set stream.streams of its stages to a multiple of {workers.most}"
                )


def is_pretrained(name: str, methods: Mapping[str, Method]) -> bool:
    """Whether a method, or one that it is built on, starts from a pretrained encoder."""
    method = methods[name]
    return method.encoder(name, methods) is not None or any(is_pretrained(of, methods) for of in method.built_on())


def with_foundations(names: tuple[str, ...], methods: Mapping[str, Method]) -> tuple[str, ...]:
    """The methods, each after those that it is built on."""
    ordered: dict[str, None] = {}

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in methods and name not in above:  # not a cycle, which a method's check refuses
            for other in methods[name].built_on():
                add(other, (*above, name))
            ordered[name] = None

    for name in names:
        add(name, ())
    return tuple(ordered)
