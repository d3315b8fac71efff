"""Runs in the terminal: a table of the run directories below a path, or two runs side by side."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import yaml
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.stages.runs import CONFIG, ENVIRONMENT, LOG, metric_records, record_file, record_folder
from ltrscale.stages.trackers import flat, numbers

_WIDEST = 1000
_OF_METHOD = ": "
"""Separates method and metric in runs with several methods."""


class RunsJob(Config):
    """List runs, or compare two."""

    under: str = "runs"
    """Directory; the runs of all directories below it are listed."""
    compare: tuple[str, str] | None = None
    """Output directories of two runs to compare instead."""

    def run(self) -> None:
        """Print the table; raises an `InputError` if there is no run."""
        table = comparison(*map(read_run, self.compare)) if self.compare else listing(list(runs_below(self.under)))
        console = Console()
        width = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
        Console(width=width).print(table)  # narrower terminals wrap lines instead of cutting names


@dataclass(frozen=True)
class _ListedRun:
    """The record of one run: last metrics by name, and seconds from the last start to the last record."""

    out: str
    stage: str
    started: str
    state: str
    seconds: float | None
    settings: Mapping[str, str]
    metrics: Mapping[str, float]

    @property
    def main(self) -> str:
        """The most informative metric as text; with several methods, that of the best, with its name."""
        names = [name for name in self.metrics if "ndcg" in name or "validation" in name] or [
            name for name in self.metrics if name.endswith("loss")
        ]
        if not names:
            return ""
        cutoff = next((value for key, value in self.settings.items() if key.endswith("primary_cutoff")), "")
        metrics = [name.rpartition(_OF_METHOD)[2] for name in names]
        metric = f"ndcg@{cutoff}" if f"ndcg@{cutoff}" in metrics else metrics[0]
        equal = (name for name, each in zip(names, metrics, strict=True) if each == metric)
        best = max(equal, key=lambda name: self.metrics[name])
        return f"{best} {self.metrics[best]:.4f}"


def runs_below(under: str) -> Iterator[_ListedRun]:
    """The runs of all directories below a path, in the order of their names; an `InputError` if there are none."""
    ends = tuple(f"/{name}/{CONFIG}" for name in (storage.RUN, storage.HIDDEN_RUN))
    names = {name.rpartition("/")[0].rpartition("/")[0] for name in storage.below(under) if f"/{name}".endswith(ends)}
    urls = sorted(storage.join(under, name) if name else under for name in names)
    if not urls:
        raise InputError(f"{under}: no run is recorded below it; name the directory that holds the outputs of jobs")
    yield from map(read_run, urls)


def read_run(out: str) -> _ListedRun:
    """The record of the run that made, or is making, an output; raises an `InputError` if there is no record."""
    folder = record_folder(out)
    if folder is None:
        raise InputError(f"{out}: no run is recorded there; name the output directory of a job")
    environment = json.loads(record_file(folder, ENVIRONMENT) or "{}")
    manifest = storage.read_manifest(out)
    records = metric_records(folder)
    command = environment.get("command", [])
    program = command[0].rpartition("/")[2].removesuffix(".py") if command else ""
    settings = storage.read_if_there(storage.join(out, "config.json"))  # written by bundles
    # pipelines commit below their directory; scores and predictions are committed period by period
    is_done = manifest is not None or "ended" in environment
    return _ListedRun(
        out=out,
        stage=(manifest or {}).get("made_by", {}).get("stage") or program.removeprefix("ltrscale "),
        started=environment.get("time", ""),
        state="done" if is_done else "failed" if " ERROR failed: " in (record_file(folder, LOG) or "") else "not done",
        seconds=_since(environment.get("time", ""), records),
        settings=flat(yaml.safe_load(record_file(folder, CONFIG) or "")),
        metrics=_last(records) | numbers(json.loads(settings or b"{}").get("metrics", {})),
    )


def _since(started: str, records: list[dict[str, Any]]) -> float | None:
    """Seconds from a start to the last record, if that record is not from an earlier start."""
    if not started or not records:
        return None
    seconds = float(records[-1]["time"]) - datetime.fromisoformat(started).timestamp()
    return seconds if seconds >= 0 else None


def _last(records: list[dict[str, Any]]) -> dict[str, float]:
    """The last value of each metric, and of each method if there are several."""
    return {
        f"{record['method']}{_OF_METHOD}{key}" if "method" in record else key: value
        for record in records
        for key, value in numbers(record).items()
    }


def listing(runs: list[_ListedRun]) -> Table:
    """A row for each run."""
    table = Table("output", "stage", "started (UTC)", "state", "time", "docs/s", "metric", box=None)
    for run in runs:
        speed = run.metrics.get("documents_per_s")
        table.add_row(
            run.out,
            run.stage,
            run.started.removesuffix("Z").replace("T", " "),
            run.state,
            _seconds(run.seconds),
            f"{speed:,.0f}" if speed else "",
            run.main,
        )
    return table


def comparison(a: _ListedRun, b: _ListedRun) -> Table:
    """The settings in which two runs differ, their time, and the last value of each metric."""
    table = Table("", a.out, b.out, "difference", box=None)
    table.add_row("stage", a.stage, b.stage)
    table.add_row("started", a.started, b.started)
    table.add_row("state", a.state, b.state)
    difference = _seconds(b.seconds - a.seconds) if a.seconds is not None and b.seconds is not None else ""
    table.add_row("time", _seconds(a.seconds), _seconds(b.seconds), difference, end_section=True)
    table.add_section()
    for key in sorted({*a.settings, *b.settings} - {"out"}):
        if a.settings.get(key) != b.settings.get(key):
            table.add_row(key, a.settings.get(key, "-"), b.settings.get(key, "-"))
    table.add_section()
    for key in [*a.metrics, *(key for key in b.metrics if key not in a.metrics)]:
        values = [run.metrics.get(key) for run in (a, b)]
        apart = "" if None in values else f"{values[1] - values[0]:+.6g}"  # type: ignore[operator]
        table.add_row(key, *("-" if value is None else f"{value:.6g}" for value in values), apart)
    return table


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s" if abs(seconds) < 600 else f"{seconds / 60:.0f} min"
