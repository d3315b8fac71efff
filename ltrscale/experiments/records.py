"""JSON records from which a restarted job continues, and the record of training time."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Self

from ltrscale import storage
from ltrscale.config import Strict, StrictT, validate
from ltrscale.errors import InputError, UnavailableError
from ltrscale.origin import digest
from ltrscale.stages.runs import heard_by
from ltrscale.storage import join


def read_record(cls: type[StrictT], url: str, remedy: str) -> StrictT | None:
    """The record in a file, None if there is no file; an `InputError` that ends with the remedy if it is invalid."""
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


_WRITE_S = 30.0


class Spent(Strict):
    """Time and documents of a training so far; `spent.json` beside its output."""

    of: str
    """Digest of what was trained."""
    seconds: float = 0.0
    start_s: float = 0.0
    """Those before the first step, in which features are fitted and libraries loaded."""
    documents: int = 0
    done: bool = False

    @classmethod
    def read(cls, folder: str) -> Self | None:
        """The record of a directory; None if it has none."""
        return read_record(cls, join(folder, "spent.json"), "remove it")


@contextmanager
def timed(folder: str, of: object) -> Iterator[None]:
    """Add the time of the block, and the documents that its trainings read, to the record of a directory.

    It is written every half minute and at the end; a block without training leaves it unchanged.
    """
    digested = digest(of)
    before = Spent.read(folder)
    if before is None or before.of != digested:
        before = Spent(of=digested)
    start, documents, written, trains = time.monotonic(), 0, time.monotonic(), False
    start_s = before.start_s

    def write(*, done: bool) -> None:
        seconds = before.seconds + time.monotonic() - start
        total = before.documents + documents
        spent = Spent(of=digested, seconds=round(seconds, 3), start_s=round(start_s, 3), documents=total, done=done)
        storage.write_bytes(join(folder, "spent.json"), record_bytes(spent))

    def hear(record: Mapping[str, object]) -> None:
        nonlocal documents, start_s, written, trains
        trains = True
        if "step" in record and isinstance(read := record.get("documents"), int):
            if not documents:
                start_s += time.monotonic() - start
            documents += read
        if time.monotonic() - written >= _WRITE_S and not before.done:
            written = time.monotonic()
            write(done=False)

    try:
        with heard_by(hear):
            yield
    except BaseException:
        if trains and not before.done:
            with suppress(InputError, UnavailableError):  # the store may fail here too: report the first error
                write(done=False)
        raise
    if trains and not before.done:
        write(done=True)
