"""Measure the speed and memory of the parts against well-known peers, as ratios in one run.

Only two parts:

  python -m jobs.bench --set 'only=[losses, metrics]'
"""

from jobs.cli import Command, main, of_class

COMMAND = Command("bench", of_class("jobs.bench.bench:BenchJob"), __doc__)

if __name__ == "__main__":
    main(COMMAND)
