"""Runs in MLflow, and MLflow's client.

An interrupted run is found by the place and the origin of its output, and continues. A run with another origin is never
continued.
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
from ltrscale.errors import ExpectedEnd, InputError, UnavailableError, without_credentials
from ltrscale.origin import digest, settings_of
from ltrscale.stages.trackers import Figures, RefusedError, Tracked, flat, run_name

MLFLOW, EXPERIMENT = "LTRSCALE_MLFLOW", "MLFLOW_EXPERIMENT_NAME"
_REPORTS = ("report.md", "report.html", "metrics.json")
_LONGEST_VALUE, _MOST_PARAMS, _MOST_METRICS = 6000, 100, 1000  # MLflow's limits
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""Limits of a request with figures: MLflow itself would retry for twenty minutes, and the sending thread retries."""
_REFUSED = (400, 404, 409)
_TOO_MANY = 429
_KNOWN_S = 10.0


class MLflowRun:
    """One run in MLflow; the stages of a pipeline are its children."""

    name = "MLflow"
    every_s = 5.0

    def __init__(self, uri: str, run: Tracked) -> None:
        for variable, value in _LIMITS.items():
            os.environ.setdefault(variable, value)
        _check(uri)
        self.place, self._run, self._parent = uri, run, _parent.get()
        self._run_id, self._known = "", threading.Event()
        self._last: dict[str, int] = {}
        """The last step of each metric in MLflow."""

    @contextmanager
    def as_parent(self) -> Iterator[None]:
        """Make runs that begin in the block children of this one."""
        token = _parent.set(self)
        try:
            yield
        finally:
            _parent.reset(token)

    def open(self) -> None:
        """Continue the interrupted run of this output, or begin one."""
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
        """Identifies stage and output; a local output also by its inode, because its path may not be unique."""
        out, inode = self._run.out, 0
        if storage.is_local(out):
            out, inode = str(storage.local_path(out).resolve()), self._run.folder.stat().st_ino
        return digest([without_credentials(out), inode, self._run.stage])

    def _origin(self) -> str:
        return digest(self._run.origin or settings_of(self._run.config))

    def _interrupted(self, experiment: str) -> Any:
        """The unfinished run of this output and origin, set to running again; None if there is none."""
        tagged = f"tags.place = '{self._place()}'"
        newest = ["attributes.start_time DESC"]
        for run in self._client.search_runs([experiment], tagged, max_results=1, order_by=newest):
            if run.info.status != "FINISHED" and run.data.tags["origin"] == self._origin():
                self._client.update_run(run.info.run_id, "RUNNING")
                return run
            if run.info.status == "RUNNING":  # its process is gone, because this one holds the output
                self._client.set_terminated(run.info.run_id, "KILLED")
        return None

    def _send_settings(self, known: Mapping[str, str]) -> None:
        """Log the settings that are not in `known`, because MLflow never changes a setting."""
        from mlflow.entities import Param

        settings = flat(self._run.config.model_dump(mode="json"))
        params = [Param(plain_key(key), value[:_LONGEST_VALUE]) for key, value in settings.items()]
        params = [param for param in params if param.key not in known]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS], synchronous=True)

    def send(self, figures: Sequence[Figures]) -> None:
        """Send new figures; a metric keeps its old values for repeated steps."""
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
        """Set the status first, then send the files, which takes longer."""
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
    except Exception as error:  # from MLflow, or from the database that the URI names
        if "MLFLOW_ALLOW_FILE_STORE" in str(error):
            raise InputError(
                f"{MLFLOW}: {uri} is a folder, which MLflow writes no more; name a database, such as "
                "sqlite:///mlflow.db, or set MLFLOW_ALLOW_FILE_STORE=true"
            ) from error
        line = str(error).strip().partition("\n")[0]
        raise InputError(f"{MLFLOW}: MLflow cannot open {uri} ({line}); check the URI") from error


def _import() -> Any:
    """Import MLflow without telemetry or printing."""
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    try:
        import mlflow
    except ImportError as error:
        raise InputError(f"{MLFLOW}: MLflow is not installed; pip install 'ltrscale[mlflow]'") from error
    return mlflow


def _check(uri: str) -> None:
    """Reject invalid stores without a server; import MLflow before threads do; create the tables of a new file."""
    _import()
    from mlflow.store.db.db_types import DATABASE_ENGINES

    engine = urlsplit(uri).scheme.partition("+")[0]
    if engine == "sqlite":
        with suppress(InputError):  # locked or unreachable for now: the thread retries
            client(uri)
    elif engine not in DATABASE_ENGINES:
        client(uri)


@contextmanager
def patient() -> Iterator[None]:
    """Let MLflow retry as long as it wants in the block, for users who wait for the registration of a model."""
    ours = {name for name, value in _LIMITS.items() if os.environ.get(name) == value}
    for name in ours:
        del os.environ[name]
    try:
        yield
    finally:
        for name in ours:
            os.environ.setdefault(name, _LIMITS[name])


@contextmanager
def mlflow_errors(failed: str) -> Iterator[None]:
    """Turn an error of MLflow in the block, or of its artifact store, into one line that begins with what failed.

    Raises:
        UnavailableError: MLflow or the store does not answer, or fails.
        InputError: MLflow refuses, or the store's library is not installed.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except ExpectedEnd:
        raise
    except MlflowException as error:
        line = str(error).partition("\n")[0]
        status = error.get_http_status_code()  # 500 without an answer too
        if status >= 500 or status == _TOO_MANY:
            raise UnavailableError(f"{failed}: MLflow does not answer ({line}); check the network and store") from error
        raise InputError(f"{failed} ({line})") from error
    except ImportError as error:
        raise InputError(f"{failed}: its artifact store needs a library ({error}); install it") from error
    except Exception as error:  # from the library of any artifact store, such as botocore or requests
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UnavailableError(f"{failed}: its artifact store fails ({line}); check the network and store") from error


def plain_key(key: str) -> str:
    """Replace the characters of a key that MLflow does not allow.

    Example:
        >>> plain_key("full/epoch/validation_ndcg@5")
        'full/epoch/validation_ndcg_5'
    """
    return re.sub(r"[^\w\-. /]", "_", key)
