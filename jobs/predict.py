r"""Rank the items of raw rows, such as next week's log, with a bundle; the rows need no labels.

The bundle knows how its training data were read, so that new rows need no column mapping:

  python -m jobs.predict --bundle models/ranker --inputs next_week.parquet \
      --out predictions/next_week

What the rows have that training had not is said, feature by feature; with
`--set refuse=true` nothing is then ranked, and the exit status is 3. With `--explain` a table
in `predictions/next_week-explained` says why the first item of each query is first.
"""

from jobs.cli import Command, main, of_class

_KEYS = "out bundle inputs inputs.0.path inputs.0.period source sort meta max_rejected refuse add explain ray workers"
COMMAND = Command("predict", of_class("ltrscale.scoring.predict:PredictJob"), __doc__, _KEYS, flags="bundle inputs out")

if __name__ == "__main__":
    main(COMMAND)
