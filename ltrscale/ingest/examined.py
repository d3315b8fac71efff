"""The rows of a batch of a raw log, with the faults that make some of them unusable.

Shapes: N rows.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.times import Clock, instants, periods
from ltrscale.ingest.mapping import ColumnMapping, ListColumns
from ltrscale.ingest.rows import TEXT_LENGTH, RawTexts, Rejection, Rule, plain_value


class Examined:
    """The rows of a batch and their faults; the first fault of a row counts."""

    def __init__(self, batch: pa.RecordBatch, file: str) -> None:
        self.batch, self.file = batch, file
        self.bad_N = np.zeros(len(batch), dtype=bool)
        self._findings: dict[int, tuple[Rule, str, str]] = {}

    def reject(
        self,
        bad_N: NDArray[np.bool_],
        reason: str,
        rule: Rule = "unparsable",
        *,
        column: str | None = None,
        fault: str = "",
    ) -> None:
        """Record a fault of some rows, the column whose values show it, and perhaps the fault of a value in words."""
        for i in np.flatnonzero(bad_N & ~self.bad_N).tolist():
            found = reason
            if column is not None:
                value = repr(plain_value(self.batch.column(column)[i]))
                found = f"{value} {fault}" if fault else f"{reason} ({value})"
            self._findings[i] = rule, reason, found
        self.bad_N |= bad_N

    def reject_each(self, faults: Mapping[int, str], rule: Rule) -> None:
        """Record a fault of single rows, each in words of its own."""
        for i, found in faults.items():
            if not self.bad_N[i]:
                self._findings[i] = rule, found, found
                self.bad_N[i] = True

    def texts(self, name: str, *, required: bool = False) -> pa.StringArray:
        """A column as text; rows where it is not UTF-8, or lacks a required value, are rejected."""
        text_N, broken_N = cols.texts(self.batch.column(name))
        self.reject(broken_N, f"column {name!r} is not text in UTF-8")
        if required:
            lacking_N = pc.or_kleene(pc.is_null(text_N), pc.equal(text_N, "")).to_numpy(zero_copy_only=False)
            self.reject(lacking_N, f"column {name!r} has no value")
        return text_N

    def periods(self, mapping: ColumnMapping | ListColumns) -> pa.StringArray | None:
        """The period of each row, if a column determines it."""
        if mapping.period_column is not None and mapping.period_column in self.batch.schema.names:
            return self.texts(mapping.period_column, required=True)
        if mapping.time is None:
            return None
        periods_N, bad_N = periods(self.batch.column(mapping.time), mapping.period, mapping.clock)
        self.reject(bad_N, f"column {mapping.time!r} is not a time stamp", column=mapping.time)
        return periods_N

    def seconds(self, name: str, clock: Clock) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """A column of times in seconds since 1970, and the rows without one; rows that cannot be read are rejected."""
        column = self.batch.column(name)
        seconds_N, bad_N = instants(column, clock)
        missing_N = bad_N & column.is_null().to_numpy(zero_copy_only=False)
        self.reject(bad_N & ~missing_N, f"column {name!r} is not a time or date", column=name)
        return seconds_N, bad_N

    def meta(self, names: Sequence[str]) -> dict[str, pa.Array]:
        """Columns of groups, unchanged, by their names in the data set."""
        found = {}
        for name in names:
            column = cols.without_dictionary(self.batch.column(name))
            key = f"meta_{name.removeprefix('meta_')}"  # a data set that is read again keeps its columns' names
            found[key] = self.texts(name) if cols.is_text(column.type) else column
        return found

    def rejections(
        self,
        lines_N: NDArray[np.int64],
        texts: RawTexts,
        query_ids_N: pa.StringArray,
        rows_N: NDArray[np.int64] | None = None,
    ) -> list[Rejection]:
        """One rejection for each bad row, in order; it counts as `rows_N` input rows, 1 by default."""
        rejected = []
        for i in np.flatnonzero(self.bad_N).tolist():
            rule, reason, found = self._findings[i]
            line, rows = int(lines_N[i]), 1 if rows_N is None else int(rows_N[i])
            shown = f"{reason}: {texts(line)}"[:TEXT_LENGTH]
            query = query_ids_N[i].as_py() or ""
            rejected.append(Rejection(self.file, line, rule, shown, query, rows, found))
        return rejected
