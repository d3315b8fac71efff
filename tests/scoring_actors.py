"""Actors of scoring that come to harm; on the path that worker processes inherit from the tests."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ltrscale.scoring import _Actor


class KilledOnce(_Actor):
    """Its process is killed when the first file comes, once."""

    def __call__(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        mark = Path(f"{self._plan.out}-killed")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


class AlwaysKilled(_Actor):
    """Its process is killed when a file comes."""

    def __call__(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)
