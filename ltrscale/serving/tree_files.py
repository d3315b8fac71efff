"""Trees in files of their own library, and as a treelite checkpoint, read back by that library alone.

Shapes: N documents, G columns.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ltrscale.errors import InputError
from ltrscale.serving.trees import Trees

TEXT, BINARY, JSON, CHECKPOINT, TRITON = "model.txt", "model.ubj", "model.json", "checkpoint.tl", "config.pbtxt"


def write_lightgbm(trees: Trees) -> dict[str, bytes]:
    """LightGBM's text."""
    return {TEXT: trees.booster.model_to_string().encode()}


def read_lightgbm(folder: Path, matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
    """Scores [N] of LightGBM."""
    import lightgbm

    scores_N = lightgbm.Booster(model_file=str(folder / TEXT)).predict(matrix_NG, raw_score=True)
    return np.asarray(scores_N, np.float64)


def write_xgboost(trees: Trees) -> dict[str, bytes]:
    """XGBoost's binary and textual JSON."""
    return {BINARY: bytes(trees.booster.save_raw("ubj")), JSON: bytes(trees.booster.save_raw("json"))}


def read_xgboost(folder: Path, matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
    """Scores [N] of XGBoost from its binary JSON.

    Raises:
        InputError: the textual JSON gives other scores.
    """
    import xgboost

    both: list[NDArray[np.float64]] = []
    for name in (BINARY, JSON):
        booster = xgboost.Booster(model_file=str(folder / name))
        about = {"feature_names": booster.feature_names, "feature_types": booster.feature_types}
        rows = xgboost.DMatrix(matrix_NG, **about, enable_categorical=True)
        both.append(booster.predict(rows, output_margin=True).astype(np.float64))
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


def read_treelite(folder: Path, matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
    """Scores [N] of treelite's own interpreter."""
    treelite = _treelite()
    model = treelite.Model.deserialize_bytes((folder / CHECKPOINT).read_bytes())
    scores = treelite.gtil.predict(model, matrix_NG, pred_margin=True)
    return np.asarray(scores, np.float64).reshape(len(matrix_NG))


def _treelite() -> Any:
    try:
        import treelite
    except ImportError as error:
        raise InputError("treelite is not installed; pip install 'ltrscale[serve]'") from error
    return treelite
