"""The time of one query with an export in this process, from raw rows to scores.

Shapes: N rows, G columns of the matrix, Q queries.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.bundle import load
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError
from ltrscale.serving.format import Format, MatrixScorer
from ltrscale.serving.raw import CODE, NO_ITEMS, RawSample, raw_files_of, sample_raw

_QUERIES, _WARM = 1_000, 20


def query_times(to: Format, bundle_url: str, out: str, *, raw: str | None, data: str) -> str:
    """The times of queries with an export, each of as many raw rows as the data set's mean group has documents.

    Raises:
        InputError: the export has no transformer, or no raw row can be used.
    """
    bundle, manifest = load(bundle_url), storage.read_manifest(out) or {}
    if CODE not in storage.listed_in(manifest):
        raise InputError(f"measure: {out} has no {CODE}: its model {NO_ITEMS}")
    counts = open_dataset(data).manifest.counts()
    rows = max(1, round(counts.documents / max(1, counts.groups)))
    with storage.scratch.directory() as folder:
        for name in storage.listed_in(manifest):
            (folder / name).write_bytes(storage.read_verified(out, name, manifest))
        sampled = sample_raw(bundle, folder, raw_files_of(raw, data), rows * (_QUERIES + _WARM))
        if sampled is None:
            raise InputError("measure: no raw row that can be used is at hand; name some as raw")
        return _time_queries(sampled, to, folder, rows)


def _time_queries(sampled: RawSample, to: Format, folder: Path, rows: int) -> str:
    """The times of queries of `rows` raw rows each, with the export in a folder."""
    lists = [sampled.rows[start : start + rows] for start in range(0, len(sampled.rows), rows)]
    lists = lists[:-1] if len(lists) > 1 and len(lists[-1]) < rows else lists
    reader = to.readers(folder)[0] if to.in_process else None
    seconds = [_timed(row_list, sampled.transformer.inputs, reader) for row_list in [*lists[:_WARM], *lists]]
    matrix_Q, scores_Q = np.array(seconds[min(_WARM, len(lists)) :]).T
    parts = [f"raw rows to the model's features {_shown(matrix_Q)}"]
    if reader is None:
        parts.append(f"{to.kind} scores in a program of its own")
    else:
        parts = [f"raw rows to scores {_shown(matrix_Q + scores_Q)}", *parts, f"features to scores {_shown(scores_Q)}"]
    return f"one query of {len(lists[0])} rows, {len(matrix_Q):,} times: {'; '.join(parts)}"


def _timed(
    rows: Sequence[Any], inputs: Callable[[Any], list[float]], reader: MatrixScorer | None
) -> tuple[float, float]:
    start = time.perf_counter()
    matrix_NG = np.array([inputs(row) for row in rows], np.float32)
    middle = time.perf_counter()
    if reader is not None:
        reader(matrix_NG)
    return middle - start, time.perf_counter() - middle


def _shown(seconds_Q: NDArray[np.float64]) -> str:
    p50, p99 = np.percentile(seconds_Q * 1000, [50, 99])
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"
