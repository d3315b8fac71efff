"""Search over the settings of a job: trees, pretraining, or finetuning; resumes where it was cut short."""

from jobs.cli import main
from ltrscale.workflows.tune import TuneJob, run_tune

if __name__ == "__main__":
    main(TuneJob, run_tune, "tune", __doc__)
