"""Pretrain an encoder on all documents of a split, without labels."""

from jobs.cli import main
from ltrscale.workflows.stages import PretrainJob, pretrain_stage

if __name__ == "__main__":
    main(PretrainJob, pretrain_stage, "pretrain", __doc__)
