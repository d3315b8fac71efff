"""Runs in MLflow, and MLflow's client.

An interrupted run goes on where it was, found again by the place and the origin of its output: nothing of an origin
that differs is ever added to it.
"""

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ltrscale import storage
from ltrscale.config import digest, settings_of
from ltrscale.errors import InputError, without_credentials
from ltrscale.stages.trackers import Figures, RefusedError, Tracked, flat, run_name

MLFLOW, EXPERIMENT = "LTRSCALE_MLFLOW", "MLFLOW_EXPERIMENT_NAME"
_REPORTS = ("report.md", "report.html", "metrics.json")
_LONGEST_VALUE, _MOST_PARAMS, _MOST_METRICS = 6000, 100, 1000  # MLflow's limits
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""Of a request with figures: MLflow itself would try for twenty minutes, and the thread that sends tries again."""
_REFUSED = (400, 404, 409)
_KNOWN_S = 10.0


class MLflowRun:
    """One run in MLflow; stages of a pipeline are its children."""

    name = "MLflow"
    every_s = 5.0

    def __init__(self, uri: str, run: Tracked) -> None:
        for variable, value in _LIMITS.items():
            os.environ.setdefault(variable, value)
        _check(uri)
        self.place, self._run, self._parent = uri, run, _parent.get()
        self._run_id, self._known = "", threading.Event()
        self._last: dict[str, int] = {}
        """The last step of each metric that is there."""

    @contextmanager
    def as_parent(self) -> Iterator[None]:
        """Let the runs that begin in the block be children of this one."""
        token = _parent.set(self)
        try:
            yield
        finally:
            _parent.reset(token)

    def open(self) -> None:
        """Go on with the run of this output that was interrupted, or begin one."""
        self._client = client(self.place)
        name = os.environ.get(EXPERIMENT, "ltrscale")
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        run = self._interrupted(experiment) or self._client.create_run(experiment, tags=self._tags())
        self._last = {metric.key: metric.step for metric in run.data._metric_objs}
        self._run_id = run.info.run_id
        self._known.set()
        self._send_settings(known=run.data.params)

    def _tags(self) -> dict[str, str]:
        out, stage = self._run.out, self._run.stage
        tags = {"mlflow.runName": run_name(out), "stage": stage, "out": without_credentials(out)}
        tags |= {"place": self._place(), "origin": self._origin()}
        if self._parent is not None and self._parent._known.wait(_KNOWN_S):
            tags["mlflow.parentRunId"] = self._parent._run_id
        return tags

    def _place(self) -> str:
        """The stage and its output: of a local one the directory itself, for others have one of the same path."""
        out, inode = self._run.out, 0
        if storage.is_local(out):
            out, inode = str(storage.local_path(out).resolve()), self._run.folder.stat().st_ino
        return digest([without_credentials(out), inode, self._run.stage])

    def _origin(self) -> str:
        return digest(self._run.origin or settings_of(self._run.config))

    def _interrupted(self, experiment: str) -> Any:
        """The run of this output that did not finish, now running again; None if there is none of this origin."""
        tagged = f"tags.place = '{self._place()}'"
        newest = ["attributes.start_time DESC"]
        for run in self._client.search_runs([experiment], tagged, max_results=1, order_by=newest):
            if run.info.status != "FINISHED" and run.data.tags["origin"] == self._origin():
                self._client.update_run(run.info.run_id, "RUNNING")
                return run
            if run.info.status == "RUNNING":  # its process is gone, for this one holds the output
                self._client.set_terminated(run.info.run_id, "KILLED")
        return None

    def _send_settings(self, known: Mapping[str, str]) -> None:
        """Log the settings that are not known: MLflow never changes one."""
        from mlflow.entities import Param

        settings = flat(self._run.config.model_dump(mode="json"))
        params = [Param(plain_key(key), value[:_LONGEST_VALUE]) for key, value in settings.items()]
        params = [param for param in params if param.key not in known]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS], synchronous=True)

    def send(self, figures: Sequence[Figures]) -> None:
        """Send what is not there yet: a metric keeps the steps that are done again as they were."""
        from mlflow import MlflowException
        from mlflow.entities import Metric

        last, metrics = dict(self._last), []
        for point, values, time_s in figures:
            for key, value in ((plain_key(f"{point.prefix}/{name}"), value) for name, value in values.items()):
                if point.step > last.get(key, -1):
                    last[key] = point.step
                    metrics.append(Metric(key, value, int(time_s * 1000), point.step))
        for first in range(0, len(metrics), _MOST_METRICS):
            batch = metrics[first : first + _MOST_METRICS]
            try:
                self._client.log_batch(self._run_id, metrics=batch, synchronous=True)
            except MlflowException as error:
                if error.get_http_status_code() in _REFUSED:
                    raise RefusedError(str(error)) from error
                raise
            self._last |= {metric.key: metric.step for metric in batch}

    def end(self, folder: Path, status: str) -> Iterator[None]:
        """Set the status first, then send the files, which take longer."""
        yield self._client.set_terminated(self._run_id, status)
        for path in sorted(folder.iterdir()):
            if path.is_file():
                yield self._client.log_artifact(self._run_id, str(path), "run")
        if status == "FINISHED" and storage.is_local(self._run.out):
            for name in _REPORTS:
                if (path := storage.local_path(self._run.out) / name).is_file():
                    yield self._client.log_artifact(self._run_id, str(path))


_parent: ContextVar[MLflowRun | None] = ContextVar("parent", default=None)


def client(uri: str) -> Any:
    """MLflow's client of a tracking store and its registry; an `InputError` if it cannot be opened."""
    mlflow = _import()
    try:
        return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    except Exception as error:  # of MLflow, or of the database that the URI names
        if "MLFLOW_ALLOW_FILE_STORE" in str(error):
            raise InputError(
                f"{MLFLOW}: {uri} is a folder, which MLflow writes no more; name a database, such as "
                "sqlite:///mlflow.db, or set MLFLOW_ALLOW_FILE_STORE=true"
            ) from error
        line = str(error).strip().partition("\n")[0]
        raise InputError(f"{MLFLOW}: MLflow cannot open {uri} ({line}); check the URI") from error


def _import() -> Any:
    """MLflow, which then neither sends reports to its makers nor prints."""
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    try:
        import mlflow
    except ImportError as error:
        raise InputError(f"{MLFLOW}: MLflow is not installed; pip install 'ltrscale[mlflow]'") from error
    return mlflow


def _check(uri: str) -> None:
    """Refuse what can be no store, without asking a server, and import MLflow before threads do.

    The tables of a new file are made here: that takes seconds, which a short run has not.
    """
    _import()
    from mlflow.store.db.db_types import DATABASE_ENGINES

    engine = urlsplit(uri).scheme.partition("+")[0]
    if engine == "sqlite":
        with suppress(InputError):  # locked, or out of reach for now: the thread tries again
            client(uri)
    elif engine not in DATABASE_ENGINES:
        client(uri)


@contextmanager
def patient() -> Iterator[None]:
    """Let MLflow try as long as it wants to in the block: who registers a model waits for it."""
    ours = {name for name, value in _LIMITS.items() if os.environ.get(name) == value}
    for name in ours:
        del os.environ[name]
    try:
        yield
    finally:
        for name in ours:
            os.environ.setdefault(name, _LIMITS[name])


def plain_key(key: str) -> str:
    """A key of the characters that MLflow allows.

    Example:
        >>> plain_key("full/epoch/validation_ndcg@5")
        'full/epoch/validation_ndcg_5'
    """
    return re.sub(r"[^\w\-. /]", "_", key)
