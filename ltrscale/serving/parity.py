"""The files of an export, and their check: a reader of only these files must give the bundle's scores.

Raw rows are compared too: through the exported files, and through `prepare` and the bundle. At the end is the time of
a query with these files, on one core of this process.

Shapes: N documents or rows, F raw features, Q queries, Q1 = groups + 1 offsets, G columns of the matrix.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle, load
from ltrscale.config import Strict
from ltrscale.data.dataset.manifest import Manifest, open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import first_groups, iterate
from ltrscale.errors import InputError
from ltrscale.serving.format import (
    FEATURES_FILE,
    ExportedFeatures,
    FeatureCodes,
    Files,
    Format,
    MatrixScorer,
    Observed,
    features_in,
)
from ltrscale.serving.raw import CODE, RawSample, raw_files_of, sample_raw, write_history, write_raw

_DISTURBED = 0.02
"""Share of the values that the check replaces: any by a missing value, and as many categories by `_UNSEEN`."""
_UNSEEN = (1 << 24) - 1
"""A code for a category that the model has never seen: the highest one, which data all but never have."""


class RawParity(Strict):
    """Comparison of raw rows through the transformer and the exported model with `prepare` and the bundle.

    All features were bitwise equal.
    """

    file: str
    documents: int
    largest_difference: float


class Parity(Strict):
    """`parity.json`."""

    to: str
    """The name of the format."""
    documents: int
    missing: int
    """Missing values among the features of these documents."""
    unseen: int
    """Categories among them that the check replaced by one that the model has never seen; none for a format that reads
    a missing value as 0."""
    largest_difference: float
    largest_score: float
    tolerance: float
    bundle: str
    data: tuple[str, ...]
    periods: tuple[str, ...] | None
    """As given; null for all."""
    raw: RawParity | None = None
    """The same from raw rows; null without a transformer or raw rows."""


def check_parity(
    to: Format,
    bundle: Bundle,
    split: Split,
    raw_urls: Sequence[str] = (),
    *,
    rows: int,
    tolerance: float | None = None,
) -> tuple[Files, Parity]:
    """The files to publish, and how well a reader of only these files agrees with the bundle on some `rows`.

    The split is of one data set. The transformer must agree with `prepare` on the first rows of `raw_urls`. Without a
    `tolerance`, a share of the largest score, the format's own one counts.

    Raises:
        InputError: scores differ by more than the tolerance; the program would refuse some documents; the bundle cannot
            be exported or has other features.
    """
    groups = _documents(bundle, split, rows, disturbed=to.missing == "nan")
    names = [feature.name for feature in bundle.features]
    (data,) = split.data
    manifest = open_dataset(data).manifest
    observed = Observed(manifest.categories, _negative(names, groups, manifest), partial(_occurring, bundle, data))
    files = write_export(to, bundle, observed)
    allowed = to.tolerance if tolerance is None else tolerance
    with storage.scratch.directory() as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        features, comparison = features_in(folder), _Comparison(to, bundle, to.readers(folder), allowed)
        matrix_NG = features.matrix(names, groups.features_NF.numpy())
        difference, largest = comparison.of(groups, matrix_NG, "documents")
        from_raw = None
        if CODE in files and (sampled := sample_raw(bundle, folder, raw_urls, rows)) is not None:
            matrix_NG = _raw_matrix(sampled, names, [column.name for column in features.columns])
            raw_difference, _ = comparison.of(sampled.groups, matrix_NG, "raw rows")
            from_raw = RawParity(file=sampled.file, documents=len(sampled.rows), largest_difference=raw_difference)
    return files, Parity(
        to=to.kind,
        documents=groups.n_documents,
        missing=int(groups.features_NF.isnan().sum()),
        unseen=int(((groups.features_NF == _UNSEEN) & _categorical_F(bundle)).sum()),
        largest_difference=difference,
        largest_score=largest,
        tolerance=allowed,
        bundle=bundle.url,
        data=split.data,
        periods=split.periods,
        raw=from_raw,
    )


def write_export(to: Format, bundle: Bundle, observed: Observed) -> Files:
    """The files of the model, with the description of its columns and the transformer of raw rows.

    Raises:
        InputError: the format cannot express the bundle; a library that writes it is not installed.
    """
    if bundle.reads_tokens:
        raise InputError(
            f"{bundle.url}: reads the tokens of texts, and {to.kind} gets features alone; export a student that "
            "jobs.distill trains from it"
        )
    files, columns = to.write(bundle, observed)
    features = ExportedFeatures(to=to.kind, missing=to.missing, columns=columns)
    described = (features.model_dump_json(indent=1, exclude_none=True) + "\n").encode()
    names = [column.name for column in columns]
    return {**files, FEATURES_FILE: described, **write_raw(bundle, names), **write_history(bundle, names)}


class _Comparison(NamedTuple):
    """The scores of an export's readers beside those of its bundle."""

    to: Format
    bundle: Bundle
    readers: Sequence[MatrixScorer]
    tolerance: float

    def of(self, groups: QueryGroups, matrix_NG: NDArray[np.float32], whose: str) -> tuple[float, float]:
        """The largest difference of a reader's scores from the bundle's, if it passes, and the largest score."""
        # list by list if a document's score depends on its list
        is_listwise = any(part.reads_lists for part in self.bundle.parts)
        bounds = groups.offsets_Q1.tolist() if is_listwise else [0, len(matrix_NG)]
        lists = [matrix_NG[a:b] for a, b in pairwise(bounds) if b > a]
        reader_scores_RN = np.stack([np.concatenate([np.zeros(0), *map(reader, lists)]) for reader in self.readers])
        bundle_scores_N = self.bundle.scorer()(groups).double().numpy()
        difference = float(np.abs(reader_scores_RN - bundle_scores_N).max(initial=0.0))
        largest = float(np.abs(bundle_scores_N).max(initial=0.0))
        if not difference <= self.tolerance * max(1.0, largest):  # not `>`: a difference of NaN must not pass
            has_missing_F = groups.features_NF.isnan().any(0).tolist()
            incomplete = [
                feature.name for feature, missing in zip(self.bundle.features, has_missing_F, strict=True) if missing
            ]
            raise InputError(
                f"{self.bundle.url}: {self.to.kind} gives scores up to {difference:.3g} away from the bundle's on "
                f"{len(bundle_scores_N):,} {whose}, more than the tolerance of {self.tolerance:g}; nothing is published"
                + (_zeros_hint(incomplete) if self.to.missing == "zero" and incomplete else "")
            )
        return difference, largest


def _occurring(bundle: Bundle, data: str, codes: FeatureCodes) -> FeatureCodes:
    """The codes that occur in a data set; reading stops once all are found."""
    features = [feature for feature in bundle.features if feature.name in codes]
    missing = {feature.name: {*codes[feature.name]} for feature in features}
    selection = select(Split(data=(data,)), labelled=False).serving(features, whose=bundle.url)
    for groups in iterate(selection):
        for feature, codes_N in zip(features, groups.features_NF.T, strict=True):
            missing[feature.name].difference_update(codes_N.unique().tolist())
        if not any(missing.values()):
            break
    return {name: {*codes[name]} - of_name for name, of_name in missing.items()}


def _negative(names: Sequence[str], groups: QueryGroups, manifest: Manifest) -> set[str]:
    """Features with values below 0 in these groups, or anywhere in the data by its summaries."""
    below = {
        name for name, has_negative in zip(names, (groups.features_NF < 0).any(0).tolist(), strict=True) if has_negative
    }
    ranges = zip(manifest.features, manifest.summaries, strict=False)  # some have no summaries
    return below | {feature.name for feature, summary in ranges if summary.minimum is not None and summary.minimum < 0}


def _zeros_hint(incomplete: Sequence[str]) -> str:
    """The likely reason for a difference where missing values count as 0."""
    names = ", ".join(incomplete[:3]) + (" and others" if len(incomplete) > 3 else "")
    return (
        f"; it reads a missing value as 0, and {names} {'are' if len(incomplete) > 1 else 'is'} missing in some "
        "documents: let prepare fill them (source.columns.fill: {numeric: median}), and train again"
    )


def _documents(bundle: Bundle, split: Split, rows: int, *, disturbed: bool) -> QueryGroups:
    """The first `rows` documents of a split in groups; `disturbed` adds missing values and unseen categories."""
    selection = select(split, labelled=False).serving(bundle.features, whose=bundle.url)
    groups = first_groups(selection, rows)
    offsets_Q1 = groups.offsets_Q1.clamp(max=rows)  # the last group may become shorter
    groups = QueryGroups(groups.features_NF[:rows], offsets_Q1[: int((offsets_Q1 < offsets_Q1[-1]).sum()) + 1])
    if not disturbed:
        return groups
    generator = torch.Generator().manual_seed(0)
    features_NF = groups.features_NF.clone()
    lost_NF, new_NF = (torch.rand(features_NF.shape, generator=generator) < _DISTURBED for _ in range(2))
    features_NF[new_NF & _categorical_F(bundle)] = _UNSEEN
    features_NF[lost_NF] = torch.nan
    return replace(groups, features_NF=features_NF)


def _categorical_F(bundle: Bundle) -> torch.Tensor:
    return torch.tensor([feature.kind == "categorical" for feature in bundle.features])


def _raw_matrix(sampled: RawSample, names: Sequence[str], exported: Sequence[str]) -> NDArray[np.float32]:
    """The matrix of the exported columns, by the transformer; each of its features must be that of `prepare`."""
    expected_NG = sampled.groups.features_NF.numpy()[:, [names.index(name) for name in exported]]
    transformer = sampled.transformer
    for line, row, expected_G in zip(sampled.lines_N.tolist(), sampled.rows, expected_NG.tolist(), strict=True):
        try:
            values = transformer.features(row)
        except transformer.RowError as error:
            raise InputError(
                f"{sampled.file}: row {line}: {CODE} refuses it ({error}), prepare does not; nothing is published"
            ) from error
        for name, expected, value in zip(exported, expected_G, values, strict=True):
            if _bits(expected) != _bits(value):
                raise InputError(
                    f"{sampled.file}: row {line}: {CODE} makes {name!r} {value!r}, prepare {expected!r}; "
                    "nothing is published"
                )
    return np.array([transformer.inputs(row) for row in sampled.rows], np.float32).reshape(expected_NG.shape)


def _bits(value: float) -> bytes:
    """A value to compare: NaN equals NaN, and -0 differs from 0."""
    return b"" if value != value else struct.pack("<d", value)


_QUERIES, _WARM = 1_000, 20
_DOCUMENTS, _DISTINCT = 100, 5_000


def query_times(to: Format, bundle_url: str, out: str, *, raw: str | None, data: str) -> str:
    """The times of queries with an export; without raw rows those of the model alone.

    Raises:
        InputError: the model scores in a program of its own, and there are no raw rows to make features of.
    """
    bundle, manifest = load(bundle_url), storage.read_manifest(out) or {}
    with storage.scratch.directory() as folder, _one_core():
        for name in storage.listed_in(manifest):
            (folder / name).write_bytes(storage.read_verified(out, name, manifest))
        sampled = None
        if CODE in storage.listed_in(manifest):
            sampled = sample_raw(bundle, folder, raw_files_of(raw, data), _DISTINCT)
        reader = to.readers(folder)[0] if to.in_process else None
        if sampled is None and reader is None:
            raise InputError(f"measure: {to.kind} scores in a program of its own, and {out} has no raw rows to read")
        rows = _matrix(bundle, folder, data) if sampled is None else sampled.rows
        inputs = None if sampled is None else sampled.transformer.inputs
        with threadpool_limits(1):  # of the libraries that the reader has loaded
            features_Q, scores_Q = _query_seconds(rows, inputs, reader)
    parts = []
    if sampled is not None:
        parts = [f"raw rows to the model's features {_shown(features_Q)}"]
    if sampled is not None and reader is not None:
        parts.insert(0, f"raw rows to scores {_shown(features_Q + scores_Q)}")
    parts.append(f"features to scores {_shown(scores_Q)}" if reader else f"{to.kind} scores in a program of its own")
    return f"one query of {_DOCUMENTS} documents on one core, {_QUERIES:,} times: {'; '.join(parts)}"


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, to one core where the system can."""
    if not hasattr(os, "sched_setaffinity"):  # macOS
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _matrix(bundle: Bundle, folder: Path, data: str) -> NDArray[np.float32]:
    """The matrix of documents of a data set."""
    selection = select(Split(data=(data,)), labelled=False).serving(bundle.features, whose=bundle.url)
    names = [feature.name for feature in bundle.features]
    return features_in(folder).matrix(names, first_groups(selection, _DISTINCT).features_NF.numpy())


def _query_seconds(
    rows: Sequence[Any] | NDArray[np.float32],
    inputs: Callable[[Any], list[float]] | None,
    reader: MatrixScorer | None,
) -> NDArray[np.float64]:
    """Seconds [2, Q] to make the features of raw rows, if they are such, and to score them."""
    seconds = []
    for query in range(_WARM + _QUERIES):
        of_query = [rows[(query * _DOCUMENTS + i) % len(rows)] for i in range(_DOCUMENTS)]
        start = time.perf_counter()
        matrix_NG = np.asarray(of_query if inputs is None else [inputs(row) for row in of_query], np.float32)
        middle = time.perf_counter()
        if reader is not None:
            reader(matrix_NG)
        seconds.append((middle - start, time.perf_counter() - middle))
    return np.array(seconds[_WARM:]).T


def _shown(seconds_Q: NDArray[np.float64]) -> str:
    p50, p99 = np.percentile(seconds_Q * 1000, [50, 99])
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"
