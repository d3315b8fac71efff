"""Sums over workers: counts, gradients and BatchNorm moments.

Gradients are summed here, once a step, instead of by DistributedDataParallel's hooks. A step accumulates the
micro-batches of all streams of a worker, some of which may have run out. It divides by the count of the whole step,
which no worker knows before its last backward pass. In one process the sums are the identity.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ltrscale.models.layers import MicroBatchNorm, moments, update_running_statistics
from ltrscale.runtime.workers import rank_and_world

T = TypeVar("T")


def sum_over_workers(values: Tensor) -> Tensor:
    """Sum a tensor over the workers, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gather_over_workers(values: Tensor) -> Tensor:
    """The values of all workers, by rank: shape [world, ...]."""
    rank, world = rank_and_world()
    of_workers = torch.zeros(world, *values.shape, dtype=values.dtype)
    of_workers[rank] = values  # the other rows are zero, so that the sum is a gather
    return sum_over_workers(of_workers)


def from_rank_0(value: T) -> T:
    """The value that rank 0 passes, on all workers; plain data, for it is pickled."""
    shared = [value]
    if dist.is_initialized():  # on the CPU: by default NCCL would copy the pickled bytes through the GPU
        dist.broadcast_object_list(shared, src=0, device=torch.device("cpu"))
    return shared[0]


def flat_gradient(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The gradients of all parameters, summed over the workers, as one vector.

    A worker without micro-batches contributes zeros.
    """
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    return sum_over_workers(torch.cat(parts))


def set_gradient(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Make the parts of a vector the parameters' gradients."""
    for parameter, gradient in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)


def update_norms(model: nn.Module) -> None:
    """Update every BatchNorm once from the moments of all micro-batches of the step, on all workers."""
    if norms := _norms(model):
        update_running_statistics(norms, sum_over_workers(moments(norms)))


def set_norms(norms: Sequence[MicroBatchNorm]) -> None:
    """Set running statistics to those of all documents since the last update, on all workers."""
    update_running_statistics(norms, sum_over_workers(moments(norms)), momentum=1.0)


def forget_moments(model: nn.Module) -> None:
    """Drop what every BatchNorm has seen since the last update of its running statistics."""
    for norm in _norms(model):
        norm.seen = []


def _norms(model: nn.Module) -> list[MicroBatchNorm]:
    return [module for module in model.modules() if isinstance(module, MicroBatchNorm)]
