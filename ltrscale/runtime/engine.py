"""Starting or joining Ray: the cluster that runs the work of this process, and how its errors come back.

Our own cluster serves this machine and this user only: it listens on 127.0.0.1, requires a token, and keeps its logs
and sockets in scratch. Its processes inherit our environment, including the keys of the object storage; nothing passes
keys to Ray itself, which would write them into its logs.
"""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ltrscale import storage
from ltrscale.errors import ExpectedEnd, InputError, UnavailableError
from ltrscale.processor import cores
from ltrscale.runtime import ray_internals
from ltrscale.signals import handling

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # so that a relative path means the same in a worker as here
# lets the end of a cluster interrupt ray.get soon (by default within 1 s): after 1 s Ray's core gives up on a raylet,
# finds the object store gone and calls _Exit
os.environ.setdefault("RAY_get_check_signal_interval_milliseconds", "100")
# by default Ray gives workers a low priority (nice 15): beside other work they would hardly progress
os.environ.setdefault("RAY_worker_niceness", "0")
# by default a task killed for low memory restarts forever
os.environ.setdefault("RAY_task_oom_retries", "6")
os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")  # the default of 5 s would waste a short notice

_ANSWER_S = 10.0
_LOOK_S = 0.1
_END_S = 15.0
_SOCKET_PATH = 107
"""Maximum length of a Unix socket's path, in bytes."""
_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest socket path that Ray makes below a cluster's scratch directory."""


@contextmanager
def ray_cluster(cpus: int) -> Iterator[None]:
    """Provide Ray while the block runs: the connected cluster, the one at RAY_ADDRESS, or our own.

    Our own cluster ends with this process, however the process ends. It has at least this number of logical CPUs, which
    may exceed the machine's.

    Raises:
        UnavailableError: no cluster answers at RAY_ADDRESS, or our own does not start or dies.
    """
    import ray  # imported late: many processes never use Ray

    if ray.is_initialized():
        yield
        return
    if "RAY_ADDRESS" not in os.environ:
        with _own_cluster(max(cpus, cores())):
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
    """Unwrap errors for the user that Ray tasks and actors raise while the block gets their results.

    With `whose`, such as "log-7: the process that handled it", the death of that process is one too; `remedy` is the
    change to suggest if it ran out of memory.

    Raises:
        InputError: a task raised it, or that process died more often than Ray restarts it.
        UnavailableError: a task raised it.
    """
    from ray.exceptions import RayError, RayTaskError  # imported late: many processes never use Ray

    try:
        yield
    except RayTaskError as error:
        if not isinstance(error.cause, InputError | UnavailableError):
            raise
        message, _, _ = str(error.cause).partition(" Failed to apply UDF")  # Ray Data appends advice on its retries
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
    """Run a cluster that only processes on this machine with access to its token can use."""
    import ray

    with storage.scratch.directory(longest=_SOCKET_PATH - len(_SOCKET)) as folder:
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        settings = with_environment(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=None,
            RAY_AUTH_TOKEN_PATH=str(token),
            TMPDIR=str(folder),  # killed Ray processes leave sockets there; the scratch directory is removed
            GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", loopback()),
        )
        with settings, ray_internals.only_this_machine(folder / "ray") as private:
            try:
                _connect(address="local", num_cpus=cpus, include_dashboard=False, **private)
                with _ending_with_the_cluster():
                    yield
            finally:
                with ray_internals.ending_all_processes():
                    ray.shutdown()


_DIED = "Ray's processes on this machine have died; give the same command again"


class _ClusterDied(BaseException):
    """Interrupts the main thread; a BaseException, so that no `except Exception` swallows it."""


@contextmanager
def _ending_with_the_cluster() -> Iterator[None]:
    """End the block when our cluster dies: otherwise it waits for another node forever, or Ray ends the process."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can be interrupted by a signal
        yield
        return
    processes = ray_internals.needed_processes()
    over, asked, main_thread = threading.Event(), threading.Event(), threading.get_ident()

    def is_dead() -> bool:
        return not all(map(ray_internals.is_alive, processes))

    def end(*_: object) -> None:
        raise _ClusterDied(_DIED)

    def watch() -> None:
        while not over.wait(_LOOK_S):
            # in this order: after the block the cluster ends too, which is not a failure
            if is_dead() and not over.is_set():
                asked.set()
                signal.pthread_kill(main_thread, signal.SIGUSR1)
                over.wait(_END_S)  # then the signal repeats, in case some code swallowed the exception after all

    previous_handler = signal.signal(signal.SIGUSR1, end)
    threading.Thread(target=watch, name="cluster", daemon=True).start()
    try:
        yield
        if asked.is_set():  # Ray Tune has a handler too, which ends the search with trials that have not begun
            raise _ClusterDied(_DIED)
    except ExpectedEnd:
        raise
    except (Exception, _ClusterDied) as error:
        if not is_dead():
            raise
        raise UnavailableError(_DIED) from error
    finally:
        over.set()
        # a signal may still be pending: SIGUSR1 without a handler would kill the process
        signal.signal(signal.SIGUSR1, signal.SIG_IGN if is_dead() else previous_handler)


@contextmanager
def with_environment(**values: str | None) -> Iterator[None]:
    """Set environment variables while the block runs (None unsets), and make Ray read its token settings again."""

    def change(to: Mapping[str, str | None]) -> None:
        for name, value in to.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        ray_internals.read_environment_again()

    previous_values = {name: os.environ.get(name) for name in values}
    change(values)
    try:
        yield
    finally:
        change(previous_values)


def loopback() -> str:
    """Name of the network interface of 127.0.0.1."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _check_answers(address: str) -> None:
    """Check that a process answers at host:port, since Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():  # `auto` or `ray://...`: left to Ray
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise UnavailableError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); start one, or unset RAY_ADDRESS"
        ) from error


def _connect(**options: Any) -> None:
    """Connect to Ray without its lines in our output."""
    import ray

    with _signals_held():
        try:
            ray.init(log_to_driver=False, logging_level="warning", **options)
        except Exception as error:  # Ray raises a bare Exception if one of its processes does not start
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UnavailableError(f"Ray has not started ({first}); give the same command again") from error


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delay SIGTERM and Ctrl-C until the end of the block, and keep Ray from handling them."""
    # Ray forks, and Python may run a signal handler inside a fork hook: it then drops the handler's exception and skips
    # the rest of the hook, which releases the lock of logging. The process would wait for that lock forever.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.alarm(0)  # from its start on, Ray's core prints a stack at SIGTERM and has the process abort 3 s later

    try:
        with handling(receive), ray_internals.keep_sigterm():
            yield
    finally:
        for number in received[:1]:
            signal.raise_signal(number)
