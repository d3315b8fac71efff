"""Scoring with gradient boosted trees, and the codes of categorical features as trees see them.

Shapes: N documents, F raw features, G columns of the view that trees see.
"""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.bundle.treefiles import check_lightgbm, check_xgboost
from ltrscale.bundle.views import View
from ltrscale.errors import InputError

T = TypeVar("T")
Predict = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""Scores [N] of columns [N, G] with the data's own codes."""
_SHORT = 256
"""Documents, such as those of one query, that are scored before a signal could matter; a thread takes longer."""


def renumber(features_NF: NDArray[np.float32], vocabularies: Mapping[int, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Replace the codes of categorical columns by their places in the columns' rising vocabularies.

    LightGBM stores a set of codes as one bit for every integer up to the largest: megabytes per split for hashed
    codes. A code that the vocabulary lacks becomes a missing value.

    Example:
        >>> renumber(np.float32([[7, 0.5], [9, 0.5], [8, 0.5]]), {0: np.float32([7, 9])}).tolist()
        [[0.0, 0.5], [1.0, 0.5], [nan, 0.5]]
    """
    if not vocabularies:
        return features_NF
    renumbered_NF = features_NF.copy()
    for column, codes in vocabularies.items():
        number_N = np.searchsorted(codes, features_NF[:, column])
        # NaN, which equals nothing, for a code above all others, whose place is past the end
        known_N = np.append(codes, np.float32("nan"))[number_N] == features_NF[:, column]
        renumbered_NF[:, column] = np.where(known_N, number_N, np.float32("nan"))
    return renumbered_NF


class _Library(ABC):
    """A library of trees, which reads its own format."""

    ending: ClassVar[str]
    """Of the files that hold a model."""

    @abstractmethod
    def predict(self, model: bytes, n_columns: int, categorical: Sequence[int], threads: int) -> Predict:
        """The function that scores columns, of which some are categorical.

        Raises:
            Exception: the model is damaged or made for other columns; errors of the libraries have no common base.
        """

    @abstractmethod
    def gains(self, model: bytes, n_columns: int) -> NDArray[np.float64]:
        """The total gain of each column's splits, shape [G]; raises as `predict`."""


class _LightGBM(_Library):
    ending = "txt"

    def predict(self, model: bytes, n_columns: int, categorical: Sequence[int], threads: int) -> Predict:
        import lightgbm  # imported late: scoring with a network does not need it

        check_lightgbm(model, n_columns)
        booster = lightgbm.Booster(model_str=model.decode())
        vocabularies = _vocabularies(categorical, booster.pandas_categorical or [])  # where LightGBM stores them itself

        def predict(columns_NG: NDArray[np.float32]) -> NDArray[np.float64]:
            scores_N = booster.predict(renumber(columns_NG, vocabularies), num_threads=threads, raw_score=True)
            return np.asarray(scores_N, np.float64)

        return predict

    def gains(self, model: bytes, n_columns: int) -> NDArray[np.float64]:
        import lightgbm

        check_lightgbm(model, n_columns)
        return np.asarray(lightgbm.Booster(model_str=model.decode()).feature_importance("gain"), np.float64)


class _XGBoost(_Library):
    ending = "json"

    def predict(self, model: bytes, n_columns: int, categorical: Sequence[int], threads: int) -> Predict:
        import xgboost

        check_xgboost(model, n_columns)
        booster = xgboost.Booster({"nthread": threads}, model_file=bytearray(model))
        vocabularies = _vocabularies(categorical, json.loads(booster.attr("codes")))

        def predict(columns_NG: NDArray[np.float32]) -> NDArray[np.float64]:
            scores_N = booster.inplace_predict(renumber(columns_NG, vocabularies), predict_type="margin")
            return np.asarray(scores_N, np.float64)

        return predict

    def gains(self, model: bytes, n_columns: int) -> NDArray[np.float64]:
        import xgboost

        check_xgboost(model, n_columns)
        booster = xgboost.Booster(model_file=bytearray(model))
        by_name = booster.get_score(importance_type="total_gain")
        names = booster.feature_names or [f"f{column}" for column in range(n_columns)]
        return np.array([by_name.get(name, 0.0) for name in names])


class _CatBoost(_Library):
    ending = "cbm"

    def predict(self, model: bytes, n_columns: int, categorical: Sequence[int], threads: int) -> Predict:  # noqa: ARG002
        booster = self._read(model)
        vocabularies = _vocabularies(categorical, json.loads(booster.get_metadata()["codes"]))
        table = CatBoostTable(vocabularies)

        def predict(columns_NG: NDArray[np.float32]) -> NDArray[np.float64]:
            rows = table(renumber(columns_NG, vocabularies))
            return np.asarray(booster.predict(rows, thread_count=threads or -1), np.float64)  # -1: all cores

        return predict

    def gains(self, model: bytes, n_columns: int) -> NDArray[np.float64]:  # noqa: ARG002
        return np.asarray(self._read(model).get_feature_importance(type="PredictionValuesChange"), np.float64)

    def _read(self, model: bytes) -> Any:
        booster = import_catboost().CatBoost()
        booster.load_model(blob=model)
        return booster


Library = Literal["lightgbm", "xgboost", "catboost"]
_LIBRARIES: dict[Library, _Library] = {"lightgbm": _LightGBM(), "xgboost": _XGBoost(), "catboost": _CatBoost()}


def ending_of(library: Library) -> str:
    """The ending of the files that hold a model in the library's own format."""
    return _LIBRARIES[library].ending


def scorer(
    library: Library, models: Mapping[str, bytes], view: View, *, threads: int
) -> Callable[[QueryGroups], Tensor]:
    """The function that scores a batch with trees, float64: the mean over the models.

    The models go by the names that errors use; 0 threads are all cores.

    Raises:
        InputError: a model is damaged or made for other columns; or it is CatBoost's and CatBoost is not installed.
    """
    predicts = []
    categorical = [column for column, feature in enumerate(view.features) if feature.kind == "categorical"]
    for where, model in models.items():
        with _named(where):
            predicts.append(_LIBRARIES[library].predict(model, len(view.features), categorical, threads))

    def score(groups: QueryGroups) -> Tensor:
        if groups.n_documents == 0:
            return torch.zeros(0, dtype=torch.float64)
        columns_NG = view.columns(groups)

        def total() -> Any:
            return sum(predict(columns_NG) for predict in predicts)

        found_N = total() if groups.n_documents <= _SHORT else interruptibly(total)
        return torch.from_numpy(found_N / len(predicts))

    return score


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Turn any error about a model into one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the classes of LightGBM's and CatBoost's errors have no common base below it
        raise InputError(f"{where}: no model of these features ({error}); train the bundle again") from error


def interruptibly(call: Callable[[], T]) -> T:
    """The result of a call into a library, made by a separate thread while this one waits.

    Python handles signals in the main thread between two Python instructions: a long call in the main thread would
    delay them until its end.
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


def importances(library: Library, models: Mapping[str, bytes], n_columns: int) -> NDArray[np.float64]:
    """The importance of each column to trees, shape [G]: its share of the total gain of all splits, which adds up to 1.

    CatBoost, whose gains are not stored, gives its own measure: by how much the predictions change on average if the
    feature's value changes. Trees without a split give zeros.

    Raises:
        InputError: a model is damaged; or it is CatBoost's and CatBoost is not installed.
    """
    gains_G = np.zeros(n_columns)
    for where, model in models.items():
        with _named(where):
            gains_G += _LIBRARIES[library].gains(model, n_columns)
    total = gains_G.sum()
    return gains_G / total if total else gains_G


def _vocabularies(categorical: Sequence[int], codes: Any) -> dict[int, NDArray[np.float32]]:
    """The codes of categorical columns by column, from the text that a library stores with its model.

    Raises:
        ValueError: the codes do not rise, or are those of another number of columns.
    """
    for of_column in codes:
        # float32 holds integers exactly below 2^24 only
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
    """Turns the result of `renumber` into the input of CatBoost: a data frame if some columns are categorical.

    Missing values are one more category.
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
