"""Benchmarks: speed and memory as ratios measured in one run, against the project's goals."""

import json
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial

from pydantic import Field
from rich.console import Console
from rich.table import Table

from jobs.bench.device import bench_device
from jobs.bench.growth import bench_scale, bench_wide
from jobs.bench.losses import bench_losses
from jobs.bench.many import bench_many
from jobs.bench.measure import Row, clean_processes
from jobs.bench.metrics import bench_evaluation_memory, bench_metrics
from jobs.bench.models import bench_scoring, bench_trees, bench_trees_memory
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
    "cost": bench_cost,
    "letor": bench_letor,
    "items": bench_items,
    "contrast": bench_contrast,
    "losses": bench_losses,
    "metrics": bench_metrics,
    "scale": bench_scale,
    "scoring": bench_scoring,
    "text": bench_text,
    "trees": bench_trees,
    "wide": bench_wide,
    "prepare": bench_prepare_memory,
    "evaluation_memory": bench_evaluation_memory,
    "trees_memory": bench_trees_memory,
    "many": bench_many,
    "device": bench_device,
}
_ALONE = ("stream", "ddp", "cost")
"""Measured first, by the clock on the wall: the machine has nothing else to do."""
_BESIDE = ("prepare", "evaluation_memory", "trees_memory", "many", "device")
"""Counts and memory, which other work does not change: made beside what is measured in time of a processor."""


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
        with closing(self._measured(names)) as benches:
            for number, (name, measured) in enumerate(benches, 1):
                log.info("measuring %s, %d of %d", name, number, len(names))
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

    def _measured(self, names: Sequence[str]) -> Generator[tuple[str, Iterable[Row]]]:
        """Each benchmark with its rows, or with their making; closing it makes no more of them."""
        benches = BENCHES | {"device": partial(bench_device, quick=self.quick, device=self.device)}
        beside = [name for name in names if name in _BESIDE and self.device == "cpu"]
        yield from ((name, benches[name]()) for name in names if name in _ALONE)
        pool = ProcessPoolExecutor(1, mp_context=clean_processes())
        try:
            made = {name: pool.submit(_all_rows, benches[name]) for name in beside}
            yield from ((name, benches[name]()) for name in names if name not in (*_ALONE, *beside))
            yield from ((name, rows.result()) for name, rows in made.items())
        finally:
            pool.shutdown(cancel_futures=True)


def _all_rows(bench: Callable[[], Iterable[Row]]) -> list[Row]:
    return [*bench()]


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
