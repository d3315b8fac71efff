"""Heads, the layers on top of an encoder: for ranking (scores) and for pretraining (projector).

Shapes: N documents, D embedding, P projection.
"""

from itertools import pairwise
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from ltrscale.config import Config
from ltrscale.models.layers import Dropout, MicroBatchNorm


class HeadConfig(Config):
    """The MLP that maps an embedding to a score."""

    layers: int = Field(3, ge=1, le=1000)
    """Linear layers, with ReLU between them: 3 in HOU24, 1 for its binary feedback and for linear probing."""
    width: int | None = Field(None, ge=1)
    """Size of the hidden layers; the encoder's width by default."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout after each hidden layer; BUYL23 has .25, HOU24 none. A multiple of 1/256 on a CPU."""
    init: Literal["random", "identity"] = "random"
    """`identity` starts every matrix as the identity and every bias at 0, so that runs differ less (HOU23)."""


def mlp_head(config: HeadConfig, width: int, *, outputs: int = 1, hidden: int | None = None) -> nn.Sequential:
    """A head from embeddings [N, width] to scores [N, outputs].

    Args:
        config: layers and their size.
        width: size of the embedding.
        outputs: scores of a document.
        hidden: size of the hidden layers if the config sets none; `width` by default.

    Example:
        >>> import torch
        >>> mlp_head(HeadConfig(layers=1), 4)(torch.zeros(3, 4)).shape
        torch.Size([3, 1])
    """
    sizes = [width, *[config.width or hidden or width] * (config.layers - 1)]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU(), *([Dropout(config.dropout)] if config.dropout else [])]
    head = nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))
    if config.init == "identity":
        for layer in head:
            if isinstance(layer, nn.Linear):
                nn.init.eye_(layer.weight)
                nn.init.zeros_(layer.bias)
    return head


class ProjectorConfig(Config):
    """The MLP between an embedding and the pretext loss; dropped after pretraining."""

    layers: int = Field(2, ge=0, le=1000)
    """Hidden layers."""
    width: int | None = Field(None, ge=1)
    """Size of the hidden layers; the encoder's width by default."""
    output: int | None = Field(None, ge=1)
    """Size of the projection; the encoder's width by default."""
    batch_norm: bool = False
    """Normalise hidden layers, and the output without scale and shift: SimSiam uses it, SimCLR-Rank does not."""
    bias: bool = False
    """Whether the linear layers have a bias: HOU24's text has none, its public code has one for SimCLR."""


class Projector(nn.Module):
    """Linear layers, by default without bias, ReLU after the hidden ones, optional BatchNorm (HOU24, A.2.5).

    Args:
        width: size of the embedding.
        config: sizes and norm.

    Example:
        >>> import torch
        >>> Projector(136, ProjectorConfig(output=64))(torch.zeros(3, 136)).shape
        torch.Size([3, 64])
    """

    def __init__(self, width: int, config: ProjectorConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.output or width
        layers: list[nn.Module] = []
        sizes = [width, *[config.width or width] * config.layers]
        for a, b in pairwise(sizes):
            norm = [MicroBatchNorm(b)] if config.batch_norm else []
            layers += [nn.Linear(a, b, bias=config.bias), *norm, nn.ReLU()]
        layers.append(nn.Linear(sizes[-1], self.width, bias=config.bias))
        if config.batch_norm:
            layers.append(MicroBatchNorm(self.width, affine=False))
        self.layers = nn.Sequential(*layers)

    def forward(self, h_ND: Tensor) -> Tensor:
        """Embeddings [N, D] to projections [N, P]."""
        z_NP: Tensor = self.layers(h_ND)
        return z_NP

    def first(self, layers: int) -> nn.Sequential:
        """The first hidden layers with their norms and activations, for finetuning (HOU23, section 5)."""
        length = layers * (3 if self.config.batch_norm else 2)
        return nn.Sequential(*list(self.layers)[:length])
