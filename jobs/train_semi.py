"""Train trees on labelled groups with the help of the others: principal components, pseudo-labels, or both."""

from jobs.cli import main
from ltrscale.workflows.tree_stages import SemiJob

if __name__ == "__main__":
    main(SemiJob, SemiJob.run, "train_semi", __doc__)
