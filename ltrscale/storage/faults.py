"""What storage fails with, as one line that names the URL and the remedy; and what is worth another try."""

import errno
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
)

from ltrscale.errors import InputError
from ltrscale.storage.urls import is_local, local_path

T = TypeVar("T")

_PATIENCE = 40.0
"""Seconds for which `patiently` tries again."""

# pyarrow tells what S3 answered in the text of an OSError only
_ARROW_FAULT = "AWS Error "
_DENIED = re.compile(r"AWS Error (ACCESS_DENIED|INVALID_|MISSING_AUTH|SIGNATURE_|UNRECOGNIZED_CLIENT|REQUEST_EXPIRED)")
_OVERLOADED = re.compile(
    r"AWS Error (SLOW_DOWN|SERVICE_UNAVAILABLE|THROTTLING|INTERNAL_FAILURE|REQUEST_TIMEOUT|UNKNOWN \(HTTP status 50)"
)
_FULL = re.compile(r"No space left on device|[Qq]uota exceeded|os error (28|122)\b")


def is_fault(error: BaseException) -> bool:
    """Whether what was raised while a file was read is the fault of the storage, and says nothing of the content.

    pyarrow raises OSError for both: for what it cannot decode without an error number, and for what S3 answers with
    a text of its own.
    """
    if isinstance(error, OSError):
        return error.errno is not None or _ARROW_FAULT in str(error)
    return isinstance(error, BotoCoreError)


def is_disk_full(error: BaseException) -> bool:
    """Whether a disk or quota was exhausted, whatever library found out."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _FULL.search(str(error)) is not None


def disk_full(url: str, need: int, folder: Path) -> InputError:
    """The error of a disk without room for what is written to `url`.

    Args:
        url: what is written.
        need: its bytes; 0 where they are not known, but to be more than what is free.
        folder: a directory on the disk.
    """
    free = f"{shutil.disk_usage(folder).free:,}"
    room = f"{need:,} bytes are needed, {free} are free" if need else f"more than the {free} bytes free are needed"
    remedy = "choose another directory" if is_local(url) else "set TMPDIR to another disk"
    return InputError(f"{url}: disk full: {room} in {folder}; make room or {remedy}")


@contextmanager
def named_errors(url: str, doing: str = "read", *, need: int = 0) -> Iterator[None]:
    """Turn what a file system raises into one line that names the URL.

    Args:
        url: what is read or written.
        doing: the verb of the message.
        need: bytes to be written, where they are known, for the message of a full disk.
    """
    try:
        yield
    except (OSError, BotoCoreError) as error:  # s3fs lets some of botocore's errors through
        if is_disk_full(error):
            raise disk_full(url, need, _folder(url)) from error
        raise InputError(f"{url}: {_explanation(error, url, doing)}") from error


def _folder(url: str) -> Path:
    """The directory on whose disk a file or directory is written, before it is uploaded if it is remote."""
    if not is_local(url):
        return Path(tempfile.gettempdir())
    path = local_path(url).absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _explanation(error: Exception, url: str, doing: str) -> str:
    s3, text = url.startswith("s3://"), str(error)
    if isinstance(error, FileNotFoundError):
        return "no such file, directory or bucket; check the path"
    denied = (PermissionError, NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
    if isinstance(error, denied) or _DENIED.search(text):
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if s3 else "your credentials"
        return f"no permission to {doing} ({text}); {'check its mode' if is_local(url) else f'check {keys}'}"
    if isinstance(error, NotADirectoryError):
        return f"cannot {doing}: a part of this path is a file; choose another path"
    if isinstance(error, IsADirectoryError):
        return f"cannot {doing}: {error.strerror}; name a file where a file is wanted"
    if is_local(url):
        return f"cannot {doing}: {text}; check the disk"
    if _is_overload(error):
        return f"cannot {doing}: the store is overloaded and refused every retry ({text}); run it again later"
    return f"cannot {doing}: {text}; check the network{' and AWS_ENDPOINT_URL' if s3 else ''}"


def _is_overload(error: Exception) -> bool:
    """Whether a remote store has answered that it cannot serve now."""
    by_s3fs = getattr(error, "errno", None) in (errno.EBUSY, errno.EREMOTEIO)
    return by_s3fs or _OVERLOADED.search(str(error)) is not None


def patiently(call: Callable[[], T]) -> T:
    """What `call` returns; called again for most of a minute where S3 is overloaded.

    For reads through `arrow_filesystem`, whose own retries are few seconds each: a file that is open can be read again.

    Raises:
        OSError: as `call`, once patience is at its end or at once if it has failed otherwise.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return call()
        except OSError as error:
            if not _OVERLOADED.search(str(error)) or time.monotonic() > end:
                raise
