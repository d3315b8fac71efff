"""Tasks that need others: their order, and what the failure of one means for the rest."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from ltrscale.errors import InputError, UnavailableError
from ltrscale.stages.tasks import Costs, Task, TaskWorkersConfig, run_all

HERE = TaskWorkersConfig(number=0)


def touch(folder: Path, name: str) -> None:
    with (folder / "log").open("a") as log:
        log.write(f"{name} {os.getpid()}\n")


def fail() -> None:
    raise InputError("no such file; make it")


def meet_outage() -> None:
    raise UnavailableError("bucket: no answer")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait(folder: Path, name: str) -> None:
    """Touch, then wait until another task has, too: ends only if both run at once."""
    touch(folder, name)
    wait_until(lambda: len((folder / "log").read_text().splitlines()) == 2)


def run(tasks: list[Task], workers: TaskWorkersConfig) -> dict[str, str | None]:
    ended: dict[str, str | None] = {}

    def end(task: Task, failure: str | None, seconds: float) -> None:
        assert task.name not in ended
        assert seconds >= 0
        ended[task.name] = failure

    run_all(tasks, workers, end)
    return ended


def some(folder: Path) -> list[Task]:
    """Two chains, one of which fails at its beginning."""

    def task(name: str, *needs: str) -> Task:
        return Task(name, functools.partial(touch, folder, name), needs)

    return [Task("bad", fail), task("a"), task("after bad", "bad"), task("b", "a"), task("last", "b", "after bad")]


def check(ended: dict[str, str | None], folder: Path) -> None:
    assert ended == {
        "bad": "no such file; make it",
        "a": None,
        "after bad": "needs bad, which failed",
        "b": None,
        "last": "needs after bad, which failed",
    }
    assert [line.split()[0] for line in (folder / "log").read_text().splitlines()] == ["a", "b"]


def test_a_failed_task_is_named_and_only_those_that_need_it_are_given_up(tmp_path: Path) -> None:
    check(run(some(tmp_path), HERE), tmp_path)


def test_a_defect_is_a_failure_too(tmp_path: Path) -> None:
    tasks = [Task("defect", functools.partial(int, "x")), Task("other", functools.partial(touch, tmp_path, "other"))]
    ended = run(tasks, HERE)
    assert ended["other"] is None
    assert str(ended["defect"]).startswith("ValueError: invalid literal")


@pytest.mark.parametrize(
    "workers", [HERE, pytest.param(TaskWorkersConfig(number=2, cpus=0.5), marks=[pytest.mark.ray, pytest.mark.nightly])]
)
def test_an_outage_is_no_failure_of_a_task_and_ends_the_run(workers: TaskWorkersConfig) -> None:
    ended: list[str] = []
    tasks = [Task("first", meet_outage), Task("needs it", fail, ("first",))]
    with pytest.raises(UnavailableError, match=r"^bucket: no answer$"):
        run_all(tasks, workers, lambda task, *_: ended.append(task.name))
    assert ended == []


def test_costs_are_predicted_by_tasks_of_their_kind_and_size() -> None:
    long = [Task(f"long {i}", fail, kind="pretraining") for i in range(2)]
    small = [Task(f"small {i}", fail, kind="trees", size=10) for i in range(2)]
    large = [Task(f"large {i}", fail, kind="trees", size=100) for i in range(2)]
    costs = Costs([*long, *small, *large])
    assert costs.done(long[0], 100, 100) == pytest.approx(100 / (100 + 5 * 100)), "no other is known"
    assert costs.done(small[0], 1, 1) == pytest.approx(101 / (101 + 100 + 1 + 2 * 10)), "in proportion to the size"
    assert costs.done(large[0], 5, 5) == pytest.approx(106 / (106 + 100 + 1 + 5)), "measured at this size"
    assert costs.done(small[1], 0, 3) == pytest.approx(106 / (106 + 100 + 5)), "it was up to date"
    assert costs.done(long[1], 100, 100) == pytest.approx(206 / (206 + 5))
    assert costs.done(large[1], 5, 5) == 1.0


def note_priority(folder: Path) -> None:
    (folder / "nice").write_text(str(os.nice(0)))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_tasks_run_in_processes_at_once_and_a_dead_process_is_one_failure(tmp_path: Path) -> None:
    for name in ("some", "both"):
        (tmp_path / name).mkdir()
    both = [Task(name, functools.partial(wait, tmp_path / "both", name)) for name in "xy"]
    others = [Task("dead", die), Task("nice", functools.partial(note_priority, tmp_path)), *both]
    ended = run([*some(tmp_path / "some"), *others], TaskWorkersConfig(number=2, cpus=0.5))
    assert str(ended.pop("dead")).startswith("dead: its process ended several times")
    assert [ended.pop(name) for name in ("nice", "x", "y")] == [None] * 3
    check(ended, tmp_path / "some")
    pids = {line.split()[1] for line in (tmp_path / "both" / "log").read_text().splitlines()}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids
    assert int((tmp_path / "nice").read_text()) == os.nice(0), "they have the priority of the process that starts them"


_LONG = """
import functools, sys, time
from ltrscale.errors import Stopped
from ltrscale.stages.tasks import Task, TaskWorkersConfig, run_all
tasks = [Task("quick", functools.partial(time.sleep, 0)), Task("long", functools.partial(time.sleep, 500))]
try:
    run_all(tasks, TaskWorkersConfig(number=2, cpus=0.5), lambda task, *_: print(task.name, flush=True))
except Stopped as error:
    sys.exit(f"stopped: {error}")
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_request_to_stop_ends_tasks_that_are_no_training_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", _LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "quick\n"
        process.terminate()
        _, errors = process.communicate(timeout=90)
    finally:
        process.kill()
    assert errors.splitlines()[-1] == "stopped: asked to stop; the same command resumes"
