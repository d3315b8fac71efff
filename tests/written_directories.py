"""The directories that a run logs as written."""

import logging
from collections.abc import Callable
from typing import TypeVar

from ltrscale.experiments.crossval import CrossvalJob
from ltrscale.experiments.pipeline import PipelineConfig
from ltrscale.experiments.stack import StackJob
from ltrscale.experiments.study_grid import StudyConfig
from ltrscale.progress import log

ConfigT = TypeVar("ConfigT", PipelineConfig, CrossvalJob, StackJob, StudyConfig)


def written_directories(run: Callable[[ConfigT], None], config: ConfigT) -> list[str]:
    """Run a config; returns the paths, below its output directory, that the log names as written."""
    written: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if ": writing " in record.getMessage():
                written.append(record.getMessage().split(config.out + "/")[-1])

    listener, level = Listener(), log.level
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    try:
        run(config)
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
    return written
