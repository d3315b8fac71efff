r"""Score periods of a data set with a bundle, and commit each period when it is finished.

After `make compare`:

  python -m jobs.score --set out=runs/scores --set periods=2026-W08 \
      --set data=runs/demo/data --set bundle=runs/demo/seed-0/simclr_rank/model
"""

from jobs.cli import Command, main, of_class

COMMAND = Command("score", of_class("ltrscale.scoring.score:ScoreJob"), __doc__)

if __name__ == "__main__":
    main(COMMAND)
