r"""List the runs below a directory, or compare two: settings that differ, time, documents per second, metrics.

After `make compare`, a list, and with `--compare "[runs/a, runs/b]"` two runs side by side:

  python -m jobs.runs runs
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.experiments.runs import RunsJob

    return RunsJob, RunsJob.run


COMMAND = Command("runs", _job, __doc__, flags="compare", argument="under")

if __name__ == "__main__":
    main(COMMAND)
