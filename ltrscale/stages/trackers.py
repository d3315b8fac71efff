"""The interface of run trackers, and the one that writes event files for TensorBoard.

A run's metrics are a JSON line per record, with each step, epoch and tree only once. A training that resumes from a
checkpoint repeats the steps after it, and one that starts over repeats all steps. The new records replace the old
records of these steps and everything after them. Records without a step, such as counts of workers, stay.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError, without_credentials

Warn = Callable[[str], None]
"""Receives the reason why something could not be written."""


class Curve(NamedTuple):
    """What the consecutive numbers of records count."""

    unit: str
    """`epoch`, `step` or `tree`."""
    of: str
    """What the unit belongs to: steps continue over all phases, epochs restart with each, trees with each model."""


class CurvePoint(NamedTuple):
    """Where a record belongs among the metrics of a run."""

    prefix: str
    """Prefix of the names of its metrics, such as `full/epoch`."""
    step: int
    """Its own number, or the next number of its prefix."""
    again: bool = False
    """Whether the run repeats it."""
    given_way: Mapping[str, int] = {}
    """The last step of each prefix with records that this one replaces."""


class MetricsFile:
    """The metrics file of a run, a context manager; it continues the file of an earlier attempt."""

    def __init__(self, path: Path, stage: str, warn: Warn) -> None:
        self._stage, self._warn = stage, warn
        self._file: FileIO = path.open("a+b", buffering=0)  # unbuffered: a killed process loses nothing
        self._path = path
        self._read()
        self.goes_on = bool(self._last)
        """Whether the file already had numbered records."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, record: Mapping[str, object]) -> CurvePoint:
        """Append a record, after removing the records that it repeats."""
        curve, number = _number(record)
        last, names = self._last.get(curve, (0, set()))
        again = number is not None and (number < last or (number == last and _names(record) in names))
        given_way = self._give_way(curve, number) if again and number is not None else {}
        self._write({"time": round(time.time(), 3), **record})
        prefix, step = self._note(record)
        return CurvePoint(prefix, step, again, given_way)

    def _read(self) -> None:
        """Read existing records; removes a partial line that a kill has left."""
        self._last: dict[Curve, tuple[int, set[frozenset[str]]]] = {}
        """The last number of each curve, and the names in its records."""
        self._counts: dict[str, int] = {}
        data = self._path.read_bytes()
        if not data.endswith(b"\n"):
            self._file.truncate(len(data) - len(data.rpartition(b"\n")[2]))
        for line in data.splitlines():
            if record := record_in(line):
                self._note(record)

    def _note(self, record: Mapping[str, object]) -> tuple[str, int]:
        """Register a record; returns its prefix and its step."""
        (curve, number), prefix = _number(record), self._prefix(record)
        self._counts[prefix] = self._counts.get(prefix, 0) + 1
        if number is None:
            return prefix, self._counts[prefix]
        last, names = self._last.get(curve, (0, set()))
        self._last[curve] = number, {_names(record)} | (names if number == last else set())
        return prefix, number

    def _prefix(self, record: Mapping[str, object]) -> str:
        curve, _ = _number(record)
        parts = (record.get("phase", self._stage), curve.of if curve.unit == "tree" else curve.unit)
        return "/".join(str(part) for part in parts if part)

    def _give_way(self, curve: Curve, number: int) -> dict[str, int]:
        """Remove the records of a curve from a number on; returns the last step of each prefix among them."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        records = [record_in(line) for line in lines]
        first = next((i for i, record in enumerate(records) if _is_from(record, curve, number)), len(lines))
        self._file.truncate(sum(map(len, lines[:first])))
        given_way: dict[str, int] = {}
        for record in records[first:]:
            prefix, (_, step) = self._prefix(record), _number(record)
            if step is None:
                self._write(record)
            else:
                given_way[prefix] = max(step, given_way.get(prefix, 0))
        self._read()
        return given_way

    def _write(self, record: Mapping[str, object]) -> None:
        """Append a whole line, or nothing and warn, because a partial line would break the file for readers."""
        end, data = self._file.seek(0, os.SEEK_END), f"{json.dumps(record)}\n".encode()
        try:
            problem = "" if self._file.write(data) == len(data) else "no space left"
        except OSError as error:
            problem = str(error)
        if problem:
            self._file.truncate(end)
            self._warn(problem)


def _is_from(record: Mapping[str, object], curve: Curve, number: int) -> bool:
    of, its = _number(record)
    return of == curve and its is not None and its >= number


def record_in(line: str | bytes) -> dict[str, Any]:
    """Parse a line; empty if it is not a record, such as after a disk fault."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _number(record: Mapping[str, object]) -> tuple[Curve, int | None]:
    """The curve of a record and its number there; None if it counts nothing."""
    for unit, of in (("epoch", record.get("phase")), ("step", ""), ("tree", record.get("model"))):
        if isinstance(number := record.get(unit), int):
            return Curve(unit, str(of or "")), number
    return Curve("", ""), None


def _names(record: Mapping[str, object]) -> frozenset[str]:
    return frozenset(record) - {"time"}


TENSORBOARD = "LTRSCALE_TENSORBOARD"


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


_begun: dict[str, int] = {}
"""The second in which this process began the newest file of a place: TensorBoard reads files in the order of their
names, which have this second, and then numbers as text."""


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
        for (prefix, step, again, given_way), values, time_s in figures:
            if again:
                self._write_from(0 if step <= 1 else step)
                self._passed = {prefix: min(last, step - 1) for prefix, last in given_way.items()}
            if step > self._passed.get(prefix, 0):
                for name, value in values.items():
                    self._writer.add_scalar(f"{prefix}/{name}", value, step, time_s)
        self._writer.flush()

    def end(self, folder: Path, status: str) -> Iterator[None]:  # noqa: ARG002
        """Close the file."""
        yield self._writer.close()


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
