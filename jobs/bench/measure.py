"""The row that a benchmark reports, measurements of memory and time that hold on a busy machine, and made-up data."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale import storage
from ltrscale.arrays import Ints
from ltrscale.batch import to_offsets
from ltrscale.data.dataset.manifest import Feature, Manifest
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.dataset.writer import Compression, DatasetWriter, commit_dataset, to_lists
from ltrscale.processor import alongside
from ltrscale.progress import log
from ltrscale.stages.stage import Stage

_LOOK_S = 0.003

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of the benchmark table: a ratio measured in one run, a count or a size, and its goal.

    `at_least`: the goal is a lower bound of the figure, otherwise an upper bound. `ours` and `peer` are the measured
    values with units. If there is no figure, because there is no peer or no measurement, `note` says why.
    """

    name: str
    figure: float | None
    ours: str = ""
    peer: str = ""
    note: str = ""
    goal: float | None = None
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal or a figure."""
        if self.goal is None or self.figure is None:
            return None
        return self.figure >= self.goal if self.at_least else self.figure <= self.goal

    @classmethod
    def speed(
        cls,
        name: str,
        n: int,
        ours_s: float,
        peer_s: float,
        *,
        goal: float | None = None,
        what: str = "docs",
        note: str = "",
    ) -> "Row":
        """How many times as much we do in a second of a processor as the peer; both did `n` of something.

        Example:
            >>> row = Row.speed("parsing", 1000, 0.01, 0.04)
            >>> row.figure, row.ours, row.peer
            (4.0, '100.0 k docs/CPU-s', '25.0 k docs/CPU-s')
        """
        ours, peer = (f"{_in_thousands(n / seconds)} {what}/CPU-s" for seconds in (ours_s, peer_s))
        return cls(name, peer_s / ours_s, ours, peer, note, goal)

    @classmethod
    def ratio(
        cls, name: str, ours: float, peer: float, unit: str, *, goal: float | None = None, note: str = ""
    ) -> "Row":
        """How many times what the peer takes we take; `unit` is the format of both.

        Example:
            >>> row = Row.ratio("a step", 3.0, 2.0, "{:.1f} CPU-s", goal=1.2)
            >>> row.figure, row.ours, row.peer, row.met
            (1.5, '3.0 CPU-s', '2.0 CPU-s', False)
        """
        return cls(name, ours / peer, unit.format(ours), unit.format(peer), note, goal, at_least=False)

    @classmethod
    def memory(
        cls,
        name: str,
        ours: int,
        peer: int,
        *,
        goal: float | None = None,
        note: str = "growth of peak resident memory, one process each",
    ) -> "Row":
        """How many times the bytes of the peer we take."""
        return cls.ratio(name, ours / 2**20, peer / 2**20, "{:.0f} MB", goal=goal, note=note)


def _in_thousands(rate: float) -> str:
    return f"{rate / 1e6:.2f} M" if rate >= 1e6 else f"{rate / 1e3:.1f} k"


@contextmanager
def quiet() -> Iterator[None]:
    """Of what works log inside the block, only their warnings appear."""
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def run_stage(stage: Stage) -> None:
    """Make the output of a stage, even if it is there, and report to nobody."""
    with quiet():
        stage.work({}, lambda _: None)


def clean_processes() -> ForkServerContext:
    """Processes that have the imports of the benchmarks, and nothing else of this one, such as its memory."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["jobs.bench.bench"])  # takes seconds, which a spawned process takes each time
    return context


def apart(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run a function in a separate process, whose peak memory nothing else has raised, and return its result."""
    with ProcessPoolExecutor(1, mp_context=clean_processes()) as pool:
        return pool.submit(function, *arguments, **named).result()


class Cost(NamedTuple):
    """What a work took."""

    memory: int
    """Growth of the process's peak resident memory, in bytes."""
    seconds: float
    """Of a processor."""
    result: Any


def costs(work: Callable[[T], object], *arguments: T) -> list[Cost]:
    """What a work takes in a process of its own (on Linux), on one thread, for each argument in turn.

    The first is best something small, so that late imports, buffers and code that is read from disk count there, and
    not in the others.
    """
    return apart(_costs, work, arguments)


def _costs(work: Callable[[T], object], arguments: Iterable[T]) -> list[Cost]:
    torch.set_num_threads(1)
    taken = []
    for argument in arguments:
        memory, start = resident_peak(), time.process_time()
        result = work(argument)
        taken.append(Cost(resident_peak() - memory, time.process_time() - start, result))
    return taken


def peak_own_bytes(work: Callable[[T], object], warm_up: T, argument: T) -> int:
    """As the memory of `costs`, without pages of memory-mapped files, which the system can reclaim.

    The memory is sampled every few milliseconds.
    """
    return apart(_own_growth, work, warm_up, argument)


def _own_growth(work: Callable[[T], object], warm_up: T, argument: T) -> int:
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
LABEL_SHARES = (0.52, 0.32, 0.13, 0.02, 0.01)
"""How often each label of web search comes."""
_DIFFERENT_ROWS = 1000
_GROUPS_A_BLOCK = 400


def mslr_lengths(n_groups: int) -> NDArray[np.int64]:
    """Group lengths distributed like those of MSLR-WEB, always the same: a lognormal cut at its longest list.

    The mean is about 124; the average document is in a list of about 178 (E[L^2] / E[L]).

    Example:
        >>> lengths_Q = mslr_lengths(50_000)
        >>> bool(abs(lengths_Q.mean() - 124) < 2), bool(abs((lengths_Q**2).sum() / lengths_Q.sum() - 178) < 4)
        (True, True)
    """
    spread = np.log(178 / 124)  # of a lognormal, E[L^2] / E[L] is the mean times exp(sigma^2)
    lengths_Q = np.random.default_rng(0).lognormal(np.log(124) - spread / 2, np.sqrt(spread), n_groups)
    return np.clip(np.rint(lengths_Q), 1, LONGEST).astype(np.int64)


def mslr_offsets(n_groups: int) -> Tensor:
    """The offsets of lists with such lengths."""
    return to_offsets(torch.from_numpy(mslr_lengths(n_groups)))


def same_draws() -> torch.Generator:
    """Random numbers that are the same at each call."""
    return torch.Generator().manual_seed(0)


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
    lengths_Q = mslr_lengths(n_groups)
    with path.open("w", newline="") as file:
        for query, length in enumerate(lengths_Q.tolist()):
            file.writelines(f"{i % 5} qid:{query} {rows[(query + i) % _DIFFERENT_ROWS]} \r\n" for i in range(length))
    return int(lengths_Q.sum())


LARGE = {"before": (8_000, 1_000_000)}
"""A layout as behind a million documents: a small data set of its own would have small row groups."""


def write_dataset(url: str, compression: Compression, *, groups: int, **layout: Any) -> None:
    """Write a data set of one period, whose list lengths and compressibility resemble those of MSLR-WEB.

    A thousand groups have about 68 MB before compression. The content is deterministic. `layout` has the writer's
    settings.
    """
    rng = np.random.default_rng(0)
    lengths_Q = mslr_lengths(groups)

    def blocks() -> Iterator[tuple[str, pa.Table]]:
        for first in range(0, groups, _GROUPS_A_BLOCK):
            block_Q = lengths_Q[first : first + _GROUPS_A_BLOCK]
            features_NF = mslr_features(rng, int(block_Q.sum()))
            yield "all", group_table(first, block_Q, features_NF, rng.integers(0, 5, len(features_NF)))

    write_tables(url, N_FEATURES, blocks(), compression=compression, **layout)


def mslr_features(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Features of n documents that compress like those of MSLR-WEB."""
    return np.where(rng.random((n, N_FEATURES)) < 0.4, 0, rng.normal(size=(n, N_FEATURES)).round(2))


def group_table(
    first: int, lengths_Q: Ints, features_NF: NDArray[Any], labels_N: NDArray[Any] | None, **columns: pa.Array
) -> pa.Table:
    """Rows of a data set for groups whose documents lie end to end, and whose numbers begin with `first`."""
    present_Q = np.ones(len(lengths_Q), np.bool_)

    def lists(values: NDArray[Any], lengths_Q: Ints) -> pa.ListArray:
        return to_lists(pa.array(values.ravel().astype(np.float32)), lengths_Q, present_Q)

    no_labels = pa.nulls(len(lengths_Q), pa.list_(pa.float32()))
    return pa.table(
        {
            "gid": pa.array(np.arange(first, first + len(lengths_Q))),
            **columns,
            "features": lists(features_NF, lengths_Q * features_NF.shape[1]),
            "labels": no_labels if labels_N is None else lists(labels_N, lengths_Q),
        }
    )


def write_tables(url: str, n_features: int, tables: Iterable[tuple[str, pa.Table]], **layout: Any) -> None:
    """Commit a data set of these tables, each of a period; `layout` has the writer's settings."""
    with storage.Commit(url) as commit:
        writer = DatasetWriter(commit, n_features=n_features, **layout)
        for period, table in tables:
            writer.add(period, table)
        version: Literal[1, 2] = 2 if layout.get("compression") == "lz4_bytes" else 1
        files = writer.close()
        commit_dataset(commit, Manifest(version=version, features=plain_features(n_features), files=files))


def plain_features(n: int) -> tuple[Feature, ...]:
    """Numeric features f0, f1, ..."""
    return tuple(Feature(name=f"f{i}") for i in range(n))


def select_all(url: str, *, labelled: bool = False) -> Selection:
    """All groups of a data set, or those with labels."""
    return select(Split(data=(url,)), labelled=labelled)
