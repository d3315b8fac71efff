"""Reads raw logs with one item (document) per row, block by block.

A config maps the columns. The reader yields RowBlocks with one row per document; memory does not grow with the file. In
numeric columns null, NaN, and in CSV an empty field or NULL, are missing values (NaN); infinite values are passed on.
Categorical columns are encoded as in `categories`.

Shapes: N rows (documents), F features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature, RawColumns
from ltrscale.data.times import part_of
from ltrscale.ingest import joins, tables
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.examined import Examined
from ltrscale.ingest.joins import Join, Joined
from ltrscale.ingest.mapping import ColumnMapping, agree, path_value, resolve
from ltrscale.ingest.rows import RowBlock, RowTexts, keep
from ltrscale.ingest.texts import TextReader
from ltrscale.ingest.vocabularies import Encoding

Encoders = dict[str, CategoryEncoder]
"""The encoder of each categorical feature, by name."""


def item_schema(url: str, mapping: ColumnMapping, joined: Sequence[Join] = ()) -> pa.Schema:
    """The columns of a file, with those that join its rows."""
    return joins.with_joined(tables.read_schema(url, mapping.dialect(url)), joined, mapping.dialect, url)


def item_features(url: str, mapping: ColumnMapping, joined: Sequence[Join] = ()) -> list[Feature]:
    """The features that `read_items` finds in a file."""
    return resolve(item_schema(url, mapping, joined), mapping, url)


def raw_columns(url: str, mapping: ColumnMapping, joined: Sequence[Join], features: Sequence[Feature]) -> RawColumns:
    """How a file has the columns that features are made of, as `read_items` reads them."""
    schema, form = item_schema(url, mapping, joined), tables.form(url)
    own, numbers = tables.read_schema(url, mapping.dialect(url)).names, _numbers(mapping, features)
    keys = {name for join in joined for name in join.key}
    used = {*_sources(mapping, features), *keys, *([mapping.time] if mapping.time in schema.names else [])}
    return RawColumns(
        rows=form,
        reads={
            name: _holds(schema.field(name).type, form if name in own else "parquet", number=name in numbers)
            for name in schema.names
            if name in used
        },
    )


def _holds(
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


def _sources(mapping: ColumnMapping, features: Sequence[Feature]) -> set[str]:
    """The columns that features are made from."""
    return {mapping.source_of(feature.name) for feature in features}


def _numbers(mapping: ColumnMapping, features: Sequence[Feature]) -> set[str]:
    """The columns that are read as numbers, where a file has text only."""
    dates, side = mapping.date_features(), mapping.side().values()
    label = [column for use, column in mapping.named().items() if use == "label"]
    return {*(f.name for f in features if f.kind == "numeric" and f.name not in dates), *side, *label}


def read_items(
    url: str,
    mapping: ColumnMapping,
    *,
    features: Sequence[Feature] | None = None,
    first: str = "the first file",
    encoders: Encoders | None = None,
    joined: Sequence[Joined] = (),
    encoding: Encoding | None = None,
    batch_rows: int = 1 << 16,
) -> Iterator[RowBlock]:
    """Read a log with one item (document) per row, in blocks of at most `batch_rows` rows.

    `lines_N` are row numbers (Parquet) or line numbers (of CSV with the header as line 1). Rejected as `unparsable`: a
    line that is no JSON object, or a CSV line with a wrong number of fields, misplaced quotes or a value that is no
    number in a numeric column; a row without a query id, with a time stamp or period that is missing or cannot be read,
    or with text that is not UTF-8. Rejected as `not_joined`: a row with a key that a table must have and has not; as
    `bad_tokens`: a row with a token that is no id of the vocabulary, or without a text that it must have.
    Partition columns in the path are ignored, except `period_column`.

    Args:
        url: A file named .parquet, .csv, .tsv or .jsonl, the last three perhaps with .gz or .xz.
        mapping: The uses of the columns.
        features: The features of the first of several files, from `item_features`; the others must have the same.
        first: The name of that file, for errors.
        encoders: Encoders by column, shared by the files of one data set so that collisions are counted once.
        joined: Tables whose columns join the rows.
        encoding: Makes tokens of texts; without it the tokens are texts, to train a tokenizer on.
        batch_rows: The most rows of a block.

    Raises:
        InputError: the file is missing, empty or damaged; a column is missing, has a type that does not fit, or
            differs from the first file.
    """
    dialect = mapping.dialect(url)
    schema = tables.read_schema(url, dialect)
    whole = joins.with_joined(schema, [table.join for table in joined], mapping.dialect, url)
    found = resolve(whole, mapping, url)
    if features is not None:
        agree(whole, found, features, mapping, url, first)
    used, known = found if features is None else features, {} if encoders is None else encoders
    build = _ItemBlocks(url, mapping, used, known, joined, encoding)
    sources, tokens = _sources(mapping, build.features), mapping.tokens.columns if mapping.tokens else ()
    wanted = {*mapping.named().values(), *mapping.meta, *sources, *tokens}
    wanted |= {name for table in joined for name in table.join.key}
    names = [name for name in schema.names if name in wanted]
    numbers = _numbers(mapping, build.features)
    yield from map(
        build,
        tables.read_rows(
            url, schema, names, numbers=numbers, query=mapping.query, dialect=dialect, batch_rows=batch_rows
        ),
    )


def read_table(table: pa.Table, mapping: ColumnMapping, features: Sequence[Feature]) -> RowBlock:
    """The rows of a table in memory, as `read_items` reads those of a Parquet file; for tables without texts or joins.

    Args:
        table: the rows, not too many for one block.
        mapping: the uses of the columns.
        features: the features to find.

    Raises:
        InputError: a column is missing or has a type that does not fit.
    """
    name = "the table"
    agree(table.schema, resolve(table.schema, mapping, name), features, mapping, name, name)
    build = _ItemBlocks(name, mapping, features, {})
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
class _ItemBlocks:
    """Turns a batch of items into a RowBlock."""

    url: str
    mapping: ColumnMapping
    features: Sequence[Feature]
    encoders: Encoders
    joined: Sequence[Joined] = ()
    encoding: Encoding | None = None

    def __call__(self, raw: tables.Raw) -> RowBlock:
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
            reader = TextReader(self.mapping.tokens, self.encoding)
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
            labels_N = cols.numbers(rows.batch.column(name))
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
        return cols.numbers(pa.array(list(grades.values()), pa.float32()).take(index_N))

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
                features_NF[:, i] = cols.numbers(column)
                continue
            if cols.is_text(cols.value_type(column.type)):
                column = rows.texts(feature.name)
            features_NF[:, i] = self.encoders.setdefault(feature.name, CategoryEncoder()).encode(column)
        return features_NF
