"""Click simulators: a user sees a ranking of the documents and clicks on some, position by position.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from pydantic import Field, model_validator
from scipy.special import ndtri

from ltrscale.arrays import Doubles
from ltrscale.derive.relabelling.step import (
    Changes,
    RelabelStep,
    StepStart,
    Transform,
    changes,
    check_grades,
    copies,
    labelled,
    relabelled,
)
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.draws import open_uniforms
from ltrscale.errors import InputError
from ltrscale.simulate.ragged import place_in_group
from ltrscale.simulate.users import PositionBased, User, attraction, relevance_probability


class Clicks(RelabelStep):
    """Simulate clicks on a shown ranking: they become the labels and `clicks`; places become `positions`."""

    kind: Literal["clicks"] = "clicks"
    user: User = PositionBased()
    """Model of how a user examines the ranking."""
    noise: float = Field(default=0.1, ge=0, le=1)
    """Probability of a click on an examined but irrelevant document (epsilon)."""
    ranking: Literal["positions", "random", "feature"] = "positions"
    """The ranking to show: by the data set's `positions`, random, or by a feature."""
    feature: str | None = None
    """Name of that feature; the highest value comes first, missing ones last, ties at random."""
    copies: int = Field(default=1, ge=1)
    """Impressions of each labelled group. Several replace it, with `#1`, `#2` and so on after the `query_id`."""
    jitter: float = Field(default=0.0, ge=0)
    """Standard deviation, in positions, of normal noise by which each document moves before it is shown; without it
    all copies of a group that is ranked by positions or a feature show the same list."""
    depth: int | None = Field(default=None, ge=1)
    """Number of positions to show; documents below get no click and no position. Empty for all."""
    max_relevance: float | None = Field(default=None, gt=0)
    """The highest grade; by default the highest label in the data set."""

    @model_validator(mode="after")
    def _check(self) -> "Clicks":
        if (self.ranking == "feature") != (self.feature is not None):
            raise ValueError("ranking: feature and a feature's name belong together; give both or neither")
        return self

    def transform(self, start: StepStart) -> Transform:
        """See `clicks`."""
        number = None if self.feature is None else start.feature(self.feature)
        return clicks(self, start.seed, top=start.highest_grade(self.max_relevance), feature=number, span=start.span)

    @property
    def fills(self) -> frozenset[str]:
        """Where a document is shown, and what is clicked."""
        return frozenset({"positions", "clicks"})

    @property
    def changes_groups(self) -> bool:
        """Adds them if there are several copies."""
        return self.copies > 1

    @property
    def lists(self) -> int:
        """The copies."""
        return self.copies


def check_shown_positions(block: GroupBlock, remedy: str) -> None:
    """Check that every labelled group has positions, and that they count from 1.

    Raises:
        InputError: a group fails the check; names the query and the remedy.
    """
    bad_Q = labelled(block) & ~block.present_Q("positions")
    if bad_Q.any():
        query = block.rows_Q.column("query_id")[int(bad_Q.argmax())]
        raise InputError(f"query {query} of period {block.period} has no positions; {remedy}")
    low_N = block.columns_N["positions"] < 1
    if low_N.any():
        query = block.rows_Q.column("query_id")[int(block.group_N[low_N.argmax()])]
        raise InputError(f"query {query} of period {block.period} has a position below 1; count positions from 1")


def shown_positions(step: Clicks, block: GroupBlock, seed: int, feature: int | None) -> Doubles:
    """The position at which each document is shown; NaN for documents that are not shown."""
    if step.ranking == "positions":
        check_shown_positions(block, "prepare it with positions, or set ranking to random or feature")
        positions_N = block.columns_N["positions"].astype(np.float64)
    else:
        sort_keys = [open_uniforms((seed, "ranking"), block.on_documents(block.keys_Q), block.index_N)]
        if feature is not None:
            sort_keys.insert(0, -block.features_NF[:, feature].astype(np.float64))  # numpy sorts NaN last
        positions_N = (place_in_group(block.offsets_Q1, *sort_keys) + 1).astype(np.float64)
    if step.jitter:
        noise_N = ndtri(open_uniforms((seed, "jitter"), block.on_documents(block.keys_Q), block.index_N))
        moved_N = (place_in_group(block.offsets_Q1, positions_N + step.jitter * noise_N) + 1).astype(np.float64)
        positions_N = np.where(np.isnan(positions_N), np.nan, moved_N)
    return positions_N if step.depth is None else np.where(positions_N <= step.depth, positions_N, np.nan)


def clicks(step: Clicks, seed: int, *, top: float, feature: int | None, span: int) -> Transform:
    """Replace the labels of labelled groups by clicks; several copies replace the group itself (see `step.copies`)."""

    def shown(block: GroupBlock) -> tuple[GroupBlock, Changes]:
        labelled_N = block.on_documents(labelled(block))
        positions_N = shown_positions(step, block, seed, feature)
        rho_N = relevance_probability(block.columns_N["labels"], top=top)
        draw_N = open_uniforms((seed, "click"), block.on_documents(block.keys_Q), block.index_N)
        clicked_N = step.user.clicks(draw_N, attraction(rho_N, noise=step.noise), positions_N, block.offsets_Q1)
        labels_N = np.where(labelled_N, clicked_N, np.nan).astype(np.float32)
        shown_N = np.where(labelled_N, positions_N, block.columns_N["positions"]).astype(np.float32)
        after = relabelled(block, labels_N).with_columns(clicks=labels_N, positions=shown_N)
        return after, changes(block, after)

    def transform(block: GroupBlock) -> Iterator[tuple[GroupBlock, Changes]]:
        check_grades(block, top)
        if step.copies == 1:
            yield shown(block)
            return
        originals, others = block.keep(labelled(block)), block.keep(~labelled(block))
        if len(others):
            yield shown(others)
        yield (
            block.keep(np.zeros(len(block), np.bool_)),
            Changes(groups_dropped=len(originals), documents_dropped=originals.n_documents),
        )
        for copy in copies(originals, step.copies, span):
            yield shown(copy)[0], Changes(groups_added=len(copy), documents_added=copy.n_documents)

    return transform
