"""Contrastive pretext losses over documents: SimCLR-Rank and SimSiam, one value per document.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, D embedding, V = 2N views (document n has views n and N + n); in a
chunk of M groups, U = 2L views a group, and R of them (a block of rows) against all U.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltrscale.batch import length_chunks

SIMILARITIES_PER_BLOCK = 1 << 18
"""Similarities handled at once: a block then stays in the cache, and memory does not grow with the list length."""

MIN_NORM = 1e-8
"""Vectors shorter than this are divided by it instead of by their norm, as torch's cosine_similarity does."""


def simclr_rank(z0_ND: Tensor, z1_ND: Tensor, offsets_Q1: Tensor, *, temperature: float) -> Tensor:
    """SimCLR-Rank: tell a document's two views from all other views of its query group, shape [N].

    `sum over a = 0, 1 of -cos(z_a, z_a') / tau + log sum over v of exp(cos(z_a, v) / tau)` where a' = 1 - a and v
    runs over the other 2L - 1 views of the same group, the positive among them and z_a itself not (Hou et al. 2024,
    formula 3, both views summed).

    Time is O(sum of L^2). The similarities are computed once forward and once backward in blocks of a fixed size
    and never kept, so that memory is O(N D). They are float32 (or float64) also for half precision input and under
    autocast: at small temperatures bfloat16 would leave nothing of their differences.

    Args:
        z0_ND: projections of the first view, not normalised. A zero vector has cosine 0 to everything.
        z1_ND: projections of the second view.
        offsets_Q1: offsets of the groups. A document alone in its group has loss 0 and gradient 0.
        temperature: tau > 0.

    Raises:
        ValueError: the temperature is not positive.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> simclr_rank(z, z, torch.tensor([0, 2, 3]), temperature=1.0)  # 2 log(1 + 2 / e) twice; a document alone
        tensor([1.1029, 1.1029, 0.0000])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    n = len(z0_ND)
    with torch.autocast(z0_ND.device.type, enabled=False):
        views_VD = F.normalize(torch.cat([_at_least_float32(z0_ND), _at_least_float32(z1_ND)]), dim=-1, eps=MIN_NORM)
        positive_N = (views_VD[:n] * views_VD[n:]).sum(-1) / temperature
        total_V: Tensor = _GroupLogSumExp.apply(views_VD, offsets_Q1, temperature)  # type: ignore[no-untyped-call]
        return total_V[:n] + total_V[n:] - 2 * positive_N


def simsiam(p0_ND: Tensor, p1_ND: Tensor, z0_ND: Tensor, z1_ND: Tensor) -> Tensor:
    """SimSiam: each view's prediction points at the other view's projection, shape [N].

    `-(cos(p_0, sg z_1) + cos(p_1, sg z_0))`, sg stopping the gradient (Chen and He 2021). Half precision is
    computed, and returned, in float32; a zero vector has cosine 0 to everything.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> simsiam(z, z.flip(0), z, z)  # p_0 agrees with z_1, p_1 is at right angles to z_0
        tensor([-1., -1.])
    """

    def cosine(p_ND: Tensor, z_ND: Tensor) -> Tensor:
        return F.cosine_similarity(_at_least_float32(p_ND), _at_least_float32(z_ND.detach()), dim=-1, eps=MIN_NORM)

    return -(cosine(p0_ND, z1_ND) + cosine(p1_ND, z0_ND))


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


class _GroupLogSumExp(torch.autograd.Function):
    """`log sum over v of exp(<u, v> / tau)` of each view u over the other views v of its group, shape [V].

    Backward computes the similarities once more: with `P = softmax of a row` and g the incoming gradient, the
    gradient of u_i is `sum over j of (g_i P_ij + g_j P_ji) u_j / tau`, both halves from the same matrix.
    """

    @staticmethod
    def forward(ctx: Any, views_VD: Tensor, offsets_Q1: Tensor, temperature: float) -> Tensor:
        total_V = views_VD.new_empty(len(views_VD))
        for rows_MU, mask_MU in _view_chunks(offsets_Q1):
            views_MUD = views_VD[rows_MU]
            barred_M1U = torch.where(mask_MU, 0.0, -torch.inf).to(views_VD.dtype)[:, None]
            for block in _row_blocks(rows_MU):
                logits_MRU = torch.baddbmm(barred_M1U, views_MUD[:, block], views_MUD.mT, alpha=1 / temperature)
                logits_MRU.diagonal(block.start, 1, 2).fill_(-torch.inf)
                mask_MR = mask_MU[:, block]
                total_V[rows_MU[:, block][mask_MR]] = logits_MRU.logsumexp(-1)[mask_MR]
        ctx.save_for_backward(views_VD, offsets_Q1, total_V)
        ctx.temperature = temperature
        return total_V

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_V: Tensor) -> tuple[Tensor, None, None]:
        views_VD, offsets_Q1, total_V = ctx.saved_tensors
        grad_VD = torch.empty_like(views_VD)
        with torch.autocast(views_VD.device.type, enabled=False):
            for rows_MU, mask_MU in _view_chunks(offsets_Q1):
                grad_VD[rows_MU[mask_MU]] = _chunk_gradient(
                    views_VD[rows_MU],
                    torch.where(mask_MU, total_V[rows_MU], torch.inf),
                    torch.where(mask_MU, grad_V[rows_MU], 0.0) / ctx.temperature,
                    mask_MU,
                    temperature=ctx.temperature,
                )[mask_MU]
        return grad_VD, None, None


def _chunk_gradient(
    views_MUD: Tensor, total_MU: Tensor, grad_MU: Tensor, mask_MU: Tensor, *, temperature: float
) -> Tensor:
    """Gradient of the views of a chunk; `total_MU` is infinite in padding, so that its softmax rows are 0."""
    grad_MUD = torch.zeros_like(views_MUD)
    barred_M1U = torch.where(mask_MU, 0.0, -torch.inf).to(views_MUD.dtype)[:, None]
    for block in _row_blocks(total_MU):
        views_MRD, grad_MR1 = views_MUD[:, block], grad_MU[:, block, None]
        softmax_MRU = barred_M1U - total_MU[:, block, None]
        softmax_MRU.baddbmm_(views_MRD, views_MUD.mT, alpha=1 / temperature).exp_()
        softmax_MRU.diagonal(block.start, 1, 2).zero_()
        grad_MUD.baddbmm_(softmax_MRU.mT, grad_MR1 * views_MRD)
        grad_MUD[:, block].addcmul_(grad_MR1, torch.bmm(softmax_MRU, views_MUD))
    return grad_MUD


def _view_chunks(offsets_Q1: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of the views of groups of similar length, both views of a group side by side, and their mask."""
    n = int(offsets_Q1[-1])
    for chunk in length_chunks(offsets_Q1, budget=SIMILARITIES_PER_BLOCK // 4):
        yield torch.cat([chunk.rows_ML, chunk.rows_ML + n], 1), torch.cat([chunk.mask_ML, chunk.mask_ML], 1)


def _row_blocks(values_MU: Tensor) -> Iterator[slice]:
    """Slices of rows, each with at most SIMILARITIES_PER_BLOCK similarities or a single row."""
    rows = max(1, SIMILARITIES_PER_BLOCK // values_MU.numel())
    for start in range(0, values_MU.shape[1], rows):
        yield slice(start, min(start + rows, values_MU.shape[1]))
