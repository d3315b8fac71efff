"""An attempt at a trial: its result, its time with that of earlier attempts, and what ASHA hears on the way."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.processor import alongside
from ltrscale.progress import log
from ltrscale.tuning.history import Result, keep_unfinished, unfinished
from ltrscale.tuning.space import STEP, VALUE, AshaConfig, Params, ReportValue

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
