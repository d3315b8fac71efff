"""How long requests wait for a store that cannot be reached or refuses for now.

Every request is retried with growing pauses. All requests of the process share the clock of an outage: it starts at the
first failure after an answer. So a later request, such as the clean-up after a failed write, does not wait the whole
time again.
"""

import math
import os
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ltrscale.errors import InputError
from ltrscale.progress import log
from ltrscale.storage.faults import may_pass

T = TypeVar("T")

PATIENCE = "LTRSCALE_STORAGE_PATIENCE_S"
"""The environment variable with the number of seconds."""
_DEFAULT_S = 180.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_LOGGED_AFTER_S = 3.0  # a shorter outage is not worth a line in the log
_FORGOTTEN_AFTER_S = 60.0  # a failure this long after the last one starts a new outage


def patience_s() -> float:
    """Seconds for which requests are retried.

    Raises:
        InputError: the environment variable is not a number.
    """
    text = os.environ.get(PATIENCE, "")
    try:
        seconds = float(text or _DEFAULT_S)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InputError(f"{PATIENCE}={text}: not a number of seconds, 0 or more; set it to one, or unset it")
    return seconds


class _Outage:
    """The time since which all requests of this process have failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = self._last = -math.inf
        self._logged = False

    def failed(self, error: Exception, patience: float) -> float:
        """Record a request without an answer; returns the seconds since the first."""
        now = time.monotonic()
        with self._lock:
            if now - self._last > _FORGOTTEN_AFTER_S:
                self._since, self._logged = now, False
            self._last = now
            lasts = now - self._since
            logs = not self._logged and _LOGGED_AFTER_S < lasts < patience
            self._logged = self._logged or logs
        if logs:
            text = " ".join(str(error).split())
            log.warning("storage does not answer (%s); trying again for up to %.0f s", text, patience)
        return lasts

    def end(self) -> None:
        with self._lock:
            lasted, logged = time.monotonic() - self._since, self._logged
            self._since = self._last = -math.inf
            self._logged = False
        if logged:
            log.warning("storage answers again after %.0f s", lasted)


_outage = _Outage()


class Tries:
    """The tries of one request."""

    def __init__(self) -> None:
        self._failed = 0
        self._since = math.inf

    def pause_after(self, error: Exception) -> float | None:
        """Seconds to wait before the request is retried; None if a retry is useless or patience is exhausted."""
        if not may_pass(error):
            return None
        patience = patience_s()
        self._since = min(self._since, time.monotonic())
        waited = max(_outage.failed(error, patience), time.monotonic() - self._since)
        if waited >= patience:
            return None
        # the random part keeps many workers from asking a recovering store at the same moment
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**self._failed) * random.uniform(0.5, 1.0)
        self._failed += 1
        return min(pause, patience - waited)

    def answered(self) -> None:
        """Record that the request was answered, with success or not."""
        _outage.end()


def patiently(call: Callable[[], T]) -> T:
    """Call `call`, and repeat it while the store cannot be reached or is overloaded; returns its result.

    For reads through `arrow_filesystem`, which itself retries only for a second: an open file can be read again.

    Raises:
        OSError: from `call`: when patience is exhausted, or at once where a retry is useless.
    """
    tries = Tries()
    failed = False
    while True:
        try:
            result = call()
        except OSError as error:
            pause = tries.pause_after(error)
            if pause is None:
                raise
            failed = True
            time.sleep(pause)
        else:
            if failed:  # a call that never failed may have read a local file, which says nothing about the store
                tries.answered()
            return result
