"""Train LightGBM LambdaRank on the labelled groups of a split."""

from jobs.cli import main
from ltrscale.workflows.tree_stages import GBDTJob

if __name__ == "__main__":
    main(GBDTJob, GBDTJob.run, "train_gbdt", __doc__)
