"""What a run of `jobs.auto` has decided by the clock, and what became of it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError

_BEAT_S = 5.0
"""A killed process loses no more of its time."""


class Entry(Config):
    """A model that was begun: one of a method, and what became of it."""

    method: str
    number: int = 0
    """0 for the first model of the method, which searches and pretrains; others have other seeds."""
    says: str = ""
    """What it is, or why it is not there."""
    foretold: float = 0.0
    """Minutes that its plan took it for; 0 for one with another seed."""
    minutes: float = 0.0
    """What it took, over all processes."""
    state: Literal["begun", "done", "late", "left out"] = "begun"
    url: str = ""

    @property
    def name(self) -> str:
        """Of the model, among the members of the blend."""
        return self.method if self.number == 0 else f"{self.method}-{self.number}"


class AutoRecord(Config):
    """`auto.json`: all that was decided by the clock, so that a process that goes on decides the same."""

    of: str
    """The hash of the data, the seed, and the metric that chooses."""
    budget: float
    """Minutes for which it was decided."""
    minutes: float = 0.0
    """Spent so far, over all processes."""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    refitted: bool | None = None
    """Whether there was time for a refit; empty until that is known."""
    ended: float | None = None
    """Minutes when the ranker was there."""

    @classmethod
    def read(cls, url: str) -> Self:
        """The record of an earlier process; an `InputError` if it is none."""
        try:
            return cls.model_validate_json(storage.read_bytes(url))
        except ValueError as error:
            raise InputError(f"{url}: not a record ({error}); remove it, and the same command begins anew") from error

    @classmethod
    def resumed(cls, url: str, of: str, budget: float) -> Self:
        """The record of an earlier process, without what was left out for another budget; or an empty one.

        Raises:
            InputError: the earlier process learnt from other data, or chose by another metric.
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
        """The models of a method that are there."""
        return [entry for entry in self.entries if (entry.state, entry.method) == ("done", method)]

    def noted(self, entry: Entry) -> Self:
        """The record with what became of a model."""
        entries = {(known.method, known.number): known for known in self.entries}
        entries[entry.method, entry.number] = entry
        return self.replace(entries=tuple(each.model_dump() for each in entries.values()))


@dataclass
class RecordKeeper:
    """The record of a process in its file, with the time that passes.

    A model may train for minutes without a word, and a process may be killed at any moment: so while `beating`, a
    thread writes the time too.
    """

    url: str
    record: AutoRecord
    """With the minutes of earlier processes when the keeper is made."""
    began: float = field(default_factory=time.monotonic)
    """When this process began, by `time.monotonic()`."""
    _training: Callable[[], Entry] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._before = self.record.minutes

    @property
    def spent(self) -> float:
        """Minutes so far, over all processes."""
        return self._before + (time.monotonic() - self.began) / 60

    def keep(self, **decided: Any) -> None:
        """Write the record with the time so far, and what was decided."""
        with self._lock:
            storage.check_lease(self.url)
            self.record = self.record.replace(**decided, minutes=self.spent)
            storage.write_bytes(self.url, (self.record.model_dump_json(indent=1) + "\n").encode())

    def note(self, entry: Entry) -> Entry:
        """Keep what became of a model."""
        with self._lock:
            self.record = self.record.noted(entry)
            self.keep()
        return entry

    def beat(self) -> None:
        """Keep the time so far, and that of the model in training."""
        with self._lock:
            if self._training is not None:
                self.record = self.record.noted(self._training())
            self.keep()

    @contextmanager
    def training(self, entry: Entry) -> Iterator[Callable[[], Entry]]:
        """Count the time of the block to a model; yields what gives its entry with the time so far."""
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
        """Keep the time every few seconds while the block runs."""
        over = threading.Event()

        def beats() -> None:
            while not over.wait(_BEAT_S):
                with suppress(InputError):  # what the run itself keeps next meets the same error, and ends it
                    self.beat()

        thread = threading.Thread(target=beats, name="record", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
