"""SimCLR-Rank as one graph for `torch.compile`, which reads each similarity where it is needed and writes it once.

Unlike `contrast.simclr_rank`, which computes similarities in tiles and keeps none, it keeps those of all lists for the
gradient: 4 bytes for each pair of views of a list, or 2.

Shapes: N documents, D embedding; M groups of a chunk with U = 2L views each, the views of a document side by side.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltrscale.batch import at_least_float32
from ltrscale.layout import Chunks
from ltrscale.pretext.watch import unit_vectors

LARGEST_EXPONENT = 80
"""`exp(-80)` is a normal float32."""


class Similarities(NamedTuple):
    """What is done with the similarities of a chunk."""

    scale: float
    """1 / tau."""
    with_positive: bool
    half: bool
    """Store cosines, and the weights of pairs in the gradient, in float16, which rounds them about as TF32 does."""

    @property
    def shift(self) -> float:
        """Subtracted from logits instead of their maximum, while no exponential can underflow; 0 for the maximum."""
        return self.scale if 2 * self.scale < LARGEST_EXPONENT else 0.0

    def views(self, chunks: Chunks, views_N2D: Tensor) -> list[Tensor]:
        """The views of each chunk, [M, U, D], 0 in padding."""
        return _by_view(chunks, chunks.pad(views_N2D.half() if self.half else views_N2D))

    def logits(self, views_MUD: Tensor, mask_ML: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities [M, U, U], and where a view is not contrasted with another."""
        cosines_MUU = torch.bmm(views_MUD, views_MUD.mT)
        view_U = torch.arange(views_MUD.shape[1], device=views_MUD.device)
        own_UU = view_U[:, None] == view_U if self.with_positive else view_U[:, None] // 2 == view_U // 2
        padding_MU = ~mask_ML[..., None].expand(-1, -1, 2).flatten(1)
        return at_least_float32(cosines_MUU) * self.scale, own_UU | padding_MU[:, None]

    def totals(self, views_MUD: Tensor, mask_ML: Tensor) -> Tensor:
        """Log-sum-exp of each view over the other views of its group, shape [M, L, 2]; arbitrary in padding."""
        logits_MUU, left_out_MUU = self.logits(views_MUD, mask_ML)
        logits_MUU = (logits_MUU - self.shift).masked_fill(left_out_MUU, -torch.inf)
        total_MU = logits_MUU.exp().sum(2).log() + self.shift if self.shift else logits_MUU.logsumexp(2)
        return total_MU.view(*mask_ML.shape, 2)

    def gradient(self, views_MUD: Tensor, mask_ML: Tensor, total_MU: Tensor, grad_MU: Tensor) -> Tensor:
        """Gradient of the views, [M, L, 2, D]; in padding `total_MU` is infinite, `grad_MU` 0, the result arbitrary."""
        logits_MUU, left_out_MUU = self.logits(views_MUD, mask_ML)
        # not the exponentials of `totals`, which a compiler would keep; without the scale weights fit float16
        weight_MUU = (logits_MUU - total_MU[:, :, None]).exp() * grad_MU[:, :, None]
        weight_MUU = weight_MUU + (logits_MUU - total_MU[:, None]).exp() * grad_MU[:, None]
        weight_MUU = weight_MUU.masked_fill(left_out_MUU, 0.0).to(views_MUD.dtype)
        grad_MUD = torch.bmm(weight_MUU, views_MUD).to(grad_MU.dtype) * self.scale
        return grad_MUD.view(*mask_ML.shape, 2, -1)


class _LogSumExp(torch.autograd.Function):
    """As `contrast._GroupLogSumExp`: [N, 2, D] to [N, 2]."""

    @staticmethod
    def forward(ctx: Any, views_N2D: Tensor, chunks: Chunks, similar: Similarities) -> Tensor:
        of_chunks = zip(similar.views(chunks, views_N2D), chunks.split(chunks.mask_S), strict=True)
        total_N2 = chunks.ragged([similar.totals(*of_chunk) for of_chunk in of_chunks])
        ctx.save_for_backward(views_N2D, total_N2)
        ctx.chunks, ctx.similar = chunks, similar
        return total_N2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N2: Tensor) -> tuple[Tensor, None, None]:
        (views_N2D, total_N2), chunks = ctx.saved_tensors, ctx.chunks
        total_N2 = total_N2.masked_fill(total_N2 == -torch.inf, torch.inf)  # an empty sum: its softmax row is 0
        of_chunks = zip(
            ctx.similar.views(chunks, views_N2D),
            chunks.split(chunks.mask_S),
            _by_view(chunks, chunks.pad(total_N2, torch.inf)),
            _by_view(chunks, chunks.pad(grad_N2)),
            strict=True,
        )
        return chunks.ragged([ctx.similar.gradient(*of_chunk) for of_chunk in of_chunks]), None, None


def _by_view(chunks: Chunks, values_S: Tensor) -> list[Tensor]:
    return [part.flatten(1, 2) for part in chunks.split(values_S)]


def info_nce(z0_ND: Tensor, z1_ND: Tensor, chunks: Chunks, similar: Similarities) -> Tensor:
    """The loss of each document as in `contrast.simclr_rank`, shape [N]."""
    views_N2D = unit_vectors(torch.stack([z0_ND, z1_ND], 1))
    positive_N = (views_N2D[:, 0] * views_N2D[:, 1]).sum(-1) * similar.scale
    total_N2: Tensor = _LogSumExp.apply(views_N2D, chunks, similar)  # type: ignore[no-untyped-call]
    loss_N = total_N2.sum(1) - 2 * positive_N
    # without the positive, a document alone has nothing to sum over
    return loss_N if similar.with_positive else loss_N.masked_fill(total_N2[:, 0] == -torch.inf, 0.0)


@cache
def compiled() -> Any:
    """`info_nce`, compiled for lists of any lengths."""
    return torch.compile(info_nce, dynamic=True)
