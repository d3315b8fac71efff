"""The weights with the best validation metric, and the goals that a network with several heads is judged by.

The weights of losses and heads are given, or found under constraints: then they are the multipliers of the Lagrangian
`metric of maximise + sum over kept goals g of w_g (metric_g - floor_g)`, all on validation, and follow its gradient,
one step after each epoch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.data.dataset.goals import GoalName, GoalWeight
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.decoder import Memory, memory_for
from ltrscale.errors import InputError
from ltrscale.models.batch_norm import moments, norms_of, update_running_statistics
from ltrscale.models.layers import device_of
from ltrscale.models.ranker import AnyRanker, rankers_in
from ltrscale.progress import log
from ltrscale.ranking.choices import metric_label, metric_named
from ltrscale.runtime.workers import rank_and_world
from ltrscale.stages.inputs import BundleUrl
from ltrscale.training.checkpoint import Progress, Snapshot
from ltrscale.training.ranking import LabelledData, RankingConfig
from ltrscale.training.reduce import sum_over_workers
from ltrscale.training.resumption import finish

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


class Best:
    """The weights with the best validation metric so far (the last ones without validation), their phase and epoch."""

    def __init__(
        self, model: AnyRanker, config: RankingConfig, data: LabelledData, constraints: Constraints | None = None
    ) -> None:
        self.model, self.config, self.data, self.constraints = model, config, data, constraints
        self.memory = memory_for(data.train, config.stream.memory_gb)
        """Memory for the training groups, shared by all phases."""
        self._validation_memory = None if data.judged is None else memory_for(data.judged, config.stream.memory_gb)
        self.metric = f"validation_{config.validation_metric}"
        self.state = _on_cpu(model)
        self.value, self.phase, self.epoch = -math.inf, "", 0
        self.of_goals: dict[str, float] = {}
        """The metric of each goal with these weights, if there are constraints."""
        self.epochs: dict[str, int] = {}
        """The epochs of each phase that led to these weights."""
        self._last_better = 0
        """The epoch of the current phase in which the metric last improved."""
        self._mean: dict[str, Tensor] = {}
        """Running mean of the trained weights in the current phase, if weights are averaged."""

    def begin(self) -> None:
        """Load the best weights into the model; each phase starts from them."""
        self.model.load_state_dict(self.state)
        self._last_better, self._mean = 0, {}

    def update(self, phase: str, epoch: int) -> float | None:
        """Validate the weights, or their mean, and keep them if they are the best so far; returns the metric.

        Epoch 0 is before any training, where there is no mean.

        Raises:
            InputError: no validation group has a relevant document.
        """
        last = _on_cpu(self.model) if self.config.average and epoch else None
        if last is not None:
            self._load_mean(epoch)
        value, of_goals = (None, {}) if self.data.judged is None else self._judge(self.data.judged)
        if value is None or value > self.value:
            self.of_goals = of_goals
            self.phase, self.epoch, self.state = phase, epoch, _on_cpu(self.model)
            self.value = -math.inf if value is None else value
            self.epochs = {**self.epochs, phase: epoch}
            self._last_better = epoch
        if last is not None:  # training continues from there
            self.model.load_state_dict(last)
        if self.constraints is not None and of_goals:
            self.constraints.step(self.model, of_goals)
        return value

    def _judge(self, judged: Selection) -> tuple[float, dict[str, float]]:
        """The value to choose by, and the metric of each goal if there are constraints."""
        metric = self.config.validation_metric
        if self.constraints is not None:
            self.model.eval()
            device = device_of(self.model)
            of_goals = validate_goals(self.model, judged, metric, device, self._validation_memory)
            return self.constraints.judged(of_goals), of_goals
        value = validate_ranker(self.model, judged, metric, self._validation_memory)
        if math.isnan(value):
            raise InputError(
                f"validation: none of its labelled groups has a relevant document, so {metric} is undefined; choose "
                "other validation periods"
            )
        return value, {}

    @torch.no_grad()
    def _load_mean(self, epoch: int) -> None:
        """Update the running mean (a plain mean in the first epochs) and load it, with its own BatchNorm statistics."""
        new = {name: p.detach().cpu() for name, p in self.model.named_parameters() if p.requires_grad}
        share = max(1 - self.config.average, 1 / epoch)
        self._mean = {name: self._mean.get(name, value).lerp(value, share) for name, value in new.items()}
        self.model.load_state_dict(self._mean, strict=False)
        norms = [norm for norm in norms_of(self.model) if norm.training]  # not the frozen ones
        if norms:
            self.model.eval()
            for norm in norms:
                norm.train()
            seen = moments(norms)
            for groups in _shared(self.data.train, device_of(self.model), self.memory):
                self.model(groups)
                seen += moments(norms)
            update_running_statistics(norms, sum_over_workers(seen), momentum=1.0)

    def is_stale(self, epoch: int) -> bool:
        """True if the metric has not improved for `patience` epochs."""
        return epoch - self._last_better >= self.config.patience

    def progress(self, *, phase: str, steps_before: int) -> Progress:
        """The state that a checkpoint of the current phase adds to the trainer's."""
        value = None if self.value == -math.inf else self.value  # JSON has no infinity
        best = [value, self.phase, self.epoch] if self.phase else None
        position = {"phase": phase, "last_better": self._last_better, "best": best, "epochs": self.epochs}
        position |= {"of_goals": self.of_goals} if self.of_goals else {}
        return Progress(steps_before, position, {"best": self.state, **({"mean": self._mean} if self._mean else {})})

    def restore(self, snapshot: Snapshot) -> None:
        """Restore the state that `progress` added to a checkpoint."""
        self.state = dict(snapshot.tensors["best"])
        self._last_better = snapshot.progress["last_better"]
        self._mean = dict(snapshot.tensors.get("mean", {}))
        if (best := snapshot.progress["best"]) is not None:
            value, self.phase, self.epoch = best
            self.value = -math.inf if value is None else value
            self.epochs = snapshot.progress["epochs"]
            self.of_goals = dict(snapshot.progress.get("of_goals", {}))

    def commit(self, out: str, *, origin: Mapping[str, Any], **also: bundle.MetricValue) -> None:
        """Load the best weights into the model; rank 0 commits it as a bundle, with the metrics in `also`."""
        self.begin()
        if rank_and_world()[0] != 0:
            return
        train, validation = self.data.train, self.data.validation
        metrics: dict[str, bundle.MetricValue] = {
            **({self.metric: self.value} if validation else {}),
            **{f"{self.metric} of {goal}": value for goal, value in self.of_goals.items()},
            "phase": self.phase,
            "epoch": self.epoch,
            **{f"epochs_{phase}": n for phase, n in self.epochs.items() if n},
            "labelled_groups": train.n_groups,
            **({"validation_groups": validation.n_groups} if validation else {}),
            **also,
        }
        facts = bundle.facts(train, self.config, metrics=metrics, made_by=origin)
        bundle.save_ranker(out, self.model, facts)
        metric = metric_label(self.config.validation_metric)
        judged = f", validation {metric} {self.value:.4f}" if self.data.validation else ""
        log.info("trained on %d labelled groups%s: %s", train.n_groups, judged, out)
        finish(out)


def validate_ranker(model: AnyRanker, selection: Selection, metric: str, memory: Memory | None = None) -> float:
    """Mean of a metric over the groups that define it, NaN if none do; each worker scores a share."""
    model.eval()
    return _means(model, _shared(selection, device_of(model), memory), metric)[0]


def validate_goals(
    score: bundle.Scorer, selection: Selection, metric: str, device: torch.device, memory: Memory | None = None
) -> dict[str, float]:
    """The mean of a metric by each goal that the selection reads; each worker scores a share, on the device.

    Raises:
        InputError: no group has a relevant document of some goal.
    """
    goals = selection.goals
    values = dict(zip(goals, _means(score, _shared(selection, device, memory), metric, goals=len(goals)), strict=True))
    for goal, value in values.items():
        if math.isnan(value):
            raise InputError(f"validation: no group has a relevant document of goal {goal!r}; choose other periods")
    return values


@torch.no_grad()
def _means(score: bundle.Scorer, batches: Iterator[QueryGroups], metric: str, *, goals: int = 0) -> list[float]:
    """The mean metric of the labels, or of each of several goals, over the groups of all workers that define it."""
    measure = metric_named(metric)
    totals = torch.zeros(max(1, goals), 2, dtype=torch.float64)
    for groups in batches:
        assert groups.labels_N is not None
        scores_N = score(groups)
        if scores_N.isnan().any():
            raise InputError(
                "validation: a score is NaN, training has diverged; lower optimizer.learning_rate or set "
                "optimizer.clip_norm"
            )
        labels = groups.goals_NG.unbind(1) if goals and groups.goals_NG is not None else [groups.labels_N]
        for number, labels_N in enumerate(labels):
            value_Q = measure.values(scores_N, labels_N, groups.offsets_Q1)
            defined_Q = value_Q[~value_Q.isnan()]
            totals[number] += torch.tensor([defined_Q.sum().item(), len(defined_Q)], dtype=torch.float64)
    return [total / count if count else math.nan for total, count in sum_over_workers(totals).tolist()]


def _shared(selection: Selection, device: torch.device, memory: Memory | None) -> Iterator[QueryGroups]:
    """This worker's share of a selection in fixed batches, on a device."""
    rank, world = rank_and_world()
    for index, groups in enumerate(iterate(selection, docs_per_batch=16_384, memory=memory)):
        if index % world == rank:
            yield groups.to(device, non_blocking=True)


def _on_cpu(module: nn.Module) -> dict[str, Tensor]:
    """A CPU copy of a module's weights and buffers."""
    return {name: value.detach().to("cpu", copy=True) for name, value in module.state_dict().items()}
