"""Lists as a click log shows them: the documents that were shown, and their order by clicks and a feature (SUN23).

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ltrscale.arrays import Doubles, Ints
from ltrscale.derive.relabelling.cleaning import clicks_of, was_shown
from ltrscale.derive.relabelling.step import Changes, RelabelStep, StepStart, Transform, changes, labelled
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.simulate.ragged import place_in_group


class ShownOnly(RelabelStep):
    """Drop the documents of labelled groups that were not shown: a click log has only those that were."""

    kind: Literal["shown_only"] = "shown_only"

    def transform(self, start: StepStart) -> Transform:  # noqa: ARG002
        """See `shown_only`."""
        return shown_only()


class ClickOrder(RelabelStep):
    """Labels that order a list: clicked documents first, then the others, each by a feature (SUN23, section 2.2)."""

    kind: Literal["click_order"] = "click_order"
    feature: str
    """Name of the feature, for example the one that holds BM25."""

    def transform(self, start: StepStart) -> Transform:
        """See `click_order`."""
        return click_order(feature=start.feature(self.feature))

    @property
    def fills(self) -> frozenset[str]:
        """The clicks that the labels were."""
        return frozenset({"clicks"})


def shown_only() -> Transform:
    """Drop documents without a position from the labelled groups that have positions."""

    def transform(block: GroupBlock) -> Iterator[tuple[GroupBlock, Changes]]:
        keep_N = was_shown(block) | ~block.on_documents(labelled(block))
        lengths_Q = np.add.reduceat(keep_N, block.offsets_Q1[:-1], dtype=np.int64)
        after = block.take(np.arange(len(block)), np.flatnonzero(keep_N), lengths_Q)
        shorter = int((lengths_Q < block.lengths_Q).sum())
        yield after, Changes(groups_changed=shorter, documents_dropped=block.n_documents - after.n_documents)

    return transform


def order_labels(
    clicks_N: NDArray[np.bool_], feature_N: Doubles, offsets_Q1: Ints, *, shown_N: NDArray[np.bool_]
) -> Ints:
    """The order of each list as labels, of which only the order matters.

    A document that was shown has 1 plus the number of shown documents of its list that are below it: not clicked where
    it is, or alike and with a lower value of the feature. One that was not shown, such as a random negative, has 0, so
    it is below all others. Documents that are alike have equal labels.

    Args:
        clicks_N: whether each document was clicked.
        feature_N: value of the feature; a missing value (NaN) is below all others.
        offsets_Q1: offsets of the groups.
        shown_N: whether each document was shown.

    Example:
        >>> clicked, shown = np.array([False, True, False, False]), np.array([True, True, True, False])
        >>> order_labels(clicked, np.array([5.0, 1.0, 7.0, 9.0]), np.array([0, 4]), shown_N=shown).tolist()
        [1, 3, 2, 0]
    """
    keys = (shown_N, clicks_N & shown_N, np.where(shown_N & ~np.isnan(feature_N), feature_N, -np.inf))
    place_N = place_in_group(offsets_Q1, *keys)
    first_N = np.repeat(offsets_Q1[:-1], np.diff(offsets_Q1))
    order_N = np.empty(len(place_N), np.int64)
    order_N[first_N + place_N] = np.arange(len(place_N))
    # In that order, equal documents are neighbours: each takes the place of the first of them.
    new_N = np.ones(len(place_N), dtype=bool)
    new_N[1:] = np.any([key[order_N][1:] != key[order_N][:-1] for key in keys], axis=0)
    new_N[offsets_Q1[:-1]] = True
    starts_N = np.maximum.accumulate(np.where(new_N, np.arange(len(place_N)), 0))
    tied_N = np.empty(len(place_N), np.int64)
    tied_N[order_N] = starts_N
    unseen_Q = np.add.reduceat(~shown_N, offsets_Q1[:-1], dtype=np.int64)
    return np.where(shown_N, 1 + tied_N - first_N - np.repeat(unseen_Q, np.diff(offsets_Q1)), 0)


def click_order(*, feature: int) -> Transform:
    """Replace the labels by the order of their list, and keep the clicks in the column `clicks`."""

    def transform(block: GroupBlock) -> Iterator[tuple[GroupBlock, Changes]]:
        clicks_N, labelled_N = clicks_of(block), block.on_documents(labelled(block))
        labels_N = order_labels(
            clicks_N > 0, block.features_NF[:, feature].astype(np.float64), block.offsets_Q1, shown_N=was_shown(block)
        )
        after = block.with_columns(
            labels=np.where(labelled_N, labels_N, np.nan).astype(np.float32),
            clicks=np.where(labelled_N, clicks_N, block.columns_N["clicks"]).astype(np.float32),
        )
        yield after, changes(block, after)

    return transform
