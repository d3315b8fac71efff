"""Do the work of a training in this process, as the processes of torchrun, or as the workers of Ray Train.

The work is the same in all three: it finds its rank through `torch.distributed`, and its data reader and the
request to stop in the context that it is given. It can be started again at any moment, for it goes on from its newest
checkpoint; that is all that recovery is. What the workers report and log travels to the launching process, so the
metrics and the log of a run are in one place.
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.data.stream.parts import Run, run_here, run_with_ray
from ltrscale.data.stream.readers import Reader, read_direct
from ltrscale.engine import ray_cluster
from ltrscale.launch.signals import stop_on_sigterm
from ltrscale.progress import Report


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


def cluster_for(workers: WorkersConfig) -> AbstractContextManager[None]:
    """Ray while the block runs, where these workers need it; a cluster of our own has CPUs left for read tasks.

    Without such CPUs training would wait for data for ever.
    """
    cpus = math.ceil(workers.most * workers.cpus) + workers.most
    return ray_cluster(cpus) if _needs_ray(workers) else nullcontext()


def run_for(workers: WorkersConfig) -> Run:
    """What runs a function over the parts of a data set before training, on the cluster if these workers take one."""
    return functools.partial(run_with_ray, read_on=workers.read_on) if _needs_ray(workers) else run_here


def _needs_ray(workers: WorkersConfig) -> bool:
    from ltrscale.launch import under_torchrun  # which needs the types below

    return not under_torchrun.is_running() and (workers.most > 1 or workers.gpus > 0)


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


@dataclass(frozen=True)
class _Holding:
    """Work in a process that acts for who holds these leases, and so may commit below them."""

    work: Work
    leases: tuple[storage.Lease, ...]

    def __call__(self, context: Context) -> None:
        storage.join_leases(self.leases)
        self.work(context)


def launch(work: Work, *, workers: WorkersConfig, report: Report) -> None:
    """Do this work on the workers; with one worker in this very process.

    Args:
        work: the same for every worker; what it makes it writes to storage.
        workers: how many; more than one start Ray, or use the cluster this process is connected to. Processes that
            torchrun started are the workers themselves.
        report: receives the records of rank 0.

    Raises:
        InputError: a worker raised one.
        Stopped: this process was asked to stop.
    """
    from ltrscale.launch import under_torchrun  # which needs the types above

    work = _Holding(work, storage.held())
    if under_torchrun.is_running():
        under_torchrun.lead(work, report, workers.hang_s)
    elif _needs_ray(workers):
        from ltrscale.launch import under_ray  # and Ray, which takes seconds

        with cluster_for(workers):
            under_ray.train(work, workers, report)
    else:
        with stop_on_sigterm() as stopping:
            work(Context(report=report, stopping=stopping))
