"""Raw logs with one item (document) per row, which are read block by block; memory does not grow with the file.

Shapes: N rows (documents), F features.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, Self

import pyarrow as pa

from ltrscale import storage
from ltrscale.data.dataset.manifest import Feature, RawColumns, matching
from ltrscale.errors import InputError
from ltrscale.ingest import joins, tables
from ltrscale.ingest.joins import Join, Joined, load_table
from ltrscale.ingest.logs import ItemBlocks, column_holds, numbers_of, sources_of
from ltrscale.ingest.mapping import ColumnMapping, Fill, check_same_features, missing, resolve_features
from ltrscale.ingest.rows import RowBlock
from ltrscale.ingest.source import Encoders, File, Needs, Reader, Source
from ltrscale.ingest.texts import TokenColumns
from ltrscale.ingest.vocabularies import Encoding

_ROWS = 1 << 14


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
    ) -> Iterator[tables.Raw]:
        """Some columns of a file, in blocks of at most `batch_rows` rows.

        Args:
            url: the file.
            schema: its columns, from `schema_of`.
            names: those to read, in their order in the schema.
            numbers: those to read as numbers, where the file has text only.
            batch_rows: the most rows of a block.

        Raises:
            InputError: the file is damaged.
        """
        raise NotImplementedError

    def form_of(self, url: str) -> tables.Form:  # noqa: ARG002
        """What values a file has: text, those of JSON, or by default values with types of their own, as Parquet."""
        return "parquet"

    def features_of(self, url: str) -> tuple[Feature, ...]:
        """The features of a file."""
        return tuple(resolve_features(self._whole(url), self.columns, url))

    def find_features(self, files: Sequence[File]) -> tuple[Feature, ...]:
        """The features of the first file."""
        return self.features_of(files[0].url)

    def open(
        self, features: Sequence[Feature], *, first: str, encoders: Encoders, encoding: Encoding | None = None
    ) -> Reader:
        """See `read`."""
        joined = [load_table(join, self.columns.dialect) for join in self.joins]
        read = partial(self.read, features=features, first=first, encoders=encoders, joined=joined)
        return lambda file: read(file.url, encoding=encoding, batch_rows=_ROWS)

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

        `lines_N` are row numbers (Parquet) or line numbers (of CSV with the header as line 1). Rejected as
        `unparsable`: a line that is no JSON object, or a CSV line with a wrong number of fields, misplaced quotes or a
        value that is no number in a numeric column; a row without a query id, with a time stamp or period that is
        missing or cannot be read, or with text that is not UTF-8. Rejected as `not_joined`: a row with a key that a
        table must have and has not; as `bad_tokens`: a row with a token that is no id of the vocabulary, or without a
        text that it must have. Partition columns in the path are ignored, except `period_column`.

        Args:
            url: The file.
            features: The features of the first of several files; the others must have the same.
            first: The name of that file, for errors.
            encoders: Encoders by column, shared by the files of one data set so that collisions are counted once.
            joined: Tables whose columns join the rows.
            encoding: Makes tokens of texts; without it the tokens are texts, to train a tokenizer on.
            batch_rows: The most rows of a block.

        Raises:
            InputError: the file is missing, empty or damaged; a column is missing, has a type that does not fit, or
                differs from the first file.
        """
        mapping, schema = self.columns, self.schema_of(url)
        whole = joins.with_joined(schema, [table.join for table in joined], mapping.dialect, url)
        found = resolve_features(whole, mapping, url)
        if features is not None:
            check_same_features(whole, found, features, mapping, url, first)
        used, known = found if features is None else features, {} if encoders is None else encoders
        build = ItemBlocks(url, mapping, used, known, joined, encoding)
        wanted = {*mapping.named().values(), *mapping.meta, *sources_of(mapping, used)}
        wanted |= {*(mapping.tokens.columns if mapping.tokens else ())}
        wanted |= {name for table in joined for name in table.join.key}
        names = [name for name in schema.names if name in wanted]
        numbers = numbers_of(mapping, used)
        yield from map(build, self.rows_of(url, schema, names, numbers=numbers, batch_rows=batch_rows))

    def raw_columns(self, features: Sequence[Feature], url: str) -> RawColumns:
        """How a file has the columns that features are made of."""
        whole, own, form = self._whole(url), self.schema_of(url).names, self.form_of(url)
        numbers, keys = numbers_of(self.columns, features), {name for join in self.joins for name in join.key}
        used = {*sources_of(self.columns, features), *keys, self.columns.time}
        return RawColumns(
            rows=form,
            reads={
                name: column_holds(whole.field(name).type, form if name in own else "parquet", number=name in numbers)
                for name in whole.names
                if name in used
            },
        )

    def for_scoring(self, needs: Needs) -> Self:
        """The columns that a model reads, those of dates and of the tables that it needs among them."""
        of_dates = self.columns.date_features()
        dates: dict[str, list[str]] = {}
        for column, part in (of_dates[name] for name in of_dates.keys() & {each.name for each in needs.features}):
            dates.setdefault(column, []).append(part)
        uses = needs.uses()
        if any("days_before" in parts for parts in dates.values()):
            uses.pop("time", None)
        named = needs.named(without=[*of_dates])
        fill = self._fill_for_scoring(needs)
        idle = {"label": None, "grades": None, "exclude": (), "fill_periods": ()}
        columns = self.columns.replace(dates=dates, fill=fill, **idle, **uses, **named)
        return self.replace(columns=columns, joins=_needed(self.joins, columns))

    def _fill_for_scoring(self, needs: Needs) -> dict[str, Fill]:
        fills = needs.fills
        wanted = {
            each.name: self.columns.fill_of(each) if fills is None else fills.get(each.name) for each in needs.features
        }
        fill = {name: value for name, value in wanted.items() if value is not None}
        if "median" in fill.values():
            raise InputError(
                "source.columns.fill: a median is that of the training data, which the bundle does not record; "
                "write its number"
            )
        return fill

    def missing_columns(self, url: str) -> list[str]:
        """The columns that a file and its tables lack."""
        return missing(self._whole(url), self.columns, url)

    def files_beside(self) -> list[str]:
        """The tables that join, and the files of a tokenizer."""
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
        found = {feature.name: self.columns.fill_of(feature) for feature in features}
        return {name: value for name, value in found.items() if value is not None}

    def filled(self, fills: Mapping[str, float]) -> Self:
        """The source with the numbers that were found."""
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
    def takes_any_order(self) -> bool:
        """Always: each feature has a column."""
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
        """The tables whose columns join the rows."""
        return self.joins

    def _whole(self, url: str) -> pa.Schema:
        """The columns of a file, with those that join its rows."""
        return joins.with_joined(self.schema_of(url), self.joins, self.columns.dialect, url)


class Items(ItemRows):
    """Parquet, CSV or JSON lines with one item (document) per row."""

    kind: Literal["items"] = "items"

    def schema_of(self, url: str) -> pa.Schema:
        """The columns of a file named .parquet, .csv, .tsv or .jsonl, the last three perhaps with .gz or .xz."""
        return tables.read_schema(url, self.columns.dialect(url))

    def rows_of(
        self, url: str, schema: pa.Schema, names: Sequence[str], *, numbers: Collection[str], batch_rows: int
    ) -> Iterator[tables.Raw]:
        """The rows, by the name of the file."""
        query, dialect = self.columns.query, self.columns.dialect(url)
        return tables.read_rows(
            url, schema, names, numbers=numbers, query=query, dialect=dialect, batch_rows=batch_rows
        )

    def form_of(self, url: str) -> tables.Form:
        """By the name of the file."""
        return tables.form(url)


def _needed(tables_: Sequence[Join], columns: ColumnMapping) -> tuple[Join, ...]:
    """The tables that have a column in use; such as not one that only had labels."""
    used = {*columns.named().values(), *columns.features, *columns.categorical, *columns.dates, *columns.meta}
    used |= {*(columns.tokens.columns if columns.tokens else ())}
    needed: list[Join] = []
    for join in reversed(tables_):
        if used & join.columns.keys():
            needed.append(join)
            used |= join.key.keys()  # which an earlier table may have
    return tuple(reversed(needed))
