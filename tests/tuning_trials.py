"""Cheap trials of a search, some of which fail.

Every worker process can import this module: it lies on the path that they inherit from the tests.
"""

import os
import time
from pathlib import Path
from typing import Any

from ltrscale.errors import InputError, UnavailableError
from ltrscale.tuning.space import ReportValue

STEPS = 9


def parabola(params: dict[str, Any], folder: str, report: ReportValue) -> float:
    """Best at x = 3; records its run."""
    x = params.get("x", 0)
    _note(folder)
    for step in range(1, STEPS + 1):
        report(step, -abs(x - 3) - 1 / step)
    return float(-abs(x - 3))


def failing(params: dict[str, Any], folder: str, report: ReportValue) -> float:
    """Ends in the way that `what` names."""
    _note(folder)
    report(1, 0.5)
    match params.get("what", "nothing"):
        case "input error":
            raise InputError("this setting\ncannot be")
        case "error":
            raise ZeroDivisionError("division by zero")
        case "outage":
            raise UnavailableError("bucket: no answer")
        case "nan":
            return float("nan")
        case "dies":
            os._exit(1)
        case "dies once" if attempts(folder) == 1:
            os._exit(1)
    return 1.0


def slow(params: dict[str, Any], folder: str, report: ReportValue) -> float:
    """Slower for x <= 0, so that better trials finish first; records whether it ran to the end."""
    _note(folder)
    for step in range(1, 41):
        report(step, params["x"])
        time.sleep(0.02 if params["x"] > 0 else 0.1)
    (Path(folder) / "ran-to-the-end").touch()
    return float(params["x"])


def _note(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "attempts").open("a") as file:
        file.write("x")


def attempts(folder: str) -> int:
    """The number of times a trial was started."""
    return len((Path(folder) / "attempts").read_text())
