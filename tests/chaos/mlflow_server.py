"""A tracking server: MLflow's own store and messages behind the few requests that a run makes of it.

MLflow's server needs the whole package, whose pins of libraries are older than ours; its client, its store and the
files of its database are the real ones here.
"""

import json
import threading
import warnings
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

from mlflow import MlflowException
from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.protos import service_pb2 as messages
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST
from mlflow.utils.proto_json_utils import message_to_json, parse_dict

_API = "/api/2.0/mlflow/"
_MOST_RUNS = 10_000
_DONE_EACH_TIME = {"gate", "tune", "weekly"}


class TrackingServer:
    """Serves the runs in a database below a folder, at `url` on loopback; a context manager."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.database = f"sqlite:///{folder}/mlflow.db"
        with warnings.catch_warnings(action="ignore"):  # of MLflow's use of SQLAlchemy
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            self._store = SqlAlchemyStore(self.database, str(folder / "artifacts"))
        handler = type("Handler", (_Handler,), {"store": self._store, "lock": threading.Lock()})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        serve = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        serve.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def tracked_twice(self) -> list[str]:
        """The outputs of which a run was begun anew where an earlier one should go on, with their stages.

        A run that has finished may be followed by one of the same origin only where the job does its work each time.
        """
        experiments = [str(each.experiment_id) for each in self._store.search_experiments()]
        runs = self._store.search_runs(experiments, "", ViewType.ALL, _MOST_RUNS)
        again: set[str] = set()
        places: dict[str, list[Any]] = {}
        for run in sorted(runs, key=lambda run: run.info.start_time):
            places.setdefault(run.data.tags["place"], []).append(run)
        for earlier, later in (pair for of_place in places.values() for pair in pairwise(of_place)):
            stage, is_same = later.data.tags["stage"], earlier.data.tags["origin"] == later.data.tags["origin"]
            if is_same and (earlier.info.status != "FINISHED" or stage not in _DONE_EACH_TIME):
                again.add(f"{later.data.tags['out']} ({stage})")
        return sorted(again)


def _experiment_by_name(store: Any, asked: Any) -> Any:
    if (found := store.get_experiment_by_name(asked.experiment_name)) is None:
        raise MlflowException(f"no experiment {asked.experiment_name}", error_code=RESOURCE_DOES_NOT_EXIST)
    return messages.GetExperimentByName.Response(experiment=found.to_proto())


def _create_experiment(store: Any, asked: Any) -> Any:
    return messages.CreateExperiment.Response(experiment_id=store.create_experiment(asked.name))


def _create_run(store: Any, asked: Any) -> Any:
    tags = [RunTag(tag.key, tag.value) for tag in asked.tags]
    run = store.create_run(asked.experiment_id, asked.user_id, asked.start_time, tags, asked.run_name)
    return messages.CreateRun.Response(run=run.to_proto())


def _search_runs(store: Any, asked: Any) -> Any:
    found = store.search_runs(
        list(asked.experiment_ids), asked.filter, ViewType.ACTIVE_ONLY, asked.max_results, list(asked.order_by)
    )
    return messages.SearchRuns.Response(runs=[run.to_proto() for run in found])


def _get_run(store: Any, asked: Any) -> Any:
    return messages.GetRun.Response(run=store.get_run(asked.run_id).to_proto())


def _update_run(store: Any, asked: Any) -> Any:
    end_time = asked.end_time if asked.HasField("end_time") else None
    info = store.update_run_info(asked.run_id, asked.status, end_time, asked.run_name or None)
    return messages.UpdateRun.Response(run_info=info.to_proto())


def _log_batch(store: Any, asked: Any) -> Any:
    metrics, params = map(Metric.from_proto, asked.metrics), map(Param.from_proto, asked.params)
    store.log_batch(asked.run_id, list(metrics), list(params), [RunTag.from_proto(tag) for tag in asked.tags])
    return messages.LogBatch.Response()


_ANSWERS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "experiments/get-by-name": (messages.GetExperimentByName, _experiment_by_name),
    "experiments/create": (messages.CreateExperiment, _create_experiment),
    "runs/create": (messages.CreateRun, _create_run),
    "runs/search": (messages.SearchRuns, _search_runs),
    "runs/get": (messages.GetRun, _get_run),
    "runs/update": (messages.UpdateRun, _update_run),
    "runs/log-batch": (messages.LogBatch, _log_batch),
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ClassVar[Any]
    lock: ClassVar[threading.Lock]

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        message, answer = _ANSWERS.get(parts.path.removeprefix(_API), (None, None))
        if message is None or answer is None:
            self._answer(404, json.dumps({"error_code": "ENDPOINT_NOT_FOUND", "message": parts.path}))
            return
        asked = message()
        parse_dict(json.loads(body or b"{}") or dict(parse_qsl(parts.query)), asked)
        try:
            with self.lock:  # SQLite has one writer
                text = message_to_json(answer(self.store, asked))
        except MlflowException as error:
            self._answer(error.get_http_status_code(), error.serialize_as_json())
        else:
            self._answer(200, text)

    do_GET = do_POST = _serve

    def _answer(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
