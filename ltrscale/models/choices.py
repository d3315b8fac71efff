"""The closed unions of encoders and list contexts that a config may name. Add one line here for each new member."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.models.attention import DASALCConfig, RankFormerConfig, SetRankConfig
from ltrscale.models.cross_encoder import CrossEncoderConfig
from ltrscale.models.encoders import IdentityConfig, IndustrialMLPConfig, MLPConfig, ResNetConfig
from ltrscale.models.features import TransformConfig
from ltrscale.models.interactions import DCNv2Config, DeepFMConfig
from ltrscale.models.listwise import DLCMConfig, GSFConfig

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
    a BERT, whose sizes replace those of `encoder.bert`. Empty starts from random ones."""

    @model_validator(mode="after")
    def _has_a_transformer(self) -> Self:
        if self.initial is not None and not isinstance(self.encoder, CrossEncoderConfig):
            raise ValueError(f"initial has weights of a cross_encoder, and encoder.kind is {self.encoder.kind}")
        return self
