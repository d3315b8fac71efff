"""What an export format defines: the bundles it takes, its files, their reader, its card, and the model's columns.

Shapes: N documents, F raw features, G columns of the matrix.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ltrscale.config import Config, Strict

if TYPE_CHECKING:
    from ltrscale.bundle import Bundle

CodeTexts = Mapping[str, Mapping[str, int]]
"""Codes of the observed texts of categorical features, by feature; features without recorded texts are absent."""
FeatureCodes = Mapping[str, Collection[int]]
"""Codes of categorical features, by feature."""


class ModelColumn(Strict):
    """A column that the model reads."""

    column: int
    """Index, from 0."""
    name: str
    """Name in the data set."""
    label: str
    """Name in the exported model: letters, digits and underscores."""
    kind: Literal["numeric", "categorical"]
    values: dict[str, int] | None = None
    """Number of each text of a category in the data set; a text that is not listed has the number of its code, if that
    is one of `codes`."""
    codes: tuple[int, ...] | None = None
    """Codes of a categorical column of trees; the model's number for a code is its index in this list, from 0."""


FEATURES_FILE = "features.json"


class ExportedFeatures(Strict):
    """`features.json`."""

    format: Literal["ltrscale-export"] = "ltrscale-export"
    version: Literal[2] = 2
    to: str
    """The name of the format."""
    missing: Literal["nan", "zero"] = "nan"
    """How the model reads a missing value: as a NaN with its own meaning, or as 0."""
    columns: tuple[ModelColumn, ...]

    def matrix(self, names: Sequence[str], features_NF: NDArray[np.float32]) -> NDArray[np.float32]:
        """The matrix [N, G] that the exported model reads, made by the rules of `columns`.

        Example:
            >>> brand = ModelColumn(column=0, name="brand", label="brand", kind="categorical", codes=(30, 70))
            >>> price = ModelColumn(column=1, name="price", label="price", kind="numeric")
            >>> features = ExportedFeatures(to="lightgbm", columns=(brand, price))
            >>> features.matrix(["price", "brand"], np.float32([[0.5, 70], [0.25, 71]])).tolist()
            [[1.0, 0.5], [nan, 0.25]]
        """
        columns_N = []
        for column in self.columns:
            raw_N = features_NF[:, names.index(column.name)]
            if column.codes is not None:
                index_of = {float(code): float(i) for i, code in enumerate(column.codes)}
                raw_N = np.array([index_of.get(float(code), np.nan) for code in raw_N], np.float32)
            columns_N.append(raw_N)
        return np.stack(columns_N, axis=1) if columns_N else np.zeros((len(features_NF), 0), np.float32)


def features_in(folder: Path) -> ExportedFeatures:
    """The content of `features.json` in a folder."""
    return ExportedFeatures.model_validate_json((folder / FEATURES_FILE).read_bytes())


def labels_of(names: Iterable[str]) -> list[str]:
    """Unique names that every engine accepts.

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


Files = dict[str, bytes]
"""Content of files, by their names."""
MatrixScorer = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""Scores [N] of a matrix [N, G]."""


class Observed(NamedTuple):
    """What the data show about a model's features."""

    texts: CodeTexts
    """Recorded texts of categories."""
    negative: Collection[str] = ()
    """Names of the features with values below 0, which a search engine's scores cannot have."""
    occurring: Callable[[FeatureCodes], FeatureCodes] = lambda _: {}
    """Finds which of some codes occur in the data; it may have to read the data."""

    def texts_of(self, codes: FeatureCodes) -> CodeTexts:
        """The known texts of some codes: recorded texts, and whole numbers, which are their own text.

        A code that occurs in the data without a recorded text is a whole number. One that does not occur may be the
        hash of any text in other data.

        Example:
            >>> observed = Observed({"city": {"berlin": 6113811}}, occurring=lambda codes: {"city": {7}})
            >>> observed.texts_of({"city": [7, 2319768, 6113811], "not recorded": [7]})
            {'city': {'7': 7, 'berlin': 6113811}}
        """
        recorded = {name: of_name for name, of_name in self.texts.items() if name in codes}
        unnamed = {name: {*codes[name]} - {*of_name.values()} for name, of_name in recorded.items()}
        numbers = self.occurring(unnamed) if any(unnamed.values()) else {}
        found = {}
        for name, of_name in recorded.items():
            pairs = [(text, code) for text, code in of_name.items() if code in codes[name]]
            pairs += [(str(code), code) for code in numbers.get(name, ())]
            found[name] = dict(sorted(pairs, key=lambda pair: pair[1]))
        return found


class Format(Config):
    """A program that serves models, and the files of a bundle for it."""

    kind: str
    title: ClassVar[str]
    """What an export is, the first line of its card."""
    use: ClassVar[str]
    """How the program reads the files, in Markdown."""
    of_rows: ClassVar[str]
    """How a service makes the model's input from raw rows, in Markdown."""
    tolerance: ClassVar[float] = 1e-5
    """Largest difference of scores that passes, as a share of the largest score."""
    missing: ClassVar[Literal["nan", "zero"]] = "nan"
    """How the program reads a missing value: as a NaN with its own meaning, or as 0."""
    in_process: ClassVar[bool]
    """True if the model scores in any process, False if only in its own engine."""

    @abstractmethod
    def write(self, bundle: Bundle, observed: Observed) -> tuple[Files, tuple[ModelColumn, ...]]:
        """The files of the model, and the columns that it reads.

        Raises:
            InputError: the format cannot express the bundle; a library that writes it is not installed.
        """

    @abstractmethod
    def readers(self, folder: Path) -> tuple[MatrixScorer, ...]:
        """The program's own reader, or an equivalent, for each file in a folder that has the whole model.

        It takes a listwise model's lists one at a time.
        """

    @abstractmethod
    def inputs(self, features: ExportedFeatures) -> str:
        """What the model reads, in Markdown."""


class MatrixFormat(Format):
    """A format for a model that scores the rows of a matrix in any process."""

    in_process: ClassVar[bool] = True
    number: ClassVar[str] = "the place of its code in the column's `codes`, counted from 0; NaN if it is not listed"
    """How the matrix encodes a category."""
    of_rows: ClassVar[str] = """
`raw_rows.py` makes the matrix of rows of the raw log; it needs Python 3.9 or later alone, and `raw_rows.json`, which
has the recipe of each feature:

```python
import raw_rows
matrix = [raw_rows.inputs(row) for row in raw_rows.read("rows.csv")]
```

A row is a dict with the columns of the log. One that cannot be used raises `raw_rows.RowError` with the reason.
"""

    def inputs(self, features: ExportedFeatures) -> str:
        """The columns of the matrix."""
        categorical = sum(column.kind == "categorical" for column in features.columns)
        return f"""`matrix` has one row a document, of single precision, and {len(features.columns)} columns,
{categorical} of them categorical, as `features.json` lists them in order:

- a numeric column has the raw value, a categorical one a number; a missing value is NaN;
- the number of a category is {self.number};
- `values` has the numbers of the texts that were recorded. The code of a whole number below 2^24 is that number; that
  of another text is `int.from_bytes(digest, "little") >> 40`, where the digest is
  `hashlib.blake2b(b"category\\0" + text.encode(), digest_size=8).digest()`."""


class EngineFormat(Format):
    """A format for a model that scores an engine's documents, which have fields."""

    in_process: ClassVar[bool] = False
    of_rows: ClassVar[str] = """
`raw_rows.py` makes the values of the numeric fields, in the order of `features.json`, of a row of the raw log:
`raw_rows.features(row)`, NaN for a field without a value. It needs Python 3.9 or later alone, and `raw_rows.json`,
which has the recipe of each feature. A row that cannot be used raises `raw_rows.RowError` with the reason.
"""

    def inputs(self, features: ExportedFeatures) -> str:
        """The fields of the documents."""
        missing = "is read as 0" if features.missing == "zero" else "stays missing: it goes where the model says"
        return f"""`features.json` lists the features: `name` in the data set, `label` in the model. A missing value
{missing}."""
