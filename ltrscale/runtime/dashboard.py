"""The dashboard of a Ray cluster: submit and follow jobs from any machine.

A job's log is shown until it ends, however often the connection is lost.
"""

import asyncio
import logging
import math
import os
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO
from urllib.parse import urlsplit

import aiohttp

from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.progress import called, log
from ltrscale.runtime.engine import with_environment
from ltrscale.signals import handling

ADDRESS = "RAY_API_SERVER_ADDRESS"
"""The environment variable with the address, as in Ray's own tools."""
_ANSWER_S = 10.0


def address_of(given: str | None) -> str:
    """The address of a dashboard without a trailing slash: the given one, or else from the environment.

    Raises:
        InputError: there is none, or it is not an HTTP address.

    Example:
        >>> address_of("http://head:8265/")
        'http://head:8265'
        >>> address_of("head:6379")
        Traceback (most recent call last):
        ltrscale.errors.InputError: head:6379: no address of a dashboard; write it as http://HEAD:8265
    """
    address = (given or os.environ.get(ADDRESS, "")).rstrip("/")
    if not address:
        raise InputError(
            f"address: no cluster is named; give --address http://HEAD:8265, or set {ADDRESS}; "
            'eval "$(python cluster/local.py start)" starts a cluster here and sets it'
        )
    if not address.startswith(("http://", "https://")) or not urlsplit(address).hostname:
        raise InputError(f"{address}: no address of a dashboard; write it as http://HEAD:8265")
    return address


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray's client for a dashboard; inside the block its errors become one line.

    Raises:
        UnavailableError: nobody answers there.
        InputError: the dashboard refuses a request or the token.
    """
    from ray.exceptions import AuthenticationError  # imported late: many processes never use Ray
    from ray.job_submission import JobSubmissionClient

    check_answers(address)
    try:
        with _quiet_ray():
            with with_environment(**{ADDRESS: address}):  # for Ray the variable takes precedence over the argument
                client = JobSubmissionClient(address)
            yield client
    except AuthenticationError as error:
        raise InputError(
            f"{address}: the dashboard asks for a token ({str(error).splitlines()[0]}); set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN_PATH to the file with the cluster's token"
        ) from error
    except Exception as error:
        if type(error) not in (RuntimeError, ConnectionError) and not type(error).__module__.startswith("requests"):
            raise
        text = f"the request to the dashboard failed ({error})"
        if isinstance(error, OSError):
            raise UnavailableError(f"{address}: {text}; see whether the cluster's head lives") from error
        raise InputError(f"{address}: {text}; see whether this is the dashboard of a Ray cluster") from error


@contextmanager
def _quiet_ray() -> Iterator[None]:
    """Hide Ray's lines about packages and sockets; its modules set the levels of their own loggers."""
    handlers = [each for each in logging.getLogger("ray").handlers if type(each).__module__.startswith("ray.")]
    levels = [handler.level for handler in handlers]
    try:
        for handler in handlers:
            handler.setLevel(logging.ERROR)
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


def check_answers(address: str) -> None:
    """Check that a process listens at an address, since Ray itself would try for minutes.

    Raises:
        UnavailableError: none does.
    """
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((str(parts.hostname), port), timeout=_ANSWER_S).close()
    except OSError as error:
        raise UnavailableError(
            f"{address}: no dashboard answers there ({error}); check the address, and that the cluster runs; from "
            "another network, `ssh -L 8265:127.0.0.1:8265 HEAD` leads there as http://127.0.0.1:8265"
        ) from error


_POLL_S = 1.0
_PATIENCE_S = 60.0
_STOPPED = 128 + 15


def follow(client: Any, attempt: str, address: str) -> int:
    """Show the log of an attempt until it ends; returns its exit status.

    Raises:
        Stopped: at Ctrl-C or SIGTERM; the attempt keeps running.
        UnavailableError: the dashboard did not answer for a minute.
    """
    come: list[int] = []

    def leave(number: int, _frame: object) -> None:
        come.append(number)
        raise KeyboardInterrupt  # the only exception that an event loop lets through

    try:
        with handling(leave):
            job = show_log(client, attempt, sys.stdout)
    except KeyboardInterrupt:
        command = f"{called('submit')} --address {shlex.quote(address)} --id {attempt}"
        message = f"following; {attempt} runs on. `{command}` follows it again, `{command} --action stop` stops it"
        raise Stopped(message, status=128 + come[0]) from None
    log.info("%s: %s", attempt, state(job))
    match str(job.status):
        case "SUCCEEDED":
            return 0
        case "STOPPED":
            return _STOPPED
    if job.driver_exit_code is None:  # it did not start; otherwise its log explains the failure
        log.error("%s: %s", attempt, " ".join((job.message or "").split()))
    code = int(job.driver_exit_code or 1)
    return code if code > 0 else 128 - code  # -9 where signal 9 ended it


def show_log(client: Any, attempt: str, sink: TextIO) -> Any:
    """Write an attempt's log to `sink` until it ends; returns its details."""
    whole = _Log(sink)
    failing_since = -math.inf
    while True:
        try:
            asyncio.run(whole.show(client.tail_job_logs(attempt)))
            job = client.get_job_info(attempt)
            if job.status.is_terminal():
                with suppress(RuntimeError):  # its node may be gone with the end of the log
                    whole.show_rest(client.get_job_logs(attempt))
                return job
        except (OSError, RuntimeError, aiohttp.ClientError) as error:  # the dashboard may restart
            now = time.monotonic()
            if whole.heard >= failing_since:  # the retry brings the whole log again
                failing_since = now
            if now - failing_since > _PATIENCE_S:
                raise UnavailableError(
                    f"{attempt}: the dashboard has not answered for {_PATIENCE_S:.0f} s ({error}); if the cluster "
                    "lives the job continues, and the same command follows it again"
                ) from error
        time.sleep(_POLL_S)


class _Log:
    """Shows a log without repeats, however often it is read from its beginning."""

    def __init__(self, sink: TextIO) -> None:
        self._sink, self._shown = sink, 0
        self.heard = 0.0
        """Time of the last part, by the monotonic clock."""

    async def show(self, texts: AsyncIterator[str]) -> None:
        """Show the parts of the log as they come."""
        end = 0
        async for text in texts:
            end += len(text)
            self.heard = time.monotonic()
            self.show_rest(text, end - len(text))

    def show_rest(self, text: str, begin: int = 0) -> None:
        """Show what is new in a text that starts at a position of the log."""
        self._sink.write(text[max(0, self._shown - begin) :])
        self._sink.flush()
        self._shown = max(self._shown, begin + len(text))


def state(job: Any) -> str:
    """The status of an attempt, in words."""
    word = str(job.status).lower()
    return f"{word} with status {job.driver_exit_code}" if job.driver_exit_code else word
