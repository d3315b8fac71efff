"""The students that learn a method's scores: a network, or trees by one of three objectives."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ltrscale.data.stream.batches import StreamConfig
from ltrscale.ranking.choices import LossConfig
from ltrscale.ranking.loss import SquaredErrorConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.ranking import RankingConfig
from ltrscale.training.settings import OptimizerConfig
from ltrscale.trees.gbdt import TreesStudent


class NetworkStudent(RankingConfig):
    """How a network learns a teacher's scores; its parts are those of the method that it is trained as."""

    needs: ClassVar = "a neural method"
    """The method that can be such a student, for errors."""
    kind: Literal["network"] = "network"
    loss: LossConfig = SquaredErrorConfig(standardise=True)
    """Squared error against scores standardised per group; `list_net` learns their softmax over each list instead."""
    epochs: int = Field(20, ge=1)
    """Maximum number of epochs; 20 as for the network that `jobs.distill` trains."""
    patience: int = Field(5, ge=1)
    """Stop after this many epochs without a better validation metric, which is of the true labels."""
    stream: StreamConfig = StreamConfig(docs_per_batch=4096, streams=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)

    def streams(self) -> list[StreamConfig]:
        """The one from which it learns the scores."""
        return [self.stream]

    def of(self, method: FinetuneConfig) -> FinetuneConfig:
        """The training on scores of a method's network: all layers at once, because scores are many."""
        parts = method.model_dump(include={"network", "head", "context", "projector_layers", "noise"})
        return FinetuneConfig.model_validate({**parts, **self.model_dump(exclude={"kind"}), "head_epochs": 0})


Student = Annotated[NetworkStudent | TreesStudent, Field(discriminator="kind")]
