"""Encoders that multiply features with one another: DeepFM and DCNv2.

Shapes: N documents, F features, P numeric features, C categorical features, E dimensions of a field's vector,
D embedding, H hidden layer.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ltrscale.models.encoders import LayeredSettings
from ltrscale.models.layers import Encoder, FeatureEmbedding, Layers, Size, Sizes


class DeepFMConfig(LayeredSettings):
    """DeepFM of Guo et al. 2017: a factorization machine and an MLP that share the vectors of the features.

    Source: Guo et al. 2017.
    Proof: equals `deepctr_torch`.
    """

    kind: Literal["deepfm"] = "deepfm"
    hidden: Sizes = (400, 400, 400)
    """Sizes of the MLP's hidden layers, by default those of Guo et al."""
    dropout: float = Field(0.5, ge=0, lt=1)
    """Dropout after each hidden layer (Guo et al.: 0.5); a multiple of 1/256 on a CPU."""
    embedding: Size = 8
    """Dimensions of each feature's vector (HOU24: 8)."""
    numeric_fields: bool = True
    """Numeric features have vectors too, multiplied by their values (Guo et al., equation 2). If false, they enter only
    the first-order term and the MLP, as plain numbers, like in common CTR libraries."""

    def build(self, numeric_F: Tensor, cardinalities: Sequence[int]) -> Encoder:
        """A `DeepFM` with fresh weights."""
        return DeepFM(self, numeric_F, cardinalities)


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

    config: DeepFMConfig

    def __init__(self, config: DeepFMConfig, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
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
        """Transformed features [N, F] to embeddings [N, D]."""
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


class DCNv2Config(LayeredSettings):
    """DCN V2 of Wang et al. 2021: layers that multiply with the input, followed by an MLP or in parallel with it.

    Source: Wang et al. 2021.
    Proof: equals `deepctr_torch`.
    """

    kind: Literal["dcnv2"] = "dcnv2"
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

    def build(self, numeric_F: Tensor, cardinalities: Sequence[int]) -> Encoder:
        """A `DCNv2` with fresh weights."""
        return DCNv2(self, numeric_F, cardinalities)


class _CrossLayer(nn.Module):
    """`x_0 * (W x + b) + x` elementwise (Wang et al. 2021, equation 1), or with W of a low rank (equation 2)."""

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        self.down = nn.Identity() if rank is None else nn.Linear(width, rank, bias=False)
        self.linear = nn.Linear(rank or width, width)

    def forward(self, x0_ND: Tensor, x_ND: Tensor) -> Tensor:
        crossed_ND: Tensor = x0_ND * self.linear(self.down(x_ND)) + x_ND
        return crossed_ND


class DCNv2(Encoder):
    """DCN V2 (Wang et al. 2021, section 3) before its last linear layer; a head of one layer completes the model.

    The input x_0 is the numeric features followed by the embeddings of the categories. The embedding is the MLP's last
    hidden layer (`stacked`), or `[cross layers' output, last hidden layer]` (`parallel`).
    """

    config: DCNv2Config

    def __init__(self, config: DCNv2Config, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.features = FeatureEmbedding(numeric_F, cardinalities, config.embedding)
        width = self.features.width
        self.width = config.hidden[-1] + (width if config.structure == "parallel" else 0)
        self.cross = nn.ModuleList(_CrossLayer(width, config.rank) for _ in range(config.cross_layers))
        self.mlp = config.layers(width)

    def forward(self, x_NF: Tensor) -> Tensor:
        """Transformed features [N, F] to embeddings [N, D]."""
        x0_ND = self.features(x_NF)
        x_ND = x0_ND
        for layer in self.cross:
            x_ND = layer(x0_ND, x_ND)
        if self.config.structure == "parallel":
            return torch.cat([x_ND, self.mlp(x0_ND)], dim=1)
        h_ND: Tensor = self.mlp(x_ND)
        return h_ND
