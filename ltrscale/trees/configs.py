"""Settings of gradient boosted trees: those that libraries share, those of each library, and students of a teacher.

BUYL23, section 7, grows a GBDT of 2,000 trees on the scores of a RankFormer. A student is an ordinary `train_gbdt`: the
training split names the scores, all its groups count as labelled, and validation keeps its true labels.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.trees.targets import QuantisedConfig, StandardisedConfig, TargetsConfig

Gain = Annotated[float, Field(ge=0)]

_STUDENT_TREES = 2_000


class TreesConfig(Config):
    """Settings that all libraries share."""

    num_trees: int = Field(500, ge=1)
    """Maximum number of trees."""
    learning_rate: float = Field(0.1, gt=0)
    """Weight of each tree."""
    label_gain: Literal["exponential", "linear"] | tuple[Gain, ...] = "exponential"
    """Gain of a document of label 0, 1, 2, ... in a ranking objective: 2^y - 1, y, or a list of gains."""
    per_query: bool = False
    """Standardise each numeric feature within its query group before trees see it, as `transform.per_query` does for
    networks; missing values stay missing. HOU24's public code does it, so that trees and networks have equal inputs."""
    targets: TargetsConfig | None = None
    """How to transform training labels before trees see them; empty uses them unchanged."""
    early_stopping_rounds: int | None = Field(50, ge=1)
    """Stop after this many trees without a better validation NDCG, and keep those up to the best; empty keeps all."""
    stop_on: int = Field(5, ge=1)
    """Cut-off of that NDCG."""
    seed: int = 0
    """Seed of the library's random draws."""
    deterministic: bool = True
    """The same trees each time with the same number of threads."""
    num_threads: int = Field(0, ge=0)
    """0 = one for each core; with several workers, `workers.cpus` each."""


class LightGBMConfig(TreesConfig):
    """LightGBM: leaves are split best first."""

    kind: Literal["lightgbm"] = "lightgbm"
    """The library."""
    objective: Literal["lambdarank", "rank_xendcg", "regression", "softmax"] = "lambdarank"
    """LambdaRank; cross entropy that bounds NDCG; squared error; softmax cross entropy against softmax(label)."""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the labels in the softmax objective."""
    num_leaves: int = Field(31, ge=2)
    """Maximum number of leaves of a tree."""
    min_data_in_leaf: int = Field(20, ge=1)
    """Minimum number of documents of a leaf."""
    feature_fraction: float = Field(1.0, gt=0, le=1)
    """Share of the features that each tree may use, drawn at random."""
    bagging_fraction: float = Field(1.0, gt=0, le=1)
    """Share of the documents that each tree is grown on, drawn at random."""
    lambda_l2: float = Field(0.0, ge=0)
    """Weight of the squared leaf values in the loss."""
    max_bin: int = Field(255, ge=2, le=65_535)
    """Maximum number of bins of a feature."""
    truncation: int = Field(30, ge=1)
    """LambdaRank counts only pairs with at least one document within this rank."""
    cegb_tradeoff: float = Field(1.0, gt=0)
    """Weight of the costs below against the loss."""
    cegb_penalty_split: float = Field(0.0, ge=0)
    """Cost of a split; it keeps trees cheap to score."""

    @property
    def is_custom(self) -> bool:
        """Whether LightGBM itself lacks the objective."""
        return self.objective == "softmax"


class XGBoostConfig(TreesConfig):
    """XGBoost, on histograms."""

    kind: Literal["xgboost"] = "xgboost"
    """The library."""
    objective: Literal["rank:ndcg", "rank:pairwise", "reg:squarederror"] = "rank:ndcg"
    """LambdaRank with NDCG; LambdaRank without weights; squared error."""
    max_leaves: int = Field(31, ge=2)
    """Maximum number of leaves of a tree, split best first."""
    max_depth: int = Field(0, ge=0)
    """0 = no limit."""
    min_child_weight: float = Field(10.0, ge=0)
    """Minimum sum of second derivatives in a leaf; codes with less are not sorted for splits by sets of codes. With
    ranking objectives a document has about 0.1, so the default is near the 100 documents that LightGBM requires of a
    code; with less, rare codes fit noise."""
    colsample_bytree: float = Field(1.0, gt=0, le=1)
    """Share of the features that each tree may use, drawn at random."""
    subsample: float = Field(1.0, gt=0, le=1)
    """Share of the documents that each tree is grown on, drawn at random."""
    reg_lambda: float = Field(1.0, ge=0)
    """Weight of the squared leaf values in the loss."""
    max_bin: int = Field(256, ge=2)
    """Maximum number of bins of a feature."""
    truncation: int = Field(30, ge=1)
    """Only pairs with at least one document within this rank count."""

    @model_validator(mode="after")
    def _has_gains(self) -> Self:
        if isinstance(self.label_gain, tuple):
            raise ValueError("XGBoost has exponential and linear gains only; set label_gain to one of these")
        return self


class CatBoostConfig(TreesConfig):
    """CatBoost, from the optional extra `trees-extra`."""

    kind: Literal["catboost"] = "catboost"
    """The library."""
    objective: Literal["YetiRank", "QueryRMSE"] = "YetiRank"
    """Pairwise loss over randomised orders; squared error up to a constant for each group."""
    depth: int = Field(6, ge=1, le=16)
    """Levels of its symmetric trees."""
    l2_leaf_reg: float = Field(3.0, ge=0)
    """Weight of the squared leaf values in the loss."""
    rsm: float = Field(1.0, gt=0, le=1)
    """Share of the features that each split may use, drawn at random."""
    border_count: int = Field(254, ge=1, le=65_535)
    """Maximum number of borders between the bins of a feature."""

    @model_validator(mode="after")
    def _has_gains(self) -> Self:
        if self.label_gain != "exponential":
            raise ValueError("CatBoost takes labels as they are; leave label_gain out")
        return self


GBDTConfig = Annotated[LightGBMConfig | XGBoostConfig | CatBoostConfig, Field(discriminator="kind")]


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
