"""Scores the columns of a log as labels and finds other outcomes of a list, by structure and by names in ten languages.

User actions are 0 for most rows of a list, differ between lists for the same item, and are rarer further down the list.
They are nested: what was bought had been put into the cart, and what was put there had been clicked.

Shapes: N rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ltrscale.ingest import names
from ltrscale.ingest.grades import MOST_GRADES, are_grades, word_grades
from ltrscale.ingest.profile import LogColumn
from ltrscale.ingest.roles import (
    Candidate,
    Scores,
    candidates,
    has_pattern,
    is_label,
    looks_like_time,
    names_one,
)
from ltrscale.ingest.structure import Structure

_RARE = 0.02
_NESTED = 24
"""The most columns without a label's name to compare with each other."""
_OF_ITEM = 0.9
"""Share of an item's rows above which a column is a property of the item."""
_FEWEST = 20
"""The fewest rows above 0 of a column that is compared with others."""
_SURELY = -3.0
"""Deviations by which rows above 0 are further up than the other rows."""


@dataclass(frozen=True)
class Beside:
    """The context of a column: the list's other roles, and the columns that are above 0 in some rows only."""

    query: LogColumn
    item: LogColumn | None
    positions: LogColumn | None
    above: Mapping[str, NDArray[np.bool_]]


def labels(
    columns: Sequence[LogColumn],
    query: LogColumn,
    seen: Structure,
    item: LogColumn | None,
    positions: LogColumn | None = None,
) -> list[Candidate]:
    """The candidates for the label column."""
    fits = [column for column in columns if column.name in seen and not looks_like_time(column)]
    fits = [column for column in fits if column.distinct > 1 or (column.distinct == 1 and column.missing > 0)]
    fits = [column for column in fits if column.numeric or column.distinct <= MOST_GRADES]
    fits = [column for column in fits if not names_one(column)]
    beside = Beside(query, item, positions, _above(fits, seen, item))
    return candidates("a label", fits, lambda column: _points(column, beside, seen))


def may_be_named(column: LogColumn) -> bool:
    """True if a column has few values and a name that labels and features share."""
    return has_pattern(column, names.PERHAPS) and column.distinct <= MOST_GRADES


def is_flag(column: LogColumn, query: LogColumn, seen: Structure, item: LogColumn | None) -> bool:
    """True if a column is 0 or 1 (or yes and no), varies within lists and is not a property of the item."""
    if column.distinct != 2 or column.name not in seen:
        return False
    values_N = amounts(column, seen)
    if {*np.unique(values_N[~np.isnan(values_N)]).tolist()} != {0.0, 1.0}:
        return False
    return seen.lists(query.name).constant(seen.codes[column.name]) < 1.0 and not _of_item(values_N > 0, seen, item)


def amounts(column: LogColumn, seen: Structure) -> NDArray[np.float64]:
    """A column as numbers, by row (words as their grades); NaN if there is no number."""
    if column.numeric:
        return seen.numbers(column.name)
    texts = [str(value) for value in seen.values[column.name].to_pylist()]
    grades = word_grades(texts)
    values_V = [np.nan if (grade := grades[text]) is None else grade for text in texts]
    return np.array([*values_V, np.nan])[seen.codes[column.name]]


def _above(columns: Sequence[LogColumn], seen: Structure, item: LogColumn | None) -> dict[str, NDArray[np.bool_]]:
    """Masks of rows above 0, for columns that are above 0 in some rows only and are not a property of the item."""
    above: dict[str, NDArray[np.bool_]] = {}
    quantities = [column for column in columns if column.numeric and column.least >= 0]
    words = [column for column in columns if not column.numeric]
    for column in [each for each in (*quantities, *words) if not each.numeric or each.least == 0 or each.distinct == 1]:
        if len(above) == _NESTED:
            break
        above_N = amounts(column, seen) > 0
        if above_N.sum() >= _FEWEST and above_N.mean() < 0.5 and not _of_item(above_N, seen, item):
            above[column.name] = above_N
    return above


def _of_item(above_N: NDArray[np.bool_], seen: Structure, item: LogColumn | None) -> bool:
    """True if each item is above 0 in all of its rows or in none."""
    if item is None or item.name not in seen:
        return False
    alike = seen.lists(item.name).alike(above_N)
    return alike is not None and alike > _OF_ITEM


def _points(column: LogColumn, beside: Beside, seen: Structure) -> Scores:
    named, perhaps = names.label_points(column.name), may_be_named(column)
    yield (
        (named, "the name of a label")
        if named
        else (3.0, "perhaps the name of a label")
        if perhaps
        else (-2.0, "no name of a label")
    )
    lists = seen.lists(beside.query.name)
    values_N = amounts(column, seen)
    above_N = values_N > (0.0 if column.distinct <= 1 else np.nanmin(values_N, initial=np.inf))
    varies = 1.0 - lists.constant(seen.codes[column.name])
    yield (-3.0, "the same in every list") if not varies else (1.0, f"differs within {varies:.0%} of the lists")
    few, own = column.distinct <= MOST_GRADES, _of_item(above_N, seen, beside.item)
    if not column.numeric and beside.item is not None and beside.item.name in seen:
        own = own or seen.decides(beside.item.name, column.name)
    if own and not named:
        yield -5.0, "the same for an item in every list"
    if are_grades(column.values) and few and not column.numeric and not own:
        yield 4.0, "words that grade, or that say what users do"
    if not column.numeric and np.isnan(values_N).all():
        yield -2.0, "words that do not grade"
        return
    if not few:
        return
    with_one = float((lists.having(above_N) > 0).mean())
    if with_one < _RARE and (lists.having(above_N) > 0).sum() < 500:
        yield -2.0, f"above 0 in {with_one:.1%} of the lists only"
    if not named and not own:
        yield from _structure(column, above_N, beside, seen, with_one)


def _structure(
    column: LogColumn, above_N: NDArray[np.bool_], beside: Beside, seen: Structure, with_one: float
) -> Scores:
    """The structural evidence that a column is a label, whatever its name."""
    lists = seen.lists(beside.query.name)
    if column.distinct <= 2 and with_one > 0.2 and (lists.having(above_N) <= 1).mean() > 0.95:
        yield 3.5, "one row a list at most"
    if column.name not in beside.above:
        return
    yield 1.0, f"0 in {1 - above_N.mean():.0%} of the rows"
    if beside.item is not None and (alike := seen.lists(beside.item.name).alike(above_N)) is not None:
        yield 0.5, f"above 0 in {alike:.0%} of the rows of an item that is so once"
    others = {name: other_N for name, other_N in beside.above.items() if name != column.name}
    around = [name for name, other_N in others.items() if inside(above_N, other_N)]
    within = [name for name, other_N in others.items() if inside(other_N, above_N)]
    if around:
        yield 2.5 + min(2.0, 0.5 * len(around)), f"above 0 only where {around[0]} is"
    elif within:
        yield 2.0, f"above 0 wherever {within[0]} is"
    if beside.positions is not None and (deviations := _height(above_N, beside, seen)) < _SURELY:
        yield 1.5, f"comes less often down the list ({-deviations:.0f} deviations)"


def inside(part_N: NDArray[np.bool_], whole_N: NDArray[np.bool_]) -> bool:
    """True if a column is above 0 only where another, more frequent one is."""
    return bool(part_N.sum() < 0.9 * whole_N.sum() and (part_N & whole_N).sum() >= 0.99 * part_N.sum())


def _height(above_N: NDArray[np.bool_], beside: Beside, seen: Structure) -> float:
    """How many deviations below the mean place of their lists the rows above 0 are, on average."""
    assert beside.positions is not None
    lists = seen.lists(beside.query.name)
    places_L, above_L = seen.numbers(beside.positions.name)[lists.rows_L], above_N[lists.rows_L]
    list_L = np.cumsum(np.isin(np.arange(len(places_L)), lists.starts_Q)) - 1
    known_L = ~np.isnan(places_L)
    places, above, groups = places_L[known_L], above_L[known_L], list_L[known_L]
    n_Q = np.maximum(np.bincount(groups), 1)
    mean_Q = np.bincount(groups, places) / n_Q
    variance_Q = np.bincount(groups, places**2) / n_Q - mean_Q**2
    deviation = np.sqrt(variance_Q[groups][above].sum())
    return float((places - mean_Q[groups])[above].sum() / deviation) if deviation > 0 else 0.0


def outcomes(
    remaining: Mapping[str, LogColumn], label: LogColumn | None, seen: Structure, item: LogColumn | None
) -> dict[str, str]:
    """The columns that say what happened after a list was shown, with the reason."""
    found = dict.fromkeys(
        (name for name, each in remaining.items() if is_label(each)),
        "another label: it would give the answer away",
    )
    if label is None or label.name not in seen:
        return found
    values_N = amounts(label, seen)
    known_N, label_N = ~np.isnan(values_N), values_N > 0
    rare = known_N.any() and label_N[known_N].mean() < 0.5  # a count with few zeros is not enough
    for name, column in remaining.items() if rare else ():
        quantity = column.numeric and name in seen and column.least >= 0 and not names_one(column)
        if not quantity or name in found:
            continue
        above_N = seen.numbers(name) > 0
        if follows(above_N, label_N, known_N):
            found[name] = f"0 wherever {label.name} is 0: it would give the answer away"
            continue
        few = column.distinct <= MOST_GRADES and above_N.mean() < 0.5 and label_N.sum() >= _FEWEST
        if few and follows(label_N, above_N, known_N) and not _of_item(above_N, seen, item):
            found[name] = f"above 0 wherever {label.name} is: it would give the answer away"
    return found


def follows(part_N: NDArray[np.bool_], whole_N: NDArray[np.bool_], known_N: NDArray[np.bool_]) -> bool:
    """True if, in the known rows, something holds only where another thing does."""
    part_N = part_N & known_N
    return bool(part_N.any() and (part_N & whole_N).sum() >= 0.99 * part_N.sum())


def gain_of(remaining: Mapping[str, LogColumn], label: LogColumn | None, seen: Structure) -> LogColumn | None:
    """The column of what a document brought, by its name; it must be 0 where the label is 0."""
    if label is None:
        return None
    worth = [each for each in remaining.values() if has_pattern(each, names.WORTH) and is_label(each)]
    worth = [each for each in worth if each.numeric and each.least >= 0 and each.name in seen and not each.lacking]
    if label.numeric:
        label_N = seen.numbers(label.name)
        known_N = ~np.isnan(label_N)
        worth = [each for each in worth if follows(seen.numbers(each.name) > 0, label_N > 0, known_N)]
    return worth[0] if worth else None
