"""Settings of gradient boosted trees: those that libraries share, those of each library, and students of a teacher.

BUYL23, section 7, grows a GBDT of 2,000 trees on the scores of a RankFormer. A student is an ordinary `train_gbdt`: the
training split names the scores, all its groups count as labelled, and validation keeps its true labels.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature, matching
from ltrscale.errors import InputError
from ltrscale.trees.targets import QuantisedConfig, StandardisedConfig, TargetsConfig

Gain = Annotated[float, Field(ge=0)]
Direction = Literal[-1, 1]
"""1: the score never falls as the feature rises, all else equal; -1: it never rises."""

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
    relevant_only: bool = False
    """Learn only from the labelled groups with a relevant document. Where most have none, as in a log of purchases,
    trees grow much faster. The others have no pairs for LambdaRank, and only fill leaves; `rank_xendcg` draws random
    targets for them, which drown the labels."""
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
    bagging_by_query: bool = False
    """Draw whole groups instead of documents, so that a tree sees lists as they are."""
    extra_trees: bool = False
    """Try one random threshold per feature and split instead of all: more varied, less overfitted trees."""
    lambda_l1: float = Field(0.0, ge=0)
    """Weight of the absolute leaf values in the loss."""
    lambda_l2: float = Field(0.0, ge=0)
    """Weight of the squared leaf values in the loss."""
    cat_smooth: float = Field(10.0, ge=0)
    """For a split by sets of codes, codes are sorted by the sum of their first derivatives over that of their second
    ones plus this prior; codes with fewer documents than this are not sorted, and stay together with missing values."""
    cat_l2: float = Field(10.0, ge=0)
    """Added to `lambda_l2` in splits by sets of codes."""
    min_data_per_group: int = Field(100, ge=1)
    """Minimum number of documents by which two splits of the sorted codes differ, and of those on the right."""
    max_cat_to_onehot: int = Field(4, ge=1)
    """Features with at most this many codes are split by one code against all others."""
    max_bin: int = Field(255, ge=2, le=65_535)
    """Maximum number of bins of a feature."""
    truncation: int = Field(30, ge=1)
    """LambdaRank counts only pairs with at least one document within this rank."""
    unbiased: bool = False
    """Labels are clicks, which higher positions attract: learn a bias of each value of the data's `positions` and
    train on what it does not explain (LambdaRank only)."""
    bias_regularization: float = Field(0.0, ge=0)
    """Weight of the squared biases, which keeps those of rare positions near 0."""
    monotone: dict[str, Direction] = Field(default_factory=dict)
    """Numeric features on which scores must depend monotonically, by name or prefix and *: {price: -1, f_clicks*: 1};
    1 = the score never falls as the value rises. Missing values are not bound."""
    cegb_tradeoff: float = Field(1.0, gt=0)
    """Weight of the costs below against the loss."""
    cegb_penalty_split: float = Field(0.0, ge=0)
    """Cost of a split; it keeps trees cheap to score."""

    @model_validator(mode="after")
    def _has_biases(self) -> Self:
        if self.unbiased and self.objective != "lambdarank":
            raise ValueError(f"unbiased is LambdaRank's; leave it out with objective {self.objective}")
        return self

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
    reg_alpha: float = Field(0.0, ge=0)
    """Weight of the absolute leaf values in the loss."""
    reg_lambda: float = Field(1.0, ge=0)
    """Weight of the squared leaf values in the loss."""
    max_bin: int = Field(256, ge=2)
    """Maximum number of bins of a feature."""
    pair_method: Literal["topk", "mean"] = "topk"
    """Pairs that count: those with at least one document within the rank `truncation`; or `pairs` random ones of each
    document, with a document of another label."""
    truncation: int = Field(30, ge=1)
    """Lowest rank of the better placed document of a pair; with `mean` it has no effect."""
    pairs: int = Field(1, ge=1)
    """Random pairs of each document; with `topk` it has no effect."""
    unbiased: bool = False
    """Labels are clicks, which higher positions attract: estimate how much and weight pairs accordingly (Hu 2019). The
    data need `positions`; XGBoost counts the places of a group in their order."""
    monotone: dict[str, Direction] = Field(default_factory=dict)
    """Numeric features on which scores must depend monotonically, by name or prefix and *: {price: -1, f_clicks*: 1};
    1 = the score never falls as the value rises. Missing values are not bound."""

    @model_validator(mode="after")
    def _has_gains(self) -> Self:
        if isinstance(self.label_gain, tuple):
            raise ValueError("XGBoost has exponential and linear gains only; set label_gain to one of these")
        return self

    @model_validator(mode="after")
    def _has_biases(self) -> Self:
        if self.unbiased and self.objective == "reg:squarederror":
            raise ValueError("unbiased weights pairs, which reg:squarederror lacks; leave it out")
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


def directions(monotone: Mapping[str, Direction], features: Sequence[Feature]) -> list[int]:
    """The direction of each feature, 0 for one that is not bound.

    Raises:
        InputError: a pattern matches no feature or a categorical one, or two patterns contradict each other.

    Example:
        >>> directions({"f_*": 1}, [Feature(name="f_clicks"), Feature(name="price")])
        [1, 0]
    """
    found: dict[str, int] = {}
    for pattern, direction in monotone.items():
        for feature in matching(pattern, features, key="monotone"):
            if feature.kind == "categorical":
                raise InputError(
                    f"monotone: {pattern!r} matches {feature.name!r}, whose codes have no order; narrow it"
                )
            if found.setdefault(feature.name, direction) != direction:
                raise InputError(f"monotone: {feature.name!r} has both directions; let {pattern!r} not match it")
    return [found.get(feature.name, 0) for feature in features]


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
