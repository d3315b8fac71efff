"""Scoring with gradient boosted trees, and the codes of categorical features as trees see them.

Shapes: N documents, F features.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.data.manifest import Feature

Library = Literal["lightgbm", "xgboost", "catboost"]
ENDINGS: dict[Library, str] = {"lightgbm": "txt", "xgboost": "json", "catboost": "cbm"}
"""Of the files that hold a model in the library's own format."""
Predict = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""Scores [N] of raw features [N, F]."""


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
    library: Library, models: Sequence[bytes], features: Sequence[Feature], *, threads: int
) -> Callable[[QueryGroups], Tensor]:
    """The function that scores a batch with trees, float64: the mean over the models.

    Args:
        library: whose format the models have.
        models: content of the model files.
        features: what the models read, in order.
        threads: 0 takes all cores.
    """
    categorical = [column for column, feature in enumerate(features) if feature.kind == "categorical"]
    predicts = [_predict(library, model, categorical, threads) for model in models]

    def score(groups: QueryGroups) -> Tensor:
        if groups.n_documents == 0:
            return torch.zeros(0, dtype=torch.float64)
        features_NF = groups.features_NF.cpu().numpy()
        return torch.from_numpy(sum(predict(features_NF) for predict in predicts) / len(predicts))

    return score


def _predict(library: Library, model: bytes, categorical: Sequence[int], threads: int) -> Predict:
    match library:
        case "lightgbm":
            return _predict_lightgbm(model, categorical, threads)
        case "xgboost" | "catboost":
            raise NotImplementedError


def _predict_lightgbm(model: bytes, categorical: Sequence[int], threads: int) -> Predict:
    import lightgbm  # here, so that scoring with a network does not load it

    booster = lightgbm.Booster(model_str=model.decode())
    codes = [np.array(codes, np.float32) for codes in booster.pandas_categorical or []]  # LightGBM's own place for them
    vocabularies = dict(zip(categorical, codes, strict=True))

    def predict(features_NF: NDArray[np.float32]) -> NDArray[np.float64]:
        scores_N = booster.predict(renumber(features_NF, vocabularies), num_threads=threads, raw_score=True)
        return np.asarray(scores_N, np.float64)

    return predict
