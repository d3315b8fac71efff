"""Trees for Vespa, which turns each split of LightGBM's dump into a ranking expression.

A numeric one is `feature < threshold`, or `!(feature >= threshold)` where `default_left` says that a missing value goes
left; LightGBM has `<=`. A category is compared as text with the entries of `pandas_categorical`; its lists belong to
the features with values in `feature_infos`, in feature order.

Sources: Vespa's documentation (Ranking with LightGBM Models) and its importer, version 8.

Shapes: N documents, G columns, n of the documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ltrscale.errors import InputError
from ltrscale.serving.format import EngineFormat, Files, MatrixScorer, ModelColumn, Observed, features_in
from ltrscale.serving.trees import Step, Trees, leaves_of, missing_goes_left, trees_of

if TYPE_CHECKING:
    from ltrscale.bundle import Bundle

_MODEL = "model.json"


class VespaFormat(EngineFormat):
    """LightGBM's dump, adapted to mean the same in Vespa."""

    kind: Literal["vespa"] = "vespa"
    title: ClassVar[str] = "A ranker for Vespa"
    tolerance: ClassVar[float] = 1e-9
    use: ClassVar[
        str
    ] = """Put `model.json` below `models/` of the application package, and define a function for each feature:

```
rank-profile ranker {
    function price() { expression: attribute(price) }
    first-phase { expression: lightgbm("model.json") }
}
```

The features have the names of `label`. Categories are text: their functions take attributes of type string."""

    def write(self, bundle: Bundle, observed: Observed) -> tuple[Files, tuple[ModelColumn, ...]]:
        """The file, and its columns."""
        trees = trees_of(bundle, observed, to=self.kind, libraries=("lightgbm",))
        return {_MODEL: _dump(trees)}, trees.columns

    def readers(self, folder: Path) -> tuple[MatrixScorer, ...]:
        """The ranking expression that Vespa makes from the file."""
        model, described = json.loads((folder / _MODEL).read_bytes()), features_in(folder).columns
        with_values = [i for i, name in enumerate(model["feature_names"]) if _category_values(model, name)]
        texts = dict(zip(with_values, model["pandas_categorical"], strict=True))

        def scores(matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
            columns: list[Any] = list(matrix_NG.T.astype(np.float64))
            for column in described:
                if column.kind == "categorical":
                    by_place, places_N = _by_place(column), columns[column.column].tolist()
                    columns[column.column] = np.array([by_place.get(place, "") for place in places_N])
            scores_N = np.zeros(len(matrix_NG))
            for tree in model["tree_info"]:
                scores_N += leaves_of(tree["tree_structure"], partial(_vespa_step, columns, texts), len(matrix_NG))
            return scores_N

        return (scores,)


def _dump(trees: Trees) -> bytes:
    dump = trees.booster.dump_model()
    roots = [_node(tree["tree_structure"]) for tree in dump["tree_info"]]
    texts = [_texts_of(c, trees.url) for c in trees.columns if c.codes and _category_values(dump, c.label)]
    model = {
        "name": "tree",
        "version": dump["version"],
        "objective": dump.get("objective", "regression"),  # a custom one has no name; neither changes scores
        "feature_names": dump["feature_names"],
        "feature_infos": dump["feature_infos"],
        "tree_info": [{"tree_index": i, "tree_structure": root} for i, root in enumerate(roots)],
        "pandas_categorical": texts,
    }
    return (json.dumps(model, allow_nan=False) + "\n").encode()


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    if "leaf_value" in node:
        return {"leaf_value": node["leaf_value"]}
    numeric = node["decision_type"] == "<="
    return {
        "split_feature": node["split_feature"],
        # x <= threshold if and only if x < the next number
        "threshold": float(np.nextafter(node["threshold"], np.inf)) if numeric else node["threshold"],
        "decision_type": node["decision_type"],
        "default_left": numeric and missing_goes_left(node),  # a missing category goes right
        "missing_type": node["missing_type"],
        **{side: _node(node[side]) for side in ("left_child", "right_child")},
    }


def _texts_of(column: ModelColumn, url: str) -> list[str]:
    """The text of each category of a column, in the order of the model's numbers."""
    by_place = _by_place(column)
    unnamed = [code for place, code in enumerate(column.codes or ()) if place not in by_place]
    if unnamed or len(by_place) < len(column.values or {}):
        raise InputError(
            f"{url}: Vespa compares categories as text, and the data set does not record one text for each code "
            f"of {column.name!r} ({len(unnamed):,} have none); export with the training data set, prepare the data "
            "again if it is that one, or train without the feature (leave_out in the training split)"
        )
    return [by_place[place] for place in range(len(by_place))]


def _by_place(column: ModelColumn) -> dict[int, str]:
    """The texts of a category by the model's numbers."""
    return {place: text for text, place in (column.values or {}).items()}


def _category_values(model: Mapping[str, Any], name: str) -> Any:
    return model["feature_infos"].get(name, {}).get("values")


def _vespa_step(
    columns: Sequence[Any], texts: Mapping[int, Sequence[str]], node: Mapping[str, Any], rows_n: NDArray[np.int64]
) -> Step:
    if "leaf_value" in node:
        return float(node["leaf_value"])
    values_n = columns[node["split_feature"]][rows_n]
    if node["decision_type"] == "==":
        named = texts[node["split_feature"]]
        left_n = np.isin(values_n, [named[int(place)] for place in node["threshold"].split("||")])
    elif node["default_left"]:
        left_n = ~(values_n >= node["threshold"])
    else:
        left_n = values_n < node["threshold"]
    return left_n, node["left_child"], node["right_child"]
