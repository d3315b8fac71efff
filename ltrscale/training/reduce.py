"""Sums over workers: counts, gradients and BatchNorm moments.

Gradients are summed here once per step, instead of by DistributedDataParallel's hooks. A step accumulates micro-batches
of all streams of a worker, some of which may have run out. It divides by the count of the whole step, unknown before
the last backward pass. In one process the sums are the identity.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ltrscale.models.batch_norm import MicroBatchNorm, moments, update_running_statistics
from ltrscale.runtime.workers import rank_and_world

T = TypeVar("T")

BUCKET_BYTES = 25 << 20
"""Size of a bucket of gradients that is sent at once."""


def sum_over_workers(values: Tensor) -> Tensor:
    """Sum a tensor over the workers, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gather_over_workers(values: Tensor) -> Tensor:
    """The values of all workers, by rank: shape [world, ...]."""
    rank, world = rank_and_world()
    of_workers = torch.zeros(world, *values.shape, dtype=values.dtype)
    of_workers[rank] = values  # other rows are zero, so the sum is a gather
    return sum_over_workers(of_workers)


def from_rank_0(value: T) -> T:
    """Rank 0's value on all workers; plain data, because it is pickled."""
    shared = [value]
    if dist.is_initialized():  # on the CPU: by default NCCL would copy the pickled bytes through the GPU
        dist.broadcast_object_list(shared, src=0, device=torch.device("cpu"))
    return shared[0]


def broadcast(values: Tensor) -> Tensor:
    """Broadcast rank 0's values of a tensor, in place."""
    if dist.is_initialized():
        dist.broadcast(values, src=0)
    return values


class FlatGradient:
    """The gradients of all parameters as one vector, summed over the workers.

    The vector is sent in buckets, last layers first, in the order of backward. If there are several, each is sent as
    soon as the step's last backward has filled it, overlapping with the rest. All workers send the buckets in the same
    order; a worker without a micro-batch sends zeros.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(reversed(parameters))
        self.buckets: list[list[nn.Parameter]] = [[]]
        for parameter in self.parameters:
            if sum(p.nbytes for p in self.buckets[-1]) >= BUCKET_BYTES:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        self._filling = False
        self._hooks: list[RemovableHandle] = []
        self._reset()
        if len(self.buckets) > 1 and dist.is_initialized():
            for number, bucket in enumerate(self.buckets):
                for parameter in bucket:
                    hook = partial(self._filled, number)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _reset(self) -> None:
        self._left = [len(bucket) for bucket in self.buckets]
        self._sent: list[tuple[Tensor, dist.Work | None]] = []

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Context of the last backward, which may send buckets as they fill."""
        self._filling = True
        try:
            yield
        finally:
            self._filling = False

    def _filled(self, number: int, _: Tensor) -> None:
        if self._filling:
            self._left[number] -= 1
            while len(self._sent) < len(self.buckets) and self._left[len(self._sent)] == 0:
                self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self._sent)]
        part = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        self._sent.append((part, dist.all_reduce(part, async_op=True) if dist.is_initialized() else None))

    def summed(self) -> Tensor:
        """The summed vector; no other sum over workers may come between `last_backward` and this call."""
        while len(self._sent) < len(self.buckets):
            self._send()
        for _, work in self._sent:
            if work is not None:
                work.wait()
        parts = [part for part, _ in self._sent]
        self._reset()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def set(self, flat: Tensor) -> None:
        """Set the parameters' gradients to the parts of a vector."""
        parts = torch.split(flat, [p.numel() for p in self.parameters])
        for parameter, gradient in zip(self.parameters, parts, strict=True):
            parameter.grad = gradient.view_as(parameter)


def update_norms(model: nn.Module) -> None:
    """Update every BatchNorm once from the moments of all micro-batches of the step, on all workers."""
    if norms := norms_of(model):
        update_running_statistics(norms, sum_over_workers(moments(norms)))


def set_norms(norms: Sequence[MicroBatchNorm], seen: Tensor) -> None:
    """Set running statistics from these moments, summed over the workers."""
    update_running_statistics(norms, sum_over_workers(seen), momentum=1.0)


def forget_moments(model: nn.Module) -> None:
    """Drop the moments that BatchNorms have collected since their last update."""
    for norm in norms_of(model):
        norm.seen = ()


def norms_of(model: nn.Module) -> list[MicroBatchNorm]:
    """All BatchNorms of a model, in a fixed order."""
    return [module for module in model.modules() if isinstance(module, MicroBatchNorm)]
