"""Click simulators: a user sees a ranking of the documents and clicks on some, position by position.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.special import ndtri

from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature
from ltrscale.derive.relabelling.step import (
    Changes,
    Doubles,
    StepConfig,
    Transform,
    changes,
    check_grades,
    copies,
    labelled,
    place_in_group,
    relabelled,
    relevance_probability,
)
from ltrscale.derive.rewrite import GroupBlock, Ints
from ltrscale.draws import open_uniforms
from ltrscale.errors import InputError, nearest


class PositionBased(Config):
    """A position is examined with probability (1 / position)^eta, whatever clicks are above it (PBM)."""

    kind: Literal["pbm"] = "pbm"
    eta: float = Field(default=1.0, ge=0)
    """Strength of the position bias; 0 for none."""
    trust: float = Field(default=0.0, ge=0, le=1)
    """Probability of a click on the first document, if it is examined, just because it is first; trust / position
    further down (trust bias, Agarwal et al. 2019)."""

    @property
    def assumed_eta(self) -> float:
        """The position bias that debiased credit assumes of these users."""
        return self.eta


class Cascade(Config):
    """Positions are examined from the top; the first click ends the session (Craswell et al., 2008)."""

    kind: Literal["cascade"] = "cascade"

    @property
    def assumed_eta(self) -> float:
        """The position bias that debiased credit assumes of these users, to whom no power of the position is true."""
        return 1.0


User = Annotated[PositionBased | Cascade, Field(discriminator="kind")]


class Clicks(StepConfig):
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


def feature_number(features: Sequence[Feature], name: str) -> int:
    """The column of a feature.

    Raises:
        InputError: no feature has this name; names the nearest one.
    """
    names = [feature.name for feature in features]
    if name not in names:
        raise InputError(f"there is no feature {name!r}; the nearest name is {nearest(name, names)!r}")
    return names.index(name)


def check_positions(block: GroupBlock, remedy: str) -> None:
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


def examination(positions_N: Doubles, *, eta: float) -> Doubles:
    """The probability that a position is examined, `(1 / position)^eta`; 0 without a position.

    Example:
        >>> examination(np.array([1.0, 2.0, np.nan]), eta=1.0).tolist()
        [1.0, 0.5, 0.0]
    """
    return np.where(np.isnan(positions_N), 0.0, positions_N**-eta)


def attraction(rho_N: Doubles, *, noise: float) -> Doubles:
    """The probability of a click on an examined document, `epsilon + (1 - epsilon) rho` (Ai et al., 2018)."""
    return noise + (1 - noise) * rho_N


def first_attracted(attracted_N: NDArray[np.bool_], positions_N: Doubles, offsets_Q1: Ints) -> NDArray[np.bool_]:
    """The documents that the cascade model clicks: in each group, the attracted one at the highest position.

    Example:
        >>> attracted = np.array([True, True, False, True])
        >>> first_attracted(attracted, np.array([3.0, 2.0, 1.0, np.nan]), np.array([0, 3, 4])).tolist()
        [False, True, False, False]
    """
    candidate_N = attracted_N & ~np.isnan(positions_N)
    return np.asarray(candidate_N & (place_in_group(offsets_Q1, ~candidate_N, positions_N) == 0))


def draw_clicks(
    user: User, draw_N: Doubles, attraction_N: Doubles, positions_N: Doubles, offsets_Q1: Ints
) -> NDArray[np.bool_]:
    """The documents that a user clicks, shape [N].

    Args:
        user: how the user examines a list.
        draw_N: a uniform number for each document.
        attraction_N: the probability of a click on each document if it is examined.
        positions_N: positions from 1; NaN for documents that are not shown.
        offsets_Q1: offsets of the groups.

    Example:
        >>> shown = np.array([1.0, 2.0, np.nan])
        >>> draw_clicks(PositionBased(), np.full(3, 0.4), np.full(3, 0.7), shown, np.array([0, 3])).tolist()
        [True, False, False]
    """
    match user:
        case PositionBased(eta=eta, trust=trust):
            trusted_N = trust * examination(positions_N, eta=1.0)
            perceived_N = trusted_N + (1 - trusted_N) * attraction_N
            return np.asarray(draw_N < perceived_N * examination(positions_N, eta=eta))
        case Cascade():
            return first_attracted(draw_N < attraction_N, positions_N, offsets_Q1)


def shown_positions(step: Clicks, block: GroupBlock, seed: int, feature: int | None) -> Doubles:
    """The position at which each document is shown; NaN for documents that are not shown."""
    if step.ranking == "positions":
        check_positions(block, "prepare it with positions, or set ranking to random or feature")
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
        clicked_N = draw_clicks(step.user, draw_N, attraction(rho_N, noise=step.noise), positions_N, block.offsets_Q1)
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
