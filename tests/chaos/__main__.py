"""Run the jobs through random faults, and compare their outputs with those of an undisturbed run, byte by byte.

Chaos acts like a user: it runs the commands prepare, pretrain, finetune, tune, score, evaluate and weekly one after the
other, on a private S3 server (SeaweedFS behind a proxy, both on loopback), round after round until the minutes are
over. A reader looks at the model in service all the while, and must find a whole bundle that a gate has passed. Every
20 seconds it injects a fault: it kills a process of the job or stops it for a while; S3 is down, frozen, overloaded or
resets connections; the disk of TMPDIR is full; the same command runs a second time; or the tracking server hangs,
resets connections, answers 500 or is down, which may end no command. If another fault ends a command, chaos repeats
it. After each round it compares the data, weights, search, scores and metrics with those of an
undisturbed run of the same code, and checks that nothing is left over. The exit status is 0 only if everything held.

  python -m tests.chaos --set out=runs/chaos --set seed=1 --set minutes=10

If chaos is killed, the same command ends the processes that it had started and continues with the remaining minutes.
The undisturbed run is stored in `out` for all seeds, and repeated when the code changes. Filling a disk needs the right
to mount one.
"""

import sys

from jobs.cli import Command, Job, main


def _job() -> Job:
    from tests.chaos.chaos import ChaosJob, chaos

    return ChaosJob, lambda job: sys.exit(0 if chaos(job) else 1)


if __name__ == "__main__":
    main(Command("chaos", _job, __doc__, package="tests"))
