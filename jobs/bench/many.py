"""What grows with the number of workers W, measured with up to 256 ranks that run the real code in one process.

A small training on ranks that are threads (`jobs.bench.ranks`) shows what all workers together ask of storage, what a
checkpoint holds and what rank 0 gathers; a mailbox of Ray takes the posts of as many ranks in three other processes.
What a rank does alone, its plan, is measured on row groups of a large data set that exist on paper only.

Shapes: see `ltrscale.batch`.
"""

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.bench.measure import Row, apart, group_table, plain_features, quiet, select_all, write_tables
from jobs.bench.ranks import on_ranks
from jobs.bench.scale import no_reader, until_read
from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.row_groups import FileToRead, RowGroup, RowGroups
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.readers import OPEN_FILES, ParquetReads, open_parquet, plan_reads, read_planned
from ltrscale.errors import Stopped
from ltrscale.processor import cpu_seconds
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.mailbox import Beat, Left, Sender, WorkerJoined, open_mailbox
from ltrscale.runtime.under_torchrun import Watchers, World
from ltrscale.runtime.workers import Pulse, WorkerContext, WorkerProgress
from ltrscale.storage import join
from ltrscale.training.checkpoint import list_checkpoints
from ltrscale.training.phases import Phase, Training
from ltrscale.training.pretrain import PretrainConfig

WORLDS = (4, 16, 64, 256)
STREAMS = WORLDS[-1]
"""Canonical streams of every measurement: the order does not depend on the workers, so all of them read the same."""
STEPS = 4
"""Steps of an epoch of the small training."""
ON_PAPER = 100_000
"""Row groups of the large data set, more than 35 million lists fill."""
_FEATURES, _GROUPS, _PER_FILE, _ROW_GROUP_BYTES = 4, 4096, 64, 1000
_PROCESSES, _LISTEN_S = 3, 5.0


def write_groups(url: str) -> None:
    """Write a small data set of 64 files, one file a period, with some 16 row groups each."""
    rng = np.random.default_rng(0)
    lengths_Q = rng.integers(4, 21, _GROUPS)

    def files() -> Iterator[tuple[str, pa.Table]]:
        for first in range(0, _GROUPS, _PER_FILE):
            block_Q = lengths_Q[first : first + _PER_FILE]
            features_NF = rng.normal(size=(block_Q.sum(), _FEATURES))
            yield f"{first // _PER_FILE:02d}", group_table(first, block_Q, features_NF, None)

    write_tables(url, _FEATURES, files(), row_group_bytes=_ROW_GROUP_BYTES)


class LeastSquares(nn.Module):
    """A linear score that shall be the mean of the features: a network that costs nothing; remembers the groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weights_F = nn.Parameter(torch.zeros(_FEATURES, dtype=torch.float64))
        self.seen: list[int] = []

    def forward(self, groups: QueryGroups, _: torch.Generator) -> tuple[Tensor, float]:
        """Summed squares, and the documents that they are averaged over."""
        assert groups.ids_Q is not None
        self.seen += groups.ids_Q.tolist()
        features_NF = groups.features_NF.double()
        return ((features_NF @ self.weights_F - features_NF.mean(1)) ** 2).sum(), float(groups.n_documents)


@dataclass
class SmallTraining:
    """One epoch on W ranks; counts what all of them open and read."""

    data: str
    out: str
    stop_after: int | None = None
    """The step after which a worker in the middle is asked to stop."""
    opened: Counter[str] = field(default_factory=Counter)
    """Openings of data files by all ranks: for the `account` before training, and in `training`."""
    row_groups: Counter[str] = field(default_factory=Counter)
    """Row groups read by all ranks, by the same names."""
    records: list[dict[str, object]] = field(default_factory=list)
    """What rank 0 reports."""

    def run(self, world: int) -> list[LeastSquares]:
        """Train on W ranks; returns the model of each.

        Raises:
            RuntimeError: the account of the epoch did not close.
        """
        selection = select_all(self.data)
        documents = -(-selection.n_documents // STEPS)
        config = PretrainConfig(
            stream=StreamConfig(docs_per_batch=documents, streams=STREAMS, prefetch=0), epochs=1, checkpoint_minutes=60
        )
        models = [LeastSquares() for _ in range(world)]

        def work(rank: int) -> None:
            steps = iter(range(sys.maxsize))

            def stopping() -> bool:
                return next(steps) + 1 == self.stop_after and rank == world // 2

            def report(record: Any) -> None:
                if rank == 0:
                    self.records.append(dict(record))

            context = WorkerContext(reader=self._read, report=report, stopping=stopping)
            training = Training(models[rank], config, selection, self.out, {}, context)
            try:
                training.run(Phase("pretrain", "pretraining", config.epochs))
            except Stopped:
                assert self.stop_after is not None

        with quiet():
            on_ranks(world, work)
        return models

    def _read(self, row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
        """As `read_direct`, counted."""
        what = "training" if "features" in columns else "account"

        def opening(url: str) -> ParquetReads:
            self.opened[what] += 1
            return open_parquet(url)

        for table in read_planned(plan_reads(row_groups), columns, lru_cache(OPEN_FILES)(opening), threads=0):
            self.row_groups[what] += 1
            yield table


def bench_many() -> list[Row]:
    """How requests, bytes, messages and seconds grow from 4 to 256 workers."""
    with storage.scratch.directory() as folder:
        data = f"{folder}/data"
        write_groups(data)
        measured = {world: apart(_measure, world, data, f"{folder}/{world}") for world in WORLDS}
    with ray_cluster(cpus=_PROCESSES):
        _posts(1)  # starts the processes
        for world in WORLDS:
            measured[world] |= _posts(world)
    return [
        _row(name, goal, note, [measured[world][name] for world in WORLDS]) for name, (goal, note) in _GROWTH.items()
    ]


_LINEAR = WORLDS[-1] / WORLDS[0]
_GROWTH = {
    "data files opened for the account": (_LINEAR, "64 files; a worker reads row groups that follow one another"),
    "data files opened in an epoch": (_LINEAR, "at most one for each of 905 row groups, in random order"),
    "row groups read in an epoch": (1.0, ""),
    "checkpoint files opened to resume": (1.0, "rank 0 reads, and broadcasts"),
    "bytes of a checkpoint's manifest": (1.05, f"{STREAMS} streams, whose positions are most of it"),
    "bytes of an epoch's record": (_LINEAR, "waiting and memory of each worker, once an epoch"),
    "posts in a mailbox that nobody empties": (_LINEAR, "each worker joins, beats every second for five, and leaves"),
    "ms of the mailbox a second": (_LINEAR, "processor time of its actor; the workers are in three processes of Ray"),
    "requests to torchrun's store in a beat": (1.0, "of a worker; it was 1 + 2 W"),
    "ms of plan in a worker": (1.2, f"{ON_PAPER:,} row groups, {STREAMS} streams, processor time"),
}
"""Growth from 4 to 256 workers that is accepted, and what is to be known of it."""


def _row(name: str, goal: float, note: str, values: Sequence[float]) -> Row:
    by_world = ", ".join(f"{world}: {value:,.4g}" for world, value in zip(WORLDS, values, strict=True))
    growth = values[-1] / values[0]
    return Row(f"{WORLDS[0]} -> {WORLDS[-1]} workers, {name}", growth, by_world, note=note, goal=goal, at_least=False)


def _measure(world: int, data: str, out: str) -> dict[str, float]:
    """A training that is stopped and resumed, and the plan of one of its workers; in a process of its own."""
    torch.set_num_threads(1)
    opened = _opened_below(join(out, "checkpoints"))
    stopped, resumed = SmallTraining(data, out, stop_after=STEPS // 2), SmallTraining(data, out)
    stopped.run(world)
    (checkpoint,) = list_checkpoints(join(out, "checkpoints"))
    manifest_bytes, before = len(storage.read_bytes(join(checkpoint, storage.MANIFEST))), len(opened)
    resumed.run(world)
    whole = SmallTraining(data, f"{out}-whole")
    whole.run(world)
    return {
        "data files opened for the account": whole.opened["account"],
        "data files opened in an epoch": whole.opened["training"],
        "row groups read in an epoch": whole.row_groups["training"],
        "checkpoint files opened to resume": len(opened) - before,
        "bytes of a checkpoint's manifest": manifest_bytes,
        "bytes of an epoch's record": len(json.dumps(whole.records[-1])),
        "requests to torchrun's store in a beat": requests_of_a_beat(world),
        "ms of plan in a worker": 1e3 * cpu_seconds(partial(_plan, world), repeats=3)[0],
    }


def _opened_below(folder: str) -> list[str]:
    """A list to which every opening of a file below a folder by Python is added from now on, until the process ends."""
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(folder):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    return opened


class CountingStore(dist.Store):  # type: ignore[misc, name-defined]
    """A store of torch in memory that counts its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self._store = dist.HashStore()  # type: ignore[attr-defined]

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self.requests += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.requests += 1
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""
        self.requests += 1
        return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values."""
        self.requests += 1
        return self._store.multi_get(keys)


def requests_of_a_beat(world: int) -> int:
    """Requests to the store of torchrun's agent for one beat of a worker of several."""
    store = CountingStore()

    def work(rank: int) -> None:
        control: Any = dist.group.WORLD
        watchers = Watchers(World(rank, store, control, itertools.count()), hang_s=600)
        dist.barrier()
        if rank == 0:
            store.requests = 0
        dist.barrier()
        watchers.beat(WorkerProgress(1, 1))

    on_ranks(world, work)
    return round(store.requests / world)


def _plan(world: int) -> None:
    """Count an epoch of the data set on paper, and plan what a worker reads of it."""
    config = StreamConfig(docs_per_batch=1 << 20, streams=STREAMS)
    stream = GroupStream(on_paper(), config, world=world, reader=no_reader)
    assert stream.groups_per_epoch
    assert stream.documents_per_epoch
    until_read(stream.epoch(0))


@cache
def on_paper() -> Selection:
    """A selection of 35 million lists, 420 million documents, as the manifest of many files would list them."""
    features = plain_features(12)
    documents = np.random.default_rng(0).integers(3_000, 5_401, ON_PAPER).tolist()
    file = FileToRead("", "all", dataset="s3://logs/news", sha256="0" * 64, bytes=1 << 28, stored=features)
    files = [replace(file, url=f"s3://logs/news/part-{i:05d}.parquet") for i in range(-(-ON_PAPER // 32))]
    row_groups = RowGroups.from_iterable(
        RowGroup(files[i // 32], i % 32, 350, n, 4, first_labelled=4 * i) for i, n in enumerate(documents)
    )
    return Selection(features, row_groups, "on paper", labelled=False)


def _posts(world: int) -> dict[str, float]:
    """Posts that the mailbox holds in the end, and its processor time; the workers are tasks of Ray."""
    import ray

    mailbox = open_mailbox()
    work = ray.remote(_post).options(num_cpus=1)
    running = [work.remote(mailbox, range(p, world, _PROCESSES)) for p in range(_PROCESSES)]
    before = ray.get(mailbox.__ray_call__.remote(lambda _: time.process_time()))
    ray.get(running)
    seconds = ray.get(mailbox.__ray_call__.remote(lambda _: time.process_time())) - before
    posts = ray.get(mailbox.take.remote())
    ray.kill(mailbox)
    return {
        "posts in a mailbox that nobody empties": len(posts),
        "ms of the mailbox a second": 1e3 * seconds / _LISTEN_S,
    }


def _post(mailbox: Any, ranks: Sequence[int]) -> None:
    """Join, send a beat every second, and leave, for each of these ranks."""

    def beat(rank: int, counts: WorkerProgress) -> None:
        mailbox.post.remote(Beat(rank, counts))

    senders = {rank: Sender(mailbox) for rank in ranks}
    with ExitStack() as stack:
        for rank, sender in senders.items():
            sender(WorkerJoined(rank, None))
            stack.enter_context(Pulse().sent(partial(beat, rank)))
        time.sleep(_LISTEN_S)
    for rank, sender in senders.items():
        sender(Left(rank, None))
        sender.flush()
