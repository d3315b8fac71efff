r"""Train a model once more on its training and validation groups together: the final model.

It learns for as many epochs, or grows as many trees, as validation has found best. Settings, splits and the bundle to
start from are those that the bundle records. After the example of `jobs.train_gbdt --help`, with the test periods too:

  python -m jobs.refit --set out=runs/final --set bundle=runs/trees \
      --set 'also={data: runs/demo/data, periods: 2026-W07..2026-W08}'
"""

from jobs.cli import Command, main, of_class

_KEYS = "out bundle also also.data also.periods also.labels workers.number workers.gpus workers.cpus fresh"
COMMAND = Command("refit", of_class("ltrscale.experiments.refit:RefitJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
