"""The directories that a run logs as written."""

import logging
from typing import Protocol

from ltrscale.progress import log


class Runs(Protocol):
    """A job of several stages."""

    @property
    def out(self) -> str: ...
    def run(self) -> object: ...


def written_directories(job: Runs) -> list[str]:
    """Run a job; returns the paths, below its output directory, that the log names as written."""
    written: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if ": writing " in record.getMessage():
                written.append(record.getMessage().split(job.out + "/")[-1])

    listener, level = Listener(), log.level
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    try:
        job.run()
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
    return written
