r"""Erase documents or query groups from a data set by their ids, and name what has learnt from them.

After `make compare`, the query groups whose ids are in a file:

  python -m jobs.erase --set data=runs/demo/data --set ids=ids.txt \
      --set under=runs
"""

from jobs.cli import Command, main, of_class

COMMAND = Command("erase", of_class("ltrscale.derive.erase:EraseJob"), __doc__)

if __name__ == "__main__":
    main(COMMAND)
