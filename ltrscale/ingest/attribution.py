"""Attribution of events to the lists in which their items were shown, by DuckDB, in bounded memory.

Three steps, each on all events or rows of some values of its key, so that a hash of the key deals the work to any
number of parts with the same result:

    by session    an event without a query id belongs to the last list of its session that shows its item, before it
                  and within the window
    by query      the events of a query id become rows: each item once, with how often it was shown and what came of it
    by name       lists of one name and period that differ in nothing but query id, times and session become one

The result depends on neither the order of the events nor their files. Of several that are one event, and of several
times that a list shows an item, the first time counts; among equal times the first position, then the other columns.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa

from ltrscale.ingest.events import LEFT, MADE, OWN
from ltrscale.ingest.sort import database

NAMED = pa.schema([("name", pa.string()), ("period", pa.string())])
"""The columns of rows that become one by name, before those of `MADE`."""
_BATCH_ROWS = 1 << 14


@contextmanager
def database_of(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, *, scratch: Path, memory_limit: str
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database with the batches as the table `events`; the columns that come with the items are c0, c1 and so on."""
    own = {*OWN.names, *MADE.names, *NAMED.names}
    names = iter(f"c{i}" for i in range(len(schema)))
    # times as numbers, which DuckDB would read by the zone of the machine
    types = [pa.int64() if pa.types.is_timestamp(kind) else kind for kind in schema.types]
    stored = pa.schema(
        [(name if name in own else next(names), kind) for name, kind in zip(schema.names, types, strict=True)]
    )
    with database(scratch, memory_limit=memory_limit) as db:
        place = str(scratch / "events.duckdb").replace("'", "''")
        db.execute(f"ATTACH '{place}' AS disk; USE disk")
        db.from_arrow(stored.empty_table()).create("events")
        for batch in batches:
            db.from_arrow(_renamed(batch, stored)).insert_into("events")
        yield db


def rows_in_view(db: duckdb.DuckDBPyConnection, view: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of a view with the columns of a schema, in their order."""
    for batch in db.sql(f"FROM {view}").to_arrow_reader(_BATCH_ROWS):
        yield _renamed(batch, schema)


def _renamed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    columns = [column.cast(kind) for column, kind in zip(batch.columns, schema.types, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


def by_session(db: duckdb.DuckDBPyConnection, *, window: int) -> None:
    """Find the lists of events without a query id; `window` is in microseconds.

    Makes the views `result`, events with their query ids, and `left_over`.
    """
    db.execute(f"""
        CREATE TABLE found AS
        WITH lists AS (SELECT session, item, time AS seen, max(query) AS list FROM events WHERE act = 0 GROUP BY ALL),
        goals AS (SELECT *, {_again("act, session, item", ["time"])} AS again FROM events WHERE act > 0)
        SELECT goals.*, list, CASE WHEN again THEN 'duplicate' WHEN list IS NULL THEN 'not_shown'
            WHEN time - seen > {window} THEN 'outside_window' END AS reason
        FROM goals ASOF LEFT JOIN lists
            ON goals.session = lists.session AND goals.item = lists.item AND goals.time >= lists.seen;
        CREATE VIEW left_over AS SELECT {_listed(LEFT.names)} FROM found WHERE reason IS NOT NULL ORDER BY ALL;
        CREATE VIEW result AS SELECT {_listed(OWN.names)} FROM
            (SELECT * REPLACE (list AS query) FROM found WHERE reason IS NULL) ORDER BY file, line, item;
    """)


def by_query(db: duckdb.DuckDBPyConnection, *, carried: int, name: str | None = None) -> None:
    """Make rows of events; `carried` is the number of columns c0, c1, ..., of which `name` may name the list.

    Makes the views `result`, rows by the first time of their list, and `left_over`, and the table `kept` of all events
    that are not left over.
    """
    columns = [f"c{i}" for i in range(carried)]
    named = f"first_value({name}::VARCHAR) OVER (PARTITION BY query ORDER BY position, item)" if name else "NULL"
    db.execute(f"""
        CREATE TABLE marked AS SELECT *, {_again("act, query, item", columns)} AS again FROM events;
        CREATE TABLE firsts AS SELECT *, {named} AS name FROM (
            SELECT query, item, position, session, {_listed([*columns, "count(*) OVER shows AS shown"])},
                min(time) OVER (PARTITION BY query) AS began,
                row_number() OVER (shows ORDER BY {_listed(["time", "position", *columns, "session"])}) AS place
            FROM marked WHERE act = 0 AND NOT again WINDOW shows AS (PARTITION BY query, item)
        ) WHERE place = 1;
        CREATE TABLE kept AS SELECT * FROM marked
            WHERE NOT again AND (act = 0 OR (query, item) IN (SELECT (query, item) FROM firsts));
        CREATE VIEW left_over AS SELECT file, line, CASE WHEN again THEN 'duplicate'
                WHEN query IN (SELECT query FROM firsts) THEN 'not_shown' ELSE 'unknown_query' END AS reason,
                act, query, session, item
            FROM marked
            WHERE again OR (act > 0 AND (query, item) NOT IN (SELECT (query, item) FROM firsts)) ORDER BY ALL;
        CREATE VIEW result AS
            SELECT name, '' AS period, query, item, position, began AS time, session, shown,
                coalesce(click, 0) AS click, coalesce(cart, 0) AS cart, coalesce("order", 0) AS "order",
                coalesce(grade, 0) AS grade, coalesce(revenue, 0) AS revenue, 1 AS weight, {_listed(columns)}
            FROM firsts LEFT JOIN (
                SELECT query, item, max((act = 1)::INT) AS click, max((act = 2)::INT) AS cart,
                    max((act = 3)::INT) AS "order", max(act) AS grade,
                    sum(CASE WHEN act = 3 THEN revenue END ORDER BY revenue) AS revenue
                FROM kept WHERE act > 0 GROUP BY query, item
            ) USING (query, item) ORDER BY began, query, position, item;
    """)


def by_name(db: duckdb.DuckDBPyConnection, *, carried: int) -> None:
    """Make one list of those of a name and period that are equal, with their number as the weight.

    Makes the view `result`, rows as of `by_query`.
    """
    columns = [f"c{i}" for i in range(carried)]
    content = _listed(["item", "position", "shown", "grade", "click", "cart", '"order"', "revenue", *columns])
    db.execute(f"""
        CREATE TABLE lists AS
            SELECT query, any_value(name) AS name, any_value(period) AS period, min(time) AS began,
                list(({content}) ORDER BY position, item) AS content
            FROM events GROUP BY query;
        CREATE TABLE firsts AS
            SELECT query, count(*) OVER same AS lists, row_number() OVER (same ORDER BY began, query) AS place
            FROM lists WINDOW same AS (PARTITION BY name, period, content, CASE WHEN name IS NULL THEN query END);
        CREATE VIEW result AS SELECT events.* REPLACE (lists AS weight)
            FROM events JOIN firsts USING (query) WHERE place = 1 ORDER BY time, query, position, item;
    """)


def _again(key: str, then: Sequence[str]) -> str:
    """Whether an event is one that is there already, in SQL."""
    same = "id, CASE WHEN id IS NULL THEN (session, time, position, revenue) END"
    order = _listed(["time", "position", *then, "session", "revenue", "file", "line"])
    return f"row_number() OVER (PARTITION BY {key}, {same} ORDER BY {order}) > 1"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
