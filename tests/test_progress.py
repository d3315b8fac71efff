"""Progress on a terminal and in a log, with a test clock."""

import io
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from rich.console import Console

from ltrscale import progress as module
from ltrscale.progress import progress


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The logged lines when standard error is no terminal."""
    monkeypatch.setattr(module, "console", Console(file=io.StringIO()))
    caplog.set_level("INFO", "ltrscale")
    return lambda: [record.getMessage() for record in caplog.records]


def test_lines_come_every_fifteen_seconds_with_rate_and_time_left(
    clock: Clock, messages: Callable[[], list[str]]
) -> None:
    with progress("finetune", 20_000) as advance:
        for _ in range(8):
            clock.now += 5
            advance(1_000)
    assert messages() == [
        "finetune: 3.0 k docs (15%), 200 docs/s, 0:01:25 left",
        "finetune: 6.0 k docs (30%), 200 docs/s, 0:01:10 left",
    ]


def test_lines_of_rows_whose_total_is_in_bytes(clock: Clock, messages: Callable[[], list[str]]) -> None:
    with progress("prepare", 4e9, "rows") as advance:
        clock.now += 20
        advance(0, 0)
        clock.now += 20
        advance(3_000_000, 1e9)
        clock.now += 20
        advance(0, 3.1e9)
    assert messages() == [
        "prepare: 0 rows (0%), 0 rows/s",
        "prepare: 3.0 M rows (25%), 75.0 k rows/s, 0:02:00 left",
        "prepare: 3.0 M rows (100%), 50.0 k rows/s, 0:00:00 left",
    ]


def test_lines_without_a_total_do_not_guess(clock: Clock, messages: Callable[[], list[str]]) -> None:
    with progress("read", unit="groups") as advance:
        clock.now += 3600
        advance(7_200)
    assert messages() == ["read: 7.2 k groups, 2 groups/s"]


def test_short_work_leaves_no_line(clock: Clock, messages: Callable[[], list[str]]) -> None:
    with progress("read", 10) as advance:
        clock.now += 14
        advance(10)
    assert messages() == []


@pytest.mark.parametrize(
    ("total", "call", "expected"),
    [
        (10_000, (500.0,), ["prepare", "━", "50 rows/s", "0:02:30"]),
        (1e6, (5_000.0, 50_000.0), ["prepare", "━", "500 rows/s", "0:02:30"]),
        (None, (5_000.0,), ["prepare", "500 rows/s"]),
    ],
)
def test_a_terminal_shows_a_bar_with_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, total: float | None, call: tuple[float, ...], expected: list[str]
) -> None:
    screen, clock = io.StringIO(), Clock()
    terminal = Console(file=screen, force_terminal=True, color_system=None, width=100, get_time=clock)
    monkeypatch.setattr(module, "console", terminal)
    with progress("prepare", total, "rows") as advance:
        for _ in range(5):
            clock.now += 10
            advance(*call)
    shown = screen.getvalue().split("\r")
    bars = [line for line in shown if "prepare" in line]
    assert all(part in bars[-1] for part in expected), bars[-1]
    assert "prepare" not in shown[-1], "nothing of the bar stays when the work is done"
