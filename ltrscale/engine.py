"""Starting or joining Ray: the one place that decides which cluster the work of this process runs on.

A cluster of our own is for this machine and this user: it listens on 127.0.0.1, asks for a token, and keeps its logs
and sockets in scratch. Its processes inherit our environment, and with it the keys of the object storage; nothing
hands keys to Ray, which would write them into its logs.
"""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ltrscale import ray_internals, storage
from ltrscale.errors import InputError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a relative path means the same in a worker as here
os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")  # of a notice of seconds, five are not to be lost

_ANSWER_S = 10.0
_SOCKET_PATH = 107
"""Bytes of the path of a Unix socket."""
_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path that Ray makes one at, below the scratch directory of a cluster."""


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
    if "RAY_ADDRESS" not in os.environ:
        with _own_cluster(max(cpus, os.cpu_count() or 1)):
            yield
        return
    _check_answers(os.environ["RAY_ADDRESS"])
    try:
        _connect()
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_cluster(cpus: int) -> Iterator[None]:
    """A cluster that only this machine can reach, and on it only processes that can read its token."""
    import ray

    with storage.scratch.directory(longest=_SOCKET_PATH - len(_SOCKET)) as folder:
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        environment = _environment(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=None,
            RAY_AUTH_TOKEN_PATH=str(token),
            TMPDIR=str(folder),  # Ray's processes leave sockets there when they are killed
            GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", loopback()),
        )
        with environment, ray_internals.only_this_machine(folder / "ray") as private:
            try:
                _connect(address="local", num_cpus=cpus, include_dashboard=True, dashboard_host="127.0.0.1", **private)
                yield
            finally:
                ray.shutdown()


@contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    """While the block runs, the environment has these values, and Ray goes by what it says of the token."""

    def change(to: Mapping[str, str | None]) -> None:
        for name, value in to.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        ray_internals.read_environment_again()

    before = {name: os.environ.get(name) for name in values}
    change(values)
    try:
        yield
    finally:
        change(before)


def loopback() -> str:
    """The name of the interface of 127.0.0.1."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


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
    """Connect to Ray, which leaves our output alone."""
    import ray

    with _sigterm_held():
        try:
            ray.init(log_to_driver=False, logging_level="warning", **options)
        except InputError:
            raise
        except Exception as error:  # Ray raises plain ones where a process of its own does not come up
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(f"Ray has not started ({first}); give the same command again") from error


@contextmanager
def _sigterm_held() -> Iterator[None]:
    """Hold a SIGTERM back until the block is over, whatever Ray would do about it.

    Ray forks. A signal that comes meanwhile is handled in the hooks of the fork, where Python drops what the handler
    raises, and the release of the lock that the hook was about: of logging's, for which the process then waits forever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    come: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: come.append(number))
    try:
        with ray_internals.sigterm_left_alone():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if come:
            signal.raise_signal(signal.SIGTERM)
