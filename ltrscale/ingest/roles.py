"""Scores the columns of a log for each role that a ranker needs, by their structure and their names.

A candidate's score is a sum of points, each with its reason. Points are coarse, since they only have to tell the
columns of one log apart: a name is worth at most four, and clear structure outweighs it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ltrscale.ingest import names
from ltrscale.ingest.grades import MOST_GRADES
from ltrscale.ingest.profile import LogColumn
from ltrscale.ingest.structure import Structure
from ltrscale.progress import progress

_CLOSE = 1.5
_LIKELIEST, _DECIDED = 64, 64
"""Columns checked as item ids, and columns that each may determine: all pairs of thousands of columns are too many."""
_SHOWING = 16
"""Columns of times and of places that are compared with each column."""
_PAIRED = 1.0
"""Points of an item's id for values that recur; not enough alone."""
_PAIRS = 30
"""The fewest recurring values, or rows, that show what a column determines and how often it repeats by chance."""
_MOST_PLACES, _COUNTERS = 1000, 8
"""The longest lists that a column may count the rows of, and the columns tried that are not named like a place."""


@dataclass(frozen=True)
class Candidate:
    """A column that may have a role, with the reasons of its score."""

    column: LogColumn
    score: float
    reasons: tuple[str, ...]
    against: str = ""
    """The reason that counts most against it."""

    @property
    def name(self) -> str:
        """The column's name."""
        return self.column.name


@dataclass(frozen=True)
class Choice:
    """The best column for a role, and close alternatives."""

    best: Candidate
    alternatives: tuple[Candidate, ...] = ()
    doubt: str = ""
    """What the user has to check; empty if the choice is clear."""


Scores = Iterable[tuple[float, str]]
"""Points with their reasons; reasons with 0 points do not count."""


def candidate(column: LogColumn, points: Scores) -> Candidate:
    """A candidate with the sum of its points."""
    points = [(score, reason) for score, reason in points if round(score, 1)]
    worst, against = min(points, default=(0.0, ""))
    reasons = tuple(reason for _, reason in points)
    return Candidate(column, sum(score for score, _ in points), reasons, against if worst < 0 else "")


def candidates(role: str, columns: Sequence[LogColumn], points: Callable[[LogColumn], Scores]) -> list[Candidate]:
    """The columns as candidates for a role."""
    found = []
    with progress(f"columns for {role}", len(columns), "columns") as advance:
        for column in columns:
            found.append(candidate(column, points(column)))
            advance(1)
    return found


def choose_role(found: Sequence[Candidate], *, least: float, alternatives: int = 0) -> Choice | None:
    """The best candidate, with close ones as alternatives; None if no candidate has `least` points.

    The first `alternatives` runners-up are named however far behind they are.

    Example:
        >>> import pyarrow as pa
        >>> columns = [LogColumn(name, pa.string(), 9, 0, 3, False, 0, 0, 5, (), ()) for name in ("a", "b")]
        >>> found = choose_role([Candidate(columns[0], 4.0, ("one time",)), Candidate(columns[1], 3.5, ())], least=1)
        >>> found.best.name, [alternative.name for alternative in found.alternatives], found.doubt
        ('a', ['b'], 'b is as likely')
    """
    ranked = sorted(found, key=lambda each: -each.score)
    if not ranked or ranked[0].score < least:
        return None
    best, runners_up = ranked[0], ranked[1:4]
    close = [each.name for each in runners_up if each.score > best.score - _CLOSE and each.score >= least]
    doubt = f"{' or '.join(close)} {'is' if len(close) == 1 else 'are'} as likely" if close else ""
    worth = [i < alternatives or each.score >= max(least, best.score - 6) for i, each in enumerate(runners_up)]
    return Choice(best, tuple(each for each, named in zip(runners_up, worth, strict=True) if named), doubt)


def looks_like_time(column: LogColumn) -> bool:
    """True if a column holds times; digits also need a time's name, since ids are numbers of the same size."""
    return bool(column.formats) and (not column.digits or has_pattern(column, names.TIME))


def has_pattern(column: LogColumn, *patterns: str) -> bool:
    """True if the plain form of a column's name matches one of the patterns."""
    return names.has(column.name, *patterns)


def _is_key(column: LogColumn) -> bool:
    return column.distinct > 1 and (not column.numeric or column.whole) and not looks_like_time(column)


def names_one(column: LogColumn) -> bool:
    """True if a column is named like an identifier."""
    return has_pattern(column, names.IDENTIFIER, names.PERSON)


def is_asked(column: LogColumn) -> bool:
    """True if a column is named like the text of a query."""
    return has_pattern(column, names.ASKED)


def is_person(column: LogColumn) -> bool:
    """True if a column is named like a user or a session."""
    return has_pattern(column, names.PERSON)


# queries


def queries(columns: Sequence[LogColumn], seen: Structure) -> list[Candidate]:
    """The columns that may name the lists to rank."""
    keys = [column for column in columns if column.name in seen and _is_key(column)]
    clocks = [column for column in columns if column.name in seen and looks_like_time(column)]
    clocks = [c for c in clocks if has_pattern(c, names.EVENT_TIME) or not has_pattern(c, names.ITEM_TIME)] or clocks
    keys = [column for column in keys if not (column.numeric and has_pattern(column, names.POSITION))]
    keys = [column for column in keys if not is_label(column)]
    likely = sorted(_things(keys, seen), key=lambda each: -each.score)[:2]
    things = [each.column for each in likely if each.score > _PAIRED]  # a color recurs too
    shown = clocks[:_SHOWING], _counters(columns, seen)
    return candidates("a query", keys, lambda column: _query_points(column, seen, *shown, things))


def _counters(columns: Sequence[LogColumn], seen: Structure) -> dict[str, NDArray[np.float64]]:
    """The columns that may count the rows of lists (named like a place first), with their numbers."""
    whole = [each for each in columns if each.name in seen and each.numeric and each.whole and not is_label(each)]
    named = [each for each in whole if has_pattern(each, names.POSITION)]
    dense = [each for each in whole if each.least in (0, 1) and 3 <= each.most - each.least + 1 <= _MOST_PLACES]
    dense = [each for each in dense if each.distinct >= 0.9 * (each.most - each.least + 1) and each not in named]
    return {each.name: seen.numbers(each.name) for each in [*named[:_SHOWING], *dense[:_COUNTERS]]}


def _query_points(
    column: LogColumn,
    seen: Structure,
    clocks: Sequence[LogColumn],
    slots: Mapping[str, NDArray[np.float64]],
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
    for slot in (name for name in slots if names.has(name, names.POSITION) and name != column.name):
        repeats = lists.repeats(seen.codes[slot])
        words = f"{slot} comes again in {repeats:.0%} of the rows"
        yield 1.0 - 6.0 * repeats, words if repeats > 0.005 else f"each {slot} once"
    counters = [name for name in slots if not names.has(name, names.POSITION) and name != column.name]
    counts = {name: lists.counted(slots[name], seen.codes[name]) for name in counters}
    if counts:
        slot = max(counts, key=lambda name: counts[name])
        yield 3.0 * counts[slot], f"{slot} counts the rows of {counts[slot]:.0%} of its lists"
    if clocks:
        agreed = {clock.name: lists.constant(seen.codes[clock.name]) for clock in clocks}
        best = max(agreed, key=lambda name: agreed[name])
        yield 3.0 * agreed[best], f"{best} is the same in {agreed[best]:.0%} of its lists"


_QUERY_NAMES = (
    (names.QUERY, 4.0, "the name of a list"),
    (names.POSITION, -5.0, "the name of a place"),
    (names.THING, -4.0, "the name of an item"),
    (names.PROPERTY, -4.0, "the name of a property"),
    (names.LISTED, 3.0, "the name of a list"),
    (names.VISITED, 2.0, "the name of a visit"),
    (names.PERSON, -1.0, "the name of a person"),
    (names.IDENTIFIER, 0.5, "the name of an id"),
)


def _query_name(column: LogColumn) -> tuple[float, str]:
    if is_label(column) and not has_pattern(column, names.QUERY):
        return -5.0, "the name of a label"
    return names.first_of(column.name, _QUERY_NAMES) or (-1.0, "no name of an id")


def within(column: LogColumn, columns: Sequence[LogColumn], seen: Structure) -> tuple[LogColumn, ...]:
    """The time column that, with a recurring `column` such as the customer, makes the query's id; or none.

    A customer's rows stand together on each day: there is a list for each run, and the day tells the runs apart.
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
    keys = [column for column in keys if not has_pattern(column, names.POSITION)]
    lists = seen.lists(query.name)
    things = {each.name: each for each in _things(keys, seen)}

    def points(column: LogColumn) -> Scores:
        own = things[column.name]
        yield own.score, "; ".join(own.reasons)
        yield from _once(column, query, seen, decides=any(each.startswith("decides") for each in own.reasons))
        if lists.constant(seen.codes[column.name]) > 0.9:
            yield -6.0, "the same in a whole list"

    return candidates("an item", [column for column in keys if column is not query], points)


def _once(column: LogColumn, query: LogColumn, seen: Structure, *, decides: bool) -> Scores:
    """Points for values that rarely repeat in a list, as items do; properties of items repeat as often as by chance."""
    lists, codes_N = seen.lists(query.name), seen.codes[column.name]
    repeats, (_, dealt) = lists.repeats(codes_N), lists.pairs(codes_N)
    if comes_by_chance(column, query, seen):
        points = -1.5 if decides or has_pattern(column, names.THING) else -5.0
        yield points, f"{repeats:.1%} of the rows repeat one in their list, as many as by chance"
    elif repeats:
        yield 1.0 - 8.0 * repeats, f"{repeats:.1%} of the rows repeat one in their list"
    elif dealt > _PAIRS:
        yield 2.0, f"once a list, where chance would repeat it {dealt:,.0f} times"
    else:
        yield 1.0, "once a list"
    if column.numeric and not decides and not has_pattern(column, names.THING):
        counted = lists.counted(seen.numbers(column.name), codes_N)
        yield -4.0 * counted, f"counts the rows of {counted:.0%} of the lists"


def is_property(candidate: Candidate, query: LogColumn, seen: Structure) -> bool:
    """True if a candidate for the item may be a property of items, such as their seller."""
    told = has_pattern(candidate.column, names.THING) and any("decides" in reason for reason in candidate.reasons)
    return not told and comes_by_chance(candidate.column, query, seen)


def comes_by_chance(column: LogColumn, query: LogColumn, seen: Structure) -> bool:
    """True if values repeat within lists about as often as if dealt at random."""
    pairs, dealt = seen.lists(query.name).pairs(seen.codes[column.name])
    return pairs >= 5 and pairs > 0.3 * dealt and (dealt < 1 or pairs < 3 * dealt)


def _things(keys: Sequence[LogColumn], seen: Structure) -> list[Candidate]:
    """The columns as item ids; what they determine of each other is checked only for the likeliest."""
    decided = {column.name for column in sorted(keys, key=lambda each: each.numeric)[:_DECIDED]}  # texts first
    others = [column for column in keys if column.name in decided]
    alone = [_thing(column, seen, ()) for column in keys]
    likeliest = {each.name for each in sorted(alone, key=lambda each: -each.score)[:_LIKELIEST]}
    return [_thing(each.column, seen, others) if each.name in likeliest else each for each in alone]


_THING_NAMES = (
    (names.LIST_OR_VISIT, -4.0, "the name of a list"),
    (names.PERSON, -4.0, "the name of a person"),
    (names.PROPERTY, -3.0, "the name of a property"),
    (names.TEXT, -1.0, "a text"),
    (names.IDENTIFIER, 1.0, "the name of an id"),
)


def _thing(column: LogColumn, seen: Structure, columns: Sequence[LogColumn]) -> Candidate:
    """A column as an item's id for any query, and which of some columns it determines."""
    lists = seen.lists(column.name)

    def points() -> Scores:
        if has_pattern(column, names.THING):
            yield (4.0, "the name of an item's id") if names_one(column) else (3.0, "the name of an item")
        elif named := names.first_of(column.name, _THING_NAMES):
            yield named
        elif column.numeric and not column.least > 100:
            yield -1.0, "a small number"
        if lists.paired > 0.5:
            yield _PAIRED, f"{lists.distinct:,} values, which come again"
        again = lists.paired * len(seen.codes[column.name]) / 2  # at most this many values recur
        others = [other for other in columns if other is not column and seen.lists(other.name).distinct > 1]
        fixed = [other.name for other in others if seen.decides(column.name, other.name)] if again >= _PAIRS else []
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
    if has_pattern(column, names.EVENT_TIME):
        yield 3.0, "the name of an event's time"
    elif has_pattern(column, names.ITEM_TIME):
        yield -2.0, "the name of an item's or a person's date"
    elif has_pattern(column, names.TIME):
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


# places and labels


def is_label(column: LogColumn) -> bool:
    """True if a column is named like what happened after the list was shown, not before."""
    return names.label_points(column.name) > 0


def positions(columns: Sequence[LogColumn], query: LogColumn, seen: Structure) -> list[Candidate]:
    """The columns that may say where an item was shown: those that count the rows of nearly every list."""
    whole = [each for each in columns if each.numeric and each.name in seen and not is_label(each)]
    lists = seen.lists(query.name)

    def points(column: LogColumn) -> Scores:
        named = has_pattern(column, names.POSITION)
        yield (2.0, "the name of a place") if named else (0.0, "")
        counted = lists.counted(seen.numbers(column.name), seen.codes[column.name])
        yield 2.0 * counted, f"counts the rows of {counted:.0%} of the lists"
        repeats = lists.repeats(seen.codes[column.name])
        if named or counted:
            yield 2.0 - 4.0 * repeats, f"comes again in {repeats:.0%} of the rows" if repeats > 0.005 else "once a list"

    named = [each for each in whole if has_pattern(each, names.POSITION)]
    counters = _counters(whole, seen)
    return candidates("a position", [each for each in whole if each in named or each.name in counters], points)


def structured(columns: Sequence[LogColumn]) -> list[str]:
    """The columns with a structure that helps to decide roles: all but measured quantities."""
    keys = [
        each for each in columns if not each.numeric or each.whole or is_label(each) or each.distinct <= MOST_GRADES
    ]
    return [
        column.name
        for column in keys
        if not column.size and (column.distinct > 1 or (column.distinct == 1 and column.missing > 0))
    ]
