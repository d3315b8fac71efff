"""What workers are and what they get: their config, their context, their rank, and requests to stop."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import BeforeValidator, Field, model_validator

from ltrscale.config import Config
from ltrscale.data.stream.readers import Reader, read_direct
from ltrscale.progress import Report, log


class WorkersConfig(Config):
    """Data-parallel workers, what each of them takes, and where data is read for them.

    Networks do not depend on any of this, and a run may be resumed with other workers; trees nearly do not, and start
    again.
    """

    number: int | tuple[int, int] = Field(1)
    """How many; more than one run under Ray Train. [min, max] takes as many as the cluster has room for, and changes
    their number when nodes come and go."""
    gpus: float = Field(0, ge=0)
    """GPUs of each; a fraction shares one among several workers."""
    cpus: float = Field(1, gt=0)
    """Logical CPUs of each; the cluster needs some more for reading."""
    read_on: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that a task which reads data takes, such as {reader: 1}, to keep reading on CPU nodes."""
    max_failures: int = Field(3, ge=0)
    """Failures in a row without a new checkpoint that are passed over; a node that was preempted is none."""
    hang_minutes: float = Field(10, gt=0)
    """Minutes in which no worker makes a step or reads anything, after which the one that the others wait for is ended:
    a failure. Let it be more than the longest time of one tree, a validation or a wait for storage. The first step has
    ten minutes at least."""

    @model_validator(mode="after")
    def _is_positive(self) -> "WorkersConfig":
        if self.least < 1 or self.most < self.least:
            raise ValueError("number must be at least 1, and [min, max] must not fall")
        return self

    @property
    def least(self) -> int:
        """Workers without which the run does not go on."""
        return self.number if isinstance(self.number, int) else self.number[0]

    @property
    def most(self) -> int:
        """Workers at most."""
        return self.number if isinstance(self.number, int) else self.number[1]

    @property
    def hang_s(self) -> float:
        """`hang_minutes` in seconds."""
        return 60 * self.hang_minutes


ONE = WorkersConfig()


def _or_number(value: Any) -> Any:
    return {"number": value} if isinstance(value, int | list | tuple) else value


Workers = Annotated[WorkersConfig, BeforeValidator(_or_number)]
"""Workers in a job's config, where a plain number is their number."""


@dataclass(frozen=True)
class Context:
    """What a training function gets from its launcher."""

    reader: Reader = read_direct
    report: Report = lambda _: None
    stopping: Callable[[], bool] = lambda: False
    """Whether this worker was asked to stop: then it leaves a checkpoint and raises `Stopped`."""
    progressed: Callable[[], None] = lambda: None
    """Tells the launcher that a checkpoint was committed."""


Work = Callable[[Context], None]
"""What every worker does: a frozen value of a class of some module, which is pickled, and called at every start."""


def rank_and_world() -> tuple[int, int]:
    """This worker's rank and the number of workers; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """While the block runs SIGTERM does not end the process; yields a function that says whether it has come.

    Outside the main thread, where Python takes no signals, the answer is always no.
    """
    asked = _Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, asked.by_signal)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


class _Asked:
    """Whether a signal has come; says so in the log when that is noticed, for a signal handler must not write."""

    def __init__(self) -> None:
        self._come = self._told = False

    def by_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._come = True

    def __call__(self) -> bool:
        if self._come and not self._told:
            self._told = True
            log.info("asked to stop: a checkpoint follows")
        return self._come
