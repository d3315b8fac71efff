"""Exports of a bundle: files for another program, published only after that program's reader gave the same scores.

    model.*          the model; `tree_files`, `onnx_graph`, `ltr_plugin` and `vespa` say which files
    raw_rows.*       what makes the model's features of a raw row (`raw`)
    features.json    the columns that the model reads: order, names, kinds, missing values, numbers of categories
    parity.json      number of documents whose scores were compared, and the largest difference
    README.md        how to read these files, for people

Shapes: N documents, F raw features, Q1 = groups + 1 offsets.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Manifest, open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.progress import log
from ltrscale.serving import ltr_plugin, onnx_graph, raw, raw_check, tree_files, vespa
from ltrscale.serving.card import card
from ltrscale.serving.features import ExportedFeatures, Format, Texts
from ltrscale.serving.trees import trees_of

FEATURES, PARITY, CARD = "features.json", "parity.json", "README.md"
_DISTURBED = 0.02
_MISSING_IS_ZERO: tuple[Format, ...] = ("elasticsearch",)
_UNSEEN = (1 << 24) - 1
_Files = dict[str, bytes]


class ParityConfig(Config):
    """The check that exported models must pass."""

    rows: int = Field(10_000, ge=1)
    """Number of documents whose scores are compared; all if there are fewer."""
    tolerance: float | None = Field(None, ge=0)
    """Largest difference of scores that passes, as a share of the largest score (at least 1); by default 1e-9 for
    LightGBM's text and Vespa, which compute in double precision, 1e-4 for ONNX, and 1e-5 for the others."""

    def allowed(self, to: Format) -> float:
        """The tolerance for a format."""
        if self.tolerance is not None:
            return self.tolerance
        return {"lightgbm": 1e-9, "vespa": 1e-9, "onnx": 1e-4}.get(to, 1e-5)


class RawParity(Config):
    """Raw rows that went through the transformer and the exported model, and through `prepare` and the bundle.

    All features were equal to the bit.
    """

    file: str
    documents: int
    largest_difference: float


class Parity(Config):
    """`parity.json`."""

    to: Format
    documents: int
    missing: int
    """Missing values among the features of these documents."""
    unseen: int
    """Categories among them that the model has never seen."""
    largest_difference: float
    largest_score: float
    tolerance: float
    bundle: str
    data: tuple[str, ...]
    periods: tuple[str, ...] | None
    """As named; null for all."""
    raw: RawParity | None = None
    """The same from raw rows on; null where there is no transformer, or there are no such rows."""


def write(to: Format, bundle: Bundle, texts: Texts, negative: Collection[str] = ()) -> tuple[_Files, ExportedFeatures]:
    """The files of the model, and its columns.

    Args:
        to: the format.
        bundle: the model.
        texts: recorded texts of categories.
        negative: names of the features that have values below 0, which scores of a search engine cannot have.

    Raises:
        InputError: the format cannot express the bundle; a library that writes it is not installed.
    """
    if bundle.reads_tokens:
        raise InputError(
            f"{bundle.url}: reads the tokens of texts, and {to} gets features alone; export a student that "
            "jobs.distill trains from it"
        )
    if to == "onnx":
        files = onnx_graph.write(bundle)
        return files, ExportedFeatures(to=to, columns=onnx_graph.columns_of(bundle, texts))
    both = ("lightgbm", "xgboost")
    libraries = {"lightgbm": ("lightgbm",), "vespa": ("lightgbm",), "xgboost": ("xgboost",)}.get(to, both)
    trees = trees_of(bundle, texts, to=to, libraries=libraries)
    match to:
        case "lightgbm":
            files = tree_files.write_lightgbm(trees)
        case "xgboost":
            files = tree_files.write_xgboost(trees)
        case "treelite":
            files = tree_files.write_treelite(trees)
        case "vespa":
            files = vespa.write(trees)
        case "elasticsearch" | "opensearch":
            files = ltr_plugin.write(trees, to=to, negative=negative)
    missing = "zero" if to in _MISSING_IS_ZERO else "nan"
    return files, ExportedFeatures(to=to, missing=missing, columns=trees.columns)


def read(
    folder: Path, features: ExportedFeatures, matrix_NG: NDArray[np.float32], offsets_Q1: NDArray[np.int64] | None
) -> NDArray[np.float64]:
    """Scores [N] by the reader of the format from the files in a folder; no bundle is at hand.

    Args:
        folder: with the files.
        features: content of `features.json`.
        matrix_NG: the matrix that the model reads.
        offsets_Q1: offsets of the lists, if the scores of documents depend on their lists.
    """
    match features.to:
        case "lightgbm":
            return tree_files.open_lightgbm(folder)(matrix_NG)
        case "xgboost":
            return tree_files.read_xgboost(folder, matrix_NG)
        case "treelite":
            return tree_files.open_treelite(folder)(matrix_NG)
        case "vespa":
            return vespa.read(folder, features, matrix_NG)
        case "elasticsearch" | "opensearch":
            return ltr_plugin.read(folder, features, matrix_NG)
        case "onnx":
            return onnx_graph.read(folder, matrix_NG, offsets_Q1)


def check_parity(
    to: Format, bundle: Bundle, split: Split, config: ParityConfig, raw_files: Sequence[str] = ()
) -> tuple[_Files, Parity]:
    """The files to publish, and how well a reader of only these files agrees with the bundle.

    Args:
        to: the format.
        bundle: the model.
        split: data whose documents are scored.
        config: how many, and how near the scores must be.
        raw_files: files of raw rows, of whose first rows the transformer must make what `prepare` makes of them.

    Raises:
        InputError: scores differ by more than the tolerance; the program would refuse some documents; the bundle cannot
            be exported or has other features.
    """
    groups = _rows(bundle, split, config.rows, disturbed=to not in _MISSING_IS_ZERO)
    names = [feature.name for feature in bundle.features]
    manifests = [open_dataset(url).manifest for url in split.data]
    texts = {name: codes for manifest in manifests for name, codes in manifest.categories.items()}
    files, features = write(to, bundle, texts, _negative(names, groups, manifests))
    files[FEATURES] = (features.model_dump_json(indent=1, exclude_none=True) + "\n").encode()
    files |= raw.write(bundle, [column.name for column in features.columns])
    with storage.scratch.directory() as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        read_features = ExportedFeatures.model_validate_json((folder / FEATURES).read_bytes())
        matrix_NG = read_features.matrix(names, groups.features_NF.numpy())
        offsets_Q1 = groups.offsets_Q1.numpy() if onnx_graph.is_listwise(bundle) else None
        theirs_N = read(folder, read_features, matrix_NG, offsets_Q1)
        apart, largest = _apart(bundle, groups, theirs_N, read_features, config)
        from_raw = _from_raw(folder, bundle, read_features, raw_files, config) if raw.CODE in files else None
    return files, Parity(
        to=to,
        documents=groups.n_documents,
        missing=int(groups.features_NF.isnan().sum()),
        unseen=int((groups.features_NF == _UNSEEN).sum()),
        largest_difference=apart,
        largest_score=largest,
        tolerance=config.allowed(to),
        bundle=bundle.url,
        data=split.data,
        periods=split.periods,
        raw=from_raw,
    )


def _apart(
    bundle: Bundle,
    groups: QueryGroups,
    theirs_N: NDArray[np.float64],
    features: ExportedFeatures,
    config: ParityConfig,
    whose: str = "documents",
) -> tuple[float, float]:
    """The largest difference from the bundle's scores, and the largest score.

    Raises:
        InputError: the difference is more than the tolerance.
    """
    ours_N, tolerance = bundle.scorer()(groups).double().numpy(), config.allowed(features.to)
    apart, largest = (float(np.abs(x_N).max(initial=0.0)) for x_N in (ours_N - theirs_N, ours_N))
    if not apart <= tolerance * max(1.0, largest):  # not `>`: a difference of NaN must not pass
        some_F = groups.features_NF.isnan().any(0).tolist()
        lacking = [feature.name for feature, some in zip(bundle.features, some_F, strict=True) if some]
        raise InputError(
            f"{bundle.url}: {features.to} gives scores up to {apart:.3g} away from the bundle's on {len(ours_N):,} "
            f"{whose}, more than the tolerance of {tolerance:g}; nothing is published"
            + (_zeros(lacking) if features.missing == "zero" and lacking else "")
        )
    return apart, largest


def _from_raw(
    folder: Path, bundle: Bundle, features: ExportedFeatures, files: Sequence[str], config: ParityConfig
) -> RawParity | None:
    """The same for the first raw rows of some files, through the transformer; None without such rows."""
    module, names = raw_check.transformer(folder), [column.name for column in features.columns]
    sampled = raw_check.sample(bundle, module, files, config.rows)
    if sampled is None:
        return None
    matrix_NG = raw_check.matrix(sampled, module, names, bundle)
    offsets_Q1 = sampled.groups.offsets_Q1.numpy() if onnx_graph.is_listwise(bundle) else None
    theirs_N = read(folder, features, matrix_NG, offsets_Q1)
    apart, _ = _apart(bundle, sampled.groups, theirs_N, features, config, "raw rows")
    return RawParity(file=sampled.file, documents=len(sampled.rows), largest_difference=apart)


def _negative(names: Sequence[str], groups: QueryGroups, manifests: Sequence[Manifest]) -> set[str]:
    """Features with values below 0 in these groups, or anywhere in the data as its summaries say."""
    below = {name for name, some in zip(names, (groups.features_NF < 0).any(0).tolist(), strict=True) if some}
    ranges = [pair for m in manifests for pair in zip(m.features, m.summaries, strict=False)]  # some have no summaries
    return below | {feature.name for feature, found in ranges if found.minimum is not None and found.minimum < 0}


def _zeros(lacking: Sequence[str]) -> str:
    """The likely reason where missing values count as 0."""
    some = ", ".join(lacking[:3]) + (" and others" if len(lacking) > 3 else "")
    return (
        f"; it reads a missing value as 0, and {some} {'are' if len(lacking) > 1 else 'is'} missing in some documents: "
        "let prepare fill them (source.columns.fill: {numeric: median}), and train again"
    )


def publish(files: Mapping[str, bytes], parity: Parity, out: str, *, made_by: Mapping[str, Any]) -> None:
    """Commit the checked files to a directory."""
    features = ExportedFeatures.model_validate_json(files[FEATURES])
    text = card(features, parity.documents, parity.largest_difference, rows=raw.CODE in files)
    more = {PARITY: (parity.model_dump_json(indent=1) + "\n").encode(), CARD: text.encode()}
    with storage.Commit(out) as commit:
        for name, content in {**files, **more}.items():
            with commit.file(name) as path:
                path.write_bytes(content)
        commit.finish({"made_by": made_by})
    message = "export: %s: the scores of %s documents are at most %.2g from the bundle's"
    log.info(message, out, f"{parity.documents:,}", parity.largest_difference)
    if parity.raw is not None:
        message = "export: %s: raw_rows.py makes the features of %s rows of %s as prepare does; scores differ by %.2g"
        log.info(message, out, f"{parity.raw.documents:,}", parity.raw.file, parity.raw.largest_difference)


def _rows(bundle: Bundle, split: Split, rows: int, *, disturbed: bool) -> QueryGroups:
    """The first groups of a split that together have at least `rows` documents, cut to that number.

    Args:
        bundle: whose features are read.
        split: the data.
        rows: number of documents.
        disturbed: whether to take some values away, and to put categories in that no data set has.
    """
    groups = _cut(QueryGroups.concat(list(_first(bundle, split, rows))), rows)
    if not disturbed:
        return groups
    generator = torch.Generator().manual_seed(0)
    features_NF = groups.features_NF.clone()
    categorical_F = torch.tensor([feature.kind == "categorical" for feature in bundle.features])
    lost_NF, new_NF = (torch.rand(features_NF.shape, generator=generator) < _DISTURBED for _ in range(2))
    features_NF[new_NF & categorical_F] = _UNSEEN
    features_NF[lost_NF] = torch.nan
    return replace(groups, features_NF=features_NF)


def _first(bundle: Bundle, split: Split, rows: int) -> Iterator[QueryGroups]:
    selection = select(split, labelled=False).serving(bundle.features, whose=bundle.url)
    for groups in iterate(selection, docs_per_batch=min(rows, 1 << 14)):
        yield groups
        rows -= groups.n_documents
        if rows <= 0:
            return


def _cut(groups: QueryGroups, rows: int) -> QueryGroups:
    """The first documents of some groups; the last group may become shorter."""
    offsets_Q1 = groups.offsets_Q1.clamp(max=rows)
    offsets_Q1 = offsets_Q1[: int((offsets_Q1 < offsets_Q1[-1]).sum()) + 1]
    return QueryGroups(groups.features_NF[:rows], offsets_Q1)
