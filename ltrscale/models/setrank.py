"""SetRank: blocks of self-attention over a list, direct or through a few inducing points.

Shapes: N documents, Q groups, D embedding; M lists of a chunk, L slots of each, K queries of each, P inducing points.
"""

from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, group_index
from ltrscale.models.attention import Attention
from ltrscale.models.context import (
    ContextSettings,
    Contextual,
    ListContext,
    check_feature,
    check_order,
    initial_order,
    map_lists,
)
from ltrscale.models.layers import Dropout


class SetRankConfig(ContextSettings):
    """SetRank: stacked attention blocks over the list, with or without an initial ranking (Pang et al. 2020).

    Source: Pang et al. 2020.
    Proof: loop.
    """

    kind: Literal["setrank"] = "setrank"
    """The kind of list context."""
    width: int = Field(256, ge=1)
    """Size of the blocks."""
    heads: int = Field(8, ge=1)
    """Attention heads; they share the width, so their number must divide it."""
    blocks: int = Field(6, ge=1, le=1000)
    """Number of blocks."""
    inducing: int | None = Field(None, ge=1)
    """Number of points through which documents attend to each other (IMSAB), which makes the work linear in the length
    of the list. By default they attend directly (MSAB)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of attention weights, and of the outputs of attention and feed-forward network."""
    initial_rank: Literal["none", "positions", "feature"] = "none"
    """Source of an initial ranking: positions at which documents were shown, or falling values of a feature."""
    feature: int | None = Field(None, ge=0)
    """Index of that feature, from 0 in the order of the data set."""
    ranks: int = Field(256, ge=1)
    """Initial ranks with their own embedding; all documents further down the list share the last one."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide the width {self.width}; choose numbers that do")
        check_order(self.initial_rank, self.feature)
        return self

    @property
    def reads_positions(self) -> bool:
        """Whether they are the initial ranking."""
        return self.initial_rank == "positions"

    def build(self, width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> ListContext:
        """See `SetRank`."""
        return SetRank(self, width, numeric_F, cardinalities)


class AttentionBlock(nn.Module):
    """MAB(X, Y): `H = LayerNorm(X + attention(X, Y))`, then `LayerNorm(H + rFF(H))`.

    The row-wise feed-forward network rFF is two linear layers of the block's width with ReLU between them; the paper
    does not state its depth.
    """

    def __init__(self, config: SetRankConfig) -> None:
        super().__init__()
        width, heads, dropout = config.width, config.heads, config.dropout
        self.attention = Attention(width, width, heads=heads, head_width=width // heads, dropout=dropout)
        self.feedforward = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(self, x_MKD: Tensor, y_MLD: Tensor, mask_ML: Tensor | None) -> Tensor:
        """Rows of x attend to the rows of y where the mask is True."""
        h_MKD = self.attention_norm(x_MKD + self.dropout(self.attention(x_MKD, y_MLD, mask_ML)))
        out_MKD: Tensor = self.feedforward_norm(h_MKD + self.dropout(self.feedforward(h_MKD)))
        return out_MKD


class SelfAttentionBlock(nn.Module):
    """MSAB(X) = MAB(X, X)."""

    def __init__(self, config: SetRankConfig) -> None:
        super().__init__()
        self.block = AttentionBlock(config)

    def forward(self, x_MLD: Tensor, mask_ML: Tensor) -> Tensor:
        """Apply the block to padded lists."""
        out_MLD: Tensor = self.block(x_MLD, x_MLD, mask_ML)
        return out_MLD


class InducedBlock(nn.Module):
    """IMSAB(X) = MAB(X, MAB(I, X)), with learned points I that are the same for all lists."""

    def __init__(self, config: SetRankConfig, points: int) -> None:
        super().__init__()
        self.points_PD = nn.Parameter(nn.init.xavier_uniform_(torch.empty(points, config.width)))
        self.collect, self.spread = AttentionBlock(config), AttentionBlock(config)

    def forward(self, x_MLD: Tensor, mask_ML: Tensor) -> Tensor:
        """Apply the block to padded lists."""
        points_MPD = self.points_PD.to(x_MLD.dtype).expand(len(x_MLD), -1, -1)
        out_MLD: Tensor = self.spread(x_MLD, self.collect(points_MPD, x_MLD, mask_ML), None)
        return out_MLD


class SetRank(ListContext):
    """SetRank (Pang et al. 2020): `block(.. block(W h_i + b + p(rank_i)))`, p the embedding of a rank.

    h is the encoder's embedding. Without initial ranks, p is omitted, and the order of the input does not matter. With
    them, it matters only for ties. A list may have any length: documents beyond the table of rank embeddings share its
    last row. Blocks are MSAB, or IMSAB if the config sets inducing points.

    Raises:
        InputError: the feature that ranks documents does not exist or is a category, or positions are missing.

    Example:
        >>> config = SetRankConfig(width=8, heads=2, blocks=1, initial_rank="feature", feature=1)
        >>> context = SetRank(config, 5, torch.tensor([True, True]), [])
        >>> groups = QueryGroups(torch.rand(3, 2), torch.tensor([0, 1, 3]))
        >>> context(groups.features_NF, torch.zeros(3, 5), groups).documents_ND.shape
        torch.Size([3, 8])
    """

    def __init__(self, config: SetRankConfig, width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:  # noqa: ARG002
        super().__init__()
        check_feature(config.feature, numeric_F)
        self.config: SetRankConfig = config
        self.width = config.width
        self.input = nn.Linear(width, config.width)
        self.ranks = None if config.initial_rank == "none" else nn.Embedding(config.ranks, config.width)
        if self.ranks is not None:
            nn.init.normal_(self.ranks.weight, std=config.width**-0.5)
        self.blocks = nn.ModuleList(
            InducedBlock(config, config.inducing) if config.inducing else SelfAttentionBlock(config)
            for _ in range(config.blocks)
        )

    def forward(self, x_NF: Tensor, h_ND: Tensor, groups: QueryGroups) -> Contextual:  # noqa: ARG002
        """See `ListContext.forward`."""
        x_ND = self.input(h_ND)
        if self.ranks is not None:
            x_ND = x_ND + self.ranks(self._ranks(groups).clamp(max=self.config.ranks - 1)).to(x_ND.dtype)
        return Contextual(map_lists(self._blocks, x_ND, groups.offsets_Q1, quadratic=self.config.inducing is None))

    def _ranks(self, groups: QueryGroups) -> Tensor:
        """Rank of each document in the initial ranking, from 0."""
        assert self.config.initial_rank != "none"
        order_N = initial_order(groups, source=self.config.initial_rank, feature=self.config.feature)
        first_N = groups.offsets_Q1[group_index(groups.offsets_Q1, order_N.shape[0])]
        ranks_N = torch.empty_like(order_N)
        ranks_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device) - first_N
        return ranks_N

    def _blocks(self, x_MLD: Tensor, mask_ML: Tensor) -> Tensor:
        for block in self.blocks:
            x_MLD = block(x_MLD, mask_ML)
        return x_MLD
