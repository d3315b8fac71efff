"""Scores raw rows with an export, by LightGBM, XGBoost or onnxruntime alone.

    python docs/score_alone.py EXPORT ROWS

EXPORT is a directory that `jobs.export` wrote, ROWS a CSV file or JSON lines in the form of the raw log. Prints one
score for each row; NaN for one that cannot be used, with the reason on stderr. The rows of an ONNX graph of a listwise
network are those of one query.
"""

import sys
from pathlib import Path

import numpy as np


def scores(export, matrix):
    """The scores of the rows of a matrix."""
    if (export / "model.txt").exists():
        import lightgbm

        return lightgbm.Booster(model_file=str(export / "model.txt")).predict(matrix, raw_score=True)
    if (export / "model.onnx").exists():
        import onnxruntime

        return onnxruntime.InferenceSession(str(export / "model.onnx")).run(["scores"], {"features": matrix})[0]
    import xgboost

    booster = xgboost.Booster(model_file=str(export / "model.json"))
    about = {"feature_names": booster.feature_names, "feature_types": booster.feature_types}
    return booster.predict(xgboost.DMatrix(matrix, **about, enable_categorical=True), output_margin=True)


def main(export, rows):
    """Print a score for each row of a file."""
    sys.path.insert(0, str(export))
    import raw_rows  # of the export: it needs Python alone

    found, matrix = [], []
    for line, row in raw_rows.numbered(rows):
        try:
            matrix.append(raw_rows.inputs(row))
            found.append(True)
        except raw_rows.RowError as error:
            print(f"{rows}: line {line}: {error}", file=sys.stderr)
            found.append(False)
    scores_N = np.full(len(found), np.nan)
    if matrix:
        scores_N[found] = scores(export, np.array(matrix, np.float32))
    print(*map(float, scores_N), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
