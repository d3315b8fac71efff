"""Encoders: they map the transformed features of each document to an embedding that depends on that document only.

Shapes: N documents, F features, C categorical features, D embedding, H hidden layer of a block.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from ltrscale.models.layers import (
    Activation,
    Dropout,
    Encoder,
    EncoderSettings,
    FeatureEmbedding,
    Layers,
    MicroBatchNorm,
    Size,
    Sizes,
    activation,
    hidden_layers,
)


class IdentityConfig(EncoderSettings):
    """No encoder: numeric features unchanged and embedded categories; with one head layer, the linear model.

    Source: RankSVM.
    Proof: a linear model.
    """

    kind: Literal["identity"] = "identity"

    def build(self, numeric_F: Tensor, cardinalities: Sequence[int]) -> Encoder:
        """An `Identity` for these features."""
        return Identity(self, numeric_F, cardinalities)


class Identity(Encoder):
    """The features themselves; with a head of one layer, RankSVM's linear model."""

    def __init__(self, config: IdentityConfig, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.features = FeatureEmbedding(numeric_F, cardinalities, config.embedding)
        self.width = self.features.width

    def forward(self, x_NF: Tensor) -> Tensor:
        """Transformed features [N, F] to embeddings [N, D]."""
        h_ND: Tensor = self.features(x_NF)
        return h_ND


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
        """An `MLP` with fresh weights."""
        return MLP(self, numeric_F, cardinalities)


class MLP(Encoder):
    """Multilayer perceptron without its last linear layer."""

    def __init__(self, config: MLPConfig, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.width = config.hidden[-1]
        self.features = FeatureEmbedding(numeric_F, cardinalities, config.embedding)
        self.layers = config.layers(self.features.width)

    def forward(self, x_NF: Tensor) -> Tensor:
        """Transformed features [N, F] to embeddings [N, D]."""
        h_ND: Tensor = self.layers(self.features(x_NF))
        return h_ND


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
        """An `IndustrialMLP` with fresh weights."""
        return IndustrialMLP(self, numeric_F, cardinalities)


class IndustrialMLP(Encoder):
    """The ranker of HOU24, A.2.5, without its last linear layer: featurizers, then four hidden layers.

    `x = drop(norm(features))`, then `x = drop(relu(norm(linear(x))))` four times. The paper names featurizers without
    details; here they are the feature transform for numeric features and an embedding for each categorical one.
    """

    def __init__(self, config: IndustrialMLPConfig, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.features = FeatureEmbedding(numeric_F, cardinalities, config.embedding)
        self.norm = MicroBatchNorm(self.features.width)
        self.dropout = Dropout(config.input_dropout)
        self.layers = hidden_layers(
            self.features.width,
            [config.width] * config.layers,
            activate=config.activation,
            dropout=config.dropout,
            batch_norm=True,
        )

    def forward(self, x_NF: Tensor) -> Tensor:
        """Transformed features [N, F] to embeddings [N, D]."""
        h_ND: Tensor = self.layers(self.dropout(self.norm(self.features(x_NF))))
        return h_ND


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
        """A `ResNet` with fresh weights."""
        return ResNet(self, numeric_F, cardinalities)


class _ResNetBlock(nn.Module):
    """`x + drop(linear(drop(act(linear(norm(x))))))` (Gorishniy et al. 2021, section 3.2)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        hidden = max(1, round(config.width * config.hidden_factor))
        self.norm = MicroBatchNorm(config.width)
        self.first = nn.Linear(config.width, hidden)
        self.second = nn.Linear(hidden, config.width)
        self.dropout = Dropout(config.dropout)
        self.activate = activation(config.activation)

    def forward(self, x_ND: Tensor) -> Tensor:
        hidden_NH = self.dropout(self.activate(self.first(self.norm(x_ND))))
        added_ND: Tensor = self.dropout(self.second(hidden_NH))
        return x_ND + added_ND


class ResNet(Encoder):
    """Tabular ResNet: embedding of categories, linear layer, residual blocks, norm, activation."""

    def __init__(self, config: ResNetConfig, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.features = FeatureEmbedding(numeric_F, cardinalities, config.embedding)
        self.linear = nn.Linear(self.features.width, config.width, bias=config.input_bias)
        self.blocks = nn.Sequential(*(_ResNetBlock(config) for _ in range(config.blocks)))
        self.norm = MicroBatchNorm(config.width)
        self.activate = activation(config.last_activation or config.activation)

    def forward(self, x_NF: Tensor) -> Tensor:
        """Transformed features [N, F] to embeddings [N, D]."""
        h_ND: Tensor = self.activate(self.norm(self.blocks(self.linear(self.features(x_NF)))))
        return h_ND
