"""The methods that a pipeline can train and compare."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import Field

from ltrscale.config import by_kind
from ltrscale.experiments.methods.base import AnyMethod
from ltrscale.experiments.methods.combined import CombinedMethod
from ltrscale.experiments.methods.ensemble import EnsembleMethod
from ltrscale.experiments.methods.feature import FeatureMethod
from ltrscale.experiments.methods.gbdt import GBDTMethod
from ltrscale.experiments.methods.neural import NeuralMethod
from ltrscale.experiments.methods.self_trained import SelfTrainedMethod
from ltrscale.experiments.methods.semi import SemiMethod
from ltrscale.experiments.methods.stack import StackMethod
from ltrscale.experiments.methods.tuned import TunedMethod
from ltrscale.runtime.workers import WorkersConfig
from ltrscale.training.presets import Preset

MethodName = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]
"""Also a directory's name."""
Member = Annotated[
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


def check_methods(
    methods: Mapping[str, AnyMethod],
    workers: WorkersConfig,
    *,
    where: str = "methods",
    learn_from: Collection[str] = (),
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
    # those that others are built on first: a method reports its own mistake
    for name in with_foundations(tuple(methods), methods):
        method = methods[name]
        method.check(f"{where}.{name}", name, methods)
        if method.labels_from not in (None, *learn_from):
            names = ", ".join(learn_from) or "empty; only a pipeline has it"
            raise ValueError(
                f"{where}.{name}.learns_from {method.labels_from!r} is not in learn_from, which is {names}"
            )
        for stream in method.streams():
            if stream.streams < workers.most:
                raise ValueError(
                    f"{where}.{name} has {stream.streams} streams for {workers.most} workers; "
                    f"set stream.streams of its stages to a multiple of {workers.most}"
                )


def with_foundations(names: tuple[str, ...], methods: Mapping[str, AnyMethod]) -> tuple[str, ...]:
    """The methods, each after those that it is built on."""
    ordered: dict[str, None] = {}

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in methods and name not in above:  # a circle, which a method's check refuses
            for other in methods[name].built_on():
                add(other, (*above, name))
            ordered[name] = None

    for name in names:
        add(name, ())
    return tuple(ordered)


def with_preset(preset: Preset, methods: Mapping[str, Any]) -> dict[str, Any]:
    """The methods of a comparison, as in a config, with this preset where they name none and their kind has presets."""
    kinds = by_kind(Method)

    def of(given: Any) -> Any:
        kind = kinds.get(str(given.get("kind"))) if isinstance(given, Mapping) else None
        return given if kind is None else kind.with_preset(preset, given, methods)

    return {name: of(given) for name, given in methods.items()}
