"""Encoders: they map the transformed features of each document to an embedding that depends on that document only.

DeepFM and DCNv2 multiply features with one another; TabM is several networks that share weights.

Shapes: N documents, F features, P numeric features, C categorical features, D embedding, H hidden layer of a block; E
dimensions of a field's vector; M members, A and B inputs and outputs of a layer, X = M * B.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ltrscale.models.batch_norm import MicroBatchNorm
from ltrscale.models.layers import (
    Activation,
    Dropout,
    Encoder,
    EncoderSettings,
    FeatureEmbedding,
    InputLayer,
    Layers,
    Size,
    Sizes,
    activation,
    hidden_layers,
)


class Chain(Encoder):
    """Named parts, one after the other; the first one embeds the features."""

    def __init__(self, config: EncoderSettings, width: int, **parts: nn.Module) -> None:
        super().__init__()
        self.config, self.width = config, width
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x_NF: Tensor) -> Tensor:
        for part in self.children():
            x_NF = part(x_NF)
        return x_NF


class IdentityConfig(EncoderSettings):
    """No encoder: numeric features unchanged and embedded categories; with one head layer, the linear model.

    Source: RankSVM.
    Proof: a linear model.
    """

    kind: Literal["identity"] = "identity"

    def build(self, numeric_F: Tensor, cardinalities: Sequence[int]) -> Encoder:
        features = FeatureEmbedding(numeric_F, cardinalities, self.embedding)
        return Chain(self, features.width, features=features)


class LayeredSettings(EncoderSettings):
    """The base of the configs of encoders with hidden layers."""

    hidden: Sizes
    """Sizes of the hidden layers; the last is the size of the embedding."""
    activation: Activation = "relu"
    """The non-linearity."""
    dropout: float
    """Dropout after each hidden layer; a multiple of 1/256 on a CPU."""
    batch_norm: bool = False
    """BatchNorm before each activation."""

    def layers(self, width: int) -> nn.Sequential:
        """The hidden layers, for inputs of this width."""
        return hidden_layers(
            width, self.hidden, activate=self.activation, dropout=self.dropout, batch_norm=self.batch_norm
        )


class MLPConfig(LayeredSettings):
    """Hidden layers, each of linear, optional norm, activation, dropout.

    Source: QIN21, BUYL23.
    Proof: equals torch's layers.
    """

    kind: Literal["mlp"] = "mlp"
    hidden: Sizes = (512, 256, 128)
    """Sizes of the hidden layers; the last is the size of the embedding. BUYL23 has 512, 256, 128."""
    dropout: float = Field(0.25, ge=0, lt=1)
    """Dropout after each hidden layer (BUYL23: 0.25); a multiple of 1/256 on a CPU."""

    def build(self, numeric_F: Tensor, cardinalities: Sequence[int]) -> Encoder:
        features = FeatureEmbedding(numeric_F, cardinalities, self.embedding)
        return Chain(self, self.hidden[-1], features=features, layers=self.layers(features.width))


class IndustrialMLPConfig(EncoderSettings):
    """The MLP that HOU24 trains on its shopping log, with batch norm and dropout on inputs and hidden layers.

    Source: HOU24, A.2.5.
    Proof: layer by layer.
    """

    kind: Literal["industrial_mlp"] = "industrial_mlp"
    width: Size = 136
    """Size of the hidden layers and of the embedding; HOU24 does not state it."""
    layers: Layers = 4
    """Hidden layers."""
    activation: Activation = "relu"
    """The non-linearity."""
    input_dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on the normalised inputs; HOU24 does not state it."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout after each hidden layer; HOU24 does not state it. On a CPU both are multiples of 1/256."""

    def build(self, numeric_F: Tensor, cardinalities: Sequence[int]) -> Encoder:
        # The paper names featurizers without details: here the transform of numbers, and an embedding of each category.
        features, sizes = FeatureEmbedding(numeric_F, cardinalities, self.embedding), [self.width] * self.layers
        return Chain(
            self,
            self.width,
            features=features,
            norm=MicroBatchNorm(features.width),
            dropout=Dropout(self.input_dropout),
            layers=hidden_layers(
                features.width, sizes, activate=self.activation, dropout=self.dropout, batch_norm=True
            ),
        )


class _ResNetBlock(nn.Module):
    """`x + drop(linear(drop(act(linear(norm(x))))))` (Gorishniy et al. 2021, section 3.2)."""

    def __init__(self, config: "ResNetConfig") -> None:
        super().__init__()
        hidden = max(1, round(config.width * config.hidden_factor))
        self.norm = MicroBatchNorm(config.width)
        self.first = nn.Linear(config.width, hidden)
        self.second = nn.Linear(hidden, config.width)
        self.dropout = Dropout(config.dropout)
        self.activate = activation(config.activation)

    def forward(self, x_ND: Tensor) -> Tensor:
        hidden_NH = self.dropout(self.activate(self.first(self.norm(x_ND))))
        return x_ND + self.dropout(self.second(hidden_NH))


class ResNetConfig(EncoderSettings):
    """The tabular ResNet of Gorishniy et al. 2021 without its last linear layer.

    Source: Gorishniy et al. 2021.
    Proof: equals `rtdl_revisiting_models`.
    """

    kind: Literal["resnet"] = "resnet"
    width: Size = 136
    """Size of the embedding, and of every block's input and output."""
    blocks: Layers = 3
    """Number of residual blocks."""
    hidden_factor: float = Field(1.0, gt=0)
    """Size of a block's hidden layer, as a multiple of the width."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout after both linear layers of a block; a multiple of 1/256 on a CPU."""
    activation: Activation = "relu"
    """The non-linearity; the public code of HOU24 has gelu in the blocks."""
    last_activation: Activation | None = None
    """The non-linearity after the last norm; that of the blocks by default. The public code of HOU24 has relu."""
    input_bias: bool = True
    """Whether the first linear layer has a bias; the public code of HOU24 has none."""

    def build(self, numeric_F: Tensor, cardinalities: Sequence[int]) -> Encoder:
        features = FeatureEmbedding(numeric_F, cardinalities, self.embedding)
        return Chain(
            self,
            self.width,
            features=features,
            linear=nn.Linear(features.width, self.width, bias=self.input_bias),
            blocks=nn.Sequential(*(_ResNetBlock(self) for _ in range(self.blocks))),
            norm=MicroBatchNorm(self.width),
            activate=activation(self.last_activation or self.activation),
        )


def _factorization(x_NP: Tensor, vectors_PE: Tensor, embedded_NCE: Tensor) -> Tensor:
    """The sum over pairs of fields of `<v_i, v_j> x_i x_j`, shape [N], in linear time (Guo et al. 2017, equation 2)."""
    sum_NE = x_NP @ vectors_PE + embedded_NCE.sum(1)
    squares_NE = x_NP.square() @ vectors_PE.square() + embedded_NCE.square().sum(1)
    return (sum_NE.square() - squares_NE).sum(1) / 2


class DeepFM(Encoder):
    """DeepFM (Guo et al. 2017, equations 1 to 4) before its last linear layer.

    The embedding is `[first-order term, second-order term, last hidden layer]`: under a linear head with weights
    (1, 1, w) the score is the paper's `y_FM + y_DNN`. A head with learned weights may also weigh the terms. The MLP
    reads the fields' vectors; that of a numeric field is its value times the learned vector. Initial vectors are so
    small that the second-order term has a deviation of about 1 on standardised features.
    """

    config: "DeepFMConfig"

    def __init__(self, config: "DeepFMConfig", numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.width = 2 + config.hidden[-1]
        numeric, dimensions = int(numeric_F.sum()), config.embedding
        fields = len(numeric_F) if config.numeric_fields else len(cardinalities)
        # n fields make n^2 / 2 products of two vectors, each with a deviation of bound^2 / 3 * sqrt(dimensions).
        bound = (18 / dimensions) ** 0.25 * max(fields, 1) ** -0.5
        first_bound = len(numeric_F) ** -0.5
        self.features = FeatureEmbedding(numeric_F, cardinalities, dimensions, bound=bound)
        self.weights = FeatureEmbedding(numeric_F, cardinalities, 1, bound=first_bound)
        self.weights_P = nn.Parameter(torch.empty(numeric).uniform_(-first_bound, first_bound))
        vectors_PE = torch.empty(numeric if config.numeric_fields else 0, dimensions)
        self.vectors_PE = nn.Parameter(vectors_PE.uniform_(-bound, bound))
        first, *further = config.layers(fields * dimensions if config.numeric_fields else self.features.width)
        assert isinstance(first, nn.Linear)
        self.first, self.rest = first, nn.Sequential(*further)

    def forward(self, x_NF: Tensor) -> Tensor:
        x_NP, embedded_NCE = self.features.split(x_NF)
        in_fields_NP = x_NP[:, : len(self.vectors_PE)]
        with torch.autocast(x_NF.device.type, enabled=False):  # bfloat16 would lose the difference of large sums
            # a matrix, not a vector: onnxruntime 1.32 fuses the sum with a product by a vector, and gets it wrong
            linear_N1 = x_NP @ self.weights_P[:, None]
            first_N = linear_N1.squeeze(1) + self.weights.split(x_NF)[1].sum((1, 2))
            second_N = _factorization(in_fields_NP, self.vectors_PE, embedded_NCE)
        inputs_ND = torch.cat([x_NP, embedded_NCE.flatten(1)], dim=1)
        h_NH = self.rest(F.linear(inputs_ND, self._first_weight(), self.first.bias))
        return torch.cat([first_N[:, None], second_N[:, None], h_NH], dim=1)

    def _first_weight(self) -> Tensor:
        """Weights of the MLP's first layer for numbers, not vectors: `sum_i W_i (x_i v_i) = sum_i x_i (W_i v_i)`."""
        numeric = self.vectors_PE.numel()
        weight_HPE = self.first.weight[:, :numeric].reshape(len(self.first.weight), *self.vectors_PE.shape)
        return torch.cat([(weight_HPE * self.vectors_PE).sum(2), self.first.weight[:, numeric:]], dim=1)


class DeepFMConfig(LayeredSettings):
    """DeepFM of Guo et al. 2017: a factorization machine and an MLP that share the vectors of the features.

    Source: Guo et al. 2017.
    Proof: equals `deepctr_torch`.
    """

    kind: Literal["deepfm"] = "deepfm"
    encoder: ClassVar = DeepFM
    hidden: Sizes = (400, 400, 400)
    """Sizes of the MLP's hidden layers, by default those of Guo et al."""
    dropout: float = Field(0.5, ge=0, lt=1)
    """Dropout after each hidden layer (Guo et al.: 0.5); a multiple of 1/256 on a CPU."""
    embedding: Size = 8
    """Dimensions of each feature's vector (HOU24: 8)."""
    numeric_fields: bool = True
    """Numeric features have vectors too, multiplied by their values (Guo et al., equation 2). If false, they enter only
    the first-order term and the MLP, as plain numbers, like in common CTR libraries."""


class _CrossLayer(nn.Module):
    """`x_0 * (W x + b) + x` elementwise (Wang et al. 2021, equation 1), or with W of a low rank (equation 2)."""

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        self.down = nn.Identity() if rank is None else nn.Linear(width, rank, bias=False)
        self.linear = nn.Linear(rank or width, width)

    def forward(self, x0_ND: Tensor, x_ND: Tensor) -> Tensor:
        return x0_ND * self.linear(self.down(x_ND)) + x_ND


class DCNv2(Encoder):
    """DCN V2 (Wang et al. 2021, section 3) before its last linear layer; a head of one layer completes the model.

    The input x_0 is the numeric features followed by the embeddings of the categories. The embedding is the MLP's last
    hidden layer (`stacked`), or `[cross layers' output, last hidden layer]` (`parallel`).
    """

    config: "DCNv2Config"

    def __init__(self, config: "DCNv2Config", numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.features = FeatureEmbedding(numeric_F, cardinalities, config.embedding)
        width = self.features.width
        self.width = config.hidden[-1] + (width if config.structure == "parallel" else 0)
        self.cross = nn.ModuleList(_CrossLayer(width, config.rank) for _ in range(config.cross_layers))
        self.mlp = config.layers(width)

    def forward(self, x_NF: Tensor) -> Tensor:
        x0_ND = self.features(x_NF)
        x_ND = x0_ND
        for layer in self.cross:
            x_ND = layer(x0_ND, x_ND)
        if self.config.structure == "parallel":
            return torch.cat([x_ND, self.mlp(x0_ND)], dim=1)
        return self.mlp(x_ND)


class DCNv2Config(LayeredSettings):
    """DCN V2 of Wang et al. 2021: layers that multiply with the input, followed by an MLP or in parallel with it.

    Source: Wang et al. 2021.
    Proof: equals `deepctr_torch`.
    """

    kind: Literal["dcnv2"] = "dcnv2"
    encoder: ClassVar = DCNv2
    cross_layers: Layers = 3
    """Cross layers (HOU24: 2, 3 or 4); n layers give products of up to n + 1 features."""
    rank: Size | None = None
    """Rank of the matrices of the cross layers; full matrices by default."""
    structure: Literal["stacked", "parallel"] = "stacked"
    """`stacked`: the MLP reads the output of the cross layers; `parallel`: it reads the input, as they do."""
    hidden: Sizes = (400, 400)
    """Sizes of the MLP's hidden layers; HOU24 does not state them."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout after each hidden layer; a multiple of 1/256 on a CPU."""


class TabM(Encoder):
    """TabM (Gorishniy et al. 2025, section 3) before its last linear layers: `[h_1, .., h_M]` of M members.

    A layer of member m is `s_m * (W (r_m * x)) + b_m`, where W is shared. The factors r of the first layer start as
    random signs, and all others as 1: at first members differ in their inputs only. `mini` has only the factors of the
    first inputs; all layers are shared.
    """

    config: "TabMConfig"

    def __init__(self, config: "TabMConfig", numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
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
        x_NA, (first, *others) = self.features(x_NF), self.layers
        if self.training or not isinstance(first, _AdaptedLinear):
            x_NMB: Tensor = first(self.signs(x_NA))
        else:
            x_NMB = first.of_shared(x_NA, self.signs.r_MA)
        for layer in others:
            x_NMB = layer(x_NMB)
        return x_NMB.flatten(1)


class TabMConfig(LayeredSettings):
    """TabM: members of one MLP that share its weights, and differ in factors of inputs and outputs of its layers.

    Source: Gorishniy et al. 2025.
    Proof: equals `tabm`; one member equals `mlp`.
    """

    kind: Literal["tabm"] = "tabm"
    encoder: ClassVar = TabM
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
