"""Checks of trees' model files before a library reads them: a cycle hangs it, a wrong child or count kills the process.

Every tree in LightGBM's text and XGBoost's JSON must split on existing columns, have finite numbers, and reach each
node once from its root. Details that the libraries check, such as the names of objectives, are left to them.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ltrscale.arrays import N_CODES

_NUMBERS = re.compile(r"(?:[-+.0-9e]+|-?inf)(?: (?:[-+.0-9e]+|-?inf))*")
_REST = re.compile(
    r"\nfeature_importances:\n(?:\S+=[0-9.e+]+\n)*"
    r"\nparameters:\n(?:\[[a-z_0-9]+: [^\n\[\]]*\]\n)+\nend of parameters\n"
    r"\npandas_categorical:[^\n]*\n?"
)
"""The part of LightGBM's text after the trees."""
_DEEPEST = 10_000
"""Nodes from root to leaf: libraries recurse down some trees, and a deeper one would overflow the stack."""
_INT32, _INT64 = 1 << 31, 1 << 63
_TREE_LINES = {
    "num_leaves", "num_cat", "split_feature", "split_gain", "threshold", "decision_type", "left_child", "right_child",
    "cat_boundaries", "cat_threshold", "leaf_value", "leaf_weight", "leaf_count", "internal_value", "internal_weight",
    "internal_count", "is_linear", "shrinkage",
}  # fmt: skip


def check_lightgbm(model: bytes, n_columns: int) -> None:
    """Check LightGBM's text.

    Raises:
        ValueError: it is not a model for such columns; names the fault.
    """
    text = model.decode("ascii")
    if "\0" in text or "\r" in text:
        raise ValueError("it has a control character")
    trees, end, ending = text.partition("\nend of trees\n")
    head, *blocks = re.split(r"^Tree=", trees + "\n", flags=re.MULTILINE)
    if not end or not head.startswith("tree\n") or not _REST.fullmatch(ending):
        raise ValueError("it does not begin and end as one")
    header = _values_by_key(head)
    for key, value in {"num_class": 1, "num_tree_per_iteration": 1, "max_feature_idx": n_columns - 1}.items():
        if header.get(key) != str(value):
            raise ValueError(f"{key} is {header.get(key, 'missing')[:20]}, not {value}")
    if len(header.get("feature_names", "").split(" ")) != n_columns:
        raise ValueError(f"feature_names are not {n_columns}")
    sizes = _numbers_by_key({"tree_sizes": header.get("tree_sizes", "")})
    if _array(sizes, "tree_sizes", len(blocks), 0, _INT32) != [len(f"Tree={block}") for block in blocks]:
        raise ValueError("tree_sizes are not those of its trees")
    for i, block in enumerate(blocks):
        first, _, lines = block.partition("\n")
        _check_tree(i, _check_lightgbm_tree, first == str(i), lines, n_columns)


def _check_lightgbm_tree(in_place: bool, text: str, n_columns: int) -> None:
    lines = _values_by_key(text.rstrip("\n"))
    if not in_place or not lines.keys() <= _TREE_LINES:
        raise ValueError("its lines are not those of a tree")
    tree = _numbers_by_key(lines)
    (leaves,), (categories,) = _array(tree, "num_leaves", 1, 1, _INT32), _array(tree, "num_cat", 1, 0, _INT32)
    nodes = leaves - 1
    _array(tree, "is_linear", 1, 0, 1)
    _floats(tree, "shrinkage", 1)
    _floats(tree, "leaf_value", leaves)
    if not nodes:  # LightGBM reads no further lines of a tree that is a single leaf
        return
    for key in ("split_gain", "internal_value", "internal_weight"):
        _floats(tree, key, nodes)
    _floats(tree, "leaf_weight", leaves)
    _array(tree, "internal_count", nodes, 0, _INT64)
    _array(tree, "leaf_count", leaves, 0, _INT64)
    _array(tree, "split_feature", nodes, 0, n_columns)
    # LightGBM writes leaf i as ~i; here leaves are numbered after the nodes
    left, right = (
        [child if child >= 0 else nodes + ~child for child in _array(tree, key, nodes, -leaves, nodes)]
        for key in ("left_child", "right_child")
    )
    if _reached(left + [-1] * leaves, right + [-1] * leaves) < nodes + leaves:
        raise ValueError("nodes are not reached from its root")
    kinds, thresholds = _array(tree, "decision_type", nodes, 0, 16), _floats(tree, "threshold", nodes, limit=math.inf)
    if any(kind & 1 and not (0 <= t < categories and t == int(t)) for kind, t in zip(kinds, thresholds, strict=True)):
        raise ValueError("threshold names no set of categories")
    bounds = _array(tree, "cat_boundaries", categories + 1, 0, _INT32) if categories else [0]
    if bounds != sorted(bounds) or bounds[0]:
        raise ValueError("cat_boundaries do not rise from 0")
    if categories:
        _array(tree, "cat_threshold", bounds[-1], 0, 1 << 32)


def _values_by_key(text: str) -> dict[str, str]:
    """The values of lines `key=value`, by key."""
    lines: dict[str, str] = {}
    for line in text.split("\n"):
        key, _, value = line.partition("=")
        if key in lines and key:
            raise ValueError(f"{key[:20]} stands there twice")
        lines[key] = value
    return lines


def _numbers_by_key(lines: Mapping[str, str]) -> dict[str, list[Any]]:
    """The numbers of each line, as JSON would read them."""
    for key, text in lines.items():
        if text and not _NUMBERS.fullmatch(text):
            raise ValueError(f"{key} are no numbers")
    return {key: json.loads(f"[{text.replace(' ', ',').replace('inf', 'Infinity')}]") for key, text in lines.items()}


def check_xgboost(model: bytes, n_columns: int) -> None:
    """Check XGBoost's JSON.

    Raises:
        ValueError: it is not a model for such columns; names the fault.
    """
    try:
        learner = _at(json.loads(model.decode(), object_pairs_hook=_once), "learner")
    except RecursionError:
        raise ValueError("its JSON is too deep") from None
    booster, counts = _at(learner, "gradient_booster"), _at(learner, "learner_model_param")
    if booster.get("name") != "gbtree":
        raise ValueError("its booster is not gbtree")
    for key, value in {"num_feature": n_columns, "num_target": 1, "num_class": 0}.items():
        if counts.get(key) != str(value):
            raise ValueError(f"{key} is {counts.get(key, 'missing')!s:.20}, not {value}")
    trees_of = _at(booster, "model")
    trees = trees_of.get("trees")
    if not isinstance(trees, list) or _at(trees_of, "gbtree_model_param").get("num_trees") != str(len(trees)):
        raise ValueError("num_trees is not the number of its trees")
    bounds = _array(trees_of, "iteration_indptr", None, 0, len(trees) + 1)
    if not bounds or bounds != sorted(bounds) or (bounds[0], bounds[-1]) != (0, len(trees)):
        raise ValueError("iteration_indptr does not rise to the number of trees")
    _array(trees_of, "tree_info", len(trees), 0, 1)
    if "cats" in trees_of and any(_at(trees_of, "cats").values()):
        raise ValueError("it has categories of its own")
    if not re.fullmatch(r"\[?-?[0-9.]+(E-?[0-9]+)?\]?", str(counts.get("base_score"))):
        raise ValueError("base_score is no number")
    if len(learner.get("feature_types") or "") not in (0, n_columns):
        raise ValueError(f"feature_types are not {n_columns}")
    for i, tree in enumerate(trees):
        _check_tree(i, _check_xgboost_tree, i, tree, n_columns)


def _check_xgboost_tree(number: int, tree: Any, n_columns: int) -> None:
    counts = _at(tree, "tree_param")
    n, deleted = (int(str(counts.get(key))) for key in ("num_nodes", "num_deleted"))
    if tree.get("id") != number or n < 1 or counts.get("size_leaf_vector") not in ("0", "1"):
        raise ValueError("it is not in its place")
    left, right = (_array(tree, key, n, -1, n) for key in ("left_children", "right_children"))
    parents = _array(tree, "parents", n, 0, _INT32)
    if _reached(left, right) != n - deleted:
        raise ValueError("nodes are not reached from its root")
    inner = [i for i in range(n) if left[i] >= 0]
    if any(parents[child] != i for i in inner for child in (left[i], right[i])):
        raise ValueError("parents are not those of its children")
    columns = _array(tree, "split_indices", n, 0, _INT32)
    if not all(columns[i] < n_columns for i in inner):
        raise ValueError("split_indices are out of range")
    _array(tree, "default_left", n, 0, 2)
    kinds = _array(tree, "split_type", n, 0, 2)
    for key in ("base_weights", "loss_changes", "sum_hessian"):
        _numbers(tree, key, n)
    conditions = _numbers(tree, "split_conditions", n)
    # a leaf's value is finite; a threshold may be infinite, but not NaN; a categorical split has no threshold
    if not all(
        math.isfinite(conditions[i]) if left[i] < 0 else kinds[i] or conditions[i] == conditions[i] for i in range(n)
    ):
        raise ValueError("split_conditions are not finite")
    _check_xgboost_categories(tree, [i for i in inner if kinds[i]], n)


def _check_xgboost_categories(tree: Mapping[str, Any], categorical: Sequence[int], n: int) -> None:
    nodes = _array(tree, "categories_nodes", None, 0, n)
    sizes = _array(tree, "categories_sizes", len(nodes), 1, _INT32)
    begins = _array(tree, "categories_segments", len(nodes), 0, _INT32)
    _array(tree, "categories", sum(sizes), 0, N_CODES)
    if nodes != categorical or [*begins, sum(sizes)] != list(accumulate(sizes, initial=0)):
        raise ValueError("categories are not those of its splits")


def _at(value: Any, key: str) -> dict[str, Any]:
    child = value.get(key) if isinstance(value, dict) else None
    if not isinstance(child, dict):
        raise ValueError(f"{key} is missing")
    return child


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys: of two equal ones, a library might read another than this check."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a key stands there twice")
    return unique


def _numbers(values: Mapping[str, Any], key: str, n: int | None) -> list[Any]:
    """An array of n numbers (None: any number of them)."""
    items = values.get(key)
    if not isinstance(items, list):
        raise ValueError(f"{key} are missing")
    if n not in (None, len(items)):
        raise ValueError(f"{key} are {len(items)}, not {n}")
    if not {*map(type, items)} <= {int, float}:
        raise ValueError(f"{key} are no numbers")
    return items


def _array(values: Mapping[str, Any], key: str, n: int | None, low: int, high: int) -> list[int]:
    """An array of n integers from `low` to below `high`."""
    items = _numbers(values, key, n)
    if not all(type(value) is int and low <= value < high for value in items):
        raise ValueError(f"{key} are out of range")
    return items


def _floats(values: Mapping[str, Any], key: str, n: int, *, limit: float = sys.float_info.max) -> list[float]:
    """An array of n numbers within the limit; a threshold may be infinite: then only missing values go right."""
    items = _numbers(values, key, n)
    if not all(-limit <= value <= limit for value in items):
        raise ValueError(f"{key} are not finite")
    return items


def _reached(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of nodes that can be reached from node 0; a child is -1 where there is none."""
    reached = bytearray(len(left))
    level, depth = [0], 0
    while level and depth <= _DEEPEST:
        below: list[int] = []
        depth += 1
        for node in level:
            if reached[node]:
                raise ValueError("a node is reached twice from its root")
            reached[node] = 1
            if left[node] >= 0 and right[node] >= 0:
                below += (left[node], right[node])
            elif left[node] != right[node]:
                raise ValueError("a node has one child")
        level = below
    if level:
        raise ValueError(f"it is deeper than {_DEEPEST} nodes")
    return sum(reached)


def _check_tree(number: int, check: Any, *arguments: Any) -> None:
    try:
        check(*arguments)
    except ValueError as error:
        raise ValueError(f"tree {number}: {error}") from None
