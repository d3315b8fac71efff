"""Run the jobs through random faults, and compare what they leave with an undisturbed run, byte by byte.

It plays a user: prepare, pretrain, finetune, tune, score and evaluate are given as commands, one after the other, on an
S3 server of its own (SeaweedFS behind a proxy, both on loopback), round after round until the minutes are over. Every
20 seconds something happens: a process of the job is killed or stopped for a while, S3 is down, frozen, overloaded or
cuts connections, the disk of TMPDIR is full, or the same command is given a second time. A command that a fault has
ended is given again as it is. At the end of each round the data, weights, search, scores and metrics are compared with
those of an undisturbed run of the same code, and nothing may be left over. Exit status 0 only where all of that held.

  python -m jobs.chaos --set out=runs/chaos --set seed=1 --set minutes=10

Killed at any time, the same command ends what it had started and goes on with the minutes that remain. The undisturbed
run is kept in `out` for all seeds, and made again when the code changes. To fill a disk takes the right to mount one.
"""

import sys

from jobs.chaos.chaos import ChaosJob, chaos
from jobs.cli import Command, main

COMMAND = Command("chaos", ChaosJob, lambda job: sys.exit(0 if chaos(job) else 1), __doc__)

if __name__ == "__main__":
    main(COMMAND)
