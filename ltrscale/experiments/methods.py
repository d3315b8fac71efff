"""The kinds of methods that a pipeline trains and compares."""

import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ltrscale.bundle import FeatureOrder
from ltrscale.config import Config
from ltrscale.data.dataset.split import Texts
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.experiments.presets import over_preset
from ltrscale.launch.workers import WorkersConfig
from ltrscale.ranking.choices import LossConfig
from ltrscale.ranking.pointwise import SquaredErrorConfig
from ltrscale.training.combine import CombineConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.presets import Preset
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.ranking import RankingConfig
from ltrscale.training.settings import OptimizerConfig
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.ensemble import EnsembleConfig, check_draws
from ltrscale.trees.semi import SemiConfig
from ltrscale.trees.stacking import StackConfig
from ltrscale.trees.students import LambdaRankStudent, RegressionStudent, SoftmaxStudent
from ltrscale.tuning.space import SamplerConfig, Space


class ReadingMethod(Config):
    """A method that reads features, not only the scores of other methods."""

    preset: Preset | None = None
    """Start from published settings of the whole method, which its own settings override: `paper` as HOU24's text has
    them, `hou24` as its public code does."""
    leave_out: Texts = ()
    """Features that this method does not read: names, prefixes with * such as c_*, or `categorical` for all of that
    kind. So one report can compare a method with and without them."""
    learns_from: str | None = None
    """Learn the labels of this entry of the pipeline's `learn_from`, such as clicks; empty for those of `splits`."""

    @model_validator(mode="before")
    @classmethod
    def _over_the_preset(cls, values: Any) -> Any:
        """The method's settings override those of its preset."""
        if not isinstance(values, Mapping) or values.get("preset") not in typing.get_args(Preset):
            return values  # no preset, or an unknown one, which the validation of the field refuses
        return over_preset(values["preset"], {"kind": cls.model_fields["kind"].default, **values})


class GBDTMethod(ReadingMethod):
    """Gradient boosted trees on the labelled groups."""

    kind: Literal["gbdt"] = "gbdt"
    gbdt: GBDTConfig = LightGBMConfig()
    """The library that grows the trees, with its settings."""
    ensemble: EnsembleConfig | None = None
    """Average several models that validation chooses; empty for one model."""

    @model_validator(mode="after")
    def _has_different_candidates(self) -> Self:
        if self.ensemble is not None:
            check_draws(self.gbdt)
        return self


class SemiMethod(ReadingMethod):
    """Gradient boosted trees on the labelled groups, helped by the unlabelled ones."""

    kind: Literal["semi_gbdt"] = "semi_gbdt"
    semi: SemiConfig


class NeuralMethod(ReadingMethod):
    """A network finetuned on the labelled groups, after pretraining or from random weights."""

    kind: Literal["neural"] = "neural"
    pretrain: PretrainConfig | None = None
    """Empty for the baseline without pretraining."""
    pretrained_as: str | None = None
    """Start from the pretrained encoder of this other method; it is pretrained once for both."""
    starts_from: str | None = None
    """Start from the ranker of this other method, such as one that has learnt clicks; `finetune.keep_head` keeps its
    head, too."""
    finetune: FinetuneConfig = FinetuneConfig()

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        keys = {"pretrain": self.pretrain, "pretrained_as": self.pretrained_as, "starts_from": self.starts_from}
        origins = [key for key, origin in keys.items() if origin is not None]
        if len(origins) > 1:
            raise ValueError(f"{' and '.join(origins)} exclude each other; leave one of them out")
        if origins not in ([], ["pretrain"]) and self.leave_out:
            raise ValueError(f"{origins[0]} brings the features of its encoder; set leave_out at that method alone")
        return self

    def projector_layers(self) -> int | None:
        """Hidden layers of the projector that the method pretrains; None if it does not pretrain."""
        return None if self.pretrain is None else self.pretrain.method.projector_layers


class TunedMethod(Config):
    """Another method with the settings that a search finds best on the validation groups.

    Each sample of labelled groups has its own search: the trials of a seed learn from its labels alone.
    """

    kind: Literal["tuned"] = "tuned"
    of: str
    """Name of a method of kind gbdt or neural, which is trial 0; pretraining is not part of a trial."""
    space: Space = Field(min_length=1)
    """Values of dotted keys of that method, `gbdt.NAME` or `finetune.NAME`, as in jobs.tune."""
    trials: int = Field(30, ge=1)
    """Number of trials; HOU24 uses up to 150 on its industrial log, and grids of 27 cells on public data."""
    search: SamplerConfig = SamplerConfig()


class CombinedMethod(Config):
    """One ranker that combines the rankers of several neural methods with the same seed."""

    kind: Literal["combined"] = "combined"
    parts: tuple[str, ...] = Field(min_length=2)
    """Names of neural methods."""
    combine: CombineConfig = CombineConfig(how="concat")


class EnsembleMethod(Config):
    """The mean score of several runs of one method that differ in their seed.

    Networks have other initial weights and another order of the data, trees other samples of rows and columns. Runs of
    a tuned method all have the settings that its search found. Compare a mean with a mean: three networks are ahead of
    one model of trees by their number alone.
    """

    kind: Literal["ensemble"] = "ensemble"
    of: str
    """Name of a method of kind neural, gbdt or tuned; its own run counts as the first."""
    runs: int = Field(3, ge=2)
    """Total number of runs; DASALC-ens takes 3 to 5."""


class NetworkStudent(RankingConfig):
    """How a network learns a teacher's scores; its parts are those of the method that it is trained as."""

    kind: Literal["network"] = "network"
    loss: LossConfig = SquaredErrorConfig(standardise=True)
    """Squared error against scores standardised per group; `list_net` learns their softmax over each list instead."""
    epochs: int = Field(20, ge=1)
    """Maximum number of epochs; 20 as for the network that `jobs.distill` trains."""
    patience: int = Field(5, ge=1)
    """Stop after this many epochs without a better validation metric, which is of the true labels."""
    stream: StreamConfig = StreamConfig(docs_per_batch=4096, streams=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)

    def of(self, method: FinetuneConfig) -> FinetuneConfig:
        """The training on scores of a method's network: all layers at once, because scores are many."""
        parts = method.model_dump(include={"network", "head", "context", "projector_layers", "noise"})
        return FinetuneConfig.model_validate({**parts, **self.model_dump(exclude={"kind"}), "head_epochs": 0})


class SelfTrainedMethod(Config):
    """A student that learns the mean score of several runs of a method on all training groups, then the labels.

    The groups whose labels are in use teach the runs, and the student in the end; no other label is read.
    """

    kind: Literal["self_trained"] = "self_trained"
    of: str
    """Name of the method whose runs teach: any but stacks, self-trained methods and orders of a feature."""
    runs: int = Field(3, ge=1)
    """Total number of runs, as for an ensemble; the method's own run counts as the first."""
    groups: int | None = Field(None, ge=1)
    """Learn the scores of at most this many training groups, a random sample; empty for all groups."""
    student_as: str | None = None
    """Name of the neural method, or of the method of LightGBM's trees, whose settings train the student on the labels;
    it starts from that method's pretrained encoder, if there is one. Empty for `of`."""
    student: Annotated[
        NetworkStudent | RegressionStudent | LambdaRankStudent | SoftmaxStudent, Field(discriminator="kind")
    ] = NetworkStudent()
    """How the student learns the scores: as a network, or as trees by one of three objectives."""


class StackMethod(Config):
    """Trees over the scores of other methods of the same seed and over raw features."""

    kind: Literal["stack"] = "stack"
    members: tuple[str, ...] = Field(min_length=1)
    """Names of methods other than stacks and orders of a feature; each is trained again for every fold."""
    stack: StackConfig = StackConfig()


class FeatureMethod(FeatureOrder):
    """The order of one feature, such as BM25: a baseline that learns nothing."""

    kind: Literal["feature"] = "feature"

    @property
    def order(self) -> FeatureOrder:
        """The order itself."""
        return FeatureOrder(feature=self.feature, ascending=self.ascending)


MethodName = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]
"""Also a directory's name."""
BaseMethod = Annotated[
    GBDTMethod | SemiMethod | NeuralMethod | TunedMethod | CombinedMethod | EnsembleMethod | SelfTrainedMethod,
    Field(discriminator="kind"),
]
"""The possible members of a stack."""
Method = Annotated[
    GBDTMethod
    | SemiMethod
    | NeuralMethod
    | TunedMethod
    | CombinedMethod
    | EnsembleMethod
    | SelfTrainedMethod
    | StackMethod
    | FeatureMethod,
    Field(discriminator="kind"),
]


def built_on(method: Method) -> tuple[str, ...]:
    """The methods of the same trial that a method needs trained."""
    match method:
        case CombinedMethod(parts=names) | StackMethod(members=names):
            return names
        case EnsembleMethod(of=of) | SelfTrainedMethod(of=of):
            return (of,)
        case NeuralMethod(starts_from=str(start)):
            return (start,)
    return ()


def searched(name: str, methods: Mapping[str, Method]) -> Method | None:
    """A method, or the one whose settings it searches; None for a name that is not there."""
    method = methods.get(name)
    return methods.get(method.of) if isinstance(method, TunedMethod) else method


def check_methods(
    methods: Mapping[str, Method], workers: WorkersConfig, *, where: str = "methods", learn_from: Collection[str] = ()
) -> None:
    """Check that each method builds on existing methods of the right kind, and has labels and enough streams.

    Args:
        methods: by name.
        workers: of their neural stages.
        where: the config's key, for errors.
        learn_from: the names of labels besides those of the splits.

    Raises:
        ValueError: a method does not; the message names it.
    """
    for name, method in methods.items():
        _check_names(name, method, methods, where)
        if isinstance(method, ReadingMethod) and method.learns_from not in (None, *learn_from):
            known = ", ".join(learn_from) or "empty; only a pipeline has it"
            raise ValueError(
                f"{where}.{name}.learns_from {method.learns_from!r} is not in learn_from, which is {known}"
            )
        for stream in _streams(method):
            if stream.streams < workers.most:
                raise ValueError(
                    f"{where}.{name} has {stream.streams} streams for {workers.most} workers; "
                    f"set stream.streams of its stages to a multiple of {workers.most}"
                )
    for name, method in methods.items():
        if isinstance(method, CombinedMethod) and len({_left_out(methods, part) for part in method.parts}) > 1:
            raise ValueError(f"{where}.{name}.parts leave out different features; combine rankers of the same ones")


def _check_names(name: str, method: Method, methods: Mapping[str, Method], where: str) -> None:
    """Check that a method builds on existing methods of the right kind."""
    match method:
        case NeuralMethod(starts_from=str()):
            _check_start(f"{where}.{name}", name, methods)
        case NeuralMethod(pretrained_as=other):
            start = method if other is None else methods.get(other)
            if not isinstance(start, NeuralMethod) or (other is not None and start.pretrain is None):
                raise ValueError(f"{where}.{name}.pretrained_as {other!r} is not a method that pretrains")
            try:
                method.finetune.check_start(start.projector_layers())
            except ValueError as error:
                raise ValueError(f"{where}.{name}.{error}") from error
        case TunedMethod(of=of):
            match methods.get(of):
                case NeuralMethod() | GBDTMethod(ensemble=None):
                    pass
                case _:
                    raise ValueError(f"{where}.{name}.of: {of!r} is not a neural method nor one of a single gbdt")
        case CombinedMethod(parts=parts):
            if wrong := [part for part in parts if not isinstance(methods.get(part), NeuralMethod)]:
                raise ValueError(f"{where}.{name}.parts: {wrong[0]!r} is not a neural method")
        case EnsembleMethod(of=of):
            match searched(of, methods):
                case NeuralMethod():
                    pass
                case GBDTMethod(gbdt=trees, ensemble=None):
                    if not isinstance(methods[of], TunedMethod):  # a search may find settings that draw
                        check_draws(trees, where=f"{where}.{name}.runs")
                case _:
                    raise ValueError(f"{where}.{name}.of: {of!r} is not a neural method, nor one of a single gbdt")
        case SelfTrainedMethod():
            _check_self_trained(f"{where}.{name}", method, methods)
        case StackMethod(members=members):
            if wrong := [m for m in members if isinstance(methods.get(m), StackMethod | FeatureMethod | None)]:
                raise ValueError(
                    f"{where}.{name}.members: {wrong[0]!r} is unknown, a stack or of kind feature; name another "
                    "method, or the feature under stack.features"
                )


def _check_start(where: str, name: str, methods: Mapping[str, Method]) -> None:
    """Check that the rankers that a neural method starts from are neural, and that the first one starts elsewhere."""
    passed = [name]
    while isinstance(method := methods.get(passed[-1]), NeuralMethod) and method.starts_from is not None:
        if method.starts_from in passed:
            raise ValueError(f"{where}.starts_from leads from {' to '.join(passed)} and back; let one start elsewhere")
        passed.append(method.starts_from)
    if not isinstance(method, NeuralMethod):
        raise ValueError(f"{where}.starts_from: {passed[-1]!r} is not a neural method")


def _left_out(methods: Mapping[str, Method], name: str) -> frozenset[str]:
    """What a neural method leaves out, itself or through the encoder of another method."""
    method = methods[name]
    assert isinstance(method, NeuralMethod)
    other = method.pretrained_as or method.starts_from
    return frozenset(method.leave_out) if other is None else _left_out(methods, other)


def _check_self_trained(where: str, method: SelfTrainedMethod, methods: Mapping[str, Method]) -> None:
    """Check that the teacher can teach, and that the student learns scores and labels with the same library."""
    match methods.get(method.of):
        case None | StackMethod() | SelfTrainedMethod() | FeatureMethod():
            raise ValueError(
                f"{where}.of: {method.of!r} is unknown, a stack, self-trained or of kind feature; name another method"
            )
        case GBDTMethod(gbdt=trees) | SemiMethod(semi=SemiConfig(gbdt=trees)) if method.runs > 1:
            check_draws(trees, where=f"{where}.runs")
    kind = method.student.kind
    match methods.get(method.student_as or method.of):
        case NeuralMethod() if kind == "network":
            return
        case GBDTMethod(gbdt=LightGBMConfig(), ensemble=None) if kind != "network":
            return
    needed = "a neural method" if kind == "network" else "a method of LightGBM's trees without an ensemble"
    raise ValueError(
        f"{where}.student of kind {kind} is trained as {method.student_as or method.of!r}, which is not {needed}; name "
        "one as student_as, or choose another kind"
    )


def _streams(method: Method) -> list[StreamConfig]:
    """The streams of data that a method's stages read."""
    match method:
        case NeuralMethod(pretrain=pretrain, finetune=finetune):
            return [finetune.stream, *([pretrain.stream] if pretrain else [])]
        case CombinedMethod(combine=combine) if combine.how == "concat":
            return [combine.stream]
        case SelfTrainedMethod(student=NetworkStudent(stream=stream)):
            return [stream]
    return []
