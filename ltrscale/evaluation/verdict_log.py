"""The log of a live test: its rows are read once, and added up by user in bounded memory.

What a verdict needs of each row goes to a scratch file. DuckDB decides there which rows count and adds them up, on disk
beyond its memory.

Shapes: A arms, M goals, N rows of a batch.
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.arrays import Doubles
from ltrscale.config import Config, Operational, Strict
from ltrscale.data import columns as cols
from ltrscale.data.dataset.split import Texts
from ltrscale.data.times import instants
from ltrscale.errors import InputError
from ltrscale.evaluation.statistics.lifts import Lifts, UserMoments, ratio
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.profile import dialect_of
from ltrscale.ingest.resolve import require
from ltrscale.ingest.rows import Raw
from ltrscale.ingest.sort import database
from ltrscale.ingest.tables import file_form, read_rows, read_schema
from ltrscale.progress import progress

_ROW, _USER = "row", "user"
_BATCH = 1 << 16
_DAY = 86_400
Day = datetime.date | None


class Goal(Config):
    """What users are to do more: a sum by user, whether there is any, or a ratio of two sums."""

    column: str = _ROW
    """Column that is added up; empty values count 0. `row` counts rows. A goal may be written as its column alone."""
    any: bool = False
    """Counts the users with any of it, such as those who bought."""
    per: str = _USER
    """Column of what it is counted by, such as `sessions`, or `row`; users are the sample all the same."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"column": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of_both(self) -> "Goal":
        if self.any and self.per != _USER:
            raise ValueError("any: counts users; leave per out")
        if self.column == _USER:
            raise ValueError("column: user is what goals are counted by; name a column of numbers, or row")
        return self

    @property
    def columns(self) -> set[str]:
        """The columns of numbers that it reads."""
        return {self.column, self.per} - {_ROW, _USER}


class _Files(Config):
    """Where the rows of a live test are, and what their columns mean."""

    inputs: Texts = Field(min_length=1)
    """Files, folders or patterns at any URL: Parquet, CSV or JSON lines."""
    user: str = "user"
    """Column of what was drawn by chance: the user, or the session where sessions were drawn."""
    arm: str = "arm"
    """Column of the arm: the user's, or in interleaving that whose ranking the item came from (its team)."""
    time: str | None = None
    """Column of the time, in ISO 8601 or as a number since 1970; `start` and `until` need it."""
    memory: Operational[str] = Field(default="512MB", pattern=r"^[0-9]+(\.[0-9]+)? ?[KMGT]i?B$")
    """Memory for adding up; beyond it the disk of TMPDIR is used."""


class AbLog(_Files):
    """Each user has one arm: an A/B test."""

    kind: Literal["ab"] = "ab"
    called: ClassVar = "A/B test"
    drawn: ClassVar = "users"
    """What gets an arm by chance."""
    twice: ClassVar = "users have several arms"
    overlap: ClassVar[str | None] = (
        "SELECT count(*), min(user) FROM (SELECT user FROM users GROUP BY user HAVING count(*) > 1)"
    )
    """Counts what breaks the randomisation, with an example; None where the log does not show it."""
    by_chance: ClassVar[str | None] = "SELECT arm, count(*) FROM users GROUP BY arm"
    """Counts what was drawn, by arm; None where the log does not show it."""

    def check(self, arms: Mapping[str, float], goals: Mapping[str, Goal]) -> None:
        """Any arms and goals will do."""

    def names(self, *, planned: bool) -> dict[str, str]:
        """The columns besides those of goals; a log of the past, for a plan, has no arms."""
        return {"user": self.user} | ({} if planned else {"arm": self.arm})

    def users(self, values: Sequence[str]) -> str:
        """The sums of all values by user."""
        return f"SELECT user, arm, {', '.join(f'sum({v}) AS {v}' for v in values)} FROM counted GROUP BY user, arm"

    def pair(self, goal: Goal, values: Mapping[str, str]) -> tuple[str, str]:
        """The x and y of a user, whose sums are divided."""
        value = values[goal.column]
        return f"({value} <> 0)::DOUBLE" if goal.any else value, values.get(goal.per, "1.0")

    def lifts(self, moments: Sequence[UserMoments]) -> list[Lifts]:
        """Each other arm against the control."""
        return [Lifts.between(moments[0], of_arm) for of_arm in moments[1:]]

    def noise(self, users: UserMoments, shares: Sequence[float]) -> tuple[Doubles, Doubles]:
        """The base of a lift, and the variance of the difference times the number of all users, by the worst arm."""
        base_M, variance_M = ratio(users)
        return base_M, variance_M * users.n_M * (1 / shares[0] + 1 / min(shares[1:]))


class InterleavingLog(_Files):
    """Users see lists made of two rankings, and a row has an item that was clicked, or shown: interleaving."""

    kind: Literal["interleaving"] = "interleaving"
    impression: str | None = None
    """Column of the list shown; with it, lists that several users have are found."""
    position: str | None = None
    """Column of the place shown, if the log has a row for each item shown: then as many lists must begin with an item
    of either arm. Needs `impression`."""
    called: ClassVar = "interleaving"
    drawn: ClassVar = "lists by the arm of their first item"
    twice: ClassVar = "lists have several users"

    @model_validator(mode="after")
    def _has_lists(self) -> "InterleavingLog":
        if self.position is not None and self.impression is None:
            raise ValueError("impression: position needs the column of the list shown")
        return self

    @property
    def overlap(self) -> str | None:
        """Counts lists of several users."""
        several = "SELECT impression FROM counted GROUP BY impression HAVING min(user) <> max(user)"
        return None if self.impression is None else f"SELECT count(*), min(impression) FROM ({several})"

    @property
    def by_chance(self) -> str | None:
        """Counts lists by the arm of their first item, and by its place, which is one if all items shown have rows."""
        place = "TRY_CAST(position AS DOUBLE)"
        first = f"SELECT arg_min(arm, {place}) AS arm, min({place}) AS place FROM counted GROUP BY impression"
        return None if self.position is None else f"SELECT arm, count(*) FROM ({first}) GROUP BY arm, place"

    def check(self, arms: Mapping[str, float], goals: Mapping[str, Goal]) -> None:
        """Refuse what lists of two rankings cannot tell."""
        if len(arms) != 2 or len({*arms.values()}) > 1:
            raise ValueError("arms: a list is made of two rankings with equal shares; name two")
        if odd := [name for name, goal in goals.items() if goal.any or goal.per != _USER]:
            raise ValueError(f"goals.{odd[0]}: interleaving compares sums; leave any and per out")

    def names(self, *, planned: bool) -> dict[str, str]:  # noqa: ARG002
        """The columns besides those of goals."""
        lists = {"impression": self.impression, "position": self.position}
        return {"user": self.user, "arm": self.arm} | {key: name for key, name in lists.items() if name is not None}

    def users(self, values: Sequence[str]) -> str:
        """The sums of all values by user, for each arm."""
        sums = [f"sum(CASE WHEN arm = {a} THEN {v} ELSE 0 END) AS {v}_{a}" for v in values for a in (0, 1)]
        return f"SELECT user, 0 AS arm, {', '.join(sums)} FROM counted GROUP BY user"

    def pair(self, goal: Goal, values: Mapping[str, str]) -> tuple[str, str]:
        """The difference of a user's credits, and their mean."""
        control, arm = (f"{values[goal.column]}_{a}" for a in (0, 1))
        return f"{arm} - {control}", f"({arm} + {control}) / 2"

    def lifts(self, moments: Sequence[UserMoments]) -> list[Lifts]:
        """The other arm against the control, by users who saw both."""
        return [Lifts.within(moments[0])]

    def noise(self, users: UserMoments, shares: Sequence[float]) -> tuple[Doubles, Doubles]:  # noqa: ARG002
        """The base of a lift, and the variance of a user's difference."""
        return users.y_M, users.xx_M


LiveLog = AbLog | InterleavingLog


class LogAccount(Strict):
    """The rows of a log: rows = used + left out, each for one reason."""

    files: str
    rows: int
    used: int
    left_out: dict[str, int]
    days: tuple[datetime.date, datetime.date] | None
    """The first and the last day of all rows; None without times."""


class LiveUsers(NamedTuple):
    """What the users of a log add up to: for each arm, or all together where they saw both."""

    account: LogAccount
    moments: list[UserMoments]
    overlap: tuple[int, str]
    by_chance: dict[int, int]


def add_up(
    log: LiveLog, goals: Mapping[str, Goal], arms: Sequence[str], days: tuple[Day, Day], *, planned: bool
) -> LiveUsers:
    """Read a log and add up the rows from the first day to the last by user; a plan needs no arms of an A/B test.

    Raises:
        InputError: a column is missing, no row or no row of an arm counts, or memory is too small.
    """
    summed = {name: f"c{i}" for i, name in enumerate(sorted(set().union(*(goal.columns for goal in goals.values()))))}
    names, numbers = log.names(planned=planned), {key: name for name, key in summed.items()}
    with storage.scratch.directory() as folder:
        unreadable = _spill(log, names, numbers, folder / "rows.parquet")
        # one thread, so that sums have one order
        with database(folder, memory_limit=log.memory, key="log.memory", threads=1) as found:
            found.read_parquet(str(folder / "rows.parquet")).create_view("rows")
            found.sql(_judged_rows(names, numbers, arms, days if log.time else (None, None)))
            account = _account(found, log, arms if "arm" in names else (), unreadable)
            return _added(found, log, goals, {_ROW: "n", **summed}, account)


def _spill(log: LiveLog, names: Mapping[str, str], numbers: Mapping[str, str], path: Path) -> int:
    """Write what is needed of all rows, null where a value is missing or unfit; returns how many cannot be read."""
    kinds = dict.fromkeys(("arm", *names), pa.string()) | dict.fromkeys(("n", *numbers), pa.float64())
    schema = pa.schema([*kinds.items(), ("seconds", pa.int64())])
    urls, unreadable = [url for path in log.inputs for url in storage.list_files(path)], 0
    with pq.ParquetWriter(path, schema) as file, progress("verdict", unit="rows") as advance:
        for url in urls:
            dialect = dialect_of(url) if file_form(url) == "csv" else Dialect()
            for raw in _read(log, url, dialect, {*names.values()}, {*numbers.values()}):
                rows, made = raw.rows, {"n": pa.array(np.ones(len(raw.rows)))}
                made |= {key: cols.texts(rows.column(name))[0] for key, name in names.items()}
                made |= {key: _finite(rows.column(name), dialect) for key, name in numbers.items()}
                if log.time is not None:
                    seconds_N, bad_N = instants(rows.column(log.time))
                    made["seconds"] = pa.array(seconds_N, mask=bad_N)
                missing = {each.name: pa.nulls(len(rows), each.type) for each in schema}
                file.write_batch(pa.record_batch({name: (missing | made)[name] for name in schema.names}))
                unreadable += len(raw.rejected)
                advance(len(rows))
    return unreadable


def _read(log: LiveLog, url: str, dialect: Dialect, names: set[str], numbers: set[str]) -> Iterator[Raw]:
    """The rows of a file with the columns that are needed, once these fit."""
    schema, needed = read_schema(url, dialect), names | numbers | ({log.time} if log.time else set())
    for name in sorted(needed):
        require(schema, name, "number" if name in numbers else "id" if name in names else "time", url)
    # the numbers of CSV stay text, for float32 would round them
    typed = numbers if file_form(url) == "json" else set[str]()
    columns = [name for name in schema.names if name in needed]
    return read_rows(url, schema, columns, numbers=typed, query=log.user, dialect=dialect, batch_rows=_BATCH)


def _finite(column: pa.Array, dialect: Dialect) -> pa.Array:
    """A column as numbers: 0 where it is empty, and null where it has no finite number."""
    column = cols.without_dictionary(column)
    if cols.is_text(column.type):
        coded = cols.texts(column)[0].fill_null("0").dictionary_encode()
        values = np.array([dialect.value(text) for text in coded.dictionary.to_pylist()], np.float64)
        values_N = values[coded.indices.to_numpy()]
    else:
        values_N = column.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False)
        values_N = np.where(np.isnan(values_N), 0.0, values_N)
    return pa.array(values_N, mask=~np.isfinite(values_N))


def _judged_rows(
    names: Mapping[str, str], numbers: Mapping[str, str], arms: Sequence[str], days: tuple[Day, Day]
) -> str:
    """Views of all rows, each with its arm by number and the first reason to leave it out, and of those without one."""
    start, until = (None if day is None else (day - datetime.date(1970, 1, 1)).days * _DAY for day in days)
    reasons = {f"no {key}": f"coalesce({key}, '') = ''" for key in names}
    reasons |= {f"{name} is no number": f"{key} IS NULL" for key, name in numbers.items()}
    code = " ".join(f"WHEN {_quoted(arm)} THEN {a}" for a, arm in enumerate(arms))
    reasons |= {"of another arm": f"CASE arm {code} END IS NULL"} if "arm" in names else {}
    if start is not None or until is not None:
        reasons["no time"] = "seconds IS NULL"
        reasons |= {} if start is None else {"before the start": f"seconds < {start}"}
        reasons |= {} if until is None else {"after the end": f"seconds >= {until + _DAY}"}
    cases = " ".join(f"WHEN {condition} THEN {_quoted(reason)}" for reason, condition in reasons.items())
    return (
        f"CREATE VIEW judged AS SELECT * RENAME (arm AS named), coalesce(CASE arm {code} END, 0) AS arm, "
        f"CASE {cases} END AS reason FROM rows; CREATE VIEW counted AS SELECT * FROM judged WHERE reason IS NULL"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _account(found: Any, log: LiveLog, arms: Sequence[str], unreadable: int) -> LogAccount:
    """All rows, used or left out by reason; an InputError if none is used, or none of an arm."""
    counts = dict(found.sql("SELECT coalesce(reason, ''), count(*) FROM judged GROUP BY reason ORDER BY 1").fetchall())
    left_out = {reason: n for reason, n in {**counts, "unreadable": unreadable}.items() if reason and n}
    files, used = ", ".join(log.inputs), counts.get("", 0)
    have_rows = {arm for (arm,) in found.sql("SELECT DISTINCT named FROM counted").fetchall()}
    missing = [arm for arm in arms if arm not in have_rows]
    if missing or not used:
        others = "SELECT DISTINCT named FROM judged WHERE reason = 'of another arm' ORDER BY named LIMIT 5"
        what = [f"{reason}: {n:,}" for reason, n in left_out.items()]
        what += [
            f"other arms are {', '.join(arm for (arm,) in rows)}" for rows in [found.sql(others).fetchall()] if rows
        ]
        of_arm = f" of the arm {missing[0]!r}" if missing else ""
        raise InputError(f"{files}: no row{of_arm} counts ({'; '.join(what) or 'there are none'}); mend log or arms")
    ((first, last),) = found.sql("SELECT min(seconds), max(seconds) FROM judged").fetchall()
    days = None if first is None else tuple(datetime.date.fromordinal(719_163 + at // _DAY) for at in (first, last))
    return LogAccount(files=files, rows=used + sum(left_out.values()), used=used, left_out=left_out, days=days)


def _added(
    found: Any, log: LiveLog, goals: Mapping[str, Goal], values: dict[str, str], account: LogAccount
) -> LiveUsers:
    """Moments of the users' values, and what shows how they were drawn."""
    found.sql(f"CREATE TABLE users AS {log.users([*values.values()])}")
    of_goals = []
    for goal in goals.values():
        x, y = log.pair(goal, values)
        figures = f"avg({x}), avg({y}), var_samp({x}), var_samp({y}), covar_samp({x}, {y})"
        of_goals.append(found.sql(f"SELECT count(*), {figures} FROM users GROUP BY arm ORDER BY arm").fetchall())
    figures_AFM = np.array(of_goals, np.float64).transpose(1, 2, 0)  # NaN for the variance of a single user
    by_chance = found.sql(log.by_chance).fetchall() if log.by_chance else []
    if len(dict(by_chance)) < len(by_chance):
        raise InputError(
            f"{account.files}: lists begin at different positions; log.position needs a row for each item shown, with "
            "the arm that put it there: leave it out"
        )
    return LiveUsers(
        account,
        [UserMoments(*of_arm) for of_arm in figures_AFM],
        found.sql(log.overlap).fetchall()[0] if log.overlap else (0, ""),
        dict(by_chance),
    )
