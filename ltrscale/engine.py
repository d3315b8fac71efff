"""Starting or joining Ray: which cluster the work of this process runs on, and how errors come back from there.

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
from ltrscale.errors import InputError, Stopped

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a relative path means the same in a worker as here
os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")  # of a notice of seconds, five are not to be lost

_ANSWER_S = 10.0
_LOOK_S = 1.0
_END_S = 15.0
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
def plain_errors(whose: str = "", remedy: str = "") -> Iterator[None]:
    """While the block gets results of Ray tasks and actors, their errors for the user are raised as themselves.

    Args:
        whose: the process whose end is an error for the user too, such as "log-7: the process that handled it".
        remedy: what to change if that process ran out of memory.

    Raises:
        InputError: a task raised it, or that process died as often as Ray starts it again.
    """
    from ray.exceptions import RayError, RayTaskError  # here, for the many processes that never use Ray

    try:
        yield
    except RayTaskError as error:
        if not isinstance(error.cause, InputError):
            raise
        message, _, _ = str(error.cause).partition(" Failed to apply UDF")  # Ray Data adds advice on its own retries
        raise type(error.cause)(message) from None
    except RayError as error:
        if not whose:
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{whose} ended several times ({first}); look for its end in Ray's log, and if it ran out of memory "
            f"{remedy}"
        ) from error


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
                with _ending_with_the_node():
                    yield
            finally:
                ray.shutdown()


_DIED = "Ray's processes on this machine have died; give the same command again"


class _NodeDied(BaseException):
    """Ends what the main thread does; no `except Exception` on the way is to keep it."""


@contextmanager
def _ending_with_the_node() -> Iterator[None]:
    """End the block when the only node of our cluster dies: all that it was to run would wait forever for another.

    Raises:
        InputError: the node has died, whatever the block made of that.
    """
    if threading.current_thread() is not threading.main_thread():  # it could not be ended
        yield
        return
    raylet = ray_internals.raylet()
    over, main_thread = threading.Event(), threading.get_ident()

    def end(*_: object) -> None:
        raise _NodeDied(_DIED)

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if raylet.poll() is not None and not over.is_set():  # in this order: it ends after the block, too
                signal.pthread_kill(main_thread, signal.SIGUSR1)
                over.wait(_END_S)  # if somebody kept it after all, it comes again

    before = signal.signal(signal.SIGUSR1, end)
    threading.Thread(target=watch, name="node", daemon=True).start()
    try:
        yield
    except (InputError, Stopped):
        raise
    except (Exception, _NodeDied) as error:
        if raylet.poll() is None:
            raise
        raise InputError(_DIED) from error
    finally:
        over.set()
        # a signal may be on its way still, and would end a process that does not expect it
        signal.signal(signal.SIGUSR1, before if raylet.poll() is None else signal.SIG_IGN)


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
