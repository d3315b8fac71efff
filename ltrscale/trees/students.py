"""Students of a teacher: trees that learn its scores.

BUYL23, section 7, grows a GBDT of 2,000 trees on the scores of a RankFormer. A student is an ordinary `train_gbdt`: the
training split names the scores, all its groups count as labelled, and validation keeps its true labels.
"""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from ltrscale.config import Config
from ltrscale.data.dataset.split import Splits
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.runtime.workers import WorkersConfig
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.trees.targets import QuantisedConfig, StandardisedConfig

_STUDENT_TREES = 2_000


class LearningTrees(Config):
    """Trees of LightGBM that learn a teacher's scores; the kind is their objective."""

    needs: ClassVar = "a method of LightGBM's trees without an ensemble"
    """The method that can be such a student, for errors."""
    exported: ClassVar = True
    """Whether `jobs.distill` exports it."""
    kind: str
    trees: LightGBMConfig

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        if self.trees.objective != self.kind:
            raise ValueError(
                f"trees.objective is {self.trees.objective}; leave it out, kind says that it is {self.kind}"
            )
        return self

    def streams(self) -> list[StreamConfig]:
        """None: trees read everything at once."""
        return []

    def job(self, out: str, splits: Splits, workers: WorkersConfig) -> GBDTJob:
        """The job that trains it on the scores that the splits name."""
        return GBDTJob(out=out, splits=splits, gbdt=self.trees, workers=workers)


class RegressionStudent(LearningTrees):
    """Squared error against the teacher's scores, standardised per group."""

    kind: Literal["regression"] = "regression"
    trees: LightGBMConfig = LightGBMConfig(
        objective="regression", targets=StandardisedConfig(), num_trees=_STUDENT_TREES, early_stopping_rounds=None
    )


class LambdaRankStudent(LearningTrees):
    """LambdaRank on the teacher's scores, standardised per group and cut into grades of linear gain."""

    kind: Literal["lambdarank"] = "lambdarank"
    trees: LightGBMConfig = LightGBMConfig(
        objective="lambdarank",
        targets=QuantisedConfig(standardise=True),
        label_gain="linear",  # with 2^y - 1 only the highest of 31 grades would count
        num_trees=_STUDENT_TREES,
        early_stopping_rounds=None,
    )


class SoftmaxStudent(LearningTrees):
    """Cross entropy against the softmax of the teacher's scores over `trees.temperature`, for each group."""

    kind: Literal["softmax"] = "softmax"
    trees: LightGBMConfig = LightGBMConfig(objective="softmax", num_trees=_STUDENT_TREES, early_stopping_rounds=None)


TreesStudent = RegressionStudent | LambdaRankStudent | SoftmaxStudent
