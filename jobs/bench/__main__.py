"""Measure the speed and memory of the parts against well-known peers, as ratios in one run.

Only two parts:

  python -m jobs.bench --set 'only=[losses, metrics]'
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from jobs.bench.bench import BenchJob, bench

    return BenchJob, bench


COMMAND = Command("bench", _job, __doc__)

if __name__ == "__main__":
    main(COMMAND)
