"""How a job may end without a defect: an error for the user, an outage, a failed check, a request to stop.

After them come the texts of messages: without credentials, and with the name that was probably meant.
"""

import difflib
import os
import re
from collections.abc import Collection
from typing import ClassVar, NoReturn


class ExpectedEnd(Exception):  # noqa: N818 - not every end is an error
    """The work ends early, and nothing is wrong with this package.

    Jobs print the lines of the message, without a traceback, and exit with the status. Every other exception is a
    defect of this package and keeps its traceback.
    """

    status: int = 2
    word: ClassVar[str] = "error"
    """What each line begins with."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*(without_credentials(" ".join(line.split())) for line in lines))

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class InputError(ExpectedEnd):
    """An input of the user cannot be used; the message names file, row or key, and the remedy."""


class UnavailableError(ExpectedEnd):
    """Something that the work needs is gone for now, and the same command may get past that later.

    Storage could not be reached, or was overloaded, for longer than `LTRSCALE_STORAGE_PATIENCE_S` allows; a dashboard
    or cluster did not answer; or Ray's own processes died. All that reads or writes storage may raise it. It is no
    `InputError`, because it says nothing about an input: work that goes on after an input error ends with an outage,
    and the same command resumes it.
    """


class Refused(ExpectedEnd):
    """A check that the user asked for failed; each line of the message is a reason.

    Its status lets scripts distinguish it from an error.
    """

    status = 3
    word = "refused"


class Stopped(ExpectedEnd):
    """The work was asked to stop; the same command resumes it from its newest checkpoint.

    Its status is that of a process that the signal ended: 143 after SIGTERM, 130 after Ctrl-C.
    """

    word = "stopped"

    def __init__(self, message: str = "", *, status: int = 128 + 15) -> None:
        super().__init__(message)
        self.status = status
        self.is_late = False
        """Whether the time of `ending_by` was up, without a signal."""


def end_at_once() -> NoReturn:
    """End the process as Ctrl-C does, with one line, and without waiting for anything."""
    os.write(2, b"stopped\n")  # not print, because the signal may have come in the middle of another print
    os._exit(128 + 2)


_USER = re.compile(r"(?<=://)[^/\s@\"']+@")
_SECRET_NAME = r"(?:sig|signature|token|secret|passwd|password|credential|auth|key|accesskeyid|accessid)"
_QUERY = re.compile(rf"([?&][^=&\s]*{_SECRET_NAME}=)[^&\s\"']+", re.IGNORECASE)
_SETTING = re.compile(rf"([\w.-]*{_SECRET_NAME}[\"']?\s*[=:]\s*[\"']?)[^\s&\"',}}]+", re.IGNORECASE)


def without_credentials(text: str, *, settings: bool = False) -> str:
    """A text for files, logs and messages, with the user, password, signatures and keys of URLs removed.

    With `settings` also the values of `password=...`, `token: ...` and the like outside URLs.

    Example:
        >>> without_credentials("https://me:pass@host/log?id=7&X-Amz-Signature=ab12: forbidden")
        'https://***@host/log?id=7&X-Amz-Signature=*** forbidden'
        >>> without_credentials("source.token=ab12", settings=True)
        'source.token=***'
    """
    text = _QUERY.sub(r"\1***", _USER.sub("***@", text))
    return _SETTING.sub(r"\1***", text) if settings else text


def nearest(name: str, known: Collection[str], *, alike: float = 0.0) -> str | None:
    """The known name most similar to a wrong one; None if none reaches `alike`, from 0 (any name) to 1 (equal).

    Example:
        >>> nearest("widht", ["depth", "width"]), nearest("price", ["width"], alike=0.5)
        ('width', None)
    """
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=alike)), None)


def suggestion(name: str, known: Collection[str], otherwise: str) -> str:
    """The remedy for a wrong name: a very similar known name, otherwise at most ten known names.

    Example:
        >>> suggestion("prise", ["price", "brand"], "its columns are")
        "did you mean 'price'?"
        >>> suggestion("margin", ["rating", *"abcdefghijk"], "its columns are")
        'its columns are rating, a, b, c, d, e, f, g, h, i and 2 more'
    """
    # below .7, words match that only share a few letters, such as action and rating
    if closest := nearest(name, known, alike=0.7):
        return f"did you mean {closest!r}?"
    more = f" and {len(known) - 10} more" if len(known) > 10 else ""
    return f"{otherwise} {', '.join([*known][:10])}{more}"
