"""Train a stack: LightGBM over the scores of several models, which score training groups out of fold."""

from jobs.cli import main
from ltrscale.workflows.stack import StackJob, run_stack

if __name__ == "__main__":
    main(StackJob, run_stack, "stack", __doc__)
