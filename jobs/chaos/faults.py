"""The plan of faults, a function of the seed."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["kill", "stop", "outage", "crash", "freeze", "resets", "busy", "full", "second"]
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
