"""Steps that a GPU repeats by itself: their shapes are always the same, and the host asks for little and never waits.

A micro-batch is padded to the frame of the training, copied to the memory of the first one and computed there; its
gradient, loss and moments of norms are added to memory of their own. Once the device has done each part of a step some
times, they are captured as CUDA graphs: one from the batch to the sums, one from the sums over workers to the weights.
A micro-batch that does not fit the frame is computed as in other trainings. A CPU runs the same code uncaptured.

The result of a step is read while the next one is computed; an update that is not finite is left out on the device.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import GroupStream, first_groups
from ltrscale.devices import block_entries
from ltrscale.layout import layout
from ltrscale.lengths import Frame, frame_of
from ltrscale.models.batch_norm import moments, norm_columns, norms_of, update_running_statistics
from ltrscale.pretext.contrast import SIMILARITIES_PER_BLOCK
from ltrscale.pretext.objective import Pretrainer
from ltrscale.progress import log
from ltrscale.runtime.workers import rank_and_world
from ltrscale.training.feed import Fed
from ltrscale.training.loop import StepSums, Trainer, UnderWay, check_finite
from ltrscale.training.reduce import from_rank_0, sum_over_workers

WARM_UP = 3
"""Times that work is done before it is captured: libraries then have their memory."""
_SAMPLED_BATCHES, _SAMPLED_VALUES = 4, 1 << 24
"""Micro-batches whose lists show the lengths to expect, and the most values that are read for them."""


class CapturedTrainer(Trainer):
    """A trainer of a `Pretrainer` by Adam whose micro-batches have the shapes of a frame.

    Args:
        frame: the shapes.
        model: as of a `Trainer`, whose further arguments follow.
        arguments: those after the model.
        settings: those by name.
    """

    late: ClassVar[int] = 1

    def __init__(self, frame: Frame, model: Pretrainer, *arguments: Any, **settings: Any) -> None:
        super().__init__(model, *arguments, **settings)
        self.frame, self.watch, self.norms = frame, model.watch, norms_of(model)
        assert not self.rows.tables
        widths = [len(norm.running_mean) for norm in self.norms]
        numbers = sum(parameter.numel() for parameter in self.gradient.parameters)
        self.flat = torch.zeros(numbers, dtype=self.parameters[0].dtype, device=self.device)
        """The summed gradient."""
        self.totals = torch.zeros(2 + len(widths) + 2 * sum(widths), dtype=torch.float64, device=self.device)
        """Summed loss, count and moments of the norms."""
        self.figures = torch.zeros(3, dtype=torch.float64, device=self.device)
        """Summed loss, count and norm of the gradient of the last step."""
        self.full_rate = torch.zeros((), device=self.device)
        self.norm_D = norm_columns(self.norms) if self.norms else None
        for group in self.optimizer.param_groups:
            group["capturable"] = True
        self.static: QueryGroups | None = None
        """The micro-batch in whose memory all are computed."""
        self.unfit = self.fitting = 0
        """Micro-batches that did not fit the frame, and that did."""
        graphs = _Graphs(self.device, self.generator)
        self._add_static = {due: _Repeated(self._of_static, graphs) for due in (False, True)}
        self._update = _Repeated(self._from_sums, graphs)

    def add_gradients(self, step: Fed) -> Tensor:
        """Add gradients, losses, counts and moments of the local micro-batches to the sums."""
        for stream, groups in step.in_order():
            self.seed_draws(self.seed, stream)
            if layout(groups.offsets_Q1).frame is None:
                self.unfit += 1
                self._add(groups)
                continue
            self.fitting += 1
            self._copy(groups)
            if self._add_static[self.watch.next_is_due]():
                self.watch.is_due()  # counts what no Python has seen
        return self.totals

    def _copy(self, groups: QueryGroups) -> None:
        if self.static is None:
            self.static = groups
            return
        pairs = [(self.static.features_NF, groups.features_NF), (self.static.offsets_Q1, groups.offsets_Q1)]
        pairs += layout(self.static.offsets_Q1).replaced(layout(groups.offsets_Q1))
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])

    def _of_static(self) -> None:
        assert self.static is not None
        self._add(self.static)

    def _add(self, groups: QueryGroups) -> None:
        self.gradient.set(self.flat)  # backward adds to it
        sums = [self.differentiate(self.objective, groups)]
        self.totals += torch.cat([*sums, moments(self.norms)] if self.norms else sums)

    def reduce(self, loss_and_count: Tensor, own: StepSums) -> UnderWay:  # noqa: ARG002 - they are in `totals`
        """Sum over all workers what the host knows and what the device has, and update, without waiting for it."""
        total = StepSums(*sum_over_workers(torch.tensor(own, dtype=torch.float64)).tolist())
        if total.groups:
            sum_over_workers(self.flat)
            sum_over_workers(self.totals)
            rate = self.rate(total.groups)
            self.full_rate.fill_(rate)
            self._update()
            for group in self.optimizer.param_groups:  # a plain number for checkpoints
                group["lr"] = rate * group["factor"]
        return UnderWay(self.state.step + 1, total, self._read_later(self.state.step))

    def _from_sums(self) -> None:
        """Update weights and running statistics from the sums, unless they are not finite or of nothing."""
        loss, count = self.totals[0], self.totals[1]
        self.flat /= count.clamp(min=1e-30)
        if self.norm_D is not None:
            update_running_statistics(self.norms, self.totals[2:], norm_D=self.norm_D)
        norm = torch.linalg.vector_norm(self.flat, dtype=torch.float64)
        if self.config.clip_norm is not None:
            self.flat *= (self.config.clip_norm / norm).clamp(max=1.0)
        usable = loss.isfinite() & norm.isfinite() & (count > 0)
        self.optimizer.found_inf = (~usable).float()  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = self.full_rate * group["factor"]
        self.gradient.set(self.flat)
        self.optimizer.step()
        self.figures.copy_(torch.stack([loss, count, norm]))
        self.flat.zero_()
        self.totals.zero_()

    def _read_later(self, step: int) -> Callable[[], tuple[float, float, float]]:
        """Begin to copy the figures of a step; the result waits for them, and stops a run that has diverged."""
        on_gpu = self.device.type == "cuda"
        copied = torch.empty(3, dtype=torch.float64, pin_memory=on_gpu)
        copied.copy_(self.figures, non_blocking=True)
        done = torch.cuda.current_stream(self.device).record_event() if on_gpu else None

        def figures() -> tuple[float, float, float]:
            if done is not None:
                done.synchronize()
            loss, count, norm = copied.tolist()
            check_finite("loss", loss, step)
            if count > 0:
                check_finite("norm of the gradient", norm, step)
            return loss, count, norm

        return figures

    def close(self) -> None:
        """Stop background work, and log how many micro-batches did not fit the frame."""
        super().close()
        if self.unfit and rank_and_world()[0] == 0:
            log.info("%d of %d micro-batches did not fit the graphs", self.unfit, self.unfit + self.fitting)


class _Graphs:
    """What the graphs of a trainer share: memory, the stream on which they are captured, and a generator."""

    def __init__(self, device: torch.device, generator: torch.Generator) -> None:
        self.device, self.generator, self.on_gpu = device, generator, device.type == "cuda"
        if self.on_gpu:
            self.pool = torch.cuda.graph_pool_handle()  # they never run at once, and leave nothing in it
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def beside(self, work: Callable[[], None]) -> None:
        """Do the work on the stream of the captures, after what was asked before."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
        current.wait_stream(self.stream)

    def captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The work as a graph; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)  # that of dropout always is
        with (
            torch.cuda.device(self.device),
            # the thread that reads ahead goes on asking for memory and copies
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            work()
        return graph


class _Repeated:
    """Work on memory that stays in its place: done as it is at first, and on a GPU captured and replayed then."""

    def __init__(self, work: Callable[[], None], graphs: _Graphs) -> None:
        self.work, self.graphs, self.times = work, graphs, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> bool:
        """Do the work; True if no Python ran."""
        if self.graph is not None:
            self.graph.replay()
            return True
        self.times += 1
        if not self.graphs.on_gpu:
            self.work()
        elif self.times <= WARM_UP:
            self.graphs.beside(self.work)
        else:
            self.graph = self.graphs.captured(self.work)
            self.graph.replay()
        return False


def frame_for(selection: Selection, stream: GroupStream, device: torch.device) -> Frame:
    """The frame of a training's micro-batches, from the lengths of the first groups, which rank 0 reads."""
    if rank_and_world()[0] != 0:
        return from_rank_0(Frame(0, ()))
    documents = min(stream.config.docs_per_batch // stream.config.streams, selection.n_documents)
    sampled = min(_SAMPLED_BATCHES * documents, _SAMPLED_VALUES // len(selection.features))
    lengths_Q = first_groups(selection, sampled).lengths_Q.numpy()
    entries = SIMILARITIES_PER_BLOCK // 4 if device.type == "cpu" else block_entries(device)
    return from_rank_0(frame_of(lengths_Q, documents=documents, longest=selection.longest, entries=entries))
