"""NeuralSort: the relaxed sort of lists; returns the entries at the first ranks.

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

from ltrscale.batch import length_chunks
from ltrscale.devices import block_entries
from ltrscale.layout import Chunks, layout

CHOICES_PER_BLOCK = 1 << 18
"""Permutation entries that a CPU builds at once: few enough to stay in the cache, so memory does not grow with L; see
`block_entries` for a GPU."""

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
    kept_Q1: Tensor = offsets_Q1 if k is None else layout(offsets_Q1).get("kept", k)
    return kept_Q1


def check_sort(temperature: float, k: int | None) -> None:
    """Raise ValueError unless the temperature is positive and k is None or at least 1."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, not {k}")


class _SortEntries(torch.autograd.Function):
    """Keeps the sorted lists for backward, which rebuilds the permutations."""

    @staticmethod
    def forward(
        ctx: Any, entries_N2: Tensor, offsets_Q1: Tensor, temperature: float, k: int | None, mode: Mode
    ) -> Tensor:
        chunks, parts = _length_chunks(entries_N2, offsets_Q1, k), []
        ctx.sorted = list(_sorted_chunks(chunks, entries_N2, k, temperature))
        for chunk in ctx.sorted:
            blocks = []
            for block in chunk.blocks():
                if mode == "soft":
                    top_M2R = chunk.entries_M2L @ _relaxed(chunk.lists, block, temperature).mT
                    top_M2R[:, 0] += chunk.lists.middle_M1
                else:
                    top_M2R = chunk.entries_M2L @ _exact(chunk.lists, block).mT
                    # Copied, not averaged: rounding in the mean would separate tied scores.
                    top_M2R[:, 0] = chunk.scores_ML[:, block]
                blocks.append(top_M2R)
            past_k = chunk.scores_ML.shape[1] - chunk.ranks
            parts.append(F.pad(torch.cat(blocks, 2), (0, past_k)).mT)
        ctx.temperature, ctx.k, ctx.mode, ctx.chunks, ctx.offsets_Q1 = temperature, k, mode, chunks, offsets_Q1
        at_rank_N2 = chunks.ragged(parts)  # in each document's row, the entry at that row's rank
        return at_rank_N2 if k is None else at_rank_N2.index_select(0, layout(offsets_Q1).get("kept_rows", k))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T2: Tensor) -> tuple[Tensor, None, None, None, None]:
        chunks, parts, grad_N2 = ctx.chunks, [], grad_T2
        if ctx.k is not None:
            kept_T = layout(ctx.offsets_Q1).get("kept_rows", ctx.k)
            grad_N2 = grad_T2.new_zeros(len(chunks.slots_N), 2).index_copy_(0, kept_T, grad_T2)
        at_ranks = chunks.split(chunks.pad(grad_N2))
        for chunk, grad_ML2 in zip(ctx.sorted, at_ranks, strict=True):
            grad_M2K = grad_ML2[:, : chunk.ranks].mT.contiguous()
            grad_M2L = _chunk_gradient(chunk, grad_M2K, ctx.temperature, ctx.mode)
            order_ML2 = chunk.lists.order_ML[..., None].expand(-1, -1, 2)
            parts.append(torch.empty_like(grad_ML2).scatter_(1, order_ML2, grad_M2L.mT))
        return chunks.ragged(parts), None, None, None, None


class _Lists(NamedTuple):
    """Lists by falling score, padding last; scores are relative to the middle score, to keep rounding errors small."""

    order_ML: Tensor
    middle_M1: Tensor
    scores_ML: Tensor
    logits_ML: Tensor
    """`-sum_j |s - s_j| / tau`, -inf in padding."""
    first_ML: Tensor
    """Documents with a higher score."""
    end_ML: Tensor
    """Documents with an equal or higher score."""
    signs_ML: Tensor
    """`sum_j sign(s - s_j)`: the number of documents below it minus the number above."""
    weights_ML: Tensor
    """`n + 1 - 2r` for each rank r, counting from 1."""


class _Chunk(NamedTuple):
    """Sorted lists of similar length, their entries, the given scores, and the number of ranks to fill."""

    lists: _Lists
    entries_M2L: Tensor
    scores_ML: Tensor
    ranks: int

    def blocks(self) -> Iterator[slice]:
        """Slices of ranks, each with at most one block of choices or a single rank."""
        entries = CHOICES_PER_BLOCK if self.scores_ML.is_cpu else block_entries(self.scores_ML.device)
        step = max(1, entries // max(1, self.scores_ML.numel()))
        for start in range(0, self.ranks, step):
            yield slice(start, min(start + step, self.ranks))


def _length_chunks(entries_N2: Tensor, offsets_Q1: Tensor, k: int | None) -> Chunks:
    # Chunks are bounded by L^2 or by L k. When most lists are no longer than k, L^2 is the tighter bound.
    quadratic = k is None or k * len(offsets_Q1) > len(entries_N2)
    budget = CHOICES_PER_BLOCK if quadratic or k is None else CHOICES_PER_BLOCK // k
    return length_chunks(offsets_Q1, budget=budget, quadratic=quadratic)


def _sorted_chunks(chunks: Chunks, entries_N2: Tensor, k: int | None, temperature: float) -> Iterator[_Chunk]:
    for entries_ML2, mask_ML in zip(*map(chunks.split, (chunks.pad(entries_N2), chunks.mask_S)), strict=True):
        lists = _sort(entries_ML2[..., 0], mask_ML, temperature)
        scores_ML, gains_ML = (values_ML.gather(1, lists.order_ML) for values_ML in entries_ML2.unbind(2))
        length = mask_ML.shape[1]
        yield _Chunk(lists, torch.stack([lists.scores_ML, gains_ML], 1), scores_ML, min(k or length, length))


def _sort(scores_ML: Tensor, mask_ML: Tensor, temperature: float) -> _Lists:
    """Sort each list; prefix sums give the sums of distances, so no matrix of pairs is needed."""
    padding_ML = ~mask_ML
    falling_ML, order_ML = scores_ML.masked_fill(padding_ML, -torch.inf).sort(descending=True)
    # the mask stays valid: padding was last before the sort and has the lowest score
    lengths_M1 = mask_ML.sum(-1, keepdim=True)
    middle_index_M1 = (lengths_M1 - 1) // 2
    middle_M1 = falling_ML.gather(1, middle_index_M1)
    scores_ML = (falling_ML - middle_M1).masked_fill_(padding_ML, 0.0)
    rising_ML = (-scores_ML).masked_fill_(padding_ML, torch.inf)
    first_ML = torch.searchsorted(rising_ML, rising_ML)
    end_ML = torch.searchsorted(rising_ML, rising_ML, right=True)
    signs_ML = lengths_M1 - end_ML - first_ML
    spread_ML = signs_ML * scores_ML - _signed_sum(scores_ML, first_ML, end_ML)
    logits_ML = ((spread_ML.gather(1, middle_index_M1) - spread_ML) / temperature).to(scores_ML.dtype)
    logits_ML.masked_fill_(padding_ML, -torch.inf)
    weights_ML = (lengths_M1 - (1 + 2 * torch.arange(mask_ML.shape[1], device=mask_ML.device))).to(scores_ML.dtype)
    return _Lists(order_ML, middle_M1, scores_ML, logits_ML, first_ML, end_ML, signs_ML, weights_ML)


def _signed_sum(values_ML: Tensor, first_ML: Tensor, end_ML: Tensor) -> Tensor:
    """`sum_j sign(s_i - s_j) v_j` of each document i, in float64; values are 0 in padding."""
    sums_ML1 = F.pad(values_ML.double().cumsum(-1), (1, 0))
    return sums_ML1[:, -1:] - sums_ML1.gather(1, end_ML) - sums_ML1.gather(1, first_ML)


def _relaxed(lists: _Lists, block: slice, temperature: float) -> Tensor:
    """Rows of NeuralSort's permutation over the sorted lists, shape [M, R, L]; rows past a list's end are unused."""
    slope_MR1 = lists.weights_ML[:, block, None] / temperature
    return torch.baddbmm(lists.logits_ML[:, None], slope_MR1, lists.scores_ML[:, None]).softmax(-1)


def _exact(lists: _Lists, block: slice) -> Tensor:
    """Rows of the exact permutation over the sorted lists, tied documents sharing their ranks, shape [M, R, L]."""
    ranks_R1 = torch.arange(block.start, block.stop, device=lists.first_ML.device)[:, None]
    share_ML = 1 / (lists.end_ML - lists.first_ML).to(lists.scores_ML.dtype)
    chosen_MRL = (lists.first_ML[:, None] <= ranks_R1) & (ranks_R1 < lists.end_ML[:, None])
    return torch.where(chosen_MRL, share_ML[:, None], 0.0)


def _chunk_gradient(chunk: _Chunk, grad_M2K: Tensor, temperature: float, mode: Mode) -> Tensor:
    """Gradient of the entries, through the mean and, for the scores, through the permutation."""
    # For permutation P, entries x and gradient G of the result, the gradient of the logits is
    # D_rl = P_rl (G_r x_l - G_r P_r x). The scores need only two sums of D over r: plain, and weighted by n + 1 - 2r.
    lists, x_M2L = chunk.lists, chunk.entries_M2L
    grad_M2L, sums_M6L = torch.zeros_like(x_M2L), x_M2L.new_zeros(len(x_M2L), 6, x_M2L.shape[2])
    for block in chunk.blocks():
        grad_M2R = grad_M2K[:, :, block]
        if mode != "soft":
            grad_M2L += grad_M2R @ _exact(lists, block)
        if mode != "hard":
            chosen_MRL = _relaxed(lists, block, temperature)
            mean_M1R = (grad_M2R * (x_M2L @ chosen_MRL.mT)).sum(1, keepdim=True)
            factors_M3R = torch.cat([grad_M2R, mean_M1R], 1)
            factors_M6R = torch.cat([factors_M3R, lists.weights_ML[:, None, block] * factors_M3R], 1)
            sums_M6L += factors_M6R @ chosen_MRL
    if mode == "hard":
        return grad_M2L
    plain_M3L, weighted_M3L = sums_M6L.chunk(2, 1)
    if mode == "soft":
        grad_M2L = plain_M3L[:, :2].clone()
    plain_ML, weighted_ML = (
        (x_M2L * sums_M3L[:, :2]).sum(1) - sums_M3L[:, 2] for sums_M3L in (plain_M3L, weighted_M3L)
    )
    distances_ML = lists.signs_ML * plain_ML + _signed_sum(plain_ML, lists.first_ML, lists.end_ML)
    grad_M2L[:, 0] += ((weighted_ML - distances_ML) / temperature).to(x_M2L.dtype)
    return grad_M2L
