"""Events as a source: tables of items shown in lists, and of what came of them, and their events in one form.

`EventRows` makes rows of items from them.

Shapes: N rows of a batch, M events: one for each row, or for each item of a row's list.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.arrays import Bools, Ints
from ltrscale.config import Config
from ltrscale.data import columns as cols
from ltrscale.data.dataset.split import Texts
from ltrscale.data.times import Clock, microseconds
from ltrscale.errors import InputError
from ltrscale.ingest.items import Items
from ltrscale.ingest.json_lines import NestedReader, sniffed_objects
from ltrscale.ingest.mapping import ColumnMapping, named_columns
from ltrscale.ingest.rows import Raw
from ltrscale.ingest.source import File, Needs, Source
from ltrscale.ingest.tables import ColumnNames, Join, file_form, join_keys, parquet_schema, read_parquet

Act = Literal["shown", "click", "cart", "order"]
ACTS: tuple[Act, ...] = ("shown", "click", "cart", "order")
"""What happens to an item; the numbers of acts are their places."""

OWN = pa.schema(
    [
        *(("act", pa.int8()), ("query", pa.string()), ("session", pa.string()), ("item", pa.string())),
        *(("time", pa.int64()), ("position", pa.float64()), ("revenue", pa.float64()), ("id", pa.string())),
        *(("file", pa.int32()), ("line", pa.int64())),
    ]
)
"""The columns of events before those that come with the items shown; times in microseconds since 1970."""
MADE = pa.schema(
    [
        *(("query", pa.string()), ("item", pa.string()), ("position", pa.float64())),
        *(("time", pa.timestamp("us", "UTC")), ("session", pa.string())),
        *((name, pa.int64()) for name in (*ACTS, "grade")),
        *(("revenue", pa.float64()), ("weight", pa.int64())),
    ]
)
"""The columns of rows before those that come with the items shown. Of the acts, `shown` is the number of times, and the
others are 1 or 0; `grade` is the number of the last act that happened, `weight` that of lists that became one."""
LEFT = pa.schema(
    [
        *(("file", pa.int32()), ("line", pa.int64()), ("reason", pa.string()), ("act", pa.int8())),
        *(("query", pa.string()), ("session", pa.string()), ("item", pa.string())),
    ]
)
"""The columns of events that are left over."""
ROWS_OF = "rows/"
"""What the paths of files of rows begin with."""
SHOWN = "shown."
"""What the names of columns that come with the items shown begin with until they are columns of rows."""
_BATCH_ROWS = 1 << 14
_JOINED = "|"
_NUMBER = r"^\s*-?[0-9]+(\.[0-9]+)?\s*$"


class EventTable(Config):
    """The uses of the columns of a table of events.

    A column is a name, or a path into objects and lists: `event.object.id`, or `items[].item_id`, which makes an event
    of each item of the list.
    """

    time: str
    """Column with the time of the event."""
    item: str
    """Column with the id of the item that was shown, clicked, put into the cart or ordered."""
    every: Act | None = None
    """What all rows of the table are, where no column says it."""
    action: str | None = None
    """Column that says what happened; its values are under shown, click, cart and order, all others are left over."""
    shown: Texts = ()
    """Values of `action` where an item was shown in a list."""
    click: Texts = ()
    """Values where it was clicked."""
    cart: Texts = ()
    """Values where it was put into the cart."""
    order: Texts = ()
    """Values where it was ordered."""
    query: Texts = ()
    """Column with the id of the query whose list it was, or several that make it. Items that are shown without it are
    one list for each session and time."""
    session: Texts = ()
    """Column with the session, visitor or user, by which events without a query id find their list."""
    position: str | None = None
    """Column with the position in the list; by default the place in a list of items, from 1."""
    revenue: str | None = None
    """Column with the revenue of an order."""
    id: str | None = None
    """Column with the id of the event: of several with one id and item, one counts. By default of several that are
    equal in all of these columns."""
    columns: ColumnNames = Field(default_factory=dict)
    """Columns that come with the items shown, such as features and texts of queries: their names, prefixes with `*`, or
    {new name: path}."""

    @model_validator(mode="after")
    def _says_what_happens(self) -> Self:
        if (self.every is None) == (self.action is None):
            raise ValueError("give every or action, what all rows are or the column that says it")
        if (self.action is None) != (not self.acts_by_value()):
            raise ValueError("give action with its values under shown, click, cart and order, and no values without it")
        paths = [path for path in (*self.paths(), *self.columns.values()) if "[]" in path]
        if deep := [path for path in paths if path.count("[]") > 1]:
            raise ValueError(f"{deep[0]}: a list within a list cannot be read; write its items as one list")
        lists = {path.partition("[]")[0] for path in paths}
        if lists - {self.item.partition("[]")[0]} or ("[]" not in self.item and lists):
            raise ValueError(f"lists: {', '.join(sorted(lists))}; paths of items are in the list of item")
        if taken := [name for name in self.columns if name in MADE.names]:
            raise ValueError(f"columns: {taken[0]!r} is a column that events make; give it another name")
        return self

    def acts_by_value(self) -> dict[str, int]:
        """The numbers of the acts by the values of `action`."""
        return {value: number for number, act in enumerate(ACTS) for value in getattr(self, act)}

    def paths(self) -> list[str]:
        """The paths in use, but for those of `columns`."""
        single = (self.time, self.item, self.action, self.position, self.revenue, self.id)
        return [path for path in (*single, *self.query, *self.session) if path]

    @property
    def needed(self) -> list[str]:
        """The columns that a file must have to be such a table."""
        paths = (self.time, self.item, self.action, *self.query, *self.session)
        return [*dict.fromkeys(_first(path) for path in paths if path)]


UBI = (
    EventTable(
        time="timestamp",
        item="query_response_hit_ids[]",
        every="shown",
        query=("query_id",),
        session=("client_id",),
        columns={"user_query": "user_query"},
    ),
    EventTable(
        time="timestamp",
        item="event_attributes.object.object_id",
        action="action_name",
        click=("click", "item_click", "product_click"),
        cart=("add_to_cart",),
        order=("purchase",),
        query=("query_id",),
        session=("client_id",),
    ),
)
"""OpenSearch's User Behavior Insights: the indices `ubi_queries` and `ubi_events`."""

GA4 = (
    EventTable(
        time="event_timestamp",
        item="items[].item_id",
        action="event_name",
        shown=("view_item_list",),
        click=("select_item",),
        cart=("add_to_cart",),
        order=("purchase",),
        session=("user_pseudo_id",),
        position="items[].item_list_index",
        revenue="items[].item_revenue",
        columns={
            **{name: f"items[].{name}" for name in ("price", "item_brand", "item_category", "item_list_id")},
            "platform": "platform",
        },
    ),
)
"""Google Analytics 4: the tables `events_*` of its export to BigQuery."""
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
        uses, keys = self.columns, join_keys(self.joins)
        others = {*named_columns([*found], uses.categorical), *uses.beside_features(), *keys}
        numbers = {*named_columns([*found], uses.features)} - others  # numeric features, and nothing else
        in_json = any(file_form(file.url) == "json" for file in files)

        def type_of(name: str, kind: pa.DataType) -> pa.DataType:
            if name in numbers and (pa.types.is_null(kind) or (in_json and pa.types.is_integer(kind))):
                return pa.float64()  # later lines may have fractions
            return pa.string() if pa.types.is_null(kind) else kind

        return pa.schema([(name, type_of(name, kind)) for name, (kind, _) in found.items()])


class EventBatch(NamedTuple):
    """Events of a batch of rows, those left over, and how many are left over by reason."""

    events: pa.Table
    left: pa.Table
    counts: Counter[str]


@dataclass(frozen=True)
class EventFile:
    """A file, read as the first of some tables whose columns it has."""

    file: File
    table: EventTable
    names: Sequence[str]
    """The columns of the file."""

    @staticmethod
    def of(file: File, tables: Sequence[EventTable]) -> "EventFile":
        """The file; an InputError if it is none of the tables."""
        url = file.url
        if file_form(url) == "json":
            names = [*dict.fromkeys(name for each in sniffed_objects(url) for name in each)]
        else:
            names = list(parquet_schema(url, file.lake).names)
        for table in tables:
            if {*table.needed} <= {*names}:
                return EventFile(file, table, names)
        needed = " or ".join(", ".join(each.needed) for each in tables)
        raise InputError(f"{url}: no table of source.tables has its columns {', '.join(names)}; each needs {needed}")

    @property
    def carried(self) -> dict[str, str]:
        """The columns that come with the items shown: paths by name, with those that patterns match."""
        table, found = self.table, dict[str, str]()
        free = [name for name in self.names if name not in (*table.query, *table.session, *MADE.names)]
        for name, path in table.columns.items():
            found |= {each: each for each in named_columns(free, [path])} if path.endswith("*") else {name: path}
        return found

    def carried_types(self) -> dict[str, pa.DataType]:
        """Their types; those that the file lacks are null."""
        url, lake = self.file.url, self.file.lake
        nulls = dict.fromkeys(self.carried, pa.null())
        schema = parquet_schema(url, lake) if file_form(url) != "json" else self._lines(nulls).schema
        rows = pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in schema.types], schema=schema)
        found = {name: _values(rows, path) for name, path in self.carried.items()}
        return {name: pa.null() if each is None else _plain_type(each.type) for name, each in found.items()}

    def read(self, number: int, clock: Clock, carried: Mapping[str, pa.DataType]) -> Iterator[EventBatch]:
        """The events, a batch of rows after the other; `number` is that of the file, `carried` the types in all."""
        for raw in self._rows(carried):
            events, reasons_M = _Batch(self.table, self.carried, raw.rows).events(raw.lines_N, number, clock)
            counts = Counter[str](reasons_M[reasons_M != ""].tolist())
            counts["unparsable"] += len(raw.rejected)
            listed_M = (reasons_M != "") & (reasons_M != "other_action")
            columns = {name: events[name] for name in LEFT.names if name != "reason"}
            left = pa.table({**columns, "reason": pa.array(reasons_M, pa.string())}).select(LEFT.names)
            bad = [{"file": number, "line": each.line, "reason": "unparsable"} for each in raw.rejected]
            left = pa.concat_tables([left.filter(pa.array(listed_M)).cast(LEFT), pa.Table.from_pylist(bad, LEFT)])
            yield EventBatch(events.filter(pa.array(reasons_M == "")), left, counts)

    def _rows(self, carried: Mapping[str, pa.DataType]) -> Iterator[Raw]:
        if file_form(self.file.url) == "json":
            return iter(self._lines(carried))
        needed = {_first(path) for path in self._paths()}
        names = [name for name in self.names if name in needed]
        return read_parquet(self.file.url, names, _BATCH_ROWS, self.file.lake)

    def _lines(self, carried: Mapping[str, pa.DataType]) -> NestedReader:
        types = {path: carried[name] for name, path in self.carried.items()}
        types |= {path: pa.float64() for path in (self.table.position, self.table.revenue) if path}
        return NestedReader.of(self.file.url, self._paths(), types, _BATCH_ROWS)

    def _paths(self) -> list[str]:
        return [*dict.fromkeys([*self.table.paths(), *self.carried.values()])]


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without a dictionary, and wide enough for the database, which has no half floats."""
    kind = cols.value_type(kind)
    return pa.float32() if pa.types.is_float16(kind) else kind


def _first(path: str) -> str:
    """The column of a file that a path begins with."""
    return path.partition(".")[0].removesuffix("[]")


class _Batch:
    """A batch of rows as events."""

    def __init__(self, table: EventTable, carried: Mapping[str, str], rows: pa.RecordBatch) -> None:
        self.table, self.carried, self.rows = table, carried, rows
        self.index_M, self.element_M = self._spread()
        self.act_M = self._acts()
        self.shown_M = self.act_M == ACTS.index("shown")

    def events(self, lines_N: Ints, file: int, clock: Clock) -> tuple[pa.Table, NDArray[np.str_]]:
        """The events of all rows, and why each is left over, empty for those that are not."""
        table = self.table
        time_M, bad_M = microseconds(self._at(table.time), clock)
        (item, bad_item_M), (name, bad_name_M) = self._texts([table.item]), self._texts([table.id] if table.id else [])
        (query, bad_query_M), (session, bad_session_M) = self._texts(table.query), self._texts(table.session)
        view = pc.binary_join_element_wise(session, pa.array(time_M).cast(pa.string()), _JOINED)
        query = pc.if_else(pa.array(self.shown_M), pc.coalesce(query, view), query)
        position = _floats(self._at(table.position))
        if "[]" in table.item:
            place_M = np.arange(len(time_M)) - np.searchsorted(self.index_M, self.index_M) + 1.0
            position = pc.coalesce(position, pa.array(place_M))
        own = [self.act_M, query, session, item, time_M, position, _floats(self._at(table.revenue)), name]
        own += [np.full(len(time_M), file, np.int32), lines_N[self.index_M]]
        conditions = {
            "other_action": self.act_M < 0,
            "unparsable": bad_M | bad_item_M | bad_name_M | bad_query_M | bad_session_M,
            "no_item": _is_null(item),
            "no_query": _is_null(query) & (_is_null(session) | self.shown_M),
        }
        reasons_M = np.select([*conditions.values()], [*conditions], "")
        return pa.table({**dict(zip(OWN.names, own, strict=True)), **self._of_shown()}), reasons_M

    def _spread(self) -> tuple[Ints, pa.Array]:
        """The row of each event, and its element among those of all lists, null for a row without any."""
        n, (before, is_list, _) = len(self.rows), self.table.item.partition("[]")
        lists = _values(self.rows, before) if is_list else None
        if lists is None or not cols.is_list(lists.type):
            return np.arange(n), pa.nulls(n, pa.int64())
        lengths_N = np.asarray(pc.list_value_length(lists).fill_null(0), np.int64)
        index_M = np.repeat(np.arange(n), np.maximum(lengths_N, 1))
        empty_M = (lengths_N == 0)[index_M]
        return index_M, pa.array(np.cumsum(~empty_M) - 1, mask=empty_M)

    def _at(self, path: str | None) -> pa.Array:
        """The value at a path for each event; null where there is none."""
        found = None if path is None else _values(self.rows, path)
        if path is None or found is None:
            return pa.nulls(len(self.index_M))
        values = cols.without_dictionary(found.take(self.element_M if "[]" in path else pa.array(self.index_M)))
        return values.cast(_plain_type(values.type))

    def _texts(self, paths: Sequence[str]) -> tuple[pa.StringArray, Bools]:
        """The texts at some paths as one, null where one is empty, and the events where one is not UTF-8."""
        parts = [cols.texts(self._at(path)) for path in paths]
        if not parts:
            return pa.nulls(len(self.index_M), pa.string()), np.zeros(len(self.index_M), bool)
        texts = [pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text) for text, _ in parts]
        return pc.binary_join_element_wise(*texts, _JOINED), np.logical_or.reduce([broken for _, broken in parts])

    def _acts(self) -> NDArray[np.int8]:
        """The number of each event's act, -1 for any other."""
        if self.table.every is not None:
            return np.full(len(self.index_M), ACTS.index(self.table.every), np.int8)
        by_value, (values, _) = self.table.acts_by_value(), self._texts([self.table.action or ""])
        place_M = pc.index_in(values, pa.array(list(by_value), pa.string())).fill_null(-1)
        return np.asarray(np.array([*by_value.values(), -1], np.int8)[place_M.to_numpy()])

    def _of_shown(self) -> dict[str, pa.Array]:
        """The columns that come with the items shown, null for other events."""
        columns = {name: self._at(path) for name, path in self.carried.items()}
        return {
            SHOWN + name: pc.if_else(pa.array(self.shown_M), column, pa.scalar(None, column.type))
            for name, column in columns.items()
        }


def _values(rows: pa.RecordBatch, path: str) -> pa.Array | None:
    """The values at a path, one for each row, or for each element of a list in it; None if there is no such path."""
    values = rows.to_struct_array()
    for step in path.split("."):
        name = step.removesuffix("[]")
        if not pa.types.is_struct(values.type) or values.type.get_field_index(name) < 0:
            return None
        values = pc.struct_field(values, name)
        if step.endswith("[]"):
            if not cols.is_list(values.type):
                return None
            values = values.flatten()
    return values


def _is_null(values: pa.Array) -> Bools:
    return np.asarray(values.is_null(), np.bool_)


def _floats(values: pa.Array) -> pa.DoubleArray:
    """Numbers, also of text; null for a text that is none."""
    if cols.is_text(values.type):
        text, _ = cols.texts(values)
        values = pc.if_else(pc.match_substring_regex(text, _NUMBER), pc.utf8_trim_whitespace(text), None)
    values = values.cast(pa.float64(), safe=False)
    return pc.if_else(pc.is_finite(values), values, pa.scalar(None, pa.float64()))


def ready_tables(url: str) -> str | None:
    """The name of the ready tables that a file is one of, such as `ubi`; None for any other file."""
    with suppress(InputError):
        table = EventFile.of(File(url), [*UBI, *GA4]).table
        return next(name for name, tables in _READY.items() if table in tables)
    return None


def made_rows(url: str) -> tuple[list[File], dict[str, int]]:
    """The files of rows of a directory of `EventRows`, by period and part, and its counts of events."""
    manifest = storage.read_manifest(url) or {"files": [], "counts": {}}
    names = sorted(file["path"] for file in manifest["files"] if file["path"].startswith(ROWS_OF))
    return [File(url=storage.join(url, name)) for name in names], manifest["counts"]
