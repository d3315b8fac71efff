"""Cheap trials of a search, some of which come to harm.

This module can be imported in every worker process, for it lies on the path that they inherit from the tests.
"""

import os
import time
from pathlib import Path
from typing import Any

from ltrscale.errors import InputError
from ltrscale.tuning.search import ReportValue

STEPS = 9


def parabola(params: dict[str, Any], folder: str, report: ReportValue) -> float:
    """Best at x = 3; writes down that it ran."""
    x = params.get("x", 0)
    _note(folder)
    for step in range(1, STEPS + 1):
        report(step, -abs(x - 3) - 1 / step)
    return float(-abs(x - 3))


def failing(params: dict[str, Any], folder: str, report: ReportValue) -> float:
    """Each choice of `what` is another way to end."""
    _note(folder)
    report(1, 0.5)
    match params.get("what", "nothing"):
        case "input error":
            raise InputError("this setting\ncannot be")
        case "error":
            raise ZeroDivisionError("division by zero")
        case "nan":
            return float("nan")
        case "dies":
            os._exit(1)
        case "dies once" if attempts(folder) == 1:
            os._exit(1)
    return 1.0


def slow(params: dict[str, Any], folder: str, report: ReportValue) -> float:
    """Takes longer the worse it is, so that better ones come first, and notes if it came to its end."""
    _note(folder)
    for step in range(1, 41):
        report(step, params["x"])
        time.sleep(0.02 if params["x"] > 0 else 0.1)
    (Path(folder) / "came-to-its-end").touch()
    return float(params["x"])


def _note(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "attempts").open("a") as file:
        file.write("x")


def attempts(folder: str) -> int:
    """How often a trial was begun."""
    return len((Path(folder) / "attempts").read_text())
