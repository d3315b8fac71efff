"""Published settings of pretraining: `paper` follows HOU24's text, `hou24` its authors' public code.

Where HOU24 does not state a setting of a baseline (SCARF's temperature, VIME's weights), the preset takes the value of
that method's own paper.

Settings in a config override those of its preset, so that a study can start from a preset and change one thing.
"""

from typing import Any, Literal

from ltrscale.config import by_kind
from ltrscale.pretext.choices import MethodConfig
from ltrscale.pretext.contrast import Contrastive
from ltrscale.pretext.objective import Objective

Preset = Literal["paper", "hou24"]

_EVERYTHING = 1_000_000_000
"""A shuffle window of this many row groups covers any data set."""

_CLASSES: dict[str, type[Objective]] = by_kind(MethodConfig)


def preset(name: Preset, method: str) -> dict[str, Any]:
    """Settings of `PretrainConfig` for a kind of method; settings that they leave out keep their defaults.

    Both presets have 300 epochs of Adam at 5e-4 on a ResNet of three blocks, and batches of about 200,000 documents, or
    2,000 for the methods that contrast all documents of a batch (HOU24, A.2.3). The text does not state sizes and
    schedule: `hou24` takes them from the authors' code.
    """
    cls = _CLASSES.get(method, Objective)  # an unknown kind is refused later, when the settings are validated
    stream = {"docs_per_batch": 2000 if cls.contrasts_batch else 200_000, "streams": 1}
    settings: dict[str, Any] = {
        "method": {"kind": method},
        "epochs": 300,
        "optimizer": {"kind": "adam", "learning_rate": 5e-4, "clip_norm": None},
        "network": {"encoder": {"kind": "resnet", "blocks": 3}},
        "stream": stream,
    }
    if method == "subtab":
        # Contrasting 200,000 documents with each other, six times a step, is out of reach.
        settings["method"]["within_groups"] = True
    if method == "scarf" and name == "hou24":
        settings["method"]["fixed_count"] = False
    if not cls.contrasts_batch and name == "paper":
        stream["streams"] = 8
    if name == "hou24":
        settings["network"] = {
            "encoder": {"kind": "resnet", "blocks": 3, "width": 136, "activation": "gelu", "dropout": 0.1},
            "transform": {"numeric": "none", "per_query": True},
        }
        settings["optimizer"] |= {
            "weight_decay": 1e-4 if method == "simsiam" else 1e-3,
            "schedule": {"kind": "step", "every": 20, "factor": 0.9},
        }
    if name == "hou24" and issubclass(cls, Contrastive):  # the methods with SimCLR's projector and temperature
        settings["method"] |= {"temperature": 0.01, "projector": {"layers": 3, "width": 136, "output": 64}}
    if name == "hou24" and method == "simsiam":
        projector = {"layers": 2, "width": 136, "output": 136, "batch_norm": True}
        settings["method"] |= {"projector": projector, "bottleneck": 34}
    if name == "hou24" and method == "simclr_sample":
        stream["window"] = _EVERYTHING  # documents are regrouped over the whole split
    return settings
