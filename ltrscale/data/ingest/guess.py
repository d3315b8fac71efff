"""Guesses the uses of a log's columns from their names and values, for a config that its reader then corrects."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ltrscale.data.ingest.profile import Column
from ltrscale.errors import InputError, suggestion

_QUERY = r"(query|search|impression|request|list|qid|srch|session).*id$|^(qid|query|search|impression|session)$"
_ITEM = r"(item|doc|document|product|article|prop|asin|sku|hotel|listing|content|offer).*(id|asin|sku)?$"
_LABEL = (
    r"^(label|labels|grade|relevance|rel|target|y)$",
    r"^(event|event_type|action|interaction|outcome|feedback)$",
    r"purchas|bought|order(ed)?$|booking|converted|conversion",
    r"cart|basket|saved|wishlist|favou?rite|engaged",
    r"^(is_)?click(ed)?s?$|click_bool",
    r"revenue|gross|sales$",
)
_EVENT_TIME = (
    r"^(event|search|query|request|impression|session|show|sent|click|log|visit)\w*?_?(time|date|at|on|ts|day)"
)
_TIME = r"time|date|_at$|^at$|^ts$|timestamp|_on$|^day$"
_POSITION = r"^(position|pos|rank|slot)$|_(position|pos|slot)$"
_META = r"^(user|visitor|customer|session|member|client).*id$"
_CODE = r"^c_|_?id$|_id_|code$|type$|category|brand|country|region|^cat_"
_WORDS = (
    r"^(view|shown?|impressions?|none|no|skip|ignored?)$",
    r"click|open|detail|visit",
    r"cart|basket|wish|fav|save|like",
    r"purchas|buy|bought|order|sale|book|convert|conversion",
)
_FEW, _LONG = 32, 60


@dataclass(frozen=True)
class Guess:
    """The uses of columns; `others` are columns without one, with the reason."""

    query: Column
    item: Column | None = None
    label: Column | None = None
    time: Column | None = None
    positions: Column | None = None
    meta: tuple[Column, ...] = ()
    features: tuple[Column, ...] = ()
    categorical: tuple[Column, ...] = ()
    dates: tuple[Column, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)


def guess(columns: Sequence[Column], given: Mapping[str, str | None], where: str) -> Guess:
    """The likely uses of a log's columns.

    Args:
        columns: the columns, from `profile.look`.
        given: the names of columns whose use is known: `query`, `item`, `label`, `time`.
        where: the file, for errors.

    Raises:
        InputError: a column does not exist, or none looks like the query's.
    """
    left = {column.name: column for column in columns}
    known = {use: _take(left, name, use, where) for use, name in given.items() if name is not None}

    def choose(use: str, fits: Callable[[Column], bool], *patterns: str) -> Column | None:
        if use in known:
            return known[use]
        for pattern in patterns:
            for column in left.values():
                if re.search(pattern, column.name.lower()) and fits(column):
                    return left.pop(column.name)
        return None

    query = choose("query", _is_repeated, _QUERY)
    if query is None:
        raise InputError(f"{where}: no column looks like a query's id; name it, as --set query={columns[0].name}")
    time = choose("time", lambda column: bool(column.formats), _EVENT_TIME)
    time = time or choose("time", lambda column: bool(column.formats) and column.clock, _TIME)
    time = time or choose("time", lambda column: bool(column.formats), _TIME)
    time = time or choose("time", lambda column: bool(column.formats) and not column.numeric, "")  # ids are numbers too
    item = choose("item", _is_key, r"(^|_)" + _ITEM)
    label = choose("label", lambda column: column.numeric or column.distinct <= _FEW, *_LABEL)
    positions = choose("positions", lambda column: column.numeric, _POSITION)
    others = {name: "another label: it would give the answer away" for name in left if _like(name, _LABEL)}
    rest = [column for name, column in left.items() if name not in others]
    uses: dict[str, list[Column]] = {"meta": [], "features": [], "categorical": [], "dates": []}
    for column in rest:
        use = _use(column, has_time=time is not None)
        if use in uses:
            uses[use].append(column)
        else:
            others[column.name] = use
    made = {use: tuple(found) for use, found in uses.items()}
    return Guess(query, item, label, time, positions, **made, others=others)


def doubtful(columns: Sequence[Column], given: Mapping[str, str | None]) -> dict[str, str]:
    """The columns that are likely no features, with the reason; those with a single value do no harm, and are none.

    Args:
        columns: the columns.
        given: as for `guess`; `query` is there.
    """
    found = guess(columns, given, "X")
    roles = {"the item": found.item, "a label": found.label, "a time": found.time, "a position": found.positions}
    reasons = {column.name: f"looks like {role}" for role, column in roles.items() if column is not None}
    reasons |= {column.name: "a user or session" for column in found.meta}
    reasons |= {column.name: "a date" for column in found.dates} | dict(found.others)
    single = {column.name for column in columns if column.distinct <= 1}
    return {name: reason for name, reason in reasons.items() if name not in {*single, *given.values()}}


def _take(left: dict[str, Column], name: str, use: str, where: str) -> Column:
    if name not in left:
        raise InputError(f"{where}: {use}: no column {name!r} is left; {suggestion(name, left, 'the columns are')}")
    return left.pop(name)


def _like(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name.lower()) for pattern in patterns)


def _is_key(column: Column) -> bool:
    return column.distinct > 1 and (not column.numeric or column.whole)


def _is_repeated(column: Column) -> bool:
    return _is_key(column) and column.distinct < 0.9 * column.rows


def _use(column: Column, *, has_time: bool) -> str:
    """The use of a column without a use of its own, or the reason why it has none."""
    name = column.name.lower()
    if column.distinct <= 1:
        return "the same value in every row" if column.distinct else "no single value that can be read"
    if _like(name, [_META]):
        return "meta"
    if column.formats and (not column.numeric or _like(name, [_TIME])):
        return "dates" if has_time else "a date, and no column with the time of the row"
    named = column.distinct > 0.5 * column.rows  # nearly every row has a value of its own
    if column.numeric and not (column.whole and _like(name, [_CODE])):
        return "features"
    if named:
        return "names single rows"
    return "text" if column.length > _LONG else "categorical"


def grades_of(label: Column) -> dict[str, float] | tuple[float, ...] | None:
    """Grades for a label of words, or of numbers too large to be grades; None for a label that has grades.

    Example:
        >>> import pyarrow as pa
        >>> event = Column("event", pa.string(), 9, 0, 3, False, 0, 0, 5, (), ("add_to_cart", "view", "purchase"))
        >>> grades_of(event)
        {'view': 0, 'add_to_cart': 1, 'purchase': 2}
    """
    if label.numeric and label.least >= 0 and label.most <= _FEW:
        return None
    if label.numeric:
        top = max(label.most, 1.0)
        return tuple(dict.fromkeys(float(f"{top * share:.2g}") for share in (0.001, 0.03, 0.3)))
    place = {value: next((i for i, word in enumerate(_WORDS) if _like(value, [word])), 0) for value in label.values}
    ranks = sorted({*place.values()})
    return {value: ranks.index(place[value]) for value in sorted(place, key=lambda value: (place[value], value))}
