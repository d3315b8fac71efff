"""How a worker that hangs is found.

A worker counts its steps and the tables that it reads, and one of its threads sends these counts. Another process
judges, by its own clock. All workers wait for the worker that hangs, so none of them makes a step: the culprit is the
worker with a silent thread, or else the worker with the fewest steps.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa

from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.stream.readers import RowGroupReader
from ltrscale.processor import alongside
from ltrscale.runtime.workers import WorkerContext

_EVERY_S = 1.0
_SILENT_S = 15.0
_TO_BEGIN_S = 600.0  # loading data and starting readers may take longer than any later step


class WorkerProgress(NamedTuple):
    """Progress of a worker."""

    steps: int = 0
    tables: int = 0


class Pulse:
    """Counts the steps of a worker's function, and the tables that it reads."""

    def __init__(self) -> None:
        self._steps = self._tables = 0

    def counting(self, context: WorkerContext) -> WorkerContext:
        """The context with its `stopping` calls and reads counted."""

        def stopping() -> bool:  # called once per step, so the training function needs no further hook
            self._steps += 1
            return context.stopping()

        return replace(context, stopping=stopping, reader=self._counting(context.reader))

    def _counting(self, reader: RowGroupReader) -> RowGroupReader:
        def read(row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
            for table in reader(row_groups, columns):
                self._tables += 1
                yield table

        return read

    def sent(self, send: Callable[[WorkerProgress], object]) -> AbstractContextManager[None]:
        """Send the counts from a thread every second while the block runs."""

        def beat(over: threading.Event) -> None:
            while not over.wait(_EVERY_S):
                send(WorkerProgress(self._steps, self._tables))

        return alongside(beat)


@dataclass
class _Worker:
    """What was last heard of a worker; times are by this process's monotonic clock."""

    who: object
    counts: WorkerProgress
    heard: float
    """When it last sent its counts."""
    moved: float
    """When these last changed."""


class HangWatch:
    """Finds workers without a step or a table for `limit_s` seconds, at least ten minutes for the first step."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._workers: dict[int, _Worker] = {}

    def joined(self, rank: int, who: object = None) -> None:
        """Record that a worker has started or restarted; `who` distinguishes successive workers of a rank."""
        now = time.monotonic()
        self._workers[rank] = _Worker(who, WorkerProgress(), heard=now, moved=now)

    def left(self, rank: int, who: object = None) -> None:
        """Record that a worker has finished or was killed; the others get the full limit to notice it.

        Ignored once another worker has its rank: the message may arrive late.
        """
        if rank in self._workers and self._workers[rank].who != who:
            return
        self._workers.pop(rank, None)
        for worker in self._workers.values():
            worker.heard = worker.moved = time.monotonic()

    def clear(self) -> None:
        """Record that all workers have ended."""
        self._workers.clear()

    def heard(self, rank: int, counts: WorkerProgress) -> None:
        """Record the counts that a worker sent; ignored once it has left."""
        if (worker := self._workers.get(rank)) is not None:
            worker.heard = time.monotonic()
            if counts != worker.counts:
                worker.counts, worker.moved = counts, worker.heard

    def hung(self) -> dict[int, str]:
        """The workers that block all others, by rank, with the symptom; empty while any worker makes progress."""
        if not self._workers:
            return {}
        now = time.monotonic()
        steps = [worker.counts.steps for worker in self._workers.values()]
        # a worker reaches its second step only after a sum with all others: all have completed the first
        limit_s = self._limit_s if max(steps) > 1 else max(self._limit_s, _TO_BEGIN_S)
        if now - max(worker.moved for worker in self._workers.values()) < limit_s:
            return {}
        silent = {
            rank: f"has been silent for {now - worker.heard:.0f} s: its process is stopped, or its machine cut off"
            for rank, worker in self._workers.items()
            if now - worker.heard > min(_SILENT_S, self._limit_s / 2)
        }
        return silent or {
            rank: f"has made no progress for {now - worker.moved:.0f} s"
            for rank, worker in self._workers.items()
            if worker.counts.steps == min(steps)
        }
