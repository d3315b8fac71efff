"""Scoring with gradient boosted trees, and the codes of categorical features as trees see them.

Shapes: N documents, F raw features, G columns of the view that trees see.
"""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.arrays import Doubles
from ltrscale.batch import QueryGroups
from ltrscale.bundle.treefiles import check_lightgbm, check_xgboost
from ltrscale.bundle.views import View
from ltrscale.errors import InputError

T = TypeVar("T")
_Vocabularies = Mapping[int, NDArray[np.float32]]
_SHORT = 256
"""Up to so many documents are scored without a separate thread, which would take longer."""


def renumber(features_NF: NDArray[np.float32], vocabularies: _Vocabularies) -> NDArray[np.float32]:
    """Replace the codes of categorical columns by their places in the columns' sorted vocabularies.

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
        # a code above all others has its place past the end: NaN there, which equals nothing
        in_vocabulary_N = np.append(codes, np.float32("nan"))[number_N] == features_NF[:, column]
        renumbered_NF[:, column] = np.where(in_vocabulary_N, number_N, np.float32("nan"))
    return renumbered_NF


class _Library(ABC):
    """A tree library and its file format; `booster` is its model object."""

    @abstractmethod
    def read(self, model: bytes, n_columns: int, threads: int) -> Any:
        """The booster for columns [N, G]; any `Exception` if the model is damaged or made for other columns."""

    @abstractmethod
    def codes(self, booster: Any) -> Any:
        """The codes of each categorical column, as the library stores them with its model."""

    @abstractmethod
    def scores(self, booster: Any, columns_NG: NDArray[np.float32], codes: _Vocabularies, threads: int) -> Any:
        """Scores [N] of renumbered columns."""

    @abstractmethod
    def contributions(self, booster: Any, columns_NG: NDArray[np.float32], codes: _Vocabularies, threads: int) -> Any:
        """What each of the renumbered columns adds to the scores, [N, G + 1]; the last is the mean score."""

    @abstractmethod
    def gains(self, booster: Any, n_columns: int) -> Any:
        """The total gain of each column's splits, shape [G]."""


class _LightGBM(_Library):
    def read(self, model: bytes, n_columns: int, threads: int) -> Any:  # noqa: ARG002
        import lightgbm  # imported late: scoring with a network does not need it

        check_lightgbm(model, n_columns)
        return lightgbm.Booster(model_str=model.decode())

    def codes(self, booster: Any) -> Any:
        return booster.pandas_categorical or []

    def scores(self, booster: Any, columns_NG: NDArray[np.float32], codes: _Vocabularies, threads: int) -> Any:  # noqa: ARG002
        return booster.predict(columns_NG, num_threads=threads, raw_score=True)

    def contributions(self, booster: Any, columns_NG: NDArray[np.float32], codes: _Vocabularies, threads: int) -> Any:  # noqa: ARG002
        return booster.predict(columns_NG, num_threads=threads, pred_contrib=True)

    def gains(self, booster: Any, n_columns: int) -> Any:  # noqa: ARG002
        return booster.feature_importance("gain")


class _XGBoost(_Library):
    def read(self, model: bytes, n_columns: int, threads: int) -> Any:
        import xgboost

        check_xgboost(model, n_columns)
        return xgboost.Booster({"nthread": threads}, model_file=bytearray(model))

    def codes(self, booster: Any) -> Any:
        return json.loads(booster.attr("codes"))

    def scores(self, booster: Any, columns_NG: NDArray[np.float32], codes: _Vocabularies, threads: int) -> Any:  # noqa: ARG002
        return booster.inplace_predict(columns_NG, predict_type="margin")

    def contributions(self, booster: Any, columns_NG: NDArray[np.float32], codes: _Vocabularies, threads: int) -> Any:
        import xgboost

        types = ["c" if column in codes else "float" for column in range(columns_NG.shape[1])]
        rows = xgboost.DMatrix(
            columns_NG,
            nthread=threads or None,
            feature_names=booster.feature_names,
            feature_types=types,
            enable_categorical=True,
        )
        return booster.predict(rows, pred_contribs=True)

    def gains(self, booster: Any, n_columns: int) -> Any:
        by_name = booster.get_score(importance_type="total_gain")
        names = booster.feature_names or [f"f{column}" for column in range(n_columns)]
        return [by_name.get(name, 0.0) for name in names]


class _CatBoost(_Library):
    def read(self, model: bytes, n_columns: int, threads: int) -> Any:  # noqa: ARG002
        booster = import_catboost().CatBoost()
        booster.load_model(blob=model)
        return booster

    def codes(self, booster: Any) -> Any:
        return json.loads(booster.get_metadata()["codes"])

    def scores(self, booster: Any, columns_NG: NDArray[np.float32], codes: _Vocabularies, threads: int) -> Any:
        return booster.predict(catboost_table(columns_NG, codes), thread_count=threads or -1)  # -1: all cores

    def contributions(self, booster: Any, columns_NG: NDArray[np.float32], codes: _Vocabularies, threads: int) -> Any:
        rows = import_catboost().Pool(catboost_table(columns_NG, codes), cat_features=list(codes))
        return booster.get_feature_importance(rows, type="ShapValues", thread_count=threads or -1)

    def gains(self, booster: Any, n_columns: int) -> Any:  # noqa: ARG002
        return booster.get_feature_importance(type="PredictionValuesChange")


Library = Literal["lightgbm", "xgboost", "catboost"]
_LIBRARIES: dict[Library, _Library] = {"lightgbm": _LightGBM(), "xgboost": _XGBoost(), "catboost": _CatBoost()}
ENDINGS: dict[Library, str] = {"lightgbm": "txt", "xgboost": "json", "catboost": "cbm"}
"""Of the files that hold a model in the library's own format."""


def scorer(
    library: Library, models: Mapping[str, bytes], view: View, *, threads: int
) -> Callable[[QueryGroups], Tensor]:
    """The function that scores a batch with trees, float64: the mean over the models.

    The keys of `models` are their names in errors; 0 threads means all cores.

    Raises:
        InputError: a model is damaged or made for other columns; or it is CatBoost's and CatBoost is not installed.
    """
    mean = _mean_of(_LIBRARIES[library].scores, library, models, view, threads)

    def score(groups: QueryGroups) -> Tensor:
        if groups.n_documents == 0:
            return torch.zeros(0, dtype=torch.float64)
        return torch.from_numpy(mean(view.columns(groups)))

    return score


def explainer(
    library: Library, models: Mapping[str, bytes], view: View, *, threads: int
) -> Callable[[QueryGroups, Tensor], Tensor]:
    """The function from a batch and pairs [P, 2] of its rows to each column's part of their score difference, [P, G].

    The difference of the library's exact Shapley values (TreeSHAP, Lundberg et al. 2020) of both documents. An absent
    column is averaged over the training documents in each leaf.

    Raises:
        InputError: as `scorer`.
    """
    mean = _mean_of(_LIBRARIES[library].contributions, library, models, view, threads)

    def explain(groups: QueryGroups, pairs_P2: Tensor) -> Tensor:
        rows_M, pairs_P2 = torch.unique(pairs_P2.cpu(), return_inverse=True)
        if not len(rows_M):
            return torch.zeros(0, len(view.features), dtype=torch.float64)
        parts_MG = torch.from_numpy(mean(view.columns(groups)[rows_M.numpy()]))[:, :-1]
        return parts_MG[pairs_P2[:, 0]] - parts_MG[pairs_P2[:, 1]]

    return explain


def _mean_of(
    ask: Callable[[Any, NDArray[np.float32], _Vocabularies, int], Any],
    library: Library,
    models: Mapping[str, bytes],
    view: View,
    threads: int,
) -> Callable[[NDArray[np.float32]], Doubles]:
    """The function from columns [N, G] to the mean of `ask` over the models."""
    functions, boosters = _LIBRARIES[library], []
    categorical = [column for column, feature in enumerate(view.features) if feature.kind == "categorical"]
    for name, model in models.items():
        with _named(name):
            booster = functions.read(model, len(view.features), threads)
            boosters.append((booster, _vocabularies(categorical, functions.codes(booster))))

    def mean(columns_NG: NDArray[np.float32]) -> Doubles:
        def mean_answer() -> Doubles:
            answers = (ask(booster, renumber(columns_NG, codes), codes, threads) for booster, codes in boosters)
            return np.asarray(sum(np.asarray(answer, np.float64) for answer in answers) / len(boosters))

        return mean_answer() if len(columns_NG) <= _SHORT else _interruptibly(mean_answer)

    return mean


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn any error about a model into one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the classes of LightGBM's and CatBoost's errors have no common base below it
        raise InputError(f"{name}: no model of these features ({error}); train the bundle again") from error


def _interruptibly(call: Callable[[], T]) -> T:
    """The result of a call into a library, made in a thread of its own: in the main one it would delay signals."""
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


def importances(library: Library, models: Mapping[str, bytes], n_columns: int) -> Doubles:
    """The importance of each column to trees, shape [G]: its share of the total gain of all splits, which adds up to 1.

    CatBoost does not store gains and gives its own measure: the mean change of the predictions if the feature's value
    changes. Trees without a split give zeros.

    Raises:
        InputError: a model is damaged; or it is CatBoost's and CatBoost is not installed.
    """
    functions, gains_G = _LIBRARIES[library], np.zeros(n_columns)
    for name, model in models.items():
        with _named(name):
            booster = functions.read(model, n_columns, threads=0)
            gains_G += np.asarray(functions.gains(booster, n_columns), np.float64)
    total = gains_G.sum()
    return gains_G / total if total else gains_G


def _vocabularies(categorical: Sequence[int], codes: Any) -> dict[int, NDArray[np.float32]]:
    """The codes of categorical columns by column, as a library stores them with its model."""
    for of_column in codes:
        # float32 holds integers exactly below 2^24 only
        if not all(type(code) is int and abs(code) < 1 << 24 for code in of_column) or of_column != sorted(of_column):
            raise ValueError("the codes of a categorical column are no rising integers below 2^24")
    return dict(zip(categorical, (np.array(of_column, np.float32) for of_column in codes), strict=True))


def import_catboost() -> Any:
    """CatBoost, an optional library.

    Raises:
        InputError: it is not installed.
    """
    try:
        import catboost
    except ImportError as error:
        raise InputError("CatBoost is not installed; pip install 'ltrscale[trees-extra]'") from error
    return catboost


def catboost_table(renumbered_NF: NDArray[np.float32], vocabularies: _Vocabularies) -> Any:
    """The result of `renumber` as CatBoost takes it: a data frame if some columns are categorical.

    Missing values are one more category.
    """
    if not vocabularies:
        return renumbered_NF
    import pandas

    columns: dict[int, Any] = dict(enumerate(renumbered_NF.T))
    for column, codes in vocabularies.items():
        place_N = np.nan_to_num(renumbered_NF[:, column], nan=len(codes)).astype(np.int32)
        names = pandas.Index([*map(str, range(len(codes))), "missing"])
        columns[column] = pandas.Categorical.from_codes(place_N, categories=names)
    return pandas.DataFrame(columns, copy=False)
