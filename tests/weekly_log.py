"""A small data set of query groups by period that tests choose row by row."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.data.dataset.files import Counts, DataFile
from ltrscale.data.dataset.manifest import Feature, Manifest


@dataclass(frozen=True)
class Row:
    """A query group; labels are None if it has none."""

    period: str
    documents: Sequence[Sequence[float]]
    labels: Sequence[float] | None
    device: str = "web"


def write_log(url: str, rows: Sequence[Row], features: Sequence[Feature], *, row_group: int, file: int = 10**9) -> str:
    """Commit rows, in their order within each period, as files of so many groups; returns the URL."""
    files, first, lists = [], 0, pa.list_(pa.float32())
    with storage.Commit(url) as commit:
        for period, of_period in itertools.groupby(sorted(rows, key=lambda row: row.period), lambda row: row.period):
            every = list(of_period)
            for groups in (every[i : i + file] for i in range(0, len(every), file)):
                columns: dict[str, Any] = {
                    "gid": pa.array(range(first, first + len(groups)), pa.int64()),
                    "query_id": [f"q{first + i}" for i in range(len(groups))],
                    "features": pa.array([[x for d in row.documents for x in d] for row in groups], lists),
                    "labels": pa.array([row.labels for row in groups], lists),
                    "meta_device": [row.device for row in groups],
                }
                first += len(groups)
                with commit.file(f"period={period}/part-{first:05d}-{{hash}}.parquet") as path:
                    pq.write_table(pa.table(columns), path, row_group_size=row_group)
                parts = [groups[i : i + row_group] for i in range(0, len(groups), row_group)]
                counts = [_counts(part) for part in parts]
                longest = max(len(row.documents) for row in groups)
                files.append(
                    DataFile(**vars(commit.files[-1]), period=period, longest=longest, row_groups=tuple(counts))
                )
        commit.finish(Manifest(features=tuple(features), files=tuple(files)).model_dump(mode="json"))
    return url


def _counts(rows: Sequence[Row]) -> Counts:
    labelled = sum(row.labels is not None for row in rows)
    return Counts(len(rows), sum(len(row.documents) for row in rows), labelled)
