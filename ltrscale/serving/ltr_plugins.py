"""Trees for the Learning to Rank plugins of Elasticsearch and OpenSearch, in their format `model/xgboost+json`.

    featureset.json  body of PUT _ltr/_featureset/NAME: a query for each feature that a tree splits on, or two
    model.json       body of POST _ltr/_featureset/NAME/_createmodel

A node of the format has either a `leaf`, or a feature `split`, a threshold `split_condition`, and the ids `yes` and
`no` of its two `children`: a document goes to the first if its value is below the threshold. Both plugins compute in
single precision and add up the leaves. A document that the query of a feature does not match has the value 0 in
Elasticsearch's plugin. In OpenSearch's, from version 3.8, it has no value and goes to the child that `missing` names.

A value is the score of a query, and no score is negative: an engine ends a search with an error instead. A field with
values below 0 therefore has two queries: one for max(x, 0), and one for max(-x, 0) with a label that ends in
`_negative`. A split reads the query that decides it:

    x < t, where t > 0:    max(x, 0) < t
    x < t, where t <= 0:   not max(-x, 0) < u, where u is the next number above -t

Both are exact, because a float32 and its negative have the same precision. The queries are `function_score`: the first
function with a filter that matches a document gives its score, computed in double precision and kept in single.

Sources: the plugins' documentation and parsers (elasticsearch-learning-to-rank, opensearch-learning-to-rank-base 3.8);
the references of both engines ("Function score query") and their `FieldValueFactorFunction`.

Shapes: N documents, G columns, n of the documents.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ltrscale.errors import InputError
from ltrscale.serving.format import EngineFormat, Files, MatrixScorer, ModelColumn, Observed, features_in, labels_of
from ltrscale.serving.trees import Step, Trees, leaves_of, missing_goes_left, trees_of

if TYPE_CHECKING:
    from ltrscale.bundle import Bundle

_FEATURES, _MODEL = "featureset.json", "model.json"
Node = dict[str, Any]
Fields = Mapping[str, NDArray[np.float32]]
"""The values [N] of each field; NaN where a document has none."""


class PluginFormat(EngineFormat):
    """A model of a Learning to Rank plugin, with the queries of its features."""

    use: ClassVar[str] = """```sh
curl -X PUT localhost:9200/_ltr
curl -X PUT localhost:9200/_ltr/_featureset/NAME -H 'Content-Type: application/json' -d @featureset.json
curl -X POST localhost:9200/_ltr/_featureset/NAME/_createmodel -H 'Content-Type: application/json' -d @model.json
```

The queries of `featureset.json` take each value from the numeric field of the same name; change them if your features
come from elsewhere, but keep their names. No score is negative, so a feature `x` with values below 0 has two queries,
`x` for max(x, 0) and `x_negative` for max(-x, 0)."""

    def write(self, bundle: Bundle, observed: Observed) -> tuple[Files, tuple[ModelColumn, ...]]:
        """The model and its feature set."""
        trees = trees_of(bundle, observed, to=self.kind, libraries=("lightgbm", "xgboost"))
        return _plugin_files(trees, observed.negative, self.kind), trees.columns

    def readers(self, folder: Path) -> tuple[MatrixScorer, ...]:
        """The plugin's computation for documents with a field for each column.

        It raises `InputError` if the engine would end searches with an error; the message names the features.
        """
        model = json.loads((folder / _MODEL).read_bytes())["model"]["model"]
        roots, columns = json.loads(model["definition"]), features_in(folder).columns

        def scores(matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
            fields = {column.name: matrix_NG[:, column.column] for column in columns}
            values = self._values(folder, fields)
            scores_N = np.zeros(len(matrix_NG), np.float32)
            for root in roots:
                scores_N += leaves_of(root, partial(_plugin_step, values), len(matrix_NG)).astype(np.float32)
            return scores_N.astype(np.float64)

        return (scores,)

    def _values(self, folder: Path, fields: Fields) -> dict[str, NDArray[np.float32]]:
        """The values [N] of the queries, by their names."""
        values, refused = {}, []
        for query in json.loads((folder / _FEATURES).read_bytes())["featureset"]["features"]:
            try:
                values_N = _query_scores(query["template"]["function_score"], fields)
                values[query["name"]] = np.nan_to_num(values_N, nan=0.0) if self.missing == "zero" else values_N
            except InputError as error:
                refused.append(str(error))
        if refused:
            more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
            raise InputError(
                f"{self.kind} would end searches with an error: {'; '.join(refused[:3])}{more}; nothing is published"
            )
        return values


class ElasticsearchFormat(PluginFormat):
    """A model of Elasticsearch's Learning to Rank plugin, which reads a missing value as 0."""

    kind: Literal["elasticsearch"] = "elasticsearch"
    title: ClassVar[str] = "A ranker for Elasticsearch's Learning to Rank plugin"
    missing: ClassVar[Literal["nan", "zero"]] = "zero"


class OpenSearchFormat(PluginFormat):
    """A model of OpenSearch's Learning to Rank plugin, from version 3.8."""

    kind: Literal["opensearch"] = "opensearch"
    title: ClassVar[str] = "A ranker for OpenSearch's Learning to Rank plugin, version 3.8 or later"


_Body = Mapping[str, Any]
"""A `function_score` of documents that have a field, or a part of it."""
_LIMITS = {"gt": np.greater, "gte": np.greater_equal, "lt": np.less, "lte": np.less_equal}


def _query_scores(body: _Body, fields: Fields) -> NDArray[np.float32]:
    """The scores of documents [N]; NaN where the query does not match; an InputError where a search would end."""
    if body["boost_mode"] != "replace" or body.get("score_mode", "first") != "first":
        raise InputError("a function_score would not replace the query's score with that of its first function")
    left_N = ~np.isnan(_values_of(fields, body["query"]["exists"]["field"]))
    scores_N = np.where(left_N, np.float32(1), np.float32(math.nan))  # 1 where no function matches
    for function in body.get("functions", [body]):
        held_N = left_N.copy()
        for field, limits in function.get("filter", {}).get("range", {}).items():
            for name, limit in limits.items():
                held_N &= _LIMITS[name](_values_of(fields, field), limit)  # False without a value
        if "field_value_factor" in function:
            scores_N[held_N] = _factor_values(function["field_value_factor"], fields, np.flatnonzero(held_N))
        else:
            scores_N[held_N] = function["weight"]
        left_N &= ~held_N
    return scores_N


def _factor_values(value: _Body, fields: Fields, rows_n: NDArray[np.int64]) -> NDArray[np.float64]:
    """The values of a field in some documents, times a factor in single precision; an InputError if one is refused."""
    field, factor = value["field"], np.float64(np.float32(value.get("factor", 1)))
    values_n = _values_of(fields, field)[rows_n].astype(np.float64) * factor
    if np.isnan(values_n).any():
        raise InputError(f"{field!r} has no value in some documents, and field_value_factor no `missing`")
    if (values_n < 0).any():
        raise InputError(f"field_value_factor of {field!r} is negative, {values_n.min():.3g}")
    return values_n


def _values_of(fields: Fields, field: str) -> NDArray[np.float32]:
    if field not in fields:
        raise InputError(f"no field {field!r}")
    return fields[field]


def _plugin_files(trees: Trees, negative: Collection[str], to: str) -> Files:
    """The files of trees; `negative` are the features with values below 0, and `to` names the engine in errors."""
    roots = _roots(trees, to)
    second = _second_labels(trees.columns, negative)
    for root in roots:
        _give_ids(root)
        for node in _nodes(root):
            if node.get("split") in second and node["split_condition"] <= 0:
                _mirror(node, second[node["split"]])
    used = {node["split"] for root in roots for node in _nodes(root) if "split" in node}
    for column in trees.columns:
        if column.kind == "categorical" and column.label in used:
            raise _splits_on_category(trees, column, to)
        if "{{" in column.name and column.label in used:
            remedy = "train without it (leave_out in the training split), or rename the column"
            raise InputError(
                f"{trees.url}: {to} would fill in the feature's name {column.name!r} as a template; {remedy}"
            )
    queries = [query for column in trees.columns for query in _feature_queries(column, second) if query["name"] in used]
    model = {"type": "model/xgboost+json", "definition": json.dumps(roots, separators=(",", ":"), allow_nan=False)}
    return {
        _FEATURES: _json({"featureset": {"features": queries}}),
        _MODEL: _json({"model": {"name": "ltrscale", "model": model}}),
    }


def _plugin_step(values: Mapping[str, NDArray[np.float32]], node: Node, rows_n: NDArray[np.int64]) -> Step:
    if "leaf" in node:
        return float(node["leaf"])
    values_n = values[node["split"]][rows_n]
    first_n = values_n < np.float32(node["split_condition"])
    first_n[np.isnan(values_n)] = node["missing"] == node["yes"]
    children = {child["nodeid"]: child for child in node["children"]}
    return first_n, children[node["yes"]], children[node["no"]]


def _roots(trees: Trees, to: str) -> list[Node]:
    """The trees as nodes in XGBoost's form."""
    if trees.library == "lightgbm":
        return [_from_lightgbm(tree["tree_structure"], trees, to) for tree in trees.booster.dump_model()["tree_info"]]
    learner = json.loads(trees.booster.save_config())["learner"]
    # the base score: the format can hold it only as a tree of one leaf
    nothing = {"leaf": float(learner["learner_model_param"]["base_score"].strip("[]"))}
    return [*(json.loads(tree) for tree in trees.booster.get_dump(dump_format="json")), nothing]


def _from_lightgbm(node: Mapping[str, Any], trees: Trees, to: str, depth: int = 0) -> Node:
    """Convert a node of LightGBM's dump and its subtree; ids come later."""
    if "leaf_value" in node:
        return {"leaf": node["leaf_value"]}
    column = trees.columns[node["split_feature"]]
    if node["decision_type"] != "<=":
        raise _splits_on_category(trees, column, to)
    return {
        "depth": depth,
        "split": column.label,
        "split_condition": _above(node["threshold"]),
        "missing": "yes" if missing_goes_left(node) else "no",
        "children": [_from_lightgbm(node[side], trees, to, depth + 1) for side in ("left_child", "right_child")],
    }


def _above(threshold: float) -> float:
    """The smallest float32 t above a threshold: x <= threshold if and only if x < t, for all but the largest."""
    largest = float(np.finfo(np.float32).max)
    if abs(threshold) >= largest:  # LightGBM writes 1e300 if a split only tests for a value; JSON has no infinity
        return math.copysign(largest, threshold)
    nearest = np.float32(threshold)
    return float(nearest if float(nearest) > threshold else np.nextafter(nearest, np.float32("inf")))


def _give_ids(root: Node) -> None:
    """Give the nodes of a tree ids, and refer to children by id in the splits."""
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


def _second_labels(columns: Sequence[ModelColumn], negative: Collection[str]) -> dict[str, str]:
    """The label of the second query for each column with values below 0, by the column's label."""
    labels = [column.label for column in columns]
    signed = [column.label for column in columns if column.name in negative and column.kind == "numeric"]
    unique = labels_of([*labels, *(f"{label}_negative" for label in signed)])
    return dict(zip(signed, unique[len(labels) :], strict=True))


def _mirror(node: Node, label: str) -> None:
    """Make a split at a threshold <= 0 read max(-x, 0), with its two directions swapped."""
    threshold = np.float32(node["split_condition"])  # XGBoost writes fewer digits than a double has
    node["split"], node["split_condition"] = label, _above(-float(threshold))
    node["children"].reverse()
    node["yes"], node["no"] = node["no"], node["yes"]


def _feature_queries(column: ModelColumn, second: Mapping[str, str]) -> list[dict[str, Any]]:
    """The query for a numeric field, or for its two sides of 0; none matches a document without the field."""
    field = column.name
    value = {"field_value_factor": {"field": field}}
    bodies: dict[str, dict[str, Any]] = {column.label: value}
    if column.label in second:
        minus = {"field_value_factor": {"field": field, "factor": -1}}
        bodies = {
            column.label: _one_side(field, "gt", "lte", value),
            second[column.label]: _one_side(field, "lt", "gte", minus),
        }
    exists = {"exists": {"field": field}}
    return [
        {
            "name": label,
            "params": [],
            "template_language": "mustache",
            "template": {"function_score": {"query": exists, **body, "boost_mode": "replace"}},
        }
        for label, body in bodies.items()
    ]


def _one_side(field: str, inside: str, outside: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The value on one side of 0, and 0 on the other."""
    sides = [{"filter": {"range": {field: {side: 0}}}} for side in (inside, outside)]
    return {"functions": [{**sides[0], **value}, {**sides[1], "weight": 0}], "score_mode": "first"}


def _splits_on_category(trees: Trees, column: ModelColumn, to: str) -> InputError:
    return InputError(
        f"{trees.url}: its trees split on the category {column.name!r}, and {to} compares numbers only; train without "
        "categories (leave_out: [categorical] in the training split)"
    )


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
