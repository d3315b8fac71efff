"""The closed union of pretext objectives that a config may name. Add one line here for each new member.

The union of augmentations is in `ltrscale.pretext.augment`, because a composition consists of augmentations.
"""

from typing import Annotated

from pydantic import Field

from ltrscale.pretext.contrast import DaclConfig, ScarfConfig, SimCLRConfig, SimCLRRankConfig, SimCLRSampleConfig
from ltrscale.pretext.objective import SimSiamConfig
from ltrscale.pretext.reconstruct import MaskedLanguageConfig, SubTabConfig, VimeConfig

FeatureMethodConfig = Annotated[
    SimCLRRankConfig
    | SimCLRConfig
    | SimCLRSampleConfig
    | SimSiamConfig
    | ScarfConfig
    | DaclConfig
    | VimeConfig
    | SubTabConfig,
    Field(discriminator="kind"),
]
"""Objectives on dense features."""
MethodConfig = Annotated[FeatureMethodConfig | MaskedLanguageConfig, Field(discriminator="kind")]
"""All objectives, including those on text."""
