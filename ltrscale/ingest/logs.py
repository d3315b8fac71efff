"""Turns batches of items (documents) into RowBlocks with one row per document, as the uses of the columns say.

In numeric columns null, NaN, and in CSV an empty field or NULL, are missing values (NaN); infinite values are passed
on. Categorical columns are encoded as in `categories`.

Shapes: N rows (documents), F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.times import part_of
from ltrscale.ingest import joins, tables
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.examined import Examined
from ltrscale.ingest.joins import Joined
from ltrscale.ingest.mapping import ColumnMapping, check_same_features, path_value, resolve_features
from ltrscale.ingest.rows import RowBlock, RowTexts, keep
from ltrscale.ingest.source import Encoders
from ltrscale.ingest.texts import TokenReader
from ltrscale.ingest.vocabularies import Encoding


def column_holds(
    kind: pa.DataType, form: tables.Form, *, number: bool
) -> Literal["number", "boolean", "integer", "text", "value"]:
    """What a column holds; `number` is whether its file reads it as such where it has text only."""
    kind = cols.value_type(kind)
    if form == "csv" and not number:
        return "text"
    if pa.types.is_boolean(kind):
        return "boolean"
    if number or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_integer(kind):
        return "integer"
    return "text" if cols.is_text(kind) or pa.types.is_null(kind) else "value"


def sources_of(mapping: ColumnMapping, features: Sequence[Feature]) -> set[str]:
    """The columns that features are made from."""
    return {mapping.source_of(feature.name) for feature in features}


def numbers_of(mapping: ColumnMapping, features: Sequence[Feature]) -> set[str]:
    """The columns that are read as numbers, where a file has text only."""
    dates, side = mapping.date_features(), mapping.side().values()
    label = [column for use, column in mapping.named().items() if use == "label"]
    return {*(f.name for f in features if f.kind == "numeric" and f.name not in dates), *side, *label}


def read_table(table: pa.Table, mapping: ColumnMapping, features: Sequence[Feature]) -> RowBlock:
    """The rows of a table in memory, as `Items` reads those of a Parquet file; for tables without texts or joins.

    Args:
        table: the rows, not too many for one block.
        mapping: the uses of the columns.
        features: the features to find.

    Raises:
        InputError: a column is missing or has a type that does not fit.
    """
    name = "the table"
    check_same_features(table.schema, resolve_features(table.schema, mapping, name), features, mapping, name, name)
    build = ItemBlocks(name, mapping, features, {})
    wanted = {*mapping.named().values(), *(mapping.source_of(feature.name) for feature in features)}
    rows = table.select([column for column in table.column_names if column in wanted]).combine_chunks()
    batch = cols.without_views(rows.to_batches()[0])
    lines_N = np.arange(1, len(batch) + 1)
    return build(tables.Raw(batch, lines_N, RowTexts(batch, lines_N), [], 1.0))


def _query_ids(rows: Examined, mapping: ColumnMapping) -> pa.StringArray:
    """The query id of each row: of one column, or of several with a bar between them."""
    parts = [rows.texts(name, required=True) for name in (mapping.query, *mapping.within)]
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, "|")


@dataclass(frozen=True)
class ItemBlocks:
    """Turns a batch of items into a RowBlock."""

    url: str
    mapping: ColumnMapping
    features: Sequence[Feature]
    encoders: Encoders
    joined: Sequence[Joined] = ()
    encoding: Encoding | None = None

    def __call__(self, raw: tables.Raw) -> RowBlock:
        """The rows that can be used, and the rejections of the others."""
        mapping = self.mapping
        rows = self._joined(raw.rows)
        batch = rows.batch
        block = RowBlock(
            file=self.url,
            lines_N=raw.lines_N,
            query_ids_N=_query_ids(rows, mapping),
            features_NF=self._features(rows),
            labels_N=self._labels(rows),
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
        """The rows with the columns of tables; rows without a key that a table must have are rejected."""
        faults: dict[int, str] = {}
        for table in self.joined:
            batch, bad_N, keys_N = table(batch)
            faults = {i: joins.fault(table, keys_N[i]) for i in np.flatnonzero(bad_N).tolist()} | faults
        rows = Examined(batch, self.url)
        rows.reject_each(faults, "not_joined")
        return rows

    def _tokens(self, rows: Examined) -> dict[str, pa.Array]:
        """The tokens of rows; rows with bad ones are rejected."""
        found: dict[str, pa.Array] = {}
        if self.mapping.tokens is not None:
            reader = TokenReader(self.mapping.tokens, self.encoding)
            for field, text in self.mapping.tokens.fields().items():
                column = rows.batch.column(text.column)
                if cols.is_text(cols.value_type(column.type)):
                    column = rows.texts(text.column)
                columns, faults = reader.read(field, column, text)
                rows.reject_each(faults, "bad_tokens")
                found |= columns
        return found

    def _labels(self, rows: Examined) -> NDArray[np.float32]:
        """The labels, NaN where there is none; rows whose value has no grade are rejected."""
        name, grades = self.mapping.label, self.mapping.grades
        if name is None:
            return np.full(len(rows.batch), np.nan, np.float32)
        if not isinstance(grades, dict):
            labels_N = cols.float_column(rows.batch.column(name))
            if grades is None:
                return labels_N
            # in float32, as the labels are: else 0.1 would not reach the cut point 0.1
            grades_N = np.searchsorted(np.array(grades, np.float32), labels_N, side="right").astype(np.float32)
            return np.where(np.isnan(labels_N), np.float32(np.nan), grades_N)
        # many tools write a column of integers as floats as soon as it has a null
        found = pc.replace_substring_regex(rows.texts(name), r"^(-?\d+)\.0$", r"\1")
        index_N = pc.index_in(found, pa.array(list(grades), pa.string()))
        unknown_N = pc.and_(pc.is_valid(found), pc.is_null(index_N)).to_numpy(zero_copy_only=False)
        fault = f"has no grade ({', '.join(grades)} have one)"
        rows.reject(unknown_N, f"column {name!r} {fault}", "bad_label", column=name, fault=fault)
        return cols.float_column(pa.array(list(grades.values()), pa.float32()).take(index_N))

    def _dates(self, rows: Examined) -> dict[str, NDArray[np.float32]]:
        """The features of dates, NaN where there is none."""
        mapping, found = self.mapping, {}
        time_N = rows.seconds(mapping.time, mapping.clock)[0] if mapping.dates and mapping.time else None
        for name, (column, part) in mapping.date_features().items():
            seconds_N, missing_N = rows.seconds(column, mapping.clock)
            values_N = part_of(part, seconds_N, time_N, mapping.clock)
            found[name] = np.where(missing_N, np.nan, values_N).astype(np.float32)
        return found

    def _features(self, rows: Examined) -> NDArray[np.float32]:
        features_NF = np.empty((len(rows.batch), len(self.features)), np.float32)
        dates = self._dates(rows)
        for i, feature in enumerate(self.features):
            column = pa.array(dates[feature.name]) if feature.name in dates else rows.batch.column(feature.name)
            if feature.kind == "numeric":
                features_NF[:, i] = cols.float_column(column)
                continue
            if cols.is_text(cols.value_type(column.type)):
                column = rows.texts(feature.name)
            features_NF[:, i] = self.encoders.setdefault(feature.name, CategoryEncoder()).encode(column)
        return features_NF
