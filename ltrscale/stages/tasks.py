"""Run tasks that depend on each other: here one after the other, or in processes of a Ray cluster.

A failed task ends neither the other tasks nor the run; only tasks that need it are given up. An outage ends the run.
"""

import logging
import math
import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.processor import alongside
from ltrscale.progress import log
from ltrscale.runtime.engine import plain_errors, ray_cluster
from ltrscale.runtime.mailbox import open_mailbox
from ltrscale.runtime.workers import or_number
from ltrscale.signals import ending_on_signal, stop_on_signal

_RESTARTS = 2
"""How often Ray restarts a task after its process has died."""
_LOOK_S, _PATIENCE_S = 1.0, 10.0
_STOP_S = 60.0
"""Time for tasks to end after a request to stop: a step, and the checkpoint after it."""


class TaskWorkersConfig(Config):
    """The processes that run the tasks. Results depend on none of these settings but the threads of trees."""

    number: int | None = Field(None, ge=0)
    """Tasks that run at once, each in a process of a Ray cluster; empty for as many as the cluster has CPUs for. 0 runs
    them one after the other in this process, without Ray."""
    cpus: float = Field(1, gt=0)
    """Logical CPUs of a task, which has as many threads."""
    gpus: float = Field(0, ge=0)
    """GPUs of a task; a fraction shares one GPU among several tasks."""

    @property
    def threads(self) -> int:
        """Threads of a task."""
        return max(1, int(self.cpus))


TaskWorkers = Annotated[TaskWorkersConfig, BeforeValidator(or_number)]
"""Workers of tasks in a config, where a plain number is their number."""


@dataclass(frozen=True)
class Task:
    """A call that commits its results to storage, after the tasks named in `needs`."""

    name: str
    call: Callable[[], object]
    """Pickled to the process that runs it."""
    needs: tuple[str, ...] = ()
    kind: str = ""
    """Tasks of the same kind have costs in proportion to their sizes."""
    size: float = 1.0
    """What the task reads, in a unit of its kind."""
    folder: str = ""
    """Where its run time is recorded; "" if nowhere."""


Ended = Callable[[Task, str | None, float], None]
"""Receives a task that has ended, its failure or None, and its duration in seconds."""


def run_all(tasks: Sequence[Task], workers: TaskWorkersConfig, ended: Ended) -> None:
    """Run all tasks, each after those that it needs, and call `ended` in this thread for each that ends.

    Raises:
        Stopped: this process was asked to stop, and running tasks have ended as they do alone, or by force after a
            minute.
        UnavailableError: a task met an outage, so that the others have ended too.
    """
    queue = _Queue(tasks, ended)
    if workers.number == 0:
        while (task := queue.next()) is not None:
            queue.end(task, _attempt(task.call))
        return
    # a handler must not raise: Ray would delay its exception until a task has ended
    with ray_cluster(math.ceil((workers.number or 1) * workers.cpus)), stop_on_signal() as stopping:
        _run_with_ray(queue, workers, stopping)


class Costs:
    """The cost of finished tasks, which predicts that of the others."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._left = Counter((task.kind, task.size) for task in tasks)
        self._costs: dict[tuple[str, float], list[float]] = {}
        self._spent = 0.0

    def done(self, task: Task, seconds: float, cost: float) -> float:
        """Record a finished task; returns the share of this run's work that is done.

        A task that was up to date took almost no seconds in this run; its cost, the total seconds of all runs, predicts
        similar tasks.
        """
        self._left[task.kind, task.size] -= 1
        self._costs.setdefault((task.kind, task.size), []).append(cost)
        self._spent += seconds
        remaining = sum(number * self._expected_cost(*like) for like, number in self._left.items() if number)
        return self._spent / (self._spent + remaining) if remaining else 1.0

    def _expected_cost(self, kind: str, size: float) -> float:
        """The mean cost of tasks of the same kind and size, or of the kind in proportion to size, or of all."""
        if same := self._costs.get((kind, size)):
            return statistics.fmean(same)
        costs_alike = [(other, cost) for (k, other), costs in self._costs.items() if k == kind for cost in costs]
        if costs_alike:
            return size * sum(cost for _, cost in costs_alike) / sum(other for other, _ in costs_alike)
        return statistics.fmean(cost for costs in self._costs.values() for cost in costs)


class _Queue:
    """The tasks that have not begun, and the outcome of those that have ended."""

    def __init__(self, tasks: Iterable[Task], ended: Ended) -> None:
        self._waiting = {task.name: task for task in tasks}
        self._ended, self._failures, self._begun = ended, dict[str, str | None](), dict[str, float]()

    def next(self) -> Task | None:
        """The first task that can begin now, or None; gives up tasks that need a failed one."""
        for task in list(self._waiting.values()):
            failed_needs = [name for name in task.needs if self._failures.get(name) is not None]
            if failed_needs:
                del self._waiting[task.name]
                self.end(task, f"needs {failed_needs[0]}, which failed")
            elif all(name in self._failures for name in task.needs):
                self._begun[task.name] = time.monotonic()
                return self._waiting.pop(task.name)
        return None

    def end(self, task: Task, failure: str | None) -> None:
        self._failures[task.name] = failure
        now = time.monotonic()
        self._ended(task, failure, now - self._begun.get(task.name, now))


def _run_with_ray(queue: _Queue, workers: TaskWorkersConfig, stopping: Callable[[], bool]) -> None:
    import ray  # imported late: many processes never use Ray

    mailbox = open_mailbox()
    remote = ray.remote(_in_worker).options(num_cpus=workers.cpus, num_gpus=workers.gpus, max_retries=_RESTARTS)
    at_once = workers.number or max(1, int(ray.cluster_resources().get("CPU", 1) / workers.cpus))
    leases, running = storage.share_leases(), dict[Any, Task]()
    try:
        while True:
            while len(running) < at_once and (task := queue.next()) is not None:
                running[remote.remote(task.call, workers.threads, leases, mailbox)] = task
            if not running:
                return
            ready, _ = ray.wait(list(running), num_returns=1, timeout=_LOOK_S)
            if stopping():
                ray.get(mailbox.ask_to_stop.remote())
                ray.wait(list(running), num_returns=len(running), timeout=_STOP_S)
                raise Stopped("asked to stop; the same command resumes")
            if not ready:
                continue
            task = running.pop(ready[0])
            failure: str | None
            try:
                with plain_errors(f"{task.name}: its process", "lower workers.number"):
                    failure = ray.get(ready[0])
            except InputError as error:
                failure = str(error)
            queue.end(task, failure)
    finally:
        if running:  # Ray may crash if a finished task is cancelled
            _, running_on = ray.wait(list(running), num_returns=len(running), timeout=0)
            for reference in running_on:
                ray.cancel(reference, force=True)
            ray.wait(list(running), num_returns=len(running), timeout=_PATIENCE_S)  # before the cluster goes away


def _in_worker(call: Callable[[], object], threads: int, leases: tuple[storage.Lease, ...], mailbox: Any) -> str | None:
    """Run a task in a Ray process, which Ray reuses for later tasks."""
    from ray.exceptions import RayError

    storage.join_leases(leases)
    torch.set_num_threads(threads)
    log.setLevel(logging.INFO)  # for the log beside each stage's output
    try:
        # the watch ends before the handler goes: its signal would end the process
        with ending_on_signal(), alongside(partial(_watch, mailbox), until=(RayError,)):
            return _attempt(call)
    except Stopped as error:  # the launching process, which has asked for it, raises its own
        return str(error)


def _watch(mailbox: Any, over: threading.Event) -> None:
    """Turn the launching process's request to stop into the signal that also stops a process running alone."""
    import ray

    while not over.is_set():
        if ray.get(mailbox.standing.remote()).stop_asked:
            # not Ray's own cancellation: it raises SIGINT, which a process from the background of a script ignores
            os.kill(os.getpid(), signal.SIGTERM)
            return
        over.wait(_LOOK_S)


def _attempt(call: Callable[[], object]) -> str | None:
    """Run a task; returns the reason of a failure, or None."""
    try:
        call()
    except (Stopped, UnavailableError):  # the same command resumes
        raise
    except InputError as error:
        return str(error)
    except Exception as error:  # a defect, or a full GPU: the other tasks continue
        log.exception("the task failed")
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None
