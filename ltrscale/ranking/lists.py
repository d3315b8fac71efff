"""The engine of losses of lists: chunks of similar lists in falling order, forward and backward at once.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group, and the first K ranks.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltrscale.batch import at_least_float32, group_index, length_chunks, sum_by_group
from ltrscale.devices import block_entries
from ltrscale.layout import Chunks
from ltrscale.processor import one_thread
from ltrscale.ranking.metrics import rank_discounts
from ltrscale.ranking.ranked import best_first, falling_order

PAIRS_PER_BLOCK = 1 << 16
"""Pairs that a CPU handles at once: few enough to stay in the cache, so memory does not grow with the list length; see
`block_entries` for a GPU."""
ROWS_PER_BLOCK = 10
"""Rows of a block: more meet fewer documents in vain, fewer leave more lists to a chunk."""


class RankedLists(NamedTuple):
    """The lists of a chunk, each in falling order of gains or scores; padding comes last.

    In padding the score is 0 and the gain is -inf.
    """

    mask_ML: Tensor
    scores_ML: Tensor
    gains_ML: Tensor
    discounts_L: Tensor
    """Discounts of ranks 1 to L, float64."""


_Order = Literal["gains", "scores"]
_Solve = Callable[[RankedLists, bool], tuple[Tensor, Tensor]]
"""Computes the loss of each list [M] and its slope by the scores [M, L]; without the flag the slope may be 0.

The slope is 0 in padding.
"""


def over_lists(
    scores_N: Tensor, gains_N: Tensor, offsets_Q1: Tensor, solve: _Solve, *, order: _Order = "gains"
) -> Tensor:
    """The loss of each group, shape [Q], computed chunk by chunk together with its gradient.

    Backward needs only one slope per document, so `solve` can free its matrices of pairs after each block of rows. It
    receives lists of similar length in falling order, and half precision scores in float32.
    """
    loss_Q: Tensor = _ListLoss.apply(at_least_float32(scores_N), gains_N, offsets_Q1, solve, order)  # type: ignore[no-untyped-call]
    return loss_Q


class _ListLoss(torch.autograd.Function):
    @staticmethod
    @one_thread()  # its blocks are sized for the cache of one core
    def forward(
        ctx: Any, scores_N: Tensor, gains_N: Tensor, offsets_Q1: Tensor, solve: _Solve, order: _Order
    ) -> Tensor:
        chunks, gains_N, losses, slopes = _chunks(offsets_Q1), gains_N.double(), [], []
        discounts_L = rank_discounts(max(length for _, length in chunks.shapes), scores_N.device)
        keys_S = chunks.pad(gains_N if order == "gains" else scores_N, -torch.inf)
        values = keys_S, chunks.pad(scores_N), chunks.pad(gains_N, -torch.inf), chunks.mask_S
        for keys_ML, scores_ML, gains_ML, mask_ML in zip(*map(chunks.split, values), strict=True):
            order_ML = falling_order(keys_ML)
            # The mask stays valid: padding was last before the sort and has the lowest key.
            in_order = scores_ML.gather(1, order_ML), gains_ML.gather(1, order_ML)
            lists = RankedLists(mask_ML, *in_order, discounts_L[: mask_ML.shape[1]])
            loss_M, slope_ML = solve(lists, ctx.needs_input_grad[0])
            losses.append(loss_M)
            slopes.append(torch.empty_like(slope_ML).scatter_(1, order_ML, slope_ML))
        ctx.save_for_backward(chunks.ragged(slopes), offsets_Q1)
        loss_Q = chunks.by_group(losses, len(offsets_Q1) - 1)
        # a NaN score has no rank: the loss of its list is NaN, not that of some other order
        return loss_Q.masked_fill_(sum_by_group(scores_N.isnan().to(loss_Q.dtype), offsets_Q1) > 0, torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Q: Tensor) -> tuple[Tensor, None, None, None, None]:
        slope_N, offsets_Q1 = ctx.saved_tensors
        return slope_N * grad_Q[group_index(offsets_Q1)], None, None, None, None


def _chunks(offsets_Q1: Tensor) -> Chunks:
    """Groups of similar length, so few that a block of pairs spans some rows of all of them."""
    return length_chunks(offsets_Q1, budget=PAIRS_PER_BLOCK // ROWS_PER_BLOCK, quadratic=False)


def most(counts: Tensor, bound: int) -> int:
    """The highest count on a CPU; elsewhere the bound, so that the host need not wait."""
    return int(counts.max()) if counts.is_cpu and counts.numel() else bound


def over_ideal(gains_ML: Tensor, discounts_L: Tensor, truncation: int | None = None) -> Tensor:
    """Gains divided by the DCG of their best order; unchanged if no document is relevant."""
    best_MK = best_first(gains_ML, truncation or gains_ML.shape[1]).clamp(min=0)
    ideal_M = best_MK @ discounts_L[: best_MK.shape[1]]
    return gains_ML / ideal_M.masked_fill_(ideal_M == 0, 1.0)[:, None]


def row_blocks(values_ML: Tensor, rows: int) -> Iterator[slice]:
    """Slices of the first `rows` rows; each spans one block of pairs, or a single row."""
    entries = PAIRS_PER_BLOCK if values_ML.is_cpu else block_entries(values_ML.device)
    step = max(1, entries // max(1, values_ML.numel()))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
