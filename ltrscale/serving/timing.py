"""The time of one query from raw rows to scores, with the files of an export in this process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ltrscale.bundle import Bundle
from ltrscale.serving import raw_check
from ltrscale.serving.format import Format, MatrixScorer

_QUERIES, _WARM = 1_000, 20


@dataclass(frozen=True)
class QueryTimes:
    """Seconds of each query: to make the matrix of its raw rows, and to score it; None where nothing here scores."""

    rows: int
    """Of each query."""
    matrix_Q: NDArray[np.float64]
    scores_Q: NDArray[np.float64] | None

    def __str__(self) -> str:
        parts = [f"raw rows to the model's features {_shown(self.matrix_Q)}"]
        if self.scores_Q is not None:
            whole = f"raw rows to scores {_shown(self.matrix_Q + self.scores_Q)}"
            parts = [whole, *parts, f"features to scores {_shown(self.scores_Q)}"]
        return f"one query of {self.rows} rows, {len(self.matrix_Q):,} times: {'; '.join(parts)}"


def time_queries(folder: Path, bundle: Bundle, to: Format, files: Sequence[str], rows: int) -> QueryTimes | None:
    """Time the queries that the first rows of some files make, each of so many rows; None without such rows.

    The model is open beforehand, as in a service, and the first queries are not counted.

    Args:
        folder: with the files of the export.
        bundle: what was exported.
        to: the format.
        files: files of raw rows.
        rows: rows of each query.
    """
    module = raw_check.transformer(folder)
    sampled = raw_check.sample(bundle, module, files, rows * (_QUERIES + _WARM))
    if sampled is None:
        return None
    lists = [sampled.rows[start : start + rows] for start in range(0, len(sampled.rows), rows)]
    lists = lists[:-1] if len(lists) > 1 and len(lists[-1]) < rows else lists
    reader, found = to.readers(folder)[0] if to.in_process else None, []
    for row_list in [*lists[:_WARM], *lists]:
        found.append(_timed(row_list, module.inputs, reader))
    seconds_Q2 = np.array(found[min(_WARM, len(lists)) :])
    return QueryTimes(len(lists[0]), seconds_Q2[:, 0], None if reader is None else seconds_Q2[:, 1])


def _timed(
    rows: Sequence[Any], inputs: Callable[[Any], list[float]], reader: MatrixScorer | None
) -> tuple[float, float]:
    start = time.perf_counter()
    matrix_NG = np.array([inputs(row) for row in rows], np.float32)
    made = time.perf_counter()
    if reader is not None:
        reader(matrix_NG)
    return made - start, time.perf_counter() - made


def _shown(seconds_Q: NDArray[np.float64]) -> str:
    p50, p99 = np.percentile(seconds_Q * 1000, [50, 99])
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"
