r"""Erase documents or query groups from a data set by their ids, and name what has learnt from them.

After `make compare`, the query groups whose ids are in a file:

  python -m jobs.erase --set data=runs/demo/data --set ids=ids.txt \
      --set under=runs
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.derive.erase import EraseJob

    return EraseJob, EraseJob.run


COMMAND = Command("erase", _job, __doc__)

if __name__ == "__main__":
    main(COMMAND)
