"""The validation that chooses the weights of a training with labels."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.decoder import Memory, memory_for
from ltrscale.errors import InputError
from ltrscale.models.batch_norm import MicroBatchNorm, moments
from ltrscale.models.combine import AnyRanker
from ltrscale.models.tables import device_of
from ltrscale.progress import log
from ltrscale.ranking.choices import metric_label, metric_named
from ltrscale.runtime.workers import rank_and_world
from ltrscale.training.checkpoint import Progress, Snapshot
from ltrscale.training.ranking import LabelledData, RankingConfig
from ltrscale.training.reduce import set_norms, sum_over_workers
from ltrscale.training.resumption import finish


class Best:
    """The weights with the best validation metric so far (the last ones without validation), their phase and epoch."""

    def __init__(self, model: AnyRanker, config: RankingConfig, data: LabelledData) -> None:
        self.model, self.config, self.data = model, config, data
        self.memory = memory_for(data.train, config.stream.memory_gb)
        """Memory for the training groups, shared by all phases."""
        self._validation_memory = None if data.judged is None else memory_for(data.judged, config.stream.memory_gb)
        self.metric = f"validation_{config.validation_metric}"
        self.state = _on_cpu(model)
        self.value, self.phase, self.epoch = -math.inf, "", 0
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
        value = None if self.data.judged is None else self._judge(self.data.judged)
        if value is None or value > self.value:
            self.phase, self.epoch, self.state = phase, epoch, _on_cpu(self.model)
            self.value = -math.inf if value is None else value
            self.epochs = {**self.epochs, phase: epoch}
            self._last_better = epoch
        if last is not None:  # training continues from there
            self.model.load_state_dict(last)
        return value

    def _judge(self, judged: Selection) -> float:
        metric = self.config.validation_metric
        value = validate_ranker(self.model, judged, metric, self._validation_memory)
        if math.isnan(value):
            raise InputError(
                f"validation: none of its labelled groups has a relevant document, so {metric} is undefined; choose "
                "other validation periods"
            )
        return value

    @torch.no_grad()
    def _load_mean(self, epoch: int) -> None:
        """Update the running mean (a plain mean in the first epochs) and load it, with its own BatchNorm statistics."""
        new = {name: p.detach().cpu() for name, p in self.model.named_parameters() if p.requires_grad}
        share = max(1 - self.config.average, 1 / epoch)
        self._mean = {name: self._mean.get(name, value).lerp(value, share) for name, value in new.items()}
        self.model.load_state_dict(self._mean, strict=False)
        norms = [m for m in self.model.modules() if isinstance(m, MicroBatchNorm) and m.training]  # not the frozen ones
        if norms:
            self.model.eval()
            for norm in norms:
                norm.train()
            seen = moments(norms)
            for groups in _shared(self.data.train, self.model, self.memory):
                self.model(groups)
                seen += moments(norms)
            set_norms(norms, seen)

    def is_stale(self, epoch: int) -> bool:
        """True if the metric has not improved for `patience` epochs."""
        return epoch - self._last_better >= self.config.patience

    def progress(self, *, phase: str, steps_before: int) -> Progress:
        """The state that a checkpoint of the current phase adds to the trainer's."""
        value = None if self.value == -math.inf else self.value  # JSON has no infinity
        best = [value, self.phase, self.epoch] if self.phase else None
        position = {"phase": phase, "last_better": self._last_better, "best": best, "epochs": self.epochs}
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

    def commit(self, out: str, *, origin: Mapping[str, Any], **also: bundle.MetricValue) -> None:
        """Load the best weights into the model; rank 0 commits it as a bundle, with the metrics in `also`."""
        self.begin()
        if rank_and_world()[0] != 0:
            return
        train, validation = self.data.train, self.data.validation
        metrics: dict[str, bundle.MetricValue] = {
            **({self.metric: self.value} if validation else {}),
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


@torch.no_grad()
def validate_ranker(model: AnyRanker, selection: Selection, metric: str, memory: Memory | None = None) -> float:
    """Mean of a metric over the groups that define it, NaN if none do; each worker scores a share."""
    measure = metric_named(metric)
    totals = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for groups in _shared(selection, model, memory):
        assert groups.labels_N is not None
        scores_N = model(groups)
        if scores_N.isnan().any():
            raise InputError(
                "validation: a score is NaN, training has diverged; lower optimizer.learning_rate or set "
                "optimizer.clip_norm"
            )
        value_Q = measure.values(scores_N, groups.labels_N, groups.offsets_Q1)
        defined_Q = value_Q[~value_Q.isnan()]
        totals += torch.tensor([defined_Q.sum().item(), len(defined_Q)], dtype=torch.float64)
    total, count = sum_over_workers(totals).tolist()
    return total / count if count else math.nan


def _shared(selection: Selection, model: AnyRanker, memory: Memory | None) -> Iterator[QueryGroups]:
    """This worker's share of a selection in fixed batches, on the model's device."""
    rank, world = rank_and_world()
    device = device_of(model)
    for index, groups in enumerate(iterate(selection, docs_per_batch=16_384, memory=memory)):
        if index % world == rank:
            yield groups.to(device, non_blocking=True)


def _on_cpu(module: nn.Module) -> dict[str, Tensor]:
    """A CPU copy of a module's weights and buffers."""
    return {name: value.detach().to("cpu", copy=True) for name, value in module.state_dict().items()}
