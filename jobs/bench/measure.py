"""The row that a benchmark reports, and measurements of memory and time whose ratios hold on a busy machine."""

import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

_LOOK_S = 0.003

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of the benchmark table: a ratio measured in one run, and its goal.

    `at_least`: the goal is a lower bound of the ratio, otherwise an upper bound. `ours` and `peer` are the measured
    values with units. If there is no ratio, because there is no peer or no measurement, `note` says why.
    """

    name: str
    ratio: float | None
    goal: float | None
    at_least: bool
    ours: str
    peer: str
    note: str = ""


def apart(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run a function in a separate process, whose peak memory nothing else has raised, and return its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # a fork would inherit this process's memory
        return pool.submit(function, *arguments, **named).result()


def peak_bytes(work: Callable[[int], object], warm_up: int, sizes: Sequence[int]) -> list[int]:
    """Growth of the peak resident memory during `work(size)`, each size in a separate process (on Linux).

    The work first runs with the small size `warm_up`, so that imports and library buffers do not count.
    """
    return [apart(_growth, work, warm_up, size) for size in sizes]


def peak_own_bytes(work: Callable[[str], object], warm_up: str, argument: str) -> int:
    """Growth of the peak anonymous memory during `work(argument)`, in a separate process (on Linux).

    Pages of memory-mapped files do not count, because the system can reclaim them. The memory is sampled every few
    milliseconds. The work first runs with `warm_up`.
    """
    return apart(_own_growth, work, warm_up, argument)


def _own_growth(work: Callable[[str], object], warm_up: str, argument: str) -> int:
    torch.set_num_threads(1)
    work(warm_up)
    before = peak = _status_bytes("RssAnon")
    over = threading.Event()

    def look() -> None:
        nonlocal peak
        while not over.wait(_LOOK_S):
            peak = max(peak, _status_bytes("RssAnon"))

    looking = threading.Thread(target=look)
    looking.start()
    work(argument)
    over.set()
    looking.join()
    return peak - before


def _growth(work: Callable[[int], object], warm_up: int, size: int) -> int:
    torch.set_num_threads(1)
    work(warm_up)
    before = resident_peak()
    work(size)
    return resident_peak() - before


def resident_peak() -> int:
    """Peak resident bytes of this process; `getrusage` would include the peak of the parent process."""
    return _status_bytes("VmHWM")


def resident_now() -> tuple[int, int]:
    """Current resident bytes of this process: private ones, and those of memory shared with other processes."""
    return _status_bytes("RssAnon") + _status_bytes("RssFile"), _status_bytes("RssShmem")


def _status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def tree_seconds(root: int) -> float:
    """Processor time of a process and all its descendants so far (on Linux)."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has just ended
            continue
        pid, parent = int(folder.name), int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))  # utime, stime, and those of children that have ended
        children.setdefault(parent, []).append(pid)
    below = [root]
    for pid in below:  # the list grows during the loop: a breadth-first walk
        below += children.get(pid, [])
    return sum(ticks[pid] for pid in below) / os.sysconf("SC_CLK_TCK")
