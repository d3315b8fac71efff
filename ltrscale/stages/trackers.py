"""Runs in the trackers that a team uses: TensorBoard, and MLflow.

Two environment variables name where to. They are read by every process that runs a job, and belong to no config: a
model does not depend on who watches.

    LTRSCALE_TENSORBOARD=DIR   event files of each run below DIR, in a folder named like the run's output
    LTRSCALE_MLFLOW=URI        a run for each stage in MLflow's tracking store, such as sqlite:///mlflow.db or
                               http://host:5000, in the experiment that MLFLOW_EXPERIMENT_NAME names (ltrscale)

A failing tracker ends no job: it is left out from then on, with a warning.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError, without_credentials
from ltrscale.progress import Report, log
from ltrscale.runtime.gauges import Gauges

TENSORBOARD, MLFLOW = "LTRSCALE_TENSORBOARD", "LTRSCALE_MLFLOW"
EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
_REPORTS = ("report.md", "report.html", "metrics.json")
_LONGEST_VALUE, _MOST_PARAMS, _MOST_METRICS = 6000, 100, 1000  # MLflow's limits
_SEND_EVERY_S = 5.0
_parent: ContextVar[str | None] = ContextVar("parent", default=None)
_off: ContextVar[bool] = ContextVar("off", default=False)


class Tracker(Protocol):
    """Receives what a run reports."""

    def report(self, values: Mapping[str, float], step: int) -> None:
        """Metrics by name, at a step."""

    def end(self, folder: Path, *, failed: bool) -> None:
        """The run is over; its files are in a folder."""


@contextmanager
def untracked() -> Iterator[None]:
    """Track nothing in the block: reading rows to score them is no run to look at."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


@contextmanager
def tracked(out: str, config: Config, stage: str, folder: Path) -> Iterator[Report]:
    """Track the block in the trackers that the environment names; yields what passes records on to them.

    The output and the stage name the run, whose config and the files in `folder` are kept with it. An `InputError` if a
    tracker is not installed, or its store cannot be opened.
    """
    trackers: list[Tracker] = []
    environment = {} if _off.get() else os.environ
    if tensorboard_url := environment.get(TENSORBOARD):
        trackers.append(_TensorBoard(tensorboard_url, out, config))
    token = None
    if uri := environment.get(MLFLOW):
        in_mlflow = _MLflow(uri, out, config, stage)
        trackers.append(in_mlflow)
        token = _parent.set(in_mlflow.run_id)
    counts: dict[str, int] = {}

    def report(record: Mapping[str, object]) -> None:
        gauges(record)
        if trackers:
            prefix, step = _place(record, stage, counts)
            values = {f"{prefix}/{key}": value for key, value in numbers(record).items()}
            _call_each(trackers, lambda tracker: tracker.report(values, step))

    failed = True
    try:
        with Gauges(_run_name(out), stage) as gauges:
            yield report
        failed = False
    finally:
        if token is not None:
            _parent.reset(token)
        _call_each(trackers, lambda tracker: tracker.end(folder, failed=failed))


def _call_each(trackers: list[Tracker], call: Callable[[Tracker], None]) -> None:
    """Call each tracker; one that fails is left out from then on."""
    for tracker in list(trackers):
        try:
            call(tracker)
        except Exception as error:  # of any library, network or disk
            trackers.remove(tracker)
            log.warning("%s: %s; this run is not tracked there any more", type(tracker).__name__.strip("_"), error)


def numbers(record: Mapping[str, object]) -> dict[str, float]:
    """The measured numbers of a record, by name.

    Example:
        >>> numbers({"step": 3, "phase": "full", "loss": 0.5, "workers": [{"memory_gb": 1.0}], "stopped": True})
        {'loss': 0.5}
    """
    return {
        key: float(value)
        for key, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("step", "epoch", "time")
    }


def _place(record: Mapping[str, object], stage: str, counts: dict[str, int]) -> tuple[str, int]:
    """The prefix of a record's metrics, such as `full/epoch`, and its step: its own, or the next number."""
    unit = next((unit for unit in ("epoch", "step") if isinstance(record.get(unit), int)), None)
    prefix = "/".join(str(part) for part in (record.get("phase", stage), unit) if part is not None)
    counts[prefix] = counts.get(prefix, 0) + 1
    step = record[unit] if unit else counts[prefix]
    return prefix, step if isinstance(step, int) else counts[prefix]


def flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as text by dotted key, without credentials.

    Example:
        >>> flat({"out": "runs/a", "network": {"width": 8, "sizes": [4, 2]}})
        {'out': 'runs/a', 'network.width': '8', 'network.sizes': '[4, 2]'}
    """
    texts: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            texts |= {f"{key}.{below}": text for below, text in flat(value).items()}
        else:
            texts[key] = without_credentials(str(value))
    return texts


class _TensorBoard:
    """Event files of one run."""

    def __init__(self, folder: str, out: str, config: Config) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                f"{TENSORBOARD}: TensorBoard is not installed; pip install 'ltrscale[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(storage.join(folder, _run_name(out)))
        rows = "\n".join(f"| {key} | {value} |" for key, value in flat(config.model_dump(mode="json")).items())
        self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}")

    def report(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, folder: Path, *, failed: bool) -> None:  # noqa: ARG002
        self._writer.close()


class _MLflow:
    """One run in MLflow; stages of a pipeline are its children."""

    def __init__(self, uri: str, out: str, config: Config, stage: str) -> None:
        self._client, self._out = client(uri), out
        from mlflow import entities  # only once it is known to be installed

        name = os.environ.get(EXPERIMENT, "ltrscale")
        try:
            existing = self._client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing else self._client.create_experiment(name)
            tags = {"mlflow.runName": _run_name(out), "stage": stage, "out": without_credentials(out)}
            if (parent := _parent.get()) is not None:
                tags["mlflow.parentRunId"] = parent
            self.run_id: str = self._client.create_run(experiment, tags=tags).info.run_id
            settings = flat(config.model_dump(mode="json"))
            params = [entities.Param(plain_key(key), value[:_LONGEST_VALUE]) for key, value in settings.items()]
            for first in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self.run_id, params=params[first : first + _MOST_PARAMS])
        except Exception as error:
            raise _unreachable(error) from error
        self._metrics: list[Any] = []
        self._metric, self._sent = entities.Metric, time.monotonic()

    def report(self, values: Mapping[str, float], step: int) -> None:
        """Metrics by name, at a step; sent every few seconds, because a request at each step would slow training."""
        now = int(time.time() * 1000)
        self._metrics += [self._metric(plain_key(key), value, now, step) for key, value in values.items()]
        if time.monotonic() - self._sent > _SEND_EVERY_S:
            self._send()

    def _send(self) -> None:
        for first in range(0, len(self._metrics), _MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=self._metrics[first : first + _MOST_METRICS])
        self._metrics.clear()
        self._sent = time.monotonic()

    def end(self, folder: Path, *, failed: bool) -> None:
        self._send()
        for path in sorted(folder.iterdir()):
            if path.is_file():
                self._client.log_artifact(self.run_id, str(path), "run")
        if not failed and storage.is_local(self._out):
            for name in _REPORTS:
                if (path := storage.local_path(self._out) / name).is_file():
                    self._client.log_artifact(self.run_id, str(path))
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def client(uri: str) -> Any:
    """MLflow's client of a tracking store and its registry; an `InputError` if either is not there."""
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise InputError(f"{MLFLOW}: MLflow is not installed; pip install 'ltrscale[mlflow]'") from error
    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except Exception as error:  # of MLflow, or of the database that the URI names
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> InputError:
    line = without_credentials(str(error).strip().partition("\n")[0])
    return InputError(f"{MLFLOW}: MLflow cannot be reached ({line}); check the URI, and that its server runs")


def _run_name(out: str) -> str:
    """A name for a run: the path of its output, in full where it leads out of the working directory by `..`.

    Example:
        >>> _run_name("s3://bucket/runs/demo/"), _run_name("runs/demo"), _run_name("/tmp/a/../b")
        ('bucket/runs/demo', 'runs/demo', 'tmp/b')
    """
    if storage.is_local(out):
        path = Path(os.path.normpath(storage.local_path(out)))  # `Path` alone keeps a `..` after a name
        out = str(path.resolve() if ".." in path.parts else path)
    return without_credentials(out).rpartition("://")[2].strip("/")


def plain_key(key: str) -> str:
    """A key of the characters that MLflow allows.

    Example:
        >>> plain_key("full/epoch/validation_ndcg@5")
        'full/epoch/validation_ndcg_5'
    """
    return re.sub(r"[^\w\-. /]", "_", key)
