"""Ragged shuffled batches against a bare pyarrow scan of the same files."""

import statistics
import time
from collections.abc import Callable

from pyarrow import dataset as arrow_dataset

from jobs.bench.measure import Row
from jobs.bench.remote import bench_remote
from jobs.bench.shapes import N_FEATURES, write_dataset
from ltrscale import storage
from ltrscale.data.dataset.split import Selection, Split, select
from ltrscale.data.stream.batches import GroupStream, StreamConfig

GOAL = 0.9
_GROUPS = 4400  # with 136 features about 300 MB
_ROUNDS = 5


def bench_stream() -> list[Row]:
    """Documents per CPU-second of a shuffled `GroupStream`, relative to a scan that reads the columns and drops them.

    One thread each, interleaved in one process, with a warm file cache and verified page checksums; the median of five
    ratios. The rows of Ray Data on S3, by wall clock, follow.
    """
    rows = []
    for compression in ("none", "zstd"):
        with storage.scratch.directory() as folder:
            write_dataset(str(folder), compression, groups=_GROUPS)
            rows.append(_compare(select(Split(data=(str(folder),)), labelled=True), compression))
    return rows + bench_remote()


def _compare(selection: Selection, compression: str) -> Row:
    stream = GroupStream(selection, StreamConfig(docs_per_batch=16384))
    files = sorted({row_group.url for row_group in selection.row_groups})
    filesystem, _ = storage.arrow_filesystem(files[0])
    scanned = arrow_dataset.dataset(files, format="parquet", filesystem=filesystem)
    checked = arrow_dataset.ParquetFragmentScanOptions(page_checksum_verification=True)

    def ours() -> int:
        steps = stream.epoch(0)
        return sum(groups.n_documents for step in steps for groups in step.micro_batches.values() if groups is not None)

    def peer() -> int:
        columns = ["gid", "features", "labels"]
        batches = scanned.to_batches(columns=columns, use_threads=False, fragment_scan_options=checked)
        return sum(len(batch.column("labels").values) for batch in batches)

    # the first round warms the file cache
    rates = [(_documents_per_second(ours), _documents_per_second(peer)) for _ in range(_ROUNDS + 1)][1:]
    own, scan = (statistics.median(column) for column in zip(*rates, strict=True))
    return Row(
        name=f"ragged batches / pyarrow scan ({compression})",
        ratio=statistics.median(mine / theirs for mine, theirs in rates),
        goal=GOAL,
        at_least=True,
        ours=f"{own / 1e6:.2f} M docs/CPU-s",
        peer=f"{scan / 1e6:.2f} M docs/CPU-s",
        note=f"{N_FEATURES} features, lists of {selection.n_documents / selection.n_groups:.0f}, one thread",
    )


def _documents_per_second(work: Callable[[], int]) -> float:
    """Documents per second of processor time (user and system)."""
    began = time.process_time()
    documents = work()
    return documents / (time.process_time() - began)
