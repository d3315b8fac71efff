"""Trees as their own library writes them, with the names of the features, for the exports that are made from them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ltrscale.bundle import Bundle, TreesBundle
from ltrscale.errors import InputError
from ltrscale.serving.features import Column, Texts, labels_of, texts_of


@dataclass(frozen=True)
class Trees:
    """One model of raw features.

    `booster` is the library's own, with the labels of the columns as the names of its features.
    """

    url: str
    library: Literal["lightgbm", "xgboost"]
    booster: Any
    columns: tuple[Column, ...]


def trees_of(bundle: Bundle, texts: Texts, *, to: str, libraries: Sequence[str]) -> Trees:
    """The trees of a bundle.

    Args:
        bundle: the bundle.
        texts: recorded texts of categories.
        to: what they are exported to, for errors.
        libraries: those whose trees can be exported to it.

    Raises:
        InputError: the bundle is not one model of raw features that one of the libraries has made.
    """
    if not isinstance(bundle, TreesBundle) or bundle.trees.library not in libraries:
        plain = f"a bundle of kind {bundle.kind}"
        what = f"trees of {bundle.trees.library}" if isinstance(bundle, TreesBundle) else plain
        remedy = "export a network to onnx, or" if bundle.kind == "neural" else "instead,"
        raise InputError(
            f"{bundle.url}: {what}, and {to} takes trees of {' or '.join(libraries)} only; {remedy} export a student "
            "that jobs.distill trains from it"
        )
    trees = bundle.trees
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
    booster, codes = (_lightgbm if trees.library == "lightgbm" else _xgboost)(bundle.content, labels)
    left = iter(codes)
    columns = tuple(
        _categorical(i, name, label, next(left), texts)
        if kinds[name] == "categorical"
        else Column(column=i, name=name, label=label, kind="numeric")
        for i, (name, label) in enumerate(zip(names, labels, strict=True))
    )
    if trees.library == "xgboost":
        booster.feature_types = ["c" if column.kind == "categorical" else "float" for column in columns]
    return Trees(bundle.url, "lightgbm" if trees.library == "lightgbm" else "xgboost", booster, columns)


def _categorical(i: int, name: str, label: str, codes: Sequence[int], texts: Texts) -> Column:
    place = {code: i for i, code in enumerate(codes)}
    values = {text: place[code] for text, code in texts_of(codes, texts.get(name)).items()}
    return Column(column=i, name=name, label=label, kind="categorical", values=values, codes=tuple(codes))


def _lightgbm(content: bytes, labels: Sequence[str]) -> tuple[Any, list[list[int]]]:
    """The model with these names, and the codes of its categorical columns."""
    import lightgbm

    text = content.decode()
    (old,) = re.findall(r"^feature_names=(.*)$", text, re.MULTILINE)
    new = dict(zip(old.split(" "), labels, strict=True))
    text = text.replace(f"\nfeature_names={old}\n", f"\nfeature_names={' '.join(labels)}\n", 1)
    trees, shares, rest = text.partition("\nfeature_importances:\n")
    rest = re.sub(r"^(\S+)(?==[0-9.e+]+$)", lambda name: str(new.get(name[1], name[1])), rest, flags=re.MULTILINE)
    booster = lightgbm.Booster(model_str=f"{trees}{shares}{rest}")
    return booster, booster.pandas_categorical or []


def _xgboost(content: bytes, labels: Sequence[str]) -> tuple[Any, list[list[int]]]:
    import xgboost

    booster = xgboost.Booster(model_file=bytearray(content))
    booster.feature_names = list(labels)
    return booster, json.loads(booster.attr("codes"))


def missing_goes_left(node: Mapping[str, Any]) -> bool:
    """Where a missing value goes at a numeric split of LightGBM's dump: a split that never met one takes it for 0."""
    assert node["missing_type"] in ("None", "NaN"), "zero_as_missing is not offered"
    return bool(node["default_left"] if node["missing_type"] == "NaN" else node["threshold"] >= 0)
