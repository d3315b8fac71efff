"""Turn raw logs (LETOR text, CSV, Parquet) into a data set of query groups."""

from jobs.cli import main
from ltrscale.workflows.stages import PrepareJob

if __name__ == "__main__":
    main(PrepareJob, PrepareJob.run, "prepare", __doc__)
