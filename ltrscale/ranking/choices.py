"""The closed union of ranking losses that a config may name: a new one is a line here."""

from typing import Annotated

from pydantic import Field

from ltrscale.ranking.losses import (
    ApproxNDCGConfig,
    AttentionAllocationConfig,
    GumbelApproxNDCGConfig,
    ListMLEConfig,
    SoftmaxConfig,
)
from ltrscale.ranking.pairwise import HingeConfig, LambdaRankConfig, RankNetConfig, SoftmaxNegativesConfig
from ltrscale.ranking.pointwise import SigmoidConfig, SquaredErrorConfig
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
    | ListMLEConfig
    | ApproxNDCGConfig
    | GumbelApproxNDCGConfig
    | NeuralSortNDCGConfig
    | GumbelNeuralSortNDCGConfig
    | PiRankConfig,
    Field(discriminator="kind"),
]
