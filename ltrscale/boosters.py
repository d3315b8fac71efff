"""Scoring with gradient boosted trees, and the codes of categorical features as trees see them.

Shapes: N documents, F raw features, G columns of the view that trees see.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.errors import InputError
from ltrscale.views import View

Library = Literal["lightgbm", "xgboost", "catboost"]
ENDINGS: dict[Library, str] = {"lightgbm": "txt", "xgboost": "json", "catboost": "cbm"}
"""Of the files that hold a model in the library's own format."""
Predict = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""Scores [N] of columns [N, G] with the data's own codes."""


def renumber(features_NF: NDArray[np.float32], vocabularies: Mapping[int, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Replace the codes of categorical columns by their numbers in the columns' rising vocabularies.

    LightGBM stores a set of codes as one bit for every integer up to the largest, megabytes a split with hashed codes.
    Codes that the vocabulary does not have become missing values.

    Example:
        >>> renumber(np.float32([[7, 0.5], [9, 0.5], [8, 0.5]]), {0: np.float32([7, 9])}).tolist()
        [[0.0, 0.5], [1.0, 0.5], [nan, 0.5]]
    """
    if not vocabularies:
        return features_NF
    renumbered_NF = features_NF.copy()
    for column, codes in vocabularies.items():
        number_N = np.searchsorted(codes, features_NF[:, column])
        known_N = np.append(codes, np.float32("nan"))[number_N] == features_NF[:, column]
        renumbered_NF[:, column] = np.where(known_N, number_N, np.float32("nan"))
    return renumbered_NF


def scorer(library: Library, models: Sequence[bytes], view: View, *, threads: int) -> Callable[[QueryGroups], Tensor]:
    """The function that scores a batch with trees, float64: the mean over the models.

    Args:
        library: whose format the models have.
        models: content of the model files.
        view: what the models see of documents.
        threads: 0 takes all cores.

    Raises:
        InputError: the models are CatBoost's, which is not installed.
    """
    categorical = [column for column, feature in enumerate(view.features) if feature.kind == "categorical"]
    predicts = [_predict(library, model, categorical, threads) for model in models]

    def score(groups: QueryGroups) -> Tensor:
        if groups.n_documents == 0:
            return torch.zeros(0, dtype=torch.float64)
        columns_NG = view.columns(groups)
        return torch.from_numpy(sum(predict(columns_NG) for predict in predicts) / len(predicts))

    return score


def _predict(library: Library, model: bytes, categorical: Sequence[int], threads: int) -> Predict:
    match library:
        case "lightgbm":
            return _predict_lightgbm(model, categorical, threads)
        case "xgboost":
            return _predict_xgboost(model, categorical, threads)
        case "catboost":
            return _predict_catboost(model, categorical, threads)


def _predict_lightgbm(model: bytes, categorical: Sequence[int], threads: int) -> Predict:
    import lightgbm  # here, so that scoring with a network does not load it

    booster = lightgbm.Booster(model_str=model.decode())
    codes = [np.array(codes, np.float32) for codes in booster.pandas_categorical or []]  # LightGBM's own place for them
    vocabularies = dict(zip(categorical, codes, strict=True))

    def predict(columns_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        scores_N = booster.predict(renumber(columns_NG, vocabularies), num_threads=threads, raw_score=True)
        return np.asarray(scores_N, np.float64)

    return predict


def _predict_xgboost(model: bytes, categorical: Sequence[int], threads: int) -> Predict:
    import xgboost

    booster = xgboost.Booster({"nthread": threads}, model_file=bytearray(model))
    vocabularies = _vocabularies(categorical, booster.attr("codes"))

    def predict(columns_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        scores_N = booster.inplace_predict(renumber(columns_NG, vocabularies), predict_type="margin")
        return np.asarray(scores_N, np.float64)

    return predict


def _predict_catboost(model: bytes, categorical: Sequence[int], threads: int) -> Predict:
    catboost = import_catboost()
    booster = catboost.CatBoost()
    booster.load_model(blob=model)
    vocabularies = _vocabularies(categorical, booster.get_metadata()["codes"])
    table = CatBoostTable(vocabularies)

    def predict(columns_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        rows = table(renumber(columns_NG, vocabularies))
        return np.asarray(booster.predict(rows, thread_count=threads or -1), np.float64)

    return predict


def _vocabularies(categorical: Sequence[int], codes: str) -> dict[int, NDArray[np.float32]]:
    """The codes of categorical columns, which are kept as JSON where a library has a place for texts."""
    return dict(zip(categorical, (np.array(found, np.float32) for found in json.loads(codes)), strict=True))


def import_catboost() -> Any:
    """The optional library.

    Raises:
        InputError: it is not installed.
    """
    try:
        import catboost
    except ImportError as error:
        raise InputError("CatBoost is not installed; pip install 'ltrscale[trees-extra]'") from error
    return catboost


class CatBoostTable:
    """Turns what `renumber` gives into what CatBoost takes: data frames where columns are categorical.

    Args:
        vocabularies: of the categorical columns; a missing value is a category of its own.
    """

    def __init__(self, vocabularies: Mapping[int, NDArray[np.float32]]) -> None:
        self._names = {column: [*map(str, range(len(codes))), "missing"] for column, codes in vocabularies.items()}

    def __call__(self, renumbered_NF: NDArray[np.float32]) -> Any:
        """A table of the same rows."""
        if not self._names:
            return renumbered_NF
        import pandas

        columns: dict[int, Any] = dict(enumerate(renumbered_NF.T))
        for column, names in self._names.items():
            place_N = np.nan_to_num(renumbered_NF[:, column], nan=len(names) - 1).astype(np.int32)
            columns[column] = pandas.Categorical.from_codes(place_N, categories=pandas.Index(names))
        return pandas.DataFrame(columns, copy=False)
