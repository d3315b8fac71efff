"""What a run keeps below its output directory so that it can be resumed, and removes once its output is committed."""

from collections.abc import Mapping
from typing import Any

from ltrscale.config import is_made_by
from ltrscale.launch.workers import Context
from ltrscale.storage import children, join, read_manifest, withdraw
from ltrscale.training import checkpoint as checkpoints
from ltrscale.training.checkpoint import Checkpoints
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
    manifests = map(read_manifest, children(join(out, CHECKPOINTS)))
    return any(manifest is not None and is_made_by(manifest, origin) for manifest in manifests)


def finish(out: str) -> None:
    """Remove what is of no use once the output is committed; the result of the pre-flight tells what it was made of."""
    _withdraw(out, TRANSFORM)


def start_anew(out: str) -> None:
    """Remove all that a run left, so that the next one begins at the beginning."""
    _withdraw(out, PREFLIGHT, TRANSFORM, EPOCHS)


def _withdraw(out: str, *names: str) -> None:
    """Withdraw all checkpoints, committed directories with these names, and those that lie directly in them."""
    for checkpoint in children(join(out, CHECKPOINTS)):
        checkpoints.withdraw(checkpoint)
    for url in (join(out, name) for name in names):
        for directory in (*children(url), url):
            withdraw(directory)
