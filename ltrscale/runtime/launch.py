"""Run the work of a training in this process, in the processes of torchrun, or in the workers of Ray Train.

The work is the same in all three: it gets its rank from `torch.distributed`, and its data reader and stop requests from
its context. It resumes from its newest checkpoint, so recovery simply starts it again. The workers send reports and log
lines to the launching process, so a run has its metrics and log in one place.
"""

import functools
import math
from contextlib import AbstractContextManager, nullcontext

from ltrscale.data.stream.plan import Run, run_here
from ltrscale.progress import Report
from ltrscale.runtime import under_torchrun
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.on_ray import run_with_ray
from ltrscale.runtime.workers import Work, WorkerContext, WorkersConfig
from ltrscale.signals import stop_on_signal


def cluster_for(workers: WorkersConfig) -> AbstractContextManager[None]:
    """Connect to Ray while the block runs, if these workers need it."""
    cpus = math.ceil(workers.most * workers.cpus) + workers.most  # the rest reads: without it data never comes
    return ray_cluster(cpus) if _needs_ray(workers) else nullcontext()


def run_for(workers: WorkersConfig) -> Run:
    """The runner for data set passes before training: on the cluster if these workers use one."""
    return functools.partial(run_with_ray, read_on=workers.read_on) if _needs_ray(workers) else run_here


def _needs_ray(workers: WorkersConfig) -> bool:
    return not under_torchrun.is_running() and (workers.most > 1 or workers.gpus > 0)


def launch(work: Work, *, workers: WorkersConfig, report: Report, elastic: bool = True) -> None:
    """Run the work, which writes its results to storage, on the workers; a single one runs in this process.

    Several start Ray or use the connected cluster; under torchrun its processes are the workers. Later ones join only
    work that is `elastic`, which continues in a world of another size after `Resized`. `report` receives the records of
    rank 0.

    Raises:
        InputError: a worker raised one.
        Stopped: this process was asked to stop.
    """
    if under_torchrun.is_running():
        under_torchrun.lead(work, report, workers.hang_s)
    elif _needs_ray(workers):
        from ltrscale.runtime import under_ray  # not at the top: importing Ray takes seconds

        with cluster_for(workers):
            under_ray.train(work, workers, report, elastic=elastic)
    else:
        with stop_on_signal() as stopping:
            work(WorkerContext(report=report, stopping=stopping, late=stopping.is_late))
