"""The closed unions of encoders and list contexts that a config may name. Add one line here for each new member."""

from typing import Annotated

from pydantic import Field

from ltrscale.config import Config
from ltrscale.models.attention import DASALCConfig, RankFormerConfig
from ltrscale.models.encoders import IdentityConfig, IndustrialMLPConfig, MLPConfig, ResNetConfig
from ltrscale.models.features import TransformConfig
from ltrscale.models.interactions import DCNv2Config, DeepFMConfig
from ltrscale.models.listwise import DLCMConfig, GSFConfig
from ltrscale.models.setrank import SetRankConfig

EncoderConfig = Annotated[
    ResNetConfig | IdentityConfig | MLPConfig | IndustrialMLPConfig | DeepFMConfig | DCNv2Config,
    Field(discriminator="kind"),
]
ContextConfig = Annotated[
    DASALCConfig | RankFormerConfig | SetRankConfig | DLCMConfig | GSFConfig, Field(discriminator="kind")
]


class NetworkConfig(Config):
    """Feature transform and encoder."""

    transform: TransformConfig = TransformConfig()
    encoder: EncoderConfig = ResNetConfig()
    """Maps a document's features to an embedding."""
