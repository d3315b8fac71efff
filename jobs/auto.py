r"""The best ranker of a data set by one command, in a budget of minutes.

Measures the log, tunes trees, trains networks from scratch and pretrained where that can pay, blends all, judges once
on test, and lets the ranker learn once more from all labels. The leaderboard is OUT/leaderboard/report.md.

  python -m jobs.auto --data runs/data --out runs/auto --budget quick
  python -m jobs.auto --data runs/data --out runs/auto --budget 90
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out data budget splits.train.periods splits.train.relevant_groups splits.validation.periods splits.test.periods
evaluate.ndcg_at evaluate.slices refit seed workers.number
"""
COMMAND = Command("auto", of_class("ltrscale.experiments.auto.auto:AutoJob"), __doc__, _KEYS, flags="data out budget")

if __name__ == "__main__":
    main(COMMAND)
