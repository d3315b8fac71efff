"""The libraries that grow trees, with their settings and abilities.

A library is one class here and one line in `GBDTConfig`. No library is imported before it grows trees.
"""

import operator
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from ltrscale.arrays import Doubles
from ltrscale.bundle.boosters import import_catboost
from ltrscale.data.dataset.manifest import Feature
from ltrscale.devices import Device
from ltrscale.errors import InputError
from ltrscale.trees.data import SAMPLE, BinCodes, Labelled
from ltrscale.trees.library import (
    CPU,
    Direction,
    FeatureCost,
    StoppingWatch,
    TreesConfig,
    directions,
    own_device,
    penalties,
)

_LIGHTGBM = {
    "num_leaves", "learning_rate", "min_data_in_leaf", "min_sum_hessian_in_leaf", "feature_fraction",
    "bagging_fraction", "bagging_by_query", "extra_trees", "lambda_l1", "lambda_l2", "cat_smooth", "cat_l2",
    "min_data_per_group", "max_cat_to_onehot", "max_bin", "cegb_tradeoff", "cegb_penalty_split", "seed",
    "deterministic", "num_threads",
}  # fmt: skip
"""Settings that keep the library's own names; likewise for XGBoost."""
_PENALTIES = ("cegb_penalty_feature_coupled", "cegb_penalty_feature_lazy")
_XGBOOST = {
    "max_leaves", "max_depth", "learning_rate", "min_child_weight", "colsample_bytree", "subsample", "reg_alpha",
    "reg_lambda", "max_bin", "seed",
}  # fmt: skip

_ON_CPU = "set device to cpu"
_MOST_BORDERS, _LONGEST_ON_GPU = 255, 1023
"""CatBoost's limits on a GPU: borders of a feature, and documents of a group with YetiRank."""


_LONGEST_OF_LIGHTGBM = 10_000
"""LightGBM's limit on the documents of a group, for any objective; the other libraries have no limit on CPUs."""
_POOL_MB = 1024
"""Maximum memory for histograms."""


class _PairTrees(TreesConfig):
    """What LightGBM and XGBoost share, whose ranking objectives compare pairs of documents."""

    unbiased: bool = False
    """Labels are clicks, which higher positions attract, as the data's `positions` say. LightGBM learns a bias of each
    position and trains on what it does not explain (LambdaRank only); XGBoost estimates how much each place of a group
    in their order attracts, and weights pairs accordingly (Hu 2019)."""
    monotone: dict[str, Direction] = Field(default_factory=dict)
    """Numeric features on which scores must depend monotonically, by name or prefix and *: {price: -1, f_clicks*: 1};
    1 = the score never falls as the value rises. Missing values are not bound."""

    @property
    def learns_biases(self) -> bool:
        """Whether `unbiased` is set."""
        return self.unbiased


class LightGBMConfig(_PairTrees):
    """LightGBM: leaves are split best first."""

    sampling: ClassVar = "feature_fraction or bagging_fraction"
    goes_on: ClassVar = True
    kind: Literal["lightgbm"] = "lightgbm"
    """The library."""
    objective: Literal["lambdarank", "rank_xendcg", "regression", "softmax"] = "lambdarank"
    """LambdaRank; cross entropy that bounds NDCG; squared error; softmax cross entropy against softmax(label)."""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the labels in the softmax objective."""
    num_leaves: int = Field(31, ge=2, le=131_072)
    """Maximum number of leaves of a tree."""
    min_data_in_leaf: int = Field(20, ge=1)
    """Minimum number of documents of a leaf."""
    min_sum_hessian_in_leaf: float = Field(1e-3, ge=0)
    """Minimum sum of second derivatives in a leaf. With LambdaRank, documents without a pair add none, so a higher
    minimum keeps leaves from resting on few pairs."""
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
    bias_regularization: float = Field(0.0, ge=0)
    """Weight of the squared biases, which keeps those of rare positions near 0."""
    cegb_tradeoff: float = Field(1.0, gt=0)
    """Weight of the costs below against the loss."""
    cegb_penalty_split: float = Field(0.0, ge=0)
    """Cost of a split; it keeps trees cheap to score."""
    cegb_penalty_feature_coupled: dict[str, FeatureCost] = Field(default_factory=dict, exclude_if=operator.not_)
    """Cost of a feature that no tree asks for yet, by its name, or a prefix and *: {f_covisit*: 2}. One that a service
    pays for once a query, such as a call to another one."""
    cegb_penalty_feature_lazy: dict[str, FeatureCost] = Field(default_factory=dict, exclude_if=operator.not_)
    """Cost of a feature for each document that reaches the first split by it, named likewise. One that a service pays
    for document by document."""

    @model_validator(mode="after")
    def _has_biases(self) -> Self:
        if self.unbiased and self.objective != "lambdarank":
            raise ValueError(f"unbiased is LambdaRank's; leave it out with objective {self.objective}")
        return self

    @property
    def is_custom(self) -> bool:
        """Whether LightGBM itself lacks the objective."""
        return self.objective == "softmax"

    @property
    def uses_gains(self) -> bool:
        """False for regression and the softmax."""
        return self.objective not in ("regression", "softmax")

    @property
    def is_random(self) -> bool:
        """Whether trees see a share of features or documents, or random targets."""
        return self.feature_fraction < 1 or self.bagging_fraction < 1 or self.objective == "rank_xendcg"

    def boost(self, train: Labelled, validation: Labelled | None, codes: BinCodes, watch: StoppingWatch) -> bytes:
        """Grow trees with LightGBM; returns the model's text."""
        from ltrscale.trees import with_lightgbm

        for groups in (train, validation):
            if groups is not None:
                _check_lengths(groups, _LONGEST_OF_LIGHTGBM, "LightGBM", "choose another kind")
        highest = int(max(train.labels_N.max(), validation.labels_N.max() if validation else 0, 0))
        parameters = self.parameters(self.gains(highest), train.view.features)
        temperature = self.temperature if self.is_custom else None
        return with_lightgbm.boost(
            parameters, train, validation, codes, watch, unbiased=self.unbiased, temperature=temperature
        )

    def numbering(self, values: Doubles) -> Self | None:
        """A table of gains, unless the objective uses none or there is one."""
        if not self.uses_gains or isinstance(self.label_gain, tuple):
            return None
        gains = values if self.label_gain == "linear" else np.exp2(values) - 1
        return self.replace(label_gain=tuple(gains.tolist()))

    def gains(self, highest: int) -> list[float]:
        """Gains of the labels 0 to at least `highest`."""
        match self.label_gain:
            case "exponential":
                return [2.0**label - 1 for label in range(highest + 1)]
            case "linear":
                return [float(label) for label in range(highest + 1)]
            case table:
                return list(table)

    def parameters(self, gains: list[float], features: Sequence[Feature] = ()) -> dict[str, Any]:
        """The settings under LightGBM's names, for columns with these features.

        With `deterministic`, histograms are row-wise: by default LightGBM chooses by timing, which does not repeat.
        """
        histograms = 16 * self.num_leaves * len(features) * self.max_bin
        # LightGBM keeps one histogram for each leaf; with a bounded pool it recomputes some
        bounded = {"histogram_pool_size": _POOL_MB} if histograms > _POOL_MB << 20 else {}
        paid = {name: getattr(self, name) for name in _PENALTIES}
        return {
            **self.model_dump(include=_LIGHTGBM),
            **bounded,
            **{name: penalties(name, costs, features) for name, costs in paid.items() if costs},
            "objective": "none" if self.is_custom else self.objective,
            "label_gain": gains,
            "lambdarank_truncation_level": self.truncation,
            "metric": "ndcg",
            "eval_at": [self.stop_on],
            "bagging_freq": int(self.bagging_fraction < 1),  # LightGBM ignores the fraction at its default of 0
            "lambdarank_position_bias_regularization": self.bias_regularization,
            "monotone_constraints": directions(self.monotone, features) if self.monotone else [],
            "bin_construct_sample_cnt": SAMPLE,
            "feature_pre_filter": False,  # it would drop features by the counts of the sample, not of the data
            "force_row_wise": self.deterministic,
            "verbosity": -1,
        }


class XGBoostConfig(_PairTrees):
    """XGBoost, on histograms."""

    sampling: ClassVar = "colsample_bytree or subsample"
    kind: Literal["xgboost"] = "xgboost"
    """The library."""
    objective: Literal["rank:ndcg", "rank:pairwise", "reg:squarederror"] = "rank:ndcg"
    """LambdaRank with NDCG; LambdaRank without weights; squared error."""
    max_leaves: int = Field(31, ge=2, le=131_072)
    """Maximum number of leaves of a tree, split best first."""
    max_depth: int = Field(0, ge=0, le=1000)
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
    max_bin: int = Field(256, ge=2, le=65_535)
    """Maximum number of bins of a feature."""
    pair_method: Literal["topk", "mean"] = "topk"
    """Pairs that count: those with at least one document within the rank `truncation`; or `pairs` random ones of each
    document, with a document of another label."""
    truncation: int = Field(30, ge=1)
    """Lowest rank of the better placed document of a pair; with `mean` it has no effect."""
    pairs: int = Field(1, ge=1, le=10_000)
    """Random pairs of each document; with `topk` it has no effect."""
    device: Device = "cpu"
    """Where trees are grown: `auto` takes this worker's GPU if it has one; or `cpu`, `cuda`, `cuda:1`. Trees grown on a
    GPU differ slightly, because its bins and sums do."""
    external_memory: bool = False
    """Keep the bins out of the device's memory: those of a GPU in the machine's memory, others in scratch files. For
    data whose bins do not fit; every split of a tree then reads all of them."""

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

    @property
    def uses_gains(self) -> bool:
        """False for regression."""
        return self.objective != "reg:squarederror"

    @property
    def is_random(self) -> bool:
        """Whether trees see a share of features or documents."""
        return self.colsample_bytree < 1 or self.subsample < 1

    def boost(self, train: Labelled, validation: Labelled | None, codes: BinCodes, watch: StoppingWatch) -> bytes:
        """Grow trees with XGBoost; returns the model's JSON."""
        from ltrscale.trees import with_xgboost

        parameters = self.parameters(train.view.features, self.check_device())
        as_data = {"by_group": self.uses_gains, "by_position": self.unbiased, "external_memory": self.external_memory}
        return with_xgboost.boost(parameters, train, validation, codes, watch, **as_data)

    def check_device(self) -> torch.device:
        """The device of this process on which trees are grown."""
        from ltrscale.trees import with_xgboost

        device = own_device(self.device)
        if device.type == "cuda" and not with_xgboost.has_cuda():
            raise InputError(f"device: {self.device} is asked for and this XGBoost was built without CUDA; {_ON_CPU}")
        return device

    def parameters(self, features: Sequence[Feature] = (), device: torch.device = CPU) -> dict[str, Any]:
        """The settings under XGBoost's names, for columns of these features; only those that the objective has."""
        ranking = {
            "lambdarank_pair_method": self.pair_method,
            "lambdarank_num_pair_per_sample": self.truncation if self.pair_method == "topk" else self.pairs,
            "lambdarank_unbiased": self.unbiased,
            "ndcg_exp_gain": self.label_gain == "exponential",
        }
        return {
            **self.model_dump(include=_XGBOOST),
            "objective": self.objective,
            **(ranking if self.uses_gains else {}),
            "eval_metric": f"ndcg@{self.stop_on}",
            "tree_method": "hist",
            "device": str(device),
            "grow_policy": "lossguide",
            **({"monotone_constraints": tuple(directions(self.monotone, features))} if self.monotone else {}),
            "nthread": self.num_threads,
        }


class CatBoostConfig(TreesConfig):
    """CatBoost, from the optional extra `trees-extra`."""

    sampling: ClassVar = "nothing"
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
    """Maximum number of borders between the bins of a feature; on a GPU at most 255."""
    device: Device = "cpu"
    """Where trees are grown: `auto` takes this worker's GPU if it has one; or `cpu`, `cuda`, `cuda:1`. On a GPU all
    `num_trees` are grown and those after the best are dropped, `rsm` is refused, `deterministic` is not promised, and
    YetiRank takes groups of at most 1,023 documents."""

    @model_validator(mode="after")
    def _has_gains(self) -> Self:
        if self.label_gain != "exponential":
            raise ValueError("CatBoost takes labels as they are; leave label_gain out")
        return self

    @property
    def uses_gains(self) -> bool:
        """False for regression."""
        return self.objective != "QueryRMSE"

    @property
    def is_random(self) -> bool:
        """Always true: CatBoost draws orders of the documents."""
        return True

    def check_workers(self, world: int) -> None:
        """Check that CatBoost is installed and there is one worker."""
        if world > 1:
            raise InputError(
                f"CatBoost trains in one process, not on {world} workers; set workers to 1, or choose another kind"
            )
        import_catboost()

    def boost(self, train: Labelled, validation: Labelled | None, codes: BinCodes, watch: StoppingWatch) -> bytes:
        """Grow trees with CatBoost; returns the model file."""
        from ltrscale.trees import with_catboost

        device = self.check_device()
        if device.type == "cuda" and self.objective == "YetiRank":
            _check_lengths(train, _LONGEST_ON_GPU, "YetiRank on a GPU", _ON_CPU)
        parameters, calls_back = self.parameters(device), device.type == "cpu"
        return with_catboost.boost(
            parameters, train, validation, codes, watch, stop_on=self.stop_on, calls_back=calls_back
        )

    def check_device(self) -> torch.device:
        """The device of this process on which trees are grown."""
        device = own_device(self.device)
        if device.type == "cuda":
            if self.rsm < 1:
                raise InputError(f"rsm: on a GPU CatBoost has no share of the features; leave it out, or {_ON_CPU}")
            if self.border_count > _MOST_BORDERS:
                raise InputError(
                    f"border_count: on a GPU CatBoost takes at most {_MOST_BORDERS}, not {self.border_count}; lower it"
                )
        return device

    def parameters(self, device: torch.device = CPU) -> dict[str, Any]:
        """The settings under CatBoost's names."""
        on_gpu = {"task_type": "GPU", "devices": str(device.index)} if device.type == "cuda" else {"rsm": self.rsm}
        return {
            **self.model_dump(include={"learning_rate", "depth", "l2_leaf_reg", "border_count"}),
            **on_gpu,
            "loss_function": self.objective,
            "iterations": self.num_trees,
            "random_seed": self.seed,
            "thread_count": self.num_threads or -1,
        }


def _check_lengths(groups: Labelled, longest: int, where: str, remedy: str) -> None:
    """Check that no group is too long for a library, before the library fails."""
    if len(groups.lengths_Q) and (length := int(groups.lengths_Q.max())) > longest:
        raise InputError(
            f"{groups.split}: group {groups.ids_Q[groups.lengths_Q.argmax()]} has {length:,} documents, {where} takes "
            f"{longest:,}; prepare again with a lower max_group, or {remedy}"
        )


GBDTConfig = Annotated[LightGBMConfig | XGBoostConfig | CatBoostConfig, Field(discriminator="kind")]
