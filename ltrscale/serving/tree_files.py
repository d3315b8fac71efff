"""Trees in files of their own library, and as a treelite checkpoint, read back by that library alone.

Shapes: N documents, G columns.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ltrscale.bundle import Bundle
from ltrscale.errors import InputError
from ltrscale.serving.features import ModelColumn
from ltrscale.serving.format import Files, MatrixFormat, MatrixScorer, Observed
from ltrscale.serving.trees import trees_of

_TEXT, _BINARY, _JSON, _CHECKPOINT, _TRITON = "model.txt", "model.ubj", "model.json", "checkpoint.tl", "config.pbtxt"


class LightGBMFormat(MatrixFormat):
    """LightGBM's own text."""

    kind: Literal["lightgbm"] = "lightgbm"
    title: ClassVar[str] = "A ranker as LightGBM's own text"
    tolerance: ClassVar[float] = 1e-9
    use: ClassVar[str] = """```python
import lightgbm
scores = lightgbm.Booster(model_file="model.txt").predict(matrix, raw_score=True)
```"""

    def write(self, bundle: Bundle, observed: Observed) -> tuple[Files, tuple[ModelColumn, ...]]:
        """The text."""
        trees = trees_of(bundle, observed.texts, to=self.kind, libraries=("lightgbm",))
        return {_TEXT: trees.booster.model_to_string().encode()}, trees.columns

    def readers(self, folder: Path) -> tuple[MatrixScorer, ...]:
        """LightGBM."""
        import lightgbm

        booster = lightgbm.Booster(model_file=str(folder / _TEXT))
        return (lambda matrix_NG: np.asarray(booster.predict(matrix_NG, raw_score=True), np.float64),)


class XGBoostFormat(MatrixFormat):
    """XGBoost's binary and textual JSON."""

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
        """Both files."""
        trees = trees_of(bundle, observed.texts, to=self.kind, libraries=("xgboost",))
        files = {name: bytes(trees.booster.save_raw(form)) for name, form in ((_BINARY, "ubj"), (_JSON, "json"))}
        return files, trees.columns

    def readers(self, folder: Path) -> tuple[MatrixScorer, ...]:
        """XGBoost, from both."""
        return _xgboost(folder / _BINARY), _xgboost(folder / _JSON)


def _xgboost(path: Path) -> MatrixScorer:
    import xgboost

    booster = xgboost.Booster(model_file=str(path))
    about = {"feature_names": booster.feature_names, "feature_types": booster.feature_types}

    def scores(matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        rows = xgboost.DMatrix(matrix_NG, **about, enable_categorical=True)
        scores_N: NDArray[np.float64] = booster.predict(rows, output_margin=True).astype(np.float64)
        return scores_N

    return scores


_FRONTENDS: dict[str, Callable[[Any], Any]] = {
    "lightgbm": lambda treelite: treelite.frontend.from_lightgbm,
    "xgboost": lambda treelite: treelite.frontend.from_xgboost,
}
"""How treelite reads the trees of each library that it takes."""


class TreeliteFormat(MatrixFormat):
    """Treelite's checkpoint, and the settings with which Triton's FIL backend serves it."""

    kind: Literal["treelite"] = "treelite"
    title: ClassVar[str] = "A ranker as a treelite checkpoint, for Triton's FIL backend"
    use: ClassVar[str] = """```python
import treelite
model = treelite.Model.deserialize("checkpoint.tl")
scores = treelite.gtil.predict(model, matrix, pred_margin=True).reshape(-1)
```

In a model repository of Triton, the files are `NAME/config.pbtxt` and `NAME/1/checkpoint.tl`."""

    def write(self, bundle: Bundle, observed: Observed) -> tuple[Files, tuple[ModelColumn, ...]]:
        """Checkpoint and settings."""
        trees = trees_of(bundle, observed.texts, to=self.kind, libraries=_FRONTENDS)
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


def _treelite() -> Any:
    try:
        import treelite
    except ImportError as error:
        raise InputError("treelite is not installed; pip install 'ltrscale[serve]'") from error
    return treelite
