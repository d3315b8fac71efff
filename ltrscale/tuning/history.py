"""The stored trials of a search, which are all it needs to resume, and an attempt at one.

`trials/00007/trial.json` exists once trial 7 has begun, `result.json` once it has ended, `interrupted.json` once an
attempt at it was interrupted or has taken a minute. A result is written once and never changes. `search.json` says
which search it is: a different one cannot continue the history.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.trial import TrialState
from pydantic import Field

from ltrscale import storage
from ltrscale.config import Strict, validate
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.origin import by_content
from ltrscale.processor import alongside
from ltrscale.progress import log
from ltrscale.storage import join
from ltrscale.tuning.space import STEP, VALUE, AshaConfig, Params, ReportValue, Space, as_trial, is_in

_SEARCH, _TRIALS, _BEGUN, _ENDED = "search.json", "trials", "trial.json", "result.json"
_INTERRUPTED = "interrupted.json"
LATE = "the search's minutes were up"
"""The reason of a trial that was stopped because the search had no time left."""


class Result(Strict):
    """The state of a trial, and how it has ended."""

    state: Literal["running", "complete", "stopped", "failed"]
    """`running`: not ended; `complete`: it finished; `stopped`: early, because other trials were better at the same
    step, or the search's minutes were up; `failed`: it raised an error, or its process died."""
    value: float | None = None
    """The metric; of a stopped trial, at its last step, if there was one."""
    curve: tuple[tuple[int, float], ...] = ()
    seconds: float = Field(0.0, ge=0)
    """Time of all attempts at it; of one that a kill cut off, to within a minute."""
    reason: str | None = None
    """Cause of a failure, or `LATE`."""


class Trial(Strict):
    """A trial that has begun."""

    number: int = Field(ge=0)
    """From 0, in the order of their beginnings."""
    params: dict[str, Any]
    """A value for every key of the space; trial 0 may have none, which means the config as given."""
    result: Result = Result(state="running")


@dataclass(frozen=True)
class History:
    """The history below a directory."""

    url: str
    space: Space | None = None
    """Trials outside it, left by a search of another space, are ignored; None reads all."""

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin a history, or check that the existing one belongs to this search.

        Only the values of the space's keys may change; an `InputError` names the first other difference.
        """
        url, identity = join(self.url, _SEARCH), _as_stored(identity)
        if storage.swap(url, None, _json_lines(identity)):
            return
        before = _identity_in(url)
        kept, wanted = _without_values(before), _without_values(identity)
        if not _is_same(kept, wanted):
            raise InputError(
                f"{self.url}: holds the history of another search, which differs in "
                f"{_first_difference(kept, wanted)}; choose another out, or remove that history with --fresh"
            )
        if before.get("space") != identity.get("space"):
            storage.check_lease(self.url)
            storage.write_bytes(url, _json_lines({**before, "space": identity["space"]}))
            known, inside = len(History(self.url).trials()), len(self.trials())
            log.info(
                "tune: the space has changed: %d of the %d trials go on, %d lie outside", inside, known, known - inside
            )

    def identity(self) -> dict[str, Any] | None:
        """The identity of the existing history; None if no history exists."""
        url = join(self.url, _SEARCH)
        return _identity_in(url) if storage.exists(url) else None

    def is_of_another(self, identity: Mapping[str, Any]) -> bool:
        """True if a history exists and belongs to another search."""
        before = self.identity()
        return before is not None and not _is_same(before, _as_stored(identity))

    def folder(self, number: int) -> str:
        """The directory of a trial."""
        return join(self.url, _TRIALS, f"{number:05d}")

    def begin(self, trial: Trial) -> None:
        """Record that a trial begins, or restarts; an `InputError` if another process has already begun it."""
        storage.check_lease(self.url)
        url = join(self.folder(trial.number), _BEGUN)
        if not storage.swap(url, None, _json_lines(trial.model_dump(mode="json", exclude={"result"}))):
            raise InputError(f"{url}: another process has begun this trial meanwhile; run one search at a time here")

    def end(self, number: int, result: Result) -> Result:
        """Record the result of a trial, unless it already has one; returns the recorded result."""
        storage.check_lease(self.url)
        url = join(self.folder(number), _ENDED)
        created = storage.swap(url, None, _json_lines(result.model_dump(mode="json")))
        return result if created else _result_in(url)

    def result(self, number: int) -> Result | None:
        """The result of a trial; None if it has not ended."""
        url = join(self.folder(number), _ENDED)
        return _result_in(url) if storage.exists(url) else None

    def trials(self) -> list[Trial]:
        """The trials that have begun, by number."""
        trials = []
        for folder in storage.children(join(self.url, _TRIALS)):
            url = join(folder, _BEGUN)
            if storage.exists(url):
                trial = validate(Trial, _read(url), url)
                if folder != self.folder(trial.number):
                    raise InputError(f"{url}: number {trial.number} does not match its directory; remove it")
                trials.append(trial.replace(result=self.result(trial.number) or unfinished(folder)))
        trials.sort(key=lambda trial: trial.number)
        return trials if self.space is None else lying_in(self.space, trials)

    def next_number(self) -> int:
        """A number above those of all trials, including those outside the space; at least 1."""
        names = (folder.rpartition("/")[2] for folder in storage.children(join(self.url, _TRIALS)))
        return max((int(name) for name in names if name.isdecimal()), default=0) + 1

    def remove(self, loose: Collection[str] = ()) -> None:
        """Delete the history, the outputs that trials committed, and the files named `loose` below the trials."""
        for folder in storage.children(join(self.url, _TRIALS)):
            if storage.exists(join(folder, _BEGUN)):  # there may be unrelated folders
                storage.withdraw_below(folder, loose)
                # the marker goes last, so an interrupted removal can resume
                for name in (_ENDED, _INTERRUPTED, _BEGUN):
                    storage.remove_with_folders(join(folder, name), self.url)
        storage.remove(join(self.url, _SEARCH))


def unfinished(folder: str) -> Result:
    """The state of a trial that has not ended, with the time of its interrupted attempts."""
    url = join(folder, _INTERRUPTED)
    return validate(Result, _read(url), url) if storage.exists(url) else Result(state="running")


def keep_unfinished(folder: str, seconds: float) -> None:
    """Record the time of the attempts at a trial, the last of which is or may be interrupted."""
    result = Result(state="running", seconds=seconds)
    storage.write_bytes(join(folder, _INTERRUPTED), _json_lines(result.model_dump(mode="json")))


def lying_in(space: Space, trials: Sequence[Trial]) -> list[Trial]:
    """The trials that a search of a space can reuse: trial 0, and those that the space contains."""
    return [trial for trial in trials if trial.number == 0 or is_in(space, trial.params)]


def ended(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that have ended."""
    return [trial for trial in trials if trial.result.state != "running"]


def counted(trials: Sequence[Trial]) -> str:
    """How many trials ended in each way, in words."""
    names = {"complete": "complete", "stopped": "stopped", "failed": "failed", "running": "interrupted"}
    states = [trial.result.state for trial in trials]
    return ", ".join(f"{states.count(state)} {name}" for state, name in names.items() if state in states)


def trials_by_value(trials: Sequence[Trial]) -> list[Trial]:
    """The complete trials, highest value first; of equal values, the earlier trial first."""
    complete = [trial for trial in trials if trial.result.state == "complete" and trial.result.value is not None]
    return sorted(complete, key=lambda trial: (-value_of(trial), trial.number))


def value_of(trial: Trial) -> float:
    """The value of a trial that has one."""
    assert trial.result.value is not None
    return trial.result.value


def best(trials: Sequence[Trial]) -> Trial | None:
    """The first of `trials_by_value`; None if no trial is complete."""
    return next(iter(trials_by_value(trials)), None)


def as_study(space: Space, trials: Sequence[Trial], **options: Any) -> optuna.Study:
    """The ended trials that the space contains as a study of Optuna; `options` go to `create_study`."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", **options)
    for trial in ended(trials):
        if is_in(space, trial.params):
            value = trial.result.value
            study.add_trial(as_trial(space, trial.params, state=state_of(value), value=value))
    return study


def state_of(value: float | None) -> TrialState:
    """Optuna's state of an ended trial with this value."""
    return TrialState.FAIL if value is None else TrialState.COMPLETE


def _as_stored(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity as JSON keeps it: its tuples are lists."""
    stored: dict[str, Any] = json.loads(json.dumps(identity))
    return stored


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two identities are equal, wherever the inputs are stored."""
    # `data` lists files by URL; the inputs already state their content
    first, second = ({key: value for key, value in identity.items() if key != "data"} for identity in (one, other))
    return bool(by_content(first) == by_content(second))


def _without_values(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity without the ranges and choices of its space; each key's `when` stays, as it changes the settings."""
    space = {key: {"when": dimension.get("when")} for key, dimension in identity.get("space", {}).items()}
    return {**identity, "space": space}


def _first_difference(a: Any, b: Any, key: str = "") -> str:
    """The first dotted key at which two plain values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in [*a, *(name for name in b if name not in a)]:
            if a.get(name) != b.get(name) or (name in a) != (name in b):
                return _first_difference(a.get(name), b.get(name), f"{key}.{name}" if key else str(name))
    return key or "everything"


def _result_in(url: str) -> Result:
    result = validate(Result, _read(url), url)
    if result.state == "running":
        raise InputError(f"{url}: is no result, as the trial has not ended; remove it")
    return result


def _identity_in(url: str) -> dict[str, Any]:
    identity = _read(url)
    space = identity.get("space", {}) if isinstance(identity, dict) else None
    if not isinstance(space, dict) or not all(isinstance(dimension, dict) for dimension in space.values()):
        raise InputError(f"{url}: does not say what was searched; start anew with --fresh")
    return dict(identity)


def _json_lines(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _read(url: str) -> Any:
    try:
        return json.loads(storage.read_bytes(url))
    except (ValueError, RecursionError) as error:
        remedy = "" if url.endswith(f"/{_SEARCH}") else "remove the directory of this trial, or "
        raise InputError(f"{url}: not JSON ({error}); {remedy}start anew with --fresh") from error


_KEEP_S = 60.0
"""How often a trial's time is kept for a kill."""
TrialFunction = Callable[[Params, str, ReportValue], float]
"""`trial(params, folder, report) -> value`: runs a trial, and resumes it after an interruption.

Params are empty for the config as given. Ray Tune pickles the function, and runs it in a separate process.
"""


def attempt(trial: TrialFunction, params: Params, folder: str, asha: AshaConfig | None) -> Result:
    """Run a trial until it finishes or fails."""
    curve, value, reason = _Curve(asha), None, None
    with _timed(folder) as seconds:
        try:
            value = float(trial(params, folder, curve))
            if not math.isfinite(value):
                reason = f"the metric is {value}"
        except (Stopped, UnavailableError):  # the same command resumes the trial
            raise
        except InputError as error:
            reason = str(error)
        except Exception as error:  # any error ends only this trial; the others continue
            log.exception("the trial failed")
            reason = " ".join(f"{type(error).__name__}: {error}".split())
    return Result(
        state="complete" if reason is None else "failed",
        value=value if reason is None else None,
        curve=tuple(curve.points),
        seconds=seconds(),
        reason=reason,
    )


@contextmanager
def _timed(folder: str) -> Iterator[Callable[[], float]]:
    """Yield the time of all attempts at a trial, kept when this one is interrupted, and every minute for a kill."""
    before, start = unfinished(folder).seconds, time.monotonic()

    def seconds() -> float:
        return round(before + time.monotonic() - start, 3)

    def keep() -> None:
        with suppress(InputError, UnavailableError):  # then the search may take longer, which must not fail a trial
            keep_unfinished(folder, seconds())

    def keep_until(over: threading.Event) -> None:
        while not over.wait(_KEEP_S):
            keep()

    try:
        with alongside(keep_until):
            yield seconds
    except BaseException:
        keep()
        raise


class _Curve:
    """Keeps values at steps 5% apart, and reports to Ray Tune the values at which ASHA decides."""

    def __init__(self, asha: AshaConfig | None) -> None:
        self.points: list[tuple[int, float]] = []
        self._asha, self._rung = asha, float(asha.grace if asha else math.inf)
        self._last, self._next = 0, 1

    def __call__(self, step: int, value: float) -> None:
        """Record a value, unless a resumed run repeats its step."""
        decides = step >= self._rung
        if not math.isfinite(value) or step <= self._last or (step < self._next and not decides):
            return
        self.points.append((step, value))
        self._last, self._next = step, math.ceil(step * 1.05)  # keeps the curve of a long trial short
        if not decides:
            return
        from ray import tune

        assert self._asha is not None
        while self._rung <= step:
            self._rung *= self._asha.reduction
        try:
            tune.report({STEP: step, VALUE: value})
        except SystemExit as error:  # Ray Tune ends a trial this way
            raise Stopped("other trials are better at this step") from error
