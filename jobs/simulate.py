r"""Make the log of a news portal with any number of lists, hour by hour, to try what grows with them.

35 million lists of ten weeks, about 5 GB, and the day that follows:

  python -m jobs.simulate --ray --set out=log --set log.lists=35000000
  python -m jobs.simulate --ray --set out=day --set log.lists=500000 \
      --set log.days=1 --set log.first_day=2026-03-16
"""

from jobs.cli import Command, main, of_class

COMMAND = Command("simulate", of_class("ltrscale.simulate.portal:PortalLog"), __doc__)

if __name__ == "__main__":
    main(COMMAND)
