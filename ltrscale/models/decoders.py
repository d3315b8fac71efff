"""Decoders: what pretext objectives put on an encoder to reconstruct its input; dropped after pretraining.

Shapes: N documents, F features, D embedding, O outputs (a value for each numeric feature, then class logits).
"""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor, nn

from ltrscale.config import Config
from ltrscale.models.heads import HeadConfig, mlp_head
from ltrscale.pretext.reconstruct import reconstruction_classes


class DecoderConfig(Config):
    """The MLP that turns an embedding back into features."""

    layers: int = Field(1, ge=1, le=1000)
    """Linear layers, with ReLU between them: 1 in VIME; SubTab mirrors its encoder, which has 2 or more."""
    width: int | None = Field(None, ge=1)
    """Size of the hidden layers; the encoder's width by default."""


class FeatureDecoder(nn.Module):
    """Reconstructs all features from an embedding: numbers, and logits of the classes of categories.

    `ltrscale.pretext.reconstruct.feature_errors` reads its outputs.

    Args:
        config: depth and width.
        width: size of the embedding.
        numeric_F: which features are numeric.
        cardinalities: rows of each categorical feature's embedding.

    Example:
        >>> import torch
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


class VimeDecoder(nn.Module):
    """VIME's two estimators on one embedding: of the features, and of which of them were corrupted.

    Args:
        config: depth and width of both.
        width: size of the embedding.
        numeric_F: which features are numeric.
        cardinalities: rows of each categorical feature's embedding.

    Example:
        >>> import torch
        >>> decoder = VimeDecoder(DecoderConfig(), 16, torch.tensor([True, True, False]), [5])
        >>> decoded_NO, mask_logits_NF = decoder(torch.zeros(3, 16))
        >>> decoded_NO.shape, mask_logits_NF.shape
        (torch.Size([3, 7]), torch.Size([3, 3]))
    """

    def __init__(self, config: DecoderConfig, width: int, numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        self.features = FeatureDecoder(config, width, numeric_F, cardinalities)
        self.mask = mlp_head(HeadConfig(layers=config.layers, width=config.width), width, outputs=len(numeric_F))

    def forward(self, h_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [N, D] to reconstructions [N, O] and logits of the mask [N, F]."""
        return self.features(h_ND), self.mask(h_ND)
