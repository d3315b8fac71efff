"""The one error that a user is meant to read."""


class InputError(Exception):
    """Something that the user gave cannot be used; the message names file, row or key, and the remedy.

    Jobs print it as one line without a traceback and exit with status 2. Every other exception is a defect of
    ours and keeps its traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
