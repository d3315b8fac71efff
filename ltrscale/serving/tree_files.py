"""Trees in files of their own library, and as a treelite checkpoint, read back by that library alone.

Shapes: N documents, G columns.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ltrscale.errors import InputError
from ltrscale.serving.trees import Trees

Reader = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""Scores [N] of a matrix [N, G]."""
TEXT, BINARY, JSON, CHECKPOINT, TRITON = "model.txt", "model.ubj", "model.json", "checkpoint.tl", "config.pbtxt"


def write_lightgbm(trees: Trees) -> dict[str, bytes]:
    """LightGBM's text."""
    return {TEXT: trees.booster.model_to_string().encode()}


def open_lightgbm(folder: Path) -> Reader:
    """LightGBM with the model."""
    import lightgbm

    booster = lightgbm.Booster(model_file=str(folder / TEXT))
    return lambda matrix_NG: np.asarray(booster.predict(matrix_NG, raw_score=True), np.float64)


def write_xgboost(trees: Trees) -> dict[str, bytes]:
    """XGBoost's binary and textual JSON."""
    return {BINARY: bytes(trees.booster.save_raw("ubj")), JSON: bytes(trees.booster.save_raw("json"))}


def open_xgboost(folder: Path, name: str = BINARY) -> Reader:
    """XGBoost with the model, from its binary JSON."""
    import xgboost

    booster = xgboost.Booster(model_file=str(folder / name))
    about = {"feature_names": booster.feature_names, "feature_types": booster.feature_types}

    def scores(matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        rows = xgboost.DMatrix(matrix_NG, **about, enable_categorical=True)
        scores_N: NDArray[np.float64] = booster.predict(rows, output_margin=True).astype(np.float64)
        return scores_N

    return scores


def read_xgboost(folder: Path, matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
    """Scores [N] of XGBoost from its binary JSON.

    Raises:
        InputError: the textual JSON gives other scores.
    """
    both = [open_xgboost(folder, name)(matrix_NG) for name in (BINARY, JSON)]
    if (apart := float(np.abs(both[0] - both[1]).max(initial=0.0))) != 0:
        raise InputError(f"{BINARY} and {JSON} give scores that are {apart:.3g} apart; nothing is published")
    return both[0]


def write_treelite(trees: Trees) -> dict[str, bytes]:
    """Treelite's checkpoint, and the settings with which Triton's FIL backend serves it.

    Raises:
        InputError: treelite is not installed.
    """
    treelite = _treelite()
    load = treelite.frontend.from_lightgbm if trees.library == "lightgbm" else treelite.frontend.from_xgboost
    settings = f"""backend: "fil"
max_batch_size: 32768
input [{{ name: "input__0" data_type: TYPE_FP32 dims: [ {len(trees.columns)} ] }}]
output [{{ name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] }}]
parameters [{{ key: "model_type" value: {{ string_value: "treelite_checkpoint" }} }}]
"""
    return {CHECKPOINT: bytes(load(trees.booster).serialize_bytes()), TRITON: settings.encode()}


def open_treelite(folder: Path) -> Reader:
    """Treelite's own interpreter with the model."""
    treelite = _treelite()
    model = treelite.Model.deserialize_bytes((folder / CHECKPOINT).read_bytes())

    def scores(matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.asarray(treelite.gtil.predict(model, matrix_NG, pred_margin=True), np.float64).reshape(len(matrix_NG))

    return scores


def _treelite() -> Any:
    try:
        import treelite
    except ImportError as error:
        raise InputError("treelite is not installed; pip install 'ltrscale[serve]'") from error
    return treelite
