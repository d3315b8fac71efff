"""The processes of a command and all their descendants, found by a mark in their environment (on Linux)."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "LTRSCALE_CHAOS"


@dataclass(frozen=True, order=True)
class Process:
    """A process; its start time distinguishes it from a later process with the same id."""

    pid: int
    started: str
    mark: str
    title: str

    @property
    def role(self) -> str:
        """`job` for the command itself, `worker` for its workers under Ray, `helper` for the rest, as Ray's daemons."""
        if " -m jobs." in self.title:
            return "job"
        is_worker = self.title.startswith("ray::") and not self.title.endswith("Agent")
        return "worker" if is_worker else "helper"

    @property
    def name(self) -> str:
        """Its title, without the folders of programs."""
        return " ".join(re.sub(r"(^|\s)/\S*/", r"\1", self.title).split())[:80]

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; returns whether the process existed."""
        if _started(self.pid) != self.started:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def marked(mark: str) -> list[Process]:
    """The processes whose mark begins with this text, without zombies."""
    return sorted(_marked(mark))


def _marked(mark: str) -> Iterator[Process]:
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            found = next((v for v in (folder / "environ").read_bytes().split(b"\0") if v.startswith(wanted)), None)
            if found is not None and (started := _started(int(folder.name))):
                title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                yield Process(int(folder.name), started, found.decode().partition("=")[2], title)


def _started(pid: int) -> str:
    """The start time of a process in the system's ticks; empty if no process runs."""
    try:
        # the name in parentheses may itself contain spaces and parentheses
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def choose(processes: Iterable[Process], draw: float) -> Process | None:
    """Choose a process: first among the roles, all equally likely, then among its processes; None if there are none.

    Args:
        processes: the candidates.
        draw: a random number from 0 to 1.
    """
    roles: dict[str, list[Process]] = {}
    for process in processes:
        roles.setdefault(process.role, []).append(process)
    if not roles:
        return None
    place = draw * len(roles)
    of_role = roles[sorted(roles)[int(place)]]
    return sorted(of_role)[int((place % 1) * len(of_role))]


def end(mark: str, within_s: float = 10.0) -> None:
    """Kill all processes with this mark, including stopped ones."""
    deadline = time.monotonic() + within_s
    # repeated, because a process can start another one before it is killed
    while (there := marked(mark)) and time.monotonic() < deadline:
        for process in there:
            process.signal(signal.SIGKILL)
        time.sleep(0.1)


def stacks(mark: str) -> str:
    """The stack of each process if py-spy is installed, otherwise its title."""
    program = Path(sys.executable).with_name("py-spy")
    texts = []
    for process in marked(mark):
        text = "(install py-spy to see its stack)"
        if program.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                dump = [str(program), "dump", "--nonblocking", "--pid", str(process.pid)]
                done = subprocess.run(dump, capture_output=True, text=True, timeout=20, check=False)
                text = done.stdout or done.stderr
        texts.append(f"## {process.pid} {process.name}\n{text}\n")
    return "\n".join(texts)
