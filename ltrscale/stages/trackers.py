"""The interface of run trackers, names and numbers that all of them use, and the one that writes for TensorBoard."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError, without_credentials
from ltrscale.stages.metrics_file import CurvePoint

TENSORBOARD = "LTRSCALE_TENSORBOARD"
_begun: dict[str, int] = {}
"""The second in which this process began the newest file of a place: TensorBoard reads files in the order of their
names, which have this second, and then numbers as text."""


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


class EventFiles:
    """The event files of a run, for TensorBoard."""

    name = "TensorBoard"
    every_s = 0.0

    def __init__(self, folder: str, run: Tracked) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401 - here, because importing threads wait for each other
        except ImportError as error:
            raise InputError(
                f"{TENSORBOARD}: TensorBoard is not installed; pip install 'ltrscale[tensorboard]'"
            ) from error
        self.place, self._run = storage.join(folder, run_name(run.out)), run
        self._writer: Any = None
        self._passed: dict[str, int] = {}
        """The last step of each prefix that is written and repeated, if `purge_step` cannot remove it."""

    def open(self) -> None:
        """Begin; a run that does not continue removes everything of an earlier run of the same name."""
        self._write_from(None if self._run.goes_on else 0)

    def _write_from(self, step: int | None) -> None:
        """Start a new file, which invalidates earlier records of this step and later ones in all curves."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        while int(time.time()) <= _begun.get(self.place, 0):  # this is a thread of its own
            time.sleep(0.05)
        self._writer = SummaryWriter(self.place, purge_step=step)
        _begun[self.place] = int(time.time())
        if step == 0:
            settings = flat(self._run.config.model_dump(mode="json"))
            rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
            self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}")

    def send(self, figures: Sequence[Figures]) -> None:
        """Write figures, after removing the ones that they repeat."""
        for point, values, time_s in figures:
            if point.again:
                self._write_from(0 if point.step <= 1 else point.step)
                self._passed = {prefix: min(last, point.step - 1) for prefix, last in point.replaced.items()}
            if point.step > self._passed.get(point.prefix, 0):
                for name, value in values.items():
                    self._writer.add_scalar(f"{point.prefix}/{name}", value, point.step, time_s)
        self._writer.flush()

    def end(self, folder: Path, status: str) -> Iterator[None]:  # noqa: ARG002
        """Close the file."""
        yield self._writer.close()
