"""Students: what learns the scores of other methods before the labels, as a network or as trees."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ltrscale.config import Config
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.ranking.loss import SquaredErrorConfig
from ltrscale.ranking.loss_choices import LossConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.settings import OptimizerConfig, TrainingConfig
from ltrscale.trees.gbdt import TreesStudent


class NetworkStudent(Config):
    """How a network learns a teacher's scores; the rest is that of the method that it is trained as."""

    fixed: ClassVar = {
        "seed": 0,
        "device": "auto",
        "precision": "float32",
        "compile": False,
        "deterministic": False,
        "checkpoint_minutes": 10.0,
        "checkpoint_failures": 3,
        "preflight": {"check": "footers", "max_bad": 0.0},
        "debias": None,
        "negatives": 0,
        "relevant_only": False,
        "average": 0.0,
        "validation_metric": "ndcg@5",
    }
    needs: ClassVar = "a neural method"
    """Kind of method that can be such a student, for error messages."""
    kind: Literal["network"] = "network"
    loss: LossConfig = SquaredErrorConfig(standardise=True)
    """Squared error against scores standardised per group; `list_net` learns their softmax over each list instead."""
    epochs: int = Field(20, ge=1)
    """Maximum number of epochs; 20 as for the network that `jobs.distill` trains."""
    patience: int = Field(5, ge=1)
    """Stop after this many epochs without a better validation metric: that of the method, on the true labels."""
    minutes: float | None = Field(None, gt=0)
    """Also end after the epoch that ends later than this; empty for no limit."""
    stream: StreamConfig = StreamConfig(docs_per_batch=4096, streams=1)
    """Batch size and order of the data."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)

    def streams(self) -> list[StreamConfig]:
        return [self.stream]

    def finetuning(self, method: FinetuneConfig) -> FinetuneConfig:
        """The settings that train a method's network on scores: all layers at once, because there are many scores."""
        network = {"network", "head", "context", "projector_layers", "noise"}
        alike = {*TrainingConfig.model_fields, *network, "validation_metric"}
        own = self.model_dump(exclude={"kind"})
        return FinetuneConfig.model_validate({**method.model_dump(include=alike), **own, "head_epochs": 0})


Student = Annotated[NetworkStudent | TreesStudent, Field(discriminator="kind")]
