"""Pretraining of the network that reads examples, on synthetic problems only.

Each step has new problems (`ltrscale/simulate/problems.py`), reads their examples and ranks their other lists. Other
processes draw ahead, so a step waits only if they are too few. A moving average of the weights is validated and kept,
because it is better than the weights of any single step.

Shapes: B problems, N documents and Q lists of one problem, Q1 = Q + 1 offsets, F features, R lists of all problems.
"""

import copy
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, ClassVar

import safetensors.torch
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ltrscale import storage
from ltrscale.batch import QueryGroups, repeated
from ltrscale.config import Config, Operational
from ltrscale.data.stream.batches import MicroBatches, StreamConfig
from ltrscale.data.stream.cursor import Position
from ltrscale.devices import Device, choose_device
from ltrscale.draws import mix
from ltrscale.errors import InputError
from ltrscale.layout import layout, registered_offsets
from ltrscale.models.in_context import InContextNetwork, InContextSizes, loss_of_layers
from ltrscale.origin import is_current
from ltrscale.processor import cores
from ltrscale.progress import Report, log, progress
from ltrscale.ranking.metrics import ndcg
from ltrscale.runtime.workers import WorkerContext
from ltrscale.signals import stop_on_signal
from ltrscale.simulate.problems import Problems, ProblemsConfig, problems
from ltrscale.stages.inputs import OutputUrl
from ltrscale.stages.stage import Origin
from ltrscale.storage import join
from ltrscale.training.checkpoint import Progress, Snapshot, restore
from ltrscale.training.loop import Trainer
from ltrscale.training.memory import built
from ltrscale.training.resumption import CHECKPOINTS, STEPS, Checkpoints, finish
from ltrscale.training.settings import CosineConfig, OptimizerConfig
from ltrscale.training.untrained import SIZES, WEIGHTS, pretrained_network

_MOST_PROCESSES = 8
_AHEAD = 2
"""Draws that each process makes ahead."""
_JUDGES = mix("validation", 0)
"""Seed of the validation problems, whatever the config's."""
_JUDGED_FROM = 1 << 40
"""Number of the first validation problems, beyond the number of any step."""
_CUTOFF = 5
"""Cut-off of the NDCG that chooses the weights."""


class InContextPretrainConfig(Config):
    """How a network learns to rank from examples."""

    fixed: ClassVar = {"checkpoint_failures": 3}

    network: InContextSizes = InContextSizes()
    """Its sizes."""
    start: OutputUrl | None = None
    """Start from the weights that this job made elsewhere, of the same sizes; empty starts from random ones."""
    problems: ProblemsConfig = ProblemsConfig()
    """What it learns from. On a GPU let a step have some ten times as many: `values` 3000000, `at_once` 64."""
    steps: int = Field(2000, ge=1)
    """Steps, each with new problems."""
    minutes: float | None = Field(None, gt=0)
    """End after this time if not all steps are done by then; the rate falls with whichever is nearer to its end. The
    weights then depend on the machine's speed. Empty sets no limit."""
    optimizer: OptimizerConfig = OptimizerConfig(
        kind="adamw",
        learning_rate=1.5e-3,
        weight_decay=1e-3,
        clip_norm=1.0,
        schedule=CosineConfig(warmup=0.03, final=0.02),
    )
    """Its schedule takes a step for an epoch."""
    average: float = Field(0.995, ge=0, lt=1)
    """What the moving average of the weights keeps of itself in a step; less in the first steps."""
    validation: int = Field(12, ge=1)
    """Draws of problems that judge. They depend on `problems` alone, so runs with other seeds are comparable."""
    validate_every: int = Field(200, ge=1)
    """Steps between two validations, the best of which decides what is kept."""
    keep_every: Operational[int | None] = Field(None, ge=1)
    """Also commit the averaged weights every this many steps: `steps/00002000` below the output."""
    seed: int = 0
    """Seed of initial weights and problems."""
    device: Device = "auto"
    """`auto` takes a GPU if there is one; or `cpu`, `cuda`, `cuda:1`."""
    processes: Operational[int | None] = Field(None, ge=0)
    """Processes that draw problems while the network learns; 0 draws them in between. Empty takes one fewer than the
    machine has CPUs, and at most 8. The result does not depend on it."""
    checkpoint_minutes: Operational[float] = Field(5.0, gt=0)
    """Time between checkpoints, from which the same command resumes; the first comes after a minute."""


def pretrain_in_context(config: InContextPretrainConfig, out: str, origin: Origin, report: Report) -> None:
    """Pretrain, and commit the best weights; resumes from the newest checkpoint below `out`.

    Raises:
        InputError: training has diverged, or checkpoints cannot be written.
        Stopped: the run was asked to stop.
    """
    url, every_s = join(out, CHECKPOINTS), 60 * config.checkpoint_minutes
    with (
        stop_on_signal() as stopping,
        Checkpoints(
            url, origin=origin, data="problems", every_s=every_s, worker=WorkerContext(stopping=stopping)
        ) as checkpoints,
        closing(Learner(config, choose_device(config.device))) as learner,
        progress("pretraining", 1.0, "lists") as advance,
    ):
        trainer = learner.trainer
        trainer.requests = checkpoints.requests
        if (snapshot := checkpoints.newest()) is not None:
            learner.restore(snapshot)
        share, ended = learner.share, False
        while not ended:
            for result in trainer.epoch():
                learner.average_weights()
                before, share = share, learner.share
                advance(result.groups, share - before)
                if config.keep_every is not None and learner.step % config.keep_every == 0:
                    _keep(learner, out, origin)
                asked = result.checkpoint_due or result.stopping
                checkpoints.after(result, trainer, learner.progress() if asked else Progress())
            ended = learner.share >= 1  # before validation: with `minutes` it keeps rising
            report(learner.validate())
    found = {"step": learner.best_step, f"validation_ndcg@{_CUTOFF}": learner.value}
    _commit(out, learner.best, config.network, origin, found)
    finish(out)
    log.info("pretrained: NDCG@%d %.4f after step %d: %s", _CUTOFF, learner.value, learner.best_step, out)


def _keep(learner: "Learner", out: str, origin: Origin) -> None:
    """Commit the current average, unless an earlier run has."""
    url, of_step = join(out, STEPS, f"{learner.step:08d}"), {**origin, "step": learner.step}
    if not is_current(url, of_step):
        _commit(url, learner.average.state_dict(), learner.config.network, of_step, {"step": learner.step})


def _commit(
    url: str, weights: Mapping[str, Tensor], sizes: InContextSizes, origin: Origin, found: Mapping[str, Any]
) -> None:
    """Commit weights, with the sizes of their network in the file."""
    with storage.Commit(url) as commit:
        with commit.file(WEIGHTS) as path:
            tensors = {name: value.cpu().contiguous() for name, value in weights.items()}
            safetensors.torch.save_file(tensors, path, {SIZES: json.dumps(sizes.model_dump())})
        commit.finish({"made_by": origin, **found})


class Learner:
    """A network in training, the moving average of its weights, and the best average so far; the rest is for `Trainer`.

    Raises:
        InputError: the weights to start from do not fit, or cannot be read.
    """

    def __init__(self, config: InContextPretrainConfig, device: torch.device) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        make = partial(InContextNetwork, config.network)
        start = config.start
        network = pretrained_network(start) if start else built(make, config.optimizer, device=device)
        if network.sizes != config.network:
            raise InputError(f"{config.start}: a network of other sizes; set in_context.network to {network.sizes}")
        self.network = network.to(device).train()
        self.average = copy.deepcopy(self.network).requires_grad_(False)
        self.stream = ProblemStream(config, lambda: self.share >= 1)
        self.trainer = Trainer(
            self.network,
            self._loss,
            self.stream,
            config.optimizer,
            epochs=config.steps,
            seed=config.seed,
            done=lambda: self.share * config.steps + 0.5,
        )
        drawn = (problems(config.problems, seed=_JUDGES, number=_JUDGED_FROM + i) for i in range(config.validation))
        self.judged = [as_groups(made).to(device) for made in drawn]
        self.best = self._averaged()
        self.best_step, self.value = 0, 0.0
        self.before_s, self.began = 0.0, time.monotonic()

    def close(self) -> None:
        """End the processes that draw problems."""
        self.stream.close()

    @property
    def step(self) -> int:
        """Steps so far."""
        return self.trainer.state.step

    @property
    def spent_s(self) -> float:
        """Seconds so far, including before restarts."""
        return self.before_s + time.monotonic() - self.began

    @property
    def share(self) -> float:
        """The share of the steps done, or of the minutes if that is larger."""
        minutes = self.config.minutes
        return max(self.step / self.config.steps, self.spent_s / (60 * minutes) if minutes else 0.0)

    def _loss(self, groups: QueryGroups, generator: torch.Generator) -> tuple[Tensor, float]:  # noqa: ARG002
        return loss_of_layers(*_ranked_questions(self.network, groups, self.config.problems.questions)), 1.0

    @torch.no_grad()
    def average_weights(self) -> None:
        """Move the average towards the weights after a step."""
        keep = min(self.config.average, 1 - 10 / (self.step + 10))
        for averaged, present in zip(self.average.parameters(), self.network.parameters(), strict=True):
            averaged.lerp_(present, 1 - keep)

    def _averaged(self) -> dict[str, Tensor]:
        """A copy of the average, because each step changes it in place."""
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self.average.state_dict().items()}

    def validate(self) -> dict[str, float]:
        """Validate the average and keep it if it is the best; returns the figures for the record."""
        loss = self.trainer.past.mean_loss
        with torch.no_grad():
            asked = (_ranked_questions(self.average, each, self.config.problems.questions) for each in self.judged)
            value = float(torch.cat([_ndcg(*each) for each in asked]).double().mean())
        if value > self.value:
            self.value, self.best_step = value, self.step
            self.best = self._averaged()
        log.info("step %d: loss %.4f, validation NDCG@%d %.4f", self.step, loss, _CUTOFF, value)
        return {"step": self.step, "loss": loss, f"validation_ndcg@{_CUTOFF}": value}

    def progress(self) -> Progress:
        """What a resume needs besides the trainer's state."""
        place = {"best_step": self.best_step, "value": self.value, "spent_s": self.spent_s}
        return Progress(0, place, {"average": self._averaged(), "best": self.best})

    def restore(self, snapshot: Snapshot) -> None:
        """Restore the state of a snapshot."""
        restore(self.trainer, snapshot)
        self.average.load_state_dict(dict(snapshot.tensors["average"]))
        self.best, place = dict(snapshot.tensors["best"]), snapshot.progress
        self.best_step, self.value, self.before_s = place["best_step"], place["value"], place["spent_s"]


def _ranked_questions(
    network: InContextNetwork, groups: QueryGroups, n_questions: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Scores [B, N] after each layer, labels and offsets of each problem's last lists; the others are its examples."""
    assert groups.ids_Q is not None
    assert groups.labels_N is not None
    n_problems, device = 1 + int(groups.ids_Q[-1]), groups.features_NF.device
    n_lists = groups.n_groups // n_problems
    x_BNF = groups.features_NF.view(n_problems, -1, groups.n_features)
    labels_BN = groups.labels_N.view(n_problems, -1)
    offsets_Q1, n_examples = layout(groups.offsets_Q1).offsets_Q1[: n_lists + 1], n_lists - n_questions
    read = int(offsets_Q1[n_examples])
    known_Q1 = registered_offsets(offsets_Q1[: n_examples + 1], device)
    asked_Q1 = registered_offsets(offsets_Q1[n_examples:] - read, device)
    reading = network.read(x_BNF[:, :read], labels_BN[:, :read], known_Q1)
    return network(reading, x_BNF[:, read:], asked_Q1), labels_BN[:, read:], asked_Q1


def _ndcg(scores: list[Tensor], labels_BN: Tensor, offsets_Q1: Tensor) -> Tensor:
    """The mean NDCG of each problem, shape [B], over lists with a relevant document."""
    n_problems = len(labels_BN)
    value_R = ndcg(scores[-1].flatten(), labels_BN.flatten(), repeated(offsets_Q1, n_problems), k=_CUTOFF)
    return value_R.view(n_problems, -1).nanmean(1).nan_to_num()


def as_groups(made: Problems) -> QueryGroups:
    """The lists of all problems, one problem after the other; the id of a list is the number of its problem."""
    n_problems, n_lists = len(made.labels_BN), len(made.offsets_Q1) - 1
    return QueryGroups(
        made.features_BNF.flatten(0, 1),
        repeated(made.offsets_Q1, n_problems),
        made.labels_BN.flatten(),
        ids_Q=torch.arange(n_problems).repeat_interleave(n_lists),
    )


class _Steps(Dataset[Problems]):
    """The problems of each step."""

    def __init__(self, config: ProblemsConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    def __getitem__(self, step: int) -> Problems:
        return problems(self.config, seed=mix("step", self.seed), number=step)


class ProblemStream:
    """The problems of each step, drawn ahead by other processes; an epoch lasts until the next validation.

    Args:
        settings: of the whole training.
        is_over: whether the training ends before the next step.
    """

    def __init__(self, settings: InContextPretrainConfig, is_over: Callable[[], bool]) -> None:
        self.config, self.streams = StreamConfig(docs_per_batch=1, prefetch=0), [0]
        self.groups_per_epoch = 1  # unknown: the schedule counts steps
        self._settings, self._is_over = settings, is_over
        self._drawn: Iterator[Problems] | None = None
        """The problems of the coming steps, once the first is asked for."""

    def epoch(self, epoch: int, start: Mapping[int, Position] | None = None) -> Iterator[MicroBatches]:
        """The rest of the steps of an epoch; the position is the number of steps before."""
        length, done = self._settings.validate_every, start[0].group if start else 0
        end = min(length, self._settings.steps - epoch * length)
        if self._drawn is None:
            self._drawn = iter(self._loader(first=epoch * length + done))
        while done < end and not self._is_over():
            done += 1
            yield MicroBatches({0: as_groups(next(self._drawn))}, {0: Position(0, done)})

    def close(self) -> None:
        """End the processes that draw."""
        self._drawn = None

    def _loader(self, first: int) -> DataLoader[Problems]:
        settings = self._settings
        processes = min(_MOST_PROCESSES, cores() - 1) if settings.processes is None else settings.processes
        several: dict[str, Any] = {"multiprocessing_context": "spawn", "prefetch_factor": _AHEAD}
        return DataLoader(
            _Steps(settings.problems, settings.seed),
            batch_size=None,
            sampler=range(first, settings.steps),
            num_workers=processes,
            worker_init_fn=_obey_parent,
            **(several if processes else {}),
        )


def _obey_parent(_: int) -> None:
    """Ignore stop signals, which a terminal sends to all processes, and end with the parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    """End this process with its parent; torch misses a parent that was killed while this process started."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
