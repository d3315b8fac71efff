"""The common parts of all relabelling steps: random draws, relevance grades as probabilities, counts of changes.

A random draw is a function of (seed, number of the step, key of the group, place of the document in the group), so it
depends neither on the layout of files nor on changes to other groups.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.config import Config
from ltrscale.data.dataset.split import PeriodTexts
from ltrscale.derive.rewrite import Floats, GroupBlock, Ints
from ltrscale.errors import InputError

Doubles = NDArray[np.float64]
Bits = NDArray[np.uint64]


class StepConfig(Config):
    """Base of all steps."""

    periods: PeriodTexts = ()
    """Periods, as in a split, to change; empty for all."""


class Changes(NamedTuple):
    """Counts of the groups and documents that a step changed, dropped and added; it passes on read + added - dropped.

    A changed group or document is passed on with another label or weight.
    """

    groups_changed: int = 0
    groups_dropped: int = 0
    groups_added: int = 0
    documents_changed: int = 0
    documents_dropped: int = 0
    documents_added: int = 0


Transform = Callable[[GroupBlock], Iterator[tuple[GroupBlock, Changes]]]
"""A step: maps a block to blocks, which may be empty, with their counts."""


def relevance_probability(relevance_N: Floats | Doubles, *, top: float) -> Doubles:
    """The probability that a user finds a document of this grade relevant, `(2^r - 1) / (2^top - 1)`.

    BUYL23, eq. 10, after Chapelle et al. (2009). NaN stays NaN.

    Raises:
        ValueError: top is not above 0.

    Example:
        >>> relevance_probability(np.array([0.0, 1.0, 4.0]), top=4).round(4).tolist()
        [0.0, 0.0667, 1.0]
    """
    if top <= 0:
        raise ValueError("the top grade must be above 0")
    return np.asarray((np.exp2(relevance_N, dtype=np.float64) - 1) / (2.0**top - 1))


def check_grades(block: GroupBlock, top: float) -> None:
    """Check that no label is above the top grade.

    Raises:
        InputError: a label is above the top grade.
    """
    labels_N = block.columns_N["labels"]
    highest = float(np.nanmax(labels_N, initial=0))
    if highest > top:
        query = block.rows_Q.column("query_id")[int(block.group_N[np.nanargmax(labels_N)])]
        raise InputError(
            f"query {query} of period {block.period}: label {highest:g} is above max_relevance {top:g}; raise it"
        )


def labelled(block: GroupBlock) -> NDArray[np.bool_]:
    """True for groups with labels, shape [Q]."""
    return block.present_Q("labels")


def maximum(values_N: NDArray[Any], offsets_Q1: Ints) -> NDArray[Any]:
    """The largest value of each group, shape [Q]; no group is empty."""
    return np.asarray(np.maximum.reduceat(values_N, offsets_Q1[:-1]))


def place_in_group(offsets_Q1: Ints, *sort_keys_N: NDArray[Any]) -> Ints:
    """The place of each document in its group, from 0, after sorting by keys; the first key is the primary one.

    Example:
        >>> place_in_group(np.array([0, 3, 4]), np.array([5.0, 1.0, 3.0, 2.0])).tolist()
        [2, 0, 1, 0]
    """
    lengths_Q = np.diff(offsets_Q1)
    group_N = np.repeat(np.arange(len(lengths_Q)), lengths_Q)
    order_N = np.lexsort((*reversed(sort_keys_N), group_N))
    place_N = np.empty(len(order_N), np.int64)
    place_N[order_N] = np.arange(len(order_N)) - np.repeat(offsets_Q1[:-1], lengths_Q)
    return place_N


def copies(block: GroupBlock, number: int, span: int) -> Iterator[GroupBlock]:
    """So many copies of all groups, as groups of their own; none of an empty block.

    Their `query_id` is the original's with `#1`, `#2` ... appended. The first copy has the keys of the originals. Each
    further one adds `span`, which is above all keys, so keys stay unique.
    """
    for copy in range(number if len(block) else 0):
        ids_Q = pc.binary_join_element_wise(block.rows_Q.column("query_id"), f"#{copy + 1}", "")
        rows_Q = block.rows_Q.set_column(block.rows_Q.schema.get_field_index("query_id"), "query_id", ids_Q)
        yield replace(block, keys_Q=block.keys_Q + copy * span, rows_Q=rows_Q)


def relabelled(block: GroupBlock, labels_N: Floats | Doubles) -> GroupBlock:
    """The groups with these labels; if a group has clicks, they become its labels above 0."""
    labels_N = labels_N.astype(np.float32)
    if "clicks" not in block.columns_N:
        return block.with_columns(labels=labels_N)
    clicked_N = np.where(np.isnan(labels_N), np.nan, labels_N > 0).astype(np.float32)
    clicks_N = np.where(block.on_documents(block.present_Q("clicks")), clicked_N, np.nan).astype(np.float32)
    return block.with_columns(labels=labels_N, clicks=clicks_N)


def changes(before: GroupBlock, after: GroupBlock) -> Changes:
    """Counts of the differences in labels and weights of the same documents."""
    different_N = np.zeros(before.n_documents, dtype=bool)
    for name in ("labels", "weights"):
        if name in after.columns_N:
            old_N, new_N = before.columns_N[name], after.columns_N[name]
            different_N |= (old_N != new_N) & ~(np.isnan(old_N) & np.isnan(new_N))
    groups = np.logical_or.reduceat(different_N, before.offsets_Q1[:-1]).sum()
    return Changes(groups_changed=int(groups), documents_changed=int(different_N.sum()))
