"""Training a ranker in phases, with early stopping on a validation metric: what finetuning and combining share."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from ltrscale import bundle
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.split import Selection, Split, select
from ltrscale.data.stream.batches import GroupStream, iterate
from ltrscale.draws import mix
from ltrscale.errors import InputError
from ltrscale.launch.workers import Context, rank_and_world
from ltrscale.models.combine import AnyRanker
from ltrscale.progress import log, progress
from ltrscale.ranking.choices import named
from ltrscale.training.account import Account, listed
from ltrscale.training.checkpoint import Checkpoints
from ltrscale.training.epochs import EpochLog, run_epoch
from ltrscale.training.loop import Trainer
from ltrscale.training.network import state_on_cpu
from ltrscale.training.ranking import RankingConfig, RankingObjective
from ltrscale.training.reduce import sum_over_workers
from ltrscale.training.resumption import checkpoints_of, finish
from ltrscale.training.snapshot import Progress, Snapshot, restore


@dataclass(frozen=True)
class LabelledData:
    """What a ranker is trained on, and what chooses the epoch whose weights are kept."""

    train: Selection
    validation: Selection

    @classmethod
    def of(cls, train: Split, validation: Split, *, without: Collection[str]) -> Self:
        """The labelled groups of two splits, without the files that are left out; the features are those of the first.

        Raises:
            InputError: as `select`, or the validation split lacks a feature.
        """
        data = cls(*(select(split, labelled=True, without=without) for split in (train, validation)))
        return data.serving(data.train.features, whose="the training split", where="the validation split")

    def serving(self, features: Sequence[Feature], *, whose: str, where: str = "the data") -> Self:
        """The same groups with these features; see `Selection.serving`."""
        splits = (self.train, self.validation)
        return type(self)(*(split.serving(features, whose=whose, where=where) for split in splits))


class Best:
    """The weights with the best validation metric so far."""

    def __init__(self, model: AnyRanker, validation: Selection, metric: str) -> None:
        self.model, self.validation, self.metric = model, validation, metric
        self.state = state_on_cpu(model)
        self.value, self.phase, self.epoch = -math.inf, "", 0

    def commit(self, out: str, config: RankingConfig, selection: Selection, *, origin: Mapping[str, Any]) -> None:
        """Give the model its best weights; rank 0 commits it as a bundle."""
        self.model.load_state_dict(self.state)
        if rank_and_world()[0] != 0:
            return
        bundle.save_ranker(
            out,
            self.model,
            config=config.model_dump(mode="json"),
            features=selection.features,
            dataset_hash=selection.hash,
            metrics={**self.metrics, "labelled_groups": selection.n_groups},
            made_by=origin,
        )
        log.info(
            "trained on %d labelled groups, validation %s %.4f: %s",
            selection.n_groups, self.metric.upper(), self.value, out,
        )  # fmt: skip
        finish(out)

    def progress(self, *, phase: str, last_better: int, steps_before: int) -> Progress:
        """What a checkpoint of the phase in training holds besides the trainer's state."""
        best = None if self.value == -math.inf else [self.value, self.phase, self.epoch]
        return Progress(steps_before, {"phase": phase, "last_better": last_better, "best": best}, {"best": self.state})

    def restore(self, snapshot: Snapshot) -> None:
        """Take the best weights from a checkpoint."""
        self.state = dict(snapshot.tensors["best"])
        if (best := snapshot.progress["best"]) is not None:
            self.value, self.phase, self.epoch = best

    @property
    def metrics(self) -> dict[str, float | int | str | None]:
        """The best value, and where it was reached."""
        return {f"validation_{self.metric}": self.value, "phase": self.phase, "epoch": self.epoch}

    def update(self, phase: str, epoch: int) -> tuple[bool, float]:
        """Validate; remember the weights if they are the best. Returns whether they are, and the metric.

        Raises:
            InputError: no validation group has a relevant document.
        """
        value = validate(self.model, self.validation, self.metric)
        if math.isnan(value):
            raise InputError(
                f"validation: none of its labelled groups has a relevant document, so {self.metric} is undefined; "
                "choose other validation periods"
            )
        better = value > self.value
        if better:
            self.value, self.phase, self.epoch, self.state = value, phase, epoch, state_on_cpu(self.model)
        return better, value


def validate(model: AnyRanker, selection: Selection, metric: str) -> float:
    """Mean of a metric over the groups where it is defined; each worker scores a part."""
    rank, world = rank_and_world()
    where = next(model.parameters()).device
    measure = named(metric)
    totals = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for index, groups in enumerate(iterate(selection, docs_per_batch=16_384)):
            if index % world == rank:
                groups = groups.to(where)
                assert groups.labels_N is not None
                value_Q = measure.of(model(groups), groups.labels_N, groups.offsets_Q1)
                defined_Q = value_Q[~value_Q.isnan()]
                totals += torch.tensor([defined_Q.sum().item(), len(defined_Q)], dtype=torch.float64)
    total, count = sum_over_workers(totals).tolist()
    return total / count if count else math.nan


@dataclass(frozen=True)
class Phase:
    """Some epochs in which some modules are fixed functions: no gradient, no dropout, running statistics."""

    name: str
    epochs: int
    frozen: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Training:
    """A ranker's training, phase after phase; cut short, it goes on from its newest checkpoint.

    A checkpoint holds, besides the trainer's state, the phase, the best weights so far with where they were reached,
    and in which epoch of the phase they last became better.
    """

    objective: RankingObjective
    selection: Selection
    best: Best
    checkpoints: Checkpoints
    context: Context

    def run(self, phases: Sequence[Phase]) -> None:
        """Train in each phase until its epochs or its patience end; phases without epochs are passed over."""
        config, saved = self.objective.config, self.checkpoints.newest()
        known = config.stream.repeat is None and not config.stream.regroup
        expected = listed(self.selection, self.context.reader) if known else None
        steps = 0
        if saved is not None:
            self.best.restore(saved)
            steps = saved.steps_before
        for phase in phases:
            finished_before = saved is not None and saved.progress["phase"] != phase.name
            if phase.epochs and not finished_before:
                trainer = self._trainer(phase, expected)
                self._run(phase, trainer, steps, saved)
                steps += trainer.state.step
                saved = None

    def _trainer(self, phase: Phase, expected: Account | None) -> Trainer:
        """A trainer of what is not fixed in a phase; it begins from the best weights so far."""
        objective, config, context = self.objective, self.objective.config, self.context
        rank, world = rank_and_world()
        objective.ranker.load_state_dict(self.best.state)
        frozen = {id(p) for module in phase.frozen for p in module.parameters()}
        for parameter in objective.parameters():
            parameter.requires_grad_(id(parameter) not in frozen)
        order = config.stream.replace(seed=mix(phase.name, config.seed, config.stream.seed))
        return Trainer(
            objective,
            objective,
            GroupStream(self.selection, order, rank=rank, world=world, reader=context.reader),
            config.optimizer,
            epochs=phase.epochs,
            seed=mix(phase.name, config.seed),
            precision=config.precision,
            expected=expected,
            due=self.checkpoints.due,
            stopping=context.stopping,
            failed=self.checkpoints.failed,
        )

    def _run(self, phase: Phase, trainer: Trainer, steps_before: int, saved: Snapshot | None) -> None:
        best, last_better = self.best, 0
        if saved is not None:
            restore(trainer, saved)
            last_better = saved.progress["last_better"]
        tell = EpochLog(f"finetuning ({phase.name})", phase.epochs, exact=trainer.expected is not None)
        left = (phase.epochs - trainer.state.epoch) * trainer.stream.documents_per_epoch
        with progress(f"finetune {phase.name}", left - trainer.state.account.documents) as advance:
            ended = False
            while not ended:
                self._set_mode(phase)
                record = run_epoch(
                    trainer,
                    self.checkpoints,
                    report=self.context.report,
                    advance=advance,
                    progress=best.progress(phase=phase.name, last_better=last_better, steps_before=steps_before),
                    labels={"phase": phase.name},
                )
                epoch = trainer.state.epoch
                better, value = best.update(phase.name, epoch)
                last_better = epoch if better else last_better
                ended = epoch == phase.epochs or epoch - last_better >= self.objective.config.patience
                record[f"validation_{best.metric}"] = value
                self.context.report(record)
                tell(record, last=ended, more=f", validation {best.metric.upper()} {value:.4f}")

    def _set_mode(self, phase: Phase) -> None:
        self.objective.train()
        for module in phase.frozen:
            module.eval()


def train_ranker(
    objective: RankingObjective,
    phases: Sequence[Phase],
    data: LabelledData,
    out: str,
    *,
    origin: Mapping[str, Any],
    context: Context,
) -> None:
    """Train a ranker in these phases, or go on with that, and commit the best weights; all workers call it.

    Args:
        objective: on its device; it brings the settings.
        phases: in order.
        data: to train on and to choose the epoch by.
        out: directory of the bundle.
        origin: recorded in its manifest.
        context: of this worker.
    """
    config = objective.config
    best = Best(objective.ranker, data.validation, config.validation_metric)
    read = f"{data.train.hash} {data.validation.hash}"
    with checkpoints_of(config, out, origin=origin, data=read, context=context) as checkpoints:
        Training(objective, data.train, best, checkpoints, context).run(phases)
    best.commit(out, config, data.train, origin=origin)
