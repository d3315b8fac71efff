"""Ray Train's controller: neither it nor what it has reserved outlives a run, however this ends."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping

import pytest
from ray._private.state import actors
from ray.util import placement_group, placement_group_table, remove_placement_group
from waiting import wait_until

from ltrscale.errors import Stopped, UnavailableError
from ltrscale.progress import Report
from ltrscale.runtime.under_ray import train
from ltrscale.runtime.workers import WorkersConfig
from ltrscale.signals import ending_by

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def run(report: Report = lambda _: None) -> None:
    """Runs two workers that never end."""
    train(lambda _: time.sleep(3600), WorkersConfig(number=2), report, elastic=False)


def reserved() -> set[str]:
    """The placement groups of the cluster that have or wait for capacity."""
    return {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}


def controllers() -> list[int]:
    """The process ids of the controllers of Ray Train."""
    return [
        actor["Pid"]
        for actor in actors().values()
        if actor["ActorClassName"] == "TrainController" and actor["State"] != "DEAD"
    ]


@pytest.fixture
def full() -> Iterator[None]:
    """A cluster whose CPUs are all taken."""
    taken = placement_group([{"CPU": 4}])
    assert taken.wait(600)
    yield
    remove_placement_group(taken)


@pytest.mark.usefixtures("full")
@pytest.mark.nightly
@pytest.mark.parametrize("when", ["at once", "waiting"])
def test_a_stop_before_there_are_workers_ends_the_controller(when: str) -> None:
    before = reserved()

    def stop() -> None:
        wait_until(lambda: reserved() > before)
        os.kill(os.getpid(), signal.SIGTERM)

    if when == "waiting":
        threading.Thread(target=stop, daemon=True).start()
    limit = ending_by(time.monotonic() + (3600 if when == "waiting" else 0))
    with pytest.raises(Stopped, match="no worker was running"), limit:
        run()
    assert reserved() == before
    assert not controllers()


@pytest.mark.nightly
def test_a_dead_controller_ends_the_run_with_one_line_and_keeps_no_room() -> None:
    others = placement_group([{"CPU": 0.5}])
    assert others.wait(600)

    def kill(record: Mapping[str, object]) -> None:
        if record.get("running_workers") == 2:
            (pid,) = controllers()
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(UnavailableError, match=r"^Ray Train's controller has died, .* the same command resumes from"):
        run(kill)
    assert reserved() == {others.id.hex()}
    remove_placement_group(others)
    assert "RayTrainWorker" not in {actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"}
