"""NeuralSort: the relaxed sort of lists, as the entries that it puts at the first ranks.

Shapes: N documents, Q lists, Q1 = Q + 1 offsets, T entries at the first ranks of all lists; in a chunk of M lists, L
slots a list, its first K ranks, and a block of R ranks compared with all L slots. An entry is a score with its gain,
so `entries_N2` has two columns; ranks inside the code count from 0.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltrscale.batch import length_chunks, to_offsets

CHOICES_PER_BLOCK = 1 << 18
"""Permutation entries built at once: few enough to stay in the cache, so memory does not grow with L."""

Mode = Literal["soft", "hard", "straight_through"]
"""The sort to use: relaxed, exact, or exact with the gradient of the relaxed one."""


def sort_entries(entries_N2: Tensor, offsets_Q1: Tensor, *, temperature: float, k: int | None, mode: Mode) -> Tensor:
    """The entries at the first k ranks of each list, one list after the other, shape [T, 2].

    The entry at rank r is `P_r x`: the mean of the list's entries x, weighted by row r of the permutation P. P is the
    relaxed permutation of the scores or, in the modes "hard" and "straight_through", the exact one, where tied
    documents share their ranks equally. The gradient flows to the entries through the mean and to the scores through
    P. The exact permutation has no gradient; "straight_through" takes that of the relaxed one.

    Row r of the relaxed permutation is `softmax over the documents of ((n + 1 - 2r) s - sum_j |s - s_j|) / tau`, the
    relaxed choice of the document at rank r among n (Grover et al. 2019, equation 5). Rows sum to 1, columns need not.
    As tau tends to 0, a row tends to the exact one.

    Forward and backward each build the permutations in blocks of a fixed size and keep none: memory is O(N). Time is
    O(n log n + n k) for a list of n documents.

    Args:
        entries_N2: scores and gains, float32 or float64, finite.
        offsets_Q1: offsets of the lists; `kept_offsets` returns those of the result.
        temperature: tau > 0.
        k: ranks to fill; None fills all.
        mode: the permutation to use.

    Example:
        >>> entries = torch.tensor([[1.0, 10.0], [3.0, 30.0], [2.0, 0.0]])
        >>> sort_entries(entries, torch.tensor([0, 2, 3]), temperature=1.0, k=1, mode="soft")
        tensor([[ 2.7616, 27.6159],
                [ 2.0000,  0.0000]])
    """
    top_T2: Tensor = _SortEntries.apply(entries_N2, offsets_Q1, temperature, k, mode)  # type: ignore[no-untyped-call]
    return top_T2


def kept_offsets(offsets_Q1: Tensor, k: int | None) -> Tensor:
    """Offsets of the lists after each keeps its first k entries."""
    return offsets_Q1 if k is None else to_offsets(offsets_Q1.diff().clamp(max=k))


def check_sort(temperature: float, k: int | None) -> None:
    """Raise ValueError unless the temperature is positive and k is None or at least 1."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, not {k}")


class _SortEntries(torch.autograd.Function):
    """Saves only the entries for backward, which builds the permutations again."""

    @staticmethod
    def forward(
        ctx: Any, entries_N2: Tensor, offsets_Q1: Tensor, temperature: float, k: int | None, mode: Mode
    ) -> Tensor:
        top_T2 = entries_N2.new_empty(int(kept_offsets(offsets_Q1, k)[-1]), 2)
        for chunk in _chunks(entries_N2, offsets_Q1, k):
            for block in chunk.blocks():
                rows_MR, real_MR = chunk.kept_MK[:, block], chunk.real_MK[:, block]
                if mode == "soft":
                    top_M2R = chunk.entries_M2L @ _relaxed(chunk.lists, block, temperature).mT
                    top_M2R[:, 0] += chunk.lists.middle_M1
                else:
                    top_M2R = chunk.entries_M2L @ _exact(chunk.lists, block).mT
                    # Copied, not averaged: rounding in the mean would separate tied scores.
                    top_M2R[:, 0] = entries_N2[chunk.rows_ML[:, block], 0]
                top_T2[rows_MR[real_MR]] = top_M2R.mT[real_MR]
        ctx.save_for_backward(entries_N2, offsets_Q1)
        ctx.temperature, ctx.k, ctx.mode = temperature, k, mode
        return top_T2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T2: Tensor) -> tuple[Tensor, None, None, None, None]:
        entries_N2, offsets_Q1 = ctx.saved_tensors
        grad_N2 = torch.empty_like(entries_N2)
        for chunk in _chunks(entries_N2, offsets_Q1, ctx.k):
            grad_MK2 = torch.where(chunk.real_MK[..., None], grad_T2[chunk.kept_MK], 0.0)
            grad_M2L = _chunk_gradient(chunk, grad_MK2.mT.contiguous(), ctx.temperature, ctx.mode)
            grad_N2[chunk.rows_ML[chunk.lists.mask_ML]] = grad_M2L.mT[chunk.lists.mask_ML]
        return grad_N2, None, None, None, None


class _Lists(NamedTuple):
    """Lists in falling order of their scores, padding last.

    `scores_ML` are relative to the list's middle score, `middle_M1`. `spread_ML`, the sum of a score's distances to all
    scores, is relative to that of the middle score. The softmax does not change, and close scores keep rounding errors
    small. `first_ML` counts the documents with a higher score, `end_ML` those with an equal or higher one.
    """

    order_ML: Tensor
    mask_ML: Tensor
    lengths_M1: Tensor
    middle_M1: Tensor
    scores_ML: Tensor
    spread_ML: Tensor
    first_ML: Tensor
    end_ML: Tensor


class _Chunk(NamedTuple):
    """Lists of similar length and their entries, with their rows in the batch, `rows_ML`, and the result, `kept_MK`."""

    lists: _Lists
    entries_M2L: Tensor
    rows_ML: Tensor
    kept_MK: Tensor
    real_MK: Tensor

    def blocks(self) -> Iterator[slice]:
        """Slices of ranks, each with at most CHOICES_PER_BLOCK choices or a single rank."""
        ranks = max(1, CHOICES_PER_BLOCK // self.rows_ML.numel())
        for start in range(0, self.kept_MK.shape[1], ranks):
            yield slice(start, min(start + ranks, self.kept_MK.shape[1]))


def _chunks(entries_N2: Tensor, offsets_Q1: Tensor, k: int | None) -> Iterator[_Chunk]:
    kept_Q1 = kept_offsets(offsets_Q1, k)
    # Chunks are bounded by L^2 or by L k. When most lists are no longer than k, L^2 is the tighter bound.
    quadratic = k is None or k * len(offsets_Q1) > len(entries_N2)
    budget = CHOICES_PER_BLOCK if quadratic or k is None else CHOICES_PER_BLOCK // k
    for groups_M, rows_ML, mask_ML in length_chunks(offsets_Q1, budget=budget, quadratic=quadratic):
        lists = _sort(entries_N2[:, 0][rows_ML], mask_ML)
        rows_ML = rows_ML.gather(1, lists.order_ML)
        ranks_K = torch.arange(min(k or mask_ML.shape[1], mask_ML.shape[1]), device=mask_ML.device)
        real_MK = ranks_K < lists.lengths_M1
        kept_MK = torch.where(real_MK, kept_Q1[groups_M][:, None] + ranks_K, 0)
        entries_M2L = torch.stack([lists.scores_ML, entries_N2[:, 1][rows_ML]], 1)
        yield _Chunk(lists, entries_M2L, rows_ML, kept_MK, real_MK)


def _sort(scores_ML: Tensor, mask_ML: Tensor) -> _Lists:
    """Sort each list; prefix sums give the sums of distances, so no matrix of pairs is needed."""
    falling_ML, order_ML = torch.where(mask_ML, scores_ML, -torch.inf).sort(descending=True)
    lengths_M1 = mask_ML.sum(-1, keepdim=True)
    mask_ML = torch.arange(mask_ML.shape[1], device=mask_ML.device) < lengths_M1
    middle_index_M1 = (lengths_M1 - 1).clamp(min=0) // 2
    middle_M1 = falling_ML.detach().gather(1, middle_index_M1)
    scores_ML = torch.where(mask_ML, falling_ML - middle_M1, 0.0)
    rising_ML = torch.where(mask_ML, -scores_ML.detach(), torch.inf)
    first_ML = torch.searchsorted(rising_ML, rising_ML)
    end_ML = torch.searchsorted(rising_ML, rising_ML, right=True)
    spread_ML = _sum_of_signs(lengths_M1, first_ML, end_ML) * scores_ML - _signed_sum(scores_ML, first_ML, end_ML)
    spread_ML = spread_ML - spread_ML.detach().gather(1, middle_index_M1)
    return _Lists(order_ML, mask_ML, lengths_M1, middle_M1, scores_ML, spread_ML.to(scores_ML.dtype), first_ML, end_ML)


def _sum_of_signs(lengths_M1: Tensor, first_ML: Tensor, end_ML: Tensor) -> Tensor:
    """`sum_j sign(s_i - s_j)` of each document i: the number of documents below it minus the number above."""
    return lengths_M1 - end_ML - first_ML


def _signed_sum(values_ML: Tensor, first_ML: Tensor, end_ML: Tensor) -> Tensor:
    """`sum_j sign(s_i - s_j) v_j` of each document i, in float64; values are 0 in padding."""
    sums_ML1 = F.pad(values_ML.double().cumsum(-1), (1, 0))
    return sums_ML1[:, -1:] - sums_ML1.gather(1, end_ML) - sums_ML1.gather(1, first_ML)


def _relaxed(lists: _Lists, block: slice, temperature: float) -> Tensor:
    """Rows of NeuralSort's permutation over the sorted lists, shape [M, R, L]; rows past a list's end are unused."""
    padding_ML = ~lists.mask_ML & (lists.lengths_M1 > 0)  # an empty list stays unmasked: its softmax would be NaN
    logits_ML = (-lists.spread_ML / temperature).masked_fill(padding_ML, -torch.inf)
    slope_MR = _rank_weights(lists, block) / temperature
    logits_MRL = torch.baddbmm(logits_ML[:, None], slope_MR[..., None], lists.scores_ML[:, None])
    return logits_MRL.softmax(-1)


def _rank_weights(lists: _Lists, block: slice) -> Tensor:
    """`n + 1 - 2i` for each rank i of a block, i counting from 1, shape [M, R]."""
    ranks_R = torch.arange(block.start, block.stop, device=lists.mask_ML.device)
    return (lists.lengths_M1 - 1 - 2 * ranks_R).to(lists.scores_ML.dtype)


def _exact(lists: _Lists, block: slice) -> Tensor:
    """Rows of the exact permutation over the sorted lists, tied documents sharing their ranks, shape [M, R, L]."""
    ranks_R1 = torch.arange(block.start, block.stop, device=lists.mask_ML.device)[:, None]
    share_ML = 1 / (lists.end_ML - lists.first_ML).to(lists.scores_ML.dtype)
    chosen_MRL = (lists.first_ML[:, None] <= ranks_R1) & (ranks_R1 < lists.end_ML[:, None])
    return torch.where(chosen_MRL, share_ML[:, None], 0.0)


def _chunk_gradient(chunk: _Chunk, grad_M2K: Tensor, temperature: float, mode: Mode) -> Tensor:
    """Gradient of a chunk's entries: through the mean and, for the scores, through the permutation.

    For the relaxed permutation P, the entries x and the gradient G of the result, the gradient of the logits is
    `D_rl = P_rl (G_r x_l - G_r P_r x)`. The scores need only two sums of D over r, one plain and one weighted by
    `n + 1 - 2r`: products of a few rows with P.
    """
    lists, x_M2L = chunk.lists, chunk.entries_M2L
    grad_M2L, sums_M6L = torch.zeros_like(x_M2L), torch.cat([torch.zeros_like(x_M2L)] * 3, 1)
    for block in chunk.blocks():
        grad_M2R = grad_M2K[:, :, block]
        if mode != "soft":
            grad_M2L += grad_M2R @ _exact(lists, block)
        if mode != "hard":
            chosen_MRL = _relaxed(lists, block, temperature)
            mean_M1R = (grad_M2R * (x_M2L @ chosen_MRL.mT)).sum(1, keepdim=True)
            factors_M3R = torch.cat([grad_M2R, mean_M1R], 1)
            sums_M6L += torch.cat([factors_M3R, _rank_weights(lists, block)[:, None] * factors_M3R], 1) @ chosen_MRL
    if mode == "soft":
        grad_M2L += sums_M6L[:, :2]
    plain_ML = (x_M2L * sums_M6L[:, :2]).sum(1) - sums_M6L[:, 2]
    weighted_ML = (x_M2L * sums_M6L[:, 3:5]).sum(1) - sums_M6L[:, 5]
    signs_ML = _sum_of_signs(lists.lengths_M1, lists.first_ML, lists.end_ML)
    distances_ML = signs_ML * plain_ML + _signed_sum(plain_ML, lists.first_ML, lists.end_ML)
    grad_M2L[:, 0] += ((weighted_ML - distances_ML) / temperature).to(x_M2L.dtype)
    return grad_M2L
