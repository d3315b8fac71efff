"""Measure speed and memory of the parts against well-known peers, as ratios in one run."""

from jobs.cli import main
from ltrscale.workflows.bench import BenchJob, bench

if __name__ == "__main__":
    main(BenchJob, bench, "bench", __doc__)
