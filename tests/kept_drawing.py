"""A process that draws the charts of many tests: to start one for each page takes as long as to draw five charts."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import pytest

from ltrscale.reports import drawing
from ltrscale.reports.charts import Spec

PROGRAM, DRAW = drawing._PROGRAM, drawing._draw


@contextmanager
def kept_drawing() -> Iterator[None]:
    """Draw in one process of the product's program while the block runs; it starts with the first chart."""
    started: list[subprocess.Popen[bytes]] = []
    owner, lock = os.getpid(), Lock()

    def pictures(specs: Sequence[Spec]) -> list[bytes | str]:
        if not started:
            here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-c", PROGRAM]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            started.append(subprocess.Popen(command, env=here, start_new_session=True, **pipes))
        asked, answered = started[0].stdin, started[0].stdout
        assert asked is not None
        assert answered is not None
        found = []
        for spec in specs:
            asked.write(drawing._asked(spec) + b"\n")
            asked.flush()
            found.append(drawing._answer(answered.readline()))
        return found

    def draw(specs: Sequence[Spec]) -> tuple[list[bytes | str], str]:
        if os.getpid() != owner or drawing._PROGRAM != PROGRAM:  # a fork, or a test of another program
            return DRAW(specs)
        with lock:
            return pictures(specs), ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_draw", draw)
        try:
            yield
        finally:
            for process in started:
                process.communicate()
