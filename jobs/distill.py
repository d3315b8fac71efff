"""Distil a teacher into trees and a pointwise network: score, train students, evaluate, compare, export.

Steps whose output is committed with the same config and inputs are skipped.
"""

from jobs.cli import main
from ltrscale.workflows.distill import DistillJob, run_distill

if __name__ == "__main__":
    main(DistillJob, run_distill, "distill", __doc__)
