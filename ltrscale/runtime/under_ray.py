"""Workers of Ray Train: started, watched and restarted until the work is done.

The work resumes from its newest checkpoint, so recovery restarts all workers: after a worker died, after a node was
lost, and before a node with a preemption notice disappears. Ray Train starts them; this module decides when another
start is useless: after an error that the user must read, after too many failures in a row, and when the launching
process was asked to stop. Workers that find capacity only later come and go without a restart, see `runtime.elastic`.
While workers wait for capacity, a line says what they ask for, whether it can ever come, and what is missing.

Torch's store, where workers meet, listens only on its node's address. By default it would listen on all interfaces,
without a token. Ray Train has no public option for this: `_OnItsNode` uses its internals, which are checked with each
version, see `ltrscale.runtime.ray_internals`.
"""

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
import ray.train
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, WorkerCrashedError
from ray.train import ControllerError, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer, config
from ray.train.v2._internal.execution.callback import ControllerCallback

from ltrscale import storage
from ltrscale.errors import ExpectedEnd, InputError, Stopped, UnavailableError
from ltrscale.processor import alongside
from ltrscale.progress import Report, log
from ltrscale.runtime import ray_internals
from ltrscale.runtime.elastic import WATCH_S, Assignment, Joiners, Requests, serve, work_through_resizes
from ltrscale.runtime.mailbox import (
    Beat,
    Left,
    LogLine,
    Post,
    ReportedMetrics,
    Running,
    Slot,
    Standing,
    WorkerJoined,
    open_mailbox,
)
from ltrscale.runtime.workers import HangWatch, Work, WorkersConfig
from ltrscale.signals import stop_on_signal

_DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError)
"""Deaths of an actor, of a process killed by Ray's memory monitor, and of a reader."""
_POLL_S = 0.2
_COLLECTIVE_S = 1800  # torch's own default for gloo
_LOOK_FOR_ROOM_S, _PATIENCE_S = 5.0, 60.0


def train(work: Work, workers: WorkersConfig, report: Report, *, elastic: bool) -> None:
    """Run the work of a training on workers of Ray Train, in the cluster that this process is connected to.

    Work that is `elastic` continues with workers that come later.

    Raises:
        InputError: a worker raised one, or workers died too many times in a row.
        UnavailableError: Ray Train's controller or the mailbox died, or a worker met an outage too many times in a row.
        Stopped: this process was asked to stop, and the workers have committed a checkpoint.
        Exception: a worker raised it too many times in a row.
    """
    mailbox = open_mailbox()
    with storage.scratch.directory() as scratch, stop_on_signal() as stopping:
        # the watch must find a worker that hangs before the others' collectives time out
        task = Assignment(work, mailbox, workers, max(_COLLECTIVE_S, math.ceil(2 * workers.hang_s)))
        most = workers.most if elastic else 0
        trainer, joiners = _trainer(task, str(scratch)), Joiners(task, _options(workers), most)
        failures: list[BaseException] = []

        def fit() -> None:
            try:
                trainer.fit()
            except BaseException as error:  # raised in the calling thread below
                failures.append(error)

        run = threading.Thread(target=fit, daemon=True)  # fit blocks, and this thread must deliver posts meanwhile
        run.start()
        try:
            _attend(run, mailbox, report, workers, stopping, joiners)
            if failures:
                error = failures[0]
                if isinstance(error, _DEATHS):
                    raise _gone("Ray Train's controller", error) from error
                raise error.controller_failure if isinstance(error, ControllerError) else error
        except ExpectedEnd:  # after any other error, Ray itself may answer no more
            ray.kill(mailbox)
            run.join()  # the controller ends too
            for error in failures:
                if isinstance(error, RayActorError) and error.actor_id:
                    ray_internals.remove_placement_groups_of(error.actor_id)
            raise
        finally:
            joiners.dismiss()
            ray.kill(mailbox)  # workers and a controller that are still alive end once they find it gone


def _gone(what: str, error: Exception) -> UnavailableError:
    """The error for the death of an actor that the workers need."""
    remedy = "the same command resumes from the last checkpoint"
    if isinstance(error, OutOfMemoryError):
        cause = " ".join(str(error).split())[:200]
        return UnavailableError(
            f"{what} was killed for memory ({cause}...); {remedy}, once its node has memory to spare"
        )
    return UnavailableError(f"{what} has died, killed or with its node; {remedy}")


def _trainer(task: Assignment, scratch: str) -> TorchTrainer:
    """Ray Train's trainer, which starts as many workers as there is capacity for, and keeps their number."""
    workers = task.workers
    return TorchTrainer(
        _worker,
        train_loop_config={"task": task},  # Ray Train takes only a dict
        scaling_config=ScalingConfig(
            num_workers=workers.number,
            elastic_resize_monitor_interval_s=math.inf,  # it would restart all workers: joiners come instead
            use_gpu=workers.gpus > 0,
            resources_per_worker=resources(workers),
            label_selector=workers.labels or None,
            accelerator_type=workers.accelerator,
        ),
        torch_config=_OnItsNode(backend=task.backend, timeout_s=task.timeout_s),
        run_config=RunConfig(
            storage_path=scratch,
            name="train",
            failure_config=FailureConfig(max_failures=-1),  # no limit: the callback counts, and raises at ours
            callbacks=[_Overseer(task.mailbox, workers.max_failures), _Lifeline(task.mailbox)],
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def _options(workers: WorkersConfig) -> dict[str, Any]:
    """Options of a joiner's actor, which may run on any node, even from within a placement group such as a trial's."""
    return {
        "num_cpus": workers.cpus,
        "num_gpus": workers.gpus,
        "label_selector": workers.labels,
        "accelerator_type": workers.accelerator,
        "scheduling_strategy": "DEFAULT",
    }


def _attend(
    run: threading.Thread,
    mailbox: Any,
    report: Report,
    workers: WorkersConfig,
    stopping: Callable[[], bool],
    joiners: Joiners,
) -> None:
    """Deliver the workers' posts until the run ends, forward the request to stop, and tend the joiners."""
    running, stop_requested, starts = False, False, 0
    waiting = Waiting(workers)
    watch, actors = HangWatch(workers.hang_s), dict[int, Any]()
    while True:
        alive = run.is_alive()  # before taking posts, so that the last ones are delivered
        for post in _taken(mailbox):
            match post:
                case ReportedMetrics(values):
                    report(values)
                case LogLine(level, text):
                    log.log(level, "%s", text)
                case Running(0):
                    report({"running_workers": 0})
                    running = False
                    waiting = Waiting(workers)
                    watch.clear()
                    joiners.dismiss()
                case Running(count):
                    running, starts = True, starts + 1
                    report({"running_workers": count, "restarts": starts - 1})
                    log.info("training on %d workers", count)
                    joiners.invite(beside=count)
                case WorkerJoined(rank, actor):
                    actors[rank] = actor
                    watch.joined(rank, actor)
                case Beat(rank, counts):
                    watch.heard(rank, counts)
                case Left(rank, actor):
                    watch.left(rank, actor)
        if not alive:
            return
        joiners.tend()
        _end_hung(watch, actors)
        if stopping() and not stop_requested:
            _ask_to_stop(mailbox, running)
            stop_requested = True
        if not running:
            waiting.look()
        run.join(_POLL_S)


def _end_hung(watch: HangWatch, actors: Mapping[int, Any]) -> None:
    """End the workers that hang; Ray Train then restarts all workers, as after any death."""
    for rank, symptom in watch.hung().items():
        log.warning("rank %d hangs: it %s; ending it", rank, symptom)
        ray.kill(actors[rank])
        watch.left(rank, actors[rank])


def _ask_to_stop(mailbox: Any, running: bool) -> None:
    """Forward the request to stop to the workers, which write a checkpoint first."""
    if not running:  # nobody would answer, for instance while the cluster has no capacity
        raise Stopped("no worker was running")
    ray.get(mailbox.ask_to_stop.remote())


def _taken(mailbox: Any) -> Iterator[Post]:
    try:
        yield from ray.get(mailbox.take.remote())
    except _DEATHS as error:
        raise _gone("the process that passes on what workers report", error) from error


class _Lifeline(ControllerCallback):  # type: ignore[misc]
    """Ends the controller of Ray Train once the mailbox has died, because no process waits for the run any more."""

    # In a thread, because the controller answers nobody while it waits for capacity. It must be dead before its
    # reservations are removed: after `ray.kill` a process may still ask for more.

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def after_controller_start(self, train_run_context: object) -> None:  # noqa: ARG002
        """Start the watch; Ray Train calls this in the controller, before it asks for workers."""
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(RayError):
            while True:
                ray.get(self._mailbox.standing.remote())
                time.sleep(WATCH_S)
        os._exit(1)


class _Overseer(UserCallback):  # type: ignore[misc]
    """Decides in the controller of Ray Train whether failed workers restart: they do unless it raises."""

    def __init__(self, mailbox: Any, max_failures: int) -> None:
        self._mailbox, self._max_failures = mailbox, max_failures
        self._failures = self._commits = self._starts = 0

    def after_exception(self, run_context: object, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
        """Ray Train calls this, possibly several times, after workers failed or died."""
        rank, error = _cause(worker_exceptions)
        if isinstance(error, InputError):  # the user must read it, so a restart is useless
            raise error
        standing: Standing = ray.get(self._mailbox.standing.remote())
        if isinstance(error, Stopped) and standing.stop_asked:
            raise error
        if standing.starts == self._starts:  # this start's failure is already counted
            return
        self._starts = standing.starts
        self._post(Running(0))
        if isinstance(error, Stopped) or (isinstance(error, RayActorError) and error.preempted):
            self._post(LogLine(logging.INFO, "a node is about to be removed: all workers start again without it"))
            return
        self._failures = self._failures + 1 if standing.commits == self._commits else 1
        self._commits = standing.commits
        if self._failures > self._max_failures:
            raise self._final(rank, error)
        count = f"failure {self._failures} of {self._max_failures} in a row without a new checkpoint"
        self._post(LogLine(logging.WARNING, f"{_one_line(rank, error)}; all workers start again ({count})"))

    def _post(self, post: LogLine | Running) -> None:
        ray.get(self._mailbox.post.remote(post))

    def _final(self, rank: int, error: Exception) -> Exception:
        if not isinstance(error, _DEATHS):
            return error
        return InputError(
            f"workers died {self._failures} times in a row before there was a new checkpoint; the last time "
            f"{_one_line(rank, error)}; lower stream.docs_per_batch if memory ran out, or raise workers.max_failures"
        )


def _cause(worker_exceptions: Mapping[int, Exception]) -> tuple[int, Exception]:
    """The exception that explains the others, by priority: an input error, a stop, a death, an outage, any other."""
    # a death before other errors: once a worker is gone, the others fail in their collectives
    errors = {rank: getattr(error, "health_check_failure", error) for rank, error in worker_exceptions.items()}
    for kind in (InputError, Stopped, _DEATHS, UnavailableError):
        for rank, error in errors.items():
            if isinstance(error, kind):
                return rank, error
    return next(iter(errors.items()))


def _one_line(rank: int, error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"rank {rank}: {type(error).__name__}: {text[:200]}{'...' if len(text) > 200 else ''}"


def _worker(config: dict[str, Assignment]) -> None:
    task, context = config["task"], ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    if rank == 0:
        ray.get(task.mailbox.post.remote(Running(world)))
    first = ray.get(task.mailbox.standing.remote()).resizes
    requests = Requests(first)
    watch = functools.partial(_watch, task.mailbox, rank, requests)
    with alongside(watch, until=(RayError,), waits=False):  # an error of Ray: the cluster or the launcher is gone
        work_through_resizes(task, rank, Slot(first, rank, world, ("", 0)), requests)


def _watch(mailbox: Any, rank: int, requests: Requests, over: threading.Event) -> None:
    """Poll for a preemption notice, a stop request and joiners."""
    # In a thread, because each question takes milliseconds. Ray Train's question is a collective: the threads of all
    # its workers ask it together, independently of the steps.
    while not over.wait(WATCH_S):
        standing: Standing | None = ray.get(mailbox.standing.remote()) if rank == 0 else None
        if (standing and standing.stop_asked) or ray.train.get_preemption_info() is not None:
            requests.stop.set()
            return
        if standing and standing.changed:
            requests.resize(standing.resizes)


class _OnItsNode(TorchConfig):  # type: ignore[misc]
    """Ray Train's torch settings, with the store on the node's address."""

    @property
    def backend_cls(self) -> type:
        """The class that sets up the workers."""
        return _Backend


class _Backend(config._TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Set up the process group of all workers; runs in Ray Train's controller."""
        config.get_address_and_port = serve  # the base class runs this function on rank 0
        super().on_start(worker_group, backend_config)


class Waiting:
    """Logs while workers wait for capacity: every minute, and at once if no node could hold one."""

    def __init__(self, workers: WorkersConfig) -> None:
        self._workers = workers
        self._next_look, self._next_line = time.monotonic() + _LOOK_FOR_ROOM_S, time.monotonic() + _PATIENCE_S
        self._looked = False

    def look(self) -> None:
        """Check the cluster, if it is time, and log what is missing.

        Raises:
            InputError: the cluster cannot get capacity for the workers.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_FOR_ROOM_S
        _check_possible(self._workers)
        if now >= self._next_line or not (self._looked or _has_nodes(self._workers)):
            log.warning("%s", _waiting_line(self._workers))
            self._next_line = now + _PATIENCE_S
        self._looked = True


def _has_nodes(workers: WorkersConfig) -> bool:
    """True if some node could hold a worker if it were empty."""
    return any(_fits(node, workers) for node in ray.nodes() if node["Alive"])


def resources(workers: WorkersConfig) -> dict[str, float]:
    """The Ray resources of each worker."""
    return {"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})}


def _waiting_line(workers: WorkersConfig) -> str:
    """One line for a run without capacity for its workers: what they need, and why it is missing."""
    wanted = _needed(workers)
    if not _has_nodes(workers):
        if ray_internals.unmet_requests() is None:
            return f"waits for {wanted}: no node is such, and no autoscaler reports that it adds one; start such nodes"
        return f"waits for {wanted}: none there yet, asked the autoscaler"
    free = {"CPU": 0.0, "GPU": 0.0, **ray.available_resources()}
    line = f"waits for room for {wanted}; free in the cluster: {free['CPU']:g} CPU, {free['GPU']:g} GPU"
    if any(free[name] < amount * workers.least for name, amount in resources(workers).items()):
        return line
    apart = "these lie on several nodes, of which none has room for a worker, or on nodes that are not asked for"
    return f"{line}; {apart}, or have just become free"


def _check_possible(workers: WorkersConfig) -> None:
    """Refuse workers that the cluster cannot get: this machine alone is too small, or no node type is theirs."""
    needed = _needed(workers)
    if ray_internals.is_own_cluster():
        if not _has_nodes(workers):
            raise InputError(f"{needed}: this machine has none of them; ask for less, or set RAY_ADDRESS to a cluster")
    elif [_asked(workers)] * workers.least in (ray_internals.unmet_requests() or []):
        raise InputError(
            f"{needed}: the cluster's autoscaler has no such node type, or not enough nodes of it; correct workers, or "
            "add a node type or raise its maximum"
        )


def _asked(workers: WorkersConfig) -> ray_internals.Demand:
    """Ray Train's request to the autoscaler for each worker."""
    of_type = {f"accelerator_type:{workers.accelerator}": 0.001} if workers.accelerator else {}
    labels = {name: _parsed(selector) for name, selector in workers.labels.items()}
    return ray_internals.Demand({**resources(workers), **of_type}, labels)


def _needed(workers: WorkersConfig) -> str:
    labels = {**({"accelerator": workers.accelerator} if workers.accelerator else {}), **workers.labels}
    where = f" on nodes with {', '.join(f'{name}: {value}' for name, value in labels.items())}" if labels else ""
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in resources(workers).items())
    return f"{workers.least} workers with {amounts} each{where}"


def _fits(node: Mapping[str, Any], workers: WorkersConfig) -> bool:
    """True if this node could hold a worker if it were empty."""
    asked, has, labels = _asked(workers), node["Resources"], node.get("Labels", {})
    enough = all(has.get(name, 0.0) >= amount for name, amount in asked.resources.items())
    return enough and all((labels.get(name) in values) != negated for name, (negated, values) in asked.labels.items())


def _parsed(selector: str) -> tuple[bool, frozenset[str]]:
    """True if a Ray label selector is negated, and its values."""
    negated, plain = selector.startswith("!"), selector.removeprefix("!")
    values = plain.removeprefix("in(").removesuffix(")").split(",") if plain.startswith("in(") else [plain]
    return negated, frozenset(value.strip() for value in values)
