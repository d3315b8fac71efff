"""The students that a distillation may name: trees by three objectives, and a pointwise network."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.data.stream import StreamConfig
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.encoders import MLPConfig
from ltrscale.models.heads import HeadConfig
from ltrscale.ranking.pointwise import SquaredErrorConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.schedules import OptimizerConfig
from ltrscale.trees.students import LambdaRankStudent, RegressionStudent, SoftmaxStudent


class MLPStudent(Config):
    """A network that scores each document on its own, by squared error against standardised scores."""

    kind: Literal["mlp"] = "mlp"
    finetune: FinetuneConfig = FinetuneConfig(
        network=NetworkConfig(encoder=MLPConfig(dropout=0.0)),  # the teacher's scores are not noisy as clicks are
        head=HeadConfig(layers=1),
        loss=SquaredErrorConfig(standardise=True),
        epochs=20,
        patience=5,
        stream=StreamConfig(docs_per_batch=8192),
        optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=None),
    )

    @model_validator(mode="after")
    def _is_pointwise(self) -> Self:
        if self.finetune.context is not None:
            raise ValueError(f"finetune.context {self.finetune.context.kind} scores whole lists; leave it out")
        if self.finetune.network.transform.per_query:
            raise ValueError("finetune.network.transform.per_query needs whole lists; leave it out")
        return self


StudentConfig = Annotated[
    RegressionStudent | LambdaRankStudent | SoftmaxStudent | MLPStudent, Field(discriminator="kind")
]
