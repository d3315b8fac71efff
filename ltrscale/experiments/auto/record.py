"""`auto.json`: the decisions of a run of `jobs.auto`, its models, and its minutes.

A decision is written before it is carried out. A restart reads the file, resumes the model that was begun, and takes no
decision again; the minutes of all processes count.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field

from ltrscale import bundle, storage
from ltrscale.config import Strict
from ltrscale.errors import InputError, UnavailableError
from ltrscale.experiments.auto.first_models import TREES
from ltrscale.experiments.records import read_record, record_bytes
from ltrscale.processor import Busy, alongside

HALF = "trees_half"
"""Trees trained on half of the labels; their gap to `trees` shows what more labels would bring."""
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
    start: float = 0.0
    """Those of them before a network's first step; 0 for trees."""
    processor: float = 0.0
    """Minutes of processors for it, of this process and the children that have ended."""
    documents: int = 0
    """Documents that its trainings read, over all epochs; 0 for trees."""
    scores: float | None = None
    """Documents that the model scored a second, with reading; None if it was not measured."""
    validation: float | None = None
    """The metric that chooses, on validation."""
    state: Literal["begun", "done", "late", "left out"] = "begun"
    """`late`: the time is too short for it; `left out`: the data do not fit it."""
    url: str = ""

    @property
    def name(self) -> str:
        """Name of the model among the members of the blend."""
        return self.method if self.number == 0 else f"{self.method}-{self.number}"

    @property
    def trained_as(self) -> str:
        """The method whose settings it has."""
        return TREES if self.method == HALF else self.method

    @property
    def place(self) -> str:
        """Its directory below `models`."""
        run = "half/" if self.method == HALF else f"runs/{self.number}/" if self.number else ""
        return run + self.trained_as


class AutoRecord(Strict):
    """The content of `auto.json`."""

    of: str
    """Hash of the data, the seed, and the metric that chooses."""
    budget: float
    """Minutes of the budget."""
    minutes: float = 0.0
    """Spent so far, over all processes."""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of the methods."""
    entries: tuple[Entry, ...] = ()
    """Models in the order of their decisions."""
    test_share: float | None = None
    """The share of the test lists that there was time to score; None until known."""
    refitted: bool | None = None
    """Whether there was time for a refit; None until known."""
    ended: float | None = None
    """Minutes spent when the ranker was complete."""
    others: float | None = None
    """The share of the machine's processors that other programs used until then, in the last process; None if unknown.
    """

    @classmethod
    def resumed(cls, url: str, of: str, budget: float) -> Self:
        """The record of an earlier process, without models left out for another budget; or an empty one.

        Raises:
            InputError: the earlier process had other data, another seed or another metric.
        """
        record = read_record(cls, url, "remove it, and the same command begins anew")
        if record is None:
            return cls(of=of, budget=budget)
        if record.of != of:
            raise InputError(
                f"{url}: begun on other data, or with another seed or primary_cutoff; name another out or remove it"
            )
        if record.budget == budget:
            return record
        kept = tuple(entry for entry in record.entries if entry.state in ("begun", "done"))
        return record.replace(budget=budget, entries=kept, test_share=None, refitted=None, ended=None)

    def done(self, method: str) -> list[Entry]:
        """The finished models of a method."""
        return [entry for entry in self.entries if (entry.state, entry.method) == ("done", method)]

    def noted(self, entry: Entry, settings: Mapping[str, Any] | None = None) -> Self:
        """The record with an entry added or updated, and with the settings of its method if they are new."""
        others = [known for known in self.entries if (known.method, known.number) != (entry.method, entry.number)]
        new = {} if settings is None else {entry.method: dict(settings)}
        return self.replace(entries=(*others, entry), methods={**self.methods, **new})


@dataclass
class RecordKeeper:
    """Keeps the record in its file, with the time spent, which a thread writes regularly while `beating`."""

    url: str
    record: AutoRecord
    """Starts with the minutes of earlier processes."""
    began: float
    """Start of this process, by `time.monotonic()`."""

    def __post_init__(self) -> None:
        self._before, self._busy, self._lock = self.record.minutes, Busy.now(), threading.RLock()

    @property
    def others(self) -> float | None:
        """The share of the machine's processors that others have used since this process began; None if unknown."""
        return Busy.now().others_since(self._busy, time.monotonic() - self.began)

    @property
    def spent(self) -> float:
        """Minutes so far, over all processes."""
        return self._before + (time.monotonic() - self.began) / 60

    def keep(self, **decided: Any) -> None:
        """Write the record with the time so far and new decisions."""
        with self._lock:
            storage.check_lease(self.url)
            self.record = self.record.replace(**decided, minutes=self.spent)
            storage.write_bytes(self.url, record_bytes(self.record))

    def note(self, entry: Entry, settings: Mapping[str, Any] | None = None) -> None:
        """Write the record with an entry added or updated, and with the settings of its method if they are new."""
        with self._lock:
            self.record = self.record.noted(entry, settings)
            self.keep()

    def beating(self) -> AbstractContextManager[None]:
        """Write the time every few seconds while the block runs."""

        def beat(over: threading.Event) -> None:
            while not over.wait(_BEAT_S):
                with suppress(InputError, UnavailableError):  # the run's next write raises the same error, and ends it
                    self.keep()

        return alongside(beat)


def validation_metric(url: str, metric: str) -> float | None:
    """A bundle's metric on validation; None for `in_context` at cut-offs other than 5 and 10."""
    value = bundle.load(url).metrics.get(f"validation_{metric}")
    return round(float(value), 6) if isinstance(value, int | float) else None
