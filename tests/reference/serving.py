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
