"""Measure the speed and memory of the parts against well-known peers, as ratios in one run.

Only two parts:

  python -m jobs.bench --set 'only=[losses, metrics]'
"""

from jobs.bench.bench import BenchJob, bench
from jobs.cli import Command, main

COMMAND = Command("bench", BenchJob, bench, __doc__)

if __name__ == "__main__":
    main(COMMAND)
