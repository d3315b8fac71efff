"""Finetune a ranker on the labelled groups of a split."""

from jobs.cli import main
from ltrscale.workflows.stages import FinetuneJob, finetune_stage

if __name__ == "__main__":
    main(FinetuneJob, finetune_stage, "finetune", __doc__)
