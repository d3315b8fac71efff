"""Raw logs with one item (document) per row, read block by block in bounded memory.

`Items` finds the features of files (`resolve`) and reads batches of rows (`tables`); `ItemBlocks` makes blocks of
features of them (`rows`). In numeric columns null, NaN, and in CSV an empty field or NULL, are missing values (NaN);
infinite values are passed on. Categorical columns are encoded as in `categories`.

Shapes: N rows (documents), F features.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.arrays import Floats
from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature, RawColumns
from ltrscale.data.times import part_of
from ltrscale.data.vectors import similarity
from ltrscale.errors import InputError
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.examined import Examined
from ltrscale.ingest.history import LINE, HistoryConfig, RowHistory
from ltrscale.ingest.mapping import ColumnMapping, Fill
from ltrscale.ingest.resolve import check_same_features, missing, require, resolve_features, with_optional
from ltrscale.ingest.rows import Raw, RowBlock, RowTexts, keep
from ltrscale.ingest.source import Encoders, File, Needs, Reader, Source
from ltrscale.ingest.tables import (
    Form,
    Join,
    Joined,
    file_form,
    join_keys,
    load_table,
    numbers_in,
    read_rows,
    read_schema,
    with_joined,
)
from ltrscale.ingest.texts import Encoding, read_tokens

_ROWS, _VALUES = 1 << 14, 1 << 22
"""The most values of a block; rows with very many features make smaller blocks."""


class Items(Source):
    """Parquet, CSV or JSON lines with one item (document) per row."""

    kind: Literal["items"] = "items"
    columns: ColumnMapping
    """The uses of the columns."""
    joins: tuple[Join, ...] = ()
    """Tables whose columns join the rows, one after the other, such as the texts of documents."""
    history: HistoryConfig | None = Field(default=None, exclude_if=lambda history: history is None)
    """Numeric features of the events before a row, such as the clicks of its item in the last week."""

    @model_validator(mode="after")
    def _history_has_times(self) -> Self:
        if self.history is not None and self.columns.time is None:
            raise ValueError("history is of what was known at a row's time; name its column under columns.time")
        return self

    def find_features(self, files: Sequence[File]) -> tuple[Feature, ...]:
        """The features of the first file, at least one."""
        url = files[0].url
        whole = self._whole(files[0])
        features = resolve_features(whole, self.uses, url, keys=join_keys(self.joins))
        if not features:
            raise InputError(
                f"{url}: no column is left as a feature; those that features matches have another use or are no "
                "numbers; name texts under categorical, and times under dates"
            )
        return tuple(features)

    def open(
        self, features: Sequence[Feature], *, first: str, encoders: Encoders, encoding: Encoding | None = None
    ) -> Reader:
        """The reader of files with these features; the joined tables are loaded once.

        `lines_N` are row numbers (Parquet) or line numbers (in CSV the header is line 1). Rejected as `unparsable`: a
        line that is not a JSON object; a CSV line with a wrong number of fields, misplaced quotes or a non-number in a
        numeric column; a row without a query id, with a time stamp or period that is missing or unreadable, or with
        text that is not UTF-8. Rejected as `not_joined`: a row with a required key that its table lacks; as
        `bad_tokens`: a row with a token that is not an id of the vocabulary, or without a required text. Partition
        columns in the path are ignored, except `period_column`.
        """
        joined = load_tables(self.joins, self.uses, features)

        def read(file: File) -> Iterator[RowBlock]:
            history = RowHistory(file.url, file.history, self.history.features) if self.history else None
            build = ItemBlocks(file.url, self.uses, features, encoders, joined, encoding, history)
            return map(build, self._rows(file, features, first))

        return read

    def _rows(self, file: File, features: Sequence[Feature], first: str) -> Iterator[Raw]:
        """The columns in use of a file that has the features of the first one."""
        mapping, url, keys, whole = self.uses, file.url, join_keys(self.joins), self._whole(file)
        check_same_features(whole, resolve_features(whole, mapping, url, keys=keys), features, mapping, url, first)
        needed = {*mapping.beside_features(), *mapping.sources_of(each.name for each in features), *keys}
        numbers, texts = _numbers_and_texts(mapping, features, keys)
        return self._read(file, needed, numbers=numbers, texts=texts, values=len(features))

    def _read(
        self,
        file: File,
        needed: Collection[str],
        *,
        numbers: Collection[str],
        texts: Collection[str],
        values: int,
    ) -> Iterator[Raw]:
        """Some columns of a file, in blocks for rows of so many values."""
        url, schema = file.url, self._schema(file)
        return read_rows(
            url,
            schema,
            [name for name in schema.names if name in needed],
            numbers=numbers_in(url, schema, file_form(url), numbers=numbers, texts=texts),
            query=self.columns.query,
            dialect=self.columns.dialect(url),
            batch_rows=min(_ROWS, max(1, _VALUES // max(1, values))),
            lake=file.lake,
        )

    def timed(
        self, file: File, time: str, keys: Collection[str], numbers: Collection[str], *, own: bool
    ) -> Iterator[pa.Table]:
        """The time, keys and numbers of rows, for `history`."""
        url, joins = file.url, self.joins if own else ()
        whole = with_joined(self._schema(file), joins, self.columns.dialect, url)
        uses = [(time, "time"), *((name, "id") for name in keys), *((name, "number") for name in numbers)]
        for name, use in uses:
            require(whole, name, use, url)
        texts = {time, *keys, *join_keys(joins)}
        build = ItemBlocks(url, self.columns, (), {}, load_tables(joins, self.columns, ()))
        for raw in self._read(file, texts | {*numbers}, numbers=numbers, texts=texts, values=len(uses)):
            rows = build.examined(raw.rows)
            seconds_N, bad_N = rows.seconds(time, self.columns.clock)
            columns = {LINE: raw.lines_N, time: pa.array(seconds_N * 10**6, pa.timestamp("us"), mask=bad_N)}
            columns |= {name: rows.texts(name) for name in keys if name != time}
            yield pa.table(columns | {name: cols.doubles(rows.batch.column(name)) for name in numbers})

    def raw_columns(self, features: Sequence[Feature], file: File) -> RawColumns:
        """How a file stores the columns that features are made of."""
        form, keys = file_form(file.url), join_keys(self.joins)
        numbers, texts = _numbers_and_texts(self.uses, features, keys)
        used = {*self.columns.sources_of(each.name for each in features), *keys, self.columns.time}
        forms = {name: file_form(storage.list_files(join.path)[0]) for join in self.joins for name in join.columns}
        vectors, reads = self.columns.vector_columns, dict[str, Any]()
        for column in self._whole(file):
            if column.name in used and column.name in vectors:
                reads[column.name] = "text" if cols.is_text(column.type) else "numbers"
            elif column.name in used:
                exact = column.name in texts and pa.types.is_integer(column.type)  # as in `numbers_in`
                number = column.name in numbers and not exact
                reads[column.name] = _column_holds(column.type, forms.get(column.name, form), number=number)
        return RawColumns(rows=form, reads=reads)

    def for_scoring(self, needs: Needs) -> Self:
        """The same source with only the columns that a model reads, including dates, vectors and tables."""
        read = {each.name for each in needs.features}
        parts = {
            column: [part for part in of if f"{column}.{part}" in read] for column, of in self.columns.dates.items()
        }
        dates = {column: of for column, of in parts.items() if of}
        uses = needs.uses(without=self.columns.sources())
        if any("days_before" in parts for parts in dates.values()):
            uses.pop("time", None)
        idle: dict[str, Any] = {"label": None, "labels": {}, "grades": None, "unjudged": "reject", "fill_periods": ()}
        sources = self.columns.sources_of(read)
        optional = tuple(name for name in self.columns.optional if name in sources)
        made = {"dates": dates, "fill": self._fill_for_scoring(needs), **self._vectors_for_scoring(read)}
        columns = self.columns.replace(optional=optional, **made, **idle, **uses)
        return self.replace(columns=columns, joins=_needed(self.joins, columns), history=None)

    def _vectors_for_scoring(self, read: Collection[str]) -> dict[str, Any]:
        """The vector settings for the features that a model reads."""
        columns, of_vectors = self.columns, self.columns.vector_features()
        needed = {column for name, (column, _) in of_vectors.items() if name in read}
        alike = [pair for name, pair in columns.similarity_features().items() if name in read]
        return {
            "vectors": {name: size for name, size in columns.vectors.items() if name in needed},
            "similarities": {kind: [pair for of, *pair in alike if of == kind] for kind in columns.similarities},
            "exclude": [name for name, (column, _) in of_vectors.items() if column in needed and name not in read],
        }

    def _fill_for_scoring(self, needs: Needs) -> dict[str, Fill]:
        fills = {each.name: self.columns.fill_of(each) for each in needs.features}
        if needs.fills is not None:
            fills = {name: needs.fills.get(name) for name in fills}
        if "median" in fills.values():
            raise InputError(
                "source.columns.fill: a median is that of the training data, which the bundle does not record; "
                "write its number"
            )
        return {name: value for name, value in fills.items() if value is not None}

    def missing_columns(self, file: File) -> list[str]:
        """The columns that are missing from a file and its tables."""
        return missing(self._whole(file), self.columns, file.url)

    def files_beside(self) -> list[str]:
        """The joined tables, the events of another table, and the files of a tokenizer."""
        paths = [join.path for join in self.joins]
        paths += [self.history.events] if self.history and self.history.events else []
        return [url for path in paths for url in storage.list_files(path)] + super().files_beside()

    @property
    def known_before(self) -> HistoryConfig | None:
        """The features of `history`."""
        return self.history

    @property
    def uses(self) -> ColumnMapping:
        """The uses of the columns; the features of `history` are among them, unless they are named there already."""
        named = {*self.columns.features, *self.columns.categorical}
        made = [name for name in (self.history.features if self.history else ()) if name not in named]
        return self.columns.replace(features=(*self.columns.features, *made)) if made else self.columns

    def _schema(self, file: File) -> pa.Schema:
        """The columns of a file; one of vectors without a value in the first lines may have lists in later ones."""
        schema, vectors = read_schema(file.url, self.columns.dialect(file.url), file.lake), self.columns.vector_columns
        for i, field in enumerate(schema):
            if field.name in vectors and pa.types.is_null(field.type):
                schema = schema.set(i, field.with_type(pa.list_(pa.null())))
        return schema

    def _whole(self, file: File) -> pa.Schema:
        """The columns of a file, with joined ones, features of `history`, and missing optional ones."""
        schema = with_joined(self._schema(file), self.joins, self.columns.dialect, file.url)
        for name in self.history.features if self.history else ():
            if name in schema.names:
                raise InputError(f"{file.url}: column {name!r} has the name of a feature of history; rename it there")
            schema = schema.append(pa.field(name, pa.float32()))
        return with_optional(schema, self.columns)


def _column_holds(
    kind: pa.DataType, form: Form, *, number: bool
) -> Literal["number", "boolean", "integer", "text", "value"]:
    """What a column holds; `number` says whether a text file's column is read as numbers."""
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


def _numbers_and_texts(
    mapping: ColumnMapping, features: Sequence[Feature], keys: Collection[str]
) -> tuple[set[str], set[str]]:
    """The columns to read as numbers if the file has only text, and those whose values must stay unchanged, as ids."""
    made, side, named = mapping.sources(), mapping.side(), mapping.named()
    plain = [feature for feature in features if feature.name not in made]
    numbers = {*(each.name for each in plain if each.kind == "numeric"), *side.values()}
    numbers |= {column for column, use in named if use == "label"}
    # a click or gain may also be the graded label: values with grades count as numbers
    texts = {column for column, use in named if use not in {"label", "graded label", *side}}
    texts |= {*mapping.dates, *mapping.meta, *mapping.token_columns, *keys}
    return numbers, texts | {each.name for each in plain if each.kind == "categorical"}


def load_tables(joins: Sequence[Join], columns: ColumnMapping, features: Sequence[Feature]) -> list[Joined]:
    """The tables that join rows with these features, in memory."""
    numbers, texts = _numbers_and_texts(columns, features, join_keys(joins))
    return [load_table(join, columns.dialect, numbers=numbers, texts=texts) for join in joins]


def _needed(tables_: Sequence[Join], columns: ColumnMapping) -> tuple[Join, ...]:
    """The tables with a column in use; a table with labels only, for example, is not needed."""
    used = columns.used()
    needed: list[Join] = []
    for join in reversed(tables_):
        if used & join.columns.keys():
            needed.append(join)
            used |= join.key.keys()  # may come from an earlier table
    return tuple(reversed(needed))


@dataclass(frozen=True)
class ItemBlocks:
    """Turns a batch of items into a RowBlock."""

    url: str
    mapping: ColumnMapping
    features: Sequence[Feature]
    encoders: Encoders
    joined: Sequence[Joined] = ()
    encoding: Encoding | None = None
    history: RowHistory | None = None

    def __call__(self, raw: Raw) -> RowBlock:
        """The usable rows, and the rejections of the others."""
        mapping, batch = self.mapping, raw.rows
        for name, column in (self.history.at(raw.lines_N) if self.history else {}).items():
            batch = batch.append_column(name, column)
        rows = self.examined(batch)
        batch = rows.batch
        ids = [rows.texts(name, required=True) for name in (mapping.query, *mapping.within)]
        block = RowBlock(
            file=self.url,
            lines_N=raw.lines_N,
            query_ids_N=ids[0] if len(ids) == 1 else pc.binary_join_element_wise(*ids, "|"),
            features_NF=self._features(rows),
            labels_N=rows.labels(mapping),
            period=mapping.path_period(self.url),
            periods_N=rows.periods(mapping, ids[0]),
            doc_ids_N=None if mapping.item is None else rows.texts(mapping.item),
            columns={name: cols.floats(batch.column(column)) for name, column in mapping.of_documents.items()}
            | rows.meta(mapping.meta)
            | self._tokens(rows),
            texts=raw.texts,
            share=raw.share,
        )
        rejected = raw.rejected + rows.rejections(raw.lines_N, raw.texts, block.query_ids_N)
        block = keep(block, ~rows.bad_N) if rows.bad_N.any() else block
        block.rejected = sorted(rejected, key=lambda rejection: rejection.line)
        return block

    def examined(self, batch: pa.RecordBatch) -> Examined:
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
        tokenizer, tokens = self.mapping.tokens.tokenizer, dict[str, pa.Array]()
        for field, text in self.mapping.tokens.fields().items():
            columns, faults = read_tokens(self._plain(rows, text.column), field, text, tokenizer, self.encoding)
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


def read_table(table: pa.Table, mapping: ColumnMapping, features: Sequence[Feature]) -> RowBlock:
    """The rows of a table in memory, read as `Items` reads Parquet; for tables without texts or joins.

    The rows must fit in one block.
    """
    name = "the table"
    check_same_features(table.schema, resolve_features(table.schema, mapping, name), features, mapping, name, name)
    build = ItemBlocks(name, mapping, features, {})
    needed = {*mapping.beside_features(), *mapping.sources_of(each.name for each in features)}
    rows = table.select([column for column in table.column_names if column in needed]).combine_chunks()
    batch = cols.plain(rows.to_batches()[0])
    lines_N = np.arange(1, len(batch) + 1)
    return build(Raw(batch, lines_N, RowTexts(batch, lines_N), [], 1.0))
