"""Chooses columns of a log for the roles that a ranker needs, by the evidence for each.

Shapes: N rows.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ltrscale.arrays import Bools, Doubles
from ltrscale.errors import InputError, suggestion
from ltrscale.ingest import names
from ltrscale.ingest.evidence import RECURS, Beside, Candidate, candidate, same_for_item
from ltrscale.ingest.profile import LogColumn
from ltrscale.ingest.structure import Structure
from ltrscale.progress import progress

_CLOSE = 1.5
_LIKELIEST, _DECIDED = 64, 64
"""Columns checked as item ids, and columns that each may determine: all pairs of thousands of columns are too many."""
_SHOWING = 16
"""Columns of times and of places that are compared with each column."""
_MOST_PLACES, _COUNTERS = 1000, 8
"""The longest lists that a column may count the rows of, and the columns tried that are not named like a place."""
_NESTED = 24
"""The most columns without a label's name to compare with each other."""
FEWEST_ABOVE = 20
"""The fewest rows above 0 of a column that is compared with others."""
_LEAST = {"query": 2.0, "item": 2.0, "time": 1.5, "label": 2.0, "positions": 2.0}
"""The least points for a role."""


@dataclass(frozen=True)
class Choice:
    """The best column for a role, and close alternatives."""

    best: Candidate
    alternatives: tuple[Candidate, ...] = ()
    doubt: str = ""
    """What the user has to check; empty if the choice is clear."""


def _candidates_for(role: str, columns: Sequence[LogColumn], beside: Beside) -> list[Candidate]:
    """The columns that may have a role, with their points; `beside` has the roles that were found before."""
    seen = beside.seen
    columns = [column for column in columns if column.name in seen]
    match role:
        case "query":
            beside = _shown_by(columns, beside)
            columns = [each for each in _keys(columns) if not (each.numeric and each.like(names.POSITION))]
        case "item":
            columns = [each for each in _keys(columns) if not each.like(names.POSITION)]
            beside = _deciding(columns, beside)
        case "time":
            columns = [each for each in columns if each.formats and (each.is_time or not each.names_one)]
        case "positions":
            columns = [each for each in columns if each.numeric and not each.is_label]
            counters = _counters(columns, seen)
            columns = [each for each in columns if each.like(names.POSITION) or each.name in counters]
        case "label":
            columns = [each for each in columns if not each.is_time and not each.names_one]
            columns = [each for each in columns if each.distinct > 1 or (each.distinct == 1 and each.missing > 0)]
            columns = [each for each in columns if each.numeric or each.few]
            beside = replace(beside, above=_above(columns, beside))
    found = []
    with progress(f"columns for {role}", len(columns), "columns") as advance:
        for column in columns:
            found.append(candidate(role, column, beside))
            advance(1)
    return found


def _choose_role(found: Sequence[Candidate], *, least: float, alternatives: int = 0) -> Choice | None:
    """The best candidate, with close ones (and some runners-up) as alternatives; None if none has `least` points."""
    ranked = sorted(found, key=lambda each: -each.score)
    if not ranked or ranked[0].score < least:
        return None
    best, runners_up = ranked[0], ranked[1:4]
    close = [each.name for each in runners_up if each.score > best.score - _CLOSE and each.score >= least]
    doubt = f"{' or '.join(close)} {'is' if len(close) == 1 else 'are'} as likely" if close else ""
    worth = [i < alternatives or each.score >= max(least, best.score - 6) for i, each in enumerate(runners_up)]
    return Choice(best, tuple(each for each, named in zip(runners_up, worth, strict=True) if named), doubt)


@dataclass
class Roles:
    """The columns that have no role yet, the columns whose role is given, and what was chosen."""

    columns: dict[str, LogColumn]
    given: dict[str, LogColumn] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)

    def take_given(self, given: Mapping[str, str | None], where: str) -> None:
        """Take the columns with these names; raises InputError for a name that no column has."""
        for use, name in given.items():
            if name is not None and name not in self.columns:
                remedy = suggestion(name, self.columns, "the columns are")
                raise InputError(f"{where}: {use}: no column {name!r} is left; {remedy}")
            if name is not None:
                self.given[use] = self.columns.pop(name)

    def take(self, role: str, beside: Beside) -> LogColumn | None:
        """The column of a role, as given or else the best candidate, which only a file without gaps has."""
        if role in self.given:
            return self.given[role]
        candidates = _candidates_for(role, [*self.columns.values()], beside)
        whole = [each for each in candidates if not each.column.lacking]  # only features may be missing from a file
        choice = _choose_role(whole, least=_LEAST[role], alternatives=2 if role == "time" else 0)
        if choice is None:
            return None
        self.choices[role] = choice
        return self.columns.pop(choice.best.name)

    def doubt(self, role: str, reason: str) -> None:
        """Say what the user has to check of a choice."""
        self.choices[role] = replace(self.choices[role], doubt=reason)

    def doubt_the_nameless(self) -> None:
        """Mark roles that rest on structure alone, or on a name that features have too."""
        reasons = {
            "label": "no column has the name of a label, see whether it is what users did",
            "positions": "no column has the name of a place",
        }
        for role, reason in reasons.items():
            if role in self.choices:
                column, doubt = self.choices[role].best.column, self.choices[role].doubt
                if not (column.is_label if role == "label" else column.like(names.POSITION)):
                    self.doubt(role, "; ".join(filter(None, (reason, doubt))))


def nearest_query(columns: Sequence[LogColumn], seen: Structure) -> str:
    """The column that comes nearest to a query's id, and how to name it."""
    best = max(_candidates_for("query", columns, Beside(seen)), key=lambda each: each.score, default=None)
    hint = f"; {best.name} is the nearest{f', but {best.against}' if best.against else ''}" if best else ""
    return f"{hint}; name it, as --set {shlex.quote(f'query={best.name if best else columns[0].name}')}"


def _keys(columns: Sequence[LogColumn]) -> list[LogColumn]:
    """The columns that may be ids."""
    keys = [each for each in columns if each.distinct > 1 and (not each.numeric or each.whole)]
    return [each for each in keys if not each.is_time and not each.is_label]


def _shown_by(columns: Sequence[LogColumn], beside: Beside) -> Beside:
    """The columns that distinguish a query's id from others: times, counters and the likeliest items."""
    clocks = [column for column in columns if column.is_time]
    clocks = [c for c in clocks if c.like(names.EVENT_TIME) or not c.like(names.ITEM_TIME)] or clocks
    keys = [each for each in _keys(columns) if not (each.numeric and each.like(names.POSITION))]
    deciding = _deciding(keys, beside)
    things = sorted((candidate("thing", each, deciding) for each in keys), key=lambda each: -each.score)[:2]
    return replace(
        beside,
        clocks=tuple(each.name for each in clocks[:_SHOWING]),
        slots=_counters(columns, beside.seen),
        things=tuple(each.name for each in things if each.score > RECURS),  # a color recurs too
    )


def _counters(columns: Sequence[LogColumn], seen: Structure) -> dict[str, Doubles]:
    """The columns that may count the rows of lists (named like a place first), with their numbers."""
    whole = [each for each in columns if each.numeric and each.whole and not each.is_label]
    named = [each for each in whole if each.like(names.POSITION)]
    dense = [each for each in whole if each.least in (0, 1) and 3 <= each.most - each.least + 1 <= _MOST_PLACES]
    dense = [each for each in dense if each.distinct >= 0.9 * (each.most - each.least + 1) and each not in named]
    return {each.name: seen.numbers(each.name) for each in [*named[:_SHOWING], *dense[:_COUNTERS]]}


def _deciding(keys: Sequence[LogColumn], beside: Beside) -> Beside:
    """The likeliest ids of items, and the columns that they may determine."""
    alone = sorted((candidate("thing", column, beside) for column in keys), key=lambda each: -each.score)
    texts_first = sorted(keys, key=lambda each: each.numeric)
    decidable = tuple(each.name for each in texts_first[:_DECIDED])
    return replace(
        beside,
        deciders=frozenset(each.name for each in alone[:_LIKELIEST]),
        decidable=tuple(each.name for each in keys if each.name in decidable),
    )


def _above(columns: Sequence[LogColumn], beside: Beside) -> dict[str, Bools]:
    """Rows above 0 of columns that are above 0 in some rows only, and are no property of the item."""
    above: dict[str, Bools] = {}
    quantities = [
        each for each in columns if each.numeric and (each.least == 0 or (each.least > 0 and each.distinct == 1))
    ]
    for column in [*quantities, *(each for each in columns if not each.numeric)]:
        if len(above) == _NESTED:
            break
        above_N = beside.seen.amounts(column) > 0
        some = above_N.sum() >= FEWEST_ABOVE and above_N.mean() < 0.5
        if some and not same_for_item(above_N, beside.seen, beside.item):
            above[column.name] = above_N
    return above


def within_query(column: LogColumn, columns: Sequence[LogColumn], seen: Structure) -> tuple[LogColumn, ...]:
    """The time column that, with a recurring `column` such as the customer, makes the query's id; or none.

    A customer's rows stand together on each day: there is a list for each run, and the day separates the runs.
    """
    lists = seen.lists(column.name)
    if lists.runs < 1.2 * lists.distinct or lists.together < 0.3:
        return ()
    for other in columns:
        if other is column or other.name not in seen or (other.numeric and not other.whole):
            continue
        if not other.is_time:
            continue
        pairs = len(np.unique(seen.joined(column.name, [other.name])))
        if abs(pairs - lists.runs) <= 0.1 * lists.runs:
            return (other,)
    return ()


def structured(columns: Sequence[LogColumn]) -> list[str]:
    """The columns with a structure that helps to decide roles: all but measured quantities."""
    keys = [each for each in columns if not each.numeric or each.whole or each.is_label or each.few]
    return [
        column.name
        for column in keys
        if not column.size and (column.distinct > 1 or (column.distinct == 1 and column.missing > 0))
    ]
