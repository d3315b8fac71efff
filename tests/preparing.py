"""The data set that `jobs.prepare` makes, without the record of a run, its rows and its quarantine."""

from typing import Any

import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.origin import made_by
from ltrscale.progress import Report


def prepare(
    config: PrepareConfig,
    out: str,
    *,
    ray: bool = False,
    report: Report = lambda _: None,
    job: type[PrepareJob] = PrepareJob,
) -> Dataset:
    preparing = job(out=out, prepare=config, ray=ray)
    origin = made_by(preparing.stage, preparing.identity(), preparing.inputs())
    if not preparing.is_done(origin):
        preparing.work(origin, report)
    return open_dataset(out)


def rows_of(dataset: Dataset) -> list[dict[str, Any]]:
    """All groups with their period, file by file."""
    return [
        {**row, "period": file.period}
        for file in dataset.manifest.files
        for row in pq.ParquetFile(storage.join(dataset.url, file.path)).read().to_pylist()
    ]


def rejections_of(dataset: Dataset) -> list[dict[str, Any]]:
    """The rows of the quarantine."""
    tables = [pq.read_table(storage.join(dataset.url, name)) for name in dataset.manifest.quarantine]
    return [row for table in tables for row in table.to_pylist()]


def rejected(dataset: Dataset) -> list[tuple[int, str, str]]:
    """Line, rule and finding of each rejection."""
    return [(row["line"], row["rule"], row["found"]) for row in rejections_of(dataset)]
