"""`features.json` of an export: the columns that the model reads, and how to fill them.

Shapes: N documents, F raw features, G columns of the matrix.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ltrscale.config import Config

CodeTexts = Mapping[str, Mapping[str, int]]
"""Codes of the observed texts of categorical features, by feature; a feature whose texts are not recorded is absent."""


class ModelColumn(Config):
    """A column that the model reads."""

    column: int
    """Index, from 0."""
    name: str
    """Name in the data set."""
    label: str
    """Name in the exported model: letters, digits and underscores."""
    kind: Literal["numeric", "categorical"]
    values: dict[str, int] | None = None
    """The number that stands for each recorded text of a category; a text that is not listed is a missing value."""
    codes: tuple[int, ...] | None = None
    """Codes of a categorical column of trees; the number that stands for a code is its index in this list, from 0."""


FEATURES_FILE = "features.json"


class ExportedFeatures(Config):
    """`features.json`."""

    format: Literal["ltrscale-export"] = "ltrscale-export"
    version: Literal[2] = 2
    to: str
    """The name of the format."""
    missing: Literal["nan", "zero"] = "nan"
    """How the model reads a missing value: as a NaN of its own meaning, or as 0."""
    columns: tuple[ModelColumn, ...]

    def matrix(self, names: Sequence[str], features_NF: NDArray[np.float32]) -> NDArray[np.float32]:
        """The matrix [N, G] that the exported model reads, made as the columns say.

        Args:
            names: names of the raw features.
            features_NF: raw features; categories are codes.

        Example:
            >>> brand = ModelColumn(column=0, name="brand", label="brand", kind="categorical", codes=(30, 70))
            >>> price = ModelColumn(column=1, name="price", label="price", kind="numeric")
            >>> features = ExportedFeatures(to="lightgbm", columns=(brand, price))
            >>> features.matrix(["price", "brand"], np.float32([[0.5, 70], [0.25, 71]])).tolist()
            [[1.0, 0.5], [nan, 0.25]]
        """
        found = []
        for column in self.columns:
            raw_N = features_NF[:, names.index(column.name)]
            if column.codes is not None:
                place = {float(code): float(i) for i, code in enumerate(column.codes)}
                raw_N = np.array([place.get(float(code), np.nan) for code in raw_N], np.float32)
            found.append(raw_N)
        return np.stack(found, axis=1) if found else np.zeros((len(features_NF), 0), np.float32)


def features_in(folder: Path) -> ExportedFeatures:
    """The content of `features.json` in a folder."""
    return ExportedFeatures.model_validate_json((folder / FEATURES_FILE).read_bytes())


def labels_of(names: Iterable[str]) -> list[str]:
    """Names that every engine accepts, all different.

    Example:
        >>> labels_of(["price", "listed.hour", "listed hour", "2nd"])
        ['price', 'listed_hour', 'listed_hour_2', '_2nd']
    """
    labels: list[str] = []
    for name in names:
        label = re.sub(r"^(?=\d)|[^A-Za-z0-9_]", "_", name)
        copies = (f"{label}_{n}" for n in range(2, len(labels) + 3))
        labels.append(label if label not in labels else next(copy for copy in copies if copy not in labels))
    return labels


def code_texts_of(codes: Iterable[int], texts: Mapping[str, int] | None) -> dict[str, int]:
    """The text of each code that has one: the recorded one, or the code itself if it is a whole number's.

    Args:
        codes: the codes to name.
        texts: codes of recorded texts of the feature; None if they were not recorded.

    Example:
        >>> code_texts_of([7, 6113811], {"berlin": 6113811, "paris": 2319768})
        {'7': 7, 'berlin': 6113811}
    """
    if texts is None:
        return {}
    by_code: dict[int, list[str]] = {}
    for text, code in texts.items():
        by_code.setdefault(code, []).append(text)
    return {text: code for code in codes for text in by_code.get(code, [str(code)])}
