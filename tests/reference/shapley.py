"""Shapley values of trees, from their definition: every set of features, and every tree walked for each of them."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Row = Sequence[float]


@dataclass(frozen=True)
class Leaf:
    value: float
    cover: float


@dataclass(frozen=True)
class Split:
    feature: int
    first: Callable[[float], bool]
    """Whether a value goes to the first child."""
    children: tuple["Tree", "Tree"]

    @property
    def cover(self) -> float:
        return self.children[0].cover + self.children[1].cover


Tree = Leaf | Split


def expected(tree: Tree, row: Row, known: set[int]) -> float:
    """The score of a row of which some features are known: children of unknown ones count by their cover."""
    if isinstance(tree, Leaf):
        return tree.value
    one, other = tree.children
    if tree.feature in known:
        return expected(one if tree.first(row[tree.feature]) else other, row, known)
    if tree.cover == 0:  # CatBoost's symmetric trees have parts that training never reached
        return 0.0
    return sum(child.cover * expected(child, row, known) for child in (one, other)) / tree.cover


def shapley(trees: Sequence[Tree], row: Row) -> list[float]:
    """`phi_j = sum over sets S without j of |S|! (F - |S| - 1)! / F! (v(S with j) - v(S))`."""
    n = len(row)

    def value(known: tuple[int, ...]) -> float:
        return sum(expected(tree, row, set(known)) for tree in trees)

    parts = [0.0] * n
    for j in range(n):
        others = [i for i in range(n) if i != j]
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for known in combinations(others, size):
                parts[j] += weight * (value((*known, j)) - value(known))
    return parts


def lightgbm_trees(booster: Any) -> list[Tree]:
    def tree(node: dict[str, Any]) -> Tree:
        if "leaf_value" in node:
            return Leaf(node["leaf_value"], node.get("leaf_count", 1))
        threshold, default_left = node["threshold"], node["default_left"]
        if node["decision_type"] == "==":
            codes = {int(code) for code in threshold.split("||")}
            first = lambda value: not math.isnan(value) and int(value) in codes  # noqa: E731
        else:
            first = lambda value: default_left if math.isnan(value) else value <= threshold  # noqa: E731
        return Split(node["split_feature"], first, (tree(node["left_child"]), tree(node["right_child"])))

    return [tree(each["tree_structure"]) for each in booster.dump_model()["tree_info"]]


def xgboost_trees(booster: Any) -> list[Tree]:
    names = booster.feature_names

    def tree(node: dict[str, Any]) -> Tree:
        if "leaf" in node:
            return Leaf(node["leaf"], node["cover"])
        yes, no = (tree(next(c for c in node["children"] if c["nodeid"] == node[key])) for key in ("yes", "no"))
        condition, missing_first = node["split_condition"], node["missing"] == node["yes"]
        if isinstance(condition, list):
            first = lambda value: missing_first if math.isnan(value) else int(value) in condition  # noqa: E731
        else:
            first = lambda value: missing_first if math.isnan(value) else value < condition  # noqa: E731
        feature = names.index(node["split"]) if names else int(node["split"][1:])
        return Split(feature, first, (yes, no))

    return [tree(json.loads(text)) for text in booster.get_dump(dump_format="json", with_stats=True)]


def catboost_trees(model: dict[str, Any]) -> list[Tree]:
    """The trees of a model of numeric features in CatBoost's JSON, whose last split is the root."""

    def tree(each: dict[str, Any], depth: int, leaf: int) -> Tree:
        if depth < 0:
            return Leaf(each["leaf_values"][leaf], each["leaf_weights"][leaf])
        split = each["splits"][depth]
        border = split["border"]
        first = lambda value: not value > border  # noqa: E731 - a missing value is below all borders
        return Split(
            split["float_feature_index"], first, (tree(each, depth - 1, leaf), tree(each, depth - 1, leaf | 1 << depth))
        )

    return [tree(each, len(each["splits"]) - 1, 0) for each in model["oblivious_trees"]]
