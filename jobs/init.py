"""Look at a log and write commented configs that run: prepare.yaml; with labels and times pipeline, study and weekly.

Uses of columns are guessed from names and values; name those that are guessed wrong:

  python -m jobs.init logs/shop.csv --out shop --set label=purchased
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.experiments.first.init import InitJob

    return InitJob, InitJob.run


COMMAND = Command("init", _job, __doc__, flags="out", argument="file")

if __name__ == "__main__":
    main(COMMAND)
