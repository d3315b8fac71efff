"""`groups.parquet` of an evaluation: a row for each group and trial, with the group's slices and every metric.

Shapes: Q groups, T trials, M metrics.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale.evaluation.measure.parts import GroupValues
from ltrscale.evaluation.measure.trials import MethodTrial

GROUPS = "groups.parquet"
"""The file with every metric of every group and trial."""
_ROWS = 1 << 16


class GroupFile:
    """Writes `groups.parquet`, a row for each group and trial, as the groups come.

    A context manager. Memory holds about 65,536 rows.
    """

    def __init__(self, path: Path, metrics: Sequence[str], trials: Sequence[MethodTrial]) -> None:
        columns = {
            "gid": pa.int64(),
            "period": pa.string(),
            "documents": pa.int64(),
            "slices": pa.list_(pa.string()),
            "method": pa.string(),
            "trial": pa.int32(),
        }
        schema = pa.schema([*columns.items(), *((metric, pa.float64()) for metric in metrics)])
        texts = ["period", "slices.list.element", "method", "trial"]
        self._writer = pq.ParquetWriter(path, schema, use_dictionary=texts)
        self._trials, self._waiting = trials, list[pa.Table]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._write()
        self._writer.close()

    def add(self, values: GroupValues) -> None:
        """Add the groups of a row group."""
        q = len(values.gids_Q)
        group, slice_ = np.nonzero(np.stack(list(values.slices.values()), axis=1))
        names = pa.array(list(values.slices), pa.string()).take(pa.array(slice_))
        offsets_Q1 = np.searchsorted(group, np.arange(q + 1)).astype(np.int32)
        for t, trial in enumerate(self._trials):
            columns = [
                values.gids_Q,
                pa.repeat(values.period, q),
                values.documents_Q,
                pa.ListArray.from_arrays(pa.array(offsets_Q1), names),
                pa.repeat(trial.method, q),
                np.full(q, trial.number, np.int32),
                *(pa.array(values_Q, mask=np.isnan(values_Q)) for values_Q in values.values_QTM[:, t].T),
            ]
            self._waiting.append(pa.table(columns, schema=self._writer.schema))
        if sum(map(len, self._waiting)) >= _ROWS:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            table = pa.concat_tables(self._waiting)
            self._writer.write_table(table, row_group_size=len(table))
            self._waiting.clear()
