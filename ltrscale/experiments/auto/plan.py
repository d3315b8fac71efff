"""The decisions of a run of `jobs.auto`: `auto.json` records them, and functions of it, sizes and minutes take them.

A decision is written before it is carried out. A restart reads the file, resumes the model that was begun, and takes no
decision again; the minutes of all processes count.

| decision | function | recorded as |
|---|---|---|
| which model is next, and the settings of its method | `next_model` | `entries`, `methods` |
| how long it may train | `RunState.minutes_left` | its minutes |
| which share of the test lists judges | `share_of_test` | `test_share` |
"""

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field

from ltrscale import bundle, storage
from ltrscale.config import Strict
from ltrscale.errors import InputError, UnavailableError
from ltrscale.experiments.auto.first_models import (
    IN_CONTEXT,
    KNOWN_METHODS,
    LINEAR,
    OVERRUN,
    PRETRAINED_NETWORK,
    SCRATCH,
    STUDENT,
    TEACHERS,
    TREES,
    TUNED,
    AutoSizes,
    Given,
    Planned,
    Speed,
    time_factor,
)
from ltrscale.experiments.first.configs import SCORED
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
    minutes: float = 0.0
    """Spent so far, over all processes."""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
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
        """The record of an earlier process, without models left out for another budget; or an empty one."""
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


MOST_MODELS = 10
"""Maximum number of models of a method."""
_RESERVED, _LEAST_RESERVED = 0.1, 0.1
"""Share of the budget for blend, test and leaderboard, and further minutes."""
_MOST_TEST, _LEAST_TEST = 0.02, 0.01
"""The largest share of the budget to test a model, and the least share of the test lists to judge on."""
_FAR_BEHIND = 0.95
"""A method whose first model has less than this share of the best one's validation metric gets no other seed."""
_REFIT = 1.2
"""Time of a refit relative to training, because it reads validation too."""


@dataclass(frozen=True)
class RunState:
    """What decides: models so far, sizes, and minutes; with the minutes that further models will take."""

    record: AutoRecord
    sizes: AutoSizes
    spent: float
    """Minutes so far, over all processes."""
    refits: bool
    """Whether the ranker's models will be refitted."""
    cutoff: int
    """Cut-off of the NDCG that chooses."""

    @property
    def minutes_left(self) -> float:
        """Minutes for further models, their refit and their test."""
        rest = 0.0  # for what is done
        for name in KNOWN_METHODS:
            if done := self.record.done(name):
                rest += len(done) * (self.refit_factor * self.again_minutes(name) + self.test_minutes(name))
        # in-context rankers score slowly, and their plan includes that
        rest += sum(max(0.0, entry.foretold - entry.minutes) for entry in self.record.done(IN_CONTEXT))
        return self.record.budget * (1 - _RESERVED) - _LEAST_RESERVED - self.spent - rest

    @property
    def refit_factor(self) -> float:
        """Minutes of a refit relative to those of the training."""
        return _REFIT if self.refits else 0.0

    @cached_property
    def speed(self) -> Speed:
        """The speed of this machine, from the models so far."""
        first = {name: entries[0] for name in (TREES, LINEAR, SCRATCH) if (entries := self.record.done(name))}

        def relative(*names: str) -> float:
            for entry in (first[name] for name in names if name in first):
                if entry.foretold:  # the first network of a process starts slowly, and that says nothing of its epochs
                    planned = entry.foretold - (self.sizes.start_minutes if entry.start else 0.0)
                    return self.share_read(entry) * planned / max(entry.minutes - entry.start, 1e-9)
            return 1.0

        networks = relative(SCRATCH, LINEAR)
        scored = (first[name].scores for name in (SCRATCH, LINEAR) if name in first)
        trees = min(1.0, relative(TREES))  # a short time may be early stopping
        return Speed(trees, networks, next(filter(None, scored), SCORED * networks))

    def share_read(self, entry: Entry) -> float:
        """The share of a network's planned epochs that it read before it stopped early; 1 for trees."""
        finetune = self.record.methods[entry.trained_as].get("finetune", {})
        planned = finetune.get("epochs", 0) * self.sizes.log.informative
        return min(1.0, entry.documents / planned) if entry.documents and planned else 1.0

    def first_minutes(self, name: str, plan: Planned) -> float:
        """Minutes of a first model, its refit (without search and pretraining) and its test."""
        if plan.settings is None:
            return 0.0
        again = self._without_start(name, plan.minutes, plan.settings)
        return plan.minutes + self.refit_factor * again + self.test_minutes(name)

    def test_minutes(self, name: str) -> float:
        """Minutes to score the test split with a model, or the part of it that there is time for."""
        return min(_MOST_TEST * self.record.budget, self.whole_test_minutes(name))

    def whole_test_minutes(self, name: str) -> float:
        """Minutes to score the whole test split with a model, once for all rankers that contain it."""
        measured = [entry.scores for entry in self.record.done(name) if entry.scores]
        rate = measured[0] if measured else self.speed.scored / time_factor(name, self.sizes.log.features)
        return self.sizes.tested / rate / 60

    def again_minutes(self, name: str) -> float:
        """Minutes to train one more model of a method."""
        first, *others = (entry.minutes for entry in self.record.done(name))
        return max(others) if others else self._without_start(name, first, self.record.methods[name])

    def _without_start(self, name: str, minutes: float, settings: Mapping[str, Any]) -> float:
        """Minutes of a method's first model without its search, pretraining or teachers."""
        if name == TUNED:
            return 2 * minutes / int(settings["trials"])
        if name in (PRETRAINED_NETWORK, STUDENT):
            return min(minutes, max((entry.minutes for entry in self.record.done(SCRATCH)), default=minutes))
        return minutes


class Decision(NamedTuple):
    """A model to train, or one left out, and the settings of its method if they are new."""

    entry: Entry
    settings: Mapping[str, Any] | None = None


def next_model(state: RunState) -> Decision | None:
    """The unfinished model, else the first model of the next method, else a student, else another seed of a method.

    What is left then goes to a method that was too long. None if no further model fits into the time that is left.
    """
    for entry in state.record.entries:
        if entry.state == "begun":
            return Decision(entry)
    tried = {entry.method for entry in state.record.entries}
    for name in (TREES, HALF, *KNOWN_METHODS):
        if name not in {*tried, STUDENT}:
            return first_model(state, name)
    if STUDENT not in tried and (teacher := better_network(state)) is not None:
        return first_model(state, STUDENT, teacher)
    if (method := method_of_fewest(state)) is None:
        return second_try(state)
    return Decision(Entry(method=method, number=len(state.record.done(method)), says="another seed"))


def first_model(state: RunState, name: str, teacher: str = SCRATCH) -> Decision:
    """The first model of a method, as left out if it does not fit."""
    method = TREES if name == HALF else name
    plan = first_settings(state, method, teacher)
    late = state.first_minutes(method, plan) > state.minutes_left and name != TREES  # at least one must be tried
    if plan.settings is None or late:
        says = f"takes {plan.minutes:.1f} minutes, which are not left" if late else plan.says
        return Decision(Entry(method=name, says=says, state="late" if late or plan.too_long else "left out"))
    entry = Entry(method=name, says=plan.says, foretold=plan.minutes)
    return Decision(entry, None if name == HALF else plan.settings)


def first_settings(state: RunState, name: str, teacher: str = SCRATCH) -> Planned:
    """The settings of a method's first model for its share of the budget, or for less if less time is left.

    One that does not fit into its share may take a third of what is left, while that is half of the budget.
    """
    within = partial(settings_within, state, name, teacher=teacher)
    known, budget, tested = KNOWN_METHODS[name], state.record.budget, state.test_minutes(name)
    plan, left = within(known.share * budget), max(0.0, state.minutes_left - tested)
    if plan.settings is None and left > budget / 2:
        plan = within(left / 3)
    takes = state.first_minutes(name, plan) - tested
    return plan if takes <= left else within(known.share * budget * left / takes)


def settings_within(state: RunState, name: str, minutes: float, teacher: str = SCRATCH) -> Planned:
    """The settings of a method's first model for this many minutes."""
    given = Given(state.sizes, minutes, state.speed, state.minutes_left, state.cutoff, teacher)
    return KNOWN_METHODS[name].plan(given)


def second_try(state: RunState) -> Decision | None:
    """The first model of a method that did not fit into its share, if it fits into what no other method takes."""
    for entry in state.record.entries:
        if entry.state == "late" and not entry.number and entry.method not in (HALF, STUDENT):
            minutes = max(0.0, state.minutes_left - state.test_minutes(entry.method)) / OVERRUN
            plan = settings_within(state, entry.method, minutes)
            if plan.settings is not None and state.first_minutes(entry.method, plan) <= state.minutes_left:
                return Decision(Entry(method=entry.method, says=plan.says, foretold=plan.minutes), plan.settings)
    return None


def better_network(state: RunState) -> str | None:
    """The network whose models are better on validation; None before each kind that has one has enough to teach."""
    networks = {name: done for name in (SCRATCH, PRETRAINED_NETWORK) if (done := state.record.done(name))}
    if not networks or min(map(len, networks.values())) < TEACHERS:
        return None
    means = {name: fmean(entry.validation or 0.0 for entry in done) for name, done in networks.items()}
    return max(means, key=lambda name: means[name])


def method_of_fewest(state: RunState) -> str | None:
    """The method with the fewest models, of which one more fits, unless validation finds it far behind.

    None if there is none.
    """
    counts = {name: len(state.record.done(name)) for name, method in KNOWN_METHODS.items() if method.again}
    counts = counts if any(counts.values()) else {TREES: len(state.record.done(TREES))}
    failed = {entry.method for entry in state.record.entries if entry.state in ("late", "left out")}
    first = {name: state.record.done(name)[0].validation for name, count in counts.items() if count}
    known = {name: value for name, value in first.items() if value is not None}
    behind = {name for name, value in known.items() if value < _FAR_BEHIND * max(known.values())}

    def fits(name: str) -> bool:
        minutes = (1 + state.refit_factor) * state.again_minutes(name) + state.test_minutes(name)
        return name not in failed | behind and minutes < state.minutes_left

    open_to_more = [name for name, count in counts.items() if 0 < count < MOST_MODELS and fits(name)]
    return min(open_to_more, key=lambda name: counts[name], default=None)


def share_of_test(state: RunState) -> float:
    """The share of the test lists that every model can score in the time left, or in half of it before a refit."""
    needed = sum(len(state.record.done(name)) * state.whole_test_minutes(name) for name in KNOWN_METHODS)
    left = state.record.budget - state.spent
    return min(1.0, max(_LEAST_TEST, (left / 2 if state.refits else left) / max(needed, 1e-9)))
