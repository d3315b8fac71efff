"""The driver of every training: phase after phase, epoch after epoch, step after step, and what it measures of itself.

After each epoch of finetuning or combining, validation decides which weights are kept and whether the phase ends early.
Pretraining is one phase without validation.
"""

import itertools
import math
import resource
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import GroupStream
from ltrscale.errors import Stopped
from ltrscale.models.features import FeatureTransform
from ltrscale.models.layers import Encoder, device_of
from ltrscale.models.ranker import Projector
from ltrscale.pretext.objective import Pretrainer
from ltrscale.progress import Advance, log, progress
from ltrscale.ranking.choices import metric_label
from ltrscale.runtime.workers import WorkerContext, rank_and_world
from ltrscale.storage import join
from ltrscale.training.auxiliary import Auxiliary, AuxiliaryObjective
from ltrscale.training.best import Best
from ltrscale.training.captured import CapturedTrainer, frame_for
from ltrscale.training.checkpoint import Progress, Snapshot, restore
from ltrscale.training.feed import Account, listed
from ltrscale.training.loop import AccountError, State, StepResult, Trainer
from ltrscale.training.memory import foresee
from ltrscale.training.reduce import gather_over_workers
from ltrscale.training.resumption import CHECKPOINTS, Checkpoints
from ltrscale.training.settings import Factors, TrainingConfig

Record = dict[str, object]


class TimeSpent:
    """The time of a training, over all its processes, and its limit."""

    def __init__(self, minutes: float | None, before_s: float) -> None:
        self._minutes, self._began = minutes, time.monotonic() - before_s

    @property
    def seconds(self) -> float:
        """Seconds so far, those of earlier processes included."""
        return time.monotonic() - self._began

    def is_all(self) -> bool:
        """Whether the minutes are up, by the latest clock of all workers, which must all ask."""
        if self._minutes is None:
            return False
        seconds = gather_over_workers(torch.tensor([self.seconds], dtype=torch.float64)).max().item()
        return seconds >= 60 * self._minutes


class EpochMeter:
    """Measures an epoch; rates count from its start or from the resume."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.began, self.waited_s = trainer, time.monotonic(), trainer.waited_s
        self.documents = trainer.state.account.documents

    def record(self, done: State) -> Record:
        """Loss and account of the epoch; speed, waiting and memory of the workers, all of which must call it."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        gpu = self.trainer.device.type == "cuda"
        gpu_bytes = torch.cuda.max_memory_allocated(self.trainer.device) if gpu else 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB on Linux
        peak_bytes = peak if sys.platform == "darwin" else 1024 * peak
        own_figures = torch.tensor([(self.trainer.waited_s - self.waited_s) / seconds, gpu_bytes, peak_bytes])
        waiting, on_gpu, resident = gather_over_workers(own_figures.double()).T.tolist()
        workers = [
            {
                "wait_percent": round(100 * waiting[rank], 2),
                "memory_gb": round(resident[rank] / 1e9, 3),
                **({"gpu_gb": round(on_gpu[rank] / 1e9, 3)} if gpu else {}),
            }
            for rank in range(rank_and_world()[1])
        ]
        return {
            "epoch": done.epoch + 1,
            "loss": done.mean_loss if done.count else None,
            **done.account._asdict(),
            **gaps(self.trainer, done),
            "documents_per_s": round((done.account.documents - self.documents) / seconds),
            "wait_percent": round(100 * sum(waiting) / len(waiting), 2),
            "workers": workers,
        }


class EpochLog:
    """Logs the first and last epoch, and in between at most one every `EVERY_S` seconds."""

    EVERY_S = 10.0

    def __init__(self, title: str, epochs: int, *, exact: bool) -> None:
        self.title, self.epochs, self.exact = title, epochs, exact
        self._next = 0.0

    def __call__(self, record: Mapping[str, object], *, last: bool) -> None:
        """Log the record of an epoch if it is time to, or if it is the last one."""
        now = time.monotonic()
        if now < self._next and not last:
            return
        self._next = now + self.EVERY_S
        account = " (0 missed, 0 repeated)" if self.exact else ""  # otherwise the trainer would have raised
        loss = "" if record["loss"] is None else f", loss {record['loss']:.4g}"
        judged = {name.removeprefix("validation_"): record[name] for name in record if name.startswith("validation_")}
        metric = "".join(f", validation {metric_label(name)} {value:.4f}" for name, value in judged.items())
        log.info(
            f"{self.title}, epoch {record['epoch']} of {self.epochs}: "
            f"{record['groups']:,} groups{account}, {record['documents']:,} documents, "
            f"{record['documents_per_s']:,} documents/s, waiting for data {record['wait_percent']:.1f}%{loss}{metric}"
        )


def gaps(trainer: Trainer, epoch: State) -> Record:
    """Missed and repeated groups of an epoch; empty if the expected account is unknown."""
    return {} if trainer.expected is None else {**epoch.account.gaps(trainer.expected)}


@dataclass(frozen=True)
class Phase:
    """A number of epochs during which some modules are frozen: no gradient, no dropout, running statistics."""

    name: str
    title: str
    """Name in the log and the progress bar."""
    epochs: int
    """Maximum number, used by learning rate schedules; 0 skips the phase."""
    until: int | None = None
    """The epoch after which it ends, if known beforehand; None for the maximum."""
    frozen: tuple[nn.Module, ...] = ()
    factors: Factors = field(default_factory=dict)
    """Factors of the learning rate, for parameters with their own rate."""
    auxiliary: AuxiliaryObjective | None = None
    """A second objective, on other groups."""
    epochs_key: str = "epochs"
    """The setting that `epochs` comes from."""

    @property
    def last(self) -> int:
        """The epoch after which it ends at the latest."""
        return self.epochs if self.until is None else self.until


@dataclass(frozen=True)
class Training:
    """A training on one worker; all workers make the same calls. It resumes from its newest checkpoint.

    A checkpoint holds the trainer's state and the progress of `Best`.
    """

    model: nn.Module
    """On its device; called with a micro-batch and a generator, it returns the summed loss and the count."""
    config: TrainingConfig
    selection: Selection
    out: str
    """Directory of the bundle and its checkpoints."""
    origin: Mapping[str, Any]
    worker: WorkerContext
    best: Best | None = None
    """Validates after each epoch; without it the training has one phase, which runs all its epochs."""
    keep: Callable[[int, float], None] = lambda _epoch, _loss: None
    """Called after each epoch with its number and its mean loss."""
    watch: Callable[[], Record] = dict
    """Called after each epoch on all workers; returns further figures of the epoch."""
    graphs: bool = False
    """Whether steps become CUDA graphs; only those of a `Pretrainer` can."""

    def run(self, *phases: Phase) -> float:
        """Train each phase until epochs, patience or minutes run out; returns the mean loss of the last epoch.

        Raises:
            Stopped: a worker was asked to stop, and a checkpoint is committed.
            InputError: training has diverged, checkpoints cannot be written, or validation is undefined.
            UnavailableError: an outage of the store lasted.
        """
        if self.config.compile:
            compile_parts(self.model)
        validation = None if self.best is None else self.best.data.validation
        read = [self.selection] if validation is None else [self.selection, validation]
        read += [phase.auxiliary.unlabelled.selection for phase in phases if phase.auxiliary is not None]
        loss = math.nan
        with Checkpoints(
            join(self.out, CHECKPOINTS),
            origin=self.origin,
            data=" ".join(selection.hash for selection in read),
            every_s=60 * self.config.checkpoint_minutes,
            worker=self.worker,
        ) as checkpoints:
            saved = checkpoints.newest()
            steps = saved.steps_before if saved else 0
            known = saved and saved.state.get("expected")
            expected = Account(*known) if known else self._expected(phases[0])
            spent = TimeSpent(self.config.minutes, 0.0 if saved is None else saved.progress["spent_s"])
            for phase in self._left(phases, saved):
                stream = self._stream(phase)
                trainer = self._trainer(phase, stream, checkpoints, expected)
                if self.best is not None:
                    self.best.begin()
                if saved is not None:  # after `begin`: the saved weights replace the best ones
                    restore(trainer, saved)
                    if self.best is not None:
                        self.best.restore(saved)
                self._set_modes(phase)
                foresee(trainer, self.selection, phase.title)
                documents = (phase.last - trainer.state.epoch) * stream.documents_per_epoch
                with progress(phase.title, documents - trainer.state.account.documents) as advance, closing(trainer):
                    late = self._epochs(phase, steps, trainer, checkpoints, spent, advance)
                loss, steps, saved = trainer.past.mean_loss, steps + trainer.state.step, None
                if late:
                    log.info("%s: its time is up after epoch %d", phase.title, trainer.state.epoch)
                    break
        if self.best is not None:
            self._warn_of_last(self.best, phases)
        return loss

    def _epochs(
        self,
        phase: Phase,
        steps_before: int,
        trainer: Trainer,
        checkpoints: Checkpoints,
        spent: TimeSpent,
        advance: Advance,
    ) -> bool:
        """Run a phase to its end, or until its time is up; True in that case."""
        log_epoch = EpochLog(phase.title, phase.last, exact=trainer.expected is not None)
        while True:
            self._set_modes(phase)  # every epoch, because validation sets eval mode
            kept, meter = self._kept(phase, steps_before, spent), EpochMeter(trainer)
            try:
                with closing(self._steps(phase, steps_before, trainer)) as results:
                    for result in results:
                        advance(result.documents)
                        checkpoints.after(result, trainer, kept)
            except Stopped:
                # epochs known beforehand are all needed
                if phase.until is None and self.best is not None and self.best.epoch > 0 and self.worker.late():
                    return True
                raise
            record, ended = self._judged(phase, trainer.state.epoch, meter.record(trainer.past))
            late = phase.until is None and spent.is_all()
            self.worker.report(record)
            log_epoch(record, last=ended or late)
            self.keep(trainer.state.epoch, trainer.past.mean_loss)
            if ended or late:
                return late

    def _steps(self, phase: Phase, steps_before: int, trainer: Trainer) -> Generator[StepResult]:
        """The reported steps of an epoch."""
        try:
            with closing(trainer.epoch()) as results:
                for result in results:
                    self._report(phase, steps_before, trainer, result)
                    yield result
        except AccountError:  # reported before it ends this attempt
            self.worker.report({**self._labels(phase), **gaps(trainer, trainer.state)})
            raise

    def _set_modes(self, phase: Phase) -> None:
        self.model.train()
        for module in phase.frozen:
            module.eval()

    def _kept(self, phase: Phase, steps_before: int, spent: TimeSpent) -> Progress:
        """What the checkpoints of an epoch hold beside the trainer's state; only the validation after it changes it."""
        kept = Progress() if self.best is None else self.best.progress(phase=phase.name, steps_before=steps_before)
        return replace(kept, place={**kept.place, "spent_s": spent.seconds})

    def _report(self, phase: Phase, steps_before: int, trainer: Trainer, result: StepResult) -> None:
        self.worker.report(
            {
                **self._labels(phase),
                "step": steps_before + result.step,
                "loss": result.loss if result.count else None,
                **({"auxiliary_loss": trainer.auxiliary_loss} if phase.auxiliary else {}),
                "groups": result.groups,
                "documents": result.documents,
                "wait_s": round(result.wait_s, 4),
            }
        )

    def _judged(self, phase: Phase, epoch: int, record: Record) -> tuple[Record, bool]:
        """The record of an epoch with its validation, and True if the phase ends."""
        record = {**self._labels(phase), **record, **self.watch()}
        if self.best is None:
            return record, epoch == phase.last
        value = self.best.update(phase.name, epoch)
        record |= {} if value is None else {self.best.metric: value}
        return record, epoch == phase.last or self.best.is_stale(epoch)

    def _labels(self, phase: Phase) -> Record:
        return {} if self.best is None else {"phase": phase.name}

    def _warn_of_last(self, best: Best, phases: Sequence[Phase]) -> None:
        """Warn if the best epoch is the last of its phase, because more epochs may be better."""
        for phase in phases:
            if phase.until is None and (best.phase, best.epoch) == (phase.name, phase.epochs):
                log.warning(
                    "%s: its last epoch, %d, is the best one, so more may be better; raise %s",
                    phase.title, phase.epochs, phase.epochs_key,
                )  # fmt: skip

    def _left(self, phases: Sequence[Phase], saved: Snapshot | None) -> list[Phase]:
        """The remaining phases, starting with the checkpoint's."""
        with_epochs = [phase for phase in phases if phase.last]
        if saved is None or self.best is None:
            return with_epochs
        return list(itertools.dropwhile(lambda phase: phase.name != saved.progress["phase"], with_epochs))

    def _expected(self, phase: Phase) -> Account | None:
        """The account that every epoch must reach; None if groups are served a random number of times."""
        order = self.config.order(phase.name)
        if order.regroup or order.repeat:
            return None
        return listed(self.selection, self.worker.reader).times(GroupStream(self.selection, order).passes)

    def _stream(self, phase: Phase) -> GroupStream:
        """This worker's share of the data in a phase."""
        order, memory = self.config.order(phase.name), None if self.best is None else self.best.memory
        rank, world = rank_and_world()
        return GroupStream(self.selection, order, rank=rank, world=world, reader=self.worker.reader, memory=memory)

    def _trainer(
        self, phase: Phase, stream: GroupStream, checkpoints: Checkpoints, expected: Account | None
    ) -> Trainer:
        """A trainer of the parameters that are not frozen in the phase."""
        config = self.config
        frozen = {id(p) for module in phase.frozen for p in module.parameters()}
        for parameter in self.model.parameters():  # before the trainer collects them
            parameter.requires_grad_(id(parameter) not in frozen)
        make: Callable[..., Trainer] = Trainer
        if self.graphs:
            make = partial(CapturedTrainer, frame_for(self.selection, stream, device_of(self.model)))
        return make(
            self.model,
            self.model,
            stream,
            config.optimizer,
            epochs=phase.epochs,
            seed=config.noise_seed(phase.name),
            factors=phase.factors,
            auxiliary=self._auxiliary(phase),
            precision=config.precision,
            expected=expected,
            requests=checkpoints.requests,
        )

    def _auxiliary(self, phase: Phase) -> Auxiliary | None:
        """The auxiliary objective of a phase, with this worker's share of its data."""
        if (objective := phase.auxiliary) is None:
            return None
        rank, world = rank_and_world()
        unlabelled = objective.unlabelled
        order = unlabelled.config.order(phase.name, self.config.seed)
        stream = GroupStream(unlabelled.selection, order, rank=rank, world=world, reader=self.worker.reader)
        return Auxiliary(objective, stream, device_of(self.model))


def compile_parts(model: nn.Module) -> None:
    """Compile transform, encoders, projector and contrast of a model, for any number of documents.

    Each is one graph. Their borders cost no memory traffic, because a product writes its result in any case. Names of
    weights stay as they are.
    """
    for module in model.modules():
        whole = isinstance(module, FeatureTransform) and not module.config.per_query  # lists are laid out in Python
        if whole or isinstance(module, Encoder | Projector):
            module.compile(dynamic=True)
        elif isinstance(module, Pretrainer):
            module.compiled = True
