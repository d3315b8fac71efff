"""Batch norm whose running statistics do not depend on the number of workers.

Shapes: N documents, D columns.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ltrscale.batch import at_least_float32
from ltrscale.layout import send

MOMENTUM, _EPSILON = 0.1, 1e-5
"""Weight of a step's statistics in the running ones, and what is added to a variance."""

SeenBatches = tuple[int | Tensor, Tensor, "SeenBatches"] | tuple[()]
"""Documents of a micro-batch, with its mean and unbiased variance [2, D], and what was seen before it. The number of
documents without padding lies on the device."""


class Padding(NamedTuple):
    """Which documents of a micro-batch are padding."""

    real_N: Tensor
    """Where a document is none."""
    least: int
    """Documents at its beginning that never are."""


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse a model that contains torch's own BatchNorm.

    Its running statistics would silently be those of a single worker's micro-batches.

    Raises:
        ValueError: a layer is torch's BatchNorm; names the layer.

    Example:
        >>> refuse_batch_norm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        Traceback (most recent call last):
        ValueError: 1: torch's BatchNorm1d makes weights depend on the number of workers; take MicroBatchNorm
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            kind = type(module).__name__
            raise ValueError(
                f"{name}: torch's {kind} makes weights depend on the number of workers; take MicroBatchNorm"
            )


class MicroBatchNorm(nn.Module):
    """BatchNorm that is exact under gradient accumulation and over workers.

    In training it normalises by the current micro-batch and remembers its mean and variance; once a step, `moments` and
    `update_running_statistics` move the running statistics of all norms, as if all documents had been one batch. It
    uses the running statistics at inference, and for a micro-batch of one document, which has no variance.

    Args:
        width: features D.
        affine: learn a scale and a shift.
        members_first: several members' rows come member by member, and not document by document.

    Example:
        >>> norm = MicroBatchNorm(1)
        >>> _ = norm(torch.tensor([[0.0], [2.0]])), norm(torch.tensor([[4.0]]))
        >>> update_running_statistics([norm], moments([norm]), momentum=1.0)
        >>> norm.running_mean.item(), norm.running_var.item()
        (2.0, 4.0)
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, *, affine: bool = True, members_first: bool = False) -> None:
        super().__init__()
        self.members_first = members_first
        self.padding: Padding | None = None
        """The padding of the micro-batch, see `leaving_out`."""
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.seen: SeenBatches = ()
        """The micro-batches since the last update. What was seen before is passed on unread, so compiled code does not
        depend on it."""

    def forward(self, x_ND: Tensor) -> Tensor:
        """Normalise each column."""
        if self.training and self.padding is not None:
            return self._without_padding(x_ND, self.padding)
        if not self.training or len(x_ND) < 2:
            if self.training and len(x_ND) == 1:
                only_D = x_ND.detach()[0].to(self.running_mean.dtype)
                self.seen = (1, torch.stack([only_D, torch.zeros_like(only_D)]), self.seen)
            return F.batch_norm(x_ND, self.running_mean, self.running_var, self.weight, self.bias, eps=_EPSILON)
        # With momentum 1, the fused kernel writes the micro-batch's mean and unbiased variance to these.
        statistics_2D = self.running_mean.new_zeros(2, len(self.running_mean))
        mean_D, var_D = statistics_2D.unbind()
        y_ND = F.batch_norm(x_ND, mean_D, var_D, self.weight, self.bias, training=True, momentum=1.0, eps=_EPSILON)
        self.seen = (len(x_ND), statistics_2D, self.seen)
        return y_ND

    def _without_padding(self, x_ND: Tensor, padding: Padding) -> Tensor:
        members = len(x_ND) // len(padding.real_N)
        in_block = 1 if self.members_first else members  # rows of a document that lie side by side
        rows_BRD = x_ND.view(members // in_block, -1, x_ND.shape[1])
        real_R1 = padding.real_N[padding.least :, None].expand(-1, in_block).reshape(-1, 1)
        y_BRD, count, statistics_2D = _PaddedNorm.apply(rows_BRD, real_R1, self.weight, self.bias)  # type: ignore[no-untyped-call]
        self.seen = (count, statistics_2D, self.seen)
        return y_BRD.view_as(x_ND)

    def take(self) -> list[tuple[int | Tensor, Tensor]]:
        """What was seen since the last call, the first micro-batch first."""
        seen, self.seen, taken = self.seen, (), []
        while seen:
            count, statistics_2D, seen = seen
            taken.append((count, statistics_2D))
        return taken[::-1]


class _PaddedNorm(torch.autograd.Function):
    """Batch norm by the real rows of blocks [B, R, D], with their number, mean and unbiased variance.

    The last rows of each block may be padding, to which no gradient goes, and from which none may come. Little but the
    kernels of batch norm passes over all rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BRD: Tensor, real_T1: Tensor, weight_D: Tensor | None, bias_D: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        first = x_BRD.shape[1] - len(real_T1)
        head_BRD, tail_BTD = at_least_float32(x_BRD[:, :first]), at_least_float32(x_BRD[:, first:])
        in_head, in_tail = x_BRD.shape[0] * first, x_BRD.shape[0] * real_T1.sum()
        var_D, mean_D = torch.var_mean(head_BRD, (0, 1), correction=0)
        away_D = tail_BTD.masked_fill(~real_T1, 0.0).sum((0, 1)) / in_tail.clamp(min=1) - mean_D  # mean of the tail
        squares_D = (tail_BTD - (mean_D + away_D)).masked_fill(~real_T1, 0.0).square().sum((0, 1))
        count = (in_head + in_tail).to(mean_D.dtype)
        squares_D = squares_D + in_head * (var_D + away_D.square() * (in_tail / count))
        mean_D = mean_D + away_D * (in_tail / count)
        inverse_D = (squares_D / count + _EPSILON).rsqrt()
        statistics_2D = torch.stack([mean_D, squares_D / (count - 1)])
        y_ND = F.batch_norm(x_BRD.flatten(0, 1), mean_D, squares_D / count, weight_D, bias_D, eps=_EPSILON)
        ctx.save_for_backward(x_BRD, real_T1, weight_D, mean_D, inverse_D, count)
        ctx.mark_non_differentiable(count, statistics_2D)
        return y_ND.view_as(x_BRD), count, statistics_2D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BRD: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x_BRD, real_T1, weight_D, mean_D, inverse_D, count = ctx.saved_tensors
        scale_D = torch.ones_like(inverse_D) if weight_D is None else weight_D
        x_ND, grad_ND, saved = x_BRD.flatten(0, 1), grad_BRD.flatten(0, 1), (mean_D, inverse_D)
        _, product_D, sum_D = torch.ops.aten.native_batch_norm_backward(
            grad_ND, x_ND, scale_D, None, None, *saved, True, 0.0, [False, True, True]
        )
        scale_D = scale_D * inverse_D
        slope_D = scale_D * inverse_D * product_D / count
        # scale (g - sum / n - (x - mean) inverse product / n) in two passes
        back_ND = torch.addcmul(mean_D * slope_D - scale_D * sum_D / count, x_ND, slope_D, value=-1)
        back_BRD = back_ND.addcmul_(grad_ND, scale_D).view_as(x_BRD)
        back_BRD[:, x_BRD.shape[1] - len(real_T1) :].masked_fill_(~real_T1, 0.0)
        of_affine = (None, None) if weight_D is None else (product_D, sum_D)
        return back_BRD.to(grad_BRD.dtype), None, *of_affine


@contextmanager
def leaving_out(norms: Sequence[MicroBatchNorm], padding: Padding) -> Iterator[None]:
    """Context in which norms leave the padding of a micro-batch out of their statistics."""
    for norm in norms:
        norm.padding = padding
    try:
        yield
    finally:
        for norm in norms:
            norm.padding = None


def norms_of(model: nn.Module) -> list[MicroBatchNorm]:
    """All BatchNorms of a model, in a fixed order."""
    return [module for module in model.modules() if isinstance(module, MicroBatchNorm)]


def moments(norms: Sequence[MicroBatchNorm]) -> Tensor:
    """What the norms have seen since the last call, as sums that can be added over workers.

    All norms share a few operations, because on a GPU each costs the same however short its vectors are.

    Returns:
        float64, for n norms of total width D: n numbers of documents, D sums, and D sums of squares.
    """
    of_norms = [norm.take() or [(0, norm.running_mean.new_zeros(2, len(norm.running_mean)))] for norm in norms]
    seen = list(chain.from_iterable(of_norms))
    # in float32, the sum of squares minus the squared mean would cancel
    stacked_2D = torch.cat([statistics_2D for _, statistics_2D in seen], 1).double()
    widths = [statistics_2D.shape[1] for _, statistics_2D in seen]
    means, variances = (torch.split(row_D, widths) for row_D in stacked_2D)
    numbers = [n for n, _ in seen]
    on_device = [n for n in numbers if isinstance(n, Tensor)]  # all or none: a micro-batch has padding or not
    if on_device:
        n_B = torch.stack(on_device).double()
        counts = torch.stack([n_B1.sum() for n_B1 in torch.split(n_B, [len(of_norm) for of_norm in of_norms])])
        sums, squares = (torch._foreach_mul(each, list(by_B)) for each, by_B in ((means, n_B), (variances, n_B - 1)))
    else:
        of_each = [sum(n for n, _ in of_norm) for of_norm in of_norms]
        counts = send(np.array(of_each, np.float64), norms[0].running_mean.device)
        sums = torch._foreach_mul(means, [float(n) for n in numbers])
        squares = torch._foreach_mul(variances, [float(max(0, n - 1)) for n in numbers])
    torch._foreach_addcmul_(squares, means, sums)
    firsts = [0, *accumulate(len(of_norm) for of_norm in of_norms)][:-1]
    for first, of_norm in zip(firsts, of_norms, strict=True):
        for later in range(first + 1, first + len(of_norm)):  # each further micro-batch is added to the first
            for values in (sums, squares):
                values[first].add_(values[later])
    return torch.cat([counts, *(values[i] for values in (sums, squares) for i in firsts)])


def norm_columns(norms: Sequence[MicroBatchNorm]) -> Tensor:
    """The norm of each column of all norms."""
    widths = [len(norm.running_mean) for norm in norms]
    return send(np.arange(len(norms)).repeat(widths), norms[0].running_mean.device)


def update_running_statistics(
    norms: Sequence[MicroBatchNorm],
    sums: Tensor,
    *,
    momentum: float = MOMENTUM,
    norm_D: Tensor | None = None,
) -> None:
    """Move the running statistics of norms towards the moments of a step.

    The variance is the unbiased one, as in `torch.nn.BatchNorm1d`. A single document has no variance and moves only the
    mean; a step without documents changes nothing.

    Args:
        norms: in the order of `sums`.
        sums: of all documents of a step: a result of `moments`, or a sum of results.
        momentum: weight of the new statistics in the running ones; 1 sets them.
        norm_D: a result of `norm_columns`, which else is sent to the device.
    """
    norm_D = norm_columns(norms) if norm_D is None else norm_D
    widths = [len(norm.running_mean) for norm in norms]
    count_D, sums_2D = sums[: len(norms)][norm_D], sums[len(norms) :].view(2, -1)
    mean_D, square_D = (sums_2D / count_D.clamp(min=1)).unbind()
    var_D = (square_D - mean_D.square()).clamp(min=0) * count_D / (count_D - 1).clamp(min=1)
    running = [norm.running_mean for norm in norms], [norm.running_var for norm in norms]
    for buffers, new_D, least in zip(running, (mean_D, var_D), (1, 2), strict=True):
        old_D = torch.cat(buffers)
        moved_D = old_D.lerp(new_D.to(old_D.dtype), momentum * (count_D >= least).to(old_D.dtype))
        torch._foreach_copy_(buffers, list(torch.split(moved_D, widths)))
