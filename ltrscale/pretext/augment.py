"""Augmentations: random changes to a document's features that make a view of it.

Shapes: N documents, F features.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ltrscale.config import Config


class ZeroingConfig(Config):
    """Set each feature to 0 with the same probability, independently."""

    kind: Literal["zeroing"] = "zeroing"
    probability: float = Field(0.1, ge=0, le=1)
    """Share of the entries that are set to 0."""


class GaussianConfig(Config):
    """Add normal noise to every numeric feature."""

    kind: Literal["gaussian"] = "gaussian"
    scale: float = Field(1.0, ge=0)
    """Standard deviation of the noise, in units of the normalised features."""


AugmentConfig = Annotated[ZeroingConfig | GaussianConfig, Field(discriminator="kind")]


def augment(
    x_NF: Tensor, numeric_F: Tensor, config: ZeroingConfig | GaussianConfig, *, generator: torch.Generator
) -> Tensor:
    """One random view of documents, shape [N, F]; the input is left as it is (Hou et al. 2024, section 3).

    Zeroing sets entries to 0, which for a normalised numeric feature is its centre and for a category the index of
    the unknown one. Gaussian noise leaves categories alone. Draws come from `generator` only and every column takes
    part in them, so that the view is a function of its state and of the shape.

    Args:
        x_NF: normalised features, as FeatureTransform gives them.
        numeric_F: True where a feature is numeric, False where it is a vocabulary index.
        config: which augmentation, and how strong.
        generator: source of randomness, on the device of x_NF.

    Example:
        >>> x, numeric = torch.ones(1, 4), torch.tensor([True, True, False, False])
        >>> augment(x, numeric, ZeroingConfig(probability=0.5), generator=torch.Generator().manual_seed(1))
        tensor([[1., 0., 0., 1.]])
        >>> augment(x, numeric, GaussianConfig(scale=0.1), generator=torch.Generator().manual_seed(1))
        tensor([[1.0661, 1.0267, 1.0000, 1.0000]])
    """
    match config:
        case ZeroingConfig(probability=probability):
            drop_NF = torch.rand(x_NF.shape, generator=generator, device=x_NF.device) < probability
            return x_NF.masked_fill(drop_NF, 0.0)
        case GaussianConfig(scale=scale):
            noise_NF = torch.randn(x_NF.shape, generator=generator, device=x_NF.device, dtype=x_NF.dtype)
            return torch.addcmul(x_NF, noise_NF, scale * numeric_F.to(x_NF.dtype))
