"""The user of a run: starts the commands of each round while faults occur, and checks their outputs."""

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos import processes
from tests.chaos.arena import BUCKET, Arena
from tests.chaos.commands import Command, Remains, give, is_hung
from tests.chaos.compare import Outcome, differences, outcome
from tests.chaos.faults import Fault, Havoc
from tests.chaos.reader import Reader
from tests.chaos.report import Diary
from tests.chaos.workload import WEEKLY, Stage, command

_TICK_S = 0.1
_LOOK_S = 2.0
_WITHHELD_S = 240.0
_AFTERMATH_S = 5.0
_ATTEMPTS_IN_PEACE = 3
_SESSIONS = 2
MOST_TIMES = 3
"""Faults occur for at most this multiple of the requested minutes, if no round of each kind has ended before."""


class Abandoned(Exception):  # noqa: N818 - not an error itself: the failures of its commands are
    """A round cannot be finished."""


@dataclass
class Player:
    """Plays rounds until the time is over."""

    arena: Arena
    diary: Diary
    faults: list[Fault]
    total_s: float
    patience_s: float
    """Seconds after the last fault, and after the last line of the running commands, until these count as hung; and
    until remaining processes count as left over."""
    stages: Sequence[Stage]
    rounds: Sequence[bool]
    """Whether jobs that can use Ray do; the rounds cycle through these."""
    undisturbed: Mapping[bool, Outcome]
    """The outcome of a round without faults, with Ray or without."""
    running: list[Command] = field(default_factory=list)
    clock_s: float = 0.0
    """Seconds of chaos; the clock stands while faults are withheld."""
    withheld: bool = False

    def __post_init__(self) -> None:
        self.clock_s = self.diary.clock_s
        self.havoc = Havoc(self.arena, calm_since=time.monotonic())
        self.remains = Remains(self.patience_s / 2)  # Ray's agents outlive a killed job by a minute
        self._pending = self.faults[
            len(self.diary.by_kind("fault")) :
        ]  # a resumed run skips the faults that it has had
        self._number = len(self.diary.by_kind("command"))
        self._kill_second: tuple[float, signal.Signals] | None = None
        self._ticked = self._looked = time.monotonic()
        self._peaceful_failures = 0

    @property
    def over(self) -> bool:
        """Whether no more faults follow; on a slow machine they continue until every kind of round has ended once."""
        if self.clock_s < self.total_s:
            return False
        return len(self.diary.by_kind("round")) >= len(self.rounds) or self.clock_s >= MOST_TIMES * self.total_s

    def play(self) -> None:
        """Play all rounds; the last one ends without faults."""
        while not self.over or self._is_under_way():
            number = len(self.diary.by_kind("round"))
            try:
                self.play_round(number)
            except Abandoned as error:
                self._fail(f"round {number}: given up: {error}")
                self._settle()
                self.arena.tidy()
                self.diary.write("round", self.clock_s, f"{number}: given up", differences=[])

    def _is_under_way(self) -> bool:
        """Whether chaos was killed during the current round, so that the round has to be finished."""
        return any(event["round"] == len(self.diary.by_kind("round")) for event in self.diary.by_kind("command"))

    def play_round(self, number: int) -> None:
        """Run the commands of a round, except those already done, and compare the outcome."""
        ray, url = self.rounds[number % len(self.rounds)], f"{BUCKET}/round-{number:03d}"
        folder = self.arena.folder / f"round-{number:03d}"
        folder.mkdir(exist_ok=True)
        done = {event["stage"] for event in self.diary.by_kind("ended") if event["round"] == number and event["done"]}
        with Reader(f"{url}/{WEEKLY}") as reader:
            for stage in self.stages:
                words = command(stage, folder, url, ray=ray)
                while stage.name not in done:
                    if self._run(number, stage, words):
                        done.add(stage.name)
        self._settle()
        self.diary.write("reader", self.clock_s, f"{reader.looks} looks at the model in service")
        killed = {event["pid"] for event in self.diary.by_kind("ended") if event["code"] == -signal.SIGKILL}
        found = differences(outcome(url, killed=killed), self.undisturbed[ray])
        found += [*self._scratch(), *reader.found()]
        for line in found:
            self._fail(f"round {number}: {line}")
        how = f"{len(found)} differences" if found else "equals the undisturbed one"
        self.diary.write("round", self.clock_s, f"{number}{' with Ray' if ray else ''}: {how}", differences=found)

    # --- commands

    def _run(self, number: int, stage: Stage, words: list[str]) -> bool:
        """Run a command, twice if a fault demands it, and wait for the first; returns whether it is done.

        Raises:
            Abandoned: it fails repeatedly without any fault.
        """
        first = self._give(number, stage, words)
        while first in self.running:
            self.tick(number)
        event = next(e for e in reversed(self.diary.by_kind("ended")) if e["mark"] == first.mark)
        in_peace = first.hangs or not first.disturbed
        self._peaceful_failures = self._peaceful_failures + 1 if event["failed"] and in_peace else 0
        if self._peaceful_failures >= _ATTEMPTS_IN_PEACE:
            raise Abandoned(f"{stage.name} of round {number} failed {_ATTEMPTS_IN_PEACE} times in a row without faults")
        return bool(event["done"])

    def _give(self, number: int, stage: Stage, words: list[str], *, second: bool = False) -> Command:
        others = any(other.stage == stage for other in self.running) or any(
            f"-{stage.name}" in mark for mark in self.remains.ended
        )
        recently = time.monotonic() < self.havoc.calm_since + _AFTERMATH_S
        disturbed = self.havoc.explains or recently or others
        given = give(self.arena, self._number, stage, words, second=second, disturbed=disturbed)
        self._number += 1
        self.running.append(given)
        self.diary.write("command", self.clock_s, given.name, round=number, mark=given.mark)
        return given

    def _look_at(self, command: Command, number: int) -> None:
        """Record a command that has ended."""
        verdict = command.verdict()
        if verdict is None:
            return
        self.running.remove(command)
        self.remains.ended[command.mark] = time.monotonic()
        seconds, code = time.monotonic() - command.began, command.process.returncode
        self.diary.write(
            "ended",
            self.clock_s,
            f"{command.name} after {seconds:.0f} s, exit status {code}: {verdict.line[:300]}",
            round=number,
            stage=command.stage.name,
            mark=command.mark,
            done=verdict.what == "done" and not command.second,
            failed=verdict.what == "failure",
            code=code,
            pid=command.process.pid,
        )
        if verdict.what == "failure":
            self._fail(f"{command.name}: {verdict.line[:1000]} (see {command.output})")

    def _fail(self, text: str) -> None:
        self.diary.write("failure", self.clock_s, text)

    # --- time

    def tick(self, number: int) -> None:
        """Wait for a moment, then handle ended commands, due faults, hangs and remaining processes."""
        time.sleep(_TICK_S)
        now = time.monotonic()
        if not self.withheld and not self.over:
            self.clock_s += now - self._ticked
        self._ticked = now
        self.havoc.pass_time()
        for running in list(self.running):
            self._look_at(running, number)
        first = next((running for running in self.running if not running.second), None)
        # a command that has run for so long must get a chance to end
        self.withheld = first is None or now - first.began > _WITHHELD_S
        if (
            first is not None
            and not self.withheld
            and not self.over
            and self._pending
            and self._pending[0].at_s <= self.clock_s
        ):
            self._let_happen(self._pending[0], first, number)
        self._kill_the_second()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self._look_for_hangs()
            self._look_for_remains()

    def _let_happen(self, fault: Fault, first: Command, number: int) -> None:
        doing = self._second(fault, first, number) if fault.kind == "second" else self.havoc.do(fault, self.running)
        if doing:
            del self._pending[0]
            self.diary.write("fault", self.clock_s, doing, kind=fault.kind, number=fault.number)

    def _second(self, fault: Fault, first: Command, number: int) -> str | None:
        """Start the running command a second time."""
        if any(running.second for running in self.running):
            return None
        second = self._give(number, first.stage, first.words, second=True)
        second.disturbed = first.disturbed = True
        if fault.share >= 0.5:  # half of the second commands run undisturbed, a quarter each gets SIGKILL or SIGTERM
            return f"{first.name} started a second time"
        how = signal.SIGKILL if fault.share < 0.25 else signal.SIGTERM
        self._kill_second = time.monotonic() + fault.seconds, how
        return f"{first.name} started a second time, {how.name} after {fault.seconds:.0f} s"

    def _kill_the_second(self) -> None:
        if self._kill_second is not None and time.monotonic() > self._kill_second[0]:
            for running in self.running:
                if running.second:
                    running.signal(self._kill_second[1])
            self._kill_second = None

    def _look_for_hangs(self) -> None:
        now, said = time.monotonic(), max((running.said for running in self.running), default=0.0)
        for running in list(self.running):
            since = max(running.began, self.havoc.calm_since)
            calm_s, silent_s = now - since, now - max(since, said)  # a second command waits in silence for the first
            if not self.havoc.active and is_hung(calm_s=calm_s, silent_s=silent_s, patience_s=self.patience_s):
                path = running.output.with_suffix(".stacks")
                path.write_text(processes.stacks(running.mark))
                running.hangs = f"hangs {calm_s:.0f} s after the last fault, stacks in {path}"
                processes.end(running.mark)

    def _look_for_remains(self) -> None:
        if self.havoc.stops:
            return
        for mark in self.remains.left(not_before=self.havoc.resumed_at):
            titles = [f"{p.pid} {p.name}" for p in processes.marked(mark)]
            self._fail(f"{mark} has ended, and left processes: {'; '.join(titles)}")
            processes.end(mark)

    # --- after a round

    def _settle(self) -> None:
        """Wait until no fault is active and nothing runs."""
        while self.running or self.remains.ended or not self.havoc.calm:
            self.tick(len(self.diary.by_kind("round")))  # without a first command no fault comes
        self.arena.s3.make_bucket(BUCKET.removeprefix("s3://"))

    def _scratch(self) -> list[str]:
        """Report leftovers on this machine, which are removed before the next round, and at the tracking server."""
        lines = [f"left in TMPDIR: {name}" for name in self.arena.left_on_disk()]
        lines += [f"several runs are tracked of {output}" for output in self.arena.tracking.tracked_twice()]
        sessions = self.arena.ray_sessions()
        if len(sessions) > _SESSIONS:
            lines.append(f"{len(sessions)} sessions of Ray left in {self.arena.ray}")
        self.arena.tidy()
        return lines
