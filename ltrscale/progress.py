"""Progress of long work, and the one type by which stages report their numbers.

On a terminal a bar with documents per second and the time left; elsewhere a plain log line now and then.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

Report = Callable[[Mapping[str, object]], None]
"""Receives one record of metrics, for example `{"stage": "finetune", "epoch": 3, "validation_ndcg@5": .41}`."""

log = logging.getLogger("ltrscale")
console = Console(stderr=True)
_EVERY_S = 15.0


class _Rate(ProgressColumn):
    """Units per second, from the task's own clock."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """The current speed."""
        return Text(f"{_count(task.speed or 0.0)} {self.unit}/s")


def _count(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f} {suffix}"
    return f"{value:.0f}"


@contextmanager
def progress(label: str, total: float | None = None, unit: str = "docs") -> Iterator[Callable[[float], None]]:
    """Show progress while the block runs; call what it yields with the number of units just done."""
    shown = _bar if console.is_terminal else _lines
    with shown(label, total, unit) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: float | None, unit: str) -> Iterator[Callable[[float], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), _Rate(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def _lines(label: str, total: float | None, unit: str) -> Iterator[Callable[[float], None]]:
    start = last = time.monotonic()
    done = 0.0

    def advance(units: float) -> None:
        nonlocal done, last
        done += units
        now = time.monotonic()
        if now - last >= _EVERY_S:
            last = now
            rate = done / (now - start)
            left = f", {(total - done) / rate:.0f} s left" if total and rate else ""
            share = f" of {_count(total)}" if total else ""
            log.info("%s: %s%s %s, %s %s/s%s", label, _count(done), share, unit, _count(rate), unit, left)

    yield advance
