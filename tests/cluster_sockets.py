"""A process that starts its own cluster and two workers, records all listening sockets, and runs until it is killed.

python cluster_sockets.py FILE
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from ltrscale.runtime.launch import launch
from ltrscale.runtime.workers import WorkerContext, WorkersConfig


def listening_sockets(root: int) -> list[tuple[str, int, str]]:
    """Address, port and command of every listening socket of a process and its descendants."""
    import psutil  # which Ray brings along

    parent = psutil.Process(root)
    return [
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port, " ".join(process.cmdline()))
        for process in [parent, *parent.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


@dataclass(frozen=True)
class EndlessWorker:
    """The work of each worker."""

    driver_pid: int
    file: Path

    def __call__(self, context: WorkerContext) -> None:  # noqa: ARG002
        """Record the listening sockets once, and run until the process is killed."""
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            write_sockets(self.driver_pid, self.file)
        while True:
            dist.all_reduce(torch.ones(1))
            time.sleep(0.1)


def write_sockets(driver_pid: int, file: Path) -> None:
    """Write the listening sockets of all processes of the cluster, and where its files are."""
    import psutil  # which Ray brings along

    driver = psutil.Process(driver_pid)
    processes = [driver, *driver.children(recursive=True)]
    node = ray._private.worker._global_node
    found = {
        "processes": [[process.pid, " ".join(process.cmdline())] for process in processes],
        "listening": listening_sockets(driver.pid),
        "gcs": node.gcs_address,
        "session": node.get_session_dir_path(),
        "token": os.environ["RAY_AUTH_TOKEN_PATH"],
    }
    file.with_suffix(".part").write_text(json.dumps(found))
    file.with_suffix(".part").rename(file)


if __name__ == "__main__":
    launch(EndlessWorker(os.getpid(), Path(sys.argv[1])), workers=WorkersConfig(number=2), report=lambda _: None)
