"""Training on several workers: the time that real steps wait for data, and the speedup from a second worker."""

import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import torch
import torch.distributed as dist

from jobs.bench.measure import Row, select_all, write_dataset
from ltrscale import storage
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.readers import RowGroupReader, read_direct
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureTransform, TransformConfig
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.choices import MethodConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer, SimSiamConfig
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.on_ray import read_with_ray
from ltrscale.training.loop import Trainer
from ltrscale.training.settings import OptimizerConfig

METHODS: tuple[MethodConfig, ...] = (SimSiamConfig(), SimCLRRankConfig())
_DOCS_A_WORKER = 16_384
_STREAMS_A_WORKER = 2
_STEPS = 8
_WARM_UP = 3


class _Times(NamedTuple):
    """Seconds of a worker's steps: wall clock, processor time, and waiting for data."""

    wall: float
    processor: float
    wait: float


def bench_ddp() -> Iterator[Row]:
    """The share of time that a step waits for Ray Data, and the speedup of two workers."""
    with storage.scratch.directory() as folder:
        data = f"{folder}/data"
        write_dataset(data, "zstd", groups=3_200)
        yield from (_scaling(method, data) for method in METHODS)
        with ray_cluster(cpus=4):
            yield from (_waiting(method, data) for method in METHODS)


def _waiting(method: MethodConfig, data: str) -> Row:
    times = _run(method, data, rank=0, world=1, reader=read_with_ray)
    return Row(
        name=f"waiting for data, {method.kind}",
        figure=times.wait / times.wall,
        goal=0.05,
        at_least=False,
        ours=f"{1e3 * times.wait / _STEPS:.1f} ms per step",
        peer=f"{times.wall / _STEPS:.2f} s per step",
        note=f"Ray Data, one worker, {_DOCS_A_WORKER:,} documents per step, default network",
    )


def _scaling(method: MethodConfig, data: str) -> Row:
    """The time of one worker divided by that of two, with equal work per worker and one core each."""
    single, of_two = (_spawn(method, data, world) for world in (1, 2))
    (one,), slowest = single, max(of_two)
    busier = statistics.mean(times.processor for times in of_two) / one.processor - 1
    idle = statistics.mean(1 - times.processor / times.wall for times in of_two)
    return Row(
        name=f"1 -> 2 workers, {method.kind}",
        figure=one.wall / slowest.wall,
        goal=0.85,
        ours=f"{2 * _STEPS * _DOCS_A_WORKER / slowest.wall / 1e3:.1f} k docs/s",
        peer=f"{_STEPS * _DOCS_A_WORKER / one.wall / 1e3:.1f} k docs/s",
        note=f"gloo, one core each; processor time {busier:+.0%}, idle {idle:.0%}",
    )


def _spawn(method: MethodConfig, data: str, world: int) -> list[_Times]:
    with (
        storage.scratch.directory() as folder,
        ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool,
    ):
        return list(pool.map(partial(_worker, world, method, data, str(folder)), range(world)))


def _worker(world: int, method: MethodConfig, data: str, folder: str, rank: int) -> _Times:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # otherwise a single worker could use the second core too
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    times = _run(method, data, rank=rank, world=world, reader=read_direct)
    dist.destroy_process_group()
    return times


def _run(method: MethodConfig, data: str, *, rank: int, world: int, reader: RowGroupReader) -> _Times:
    """Train some steps, with an equal share for each worker."""
    selection = select_all(data)
    torch.manual_seed(0)
    transform = FeatureTransform(TransformConfig(numeric="none"), ["numeric"] * len(selection.features), [])
    model = Pretrainer(transform, NetworkConfig(), method, ZeroingConfig(), None)
    order = StreamConfig(docs_per_batch=_DOCS_A_WORKER * world, streams=_STREAMS_A_WORKER * world)
    stream = GroupStream(selection, order, rank=rank, world=world, reader=reader)
    steps = Trainer(model, model, stream, OptimizerConfig(), epochs=1, seed=0).epoch()
    for _ in range(_WARM_UP):
        next(steps)
    wall, processor, wait = time.perf_counter(), time.process_time(), 0.0
    for _ in range(_STEPS):
        wait += next(steps).wait_s
    times = _Times(time.perf_counter() - wall, time.process_time() - processor, wait)
    steps.close()
    return times
