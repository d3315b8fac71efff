"""The plan of faults, a function of the seed; injecting them, and undoing them when their time is over."""

import random
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from tests.chaos.arena import Arena
from tests.chaos.commands import Command
from tests.chaos.faulty_proxy import BROKEN, SLOW_DOWN
from tests.chaos.processes import Process, choose, marked

Kind = Literal["kill", "stop", "outage", "crash", "freeze", "resets", "busy", "full", "second", "tracking"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MEANINGS: dict[Kind, str] = {
    "kill": "SIGKILL to a process of the job",
    "stop": "SIGSTOP to a process of the job, then SIGCONT",
    "outage": "S3 refuses connections",
    "crash": "the S3 server is killed and started again",
    "freeze": "the S3 server accepts requests and does not answer",
    "resets": "a share of the requests ends with a reset connection",
    "busy": "a share of the requests is answered with 503",
    "full": "the disk of TMPDIR is full",
    "second": "the same command runs twice at the same time; the second one may be killed",
    "tracking": "the tracking server hangs, resets connections, answers 500 or refuses connections",
}

_SECONDS: dict[Kind, tuple[float, float]] = {
    "kill": (0, 0),
    "stop": (5, 40),
    "outage": (5, 30),
    "crash": (5, 20),
    "freeze": (5, 30),
    "resets": (4, 15),
    "busy": (5, 20),
    "full": (5, 20),
    "second": (1, 25),
    "tracking": (5, 30),
}
_LONG_STOP_S = 70.0  # long enough for the lease of a stopped writer to lapse
_LONG_STOPS = 0.2


@dataclass(frozen=True)
class Fault:
    """One planned fault."""

    number: int
    at_s: float
    """When it begins, in seconds of chaos; the clock stands while faults are withheld or chaos does not run."""
    kind: Kind
    seconds: float
    """How long it lasts; for a second command, when it may be killed."""
    target: float
    """From 0 to 1: selects one of the running processes."""
    share: float
    """From 0 to 1: the severity."""


def plan(seed: int, minutes: float, every_s: float, kinds: Collection[Kind] = KINDS) -> list[Fault]:
    """Faults at random moments, one per `every_s` seconds on average, all kinds about equally often.

    Example:
        >>> [fault.kind for fault in plan(1, 1, 20)] == [fault.kind for fault in plan(1, 1, 20)]
        True
    """
    rng = random.Random(seed)
    faults: list[Fault] = []
    bag: list[Kind] = []
    for number in range(int(60 * minutes / every_s)):
        if not bag:  # every kind once before any comes again
            bag = sorted(kinds)
            rng.shuffle(bag)
        kind = bag.pop()
        seconds = rng.uniform(*_SECONDS[kind])
        if kind == "stop" and rng.random() < _LONG_STOPS:
            seconds = _LONG_STOP_S
        at_s = every_s * (number + rng.uniform(0.25, 0.75))
        faults.append(Fault(number, at_s, kind, seconds, rng.random(), rng.random()))
    return faults


_THINGS: dict[Kind, str] = {
    "outage": "connections",
    "crash": "server",
    "freeze": "server",
    "resets": "requests",
    "busy": "requests",
    "full": "disk",
    "tracking": "tracking",
}
"""The thing that a fault changes; a second fault on the same thing waits until the first one is over."""
_RESTART_S = 15.0  # from the start of the S3 server until it answers


@dataclass
class Havoc:
    """The active faults."""

    arena: Arena
    active: list[tuple[float, str, Callable[[], object]]] = field(default_factory=list)
    """For each fault its end, the thing that it changes, and the function that undoes it."""
    calm_since: float = 0.0
    """When the last fault was over; in the future while a server starts."""
    resumed_at: float = 0.0
    """When the last stopped process was resumed."""

    def do(self, fault: Fault, commands: Sequence[Command]) -> str | None:
        """Inject a fault; returns its description, or None if it has to wait."""
        thing = _THINGS.get(fault.kind, fault.kind)
        if thing in [changed for _, changed, _ in self.active] and fault.kind != "stop":
            return None
        match fault.kind:
            case "kill" | "stop":
                process = choose(marked(f"{self.arena.mark}.c"), fault.target)
                text = self._signal(process, fault, commands) if process else None
            case _:
                text = self._disturb(fault)
        if text and fault.kind != "tracking":  # which explains no error
            self.calm_since = max(self.calm_since, time.monotonic())
            for command in commands:
                command.disturbed = True
        return text

    def _signal(self, process: Process, fault: Fault, commands: Sequence[Command]) -> str | None:
        number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
        for command in commands:
            if command.process.pid == process.pid:
                command.sent.add(number)
        if not process.signal(number):
            return None
        which = f"{process.role} {process.pid}: {process.name}"
        if fault.kind == "kill":
            return f"killed {which}"
        self._until(fault, "stop", lambda: process.signal(signal.SIGCONT))
        return f"stopped for {fault.seconds:.0f} s {which}"

    def _disturb(self, fault: Fault) -> str:
        arena, proxy, seconds = self.arena, self.arena.proxy, f"for {fault.seconds:.0f} s"
        undo: Callable[[], object]
        match fault.kind:
            case "outage":
                proxy.close()
                undo, text = proxy.open, f"S3 refuses connections {seconds}"
            case "crash":
                arena.s3.kill()
                undo, text = arena.s3.start, f"S3 server killed, restart in {fault.seconds:.0f} s"
            case "freeze":
                arena.freeze_s3()
                undo, text = arena.thaw_s3, f"S3 server frozen {seconds}"
            case "tracking":
                how, undo = self._disturb_tracking(fault)
                text = f"tracking server {how} {seconds}"
            case "full":
                arena.fill_disk()
                undo, text = arena.empty_disk, f"TMPDIR full {seconds}"
            case _:
                proxy.fault = "reset" if fault.kind == "resets" else SLOW_DOWN
                proxy.share = 0.2 + 0.7 * fault.share
                undo, text = self._answer_all, f"{fault.kind} in {proxy.share:.0%} of the requests {seconds}"
        self._until(fault, _THINGS[fault.kind], undo)
        return text

    def _disturb_tracking(self, fault: Fault) -> tuple[str, Callable[[], object]]:
        """Let the tracking server fail in one of several ways; returns which, and how to undo it."""
        proxy = self.arena.tracking_proxy
        how = ("hangs", "resets", "answers 500", "refuses connections")[int(4 * fault.share)]
        if how == "refuses connections":
            proxy.close()
            return how, proxy.open
        proxy.fault = BROKEN if how == "answers 500" else "hang" if how == "hangs" else "reset"
        proxy.share = 0.3 + 0.7 * fault.target

        def answer() -> None:
            proxy.share = 0.0

        return f"{how} ({proxy.share:.0%})", answer

    def _answer_all(self) -> None:
        self.arena.proxy.share = 0.0

    def _until(self, fault: Fault, thing: str, undo: Callable[[], object]) -> None:
        self.active.append((time.monotonic() + fault.seconds, thing, undo))

    def pass_time(self) -> None:
        """Undo the faults whose time is over."""
        for entry in [entry for entry in self.active if entry[0] <= time.monotonic()]:
            _, thing, undo = entry
            self.active.remove(entry)
            undo()
            self.calm_since = max(self.calm_since, time.monotonic() + (_RESTART_S if thing == "server" else 0))
            if thing == "stop":
                self.resumed_at = time.monotonic()
        if any(thing == "disk" for _, thing, _ in self.active):
            self.arena.fill_disk()  # again, because jobs delete files when a write fails

    @property
    def explains(self) -> bool:
        """Whether a fault is active that may end a command; one of tracking may not."""
        return any(thing != "tracking" for _, thing, _ in self.active)

    @property
    def stops(self) -> bool:
        """Whether a process is stopped."""
        return any(thing == "stop" for _, thing, _ in self.active)

    @property
    def calm(self) -> bool:
        """Whether no fault is active and the server has restarted."""
        return not self.active and time.monotonic() >= self.calm_since
