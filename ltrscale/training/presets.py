"""Published settings of pretraining and finetuning: `paper` follows HOU24's text, `hou24` its authors' public code.

Where HOU24 does not state a setting of a baseline (SCARF's temperature, VIME's weights), the preset takes the value of
that method's own paper. docs/methods.md lists the remaining differences from the authors' code.

Settings in a config override its preset, so a study can start from a preset and change one thing.
"""

from typing import Any, Literal

from ltrscale.config import by_kind
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.contrast import Contrastive
from ltrscale.pretext.objective import Objective

Preset = Literal["paper", "hou24"]

_EVERYTHING = 1_000_000_000
"""A shuffle window of this many row groups covers any data set."""

_CLASSES: dict[str, type[Objective]] = by_kind(FeatureMethodConfig)


def preset(name: Preset, method: str) -> dict[str, Any]:
    """Settings of `PretrainConfig` for a kind of method; omitted settings keep their defaults.

    Both presets have 300 epochs of Adam at 5e-4 on a ResNet of three blocks, and batches of about 200,000 documents, or
    2,000 for the methods that contrast all documents of a batch (HOU24, A.2.3). Views are zeroed at .1, one of the
    paper's choices. The text does not state sizes and schedule: `hou24` takes them from the authors' code.
    """
    cls = _CLASSES.get(method, Objective)  # validation refuses unknown kinds later
    stream = {"docs_per_batch": 2000 if cls.contrasts_batch else 200_000, "streams": 1}
    settings: dict[str, Any] = {
        "method": {"kind": method},
        "augment": {"kind": "zeroing", "probability": 0.1},
        "epochs": 300,
        "optimizer": {"kind": "adam", "learning_rate": 5e-4, "clip_norm": None},
        "network": {"encoder": {"kind": "resnet", "blocks": 3}},
        "stream": stream,
    }
    if method == "subtab":
        # contrasting 200,000 documents with each other, six times a step, is infeasible
        settings["method"]["within_groups"] = True
    if not cls.contrasts_batch and name == "paper":
        stream["streams"] = 8
    if name == "hou24":
        settings["network"] = _NETWORK
        settings["optimizer"] |= {
            "weight_decay": _DECAY.get(method, 1e-3),
            "schedule": {"kind": "step", "every": 20, "factor": 0.9},
        }
        settings["method"] |= _published_settings(method, cls)
    if name == "hou24" and method == "simclr_sample":
        stream["window"] = _EVERYTHING  # documents are regrouped over the whole split
    return settings


_NETWORK = {
    "encoder": {
        "kind": "resnet",
        "blocks": 3,
        "width": 136,
        "activation": "gelu",
        "last_activation": "relu",
        "input_bias": False,
        "dropout": 0.1,
    },
    "transform": {"numeric": "none", "per_query": True},
}
"""The network of HOU24's public code, for pretraining and for the baseline without."""

_DECAY = {"simsiam": 2e-4, "simclr": 2e-3, "simclr_rank": 2e-3, "simclr_sample": 2e-3, "dacl": 2e-3}
"""Weight decay of HOU24's public code, 1e-4 and 1e-3, doubled where its loss is the mean of both views and ours the
sum: Adam cancels a factor of the loss, which changes the relative size of the decay."""


def _published_settings(method: str, cls: type[Objective]) -> dict[str, Any]:
    """Settings of a method in HOU24's public code."""
    simclr = {"temperature": 0.01, "projector": {"layers": 3, "width": 136, "output": 64, "bias": True}}
    match method:
        case "simsiam":
            projector = {"layers": 2, "width": 136, "output": 136, "batch_norm": True}
            return {"projector": projector, "bottleneck": 34, "predictor_bias": True}
        case "scarf":
            return {**simclr, "fixed_count": False}
        case "dacl":
            return {**simclr, "forms": ["linear", "binary"]}
        case "subtab":
            return {"contrast": 0, "distance": 0, "noise": "zero", "rate": 0.15, "decoder": {"layers": 1}}
    return simclr if issubclass(cls, Contrastive) else {}


def finetuning(name: Preset, method: str | None) -> dict[str, Any]:
    """Settings of `FinetuneConfig` after pretraining with a kind of method; None for the baseline without pretraining.

    Both presets have LambdaRank, batches of about 1,000 documents, no early stop, and after pretraining a head of three
    layers, trained alone for 100 epochs, then everything for 100, with Adam at 5e-5 (HOU24, A.2.3). The baseline trains
    for 300 epochs at 1e-3, one of the rates that the paper tries. `hou24` keeps the first layer of SimCLR's projector,
    as the authors' code does though A.2.5 discards the projector, and gives the baseline one linear layer as its head.
    """
    adam = {"kind": "adam", "clip_norm": None}
    settings: dict[str, Any] = {"loss": {"kind": "lambdarank"}, "stream": {"docs_per_batch": 1000}}
    if method is None:
        decay = {"weight_decay": 1e-3} if name == "hou24" else {}
        network = {"network": _NETWORK, "head": {"layers": 1}} if name == "hou24" else {"head": {"layers": 3}}
        return settings | network | _epochs(300) | {"optimizer": {**adam, "learning_rate": 1e-3, **decay}}
    kept = name == "hou24" and issubclass(_CLASSES.get(method, Objective), Contrastive)
    settings_of_head = {"head": {"layers": 3}, "head_epochs": 100, "projector_layers": int(kept)}
    return settings | settings_of_head | _epochs(100) | {"optimizer": {**adam, "learning_rate": 5e-5}}


def _epochs(epochs: int) -> dict[str, int]:
    return {"epochs": epochs, "patience": epochs}  # no early stop; the best epoch is kept
