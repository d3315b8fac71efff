"""Trees in their library's own format with feature names, and the exports that this library reads back.

Shapes: N documents, G columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ltrscale.errors import InputError
from ltrscale.serving.format import Files, MatrixFormat, MatrixScorer, ModelColumn, Observed, labels_of

if TYPE_CHECKING:
    from ltrscale.bundle import Bundle, boosters

_CODES = "\npandas_categorical:"
_OF_SPLITS = 1
"""The bit of LightGBM's `decision_type` of a split by a set of codes."""
_WORD = 32
"""Bits of a word of such a set."""
_TEXT, _BINARY, _JSON, _CHECKPOINT, _TRITON = "model.txt", "model.ubj", "model.json", "checkpoint.tl", "config.pbtxt"


@dataclass(frozen=True)
class Trees:
    """One model of raw features.

    `booster` is the library's own object, with the column labels as feature names.
    """

    url: str
    library: boosters.Library
    booster: Any
    columns: tuple[ModelColumn, ...]


def trees_of(bundle: Bundle, observed: Observed, *, to: str, libraries: Collection[str]) -> Trees:
    """The trees of a bundle.

    Raises:
        InputError: the bundle is not one model of raw features from one of the libraries.
    """
    trees = bundle.forest
    if trees is None or trees.library not in libraries:
        contents = f"trees of {trees.library}" if trees else f"a bundle of kind {bundle.kind}"
        remedy = "export a network to onnx, or" if bundle.parts else "instead,"
        raise InputError(
            f"{bundle.url}: {contents}, and {to} takes trees of {' or '.join(libraries)} only; {remedy} export a "
            "student that jobs.distill trains from it"
        )
    several = len(trees.models) > 1 and trees.library != "lightgbm"
    if several or trees.per_query or trees.projection or trees.members:
        raise InputError(
            f"{bundle.url}: several models of {trees.library}, or trees on features standardised per query, on "
            f"components or on other models' scores, which {to} cannot express; export a bundle of one model on raw "
            "features, such as a student of this one"
        )
    bundle.scorer()  # raises if the model is damaged
    kinds = {feature.name: feature.kind for feature in bundle.features}
    names = list(kinds if trees.sees is None else trees.sees)
    labels = labels_of(names)
    read = _read_lightgbm if trees.library == "lightgbm" else _read_xgboost
    content = bundle.contents[trees.files()[0]]
    if len(trees.models) > 1:
        models = [bundle.contents[name].decode() for name in trees.files()]
        categorical = [i for i, name in enumerate(names) if kinds[name] == "categorical"]
        content = merged_lightgbm(models, categorical).encode()
    booster, codes = read(content, labels, [kinds[name] for name in names])
    codes_of = dict(zip([name for name in names if kinds[name] == "categorical"], codes, strict=True))
    texts = observed.texts_of(codes_of)
    columns = tuple(
        _categorical(i, name, label, codes_of[name], texts.get(name, {}))
        if name in codes_of
        else ModelColumn(column=i, name=name, label=label, kind="numeric")
        for i, (name, label) in enumerate(zip(names, labels, strict=True))
    )
    return Trees(bundle.url, trees.library, booster, columns)


_Read = tuple[Any, list[list[int]]]
"""A library's own model, and the codes of its categorical columns."""


def _categorical(i: int, name: str, label: str, codes: Sequence[int], texts: Mapping[str, int]) -> ModelColumn:
    index_of = {code: i for i, code in enumerate(codes)}
    values = {text: index_of[code] for text, code in texts.items()}
    return ModelColumn(column=i, name=name, label=label, kind="categorical", values=values, codes=tuple(codes))


def _read_lightgbm(content: bytes, labels: Sequence[str], kinds: Sequence[str]) -> _Read:  # noqa: ARG001
    import lightgbm

    text = content.decode()
    (old,) = re.findall(r"^feature_names=(.*)$", text, re.MULTILINE)
    new = dict(zip(old.split(" "), labels, strict=True))
    text = text.replace(f"\nfeature_names={old}\n", f"\nfeature_names={' '.join(labels)}\n", 1)
    trees, shares, parameters = text.partition("\nfeature_importances:\n")
    parameters = re.sub(
        r"^(\S+)(?==[0-9.e+]+$)", lambda name: str(new.get(name[1], name[1])), parameters, flags=re.MULTILINE
    )
    booster = lightgbm.Booster(model_str=f"{trees}{shares}{parameters}")
    return booster, booster.pandas_categorical or []


def _read_xgboost(content: bytes, labels: Sequence[str], kinds: Sequence[str]) -> _Read:
    import xgboost

    booster = xgboost.Booster(model_file=bytearray(content))
    booster.feature_names = list(labels)
    booster.feature_types = ["c" if kind == "categorical" else "float" for kind in kinds]
    return booster, json.loads(booster.attr("codes"))


def merged_lightgbm(texts: Sequence[str], categorical: Sequence[int]) -> str:
    """The text of one model whose score is the mean of several: all their trees, with leaves divided by their number.

    Each model numbers the codes of its `categorical` columns by lists of its own; the one model has the union of the
    lists. A code that a model has not learnt goes where its missing value goes, which is out of every set of codes.
    """
    own = [_codes_of(text) for text in texts]
    unions = [dict.fromkeys(code for codes in lists for code in codes) for lists in zip(*own, strict=True)]
    numbers = [{code: number for number, code in enumerate(union)} for union in unions]
    head = re.sub(r"^tree_sizes=.*\n", "", texts[0].partition("\nTree=0\n")[0], flags=re.MULTILINE)
    trees: list[str] = []
    for text, lists in zip(texts, own, strict=True):
        renumbered = {
            column: [number_of[code] for code in codes]
            for column, codes, number_of in zip(categorical, lists, numbers, strict=True)
        }
        blocks = re.split(r"^Tree=\d+\n", text.partition("\nend of trees\n")[0], flags=re.MULTILINE)[1:]
        trees += [_tree(block, renumbered, len(texts)) for block in blocks]
    body = "".join(f"Tree={i}\n{tree}" for i, tree in enumerate(trees))
    tail = texts[0].partition("\nend of trees\n")[2].partition(_CODES)[0]
    return f"{head}\n\n{body}end of trees\n{tail}{_CODES}{json.dumps([list(union) for union in unions])}\n"


def _codes_of(text: str) -> list[list[int]]:
    found: list[list[int]] | None = json.loads(text.rpartition(_CODES)[2].partition("\n")[0])
    return found or []


def _tree(block: str, renumbered: Mapping[int, Sequence[int]], models: int) -> str:
    """A tree's text with its share of the mean, and with the sets of codes of its splits in the common numbers."""
    lines = [line.partition("=") for line in block.splitlines() if line]
    values = {name: value.split(" ") for name, _, value in lines}
    for name in ("leaf_value", "internal_value"):
        if name in values:
            values[name] = [repr(float(value) / models) if value else "" for value in values[name]]
    if values["num_cat"] != ["0"]:
        _renumber(values, renumbered)
    return "".join(f"{name}={' '.join(value)}\n" for name, value in values.items()) + "\n\n"


def _renumber(values: dict[str, list[str]], renumbered: Mapping[int, Sequence[int]]) -> None:
    """Replace the sets of codes of a tree."""
    bounds, words = (list(map(int, values[name])) for name in ("cat_boundaries", "cat_threshold"))
    sets: list[list[int]] = [[] for _ in bounds[1:]]
    splits = zip(values["split_feature"], values["threshold"], values["decision_type"], strict=True)
    for column, threshold, decision in splits:
        if int(decision) & _OF_SPLITS:
            number = int(float(threshold))
            bits = sum(word << (_WORD * i) for i, word in enumerate(words[bounds[number] : bounds[number + 1]]))
            new = sum(1 << place for old, place in enumerate(renumbered[int(column)]) if bits >> old & 1)
            count = max(1, -(-new.bit_length() // _WORD))
            sets[number] = [new >> (_WORD * i) & ((1 << _WORD) - 1) for i in range(count)]
    ends = [0]
    for each in sets:
        ends.append(ends[-1] + len(each))
    values["cat_boundaries"] = list(map(str, ends))
    values["cat_threshold"] = [str(word) for each in sets for word in each]


def missing_goes_left(node: Mapping[str, Any]) -> bool:
    """True if a missing value goes left at a numeric split of LightGBM's dump; if training had none, it counts as 0."""
    if node["missing_type"] not in ("None", "NaN"):
        raise InputError(
            f"the trees have the missing_type {node['missing_type']!r}, which no export has; "
            "train without zero_as_missing"
        )
    return bool(node["default_left"] if node["missing_type"] == "NaN" else node["threshold"] >= 0)


Step = float | tuple[NDArray[np.bool_], Any, Any]
"""The value of a leaf; or which rows of a node go to its first child, and both children."""


def leaves_of(root: Any, step: Callable[[Any, NDArray[np.int64]], Step], documents: int) -> NDArray[np.float64]:
    """The value of the leaf in which each document [N] ends; `step` takes a node and the rows that reach it."""
    leaves_N = np.empty(documents)
    waiting = [(root, np.arange(documents))]
    while waiting:
        node, rows_n = waiting.pop()
        match step(node, rows_n):
            case (first_n, first, second):
                waiting += [(first, rows_n[first_n]), (second, rows_n[~first_n])]
            case value:
                leaves_N[rows_n] = value
    return leaves_N


class LightGBMFormat(MatrixFormat):
    """LightGBM's text format."""

    kind: Literal["lightgbm"] = "lightgbm"
    title: ClassVar[str] = "A ranker as LightGBM's own text"
    tolerance: ClassVar[float] = 1e-9
    use: ClassVar[str] = """```python
import lightgbm
scores = lightgbm.Booster(model_file="model.txt").predict(matrix, raw_score=True)
```"""

    def write(self, bundle: Bundle, observed: Observed) -> tuple[Files, tuple[ModelColumn, ...]]:
        """The text file, and its columns."""
        trees = trees_of(bundle, observed, to=self.kind, libraries=("lightgbm",))
        return {_TEXT: trees.booster.model_to_string().encode()}, trees.columns

    def readers(self, folder: Path) -> tuple[MatrixScorer, ...]:
        """LightGBM itself."""
        import lightgbm

        booster = lightgbm.Booster(model_file=str(folder / _TEXT))
        return (lambda matrix_NG: np.asarray(booster.predict(matrix_NG, raw_score=True), np.float64),)


class XGBoostFormat(MatrixFormat):
    """XGBoost's UBJ and JSON."""

    kind: Literal["xgboost"] = "xgboost"
    title: ClassVar[str] = "A ranker in XGBoost's own formats"
    use: ClassVar[str] = """`model.ubj` and `model.json` are the same model:

```python
import xgboost
booster = xgboost.Booster(model_file="model.ubj")
rows = xgboost.DMatrix(
    matrix, feature_names=booster.feature_names, feature_types=booster.feature_types, enable_categorical=True
)
scores = booster.predict(rows, output_margin=True)
```"""

    def write(self, bundle: Bundle, observed: Observed) -> tuple[Files, tuple[ModelColumn, ...]]:
        """Both files, and their columns."""
        trees = trees_of(bundle, observed, to=self.kind, libraries=("xgboost",))
        files = {name: bytes(trees.booster.save_raw(form)) for name, form in ((_BINARY, "ubj"), (_JSON, "json"))}
        return files, trees.columns

    def readers(self, folder: Path) -> tuple[MatrixScorer, ...]:
        """XGBoost itself, for both files."""
        return _xgboost(folder / _BINARY), _xgboost(folder / _JSON)


def _xgboost(path: Path) -> MatrixScorer:
    import xgboost

    booster = xgboost.Booster(model_file=str(path))
    column_info = {"feature_names": booster.feature_names, "feature_types": booster.feature_types}

    def scores(matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        rows = xgboost.DMatrix(matrix_NG, **column_info, enable_categorical=True)
        scores_N: NDArray[np.float64] = booster.predict(rows, output_margin=True).astype(np.float64)
        return scores_N

    return scores


class TreeliteFormat(MatrixFormat):
    """Treelite's checkpoint, and settings for Triton's FIL backend."""

    kind: Literal["treelite"] = "treelite"
    title: ClassVar[str] = "A ranker as a treelite checkpoint, for Triton's FIL backend"
    use: ClassVar[str] = """```python
import treelite
model = treelite.Model.deserialize("checkpoint.tl")
scores = treelite.gtil.predict(model, matrix, pred_margin=True).reshape(-1)
```

In a model repository of Triton, the files are `NAME/config.pbtxt` and `NAME/1/checkpoint.tl`."""

    def write(self, bundle: Bundle, observed: Observed) -> tuple[Files, tuple[ModelColumn, ...]]:
        """Checkpoint and settings, and the columns."""
        trees = trees_of(bundle, observed, to=self.kind, libraries=_FRONTENDS)
        treelite = _treelite()
        load = _FRONTENDS[trees.library](treelite)
        settings = f"""backend: "fil"
max_batch_size: 32768
input [{{ name: "input__0" data_type: TYPE_FP32 dims: [ {len(trees.columns)} ] }}]
output [{{ name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] }}]
parameters [{{ key: "model_type" value: {{ string_value: "treelite_checkpoint" }} }}]
"""
        files = {_CHECKPOINT: bytes(load(trees.booster).serialize_bytes()), _TRITON: settings.encode()}
        return files, trees.columns

    def readers(self, folder: Path) -> tuple[MatrixScorer, ...]:
        """Treelite's own interpreter."""
        treelite = _treelite()
        model = treelite.Model.deserialize_bytes((folder / _CHECKPOINT).read_bytes())

        def scores(matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
            scores_N1 = treelite.gtil.predict(model, matrix_NG, pred_margin=True)
            return np.asarray(scores_N1, np.float64).reshape(len(matrix_NG))

        return (scores,)


_FRONTENDS: dict[str, Callable[[Any], Any]] = {
    "lightgbm": lambda treelite: treelite.frontend.from_lightgbm,
    "xgboost": lambda treelite: treelite.frontend.from_xgboost,
}
"""Treelite's loader for each supported library."""


def _treelite() -> Any:
    try:
        import treelite
    except ImportError as error:
        raise InputError("treelite is not installed; pip install 'ltrscale[serve]'") from error
    return treelite
