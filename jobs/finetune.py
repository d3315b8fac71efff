"""Finetune a ranker on the labelled groups of a split."""

from jobs.cli import main
from ltrscale.workflows.stages import FinetuneJob

if __name__ == "__main__":
    main(FinetuneJob, FinetuneJob.run, "finetune", __doc__)
