"""The methods that a pipeline can train and compare."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ltrscale.config import by_kind
from ltrscale.experiments.methods.composed import CombinedMethod, EnsembleMethod, SelfTrainedMethod, TunedMethod
from ltrscale.experiments.methods.neural import NeuralMethod
from ltrscale.experiments.methods.stack import StackMethod
from ltrscale.experiments.methods.trees import FeatureMethod, GBDTMethod, SemiMethod
from ltrscale.training.presets import Preset

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


def with_preset(preset: Preset, methods: Mapping[str, Any]) -> dict[str, Any]:
    """The methods of a comparison, as in a config, with this preset where they name none and their kind has presets."""
    kinds = by_kind(Method)

    def of(given: Any) -> Any:
        kind = kinds.get(str(given.get("kind"))) if isinstance(given, Mapping) else None
        return given if kind is None else kind.with_preset(preset, given, methods)

    return {name: of(given) for name, given in methods.items()}
