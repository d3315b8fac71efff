"""Settings shared by pretraining and all trainings with labels: the optimizer, its schedules, device and precision.

A schedule is a pure function of the number of epochs done, including a fraction of the current one. So checkpoints need
not save it: a resumed run continues at the same rate.

Presets are published settings: `paper` follows HOU24's text, `hou24` its authors' public code. Where HOU24 does not
state a setting of a baseline (SCARF's temperature, VIME's weights), the preset takes the value of that method's own
paper. docs/methods.md lists the remaining differences from the authors' code. Settings in a config override its preset,
so a study can start from a preset and change one thing.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from ltrscale.config import Config, Operational, by_kind
from ltrscale.data.dataset.preflight import PreflightConfig
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.devices import Device, choose_device, round_to_tf32
from ltrscale.draws import mix
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.contrast import Contrastive
from ltrscale.pretext.objective import Objective


class Schedule(Config):
    """How the learning rate changes with the epochs."""

    kind: str

    def share(self, done: float, epochs: int) -> float:
        """The rate after `done` of `epochs` epochs, as a share of the full rate."""
        raise NotImplementedError


class ConstantConfig(Schedule):
    """A constant rate."""

    kind: Literal["constant"] = "constant"

    def share(self, done: float, epochs: int) -> float:  # noqa: ARG002
        """Always 1."""
        return 1.0


class StepDecayConfig(Schedule):
    """Multiply the rate by a factor every this many epochs."""

    kind: Literal["step"] = "step"
    every: int = Field(20, ge=1)
    """Epochs between two multiplications."""
    factor: float = Field(0.9, gt=0, le=1)
    """Factor of each multiplication."""

    def share(self, done: float, epochs: int) -> float:  # noqa: ARG002
        """The factor to the power of the steps so far."""
        return self.factor ** (int(done) // self.every)


class InverseSqrtConfig(Schedule):
    """Constant at first, then falling as `(1 + (done - after) / scale)^-.5` with the epochs done (BUYL23)."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    after: float = Field(20, gt=0)
    """Epochs at the full rate."""
    scale: float | None = Field(None, gt=0)
    """After three times as many further epochs the rate is half. Empty takes `after`, which makes the rate fall with
    the epochs done, as BUYL23's text says; 1 with `after: 20` is `(done - 19)^-.5`, as its public code has it."""

    def share(self, done: float, epochs: int) -> float:  # noqa: ARG002
        """1 at first, then the inverse square root."""
        if self.scale is not None:
            return 1 / math.sqrt(1 + max(0.0, done - self.after) / self.scale)
        return min(1.0, math.sqrt(self.after / done)) if done else 1.0


class CosineConfig(Schedule):
    """Rising linearly from 0, then falling along half a cosine until the last epoch (HOU24, industrial)."""

    kind: Literal["cosine"] = "cosine"
    warmup: float = Field(0.05, ge=0, lt=1)
    """Share of the epochs during which the rate rises."""
    final: float = Field(0.0, ge=0, le=1)
    """Rate at the end, as a share of the full rate."""

    def share(self, done: float, epochs: int) -> float:
        """A linear rise, then half a cosine."""
        share = min(1.0, done / epochs)
        if share < self.warmup:
            return share / self.warmup
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * (share - self.warmup) / (1 - self.warmup))) / 2


ScheduleConfig = Annotated[
    ConstantConfig | StepDecayConfig | InverseSqrtConfig | CosineConfig, Field(discriminator="kind")
]


class OptimizerConfig(Config):
    """The optimizer, the schedule of its learning rate, and gradient clipping."""

    kind: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    """`adam`, `adagrad` and `sgd` add weight decay to the gradient, `adamw` decouples it. QIN21 tries Adam with rates
    1e-4, 1e-3 and 1e-2, and Adagrad with .01, .1 and .5; BUYL23's public code has AdamW."""
    learning_rate: float = Field(5e-4, gt=0)
    """The full rate, before the schedule lowers it (HOU24: 5e-4 for pretraining, 5e-5 for finetuning)."""
    weight_decay: float = Field(0.0, ge=0)
    """L2 penalty."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of `sgd`."""
    clip_norm: float | None = Field(None, gt=0)
    """Clip the gradient of a step to this norm (HOU23: 2 for pretraining, 1 for finetuning)."""
    schedule: ScheduleConfig = ConstantConfig()
    """How the rate changes with the epochs."""


Factors = Mapping[nn.Parameter, float]
"""Learning rate factors; 1 for parameters that are not listed."""


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, factors: Factors | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a config, at the full rate; parameters with equal `factor` form a group, which stores it."""
    by_factor: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_factor.setdefault((factors or {}).get(parameter, 1.0), []).append(parameter)
    groups = [{"params": of_factor, "factor": factor} for factor, of_factor in by_factor.items()]
    rate, decay = config.learning_rate, config.weight_decay
    match config.kind:
        case "adam":
            return torch.optim.Adam(groups, lr=rate, weight_decay=decay, fused=True)
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, weight_decay=decay, fused=True)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=rate, weight_decay=decay)
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, weight_decay=decay, momentum=config.momentum, fused=True)


Precision = Literal["float32", "tf32", "bf16"]


class TrainingConfig(Config):
    """Settings of every training."""

    fixed: ClassVar = {"checkpoint_failures": 3}

    stream: StreamConfig
    """Batch size and order of the data."""
    optimizer: OptimizerConfig
    seed: int = 0
    """Seed of initial weights, data order, augmentation, dropout and sampled losses."""
    device: Device = "auto"
    """`auto` takes this worker's GPU if it has one; or `cpu`, `cuda`, `cuda:1`."""
    precision: Precision = "float32"
    """`bf16` computes matrix products in bfloat16 (autocast), `tf32` in TensorFloat-32 on GPUs that have it."""
    compile: bool = False
    """Compile transform, encoder, projector and, on a GPU, the contrast of SimCLR and its kin with torch.compile, for
    batches of any length. It fuses what lies between matrix products, and takes a minute or two at the start of each
    worker: worth it for long runs on a GPU; on a CPU it is slower. The contrast then keeps the similarities of a batch
    for the gradient, in float16 under `tf32` and `bf16`; dropout has other draws."""
    deterministic: bool = False
    """Use only algorithms that give the same bits each time; on a GPU some of them are slower."""
    checkpoint_minutes: Operational[float] = Field(10.0, gt=0)
    """Time between checkpoints, from which the same command resumes; the first comes after a minute. They
    are written while training continues. A killed machine loses up to this much, a request to stop loses no step."""
    minutes: float | None = Field(None, gt=0)
    """Also end after the epoch that ends later than this, with what was best by then; a resumed run counts the time of
    its whole epochs. Empty for no limit."""
    preflight: PreflightConfig = PreflightConfig()
    """How the data files are checked before workers start."""

    def order(self, phase: str) -> StreamConfig:
        """How a phase of the training reads its data; each phase has a different order."""
        return self.stream.replace(seed=mix(phase, self.seed, self.stream.seed))

    def noise_seed(self, phase: str) -> int:
        """The seed of augmentation, dropout and sampled losses in a phase."""
        return mix(phase, self.seed)


def set_up(config: TrainingConfig) -> torch.device:
    """Apply the process-wide settings; returns the device of this worker.

    Raises:
        InputError: the config asks for a GPU and the worker has none.
    """
    torch.use_deterministic_algorithms(config.deterministic)
    round_to_tf32(config.precision == "tf32")
    return choose_device(config.device)


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
