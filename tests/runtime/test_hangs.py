"""Detection of the worker that hangs."""

from collections.abc import Callable

import pytest
from waiting import wait_until

from ltrscale.runtime import workers
from ltrscale.runtime.workers import HangWatch, Pulse, WorkerContext, WorkerProgress


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(workers.time, "monotonic", clock)
    return clock


def seconds(clock: Clock, count: int, beat: Callable[[], None]) -> None:
    for _ in range(count):
        clock.now += 1
        beat()


def watch_of_two() -> HangWatch:
    watch = HangWatch(60.0)
    for rank in (0, 1):
        watch.joined(rank)
        watch.heard(rank, WorkerProgress(2, 0))
    return watch


def test_the_worker_with_the_fewest_steps_hangs(clock: Clock) -> None:
    watch = watch_of_two()

    def beat() -> None:
        watch.heard(0, WorkerProgress(8, 3))
        watch.heard(1, WorkerProgress(7, 9))

    seconds(clock, 60, beat)
    assert watch.hung() == {}  # a minute after the last step it is 59 s
    seconds(clock, 1, beat)
    assert watch.hung() == {1: "has made no progress for 60 s"}
    watch.left(1)
    seconds(clock, 59, lambda: watch.heard(0, WorkerProgress(8, 3)))
    assert watch.hung() == {}  # rank 0 could not have moved before
    seconds(clock, 1, lambda: watch.heard(0, WorkerProgress(8, 3)))
    assert list(watch.hung()) == [0]


@pytest.mark.parametrize("late", [False, True])
def test_one_who_leaves_late_takes_nobody_with_it_who_has_its_rank_by_then(clock: Clock, late: bool) -> None:
    """Two joiners leave a group at once, in which they had ranks 1 and 2; one joins the next, with the other's rank."""
    watch = HangWatch(60.0)
    for rank, who in enumerate(("zero", "one", "two")):
        watch.joined(rank, who)
    watch.left(0, "zero")
    watch.left(2, "two")
    posts: list[Callable[[], None]] = [lambda: watch.left(1, "one"), lambda: watch.joined(1, "two")]
    for post in reversed(posts) if late else posts:
        post()
    watch.joined(0, "zero")
    for rank in (0, 1):
        watch.heard(rank, WorkerProgress(2, 0))
    seconds(clock, 61, lambda: watch.heard(0, WorkerProgress(2, 0)))
    assert list(watch.hung()) == [1]
    watch.left(1, "two")
    assert watch.hung() == {}


def test_a_silent_worker_hangs_however_many_steps_it_made(clock: Clock) -> None:
    watch = watch_of_two()
    watch.heard(1, WorkerProgress(8, 0))
    seconds(clock, 61, lambda: watch.heard(0, WorkerProgress(8, 0)))
    assert list(watch.hung()) == [1]
    assert "has been silent for 61 s" in watch.hung()[1]


def test_a_worker_that_reads_or_has_yet_to_begin_does_not_hang(clock: Clock) -> None:
    watch = watch_of_two()
    seconds(clock, 200, lambda: watch.heard(1, WorkerProgress(2, int(clock.now))))
    assert watch.hung() == {}
    watch.clear()
    watch.joined(0)
    watch.heard(0, WorkerProgress(1, 0))
    seconds(clock, 590, lambda: watch.heard(0, WorkerProgress(1, 0)))
    assert watch.hung() == {}
    seconds(clock, 11, lambda: watch.heard(0, WorkerProgress(1, 0)))
    assert list(watch.hung()) == [0]


def test_a_pulse_counts_steps_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_EVERY_S", 0.01)
    pulse, sent = Pulse(), list[WorkerProgress]()
    context = pulse.counting(WorkerContext(reader=lambda _, __: iter(["a", "b"]), stopping=lambda: True))
    with pulse.sent(sent.append):
        assert context.stopping()
        assert list(context.reader([], [])) == ["a", "b"]
        wait_until(lambda: WorkerProgress(1, 2) in sent)
