"""Losses that relax the sort inside NDCG: NeuralSortNDCG, its Gumbel form, and PiRank; see `ltrscale.ranking.loss`.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, S samples; G groups with a relevant document, R runs of a merge
sort, J runs joined from them, T entries. An entry is a score with its gain: `entries_N2` has two columns.
"""

from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ltrscale.batch import at_least_float32, group_index, length_chunks, rows_of, sum_by_group, to_offsets
from ltrscale.layout import layout, registered_offsets, send
from ltrscale.ranking.loss import Loss
from ltrscale.ranking.losses import NoisyLoss
from ltrscale.ranking.metrics import exponential_gain, rank_discounts
from ltrscale.ranking.neuralsort import Mode, check_sort, kept_offsets, sort_entries
from ltrscale.ranking.ranked import SLOTS_PER_CHUNK


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


class PiRankConfig(Loss):
    """PiRank: NDCG through a relaxed sort, by divide and conquer for long lists.

    Source: Swezey et al. 2021.
    Proof: laws; exact NDCG@k when hard or cold; depth 1 = flat.
    """

    kind: Literal["pirank"] = "pirank"
    function = staticmethod(pirank)
    needs_relevance: ClassVar[bool] = True
    temperature: float = Field(1.0, gt=0)
    """Temperature of the relaxed sort, in units of the scores."""
    k: int | None = Field(None, ge=1)
    """Cut-off of the NDCG; empty for the whole list."""
    depth: int = Field(1, ge=1, le=100)
    """Levels of divide and conquer; 1 sorts the list at once."""
    mode: Mode = "soft"
    """`straight_through` takes the exact order forward and the gradient of the relaxed one backward."""


class NeuralSortNDCGConfig(Loss):
    """NDCG of the relaxed order of NeuralSort, which is PiRank of depth 1.

    Source: Grover et al. 2019; QIN21, B.2, without the constant 1 and with the indices of P exchanged.
    Proof: laws; figures of TF-Ranking's own test.
    """

    kind: Literal["neural_sort_ndcg"] = "neural_sort_ndcg"
    function = staticmethod(pirank)
    needs_relevance: ClassVar[bool] = True
    temperature: float = Field(1.0, gt=0)
    """Temperature of the relaxed sort, in units of the scores."""
    k: int | None = Field(None, ge=1)
    """Cut-off of the NDCG; empty for the whole list."""


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
