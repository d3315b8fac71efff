"""List contexts with attention: the attention layer, DASALC, RankFormer and SetRank.

Shapes: N documents, Q groups, F features, D embedding; M lists of a chunk, L slots of each, K queries of each; S
slots and R queries of all chunks; P inducing points; T = N + Q tokens.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, group_index, longer
from ltrscale.errors import InputError
from ltrscale.models.contexts import (
    ContextSettings,
    Contextual,
    ListContext,
    Lists,
    RankedSettings,
    inverse,
    map_slots,
)
from ltrscale.models.layers import Dropout, FeatureEmbedding, Layers, Size


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017): `concat_h(softmax(Q_h K_h' / sqrt(head_width)) V_h) W + b`.

    Keys have no bias: it would shift all scores of a query equally, which does not change their softmax.
    """

    def __init__(
        self, inputs: int, width: int, *, heads: int, head_width: int, dropout: float = 0.0, bias: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(inputs, heads * head_width, bias=bias)
        self.key = nn.Linear(inputs, heads * head_width, bias=False)
        self.value = nn.Linear(inputs, heads * head_width, bias=bias)
        self.output = nn.Linear(heads * head_width, width)
        for layer in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(layer.weight)
        for layer in (self.query, self.value, self.output):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, queries_RD: Tensor, keys_SD: Tensor, of_queries: Lists, of_keys: Lists) -> Tensor:
        """The weighted mean of values for each query, over the keys of its list; every list needs a key."""
        sides = (self.query, queries_RD, of_queries), (self.key, keys_SD, of_keys), (self.value, keys_SD, of_keys)
        split = (lists.split(layer(x_SD).unflatten(-1, (self.heads, -1))) for layer, x_SD, lists in sides)
        dropout, parts = self.dropout if self.training else 0.0, []
        for *inputs_MLHD, mask_ML in zip(*split, of_keys.masks, strict=True):
            query, key, value = (x_MLHD.transpose(1, 2) for x_MLHD in inputs_MLHD)
            mask = None if mask_ML is None else mask_ML[:, None, None, :]
            heads_MHKD = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
            parts.append(heads_MHKD.transpose(1, 2).flatten(2).flatten(0, 1))
        return self.output(parts[0] if len(parts) == 1 else torch.cat(parts))


class DASALC(ListContext):
    """Data augmented self-attentive latent cross (QIN21, section 4.2.2): `relu((1 + a_i) * h_i)`, h the encoder's.

    The context a comes from the features x: `a = relu(W x + b)`, then in each layer `a = LayerNorm(a + MHSA(a))`, where
    each head is as wide as the layer (equation 10). If the widths of a and h differ, a linear layer maps a to the width
    of h (equation 11). The formulas omit the first linear layer and the residual connection; both come from TF-Ranking,
    the authors' library, which the paper says it used ("similarly to Vaswani et al."). Without the cross the output is
    `[h_i, a_i]`, as in Pasumarthi et al. 2020.

    A head of one linear layer on top is the paper's score; its noise and log1p belong to the inputs.
    """

    def __init__(self, config: "DASALCConfig", width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.width = width if config.cross else width + config.width
        self.features = FeatureEmbedding(numeric_F, cardinalities, config.embedding)
        self.input = nn.Linear(self.features.width, config.width)
        self.attention = nn.ModuleList(
            Attention(config.width, config.width, heads=config.heads, head_width=config.width, dropout=config.dropout)
            for _ in range(config.layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(config.layers))
        self.dropout = Dropout(config.dropout)
        self.project = nn.Linear(config.width, width) if config.cross and config.width != width else nn.Identity()
        self.cross = config.cross

    def forward(self, x_NF: Tensor, h_ND: Tensor, groups: QueryGroups) -> Contextual:
        a_ND = self.input(self.features(x_NF)).relu()
        a_ND = self.project(map_slots(self._attend, a_ND, groups.offsets_Q1, quadratic=True))
        if not self.cross:
            return Contextual(torch.cat([h_ND, a_ND], dim=1))
        return Contextual(((1 + a_ND) * h_ND).relu())

    def _attend(self, a_SD: Tensor, lists: Lists) -> Tensor:
        for attention, norm in zip(self.attention, self.norms, strict=True):
            a_SD = norm(a_SD + self.dropout(attention(a_SD, a_SD, lists, lists)))
        return a_SD


class DASALCConfig(ContextSettings):
    """DASALC: self-attention over the list, crossed with each document's embedding (QIN21).

    Source: QIN21, section 4.
    Proof: loop; torch's attention.
    """

    kind: Literal["dasalc"] = "dasalc"
    context: ClassVar = DASALC
    width: Size = 256
    """Size of the attention's output and, as in the paper, of each head."""
    heads: Size = 2
    """Attention heads: 2 to 5 in the paper."""
    layers: Layers = 3
    """Attention layers: 3 to 6 in the paper."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of attention weights and of the attention's output; the paper names none."""
    cross: bool = True
    """Latent cross; false concatenates context and embedding, the paper's ablation."""
    embedding: Size = 8
    """Dimensions of the embedding of each categorical feature in the attention's input."""


class _TransformerLayer(nn.Module):
    """`torch.nn.TransformerEncoderLayer(norm_first=True)`, which BUYL23 used: two residual branches behind norms."""

    def __init__(self, config: "RankFormerConfig", width: int) -> None:
        super().__init__()
        head_width, dropout = width // config.heads, config.dropout
        self.attention = Attention(width, width, heads=config.heads, head_width=head_width, dropout=dropout, bias=True)
        self.first = nn.Linear(width, config.feedforward)
        self.second = nn.Linear(config.feedforward, width)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(self, x_SD: Tensor, lists: Lists) -> Tensor:
        normed_SD = self.attention_norm(x_SD)
        x_SD = x_SD + self.dropout(self.attention(normed_SD, normed_SD, lists, lists))
        hidden = self.dropout(F.gelu(self.first(self.feedforward_norm(x_SD))))
        added_SD: Tensor = self.dropout(self.second(hidden))
        return x_SD + added_SD


class RankFormer(ListContext):
    """RankFormer (BUYL23, section 5): the embedding of a document is `z_i || z_cls`, that of a list `z_cls`.

    `z = Transformer(x_1 .. x_L, x_cls)`, where x_cls is learned and the same for all lists; there are no positional
    embeddings (equations 7 and 8). For an empty list, the Transformer sees only the token.
    """

    def __init__(self, config: "RankFormerConfig", width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:  # noqa: ARG002
        super().__init__()
        self.config = config
        inner = config.width or width
        if inner % config.heads:
            raise InputError(
                f"context.heads: {config.heads} does not divide the encoder's width {width}; "
                "choose another number of heads, or set context.width"
            )
        self.width, self.list_width = 2 * inner, inner
        self.input = nn.Identity() if inner == width else nn.Linear(width, inner)
        self.token = nn.Parameter(torch.randn(inner))  # at the scale of standardised features
        self.layers = nn.ModuleList(_TransformerLayer(config, inner) for _ in range(config.layers))

    def forward(self, x_NF: Tensor, h_ND: Tensor, groups: QueryGroups) -> Contextual:  # noqa: ARG002
        """Embeddings of documents in their lists, and of the lists."""
        x_ND, offsets_Q1, group_N = self.input(h_ND), groups.offsets_Q1, group_index(groups.offsets_Q1, h_ND.shape[0])
        lists_Q = torch.arange(groups.n_groups, device=offsets_Q1.device)
        # A list's token follows its documents.
        document_N = torch.arange(x_ND.shape[0], device=offsets_Q1.device) + group_N
        token_Q = offsets_Q1[1:] + lists_Q
        tokens_QD = self.token.to(x_ND.dtype).expand(groups.n_groups, -1)
        x_TD = torch.cat([x_ND, tokens_QD]).index_select(0, inverse(torch.cat([document_N, token_Q])))
        z_TD = map_slots(self._transform, x_TD, longer(offsets_Q1), quadratic=True)
        lists_QD = z_TD.index_select(0, token_Q)
        documents_ND = torch.cat([z_TD.index_select(0, document_N), lists_QD.index_select(0, group_N)], dim=1)
        return Contextual(documents_ND, lists_QD)

    def _transform(self, x_SD: Tensor, lists: Lists) -> Tensor:
        for layer in self.layers:
            x_SD = layer(x_SD, lists)
        return x_SD


class RankFormerConfig(ContextSettings):
    """RankFormer: a Transformer over the list and a token that stands for the whole list (BUYL23).

    Source: BUYL23, section 4.
    Proof: torch's `TransformerEncoder`.
    """

    kind: Literal["rankformer"] = "rankformer"
    context: ClassVar = RankFormer
    embeds_lists: ClassVar[bool] = True
    width: Size | None = None
    """Size of the Transformer; the encoder's width by default, as in the paper for the `identity` encoder."""
    heads: Size = 1
    """Attention heads; they share the width, so their number must divide it."""
    feedforward: Size = 512
    """Size of the hidden layer of each layer's feed-forward network."""
    layers: Layers = 3
    """Transformer layers."""
    dropout: float = Field(0.25, ge=0, lt=1)
    """Dropout of attention weights, inside the feed-forward network, and of the outputs of both."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.width is not None and self.width % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide the width {self.width}; choose numbers that do")
        return self


class _AttentionBlock(nn.Module):
    """MAB(X, Y): `H = LayerNorm(X + attention(X, Y))`, then `LayerNorm(H + rFF(H))` with a network rFF."""

    def __init__(self, config: "SetRankConfig") -> None:
        super().__init__()
        width, heads, dropout = config.width, config.heads, config.dropout
        self.attention = Attention(width, width, heads=heads, head_width=width // heads, dropout=dropout)
        self.feedforward = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(self, x_RD: Tensor, y_SD: Tensor, of_x: Lists, of_y: Lists) -> Tensor:
        h_RD = self.attention_norm(x_RD + self.dropout(self.attention(x_RD, y_SD, of_x, of_y)))
        return self.feedforward_norm(h_RD + self.dropout(self.feedforward(h_RD)))


class _SelfAttentionBlock(nn.Module):
    """MSAB(X) = MAB(X, X)."""

    def __init__(self, config: "SetRankConfig") -> None:
        super().__init__()
        self.block = _AttentionBlock(config)

    def forward(self, x_SD: Tensor, lists: Lists) -> Tensor:
        return self.block(x_SD, x_SD, lists, lists)


class _InducedBlock(nn.Module):
    """IMSAB(X) = MAB(X, MAB(I, X)), with learned points I that are the same for all lists."""

    def __init__(self, config: "SetRankConfig", points: int) -> None:
        super().__init__()
        self.points_PD = nn.Parameter(nn.init.xavier_uniform_(torch.empty(points, config.width)))
        self.collect, self.spread = _AttentionBlock(config), _AttentionBlock(config)

    def forward(self, x_SD: Tensor, lists: Lists) -> Tensor:
        of_points = Lists([(m, len(self.points_PD)) for m, _ in lists.shapes], [None] * len(lists.shapes))
        points_RD = self.points_PD.to(x_SD.dtype).repeat(sum(m for m, _ in lists.shapes), 1)
        return self.spread(x_SD, self.collect(points_RD, x_SD, of_points, lists), lists, of_points)


class SetRank(ListContext):
    """SetRank (Pang et al. 2020): `block(.. block(W h_i + b + p(rank_i)))`, p the embedding of a rank.

    h is the encoder's embedding. Without initial ranks, p is omitted, and the order of the input does not matter. With
    them, it matters only for ties. A list may have any length: documents beyond the table of rank embeddings share its
    last row. Blocks are MSAB, or IMSAB if the config sets inducing points.
    """

    def __init__(self, config: "SetRankConfig", width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:  # noqa: ARG002
        super().__init__()
        config.check_feature(numeric_F)
        self.config: SetRankConfig = config
        self.width = config.width
        self.input = nn.Linear(width, config.width)
        self.ranks = None if config.initial_rank == "none" else nn.Embedding(config.ranks, config.width)
        if self.ranks is not None:
            nn.init.normal_(self.ranks.weight, std=config.width**-0.5)
        self.blocks = nn.ModuleList(
            _InducedBlock(config, config.inducing) if config.inducing else _SelfAttentionBlock(config)
            for _ in range(config.blocks)
        )

    def forward(self, x_NF: Tensor, h_ND: Tensor, groups: QueryGroups) -> Contextual:  # noqa: ARG002
        x_ND = self.input(h_ND)
        if self.ranks is not None:
            x_ND = x_ND + self.ranks(self._ranks(groups).clamp(max=self.config.ranks - 1)).to(x_ND.dtype)
        return Contextual(map_slots(self._blocks, x_ND, groups.offsets_Q1, quadratic=self.config.inducing is None))

    def _ranks(self, groups: QueryGroups) -> Tensor:
        """Rank of each document in the initial ranking, from 0."""
        order_N = self.config.order(groups)
        first_N = groups.offsets_Q1[group_index(groups.offsets_Q1, order_N.shape[0])]
        ranks_N = torch.empty_like(order_N)
        ranks_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device) - first_N
        return ranks_N

    def _blocks(self, x_SD: Tensor, lists: Lists) -> Tensor:
        for block in self.blocks:
            x_SD = block(x_SD, lists)
        return x_SD


class SetRankConfig(RankedSettings):
    """SetRank: stacked attention blocks over the list, with or without an initial ranking (Pang et al. 2020).

    Source: Pang et al. 2020.
    Proof: loop.
    """

    kind: Literal["setrank"] = "setrank"
    context: ClassVar = SetRank
    width: Size = 256
    """Size of the blocks."""
    heads: Size = 8
    """Attention heads; they share the width, so their number must divide it."""
    blocks: Layers = 6
    """Number of blocks."""
    inducing: Size | None = None
    """Number of points through which documents attend to each other (IMSAB), which makes the work linear in the length
    of the list. By default they attend directly (MSAB)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of attention weights, and of the outputs of attention and feed-forward network."""
    initial_rank: Literal["none", "positions", "feature"] = "none"
    """Source of an initial ranking: positions at which documents were shown, or falling values of a feature."""
    ranks: Size = 256
    """Initial ranks with their own embedding; all documents further down the list share the last one."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide the width {self.width}; choose numbers that do")
        return self
