"""Reads what a config asks of the columns of a batch, and collects the faults of unusable rows.

Shapes: N rows.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale.arrays import Bools, Floats, Ints
from ltrscale.data import columns as cols
from ltrscale.data.columns import Vectors, lists_of_texts
from ltrscale.data.ids import parts
from ltrscale.data.times import Clock, instants, periods
from ltrscale.ingest.mapping import ColumnMapping, ListColumns
from ltrscale.ingest.rows import TEXT_LENGTH, Cause, RawTexts, Rejection, Rule, plain_value


class _Finding(NamedTuple):
    """A fault of a row, as in `Rejection`; `reason` is the same for all rows with this fault."""

    rule: Rule
    reason: str
    found: str
    cause: Cause = ""
    value: str = ""


class Examined:
    """The rows of a batch and their faults; the first fault of a row counts."""

    def __init__(self, batch: pa.RecordBatch, file: str) -> None:
        self.batch, self.file = batch, file
        self.bad_N = np.zeros(len(batch), dtype=bool)
        self._findings: dict[int, _Finding] = {}

    def reject(
        self,
        bad_N: Bools,
        reason: str,
        rule: Rule = "unparsable",
        *,
        column: str | None = None,
        fault: str = "",
        cause: Cause = "",
    ) -> None:
        """Record a fault of some rows: the column with the bad values, and perhaps the fault in words."""
        for i in np.flatnonzero(bad_N & ~self.bad_N).tolist():
            found, value = reason, ""
            if column is not None:
                bad = plain_value(self.batch.column(column)[i])
                found, value = f"{bad!r} {fault}" if fault else f"{reason} ({bad!r})", str(bad)
            self._findings[i] = _Finding(rule, reason, found, cause, value)
        self.bad_N |= bad_N

    def reject_each(self, faults: Mapping[int, str], rule: Rule) -> None:
        """Record faults of single rows, each with its own description."""
        for i, reason in faults.items():
            if not self.bad_N[i]:
                self._findings[i] = _Finding(rule, reason, reason)
                self.bad_N[i] = True

    def texts(self, name: str, *, required: bool = False) -> pa.StringArray:
        """A column as text; rows that are not UTF-8, or lack a required value, are rejected."""
        text_N, broken_N = cols.texts(self.batch.column(name))
        self.reject(broken_N, f"column {name!r} is not text in UTF-8", cause="encoding")
        if required:
            lacking_N = pc.or_kleene(pc.is_null(text_N), pc.equal(text_N, "")).to_numpy(zero_copy_only=False)
            self.reject(lacking_N, f"column {name!r} has no value")
        return text_N

    def periods(self, mapping: ColumnMapping | ListColumns, queries_N: pa.StringArray) -> pa.StringArray | None:
        """The period of each row, if a column or the query determines it."""
        if mapping.period == "part":
            return pa.array(parts(queries_N.fill_null("").to_pylist()), pa.string())
        if mapping.period_column is not None and mapping.period_column in self.batch.schema.names:
            return self.texts(mapping.period_column, required=True)
        if mapping.time is None:
            return None
        periods_N, bad_N = periods(self.batch.column(mapping.time), mapping.period, mapping.clock)
        self.reject(bad_N, f"column {mapping.time!r} is not a time stamp", column=mapping.time, cause="time")
        return periods_N

    def labels(self, mapping: ColumnMapping) -> Floats:
        """The labels, NaN if missing; rows with a value that has no grade are rejected."""
        name, grades = mapping.label_column, mapping.grades
        if name is None:
            return np.full(len(self.batch), np.nan, np.float32)
        if not isinstance(grades, dict):
            labels_N = cols.float_column(self.batch.column(name))
            if grades is None:
                return labels_N
            # in float32 like the labels, or 0.1 would not reach the cut point 0.1
            grades_N = np.searchsorted(np.array(grades, np.float32), labels_N, side="right").astype(np.float32)
            return np.where(np.isnan(labels_N), np.float32(np.nan), grades_N)
        # many tools write a column of integers as floats if it has a null
        values_N = pc.replace_substring_regex(self.texts(name), r"^(-?\d+)\.0$", r"\1")
        index_N = pc.index_in(values_N, pa.array(list(grades), pa.string()))
        unknown_N = pc.and_(pc.is_valid(values_N), pc.is_null(index_N)).to_numpy(zero_copy_only=False)
        fault = f"has no grade ({', '.join(grades)} have one)"
        self.reject(unknown_N, f"column {name!r} {fault}", "bad_label", column=name, fault=fault)
        return cols.float_column(pa.array(list(grades.values()), pa.float32()).take(index_N))

    def seconds(self, name: str, clock: Clock) -> tuple[Ints, Bools]:
        """A time column in seconds since 1970, and a mask of rows without a time; unreadable rows are rejected."""
        column = self.batch.column(name)
        seconds_N, bad_N = instants(column, clock)
        missing_N = bad_N & column.is_null().to_numpy(zero_copy_only=False)
        self.reject(bad_N & ~missing_N, f"column {name!r} is not a time or date", column=name, cause="time")
        return seconds_N, bad_N

    def vectors(self, name: str, size: int | None) -> Vectors:
        """A column of vectors; rows with a vector of the wrong length or with a gap are rejected."""
        column = cols.without_dictionary(self.batch.column(name))
        if cols.is_text(column.type):
            column, bad_N = lists_of_texts(column)
            self.reject(bad_N, f"column {name!r} is not a list of numbers", column=name)
        found = Vectors(column)
        other_N = found.lengths_N >= 0 if size is not None else np.zeros(len(self.batch), bool)
        other_N &= found.lengths_N != (size or 0)
        lengths = ((i, int(found.lengths_N[i])) for i in np.flatnonzero(other_N).tolist())
        self.reject_each({i: f"column {name!r} has {n} numbers, not {size}" for i, n in lengths}, "unparsable")
        self.reject(found.broken_N, f"column {name!r} lacks a number in its list")
        return found

    def meta(self, names: Sequence[str]) -> dict[str, pa.Array]:
        """Columns of groups, unchanged, keyed by their names in the data set."""
        columns = {}
        for name in names:
            column = cols.without_dictionary(self.batch.column(name))
            key = f"meta_{name.removeprefix('meta_')}"  # reading a data set again keeps its column names
            columns[key] = self.texts(name) if cols.is_text(column.type) else column
        return columns

    def rejections(
        self, lines_N: Ints, texts: RawTexts, query_ids_N: pa.StringArray, rows_N: Ints | None = None
    ) -> list[Rejection]:
        """One rejection for each bad row, in order, counted as `rows_N` input rows (1 by default)."""
        rejected = []
        for i in np.flatnonzero(self.bad_N).tolist():
            rule, reason, found, cause, value = self._findings[i]
            line, rows = int(lines_N[i]), 1 if rows_N is None else int(rows_N[i])
            text, query = f"{reason}: {texts(line)}"[:TEXT_LENGTH], query_ids_N[i].as_py() or ""
            rejected.append(Rejection(self.file, line, rule, text, query, rows, found, cause, value))
        return rejected
