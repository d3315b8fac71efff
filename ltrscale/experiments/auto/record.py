"""What a run of `jobs.auto` has decided by the clock, and what became of it."""

from typing import Any, Literal, Self

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError


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
