"""Following a job whose connection is lost, on a client that answers as a dashboard would."""

import io
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace

import pytest
from ray.job_submission import JobStatus

from ltrscale.errors import UnavailableError
from ltrscale.runtime.dashboard import follow, show_log

WHOLE = "one\ntwo\nthree\n"


class Dashboard:
    """Each connection brings the log from its beginning in parts; all but the last one are lost."""

    def __init__(self, connections: Sequence[Sequence[str]], status: JobStatus, code: int | None = None) -> None:
        self.connections = list(connections)
        self.job = SimpleNamespace(status=status, driver_exit_code=code, message="a reason")

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        for text in self.connections.pop(0) if self.connections else ():
            yield text
        if self.connections:
            raise RuntimeError("the connection is lost")

    def get_job_info(self, _: str) -> SimpleNamespace:
        return self.job

    def get_job_logs(self, _: str) -> str:
        return WHOLE


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ltrscale.runtime.dashboard._POLL_S", 0.0)


def test_a_log_that_is_read_again_shows_nothing_twice() -> None:
    dashboard = Dashboard([["one\ntw"], [], ["on", "e\ntwo\n", "thr"]], JobStatus.SUCCEEDED)
    sink = io.StringIO()
    assert show_log(dashboard, "a", sink) is dashboard.job
    assert sink.getvalue() == WHOLE


def test_a_dashboard_that_stays_away_ends_the_following(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ltrscale.runtime.dashboard._PATIENCE_S", 0.01)
    dashboard = Dashboard([["one\n"], *[[] for _ in range(100_000)]], JobStatus.RUNNING)
    with pytest.raises(UnavailableError, match="the same command follows it again"):
        show_log(dashboard, "a", io.StringIO())


@pytest.mark.parametrize(
    ("status", "code", "exits"),
    [
        (JobStatus.SUCCEEDED, 0, 0),
        (JobStatus.STOPPED, None, 143),
        (JobStatus.FAILED, 2, 2),
        (JobStatus.FAILED, -9, 137),
        (JobStatus.FAILED, None, 1),
    ],
)
def test_the_exit_status_is_that_of_the_job(status: JobStatus, code: int | None, exits: int) -> None:
    assert follow(Dashboard([], status, code), "a", "http://head:8265") == exits
