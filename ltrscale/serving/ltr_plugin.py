"""Trees for the Learning to Rank plugins of Elasticsearch and OpenSearch, in the format `model/xgboost+json`.

    featureset.json  body of PUT _ltr/_featureset/NAME: a query for each feature that a tree splits on
    model.json       body of POST _ltr/_featureset/NAME/_createmodel

A node of the format has either a `leaf`, or a feature `split`, a threshold `split_condition`, and the ids `yes` and
`no` of its two `children`: a document goes to the first if its value is below the threshold. Both plugins compute in
single precision and add up the leaves. A document that the query of a feature does not match has the value 0 in
Elasticsearch's plugin. In OpenSearch's, from version 3.8, it has no value and goes to the child that `missing` names.

Source: the plugins' documentation and parsers (elasticsearch-learning-to-rank, opensearch-learning-to-rank-base 3.8).

Shapes: N documents, G columns.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ltrscale.errors import InputError
from ltrscale.serving.features import Column, ExportedFeatures
from ltrscale.serving.trees import Trees, missing_goes_left

FEATURES, MODEL = "featureset.json", "model.json"
Node = dict[str, Any]


def write(trees: Trees, *, to: str) -> dict[str, bytes]:
    """The two files.

    Raises:
        InputError: a tree splits on a category.
    """
    if trees.library == "lightgbm":
        roots = [_of_lightgbm(tree["tree_structure"], trees, to) for tree in trees.booster.dump_model()["tree_info"]]
    else:
        roots = [json.loads(tree) for tree in trees.booster.get_dump(dump_format="json")]
        learner = json.loads(trees.booster.save_config())["learner"]
        # the score of no tree, which the format has no place for but a tree of one leaf
        roots.append({"leaf": float(learner["learner_model_param"]["base_score"].strip("[]"))})
    for root in roots:
        _number(root)
    labels = {node["split"] for root in roots for node in _nodes(root) if "split" in node}
    used = [column for column in trees.columns if column.label in labels]
    for column in used:
        if column.kind == "categorical":
            raise _categories(trees, column, to)
    queries = [_query(column) for column in used]
    model = {"type": "model/xgboost+json", "definition": json.dumps(roots, separators=(",", ":"), allow_nan=False)}
    return {
        FEATURES: _json({"featureset": {"features": queries}}),
        MODEL: _json({"model": {"name": "ltrscale", "model": model}}),
    }


def read(folder: Path, features: ExportedFeatures, matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
    """Scores [N] as the plugin computes them from the files."""
    model = json.loads((folder / MODEL).read_bytes())["model"]["model"]
    known = [query["name"] for query in json.loads((folder / FEATURES).read_bytes())["featureset"]["features"]]
    place = {column.label: i for i, column in enumerate(features.columns) if column.label in known}
    values_NG = np.nan_to_num(matrix_NG, nan=0.0) if features.missing == "zero" else matrix_NG
    scores_N = np.zeros(len(values_NG), np.float32)
    for root in json.loads(model["definition"]):
        scores_N += _walk(root, values_NG, place)
    return scores_N.astype(np.float64)


def _walk(root: Node, values_NG: NDArray[np.float32], place: Mapping[str, int]) -> NDArray[np.float32]:
    leaves_N = np.empty(len(values_NG), np.float32)
    waiting = [(root, np.arange(len(values_NG)))]
    while waiting:
        node, rows = waiting.pop()
        if "leaf" in node:
            leaves_N[rows] = np.float32(node["leaf"])
            continue
        values_n = values_NG[rows, place[node["split"]]]
        first_n = values_n < np.float32(node["split_condition"])
        first_n[np.isnan(values_n)] = node["missing"] == node["yes"]
        children = {child["nodeid"]: child for child in node["children"]}
        waiting += [(children[node["yes"]], rows[first_n]), (children[node["no"]], rows[~first_n])]
    return leaves_N


def _of_lightgbm(node: Mapping[str, Any], trees: Trees, to: str, depth: int = 0) -> Node:
    """A node of LightGBM's dump and all below it; ids come later."""
    if "leaf_value" in node:
        return {"leaf": node["leaf_value"]}
    column = trees.columns[node["split_feature"]]
    if node["decision_type"] != "<=":
        raise _categories(trees, column, to)
    return {
        "depth": depth,
        "split": column.label,
        "split_condition": _above(node["threshold"]),
        "missing": "yes" if missing_goes_left(node) else "no",
        "children": [_of_lightgbm(node[side], trees, to, depth + 1) for side in ("left_child", "right_child")],
    }


def _above(threshold: float) -> float:
    """The smallest float32 above a threshold: x <= threshold if and only if x < it, for every float32 but the largest.

    Example:
        >>> _above(1.0), _above(0.1) == float(np.float32(0.1))
        (1.0000001192092896, True)
        >>> _above(1e300) == float(np.finfo(np.float32).max)
        True
    """
    largest = float(np.finfo(np.float32).max)
    if abs(threshold) > largest:  # LightGBM writes 1e300 where a split only asks for a value; JSON has no infinity
        return math.copysign(largest, threshold)
    nearest = np.float32(threshold)
    return float(nearest if float(nearest) > threshold else np.nextafter(nearest, np.float32("inf")))


def _number(root: Node) -> None:
    """Give the nodes of a tree ids, and let splits name their children by them."""
    for i, node in enumerate(_nodes(root)):
        node["nodeid"] = i
    for node in _nodes(root):
        if "children" in node:
            yes, no = (child["nodeid"] for child in node["children"])
            node["missing"] = yes if node["missing"] in ("yes", node.get("yes")) else no
            node["yes"], node["no"] = yes, no


def _nodes(root: Node) -> Iterator[Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.get("children", [])


def _query(column: Column) -> dict[str, Any]:
    """The value of a numeric field of the document; a document without it does not match."""
    field = {"field": column.name}
    query = {"query": {"exists": field}, "field_value_factor": field, "boost_mode": "replace"}
    return {
        "name": column.label,
        "params": [],
        "template_language": "mustache",
        "template": {"function_score": query},
    }


def _categories(trees: Trees, column: Column, to: str) -> InputError:
    return InputError(
        f"{trees.url}: its trees split on the category {column.name!r}, and {to} compares numbers only; train without "
        "categories (leave_out: [categorical] in the training split)"
    )


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
