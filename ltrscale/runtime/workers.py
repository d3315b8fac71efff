"""Workers: their config, what they are given, their rank, and how one that hangs is found.

A worker counts its steps and the tables that it reads, and one of its threads sends these counts. Another process
judges, by its own clock. All workers wait for the worker that hangs, so none of them makes a step: the culprit is the
worker with a silent thread, or else the worker with the fewest steps.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, Self

import pyarrow as pa
from pydantic import BeforeValidator, Field, model_validator

from ltrscale.config import Config
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.stream.readers import RowGroupReader, read_on_spare_cores
from ltrscale.processor import alongside
from ltrscale.progress import Report

_EVERY_S = 1.0
_SILENT_S = 15.0
_TO_BEGIN_S = 600.0  # loading data and starting readers may take longer than any later step


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


class WorkerProgress(NamedTuple):
    """Progress of a worker."""

    steps: int = 0
    tables: int = 0


class Pulse:
    """Counts the steps of a worker's function, and the tables that it reads."""

    def __init__(self) -> None:
        self._steps = self._tables = 0

    def counting(self, context: WorkerContext) -> WorkerContext:
        """The context with its `stopping` calls and reads counted."""

        def stopping() -> bool:  # called once per step, so the training function needs no further hook
            self._steps += 1
            return context.stopping()

        return replace(context, stopping=stopping, reader=self._counting(context.reader))

    def _counting(self, reader: RowGroupReader) -> RowGroupReader:
        def read(row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
            for table in reader(row_groups, columns):
                self._tables += 1
                yield table

        return read

    def sent(self, send: Callable[[WorkerProgress], object]) -> AbstractContextManager[None]:
        """Send the counts from a thread every second while the block runs."""

        def beat(over: threading.Event) -> None:
            while not over.wait(_EVERY_S):
                send(WorkerProgress(self._steps, self._tables))

        return alongside(beat)


@dataclass
class _Worker:
    """What was last heard of a worker; times are by this process's monotonic clock."""

    who: object
    counts: WorkerProgress
    heard: float
    """When it last sent its counts."""
    moved: float
    """When these last changed."""


class HangWatch:
    """Finds workers without a step or a table for `limit_s` seconds, at least ten minutes for the first step."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._workers: dict[int, _Worker] = {}

    def joined(self, rank: int, who: object = None) -> None:
        """Record that a worker has started or restarted; `who` distinguishes successive workers of a rank."""
        now = time.monotonic()
        self._workers[rank] = _Worker(who, WorkerProgress(), heard=now, moved=now)

    def left(self, rank: int, who: object = None) -> None:
        """Record that a worker has finished or was killed; the others get the full limit to notice it.

        Ignored once another worker has its rank: the message may arrive late.
        """
        if rank in self._workers and self._workers[rank].who != who:
            return
        self._workers.pop(rank, None)
        for worker in self._workers.values():
            worker.heard = worker.moved = time.monotonic()

    def clear(self) -> None:
        """Record that all workers have ended."""
        self._workers.clear()

    def heard(self, rank: int, counts: WorkerProgress) -> None:
        """Record the counts that a worker sent; ignored once it has left."""
        if (worker := self._workers.get(rank)) is not None:
            worker.heard = time.monotonic()
            if counts != worker.counts:
                worker.counts, worker.moved = counts, worker.heard

    def hung(self) -> dict[int, str]:
        """The workers that block all others, by rank, with the symptom; empty while any worker makes progress."""
        if not self._workers:
            return {}
        now = time.monotonic()
        steps = [worker.counts.steps for worker in self._workers.values()]
        # a worker reaches its second step only after a sum with all others: all have completed the first
        limit_s = self._limit_s if max(steps) > 1 else max(self._limit_s, _TO_BEGIN_S)
        if now - max(worker.moved for worker in self._workers.values()) < limit_s:
            return {}
        silent = {
            rank: f"has been silent for {now - worker.heard:.0f} s: its process is stopped, or its machine cut off"
            for rank, worker in self._workers.items()
            if now - worker.heard > min(_SILENT_S, self._limit_s / 2)
        }
        return silent or {
            rank: f"has made no progress for {now - worker.moved:.0f} s"
            for rank, worker in self._workers.items()
            if worker.counts.steps == min(steps)
        }
