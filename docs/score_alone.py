"""Scores raw rows with an export, by LightGBM, XGBoost or onnxruntime alone.

    python docs/score_alone.py EXPORT ROWS.csv

EXPORT is a directory that `jobs.export` wrote, ROWS.csv has the columns of the raw log; an empty field is a missing
value. Prints one score for each row. The rows of an ONNX graph of a listwise network are those of one query.
"""

import csv
import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np


def code(text):
    """The code of a category: a whole number below 2^24 is its own code, any other text is hashed."""
    if text.isascii() and text.isdigit() and len(text) <= 8 and str(int(text)) == text and int(text) < 1 << 24:
        return int(text)
    return int.from_bytes(hashlib.blake2b(b"category\0" + text.encode(), digest_size=8).digest(), "little") >> 40


def number(text, column):
    """The number in the model's matrix for the text of a field."""
    if text == "":
        return math.nan
    if column["kind"] == "numeric":
        return float(text)
    if "codes" not in column:  # a network reads the codes themselves
        return code(text)
    return column["codes"].index(code(text)) if code(text) in column["codes"] else math.nan


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
    """Print a score for each row of a CSV file."""
    columns = json.loads((export / "features.json").read_text())["columns"]
    with rows.open(newline="") as file:
        matrix = [[number(row[column["name"]], column) for column in columns] for row in csv.DictReader(file)]
    print(*map(float, scores(export, np.array(matrix, np.float32))), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
