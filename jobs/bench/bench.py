"""Benchmarks: speed and memory as ratios measured in one run, against the project's goals."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from pydantic import Field
from rich.console import Console
from rich.table import Table

from jobs.bench.device import bench_device
from jobs.bench.growth import bench_scale, bench_wide
from jobs.bench.losses import bench_losses
from jobs.bench.many import bench_many
from jobs.bench.measure import Row
from jobs.bench.metrics import bench_metrics
from jobs.bench.models import bench_scoring, bench_trees
from jobs.bench.predict import bench_cost
from jobs.bench.prepare import bench_items, bench_letor, bench_prepare_memory
from jobs.bench.stream import bench_stream
from jobs.bench.training import bench_contrast, bench_ddp, bench_text
from ltrscale import storage
from ltrscale.config import Config
from ltrscale.devices import Device
from ltrscale.errors import InputError
from ltrscale.processor import Timings
from ltrscale.progress import log
from ltrscale.stages.runs import environment

BENCHES: dict[str, Callable[[], Iterable[Row]]] = {
    "stream": bench_stream,
    "ddp": bench_ddp,
    "letor": bench_letor,
    "items": bench_items,
    "contrast": bench_contrast,
    "cost": bench_cost,
    "losses": bench_losses,
    "many": bench_many,
    "metrics": bench_metrics,
    "prepare": bench_prepare_memory,
    "scale": bench_scale,
    "scoring": bench_scoring,
    "text": bench_text,
    "trees": bench_trees,
    "device": bench_device,
    "wide": bench_wide,
}


class BenchJob(Config):
    """Measure speed and memory against peers, as ratios in one run."""

    quick: bool = False
    """Only the counts of `device` that have a goal: a few minutes at most, and the same on every machine."""
    device: Device = "cpu"
    """A GPU on which `device` also times its steps."""
    only: tuple[str, ...] = Field((), description=f"Which of {', '.join(BENCHES)} to run; empty for all.")
    out: str | None = None
    """Directory for `bench.json`; if empty, the results are only printed."""

    def run(self) -> None:
        """Run the benchmarks, log each figure as soon as it is measured, and print all of them.

        Raises:
            InputError: `only` names no benchmark, or with `quick` another one than `device`.
        """
        names = self.only or (("device",) if self.quick else tuple(BENCHES))
        for name in names:
            if name not in BENCHES:
                raise InputError(f"only: no benchmark {name!r}; there are {', '.join(BENCHES)}")
            if self.quick and name != "device":
                raise InputError(f"only: {name!r} has no quick form; set quick=false")
        rows: list[Row] = []
        start = time.monotonic()
        for number, name in enumerate(names, 1):
            log.info("measuring %s, %d of %d", name, number, len(names))
            measured = bench_device(quick=self.quick, device=self.device) if name == "device" else BENCHES[name]()
            for row in measured:
                rows.append(row)
                log.info("%s: %s", row.name, " ".join(filter(None, _judged(row))) or row.note)
                if self.out is not None:  # what is measured is kept, should the next one fail
                    _keep(rows, self.out)
        table = Table("what", "figure", "goal", "", "ours", "peer", "note")
        for row in rows:
            table.add_row(row.name, *_judged(row), row.ours, row.peer, row.note)
        Console(width=180, markup=False).print(table)  # notes may have brackets
        judged = [row.met for row in rows if row.met is not None]
        log.info("%d of %d goals met, in %.1f minutes", sum(judged), len(judged), (time.monotonic() - start) / 60)


def _keep(rows: Sequence[Row], out: str) -> None:
    document = {"environment": environment(), "rows": [asdict(row) for row in rows]}
    storage.write_bytes(storage.join(out, "bench.json"), (json.dumps(document, indent=1) + "\n").encode())


def _judged(row: Row) -> tuple[str, str, str]:
    """The figure, its goal, and whether it is met."""
    goal = "" if row.goal is None else f"{'>=' if row.at_least else '<='} {row.goal:g}"
    return _figure(row.figure), goal, {True: "met", False: "missed", None: ""}[row.met]


def _figure(value: float | None) -> str:
    """A count as it is, any other number with two digits and the range of its rounds."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    rounds = value.rounds if isinstance(value, Timings) else ()
    return f"{value:.2f}" + (f" ({min(rounds):.2f}-{max(rounds):.2f})" if len(rounds) > 1 else "")
