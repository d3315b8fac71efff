"""Cleaning of clicks before training (SUN23): propensity weights, refined labels, random negatives, orders of lists.

The clicks of a group are its column `clicks` or, without that column, its labels above 0. Groups without labels do not
change.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, P positions, M drawn documents, C candidates to draw.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from ltrscale.arrays import Bools, Doubles, Floats, Ints, maximum, place_in_group, softmax_by_group
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.derive.feedback import check_shown_positions
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.derive.step import Changed, Changes, LabelStep, RelabelStep, StepStart, Transform, changed, labelled
from ltrscale.draws import open_uniforms
from ltrscale.errors import InputError
from ltrscale.progress import log

_NO_POSITIONS = "prepare it with positions, or simulate clicks before"


class ClickRatioWeights(LabelStep):
    """Inverse propensity weights from the click ratio of each position (SUN23, eq. 2)."""

    kind: Literal["click_ratio_weights"] = "click_ratio_weights"
    columns: ClassVar = ("positions", "weights")
    alpha: float = Field(default=0.25, ge=0)
    """Exponent of (cr_1 / cr_i); 0 for equal weights."""
    depth: int = Field(default=10, ge=1)
    """Positions with their own weight; documents further down share the last one."""

    def transform(self, start: StepStart) -> Transform:
        """Weigh each document by its position; an extra pass through the groups counts clicks."""
        weights_P = _propensity_weights(_shown_click_ratios(start.blocks(), self.depth), alpha=self.alpha)
        log.info("relabel: weights by position: %s", " ".join(f"{weight:.3f}" for weight in weights_P))
        return _weighing(weights_P)

    def check_after(self, before: Sequence[RelabelStep]) -> None:
        if any(isinstance(step, RandomNegatives) and step.replace_unseen for step in before):
            raise ValueError(
                "random_negatives takes documents without a click out of the click ratios; "
                "put click_ratio_weights before it"
            )


class Refine(LabelStep):
    """Labels from clicks and a well-performing feature, as a distribution over the shown documents (SUN23, 2.2)."""

    kind: Literal["refine"] = "refine"
    columns: ClassVar = ("clicks",)
    feature: str
    """Name of the feature, for example the one that holds BM25."""
    delta: float = 2.0
    """Amount that a click adds to the feature."""
    temperature: float = Field(default=0.1, gt=0)
    """Temperature of the softmax."""
    scale: Literal["standard", "none"] = "standard"
    """`standard` first divides the feature by its standard deviation over the data set; `none` does not."""

    def transform(self, start: StepStart) -> Transform:
        feature = start.feature(self.feature)
        scale = _deviation(start.dataset, feature) if self.scale == "standard" else 1.0

        def transform(block: GroupBlock) -> Changed:
            clicks_N = _clicks_of(block)
            labels_N = _refined_labels(
                clicks_N > 0,
                block.features_NF[:, feature].astype(np.float64) / scale,
                block.offsets_Q1,
                delta=self.delta,
                temperature=self.temperature,
                shown_N=_was_shown(block),
            )
            yield changed(block, _with_clicks(block, labels_N, clicks_N))

        return transform


class RandomNegatives(LabelStep):
    """Random documents of other queries as negatives; they replace the documents after the last click (SUN23, 2.2)."""

    kind: Literal["random_negatives"] = "random_negatives"
    replace_unseen: bool = True
    """Whether to replace the documents shown after the last click, in groups with a click."""
    extra: int = Field(default=0, ge=0)
    """Number of further negatives to append to every labelled group."""

    def transform(self, start: StepStart) -> Transform:
        """Put documents of other groups of the block into labelled groups, with label and relevance 0.

        They were not shown, so they have no position, and weight 1 if the group has weights.
        """

        def transform(block: GroupBlock) -> Changed:
            labelled_Q = labelled(block)
            replaced_N = np.zeros(block.n_documents, dtype=bool)
            if self.replace_unseen:
                check_shown_positions(block, _NO_POSITIONS)
                replaced_N = _unseen(_clicks_of(block), block.columns_N["positions"], block.offsets_Q1)
                replaced_N &= block.on_documents(labelled_Q)
            replaced_Q = np.add.reduceat(replaced_N, block.offsets_Q1[:-1], dtype=np.int64)
            extra_Q = labelled_Q * self.extra
            drawn_M = _draw_others(block, replaced_Q + extra_Q, start.seed)
            changed_block = _with_negatives(block, replaced_N, extra_Q, drawn_M)
            groups = int((replaced_Q + extra_Q > 0).sum())
            replaced, added = int(replaced_N.sum()), len(drawn_M)
            yield changed_block, Changes(groups_changed=groups, documents_dropped=replaced, documents_added=added)

        return transform

    @property
    def fills(self) -> frozenset[str]:
        return frozenset({"positions"} if self.replace_unseen else ())


class ShownOnly(LabelStep):
    """Drop the documents of labelled groups that were not shown: a click log has only those that were."""

    kind: Literal["shown_only"] = "shown_only"

    def transform(self, start: StepStart) -> Transform:
        def transform(block: GroupBlock) -> Changed:
            keep_N = _was_shown(block) | ~block.on_documents(labelled(block))
            lengths_Q = np.add.reduceat(keep_N, block.offsets_Q1[:-1], dtype=np.int64)
            changed_block = block.take(np.arange(len(block)), np.flatnonzero(keep_N), lengths_Q)
            shorter = int((lengths_Q < block.lengths_Q).sum())
            yield (
                changed_block,
                Changes(groups_changed=shorter, documents_dropped=block.n_documents - changed_block.n_documents),
            )

        return transform


class ClickOrder(LabelStep):
    """Labels that order a list: clicked documents first, then the others, each by a feature (SUN23, section 2.2)."""

    kind: Literal["click_order"] = "click_order"
    columns: ClassVar = ("clicks",)
    feature: str
    """Name of the feature, for example the one that holds BM25."""

    def transform(self, start: StepStart) -> Transform:
        feature = start.feature(self.feature)

        def transform(block: GroupBlock) -> Changed:
            clicks_N, feature_N = _clicks_of(block), block.features_NF[:, feature].astype(np.float64)
            labels_N = _order_labels(clicks_N > 0, feature_N, block.offsets_Q1, shown_N=_was_shown(block))
            yield changed(block, _with_clicks(block, labels_N, clicks_N))

        return transform


def _clicks_of(block: GroupBlock) -> Floats:
    """The clicks of each document; NaN for documents without clicks and labels."""
    labels_N = block.columns_N["labels"]
    clicks_N = np.where(np.isnan(labels_N), np.nan, labels_N > 0)
    if "clicks" in block.columns_N:
        clicks_N = np.where(block.on_documents(block.present_Q("clicks")), block.columns_N["clicks"], clicks_N)
    return clicks_N.astype(np.float32)


def _was_shown(block: GroupBlock) -> Bools:
    """Whether each document was shown: those with a position, and all of a group without positions."""
    shown_N = ~block.on_documents(block.present_Q("positions"))
    if "positions" in block.columns_N:
        shown_N |= ~np.isnan(block.columns_N["positions"])
    return shown_N


def _shown_click_ratios(blocks: Iterable[GroupBlock], depth: int) -> Doubles:
    """The share of clicked documents among those shown at each position, shape [depth]; NaN where none was shown."""
    shown_P, clicked_P = np.zeros(depth + 1), np.zeros(depth + 1)
    for block in blocks:
        check_shown_positions(block, _NO_POSITIONS)
        positions_N = block.columns_N["positions"]
        shown_N = (positions_N <= depth) & block.on_documents(labelled(block))
        place_N = positions_N[shown_N].astype(np.int64)
        shown_P += np.bincount(place_N, minlength=depth + 1)
        clicked_P += np.bincount(place_N, weights=_clicks_of(block)[shown_N] > 0, minlength=depth + 1)
    ratios_P: Doubles = np.divide(clicked_P, shown_P, out=np.full(depth + 1, np.nan), where=shown_P > 0)
    return ratios_P[1:]


def _propensity_weights(ratios_P: Doubles, *, alpha: float) -> Doubles:
    """The weight of each position, `(cr_1 / cr_i)^alpha`, from its click ratio; NaN where nothing was shown."""
    if np.isnan(ratios_P[0]) or ratios_P[0] == 0:
        raise InputError("position 1 has no click to compare with; see whether positions count from 1")
    if (ratios_P == 0).any():
        position = int((ratios_P == 0).argmax())
        raise InputError(f"position {position + 1} was never clicked, so it has no weight; set depth to {position}")
    return np.asarray((ratios_P[0] / ratios_P) ** alpha)


def _weighing(weights_P: Doubles) -> Transform:
    """Write the weight of each document's position; 1 for a document that was not shown, such as a random negative."""
    last = int(np.flatnonzero(~np.isnan(weights_P)).max())

    def transform(block: GroupBlock) -> Changed:
        check_shown_positions(block, _NO_POSITIONS)
        positions_N = block.columns_N["positions"]
        shown_N = ~np.isnan(positions_N)
        place_N = np.where(shown_N, positions_N, 1).astype(np.int64) - 1
        own_N = np.where(shown_N, weights_P[np.minimum(place_N, last)], 1.0)
        weights_N = np.where(block.on_documents(labelled(block)), own_N, block.columns_N["weights"])
        yield changed(block, block.with_columns(weights=weights_N.astype(np.float32)))

    return transform


def _with_clicks(block: GroupBlock, labels_N: Doubles | Ints, clicks_N: Floats) -> GroupBlock:
    """Labelled groups with new labels, and the clicks from which these are made."""
    labelled_N = block.on_documents(labelled(block))
    return block.with_columns(
        labels=np.where(labelled_N, labels_N, np.nan).astype(np.float32),
        clicks=np.where(labelled_N, clicks_N, block.columns_N["clicks"]).astype(np.float32),
    )


def _deviation(dataset: Dataset, feature: int) -> float:
    summaries = dataset.manifest.summaries
    deviation = summaries[feature].std if feature < len(summaries) else None  # none of what this job appends
    if not deviation:
        name = dataset.manifest.features[feature].name
        raise InputError(
            f"the manifest has no standard deviation of feature {name!r}; set scale to none, or append it in another "
            "job before"
        )
    return deviation


def _refined_labels(
    clicks_N: Bools,
    feature_N: Doubles,
    offsets_Q1: Ints,
    *,
    delta: float,
    temperature: float,
    shown_N: Bools,
) -> Doubles:
    """Labels `softmax((delta click + feature) / temperature)` of each group; 0 for documents that were not shown."""
    # our reading of SUN23, which prints the formula only in a figure; a missing value is the smallest of the list
    valued_N = shown_N & ~np.isnan(feature_N)
    lowest_Q = -maximum(np.where(valued_N, -feature_N, -np.inf), offsets_Q1)
    lowest_Q = np.where(np.isinf(lowest_Q), 0.0, lowest_Q)
    filled_N = np.where(valued_N, feature_N, np.repeat(lowest_Q, np.diff(offsets_Q1)))
    logits_N = (delta * clicks_N + filled_N) / temperature
    return softmax_by_group(np.where(shown_N, logits_N, -np.inf), offsets_Q1)


def _unseen(clicks_N: Floats, positions_N: Floats, offsets_Q1: Ints) -> Bools:
    """True for documents shown below the last click of their group; False in a group without a click."""
    last_Q = maximum(np.where((clicks_N > 0) & ~np.isnan(positions_N), positions_N, -np.inf), offsets_Q1)
    last_Q = np.where(np.isinf(last_Q), np.inf, last_Q)  # -inf, no click, becomes inf: no position is below it
    return np.asarray(positions_N > np.repeat(last_Q, np.diff(offsets_Q1)))


def _draw_others(block: GroupBlock, wanted_Q: Ints, seed: int) -> Ints:
    """Draw documents of the other groups of a block for each group, without repetition while there are enough."""
    # a group starts at a random place of a shuffled circle of all documents and takes the next ones that are neither
    # its own nor taken (documents with one id are the same); if these are too few, it takes them again, in that order
    alone_Q = (wanted_Q > 0) & (block.lengths_Q == block.n_documents)
    if alone_Q.any():
        raise InputError(f"period {block.period} has one query group here, so there are no other documents to draw")
    keys_N = block.on_documents(block.keys_Q)
    circle = np.argsort(open_uniforms((seed, "circle"), keys_N, block.index_N), kind="stable").tolist()
    start_Q = (open_uniforms((seed, "start"), block.keys_Q) * block.n_documents).astype(np.int64)
    documents, drawn = _same_documents(block).tolist(), list[int]()
    different = len({*documents})
    for q in np.flatnonzero(wanted_Q).tolist():
        known, taken, place = {*documents[block.offsets_Q1[q] : block.offsets_Q1[q + 1]]}, list[int](), int(start_Q[q])
        while len(taken) < wanted_Q[q] and len(known) < different:
            if documents[circle[place]] not in known:
                known.add(documents[circle[place]])
                taken.append(circle[place])
            place = (place + 1) % len(circle)
        if not taken:
            query = block.rows_Q["query_id"][q].as_py()
            raise InputError(
                f"period {block.period}: query {query!r} has all documents of the other groups here, so there are none "
                "to draw; drop random_negatives, or such queries"
            )
        drawn += np.resize(taken, wanted_Q[q]).tolist()
    return np.array(drawn, np.int64)


def _same_documents(block: GroupBlock) -> Ints:
    """A number for each document, the same for those with one id; all differ where there are no ids."""
    numbers_N = np.arange(block.n_documents)
    if block.doc_ids_N is None:
        return numbers_N
    codes_N = block.doc_ids_N.dictionary_encode().indices.fill_null(-1).to_numpy()
    return np.where(codes_N < 0, block.n_documents + numbers_N, codes_N)


def _with_negatives(block: GroupBlock, replaced_N: Bools, extra_Q: Ints, drawn_M: Ints) -> GroupBlock:
    """Replace documents by drawn ones, which come group by group, and append `extra_Q` more to each group."""
    group_N = np.concatenate([block.group_N, np.repeat(np.arange(len(block)), extra_Q)])
    negative_N = np.concatenate([replaced_N, np.ones(extra_Q.sum(), dtype=bool)])
    order_N = np.argsort(group_N, kind="stable")
    documents_N = np.concatenate([np.arange(block.n_documents), np.zeros(extra_Q.sum(), np.int64)])[order_N]
    negative_N = negative_N[order_N]
    documents_N[negative_N] = drawn_M
    extended = block.take(np.arange(len(block)), documents_N, block.lengths_Q + extra_Q)
    values = {"positions": np.nan, "weights": 1.0}  # 0 elsewhere: labels, clicks and gains
    present = {name: extended.on_documents(block.present_Q(name)) for name in block.columns_N}
    columns_N = {
        name: np.where(negative_N, np.where(present[name], values.get(name, 0.0), np.nan), column_N).astype(np.float32)
        for name, column_N in extended.columns_N.items()
    }
    return extended.with_columns(**columns_N)


def _order_labels(clicks_N: Bools, feature_N: Doubles, offsets_Q1: Ints, *, shown_N: Bools) -> Ints:
    """Labels that order each list: 1 plus the number of shown documents below a shown one, 0 for the others."""
    # below it are those not clicked while it is, or equally clicked with a lower value; a missing value is the lowest
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
