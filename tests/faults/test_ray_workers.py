"""Workers of Ray Train on one machine: killed, failing, stopped, more or fewer than before."""

import logging
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import ray
from faulty_pretraining import (
    FaultyPretraining,
    attempts,
    await_step,
    bundle_weights,
    check_exactly_once,
    check_restarts,
    in_background,
    last_executions,
    process_launcher,
    run_pretraining,
)

from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.runtime.elastic import Assignment, Requests, await_slot, give_up
from ltrscale.runtime.mailbox import open_mailbox
from ltrscale.runtime.workers import WorkersConfig

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
TWO = WorkersConfig(number=2, max_failures=1)


@pytest.mark.nightly
def test_killed_and_stopped_again_and_again_with_progress_between(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, steps = tmp_path / "expected", str(tmp_path / "out" / "steps")
    run_pretraining(
        FaultyPretraining(str(expected / "steps")),
        synthetic_dataset,
        str(expected),
        launch=process_launcher(2, restarts=0),
    )
    records: list[Mapping[str, object]] = []
    with caplog.at_level(logging.INFO, "ltrscale"):
        watched = FaultyPretraining(steps, kills=((6, 1), (14, 0)), hangs=((10, 1, "stopped"),))
        run_pretraining(
            watched,
            synthetic_dataset,
            str(tmp_path / "out"),
            workers=TWO.replace(hang_minutes=0.15),
            report=lambda r: records.append(dict(r)),
        )
    check_restarts(steps, kills=2)
    check_exactly_once(steps)
    assert last_executions(steps) == last_executions(str(expected / "steps"))
    assert bundle_weights(str(tmp_path / "out")) == bundle_weights(str(expected))
    lines = [record.message for record in caplog.records]
    again = [line for line in lines if "all workers start again (failure 1 of 1" in line]
    assert len(again) == 3
    assert all(re.match(r"rank [01]: ", line) for line in again)
    (hangs,) = [line for line in lines if "hangs" in line]
    assert re.match(r"rank 1 hangs: it has been silent for \d+ s: its process is stopped, or .*; ending it$", hangs)
    assert sum(line.startswith("pretrained on 480 groups") for line in lines) == 1
    assert sum(line.startswith("resumed from") for line in lines) == 3
    assert {r["epoch"] for r in records if "epoch" in r} == {1, 2}
    assert [(r["running_workers"], r.get("restarts")) for r in records if "running_workers" in r] == [
        (2, 0), (0, None), (2, 1), (0, None), (2, 2), (0, None), (2, 3),
    ]  # fmt: skip
    checkpoints = [r["checkpoints"] for r in records if "checkpoints" in r]
    assert checkpoints == list(range(1, len(checkpoints) + 1))
    assert len(checkpoints) >= 3


@pytest.mark.nightly
def test_an_input_error_ends_the_run_with_one_line(synthetic_dataset: str, tmp_path: Path) -> None:
    watched = FaultyPretraining(str(tmp_path / "steps"), raises=((2, 1, "input"),))
    with pytest.raises(InputError, match=r"^input of rank 1 in step 2$"):
        run_pretraining(watched, synthetic_dataset, str(tmp_path), workers=TWO)
    assert len(attempts(str(tmp_path / "steps"))) == 1


@pytest.mark.nightly
def test_storage_that_cannot_be_reached_counts_as_a_failure_of_workers(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = FaultyPretraining(str(tmp_path / "steps"), raises=((0, 1, "storage"),))
    with pytest.raises(UnavailableError, match=r"^storage of rank 1 in step 0$"):
        run_pretraining(watched, synthetic_dataset, str(tmp_path), workers=TWO)
    assert len(attempts(str(tmp_path / "steps"))) == 2
    assert "storage of rank 1 in step 0; all workers start again (failure 1 of 1" in caplog.text


@pytest.mark.nightly
def test_a_defect_is_raised_when_it_comes_again_and_again(synthetic_dataset: str, tmp_path: Path) -> None:
    watched = FaultyPretraining(str(tmp_path / "steps"), raises=((0, 1, "defect"),))
    with pytest.raises(ValueError, match="defect of rank 1 in step 0") as caught:
        run_pretraining(watched, synthetic_dataset, str(tmp_path), workers=TWO)
    assert "faulty_pretraining.py" in caught.value.__notes__[0]  # the worker's own traceback
    assert len(attempts(str(tmp_path / "steps"))) == 2


@pytest.mark.nightly
def test_asked_to_stop_the_workers_leave_a_checkpoint_that_other_numbers_of_workers_resume(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    steps = str(tmp_path / "steps")

    def terminate() -> None:
        await_step(steps, 3)
        os.kill(os.getpid(), signal.SIGTERM)

    in_background(terminate)
    with pytest.raises(Stopped, match=r"after step [0-9]+, checkpoint written to"):
        run_pretraining(FaultyPretraining(steps, every_step_s=0.2), synthetic_dataset, str(tmp_path), workers=TWO)
    elastic = WorkersConfig(number=(1, 3))
    run_pretraining(FaultyPretraining(steps), synthetic_dataset, str(tmp_path), workers=elastic)
    first, second = attempts(steps)
    assert min(second.steps) == max(first.steps) + 1  # nothing is lost
    assert (first.world, second.world) == (2, 3)
    check_exactly_once(steps)


@pytest.mark.parametrize("formed", ["before", "after"])
def test_a_joiner_that_must_leave_takes_a_slot_that_it_has_and_waits_for_no_other(tmp_path: Path, formed: str) -> None:
    mailbox = open_mailbox()
    task = Assignment(FaultyPretraining(str(tmp_path)), mailbox, TWO, 60)
    requests = Requests(ray.get(mailbox.come.remote("joiner")))
    if formed == "before":
        ray.get(mailbox.resize.remote(2, ("127.0.0.1", 1)))
    give_up(task, "joiner", requests)
    if formed == "after":
        ray.get(mailbox.resize.remote(2, ("127.0.0.1", 1)))
    slot = await_slot(task, "joiner", requests)
    assert (slot and slot.rank) == (2 if formed == "before" else None)
    ray.kill(mailbox)
