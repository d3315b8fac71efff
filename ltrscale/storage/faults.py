"""Errors of storage: which of them a retry may cure, for how long to retry, and one line with the URL and the remedy.

Every request is retried with growing pauses. All requests of the process share the clock of an outage: it starts at the
first failure after an answer. So a later request, such as the clean-up after a failed write, does not wait the whole
time again.
"""

import errno
import math
import os
import random
import re
import shutil
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from botocore import exceptions as boto  # type: ignore[import-untyped]

from ltrscale.errors import InputError, UnavailableError
from ltrscale.progress import log
from ltrscale.storage.names import is_local, local_path


class _Refusal(NamedTuple):
    """A store's answer: S3's code and the HTTP status, empty and 0 if the answer lacks them."""

    code: str
    status: int


# pyarrow reports S3's answer and the fate of the connection only in the text of an OSError
_ARROW = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))?")
_ARROW_NAME = re.compile(r"ExceptionName: (\w+)")  # S3's code, if pyarrow has no name for it
_ARROW_CERTIFICATE = re.compile(r"curlCode: (51|60|77)\b")
_FULL = re.compile(r"No space left on device|[Qq]uota exceeded|os error (28|122)\b")

_NETWORK = "NetworkConnection"
_OVERLOADED = {
    "IncompleteBody", "InternalError", "InternalFailure", "OperationAborted", "RequestThrottled", "RequestTimeout",
    "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests",
}  # fmt: skip
_OVERLOADED_STATUS = {429, 500, 502, 503, 504}
_EXPIRED = "the keys have expired; renew AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
_REMEDIES = {
    "AuthorizationHeaderMalformed": "check AWS_DEFAULT_REGION",
    "ExpiredToken": _EXPIRED,
    "NoSuchBucket": "check the path",
    "PermanentRedirect": "check AWS_DEFAULT_REGION",
    "RequestExpired": _EXPIRED,
    "RequestTimeTooSkewed": "the clocks of store and machine differ; set this machine's",
    "TokenRefreshRequired": _EXPIRED,
}
_OF_KEYS = (
    "AccessDenied", "InvalidAccessKey", "InvalidClientToken", "InvalidSecurity", "InvalidSignature", "InvalidToken",
    "MissingAuth", "Signature", "UnrecognizedClient",
)  # fmt: skip
_NO_KEYS = (PermissionError, boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)


def is_fault(error: BaseException) -> bool:
    """True if an error while reading a file is a fault of the storage, not of the content.

    pyarrow raises OSError for both: without an error number for undecodable content, and with its own text for an
    answer of S3.
    """
    if isinstance(error, OSError):
        return error.errno is not None or _refusal(error) is not None or _is_unreachable(error)
    return isinstance(error, boto.BotoCoreError)


def may_pass(error: Exception) -> bool:
    """True if a store cannot be reached or cannot serve now, so that a retry may succeed."""
    return _is_unreachable(error) or _is_overload(error)


def is_unexplained(error: Exception) -> bool:
    """True if a store refused without a reason, as it must for a HEAD request, because its answer has no body."""
    refusal = _refusal(error)
    return refusal is not None and refusal.code.isdecimal() and refusal.status in (400, 403)


def _refusal(error: BaseException) -> _Refusal | None:
    """The store's answer in an error; None if no store failed, or it gave no answer."""
    cause = error if isinstance(error, boto.ClientError) else error.__cause__  # s3fs chains an OSError to it
    if isinstance(cause, boto.ClientError):
        answer = cause.response
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return _Refusal(str(answer.get("Error", {}).get("Code", "")), int(status))
    if _is_of_http(error) and (status := getattr(error, "status", 0)):
        return _Refusal("", status)
    if (match := _ARROW.search(str(error))) is None:
        return None
    name = _ARROW_NAME.search(str(error))
    code = name[1] if name else "".join(word.capitalize() for word in match[1].split("_"))
    return _Refusal(code, int(match[2] or 0))


def _is_of_http(error: BaseException) -> bool:
    """True if aiohttp, which fsspec reads the web with, raised it; by name, because importing aiohttp takes .2 s."""
    return type(error).__module__.partition(".")[0] == "aiohttp"


def _is_overload(error: Exception) -> bool:
    refusal = _refusal(error)
    return refusal is not None and (refusal.code in _OVERLOADED or refusal.status in _OVERLOADED_STATUS)


def _is_unreachable(error: BaseException) -> bool:
    """True if there was no connection, or it ended before the whole answer arrived."""
    if _is_of_certificates(error):
        return False
    if isinstance(error, boto.ConnectionError | boto.HTTPClientError | boto.IncompleteReadError):
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    refusal = _refusal(error)
    if _is_of_http(error):
        return refusal is None
    return refusal is not None and refusal.code == _NETWORK


def _is_of_certificates(error: BaseException) -> bool:
    """True if a server's certificate was rejected, or the file of trusted certificates cannot be used."""
    cause = error.kwargs.get("error") if isinstance(error, boto.BotoCoreError) else error
    if type(error) is boto.HTTPClientError:  # botocore's unnamed error: loading certificates failed
        return isinstance(cause, ssl.SSLError | FileNotFoundError | IsADirectoryError | PermissionError)
    return isinstance(cause, ssl.SSLCertVerificationError) or _ARROW_CERTIFICATE.search(str(error)) is not None


def is_disk_full(error: BaseException) -> bool:
    """True if a disk or quota is exhausted, whichever library reports it."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _FULL.search(str(error)) is not None


def disk_full(url: str, need: int, folder: Path) -> InputError:
    """The error for the disk of `folder` without space for the file at `url`, of `need` bytes if these are known."""
    free = f"{shutil.disk_usage(folder).free:,}"
    url = url.replace("-{hash}", "")  # an unfinished file has no hash yet
    shortage = f"{need:,} bytes are needed, {free} are free" if need else f"more than the {free} bytes free are needed"
    remedy = "choose another directory" if is_local(url) else "set TMPDIR to another disk"
    return InputError(f"{url}: disk full: {shortage} in {folder}; make room or {remedy}")


@contextmanager
def named_errors(url: str, doing: str = "read", *, need: int = 0) -> Iterator[None]:
    """Turn an error of a file system into one line with the URL and what was being done.

    `need` are the bytes to be written, if known, for the message of a full disk.

    Raises:
        UnavailableError: the store cannot be reached or is overloaded.
        InputError: any other failure of storage.
    """
    try:
        yield
    except Exception as error:
        # s3fs does not translate some errors of botocore
        if not isinstance(error, OSError | boto.BotoCoreError) and not _is_of_http(error):
            raise
        if is_disk_full(error):
            raise disk_full(url, need, _folder(url)) from error
        if not is_local(url) and may_pass(error):
            raise UnavailableError(f"{url}: cannot {doing}: {_unavailable(error, url)}") from error
        raise InputError(f"{url}: {_explanation(error, url, doing)}") from error


def _folder(url: str) -> Path:
    """An existing directory on the written disk; for a remote URL, on the disk of the scratch files."""
    if not is_local(url):
        return Path(tempfile.gettempdir())
    path = local_path(url).absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _unavailable(error: Exception, url: str) -> str:
    if _is_overload(error):
        return f"the store is overloaded and refused every retry ({error}); run it again later"
    endpoint = " and AWS_ENDPOINT_URL" if url.startswith("s3://") else ""
    return f"the store does not answer ({error}); check the network{endpoint}"


def _explanation(error: Exception, url: str, doing: str) -> str:
    text, keys = str(error), "check your credentials"
    if _is_of_certificates(error):
        variable = "AWS_CA_BUNDLE" if url.startswith("s3://") else "SSL_CERT_FILE"
        return f"cannot {doing}: the server's certificate is not trusted ({text}); set {variable} to the file of its CA"
    if _is_of_http(error):
        keys = "check the address, and whether the server wants a login"
    if url.startswith("s3://"):
        keys = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if is_local(url):
        keys = "check its mode"
    refusal = _refusal(error)
    if refusal is not None and refusal.code in _REMEDIES:
        return f"cannot {doing}: the store refused with {refusal.code} ({text}); {_REMEDIES[refusal.code]}"
    if isinstance(error, FileNotFoundError):
        return "no such file, directory or bucket; check the path"
    if isinstance(error, _NO_KEYS) or (refusal is not None and _is_of_keys(refusal)):
        return f"no permission to {doing} ({text}); {keys}"
    if isinstance(error, NotADirectoryError):
        return f"cannot {doing}: a part of this path is a file; choose another path"
    if isinstance(error, IsADirectoryError):
        return f"cannot {doing}: {error.strerror}; name a file where a file is wanted"
    if is_local(url):
        return f"cannot {doing}: {text}; check the disk"
    if refusal is not None:
        return f"cannot {doing}: the store refused ({text}); {keys}, and that they have not expired"
    return f"cannot {doing}: {text}; check the path and the settings of the store"


def _is_of_keys(refusal: _Refusal) -> bool:
    """True if a store rejects the keys, or denies them this request."""
    return refusal.status in (401, 403) or refusal.code.startswith(_OF_KEYS)


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
