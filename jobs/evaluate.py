"""Evaluate bundles on the test split: metrics, outlier groups, significance, report."""

from jobs.cli import main
from ltrscale.workflows.stages import EvaluateJob, evaluate_stage

if __name__ == "__main__":
    main(EvaluateJob, evaluate_stage, "evaluate", __doc__)
