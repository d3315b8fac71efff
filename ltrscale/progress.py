"""Progress of long work, and the one type by which stages report their numbers.

A terminal shows a bar with documents per second and the time left; elsewhere a plain log line appears now and then.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ltrscale.errors import without_credentials

Report = Callable[[Mapping[str, object]], None]
"""Receives one record of metrics, for example `{"stage": "finetune", "epoch": 3, "validation_ndcg@5": .41}`."""


def _without_credentials(record: logging.LogRecord) -> bool:
    """Remove the credentials from a record before any handler sees it."""
    record.msg, record.args = without_credentials(record.getMessage()), None
    if record.exc_info:
        record.exc_text = without_credentials(logging.Formatter().formatException(record.exc_info))
    return True


log = logging.getLogger("ltrscale")
log.addFilter(_without_credentials)
console = Console(stderr=True)
_EVERY_S = 15.0


def called(job: str) -> str:
    """The first words of a job's command line: `ltrscale NAME` where this process was started so, else the module.

    Example:
        >>> called("prepare")
        'python -m jobs.prepare'
    """
    program = Path((sys.argv or [""])[0]).stem.partition(" ")[0]  # `ltrscale prepare` while that verb runs
    return f"ltrscale {job}" if program == "ltrscale" else f"python -m jobs.{job}"


class Advance(Protocol):
    """Reports work just done, in units, and in the total's own measure if that differs."""

    def __call__(self, units: float, of_total: float | None = None) -> None:
        """`of_total` equals `units` by default."""
        ...


class _Rate(ProgressColumn):
    """Units per second, from the task's own clock."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        units = task.fields["units"] / task.completed if task.completed else 0.0
        return Text(f"{_count((task.speed or 0.0) * units)} {self.unit}/s")


def _count(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f} {suffix}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


@contextmanager
def progress(label: str, total: float | None = None, unit: str = "docs") -> Iterator[Advance]:
    """Show progress while the block runs; call the yielded function with the number of units just done.

    The total may have another measure than the units, such as bytes if the number of rows is unknown: then each call
    also reports how much of the total was done.
    """
    shown = _bar if console.is_terminal else _lines
    with shown(label, total, unit) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: float | None, unit: str) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), _Rate(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total, units=0.0)
        done = 0.0

        def advance(units: float, of_total: float | None = None) -> None:
            nonlocal done
            done += units
            bar.update(task, advance=units if of_total is None else of_total, units=done)

        yield advance


@contextmanager
def _lines(label: str, total: float | None, unit: str) -> Iterator[Advance]:
    start = last = time.monotonic()
    done = done_of_total = 0.0

    def advance(units: float, of_total: float | None = None) -> None:
        nonlocal done, done_of_total, last
        done += units
        done_of_total += units if of_total is None else of_total
        now = time.monotonic()
        if now - last >= _EVERY_S:
            last = now
            share = min(1.0, done_of_total / total) if total else 0.0
            percent = f" ({share:.0%})" if total else ""
            left = f", {timedelta(seconds=round((now - start) * (1 / share - 1)))} left" if share else ""
            log.info(
                "%s: %s %s%s, %s %s/s%s", label, _count(done), unit, percent, _count(done / (now - start)), unit, left
            )

    yield advance
