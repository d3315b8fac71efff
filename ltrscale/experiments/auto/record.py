"""The time-dependent decisions of a run of `jobs.auto`, and their results."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Strict
from ltrscale.errors import InputError

_BEAT_S = 5.0
"""Interval of saving the time; a killed process loses at most this."""


class Entry(Strict):
    """A model of a method, with its state."""

    method: str
    number: int = 0
    """0 for the method's first model, which searches and pretrains; the others have other seeds."""
    says: str = ""
    """Description, or why there is no model."""
    foretold: float = 0.0
    """Planned minutes; 0 for a model with another seed."""
    minutes: float = 0.0
    """Minutes spent, over all processes."""
    state: Literal["begun", "done", "late", "left out"] = "begun"
    url: str = ""

    @property
    def name(self) -> str:
        """Name of the model among the members of the blend."""
        return self.method if self.number == 0 else f"{self.method}-{self.number}"


class AutoRecord(Strict):
    """`auto.json`: all time-dependent decisions, so that a resumed run decides the same."""

    of: str
    """Hash of the data, the seed, and the metric that chooses."""
    budget: float
    """Minutes of the budget."""
    minutes: float = 0.0
    """Spent so far, over all processes."""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    refitted: bool | None = None
    """Whether there was time for a refit; None until known."""
    ended: float | None = None
    """Minutes spent when the ranker was complete."""

    @classmethod
    def read(cls, url: str) -> Self:
        """The record of an earlier process; an `InputError` if the file is not one."""
        try:
            return cls.model_validate_json(storage.read_bytes(url))
        except ValueError as error:
            raise InputError(f"{url}: not a record ({error}); remove it, and the same command begins anew") from error

    @classmethod
    def resumed(cls, url: str, of: str, budget: float) -> Self:
        """The record of an earlier process, without models left out for another budget; or an empty one.

        Raises:
            InputError: the earlier process had other data, another seed or another metric.
        """
        if not storage.exists(url):
            return cls(of=of, budget=budget)
        record = cls.read(url)
        if record.of != of:
            raise InputError(
                f"{url}: begun on other data, or with another seed or primary_cutoff; name another out or remove it"
            )
        if record.budget == budget:
            return record
        kept = tuple(entry.model_dump() for entry in record.entries if entry.state in ("begun", "done"))
        return record.replace(budget=budget, entries=kept, refitted=None, ended=None)

    def done(self, method: str) -> list[Entry]:
        """The finished models of a method."""
        return [entry for entry in self.entries if (entry.state, entry.method) == ("done", method)]

    def noted(self, entry: Entry) -> Self:
        """The record with an entry added or updated."""
        entries = {(known.method, known.number): known for known in self.entries}
        entries[entry.method, entry.number] = entry
        return self.replace(entries=tuple(each.model_dump() for each in entries.values()))


@dataclass
class RecordKeeper:
    """Keeps the record in its file, with the time spent.

    A process may be killed in the middle of a long training. So while `beating`, a thread writes the time regularly.
    """

    url: str
    record: AutoRecord
    """Starts with the minutes of earlier processes."""
    began: float = field(default_factory=time.monotonic)
    """Start of this process, by `time.monotonic()`."""
    _training: Callable[[], Entry] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._before = self.record.minutes

    @property
    def spent(self) -> float:
        """Minutes so far, over all processes."""
        return self._before + (time.monotonic() - self.began) / 60

    def keep(self, **decided: Any) -> None:
        """Write the record with the time so far and new decisions."""
        with self._lock:
            storage.check_lease(self.url)
            self.record = self.record.replace(**decided, minutes=self.spent)
            storage.write_bytes(self.url, (self.record.model_dump_json(indent=1) + "\n").encode())

    def note(self, entry: Entry) -> Entry:
        """Write the record with an entry added or updated."""
        with self._lock:
            self.record = self.record.noted(entry)
            self.keep()
        return entry

    def beat(self) -> None:
        """Write the time so far, and that of the model in training."""
        with self._lock:
            if self._training is not None:
                self.record = self.record.noted(self._training())
            self.keep()

    @contextmanager
    def training(self, entry: Entry) -> Iterator[Callable[[], Entry]]:
        """Add the time of the block to a model; yields a function that returns its entry with the time so far."""
        began = time.monotonic()

        def so_far() -> Entry:
            return entry.replace(minutes=entry.minutes + (time.monotonic() - began) / 60)

        self._training = so_far
        try:
            yield so_far
        finally:
            with self._lock:
                self._training = None

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Write the time every few seconds while the block runs."""
        over = threading.Event()

        def beats() -> None:
            while not over.wait(_BEAT_S):
                with suppress(InputError):  # the run's next write raises the same error, and ends it
                    self.beat()

        thread = threading.Thread(target=beats, name="record", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
