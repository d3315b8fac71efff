"""Simulate or clean labels: make a data set directory with other labels from one that jobs.prepare made."""

from jobs.cli import main
from ltrscale.workflows.stages import RelabelJob

if __name__ == "__main__":
    main(RelabelJob, RelabelJob.run, "relabel", __doc__)
