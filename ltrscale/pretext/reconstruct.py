"""Reconstruction of features, shared by VIME and SubTab: the decoder and its error.

Shapes: N documents, F features, D embedding, O outputs (a value for each numeric feature, then class logits).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ltrscale.batch import at_least_float32
from ltrscale.config import Config
from ltrscale.models.heads import HeadConfig, mlp_head

MAX_CLASSES = 256
"""Categories of one feature that reconstruction distinguishes; a larger vocabulary is folded."""


def reconstruction_classes(cardinalities: Sequence[int]) -> list[int]:
    """The number of classes in the reconstruction of each categorical feature: its cardinality, at most MAX_CLASSES.

    The target of an index is its remainder by the number of classes, so a vocabulary of 100,000 does not cost 100,000
    outputs a document. Up to MAX_CLASSES rows the target is the index itself.

    Example:
        >>> reconstruction_classes([5, 100_000])
        [5, 256]
    """
    return [min(n, MAX_CLASSES) for n in cardinalities]


def feature_errors(decoded_NO: Tensor, x_NF: Tensor, numeric_F: Tensor, cardinalities: Sequence[int]) -> Tensor:
    """The reconstruction error of each feature: squared error of a number, cross entropy of a category, shape [N, F].

    The papers have numeric features (categories one-hot) in [0, 1] and a squared error for all. Here a category is a
    class, equivalent to one-hot columns under a softmax. Computed, and returned, in float32 at least.

    Args:
        decoded_NO: a value for each numeric feature, then the logits of each categorical one, in the features' order.
        x_NF: the target: normalised numbers and vocabulary indices.
        numeric_F: True where a feature is numeric.
        cardinalities: rows of each categorical feature's embedding, the unknown category included.

    Example:
        >>> decoded = torch.tensor([[1.0, 3.0, 0.0, 0.0]])  # two numbers, and two equal logits
        >>> feature_errors(decoded, torch.tensor([[1.0, 0.0, 5.0]]), torch.tensor([True, False, True]), [2])
        tensor([[0.0000, 0.6931, 4.0000]])
    """
    classes = reconstruction_classes(cardinalities)
    decoded_NO, x_NF = at_least_float32(decoded_NO), at_least_float32(x_NF)
    n_numeric = int(numeric_F.sum())
    errors_NF = torch.empty_like(x_NF)
    errors_NF[:, numeric_F] = (decoded_NO[:, :n_numeric] - x_NF[:, numeric_F]).square()
    columns = (~numeric_F).nonzero()[:, 0].tolist()
    for column, n, logits_NO in zip(columns, classes, torch.split(decoded_NO[:, n_numeric:], classes, 1), strict=True):
        errors_NF[:, column] = F.cross_entropy(logits_NO, x_NF[:, column].long() % n, reduction="none")
    return errors_NF


class DecoderConfig(Config):
    """The MLP that maps an embedding back to features."""

    layers: int = Field(1, ge=1, le=1000)
    """Linear layers, with ReLU between them: 1 in VIME; SubTab mirrors its encoder, which has 2 or more."""
    width: int | None = Field(None, ge=1)
    """Size of the hidden layers; the encoder's width by default."""


class FeatureDecoder(nn.Module):
    """Reconstructs all features from an embedding: numbers, and logits of the classes of categories.

    `feature_errors` reads its outputs.

    Args:
        config: depth and width.
        width: size of the embedding.
        numeric_F: True where a feature is numeric.
        cardinalities: rows of each categorical feature's embedding.

    Example:
        >>> decoder = FeatureDecoder(DecoderConfig(), 16, torch.tensor([True, True, False]), [5])
        >>> decoder(torch.zeros(3, 16)).shape
        torch.Size([3, 7])
    """

    def __init__(self, config: DecoderConfig, width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        outputs = int(numeric_F.sum()) + sum(reconstruction_classes(cardinalities))
        self.layers = mlp_head(HeadConfig(layers=config.layers, width=config.width), width, outputs=outputs)

    def forward(self, h_ND: Tensor) -> Tensor:
        """Embeddings [N, D] to reconstructions [N, O]."""
        decoded_NO: Tensor = self.layers(h_ND)
        return decoded_NO
