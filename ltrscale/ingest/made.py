"""Features made of columns of times, dates and vectors.

Shapes: N rows.
"""

import numpy as np
from numpy.typing import NDArray

from ltrscale.data.times import part_of
from ltrscale.data.vectors import similarity
from ltrscale.ingest.examined import Examined
from ltrscale.ingest.mapping import ColumnMapping


def made_features(rows: Examined, mapping: ColumnMapping) -> dict[str, NDArray[np.float32]]:
    """These features by name, NaN if missing; rows with unreadable values are rejected."""
    return _dates(rows, mapping) | _vectors(rows, mapping)


def _dates(rows: Examined, mapping: ColumnMapping) -> dict[str, NDArray[np.float32]]:
    dates = {}
    time_N = rows.seconds(mapping.time, mapping.clock)[0] if mapping.dates and mapping.time else None
    for name, (column, part) in mapping.date_features().items():
        seconds_N, missing_N = rows.seconds(column, mapping.clock)
        values_N = part_of(part, seconds_N, time_N, mapping.clock)
        dates[name] = np.where(missing_N, np.nan, values_N).astype(np.float32)
    return dates


def _vectors(rows: Examined, mapping: ColumnMapping) -> dict[str, NDArray[np.float32]]:
    read = {name: rows.vectors(name, size) for name, size in mapping.vector_columns.items()}
    tables = {name: read[name].rows_of_length(size) for name, size in mapping.vectors.items() if name in read}
    found = {name: tables[column][:, place] for name, (column, place) in mapping.vector_features().items()}
    for name, (kind, one, other) in mapping.similarity_features().items():
        x, y = read[one], read[other]
        unlike_N = (x.lengths_N != y.lengths_N) & (x.lengths_N >= 0) & (y.lengths_N >= 0)
        pairs = ((i, int(x.lengths_N[i]), int(y.lengths_N[i])) for i in np.flatnonzero(unlike_N).tolist())
        faults = {i: f"columns {one!r} and {other!r} have {n} and {m} numbers" for i, n, m in pairs}
        rows.reject_each(faults, "unparsable")
        found[name] = similarity(kind, x, y)
    return found
