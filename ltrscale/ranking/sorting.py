"""Losses that relax the sort inside NDCG: NeuralSortNDCG, its Gumbel form, and PiRank; see `ltrscale.ranking.loss`.

Shapes: N documents, Q groups or lists, Q1 = Q + 1 offsets, S samples; G groups with a relevant document, R runs of a
merge sort, J runs joined from them, T entries at the first ranks of all lists; in a chunk of M lists, L slots a list,
its first K ranks, and a block of R ranks compared with all L slots. An entry is a score with its gain, so `entries_N2`
has two columns; ranks inside the code count from 0.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltrscale.batch import at_least_float32, group_index, length_chunks, rows_of, sum_by_group, to_offsets
from ltrscale.devices import block_entries
from ltrscale.layout import Chunks, layout, registered_offsets, send
from ltrscale.ranking.loss import Loss
from ltrscale.ranking.losses import NoisyLoss
from ltrscale.ranking.metrics import exponential_gain, rank_discounts
from ltrscale.ranking.ranked import SLOTS_PER_CHUNK

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


def pirank(
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    temperature: float,
    k: int | None = None,
    depth: int = 1,
    mode: Mode = "soft",
) -> Tensor:
    """PiRank: 1 - NDCG@k with the sort relaxed by NeuralSort, flat or by divide and conquer, shape [Q].

    `1 - sum over ranks r <= k of (P g)_r / log2(1 + r) / IDCG@k` with the gains `g = 2^y - 1`, the first k rows P of
    the relaxed permutation, and the IDCG of the whole list (Swezey et al. 2021). As tau tends to 0, this tends to
    1 - NDCG@k, where tied documents share their ranks as in `metrics.ndcg`. Columns of P are not normalised: a document
    may count more or less than once, and at a high tau the loss may fall a little below 0.

    With a depth above 1 a list is sorted as in merge sort: runs of consecutive documents are sorted and keep their
    first k (relaxed) scores and gains, then runs are joined and sorted again; `depth` rounds leave a single run. P is
    the product of all these matrices. Let b be the smallest integer with `b^depth >= length of the list`. Each round
    turns m runs (at first the single documents) into ceil(m / b): run c joins the new run floor(c ceil(m / b) / m). So
    no new run joins more than b, and a list of any length is split evenly. A run that joins no other is not sorted.

    The order of the documents decides which of them share a run, so it matters to soft and straight-through sorts with
    a depth above 1. Where a run's rank k cuts a block of ties, the exact sort may differ from NDCG@k.

    The mode "soft" relaxes the sorts, "hard" uses exact ones with gradient 0, and "straight_through" combines the value
    of exact sorts with the gradient of relaxed ones. A group without a relevant document has loss and gradient 0.

    The paper's public code differs in four ways. It divides the summed DCG of a batch by the summed ideal DCG, not
    list by list. Its ideal covers the documents that survive the merges, not the whole list. Its straight-through sort
    is exact only in the last merge, not in all. Its defaults are a temperature of 5 and k = 15.

    Raises:
        ValueError: the temperature is not positive, or k or depth is below 1.

    Example:
        >>> scores, labels = torch.tensor([1.0, 3.0, 2.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
        >>> offsets = torch.tensor([0, 3, 4])  # the second group has no relevant document
        >>> pirank(scores, labels, offsets, temperature=1.0, k=2)
        tensor([0.3711, 0.0000])
        >>> pirank(scores, labels, offsets, temperature=1.0, k=2, mode="hard")  # 1 - 1 / log2(3)
        tensor([0.3691, 0.0000])
    """
    check_sort(temperature, k)
    if depth < 1:
        raise ValueError(f"depth must be at least 1, not {depth}")
    scores_N = at_least_float32(scores_N)
    lists = _relevant_lists(scores_N, labels_N, offsets_Q1, k)
    if depth == 1:
        top_T2 = sort_entries(lists.entries_N2, lists.offsets_G1, temperature=temperature, k=k, mode=mode)
    else:
        top_T2 = _merge_sort(lists, k=k, depth=depth, temperature=temperature, mode=mode)
    kept_G1 = kept_offsets(lists.offsets_G1, k)
    ranks_T = torch.arange(len(top_T2), device=top_T2.device) - kept_G1[group_index(kept_G1)]
    discounts_K = rank_discounts(layout(kept_G1).longest, top_T2.device).to(top_T2.dtype)
    ndcg_G = sum_by_group(top_T2[:, 1] * discounts_K[ranks_T], kept_G1)
    loss_G = torch.where(lists.relevant_G, 1 - ndcg_G, 0.0)
    return scores_N.new_zeros(len(offsets_Q1) - 1).index_add(0, lists.groups_G, loss_G)


class _RelaxedNDCG(Loss):
    """The base of NDCG through one relaxed sort."""

    function = staticmethod(pirank)
    needs_relevance: ClassVar[bool] = True
    temperature: float = Field(1.0, gt=0)
    """Temperature of the relaxed sort, in units of the scores."""
    k: int | None = Field(None, ge=1)
    """Cut-off of the NDCG; empty for the whole list."""


class PiRankConfig(_RelaxedNDCG):
    """PiRank: NDCG through a relaxed sort, by divide and conquer for long lists.

    Source: Swezey et al. 2021.
    Proof: laws; exact NDCG@k when hard or cold; depth 1 = flat.
    """

    kind: Literal["pirank"] = "pirank"
    depth: int = Field(1, ge=1, le=100)
    """Levels of divide and conquer; 1 sorts the list at once."""
    mode: Mode = "soft"
    """`straight_through` takes the exact order forward and the gradient of the relaxed one backward."""


class NeuralSortNDCGConfig(_RelaxedNDCG):
    """NDCG of the relaxed order of NeuralSort, which is PiRank of depth 1.

    Source: Grover et al. 2019; QIN21, B.2, without the constant 1 and with the indices of P exchanged.
    Proof: laws; figures of TF-Ranking's own test.
    """

    kind: Literal["neural_sort_ndcg"] = "neural_sort_ndcg"


class GumbelNeuralSortNDCGConfig(NoisyLoss):
    """NeuralSort's NDCG of scores with Gumbel noise, a mean over samples.

    Source: QIN21, B.2.
    Proof: laws; order frequencies.
    """

    kind: Literal["gumbel_neural_sort_ndcg"] = "gumbel_neural_sort_ndcg"
    function = staticmethod(pirank)
    temperature: float = Field(1.0, gt=0)
    """Temperature of the relaxed sort, in units of the scores."""
    k: int | None = Field(None, ge=1)
    """Cut-off of the NDCG; empty for the whole list."""


class _RelevantLists(NamedTuple):
    """Groups with a relevant document: scores, and gains divided by IDCG@k; on a GPU all groups, see `relevant_G`."""

    groups_G: Tensor
    offsets_G1: Tensor
    relevant_G: Tensor
    entries_N2: Tensor


def _relevant_lists(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, k: int | None) -> _RelevantLists:
    gains_N = exponential_gain(labels_N, waits=False)
    chunks = length_chunks(offsets_Q1, budget=SLOTS_PER_CHUNK, quadratic=False)
    discounts_L, ideals = rank_discounts(max(1, layout(offsets_Q1).longest), gains_N.device), []
    for gains_ML in chunks.split(chunks.pad(gains_N)):
        best_MK = gains_ML.topk(min(k or gains_ML.shape[1], gains_ML.shape[1])).values
        ideals.append(best_MK @ discounts_L[: best_MK.shape[1]])
    ideal_Q = chunks.by_group(ideals, len(offsets_Q1) - 1)
    groups_G = torch.arange(len(ideal_Q), device=ideal_Q.device)
    if ideal_Q.is_cpu:
        groups_G = ideal_Q.nonzero()[:, 0]
        rows_N, offsets_Q1 = rows_of(offsets_Q1, groups_G)
        scores_N, gains_N, ideal_Q = scores_N[rows_N], gains_N[rows_N], ideal_Q[groups_G]
    gains_N = gains_N / torch.where(ideal_Q > 0, ideal_Q, 1.0)[group_index(offsets_Q1)]
    entries_N2 = torch.stack([scores_N, gains_N.to(scores_N.dtype)], 1)
    return _RelevantLists(groups_G, offsets_Q1, ideal_Q > 0, entries_N2)


def _merge_sort(lists: _RelevantLists, *, k: int | None, depth: int, temperature: float, mode: Mode) -> Tensor:
    """The entries at the first k ranks of each list after `depth` rounds, shape [T, 2]."""
    entries_T2, runs_G = lists.entries_N2, torch.from_numpy(layout(lists.offsets_G1).lengths_Q)
    lengths_R = torch.ones(len(entries_T2), dtype=torch.int64)
    # Runs are planned on the CPU, from the lengths alone.
    # The smallest integer whose power `depth` reaches the length. The root is rounded, then corrected: ceil of a root
    # that is an integer would be one too large wherever floating point puts it slightly above.
    branching_G = (runs_G.double() ** (1 / depth)).round()
    branching_G = torch.where((branching_G**depth).round() < runs_G, branching_G + 1, branching_G).long()
    for _ in range(depth):
        joined_G = (runs_G + branching_G - 1) // branching_G
        list_R = group_index(to_offsets(runs_G))
        place_R = torch.arange(len(list_R)) - to_offsets(runs_G)[list_R]
        joined_R = to_offsets(joined_G)[list_R] + place_R * joined_G[list_R] // runs_G[list_R]
        runs_J = torch.bincount(joined_R, minlength=int(joined_G.sum()))
        lengths_J = torch.zeros_like(runs_J).index_add(0, joined_R, lengths_R)
        offsets_J1 = to_offsets(lengths_J)
        kept_J1 = kept_offsets(offsets_J1, k)
        alone_J, merged_J = (runs_J == 1).nonzero()[:, 0], (runs_J > 1).nonzero()[:, 0]
        rows_T, offsets_S1 = rows_of(offsets_J1, merged_J)
        indices = rows_T, rows_of(offsets_J1, alone_J)[0], *(rows_of(kept_J1, of_J)[0] for of_J in (merged_J, alone_J))
        rows_T, left_T, merged_T, alone_T = (send(index.numpy(), entries_T2.device) for index in indices)
        there_S1 = registered_offsets(offsets_S1.numpy(), entries_T2.device)
        sorted_T2 = sort_entries(entries_T2[rows_T], there_S1, temperature=temperature, k=k, mode=mode)
        next_T2 = entries_T2.new_zeros(int(kept_J1[-1]), 2).index_copy(0, merged_T, sorted_T2)
        entries_T2 = next_T2.index_copy(0, alone_T, entries_T2[left_T])
        runs_G, lengths_R = joined_G, kept_J1.diff()
    return entries_T2
