"""Pretrain an encoder on all documents of a split, without labels."""

from jobs.cli import main
from ltrscale.workflows.stages import PretrainJob

if __name__ == "__main__":
    main(PretrainJob, PretrainJob.run, "pretrain", __doc__)
