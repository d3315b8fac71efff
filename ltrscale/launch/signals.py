"""Requests to stop that reach a process as a signal."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ltrscale.progress import log


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """While the block runs SIGTERM does not end the process; yields a function that says whether it has come.

    Outside the main thread, where Python takes no signals, the answer is always no.
    """
    asked = _Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, asked.by_signal)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


class _Asked:
    """Whether a signal has come; says so in the log when that is noticed, for a signal handler must not write."""

    def __init__(self) -> None:
        self._come = self._told = False

    def by_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._come = True

    def __call__(self) -> bool:
        if self._come and not self._told:
            self._told = True
            log.info("asked to stop: a checkpoint follows")
        return self._come
