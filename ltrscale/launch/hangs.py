"""Finding workers that hang: their processes are stopped, or their functions go no further.

A worker counts its steps and the tables that it reads, and a thread of it sends these counts around. Another process
judges, by its own clock. All workers wait for one that hangs, so none of them moves: it is the one whose thread is
silent, or else the one with the fewest steps.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa

from ltrscale.data.dataset.split import RowGroup
from ltrscale.data.stream.readers import Reader
from ltrscale.launch.workers import Context

_EVERY_S = 1.0
_SILENT_S = 15.0
_TO_BEGIN_S = 600.0  # at least: to load data and start readers takes as long as it takes


class Counts(NamedTuple):
    """How far a worker has come."""

    steps: int = 0
    tables: int = 0


class Pulse:
    """Counts what the function of a worker does."""

    def __init__(self) -> None:
        self._steps = self._tables = 0

    def counting(self, context: Context) -> Context:
        """The context, whose questions and readings are counted."""

        def stopping() -> bool:  # is asked in each step
            self._steps += 1
            return context.stopping()

        return replace(context, stopping=stopping, reader=self._counting(context.reader))

    def _counting(self, reader: Reader) -> Reader:
        def read(row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
            for table in reader(row_groups, columns):
                self._tables += 1
                yield table

        return read

    @contextmanager
    def sent(self, send: Callable[[Counts], object]) -> Iterator[None]:
        """While the block runs a thread sends the counts every second."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_EVERY_S):
                send(Counts(self._steps, self._tables))

        thread = threading.Thread(target=beat, name="pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@dataclass
class _Worker:
    counts: Counts
    heard: float
    moved: float


class Watch:
    """Judges which workers hang, by what it hears of them.

    Args:
        limit_s: seconds without a step or a table after which a worker hangs; the first step has ten minutes at least.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._workers: dict[int, _Worker] = {}

    def joined(self, rank: int) -> None:
        """A worker has begun, perhaps anew."""
        now = time.monotonic()
        self._workers[rank] = _Worker(Counts(), heard=now, moved=now)

    def left(self, rank: int) -> None:
        """A worker is done, or was ended: the others have as long as ever to notice."""
        self._workers.pop(rank, None)
        for worker in self._workers.values():
            worker.heard = worker.moved = time.monotonic()

    def clear(self) -> None:
        """All workers have ended."""
        self._workers.clear()

    def heard(self, rank: int, counts: Counts) -> None:
        """A worker has sent its counts."""
        if (worker := self._workers.get(rank)) is not None:
            worker.heard = time.monotonic()
            if counts != worker.counts:
                worker.counts, worker.moved = counts, worker.heard

    def hung(self) -> dict[int, str]:
        """The workers that hold up all, by rank, and how that shows; none while any of them moves."""
        if not self._workers:
            return {}
        now = time.monotonic()
        steps = [worker.counts.steps for worker in self._workers.values()]
        # who begins the second step has seen that all made the first
        limit_s = self._limit_s if max(steps) > 1 else max(self._limit_s, _TO_BEGIN_S)
        if now - max(worker.moved for worker in self._workers.values()) < limit_s:
            return {}
        silent = {
            rank: f"was not heard of for {now - worker.heard:.0f} s: its process is stopped, or its machine cut off"
            for rank, worker in self._workers.items()
            if now - worker.heard > min(_SILENT_S, self._limit_s / 2)
        }
        return silent or {
            rank: f"has not moved for {now - worker.moved:.0f} s"
            for rank, worker in self._workers.items()
            if worker.counts.steps == min(steps)
        }
