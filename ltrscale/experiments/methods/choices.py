"""The methods that a pipeline can train and compare."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ltrscale.config import by_kind
from ltrscale.experiments.methods.composed import (
    BlendMethod,
    CombinedMethod,
    EnsembleMethod,
    SelfTrainedMethod,
    StackMethod,
    TunedMethod,
)
from ltrscale.experiments.methods.neural import InContextMethod, NeuralMethod
from ltrscale.experiments.methods.trees import FeatureMethod, GBDTMethod, SemiMethod
from ltrscale.training.presets import Preset

Method = Annotated[
    GBDTMethod
    | SemiMethod
    | NeuralMethod
    | InContextMethod
    | TunedMethod
    | CombinedMethod
    | EnsembleMethod
    | BlendMethod
    | SelfTrainedMethod
    | StackMethod
    | FeatureMethod,
    Field(discriminator="kind"),
]


def with_preset(preset: Preset, methods: Mapping[str, Any]) -> dict[str, Any]:
    """The methods, as in a config, with this preset for those that name none and have presets."""
    kinds = by_kind(Method)

    def filled(settings: Any) -> Any:
        kind = kinds.get(str(settings.get("kind"))) if isinstance(settings, Mapping) else None
        return settings if kind is None else kind.with_preset(preset, settings, methods)

    return {name: filled(given) for name, given in methods.items()}
