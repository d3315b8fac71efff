"""Score periods of a data set with a bundle, each committed when it is done."""

from jobs.cli import main
from ltrscale.workflows.stages import ScoreJob, score_stage

if __name__ == "__main__":
    main(ScoreJob, score_stage, "score", __doc__)
