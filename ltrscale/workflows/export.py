"""Export of a tree bundle as LightGBM's native text, after a parity check."""

from ltrscale.bundle import load
from ltrscale.config import is_current, made_by
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.split import Split, Texts
from ltrscale.progress import log
from ltrscale.trees.export import ParityConfig, check_parity, publish
from ltrscale.workflows.origins import bundle_hashes, dataset_hashes
from ltrscale.workflows.runs import check_replaceable, run_stage


class ExportJob(ParityConfig):
    """Export a bundle of LightGBM trees as the library's own text, with a note on its features."""

    out: str
    """Directory of the export."""
    bundle: str
    """Bundle of one LightGBM model."""
    data: str
    """Data set directory on whose documents the scores are compared."""
    periods: Texts = ()
    """Periods `P` or ranges `A..B`, both ends included; empty for all."""


class _Identity(ParityConfig):
    """What an export depends on besides its inputs."""

    periods: Texts


@one_view()
def export_stage(job: ExportJob) -> None:
    """Compare scores, then publish; nothing is left where they are further apart than allowed.

    Raises:
        InputError: they are; as `ltrscale.trees.export.check_parity`.
    """
    split = Split(data=(job.data,), periods=job.periods)
    config = _Identity(rows=job.rows, tolerance=job.tolerance, periods=job.periods)
    inputs = dataset_hashes([split]) | bundle_hashes([job.bundle])
    if is_current(job.out, made_by("export", config, inputs)):
        log.info("export: %s is up to date", job.out)
        return
    check_replaceable(job.out, "export")
    files, parity = check_parity(load(job.bundle), split, config)  # before a run directory is begun
    run_stage("export", job, job.out, config, inputs, lambda origin, _: publish(files, parity, job.out, made_by=origin))
