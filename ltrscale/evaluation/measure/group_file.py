"""The file with every metric of every group that an evaluation commits beside its results.

`groups.parquet` has a row for each group and trial, with the group's slices but `all`, and every metric.

Shapes: Q groups, T or t trials of all or one method, M metrics.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.arrays import Doubles
from ltrscale.evaluation.measure.measuring import GroupValues
from ltrscale.evaluation.measure.report import Evaluation, MethodTrial
from ltrscale.evaluation.measure.slices import ALL

GROUPS = "groups.parquet"
"""The file with every metric of every group and trial."""
_ROWS_WAITING = 1 << 16


class GroupFile:
    """Writes `groups.parquet`, a row for each group and trial, as the groups arrive.

    A context manager. Memory holds about 65,536 rows.
    """

    def __init__(self, path: Path, metrics: Sequence[str], methods: Mapping[str, Sequence[MethodTrial]]) -> None:
        text = pa.string()
        columns = {"gid": pa.int64(), "period": text, "documents": pa.int64(), "slices": pa.list_(text)}
        columns |= {"method": text, "trial": pa.int32(), **dict.fromkeys(metrics, pa.float64())}
        schema = pa.schema(list(columns.items()))
        texts = ["period", "slices.list.element", "method", "trial"]
        self._writer = pq.ParquetWriter(path, schema, use_dictionary=texts)
        self._trials = [(name, number) for name, trials in methods.items() for number in range(len(trials))]
        self._waiting: list[pa.Table] = []

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
        for (method, number), values_MQ in zip(self._trials, values.values_TMQ, strict=True):
            columns = [
                values.gids_Q,
                pa.repeat(values.period, q),
                values.documents_Q,
                pa.ListArray.from_arrays(pa.array(offsets_Q1), names),
                pa.repeat(method, q),
                np.full(q, number, np.int32),
                *(pa.array(values_Q, mask=np.isnan(values_Q)) for values_Q in values_MQ),
            ]
            self._waiting.append(pa.table(columns, schema=self._writer.schema))
        if sum(map(len, self._waiting)) >= _ROWS_WAITING:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            table = pa.concat_tables(self._waiting)
            self._writer.write_table(table, row_group_size=len(table))
            self._waiting.clear()


def read_group_metrics(url: str, evaluation: Evaluation) -> list[Doubles]:
    """Every metric of every group and trial, [Q, t, M], for each method of a committed evaluation; NaN if undefined."""
    manifest = storage.read_manifest(url)
    assert manifest is not None
    table = pq.read_table(pa.BufferReader(storage.read_verified(url, GROUPS, manifest)))
    metrics = list(evaluation.methods[0].slices[ALL].summaries)
    methods = []
    for method in evaluation.methods:
        trials = []
        for trial in range(len(method.trials)):
            rows = table.filter((pc.field("method") == method.name) & (pc.field("trial") == trial))
            trials.append(np.stack([rows[metric].to_numpy() for metric in metrics], axis=1))
        methods.append(np.stack(trials, axis=1))
    return methods
