"""The file of a run's metrics: a JSON line per record, with each step, epoch and tree only once.

A training that resumes from a checkpoint repeats the steps after it, and one that starts over repeats all steps. The
new records replace the old records of these steps and everything after them. Records without a step, such as counts of
workers, stay.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self

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
    replaced: Mapping[str, int] = {}
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
        replaced = self._remove_from(curve, number) if again and number is not None else {}
        self._write({"time": round(time.time(), 3), **record})
        prefix, step = self._note(record)
        return CurvePoint(prefix, step, again, replaced)

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

    def _remove_from(self, curve: Curve, number: int) -> dict[str, int]:
        """Remove the records of a curve from a number on; returns the last step of each prefix among them."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        records = [record_in(line) for line in lines]
        first = next((i for i, record in enumerate(records) if _is_from(record, curve, number)), len(lines))
        self._file.truncate(sum(map(len, lines[:first])))
        replaced: dict[str, int] = {}
        for record in records[first:]:
            prefix, (_, step) = self._prefix(record), _number(record)
            if step is None:
                self._write(record)
            else:
                replaced[prefix] = max(step, replaced.get(prefix, 0))
        self._read()
        return replaced

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
