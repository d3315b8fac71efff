"""Workers: their config, what they are given, and their rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from ltrscale.config import Config
from ltrscale.data.stream.readers import RowGroupReader, read_on_spare_cores
from ltrscale.progress import Report


class WorkersConfig(Config):
    """Number and resources of data-parallel workers, and where their data is read.

    A trained network does not depend on these settings, and a run may resume with others. Trees depend on them
    slightly, and start again if they change.
    """

    number: int | tuple[int, int] = Field(1)
    """Number of workers; several run under Ray Train. [min, max] takes as many as the cluster has room for; those
    that get room only later join between two steps, while the others keep running."""
    gpus: float = Field(0, ge=0)
    """GPUs of each worker; a fraction shares one GPU among several workers."""
    cpus: float = Field(1, gt=0)
    """Logical CPUs of each worker; the cluster needs some more for reading."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes for workers, such as {ray.io/market-type: spot}, as Ray's label selectors: a value, !value,
    in(a, b) or !in(a, b)."""
    accelerator: str | None = Field(None)
    """Type of the GPUs, such as H100, by Ray's name; empty takes any."""
    read_on: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources of each task that reads data, such as {reader: 1}, to keep reading on CPU nodes."""
    max_failures: int = Field(3, ge=0)
    """Failures in a row without a new checkpoint after which workers still restart; a preempted node does not count."""
    hang_minutes: float = Field(10, gt=0)
    """Minutes without a step or a read of any worker after which the worker that blocks the others is killed, which
    counts as a failure. Set it above the longest time of one tree, a validation or a wait for storage. The first step
    has at least ten minutes."""

    @model_validator(mode="after")
    def _is_positive(self) -> Self:
        if self.least < 1 or self.most < self.least:
            raise ValueError("number must be at least 1, and [min, max] must not fall")
        return self

    @property
    def least(self) -> int:
        """Minimum number of workers; with fewer the run waits."""
        return self.number if isinstance(self.number, int) else self.number[0]

    @property
    def most(self) -> int:
        """Maximum number of workers."""
        return self.number if isinstance(self.number, int) else self.number[1]

    @property
    def hang_s(self) -> float:
        """`hang_minutes` in seconds."""
        return 60 * self.hang_minutes


ONE = WorkersConfig()


def or_number(value: Any) -> Any:
    """Workers' settings from a config, which may give only their number."""
    return {"number": value} if isinstance(value, int | list | tuple) else value


Workers = Annotated[WorkersConfig, BeforeValidator(or_number)]
"""Workers in a job's config; a plain number means `number`."""


@dataclass(frozen=True)
class WorkerContext:
    """What the launcher provides to a training function."""

    reader: RowGroupReader = read_on_spare_cores
    report: Report = lambda _: None
    stopping: Callable[[], bool] = lambda: False
    """True if this worker was asked to stop: it then writes a checkpoint and raises `Stopped`."""
    late: Callable[[], bool] = lambda: False
    """True if `stopping` means the end of `ending_by`: what is best by then is the result, if there is any."""
    progressed: Callable[[], None] = lambda: None
    """Notifies the launcher that a checkpoint was committed."""
    resizing: Callable[[], bool] = lambda: False
    """True if `stopping` means a resize of the world, not an end; only rank 0's answer counts, once all stop."""
    carried: object = None
    """The state of rank 0's `Resized` at the last resize; None before the first resize and on other workers."""


class Resized(Exception):  # noqa: N818 - no error
    """Leaves the work of every worker between two steps; it is called again in the same process, in a resized world.

    The launcher passes rank 0's `state`, with which the work continues, back as `WorkerContext.carried`.
    """

    def __init__(self, state: object = None) -> None:
        super().__init__("the workers go on in a resized world")
        self.state = state


Work = Callable[[WorkerContext], None]
"""The work of every worker: an immutable value, pickled to the worker and called at every start."""


def rank_and_world() -> tuple[int, int]:
    """This worker's rank and the number of workers; (0, 1) without a process group."""
    import torch.distributed as dist  # imported late: readers and the mailbox need no torch

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
