"""Layers that the networks share: dropout, embeddings of categories, hidden layers, activations.

Shapes: N documents, P numeric features, C categorical features, E dimensions of an embedding; S parts of a network,
with A inputs and B outputs each.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ltrscale.models.batch_norm import MicroBatchNorm

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Activation = Literal["relu", "gelu", "elu"]
Size = Annotated[int, Field(ge=1, le=1_000_000)]
"""Size of a layer or of a part of one."""
Layers = Annotated[int, Field(ge=1, le=1000)]
"""Number of layers; bounded, because each takes time to build."""
Sizes = Annotated[tuple[Size, ...], Field(min_length=1, max_length=1000)]
"""Sizes of consecutive layers."""


class Stack(nn.Module):
    """A part of an encoder whose children are layers, one after the other."""


class InputLayer(nn.Module):
    """A part of an encoder that reads features; all such parts together are the first layer."""


class Dropout(nn.Module):
    """Dropout; on a CPU its mask comes from random bytes, 2.5 times faster than torch's, but not in compiled code.

    There the probability is rounded to a multiple of 1/256, and outputs are scaled by the rounded rate. Randomness
    comes from torch's default generator.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.dropped = min(round(256 * probability), 255)

    def forward(self, x: Tensor) -> Tensor:
        """Drop entries in training."""
        if not self.training or self.probability == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.probability)
        # Whole 64-bit words over the full range: torch's default range leaves some bits of a word 0.
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
        keep = words.view(torch.uint8)[: x.numel()].view(x.shape) >= self.dropped
        return x * keep.to(x.dtype).mul_(256 / (256 - self.dropped))


class FeatureEmbedding(InputLayer):
    """Numeric features unchanged, followed by an embedding of each categorical one.

    The embedding of the unknown category starts at 0, so it stays neutral if training never meets an unknown category.

    Args:
        numeric_F: True where a feature is numeric.
        cardinalities: rows for each categorical feature, the unknown included.
        dimensions: size of an embedding.
        bound: embeddings start uniformly between -bound and bound; `dimensions ** -0.5` by default.

    Example:
        >>> embedding = FeatureEmbedding(torch.tensor([False, True]), [3], dimensions=4)
        >>> embedding(torch.tensor([[0.0, 0.5]])).tolist()
        [[0.5, 0.0, 0.0, 0.0, 0.0]]
    """

    numeric: Tensor
    categorical: Tensor
    first_C: Tensor

    def __init__(
        self, numeric_F: Tensor, cardinalities: Sequence[int], dimensions: int, *, bound: float | None = None
    ) -> None:
        super().__init__()
        # All features share one table. The buffers follow from the transform, so they are not saved.
        first_C = torch.tensor([0, *cardinalities]).cumsum(0)[:-1]
        self.register_buffer("numeric", numeric_F.nonzero()[:, 0], persistent=False)
        self.register_buffer("categorical", (~numeric_F).nonzero()[:, 0], persistent=False)
        self.register_buffer("first_C", first_C, persistent=False)
        self.dimensions = dimensions
        self.table: nn.Module | None = nn.Embedding(sum(cardinalities), dimensions) if cardinalities else None
        self.width = len(self.numeric) + len(cardinalities) * dimensions
        if isinstance(self.table, nn.Embedding):
            bound = dimensions**-0.5 if bound is None else bound
            nn.init.uniform_(self.table.weight, -bound, bound)
            with torch.no_grad():
                self.table.weight[first_C] = 0.0

    def split(self, x_NF: Tensor) -> tuple[Tensor, Tensor]:
        """Map transformed features [N, F] to numeric values [N, P] and embeddings [N, C, E]."""
        if self.table is None:
            return x_NF, x_NF.new_zeros(len(x_NF), 0, self.dimensions)
        return x_NF[:, self.numeric], self.table(x_NF[:, self.categorical].long() + self.first_C)

    def forward(self, x_NF: Tensor) -> Tensor:
        """Transformed features [N, F] to [N, P + C * E]."""
        if self.table is None:
            return x_NF
        x_NP, embedded_NCE = self.split(x_NF)
        return torch.cat([x_NP, embedded_NCE.flatten(1)], dim=1)


class SeparateLinear(nn.Module):
    """A separate linear layer for each of S parts (features, members), [N, S, A] to [N, S, B]."""

    def __init__(self, parts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(parts, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(parts, outputs).uniform_(-bound, bound))

    def forward(self, x_NSA: Tensor) -> Tensor:
        """Apply each part's layer."""
        return torch.einsum("nsa,sab->nsb", x_NSA, self.weight) + self.bias


def hidden_layers(
    width: int, hidden: Sequence[int], *, activate: Activation, dropout: float = 0.0, batch_norm: bool = False
) -> nn.Sequential:
    """Layers `dropout(activation(norm(linear(x))))` of the given sizes, on inputs [N, width]."""
    layers: list[nn.Module] = []
    for a, b in pairwise([width, *hidden]):
        norm = [MicroBatchNorm(b)] if batch_norm else []
        layers += [nn.Linear(a, b), *norm, activation(activate), Dropout(dropout)]
    return nn.Sequential(*layers)


def activation(name: Activation) -> nn.Module:
    """The non-linearity of this name."""
    match name:
        case "relu":
            return nn.ReLU()
        case "gelu":
            return nn.GELU()
        case "elu":
            return nn.ELU()
