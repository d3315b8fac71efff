"""Settings that pretraining and all trainings with labels share."""

from typing import Literal, Self

import torch
from pydantic import Field

from ltrscale.config import Config
from ltrscale.data.dataset.preflight import PreflightConfig
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.devices import Device, choose_device
from ltrscale.draws import mix
from ltrscale.training.schedules import OptimizerConfig

Precision = Literal["float32", "tf32", "bf16"]


class TrainingConfig(Config):
    """Settings of every training."""

    stream: StreamConfig
    """Batch size and order of the data."""
    optimizer: OptimizerConfig
    seed: int = 0
    """Seed of initial weights, data order, augmentation, dropout and sampled losses."""
    device: Device = "auto"
    """`auto` takes this worker's GPU if it has one; or `cpu`, `cuda`, `cuda:1`."""
    precision: Precision = "float32"
    """`bf16` computes matrix products in bfloat16 (autocast), `tf32` in TensorFloat-32 on GPUs that have it."""
    deterministic: bool = False
    """Use only algorithms that give the same bits each time; on a GPU some of them are slower."""
    checkpoint_minutes: float = Field(10.0, gt=0)
    """Time between checkpoints, from which the same command resumes."""
    checkpoint_failures: int = Field(3, ge=1)
    """End the run after this many failed writes of checkpoints in a row, as on a full disk."""
    preflight: PreflightConfig = PreflightConfig()
    """How the data files are checked before workers start."""

    def identity(self) -> Self:
        """The settings that determine the result, all others at their defaults; a resumed run may change the others."""
        fields = type(self).model_fields
        defaults = {name: fields[name].default for name in ("checkpoint_minutes", "checkpoint_failures")}
        prefetch = StreamConfig.model_fields["prefetch"].default
        return self.replace(**defaults, stream=self.stream.replace(prefetch=prefetch).model_dump())

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
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    return choose_device(config.device)
