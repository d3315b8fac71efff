"""Following a submitted job: its log is shown until it ends, however often the connection is lost."""

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, TextIO

import aiohttp

from ltrscale.errors import Stopped, UnavailableError
from ltrscale.progress import log
from ltrscale.signals import handling

_POLL_S = 1.0
_PATIENCE_S = 60.0
_STOPPED = 128 + 15


def follow(client: Any, attempt: str, address: str) -> int:
    """Show the log of an attempt until it ends; returns its exit status.

    Raises:
        Stopped: at Ctrl-C or SIGTERM; the attempt goes on.
        UnavailableError: the dashboard did not answer for a minute.
    """
    come: list[int] = []

    def leave(number: int, _frame: object) -> None:
        come.append(number)
        raise KeyboardInterrupt  # the one exception that an event loop lets through

    try:
        with handling(leave):
            job = attempt_details(client, attempt, sys.stdout)
    except KeyboardInterrupt:
        again = f"python -m jobs.submit --address {address} --id {attempt}"
        message = f"following; {attempt} goes on. `{again}` follows it again, `{again} --action stop` stops it"
        raise Stopped(message, status=128 + come[0]) from None
    log.info("%s: %s", attempt, state(job))
    match str(job.status):
        case "SUCCEEDED":
            return 0
        case "STOPPED":
            return _STOPPED
    if job.driver_exit_code is None:  # it did not begin; otherwise its own log explains the failure
        log.error("%s: %s", attempt, " ".join((job.message or "").split()))
    code = int(job.driver_exit_code or 1)
    return code if code > 0 else 128 - code  # -9 where signal 9 ended it


def attempt_details(client: Any, attempt: str, sink: TextIO) -> Any:
    """The details of an attempt after its end; its log was written to `sink` meanwhile."""
    whole = _Log(sink)
    failing_since = -math.inf
    while True:
        try:
            asyncio.run(whole.show(client.tail_job_logs(attempt)))
            job = client.get_job_info(attempt)
            if job.status.is_terminal():
                with suppress(RuntimeError):  # its node may be gone, with the end of the log
                    whole.show_rest(client.get_job_logs(attempt))
                return job
        except (OSError, RuntimeError, aiohttp.ClientError) as error:  # the dashboard may start again
            now = time.monotonic()
            if whole.heard >= failing_since:  # which brings the whole log once more
                failing_since = now
            if now - failing_since > _PATIENCE_S:
                raise UnavailableError(
                    f"{attempt}: the dashboard has not answered for {_PATIENCE_S:.0f} s ({error}); if the cluster "
                    "lives the job goes on, and the same command follows it again"
                ) from error
        time.sleep(_POLL_S)


class _Log:
    """A log of which no character is shown twice, however often it is read from its beginning."""

    def __init__(self, sink: TextIO) -> None:
        self._sink, self._shown = sink, 0
        self.heard = 0.0
        """When a part came last, by the monotonic clock."""

    async def show(self, texts: AsyncIterator[str]) -> None:
        """Show the parts of the log, each as it comes."""
        end = 0
        async for text in texts:
            end += len(text)
            self.heard = time.monotonic()
            self.show_rest(text, end - len(text))

    def show_rest(self, text: str, begin: int = 0) -> None:
        """Show what is new in a text that begins at a position of the log."""
        self._sink.write(text[max(0, self._shown - begin) :])
        self._sink.flush()
        self._shown = max(self._shown, begin + len(text))


def state(job: Any) -> str:
    """How an attempt stands, in words."""
    word = str(job.status).lower()
    return f"{word} with status {job.driver_exit_code}" if job.driver_exit_code else word
