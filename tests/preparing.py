"""The data set that `jobs.prepare` makes, without the record of a run."""

from ltrscale.config import made_by
from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob
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
