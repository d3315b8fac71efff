"""What a run keeps below its output directory so that it can be resumed, and removes once its output is committed."""

from collections.abc import Mapping
from typing import Any

from ltrscale.config import is_current
from ltrscale.launch.workers import Context
from ltrscale.storage import join, remove
from ltrscale.training.checkpoint import Checkpoints, list_checkpoints
from ltrscale.training.settings import TrainingConfig

CHECKPOINTS, PREFLIGHT, TRANSFORM, EPOCHS = "checkpoints", "preflight", "transform", "epochs"


def checkpoints_of(
    config: TrainingConfig, out: str, *, origin: Mapping[str, Any], data: str, context: Context
) -> Checkpoints:
    """The checkpoints of a run into `out`; for the others see `Checkpoints`."""
    return Checkpoints(
        join(out, CHECKPOINTS),
        origin=origin,
        data=data,
        every_s=60 * config.checkpoint_minutes,
        failures=config.checkpoint_failures,
        progressed=context.progressed,
    )


def is_unfinished(out: str, origin: Mapping[str, Any]) -> bool:
    """Whether a run of this origin was cut short and would go on from a checkpoint."""
    return any(is_current(checkpoint, origin) for checkpoint in list_checkpoints(join(out, CHECKPOINTS)))


def finish(out: str) -> None:
    """Remove what is of no use once the output is committed; the result of the pre-flight tells what it was made of."""
    for name in (CHECKPOINTS, TRANSFORM):
        remove(join(out, name))


def start_anew(out: str) -> None:
    """Remove all that a run left, so that the next one begins at the beginning."""
    for name in (CHECKPOINTS, PREFLIGHT, TRANSFORM, EPOCHS):
        remove(join(out, name))
