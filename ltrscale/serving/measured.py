"""The time of one query of 100 documents with an export on one core of this process, from raw rows to scores.

Shapes: N rows, G columns of the matrix, Q queries.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ltrscale import storage
from ltrscale.bundle import Bundle, load
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import first_groups
from ltrscale.errors import InputError
from ltrscale.serving.format import Format, MatrixScorer, features_in
from ltrscale.serving.raw import CODE, RawSample, raw_files_of, sample_raw

_QUERIES, _WARM = 1_000, 20
_DOCUMENTS, _DISTINCT = 100, 5_000


def query_times(to: Format, bundle_url: str, out: str, *, raw: str | None, data: str) -> str:
    """The times of queries with an export; without raw rows those of the model alone.

    Raises:
        InputError: the model scores in a program of its own, and there are no raw rows to make features of.
    """
    bundle, manifest = load(bundle_url), storage.read_manifest(out) or {}
    with storage.scratch.directory() as folder, _one_core():
        for name in storage.listed_in(manifest):
            (folder / name).write_bytes(storage.read_verified(out, name, manifest))
        sampled = None
        if CODE in storage.listed_in(manifest):
            sampled = sample_raw(bundle, folder, raw_files_of(raw, data), _DISTINCT)
        reader = to.readers(folder)[0] if to.in_process else None
        with threadpool_limits(1):  # of the libraries that the reader has loaded
            if sampled is not None:
                return _from_rows(sampled, to, reader)
            if reader is None:
                raise InputError(
                    f"measure: {to.kind} scores in a program of its own, and {out} has no raw rows to read"
                )
            return _from_features(_matrix(bundle, folder, data), reader)


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, to one core where the system can."""
    if not hasattr(os, "sched_setaffinity"):  # macOS
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _matrix(bundle: Bundle, folder: Path, data: str) -> NDArray[np.float32]:
    """The matrix of documents of a data set."""
    selection = select(Split(data=(data,)), labelled=False).serving(bundle.features, whose=bundle.url)
    names = [feature.name for feature in bundle.features]
    return features_in(folder).matrix(names, first_groups(selection, _DISTINCT).features_NF.numpy())


def _lists(n: int) -> list[NDArray[np.int64]]:
    """The places of the documents of each query, of `n` that come again and again."""
    return [np.arange(i * _DOCUMENTS, (i + 1) * _DOCUMENTS) % n for i in range(_QUERIES + _WARM)]


def _from_rows(sampled: RawSample, to: Format, reader: MatrixScorer | None) -> str:
    rows, inputs = sampled.rows, sampled.transformer.inputs
    lists = [[rows[i] for i in places] for places in _lists(len(rows))]
    matrix_Q, scores_Q = np.array([_timed(row_list, inputs, reader) for row_list in lists][_WARM:]).T
    parts = [f"raw rows to the model's features {_shown(matrix_Q)}"]
    if reader is None:
        parts.append(f"{to.kind} scores in a program of its own")
    else:
        parts = [f"raw rows to scores {_shown(matrix_Q + scores_Q)}", *parts, f"features to scores {_shown(scores_Q)}"]
    return f"{_HEAD}{'; '.join(parts)}"


def _from_features(matrix_NG: NDArray[np.float32], reader: MatrixScorer) -> str:
    lists = [matrix_NG[places] for places in _lists(len(matrix_NG))]
    seconds = [_timed(list_NG, None, reader)[1] for list_NG in lists][_WARM:]
    return f"{_HEAD}features to scores {_shown(np.array(seconds))}"


_HEAD = f"one query of {_DOCUMENTS} documents on one core, {_QUERIES:,} times: "


def _timed(
    rows: Sequence[Any] | NDArray[np.float32],
    inputs: Callable[[Any], list[float]] | None,
    reader: MatrixScorer | None,
) -> tuple[float, float]:
    """Seconds to make the features of raw rows, if they are such, and to score them."""
    start = time.perf_counter()
    matrix_NG = np.asarray(rows if inputs is None else [inputs(row) for row in rows], np.float32)
    middle = time.perf_counter()
    if reader is not None:
        reader(matrix_NG)
    return middle - start, time.perf_counter() - middle


def _shown(seconds_Q: NDArray[np.float64]) -> str:
    p50, p99 = np.percentile(seconds_Q * 1000, [50, 99])
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"
