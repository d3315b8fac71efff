"""Trees as their own library writes them, with the names of the features, for the exports that are made from them."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ltrscale.bundle import Bundle, boosters
from ltrscale.errors import InputError
from ltrscale.serving.features import CodeTexts, ModelColumn, code_texts_of, labels_of


@dataclass(frozen=True)
class Trees:
    """One model of raw features.

    `booster` is the library's own, with the labels of the columns as the names of its features.
    """

    url: str
    library: boosters.Library
    booster: Any
    columns: tuple[ModelColumn, ...]


def trees_of(bundle: Bundle, texts: CodeTexts, *, to: str, libraries: Collection[str]) -> Trees:
    """The trees of a bundle.

    Args:
        bundle: the bundle.
        texts: recorded texts of categories.
        to: what they are exported to, for errors.
        libraries: those whose trees can be exported to it.

    Raises:
        InputError: the bundle is not one model of raw features that one of the libraries has made.
    """
    trees = bundle.forest
    if trees is None or trees.library not in libraries:
        what = f"trees of {trees.library}" if trees else f"a bundle of kind {bundle.kind}"
        remedy = "export a network to onnx, or" if bundle.parts else "instead,"
        raise InputError(
            f"{bundle.url}: {what}, and {to} takes trees of {' or '.join(libraries)} only; {remedy} export a student "
            "that jobs.distill trains from it"
        )
    if len(trees.models) > 1 or trees.per_query or trees.projection or trees.members:
        raise InputError(
            f"{bundle.url}: several models, or trees on features standardised per query, on components or on other "
            f"models' scores, which {to} cannot express; export a bundle of one model on raw features, such as a "
            "student of this one"
        )
    bundle.scorer()  # raises if the model is damaged
    kinds = {feature.name: feature.kind for feature in bundle.features}
    names = list(kinds if trees.sees is None else trees.sees)
    labels = labels_of(names)
    booster, codes = _READERS[trees.library](bundle.content, labels, [kinds[name] for name in names])
    left = iter(codes)
    columns = tuple(
        _categorical(i, name, label, next(left), texts)
        if kinds[name] == "categorical"
        else ModelColumn(column=i, name=name, label=label, kind="numeric")
        for i, (name, label) in enumerate(zip(names, labels, strict=True))
    )
    return Trees(bundle.url, trees.library, booster, columns)


_Read = tuple[Any, list[list[int]]]
"""A library's own model, and the codes of its categorical columns."""


def _categorical(i: int, name: str, label: str, codes: Sequence[int], texts: CodeTexts) -> ModelColumn:
    place = {code: i for i, code in enumerate(codes)}
    values = {text: place[code] for text, code in code_texts_of(codes, texts.get(name)).items()}
    return ModelColumn(column=i, name=name, label=label, kind="categorical", values=values, codes=tuple(codes))


def _lightgbm(content: bytes, labels: Sequence[str], kinds: Sequence[str]) -> _Read:  # noqa: ARG001
    import lightgbm

    text = content.decode()
    (old,) = re.findall(r"^feature_names=(.*)$", text, re.MULTILINE)
    new = dict(zip(old.split(" "), labels, strict=True))
    text = text.replace(f"\nfeature_names={old}\n", f"\nfeature_names={' '.join(labels)}\n", 1)
    trees, shares, rest = text.partition("\nfeature_importances:\n")
    rest = re.sub(r"^(\S+)(?==[0-9.e+]+$)", lambda name: str(new.get(name[1], name[1])), rest, flags=re.MULTILINE)
    booster = lightgbm.Booster(model_str=f"{trees}{shares}{rest}")
    return booster, booster.pandas_categorical or []


def _xgboost(content: bytes, labels: Sequence[str], kinds: Sequence[str]) -> _Read:
    import xgboost

    booster = xgboost.Booster(model_file=bytearray(content))
    booster.feature_names = list(labels)
    booster.feature_types = ["c" if kind == "categorical" else "float" for kind in kinds]
    return booster, json.loads(booster.attr("codes"))


_READERS: dict[boosters.Library, Callable[[bytes, Sequence[str], Sequence[str]], _Read]] = {
    "lightgbm": _lightgbm,
    "xgboost": _xgboost,
}
"""How each library reads its own model, with these labels for columns of these kinds."""


def missing_goes_left(node: Mapping[str, Any]) -> bool:
    """Where a missing value goes at a numeric split of LightGBM's dump: a split that never met one takes it for 0."""
    assert node["missing_type"] in ("None", "NaN"), "zero_as_missing is not offered"
    return bool(node["default_left"] if node["missing_type"] == "NaN" else node["threshold"] >= 0)
