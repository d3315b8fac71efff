"""Scoring actors that are disturbed; worker processes import this module from the path of the tests."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ltrscale.errors import UnavailableError
from ltrscale.scoring.score import _Actor


class KilledOnce(_Actor):
    """Its process is killed once, when it receives the first file."""

    def __call__(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        mark = Path(f"{self._plan.out}-killed")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


class WithoutStorage(_Actor):
    """Meets an outage instead of its bundle."""

    @property
    def _scorer(self) -> Any:
        raise UnavailableError("bucket: no answer")


class AlwaysKilled(_Actor):
    """Its process is killed whenever it receives a file."""

    def __call__(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)
