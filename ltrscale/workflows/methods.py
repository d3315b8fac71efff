"""The kinds of methods that a pipeline trains and compares."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.launch.workers import WorkersConfig
from ltrscale.training.combine import CombineConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.ensemble import EnsembleConfig, check_draws
from ltrscale.trees.semi import SemiConfig
from ltrscale.trees.stacking import StackConfig
from ltrscale.tuning.space import SamplerConfig, Space


class GBDTMethod(Config):
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


class SemiMethod(Config):
    """Gradient boosted trees on the labelled groups, helped by the unlabelled ones."""

    kind: Literal["semi_gbdt"] = "semi_gbdt"
    semi: SemiConfig


class NeuralMethod(Config):
    """A network finetuned on the labelled groups, after pretraining or from random weights."""

    kind: Literal["neural"] = "neural"
    pretrain: PretrainConfig | None = None
    """Empty for the baseline without pretraining."""
    pretrained_as: str | None = None
    """Start from the pretrained encoder of this other method; it is pretrained once for both."""
    finetune: FinetuneConfig = FinetuneConfig()

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.pretrain is not None and self.pretrained_as is not None:
            raise ValueError("pretrain and pretrained_as exclude each other; leave one of them out")
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
    """The mean score of several runs of one neural method, each with other initial weights and another data order."""

    kind: Literal["ensemble"] = "ensemble"
    of: str
    """Name of a neural method; its own run counts as the first."""
    runs: int = Field(3, ge=2)
    """Total number of runs; DASALC-ens takes 3 to 5."""


class StackMethod(Config):
    """Trees over the scores of other methods of the same seed and over raw features."""

    kind: Literal["stack"] = "stack"
    members: tuple[str, ...] = Field(min_length=1)
    """Names of methods other than stacks; each is trained again for every fold."""
    stack: StackConfig = StackConfig()


MethodName = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]
"""Also a directory's name."""
BaseMethod = Annotated[
    GBDTMethod | SemiMethod | NeuralMethod | TunedMethod | CombinedMethod | EnsembleMethod, Field(discriminator="kind")
]
"""The possible members of a stack."""
Method = Annotated[
    GBDTMethod | SemiMethod | NeuralMethod | TunedMethod | CombinedMethod | EnsembleMethod | StackMethod,
    Field(discriminator="kind"),
]


def built_on(method: Method) -> tuple[str, ...]:
    """The methods of the same trial that a method needs trained."""
    match method:
        case CombinedMethod(parts=names) | StackMethod(members=names):
            return names
        case EnsembleMethod(of=of):
            return (of,)
    return ()


def check_methods(methods: Mapping[str, Method], workers: WorkersConfig, *, where: str = "methods") -> None:
    """Check that each method builds on existing methods of the right kind, and has a stream for every worker.

    Args:
        methods: by name.
        workers: of their neural stages.
        where: the config's key, for errors.

    Raises:
        ValueError: a method does not; the message names it.
    """
    for name, method in methods.items():
        _check_names(name, method, methods, where)
        for stream in _streams(method):
            if stream.streams < workers.most:
                raise ValueError(
                    f"{where}.{name} has {stream.streams} streams for {workers.most} workers; "
                    f"set stream.streams of its stages to a multiple of {workers.most}"
                )


def _check_names(name: str, method: Method, methods: Mapping[str, Method], where: str) -> None:
    """Check that a method builds on existing methods of the right kind."""
    match method:
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
            if not isinstance(methods.get(of), NeuralMethod):
                raise ValueError(f"{where}.{name}.of: {of!r} is not a neural method")
        case StackMethod(members=members):
            if wrong := [m for m in members if isinstance(methods.get(m), StackMethod | None)]:
                raise ValueError(f"{where}.{name}.members: {wrong[0]!r} is unknown or a stack; name another method")


def _streams(method: Method) -> list[StreamConfig]:
    """The streams of data that a method's stages read."""
    match method:
        case NeuralMethod(pretrain=pretrain, finetune=finetune):
            return [finetune.stream, *([pretrain.stream] if pretrain else [])]
        case CombinedMethod(combine=combine) if combine.how == "concat":
            return [combine.stream]
    return []
