"""Running commands, judging how they end, and the processes that ended commands leave behind."""

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tests.chaos.arena import Arena
from tests.chaos.processes import marked
from tests.chaos.workload import Stage

_TRACEBACK = "Traceback (most recent call last)"
_EXPLAINED = re.compile(
    r"check the network|overloaded|refused every retry"  # S3
    r"|disk full|[Nn]o space left"
    r"|workers died|worker|Ray|raylet|its process died"  # killed processes
    r"|no longer holds|changed by others"  # a lost lease
    r"|another (writer|process|command|job)|meanwhile|is running|runs? (here|there|on)|held by|lease"  # two writers
)

_CUT_OFF = re.compile(
    r"Failed to get the system config from raylet because it is dead|Attempting to recover \d+ lost objects"
    r"|Failed to connect to GCS within \d+ seconds"
)
"""Last messages of Ray's core before it ends a process whose raylet or GCS died while it connected, or just before it
used the object store; none of our code runs then."""


class Verdict(NamedTuple):
    """The end of a command."""

    what: Literal["done", "again", "failure"]
    line: str
    """The last line of its output, or the problem."""


def judge(code: int, output: str, *, sent: Collection[signal.Signals], disturbed: bool, done: int = 0) -> Verdict:
    """Judge the end of a command.

    Args:
        code: its exit status, negative for a signal.
        output: its standard output and error.
        sent: signals that chaos has sent to the command's first process.
        disturbed: whether a fault was active since it started, or another command worked on the same output.
        done: the exit status with which it is done.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "(no output)"
    if _TRACEBACK in output:
        return Verdict("failure", f"a traceback, exit status {code}: {last}")
    if code == done:
        return Verdict("done", last)
    if code == -signal.SIGKILL and signal.SIGKILL in sent:
        return Verdict("again", "killed")
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM) and signal.SIGTERM in sent:
        return Verdict("again", last)
    if code == 1 and disturbed and _CUT_OFF.search(last):
        return Verdict("again", last)
    if code != 2:
        return Verdict("failure", f"exit status {code}: {last}")
    error = next((line for line in reversed(lines) if line.startswith("error: ")), "")
    if not error:
        return Verdict("failure", f"exit status 2 without an error line: {last}")
    if not disturbed:
        return Verdict("failure", f"an error without any fault: {error}")
    if not _EXPLAINED.search(error):
        return Verdict("failure", f"no fault explains this: {error}")
    return Verdict("again", error)


def is_hung(*, calm_s: float, silent_s: float, patience_s: float) -> bool:
    """Whether a command hangs that has run for `calm_s` since the last fault, and said nothing for `silent_s`.

    On a busy machine work takes long, and says so; who talks for five times the patience hangs too.

    Example:
        >>> is_hung(calm_s=400, silent_s=20, patience_s=180), is_hung(calm_s=400, silent_s=200, patience_s=180)
        (False, True)
        >>> is_hung(calm_s=1000, silent_s=20, patience_s=180)
        True
    """
    return silent_s > patience_s or calm_s > 5 * patience_s


_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Command:
    """A started command."""

    stage: Stage
    words: list[str]
    mark: str
    second: bool
    process: subprocess.Popen[bytes]
    output: Path
    began: float
    disturbed: bool
    """Whether a fault was active while it ran."""
    sent: set[signal.Signals] = field(default_factory=set)
    hangs: str = ""
    """Why chaos has ended it; empty if it did not hang."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command's first process."""
        self.sent.add(number)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    @property
    def name(self) -> str:
        """The name in logs and reports."""
        return f"{self.stage.name}{' (second)' if self.second else ''}"

    @property
    def said(self) -> float:
        """When it has written its last line, as `time.monotonic` counts."""
        return time.monotonic() - (time.time() - self.output.stat().st_mtime)

    def verdict(self) -> Verdict | None:
        """The judgement of its end; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if self.hangs:
            return Verdict("failure", self.hangs)
        output = self.output.read_text(errors="replace")
        return judge(code, output, sent=self.sent, disturbed=self.disturbed, done=self.stage.status)


def give(
    arena: Arena, number: int, stage: Stage, words: list[str], *, second: bool = False, disturbed: bool = False
) -> Command:
    """Start a command in a new session; its output goes to a file below the arena's folder."""
    mark = f"c{number:04d}-{stage.name}"
    logs = arena.folder / "logs"
    logs.mkdir(exist_ok=True)
    output = logs / f"{mark[1:]}{'-second' if second else ''}.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            words,
            env=arena.environment(mark),
            cwd=_REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Command(stage, words, f"{arena.mark}.{mark}", second, process, output, time.monotonic(), disturbed)


@dataclass
class Remains:
    """Ended commands, all of whose processes must end soon, too."""

    within_s: float
    ended: dict[str, float] = field(default_factory=dict)

    def left(self, *, not_before: float) -> list[str]:
        """The marks of commands with processes that run longer than `within_s`; each is reported once.

        Args:
            not_before: the earliest moment from which seconds count, such as the last time that a stopped process was
                resumed.
        """
        late = []
        for mark, ended in list(self.ended.items()):
            if not marked(mark):
                del self.ended[mark]
            elif time.monotonic() - max(ended, not_before) > self.within_s:
                del self.ended[mark]
                late.append(mark)
        return late
