"""The closed union of pretext objectives that a config may name: a new one is a line here.

That of augmentations is in `ltrscale.pretext.augment`, for a composition is made of them.
"""

from typing import Annotated

from pydantic import Field

from ltrscale.pretext.contrast import DaclConfig, ScarfConfig, SimCLRConfig, SimCLRRankConfig, SimCLRSampleConfig
from ltrscale.pretext.simsiam import SimSiamConfig
from ltrscale.pretext.subtab import SubTabConfig
from ltrscale.pretext.vime import VimeConfig

MethodConfig = Annotated[
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
