"""Scores the columns of a log for each role that a ranker needs, by their structure and their names.

A candidate's score is a sum of points, each with its reason. Points are few and coarse, since they only have to tell
the columns of one log apart: a name is worth at most four, and structure outweighs it where it is clear.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ltrscale.ingest.profile import LogColumn, Structure
from ltrscale.progress import progress

_LIST = r"(query|search|impression|request|srch|qid|list|slate|serp|feed|ranking)"
_VISIT = r"(session|visit|basket|order|invoice|transaction|trip|receipt|incident)"
_PERSON = (
    r"^(user|visitor|customer|cust|session|member|client|shopper|household|reader|owner|card)(s|_?(id|no|nr|key))?$"
)
_THING = r"(item|doc|document|product|article|prop|property|asin|sku|hotel|listing|content|offer|stock|movie|song|part)"
_SORT = (
    r"(category|cat|brand|seller|shop|store|country|region|location|destination|type|class|subclass|site|device|age)"
)
_ID = r"_?(id|key|no|nr|number|code|asin|sku|uuid|guid)$"
_TIME = r"time|date|_dt$|_at$|^at$|^ts$|timestamp|_on$|^day$"
_EVENT_TIME = (
    r"^(event|search|query|request|impression|session|show|sent|click|log|visit|srch|order|invoice|transaction)\w*?_?"
    r"(time|date|at|on|ts|day)"
)
_ITEM_TIME = r"list|publish|creat|updat|releas|launch|birth|expir|regist|signup|first|last|due|since|checkin|arriv"
_POSITION = r"^(position|pos|rank|slot)$|_(position|pos|slot)$"
WORTH = r"revenue|gross|sales$|turnover|gmv"
"""Names of what a document brought."""
LABELS = (
    (WORTH, 2.2),
    (r"^(label|labels|grade|relevance|rel|target|y)$", 5.0),
    (r"^(event|event_type|event_name|action|interaction|outcome|feedback)$", 4.5),
    (r"purchas|bought|order(ed)?$|booking|booked|converted|conversion", 4.0),
    (r"cart|basket|saved|wishlist|favou?rite|engaged", 3.5),
    (r"^(is_)?(fault|faulty|failed|failure|defect|defective|root_cause|culprit|cause|hit|won|hired|applied)$", 3.5),
    (r"^(is_)?click(ed)?s?$|click_bool", 3.0),
)
"""Names of labels, the stronger ones first, with the points that the name is worth."""
_BEFORE = (
    r"^[fn]_|share|rate|ratio|mean|avg|median|total|count|ctr|past|last|prev|hist|prior|_\d+[hdwmy]|_(score|days?)$"
)
FEW_LISTS = 32
"""The most different values of a label."""
_CLOSE = 1.5
_RARE = 0.02
_LIKELIEST, _DECIDED = 64, 64
"""Columns that are looked at as items' ids with what they decide, and the columns that they may decide: a log with
thousands of columns has that many pairs of any of them."""
_SHOWING = 16
"""Columns of times and of places that are looked at beside each column."""
_PAIRED = 1.0
"""Points of an item's id for values that come again; alone they make none."""


@dataclass(frozen=True)
class Candidate:
    """A column that may have a role, with the reasons of its score."""

    column: LogColumn
    score: float
    reasons: tuple[str, ...]

    @property
    def name(self) -> str:
        """The column's name."""
        return self.column.name


@dataclass(frozen=True)
class Choice:
    """The best column for a role, and those that come close behind."""

    best: Candidate
    rivals: tuple[Candidate, ...] = ()
    doubt: str = ""
    """What a reader has to check; empty where the choice is clear."""


Scores = Iterable[tuple[float, str]]
"""Points with their reasons; a point of 0 is no reason."""


def candidate(column: LogColumn, points: Scores) -> Candidate:
    """A candidate with the sum of its points."""
    points = [(score, reason) for score, reason in points if round(score, 1)]
    return Candidate(column, sum(score for score, _ in points), tuple(reason for _, reason in points))


def _candidates(role: str, columns: Sequence[LogColumn], points: Callable[[LogColumn], Scores]) -> list[Candidate]:
    """The columns as candidates for a role."""
    found = []
    with progress(f"columns for {role}", len(columns), "columns") as advance:
        for column in columns:
            found.append(candidate(column, points(column)))
            advance(1)
    return found


def choose_role(candidates: Sequence[Candidate], *, least: float, rivals: int = 0) -> Choice | None:
    """The best candidate, with those that come near as rivals; None where no one has `least` points.

    `rivals` are named however far they are behind.

    Example:
        >>> import pyarrow as pa
        >>> columns = [LogColumn(name, pa.string(), 9, 0, 3, False, 0, 0, 5, (), ()) for name in ("a", "b")]
        >>> found = choose_role([Candidate(columns[0], 4.0, ("one time",)), Candidate(columns[1], 3.5, ())], least=1)
        >>> found.best.name, [rival.name for rival in found.rivals], found.doubt
        ('a', ['b'], 'b is as likely')
    """
    ranked = sorted(candidates, key=lambda each: -each.score)
    if not ranked or ranked[0].score < least:
        return None
    best, runners_up = ranked[0], ranked[1:4]
    close = [each.name for each in runners_up if each.score > best.score - _CLOSE and each.score >= least]
    doubt = f"{' or '.join(close)} {'is' if len(close) == 1 else 'are'} as likely" if close else ""
    worth = [i < rivals or each.score >= max(least, best.score - 6) for i, each in enumerate(runners_up)]
    return Choice(best, tuple(each for each, named in zip(runners_up, worth, strict=True) if named), doubt)


def looks_like_time(column: LogColumn) -> bool:
    """Whether a column holds times; digits also need the name of one, since ids are numbers of the same size."""
    return bool(column.formats) and (not column.digits or has_pattern(column, _TIME))


def has_pattern(column: LogColumn, *patterns: str) -> bool:
    """Whether a column's name, in lower case, has one of the patterns."""
    return any(re.search(pattern, column.name.lower()) for pattern in patterns)


def _is_key(column: LogColumn) -> bool:
    return column.distinct > 1 and (not column.numeric or column.whole) and not looks_like_time(column)


def names_one(column: LogColumn) -> bool:
    """Whether a column is named as an identifier."""
    return has_pattern(column, _ID, _PERSON)


def is_asked(column: LogColumn) -> bool:
    """Whether a column is named as the text of a query."""
    return has_pattern(column, r"query|search|keyword|term|phrase")


def is_person(column: LogColumn) -> bool:
    """Whether a column names a user or a session."""
    return has_pattern(column, _PERSON)


# queries


def queries(columns: Sequence[LogColumn], seen: Structure) -> list[Candidate]:
    """The columns that may name the lists to rank."""
    keys = [column for column in columns if column.name in seen and _is_key(column)]
    clocks = [column for column in columns if column.name in seen and looks_like_time(column)]
    clocks = [c for c in clocks if has_pattern(c, _EVENT_TIME) or not has_pattern(c, _ITEM_TIME)] or clocks
    slots = [column for column in columns if column.name in seen and column.numeric and has_pattern(column, _POSITION)]
    keys = [column for column in keys if not (column.numeric and has_pattern(column, _POSITION))]
    keys = [column for column in keys if not is_label(column)]
    likely = sorted(_things(keys, seen), key=lambda each: -each.score)[:2]
    things = [each.column for each in likely if each.score > _PAIRED]  # a color comes again, too
    shown = clocks[:_SHOWING], slots[:_SHOWING]
    return _candidates("a query", keys, lambda column: _query_points(column, seen, *shown, things))


def _query_points(
    column: LogColumn,
    seen: Structure,
    clocks: Sequence[LogColumn],
    slots: Sequence[LogColumn],
    things: Sequence[LogColumn],
) -> Scores:
    yield _query_name(column)
    lists = seen.lists(column.name)
    rows = len(seen.codes[column.name])
    yield 2.0 * lists.paired - 1.0, f"{lists.distinct:,} lists of {rows / max(lists.distinct, 1):,.1f} rows"
    if lists.paired < 0.5:
        yield -6.0, "most of its values name a single row"
    if lists.distinct < 5 or rows > 2000 * lists.distinct:
        yield -5.0, f"has {lists.distinct:,} values only"
    yield 3.0 * lists.together, f"{lists.together:.0%} of its rows stand beside one of theirs"
    if other_things := [thing for thing in things if thing is not column]:
        repeats = min(lists.repeats(seen.codes[thing.name]) for thing in other_things)
        yield -6.0 * repeats, f"{repeats:.1%} of the rows repeat an item"
    for slot in slots:
        repeats = lists.repeats(seen.codes[slot.name])
        words = f"{slot.name} comes again in {repeats:.0%} of the rows"
        yield 1.0 - 6.0 * repeats, words if repeats > 0.005 else f"each {slot.name} once"
    if clocks:
        agreed = {clock.name: lists.constant(seen.codes[clock.name]) for clock in clocks}
        best = max(agreed, key=lambda name: agreed[name])
        yield 3.0 * agreed[best], f"{best} is the same in {agreed[best]:.0%} of its lists"


def _query_name(column: LogColumn) -> tuple[float, str]:
    name = column.name.lower()
    if re.search(rf"^{_LIST}{_ID}|^(qid|query|search|impression|q|request)$", name):
        return 4.0, "the name of a list"
    if is_label(column) or re.search(_POSITION, name):
        return -5.0, "the name of a label or a place"
    if re.search(rf"(^|_){_THING}({_ID}|s?$)", name):
        return -4.0, "the name of an item"
    if re.search(rf"(^|_){_SORT}({_ID}|$)", name):
        return -4.0, "the name of a property"
    if re.search(rf"{_LIST}.*{_ID}", name):
        return 3.0, "the name of a list"
    if re.search(rf"(^|_){_VISIT}({_ID}|$)|^(group|case)({_ID}|$)", name):
        return 2.0, "the name of a visit"
    if re.search(_PERSON, name):
        return -1.0, "the name of a person"
    return (0.5, "the name of an id") if re.search(_ID, name) else (-1.0, "no name of an id")


def within(column: LogColumn, columns: Sequence[LogColumn], seen: Structure) -> tuple[LogColumn, ...]:
    """A further column that makes a query's id with the column of the best candidate, whose runs return; or none.

    A customer's rows stand together on each day: there is a list for each run, and the day tells them apart.
    """
    lists = seen.lists(column.name)
    if lists.runs < 1.2 * lists.distinct or lists.together < 0.3:
        return ()
    for other in columns:
        if other is column or other.name not in seen or (other.numeric and not other.whole):
            continue
        if not looks_like_time(other):
            continue
        pairs = len(np.unique(seen.joined(column.name, [other.name])))
        if abs(pairs - lists.runs) <= 0.1 * lists.runs:
            return (other,)
    return ()


# items


def items(columns: Sequence[LogColumn], query: LogColumn, seen: Structure) -> list[Candidate]:
    """The columns that may name the documents."""
    keys = [column for column in columns if column.name in seen and _is_key(column) and not is_label(column)]
    keys = [column for column in keys if not has_pattern(column, _POSITION)]
    lists = seen.lists(query.name)
    things = {each.name: each for each in _things(keys, seen)}

    def points(column: LogColumn) -> Scores:
        own = things[column.name]
        yield own.score, "; ".join(own.reasons)
        repeats = lists.repeats(seen.codes[column.name])
        yield 1.0 - 8.0 * repeats, f"{repeats:.1%} of the rows repeat one in their list" if repeats else "once a list"
        if lists.constant(seen.codes[column.name]) > 0.9:
            yield -6.0, "the same in a whole list"

    return _candidates("an item", [column for column in keys if column is not query], points)


def _things(keys: Sequence[LogColumn], seen: Structure) -> list[Candidate]:
    """The columns as items' ids; what they decide of each other is looked at for the likeliest."""
    decided = {column.name for column in sorted(keys, key=lambda each: each.numeric)[:_DECIDED]}  # texts first
    others = [column for column in keys if column.name in decided]
    alone = [_thing(column, seen, ()) for column in keys]
    likeliest = {each.name for each in sorted(alone, key=lambda each: -each.score)[:_LIKELIEST]}
    return [_thing(each.column, seen, others) if each.name in likeliest else each for each in alone]


def _thing(column: LogColumn, seen: Structure, columns: Sequence[LogColumn]) -> Candidate:
    """A column as an item's id, whatever the query is, with what it decides of some columns."""
    lists, name = seen.lists(column.name), column.name.lower()

    def points() -> Scores:
        if re.search(rf"(^|_){_THING}({_ID}|s?$)", name):
            yield (4.0, "the name of an item's id") if re.search(_ID, name) else (3.0, "the name of an item")
        elif re.search(rf"{_LIST}|{_VISIT}.*{_ID}", name) or is_person(column):
            yield -4.0, "the name of a list or a person"
        elif re.search(rf"(^|_){_SORT}({_ID}|$)", name):
            yield -3.0, "the name of a property"
        elif re.search(r"name|title|text|desc|url", name):
            yield -1.0, "a text"
        elif re.search(_ID, name):
            yield 1.0, "the name of an id"
        elif column.numeric and not column.least > 100:
            yield -1.0, "a small number"
        if lists.paired > 0.5:
            yield _PAIRED, f"{lists.distinct:,} values, which come again"
        others = [other for other in columns if other is not column and seen.lists(other.name).distinct > 1]
        fixed = [other.name for other in others if seen.decides(column.name, other.name)] if lists.paired > 0.5 else []
        if fixed:
            yield min(2.0, 0.5 * len(fixed)), f"decides {', '.join(fixed[:3])}"

    return candidate(column, points())


# times


def times(columns: Sequence[LogColumn], query: LogColumn, seen: Structure, item: LogColumn | None) -> list[Candidate]:
    """The columns that may have the time of a row."""
    return [
        candidate(column, _time_points(column, query, seen, item))
        for column in columns
        if column.formats and column.name in seen and (looks_like_time(column) or not names_one(column))
    ]


def _time_points(column: LogColumn, query: LogColumn, seen: Structure, item: LogColumn | None) -> Scores:
    if has_pattern(column, _EVENT_TIME):
        yield 3.0, "the name of an event's time"
    elif has_pattern(column, _ITEM_TIME):
        yield -2.0, "the name of an item's or a person's date"
    elif has_pattern(column, _TIME):
        yield 2.0, "the name of a time"
    elif column.digits:
        yield -3.0, "a number without the name of a time"
    yield (1.5, "with hours") if column.clock else (0.0, "")
    lists = seen.lists(query.name)
    agreed = lists.constant(seen.codes[column.name])
    if agreed > 0.5:
        yield 3.0 * agreed, f"the same in {agreed:.0%} of the lists"
    else:
        hours = lists.spread(seen.seconds(column)) / 3600
        span = f"{hours:.1g} h" if hours < 48 else f"{hours / 24:,.0f} days"
        yield (2.0 if hours <= 1 else 1.0 if hours <= 24 else -2.0), f"{span} apart within a list"
    if item is not None and item.name in seen and seen.decides(item.name, column.name):
        yield -4.0, f"{item.name} decides it"
    if column.days > 3 * 365:
        yield -1.0, f"{column.days / 365:.0f} years long"
    if column.bad:
        yield -5.0 * column.bad, f"{column.bad:.2%} of the rows have a bad one"


# labels and places


def is_label(column: LogColumn) -> bool:
    """Whether a column is named as what happened after the list was shown, and not as what did so before."""
    return any(has_pattern(column, pattern) for pattern, _ in LABELS) and not has_pattern(column, _BEFORE)


def labels(columns: Sequence[LogColumn], query: LogColumn, seen: Structure, item: LogColumn | None) -> list[Candidate]:
    """The columns that may have the labels."""
    fits = [column for column in columns if column.name in seen and column.distinct > 1 and not looks_like_time(column)]
    fits = [column for column in fits if column.numeric or column.distinct <= FEW_LISTS]
    fits = [column for column in fits if not names_one(column)]
    return _candidates("a label", fits, lambda column: _label_points(column, query, seen, item))


def _label_points(column: LogColumn, query: LogColumn, seen: Structure, item: LogColumn | None) -> Scores:
    points = (
        next((points for pattern, points in LABELS if has_pattern(column, pattern)), 0.0) if is_label(column) else -2.0
    )
    yield points, "the name of a label" if points > 0 else "no name of a label"
    lists = seen.lists(query.name)
    varies = 1.0 - lists.constant(seen.codes[column.name])
    yield (-3.0, "the same in every list") if not varies else (1.0, f"differs within {varies:.0%} of the lists")
    if not column.numeric:
        return
    positive_Q = lists.having(seen.numbers(column.name) > max(column.least, 0.0))
    with_one = float((positive_Q > 0).mean())
    if points > 0 and with_one < _RARE and (positive_Q > 0).sum() < 500:
        yield -2.0, f"above 0 in {with_one:.1%} of the lists only"
    if points < 0 and column.distinct == 2 and with_one > 0.2 and (positive_Q <= 1).mean() > 0.95:
        belongs_to_item = item is not None and item.name in seen and seen.decides(item.name, column.name)
        yield (0.0, "") if belongs_to_item else (3.5, "one row a list at most")


def positions(columns: Sequence[LogColumn], query: LogColumn, seen: Structure) -> list[Candidate]:
    """The columns that may say where an item was shown."""
    named = [each for each in columns if each.numeric and each.name in seen and has_pattern(each, _POSITION)]
    lists = seen.lists(query.name)

    def points(column: LogColumn) -> Scores:
        yield 2.0, "the name of a place"
        repeats = lists.repeats(seen.codes[column.name])
        yield 2.0 - 4.0 * repeats, f"comes again in {repeats:.0%} of the rows" if repeats > 0.005 else "once a list"

    return _candidates("a position", named, points)


def structured(columns: Sequence[LogColumn]) -> list[str]:
    """The columns whose structure decides on roles: all but measured quantities."""
    keys = [column for column in columns if not column.numeric or column.whole or is_label(column)]
    return [column.name for column in keys if column.distinct > 1]
