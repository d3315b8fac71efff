"""The time to end: it asks like a signal, in its own thread alone, and differs from a signal before the stop."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ltrscale.errors import Stopped
from ltrscale.experiments.first.init import InitJob
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.signals import ending_by, ending_on_signal, stop_on_signal


def work(seconds: float) -> None:
    """Stops where it is asked to, or ends by itself."""
    with stop_on_signal() as stopping:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if stopping():
                raise Stopped("asked")
            time.sleep(0.005)


def test_work_that_begins_in_the_block_is_asked_when_the_time_is_up() -> None:
    with pytest.raises(Stopped) as stopped, ending_by(time.monotonic() + 0.05):
        work(60)
    assert stopped.value.is_late
    with ending_by(time.monotonic() + 60):
        work(0.02)
    with pytest.raises(Stopped), ending_by(time.monotonic() + 0.02), ending_by(time.monotonic() + 60):
        work(60)  # the nearer end counts


def interrupted() -> None:
    with stop_on_signal():
        signal.raise_signal(signal.SIGTERM)
        raise Stopped("asked")


def test_a_signal_is_no_end_of_the_time_though_that_is_up_too() -> None:
    with pytest.raises(Stopped) as stopped, ending_by(time.monotonic()):
        interrupted()
    assert not stopped.value.is_late
    assert stopped.value.status == 128 + signal.SIGTERM


def looked_at(folder: Path) -> None:
    InitJob(file="log.csv", out=str(folder / "out")).run()


def prepared(folder: Path) -> None:
    source = {"kind": "items", "columns": {"query": "q", "features": ["x"]}}
    PrepareJob.model_validate({"out": str(folder / "out"), "prepare": {"inputs": "log.csv", "source": source}}).run()


@pytest.mark.parametrize("job", [looked_at, prepared])
def test_a_job_without_stages_promises_none_when_it_is_stopped(
    job: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of one stage do all of it again, and a pipeline what is left."""
    monkeypatch.setattr("ltrscale.storage.list_files", lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped, match=r"^asked to stop; the same command does what is left to do$"), ending_on_signal():
        job(tmp_path)


def test_other_threads_have_their_own_time() -> None:
    found: list[object] = []

    def beside() -> None:
        try:
            work(0.2)
            found.append("ended")
        except Stopped as stopped:
            found.append(stopped)

    with ending_by(time.monotonic()):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    assert found == ["ended"]
    with ending_by(time.monotonic()), pytest.raises(Stopped):
        work(60)
