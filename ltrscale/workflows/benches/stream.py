"""Ragged shuffled batches against a bare pyarrow scan of the same files."""

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import pyarrow as pa
from pyarrow import dataset as arrow_dataset

from ltrscale import storage
from ltrscale.data.manifest import Feature, Manifest
from ltrscale.data.split import Selection, Split, select
from ltrscale.data.stream import GroupStream, StreamConfig
from ltrscale.data.writer import DatasetWriter
from ltrscale.workflows.benches.row import Row
from ltrscale.workflows.benches.shapes import N_FEATURES, mslr_lengths

GOAL = 0.9
_GROUPS = 4400  # with 136 features about 300 MB
_GROUPS_A_BLOCK = 400
_ROUNDS = 5


def bench_stream() -> list[Row]:
    """Documents per CPU-second of a shuffled `GroupStream`, relative to a scan that reads the columns and drops them.

    One thread each, interleaved in one process, the file cache warm; the median of five ratios.
    """
    rows = []
    for compression in ("none", "zstd"):
        with tempfile.TemporaryDirectory() as folder:
            _write(folder, compression)
            rows.append(_compare(select(Split(data=(folder,)), labelled=True), compression))
    return rows


def _compare(selection: Selection, compression: str) -> Row:
    stream = GroupStream(selection, StreamConfig(docs_per_batch=16384))
    files = sorted({row_group.url for row_group in selection.row_groups})
    filesystem, _ = storage.arrow_filesystem(files[0])
    scanned = arrow_dataset.dataset(files, format="parquet", filesystem=filesystem)

    def ours() -> int:
        return sum(groups.n_documents for step in stream.epoch(0) for groups in step.values() if groups is not None)

    def peer() -> int:
        batches = scanned.to_batches(columns=["gid", "features", "labels"], use_threads=False)
        return sum(len(batch.column("labels").values) for batch in batches)

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
    """Documents per second of user and system time."""
    began = time.process_time()
    documents = work()
    return documents / (time.process_time() - began)


def _write(url: str, compression: Literal["none", "zstd"]) -> None:
    """A data set with lists like those of MSLR-WEB and values that compress about as its do."""
    rng = np.random.default_rng(0)
    lengths_Q = mslr_lengths(_GROUPS, seed=0)
    with storage.Commit(url) as commit:
        writer = DatasetWriter(commit, n_features=N_FEATURES, compression=compression)
        for first in range(0, _GROUPS, _GROUPS_A_BLOCK):
            block_Q = lengths_Q[first : first + _GROUPS_A_BLOCK]
            n = int(block_Q.sum())
            features_NF = np.where(rng.random((n, N_FEATURES)) < 0.4, 0, rng.normal(size=(n, N_FEATURES)).round(2))
            columns = {
                "gid": pa.array(np.arange(first, first + len(block_Q))),
                "features": _lists(features_NF, block_Q * N_FEATURES),
                "labels": _lists(rng.integers(0, 5, n), block_Q),
            }
            writer.add("all", pa.table(columns))
        files = tuple(writer.close())
        features = tuple(Feature(name=f"f{i}") for i in range(N_FEATURES))
        commit.finish(Manifest(features=features, files=files).model_dump(mode="json"))


def _lists(values: np.ndarray, lengths_Q: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths_Q)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel().astype(np.float32)))
