"""Raw logs with one item (document) per row, read block by block in bounded memory.

In numeric columns null, NaN, and in CSV an empty field or NULL, are missing values (NaN); infinite values are passed
on. Categorical columns are encoded as in `categories`.

Shapes: N rows (documents), F features.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature, RawColumns, matching
from ltrscale.errors import InputError
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.examined import Examined, check_same_features, missing, path_value, resolve_features, with_optional
from ltrscale.ingest.made import made_features
from ltrscale.ingest.mapping import ColumnMapping, Fill
from ltrscale.ingest.rows import RowBlock, RowTexts, keep
from ltrscale.ingest.source import Encoders, File, Needs, Reader, Source
from ltrscale.ingest.tables import (
    Form,
    Join,
    Joined,
    Raw,
    fault,
    file_form,
    join_keys,
    load_table,
    numbers_in,
    read_rows,
    read_schema,
    with_joined,
)
from ltrscale.ingest.texts import Encoding, TokenColumns, TokenReader
from ltrscale.ingest.validate import Unjudged


def column_holds(
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


def numbers_of(mapping: ColumnMapping, features: Sequence[Feature]) -> set[str]:
    """The columns to read as numbers if the file has only text."""
    made, side = mapping.sources(), mapping.side().values()
    label = [column for use, column in mapping.named().items() if use == "label"]
    return {*(f.name for f in features if f.kind == "numeric" and f.name not in made), *side, *label}


def texts_of(mapping: ColumnMapping, features: Sequence[Feature], keys: Collection[str]) -> set[str]:
    """The columns with values that must stay unchanged, such as ids, categories and join keys."""
    # a click or gain may also be the graded label: values with grades count as numbers
    numbers, made = {"label", "graded label", *mapping.side()}, mapping.sources()
    named = {column for use, column in mapping.named().items() if use not in numbers}
    tokens = mapping.tokens.columns if mapping.tokens else ()
    categories = {f.name for f in features if f.kind == "categorical" and f.name not in made}
    return {*named, *mapping.dates, *mapping.meta, *tokens, *keys, *categories}


def read_table(table: pa.Table, mapping: ColumnMapping, features: Sequence[Feature]) -> RowBlock:
    """The rows of a table in memory, read as `Items` reads Parquet; for tables without texts or joins.

    The rows must fit in one block.

    Raises:
        InputError: a column is missing or has a type that does not fit.
    """
    name = "the table"
    check_same_features(table.schema, resolve_features(table.schema, mapping, name), features, mapping, name, name)
    build = ItemBlocks(name, mapping, features, {})
    needed = {*mapping.named().values(), *mapping.sources_of(each.name for each in features)}
    rows = table.select([column for column in table.column_names if column in needed]).combine_chunks()
    batch = cols.plain(rows.to_batches()[0])
    lines_N = np.arange(1, len(batch) + 1)
    return build(Raw(batch, lines_N, RowTexts(batch, lines_N), [], 1.0))


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
        """The rows with joined columns and missing optional ones; rows without a required key are rejected."""
        for name in self.mapping.missing_optional(batch.schema):
            field = with_optional(pa.schema([]), self.mapping).field(name)
            batch = batch.append_column(name, pa.nulls(len(batch), field.type))
        faults: dict[int, str] = {}
        for table in self.joined:
            batch, bad_N, keys_N = table(batch)
            faults = {i: fault(table, keys_N[i]) for i in np.flatnonzero(bad_N).tolist()} | faults
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

    def _labels(self, rows: Examined) -> NDArray[np.float32]:
        """The labels, NaN if missing; rows with a value that has no grade are rejected."""
        name, grades = self.mapping.label, self.mapping.grades
        if name is None:
            return np.full(len(rows.batch), np.nan, np.float32)
        if not isinstance(grades, dict):
            labels_N = cols.float_column(rows.batch.column(name))
            if grades is None:
                return labels_N
            # in float32 like the labels, or 0.1 would not reach the cut point 0.1
            grades_N = np.searchsorted(np.array(grades, np.float32), labels_N, side="right").astype(np.float32)
            return np.where(np.isnan(labels_N), np.float32(np.nan), grades_N)
        # many tools write a column of integers as floats if it has a null
        values_N = pc.replace_substring_regex(rows.texts(name), r"^(-?\d+)\.0$", r"\1")
        index_N = pc.index_in(values_N, pa.array(list(grades), pa.string()))
        unknown_N = pc.and_(pc.is_valid(values_N), pc.is_null(index_N)).to_numpy(zero_copy_only=False)
        fault = f"has no grade ({', '.join(grades)} have one)"
        rows.reject(unknown_N, f"column {name!r} {fault}", "bad_label", column=name, fault=fault)
        return cols.float_column(pa.array(list(grades.values()), pa.float32()).take(index_N))

    def _features(self, rows: Examined) -> NDArray[np.float32]:
        features_NF = np.empty((len(rows.batch), len(self.features)), np.float32)
        made = made_features(rows, self.mapping)
        for i, feature in enumerate(self.features):
            name = feature.name
            if feature.kind == "numeric":
                features_NF[:, i] = made[name] if name in made else cols.float_column(rows.batch.column(name))
            else:
                column = pa.array(made[name]) if name in made else self._plain(rows, name)
                features_NF[:, i] = self.encoders.setdefault(name, CategoryEncoder()).encode(column)
        return features_NF


_ROWS, _VALUES = 1 << 14, 1 << 22
"""The most values of a block; rows with very many features make smaller blocks."""


class ItemRows(Source):
    """Files with one item (document) per row, of which a subclass reads the columns and the rows."""

    columns: ColumnMapping
    """The uses of the columns."""
    joins: tuple[Join, ...] = ()
    """Tables whose columns join the rows, one after the other, such as the texts of documents."""

    def schema_of(self, url: str) -> pa.Schema:
        """The columns of a file.

        Raises:
            InputError: the file is missing, empty or damaged, or its name has another ending.
        """
        raise NotImplementedError

    def rows_of(
        self, url: str, schema: pa.Schema, names: Sequence[str], *, numbers: Collection[str], batch_rows: int
    ) -> Iterator[Raw]:
        """Some columns of a file; `schema` is from `schema_of`, and the arguments are as for `tables.read_rows`.

        Raises:
            InputError: the file is damaged.
        """
        raise NotImplementedError

    def form_of(self, url: str) -> Form:  # noqa: ARG002
        """The form of a file's values: text, JSON, or by default typed as in Parquet."""
        return "parquet"

    def typed_rows(self, url: str, batch_rows: int) -> Iterator[tuple[int, Mapping[str, Any]]] | None:
        """All columns of a file of typed values."""
        if self.form_of(url) != "parquet":
            return None
        schema = self.schema_of(url)
        raws = self.rows_of(url, schema, schema.names, numbers=(), batch_rows=batch_rows)
        return (row for raw in raws for row in zip(raw.lines_N.tolist(), raw.rows.to_pylist(), strict=True))

    def features_of(self, url: str) -> tuple[Feature, ...]:
        """The features of a file."""
        return tuple(resolve_features(self._whole(url), self.columns, url, keys=join_keys(self.joins)))

    def find_features(self, files: Sequence[File]) -> tuple[Feature, ...]:
        """The features of the first file."""
        return self.features_of(files[0].url)

    def open(
        self, features: Sequence[Feature], *, first: str, encoders: Encoders, encoding: Encoding | None = None
    ) -> Reader:
        """The reader of files with these features; the joined tables are loaded once."""
        joined = self.tables(features)
        read = partial(self.read, features=features, first=first, encoders=encoders, joined=joined)
        batch_rows = min(_ROWS, max(1, _VALUES // max(1, len(features))))
        return lambda file: read(file.url, encoding=encoding, batch_rows=batch_rows)

    def read(
        self,
        url: str,
        *,
        features: Sequence[Feature] | None = None,
        first: str = "the first file",
        encoders: Encoders | None = None,
        joined: Sequence[Joined] = (),
        encoding: Encoding | None = None,
        batch_rows: int = 1 << 16,
    ) -> Iterator[RowBlock]:
        """Read a file in blocks of at most `batch_rows` rows.

        `lines_N` are row numbers (Parquet) or line numbers (in CSV the header is line 1). Rejected as `unparsable`: a
        line that is not a JSON object; a CSV line with a wrong number of fields, misplaced quotes or a non-number in a
        numeric column; a row without a query id, with a time stamp or period that is missing or unreadable, or with
        text that is not UTF-8. Rejected as `not_joined`: a row with a required key that its table lacks; as
        `bad_tokens`: a row with a token that is not an id of the vocabulary, or without a required text. Partition
        columns in the path are ignored, except `period_column`.

        The other arguments are as for `open`; by default the file is the only one.

        Raises:
            InputError: the file is missing, empty or damaged; a column is missing, has a type that does not fit, or
                differs from the first file.
        """
        mapping, schema = self.columns, self.schema_of(url)
        joins = [table.join for table in joined]
        whole, keys = with_optional(with_joined(schema, joins, mapping.dialect, url), mapping), join_keys(joins)
        file_features = resolve_features(whole, mapping, url, keys=keys)
        used = file_features if features is None else features
        check_same_features(whole, file_features, used, mapping, url, first)
        build = ItemBlocks(url, mapping, used, {} if encoders is None else encoders, joined, encoding)
        needed = {*mapping.named().values(), *mapping.meta, *mapping.sources_of(each.name for each in used)}
        needed |= {*(mapping.tokens.columns if mapping.tokens else ()), *keys}
        names = [name for name in schema.names if name in needed]
        numbers, texts = numbers_of(mapping, used), texts_of(mapping, used, keys)
        numbers = numbers_in(url, schema, self.form_of(url), numbers=numbers, texts=texts)
        yield from map(build, self.rows_of(url, schema, names, numbers=numbers, batch_rows=batch_rows))

    def tables(self, features: Sequence[Feature]) -> list[Joined]:
        """The tables that join, in memory, for rows with these features.

        Raises:
            InputError: a table is missing or damaged, lacks a column, or has a key twice.
        """
        numbers = numbers_of(self.columns, features)
        texts = texts_of(self.columns, features, join_keys(self.joins))
        return [load_table(join, self.columns.dialect, numbers=numbers, texts=texts) for join in self.joins]

    def raw_columns(self, features: Sequence[Feature], url: str) -> RawColumns:
        """How a file stores the columns that features are made of."""
        form, keys = self.form_of(url), join_keys(self.joins)
        numbers, texts = numbers_of(self.columns, features), texts_of(self.columns, features, keys)
        used = {*self.columns.sources_of(each.name for each in features), *keys, self.columns.time}
        forms = {name: join.form for join in self.joins for name in join.columns}
        vectors, reads = self.columns.vector_columns, dict[str, Any]()
        for column in self._whole(url):
            if column.name in used and column.name in vectors:
                reads[column.name] = "text" if cols.is_text(column.type) else "numbers"
            elif column.name in used:
                exact = column.name in texts and pa.types.is_integer(column.type)  # as in `numbers_in`
                number = column.name in numbers and not exact
                reads[column.name] = column_holds(column.type, forms.get(column.name, form), number=number)
        return RawColumns(rows=form, reads=reads)

    def for_scoring(self, needs: Needs) -> Self:
        """The same source with only the columns that a model reads, including dates, vectors and tables."""
        of_dates, read = self.columns.date_features(), {each.name for each in needs.features}
        dates: dict[str, list[str]] = {}
        for column, part in (of_dates[name] for name in of_dates.keys() & read):
            dates.setdefault(column, []).append(part)
        uses = needs.uses()
        if any("days_before" in parts for parts in dates.values()):
            uses.pop("time", None)
        named = needs.named(without=self.columns.sources())
        fill = self._fill_for_scoring(needs)
        idle = {"label": None, "grades": None, "unjudged": "reject", "fill_periods": ()}
        sources = {*self.columns.sources_of(read)}
        optional = tuple(name for name in self.columns.optional if name in sources)
        columns = self.columns.replace(
            dates=dates, fill=fill, optional=optional, **self._vectors_for_scoring(read), **idle, **uses, **named
        )
        return self.replace(columns=columns, joins=_needed(self.joins, columns))

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
        fills = needs.fills
        values = {
            each.name: self.columns.fill_of(each) if fills is None else fills.get(each.name) for each in needs.features
        }
        fill = {name: value for name, value in values.items() if value is not None}
        if "median" in fill.values():
            raise InputError(
                "source.columns.fill: a median is that of the training data, which the bundle does not record; "
                "write its number"
            )
        return fill

    def missing_columns(self, url: str) -> list[str]:
        """The columns that are missing from a file and its tables."""
        return missing(self._whole(url), self.columns, url)

    def files_beside(self) -> list[str]:
        """The joined tables, and the files of a tokenizer."""
        return [url for join in self.joins for url in storage.list_files(join.path)] + super().files_beside()

    def wanted_fills(self, features: Sequence[Feature]) -> dict[str, Fill]:
        """The fill of each feature that has one."""
        categories = {feature.name for feature in features if feature.kind == "categorical"}
        for pattern in self.columns.fill:
            if pattern in categories:
                raise InputError(
                    f"fill: {pattern!r} is a category, and a missing one is a value of its own; leave it out"
                )
            matching(pattern, [f for f in features if f.name not in categories], key="source.columns.fill")
        fills = ((feature.name, self.columns.fill_of(feature)) for feature in features)
        return {name: value for name, value in fills if value is not None}

    def filled(self, fills: Mapping[str, float]) -> Self:
        """The source with these numbers for missing values."""
        return self.replace(columns=self.columns.replace(fill=dict(fills)))

    @property
    def fills(self) -> dict[str, float]:
        """The numbers for missing values."""
        return {name: value for name, value in self.columns.fill.items() if value != "median"}

    def check_documents_named(self) -> None:
        """Refuse columns without document ids."""
        if self.columns.item is None:
            raise ValueError("name the column with the ids of documents, source.columns.item")

    @property
    def token_columns(self) -> TokenColumns | None:
        """The token fields."""
        return self.columns.tokens

    @property
    def unjudged(self) -> Unjudged:
        """The setting of the columns."""
        return self.columns.unjudged

    @property
    def takes_any_order(self) -> bool:
        """Always true: each feature has a column."""
        return True

    @property
    def label_place(self) -> str:
        """The column of labels."""
        return f"column {self.columns.label!r}"

    @property
    def mapping(self) -> ColumnMapping:
        """The uses of the columns."""
        return self.columns

    @property
    def joined_tables(self) -> Sequence[Join]:
        """The tables that join the rows."""
        return self.joins

    def _whole(self, url: str) -> pa.Schema:
        """The columns of a file, with joined ones and missing optional ones."""
        return with_optional(with_joined(self.schema_of(url), self.joins, self.columns.dialect, url), self.columns)


class Items(ItemRows):
    """Parquet, CSV or JSON lines with one item (document) per row."""

    kind: Literal["items"] = "items"

    def schema_of(self, url: str) -> pa.Schema:
        """The columns of a file named .parquet, .csv, .tsv or .jsonl, the last three perhaps with .gz or .xz."""
        return _lists(read_schema(url, self.columns.dialect(url)), self.columns.vector_columns)

    def rows_of(
        self, url: str, schema: pa.Schema, names: Sequence[str], *, numbers: Collection[str], batch_rows: int
    ) -> Iterator[Raw]:
        """The rows, read according to the file's name."""
        query, dialect = self.columns.query, self.columns.dialect(url)
        return read_rows(url, schema, names, numbers=numbers, query=query, dialect=dialect, batch_rows=batch_rows)

    def form_of(self, url: str) -> Form:
        """The form, from the file's name."""
        return file_form(url)


def _needed(tables_: Sequence[Join], columns: ColumnMapping) -> tuple[Join, ...]:
    """The tables with a column in use; a table with labels only, for example, is not needed."""
    used = {*columns.named().values(), *columns.features, *columns.categorical, *columns.dates, *columns.meta}
    used |= columns.vector_columns.keys()
    used |= {*(columns.tokens.columns if columns.tokens else ())}
    needed: list[Join] = []
    for join in reversed(tables_):
        if used & join.columns.keys():
            needed.append(join)
            used |= join.key.keys()  # may come from an earlier table
    return tuple(reversed(needed))


def _lists(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """The schema with lists for those of these columns that have no value in the first lines; later lines may."""
    for i, field in enumerate(schema):
        if field.name in names and pa.types.is_null(field.type):
            schema = schema.set(i, field.with_type(pa.list_(pa.null())))
    return schema
