"""Workers of Ray Train: started, watched and restarted until the work is done.

The work resumes from its newest checkpoint, so recovery restarts all workers: after a worker has died, after a node was
lost, and before a node with a preemption notice disappears. Ray Train starts them; this module decides when another
start is useless: after an error that the user must read, after too many failures in a row, and when the launching
process was asked to stop.

Torch's store, where workers meet, listens on the address of its node alone. Ray Train has no public way to choose the
interface, and by default the store listens on all and requires no token: `OnItsNode` uses its internals, which are
checked with each version, see `ltrscale.runtime.ray_internals`.
"""

import functools
import math
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.exceptions import RayActorError, RayError
from ray.train import ControllerError, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer, config
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ltrscale import storage
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.progress import Report, log
from ltrscale.runtime.hangs import HangWatch, Pulse
from ltrscale.runtime.mailbox import (
    AttemptEnded,
    Beat,
    Committed,
    Left,
    LogLine,
    ReportedMetrics,
    Sender,
    Standing,
    Started,
    WorkerJoined,
    forwarded_logs,
    open_mailbox,
)
from ltrscale.runtime.on_ray import read_with_ray
from ltrscale.runtime.workers import Context, Work, WorkersConfig
from ltrscale.signals import stop_on_signal

_POLL_S = 0.2
_WATCH_S = 0.5
_PATIENCE_S = 60.0
_COLLECTIVE_S = 1800  # torch's own default for gloo


def train(work: Work, workers: WorkersConfig, report: Report) -> None:
    """Run the work of a training on workers of Ray Train, in the cluster that this process is connected to.

    Raises:
        InputError: a worker raised one, or workers died too many times in a row.
        Stopped: this process was asked to stop, and the workers have committed a checkpoint.
        Exception: a worker raised it too many times in a row.
    """
    mailbox = open_mailbox()
    with storage.scratch.directory() as scratch, stop_on_signal() as stopping:
        trainer = _trainer(work, workers, mailbox, str(scratch))
        failures: list[BaseException] = []

        def fit() -> None:
            try:
                trainer.fit()
            except BaseException as error:  # raised in the calling thread below
                failures.append(error)

        run = threading.Thread(target=fit, daemon=True)  # fit blocks, and this thread must deliver posts meanwhile
        run.start()
        try:
            _attend(run, mailbox, report, workers, stopping)
        finally:
            ray.kill(mailbox)  # workers that are still alive end once they find it gone
        if failures:
            error = failures[0]
            raise error.controller_failure if isinstance(error, ControllerError) else error


def _trainer(work: Work, workers: WorkersConfig, mailbox: Any, scratch: str) -> TorchTrainer:
    return TorchTrainer(
        _worker,
        train_loop_config={"task": _Task(work, mailbox, workers.read_on)},  # Ray Train takes only a dict
        scaling_config=ScalingConfig(
            num_workers=workers.number, use_gpu=workers.gpus > 0, resources_per_worker=_resources(workers)
        ),
        # the watch must find a worker that hangs before the others' collectives time out
        torch_config=OnItsNode(
            backend="cpu:gloo,cuda:nccl" if workers.gpus >= 1 else "gloo",  # NCCL refuses workers that share a GPU
            timeout_s=max(_COLLECTIVE_S, math.ceil(2 * workers.hang_s)),
        ),
        run_config=RunConfig(
            storage_path=scratch,
            name="train",
            failure_config=FailureConfig(max_failures=-1),  # no limit: the callback counts, and raises at ours
            callbacks=[_Overseer(mailbox, workers.max_failures)],
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def _resources(workers: WorkersConfig) -> dict[str, float]:
    return {"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})}


def _attend(
    run: threading.Thread, mailbox: Any, report: Report, workers: WorkersConfig, stopping: Callable[[], bool]
) -> None:
    """Deliver the workers' posts until the run ends, and forward the request to stop."""
    running, stop_requested, starts = False, False, 0
    waiting_since = time.monotonic()
    watch, actors = HangWatch(workers.hang_s), dict[int, Any]()
    while True:
        alive = run.is_alive()  # before taking posts, so that the last ones are delivered
        for post in ray.get(mailbox.take.remote()):
            match post:
                case ReportedMetrics(values):
                    report(values)
                case LogLine(level, text):
                    log.log(level, "%s", text)
                case Started(count):
                    running, starts = True, starts + 1
                    report({"running_workers": count, "restarts": starts - 1})
                    log.info("training on %d workers", count)
                case Committed(checkpoints):
                    report({"checkpoints": checkpoints})
                case WorkerJoined(rank, actor):
                    actors[rank] = actor
                    watch.joined(rank)
                case Beat(rank, counts):
                    watch.heard(rank, counts)
                case Left(rank):
                    watch.left(rank)
                case AttemptEnded():
                    report({"running_workers": 0})
                    running, waiting_since = False, time.monotonic()
                    watch.clear()
        if not alive:
            return
        for rank, symptom in watch.hung().items():
            log.warning("rank %d hangs: it %s; ending it", rank, symptom)
            ray.kill(actors[rank])  # Ray Train then restarts all workers, as after any death
            watch.left(rank)
        if stopping() and not stop_requested:
            if not running:  # nobody would answer, for instance while the cluster has no room
                raise Stopped("no worker was running")
            ray.get(mailbox.ask_to_stop.remote())
            stop_requested = True
        if not running and time.monotonic() - waiting_since > _PATIENCE_S:
            waiting_since = time.monotonic()
            log.warning(
                "waiting for room for %d workers with %s each; free in the cluster: %s",
                workers.least, _resources(workers), _free_resources(),
            )  # fmt: skip
        run.join(_POLL_S)


def _free_resources() -> dict[str, float]:
    free = ray.available_resources()
    return {name: free.get(name, 0.0) for name in ("CPU", "GPU")}


class _Overseer(UserCallback):  # type: ignore[misc]
    """Decides, in the controller of Ray Train, whether failed workers restart: they do unless it raises."""

    def __init__(self, mailbox: Any, max_failures: int) -> None:
        self._mailbox, self._max_failures = mailbox, max_failures
        self._failures = self._commits = self._starts = 0

    def after_exception(self, run_context: object, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
        """Ray Train calls this, possibly several times, while some workers have failed or are gone."""
        rank, error = _cause(worker_exceptions)
        if _is_final(error):
            raise error
        standing: Standing = ray.get(self._mailbox.standing.remote())
        if isinstance(error, Stopped) and standing.stop_asked:
            raise error
        if standing.starts == self._starts:  # this start's failure is counted already
            return
        self._starts = standing.starts
        self._post(AttemptEnded())
        if isinstance(error, Stopped) or (isinstance(error, RayActorError) and error.preempted):
            self._post(LogLine(20, "a node is about to be removed: all workers start again without it"))
            return
        self._failures = self._failures + 1 if standing.commits == self._commits else 1
        self._commits = standing.commits
        if self._failures > self._max_failures:
            raise self._final(rank, error)
        count = f"failure {self._failures} of {self._max_failures} in a row without a new checkpoint"
        self._post(LogLine(30, f"{_one_line(rank, error)}; all workers start again ({count})"))

    def _post(self, post: LogLine | AttemptEnded) -> None:
        ray.get(self._mailbox.post.remote(post))

    def _final(self, rank: int, error: Exception) -> Exception:
        if not isinstance(error, RayActorError):
            return error
        return InputError(
            f"workers died {self._failures} times in a row before there was a new checkpoint; the last time "
            f"{_one_line(rank, error)}; lower stream.docs_per_batch if memory ran out, or raise workers.max_failures"
        )


def _cause(worker_exceptions: Mapping[int, Exception]) -> tuple[int, Exception]:
    """The exception that explains the others: first an error that the user must read, then a stop, a death, any other.

    A death comes before other errors because the other workers fail in their collectives once one is gone.
    """
    errors = {rank: getattr(error, "health_check_failure", error) for rank, error in worker_exceptions.items()}
    for rank, error in errors.items():
        if _is_final(error):
            return rank, error
    for kind in (Stopped, RayActorError, UnavailableError):
        for rank, error in errors.items():
            if isinstance(error, kind):
                return rank, error
    return next(iter(errors.items()))


def _is_final(error: Exception) -> bool:
    """Whether another start is useless, for the user must read the error; unavailable storage may come back."""
    return isinstance(error, InputError) and not isinstance(error, UnavailableError)


def _one_line(rank: int, error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"rank {rank}: {type(error).__name__}: {text[:200]}{'...' if len(text) > 200 else ''}"


@dataclass(frozen=True)
class _Task:
    """The value that Ray Train hands to each worker."""

    work: Work
    mailbox: Any
    read_on: dict[str, float]


def _worker(config: dict[str, _Task]) -> None:
    """The function that Ray Train runs in each worker."""
    task, context = config["task"], ray.train.get_context()
    rank, sender = context.get_world_rank(), Sender(task.mailbox)
    if rank == 0:
        sender(Started(context.get_world_size()))
    sender(WorkerJoined(rank, ray.get_runtime_context().current_actor))
    pulse = Pulse()
    reader = functools.partial(read_with_ray, read_on=task.read_on) if task.read_on else read_with_ray
    with (
        forwarded_logs(sender, rank),
        _watching(sender.mailbox, rank) as stopping,
        # not through the sender, which may wait: a beat that is late looks like a hang
        pulse.sent(lambda counts: sender.mailbox.post.remote(Beat(rank, counts))),
    ):
        worker_context = Context(
            reader=reader,
            report=sender.report if rank == 0 else lambda _: None,
            stopping=stopping,
            progressed=lambda: sender.mailbox.count_commit.remote(),
        )
        try:
            task.work(pulse.counting(worker_context))
        except (InputError, Stopped):
            raise
        except Exception as error:
            error.add_note(f"raised by rank {rank}:\n{traceback.format_exc()}")  # pickling drops the traceback
            raise
        finally:
            sender(Left(rank))
            sender.flush()


@contextmanager
def _watching(mailbox: Any, rank: int) -> Iterator[Callable[[], bool]]:
    """Yields a function that reports whether a node has a preemption notice or the launching process was asked to stop.

    A thread asks both, for each question takes milliseconds. Ray Train's question is a collective: the threads of all
    workers ask it together, independently of the steps.
    """
    stop_requested, over = threading.Event(), threading.Event()

    def watch() -> None:
        try:
            while not over.wait(_WATCH_S):
                stop_asked = rank == 0 and ray.get(mailbox.standing.remote()).stop_asked
                if stop_asked or ray.train.get_preemption_info() is not None:
                    stop_requested.set()
                    return
        except RayError:  # the cluster is shutting down, or other workers are gone and this one will follow
            return

    threading.Thread(target=watch, name="watch", daemon=True).start()
    try:
        yield stop_requested.is_set
    finally:
        over.set()


_stores: list[TCPStore] = []
"""Keeps the stores of this process alive: torch holds none before it has a process group."""


class OnItsNode(TorchConfig):  # type: ignore[misc]
    """Ray Train's settings of torch, with the store on the node's address."""

    @property
    def backend_cls(self) -> type:
        """The class that sets up the workers."""
        return _Backend


class _Backend(config._TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Set up the process group of all workers; runs in Ray Train's controller."""
        config.get_address_and_port = _serve  # the base class runs this function on rank 0
        super().on_start(worker_group, backend_config)


def _serve() -> tuple[str, int]:
    """Open the store; returns its address and port. Torch then reuses this store, which its process has at the port."""
    host = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = int(server.getsockname()[1])
        _stores.append(
            TCPStore(
                host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=server.detach()
            )
        )
    return host, port
