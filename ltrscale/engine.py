"""Starting or joining Ray: the one place that decides which cluster the work of this process runs on."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ltrscale.errors import InputError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a relative path means the same in a worker as here
os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")  # of a notice of seconds, five are not to be lost

_ANSWER_S = 10.0


@contextmanager
def ray_cluster(cpus: int) -> Iterator[None]:
    """Ray while the block runs: the cluster this process is connected to, the one of RAY_ADDRESS, or one of our own.

    A cluster of our own ends with this process, however that ends.

    Args:
        cpus: logical CPUs of a cluster of our own, at least; they may be more than the machine has.

    Raises:
        InputError: no cluster answers at RAY_ADDRESS.
    """
    import ray  # here, for the many processes that never use Ray

    if ray.is_initialized():
        yield
        return
    if "RAY_ADDRESS" in os.environ:
        _check_answers(os.environ["RAY_ADDRESS"])
        _connect()
    else:
        _connect(
            address="local",
            num_cpus=max(cpus, os.cpu_count() or 1),
            include_dashboard=True,
            dashboard_host="127.0.0.1",
        )
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Check that something answers at host:port; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():  # `auto`, `ray://...`
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise InputError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); start one, or unset RAY_ADDRESS"
        ) from error


def _connect(**options: Any) -> None:
    """Connect to Ray, which leaves our output and our reaction to SIGTERM alone."""
    import ray

    before = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level="warning", **options)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
