"""Export of LightGBM trees as files that LightGBM can read without this package.

They are published only after a check that they give the same scores.

    model.txt       LightGBM's own text, byte for byte as in the bundle
    features.json   the columns of its matrix: order, names, kinds, and the codes of categorical columns
    parity.json     number of documents whose scores were compared, and the largest difference
    README.md       how to read these files, for people

Shapes: N documents, G columns of the matrix.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle
from ltrscale.config import Config
from ltrscale.data.dataset.split import Split, select
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.progress import log

MODEL, FEATURES, PARITY, _CARD = "model.txt", "features.json", "parity.json", "README.md"


class ParityConfig(Config):
    """The check that exported trees must pass."""

    rows: int = Field(10_000, ge=1)
    """Number of documents whose scores are compared; all if there are fewer."""
    tolerance: float = Field(1e-9, ge=0)
    """Largest difference of scores that passes."""


class Column(Config):
    """A column of the matrix that the model reads."""

    column: int
    """Index, from 0."""
    name: str
    kind: Literal["numeric", "categorical"]
    codes: tuple[int, ...] | None = None
    """Codes of a categorical column; the matrix holds a code's index in this list, from 0."""


class ExportedFeatures(Config):
    """`features.json`."""

    format: Literal["ltrscale-lightgbm-export"] = "ltrscale-lightgbm-export"
    version: Literal[1] = 1
    columns: tuple[Column, ...]


class Parity(Config):
    """`parity.json`."""

    documents: int
    largest_difference: float
    tolerance: float
    bundle: str
    data: tuple[str, ...]
    periods: tuple[str, ...] | None
    """As named; null for all."""


def columns_of(bundle: Bundle) -> ExportedFeatures:
    """The columns of the model's matrix.

    Raises:
        InputError: the bundle is not one LightGBM model of raw features.
    """
    import lightgbm

    trees = bundle.trees
    if trees is None or trees.library != "lightgbm":
        what = bundle.kind if trees is None else trees.library
        raise InputError(
            f"{bundle.url}: a bundle of kind {what}; only LightGBM's trees are exported as its text, such as those of "
            "a student that jobs.distill trains from it"
        )
    if len(trees.models) > 1 or trees.per_query or trees.projection or trees.members:
        raise InputError(
            f"{bundle.url}: several models, or trees on features standardised per query, on components or on other "
            "models' scores, which LightGBM alone cannot score; export a bundle of one model on raw features, such as "
            "a student of this one"
        )
    bundle.scorer()  # raises if the model is damaged
    codes = iter(lightgbm.Booster(model_str=bundle.content.decode()).pandas_categorical or [])
    kinds = {feature.name: feature.kind for feature in bundle.features}
    return ExportedFeatures(
        columns=tuple(
            Column(column=i, name=name, kind=kinds[name], codes=next(codes) if kinds[name] == "categorical" else None)
            for i, name in enumerate(trees.sees or kinds)
        )
    )


def matrix(features: ExportedFeatures, names: Sequence[str], features_NF: NDArray[np.float32]) -> NDArray[np.float32]:
    """The matrix [N, G] that the exported model reads, made as the card describes.

    Args:
        features: columns of the export.
        names: names of the raw features.
        features_NF: raw features.

    Example:
        >>> brand = Column(column=0, name="brand", kind="categorical", codes=(30, 70))
        >>> features = ExportedFeatures(columns=(brand, Column(column=1, name="price", kind="numeric")))
        >>> matrix(features, ["price", "brand"], np.float32([[0.5, 70], [0.25, 71]])).tolist()
        [[1.0, 0.5], [nan, 0.25]]
    """
    found = []
    for column in features.columns:
        raw_N = features_NF[:, names.index(column.name)]
        if column.codes is not None:
            place = {float(code): float(i) for i, code in enumerate(column.codes)}
            raw_N = np.array([place.get(float(code), np.nan) for code in raw_N], np.float32)
        found.append(raw_N)
    return np.stack(found, axis=1) if found else np.zeros((len(features_NF), 0), np.float32)


def check_parity(bundle: Bundle, split: Split, config: ParityConfig) -> tuple[dict[str, bytes], Parity]:
    """The files to publish, and how well LightGBM, reading only these files, agrees with the bundle.

    Raises:
        InputError: scores differ by more than the tolerance; the bundle cannot be exported or has other features.
    """
    import lightgbm

    features = columns_of(bundle)
    files = {MODEL: bundle.content, FEATURES: (features.model_dump_json(indent=1, exclude_none=True) + "\n").encode()}
    with storage.scratch.directory() as scratch:
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        booster = lightgbm.Booster(model_file=str(scratch / MODEL))
        read = ExportedFeatures.model_validate_json((scratch / FEATURES).read_bytes())
    scorer, names = bundle.scorer(), [feature.name for feature in bundle.features]
    documents, largest = 0, 0.0
    for groups in _first(bundle, split, config.rows):
        matrix_NG = matrix(read, names, groups.features_NF.numpy())[: config.rows - documents]
        theirs_N = booster.predict(matrix_NG, raw_score=True)
        apart_N = np.abs(scorer(groups).numpy()[: len(theirs_N)] - theirs_N)
        documents, largest = documents + len(theirs_N), max(largest, float(apart_N.max(initial=0.0)))
    if not largest <= config.tolerance:  # not `>`: a difference of NaN must not pass
        raise InputError(
            f"{bundle.url}: LightGBM on its own gives scores up to {largest:.3g} away from the bundle's on "
            f"{documents:,} documents, more than tolerance {config.tolerance:g}; nothing is published"
        )
    parity = Parity(
        documents=documents,
        largest_difference=largest,
        tolerance=config.tolerance,
        bundle=bundle.url,
        data=split.data,
        periods=split.periods,
    )
    return files, parity


def publish(files: Mapping[str, bytes], parity: Parity, out: str, *, made_by: Mapping[str, Any]) -> None:
    """Commit the checked files to a directory."""
    card = _card(ExportedFeatures.model_validate_json(files[FEATURES]), parity)
    more = {PARITY: (parity.model_dump_json(indent=1) + "\n").encode(), _CARD: card.encode()}
    with storage.Commit(out) as commit:
        for name, content in {**files, **more}.items():
            with commit.file(name) as path:
                path.write_bytes(content)
        commit.finish({"made_by": made_by})
    log.info(
        "export: %s: the scores of %s documents are at most %.2g from the bundle's", out, f"{parity.documents:,}",
        parity.largest_difference,
    )  # fmt: skip


def _first(bundle: Bundle, split: Split, rows: int) -> Iterator[QueryGroups]:
    """The first groups of a split that together have at least `rows` documents."""
    selection = select(split, labelled=False).serving(bundle.features, whose=bundle.url)
    for groups in iterate(selection, docs_per_batch=min(rows, 1 << 14)):
        yield groups
        rows -= groups.n_documents
        if rows <= 0:
            return


def _card(features: ExportedFeatures, parity: Parity) -> str:
    """The card that explains to people how to score with the files."""
    categorical = sum(column.codes is not None for column in features.columns)
    return f"""# A ranker as LightGBM's own text

`{MODEL}` scores documents one by one; higher is better. Any LightGBM reads it:

```python
import lightgbm
scores = lightgbm.Booster(model_file="{MODEL}").predict(matrix, raw_score=True)
```

`matrix` has one row a document and {len(features.columns)} columns, {categorical} of them categorical, as `{FEATURES}`
lists them in order:

- a numeric column has the raw value, rounded to single precision; a missing value is NaN;
- a categorical column has the place of the document's code in the column's `codes`, counted from 0; a missing code, or
  one that is not in the list, is NaN.

Before this was published, LightGBM's scores from these files were compared with the ranker's own on
{parity.documents:,} documents: they were at most {parity.largest_difference:.3g} apart (`{PARITY}`).
"""
