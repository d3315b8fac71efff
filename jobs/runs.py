r"""List the runs below a directory, or compare two: settings that differ, time, documents per second, metrics.

After `make compare`, a list, and with `--compare "[runs/a, runs/b]"` two runs side by side:

  python -m jobs.runs runs
"""

from jobs.cli import Command, main, of_class

COMMAND = Command("runs", of_class("ltrscale.experiments.runs:RunsJob"), __doc__, flags="compare", argument="under")

if __name__ == "__main__":
    main(COMMAND)
