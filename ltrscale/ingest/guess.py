"""Guesses the uses of a log's columns from their structure and names, for a draft config that the user corrects."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ltrscale.arrays import Bools, Doubles
from ltrscale.data.times import ISO, Clock, instants
from ltrscale.errors import InputError
from ltrscale.ingest import names
from ltrscale.ingest.evidence import Beside, same_for_item
from ltrscale.ingest.names import MOST_GRADES, is_unnamed, word_grades
from ltrscale.ingest.profile import LogColumn
from ltrscale.ingest.roles import FEWEST_ABOVE, Choice, Roles, nearest_query, within_query
from ltrscale.ingest.structure import Structure

_CODE = r"^c_|_?id$|_id_|code$|type$|category|brand|country|region|^cat_"
_INDEX = r"x|index|level_\d+|__index_level_\d+__|row_?(names?|num(ber)?|id|ix|idx|index|nr|no)?|nr|no|idx"
_MANY_ROWS = 1000
"""Number of rows from which no feature counts them by chance."""
_LONG = 60
_SEEN_OFTEN = 5
"""Mean number of rows per value from which a model can learn from an identifier."""
_UNREAD = 0.2
"""Share of unreadable values above which a column costs more rows than it is worth."""
_ASKED_OF_FLAGS = (
    "0 or 1, and no column looks like a label: is it known when the list is shown, or what users did then (the label)?"
)
_INSTANT = datetime(2026, 2, 3)
"""A time in which day and month could be swapped."""


@dataclass(frozen=True)
class Guess:
    """The uses of columns; `others` are the columns without a use, with the reason."""

    query: LogColumn
    within: tuple[LogColumn, ...] = ()
    """Further columns that, with `query`, make the query's id."""
    item: LogColumn | None = None
    label: LogColumn | None = None
    gain: LogColumn | None = None
    clicks: LogColumn | None = None
    time: LogColumn | None = None
    positions: LogColumn | None = None
    meta: tuple[LogColumn, ...] = ()
    features: tuple[LogColumn, ...] = ()
    categorical: tuple[LogColumn, ...] = ()
    dates: tuple[LogColumn, ...] = ()
    vectors: tuple[LogColumn, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Choice] = field(default_factory=dict)
    """For each role that was guessed: the reasons, and the alternatives."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """A question on each feature that may be known only after users have acted."""

    @property
    def optional(self) -> tuple[LogColumn, ...]:
        """The features that some file lacks."""
        return tuple(column for column in self.readable if column.lacking)

    @property
    def moving(self) -> list[str]:
        """The features that differ between earlier and later files, as patterns of their names."""
        made = (*self.dates, *self.vectors)
        return [f"{column.name}.*" if column in made else column.name for column in self.optional]

    @property
    def readable(self) -> tuple[LogColumn, ...]:
        """The columns that features are made of."""
        return (*self.features, *self.categorical, *self.dates, *self.vectors)

    @property
    def alike(self) -> list[list[str]]:
        """Pairs of vectors to compare: the query's by name, else the first, with each other one of the same length."""
        first, *others = sorted(self.vectors, key=lambda each: not each.is_asked) or (None,)
        return [[first.name, each.name] for each in others if first is not None and each.size == first.size]


def guess(columns: Sequence[LogColumn], seen: Structure, given: Mapping[str, str | None], where: str) -> Guess:
    """The likely uses of a log's columns.

    Args:
        columns: the columns, from `profile.first_columns`.
        seen: the structure of at least the columns of `roles.structured`.
        given: the names of columns with a known use: `query`, `item`, `label`, `time`, `positions`.
        where: the file, for errors.

    Raises:
        InputError: a column does not exist, or none looks like the query's.
    """
    numbers = {name: why for name, why in row_numbers(columns, seen).items() if name not in given.values()}
    left = Roles({column.name: column for column in columns if column.name not in numbers})
    left.take_given(given, where)
    query = left.take("query", Beside(seen))
    if query is None:
        raise InputError(f"{where}: no column looks like a query's id{nearest_query(columns, seen)}")
    within = () if "query" in left.given else within_query(query, [*left.columns.values()], seen)
    if within:
        days = ", ".join(column.name for column in within)
        left.doubt("query", f"no single column names a list, rows of {query.name} stand together by {days}")
    key, seen = _combined(query, within, seen)
    item = left.take("item", Beside(seen, key))
    if "item" in left.choices and left.choices["item"].best.by_chance:
        left.doubt("item", "it comes again within lists as often as by chance")
    time = left.take("time", Beside(seen, key, item))
    positions = left.take("positions", Beside(seen, key, item))
    label = left.take("label", Beside(seen, key, item, positions))
    left.doubt_the_nameless()
    known = _outcomes(left.columns, label, seen, item)
    gain = _gain_of(left.columns, label, seen)
    counts = [each for each in [label, *left.columns.values()] if each and each.numeric and each.least >= 0]
    counts = [each for each in counts if each.few and not each.lacking]
    clicks = next((each for each in counts if each.like(names.CLICKED)), None)
    found = Guess(query, within, item, label, gain, clicks, time, positions, choices=left.choices)
    rest = [column for column in left.columns.values() if column is not gain]
    found = _with_rest(found, rest, {**numbers, **known}, key, seen)
    features = (*found.features, *found.categorical) if label is None else ()
    flags = [each for each in features if _is_flag(each, key, seen, item)]
    return replace(found, asked={each.name: _ASKED_OF_FLAGS for each in flags})


def row_numbers(columns: Sequence[LogColumn], seen: Structure) -> dict[str, str]:
    """The columns that count the rows, like the index of a data frame, with the reason to leave them out.

    A column without a name is always an index. Any other must start at 0 or 1 and rise by one from row to row, in each
    file or over all files, and must have the name of an index or many rows.
    """
    reasons = {}
    for column in columns:
        if is_unnamed(column.name):
            reasons[column.name] = "a column without a name, as the index of a data frame has none"
        elif column.name in seen and column.numeric and column.whole and column.least in (0, 1):
            many = len(seen.codes[column.name]) >= _MANY_ROWS or re.fullmatch(_INDEX, column.name.lower())
            if many and _counts_rows(seen.numbers(column.name), seen.files):
                reasons[column.name] = "the number of the row"
    return reasons


def _counts_rows(numbers_N: Doubles, files: Sequence[int]) -> bool:
    """True if numbers rise by one from row to row; each file may start again."""
    again_N = np.zeros(len(numbers_N), np.bool_)
    again_N[[row for row in files if row < len(numbers_N)]] = True
    rises_N = np.diff(numbers_N, prepend=numbers_N[:1] - 1) == 1
    return bool((rises_N | (again_N & (numbers_N == numbers_N[0]))).all())


def _combined(query: LogColumn, within: Sequence[LogColumn], seen: Structure) -> tuple[LogColumn, Structure]:
    """The query's column and the structure; if several columns make the id, one column for their combination."""
    if query.name not in seen or not within:
        return query, seen
    parts = [column.name for column in within]
    key = replace(query, name=" ".join([query.name, *parts]))
    return key, replace(seen, codes={**seen.codes, key.name: seen.joined(query.name, parts)})


def _with_rest(
    best_guess: Guess, remaining: Sequence[LogColumn], outcomes: Mapping[str, str], key: LogColumn, seen: Structure
) -> Guess:
    """The guess with the uses of all other columns."""
    uses: dict[_Use, list[LogColumn]] = {"meta": [], "features": [], "categorical": [], "dates": [], "vectors": []}
    unused = dict(outcomes)
    for column in (best_guess.gain, best_guess.clicks if best_guess.positions is not None else None):
        if column is not None:
            unused.pop(column.name, None)
    first_with = dict.fromkeys(best_guess.time.formats[:1], best_guess.time) if best_guess.time is not None else {}
    for column in remaining:
        if column.name in outcomes or column in best_guess.within:
            continue
        use, why_not = _use(column, best_guess, key, seen)
        if use == "dates" and (misread := _misread(column, first_with)):
            use, why_not = None, misread
        if use is None:
            unused[column.name] = why_not
            continue
        uses[use].append(column)
        if use == "dates":
            first_with.setdefault(column.formats[0], column)
    found: dict[str, Any] = {use: tuple(columns) for use, columns in uses.items()}
    return replace(best_guess, **found, others=unused)


def _misread(column: LogColumn, others: Mapping[str, LogColumn]) -> str | None:
    """Why formats of other time columns, tried first, would misread this date; None if they would not."""
    [form, *_] = column.formats
    text = pa.array([_INSTANT.isoformat() if form == ISO else _INSTANT.strftime(form)])
    for earlier, other in others.items():
        if instants(text, Clock(formats=(earlier, form)))[0] != instants(text, Clock(formats=(form,)))[0]:
            return f"a date in {form}, which {earlier} of {other.name} reads as another one"
    return None


_Use = Literal["meta", "features", "categorical", "dates", "vectors"]


def _use(column: LogColumn, best_guess: Guess, key: LogColumn, seen: Structure) -> tuple[_Use | None, str]:
    """The use of a column without a role; if it has none, the reason."""
    if column.size:
        return "vectors", ""
    if column.distinct <= 1:
        only = "one value, or none" if column.missing else "the same value in every row"
        return None, only if column.distinct else "no single value that can be read"
    if column.bad > _UNREAD:
        return None, f"{column.bad:.0%} of its values cannot be read"
    if column.is_time:
        return ("dates", "") if best_guess.time else (None, "a date, and no column with the time of the row")
    if column.lacking and column.numeric and column.like(names.POSITION):
        return None, f"a place, which {column.lacking} lacks"
    lists = seen.lists(key.name)
    in_list = column.name in seen and lists.constant(seen.codes[column.name]) > 0.95
    is_query_like = not column.numeric and column.is_asked
    rare = column.distinct * _SEEN_OFTEN > lists.distinct
    if column.like(names.PERSON) or (in_list and (is_query_like or (column.names_one and rare))):
        return ("meta", "") if not column.lacking else (None, f"of the whole list, and {column.lacking} lacks it")
    if column.numeric and not (column.whole and (column.like(_CODE) or column.names_one)):
        return "features", ""
    if column.names_one and column.distinct * _SEEN_OFTEN > column.rows:
        return None, f"an id of {column.distinct:,} things, each in few rows"
    if column.distinct > 0.5 * column.rows:  # nearly every row has its own value
        return None, "names single rows"
    if not column.numeric and _names(column, best_guess.item, seen):
        return None, "text, another one for each item, which a model reads as tokens (docs/text.md)"
    if column.length > _LONG:
        return None, "text, which a model reads as tokens (docs/text.md)"
    return "categorical", ""


def _names(column: LogColumn, item: LogColumn | None, seen: Structure) -> bool:
    """True if nearly every item has its own value."""
    if item is None or not {item.name, column.name} <= {*seen.codes}:
        return False
    return seen.lists(column.name).distinct > 0.8 * seen.lists(item.name).distinct and seen.decides(
        column.name, item.name
    )


def doubtful(columns: Sequence[LogColumn], seen: Structure, given: Mapping[str, str | None]) -> dict[str, str]:
    """The columns that are probably not features, with the reason; harmless columns with a single value are left out.

    The arguments are as for `guess`; `given` must include the query.
    """
    uses = guess(columns, seen, given, "X")
    by_role = {"the item": uses.item, "a label": uses.label, "a time": uses.time, "a position": uses.positions}
    reasons = {column.name: f"looks like {role}" for role, column in by_role.items() if column is not None}
    outcomes = {each.name for each in (uses.gain, uses.clicks) if each is not None}
    reasons |= dict.fromkeys(outcomes, "an outcome: it would give the answer away")
    reasons |= {column.name: "a user or session" for column in uses.meta}
    reasons |= {column.name: "a date" for column in uses.dates} | dict(uses.others)
    single = {column.name for column in columns if column.distinct <= 1}
    return {name: reason for name, reason in reasons.items() if name not in {*single, *given.values()}}


def _is_flag(column: LogColumn, query: LogColumn, seen: Structure, item: LogColumn | None) -> bool:
    """True if a column is 0 or 1 (or yes and no), varies within lists and is not a property of the item."""
    if column.distinct != 2 or column.name not in seen:
        return False
    values_N = seen.amounts(column)
    if {*np.unique(values_N[~np.isnan(values_N)]).tolist()} != {0.0, 1.0}:
        return False
    return seen.lists(query.name).constant(seen.codes[column.name]) < 1.0 and not same_for_item(
        values_N > 0, seen, item
    )


def _outcomes(
    remaining: Mapping[str, LogColumn], label: LogColumn | None, seen: Structure, item: LogColumn | None
) -> dict[str, str]:
    """The columns that say what happened after a list was shown, with the reason."""
    found = dict.fromkeys(
        (name for name, each in remaining.items() if each.is_label), "another label: it would give the answer away"
    )
    if label is None or label.name not in seen:
        return found
    values_N = seen.amounts(label)
    known_N, label_N = ~np.isnan(values_N), values_N > 0
    rare = known_N.any() and label_N[known_N].mean() < 0.5  # a count with few zeros is not enough
    for name, column in remaining.items() if rare else ():
        quantity = column.numeric and name in seen and column.least >= 0 and not column.names_one
        if not quantity or name in found:
            continue
        above_N = seen.numbers(name) > 0
        if _follows(above_N, label_N, known_N):
            found[name] = f"0 wherever {label.name} is 0: it would give the answer away"
            continue
        few = column.few and above_N.mean() < 0.5 and label_N.sum() >= FEWEST_ABOVE
        if few and _follows(label_N, above_N, known_N) and not same_for_item(above_N, seen, item):
            found[name] = f"above 0 wherever {label.name} is: it would give the answer away"
    return found


def _follows(part_N: Bools, whole_N: Bools, known_N: Bools) -> bool:
    """True if, in the known rows, something holds only where another thing does."""
    part_N = part_N & known_N
    return bool(part_N.any() and (part_N & whole_N).sum() >= 0.99 * part_N.sum())


def _gain_of(remaining: Mapping[str, LogColumn], label: LogColumn | None, seen: Structure) -> LogColumn | None:
    """The column of what a document brought, by its name; it must be 0 where the label is 0."""
    if label is None:
        return None
    worth = [each for each in remaining.values() if each.like(names.WORTH) and each.is_label]
    worth = [each for each in worth if each.numeric and each.least >= 0 and each.name in seen and not each.lacking]
    if label.numeric:
        label_N = seen.numbers(label.name)
        known_N = ~np.isnan(label_N)
        worth = [each for each in worth if _follows(seen.numbers(each.name) > 0, label_N > 0, known_N)]
    return worth[0] if worth else None


def grades_of(label: LogColumn) -> Mapping[str, float | None] | tuple[float, ...] | None:
    """Grades for a label of words, or of numbers too large to be grades; None for a label that has grades.

    Numeric text has its number as grade, and an unknown word has none.

    Example:
        >>> import pyarrow as pa
        >>> event = LogColumn("event", pa.string(), rows=9, values=("add_to_cart", "view", "purchase"))
        >>> grades_of(event)
        {'view': 0, 'add_to_cart': 1, 'purchase': 2}
    """
    if label.numeric and label.least >= 0 and label.most <= MOST_GRADES:
        return None
    if label.numeric:
        top = max(label.most, 1.0)
        return tuple(dict.fromkeys(float(f"{top * share:.2g}") for share in (0.001, 0.03, 0.3)))
    found = word_grades(label.values)
    known = sorted((grade, value) for value, grade in found.items() if grade is not None)
    return {
        value: found[value] for value in [*(value for _, value in known), *sorted({*found} - {v for _, v in known})]
    }
