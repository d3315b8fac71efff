"""The dashboard of a Ray cluster, through which jobs are submitted from any machine."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from ltrscale.errors import InputError, UnavailableError
from ltrscale.runtime.engine import with_environment

ADDRESS = "RAY_API_SERVER_ADDRESS"
"""The environment variable with the address, as in Ray's own tools."""
_ANSWER_S = 10.0


def address_of(given: str | None) -> str:
    """The address of a dashboard, without a slash at its end: the given one, or else that of the environment.

    Raises:
        InputError: there is none, or it is no address of HTTP.

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
    """Ray's client of a dashboard; inside the block its errors become one line.

    Raises:
        UnavailableError: nobody answers there.
        InputError: the dashboard refuses a request, or asks for another token.
    """
    from ray.exceptions import AuthenticationError  # imported late: many processes never use Ray
    from ray.job_submission import JobSubmissionClient

    check_answers(address)
    try:
        with _quiet_ray():
            with with_environment(**{ADDRESS: address}):  # Ray heeds the variable before the argument
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
    """Keep Ray's lines about packages and sockets from our output; its modules set the levels of their own loggers."""
    handlers = [each for each in logging.getLogger("ray").handlers if type(each).__module__.startswith("ray.")]
    before = [handler.level for handler in handlers]
    try:
        for handler in handlers:
            handler.setLevel(logging.ERROR)
        yield
    finally:
        for handler, level in zip(handlers, before, strict=True):
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
