"""The closed unions of a network's parts that a config may name. Add one line here for each new member."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.models.attention import DASALCConfig, RankFormerConfig, SetRankConfig
from ltrscale.models.contexts import DLCMConfig, GSFConfig
from ltrscale.models.cross_encoder import CrossEncoderConfig
from ltrscale.models.encoders import (
    DCNv2Config,
    DeepFMConfig,
    IdentityConfig,
    IndustrialMLPConfig,
    MLPConfig,
    ResNetConfig,
    TabMConfig,
)
from ltrscale.models.features import FeatureTransform, TransformConfig
from ltrscale.models.layers import Encoder
from ltrscale.models.numbers import InFront, PlainConfig, PLEConfig, PLRConfig

FeatureEncoderConfig = Annotated[
    ResNetConfig | IdentityConfig | MLPConfig | IndustrialMLPConfig | DeepFMConfig | DCNv2Config | TabMConfig,
    Field(discriminator="kind"),
]
"""Encoders of dense features."""
EncoderConfig = Annotated[FeatureEncoderConfig | CrossEncoderConfig, Field(discriminator="kind")]
"""All encoders, including those of text."""
ContextConfig = Annotated[
    DASALCConfig | RankFormerConfig | SetRankConfig | DLCMConfig | GSFConfig, Field(discriminator="kind")
]
NumbersConfig = Annotated[PlainConfig | PLEConfig | PLRConfig, Field(discriminator="kind")]


class NetworkConfig(Config):
    """Feature transform, embedding of numbers and encoder."""

    transform: TransformConfig = TransformConfig()
    numbers: NumbersConfig = PlainConfig()
    """How numeric features enter any encoder; `plain` leaves them as they are."""
    encoder: EncoderConfig = ResNetConfig()
    """Maps a document's features, and its text, to an embedding."""
    initial: str | None = None
    """Directory with initial weights of a cross_encoder in Hugging Face's format: config.json and model.safetensors of
    a BERT, whose sizes replace those of `encoder.bert`. Empty starts from random ones."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.initial is not None and not isinstance(self.encoder, CrossEncoderConfig):
            raise ValueError(f"initial has weights of a cross_encoder, and encoder.kind is {self.encoder.kind}")
        if self.numbers != PlainConfig() and any(self.encoder.reads_tokens):
            raise ValueError(f"numbers: encoder.kind {self.encoder.kind} takes its features plain; leave numbers out")
        if self.numbers.fitted_bins and self.transform.per_query:
            raise ValueError(
                f"numbers.kind {self.numbers.kind} has bins of values that transform.per_query replaces; set "
                "numbers.within_lists instead, which keeps both"
            )
        return self

    def build(self, transform: FeatureTransform) -> Encoder:
        """The encoder with fresh weights, behind its embedding of numbers if it has one."""
        numbers = self.numbers.build(transform)
        if numbers is None:
            return self.encoder.build(transform.numeric_F, transform.cardinalities)
        return InFront(numbers, self.encoder.build(numbers.numeric_F, transform.cardinalities))
