"""What a list context is: a module that lets a document's embedding depend on the rest of its list; padding lists.

DLCM and GSF are in `models/contexts.py`, those with attention in `models/attention.py`.

Shapes: N documents, Q groups, F features, D embedding; M lists of a chunk, L slots of each, S slots with a document.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, group_index, length_chunks
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.layout import Chunks, split_slots

PAIRS_PER_CHUNK = 2**18  # entries of one attention matrix: about 2,000 documents in lists of 128
DOCUMENTS_PER_CHUNK = 2**12  # documents, for layers whose work is linear in the length of a list


class Contextual(NamedTuple):
    """Embeddings of documents in the context of their list, and of the lists if the module has such embeddings."""

    documents_ND: Tensor
    lists_QD: Tensor | None = None


class ListContext(nn.Module):
    """A module between encoder and head; it truncates no list, and an output never depends on other lists of the batch.

    A subclass sets `config`, `width` (of its documents' embeddings) and `list_width` (of its lists' embeddings, 0 if it
    has none).
    """

    config: Config
    width: int
    list_width: int = 0

    def forward(self, x_NF: Tensor, h_ND: Tensor, groups: QueryGroups) -> Contextual:
        """Map transformed features and the encoder's embeddings to embeddings in context."""
        raise NotImplementedError


class ContextSettings(Config):
    """The base of the configs of list contexts."""

    kind: str
    context: ClassVar[Callable[..., ListContext]]
    """Its list context."""
    embeds_lists: ClassVar[bool] = False
    """Whether it also embeds whole lists, as a loss of whole lists requires."""
    beyond_graphs: ClassVar[str] = ""
    """What it does that a fixed graph of operations cannot express; empty if there is no such thing."""

    @property
    def reads_positions(self) -> bool:
        """Whether it needs the positions at which documents were shown, in scoring too."""
        return False

    def build(self, width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> ListContext:
        """The list context with fresh weights.

        Raises:
            InputError: the config does not fit the features or the encoder.
        """
        return self.context(self, width, numeric_F, cardinalities)


class RankedSettings(ContextSettings):
    """The base of the configs of contexts that may read an initial ranking."""

    initial_rank: Literal["none", "positions", "feature"]
    feature: int | None = Field(None, ge=0)
    """Index of that feature, from 0 in the order of the data set."""

    @model_validator(mode="after")
    def _has_its_feature(self) -> Self:
        if self.initial_rank == "feature" and self.feature is None:
            raise ValueError("feature: give the number, from 0, of the feature by which documents are ranked")
        if self.initial_rank != "feature" and self.feature is not None:
            remedy = "set initial_rank to feature or leave it out"
            raise ValueError(f"feature: is not used with initial_rank {self.initial_rank}; {remedy}")
        return self

    @property
    def reads_positions(self) -> bool:
        """Whether shown positions are the initial ranking."""
        return self.initial_rank == "positions"

    def check_feature(self, numeric_F: Tensor) -> None:
        """Check that the data set has the feature that ranks documents.

        Raises:
            InputError: the data set does not have it, or it is a category.
        """
        if self.feature is None:
            return
        where = f"context.feature: {self.feature}"
        if self.feature >= len(numeric_F):
            raise InputError(f"{where}: the data set has {len(numeric_F)} features; give a number below that")
        if not numeric_F[self.feature]:
            raise InputError(f"{where}: this feature is a category, which has no order; name a number")

    def order(self, groups: QueryGroups) -> Tensor:
        """Document indices list by list, by rising position or by falling raw value of the feature.

        A document without a value comes last; ties keep the order of the input.

        Raises:
            InputError: positions rank documents, and a list has none.
        """
        if self.initial_rank == "feature":
            return order_within_lists(-groups.features_NF[:, self.feature], groups.offsets_Q1)
        remedy = "prepare the data with a column of positions, or set context.initial_rank to feature"
        if groups.positions_N is None:
            raise InputError(f"the model ranks documents by position, and this data set has none: {remedy}")
        if (first := groups.first_unplaced()) is not None:
            name = f"query group {first if groups.ids_Q is None else int(groups.ids_Q[first])}"
            raise InputError(f"the model ranks documents by position, and {name} has no positions: {remedy}")
        return order_within_lists(groups.positions_N, groups.offsets_Q1)


def map_lists(
    layer: Callable[[Tensor, Tensor], Tensor], x_ND: Tensor, offsets_Q1: Tensor, *, quadratic: bool
) -> Tensor:
    """Apply a function of padded lists to ragged ones, in chunks of lists of similar length.

    Args:
        layer: takes documents [M, L, D], 0 in padding, and a mask [M, L], True on documents; returns [M, L, D']. Its
            outputs in padding are dropped, and padding must not change its other outputs.
        x_ND: documents.
        offsets_Q1: offsets of their lists. Empty lists are skipped; if there are no documents at all, the function is
            called once, with no list.
        quadratic: whether the work grows with the square of a list's length. If so, `PAIRS_PER_CHUNK` bounds a chunk,
            otherwise `DOCUMENTS_PER_CHUNK` does. A list above the bound is its own chunk.

    Returns:
        The documents' outputs [N, D'].

    Example:
        >>> x_ND, offsets = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 1, 1, 4])
        >>> map_lists(lambda x, mask: x - x.sum(1, keepdim=True), x_ND, offsets, quadratic=False).flatten().tolist()
        [0.0, -7.0, -6.0, -5.0]
    """
    if len(offsets_Q1) == 2 and x_ND.shape[0] > 0:  # one list: no need to read the offsets
        return layer(x_ND[None], x_ND.new_ones(1, x_ND.shape[0], dtype=torch.bool))[0]
    # Without documents there is one chunk without lists: only the layer knows the width of its output.
    chunks = _chunks(offsets_Q1, quadratic=quadratic)
    padded, masks = chunks.split(chunks.pad(x_ND)), chunks.split(chunks.mask_S)
    return chunks.ragged([layer(x_MLD, mask_ML) for x_MLD, mask_ML in zip(padded, masks, strict=True)])


def _chunks(offsets_Q1: Tensor, *, quadratic: bool) -> Chunks:
    budget = PAIRS_PER_CHUNK if quadratic else DOCUMENTS_PER_CHUNK
    return length_chunks(offsets_Q1, budget=budget, quadratic=quadratic)


class Lists(NamedTuple):
    """The layout of padded lists whose slots are concatenated, chunk after chunk."""

    shapes: Sequence[tuple[int, int]]
    """Lists and slots (M, L) of each chunk."""
    masks: Sequence[Tensor | None]
    """True where a slot [M, L] holds a document; None if all do."""

    def split(self, values_SD: Tensor) -> list[Tensor]:
        """One view [M, L, D] for each chunk."""
        return split_slots(values_SD, self.shapes)


def map_slots(layer: Callable[[Tensor, Lists], Tensor], x_ND: Tensor, offsets_Q1: Tensor, *, quadratic: bool) -> Tensor:
    """`map_lists` for a function of concatenated slots [S, D] and the lists that they make up.

    A GPU gets all chunks in one call, so that what a layer does slot by slot is one operation. A CPU gets one chunk per
    call, which stays in the cache.
    """
    if x_ND.device.type != "cpu" and len(offsets_Q1) != 2:
        chunks = _chunks(offsets_Q1, quadratic=quadratic)
        y_SD = layer(chunks.pad(x_ND), Lists(chunks.shapes, chunks.split(chunks.mask_S)))
        return chunks.ragged([y_SD[None]])

    def run_chunk(x_MLD: Tensor, mask_ML: Tensor) -> Tensor:
        m, length = x_MLD.shape[:2]
        y_SD = layer(x_MLD.flatten(0, 1), Lists([(m, length)], [mask_ML]))
        return y_SD.view(m, length, y_SD.shape[1])

    return map_lists(run_chunk, x_ND, offsets_Q1, quadratic=quadratic)


def inverse(order_N: Tensor) -> Tensor:
    """The inverse of a permutation."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    return inverse_N


def order_within_lists(keys_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Document indices, list by list, each list sorted by rising key; ties keep the input order, NaN comes last.

    Example:
        >>> order_within_lists(torch.tensor([3.0, float("nan"), 1.0, 9.0, 5.0]), torch.tensor([0, 3, 3, 5])).tolist()
        [2, 0, 1, 4, 3]
    """
    order_N = keys_N.argsort(stable=True)
    return order_N if len(offsets_Q1) == 2 else order_N[group_index(offsets_Q1)[order_N].argsort(stable=True)]
