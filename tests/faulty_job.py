"""jobs.pretrain with an error for the user on rank 1; run as `python -m faulty_job` with tests/ on the path."""

import os

from faulty_pretraining import FaultyPretraining

from jobs.cli import Command, main
from ltrscale.training.pretrain import PretrainJob

if __name__ == "__main__":
    with FaultyPretraining(os.environ["FAULTY_JOB"], raises=((2, 1, "input"),)).installed():
        main(Command("pretrain", lambda: (PretrainJob, PretrainJob.run), "A test."))
