r"""Run a job on a Ray cluster: submit it through the dashboard, show its log, and exit with its status.

What follows `--` is the job and its arguments, as after `python -m jobs.`; its config is checked here first. For a
cluster on this machine, which `eval "$(python cluster/local.py start)"` starts and names in the environment:

  python -m jobs.submit -- pretrain \
      --config jobs/configs/start/distributed-dev.yaml \
      --set out=s3://ltrscale/runs/submitted --workers 2

`--address http://HEAD:8265` names another one. Ctrl-C stops following, not the job: the same command follows it again,
`--action stop` before the `--` stops it, and `--action status` shows its attempts. If the job has ended, the same
command is a new attempt, which resumes.

A copy of what git tracks in the checkout is sent along, without data sets and what .rayignore names, so the nodes need
only the installed packages. S3 keys do not travel: the nodes have them. docs/operating.md explains more.
"""

import sys
from typing import TYPE_CHECKING

from jobs.cli import Command, Job, main, read_command
from jobs.verbs import command

if TYPE_CHECKING:
    from ltrscale.runtime.submission import SubmitConfig


def run(config: "SubmitConfig") -> None:
    """Submit, with the job's own config checked and hashed."""
    from ltrscale.origin import digest
    from ltrscale.runtime.submission import relative_places, submission, submit

    settings = "\n".join(config.command)
    files: list[str] = []
    places: dict[str, str] = {}
    if config.command and config.check:
        job, files = read_command(command(config.command[0]), config.command[1:])
        settings, places = digest(job), relative_places(job)
    sys.exit(submit(config, submission(config, digest(settings), files, places)))


def _job() -> Job:
    from ltrscale.runtime.submission import SubmitConfig

    return SubmitConfig, run


COMMAND = Command("submit", _job, __doc__, flags="address action id", argument="command")

if __name__ == "__main__":
    main(COMMAND)
