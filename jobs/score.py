"""Score periods of a data set with a bundle, each committed when it is done."""

from jobs.cli import main
from ltrscale.workflows.stages import ScoreJob

if __name__ == "__main__":
    main(ScoreJob, ScoreJob.run, "score", __doc__)
