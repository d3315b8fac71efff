"""Runs in the trackers that a team uses, TensorBoard and MLflow, and as gauges; they only ever cost a run telemetry.

Environment variables name the trackers. Every process that runs a job reads them. They belong to no config, because a
model does not depend on who watches.

    LTRSCALE_TENSORBOARD=DIR   event files of each run below DIR, in a folder named like the run's output
    LTRSCALE_MLFLOW=URI        a run for each stage in MLflow's tracking store, such as sqlite:///mlflow.db or
                               http://host:5000, in the experiment that MLFLOW_EXPERIMENT_NAME names (ltrscale)
    LTRSCALE_TRACKING_REQUIRED=true   ends a job whose tracker does not answer at the start

Each tracker has its own thread, so a server that is down, hangs or is slow delays no step, checkpoint or stop. Reports
wait in a bounded queue while the thread retries; reports that find the queue full are counted and lost. At the end of a
run its tracker has some seconds for the rest. The threads are daemons, so a hanging one does not keep the process
alive.

Gauges are the numbers of a running job for Ray's dashboard and Prometheus, as metrics of Ray. A process connected to
Ray exports its reports with the prefix `ray_` and for counters the suffix `_total`: `ray_ltrscale_documents_total`.
Other processes import nothing of Ray.
"""

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Self

from ltrscale.errors import InputError, Stopped
from ltrscale.progress import log
from ltrscale.stages.metrics_file import CurvePoint
from ltrscale.stages.mlflow_runs import MLFLOW, MLflowRun
from ltrscale.stages.trackers import (
    TENSORBOARD,
    EventFiles,
    Figures,
    RefusedError,
    Tracked,
    Tracker,
    numbers,
    run_name,
)

REQUIRED = "LTRSCALE_TRACKING_REQUIRED"
Track = Callable[[Mapping[str, object], CurvePoint], None]
"""Passes a record on to the trackers of a run."""
_MOST_WAITING = 10_000
_AT_ONCE = 200
_LONGEST_REASON = 120
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_OPEN_S, _END_S, _SILENT_S = 30.0, 30.0, 10.0
_off: ContextVar[bool] = ContextVar("off", default=False)
_silent: set[str] = set()
"""Places that had not answered when a run ended; later runs do not wait for them."""


@contextmanager
def untracked() -> Iterator[None]:
    """Track nothing in the block, such as reading rows in order to score them."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


@contextmanager
def tracked(run: Tracked) -> Iterator[Track]:
    """Track the block in the trackers that the environment names; yields a function that passes records to them.

    The output and the stage name the run. Its config and the files in its folder are kept with it.

    Raises:
        InputError: a tracker is not installed, the environment names an invalid store, or a required tracker did not
            answer at the start.
    """
    required = _is_required()
    with _trackers_of(run) as trackers:
        followers = [_Follower(tracker, required) for tracker in trackers]
        gauges = Gauges(run_name(run.out), run.stage)

        def track(record: Mapping[str, object], point: CurvePoint) -> None:
            gauges(record)
            if not followers:
                return
            values = {key: value for key, value in numbers(record).items() if key not in ("step", "epoch", "time")}
            if values:
                for follower in followers:
                    follower.report(Figures(point, values, time.time()))

        status = "FAILED"
        try:
            if required:
                for follower in followers:
                    follower.require()
            with gauges:
                yield track
            status = "FINISHED"
        except (Stopped, KeyboardInterrupt):
            status = "KILLED"
            raise
        finally:
            for follower in followers:
                follower.end(run.folder, status)


@contextmanager
def _trackers_of(run: Tracked) -> Iterator[list[Tracker]]:
    """The trackers that the environment names, not yet opened; MLflow's run is a parent run inside the block."""
    environment: Mapping[str, str] = {} if _off.get() else os.environ
    trackers: list[Tracker] = []
    with ExitStack() as block:
        if folder := environment.get(TENSORBOARD):
            trackers.append(EventFiles(folder, run))
        if uri := environment.get(MLFLOW):
            in_mlflow = MLflowRun(uri, run)
            trackers.append(in_mlflow)
            block.enter_context(in_mlflow.as_parent())
        yield trackers


def _is_required() -> bool:
    known = {"true": True, "1": True, "false": False, "0": False, "": False}
    if (value := os.environ.get(REQUIRED, "").lower()) not in known:
        raise InputError(f"{REQUIRED}: {value!r} is neither true nor false")
    return known[value]


class _Follower:
    """Passes figures on to a tracker in its own thread."""

    def __init__(self, tracker: Tracker, required: bool) -> None:
        self._tracker = tracker
        self._waiting: deque[Figures] = deque()
        self._reported = self._arrived = 0
        self._trouble, self._quiet = "", False
        self._warned = required  # the error of `require` stands for the warning
        self._saying = threading.Lock()
        self._news, self._over = threading.Event(), threading.Event()
        self._opened, self._done = threading.Event(), threading.Event()
        self._until, self._answered = math.inf, 0.0
        """When the thread gives up, and when the tracker last answered, by `time.monotonic()`."""
        self._ending: tuple[Path, str]
        self._ended = False
        threading.Thread(target=self._work, name=f"tracking in {tracker.name}", daemon=True).start()

    def report(self, figures: Figures) -> None:
        """Queue figures unless the queue is full; never waits."""
        self._reported += len(figures.values)
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(figures)
            self._news.set()

    def require(self) -> None:
        """Wait until the tracker has begun the run; an `InputError` if it does not."""
        if not self._opened.wait(_OPEN_S):
            self._trouble, self._quiet = self._trouble or f"no answer within {_OPEN_S:.0f} s", True
            raise InputError(f"{self._said()}; start it, or unset {REQUIRED}")
        self._warned = False

    def end(self, folder: Path, status: str) -> None:
        """Give the tracker some seconds to send the rest and end the run, and log what did not arrive."""
        self._ending = folder, status
        self._answered = now = time.monotonic()
        # a failing tracker gets one more try, so that a server that is down delays no run
        self._until = now if self._trouble else now + _END_S
        with self._saying:
            self._over.set()
        self._news.set()
        silent_s = 0.0 if self._tracker.place in _silent else _SILENT_S
        while (left_s := min(now + _END_S, self._answered + silent_s) - time.monotonic()) > 0:
            if self._done.wait(left_s):
                break  # otherwise an answer may have come meanwhile, which gives it more time
        if not self._done.is_set():
            _silent.add(self._tracker.place)
        lost = self._reported - self._arrived
        what = [f"{lost:,} of {self._reported:,} figures"] if lost else []
        what += [] if self._ended else ["the end"]
        if what and not self._quiet:
            self._trouble = self._trouble or "no answer"
            log.warning("%s; %s of this run did not arrive", self._said(), " and ".join(what))

    def _work(self) -> None:
        if self._attempt(self._tracker.open):
            self._opened.set()
            if self._pass_on():
                self._ended = self._attempt(self._end)
        self._done.set()

    def _end(self) -> None:
        for _ in self._tracker.end(*self._ending):
            self._answered = time.monotonic()

    def _pass_on(self) -> bool:
        """Send reports until the run is over; returns whether the tracker still answers."""
        while not self._over.is_set() or self._waiting:
            self._news.wait()
            self._over.wait(self._tracker.every_s)
            self._news.clear()
            while self._waiting:
                figures = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
                try:
                    if not self._attempt(partial(self._tracker.send, figures)):
                        return False
                    self._arrived += sum(len(each.values) for each in figures)
                except RefusedError as error:
                    self._fail(error, "such figures are refused")
        return True

    def _attempt(self, call: Callable[[], None]) -> bool:
        """Call with growing pauses until it succeeds; returns whether it did before time was up."""
        wait_s = _FIRST_WAIT_S
        while True:
            last = time.monotonic() >= self._until
            try:
                call()
            except RefusedError:
                raise
            except Exception as error:  # from any library, network or disk
                self._fail(error)
            else:
                self._trouble, self._answered = "", time.monotonic()
                _silent.discard(self._tracker.place)
                return True
            if last:
                return False
            if self._over.wait(wait_s) and time.monotonic() < self._until:
                time.sleep(_FIRST_WAIT_S)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _fail(self, error: Exception, so: str = "its figures wait until that is over") -> None:
        """Log the first failure of a run; failures at its end are logged with what did not arrive."""
        with self._saying:
            self._trouble = _reason(error)
            if not self._warned and not self._over.is_set():
                self._warned = True
                log.warning("%s; the run continues, and %s", self._said(), so)

    def _said(self) -> str:
        return f"{self._tracker.name} in {self._tracker.place}: {self._trouble}"


def _reason(error: BaseException) -> str:
    """A short text of an error; for long ones of requests, that of the cause, such as a refused connection."""
    text = str(error).strip().partition("\n")[0]
    below = error.__cause__ or error.__context__
    if text and (len(text) <= _LONGEST_REASON or below is None):
        return text[:_LONGEST_REASON]
    return type(error).__name__ if below is None else _reason(below)


_REFRESH_S = 5.0  # Ray drops a gauge that was not set for 20 s, twice its export interval

COUNTERS = {
    "documents": "Documents that all workers have read",
    "groups": "Query groups that all workers have read",
    "wait_s": "Seconds spent waiting for data, mean over the workers",
}
"""Counted by step, under the names in a step's record."""
OF_RUN = {
    "epoch": "Epochs of the phase that are complete",
    "running_workers": "Workers that have started",
    "restarts": "Times that the workers have been started again",
    "checkpoints": "Checkpoints committed since the launch",
    "missed": "Query groups that the last complete epoch has missed, at least",
    "repeated": "Query groups that the last complete epoch has repeated, at least",
}
OF_STEP = {
    "step": "Steps of the run so far",
    "loss": "Mean loss of the last step",
    "auxiliary_loss": "Mean auxiliary loss of the last step",
}
OF_EPOCH = {
    "groups": "Query groups of the last complete epoch",
    "loss": "Mean loss of the last complete epoch",
}
OF_WORKER = {
    "wait_percent": "Percentage of the last epoch that a worker has waited for data",
    "memory_gb": "Peak memory of a worker's process",
    "gpu_gb": "Peak memory of a worker on its GPU",
}
OF_VALIDATION = {"validation": "Metric of the last validation"}


class Gauges:
    """Passes the records of one run to Ray, if this process is connected to Ray when they arrive.

    Every number is labelled with the run's name and its phase, or its stage if it has no phases. A context manager: a
    thread keeps the gauges alive in Ray until exit.
    """

    def __init__(self, run: str, stage: str) -> None:
        self._run, self._stage = run, stage
        self._metrics: dict[str, Any] = {}
        self._last: dict[tuple[str, ...], tuple[Any, float, dict[str, str]]] = {}
        self._refreshing: threading.Thread | None = None
        self._over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def __call__(self, record: Mapping[str, object]) -> None:
        """Export the known fields of a record of a step, an epoch or the run.

        If Ray refuses a number, a warning says so, and the run continues without gauges.
        """
        if self._over.is_set() or not _is_connected():
            return
        try:
            self._export(record)
        except Exception as error:  # whatever Ray raises
            self._over.set()
            log.warning("gauges: %s; this run exports none any more", error)

    def _export(self, record: Mapping[str, object]) -> None:
        if self._refreshing is None:
            self._refreshing = threading.Thread(target=self._refresh, name="gauges", daemon=True)
            self._refreshing.start()
        tags = {"run": self._run, "phase": str(record.get("phase", self._stage))}
        self._set(OF_RUN, record, tags)
        if "epoch" in record:
            self._set(OF_EPOCH, record, tags, "epoch_")
            workers = record.get("workers")
            for rank, figures in enumerate(workers if isinstance(workers, list) else ()):
                self._set(OF_WORKER, figures, {**tags, "rank": str(rank)}, "worker_")
            for name, value in record.items():
                if name.startswith("validation_"):
                    tagged = {**tags, "metric": name.removeprefix("validation_")}
                    self._set(OF_VALIDATION, {"validation": value}, tagged)
        elif "step" in record:
            self._set(OF_STEP, record, tags)
            self._set(COUNTERS, record, tags, counts=True)

    def _set(
        self,
        known: Mapping[str, str],
        record: Mapping[str, object],
        tags: dict[str, str],
        prefix: str = "",
        *,
        counts: bool = False,
    ) -> None:
        """Set the gauges of the known numbers of a record, or increase their counters; each is made when first used."""
        from ray.util import metrics

        for name, value in numbers(record).items():
            if name not in known or not math.isfinite(value) or (counts and value <= 0):  # Ray refuses such counts
                continue
            key = prefix + name
            if key not in self._metrics:
                make = metrics.Counter if counts else metrics.Gauge
                self._metrics[key] = make(f"ltrscale_{key}", known[name], tag_keys=tuple(tags))
            if counts:
                self._metrics[key].inc(value, tags=tags)
            else:
                self._metrics[key].set(value, tags=tags)
                self._last[key, *tags.values()] = self._metrics[key], value, tags

    def _refresh(self) -> None:
        while not self._over.wait(_REFRESH_S):
            for gauge, value, tags in list(self._last.values()) if _is_connected() else ():
                gauge.set(value, tags=tags)


def _is_connected() -> bool:
    """True if this process is connected to Ray; imports nothing."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
