"""Features of a row from the events before it: configs, the SQL that computes them here and where they serve, a reader.

An event is a row of the log, or of a table of its own. It is known at t_e, some `delay` after its time; t is the time
of a row, and both are cut to whole `step`s. Of the events with the row's values of `by`,

    w = 1 if t - window <= t_e < t,  or  2^(-(t - t_e) / half_life) if t_e < t,  else 0                          (1)
    count = sum w of                                                                                             (2)
    rate = (sum w of + smooth prior) / (sum w per + smooth)                                                      (3)
    last, first = t - t_e of the latest and the earliest event with of > 0 and w > 0, in seconds                 (4)

Sums of (2) and (3) are of decimals with nine digits, so that no order of rows changes them. A half-life multiplies
them by 2^((t_e - t_b) / half_life), where t_b is the start of a block of 500 half-lives, and adds up those of the
block of t and of the one before; events that are older than 500 half-lives do not count.

Shapes: N rows of a block, M rows that were read and are still to come.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from ltrscale.arrays import Ints
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.ingest.tables import ColumnNames, parquet_schema, read_parquet

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BLOCK = 500
"""Half-lives of a block: weights between 2^-500 and 2^500 are numbers of double precision."""
_BATCH_ROWS = 1 << 16
LINE = "__line__"
"""The column with the line of a row in its file."""
SqlDialect = Literal["duckdb", "bigquery"]
Duration = Annotated[str, Field(pattern="^[1-9][0-9]{0,5}[smhdw]$")]
"""A number of seconds, minutes, hours, days or weeks, such as 30m or 7d."""
HalfLife = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}(\.[0-9]{1,15})?[smhdw]$")]
"""The same, which may be 41.6m."""


def in_microseconds(duration: str) -> float:
    """The length of a duration or half-life.

    Example:
        >>> in_microseconds("2h")
        7200000000.0
    """
    return float(duration[:-1]) * _SECONDS[duration[-1]] * 1e6


class _OfEvents(Config):
    """What the features of events share."""

    by: ColumnNames = Field(min_length=1)
    """The columns in which events agree with the row, such as item_id or [user_id, brand]; `{column of the rows: column
    of the events}` where names differ. A row without one of these values has no value of the feature."""
    window: Duration | None = None
    """Only events of this time before the row, such as 7d; by default all."""

    @property
    def decay(self) -> str | None:
        """The half-life of an event's weight."""
        return None

    def columns(self) -> list[str]:
        """The columns of events whose values are read."""
        return []

    def sql(self, known: "_Known") -> str:
        """The feature at a row, as an expression of what is known there."""
        raise NotImplementedError


class _Total(_OfEvents):
    half_life: HalfLife | None = None
    """Time after which an event counts half, instead of a window."""

    @model_validator(mode="after")
    def _one_weight(self) -> Self:
        if self.window and self.half_life:
            raise ValueError("give window or half_life, not both")
        return self

    @property
    def decay(self) -> str | None:
        """The half-life of an event's weight."""
        return self.half_life


class CountFeature(_Total):
    """A number of events, or the sum of their values."""

    kind: Literal["count"] = "count"
    of: str | None = None
    """Column of numbers to sum, such as clicked; by default each event is 1."""

    def columns(self) -> list[str]:  # noqa: D102
        return [self.of] if self.of else []

    def sql(self, known: "_Known") -> str:  # noqa: D102
        return known.total(self.of)


class RateFeature(_Total):
    """A share of events, or the mean of their values; missing where less than a billionth is below the line."""

    kind: Literal["rate"] = "rate"
    of: str
    """Column of numbers above the line, such as clicked."""
    per: str | None = None
    """Column of numbers below the line, such as shown; by default each event with a value of `of` is 1."""
    smooth: float = Field(default=0, ge=0, le=1e9)
    """Events that are added below the line; with `prior`, their rate."""
    prior: float = Field(default=0, ge=-1e9, le=1e9)
    """The rate of those events."""

    def columns(self) -> list[str]:  # noqa: D102
        return [self.of, self.per] if self.per else [self.of]

    def sql(self, known: "_Known") -> str:  # noqa: D102
        below = known.total(self.per) if self.per else known.number(self.of)
        above, below = f"{known.total(self.of)} + {self.smooth * self.prior!r}", f"{below} + {self.smooth!r}"
        return f"({above}) / NULLIF(GREATEST({below}, 1e-9), 1e-9)"  # less would be no number in single precision


class _Since(_OfEvents):
    of: str | None = None
    """Column that must be above 0, such as clicked; by default any event."""

    def columns(self) -> list[str]:
        return [self.of] if self.of else []


class LastFeature(_Since):
    """Seconds since the latest event; missing if there is none."""

    kind: Literal["last"] = "last"

    def sql(self, known: "_Known") -> str:  # noqa: D102
        return known.since("MAX", self.of)


class FirstFeature(_Since):
    """Seconds since the earliest event, such as the age of an item; missing if there is none."""

    kind: Literal["first"] = "first"

    def sql(self, known: "_Known") -> str:  # noqa: D102
        return known.since("MIN", self.of)


HistoryFeature = Annotated[CountFeature | RateFeature | LastFeature | FirstFeature, Field(discriminator="kind")]


class HistoryConfig(Config):
    """Features from events, as they were known at the time of the row."""

    features: dict[str, HistoryFeature] = Field(min_length=1)
    """Numeric features, by their names."""
    events: str | None = None
    """Files of the events: Parquet, CSV or JSON lines, as the log itself. By default its rows are the events."""
    time: str | None = None
    """Column with the time of these events; by default that of the rows."""
    delay: Duration | None = None
    """Time after which an event is known, such as 10m for logs that arrive late."""
    step: Duration = "1s"
    """Length of the steps of time, such as 1m where a service counts once a minute: events of the row's own step are
    not known."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.time is not None and self.events is None:
            raise ValueError("time is that of events; the rows have columns.time")
        both = {column for each in self.features.values() for column in each.columns()} & {*self.event_keys()}
        if both:
            raise ValueError(f"{min(both)!r} is a number to sum and also under by; write it to another column")
        if len({name.lower() for name in self.features}) < len(self.features):
            raise ValueError("two names of features differ only in case, which SQL takes for one; rename one")
        return self

    def row_keys(self) -> list[str]:
        """The columns of rows that name what events are of."""
        return list(dict.fromkeys(column for each in self.features.values() for column in each.by))

    def event_keys(self) -> list[str]:
        """The columns of events with these values."""
        return list(dict.fromkeys(column for each in self.features.values() for column in each.by.values()))

    def event_values(self) -> list[str]:
        """The columns of events with numbers."""
        return list(dict.fromkeys(column for each in self.features.values() for column in each.columns()))

    def only(self, names: Collection[str]) -> Self:
        """The same with some of the features."""
        return self.replace(features={name: each for name, each in self.features.items() if name in names})

    def passes(self) -> list["Pass"]:
        """The passes over the events, one for all features of a window or half-life and of the same columns."""
        found: dict[str, dict[str, HistoryFeature]] = {}
        for name, each in self.features.items():
            found.setdefault(f"{each.window} {each.decay} {sorted(each.by.items())}", {})[name] = each
        return [Pass(self, features) for features in found.values()]

    def sql(self, time: str, dialect: SqlDialect) -> str:
        """The statement that gives the rows of a table `rows` with the features, which a table `events` knows of.

        `time` is the column with the time of the rows.
        """
        import sqlglot  # only exports need it

        query = sqlglot.parse_one(select_known(self.passes(), time, "rows.*"), dialect="duckdb")
        if dialect == "bigquery":
            for call in query.find_all(sqlglot.exp.Anonymous):  # EPOCH_US, the only one that sqlglot does not know
                call.set("this", "UNIX_MICROS")
        return f"{query.sql(dialect, pretty=True)};\n"


def quoted(name: str) -> str:
    """The name of a column in SQL."""
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True)
class Pass:
    """Features of one window or half-life by the same columns, which one sort of the events gives."""

    config: HistoryConfig
    features: Mapping[str, HistoryFeature]

    @property
    def like(self) -> HistoryFeature:
        """One of them."""
        return next(iter(self.features.values()))

    @property
    def by(self) -> Mapping[str, str]:
        """The columns of rows, with those of events."""
        return self.like.by

    def moment(self, time: str, delay: str | None = None) -> str:
        """The time of a row, or at which an event is known, in whole steps, as microseconds since 1970."""
        at = f"EPOCH_US({time})" + (f" + {in_microseconds(delay):.0f}" if delay else "")
        step = f"{in_microseconds(self.config.step):.0f}"
        return f"CAST(FLOOR(({at}) / {step}) AS BIGINT) * {step}"

    def known(self, time: str) -> str:
        """The query of the features at each moment of each key: t, the key as k0, k1, ..., and f0, f1, ..."""
        by, window = self.by, self.like.window
        values = dict.fromkeys(column for each in self.features.values() for column in each.columns())
        known = _Known({column: f"v{i}" for i, column in enumerate(values)}, self.like.decay)
        shown = ", ".join(f"{each.sql(known)} AS f{i}" for i, each in enumerate(self.features.values()))
        at = self.moment(quoted(self.config.time or time), self.config.delay)
        columns = [f"{quoted(column)} AS {name}" for column, name in known.values.items()]
        events = f"SELECT {', '.join([f'{at} AS t', *_keys(by.values()), *columns, '1 AS one'])} FROM events"
        nulls = [f"NULL AS {name}" for name in (*known.values.values(), "one")]
        rows = f"SELECT {', '.join([f'{self.moment(quoted(time))} AS t', *_keys(by), *nulls])} FROM rows"
        key = ", ".join(f"k{i}" for i in range(len(by)))
        length = known.block or (in_microseconds(window) if window else None)
        start = f"{length:.0f} PRECEDING" if length else "UNBOUNDED PRECEDING"
        block, blocks = known.block, f"b, {key}" if known.block else key
        marks = f"{events} UNION ALL {rows}"
        if block:  # the events of a block are also those of the next one, where no row of their own time is
            here = f"CAST(FLOOR(t / {block}) AS BIGINT)"
            marks = f"SELECT *, {here} AS b FROM ({marks}) UNION ALL SELECT *, {here} + 1 AS b FROM ({events})"
        sums = ", ".join(f"{aggregate} AS {name}" for aggregate, name in known.sums.items())
        present = " AND ".join(f"{name} IS NOT NULL" for name in ("t", *key.split(", ")))
        moments = f"SELECT t, {blocks}, {sums} FROM ({marks}) WHERE {present} GROUP BY t, {blocks}"
        over = f"PARTITION BY {blocks} ORDER BY t NULLS FIRST RANGE BETWEEN {start} AND 1 PRECEDING"
        found = f"SELECT t, {blocks}, {shown} FROM ({moments}) WINDOW known AS ({over})"
        return f"SELECT * FROM ({found}) WHERE b = {here}" if block else found


def _keys(columns: Iterable[str]) -> list[str]:
    """Columns as text, in their order."""
    return [f"NULLIF(CAST({quoted(column)} AS VARCHAR), '') AS k{i}" for i, column in enumerate(columns)]


def select_known(passes: Sequence[Pass], time: str, columns: str) -> str:
    """The query of some columns of rows with the features of passes, in DuckDB's SQL."""
    tables = ", ".join(f"p{i} AS ({each.known(time)})" for i, each in enumerate(passes))
    features = [(f"p{i}.f{k}", name) for i, each in enumerate(passes) for k, name in enumerate(each.features)]
    shown = ", ".join(f"{value} AS {quoted(name)}" for value, name in features)
    joins = ""
    for i, each in enumerate(passes):
        same = [f"CAST(rows.{quoted(column)} AS VARCHAR) = p{i}.k{k}" for k, column in enumerate(each.by)]
        at = each.moment(f"rows.{quoted(time)}")
        joins += f" LEFT JOIN p{i} ON {' AND '.join([f'{at} = p{i}.t', *same])}"
    return f"WITH {tables} SELECT {columns}, {shown} FROM rows{joins}"


@dataclass
class _Known:
    """The sums that the features of a pass need at each moment of each key."""

    values: Mapping[str, str]
    """The columns of events, with their names inside the query."""
    half_life: str | None
    sums: dict[str, str] = field(default_factory=dict)
    """Aggregates of the events of a moment, with their names."""

    @property
    def block(self) -> int | None:
        """The length of a block in microseconds; None without a half-life."""
        return round(_BLOCK * in_microseconds(self.half_life)) if self.half_life else None

    def total(self, column: str | None) -> str:
        """The weighted sum of a column; of 1 without one."""
        return self._sum(self.values[column] if column else "one")

    def number(self, column: str) -> str:
        """The weighted number of events with a value of a column."""
        return self._sum(f"CASE WHEN {self.values[column]} IS NOT NULL THEN 1 END")

    def since(self, function: Literal["MAX", "MIN"], column: str | None) -> str:
        """Seconds since the last or first event with a value above 0."""
        name = self._named(f"{function}(CASE WHEN {self.values[column] if column else 'one'} > 0 THEN t END)")
        return f"(t - {function}({name}) OVER known) / 1000000"

    def _sum(self, value: str) -> str:
        name = self._named(f"SUM(CAST({value} AS DECIMAL(38, 9)))")
        if self.half_life is None:
            return f"COALESCE(CAST(SUM({name}) OVER known AS DOUBLE), 0)"
        age = f"(t - b * {self.block}) / {in_microseconds(self.half_life)!r}"
        weighted = f"SUM(CAST({name} AS DOUBLE) * POWER(2, {age})) OVER known"
        return f"COALESCE({weighted} * POWER(2, -({age})), 0)"

    def _named(self, aggregate: str) -> str:
        return self.sums.setdefault(aggregate, f"s{len(self.sums)}")


class RowHistory:
    """The features of a file's rows, from files that have them in the order of its lines, some columns each."""

    def __init__(self, file: str, urls: Sequence[str], names: Collection[str]) -> None:
        self._file = file
        self._parts = zip(*(read_parquet(url, parquet_schema(url).names, _BATCH_ROWS) for url in urls), strict=True)
        self._waiting = pa.schema([(LINE, pa.int64()), *((name, pa.float32()) for name in names)]).empty_table()

    def at(self, lines_N: Ints) -> dict[str, pa.Array]:
        """The features of the rows at these lines, which lie behind those of the call before."""
        last = lines_N.max(initial=-1)
        while (lines_M := self._waiting[LINE].to_numpy()).max(initial=-1) < last:
            self._waiting = pa.concat_tables([self._waiting, self._next()])
        place_N = np.searchsorted(lines_M, lines_N)
        if (lines_M[place_N] != lines_N).any():
            raise self._changed()
        rows = self._waiting.drop_columns(LINE).take(pa.array(place_N))
        self._waiting = self._waiting.slice(int(place_N.max(initial=-1)) + 1)
        return {name: rows[name].combine_chunks() for name in rows.column_names}

    def _next(self) -> pa.Table:
        """The next rows of all files."""
        if (parts := next(self._parts, None)) is None:
            raise self._changed()
        columns = {name: part.rows[name] for part in parts for name in part.rows.schema.names}
        return pa.table(columns).select(self._waiting.column_names)

    def _changed(self) -> InputError:
        return InputError(f"{self._file}: has other rows than when its history was made; run the same command again")
