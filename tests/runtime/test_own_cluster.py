"""A cluster that a job starts for itself: who can reach it, who can see its files, and how it ends."""

import ipaddress
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from ltrscale.tuning.history import History, ended

pytestmark = [pytest.mark.slow, pytest.mark.ray]

TESTS = Path(__file__).resolve().parents[1]
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A process with a cluster and two workers, and the record that they write."""
    folder = tmp_path_factory.mktemp("driver")
    command = [sys.executable, str(TESTS / "cluster_sockets.py"), str(folder / "found.json")]
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    environment["PYTHONPATH"] = str(TESTS.parent)
    with (folder / "said").open("w") as said, subprocess.Popen(command, env=environment, stderr=said) as process:
        try:
            wait_until(lambda: (folder / "found.json").exists() or process.poll() is not None)
            assert process.poll() is None, (folder / "said").read_text()
            yield process, json.loads((folder / "found.json").read_text())
        finally:
            process.kill()


def test_nobody_elsewhere_can_reach_it(driver: tuple[subprocess.Popen[bytes], dict[str, Any]]) -> None:
    listening = driver[1]["listening"]
    names = " ".join(name for _, _, name in listening)
    for part in ("gcs_server", "raylet", "DashboardAgent", "RayTrainWorker"):
        assert part in names
    assert [entry for entry in listening if not ipaddress.ip_address(entry[0]).is_loopback] == []


def test_nobody_is_served_without_its_token(driver: tuple[subprocess.Popen[bytes], dict[str, Any]]) -> None:
    found = driver[1]
    code = f"from ray._raylet import GcsClient; GcsClient(address={found['gcs']!r})"
    for token, served in ((Path(found["token"]).read_text(), True), ("0" * 64, False)):
        shell = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        done = subprocess.run([sys.executable, "-c", code], env=shell, capture_output=True, text=True, timeout=LIMIT_S)
        assert (done.returncode == 0) == served, done.stderr
        assert ("InvalidAuthToken" in done.stderr) != served


def test_its_files_are_their_owners_and_go_after_a_kill(
    driver: tuple[subprocess.Popen[bytes], dict[str, Any]],
) -> None:
    process, found = driver
    session, token = Path(found["session"]), Path(found["token"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    own = token.parent.parent
    assert session.is_relative_to(token.parent)
    for folder in (token.parent, own, own.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    makes = f"from ltrscale.storage import scratch; scratch.make(longest={len(str(token.parent))})"
    start = [sys.executable, "-c", makes]
    subprocess.run(start, timeout=LIMIT_S, check=True)
    assert session.is_dir()  # its process lives
    process.send_signal(signal.SIGKILL)
    process.wait(LIMIT_S)
    # Ray's agents report the death of the raylet to the GCS before they exit, and retry for a minute.
    others = [pid for pid, name in found["processes"] if "Agent" not in name]
    assert len(others) > 8
    wait_until(lambda: not [pid for pid in others if Path(f"/proc/{pid}").exists()])
    subprocess.run(start, timeout=LIMIT_S, check=True)  # any process that makes a place removes those of the dead
    assert not own.exists()


_STOPPED_IN_A_FORK = """
import logging, os, signal
from ltrscale.runtime.engine import ray_cluster
from ltrscale.errors import Stopped

def stop(number, frame):
    raise Stopped("asked to stop")

signal.signal(signal.SIGTERM, stop)
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
try:
    with ray_cluster(1):
        print("not stopped")
except Stopped:
    print("stopped")
"""


@pytest.mark.nightly
def test_a_request_to_stop_that_comes_in_a_fork_of_ray_is_heard() -> None:
    """In fork hooks, Python drops exceptions of signal handlers, and with them the release of logging's lock."""
    done = _run(_STOPPED_IN_A_FORK)
    assert (done.stdout, done.stderr) == ("stopped\n", "")


_STOPPED_WHILE_RAY_WAITS = """
import os, signal, threading, time
import ray
from jobs.cli import Command, main
from ltrscale.config import Config
from ltrscale.runtime.engine import ray_cluster

class Call(Config):
    call: str

def wait(config):
    with ray_cluster(1):
        endless = ray.remote(lambda: time.sleep(1000)).remote()
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        ray.get(endless) if config.call == "get" else ray.wait([endless])

main(Command("wait", lambda: (Call, wait), "A test."))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("call", ["get", "wait"])
def test_a_request_to_stop_that_comes_while_ray_waits_is_heard_at_once(call: str) -> None:
    done = _run(_STOPPED_WHILE_RAY_WAITS, f"--set=call={call}")
    # On a busy machine, the core of Ray logs an error of its own when it is left while a task runs.
    lines = [line for line in done.stderr.splitlines() if "task_manager.cc" not in line]
    stopped = "stopped: asked to stop; the same command does what is left to do"
    assert (done.returncode, lines) == (143, [stopped])


_STOPPED_WHILE_RAY_STARTS = """
import os, signal, time
import ray
from ltrscale.runtime.engine import ray_cluster
from ltrscale.signals import stop_on_signal

init = ray.init

def begin(**options):
    init(**options)
    os.kill(os.getpid(), signal.SIGTERM)  # which the core of Ray handles from its start on

ray.init = begin
with stop_on_signal() as stop_requested, ray_cluster(1):
    time.sleep(6)
    print("stopped" if stop_requested() else "not asked", flush=True)
"""


@pytest.mark.nightly
def test_a_request_to_stop_that_comes_while_ray_starts_leaves_the_time_for_a_checkpoint() -> None:
    done = _run(_STOPPED_WHILE_RAY_STARTS)
    assert (done.stdout, done.returncode) == ("stopped\n", -15), done.stderr


_NODE_DIES = """
import os, signal, sys, threading, time
import ray
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.ray_internals import needed_processes
from ltrscale.errors import UnavailableError

@ray.remote
def endless():
    time.sleep(1000)

try:
    with ray_cluster(1):
        (killed,) = [process for process in needed_processes() if process.name() == sys.argv[1]]
        pending = [endless.remote()]
        threading.Timer(1, os.kill, (killed.pid, signal.SIGKILL)).start()
        while pending:  # as Ray Tune waits, for a node that never comes
            _, pending = ray.wait(pending, timeout=0.1)
            pending = pending or [endless.remote()]
except UnavailableError as error:
    print(error)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("process", ["raylet", "ray::DashboardAgent", "gcs_server", "ray::RuntimeEnvAgent"])
def test_when_the_only_node_dies_the_job_ends_with_one_line(process: str) -> None:
    said = _run(_NODE_DIES, process).stdout  # after what Ray has to say of it
    assert said.endswith("Ray's processes on this machine have died; give the same command again\n")


_LEAVES_A_PROCESS = """
import subprocess
import ray
from ltrscale.runtime.engine import ray_cluster

@ray.remote
def start():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

with ray_cluster(1):
    print(ray.get(start.remote()))
"""


def test_no_process_outlives_it() -> None:
    process = Path("/proc", _run(_LEAVES_A_PROCESS).stdout.split()[-1])
    wait_until(lambda: not process.exists() or not (process / "cmdline").read_bytes())  # a zombie has no command line


_NODE_DIES_IN_A_SEARCH = """
import os, signal, sys, threading, time
import ray
from ltrscale.origin import digest
from ltrscale.errors import UnavailableError
from ltrscale.tuning.history import History
from ltrscale.tuning.space import SearchConfig
from ltrscale.tuning.tune import Search
from tuning_trials import slow

history = History(sys.argv[1])
history.open({})
config = SearchConfig.model_validate({"space": {"x": {"choices": [*range(9)]}}, "trials": 3, "concurrent": 1})

def kill():
    while history.result(0) is None:
        time.sleep(0.1)
    (raylet,) = ray._private.worker._global_node.all_processes["raylet"]
    os.kill(raylet.process.pid, signal.SIGKILL)

if sys.argv[2] == "killed":
    threading.Thread(target=kill, daemon=True).start()
try:
    Search(config, slow, history, {"x": 1}, digest).run(lambda _: None)
except UnavailableError as error:
    print(error)
"""


@pytest.mark.nightly
def test_a_search_whose_node_dies_ends_with_one_line_and_resumes(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    said = _run(_NODE_DIES_IN_A_SEARCH, str(tmp_path), "killed").stdout
    assert said.endswith("Ray's processes on this machine have died; give the same command again\n")
    assert len(ended(history.trials())) < 3
    assert _run(_NODE_DIES_IN_A_SEARCH, str(tmp_path), "alone").returncode == 0
    assert len(ended(history.trials())) == 3


_MEMORY_RUNS_LOW = """
import os, sys, time
if sys.argv[1] != "killed":  # the node's memory is never low enough
    os.environ |= {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "500"}
    os.environ["RAY_task_oom_retries"] = "1"
from ltrscale.errors import ExpectedEnd
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.launch import launch
from ltrscale.runtime.on_ray import run_with_ray
from ltrscale.runtime.workers import WorkersConfig

def work(what):
    if what == "killed":
        os.kill(os.getpid(), 9)
    time.sleep(1000)

try:
    with ray_cluster(3):
        if sys.argv[1] == "training":
            launch(work, workers=WorkersConfig(number=2), report=print)
        else:
            list(run_with_ray(work, [sys.argv[1]]))
except ExpectedEnd as error:
    print(error)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("killed", "handled a part of the data ended several times .*; look for its end .* give Ray fewer CPUs"),
        ("low", r"ended several times \(.*running low on memory.*; look for its end in .* give Ray fewer CPUs"),
        ("training", r"the process that passes on .* killed for memory \(.*low on memory.*; the same command resumes"),
    ],
    ids=["killed", "low", "training"],
)
def test_processes_that_are_killed_for_memory_end_the_job_with_one_line(what: str, said: str) -> None:
    done = _run(_MEMORY_RUNS_LOW, what)  # after what Ray has to say of it
    assert re.search(said, done.stdout.splitlines()[-1]), done.stdout + done.stderr


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**environment, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
