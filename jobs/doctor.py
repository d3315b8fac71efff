r"""Look at this machine, a cluster and a store: what is well, what is not, and what to do about it.

Each line is `ok`, `warning` or `error`, with what was found and the remedy; the exit status is 1 if there is an error.
Looked at are: versions of packages, GPUs with NCCL, shared memory, the disk for spilled objects, ports that are open to
others without a token. If they are named, also a store (read, write, conditional put, delete, clock), a config, and
every node of a cluster, where a small job runs the same checks:

  python -m jobs.doctor --store s3://ltrscale/doctor \
      --set config=jobs/configs/results/pretrain-news.yaml

`--address http://HEAD:8265` names a cluster; by default it is the one of RAY_ADDRESS or RAY_API_SERVER_ADDRESS. The
store is then tried from its nodes, with the keys that they have.
"""

import sys

from jobs.cli import Command, Job, main, shipped
from jobs.verbs import command


def _job() -> Job:
    from ltrscale.runtime.doctor import DoctorConfig, doctor

    def run(config: DoctorConfig) -> None:
        if config.config is not None:
            config = config.replace(config=shipped(config.config))
        sys.exit(doctor(config, lambda name: command(name).config))

    return DoctorConfig, run


COMMAND = Command("doctor", _job, __doc__, flags="address store")

if __name__ == "__main__":
    main(COMMAND)
