"""Evaluate bundles on the test split: metrics, outlier groups, significance, report."""

from jobs.cli import main
from ltrscale.workflows.stages import EvaluateJob

if __name__ == "__main__":
    main(EvaluateJob, EvaluateJob.run, "evaluate", __doc__)
