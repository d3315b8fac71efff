"""Label simulators: fewer labels, binary feedback, implicit feedback by selection, intent and interaction, and clicks.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from ltrscale.arrays import Bits, Bools, Doubles, Ints, maximum, place_in_group
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.derive.step import (
    NO_LABELS,
    Changed,
    Changes,
    LabelStep,
    StepStart,
    Transform,
    changed,
    check_grades,
    copies,
    labelled,
    relabelled,
)
from ltrscale.draws import open_uniforms, random_bits
from ltrscale.errors import InputError
from ltrscale.late import Late
from ltrscale.simulate.users import PositionBased, User, attraction, relevance_probability

special = Late("scipy.special")


class LabelledFraction(LabelStep):
    """Keep the labels of a fraction of the labelled groups (HOU24, crowdsourced labels)."""

    kind: Literal["labelled_fraction"] = "labelled_fraction"
    fraction: float = Field(gt=0, le=1)
    """Share of the labelled groups that keep their labels, over all periods together; at least one group does."""
    sample: Literal["random", "first"] = "random"
    """How to choose them: `random` draws uniformly; `first` takes the lowest gids, as HOU24's authors do."""

    def transform(self, start: StepStart) -> Transform:
        """Remove the labels of the others; an extra pass through the groups finds the last that keeps its labels."""
        ranks = [self.ranks(block, start.seed)[labelled(block)] for block in start.blocks()]
        ranks_Q = np.concatenate(ranks or [np.empty(0, np.uint64)])
        if not len(ranks_Q):
            raise InputError(NO_LABELS)
        last = np.uint64(_last_kept_rank(ranks_Q, self.fraction))

        def transform(block: GroupBlock) -> Changed:
            hidden_N = block.on_documents(self.ranks(block, start.seed) > last)
            labels_N = np.where(hidden_N, np.nan, block.columns_N["labels"])
            yield changed(block, block.with_columns(labels=labels_N.astype(np.float32)))

        return transform

    def ranks(self, block: GroupBlock, seed: int) -> Bits:
        """The rank by which groups are chosen to keep their labels, lowest first; unique for each group, shape [Q]."""
        if self.sample == "first":
            return block.keys_Q.astype(np.uint64)
        # A hash instead of a permutation, as in a split: groups stream past, and earlier steps may drop or copy some.
        return random_bits((seed, "labelled"), block.keys_Q)


class RelevantOnly(LabelStep):
    """Drop labelled groups without a label above 0; keep unlabelled groups."""

    kind: Literal["relevant_only"] = "relevant_only"
    renumbers: ClassVar = True

    def transform(self, start: StepStart) -> Transform:
        # The maximum of an unlabelled group is NaN, so "not <= 0" keeps it, which "> 0" would not.
        return _keeping(lambda block: ~(maximum(block.columns_N["labels"], block.offsets_Q1) <= 0))


class MinDocs(LabelStep):
    """Drop groups of few documents, labelled or not (public code of HOU24; SUN23, section 4)."""

    kind: Literal["min_docs"] = "min_docs"
    renumbers: ClassVar = True
    documents: int = Field(default=10, ge=2)
    """The fewest documents of a group that stays; HOU24's public code and SUN23 have 10."""

    def transform(self, start: StepStart) -> Transform:
        return _keeping(lambda block: block.lengths_Q >= self.documents)


class BinaryFeedback(LabelStep):
    """Binary labels; the higher the grade, the more probable is a 1 (HOU24, A.2.4)."""

    kind: Literal["binary_feedback"] = "binary_feedback"
    sharpness: float = Field(default=4.0, gt=0)
    """t in P(y = 1) = sigmoid(t (r - tau)): the larger t, the less random the labels."""
    tau: float = 4.5
    """Grade at which half of the documents get a 1; HOU24 uses 4.25, 4.5 and 5.1 for grades from 0 to 4."""
    unlabel_empty: bool = True
    """Whether a group without a 1 loses its labels; HOU24 counts only the other groups as labelled."""

    def transform(self, start: StepStart) -> Transform:
        def transform(block: GroupBlock) -> Changed:
            places, grades_N = (block.on_documents(block.keys_Q), block.index_N), block.columns_N["labels"]
            one_N, zero_N = (_gumbel(open_uniforms((start.seed, label), *places)) for label in ("one", "zero"))
            # t r + G1 > t tau + G0, which NaN never is
            positive_N = self.sharpness * grades_N.astype(np.float64) + one_N > self.sharpness * self.tau + zero_N
            keep_Q = labelled(block)
            if self.unlabel_empty:
                keep_Q &= maximum(positive_N, block.offsets_Q1)
            yield changed(block, relabelled(block, np.where(block.on_documents(keep_Q), positive_N, np.nan)))

        return transform


class ImplicitFeedback(LabelStep):
    """Label documents of sampled short lists as seen, clicked or bought, by user intent (BUYL23, 6.1)."""

    kind: Literal["implicit_feedback"] = "implicit_feedback"
    renumbers: ClassVar = True
    documents: int = Field(default=16, ge=1)
    """Documents of a sampled list (N_s); shorter lists are taken whole."""
    copies: int = Field(default=10, ge=1)
    """Lists sampled from each labelled list (N_b); they replace it."""
    conversion: float = Field(default=0.1, ge=0, le=1)
    """Among users willing to click, the share willing to buy (kappa)."""
    noise: float = Field(default=0.1, ge=0, le=1)
    """Probability of a click on an irrelevant document (epsilon)."""
    conversion_label: int = Field(default=2, ge=2)
    """Label of a conversion; a click has 1. BUYL23's text has 2, its public code 4, as a conversion matters more."""
    max_relevance: float | None = Field(default=None, gt=0)
    """The highest grade; by default the highest label in the data set."""

    def transform(self, start: StepStart) -> Transform:
        top = start.highest_grade(self.max_relevance)

        def transform(block: GroupBlock) -> Changed:
            check_grades(block, top)
            originals, unlabelled = block.keep(labelled(block)), block.keep(~labelled(block))
            yield unlabelled, Changes(groups_dropped=len(originals), documents_dropped=originals.n_documents)
            for copy in copies(originals, self.copies, start.span):
                draw_N = open_uniforms((start.seed, "select"), copy.on_documents(copy.keys_Q), copy.index_N)
                chosen = np.flatnonzero(place_in_group(copy.offsets_Q1, draw_N) < self.documents)
                sampled = copy.take(np.arange(len(copy)), chosen, np.minimum(copy.lengths_Q, self.documents))
                changed_block = relabelled(sampled, self._labels(sampled, start.seed, top))
                yield changed_block, Changes(groups_added=len(changed_block), documents_added=changed_block.n_documents)

        return transform

    def _labels(self, block: GroupBlock, seed: int, top: float) -> Doubles:
        rho_N = relevance_probability(block.columns_N["labels"], top=top)
        rho_Q = maximum(rho_N, block.offsets_Q1)
        intent_Q = _intents(open_uniforms((seed, "intent"), block.keys_Q), rho_Q, conversion=self.conversion)
        places = (block.on_documents(block.keys_Q), block.index_N)
        intent_N = block.on_documents(intent_Q)
        # BUYL23, eq. 12
        bought_N = (intent_N == 2) & (open_uniforms((seed, "buy"), *places) < rho_N)
        attracted_N = open_uniforms((seed, "click"), *places) < self.noise + (1 - self.noise) * rho_N
        clicked_N = (intent_N >= 1) & attracted_N
        return np.where(bought_N, self.conversion_label, clicked_N).astype(np.float64)

    @property
    def lists(self) -> int:
        return self.copies


def _last_kept_rank(ranks_Q: Bits, fraction: float) -> int:
    """The rank of the last of `max(1, round(fraction * Q))` groups."""
    keep = max(1, round(fraction * len(ranks_Q)))
    return int(np.partition(ranks_Q, keep - 1)[keep - 1])


def _keeping(chosen: Callable[[GroupBlock], Bools]) -> Transform:
    """Keep the groups that a function chooses, and count the others."""

    def transform(block: GroupBlock) -> Changed:
        kept = block.keep(chosen(block))
        dropped = len(block) - len(kept)
        yield kept, Changes(groups_dropped=dropped, documents_dropped=block.n_documents - kept.n_documents)

    return transform


def _gumbel(uniform_N: Doubles) -> Doubles:
    """Standard Gumbel numbers `-log(-log u)` from uniform numbers u."""
    return -np.log(-np.log(uniform_N))


def _intents(uniform_Q: Doubles, rho_Q: Doubles, *, conversion: float) -> Ints:
    """The strongest action that each user is willing to take: 0 look, 1 click, 2 buy, by the list's best document."""
    # P(T = 0, 1, 2) = 1 - rho, (1 - kappa) rho, kappa rho (BUYL23, eq. 11), with kappa the conversion; the printed
    # thresholds of Alg. 1 never give T = 1 for small rho
    return (uniform_Q >= 1 - rho_Q).astype(np.int64) + (uniform_Q >= 1 - conversion * rho_Q)


class Clicks(LabelStep):
    """Simulate clicks on a shown ranking: they become the labels and `clicks`; places become `positions`."""

    kind: Literal["clicks"] = "clicks"
    columns: ClassVar = ("positions", "clicks")
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
        feature = None if self.feature is None else start.feature(self.feature)
        top = start.highest_grade(self.max_relevance)

        def shown(block: GroupBlock) -> tuple[GroupBlock, Changes]:
            labelled_N = block.on_documents(labelled(block))
            positions_N = self.shown_at(block, start.seed, feature)
            rho_N = relevance_probability(block.columns_N["labels"], top=top)
            draw_N = open_uniforms((start.seed, "click"), block.on_documents(block.keys_Q), block.index_N)
            clicked_N = self.user.clicks(draw_N, attraction(rho_N, noise=self.noise), positions_N, block.offsets_Q1)
            labels_N = np.where(labelled_N, clicked_N, np.nan).astype(np.float32)
            shown_N = np.where(labelled_N, positions_N, block.columns_N["positions"]).astype(np.float32)
            return changed(block, relabelled(block, labels_N).with_columns(clicks=labels_N, positions=shown_N))

        def transform(block: GroupBlock) -> Changed:
            check_grades(block, top)
            if self.copies == 1:
                yield shown(block)
                return
            originals, unlabelled = block.keep(labelled(block)), block.keep(~labelled(block))
            if len(unlabelled):
                yield shown(unlabelled)
            nothing = block.keep(np.zeros(len(block), np.bool_))
            yield nothing, Changes(groups_dropped=len(originals), documents_dropped=originals.n_documents)
            for copy in copies(originals, self.copies, start.span):
                yield shown(copy)[0], Changes(groups_added=len(copy), documents_added=copy.n_documents)

        return transform

    def shown_at(self, block: GroupBlock, seed: int, feature: int | None) -> Doubles:
        """The position at which each document is shown; NaN for documents that are not shown."""
        if self.ranking == "positions":
            check_shown_positions(block, "prepare it with positions, or set ranking to random or feature")
            positions_N = block.columns_N["positions"].astype(np.float64)
        else:
            sort_keys = [open_uniforms((seed, "ranking"), block.on_documents(block.keys_Q), block.index_N)]
            if feature is not None:
                sort_keys.insert(0, -block.features_NF[:, feature].astype(np.float64))  # numpy sorts NaN last
            positions_N = (place_in_group(block.offsets_Q1, *sort_keys) + 1).astype(np.float64)
        if self.jitter:
            noise_N = special.ndtri(open_uniforms((seed, "jitter"), block.on_documents(block.keys_Q), block.index_N))
            moved_N = (place_in_group(block.offsets_Q1, positions_N + self.jitter * noise_N) + 1).astype(np.float64)
            positions_N = np.where(np.isnan(positions_N), np.nan, moved_N)
        return positions_N if self.depth is None else np.where(positions_N <= self.depth, positions_N, np.nan)

    @property
    def lists(self) -> int:
        return self.copies


def check_shown_positions(block: GroupBlock, remedy: str) -> None:
    """Refuse, with an InputError, labelled groups without positions, or with positions that do not count from 1."""
    bad_Q = labelled(block) & ~block.present_Q("positions")
    if bad_Q.any():
        query = block.rows_Q.column("query_id")[int(bad_Q.argmax())]
        raise InputError(f"query {query} of period {block.period} has no positions; {remedy}")
    low_N = block.columns_N["positions"] < 1
    if low_N.any():
        query = block.rows_Q.column("query_id")[int(block.group_N[low_N.argmax()])]
        raise InputError(f"query {query} of period {block.period} has a position below 1; count positions from 1")
