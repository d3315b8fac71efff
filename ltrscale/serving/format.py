"""What a format of exports defines: which bundles it takes, its files, their reader, and what its card says.

Shapes: N documents, G columns of the matrix.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ltrscale.bundle import Bundle
from ltrscale.config import Config
from ltrscale.serving.features import CodeTexts, ExportedFeatures, ModelColumn

Files = dict[str, bytes]
"""Content of files, by their names."""
MatrixScorer = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""Scores [N] of a matrix [N, G]."""


class Observed(NamedTuple):
    """What the data show of the features of a model."""

    texts: CodeTexts
    """Recorded texts of categories."""
    negative: Collection[str] = ()
    """Names of the features that have values below 0, which scores of a search engine cannot have."""


class Format(Config):
    """A program that serves models, with the files that hand a bundle over to it."""

    kind: str
    title: ClassVar[str]
    """What an export is, the first line of its card."""
    use: ClassVar[str]
    """How the program reads the files, in Markdown."""
    of_rows: ClassVar[str]
    """How a service makes what the model reads of raw rows, in Markdown."""
    tolerance: ClassVar[float] = 1e-5
    """Largest difference of scores that passes, as a share of the largest score."""
    missing: ClassVar[Literal["nan", "zero"]] = "nan"
    """How the program reads a missing value: as a NaN of its own meaning, or as 0."""
    in_process: ClassVar[bool]
    """Whether the model scores in any process; else in an engine of its own."""

    @abstractmethod
    def write(self, bundle: Bundle, observed: Observed) -> tuple[Files, tuple[ModelColumn, ...]]:
        """The files of the model, and the columns that it reads.

        Raises:
            InputError: the format cannot express the bundle; a library that writes it is not installed.
        """

    @abstractmethod
    def readers(self, folder: Path) -> tuple[MatrixScorer, ...]:
        """The program's own reader, or one that does the same, of each file in a folder that has the whole model.

        It takes a listwise model's lists one by one.
        """

    @abstractmethod
    def inputs(self, features: ExportedFeatures) -> str:
        """What the model reads, in Markdown."""


class MatrixFormat(Format):
    """A format whose model scores the rows of a matrix in any process."""

    in_process: ClassVar[bool] = True
    number: ClassVar[str] = "the place of its code in the column's `codes`, counted from 0; NaN if it is not listed"
    """The number of a category in the matrix."""
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
    """A format whose model scores the documents of an engine, which have fields."""

    in_process: ClassVar[bool] = False
    of_rows: ClassVar[str] = """
`raw_rows.py` makes the values of the numeric fields, in the order of `features.json`, of a row of the raw log:
`raw_rows.features(row)`, NaN for a field without a value. It needs Python 3.9 or later alone, and `raw_rows.json`,
which has the recipe of each feature. A row that cannot be used raises `raw_rows.RowError` with the reason.
"""

    def inputs(self, features: ExportedFeatures) -> str:
        """The fields."""
        missing = "is read as 0" if features.missing == "zero" else "stays missing: it goes where the model says"
        return f"""`features.json` lists the features: `name` in the data set, `label` in the model. A missing value
{missing}."""
