"""A process with two workers on a cluster of its own, which write down who listens where, and go on until it is killed.

python own_cluster.py FILE
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from ltrscale.launch.start import launch
from ltrscale.launch.workers import Context, WorkersConfig


def listening(root: int) -> list[tuple[str, int, str]]:
    """Address, port and command of whatever listens, of a process and all that it has started."""
    import psutil  # which Ray brings along

    parent = psutil.Process(root)
    return [
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port, " ".join(process.cmdline())[:100])
        for process in [parent, *parent.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def work(arguments: Mapping[str, Any], context: Context) -> None:  # noqa: ARG001
    """What each worker does."""
    import psutil  # which Ray brings along

    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        driver = psutil.Process(arguments["driver"])
        processes = [driver, *driver.children(recursive=True)]
        node = ray._private.worker._global_node
        found = {
            "processes": [[process.pid, " ".join(process.cmdline())[:100]] for process in processes],
            "listening": listening(driver.pid),
            "dashboard": node.webui_url,
            "gcs": node.gcs_address,
            "session": node.get_session_dir_path(),
            "token": os.environ["RAY_AUTH_TOKEN_PATH"],
        }
        file = Path(arguments["file"])
        file.with_suffix(".part").write_text(json.dumps(found))
        file.with_suffix(".part").rename(file)
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.1)


if __name__ == "__main__":
    given = {"driver": os.getpid(), "file": sys.argv[1]}
    launch(work, given, workers=WorkersConfig(number=2), report=lambda _: None)
