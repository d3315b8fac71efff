"""The evidence for and against the roles of a log's columns: one table of points and reasons.

Points are coarse, since they only have to separate the columns of one log: a name is worth at most five, and clear
structure outweighs it.

User actions are 0 for most rows of a list, differ between lists for the same item, and are rarer further down the list.
They are nested: what was bought had been put into the cart, and what was put there had been clicked.

Shapes: N rows, Q lists of a sample.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.ingest import names
from ltrscale.ingest.names import are_grades
from ltrscale.ingest.profile import LogColumn
from ltrscale.ingest.structure import KeyLists, Structure

RECURS = 1.0
"""Points of an item's id for values that recur; not enough alone."""
_PAIRS = 30
"""The fewest recurring values, or rows, that show what a column determines and how often it repeats by chance."""
_RARE = 0.02
_OF_ITEM = 0.9
"""Share of an item's rows above which a column is a property of the item."""
_SURELY = 3.0
"""Deviations by which rows above 0 are further up than the other rows."""


@dataclass(frozen=True)
class Candidate:
    """A column that may have a role, with the reasons of its score."""

    column: LogColumn
    score: float
    reasons: tuple[str, ...]
    against: str = ""
    """The reason that counts most against it."""
    by_chance: bool = False
    """True if, as an item, it comes again within lists as often as a property of items would."""

    @property
    def name(self) -> str:
        """The column's name."""
        return self.column.name


@dataclass(frozen=True)
class Beside:
    """What is known of a log when a role is looked for."""

    seen: Structure
    query: LogColumn | None = None
    item: LogColumn | None = None
    positions: LogColumn | None = None
    clocks: tuple[str, ...] = ()
    """Columns of times."""
    slots: Mapping[str, Doubles] = field(default_factory=dict)
    """The numbers of columns that may count the rows of lists."""
    things: tuple[str, ...] = ()
    """The likeliest ids of items."""
    deciders: frozenset[str] = frozenset()
    """The columns of which it is looked for what they determine."""
    decidable: tuple[str, ...] = ()
    """The columns that these may determine."""
    above: Mapping[str, Bools] = field(default_factory=dict)
    """Rows above 0 of columns that are so in some rows only."""


_Found = tuple[float, str] | None


@dataclass(frozen=True, eq=False)
class _Look:
    """A column beside what is known of its log; each measure is taken once, and only if it is asked for."""

    column: LogColumn
    beside: Beside

    @cached_property
    def codes_N(self) -> Ints:
        return self.beside.seen.codes[self.column.name]

    @cached_property
    def own(self) -> KeyLists:
        """The lists that it would make itself."""
        return self.beside.seen.lists(self.column.name)

    @cached_property
    def lists(self) -> KeyLists:
        assert self.beside.query is not None
        return self.beside.seen.lists(self.beside.query.name)

    @property
    def mean(self) -> float:
        return len(self.codes_N) / max(self.own.distinct, 1)

    def best(self, others: Iterable[str], measure: Callable[[Ints, str], float]) -> _Found:
        """The highest measure of other columns with the column's name."""
        codes = self.beside.seen.codes
        found = [(measure(codes[name], name), name) for name in others if name != self.column.name]
        return max(found, key=lambda one: one[0], default=None)

    def least(self, others: Iterable[str]) -> _Found:
        """The other column that comes again least often in its lists, with the share of such rows."""
        best = self.best(others, lambda codes_N, _: -self.own.repeats(codes_N))
        return best and (-best[0], best[1])

    @cached_property
    def slot(self) -> _Found:
        return self.least(name for name in self.beside.slots if names.has(name, names.POSITION))

    def same(self, codes_N: Ints, _: str) -> float:
        return self.own.constant(codes_N)

    @cached_property
    def counter(self) -> _Found:
        counters = [name for name in self.beside.slots if not names.has(name, names.POSITION)]
        return self.best(counters, lambda codes_N, name: self.own.counted(self.beside.slots[name], codes_N))

    @cached_property
    def fixed(self) -> list[str]:
        """The columns that it determines."""
        seen, name = self.beside.seen, self.column.name
        if name not in self.beside.deciders or self.own.paired * len(self.codes_N) / 2 < _PAIRS:  # most that recur
            return []
        others = [each for each in self.beside.decidable if each != name and seen.lists(each).distinct > 1]
        return [other for other in others if seen.decides(name, other)]

    @cached_property
    def is_thing(self) -> bool:
        return bool(self.fixed) or self.column.like(names.THING)

    @cached_property
    def repeats(self) -> float:
        return self.lists.repeats(self.codes_N)

    @cached_property
    def pairs(self) -> tuple[int, float]:
        return self.lists.pairs(self.codes_N)

    @property
    def repeats_by_chance(self) -> bool:
        """True if values repeat within lists about as often as if dealt at random."""
        pairs, dealt = self.pairs
        return pairs >= 5 and pairs > 0.3 * dealt and (dealt < 1 or pairs < 3 * dealt)

    @cached_property
    def counted(self) -> float:
        return self.lists.counted(self.beside.seen.numbers(self.column.name), self.codes_N)

    @cached_property
    def agreed(self) -> float:
        return self.lists.constant(self.codes_N)

    @cached_property
    def hours(self) -> float:
        return self.lists.spread(self.beside.seen.seconds(self.column)) / 3600

    @property
    def span(self) -> str:
        return f"{self.hours:.1g} h" if self.hours < 48 else f"{self.hours / 24:,.0f} days"

    @property
    def decided_by_item(self) -> bool:
        item, seen = self.beside.item, self.beside.seen
        return item is not None and item.name in seen and seen.decides(item.name, self.column.name)

    @cached_property
    def values_N(self) -> Doubles:
        return self.beside.seen.amounts(self.column)

    @cached_property
    def above_N(self) -> Bools:
        return self.values_N > (0.0 if self.column.distinct <= 1 else np.nanmin(self.values_N, initial=np.inf))

    @cached_property
    def is_own(self) -> bool:
        """True if it is a property of the item."""
        same = same_for_item(self.above_N, self.beside.seen, self.beside.item)
        return same or (not self.column.numeric and self.decided_by_item)

    @cached_property
    def wordy(self) -> bool:
        """True if none of its words is a grade."""
        return not self.column.numeric and bool(np.isnan(self.values_N).all())

    @cached_property
    def nameless(self) -> bool:
        """True if only structure could make it a label."""
        return self.column.few and not self.wordy and not self.column.is_label and not self.is_own

    @cached_property
    def acted(self) -> bool:
        """True if it may say what users did, by structure alone."""
        return self.nameless and self.column.name in self.beside.above

    @cached_property
    def having_Q(self) -> Ints:
        return self.lists.having(self.above_N)

    @property
    def with_one(self) -> float:
        return float((self.having_Q > 0).mean())

    @property
    def alike(self) -> float | None:
        item = self.beside.item
        return None if item is None or not self.acted else self.beside.seen.lists(item.name).alike(self.above_N)

    @property
    def _others(self) -> list[tuple[str, Bools]]:
        return [each for each in self.beside.above.items() if self.acted and each[0] != self.column.name]

    @cached_property
    def around(self) -> list[str]:
        return [name for name, other_N in self._others if _inside(self.above_N, other_N)]

    @cached_property
    def within(self) -> list[str]:
        return [name for name, other_N in self._others if _inside(other_N, self.above_N)]

    @cached_property
    def height(self) -> float:
        """How many deviations further up than the mean place of their lists the rows above 0 are, on average."""
        if self.beside.positions is None or not self.acted:
            return 0.0
        places_N = self.beside.seen.numbers(self.beside.positions.name)
        return self.lists.height(places_N, self.above_N)


def same_for_item(above_N: Bools, seen: Structure, item: LogColumn | None) -> bool:
    """True if each item is above 0 in all of its rows or in none."""
    if item is None or item.name not in seen:
        return False
    alike = seen.lists(item.name).alike(above_N)
    return alike is not None and alike > _OF_ITEM


def _inside(part_N: Bools, whole_N: Bools) -> bool:
    """True if a column is above 0 only where another, more frequent one is."""
    return bool(part_N.sum() < 0.9 * whole_N.sum() and (part_N & whole_N).sum() >= 0.99 * part_N.sum())


class _Evidence(NamedTuple):
    """Points, with their reason, where a look finds something: True, a value, or a value with a word."""

    points: float
    reason: str
    """A format of the value, the word, and the look `c`."""
    finds: Callable[[_Look], float | _Found]
    each: float = 0.0
    """Points for each unit of the value."""


_e = _Evidence


def _like(points: float, reason: str, *patterns: str) -> _Evidence:
    """Evidence of a name that matches all patterns."""
    return _Evidence(points, reason, lambda c: all(c.column.like(pattern) for pattern in patterns))


def _else(points: float, reason: str) -> _Evidence:
    return _Evidence(points, reason, lambda _: True)


_BY_CHANCE = "{c.repeats:.1%} of the rows repeat one in their list, as many as by chance"
_THING: tuple[_Evidence | list[_Evidence], ...] = (
    [
        _like(4.0, "the name of an item's id", names.THING, f"{names.IDENTIFIER}|{names.PERSON}"),
        _like(3.0, "the name of an item", names.THING),
        _like(-4.0, "the name of a list", names.LIST_OR_VISIT),
        _like(-4.0, "the name of a person", names.PERSON),
        _like(-3.0, "the name of a property", names.PROPERTY),
        _like(-1.0, "a text", names.TEXT),
        _like(1.0, "the name of an id", names.IDENTIFIER),
        _e(-1.0, "a small number", lambda c: c.column.numeric and c.column.least <= 100),
    ],
    _e(RECURS, "{c.own.distinct:,} values, which come again", lambda c: c.own.paired > 0.5),
    _e(0.0, "decides {1}", lambda c: (min(4, len(c.fixed)), ", ".join(c.fixed[:3])), 0.5),
)
_TABLE: Mapping[str, tuple[_Evidence | list[_Evidence], ...]] = {
    "thing": _THING,
    "query": (
        [
            _like(4.0, "the name of a list", names.QUERY),
            _like(-5.0, "the name of a place", names.POSITION),
            _like(-4.0, "the name of an item", names.THING),
            _like(-4.0, "the name of a property", names.PROPERTY),
            _like(3.0, "the name of a list", names.LISTED),
            _like(2.0, "the name of a visit", names.VISITED),
            _like(-1.0, "the name of a person", names.PERSON),
            _like(0.5, "the name of an id", names.IDENTIFIER),
            _else(-1.0, "no name of an id"),
        ],
        _e(-1.0, "{c.own.distinct:,} lists of {c.mean:,.1f} rows", lambda c: c.own.paired, 2.0),
        _e(-6.0, "most of its values name a single row", lambda c: c.own.paired < 0.5),
        _e(-5.0, "has {c.own.distinct:,} values only", lambda c: c.own.distinct < 5 or c.mean > 2000),
        _e(0.0, "{0:.0%} of its rows stand beside one of theirs", lambda c: c.own.together, 3.0),
        _e(0.0, "{0:.1%} of the rows repeat an item", lambda c: c.least(c.beside.things), -6.0),
        [
            _e(1.0, "each {1} once", lambda c: c.slot if c.slot and c.slot[0] <= 0.005 else None, -6.0),
            _e(1.0, "{1} comes again in {0:.0%} of the rows", lambda c: c.slot, -6.0),
        ],
        _e(0.0, "{1} counts the rows of {0:.0%} of its lists", lambda c: c.counter, 3.0),
        _e(0.0, "{1} is the same in {0:.0%} of its lists", lambda c: c.best(c.beside.clocks, c.same), 3.0),
    ),
    "item": (
        *_THING,
        [
            _e(-1.5, _BY_CHANCE, lambda c: c.repeats_by_chance and c.is_thing),
            _e(-5.0, _BY_CHANCE, lambda c: c.repeats_by_chance),
            _e(1.0, "{0:.1%} of the rows repeat one in their list", lambda c: c.repeats or None, -8.0),
            _e(2.0, "once a list, where chance would repeat it {c.pairs[1]:,.0f} times", lambda c: c.pairs[1] > _PAIRS),
            _else(1.0, "once a list"),
        ],
        [
            _e(0.0, "", lambda c: c.is_thing or not c.column.numeric),
            _e(0.0, "counts the rows of {0:.0%} of the lists", lambda c: c.counted, -4.0),
        ],
        _e(-6.0, "the same in a whole list", lambda c: c.agreed > 0.9),
    ),
    "time": (
        [
            _like(3.0, "the name of an event's time", names.EVENT_TIME),
            _like(-2.0, "the name of an item's or a person's date", names.ITEM_TIME),
            _like(2.0, "the name of a time", names.TIME),
            _e(-3.0, "a number without the name of a time", lambda c: c.column.digits),
        ],
        _e(1.5, "with hours", lambda c: c.column.clock),
        [
            _e(0.0, "the same in {0:.0%} of the lists", lambda c: c.agreed if c.agreed > 0.5 else None, 3.0),
            _e(2.0, "{c.span} apart within a list", lambda c: c.hours <= 1),
            _e(1.0, "{c.span} apart within a list", lambda c: c.hours <= 24),
            _else(-2.0, "{c.span} apart within a list"),
        ],
        _e(-4.0, "{c.beside.item.name} decides it", lambda c: c.decided_by_item),
        _e(-1.0, "{0:.0f} years long", lambda c: c.column.days / 365 if c.column.days > 3 * 365 else None),
        _e(0.0, "{0:.2%} of the rows have a bad one", lambda c: c.column.bad, -5.0),
    ),
    "positions": (
        _like(2.0, "the name of a place", names.POSITION),
        _e(0.0, "counts the rows of {0:.0%} of the lists", lambda c: c.counted, 2.0),
        [
            _e(0.0, "", lambda c: not c.counted and not c.column.like(names.POSITION)),
            _e(2.0, "once a list", lambda c: c.repeats if c.repeats <= 0.005 else None, -4.0),
            _e(2.0, "comes again in {0:.0%} of the rows", lambda c: c.repeats, -4.0),
        ],
    ),
    "label": (
        [
            _e(0.0, "the name of a label", lambda c: names.label_points(c.column.name) or None, 1.0),
            _e(3.0, "perhaps the name of a label", lambda c: c.column.few and c.column.like(names.PERHAPS)),
            _else(-2.0, "no name of a label"),
        ],
        [
            _e(-3.0, "the same in every list", lambda c: c.agreed == 1),
            _e(1.0, "differs within {0:.0%} of the lists", lambda c: 1.0 - c.agreed),
        ],
        _e(-5.0, "the same for an item in every list", lambda c: c.is_own and not c.column.is_label),
        _e(
            4.0,
            "words that grade, or that say what users do",
            lambda c: c.column.few and not c.column.numeric and are_grades(c.column.values) and not c.is_own,
        ),
        _e(-2.0, "words that do not grade", lambda c: c.wordy),
        _e(
            -2.0,
            "above 0 in {c.with_one:.1%} of the lists only",
            lambda c: c.column.few and not c.wordy and c.with_one < _RARE and int((c.having_Q > 0).sum()) < 500,
        ),
        _e(
            3.5,
            "one row a list at most",
            lambda c: (
                c.nameless and c.column.distinct <= 2 and c.with_one > 0.2 and bool((c.having_Q <= 1).mean() > 0.95)
            ),
        ),
        _e(1.0, "0 in {0:.0%} of the rows", lambda c: 1 - float(c.above_N.mean()) if c.acted else None),
        _e(0.5, "above 0 in {0:.0%} of the rows of an item that is so once", lambda c: c.alike),
        [
            _e(2.5, "above 0 only where {c.around[0]} is", lambda c: min(4, len(c.around)) or None, 0.5),
            _e(2.0, "above 0 wherever {c.within[0]} is", lambda c: bool(c.within)),
        ],
        _e(1.5, "comes less often down the list ({c.height:.0f} deviations)", lambda c: c.height > _SURELY),
    ),
}
"""Evidence for and against each role; of a list the first that finds something counts."""


def candidate(role: str, column: LogColumn, beside: Beside) -> Candidate:
    """A column as a candidate for a role of `_TABLE`, with the sum of its points."""
    look, points = _Look(column, beside), list[tuple[float, str]]()
    for group in _TABLE[role]:
        for each in group if isinstance(group, list) else [group]:
            found = each.finds(look)
            if found is not None and found is not False:
                value, word = found if isinstance(found, tuple) else (found, "")
                points.append((each.points + each.each * value, each.reason.format(value, word, c=look)))
                break
    points = [(score, reason) for score, reason in points if round(score, 1)]
    worst, against = min(points, default=(0.0, ""))
    reasons = tuple(reason for _, reason in points)
    by_chance = role == "item" and look.repeats_by_chance and not (look.fixed and column.like(names.THING))
    return Candidate(column, sum(score for score, _ in points), reasons, against if worst < 0 else "", by_chance)
