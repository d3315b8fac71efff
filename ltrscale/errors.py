"""What ends a job without being a defect: an error that a user is meant to read, and a request to stop."""

from typing import ClassVar


class InputError(Exception):
    """Something that the user gave cannot be used; the message names file, row or key, and the remedy.

    Jobs print it as one line without a traceback and exit with status 2. Every other exception is a defect of
    ours and keeps its traceback.
    """

    status: ClassVar[int] = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UnavailableError(InputError):
    """Storage could not be reached, or was overloaded, for as long as is waited for it.

    The same may succeed later, so workers that fail with it are started again, as after any other failure.
    """


class Stopped(Exception):  # noqa: N818 - it is none
    """The work was asked to stop, and the same command goes on from its newest checkpoint.

    Jobs print it as one line and exit as a process does that SIGTERM has ended.
    """

    status: ClassVar[int] = 128 + 15
