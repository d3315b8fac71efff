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

    Raises:
        ValueError: the engine ends the search with an error.
    """
    if not matches(body.get("query", {"match_all": {}}), document):
        return None
    given = body.get("functions", [{"field_value_factor": body.get("field_value_factor")}])
    mode = body.get("score_mode", "multiply")
    found: list[tuple[float, float]] = []
    for function in given:
        if matches(function.get("filter", {"match_all": {}}), document) and not (mode == "first" and found):
            weight = float(np.float32(function.get("weight", 1)))
            factor = function.get("field_value_factor")
            found.append((weight * (field_value(factor, document) if factor else 1.0), weight))
    value = 1.0
    if found:
        values = [value for value, _ in found]
        together = {"multiply": math.prod, "sum": sum, "first": sum, "max": max, "min": min, "avg": sum}
        value = together[mode](values)
        value = value / sum(weight for _, weight in found) if mode == "avg" else value
    value = min(value, body.get("max_boost", float(np.finfo(np.float32).max)))
    boost = {"multiply": value, "replace": value, "sum": 1 + value, "avg": (1 + value) / 2}
    boost |= {"max": max(1.0, value), "min": min(1.0, value)}
    score = float(np.float32(boost[body.get("boost_mode", "multiply")]))
    if not score >= 0:
        raise ValueError("invalid score")
    return score


def matches(query: Mapping[str, Any], document: Mapping[str, float]) -> bool:
    """Whether a query `match_all`, `exists` or `range` holds for a document."""
    ((kind, given),) = query.items()
    if kind == "match_all":
        return True
    if kind == "exists":
        return given["field"] in document
    ((field, limits),) = given.items()
    if field not in document:
        return False
    value = document[field]
    tests = {"gt": value.__gt__, "gte": value.__ge__, "lt": value.__lt__, "lte": value.__le__}
    return all(tests[name](float(limit)) for name, limit in limits.items())


def field_value(given: Mapping[str, Any], document: Mapping[str, float]) -> float:
    """`modifier(factor * value)`; an error if the field is missing without `missing`, or the result is negative."""
    if given["field"] not in document and "missing" not in given:
        raise ValueError("missing value")
    x = document.get(given["field"], given.get("missing", math.nan)) * float(np.float32(given.get("factor", 1)))
    modifier = given.get("modifier", "none")
    shift = {"log1p": 1, "log2p": 2, "ln1p": 1, "ln2p": 2}.get(modifier, 0)
    if modifier.startswith(("log", "ln")):
        if x + shift <= 0:
            raise ValueError("logarithm of a number that is not above 0")
        result = math.log10(x + shift) if modifier.startswith("log") else math.log(x + shift)
    elif modifier == "sqrt" and x < 0:
        raise ValueError("square root of a negative number")
    elif modifier == "reciprocal":
        result = 1 / x if x else math.copysign(math.inf, x)
    else:
        result = {"none": x, "square": x * x, "sqrt": math.sqrt(abs(x))}[modifier]
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
