"""The row that a benchmark reports, and measurements of memory and time whose ratios hold on a busy machine."""

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.alongside import alongside
from ltrscale.data.dataset.manifest import Feature, Manifest
from ltrscale.data.dataset.writer import Compression, DatasetWriter, commit_dataset
from ltrscale.processor import Timings, cpu_seconds
from ltrscale.progress import log

_LOOK_S = 0.003

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of the benchmark table: a ratio measured in one run, or a count, and its goal.

    `at_least`: the goal is a lower bound of the ratio, otherwise an upper bound. `ours` and `peer` are the measured
    values with units. If there is no ratio, because there is no peer or no measurement, `note` says why.
    """

    name: str
    ratio: float | None
    ours: str = ""
    peer: str = ""
    note: str = ""
    goal: float | None = None
    at_least: bool = True


def quiet_cpu_seconds(*works: Callable[[], object], repeats: int) -> list[Timings]:
    """As `cpu_seconds`, for works that log their progress: only their warnings appear."""
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        return cpu_seconds(*works, repeats=repeats)
    finally:
        log.setLevel(level)


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

    def look(over: threading.Event) -> None:
        nonlocal peak
        while not over.wait(_LOOK_S):
            peak = max(peak, _status_bytes("RssAnon"))

    with alongside(look):
        work(argument)
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
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


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
    pids = [root]
    for pid in pids:  # the list grows during the loop: a breadth-first walk
        pids += children.get(pid, [])
    return sum(ticks[pid] for pid in pids) / os.sysconf("SC_CLK_TCK")


LONGEST = 1251
N_FEATURES = 136
_DIFFERENT_ROWS = 1000
_GROUPS_A_BLOCK = 400


def mslr_lengths(n_groups: int, seed: int) -> NDArray[np.int64]:
    """Group lengths distributed like those of MSLR-WEB: a lognormal cut at its longest list.

    The mean is about 124; the average document is in a list of about 178 (E[L^2] / E[L]).

    Example:
        >>> lengths_Q = mslr_lengths(50_000, seed=0)
        >>> bool(abs(lengths_Q.mean() - 124) < 2), bool(abs((lengths_Q**2).sum() / lengths_Q.sum() - 178) < 4)
        (True, True)
    """
    spread = np.log(178 / 124)  # of a lognormal, E[L^2] / E[L] is the mean times exp(sigma^2)
    lengths_Q = np.random.default_rng(seed).lognormal(np.log(124) - spread / 2, np.sqrt(spread), n_groups)
    return np.clip(np.rint(lengths_Q), 1, LONGEST).astype(np.int64)


def write_letor(path: Path, n_groups: int) -> int:
    """Write LETOR text that looks like MSLR's; returns its number of documents.

    Half of the columns are counts, half have six digits, and more than a third of the values are 0. The same thousand
    rows repeat, so that writing takes no longer than the measurement.
    """
    rng = np.random.default_rng(0)
    shape = (_DIFFERENT_ROWS, N_FEATURES)
    values = rng.lognormal(1.5, 1.5, shape)
    values[:, ::2] = np.floor(values[:, ::2])
    values[rng.random(shape) < 1 / 3] = 0
    rows = [" ".join(f"{f}:{value:g}" for f, value in enumerate(row, 1)) for row in values.tolist()]
    lengths_Q = mslr_lengths(n_groups, seed=0)
    with path.open("w", newline="") as file:
        for query, length in enumerate(lengths_Q.tolist()):
            file.writelines(f"{i % 5} qid:{query} {rows[(query + i) % _DIFFERENT_ROWS]} \r\n" for i in range(length))
    return int(lengths_Q.sum())


def write_dataset(url: str, compression: Compression, *, groups: int) -> None:
    """Write a data set of one period, whose list lengths and compressibility resemble those of MSLR-WEB.

    A thousand groups have about 68 MB before compression. The content is deterministic.
    """
    rng = np.random.default_rng(0)
    lengths_Q = mslr_lengths(groups, seed=0)
    with storage.Commit(url) as commit:
        writer = DatasetWriter(commit, n_features=N_FEATURES, compression=compression)
        for first in range(0, groups, _GROUPS_A_BLOCK):
            block_Q = lengths_Q[first : first + _GROUPS_A_BLOCK]
            n = int(block_Q.sum())
            features_NF = np.where(rng.random((n, N_FEATURES)) < 0.4, 0, rng.normal(size=(n, N_FEATURES)).round(2))
            columns = {
                "gid": pa.array(np.arange(first, first + len(block_Q))),
                "features": _lists(features_NF, block_Q * N_FEATURES),
                "labels": _lists(rng.integers(0, 5, n), block_Q),
            }
            writer.add("all", pa.table(columns))
        files = tuple(writer.close())
        features = tuple(Feature(name=f"f{i}") for i in range(N_FEATURES))
        commit_dataset(commit, Manifest(features=features, files=files))


def _lists(values: np.ndarray, lengths_Q: NDArray[np.int64]) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths_Q)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel().astype(np.float32)))
