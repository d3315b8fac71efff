"""Raw logs with one item (document) per row, read block by block in bounded memory.

In numeric columns null, NaN, and in CSV an empty field or NULL, are missing values (NaN); infinite values are passed
on. Categorical columns are encoded as in `categories`.

Shapes: N rows (documents), F features.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from ltrscale import storage
from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import Feature, RawColumns
from ltrscale.errors import InputError
from ltrscale.ingest.examined import ItemBlocks, check_same_features, missing, resolve_features, with_optional
from ltrscale.ingest.mapping import ColumnMapping, Fill
from ltrscale.ingest.rows import Raw, RowBlock, RowTexts
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
from ltrscale.ingest.texts import Encoding


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


def _numbers_of(mapping: ColumnMapping, features: Sequence[Feature]) -> set[str]:
    """The columns to read as numbers if the file has only text."""
    made, side = mapping.sources(), mapping.side().values()
    label = [column for use, column in mapping.named().items() if use == "label"]
    return {*(f.name for f in features if f.kind == "numeric" and f.name not in made), *side, *label}


def _texts_of(mapping: ColumnMapping, features: Sequence[Feature], keys: Collection[str]) -> set[str]:
    """The columns with values that must stay unchanged, such as ids, categories and join keys."""
    # a click or gain may also be the graded label: values with grades count as numbers
    numbers, made = {"label", "graded label", *mapping.side()}, mapping.sources()
    named = {column for use, column in mapping.named().items() if use not in numbers}
    tokens = mapping.tokens.columns if mapping.tokens else ()
    categories = {f.name for f in features if f.kind == "categorical" and f.name not in made}
    return {*named, *mapping.dates, *mapping.meta, *tokens, *keys, *categories}


def load_tables(joins: Sequence[Join], columns: ColumnMapping, features: Sequence[Feature]) -> list[Joined]:
    """The tables that join rows with these features, in memory; raises as `load_table`."""
    numbers, texts = _numbers_of(columns, features), _texts_of(columns, features, join_keys(joins))
    return [load_table(join, columns.dialect, numbers=numbers, texts=texts) for join in joins]


def read_table(table: pa.Table, mapping: ColumnMapping, features: Sequence[Feature]) -> RowBlock:
    """The rows of a table in memory, read as `Items` reads Parquet; for tables without texts or joins.

    The rows must fit in one block.

    Raises:
        InputError: a column is missing or has a type that does not fit.
    """
    name = "the table"
    check_same_features(table.schema, resolve_features(table.schema, mapping, name), features, mapping, name, name)
    build = ItemBlocks(name, mapping, features, {})
    needed = {*mapping.beside_features(), *mapping.sources_of(each.name for each in features)}
    rows = table.select([column for column in table.column_names if column in needed]).combine_chunks()
    batch = cols.plain(rows.to_batches()[0])
    lines_N = np.arange(1, len(batch) + 1)
    return build(Raw(batch, lines_N, RowTexts(batch, lines_N), [], 1.0))


_ROWS, _VALUES = 1 << 14, 1 << 22
"""The most values of a block; rows with very many features make smaller blocks."""


class Items(Source):
    """Parquet, CSV or JSON lines with one item (document) per row."""

    kind: Literal["items"] = "items"
    columns: ColumnMapping
    """The uses of the columns."""
    joins: tuple[Join, ...] = ()
    """Tables whose columns join the rows, one after the other, such as the texts of documents."""

    def find_features(self, files: Sequence[File]) -> tuple[Feature, ...]:
        """The features of the first file."""
        url = files[0].url
        whole = self._whole(self._schema(url), url)
        return tuple(resolve_features(whole, self.columns, url, keys=join_keys(self.joins)))

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
        joined = load_tables(self.joins, self.columns, features)

        def read(file: File) -> Iterator[RowBlock]:
            build = ItemBlocks(file.url, self.columns, features, encoders, joined, encoding)
            return map(build, self._rows(file.url, features, first))

        return read

    def _rows(self, url: str, features: Sequence[Feature], first: str) -> Iterator[Raw]:
        """The columns in use of a file that has the features of the first one."""
        mapping, schema, keys = self.columns, self._schema(url), join_keys(self.joins)
        whole = self._whole(schema, url)
        check_same_features(whole, resolve_features(whole, mapping, url, keys=keys), features, mapping, url, first)
        needed = {*mapping.beside_features(), *mapping.sources_of(each.name for each in features), *keys}
        names = [name for name in schema.names if name in needed]
        numbers, texts = _numbers_of(mapping, features), _texts_of(mapping, features, keys)
        return read_rows(
            url,
            schema,
            names,
            numbers=numbers_in(url, schema, file_form(url), numbers=numbers, texts=texts),
            query=mapping.query,
            dialect=mapping.dialect(url),
            batch_rows=min(_ROWS, max(1, _VALUES // max(1, len(features)))),
        )

    def raw_columns(self, features: Sequence[Feature], url: str) -> RawColumns:
        """How a file stores the columns that features are made of."""
        form, keys = file_form(url), join_keys(self.joins)
        numbers, texts = _numbers_of(self.columns, features), _texts_of(self.columns, features, keys)
        used = {*self.columns.sources_of(each.name for each in features), *keys, self.columns.time}
        forms = {name: join.form for join in self.joins for name in join.columns}
        vectors, reads = self.columns.vector_columns, dict[str, Any]()
        for column in self._whole(self._schema(url), url):
            if column.name in used and column.name in vectors:
                reads[column.name] = "text" if cols.is_text(column.type) else "numbers"
            elif column.name in used:
                exact = column.name in texts and pa.types.is_integer(column.type)  # as in `numbers_in`
                number = column.name in numbers and not exact
                reads[column.name] = _column_holds(column.type, forms.get(column.name, form), number=number)
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
        return missing(self._whole(self._schema(url), url), self.columns, url)

    def files_beside(self) -> list[str]:
        """The joined tables, and the files of a tokenizer."""
        return [url for join in self.joins for url in storage.list_files(join.path)] + super().files_beside()

    @property
    def uses(self) -> ColumnMapping:
        """The uses of the columns."""
        return self.columns

    def _schema(self, url: str) -> pa.Schema:
        """The columns of a file; one of vectors without a value in the first lines may have lists in later ones."""
        schema, vectors = read_schema(url, self.columns.dialect(url)), self.columns.vector_columns
        for i, field in enumerate(schema):
            if field.name in vectors and pa.types.is_null(field.type):
                schema = schema.set(i, field.with_type(pa.list_(pa.null())))
        return schema

    def _whole(self, schema: pa.Schema, url: str) -> pa.Schema:
        """The columns of a file, with joined ones and missing optional ones."""
        return with_optional(with_joined(schema, self.joins, self.columns.dialect, url), self.columns)


def _needed(tables_: Sequence[Join], columns: ColumnMapping) -> tuple[Join, ...]:
    """The tables with a column in use; a table with labels only, for example, is not needed."""
    used = {*columns.beside_features(), *columns.features, *columns.categorical, *columns.dates}
    used |= columns.vector_columns.keys()
    needed: list[Join] = []
    for join in reversed(tables_):
        if used & join.columns.keys():
            needed.append(join)
            used |= join.key.keys()  # may come from an earlier table
    return tuple(reversed(needed))
