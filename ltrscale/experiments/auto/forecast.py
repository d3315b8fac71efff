"""What fits into the remaining minutes, as a pure function of the record of a run of `jobs.auto`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ltrscale.experiments.auto.plan import (
    ALL_METHODS,
    IN_CONTEXT,
    MORE_OF,
    PRETRAINED_NETWORK,
    SCRATCH,
    SLOWER,
    STUDENT,
    TREES,
    TUNED,
    AutoSizes,
    Planned,
    Speed,
    chosen_at,
    planned,
)
from ltrscale.experiments.auto.record import AutoRecord
from ltrscale.experiments.first.pipeline import SCORED

MOST_MODELS = 10
"""Maximum number of models of a method."""
_RESERVED, _LEAST_RESERVED = 0.1, 0.1
"""Share of the budget for blend, test and leaderboard, and further minutes."""
_REFIT = 1.2
"""Time of a refit relative to training, because it reads validation too."""


@dataclass(frozen=True)
class Forecast:
    """The minutes that models will take, and those that remain."""

    record: AutoRecord
    """Models so far, and the budget."""
    sizes: AutoSizes
    spent: float
    """Minutes so far, over all processes."""
    refits: bool
    """Whether the ranker's models will be refitted."""
    cutoff: int
    """Cut-off of the NDCG that chooses."""

    @property
    def left(self) -> float:
        """Minutes for further models, their refit and their test."""
        done = {name: self.record.done(name) for name in ALL_METHODS}
        tested = sum(len(entries) * self.test_minutes(name) for name, entries in done.items())
        refitted = sum(len(entries) * self._again_minutes(name) for name, entries in done.items() if entries)
        # in-context rankers score slowly, and their plan includes that
        slow = sum(max(0.0, entry.foretold - entry.minutes) for entry in done[IN_CONTEXT])
        rest = (self._with_refit - 1) * refitted + tested + slow
        return self.record.budget * (1 - _RESERVED) - _LEAST_RESERVED - self.spent - rest

    def first(self, name: str, teacher: str = SCRATCH) -> Planned:
        """The plan of a method's first model for its share of the budget, or less if less time is left."""
        plan, tested = self._planned(name, self.record.budget, teacher), self.test_minutes(name)
        takes, left = self.takes(name, plan) - tested, max(0.0, self.left - tested)
        return plan if takes <= left else self._planned(name, self.record.budget * left / takes, teacher)

    def takes(self, name: str, plan: Planned) -> float:
        """Minutes of a first model, its refit (without search and pretraining) and its test."""
        if plan.settings is None:
            return 0.0
        again = self._without_start(name, plan.minutes, plan.settings)
        return plan.minutes + (self._with_refit - 1) * again + self.test_minutes(name)

    def more(self) -> str | None:
        """The method to train one more model of: the one with the fewest; None if none fits."""
        counts = {name: len(self.record.done(name)) for name in MORE_OF}
        counts = counts if any(counts.values()) else {TREES: len(self.record.done(TREES))}
        failed = {entry.method for entry in self.record.entries if entry.state in ("late", "left out")}
        fits = [
            name
            for name, count in counts.items()
            if 0 < count < MOST_MODELS
            and name not in failed
            and self._with_refit * self._again_minutes(name) + self.test_minutes(name) < self.left
        ]
        return min(fits, key=lambda name: counts[name], default=None)

    @property
    def _with_refit(self) -> float:
        """Factor from minutes of training to minutes with refit."""
        return 1 + _REFIT if self.refits else 1.0

    def _again_minutes(self, name: str) -> float:
        """Minutes of one more model of a method, without search or pretraining."""
        first, *others = (entry.minutes for entry in self.record.done(name))
        return max(others) if others else self._without_start(name, first, self.record.methods[name])

    def test_minutes(self, name: str) -> float:
        """Minutes to score the test split with a model, once for all rankers that contain it."""
        return SLOWER.get(name, 1.0) * self.sizes.tested / (SCORED * self.speed.networks) / 60

    @cached_property
    def speed(self) -> Speed:
        """The speed of this machine, from the models so far."""
        speed = Speed()
        for method, kind in ((TREES, "trees"), (SCRATCH, "networks")):
            for entry in self.record.done(method)[:1]:
                if entry.foretold:  # at most 1: a short time may be early stopping
                    speed = speed._replace(**{kind: min(1.0, entry.foretold / max(entry.minutes, 1e-9))})
        return speed

    def _planned(self, name: str, budget: float, teacher: str) -> Planned:
        """The plan of a method's first model for its share of a budget, on this machine."""
        plan = planned(name, self.sizes, budget, self.speed, teacher=teacher)
        return plan._replace(settings=chosen_at(self.cutoff, plan.settings))

    def _without_start(self, name: str, minutes: float, settings: Mapping[str, Any]) -> float:
        """Minutes of a method's first model without its search, pretraining or teachers."""
        if name == TUNED:
            return 2 * minutes / int(settings["trials"])
        if name in (PRETRAINED_NETWORK, STUDENT):
            return min(minutes, max((entry.minutes for entry in self.record.done(SCRATCH)), default=minutes))
        return minutes
