"""The history of a search: two small files a trial, in storage, which are all that a search knows of its past.

`trials/00007/trial.json` is there once trial 7 has begun, `result.json` once it has ended. Whoever ends a trial writes
its result only where there is none, so a result never changes.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, validate
from ltrscale.errors import InputError
from ltrscale.storage import join

_SEARCH, _TRIALS, _BEGUN, _ENDED = "search.json", "trials", "trial.json", "result.json"


class Begun(Config):
    """A trial that has begun."""

    number: int = Field(ge=0)
    """From 0, in the order in which they began."""
    params: dict[str, Any]
    """A value for every key of the space; trial 0 may have none, which is the config as it is given."""


class Result(Config):
    """How a trial has ended."""

    state: Literal["complete", "stopped", "failed"]
    """Came to its end; was given up early, for others were better at that stage; raised an error, or its process died.
    """
    value: float | None = None
    """The metric; of one that was stopped, when that happened."""
    curve: tuple[tuple[int, float], ...] = ()
    """Steps, and the metric at each."""
    seconds: float = Field(0.0, ge=0)
    """Since it was last begun or resumed."""
    reason: str | None = None
    """Why it failed."""


@dataclass(frozen=True)
class TrialRecord:
    """What a history knows of a trial: how it began and, once it has ended, its result."""

    begun: Begun
    result: Result | None

    @property
    def number(self) -> int:
        """Of the trial."""
        return self.begun.number


@dataclass(frozen=True)
class History:
    """The history below a directory."""

    url: str

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin a history, or check that the one that is there is of this search.

        Args:
            identity: all that the value of a trial depends on besides its parameters, as plain data.

        Raises:
            InputError: another search's history is there; names what differs.
        """
        url = join(self.url, _SEARCH)
        wanted = json.loads(json.dumps(identity))
        if not storage.create_exclusively(url, _lines(wanted)) and (there := _read(url)) != wanted:
            raise InputError(
                f"{self.url}: the history of another search is there, which differs in "
                f"{_first_difference(there, wanted)}; choose another out, or remove that history with --fresh"
            )

    def identity(self) -> dict[str, Any] | None:
        """What the history that is there was begun with; None where none is."""
        url = join(self.url, _SEARCH)
        if not storage.exists(url):
            return None
        found: dict[str, Any] = _read(url)
        return found

    def folder(self, number: int) -> str:
        """The directory of a trial."""
        return join(self.url, _TRIALS, f"{number:05d}")

    def begin(self, begun: Begun) -> None:
        """Record that a trial begins, or begins again.

        Raises:
            InputError: the trial has begun with other parameters: another process runs the same search.
        """
        storage.check_lease(self.url)
        url = join(self.folder(begun.number), _BEGUN)
        if not storage.create_exclusively(url, _lines(begun.model_dump(mode="json"))):
            raise InputError(f"{url}: another process has begun this trial meanwhile; run one search at a time here")

    def end(self, number: int, result: Result) -> Result:
        """Record how a trial has ended, unless that is recorded; returns what is recorded."""
        storage.check_lease(self.url)
        url = join(self.folder(number), _ENDED)
        if storage.create_exclusively(url, _lines(result.model_dump(mode="json"))):
            return result
        return validate(Result, _read(url), url)

    def result(self, number: int) -> Result | None:
        """How a trial has ended; None if it has not."""
        url = join(self.folder(number), _ENDED)
        return validate(Result, _read(url), url) if storage.exists(url) else None

    def trials(self) -> list[TrialRecord]:
        """All trials that have begun, by number."""
        found = []
        for folder in storage.children(join(self.url, _TRIALS)):
            url = join(folder, _BEGUN)
            if storage.exists(url):
                begun = validate(Begun, _read(url), url)
                if folder != self.folder(begun.number):
                    raise InputError(f"{url}: number {begun.number} is not that of its directory; remove it")
                found.append(TrialRecord(begun, self.result(begun.number)))
        return sorted(found, key=lambda trial: trial.number)

    def remove(self, loose: Collection[str] = ()) -> None:
        """Forget everything, with what the trials committed and the files with these names below them."""
        storage.withdraw_below(join(self.url, _TRIALS), [_BEGUN, _ENDED, *loose])
        storage.remove(join(self.url, _SEARCH))


def ended(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Those that have ended."""
    return [trial for trial in trials if trial.result is not None]


def best(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The one with the highest value of those that came to their end, of equal ones the first; None if none did."""
    complete = [(t.result.value, t) for t in trials if t.result is not None and t.result.state == "complete"]
    return max(((v, -t.number, t) for v, t in complete if v is not None), default=(0, 0, None))[2]


def _lines(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _read(url: str) -> Any:
    try:
        return json.loads(storage.read_bytes(url))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{url}: not JSON ({error}); remove the directory of this trial, or begin --fresh") from error


def _first_difference(a: Any, b: Any, key: str = "") -> str:
    """The dotted key where two plain values differ first."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in [*a, *(name for name in b if name not in a)]:
            if a.get(name) != b.get(name) or (name in a) != (name in b):
                return _first_difference(a.get(name), b.get(name), f"{key}.{name}" if key else str(name))
    return key or "everything"
