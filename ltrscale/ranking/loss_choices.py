"""The closed union of ranking losses that a config may name. Add one line here for each new member."""

from typing import Annotated

from pydantic import Field

from ltrscale.ranking.loss import SigmoidConfig, SquaredErrorConfig
from ltrscale.ranking.losses import (
    ApproxNDCGConfig,
    AttentionAllocationConfig,
    GumbelApproxNDCGConfig,
    ListMLEConfig,
    ListNetConfig,
    SoftmaxConfig,
)
from ltrscale.ranking.pairwise import HingeConfig, LambdaRankConfig, RankNetConfig, SoftmaxNegativesConfig
from ltrscale.ranking.sorting import GumbelNeuralSortNDCGConfig, NeuralSortNDCGConfig, PiRankConfig

LossConfig = Annotated[
    SigmoidConfig
    | SquaredErrorConfig
    | RankNetConfig
    | HingeConfig
    | LambdaRankConfig
    | SoftmaxConfig
    | SoftmaxNegativesConfig
    | AttentionAllocationConfig
    | ListNetConfig
    | ListMLEConfig
    | ApproxNDCGConfig
    | GumbelApproxNDCGConfig
    | NeuralSortNDCGConfig
    | GumbelNeuralSortNDCGConfig
    | PiRankConfig,
    Field(discriminator="kind"),
]
