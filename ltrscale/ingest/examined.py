"""Turns batches of items into blocks of rows: what a config asks of their columns, and the faults of unusable rows.

Shapes: N rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ltrscale.arrays import Bools, Floats, Ints
from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.times import Clock, instants, part_of, periods
from ltrscale.data.vectors import Vectors, lists_of_texts, similarity
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.mapping import ColumnMapping, ListColumns
from ltrscale.ingest.rows import TEXT_LENGTH, Raw, RawTexts, Rejection, RowBlock, Rule, keep, plain_value
from ltrscale.ingest.schemas import path_value, with_optional
from ltrscale.ingest.source import Encoders
from ltrscale.ingest.tables import Joined
from ltrscale.ingest.texts import Encoding, TokenReader


class Examined:
    """The rows of a batch and their faults; the first fault of a row counts."""

    def __init__(self, batch: pa.RecordBatch, file: str) -> None:
        self.batch, self.file = batch, file
        self.bad_N = np.zeros(len(batch), dtype=bool)
        self._findings: dict[int, tuple[Rule, str, str]] = {}

    def reject(
        self,
        bad_N: Bools,
        reason: str,
        rule: Rule = "unparsable",
        *,
        column: str | None = None,
        fault: str = "",
    ) -> None:
        """Record a fault of some rows: the column with the bad values, and perhaps the fault in words."""
        for i in np.flatnonzero(bad_N & ~self.bad_N).tolist():
            shown = reason
            if column is not None:
                value = repr(plain_value(self.batch.column(column)[i]))
                shown = f"{value} {fault}" if fault else f"{reason} ({value})"
            self._findings[i] = rule, reason, shown
        self.bad_N |= bad_N

    def reject_each(self, faults: Mapping[int, str], rule: Rule) -> None:
        """Record faults of single rows, each with its own description."""
        for i, reason in faults.items():
            if not self.bad_N[i]:
                self._findings[i] = rule, reason, reason
                self.bad_N[i] = True

    def texts(self, name: str, *, required: bool = False) -> pa.StringArray:
        """A column as text; rows that are not UTF-8, or lack a required value, are rejected."""
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

    def labels(self, mapping: ColumnMapping) -> Floats:
        """The labels, NaN if missing; rows with a value that has no grade are rejected."""
        name, grades = mapping.label, mapping.grades
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
        self.reject(bad_N & ~missing_N, f"column {name!r} is not a time or date", column=name)
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
        self,
        lines_N: Ints,
        texts: RawTexts,
        query_ids_N: pa.StringArray,
        rows_N: Ints | None = None,
    ) -> list[Rejection]:
        """One rejection for each bad row, in order, counted as `rows_N` input rows (1 by default)."""
        rejected = []
        for i in np.flatnonzero(self.bad_N).tolist():
            rule, reason, finding = self._findings[i]
            line, rows = int(lines_N[i]), 1 if rows_N is None else int(rows_N[i])
            text, query = f"{reason}: {texts(line)}"[:TEXT_LENGTH], query_ids_N[i].as_py() or ""
            rejected.append(Rejection(self.file, line, rule, text, query, rows, finding))
        return rejected


@dataclass(frozen=True)
class ItemBlocks:
    """Turns a batch of items into a RowBlock."""

    url: str
    mapping: ColumnMapping
    features: Sequence[Feature]
    encoders: Encoders
    joined: Sequence[Joined] = ()
    encoding: Encoding | None = None

    def __call__(self, raw: Raw) -> RowBlock:
        """The usable rows, and the rejections of the others."""
        mapping = self.mapping
        rows = self._joined(raw.rows)
        batch = rows.batch
        ids = [rows.texts(name, required=True) for name in (mapping.query, *mapping.within)]
        block = RowBlock(
            file=self.url,
            lines_N=raw.lines_N,
            query_ids_N=ids[0] if len(ids) == 1 else pc.binary_join_element_wise(*ids, "|"),
            features_NF=self._features(rows),
            labels_N=rows.labels(mapping),
            period=path_value(self.url, mapping.period_column or "") or "",
            periods_N=rows.periods(mapping),
            doc_ids_N=None if mapping.item is None else rows.texts(mapping.item),
            columns={name: cols.floats(batch.column(column)) for name, column in mapping.side().items()}
            | rows.meta(mapping.meta)
            | self._tokens(rows),
            texts=raw.texts,
            share=raw.share,
        )
        rejected = raw.rejected + rows.rejections(raw.lines_N, raw.texts, block.query_ids_N)
        block = keep(block, ~rows.bad_N) if rows.bad_N.any() else block
        block.rejected = sorted(rejected, key=lambda rejection: rejection.line)
        return block

    def _joined(self, batch: pa.RecordBatch) -> Examined:
        """The rows with joined columns and missing optional ones; rows without a required key are rejected."""
        for field in [*with_optional(batch.schema, self.mapping)][batch.num_columns :]:
            batch = batch.append_column(field.name, pa.nulls(len(batch), field.type))
        faults: dict[int, str] = {}
        for table in self.joined:
            batch, bad_N, keys_N = table(batch)
            faults = {i: table.fault(keys_N[i]) for i in np.flatnonzero(bad_N).tolist()} | faults
        rows = Examined(batch, self.url)
        rows.reject_each(faults, "not_joined")
        return rows

    def _tokens(self, rows: Examined) -> dict[str, pa.Array]:
        """The tokens of rows; rows with bad tokens are rejected."""
        if self.mapping.tokens is None:
            return {}
        reader, tokens = TokenReader(self.mapping.tokens, self.encoding), dict[str, pa.Array]()
        for field, text in self.mapping.tokens.fields().items():
            columns, faults = reader.read(field, self._plain(rows, text.column), text)
            rows.reject_each(faults, "bad_tokens")
            tokens |= columns
        return tokens

    def _plain(self, rows: Examined, name: str) -> pa.Array:
        """A column; if it is text, rows that are not UTF-8 are rejected."""
        column = rows.batch.column(name)
        return rows.texts(name) if cols.is_text(cols.value_type(column.type)) else column

    def _features(self, rows: Examined) -> Floats:
        features_NF = np.empty((len(rows.batch), len(self.features)), np.float32)
        made = _dates(rows, self.mapping) | _vectors(rows, self.mapping)
        for i, feature in enumerate(self.features):
            name = feature.name
            if feature.kind == "numeric":
                features_NF[:, i] = made[name] if name in made else cols.float_column(rows.batch.column(name))
            else:
                column = pa.array(made[name]) if name in made else self._plain(rows, name)
                features_NF[:, i] = self.encoders.setdefault(name, CategoryEncoder()).encode(column)
        return features_NF


def _dates(rows: Examined, mapping: ColumnMapping) -> dict[str, Floats]:
    dates = {}
    time_N = rows.seconds(mapping.time, mapping.clock)[0] if mapping.dates and mapping.time else None
    for name, (column, part) in mapping.date_features().items():
        seconds_N, missing_N = rows.seconds(column, mapping.clock)
        values_N = part_of(part, seconds_N, time_N, mapping.clock)
        dates[name] = np.where(missing_N, np.nan, values_N).astype(np.float32)
    return dates


def _vectors(rows: Examined, mapping: ColumnMapping) -> dict[str, Floats]:
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
