"""The check of an export: a reader of only its files must give the bundle's scores.

Raw rows are compared too: through the exported files, and through `prepare` and the bundle.

Shapes: N documents or rows, F raw features, Q1 = groups + 1 offsets, G columns of the matrix.
"""

import importlib.util
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle
from ltrscale.config import Strict
from ltrscale.data.dataset.manifest import Feature, Manifest, open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import first_groups, iterate
from ltrscale.errors import InputError
from ltrscale.ingest.assembly import completed
from ltrscale.ingest.inputs import PrepareConfig, raw_files
from ltrscale.ingest.items import Items, load_tables
from ltrscale.ingest.rows import RowBlock, concat, cut, keep
from ltrscale.ingest.source import File, Source
from ltrscale.ingest.tables import typed_rows
from ltrscale.progress import log
from ltrscale.serving import raw
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
from ltrscale.serving.onnx_graph import is_listwise

_DISTURBED = 0.02
_UNSEEN = (1 << 24) - 1


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
    """Categories among them that the model has never seen."""
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

    The transformer must agree with `prepare` on the first rows of `raw_urls`. Without a `tolerance`, a share of the
    largest score, the format's own one counts.

    Raises:
        InputError: scores differ by more than the tolerance; the program would refuse some documents; the bundle cannot
            be exported or has other features.
    """
    groups = _documents(bundle, split, rows, disturbed=to.missing == "nan")
    names = [feature.name for feature in bundle.features]
    manifests = [open_dataset(url).manifest for url in split.data]
    texts = {name: codes for manifest in manifests for name, codes in manifest.categories.items()}
    observed = Observed(texts, _negative(names, groups, manifests), partial(_occurring, bundle, split.data))
    files = write_export(to, bundle, observed)
    allowed = to.tolerance if tolerance is None else tolerance
    with storage.scratch.directory() as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        export = _Export(to, bundle, allowed, features_in(folder), to.readers(folder))
        matrix_NG = export.features.matrix(names, groups.features_NF.numpy())
        difference, largest = export.apart(groups, matrix_NG, "documents")
        from_raw = _from_raw(export, folder, raw_urls, rows) if raw.CODE in files else None
    return files, Parity(
        to=to.kind,
        documents=groups.n_documents,
        missing=int(groups.features_NF.isnan().sum()),
        unseen=int((groups.features_NF == _UNSEEN).sum()),
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
    return {**files, FEATURES_FILE: described, **raw.write_raw(bundle, [column.name for column in columns])}


class _Export(NamedTuple):
    """A bundle and the readers of its exported files."""

    to: Format
    bundle: Bundle
    tolerance: float
    features: ExportedFeatures
    readers: tuple[MatrixScorer, ...]

    def apart(self, groups: QueryGroups, matrix_NG: NDArray[np.float32], whose: str) -> tuple[float, float]:
        """Largest difference of a reader's scores from the bundle's, checked for tolerance, and the largest score."""
        bundle, tolerance = self.bundle, self.tolerance
        bundle_scores_N = bundle.scorer()(groups).double().numpy()
        reader_scores_RN = [self._scores(reader, groups, matrix_NG) for reader in self.readers]
        difference, largest = (
            float(np.abs(x).max(initial=0.0)) for x in (np.stack(reader_scores_RN) - bundle_scores_N, bundle_scores_N)
        )
        if not difference <= tolerance * max(1.0, largest):  # not `>`: a difference of NaN must not pass
            has_missing_F = groups.features_NF.isnan().any(0).tolist()
            incomplete = [
                feature.name for feature, has_missing in zip(bundle.features, has_missing_F, strict=True) if has_missing
            ]
            raise InputError(
                f"{bundle.url}: {self.to.kind} gives scores up to {difference:.3g} away from the bundle's on "
                f"{len(bundle_scores_N):,} {whose}, more than the tolerance of {tolerance:g}; nothing is published"
                + (_zeros_hint(incomplete) if self.to.missing == "zero" and incomplete else "")
            )
        return difference, largest

    def _scores(self, reader: MatrixScorer, groups: QueryGroups, matrix_NG: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores [N] from a reader; list by list if a document's score depends on its list."""
        bounds = groups.offsets_Q1.tolist() if is_listwise(self.bundle) else [0, len(matrix_NG)]
        return np.concatenate([np.zeros(0), *(reader(matrix_NG[a:b]) for a, b in pairwise(bounds) if b > a)])


def _from_raw(export: _Export, folder: Path, files: Sequence[str], rows: int) -> RawParity | None:
    """Compare the first raw rows of some files through the transformer; None without such rows."""
    module, names = transformer(folder), [column.name for column in export.features.columns]
    sampled = sample_raw(export.bundle, module, files, rows)
    if sampled is None:
        return None
    matrix_NG = _raw_matrix(sampled, module, names, export.bundle)
    difference, _ = export.apart(sampled.groups, matrix_NG, "raw rows")
    return RawParity(file=sampled.file, documents=len(sampled.rows), largest_difference=difference)


def _occurring(bundle: Bundle, data: tuple[str, ...], codes: FeatureCodes) -> FeatureCodes:
    """The codes that occur in some data sets; reading stops once all are found."""
    features = [feature for feature in bundle.features if feature.name in codes]
    missing = {feature.name: {*codes[feature.name]} for feature in features}
    selection = select(Split(data=data), labelled=False).serving(features, whose=bundle.url)
    for groups in iterate(selection):
        for feature, codes_N in zip(features, groups.features_NF.T, strict=True):
            missing[feature.name].difference_update(codes_N.unique().tolist())
        if not any(missing.values()):
            break
    return {name: {*codes[name]} - of_name for name, of_name in missing.items()}


def _negative(names: Sequence[str], groups: QueryGroups, manifests: Sequence[Manifest]) -> set[str]:
    """Features with values below 0 in these groups, or anywhere in the data by its summaries."""
    below = {
        name for name, has_negative in zip(names, (groups.features_NF < 0).any(0).tolist(), strict=True) if has_negative
    }
    ranges = [pair for m in manifests for pair in zip(m.features, m.summaries, strict=False)]  # some have no summaries
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
    categorical_F = torch.tensor([feature.kind == "categorical" for feature in bundle.features])
    lost_NF, new_NF = (torch.rand(features_NF.shape, generator=generator) < _DISTURBED for _ in range(2))
    features_NF[new_NF & categorical_F] = _UNSEEN
    features_NF[lost_NF] = torch.nan
    return replace(groups, features_NF=features_NF)


_MOST_BYTES = 1 << 30
_ROWS_AT_ONCE = 1 << 12


@dataclass(frozen=True)
class RawSample:
    """Raw rows of a file that `prepare` accepts, sorted by query, with their prepared features."""

    file: str
    lines_N: NDArray[np.int64]
    rows: list[Mapping[str, Any]]
    groups: QueryGroups
    """The bundle's features of the rows."""


def transformer(folder: Path) -> ModuleType:
    """Import the exported transformer of a folder, as a service does."""
    spec = importlib.util.spec_from_file_location("exported_raw_rows", folder / raw.CODE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample_raw(bundle: Bundle, module: ModuleType, files: Sequence[str], rows: int) -> RawSample | None:
    """The first rows of the first file with rows that `prepare` accepts for this bundle; None without one.

    Raises:
        InputError: a file is missing, damaged or lacks columns.
    """
    reading = raw.reading_raw(bundle, [feature.name for feature in bundle.features])
    assert reading is not None
    for url in files:
        with storage.scratch.directory() as folder:
            rows_read = _taken(url, *reading, rows)
            if rows_read is None:
                continue
            place_of_line = {int(line): place for place, line in enumerate(rows_read.lines_N)}
            kept: list[Any] = [None] * len(place_of_line)
            last = max(place_of_line)
            for line, row in typed_rows(url, _ROWS_AT_ONCE) or _text_rows(url, module, folder):
                if line in place_of_line:
                    kept[place_of_line[line]] = row
                if line >= last:
                    break
        coded = rows_read.query_ids_N.dictionary_encode().indices.to_numpy()
        order_N = np.argsort(coded, kind="stable")
        offsets_Q1 = np.concatenate([[0], np.cumsum(np.bincount(coded))])
        names = [feature.name for feature in reading[1]]
        columns = [names.index(feature.name) for feature in bundle.features]
        features_NF = torch.from_numpy(rows_read.features_NF[order_N][:, columns])
        groups = QueryGroups(features_NF, torch.from_numpy(offsets_Q1))
        found = [kept[i] for i in order_N.tolist()]
        if any(join["table"] is None for join in module.beside(str(Path(str(module.__file__)).parent)).recipe["joins"]):
            found = _with_tables(found, reading[0].source, reading[1])
        return RawSample(url, rows_read.lines_N[order_N], found, groups)
    return None


def _with_tables(rows: list[Any], source: Source, features: Sequence[Feature]) -> list[Any]:
    """Rows with the columns of joined tables, which a service supplies if a table is too large to export."""
    assert isinstance(source, Items)
    for table in load_tables(source.joins, source.columns, features):
        keys = pa.RecordBatch.from_pydict({name: [row.get(name) for row in rows] for name in table.join.key})
        joined = table(keys)[0].select([*table.join.columns]).to_pylist()
        rows = [{**row, **more} for row, more in zip(rows, joined, strict=True)]
    return rows


def raw_files_of(raw_rows: str | None, data: str) -> list[str]:
    """The files of raw rows to check: the named ones, or those of the data set that still exist.

    Raises:
        InputError: the named files are missing.
    """
    if raw_rows is not None:
        return storage.list_files(raw_rows)
    if not (urls := raw_files(open_dataset(data))):
        log.warning(
            "export: the raw rows of %s are not there any more; name some as raw, to check the transformer", data
        )
    return urls


def _raw_matrix(sampled: RawSample, module: ModuleType, names: Sequence[str], bundle: Bundle) -> NDArray[np.float32]:
    """The exported model's matrix of the rows, made by the transformer; each value must equal that of `prepare`."""
    places = [[feature.name for feature in bundle.features].index(name) for name in names]
    expected_NG = sampled.groups.features_NF.numpy()[:, places]
    for line, row, expected_G in zip(sampled.lines_N.tolist(), sampled.rows, expected_NG, strict=True):
        try:
            values = module.features(row)
        except module.RowError as error:
            raise InputError(
                f"{sampled.file}: row {line}: {raw.CODE} refuses it ({error}), prepare does not; nothing is published"
            ) from error
        for name, expected, value in zip(names, expected_G.tolist(), values, strict=True):
            if _bits(expected) != _bits(value):
                raise InputError(
                    f"{sampled.file}: row {line}: {raw.CODE} makes {name!r} {value!r}, prepare {expected!r}; "
                    "nothing is published"
                )
    return np.array([module.inputs(row) for row in sampled.rows], np.float32).reshape(len(sampled.rows), len(names))


def _bits(value: float) -> bytes:
    return b"" if value != value else struct.pack("<d", value)


def _taken(url: str, config: PrepareConfig, features: tuple[Feature, ...], rows: int) -> RowBlock | None:
    """The first rows of a file that `prepare` accepts; None without any."""
    read = config.source.open(features, first=url, encoders={})
    blocks: list[RowBlock] = []
    n = 0
    for block in read(File(url=url)):
        whole = completed(block, config, features)
        whole = keep(whole, np.asarray(~np.isinf(whole.features_NF).any(1)))
        blocks.append(cut(whole, 0, min(len(whole), rows - n)))
        n += len(blocks[-1])
        if n >= rows:
            break
    return concat(blocks) if n else None


def _text_rows(url: str, module: ModuleType, folder: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a text file with their line numbers, as the transformer reads them."""
    path = Path(url)
    if not path.exists():
        if storage.size(url) > _MOST_BYTES:
            raise InputError(f"{url}: more than 1 GB, and raw rows are copied here to be checked; name fewer as raw")
        path = folder / url.rpartition("/")[2]
        with storage.open_input(url) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    yield from module.numbered(path)
