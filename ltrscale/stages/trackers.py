"""The interface of run trackers: what they are given, and the names and numbers that all of them use."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import without_credentials
from ltrscale.stages.metrics_file import CurvePoint


class Tracked(NamedTuple):
    """A run that is tracked."""

    out: str
    config: Config
    stage: str
    origin: Mapping[str, object] | None
    """By default the part of the config that determines the result."""
    folder: Path
    """The local folder of the run's record."""
    goes_on: bool
    """Whether an earlier attempt has recorded steps."""


class Figures(NamedTuple):
    """The numbers of a record."""

    point: CurvePoint
    values: Mapping[str, float]
    time_s: float


class RefusedError(Exception):
    """The tracker answered and rejected these figures."""


class Tracker(Protocol):
    """Keeps the reports of a run. A thread calls it, and may retry failed calls."""

    name: str
    every_s: float
    """Seconds to gather figures for, because requests cost time."""
    place: str
    """Where it is."""

    def open(self) -> None:
        """Begin or continue the run."""

    def send(self, figures: Sequence[Figures]) -> None:
        """Keep figures in order; a `RefusedError` if a retry is useless."""

    def end(self, folder: Path, status: str) -> Iterator[None]:
        """End the run as FINISHED, FAILED or KILLED, with its files in a folder. Yields after each part."""


def numbers(record: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a record, by name.

    Example:
        >>> numbers({"step": 3, "phase": "full", "loss": 0.5, "workers": [{"memory_gb": 1.0}], "stopped": True})
        {'step': 3.0, 'loss': 0.5}
    """
    plain = {key: value for key, value in record.items() if not isinstance(value, bool)}
    return {key: float(value) for key, value in plain.items() if isinstance(value, int | float)}


def flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as text by dotted key, without credentials.

    Example:
        >>> flat({"out": "runs/a", "network": {"width": 8, "sizes": [4, 2]}})
        {'out': 'runs/a', 'network.width': '8', 'network.sizes': '[4, 2]'}
    """
    texts: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            texts |= {f"{key}.{below}": text for below, text in flat(value).items()}
        else:
            texts[key] = without_credentials(str(value))
    return texts


def run_name(out: str) -> str:
    """A name for a run: the path of its output, in full where it leads out of the working directory by `..`.

    Example:
        >>> run_name("s3://bucket/runs/demo/"), run_name("runs/demo"), run_name("/tmp/a/../b")
        ('bucket/runs/demo', 'runs/demo', 'tmp/b')
    """
    if storage.is_local(out):
        path = Path(os.path.normpath(storage.local_path(out)))  # `Path` alone keeps a `..` after a name
        out = str(path.resolve() if ".." in path.parts else path)
    return without_credentials(out).rpartition("://")[2].strip("/")
