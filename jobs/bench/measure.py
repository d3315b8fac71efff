"""What one benchmark reports, and memory and time measured so that ratios hold on a busy machine."""

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

    `at_least` says on which side of the goal the ratio should be, if there is one; `ours` and `peer` are what was
    measured, with units. Without a ratio there was nothing to compare with, or nothing was measured, as the note says.
    """

    name: str
    ratio: float | None
    goal: float | None
    at_least: bool
    ours: str
    peer: str
    note: str = ""


def apart(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What a function returns in a process of its own, whose peak of memory nothing else has raised."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **named).result()


def peak_bytes(work: Callable[[int], object], warm_up: int, sizes: Sequence[int]) -> list[int]:
    """Growth of the peak resident memory through `work(size)`, each size in a process of its own (on Linux).

    The work is done once at size `warm_up`, a small one, before the peak is read for the first time: imports and
    library buffers do not count.
    """
    return [apart(_growth, work, warm_up, size) for size in sizes]


def peak_own_bytes(work: Callable[[str], object], warm_up: str, argument: str) -> int:
    """Growth of the peak of a process's own memory through `work(argument)`, in a process of its own (on Linux).

    Pages of files that are mapped into memory do not count, for the system takes them back when it needs them; the
    peak is looked for every few milliseconds. The work is done with `warm_up` before.
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
    """Peak resident bytes of this process; that of `getrusage` begins with the peak of the parent process."""
    return _status_bytes("VmHWM")


def resident_now() -> tuple[int, int]:
    """Resident bytes of this process now: those of its own, and those of memory that it shares with others."""
    return _status_bytes("RssAnon") + _status_bytes("RssFile"), _status_bytes("RssShmem")


def _status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def tree_seconds(root: int) -> float:
    """Processor time so far of a process and of all processes below it (on Linux)."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        pid, parent = int(folder.name), int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))  # its own and that of children waited for, user and system
        children.setdefault(parent, []).append(pid)
    below = [root]
    for pid in below:
        below += children.get(pid, [])
    return sum(ticks[pid] for pid in below) / os.sysconf("SC_CLK_TCK")
