"""The history of a search: two small files for each trial, in storage. A search resumes from them alone.

`trials/00007/trial.json` exists once trial 7 has begun, `result.json` once it has ended. A result is written only where
none exists, so it never changes.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, by_content, validate
from ltrscale.errors import InputError
from ltrscale.storage import join

_SEARCH, _TRIALS, _BEGUN, _ENDED = "search.json", "trials", "trial.json", "result.json"


class Begun(Config):
    """A trial that has begun."""

    number: int = Field(ge=0)
    """From 0, in the order of their beginnings."""
    params: dict[str, Any]
    """A value for every key of the space; trial 0 may have none, which means the config as given."""


class Result(Config):
    """The end of a trial."""

    state: Literal["complete", "stopped", "failed"]
    """`complete`: it finished; `stopped`: early, because other trials were better at the same step; `failed`: it raised
    an error, or its process died."""
    value: float | None = None
    """The metric; of a stopped trial, at its last step."""
    curve: tuple[tuple[int, float], ...] = ()
    """Steps, and the metric at each."""
    seconds: float = Field(0.0, ge=0)
    """Time since its last start."""
    reason: str | None = None
    """Cause of a failure."""


@dataclass(frozen=True)
class TrialRecord:
    """A trial in the history: its beginning and, once it has ended, its result."""

    begun: Begun
    result: Result | None

    @property
    def number(self) -> int:
        """Number of the trial."""
        return self.begun.number


@dataclass(frozen=True)
class History:
    """The history below a directory."""

    url: str

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin a history, or check that the existing one belongs to this search.

        Args:
            identity: everything besides its parameters that the value of a trial depends on, as plain data.

        Raises:
            InputError: the history of another search exists; names the first difference.
        """
        url = join(self.url, _SEARCH)
        wanted = json.loads(json.dumps(identity))  # tuples become lists, as in the file
        if not storage.create_exclusively(url, _lines(wanted)) and not _is_same(there := _read(url), wanted):
            raise InputError(
                f"{self.url}: holds the history of another search, which differs in "
                f"{_first_difference(there, wanted)}; choose another out, or remove that history with --fresh"
            )

    def identity(self) -> dict[str, Any] | None:
        """The identity of the existing history; None if there is none."""
        url = join(self.url, _SEARCH)
        if not storage.exists(url):
            return None
        found: dict[str, Any] = _read(url)
        return found

    def is_of_another(self, identity: Mapping[str, Any]) -> bool:
        """Whether there is a history, of another search than this one."""
        there = self.identity()
        return there is not None and not _is_same(there, json.loads(json.dumps(identity)))

    def folder(self, number: int) -> str:
        """The directory of a trial."""
        return join(self.url, _TRIALS, f"{number:05d}")

    def begin(self, begun: Begun) -> None:
        """Record that a trial begins, or restarts.

        Raises:
            InputError: the trial has begun with other parameters, because another process runs the same search.
        """
        storage.check_lease(self.url)
        url = join(self.folder(begun.number), _BEGUN)
        if not storage.create_exclusively(url, _lines(begun.model_dump(mode="json"))):
            raise InputError(f"{url}: another process has begun this trial meanwhile; run one search at a time here")

    def end(self, number: int, result: Result) -> Result:
        """Record the result of a trial, unless it already has one; returns the recorded result."""
        storage.check_lease(self.url)
        url = join(self.folder(number), _ENDED)
        if storage.create_exclusively(url, _lines(result.model_dump(mode="json"))):
            return result
        return validate(Result, _read(url), url)

    def result(self, number: int) -> Result | None:
        """The result of a trial; None if it has not ended."""
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
                    raise InputError(f"{url}: number {begun.number} does not match its directory; remove it")
                found.append(TrialRecord(begun, self.result(begun.number)))
        return sorted(found, key=lambda trial: trial.number)

    def remove(self, loose: Collection[str] = ()) -> None:
        """Delete the history, the outputs that trials committed, and the files named `loose` below the trials."""
        storage.withdraw_below(join(self.url, _TRIALS), [_BEGUN, _ENDED, *loose])
        storage.remove(join(self.url, _SEARCH))


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities are equal, wherever the inputs are."""
    # without the files of each data set by URL, whose content the inputs state, too
    first, second = ({key: value for key, value in identity.items() if key != "data"} for identity in (one, other))
    return bool(by_content(first) == by_content(second))


def ended(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that have ended."""
    return [trial for trial in trials if trial.result is not None]


def best(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The complete trial with the highest value, the first among equals; None if no trial is complete."""
    complete = [(t.result.value, t) for t in trials if t.result is not None and t.result.state == "complete"]
    return max(((v, -t.number, t) for v, t in complete if v is not None), default=(0, 0, None))[2]


def _lines(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _read(url: str) -> Any:
    try:
        return json.loads(storage.read_bytes(url))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{url}: not JSON ({error}); remove the directory of this trial, or start anew with --fresh"
        ) from error


def _first_difference(a: Any, b: Any, key: str = "") -> str:
    """The first dotted key at which two plain values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in [*a, *(name for name in b if name not in a)]:
            if a.get(name) != b.get(name) or (name in a) != (name in b):
                return _first_difference(a.get(name), b.get(name), f"{key}.{name}" if key else str(name))
    return key or "everything"
