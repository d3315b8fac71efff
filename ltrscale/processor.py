"""The cores and memory that a process may use, its threads, and the processor time that a computation takes."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has none


def memory() -> int:
    """Bytes of memory of this machine or container."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    known = limit.exists() and (text := limit.read_text().strip()).isdecimal()
    return min(machine, int(text)) if known else machine


class Busy(NamedTuple):
    """Processor seconds so far: of this process with the children that have ended, and of all processes.

    None where the system does not say.
    """

    own: float
    all: float | None

    @classmethod
    def now(cls) -> Self:
        """Both, as the system counts them."""
        own, stat = sum(os.times()[:4]), Path("/proc/stat")
        if not stat.exists():  # not Linux
            return cls(own, None)
        user, nice, system, _idle, _waiting, *others = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
        return cls(own, (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK"))

    def others_since(self, before: Self, seconds: float) -> float | None:
        """The share of this machine's processors that other processes used in the seconds between; None if unknown."""
        if self.all is None or before.all is None or seconds <= 0:
            return None
        used = (self.all - before.all) - (self.own - before.own)
        return min(1.0, max(0.0, used / (seconds * (os.cpu_count() or 1))))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on the calling thread alone while the block runs.

    Threads gain nothing in operations of some microseconds, and wait for each other in every one: where other processes
    keep the cores busy, that takes ten times as long as the work.
    """
    import torch  # imported late: a process that only asks for the cores needs no torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def alongside(
    work: Callable[[threading.Event], object], *, until: tuple[type[Exception], ...] = (), waits: bool = True
) -> Iterator[None]:
    """Run a function in a thread while the block runs; the event that it receives is set at the end of the block.

    The end of the block waits for it unless `waits` is false. An exception in `until` ends the function silently.
    """
    over = threading.Event()

    def run() -> None:
        with suppress(*until):
            work(over)

    thread = threading.Thread(target=run, name="alongside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        if waits:
            thread.join()


class Timings(float):
    """A quantity measured in rounds with others: their median, and the single rounds in `rounds`.

    A quotient is taken round by round, so that a change in the machine's speed cancels out.

    Example:
        >>> from copy import copy
        >>> ratio = Timings([2.0, 6.0, 3.0]) / Timings([1.0, 2.0, 3.0])
        >>> ratio, copy(ratio).rounds
        (2.0, (2.0, 3.0, 1.0))
    """

    rounds: tuple[float, ...]

    def __new__(cls, rounds: Sequence[float]) -> Self:
        """The median of these values."""
        made = super().__new__(cls, statistics.median(rounds))
        made.rounds = tuple(rounds)
        return made

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[float, ...]]]:
        """Copies and pickles keep the rounds."""
        return type(self), (self.rounds,)

    def __truediv__(self, other: float) -> "Timings":
        """The quotient of each round."""
        others = other.rounds if isinstance(other, Timings) else [other] * len(self.rounds)
        return Timings([a / b for a, b in zip(self.rounds, others, strict=True)])


def cpu_seconds(*works: Callable[[], object], repeats: int = 7) -> list[Timings]:
    """Processor time (user and system) of each work on one torch thread.

    The works alternate, so that a change in the machine's speed affects all of them. The first round warms up and is
    not counted.
    """
    with one_thread():
        rounds = [[_seconds(work) for work in works] for _ in range(repeats + 1)]
    return [Timings(times) for times in zip(*rounds[1:], strict=True)]


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
