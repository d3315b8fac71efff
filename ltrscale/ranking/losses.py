"""Ranking losses over ragged groups: one value per group, to be reduced in one place by the training loop.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group, and R of them (a block of
rows) against all L.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltrscale.batch import Chunk, length_chunks
from ltrscale.ranking.metrics import rank_discounts

PAIRS_PER_BLOCK = 1 << 18
"""Pairs handled at once: the temporaries then stay in the cache, and memory does not grow with the list length."""


def lambdarank(
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    sigma: float = 1.0,
    truncation: int | None = None,
) -> Tensor:
    """LambdaRank: pairwise logistic loss weighted by how much a swap of the pair would change NDCG, shape [Q].

    `sum over pairs with y_i > y_j of |G_i - G_j| |D_i - D_j| / IDCG * log(1 + exp(-sigma (s_i - s_j)))` with gain
    `G = 2^y - 1`, discount `D = 1 / log2(1 + rank)`, and the IDCG of the whole list (Burges 2010; this is the loss
    whose gradients are its lambdas). Ranks come from the current scores and carry no gradient. Documents with equal
    scores share the mean discount of their block, so that the order of the input never matters; a pair within a
    block then has weight 0, and where all scores are equal so has the whole group.

    Args:
        scores_N: finite scores. Half precision is computed, and returned, in float32.
        labels_N: finite relevance, not negative.
        offsets_Q1: offsets of the groups. A group without a pair has loss 0.
        sigma: steepness of the logistic function.
        truncation: count only pairs of which a document stands among this many first ranks (a tied block stands at
            its first rank); None counts all pairs.

    Example:
        >>> scores = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
        >>> loss = lambdarank(scores, torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0, 2, 3]))
        >>> loss.detach()  # a group in the wrong order, (1 - 1 / log2(3)) log(1 + e), and one without a pair
        tensor([0.4847, 0.0000])
        >>> loss.sum().backward()
        >>> scores.grad
        tensor([ 0.2698, -0.2698,  0.0000])
    """
    if scores_N.dtype in (torch.float16, torch.bfloat16):
        scores_N = scores_N.float()
    loss_Q: Tensor = _LambdaRank.apply(scores_N, labels_N, offsets_Q1, sigma, truncation)  # type: ignore[no-untyped-call]
    return loss_Q


class _LambdaRank(torch.autograd.Function):
    """Finds the gradient along with the loss, so that no matrix of pairs outlives its block."""

    @staticmethod
    def forward(
        ctx: Any, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, sigma: float, truncation: int | None
    ) -> Tensor:
        gains_N = torch.exp2(labels_N.double()) - 1
        loss_Q = scores_N.new_zeros(len(offsets_Q1) - 1)
        slope_N = torch.zeros_like(scores_N)
        for chunk in length_chunks(offsets_Q1, budget=PAIRS_PER_BLOCK):
            lists = _sorted_by_gain(scores_N, gains_N, chunk)
            slope_ML = torch.zeros_like(lists.scores_ML)
            rows = max(1, PAIRS_PER_BLOCK // lists.scores_ML.numel())
            for start in range(0, lists.winners, rows):
                block = slice(start, min(start + rows, lists.winners))
                margins_MRL = sigma * (lists.scores_ML[:, block, None] - lists.scores_ML[:, None])
                log_chance_MRL = F.logsigmoid(margins_MRL)
                weights_MRL = _weights(lists, block, truncation)
                loss_Q[chunk.groups_M] -= (weights_MRL * log_chance_MRL).sum((1, 2))
                if ctx.needs_input_grad[0]:
                    pull_MRL = weights_MRL.mul_(log_chance_MRL.expm1_()).mul_(sigma)  # expm1: -sigmoid(-margin)
                    slope_ML[:, block] += pull_MRL.sum(2)
                    slope_ML -= pull_MRL.sum(1)
            slope_N[lists.rows_ML[lists.mask_ML]] = slope_ML[lists.mask_ML]
        ctx.save_for_backward(slope_N, offsets_Q1)
        return loss_Q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Q: Tensor) -> tuple[Tensor, None, None, None, None]:
        slope_N, offsets_Q1 = ctx.saved_tensors
        return slope_N * grad_Q.repeat_interleave(offsets_Q1.diff()), None, None, None, None


class _Lists(NamedTuple):
    """The lists of a chunk, each ordered by falling gain, padding last.

    Gains are divided by IDCG. No document after the first `winners` beats another one in any of the lists: where
    relevance is scarce, this leaves few rows of the matrix of pairs. `first_ML` counts the documents scored higher.
    """

    rows_ML: Tensor
    mask_ML: Tensor
    scores_ML: Tensor
    gains_ML: Tensor
    discounts_ML: Tensor
    first_ML: Tensor
    winners: int


def _sorted_by_gain(scores_N: Tensor, gains_N: Tensor, chunk: Chunk) -> _Lists:
    gains_ML, order_ML = torch.where(chunk.mask_ML, gains_N[chunk.rows_ML], -1.0).sort(descending=True)
    rows_ML, mask_ML = chunk.rows_ML.gather(1, order_ML), chunk.mask_ML  # padding is last before and after
    scores_ML = scores_N[rows_ML]
    discounts_L = rank_discounts(mask_ML.shape[1], scores_N.device)
    ideal_M1 = (gains_ML.clamp(min=0) @ discounts_L)[:, None]
    lowest_M1 = gains_ML.gather(1, mask_ML.sum(-1, keepdim=True) - 1)
    winners = int((gains_ML > lowest_M1).sum(-1).max())
    gains_ML = gains_ML / torch.where(ideal_M1 > 0, ideal_M1, 1.0)

    rising_ML = torch.where(mask_ML, -scores_ML, torch.inf)
    sorted_ML = rising_ML.sort().values
    first_ML = torch.searchsorted(sorted_ML, rising_ML)
    end_ML = torch.searchsorted(sorted_ML, rising_ML, right=True)
    sums_L1 = F.pad(discounts_L.cumsum(0), (1, 0))
    discounts_ML = (sums_L1[end_ML] - sums_L1[first_ML]) / (end_ML - first_ML)
    dtype = scores_N.dtype
    return _Lists(rows_ML, mask_ML, scores_ML, gains_ML.to(dtype), discounts_ML.to(dtype), first_ML, winners)


def _weights(lists: _Lists, block: slice, truncation: int | None) -> Tensor:
    """`|G_i - G_j| |D_i - D_j| / IDCG` of a block of rows i against all j; 0 unless i beats j."""
    beaten_ML = torch.where(lists.mask_ML, lists.gains_ML, torch.inf)  # nothing beats padding
    weights_MRL = (lists.gains_ML[:, block, None] - beaten_ML[:, None]).clamp_(min=0)
    weights_MRL *= (lists.discounts_ML[:, block, None] - lists.discounts_ML[:, None]).abs_()
    if truncation is not None:
        near_ML = lists.first_ML < truncation
        weights_MRL *= near_ML[:, block, None] | near_ML[:, None]
    return weights_MRL
