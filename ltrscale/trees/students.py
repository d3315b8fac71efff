"""Students of a teacher: trees that learn its scores.

BUYL23, section 7, grows a GBDT of 2,000 trees on the scores of a RankFormer. A student is an ordinary `train_gbdt`: the
training split names the scores, all its groups count as labelled, and validation keeps its true labels.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.targets import QuantisedConfig, StandardisedConfig

_STUDENT_TREES = 2_000


class RegressionStudent(Config):
    """Squared error against the teacher's scores, standardised per group."""

    kind: Literal["regression"] = "regression"
    trees: LightGBMConfig = LightGBMConfig(
        objective="regression", targets=StandardisedConfig(), num_trees=_STUDENT_TREES, early_stopping_rounds=None
    )

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        _check_objective(self.trees, "regression")
        return self


class LambdaRankStudent(Config):
    """LambdaRank on the teacher's scores, standardised per group and cut into grades of linear gain."""

    kind: Literal["lambdarank"] = "lambdarank"
    trees: LightGBMConfig = LightGBMConfig(
        objective="lambdarank",
        targets=QuantisedConfig(standardise=True),
        label_gain="linear",  # with 2^y - 1 only the highest of 31 grades would count
        num_trees=_STUDENT_TREES,
        early_stopping_rounds=None,
    )

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        _check_objective(self.trees, "lambdarank")
        return self


class SoftmaxStudent(Config):
    """Cross entropy against the softmax of the teacher's scores over `trees.temperature`, for each group."""

    kind: Literal["softmax"] = "softmax"
    trees: LightGBMConfig = LightGBMConfig(objective="softmax", num_trees=_STUDENT_TREES, early_stopping_rounds=None)

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        _check_objective(self.trees, "softmax")
        return self


TreesStudent = Annotated[RegressionStudent | LambdaRankStudent | SoftmaxStudent, Field(discriminator="kind")]


def _check_objective(trees: LightGBMConfig, objective: str) -> None:
    if trees.objective != objective:
        raise ValueError(f"trees.objective is {trees.objective}; leave it out, kind says that it is {objective}")
