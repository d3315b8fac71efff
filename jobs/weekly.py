r"""Add the rows of a new period, train again, and put the new model into service, unless the old one must stay.

The new rows are compared with those of training before they join the data set. A candidate learns from newer periods
than the model in service, and both are judged on periods that neither has seen. The exit status is 0 if the candidate
is in service then, and 3 if the rows or the candidate are refused, with a line for each reason. The same command goes
on where it was stopped, and does nothing if the week is done.

With the config that `jobs.init` writes; with --dry-run it says what it would do, and --rollback puts the model before
the present one back into service:

  python -m jobs.weekly --config jobs/configs/start/weekly.yaml --inputs W12.csv
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out pipeline method inputs production splits.train.periods splits.validation.periods splits.test.periods
max_rejected bounds.refuse bounds.margin bounds.groups bounds.drifted bounds.feature_psi bounds.moving
bounds.expected bounds.score_psi refit export registry.name registry.store rollback dry_run ray
"""
COMMAND = Command("weekly", of_class("ltrscale.experiments.weekly:WeeklyJob"), __doc__, _KEYS, flags="inputs")

if __name__ == "__main__":
    main(COMMAND)
