"""Networks with a head for each goal: the weights of losses and heads, given or found under constraints.

With constraints it is the Lagrangian `metric of maximise + sum over kept goals g of w_g (metric_g - floor_g)`, all on
validation. The weights are its multipliers, which follow its gradient, one step after each epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from ltrscale.config import Config
from ltrscale.data.dataset.columns import GoalName, GoalWeight
from ltrscale.data.dataset.split import Split
from ltrscale.models.combine import AnyRanker, rankers_in
from ltrscale.stages.inputs import BundleUrl

MOST = 100.0
"""The largest multiplier: a constraint that cannot hold must not drown the other goals."""


class GoalsConfig(Config):
    """A head for each goal on one encoder; the score is the weighted sum of the heads."""

    weights: dict[GoalName, GoalWeight] = Field(default_factory=dict, max_length=100)
    """The goals, each with the weight of its loss and of its head in the score, as {click: 0.2, order: 1}."""
    maximise: GoalName | None = None
    """Instead of weights: the goal to raise, while others keep what they have."""
    keep: dict[GoalName, Annotated[float, Field(ge=-1, le=1)]] = Field(default_factory=dict, max_length=100)
    """How the validation metric of other goals may differ from that of `production`, as {click: -0.005}: at most so
    much less. Epochs that hold this are better than all others."""
    production: BundleUrl | None = None
    """The bundle in service, which `keep` compares with; jobs.weekly fills it in. Without one nothing is kept."""
    rate: float = Field(20.0, gt=0, le=1e6)
    """How fast the weight of a kept goal follows what it lacks: by this times the difference, after each epoch."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.weights) == (self.maximise is not None):
            raise ValueError("give weights, or maximise with keep; not both")
        if self.weights and not any(self.weights.values()):
            raise ValueError("weights: each is 0; give a goal a weight above 0")
        if bool(self.keep) != (self.maximise is not None) or self.maximise in self.keep:
            raise ValueError("maximise names one goal, and keep one or more others")
        return self

    def reading(self, split: Split, *, judged: bool = False) -> Split:
        """The split with the sum of the goals as labels, which says which groups have something to learn or to judge.

        Where weights are given, the labels of a split that is `judged` by are its own.
        """
        return split if judged and self.weights else split.replace(labels=dict.fromkeys(self.initial, 1.0))

    @property
    def initial(self) -> dict[str, float]:
        """The weight of each goal at first; those that are found start as equals."""
        return dict(sorted((self.weights or dict.fromkeys((str(self.maximise), *self.keep), 1.0)).items()))


def raised(
    weights: Mapping[str, float], values: Mapping[str, float], floors: Mapping[str, float], rate: float
) -> dict[str, float]:
    """One step of the multipliers: `w_g + rate (floor_g - value_g)`, cut to 0..MOST; other weights stay.

    Example:
        >>> raised({"click": 1.0, "order": 1.0}, {"click": 0.5, "order": 0.3}, {"click": 0.6}, rate=5.0)
        {'click': 1.5, 'order': 1.0}
    """
    return {
        goal: min(MOST, max(0.0, weight + rate * (floors[goal] - values[goal]))) if goal in floors else weight
        for goal, weight in weights.items()
    }


@dataclass(frozen=True)
class Constraints:
    """What each epoch is judged by: the metric to raise, and the floors of others."""

    config: GoalsConfig
    floors: Mapping[str, float]

    def judged(self, values: Mapping[str, float]) -> float:
        """The metric of `maximise` where every floor is kept; else minus what is missing, so worse than any that is."""
        missing = sum(max(0.0, floor - values[goal]) for goal, floor in self.floors.items())
        return -missing if missing else values[str(self.config.maximise)]

    def step(self, ranker: AnyRanker, values: Mapping[str, float]) -> None:
        """Move the weights of a ranker's heads by one step."""
        for part in rankers_in(ranker):
            part.weigh(raised(part.architecture.goals, values, self.floors, self.config.rate))
