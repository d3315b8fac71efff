"""Predicts runs with the model of `jobs.bench.cost`: one of 8 workers here, which is then made, and one on 64 GPUs.

Workers are processes that run the real training with real sums over gloo; only computing is replaced by sleeping, and
storage by local files whose reading sleeps too, so that two cores can host eight workers. The model is fitted to 1, 2
and 4 workers. Its prediction for 8 is logged before these start.
"""

import functools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.bench.cost import (
    Cluster,
    Machine,
    Network,
    Store,
    Workload,
    account_s,
    epoch_s,
    fit_host,
    fit_network,
    fit_start,
    run_s,
    step,
)
from jobs.bench.device import GPUS, count, lists, plain_transform, steps
from jobs.bench.many import write_groups
from jobs.bench.measure import N_FEATURES, Row, clean_processes, select_all, write_dataset
from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream import plan
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.readers import read_direct
from ltrscale.models.choices import NetworkConfig
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer
from ltrscale.processor import cores, cpu_seconds
from ltrscale.progress import log
from ltrscale.runtime.workers import WorkerContext
from ltrscale.training.phases import Phase, Training
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.reduce import sum_over_workers

FITTED, PREDICTED = (1, 2, 4), 8
_FILES_A_WORKER = 4
_DOCUMENTS = 512
_PARAMETERS = 1 << 20
_BYTES = 4 * _PARAMETERS
_BYTES_A_DOCUMENT = 1000.0
_SUMS = 15
_CHECKPOINT_MINUTES = 0.1
_CORES = cores()


class Setting(NamedTuple):
    """An experiment: what bounds its steps, the sleep of a step, and the storage that reading sleeps for."""

    name: str
    compute_s: float
    store: Store


SETTINGS = (
    Setting("bound by computing", 0.7, Store(request_s=0.005, rate=50e6, requests=3, at_once=1)),
    Setting("bound by reading", 0.2, Store(request_s=0.03, rate=50e6, requests=3, at_once=1)),
)


class Sleeping(nn.Module):
    """Computes nothing for a while; its gradient is that of a million parameters."""

    def __init__(self, compute_s: float) -> None:
        super().__init__()
        self.weights_P = nn.Parameter(torch.zeros(_PARAMETERS))
        self.compute_s = compute_s

    def forward(self, groups: QueryGroups, _: torch.Generator) -> tuple[Tensor, float]:
        """Summed squares; sleeps in proportion to the documents."""
        time.sleep(self.compute_s * groups.n_documents / _DOCUMENTS)
        return ((self.weights_P - 1) ** 2).sum() * 1e-3 * groups.n_documents, float(groups.n_documents)


@dataclass(frozen=True)
class Times:
    """What a run measured, in seconds."""

    small: float
    """A sum of a few numbers over the workers, median."""
    large: float
    """A sum of the gradient's size."""
    step: float
    """A full step, mean."""
    epoch: float
    """All steps."""
    whole: float
    """From the start of the processes to their end."""


def bench_cost() -> Iterator[Row]:
    """Predictions for 8 workers beside their measurement, and those for 64 GPUs."""
    with storage.scratch.directory() as folder:
        data = f"{folder}/data"
        write_groups(data)
        for setting in SETTINGS:
            yield from _checked(setting, data, folder)
    yield from _rows_for_64_gpus()


def _checked(setting: Setting, data: str, folder: Path) -> Iterator[Row]:
    """Fit the model, say what it predicts, and then measure that."""
    times = {world: _run(setting, data, world, folder) for world in FITTED}
    works = {world: _workload(setting, data, world) for world in (*FITTED, PREDICTED)}
    cluster, work = _fitted(setting, times, works), works[PREDICTED]
    predicted = {
        "step": step(work, PREDICTED, cluster).seconds,
        "epoch": epoch_s(work, PREDICTED, cluster),
        "whole": run_s(work, PREDICTED, cluster),
    }
    fitted = (
        f"a message {1e3 * cluster.network.latency_s:.1f} ms, {cluster.network.bandwidth / 1e6:.0f} MB/s, "
        f"host {1e3 * cluster.machine.host_s:.0f} ms a step on {_CORES} cores"
    )
    log.info("%s, fitted at %s: %s", setting.name, FITTED, fitted)
    log.info("predicted for %d workers: %s", PREDICTED, json.dumps(predicted))
    measured = _run(setting, data, PREDICTED, folder)
    for what, seconds in predicted.items():
        yield Row(
            f"{PREDICTED} workers, {setting.name}: predicted / measured seconds of {what}",
            seconds / getattr(measured, what),
            ours=f"{seconds:.2f} s",
            peer=f"{getattr(measured, what):.2f} s",
            note=", ".join(f"{world}: {getattr(of, what):.2f}" for world, of in times.items()) + f"; {fitted}",
        )


def _fitted(setting: Setting, times: Mapping[int, Times], works: Mapping[int, Workload]) -> Cluster:
    """The machine here, as measured runs explain it."""
    network = fit_network({w: of.small for w, of in times.items()}, {w: of.large for w, of in times.items()}, _BYTES)
    steps_s = {w: of.step for w, of in times.items()}
    # where reading bounds a step, the host's time does not show
    host_s = fit_host(steps_s, works[1], network, _CORES) if setting is SETTINGS[0] else 0.0
    starts = {w: of.whole - of.epoch - account_s(works[w], w, setting.store) for w, of in times.items()}
    machine = Machine(_CORES, host_s, *fit_start(starts, _CORES), checkpoint_every_s=60 * _CHECKPOINT_MINUTES)
    return Cluster(network, setting.store, machine)


def _selection(data: str, world: int) -> Selection:
    """Files in proportion to the workers."""
    periods = tuple(f"{number:02d}" for number in range(_FILES_A_WORKER * world))
    return select(Split(data=(data,), periods=periods), labelled=False)


def _config(world: int) -> PretrainConfig:
    stream = StreamConfig(docs_per_batch=_DOCUMENTS * world, streams=world, memory_gb=0)
    return PretrainConfig(stream=stream, epochs=1, checkpoint_minutes=_CHECKPOINT_MINUTES)


def _workload(setting: Setting, data: str, world: int) -> Workload:
    selection = _selection(data, world)
    documents = [row_group.documents for row_group in selection.row_groups]
    config = _config(world).order("pretrain")
    dealt = plan.canonical_streams(documents, seed=config.seed, epoch=0, key=selection.hash, streams=world)
    n = sum(documents)
    of_step = _DOCUMENTS - n / selection.n_groups / 2  # on average half a list does not fit any more
    return Workload(
        documents=n,
        row_groups=len(documents),
        bytes_per_document=_BYTES_A_DOCUMENT,
        documents_per_step=of_step,
        compute_s=setting.compute_s * of_step / _DOCUMENTS,
        gradient_bytes=_BYTES,
        tail=max(sum(documents[i] for i in stream) for stream in dealt) * world / n,
    )


def _run(setting: Setting, data: str, world: int, folder: Path) -> Times:
    """Train one epoch on processes; returns what rank 0 measured."""
    context = clean_processes()
    first = context.Process(target=time.monotonic)  # its start takes imports
    first.start()
    first.join()
    out = folder / f"{setting.name}-{world}".replace(" ", "-")
    out.mkdir()
    start = time.monotonic()
    workers = [context.Process(target=_worker, args=(setting, data, str(out), world, rank)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError(f"a worker of {world} failed")
    measured = json.loads((out / "measured.json").read_text())
    return Times(**measured, whole=time.monotonic() - start)


def _worker(setting: Setting, data: str, out: str, world: int, rank: int) -> None:
    torch.set_num_threads(1)
    log.setLevel("WARNING")
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=world)
    small, large = (_sum_s(values) for values in (torch.zeros(7, dtype=torch.float64), torch.zeros(_PARAMETERS)))
    ends: list[float] = []

    def report(record: Any) -> None:
        if "documents_per_s" not in record:
            ends.append(time.monotonic())

    context = WorkerContext(reader=functools.partial(_far, setting.store), report=report)
    selection = _selection(data, world)
    Training(Sleeping(setting.compute_s), _config(world), selection, f"{out}/run", {}, context).run(
        Phase("pretrain", "pretraining", 1)
    )
    if rank == 0:
        mean = (ends[-2] - ends[0]) / (len(ends) - 2)  # the last step is a part
        values = {"small": small, "large": large, "step": mean, "epoch": ends[-1] - ends[0] + mean}
        (Path(out) / "measured.json").write_text(json.dumps(values))
    dist.destroy_process_group()


def _sum_s(values: Tensor) -> float:
    """Seconds of a sum over the workers, median."""
    seconds = []
    for _ in range(_SUMS):
        start = time.monotonic()
        sum_over_workers(values)
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds)


def _far(store: Store, row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read local files as slowly as this storage answers."""
    share = 1.0 if "features" in columns else 0.0
    for row_group, table in zip(row_groups, read_direct(row_groups, columns), strict=True):
        time.sleep(store.row_group_s(share * row_group.documents * _BYTES_A_DOCUMENT))
        yield table


_S3 = Store(request_s=0.03, rate=60e6, requests=3, at_once=4)
"""S3 within its region: 30 ms to the first byte, and 60 MB/s of a connection."""
_ETHERNET = Network(latency_s=30e-6, bandwidth=5e9, tree=True)
"""NCCL between nodes: 30 us a message in a tree, and 40 Gbit/s for each GPU."""
_NODES = Machine(cores=512, host_s=0.005, start_s=300.0)
"""Cores for each worker; five minutes for Ray, imports, checks of the files and one pass for the statistics."""
_GPUS, _LISTS, _LENGTH, _FEATURES, _STEP = 64, 35e6, 12, 12, 16_384
_ROW_GROUP_BYTES = 8 << 20


def h200_workload() -> tuple[Workload, str]:
    """An epoch of SimCLR-Rank over 35 million lists on H200s, and what bounds the computation of a step."""
    groups = lists(_STEP // _LENGTH, _LENGTH)
    rate, bound = count(steps()["method simclr_rank"], groups).rate(next(gpu for gpu in GPUS if gpu.name == "H200"))
    model = Pretrainer(plain_transform(), NetworkConfig(), SimCLRRankConfig(), ZeroingConfig())
    documents, bytes_per_document = _LISTS * _LENGTH, 4.0 * (_FEATURES + 1)
    row_groups = round(documents * bytes_per_document / _ROW_GROUP_BYTES)
    dealt = plan.canonical_streams([1] * row_groups, seed=0, epoch=0, key="", streams=_GPUS)
    work = Workload(
        documents=documents,
        row_groups=row_groups,
        bytes_per_document=bytes_per_document,
        documents_per_step=_STEP - _LENGTH / 2,
        compute_s=groups.n_documents / rate,
        gradient_bytes=4.0 * sum(p.numel() for p in model.parameters()),
        tail=max(map(len, dealt)) * _GPUS / row_groups,
        decode_s=_decode_s_a_byte() * bytes_per_document,
    )
    return work, bound


def _decode_s_a_byte() -> float:
    """Processor time of reading, shuffling and cutting local data into batches, for a byte of features and labels."""
    with storage.scratch.directory() as folder:
        write_dataset(f"{folder}/data", "zstd", groups=1000)
        selection = select_all(f"{folder}/data")

        def read() -> None:
            for _ in GroupStream(selection, StreamConfig(docs_per_batch=_STEP)).epoch(0):
                pass

        (seconds,) = cpu_seconds(read, repeats=3)
    return seconds / (4.0 * (N_FEATURES + 1) * selection.n_documents)


def _rows_for_64_gpus() -> Iterator[Row]:
    """One epoch and ten, as the model predicts them."""
    work, bound = h200_workload()
    cluster = Cluster(_ETHERNET, _S3, _NODES)
    of_step, epoch = step(work, _GPUS, cluster), epoch_s(work, _GPUS, cluster)
    parts = (
        f"a step of {_GPUS} x {_STEP:,} documents: computing {1e3 * of_step.compute:.1f} ms ({bound}), host "
        f"{1e3 * of_step.host:.1f}, exchanging {work.gradient_bytes / 1e6:.1f} MB {1e3 * of_step.exchange:.1f}, beside "
        f"reading {1e3 * of_step.reading:.1f} ms; {work.steps(_GPUS):.0f} steps, {work.row_groups:,} row groups"
    )
    for n in (1, 10):
        whole = run_s(work, _GPUS, cluster, epochs=n)
        yield Row(
            f"{_GPUS} H200s, {_LISTS / 1e6:.0f} million lists, {n} epoch{'s' if n > 1 else ''}: predicted minutes",
            whole / 60,
            ours=f"{n * epoch:.0f} s of steps after {whole - n * epoch:.0f} s",
            note=parts,
        )
