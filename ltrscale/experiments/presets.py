"""Published settings of whole methods, so that all methods of a comparison have the same inputs.

`paper` follows HOU24's text, `hou24` its authors' public code: transform, pretraining, head and finetuning of a neural
method, the baseline without pretraining, and trees. What a method states itself stands over its preset.
"""

from collections.abc import Mapping
from typing import Any

from ltrscale.config import overlay
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.training.presets import Preset, finetuning


def over_preset(name: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method over those of a preset.

    Args:
        name: the preset.
        given: of a `gbdt`, `semi_gbdt` or `neural` method, as in a config.

    Raises:
        ValueError: the method starts from another one's encoder, and does not say how much of its projector it keeps.
    """
    match given.get("kind"):
        case "gbdt":
            return overlay({"gbdt": _trees(name, given.get("gbdt"))}, given)
        case "semi_gbdt":
            return overlay({"semi": _semi(name, given.get("semi"))}, given)
    return overlay(_neural(name, given), given)


def for_all(name: Preset, methods: Mapping[str, Any]) -> dict[str, Any]:
    """The methods of a comparison with this preset where they name none; kinds without presets do not change."""
    return {method: _named(name, given, methods) for method, given in methods.items()}


def _named(name: Preset, given: Any, methods: Mapping[str, Any]) -> Any:
    if not isinstance(given, Mapping) or given.get("kind") not in ("gbdt", "semi_gbdt", "neural"):
        return given
    named = {"preset": name, **given}
    start = methods.get(str(given.get("pretrained_as")))
    if named["preset"] == name and isinstance(start, Mapping):
        kept = finetuning(name, _pretext(start.get("pretrain")))["projector_layers"]
        return overlay({"finetune": {"projector_layers": kept}}, named)
    return named


def _neural(name: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    finetune = given.get("finetune", {})
    if given.get("pretrained_as") is not None:
        if name == "hou24" and isinstance(finetune, Mapping) and "projector_layers" not in finetune:
            raise ValueError(
                "preset hou24 keeps the first projector layer of some methods; set finetune.projector_layers beside "
                "pretrained_as: 1 for those of the SimCLR family, 0 for others"
            )
        return {"finetune": finetuning(name, SimCLRRankConfig().kind)}
    if given.get("pretrain") is None:
        return {"finetune": finetuning(name, None)}
    return {"pretrain": {"preset": name}, "finetune": finetuning(name, _pretext(given["pretrain"]))}


def _pretext(pretrain: Any) -> str:
    """The kind of pretext method of pretraining settings; without one, the default's."""
    method = pretrain.get("method", {}) if isinstance(pretrain, Mapping) else {}
    return str(method.get("kind", SimCLRRankConfig().kind) if isinstance(method, Mapping) else SimCLRRankConfig().kind)


def _trees(name: Preset, given: Any) -> dict[str, Any]:
    """A cell of HOU24's grid, in LightGBM's defaults otherwise; other libraries get the inputs alone."""
    inputs = {"per_query": True} if name == "hou24" else {}
    kind = given.get("kind", "lightgbm") if isinstance(given, Mapping) else "lightgbm"
    if kind != "lightgbm":
        return {"kind": kind, **inputs}
    stop = {"early_stopping_rounds": 20 if name == "hou24" else None}  # LightGBM's default is none
    grid = {"num_leaves": 31, "min_data_in_leaf": 20, "feature_fraction": 1, "num_trees": 100, "learning_rate": 0.1}
    return {"kind": kind, **grid, **stop, **inputs}


def _semi(name: Preset, given: Any) -> dict[str, Any]:
    """The trees, and what principal components and pseudo-labels are made of where a method asks for them."""
    given = given if isinstance(given, Mapping) else {}
    settings: dict[str, Any] = {"gbdt": _trees(name, given.get("gbdt"))}
    if given.get("first") is not None:
        settings["first"] = _trees(name, given["first"])
    if name == "hou24":
        settings["pca_scaled"] = False
        if given.get("pseudo_labels") is not None:
            settings["pseudo_labels"] = {"grades": 5, "bins": "even"}
    return settings
