"""The closed unions of encoders and list contexts that a config may name. Add one line here for each new member."""

from typing import Annotated

from pydantic import Field

from ltrscale.config import Config
from ltrscale.models.attention import DASALCConfig, RankFormerConfig
from ltrscale.models.cross_encoder import CrossEncoderConfig
from ltrscale.models.encoders import IdentityConfig, IndustrialMLPConfig, MLPConfig, ResNetConfig
from ltrscale.models.features import TransformConfig
from ltrscale.models.interactions import DCNv2Config, DeepFMConfig
from ltrscale.models.listwise import DLCMConfig, GSFConfig
from ltrscale.models.setrank import SetRankConfig

FeatureEncoderConfig = Annotated[
    ResNetConfig | IdentityConfig | MLPConfig | IndustrialMLPConfig | DeepFMConfig | DCNv2Config,
    Field(discriminator="kind"),
]
"""Encoders of dense features."""
EncoderConfig = Annotated[FeatureEncoderConfig | CrossEncoderConfig, Field(discriminator="kind")]
"""All encoders, those of text too."""
ContextConfig = Annotated[
    DASALCConfig | RankFormerConfig | SetRankConfig | DLCMConfig | GSFConfig, Field(discriminator="kind")
]


class NetworkConfig(Config):
    """Feature transform and encoder."""

    transform: TransformConfig = TransformConfig()
    encoder: EncoderConfig = ResNetConfig()
    """Maps a document's features, and its text, to an embedding."""
    initial: str | None = None
    """Directory with initial weights of a cross_encoder in Hugging Face's format: config.json and model.safetensors of
    a BERT. Empty starts from random ones."""
