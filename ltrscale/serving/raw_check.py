"""The check of a transformer of raw rows: rows go through the exported files, and through `prepare` and the bundle.

Shapes: N rows, F features of the bundle, Q1 = groups + 1 offsets.
"""

import importlib.util
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature, open_dataset
from ltrscale.data.dataset.origin import inputs_of
from ltrscale.errors import InputError, UnavailableError
from ltrscale.ingest.assembly import completed
from ltrscale.ingest.inputs import InputFiles, PrepareConfig, list_inputs
from ltrscale.ingest.rows import RowBlock, concat, cut, keep
from ltrscale.ingest.source import File
from ltrscale.ingest.tables import parquet_schema, read_parquet
from ltrscale.progress import log
from ltrscale.serving import raw

_MOST_BYTES = 1 << 30
_BATCH = 1 << 12


@dataclass(frozen=True)
class RawSample:
    """Raw rows of a file that `prepare` takes, sorted by their queries, with what it makes of them."""

    file: str
    lines_N: NDArray[np.int64]
    rows: list[Mapping[str, Any]]
    groups: QueryGroups
    """The features of the bundle."""

    @property
    def queries(self) -> list[list[Mapping[str, Any]]]:
        """The rows of each query."""
        offsets = self.groups.offsets_Q1.tolist()
        return [self.rows[start:stop] for start, stop in pairwise(offsets)]


def transformer(folder: Path) -> ModuleType:
    """The exported transformer of a folder, as a service imports it."""
    spec = importlib.util.spec_from_file_location("exported_raw_rows", folder / raw.CODE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample(bundle: Bundle, module: ModuleType, files: Sequence[str], rows: int) -> RawSample | None:
    """The first rows of the first file that has some which `prepare` takes for this bundle; None where none does.

    Args:
        bundle: whose features are read.
        module: the exported transformer, which reads text files.
        files: URLs.
        rows: the most rows.

    Raises:
        InputError: a file is missing, damaged or lacks columns.
    """
    found = raw.reading_raw(bundle, [feature.name for feature in bundle.features])
    assert found is not None
    for url in files:
        with storage.scratch.directory() as folder:
            taken = _taken(url, *found, rows)
            if taken is None:
                continue
            wanted = {int(line): place for place, line in enumerate(taken.lines_N)}
            kept: list[Any] = [None] * len(wanted)
            for line, row in _numbered(url, module, folder, max(wanted)):
                if line in wanted:
                    kept[wanted[line]] = row
        coded = taken.query_ids_N.dictionary_encode().indices.to_numpy()
        order_N = np.argsort(coded, kind="stable")
        offsets_Q1 = np.concatenate([[0], np.cumsum(np.bincount(coded))])
        features_NF = torch.from_numpy(_by_bundle(taken, found[1], bundle)[order_N])
        groups = QueryGroups(features_NF, torch.from_numpy(offsets_Q1))
        return RawSample(url, taken.lines_N[order_N], [kept[i] for i in order_N.tolist()], groups)
    return None


def raw_files_of(raw_rows: str | None, data: str) -> list[str]:
    """The files of raw rows to check: those that are named or, as far as they are there, those that made the data set.

    Raises:
        InputError: the named ones are missing.
    """
    if raw_rows is not None:
        return storage.list_files(raw_rows)
    there = []
    for entry in inputs_of(open_dataset(data)):
        try:
            there += [file.url for file in list_inputs([validate(InputFiles, entry, data)])]
        except UnavailableError:
            raise
        except InputError:
            continue
    if not there:
        log.warning(
            "export: the raw rows of %s are not there any more; name some as raw, to check the transformer", data
        )
    return there


def matrix(sampled: RawSample, module: ModuleType, names: Sequence[str], bundle: Bundle) -> NDArray[np.float32]:
    """The matrix of the exported model that the transformer makes of the rows.

    Raises:
        InputError: a value is not that of `prepare`, to the bit, or a row is refused; names it.
    """
    places = [[feature.name for feature in bundle.features].index(name) for name in names]
    expected_NG = sampled.groups.features_NF.numpy()[:, places]
    for line, row, expected_G in zip(sampled.lines_N.tolist(), sampled.rows, expected_NG, strict=True):
        try:
            found = module.features(row)
        except module.RowError as error:
            raise InputError(
                f"{sampled.file}: row {line}: {raw.CODE} refuses it ({error}), prepare does not; nothing is published"
            ) from error
        for name, ours, theirs in zip(names, expected_G.tolist(), found, strict=True):
            if _bits(ours) != _bits(theirs):
                raise InputError(
                    f"{sampled.file}: row {line}: {raw.CODE} makes {name!r} {theirs!r}, prepare {ours!r}; "
                    "nothing is published"
                )
    return np.array([module.inputs(row) for row in sampled.rows], np.float32).reshape(len(sampled.rows), len(names))


def _bits(value: float) -> bytes:
    return b"" if value != value else struct.pack("<d", value)


def _taken(url: str, config: PrepareConfig, features: tuple[Feature, ...], rows: int) -> RowBlock | None:
    """The first rows of a file that `prepare` takes; None if it takes none."""
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


def _by_bundle(block: RowBlock, features: Sequence[Feature], bundle: Bundle) -> NDArray[np.float32]:
    names = [feature.name for feature in features]
    return block.features_NF[:, [names.index(feature.name) for feature in bundle.features]]


def _numbered(url: str, module: ModuleType, folder: Path, last: int) -> Iterator[tuple[int, Any]]:
    """The rows of a file with their line or row numbers, up to the last that is wanted."""
    if url.endswith(".parquet"):
        for batch in read_parquet(url, parquet_schema(url).names, _BATCH):
            yield from zip(batch.lines_N.tolist(), batch.rows.to_pylist(), strict=True)
            if int(batch.lines_N[-1]) >= last:
                return
        return
    path = Path(url)
    if not path.exists():
        if storage.size(url) > _MOST_BYTES:
            raise InputError(f"{url}: more than 1 GB, and raw rows are copied here to be checked; name fewer as raw")
        path = folder / url.rpartition("/")[2]
        with storage.open_input(url) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    yield from module.numbered(path)
