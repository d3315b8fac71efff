r"""Report which features solve the contrast of a pretrained bundle: its loss with each feature permuted in one view.

After `make compare`:

  python -m jobs.contrast --set out=runs/contrast \
      --set data=runs/demo/data --set periods=2026-W01..2026-W05 \
      --set bundle=runs/demo/seed-0/simclr_rank/pretrained
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.evaluation.measure.contrast import ContrastJob

    return ContrastJob, ContrastJob.run


COMMAND = Command("contrast", _job, __doc__)

if __name__ == "__main__":
    main(COMMAND)
