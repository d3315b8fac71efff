"""Records that jobs keep in JSON files of their own, to go on from where an earlier process was."""

import json

from ltrscale import storage
from ltrscale.config import Strict, StrictT, validate
from ltrscale.errors import InputError


def read_record(cls: type[StrictT], url: str, remedy: str) -> StrictT | None:
    """The record in a file, None without one; an `InputError` that ends with the remedy if it is invalid."""
    data = storage.read_if_there(url)
    if data is None:
        return None
    try:
        return validate(cls, json.loads(data), url)
    except (ValueError, RecursionError) as error:  # json raises RecursionError for deep nesting
        raise InputError(f"{url}: not JSON ({error}); {remedy}") from error
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from error


def record_bytes(value: Strict) -> bytes:
    """A record as JSON for `read_record`."""
    return (json.dumps(value.model_dump(mode="json"), indent=1) + "\n").encode()
