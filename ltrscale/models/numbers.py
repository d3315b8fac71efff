"""Embeddings of numbers, in front of any encoder: each numeric feature becomes a vector.

Shapes: N documents, F features, P numeric features, B bins, B1 = B + 1 edges, K frequencies, E dimensions of an
embedding, D embedding of a document.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, standardise_groups
from ltrscale.config import Config
from ltrscale.models.features import FeatureTransform
from ltrscale.models.layers import Encoder, InputLayer, SeparateLinear, Size


class _NumberSettings(Config):
    """The base of the configs of embeddings of numbers."""

    kind: str
    within_lists: bool = False
    """Also give the encoder every numeric feature standardised within its list, as plain numbers beside the others: how
    far is this document above those that it competes with? A score then depends on the other documents of its list."""

    @property
    def fitted_bins(self) -> int:
        """Bins of each feature whose edges the feature transform has to fit."""
        return 0

    def build(self, transform: FeatureTransform) -> "_NumberEmbedding | None":
        """The embedding, with fresh weights; None if numbers enter the encoder as they are."""
        raise NotImplementedError


class _NumberEmbedding(InputLayer):
    """The inputs of an encoder: embedded numbers, numbers standardised within lists if asked for, and categories."""

    numeric: Tensor
    categorical: Tensor

    def __init__(self, config: _NumberSettings, transform: FeatureTransform, *, dimensions: int = 1) -> None:
        super().__init__()
        self.within_lists = config.within_lists
        numeric_F = transform.numeric_F
        # These follow from the transform, so they are not saved.
        self.register_buffer("numeric", numeric_F.nonzero()[:, 0], persistent=False)
        self.register_buffer("categorical", (~numeric_F).nonzero()[:, 0], persistent=False)
        numbers = len(self.numeric) * (dimensions + config.within_lists)
        self.numeric_F = torch.arange(numbers + len(self.categorical), device=numeric_F.device) < numbers
        """True where an output is a number, False where it is an index of a category."""

    def forward(self, x_NF: Tensor, offsets_Q1: Tensor) -> Tensor:
        x_NP = x_NF.index_select(1, self.numeric)
        within = [standardise_groups(x_NP, offsets_Q1)] if self.within_lists else []
        return torch.cat([self.embed(x_NP).flatten(1), *within, x_NF.index_select(1, self.categorical)], 1)

    def embed(self, x_NP: Tensor) -> Tensor:
        """Numbers [N, P] to their embeddings [N, P, E]; by default numbers as they are."""
        return x_NP


class PlainConfig(_NumberSettings):
    """Numbers as they are."""

    kind: Literal["plain"] = "plain"

    def build(self, transform: FeatureTransform) -> _NumberEmbedding | None:
        """A `_NumberEmbedding` if the config sets `within_lists`, otherwise None."""
        return _NumberEmbedding(self, transform) if self.within_lists else None


class PLEConfig(_NumberSettings):
    """Piecewise-linear encoding: which bins of its feature a value is above, and how far it is into its own one.

    Source: Gorishniy et al. 2022, section 3.2.
    Proof: loop; equals `rtdl_num_embeddings`.
    """

    kind: Literal["ple"] = "ple"
    bins: int = Field(16, ge=1, le=10_000)
    """Bins between quantiles of the training documents. Equal quantiles, as those of a feature that is mostly 0, leave
    fewer."""
    embedding: int = Field(8, ge=0, le=1_000_000)
    """Dimensions of the learnt embedding of each feature, a linear layer of its bins and ReLU; 0 gives the encoder the
    bins themselves."""

    @property
    def fitted_bins(self) -> int:
        return self.bins

    def build(self, transform: FeatureTransform) -> _NumberEmbedding:
        return _PiecewiseLinear(self, transform)


class _PiecewiseLinear(_NumberEmbedding):
    """Piecewise-linear encoding of numbers (Gorishniy et al. 2022, equation 1), and a linear layer with ReLU."""

    left_PB: Tensor
    scale_PB: Tensor
    low_PB: Tensor
    high_PB: Tensor

    def __init__(self, config: PLEConfig, transform: FeatureTransform) -> None:
        super().__init__(config, transform, dimensions=config.embedding or config.bins)
        edges_PB1 = transform.edges_FB1[transform.numeric_F]
        if edges_PB1.shape[1] != config.bins + 1:
            raise ValueError(f"numbers.bins is {config.bins}, the transform has {edges_PB1.shape[1] - 1} bins")
        width_PB = edges_PB1.diff(dim=1)
        open_PB = width_PB > 0
        places_PB = open_PB.cumsum(1)
        first_PB, last_PB = open_PB & (places_PB == 1), open_PB & (places_PB == places_PB[:, -1:])
        low_PB, high_PB = torch.zeros_like(width_PB), open_PB.to(width_PB.dtype)
        bound = transform.config.clip  # the paper has none: a value may be a million widths of a narrow last bin away
        self.register_buffer("left_PB", edges_PB1[:, :-1], persistent=False)
        self.register_buffer("scale_PB", open_PB / width_PB.masked_fill(~open_PB, 1.0), persistent=False)
        self.register_buffer("low_PB", low_PB.masked_fill(first_PB, -bound), persistent=False)
        self.register_buffer("high_PB", high_PB.masked_fill(last_PB, bound), persistent=False)
        self.linear = SeparateLinear(len(edges_PB1), config.bins, config.embedding) if config.embedding else None

    def embed(self, x_NP: Tensor) -> Tensor:
        """Numbers [N, P] to embeddings [N, P, E], or to bins [N, P, B]."""
        inside_NPB = ((x_NP[..., None] - self.left_PB) * self.scale_PB).clamp(self.low_PB, self.high_PB)
        return inside_NPB if self.linear is None else self.linear(inside_NPB).relu()


class PLRConfig(_NumberSettings):
    """Periodic embedding: sines and cosines of learnt frequencies, a linear layer for each feature, ReLU.

    Source: Gorishniy et al. 2022, section 3.3.
    Proof: loop; equals `rtdl_num_embeddings`.
    """

    kind: Literal["plr"] = "plr"
    frequencies: Size = 16
    """Learnt frequencies of each feature."""
    sigma: float = Field(0.1, gt=0)
    """Standard deviation of the initial frequencies, the most important setting (the paper searches .01 to 100): too
    high, and neighbouring values have nothing in common."""
    embedding: Size = 8
    """Dimensions of the embedding of each feature."""

    def build(self, transform: FeatureTransform) -> _NumberEmbedding:
        return _Periodic(self, transform)


class _Periodic(_NumberEmbedding):
    """`relu(linear([cos(v), sin(v)]))`, `v = 2 pi c x`, learnt c (Gorishniy et al. 2022, equation 2)."""

    def __init__(self, config: PLRConfig, transform: FeatureTransform) -> None:
        super().__init__(config, transform, dimensions=config.embedding)
        features = len(self.numeric)
        self.frequencies_PK = nn.Parameter(torch.randn(features, config.frequencies) * config.sigma)
        self.linear = SeparateLinear(features, 2 * config.frequencies, config.embedding)

    def embed(self, x_NP: Tensor) -> Tensor:
        v_NPK = 2 * math.pi * self.frequencies_PK * x_NP[..., None]
        return self.linear(torch.cat([v_NPK.cos(), v_NPK.sin()], -1)).relu()


class InFront(Encoder):
    """An encoder behind an embedding of numbers."""

    def __init__(self, numbers: _NumberEmbedding, encoder: Encoder) -> None:
        super().__init__()
        self.numbers, self.encoder = numbers, encoder
        self.config, self.width, self.members = encoder.config, encoder.width, encoder.members

    def embed(self, x_NF: Tensor, groups: QueryGroups) -> Tensor:
        return self.encoder.embed(self.numbers(x_NF, groups.offsets_Q1), groups)
