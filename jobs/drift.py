r"""Report metrics by period after the end of training, the drift of features and scores, and whether it predicted loss.

It reads an evaluation that was sliced by period (`evaluate.slice_by=[period]`), with its bundles and data sets.

After the example of `python -m jobs.evaluate --help` with `--set 'evaluate.slice_by=[period]'`:

  python -m jobs.drift --set evaluation=runs/report --set out=runs/drift
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.evaluation.weeks.decay import DriftJob

    return DriftJob, DriftJob.run


COMMAND = Command("drift", _job, __doc__)

if __name__ == "__main__":
    main(COMMAND)
