"""What ends a job without being a defect: an error that a user is meant to read, and a request to stop."""

import difflib
import re
from collections.abc import Collection
from typing import ClassVar

_USER = re.compile(r"(?<=://)[^/\s@\"']+@")
_SECRET_NAME = r"(?:sig|signature|token|secret|passwd|password|credential|auth|key|accesskeyid|accessid)"
_QUERY = re.compile(rf"([?&][^=&\s]*{_SECRET_NAME}=)[^&\s\"']+", re.IGNORECASE)
_SETTING = re.compile(rf"([\w.-]*{_SECRET_NAME}[\"']?\s*[=:]\s*[\"']?)[^\s&\"',}}]+", re.IGNORECASE)


def without_credentials(text: str, *, settings: bool = False) -> str:
    """A text for files, logs and messages: URLs in it lose user, password, and what signs or opens them.

    Args:
        text: any.
        settings: `password=...`, `token: ...` and the like lose their values outside URLs as well.

    Example:
        >>> without_credentials("https://me:pass@host/log?id=7&X-Amz-Signature=ab12: forbidden")
        'https://***@host/log?id=7&X-Amz-Signature=*** forbidden'
        >>> without_credentials("source.token=ab12", settings=True)
        'source.token=***'
    """
    text = _QUERY.sub(r"\1***", _USER.sub("***@", text))
    return _SETTING.sub(r"\1***", text) if settings else text


def nearest(name: str, known: Collection[str], *, alike: float = 0.0) -> str | None:
    """The known name that a wrong one is most like; None where none is `alike` enough, from 0 (anything) to 1 (equal).

    Example:
        >>> nearest("widht", ["depth", "width"]), nearest("price", ["width"], alike=0.5)
        ('width', None)
    """
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=alike)), None)


class InputError(Exception):
    """Something that the user gave cannot be used; the message names file, row or key, and the remedy.

    Jobs print it as one line without a traceback and exit with status 2. Every other exception is a defect of
    ours and keeps its traceback.
    """

    status: ClassVar[int] = 2

    def __init__(self, message: str) -> None:
        super().__init__(without_credentials(" ".join(message.split())))


class UnavailableError(InputError):
    """Storage could not be reached, or was overloaded, for as long as is waited for it.

    The same may succeed later, so workers that fail with it are started again, as after any other failure.
    """


class Stopped(Exception):  # noqa: N818 - it is none
    """The work was asked to stop, and the same command goes on from its newest checkpoint.

    Jobs print it as one line and exit as a process does that SIGTERM has ended.
    """

    status: ClassVar[int] = 128 + 15
