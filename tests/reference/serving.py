"""How the engines score one document with an exported model, one node at a time, as their documentation says."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Document = Mapping[str, Any]
"""Values by the label of the feature; one without a value is absent. Categories are text."""


def ltr_plugin(definition: str, document: Document, *, missing_is_zero: bool) -> float:
    """The score of the Learning to Rank plugins: single precision throughout, trees added up in order."""
    total = np.float32(0)
    for node in json.loads(definition):
        while "leaf" not in node:
            by_id = {child["nodeid"]: child for child in node["children"]}
            value = document.get(node["split"], 0.0 if missing_is_zero else None)
            if value is None:
                node = by_id[node["missing"]]
            else:
                node = by_id[node["yes"] if np.float32(node["split_condition"]) > np.float32(value) else node["no"]]
        total = np.float32(total + np.float32(node["leaf"]))
    return float(total)


def vespa(model: str, document: Document) -> float:
    """The score of the ranking expression that Vespa makes of LightGBM's dump."""
    dump = json.loads(model)
    assert dump["objective"] in ("lambdarank", "rank_xendcg", "regression")
    names = dump["feature_names"]
    categorical = [name for name in names if dump["feature_infos"].get(name, {}).get("values")]
    texts = dict(zip(categorical, dump["pandas_categorical"], strict=True))
    total = 0.0
    for tree in dump["tree_info"]:
        node = tree["tree_structure"]
        while "leaf_value" not in node:
            name = names[node["split_feature"]]
            value = document.get(name, "" if name in texts else math.nan)
            if node["decision_type"] == "==":
                goes_left = value in [texts[name][int(i)] for i in node["threshold"].split("||")]
            elif node["default_left"]:
                goes_left = not value >= node["threshold"]
            else:
                goes_left = value < node["threshold"]
            node = node["left_child" if goes_left else "right_child"]
        total += node["leaf_value"]
    return total


def function_score(body: Mapping[str, Any], document: Mapping[str, float]) -> float | None:
    """The score of a `function_score` for one document, None if it does not match, as the engines' references say.

    Its `score_mode` is `first`, and its `boost_mode` `replace`.

    Raises:
        ValueError: the engine ends the search with an error.
    """
    if body["query"]["exists"]["field"] not in document:
        return None
    for function in body.get("functions", [{"field_value_factor": body.get("field_value_factor")}]):
        if all(in_range(document, *limits) for limits in function.get("filter", {}).get("range", {}).items()):
            factor = function.get("field_value_factor")
            return float(np.float32(field_value(factor, document) if factor else function.get("weight", 1)))
    return 1.0


def in_range(document: Mapping[str, float], field: str, limits: Mapping[str, float]) -> bool:
    """Whether a document has a field's value within the limits."""
    value = document.get(field, math.nan)
    tests = {"gt": value.__gt__, "gte": value.__ge__, "lt": value.__lt__, "lte": value.__le__}
    return all(tests[name](float(limit)) for name, limit in limits.items())


def field_value(given: Mapping[str, Any], document: Mapping[str, float]) -> float:
    """`factor * value`; an error if the field is missing, or the result is negative."""
    if given["field"] not in document:
        raise ValueError("missing value")
    result = document[given["field"]] * float(np.float32(given.get("factor", 1)))
    if result < 0:
        raise ValueError("negative")
    return result


def features(featureset: str, document: Mapping[str, float]) -> dict[str, float]:
    """The values of a feature set for a document with these fields; one whose query does not match is absent."""
    found = {}
    for query in json.loads(featureset)["featureset"]["features"]:
        score = function_score(query["template"]["function_score"], document)
        if score is not None:
            found[query["name"]] = score
    return found
