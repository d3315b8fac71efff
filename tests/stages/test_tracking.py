"""Tracking costs telemetry only, whatever the server does; what arrives is there once, in order, and under one run."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from made_once import MadeOnce
from nightly import nightly
from waiting import wait_until

from ltrscale import storage
from ltrscale.config import Config, Operational
from ltrscale.errors import InputError, Stopped
from ltrscale.progress import Report
from ltrscale.stages import mlflow_runs, tracking
from ltrscale.stages.metrics_file import MetricsFile
from ltrscale.stages.mlflow_runs import MLFLOW
from ltrscale.stages.stage import Origin, Stage
from ltrscale.stages.trackers import TENSORBOARD
from tests.chaos.faulty_proxy import BROKEN, FaultyProxy
from tests.chaos.mlflow_server import TrackingServer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

KEPT = "kept.txt"


class Settings(Config):
    width: int = 3
    threads: Operational[int] = 1


class Example(Stage):
    """A stage that calls a function of the test."""

    stage: ClassVar[str] = "example"
    settings: Settings = Settings()
    _body: Callable[[Report], None]

    def inputs(self) -> dict[str, str]:
        return {}

    def work(self, origin: Origin, report: Report) -> None:
        self._body(report)
        with storage.Commit(self.out) as commit:
            with commit.file(KEPT) as path:
                path.write_text("result")
            commit.finish({"made_by": origin})


def run(out: Path, body: Callable[[Report], None], **settings: int) -> None:
    example = Example(out=str(out), settings=Settings(**settings))
    example._body = body
    example.run()
    assert (out / KEPT).read_text() == "result"


def steps(first: int, last: int) -> Callable[[Report], None]:
    def body(report: Report) -> None:
        for step in range(first, last + 1):
            report({"step": step, "loss": 1 / step})

    return body


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a server that answers all the time that it needs at the end of a run."""
    monkeypatch.setattr(tracking, "_SILENT_S", 250.0)
    monkeypatch.setattr(tracking, "_END_S", 250.0)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_SILENT_S", 0.2)


@pytest.fixture(scope="session")
def empty_store(made_once: MadeOnce) -> Path:
    """A folder with MLflow's tables, which take seconds to make."""

    def make(folder: Path) -> None:
        with TrackingServer(folder):
            pass

    return made_once("mlflow", make)


@pytest.fixture
def server(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackingServer]:
    shutil.copytree(empty_store, tmp_path / "tracking")
    monkeypatch.setattr(tracking, "_FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(mlflow_runs.MLflowRun, "every_s", 0.0)
    monkeypatch.setattr(tracking, "_silent", set())
    with TrackingServer(tmp_path / "tracking") as server:
        monkeypatch.setenv(MLFLOW, server.url)
        yield server


@pytest.fixture
def proxy(server: TrackingServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.url, 0.0) as proxy:
        monkeypatch.setenv(MLFLOW, proxy.url)
        yield proxy


def runs(server: TrackingServer) -> list[Any]:
    """The runs at the server, the oldest first."""
    client = mlflow_runs.client(server.database)
    if (experiment := client.get_experiment_by_name("ltrscale")) is None:
        return []
    return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]))


def history(server: TrackingServer, run_id: str, key: str = "example/step/loss") -> list[tuple[int, float]]:
    points = mlflow_runs.client(server.database).get_metric_history(run_id, key)
    return [(point.step, point.value) for point in sorted(points, key=lambda point: (point.timestamp, point.step))]


def losses(first: int, last: int) -> list[tuple[int, float]]:
    return [(step, 1 / step) for step in range(first, last + 1)]


# --- a server that is no good


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("since", "fault"),
    [
        ("start", "gone"),
        ("middle", BROKEN),
        *(nightly("start", fault) for fault in ("hang", "reset", BROKEN)),
        *(nightly("middle", fault) for fault in ("hang", "gone", "reset")),
    ],
)
def test_a_run_ends_while_its_server_does_not_answer(
    proxy: FaultyProxy, server: TrackingServer, tmp_path: Path, fault: Any, since: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        proxy.share = 1.0
        if fault == "gone":
            proxy.close()

    def body(report: Report) -> None:
        steps(1, 5)(report)
        if since == "middle":
            wait_until(lambda: runs(server) and len(history(server, runs(server)[0].info.run_id)) == 5 and proxy.idle)
            fail()  # after the answer, without which no client can know that its figures arrived
        steps(6, 50)(report)

    proxy.fault = "reset" if fault == "gone" else fault
    if since == "start":
        fail()
    run(tmp_path / "out", body)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert 1 <= len(said) <= 2
    assert all(line.startswith(f"MLflow in {proxy.url}: ") for line in said)
    lost = 50 if since == "start" else 45
    assert said[-1].endswith(f"; {lost} of 50 figures and the end of this run did not arrive")


@pytest.mark.usefixtures("hurried")
def test_the_next_runs_do_not_wait_for_a_server_that_was_silent(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.fault, proxy.share = "hang", 1.0
    run(tmp_path / "first", steps(1, 5))
    monkeypatch.setattr(tracking, "_SILENT_S", 3600.0)
    monkeypatch.setattr(tracking, "_END_S", 3600.0)
    run(tmp_path / "second", steps(1, 5))


@pytest.mark.usefixtures("unhurried")
def test_what_waited_arrives_once_the_server_is_back(
    proxy: FaultyProxy, server: TrackingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(report: Report) -> None:
        for first in range(1, 60, 10):
            proxy.fault, proxy.share = ("reset", BROKEN, "cut")[first // 10 % 3], float(first // 10 % 2 == 0)
            failed = proxy.failed
            steps(first, first + 9)(report)
            if proxy.share:
                wait_until(lambda: proxy.failed > failed)  # noqa: B023 - it is over before the next turn

    run(tmp_path / "out", body)
    (found,) = runs(server)
    assert found.info.status == "FINISHED"
    assert history(server, found.info.run_id) == losses(1, 60)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.usefixtures("unhurried")
def test_a_slow_server_gets_all_and_each_step_once(proxy: FaultyProxy, server: TrackingServer, tmp_path: Path) -> None:
    answers = threading.Semaphore(0)

    def slow(_method: str, _path: str) -> bool:
        answers.acquire()
        return False

    proxy.match = slow
    over = threading.Event()

    def release() -> None:
        while not over.wait(0.02):
            answers.release()

    def body(report: Report) -> None:
        steps(1, 300)(report)  # while nothing has been answered yet
        steps(200, 500)(report)  # as workers do that start again
        threading.Thread(target=release, daemon=True).start()

    run(tmp_path / "out", body)
    over.set()
    (found,) = runs(server)
    assert history(server, found.info.run_id) == losses(1, 500)


@pytest.mark.usefixtures("unhurried")
def test_what_waits_is_bounded_and_what_is_lost_is_counted(
    proxy: FaultyProxy,
    server: TrackingServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tracking, "_MOST_WAITING", 30)
    proxy.fault, proxy.share = "hang", 1.0

    def body(report: Report) -> None:
        steps(1, 1000)(report)
        proxy.share = 0.0

    run(tmp_path / "out", body)
    (found,) = runs(server)
    assert (found.info.status, history(server, found.info.run_id)) == ("FINISHED", losses(1, 30))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said[-1].endswith("; 970 of 1,000 figures of this run did not arrive")


@pytest.mark.usefixtures("unhurried")
def test_figures_that_the_server_refuses_do_not_stop_the_others(
    server: TrackingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(report: Report) -> None:
        report({"n" * 300: 1.0})  # a name that MLflow does not take
        wait_until(lambda: "refused" in caplog.text)
        steps(1, 6)(report)

    run(tmp_path / "out", body)
    (found,) = runs(server)
    assert (found.info.status, history(server, found.info.run_id)) == ("FINISHED", losses(1, 6))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said[-1].endswith("; 1 of 7 figures of this run did not arrive")


def test_a_server_that_is_down_at_the_start_ends_a_job_only_if_it_is_required(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "_OPEN_S", 1.0)
    monkeypatch.setattr(tracking, "_SILENT_S", 0.2)
    proxy.close()
    run(tmp_path / "one", steps(1, 2))
    monkeypatch.setenv(tracking.REQUIRED, "true")
    caplog.clear()
    with pytest.raises(
        InputError, match=rf"MLflow in {proxy.url}: .*refused; start it, or unset {tracking.REQUIRED}"
    ) as error:
        run(tmp_path / "other", steps(1, 2))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "other" / KEPT).exists()
    assert caplog.messages == []  # the error says all
    proxy.open()
    monkeypatch.setattr(tracking, "_OPEN_S", 250.0)
    run(tmp_path / "other", steps(1, 2))
    monkeypatch.setenv(tracking.REQUIRED, "perhaps")
    with pytest.raises(InputError, match=f"{tracking.REQUIRED}: 'perhaps' is neither true nor false"):
        run(tmp_path / "third", steps(1, 2))


def test_a_folder_that_mlflow_does_not_write_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for uri in (f"file://{tmp_path}/mlruns", str(tmp_path / "mlruns")):
        monkeypatch.setenv(MLFLOW, uri)
        with pytest.raises(
            InputError, match=r"is a folder, .* name a database, such as sqlite:///mlflow.db, or set MLF"
        ):
            run(tmp_path / "out", steps(1, 2))


def test_who_registers_a_model_has_the_patience_of_mlflow(
    server: TrackingServer,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in mlflow_runs._LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the user's

    def limits() -> tuple[str | None, str | None]:
        return os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT"), os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES")

    def body(_: Report) -> None:
        assert limits() == ("10", "3")
        with mlflow_runs.patient():
            assert limits() == (None, "3")
        assert limits() == ("10", "3")

    run(tmp_path / "out", body)


ENDS = """
import json, os, socket, sys, threading
from pathlib import Path
from ltrscale.stages import tracking
sys.path.insert(0, sys.argv[1])
import test_tracking as tests
tracking._SILENT_S = 0.2
tests.run(Path(sys.argv[2]), tests.steps(1, 5))
print("done", [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()], flush=True)
"""


@pytest.mark.nightly
def test_a_process_ends_although_a_thread_still_waits_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(MLFLOW, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3600")
        command = [sys.executable, "-c", ENDS, str(Path(__file__).parent), str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "done ['tracking in MLflow']"), done.stderr


# --- one run for one output


DIES = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_tracking as tests
from ltrscale.stages import mlflow_runs
mlflow_runs.MLflowRun.every_s = 0.0

def body(report):
    tests.steps(1, 5)(report)
    print("reported", flush=True)
    signal.pause()

tests.run(Path(sys.argv[2]), body)
"""


def killed(out: Path, arrived: Callable[[], object]) -> None:
    """Run five steps in a process that is killed once these have arrived."""
    command = [sys.executable, "-c", DIES, str(Path(__file__).parent), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reported\n"
        wait_until(arrived)
        process.send_signal(signal.SIGKILL)


@pytest.mark.usefixtures("unhurried")
def test_a_resumed_run_goes_on_in_mlflow_where_it_was(server: TrackingServer, tmp_path: Path) -> None:
    def last_step() -> int:
        found = runs(server)
        return max([step for step, _ in history(server, found[0].info.run_id)], default=0) if found else 0

    out = tmp_path / "out"
    killed(out, lambda: last_step() == 5)
    assert [found.info.status for found in runs(server)] == ["RUNNING"]

    def stopped(report: Report) -> None:
        steps(4, 8)(report)
        wait_until(lambda: last_step() == 8)
        raise Stopped

    def failing(report: Report) -> None:
        steps(7, 10)(report)
        raise InputError("no good")

    for body, error, status in ((stopped, Stopped, "KILLED"), (failing, InputError, "FAILED")):
        with pytest.raises(error):
            run(out, body, threads=2)
        assert [found.info.status for found in runs(server)] == [status]
    run(out, steps(9, 12), threads=3)
    (found,) = runs(server)
    assert found.info.status == "FINISHED"
    assert found.data.tags["out"] == str(out)
    assert history(server, found.info.run_id) == losses(1, 12)
    assert (found.data.params["settings.width"], found.data.params["settings.threads"]) == ("3", "1")


@pytest.mark.nightly
@pytest.mark.usefixtures("unhurried")
def test_a_run_of_other_settings_is_another_and_the_one_before_is_over(server: TrackingServer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed(out, lambda: runs(server))
    run(out, steps(1, 3), width=4)
    assert [found.info.status for found in runs(server)] == ["KILLED", "FINISHED"]
    run(out, steps(1, 3), width=3)
    run(tmp_path / "next", steps(1, 3), width=3)
    assert [found.info.status for found in runs(server)] == ["KILLED", "FINISHED", "FINISHED", "FINISHED"]
    assert [history(server, found.info.run_id) for found in runs(server)[1:]] == [losses(1, 3)] * 3
    assert server.tracked_twice() == []
    (out / "manifest.json").unlink()
    run(out, steps(1, 3), width=3)
    assert server.tracked_twice() == [f"{out} (example)"], "chaos looks for such runs"


@pytest.mark.usefixtures("unhurried")
def test_a_child_knows_its_parent_although_neither_waits_for_the_server(server: TrackingServer, tmp_path: Path) -> None:
    from ltrscale.stages.runs import recorded

    with recorded(str(tmp_path / "whole"), Settings(), "pipeline"):
        run(tmp_path / "whole" / "part", steps(1, 2))
    by_stage = {found.data.tags["stage"]: found for found in runs(server)}
    assert by_stage["example"].data.tags["mlflow.parentRunId"] == by_stage["pipeline"].info.run_id
    assert "mlflow.parentRunId" not in by_stage["pipeline"].data.tags


# --- TensorBoard


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, round(event.value, 4)) for event in events.Scalars(name)]


@pytest.mark.usefixtures("unhurried")
def test_tensorboard_has_each_step_and_epoch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    monkeypatch.setenv(TENSORBOARD, str(tmp_path / "events"))
    out = tmp_path / "out"
    folder = tmp_path / "events" / str(out).strip("/")

    def training(first: int, last: int) -> Callable[[Report], None]:
        def body(report: Report) -> None:
            for step in range(first, last + 1):
                report({"step": step, "loss": 1 / step})
                if step % 3 == 0:
                    report({"epoch": step // 3, "loss": step})
            if last < 12:
                raise Stopped

        return body

    for first, last in ((1, 7), (5, 10), (2, 8)):
        with pytest.raises(Stopped):
            run(out, training(first, last))
    run(out, training(7, 12))
    assert scalars(folder, "example/step/loss") == [(step, round(1 / step, 4)) for step in range(1, 13)]
    assert scalars(folder, "example/epoch/loss") == [(epoch, 3.0 * epoch) for epoch in range(1, 5)]
    with pytest.raises(Stopped):  # another run of the same name
        run(out, training(1, 4), width=4)
    assert scalars(folder, "example/step/loss") == [(step, round(1 / step, 4)) for step in range(1, 5)]
    assert scalars(folder, "example/epoch/loss") == [(1, 3.0)]
    (out / "run" / "metrics.jsonl").unlink()
    with pytest.raises(Stopped):  # the output was removed meanwhile
        run(out, training(1, 2), width=4)
    assert scalars(folder, "example/step/loss") == [(1, 1.0), (2, 0.5)]


@pytest.mark.nightly
def test_no_step_waits_for_a_tracker_that_never_comes_back_from_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_MOST_WAITING", 100)
    stuck, go_on = threading.Event(), threading.Event()

    class Stuck:
        name, place, every_s = "Stuck", "nowhere", 0.0

        def open(self) -> None:
            stuck.set()
            go_on.wait()
            raise ConnectionError

    follower = tracking._Follower(Stuck(), required=False)  # type: ignore[arg-type]
    stuck.wait()
    with MetricsFile(tmp_path / "metrics.jsonl", "example", lambda _: None) as file:
        for step in range(1, 1000):
            point = file.append({"step": step})
            follower.report(tracking.Figures(point, {"loss": 0.0}, 0.0))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 999
    assert len(follower._waiting) == tracking._MOST_WAITING
    go_on.set()
    follower.end(tmp_path, "KILLED")
