"""Measure speed and memory of the parts against well-known peers, as ratios in one run."""

from jobs.bench.bench import BenchJob, bench
from jobs.cli import main

if __name__ == "__main__":
    main(BenchJob, bench, "bench", __doc__)
