"""Rows of a raw log under examination: which of them cannot be used, and why.

Shapes: N rows of a batch.
"""

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.ingest.categories import CategoryEncoder
from ltrscale.data.ingest.mapping import ColumnMapping, GroupColumns
from ltrscale.data.ingest.rows import TEXT_LENGTH, Rejection, Rule, Texts

Encoders = dict[str, CategoryEncoder]
"""The encoder of each categorical feature, by name."""


class RowTexts:
    """What the quarantine shows of Parquet rows: their columns as JSON, by the number of the row."""

    def __init__(self, batch: pa.RecordBatch, lines_N: NDArray[np.int64]) -> None:
        self.batch, self.lines_N = batch, lines_N
        self._last = 0, ""  # all documents of a bad group ask for one row, which may be long

    def __call__(self, line: int) -> str:
        """The text of one row."""
        if self._last[0] != line:
            row = int(np.searchsorted(self.lines_N, line))
            columns = zip(self.batch.schema.names, self.batch, strict=True)
            values = {name: _plain(column[row]) for name, column in columns}
            self._last = line, json.dumps(values, default=str, ensure_ascii=False)[:TEXT_LENGTH]
        return self._last[1]

    def only(self, lines_N: NDArray[np.int64]) -> "RowTexts":
        """The texts of these rows, without the rest of the batch in memory."""
        lines = np.unique(lines_N)
        return RowTexts(self.batch.take(pa.array(np.searchsorted(self.lines_N, lines))), lines)


def _plain(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except (UnicodeDecodeError, ValueError, OverflowError):
        return "(not readable)"


class Examined:
    """The rows of a batch and what is wrong with them; the first finding counts."""

    def __init__(self, batch: pa.RecordBatch, file: str) -> None:
        self.batch, self.file = batch, file
        self.bad_N = np.zeros(len(batch), dtype=bool)
        self._findings: dict[int, tuple[Rule, str]] = {}

    def reject(self, bad_N: NDArray[np.bool_], reason: str, rule: Rule = "unparsable") -> None:
        """Note what is wrong with some rows."""
        for i in np.flatnonzero(bad_N & ~self.bad_N).tolist():
            self._findings[i] = rule, reason
        self.bad_N |= bad_N

    def texts(self, name: str, *, required: bool = False) -> pa.StringArray:
        """A column as text; rows in which it is not UTF-8, or has no value where it must, are rejected."""
        text_N, broken_N = cols.texts(self.batch.column(name))
        self.reject(broken_N, f"column {name!r} is not text in UTF-8")
        if required:
            lacking_N = pc.or_kleene(pc.is_null(text_N), pc.equal(text_N, "")).to_numpy(zero_copy_only=False)
            self.reject(lacking_N, f"column {name!r} has no value")
        return text_N

    def periods(self, mapping: ColumnMapping | GroupColumns) -> pa.StringArray | None:
        """The period of each row, where a column gives it."""
        if mapping.period_column is not None and mapping.period_column in self.batch.schema.names:
            return self.texts(mapping.period_column, required=True)
        if mapping.time is None:
            return None
        periods_N, bad_N = cols.periods(self.batch.column(mapping.time), mapping.period)
        self.reject(bad_N, f"column {mapping.time!r} is not a time stamp")
        return periods_N

    def meta(self, names: Sequence[str]) -> dict[str, pa.Array]:
        """Columns of groups, as they are, by their names in the data set."""
        found = {}
        for name in names:
            column = cols.plain(self.batch.column(name))
            key = f"meta_{name.removeprefix('meta_')}"  # a data set's own columns keep their names
            found[key] = self.texts(name) if cols.is_text(column.type) else column
        return found

    def rejections(
        self,
        lines_N: NDArray[np.int64],
        texts: Texts,
        query_ids_N: pa.StringArray,
        rows_N: NDArray[np.int64] | None = None,
    ) -> list[Rejection]:
        """One for each bad row, in order; `rows_N` is what each counts, 1 by default."""
        found = []
        for i in np.flatnonzero(self.bad_N).tolist():
            rule, reason = self._findings[i]
            line, rows = int(lines_N[i]), 1 if rows_N is None else int(rows_N[i])
            shown = f"{reason}: {texts(line)}"[:TEXT_LENGTH]
            found.append(Rejection(self.file, line, rule, shown, query_ids_N[i].as_py() or "", rows))
        return found
