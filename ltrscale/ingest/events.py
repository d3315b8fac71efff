"""Events as a source: items shown in lists, and what came of them; `EventRows` makes rows of items from them."""

from collections.abc import Sequence
from typing import Literal, Self

import pyarrow as pa
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.data import columns as cols
from ltrscale.ingest.event_tables import GA4, MADE, UBI, EventFile, EventTable
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping, named_columns
from ltrscale.ingest.source import File, Needs, Source
from ltrscale.ingest.tables import Join, file_form, join_keys

ROWS_OF = "rows/"
"""What the paths of files of rows begin with."""
_READY = {"ubi": UBI, "ga4": GA4}


class Events(Source):
    """Parquet or JSON lines with one event per row: lists of items that were shown, clicks, carts, orders."""

    kind: Literal["events"] = "events"
    tables: Literal["ubi", "ga4"] | tuple[EventTable, ...] = Field(min_length=1)
    """The tables, or `ubi` (OpenSearch's User Behavior Insights), or `ga4` (the export of Google Analytics 4). A file
    is read as the first of them whose columns it has."""
    columns: ColumnMapping
    """The uses of the columns of the rows that events become: query, item, position, time, session; shown, click, cart,
    order, grade, revenue, weight; and those that came with the items shown."""
    joins: tuple[Join, ...] = ()
    """Tables whose columns join the rows, such as features of items, queries and users."""
    window_minutes: float = Field(default=1440, gt=0, le=1e6)
    """Minutes within which an event without a query id belongs to the last list of its session that shows its item."""
    merge: str | None = None
    """Column that came with the items, such as the text of the query: lists of one of its values and of one period that
    differ in nothing but query id, time and session become one, with their number as the weight of its rows."""

    @model_validator(mode="after")
    def _merges_by_a_column(self) -> Self:
        named = {name for table in self.event_tables for name in table.columns}
        if self.merge is not None and self.merge not in named:
            raise ValueError(f"merge: {self.merge!r} is not under columns of a table; name it there")
        return self

    @property
    def event_tables(self) -> tuple[EventTable, ...]:
        """The tables."""
        return _READY[self.tables] if isinstance(self.tables, str) else self.tables

    @property
    def uses(self) -> ColumnMapping:
        """The uses of the columns of the rows."""
        return self.columns

    @property
    def rows(self) -> Items:
        """The source of the rows that events become; patterns match no column of what came of them."""
        exclude = dict.fromkeys([*self.columns.exclude, *MADE.names])
        return Items(columns=self.columns.replace(exclude=tuple(exclude)), joins=self.joins)

    def files_beside(self) -> list[str]:
        """The joined tables, and the files of a tokenizer."""
        return self.rows.files_beside()

    def for_scoring(self, needs: Needs) -> Items:
        """The source of rows to rank: they are items, not events."""
        return self.rows.for_scoring(needs)

    def carried(self, files: Sequence[File]) -> pa.Schema:
        """The columns that come with the items shown in any of the files, each in a type that holds all its values."""
        found: dict[str, tuple[pa.DataType, str]] = {}
        types = storage.at_once(lambda file: EventFile.of(file, self.event_tables).carried_types(), files)
        for file, of_file in zip(files, types, strict=True):
            for name, kind in of_file.items():
                before, first = found.get(name, (kind, file.url))
                found[name] = cols.wider_type(name, before, kind, file.url, first), first
        numbers = self._numbers([*found])
        in_json = any(file_form(file.url) == "json" for file in files)

        def type_of(name: str, kind: pa.DataType) -> pa.DataType:
            if name in numbers and (pa.types.is_null(kind) or (in_json and pa.types.is_integer(kind))):
                return pa.float64()  # later lines may have fractions
            return pa.string() if pa.types.is_null(kind) else kind

        return pa.schema([(name, type_of(name, kind)) for name, (kind, _) in found.items()])

    def _numbers(self, names: Sequence[str]) -> set[str]:
        """The columns of some names that are numeric features, and nothing else."""
        uses = self.columns
        others = {*named_columns(names, uses.categorical), *uses.beside_features(), *join_keys(self.joins)}
        return {*named_columns(names, uses.features)} - others


def made_rows(url: str) -> tuple[list[File], dict[str, int]]:
    """The files of rows of a directory of `EventRows`, by period and part, and its counts of events."""
    manifest = storage.read_manifest(url) or {"files": [], "counts": {}}
    names = sorted(file["path"] for file in manifest["files"] if file["path"].startswith(ROWS_OF))
    return [File(url=storage.join(url, name)) for name in names], manifest["counts"]
