"""Scoring with gradient boosted trees, and the codes of categorical features as trees see them.

Shapes: N documents, F raw features, G columns of the view that trees see.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.errors import InputError
from ltrscale.treefiles import check_lightgbm, check_xgboost
from ltrscale.views import View

T = TypeVar("T")
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


def scorer(
    library: Library, models: Mapping[str, bytes], view: View, *, threads: int
) -> Callable[[QueryGroups], Tensor]:
    """The function that scores a batch with trees, float64: the mean over the models.

    Args:
        library: whose format the models have.
        models: content of the model files, by what errors call them.
        view: what the models see of documents.
        threads: 0 takes all cores.

    Raises:
        InputError: a model is damaged or made for other columns; or it is CatBoost's, which is not installed.
    """
    predicts = []
    for where, model in models.items():
        with _named(where):
            predicts.append(_predict(library, model, view, threads))

    def score(groups: QueryGroups) -> Tensor:
        if groups.n_documents == 0:
            return torch.zeros(0, dtype=torch.float64)
        columns_NG = view.columns(groups)
        return torch.from_numpy(interruptibly(lambda: sum(predict(columns_NG) for predict in predicts)) / len(predicts))

    return score


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Turn what is found wrong with a model into one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # LightGBM's and CatBoost's own are of no other class
        raise InputError(f"{where}: no model of these features ({error}); train the bundle again") from error


def interruptibly(call: Callable[[], T]) -> T:
    """What a call into a library returns: it is made by a thread of its own while this one waits.

    Python handles signals in the main thread between two of its own instructions, so after the call, however long.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()


def _predict(library: Library, model: bytes, view: View, threads: int) -> Predict:
    categorical = [column for column, feature in enumerate(view.features) if feature.kind == "categorical"]
    match library:
        case "lightgbm":
            return _predict_lightgbm(model, len(view.features), categorical, threads)
        case "xgboost":
            return _predict_xgboost(model, len(view.features), categorical, threads)
        case "catboost":
            return _predict_catboost(model, categorical, threads)


def _predict_lightgbm(model: bytes, n_columns: int, categorical: Sequence[int], threads: int) -> Predict:
    import lightgbm  # here, so that scoring with a network does not load it

    check_lightgbm(model, n_columns)
    booster = lightgbm.Booster(model_str=model.decode())
    vocabularies = _vocabularies(categorical, booster.pandas_categorical or [])  # LightGBM's own place for them

    def predict(columns_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        scores_N = booster.predict(renumber(columns_NG, vocabularies), num_threads=threads, raw_score=True)
        return np.asarray(scores_N, np.float64)

    return predict


def _predict_xgboost(model: bytes, n_columns: int, categorical: Sequence[int], threads: int) -> Predict:
    import xgboost

    check_xgboost(model, n_columns)
    booster = xgboost.Booster({"nthread": threads}, model_file=bytearray(model))
    vocabularies = _vocabularies(categorical, json.loads(booster.attr("codes")))

    def predict(columns_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        scores_N = booster.inplace_predict(renumber(columns_NG, vocabularies), predict_type="margin")
        return np.asarray(scores_N, np.float64)

    return predict


def _predict_catboost(model: bytes, categorical: Sequence[int], threads: int) -> Predict:
    catboost = import_catboost()
    booster = catboost.CatBoost()
    booster.load_model(blob=model)
    vocabularies = _vocabularies(categorical, json.loads(booster.get_metadata()["codes"]))
    table = CatBoostTable(vocabularies)

    def predict(columns_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        rows = table(renumber(columns_NG, vocabularies))
        return np.asarray(booster.predict(rows, thread_count=threads or -1), np.float64)

    return predict


def _vocabularies(categorical: Sequence[int], codes: Any) -> dict[int, NDArray[np.float32]]:
    """The codes of categorical columns, which are kept as JSON where a library has a place for texts.

    Raises:
        ValueError: they are not the rising codes of so many columns.
    """
    for of_column in codes:
        if not all(type(code) is int and abs(code) < 1 << 24 for code in of_column) or of_column != sorted(of_column):
            raise ValueError("the codes of a categorical column are no rising integers below 2^24")
    return dict(zip(categorical, (np.array(of_column, np.float32) for of_column in codes), strict=True))


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
