"""Benchmarks: speed and memory as ratios measured in one run, against the project's goals."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from pydantic import Field
from rich.console import Console
from rich.table import Table

from jobs.bench.ddp import bench_ddp
from jobs.bench.device import bench_device
from jobs.bench.losses import bench_losses
from jobs.bench.many import bench_many
from jobs.bench.measure import Row
from jobs.bench.metrics import bench_metrics
from jobs.bench.networks import bench_contrast, bench_networks, bench_text
from jobs.bench.predict import bench_cost
from jobs.bench.prepare import bench_items, bench_letor, bench_prepare_memory
from jobs.bench.scale import bench_scale
from jobs.bench.scoring import bench_scoring
from jobs.bench.stream import bench_stream
from jobs.bench.trees import bench_trees
from jobs.bench.wide import bench_wide
from ltrscale import storage
from ltrscale.config import Config
from ltrscale.devices import Device
from ltrscale.errors import InputError
from ltrscale.processor import Timings
from ltrscale.progress import log
from ltrscale.stages.runs import environment

BENCHES: dict[str, Callable[[], list[Row]]] = {
    "stream": bench_stream,
    "ddp": bench_ddp,
    "letor": bench_letor,
    "items": bench_items,
    "contrast": bench_contrast,
    "cost": bench_cost,
    "losses": bench_losses,
    "many": bench_many,
    "metrics": bench_metrics,
    "networks": bench_networks,
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
    """Only what takes seconds: counts, which are the same on every machine; if `wide` is named, small lists."""
    device: Device = "cpu"
    """A GPU on which `device` also times its steps."""
    only: tuple[str, ...] = Field((), description=f"Which of {', '.join(BENCHES)} to run; empty for all.")
    out: str | None = None
    """Directory for `bench.json`; if empty, the results are only printed."""


def bench(job: BenchJob) -> None:
    """Run the benchmarks and print one row per ratio.

    Raises:
        InputError: `only` names no benchmark.
    """
    for name in job.only:
        if name not in BENCHES:
            raise InputError(f"only: no benchmark {name!r}; there are {', '.join(BENCHES)}")
    rows: list[Row] = []
    quick = {"device": partial(bench_device, quick=job.quick, device=job.device)}
    benches = BENCHES | quick | {"wide": partial(bench_wide, quick=job.quick)}
    for name in job.only or (["device"] if job.quick else benches):
        log.info("measuring %s", name)
        rows += benches[name]()
        if job.out is not None:  # what is measured is kept, should the next one fail
            document = {"environment": environment(), "rows": [asdict(row) for row in rows]}
            storage.write_bytes(storage.join(job.out, "bench.json"), (json.dumps(document, indent=1) + "\n").encode())
    Console(width=180).print(_table(rows))


def _table(rows: list[Row]) -> Table:
    table = Table("what", "figure", "goal", "", "ours", "peer", "note")
    for row in rows:
        goal, verdict = "", ""
        if row.goal is not None and row.ratio is not None:
            reached = row.ratio >= row.goal if row.at_least else row.ratio <= row.goal
            goal, verdict = f"{'>=' if row.at_least else '<='} {row.goal:g}", "met" if reached else "missed"
        table.add_row(row.name, _figure(row.ratio), goal, verdict, row.ours, row.peer, row.note)
    return table


def _figure(ratio: float | None) -> str:
    """A count as it is, a ratio with two digits and the range of its rounds."""
    if ratio is None:
        return ""
    if isinstance(ratio, int):
        return f"{ratio:,}"
    rounds = ratio.rounds if isinstance(ratio, Timings) else ()
    return f"{ratio:.2f}" + (f" ({min(rounds):.2f}-{max(rounds):.2f})" if len(rounds) > 1 else "")
