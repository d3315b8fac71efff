"""Train LightGBM LambdaRank on the labelled groups of a split."""

from jobs.cli import main
from ltrscale.workflows.stages import GBDTJob, gbdt_stage

if __name__ == "__main__":
    main(GBDTJob, gbdt_stage, "train_gbdt", __doc__)
