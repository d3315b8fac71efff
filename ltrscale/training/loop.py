"""The training loop: pretraining and finetuning, one process or many, with or without Ray.

A step takes one micro-batch from each of the C canonical streams of the data; each worker computes those of its local
streams. Losses are summed over all micro-batches and workers, then divided once by the number of documents or
groups that the objective averages over. Randomness is seeded before each micro-batch from (seed, step, stream). So the
update does not depend on how streams are assigned to workers.

Shapes: see `ltrscale.batch`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ltrscale.batch import QueryGroups
from ltrscale.data.stream.batches import MicroBatches, StreamConfig
from ltrscale.data.stream.cursor import Position
from ltrscale.data.stream.plan import step_seed
from ltrscale.draws import mix
from ltrscale.errors import InputError
from ltrscale.lengths import Frame
from ltrscale.models.layers import device_of
from ltrscale.runtime.workers import rank_and_world
from ltrscale.training.auxiliary import Auxiliary
from ltrscale.training.feed import Account, Fed, read_ahead
from ltrscale.training.reduce import FlatGradient, RowGradients, forget_moments, sum_over_workers, update_norms
from ltrscale.training.settings import Factors, OptimizerConfig, Precision, build_optimizer

LossOfBatch = Callable[[QueryGroups, torch.Generator], tuple[Tensor, Tensor | float]]
"""Summed loss of a micro-batch, and the count that divides it: documents for pretext objectives, groups with a defined
loss for ranking losses. A count that depends on values stays on the device."""


@dataclass
class State:
    """Progress of training; an exact resume needs only this, the weights and the optimizer."""

    epoch: int = 0
    step: int = 0
    account: Account = field(default_factory=Account)
    """What all workers have read in this epoch; also drives the learning rate's schedule."""
    loss: float = 0.0
    """Summed loss of this epoch over all workers."""
    count: float = 0.0
    """Divisor of the summed loss."""
    positions: dict[int, Position] = field(default_factory=dict)
    """Position in each local stream within the epoch; empty at the start of an epoch."""

    @property
    def mean_loss(self) -> float:
        """Mean loss of this epoch so far; NaN while the count is 0."""
        return self.loss / self.count if self.count else math.nan


class StepSums(NamedTuple):
    """Sums of a step over all workers: the first three over micro-batches, the others one value per worker."""

    groups: float
    documents: float
    checksum: float
    due: float
    stopping: float
    failed: float
    wait_s: float


@dataclass(frozen=True)
class StepResult:
    """One step, over all workers."""

    step: int
    """Its number in the phase, from 1."""
    loss: float
    """Mean over `count`; NaN where `count` is 0."""
    count: float
    groups: int
    documents: int
    checksum: int
    """Of the groups that all workers read."""
    gradient_norm: float
    wait_s: float = field(compare=False)
    """Time spent waiting for data, mean over the workers."""
    checkpoint_due: bool
    """True if a worker asks for a checkpoint; equal on all workers."""
    stopping: bool
    """True if a worker was asked to stop; equal on all workers."""
    failed: bool
    """True if a worker cannot continue, so all must end; equal on all workers."""


class UnderWay(NamedTuple):
    """A step whose work is under way."""

    step: int
    total: StepSums
    figures: Callable[[], tuple[float, float, float]]
    """Summed loss, count and norm of the gradient, once the device has them."""


class Stream(Protocol):
    """Serves the steps of a worker, epoch after epoch, as `GroupStream` does."""

    @property
    def config(self) -> StreamConfig:
        """How it serves them."""

    @property
    def streams(self) -> Sequence[int]:
        """The streams of this worker."""

    @property
    def groups_per_epoch(self) -> int:
        """Groups of all workers."""

    def epoch(self, epoch: int, start: Mapping[int, Position] | None = None) -> Iterator[MicroBatches]:
        """The steps of an epoch after these positions."""


class AccountError(RuntimeError):
    """An epoch has missed or repeated groups."""


class Trainer:
    """Trains the parameters that require gradients, step by step.

    Args:
        model: already on its device; its BatchNorms are `MicroBatchNorm`.
        objective: summed loss and count of a micro-batch.
        stream: this worker's share of the data.
        config: optimizer settings.
        epochs: total number, for the schedule of the learning rate.
        seed: seed of augmentation, dropout and noise.
        factors: learning rate factors, for parameters with their own rate.
        auxiliary: a second objective on other groups, whose weighted gradient joins that of the step.
        precision: of matrix products; parameters and gradients are always float32.
        expected: the account that every epoch must reach, checked at its end; None if unknown.
        done: how much of `epochs` is done, for the schedule; None counts the groups that were read.
        requests: is a checkpoint due, was this worker asked to stop, is it unable to continue? Called once per step;
            one true counts for all.
    """

    late: ClassVar[int] = 0
    """Steps that are under way before the result of one is awaited."""
    frame: Frame | None = None
    """The shapes that micro-batches are padded to."""

    def __init__(
        self,
        model: nn.Module,
        objective: LossOfBatch,
        stream: Stream,
        config: OptimizerConfig,
        *,
        epochs: int,
        seed: int,
        factors: Factors | None = None,
        auxiliary: Auxiliary | None = None,
        precision: Precision = "float32",
        expected: Account | None = None,
        done: Callable[[], float] | None = None,
        requests: Callable[[], tuple[bool, bool, bool]] = lambda: (False, False, False),
    ) -> None:
        self.model, self.objective, self.stream, self.config = model, objective, stream, config
        self.epochs, self.seed, self.precision = epochs, seed, precision
        self.auxiliary = auxiliary
        self.expected, self.done, self.requests = expected, done, requests
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = device_of(model)
        self.optimizer = build_optimizer(self.parameters, config, factors)
        self.rows = RowGradients([model] if auxiliary is None else [model, auxiliary.objective])
        if auxiliary is not None:
            auxiliary.rows_of = self.rows.ids
        by_rows = {id(table.weight) for table in self.rows.tables}
        self.gradient = FlatGradient([p for p in self.parameters if id(p) not in by_rows])
        self.generator = torch.Generator(self.device)
        self.state = State()
        self.past = State()
        """The state at the end of the previous epoch."""
        self.auxiliary_loss: float | None = None
        """Mean auxiliary loss of the last step; None if it had none."""
        self.waited_s = 0.0
        """Time this worker has spent waiting for data."""

    def epoch(self) -> Generator[StepResult]:
        """Run the rest of the current epoch; yields after each step, when `state` may be saved.

        A step accumulates the gradients of the local micro-batches, then updates with the sum over all workers.

        Raises:
            InputError: training has diverged.
            AccountError: the account of the epoch differs from the expected one.
        """
        epoch, waiting = self.stream.epoch(self.state.epoch, self.state.positions or None), deque[UnderWay]()
        depth, rows_of = self.stream.config.prefetch, self.rows.ids if self.rows.tables else None
        ahead = read_ahead(epoch, depth=depth, device=self.device, rows_of=rows_of, frame=self.frame)
        with closing(ahead) as steps:
            while True:
                start = time.monotonic()
                # a worker whose streams have run out takes empty steps: the others still need it in their sums
                step = next(steps, Fed({}, self.state.positions, Account()))
                wait_s = time.monotonic() - start
                loss_and_count = self.add_gradients(step)
                taken = self.reduce(loss_and_count, StepSums(*step.account, *self.requests(), wait_s))
                total = taken.total
                self.waited_s += wait_s
                if total.groups == 0:  # summed over all workers, so all end here
                    break
                self.state.step += 1
                self.state.account = self.state.account.plus(total.groups, total.documents, total.checksum)
                self.state.positions = step.positions
                waiting.append(taken)
                late = 0 if total.due or total.stopping or total.failed else self.late  # what is saved is complete
                while len(waiting) > late:
                    yield self._result(waiting.popleft())
            while waiting:
                yield self._result(waiting.popleft())
        if self.expected is not None and not self.state.account.agrees_with(self.expected):
            raise AccountError(f"epoch {self.state.epoch} read {self.state.account} and not {self.expected}")
        self.past, self.state = self.state, State(epoch=self.state.epoch + 1, step=self.state.step)

    def _result(self, taken: UnderWay) -> StepResult:
        """The result of a step, whose loss enters that of the epoch."""
        (loss, count, norm), total = taken.figures(), taken.total
        mean = loss / count if count > 0 else math.nan
        if count:
            self.state.loss += mean * count
            self.state.count += count
        return StepResult(
            step=taken.step,
            loss=mean,
            count=count,
            groups=int(total.groups),
            documents=int(total.documents),
            checksum=int(total.checksum),
            gradient_norm=norm if count > 0 else math.nan,
            wait_s=total.wait_s / rank_and_world()[1],
            checkpoint_due=bool(total.due),
            stopping=bool(total.stopping),
            failed=bool(total.failed),
        )

    def add_gradients(self, step: Fed) -> Tensor:
        """Add the gradients of the local micro-batches; returns their summed loss and count."""
        loss_and_count = torch.zeros(2, dtype=torch.float64, device=self.device)
        micro_batches = list(step.in_order())
        for number, (stream, groups) in enumerate(micro_batches, 1):
            last = self.gradient.last_backward() if number == len(micro_batches) else nullcontext()
            with last, self.rows.planned(step.rows.get(stream)):
                loss_and_count += self.add_gradient(self.objective, self.seed, stream, groups)
        return loss_and_count

    def add_gradient(self, objective: LossOfBatch, run_seed: int, stream: int, groups: QueryGroups) -> Tensor:
        """Seed the randomness of one micro-batch and add its gradient to the parameters'.

        Returns its summed loss and count, float64, on the device: a step copies them to the CPU once.
        """
        self.seed_draws(run_seed, stream)
        return self.differentiate(objective, groups)

    def seed_draws(self, run_seed: int, stream: int) -> None:
        """Seed the randomness of one micro-batch."""
        seed = step_seed(run_seed, self.state.step, stream)
        torch.manual_seed(seed)  # dropout
        self.generator.manual_seed(seed)  # augmentation

    def differentiate(self, objective: LossOfBatch, groups: QueryGroups) -> Tensor:
        """Add the gradient of one micro-batch, whose randomness is seeded; returns its summed loss and count."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            loss, count = objective(groups, self.generator)
        if loss.requires_grad:  # a batch with nothing to learn may have no graph
            loss.backward()  # type: ignore[no-untyped-call]
        counted = count if isinstance(count, Tensor) else torch.full_like(loss, count, dtype=torch.float64)
        return torch.stack([loss.detach().double(), counted.double()])

    def reduce(self, loss_and_count: Tensor, own: StepSums) -> UnderWay:
        """Sum loss, count and gradient over all workers, and update unless the count is 0.

        Everything a step needs from the device (loss, count, gradient norm, workers' sums) is read at once, after the
        gradient. So the host waits for a GPU once per step, and twice more with an auxiliary loss.
        """
        flat = self.gradient.summed()  # first, because some buckets may have been sent during backward
        # one small all-reduce; float64 keeps counts and checksums exact
        sums = torch.cat([loss_and_count, torch.tensor(own, dtype=torch.float64).to(self.device, non_blocking=True)])
        divisor = sum_over_workers(sums)[1].clamp(min=1e-30)
        flat /= divisor
        self.rows.collect(divisor)
        update_norms(self.model)  # before an auxiliary loss, whose views must not enter them
        self.auxiliary_loss = None
        if self.auxiliary is not None and self.auxiliary.is_due(self.state.step) and sums[1] > 0:
            flat += self._gradient_of(self.auxiliary)
        self.gradient.set(flat)
        norm_1 = torch.linalg.vector_norm(flat, dtype=torch.float64)[None]
        copied = self.rows.beside(torch.cat([sums[:2], norm_1, sums[2:]])).cpu()
        loss, count, norm, *of_workers = self.rows.taken_from(copied, 3 + len(own)).tolist()
        norm = math.hypot(norm, self.rows.norm)
        total = StepSums(*of_workers)
        check_finite("loss", loss, self.state.step)
        if count > 0:
            check_finite("norm of the gradient", norm, self.state.step)
            self.update(flat, norm, total.groups)
        self.optimizer.zero_grad()
        return UnderWay(self.state.step + 1, total, lambda: (loss, count, norm))

    def update(self, flat: Tensor, norm: float, groups: float) -> None:
        """Clip the gradient `flat` by its norm and apply it; the schedule advances by the `groups` read."""
        clip = 1.0
        if self.config.clip_norm is not None and norm > self.config.clip_norm:
            clip = self.config.clip_norm / norm
            flat *= clip
        rate = self.rate(groups)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.optimizer.step()
        self.rows.update(self.optimizer, clip)

    def rate(self, groups: float) -> float:
        """The learning rate of a step that reads this many groups."""
        middle = (self.state.account.groups + groups / 2) / max(1, self.stream.groups_per_epoch)  # of the step
        read = self.state.epoch + min(1.0, middle)  # min: an epoch of drawn groups may read more than planned
        done = self.done() if self.done else read
        return self.config.learning_rate * self.config.schedule.share(done, self.epochs)

    def _gradient_of(self, auxiliary: Auxiliary) -> Tensor:
        """The weighted gradient of one auxiliary step, as a vector; sets its mean loss."""
        loss = documents = read = 0.0
        while not read:
            self.optimizer.zero_grad()
            fed, sums = auxiliary.next(), torch.zeros(2, dtype=torch.float64, device=self.device)
            self.rows.collect(None)
            for stream, groups in fed.in_order():
                with self.rows.planned(fed.rows.get(stream)):
                    sums += self.add_gradient(auxiliary.objective, mix("auxiliary", self.seed), stream, groups)
            own_read = torch.tensor([float(fed.account.groups)], dtype=torch.float64)
            loss, documents, read = sum_over_workers(torch.cat([sums.cpu(), own_read])).tolist()
            auxiliary.advance(fed, read)
        check_finite("auxiliary loss", loss, self.state.step)
        forget_moments(self.model)  # running statistics are of documents, not of their views
        documents = max(documents, 1.0)  # a batch of texts may have no hidden token; its gradient is 0
        self.auxiliary_loss = loss / documents
        divisor = documents / auxiliary.config.weight
        self.rows.collect(divisor)
        return self.gradient.summed().div_(divisor)

    def close(self) -> None:
        """Stop background work."""
        self.gradient.close()
        if self.auxiliary is not None:
            self.auxiliary.close()


def check_finite(name: str, value: float, step: int) -> None:
    """Stop a run that has diverged, by an `InputError`; all workers see the same sums, so all stop."""
    if not math.isfinite(value):
        raise InputError(
            f"step {step + 1}: the {name} is {value}, training has diverged; "
            "lower optimizer.learning_rate or set optimizer.clip_norm"
        )
