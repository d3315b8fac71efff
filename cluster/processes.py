"""Background processes of the scripts in this directory: each has a pid file and a log, and is stopped by its id."""

import contextlib
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ltrscale.errors import ExpectedEnd, InputError

RUNS = Path(__file__).resolve().parents[1] / "runs"
"""Directory for the state of the scripts; git and `ray job submit --working-dir` ignore it."""
_KILLED_S = 10.0  # how long to wait for the end of a killed process


def program(name: str, package: str) -> str:
    """The path of a program that a Python package installs.

    Raises:
        InputError: it is not installed.
    """
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise InputError(f"{name}: no such program; install the package {package}, or everything with `make install`")
    return found


class Process:
    """A process that outlives the script that started it; `folder` keeps `name.pid` and `name.log`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._pid_file = folder / f"{name}.pid"

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command with exactly this environment, in a new session and in the folder of its log."""
        with self.log.open("w") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pid_file.write_text(f"{process.pid}\n{_started(process.pid)}\n")

    @property
    def pid(self) -> int | None:
        """The process id while it runs; the start time excludes a later process with the same id."""
        if not self._pid_file.exists():
            return None
        pid, _, started = self._pid_file.read_text().strip().partition("\n")
        return int(pid) if started and started == _started(int(pid)) else None

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until `ready()`.

        Raises:
            InputError: the process ended, or `seconds` have passed.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if self.pid is None:
                lines = self.log.read_text().strip().splitlines()[-1:]
                raise InputError(f"{self.name}: ended immediately ({' '.join(lines)}); see {self.log}")
            if time.monotonic() > deadline:
                raise InputError(f"{self.name}: not ready after {seconds:.0f} s; see {self.log}")
            time.sleep(0.2)

    def stop(self, seconds: float) -> bool:
        """Stop the process with SIGTERM, after `seconds` with SIGKILL; returns whether it ran."""
        pid = self.pid
        if pid is not None and not self._ended_by(signal.SIGTERM, pid, seconds):
            self._ended_by(signal.SIGKILL, pid, _KILLED_S)
        self._pid_file.unlink(missing_ok=True)
        return pid is not None

    def _ended_by(self, signal_number: signal.Signals, pid: int, seconds: float) -> bool:
        """Send a signal; returns whether the process ended within `seconds`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)
        deadline = time.monotonic() + seconds
        while self.pid is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def _started(pid: int) -> str:
    """The start time of a process as `ps` prints it; empty if no process runs."""
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    done = subprocess.run(command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=False)
    state, _, started = done.stdout.strip().partition(" ")
    # a zombie has ended: only its parent has not read the exit status yet
    return "" if state.startswith("Z") else started.strip()


def is_free(port: int) -> bool:
    """Whether nothing listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def free_ports(count: int) -> list[int]:
    """Free ports outside the ranges that Ray and the system assign automatically."""
    candidates = (port for port in random.sample(range(20_000, 30_000), 1_000) if is_free(port))
    return [next(candidates) for _ in range(count)]


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)


def print_exports(environment: Mapping[str, str]) -> None:
    """Print the shell commands that set an environment."""
    for name, value in environment.items():
        print(f"export {name}={shlex.quote(value)}")


def print_status(line: str) -> None:
    """Print to standard error, because the shell evaluates standard output."""
    print(line, file=sys.stderr)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Report an expected end in one line with its exit status, like the jobs."""
    try:
        yield
    except ExpectedEnd as error:
        print_status(f"{error.word}: {error}")
        sys.exit(error.status)
