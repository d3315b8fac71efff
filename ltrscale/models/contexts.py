"""What a list context is, and those without attention: DLCM reads a list in order, GSF scores documents in windows.

A list context lets a document's embedding depend on the rest of its list. Those with attention are in
`models/attention.py`.

Shapes: N documents, Q groups, F features, D embedding, H hidden layer, R strides; M lists of a chunk, L slots of each,
S slots with a document; A state of the recurrent network, U units; W windows (`size` documents scored together), B
block of a window's output.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, group_index, length_chunks
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.layout import Chunks, layout, send, split_slots
from ltrscale.models.layers import Activation, Dropout, FeatureEmbedding, Size, Sizes, activation

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
        """The list context with fresh weights."""
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


class DLCM(ListContext):
    """Deep listwise context model (Ai et al. 2018): units `u_ik = o_i . tanh(W_k s + b_k)`.

    A GRU reads the initial ranking from the last document to the first; o are its outputs, and s is its state after the
    first document. The input of a document is `[x_i, h_i]`, its features and the encoder's embedding. A head of one
    linear layer V on the units is the paper's local ranking function `V (o_i . tanh(W s + b))`.

    The output depends on the initial ranking, and therefore on the order of the input where documents tie.
    """

    def __init__(self, config: "DLCMConfig", width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        config.check_feature(numeric_F)
        self.config: DLCMConfig = config
        self.width = config.units
        self.features = FeatureEmbedding(numeric_F, cardinalities, config.embedding) if config.features else None
        inputs = width + (self.features.width if self.features else 0)
        self.gru = nn.GRU(inputs, config.state, batch_first=True)
        self.compare = nn.Linear(config.state, config.state * config.units)

    def forward(self, x_NF: Tensor, h_ND: Tensor, groups: QueryGroups) -> Contextual:
        if self.features is not None:
            h_ND = torch.cat([self.features(x_NF), h_ND], dim=1)
        order_N = self.config.order(groups)
        # Reverse each list: in a list [first, end), the document at first + end - 1 - p moves to place p.
        turn_Q = groups.offsets_Q1[:-1] + groups.offsets_Q1[1:] - 1
        places_N = torch.arange(order_N.shape[0], device=order_N.device)
        order_N = order_N[turn_Q[group_index(groups.offsets_Q1, h_ND.shape[0])] - places_N]
        units_NU = map_lists(self._read, h_ND.index_select(0, order_N), groups.offsets_Q1, quadratic=False)
        return Contextual(units_NU.index_select(0, inverse(order_N)))

    def _read(self, x_MLD: Tensor, mask_ML: Tensor) -> Tensor:
        o_MLA = self.gru(x_MLD)[0]  # padding follows the documents of a list, so it does not change their outputs
        last_M = mask_ML.sum(1) - 1
        state_MA = o_MLA[torch.arange(o_MLA.shape[0], device=last_M.device), last_M]
        keys_MAU = self.compare(state_MA).tanh().unflatten(1, (o_MLA.shape[2], -1))
        return o_MLA @ keys_MAU


class DLCMConfig(RankedSettings):
    """DLCM: a recurrent network reads the initial ranking, and its last state re-ranks (Ai et al. 2018).

    Source: Ai et al. 2018.
    Proof: loop; order laws.
    """

    kind: Literal["dlcm"] = "dlcm"
    context: ClassVar = DLCM
    state: Size = 136
    """Size of the network's state."""
    units: Size = 3
    """Comparisons of a document with the list's state; the size of the document's new embedding."""
    features: bool = True
    """Add each document's features to the encoder's embedding; this is the paper's input, with two layers of ELU as the
    encoder."""
    embedding: Size = 8
    """Dimensions of the embedding of each categorical feature among these."""
    initial_rank: Literal["positions", "feature"] = "positions"
    """Source of the initial ranking: positions at which documents were shown, or falling values of a feature."""


class GSF(ListContext):
    """Groupwise scoring function (Ai et al. 2019): a network scores a window of `size` documents; mean over windows.

    For a window (i_1, .., i_m), a group in the paper, the network maps `[h_i1, .., h_im]` to m blocks, one for the
    document in each place; a document's embedding is the mean of its blocks over windows. With a head of one linear
    layer, this is the paper's scoring function with its last layer in two factors.

    A sample of windows stands in for all in all orders, as in the paper. In training, each list is shuffled (torch's
    default generator), and every document starts one window with the documents that follow it, wrapping around the end
    of the list: each document takes each place once. At inference, a hash of the raw features orders each list; windows
    take documents at several strides (`_stride_numbers`), and documents with equal features share their mean. So scores
    are deterministic and do not depend on the order of the input. A list shorter than `size` repeats its documents
    within a window.
    """

    def __init__(self, config: "GSFConfig", width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:  # noqa: ARG002
        super().__init__()
        self.config: GSFConfig = config
        self.width = config.width
        # The first layer of a window is a sum over its places; each term is computed once per document and place.
        self.places = nn.Linear(width, config.size * config.hidden[0], bias=False)
        nn.init.kaiming_uniform_(self.places.weight, a=(5 * config.size) ** 0.5)  # fan-in is that of the whole window
        self.bias = nn.Parameter(torch.zeros(config.hidden[0]))
        activate, dropout = activation(config.activation), Dropout(config.dropout)
        hidden = [layer for a, b in pairwise(config.hidden) for layer in (nn.Linear(a, b), activate, dropout)]
        blocks = nn.Linear(config.hidden[-1], config.size * config.width)
        self.network = nn.Sequential(activate, dropout, *hidden, blocks)

    def forward(self, x_NF: Tensor, h_ND: Tensor, groups: QueryGroups) -> Contextual:  # noqa: ARG002
        offsets_Q1, config = groups.offsets_Q1, self.config
        if self.training:
            keys_N = torch.rand(len(h_ND), device=h_ND.device)
            strides_QR = np.ones((groups.n_groups, 1), np.int64)
        else:
            keys_N = _content_keys(groups.features_NF)
            rounds = config.strides if config.size > 1 else 1
            strides_QR = _strides(layout(offsets_Q1).lengths_Q, config.size, rounds)
        order_N = order_within_lists(keys_N, offsets_Q1)
        sums_NB = self._sum_blocks(h_ND.index_select(0, order_N), offsets_Q1, strides_QR)
        rounds_Q = send(config.size * (strides_QR > 0).sum(1), offsets_Q1.device)
        means_NB = sums_NB / rounds_Q[group_index(offsets_Q1)][:, None]
        if not self.training:
            means_NB = _mean_of_equals(means_NB, keys_N[order_N], offsets_Q1)
        return Contextual(means_NB.index_select(0, inverse(order_N)))

    def _sum_blocks(self, h_ND: Tensor, offsets_Q1: Tensor, strides_QR: NDArray[np.int64]) -> Tensor:
        """Sum of each document's blocks over strides and places, one stride at a time."""
        config = self.config
        places_NmH = self.places(h_ND).unflatten(1, (config.size, -1))
        # Float32 even under autocast: a document has many blocks, and bfloat16 would round their sum.
        dtype = torch.promote_types(h_ND.dtype, torch.float32)
        sums_NB = torch.zeros(len(h_ND), config.width, dtype=dtype, device=h_ND.device)
        for strides_Q in strides_QR.T:
            windows = _Windows.from_strides(offsets_Q1, strides_Q)
            hidden_WH = self.bias.expand(len(windows.row_W), -1)
            for place in range(config.size):
                hidden_WH = hidden_WH + places_NmH[:, place].index_select(0, windows.document_W(place))
            blocks_WmB = self.network(hidden_WH).unflatten(1, (config.size, -1))
            for place in range(config.size):
                sums_NB = sums_NB.index_add(0, windows.document_W(place), blocks_WmB[:, place].to(sums_NB.dtype))
        return sums_NB


class GSFConfig(ContextSettings):
    """GSF: a network reads several documents of a list at once and scores them together (Ai et al. 2019).

    Source: Ai et al. 2019.
    Proof: loop; all pairs for `size: 2`.
    """

    kind: Literal["gsf"] = "gsf"
    context: ClassVar = GSF
    beyond_graphs: ClassVar = "chooses windows by the length of a list and by hashes"
    size: int = Field(2, ge=1, le=100)
    """Documents that are scored together; 1 is a pointwise network."""
    hidden: Sizes = (256, 128)
    """Sizes of the hidden layers."""
    width: Size = 64
    """Size of the embedding that the network computes for each of its documents."""
    activation: Activation = "relu"
    """The non-linearity."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of hidden layers."""
    strides: Size | None = 16
    """Rounds of windows, the documents scored together, at inference; in a round, each document takes each place once.
    Empty for all rounds, which are all ordered pairs if the size is 2."""


class _Windows(NamedTuple):
    """One window for each document of the lists that have this stride; shapes [W]."""

    row_W: Tensor
    first_W: Tensor
    length_W: Tensor
    stride_W: Tensor

    @staticmethod
    def from_strides(offsets_Q1: Tensor, strides_Q: NDArray[np.int64]) -> "_Windows":
        """The windows of one round; a list with stride 0 has none."""
        has_one_N, device = (strides_Q > 0).repeat(layout(offsets_Q1).lengths_Q), offsets_Q1.device
        row_W = send(np.flatnonzero(has_one_N), device)
        group_W = group_index(offsets_Q1)[row_W]
        return _Windows(row_W, offsets_Q1[group_W], offsets_Q1.diff()[group_W], send(strides_Q.copy(), device)[group_W])

    def document_W(self, place: int) -> Tensor:
        """The document at a place of each window, wrapping around the end of the list."""
        return self.first_W + (self.row_W - self.first_W + place * self.stride_W) % self.length_W


@lru_cache(maxsize=4096)  # testing all strides is slow, and lengths repeat from batch to batch
def _stride_numbers(length: int, size: int, rounds: int | None) -> tuple[int, ...]:
    """At most `rounds` strides s such that no window (p, p + s, p + 2 s, ..) of a list repeats a document."""
    distinct = min(size, length)
    valid = [s for s in range(1, length) if all(s * k % length for k in range(1, distinct))] or [1]
    if rounds is None or len(valid) <= rounds:
        return tuple(valid)
    return tuple(valid[i * len(valid) // rounds] for i in range(rounds))


# Odd multipliers of a 64-bit mixing function, as signed words: torch has no arithmetic on uint64.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xD6E8FEB86659FD93 - 2**64


def _content_keys(features_NF: Tensor) -> Tensor:
    """Hash of each document's features, int64 [N], the same in any batch and on any device."""
    features_NF = features_NF.double() + 0.0  # -0 + 0 is 0
    bits_NF = features_NF.masked_fill(features_NF.isnan(), torch.inf).view(torch.int64)
    columns_F = torch.arange(1, bits_NF.shape[1] + 1, device=bits_NF.device) * _GOLDEN
    words_NF = (bits_NF ^ (bits_NF >> 32)) * _MIX + columns_F
    words_NF = (words_NF ^ (words_NF >> 32)) * _MIX
    return (words_NF ^ (words_NF >> 32)).sum(1)


def _strides(lengths_Q: NDArray[np.int64], size: int, rounds: int | None) -> NDArray[np.int64]:
    """Strides of each list [Q, R]; 0 fills the rows of lists with fewer strides."""
    lengths, place_Q = np.unique(lengths_Q, return_inverse=True)
    numbers = [_stride_numbers(length, size, rounds) for length in lengths.tolist()]
    return np.array(list(zip_longest(*numbers, fillvalue=0)) or [()], np.int64).T[place_Q]


def _mean_of_equals(values_NB: Tensor, keys_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Replace the values of documents with equal keys, which are adjacent in their list, by their mean."""
    begins_N = torch.ones_like(keys_N, dtype=torch.bool)
    begins_N[1:] = (keys_N.diff() != 0) | (group_index(offsets_Q1).diff() != 0)
    block_N = begins_N.cumsum(0) - 1
    counts_N = torch.zeros_like(keys_N).index_add(0, block_N, torch.ones_like(keys_N))
    sums_NB = torch.zeros_like(values_NB).index_add(0, block_N, values_NB)
    return (sums_NB / counts_N.clamp(min=1)[:, None]).index_select(0, block_N)
