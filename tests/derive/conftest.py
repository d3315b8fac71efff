"""Small data sets with known groups, and readers of a data set's groups."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from known_datasets import make_dataset

from ltrscale import storage
from ltrscale.arrays import offsets
from ltrscale.data.dataset.manifest import Dataset, Feature, FeatureSummary, Manifest, open_dataset
from ltrscale.data.dataset.summaries import LabelCounts
from ltrscale.data.dataset.writer import DatasetWriter
from ltrscale.derive.relabel import RelabelConfig, RelabelJob
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.derive.step import Changes, RelabelStep, StepStart

__all__ = ["apply", "make_block", "make_dataset", "rows_of", "write"]

Row = Mapping[str, Any]
Write = Callable[..., str]
Relabel = Callable[..., str]

_LISTS = ("labels", "relevance", "positions", "clicks", "weights", "gains")


@pytest.fixture
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes rows as a data set directory.

    A row has `labels` (or None), `features` [L][F], and optionally query_id, period, doc_ids, meta_* and
    the lists with one number per document.
    """

    def made(rows: Sequence[Row], *, row_group_bytes: int = 8 << 20, file_bytes: int = 256 << 20) -> str:
        url = str(tmp_path_factory.mktemp("data") / "set")
        features = tuple(Feature(name=name) for name in ("bm25", "age", "id"))
        types = {name: pa.list_(pa.float32()) for name in ("features", *_LISTS)} | {"doc_ids": pa.list_(pa.string())}
        names = dict.fromkeys(["gid", "query_id", *(name for row in rows for name in row if name != "period")])
        filled = [{"gid": gid, "query_id": f"q{gid}", "period": "all", **row} for gid, row in enumerate(rows)]
        labels = LabelCounts()
        labels.add(np.array([y for row in rows for y in row["labels"] or ()], np.float32))
        with storage.Commit(url) as commit:
            writer = DatasetWriter(
                commit, n_features=len(features), row_group_bytes=row_group_bytes, file_bytes=file_bytes
            )
            for period in dict.fromkeys(row["period"] for row in filled):
                own = [row for row in filled if row["period"] == period]
                flat = {"features": [np.ravel(row["features"]).tolist() for row in own]}
                columns = {name: [row.get(name) for row in own] for name in names} | flat
                writer.add(period, pa.table({n: pa.array(v, types.get(n)) for n, v in columns.items()}))
            manifest = Manifest(features=features, files=writer.close(), label_counts=labels.counts())
            commit.finish(manifest.model_dump(mode="json"))
        return url

    return made


@pytest.fixture
def apply(tmp_path_factory: pytest.TempPathFactory) -> Relabel:
    """Applies steps, given as plain values, to a data set directory; returns the new one's URL."""

    def applied(url: str, *steps: Mapping[str, Any], seed: int = 0) -> str:
        out = str(tmp_path_factory.mktemp("relabelled") / "set")
        config = RelabelConfig.model_validate({"steps": steps, "seed": seed})
        RelabelJob(relabel=config, data=url, out=out).work({"stage": "relabel"}, lambda _: None)
        return out

    return applied


@pytest.fixture(scope="session")
def run_step() -> Callable[..., list[tuple[GroupBlock, Changes]]]:
    """Runs one step on a block of `make_block`, whose features all have the standard deviation 10."""
    summary = FeatureSummary(missing=0, minimum=0.0, maximum=1.0, mean=0.0, std=10.0, unique_in_group=0.5)
    features = tuple(Feature(name=name) for name in ("bm25", "age", "id"))
    dataset = Dataset("data", Manifest(features=features, files=(), summaries=(summary,) * 3))

    def run(step: RelabelStep, block: GroupBlock, seed: int = 0, span: int = 1_000_000) -> Any:
        return list(step.transform(StepStart(dataset, seed, lambda: iter([block]), span))(block))

    return run


@pytest.fixture(scope="session")
def rows_of() -> Callable[[str], list[dict[str, Any]]]:
    """Reads all groups of a data set as plain rows with their period, in the order of its files."""

    def read(url: str) -> list[dict[str, Any]]:
        manifest = open_dataset(url).manifest
        shape = (-1, len(manifest.features))
        return [
            {**row, "period": file.period, "features": np.reshape(row["features"], shape).tolist()}
            for file in manifest.files
            for row in pq.ParquetFile(f"{url}/{file.path}").read().to_pylist()
        ]

    return read


@pytest.fixture(scope="session")
def make_block() -> Callable[..., GroupBlock]:
    """Makes a block of groups from lists of labels, None for an unlabelled group; other columns work in the same way.

    By default, the features of document n of the block are n, 10 n and 100 n.
    """

    def dense(lists: Sequence[Sequence[float] | None], lengths_Q: Sequence[int]) -> np.ndarray:
        whole = [[np.nan] * n if values is None else list(values) for values, n in zip(lists, lengths_Q, strict=True)]
        return np.concatenate(whole).astype(np.float32)

    def made(labels: Sequence[Sequence[float] | None], *, lengths: Sequence[int] = (), **columns: Any) -> GroupBlock:
        lengths_Q = np.array(lengths or [len(values or ()) for values in labels])
        numbers_N = np.arange(lengths_Q.sum(), dtype=np.float32)
        features_NF = columns.pop("features", numbers_N[:, None] * np.array([1, 10, 100]))
        return GroupBlock(
            period="all",
            keys_Q=np.arange(len(labels)),
            offsets_Q1=offsets(lengths_Q),
            features_NF=np.asarray(features_NF, np.float32),
            columns_N={n: dense(lists, lengths_Q.tolist()) for n, lists in {"labels": labels, **columns}.items()},
            rows_Q=pa.table({"query_id": [f"q{q}" for q in range(len(labels))]}),
            doc_ids_N=None,
        )

    return made
