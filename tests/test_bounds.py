"""Every number and list of a model's settings that sizes it has a bound, for settings come from strangers too."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

import ltrscale
from ltrscale.config import Strict

PACKAGES = tuple(f"ltrscale.{name}." for name in ("models", "pretext", "bundle", "trees", "ranking"))
RESULTS = {
    "SingleFeature",
    "BundleConfig",
    "Calibration",
    "Explanation",
    "FeatureReference",
    "Provenance",
    "RecordedSplits",
    "Reference",
}
"""What jobs write about data and runs: as long as the file or the config that holds it, and no setting of a model."""
SIZES_NOTHING = {
    "seed": "any seed takes as long",
    "feature": "the number of one of the data's features",
    "k": "ranks below the last document of a list do not count",
    "truncation": "the same",
    "stop_on": "the same",
    "early_stopping_rounds": "ends a training earlier",
    "min_data_in_leaf": "makes trees smaller",
    "min_data_per_group": "makes trees smaller",
    "max_cat_to_onehot": "a category has at most 2^24 codes",
    "host_rows": "says where a table is, not how large",
    "label_gain": "a value for each label of the data",
    "gains": "the same",
    "monotone": "names features of the data",
    "cegb_penalty_feature_coupled": "the same",
    "cegb_penalty_feature_lazy": "the same",
    "columns": "the same",
    "features": "the same",
    "sees": "the same",
    "query": "names fields of the data",
    "document": "the same",
    "folds": "names bundles of folds, which are bounded",
}
"""Why a key has no bound."""


def configs() -> list[type[Strict]]:
    """The configs and records of the rooms that make models."""
    for module in pkgutil.walk_packages(ltrscale.__path__, "ltrscale."):
        if module.name.startswith(PACKAGES):
            importlib.import_module(module.name)
    found, left = {}, [Strict]
    while left:
        left += (cls := left.pop()).__subclasses__()
        if cls.__module__.startswith(PACKAGES) and cls.__name__ not in RESULTS:
            found[cls.__qualname__] = cls
    return [found[name] for name in sorted(found)]


def unbounded(schema: Mapping[str, Any]) -> Iterator[str]:
    """What a key may hold without a bound."""
    for choice in schema.get("anyOf", []):
        yield from unbounded(choice)
    match schema.get("type"):
        case "integer" if not schema.keys() & {"maximum", "exclusiveMaximum", "enum", "const"}:
            yield "a number"
        case "array":
            yield from () if "maxItems" in schema else ("a list",)
            yield from unbounded(schema.get("items", {}))
        case "object" if "additionalProperties" in schema and "maxProperties" not in schema:
            yield "a mapping"


@pytest.mark.slow
@pytest.mark.parametrize("config", configs())
def test_what_sizes_a_model_has_a_bound(config: type[BaseModel]) -> None:
    properties = config.model_json_schema().get("properties", {})
    without = {key: found for key, schema in properties.items() if (found := [*unbounded(schema)])}
    assert not {key: found for key, found in without.items() if key not in SIZES_NOTHING}
