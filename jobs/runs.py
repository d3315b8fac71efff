r"""List the runs below a directory, or compare two: settings that differ, time, documents per second, metrics.

python -m jobs.runs runs
python -m jobs.runs --compare "[runs/demo/seed-0/gbdt/model, runs/numbers]"
"""

from jobs.cli import Command, main
from ltrscale.workflows.listing import RunsJob

COMMAND = Command("runs", RunsJob, RunsJob.run, __doc__, flags="compare", argument="under")

if __name__ == "__main__":
    main(COMMAND)
