"""Running commands, and the processes that ended commands leave behind."""

import contextlib
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from jobs.chaos.arena import Arena
from jobs.chaos.judge import Verdict, judge
from jobs.chaos.processes import marked
from jobs.chaos.workload import Stage

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

    def verdict(self) -> Verdict | None:
        """The judgement of its end; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if self.hangs:
            return Verdict("failure", self.hangs)
        return judge(code, self.output.read_text(errors="replace"), sent=self.sent, disturbed=self.disturbed)


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
