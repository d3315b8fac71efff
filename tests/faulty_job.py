"""jobs.pretrain, in which rank 1 raises what a user is to read; `python -m faulty_job` with this folder on the path."""

import os

from victims import Watched

from jobs.cli import Command, main
from ltrscale.training import pretrain
from ltrscale.workflows.stages import PretrainJob, pretrain_stage

if __name__ == "__main__":
    pretrain.pretrain_worker = Watched(os.environ["FAULTY_JOB"], raises=((2, 1, "input"),))
    main(Command("pretrain", PretrainJob, pretrain_stage, "A test."))
