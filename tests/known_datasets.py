"""Small data set directories with known groups, written without `prepare`."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.data.dataset.files import Counts, DataFile
from ltrscale.data.dataset.manifest import Feature, Manifest


@dataclass(frozen=True)
class Group:
    """One query group as written; labels are None if it is unlabelled."""

    period: str
    features: NDArray[np.float32]
    labels: NDArray[np.float32] | None
    weights: NDArray[np.float32] | None


@dataclass(frozen=True)
class KnownDataset:
    """A data set directory and its groups by gid."""

    url: str
    groups: dict[int, Group]

    @property
    def labelled(self) -> list[int]:
        return [gid for gid, group in self.groups.items() if group.labels is not None]


MakeDataset = Callable[..., KnownDataset]


@pytest.fixture(scope="session")
def make_dataset(tmp_path_factory: pytest.TempPathFactory) -> MakeDataset:
    """Writes a data set with group lengths `lengths[period][row group][group]`, one file per period."""

    def make(
        lengths: Mapping[str, Sequence[Sequence[int]]],
        *,
        features: Sequence[str] = ("a", "b", "c"),
        is_labelled: Callable[[int], bool] = lambda _: True,
        has_weights: Callable[[int], bool] | None = None,
        seed: int = 0,
        url: str = "",
    ) -> KnownDataset:
        rng = np.random.default_rng(seed)
        groups: dict[int, Group] = {}
        files = []
        url = url or str(tmp_path_factory.mktemp("data") / "set")
        with storage.Commit(url) as commit:
            for period, row_groups in lengths.items():
                counts = []
                with (
                    commit.file(f"period={period}/part-00000-{{hash}}.parquet") as path,
                    pq.ParquetWriter(path, _schema(has_weights is not None)) as writer,
                ):
                    for row_group in row_groups:
                        first = len(groups)
                        for n in row_group:
                            labels = rng.integers(0, 5, n).astype(np.float32) if is_labelled(len(groups)) else None
                            values = rng.normal(size=(n, len(features))).astype(np.float32)
                            weighted = has_weights is not None and has_weights(len(groups))
                            own = rng.random(n, dtype=np.float32) if weighted else None
                            groups[len(groups)] = Group(period, values, labels, own)
                        new = {gid: groups[gid] for gid in range(first, len(groups))}
                        writer.write_table(_table(new, has_weights is not None))
                        n_labelled = sum(group.labels is not None for group in new.values())
                        counts.append(Counts(len(row_group), sum(row_group), n_labelled))
                longest = max(itertools.chain.from_iterable(row_groups))
                files.append(
                    DataFile(**vars(commit.files[-1]), period=period, longest=longest, row_groups=tuple(counts))
                )
            manifest = Manifest(features=tuple(Feature(name=name) for name in features), files=tuple(files))
            commit.finish(manifest.model_dump(mode="json"))
        return KnownDataset(url, groups)

    return make


def _schema(weights: bool) -> pa.Schema:
    lists = pa.list_(pa.float32())
    fields = [("gid", pa.int64()), ("query_id", pa.string()), ("features", lists), ("labels", lists)]
    return pa.schema(fields + ([("weights", lists)] if weights else []))


def _table(groups: Mapping[int, Group], weights: bool) -> pa.Table:
    columns = {
        "gid": list(groups),
        "query_id": [f"q{gid}" for gid in groups],
        "features": [group.features.ravel() for group in groups.values()],
        "labels": [group.labels for group in groups.values()],
    }
    if weights:
        columns["weights"] = [group.weights for group in groups.values()]
    return pa.table(columns, schema=_schema(weights))
