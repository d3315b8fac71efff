"""Requests to stop: SIGTERM, and Ctrl-C (SIGINT), which mean the same; a second Ctrl-C ends the process at once."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType

from ltrscale.errors import Stopped, end_at_once
from ltrscale.progress import log

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Let a function handle both signals while the block runs, in the main thread.

    Ctrl-C stays ignored in a process started that way, such as a background process of a shell script.
    """
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    numbers = (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGINT)
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


@contextmanager
def stop_on_signal() -> Iterator["StopRequest"]:
    """Keep the signals from ending the process while the block runs; yields whether one has come.

    `Stopped`, raised by the block, gets the exit status of the signal. A block that ends by itself passes the signal
    on, so that the next stage does not begin. Python handles no signal outside the main thread, so none comes there.
    """
    stop_request = StopRequest()
    handlers = nullcontext()
    if threading.current_thread() is threading.main_thread():
        handlers = handling(stop_request.by_signal)  # type: ignore[assignment]
    with handlers:
        try:
            yield stop_request
        except Stopped as error:
            error.status, error.is_late = stop_request.status, stop_request.is_late()
            raise
    for number in stop_request.come[:1]:
        signal.raise_signal(number)


@contextmanager
def ending_on_signal() -> Iterator[None]:
    """End the block at a signal; `stop_on_signal` inside it replaces the handler with one that lets work end well.

    Raises:
        Stopped: a signal has come.
    """
    stop_request = StopRequest()

    def stop(number: int, frame: FrameType | None) -> None:
        stop_request.by_signal(number, frame)
        raise KeyboardInterrupt  # while Ray waits, it holds back any other exception

    with handling(stop):
        try:
            yield
        except Stopped:
            raise
        except (Exception, KeyboardInterrupt):  # libraries turn an interrupt into their own errors
            if not stop_request.come:
                raise
            message = "asked to stop; the same command does what is left to do"
            raise Stopped(message, status=stop_request.status) from None


_end: ContextVar[float] = ContextVar("end", default=math.inf)


@contextmanager
def ending_by(time_s: float) -> Iterator[None]:
    """Ask work started in the block, in this thread, to stop at a time of `time.monotonic()`, as a signal would.

    Work that looks at `stop_on_signal` then ends with what validation found best by then; without anything it leaves a
    checkpoint and raises `Stopped`, which `is_late`.
    """
    token = _end.set(min(time_s, _end.get()))
    try:
        yield
    finally:
        _end.reset(token)


class StopRequest:
    """Whether a signal or the time to end has come; logged when first asked, because a handler must not write."""

    def __init__(self) -> None:
        self.come: list[int] = []
        self._end, self._logged = _end.get(), False

    def is_late(self) -> bool:
        """True if the time of `ending_by` is up, without a signal."""
        return not self.come and time.monotonic() >= self._end

    @property
    def status(self) -> int:
        """The exit status of a process that the first signal ends; that of SIGTERM where another process was asked."""
        return 128 + (self.come[0] if self.come else signal.SIGTERM)

    def by_signal(self, number: int, _frame: FrameType | None) -> None:
        """Record a signal; a second Ctrl-C ends the process."""
        if number == signal.SIGINT and number in self.come:
            end_at_once()
        self.come.append(number)

    def __call__(self) -> bool:
        """True if a signal or the end has come."""
        if self.come and not self._logged:
            self._logged = True
            hint = "; Ctrl-C again ends at once" if signal.SIGINT in self.come else ""
            log.info("asked to stop: a checkpoint follows%s", hint)
        return bool(self.come) or self.is_late()
