"""TabM: an encoder of several networks that share weights.

Shapes: N documents, F features, D embedding, M members, A and B inputs and outputs of a layer, X = M * B.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ltrscale.models.batch_norm import MicroBatchNorm
from ltrscale.models.encoder import Encoder
from ltrscale.models.encoders import LayeredSettings
from ltrscale.models.layers import Dropout, FeatureEmbedding, InputLayer, Sizes, activation


class TabMConfig(LayeredSettings):
    """TabM: members of one MLP that share its weights, and differ in factors of inputs and outputs of its layers.

    Source: Gorishniy et al. 2025.
    Proof: equals `tabm`; one member equals `mlp`.
    """

    kind: Literal["tabm"] = "tabm"
    members: int = Field(16, ge=1, le=1000)
    """Networks in one, each with its own head and loss; 32 in the paper. Time and memory of a step grow with their
    number, the size of the weights hardly does."""
    structure: Literal["full", "mini"] = "full"
    """Which parts of the MLP each member has for itself: `full` factors of inputs and outputs and the bias of every
    layer, `mini` factors of the first inputs only."""
    hidden: Sizes = (512, 512, 512)
    """Sizes of the hidden layers; the last is the size of a member's embedding."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout after each hidden layer; a multiple of 1/256 on a CPU."""
    batch_norm: bool = False
    """BatchNorm before each activation, with statistics, scale and shift of each member; not in the paper."""

    def build(self, numeric_F: Tensor, cardinalities: Sequence[int]) -> Encoder:
        """A `TabM` with fresh weights."""
        return TabM(self, numeric_F, cardinalities)


class TabM(Encoder):
    """TabM (Gorishniy et al. 2025, section 3) before its last linear layers: `[h_1, .., h_M]` of M members.

    A layer of member m is `s_m * (W (r_m * x)) + b_m`, where W is shared. The factors r of the first layer start as
    random signs, and all others as 1: at first members differ in their inputs only. `mini` has only the factors of the
    first inputs; all layers are shared.
    """

    config: TabMConfig

    def __init__(self, config: TabMConfig, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.config, self.members = config, config.members
        self.width = config.members * config.hidden[-1]
        self.features = FeatureEmbedding(numeric_F, cardinalities, config.embedding)
        self.signs = _Signs(config.members, self.features.width)
        layers: list[nn.Module] = []
        for number, (a, b) in enumerate(pairwise([self.features.width, *config.hidden])):
            full = (
                _AdaptedLinear(config.members, a, b, scales_inputs=number > 0) if config.structure == "full" else None
            )
            norm = [_MemberNorm(config.members * b)] if config.batch_norm else []
            layers += [full or nn.Linear(a, b), *norm, activation(config.activation), Dropout(config.dropout)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x_NF: Tensor) -> Tensor:
        """Transformed features [N, F] to embeddings [N, D]."""
        x_NA, (first, *others) = self.features(x_NF), self.layers
        if self.training or not isinstance(first, _AdaptedLinear):
            x_NMB: Tensor = first(self.signs(x_NA))
        else:
            x_NMB = first.of_shared(x_NA, self.signs.r_MA)
        for layer in others:
            x_NMB = layer(x_NMB)
        return x_NMB.flatten(1)


class _Signs(InputLayer):
    """The inputs [N, A] of each member, [N, M, A]: multiplied by learnt factors, which start as random signs."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.r_MA = nn.Parameter(torch.randint(0, 2, (members, width)) * 2.0 - 1)

    def forward(self, x_NA: Tensor) -> Tensor:
        return x_NA[:, None] * self.r_MA


class _AdaptedLinear(nn.Module):
    """A linear layer that members share, with factors of each (BatchEnsemble): `s_m * (W (r_m * x)) + b_m`.

    Scoring multiplies by weights with the factors inside, `s_m W r_m`, which saves two passes over the documents.
    """

    def __init__(self, members: int, inputs: int, outputs: int, *, scales_inputs: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.r_MA = nn.Parameter(torch.ones(members, inputs)) if scales_inputs else None
        self.s_MB = nn.Parameter(torch.ones(members, outputs))
        bias_B = torch.empty(outputs).uniform_(-(inputs**-0.5), inputs**-0.5)
        self.bias_MB = nn.Parameter(bias_B.repeat(members, 1))

    def forward(self, x_NMA: Tensor) -> Tensor:
        if self.training or self.r_MA is None:
            x_NMA = x_NMA if self.r_MA is None else x_NMA * self.r_MA
            return torch.addcmul(self.bias_MB, self.linear(x_NMA), self.s_MB)
        weights_MAB = self._weights_MBA(self.r_MA).transpose(1, 2)
        return torch.baddbmm(self.bias_MB[:, None], x_NMA.transpose(0, 1), weights_MAB).transpose(0, 1)

    def of_shared(self, x_NA: Tensor, r_MA: Tensor) -> Tensor:
        """The outputs [N, M, B] of inputs that members share before their factors r."""
        weights_XA = self._weights_MBA(r_MA).flatten(0, 1)
        return F.linear(x_NA, weights_XA, self.bias_MB.flatten()).view(-1, *self.bias_MB.shape)

    def _weights_MBA(self, r_MA: Tensor) -> Tensor:
        return self.linear.weight * self.s_MB[:, :, None] * r_MA[:, None]


class _MemberNorm(MicroBatchNorm):
    """BatchNorm of members [N, M, B], with statistics of each."""

    def forward(self, x_NMB: Tensor) -> Tensor:
        return super().forward(x_NMB.flatten(1)).view_as(x_NMB)
