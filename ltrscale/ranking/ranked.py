"""The kernel of all metrics: groups in padded chunks, and what each rank of a list holds on average over ties.

Documents with equal scores come in random order, so a rank holds an expectation. A metric that is linear in what the
ranks hold needs no more; one that stops at a document needs the chance that none before it stopped.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group, the first K ranks, and P =
K + 1 numbers of documents.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ltrscale.batch import Chunk, length_chunks

SLOTS_PER_CHUNK = 1 << 15
"""Padded documents ranked at once: the temporaries of a chunk then stay in the cache."""


class Ranking(NamedTuple):
    """The expected content of the first K ranks of each group, where tied documents (a block) come in random order.

    `expected_MK` is the expected value at each rank, 0 past the end of the list. `first_MK` counts the documents
    before a rank's block, `drawn_MK` those of the block before the rank, and `size_MK` all documents of the block (up
    to rank K if the block continues past it).
    """

    rank_K: Tensor
    expected_MK: Tensor
    first_MK: Tensor
    drawn_MK: Tensor
    size_MK: Tensor


def rank(scores_ML: Tensor, values_ML: Tensor, mask_ML: Tensor, width: int) -> Ranking:
    """Rank by falling score; padding has score -inf and value 0, so it may tie with documents of score -inf."""
    lengths_M1 = mask_ML.sum(-1, keepdim=True)
    # One rank more, which shows a block that continues past rank K.
    more_MK, index_MK = scores_ML.topk(min(width + 1, scores_ML.shape[1]))
    ranks_K = torch.arange(1, more_MK.shape[1] + 1, device=scores_ML.device)
    falls_MK = (more_MK[:, :-1] > more_MK[:, 1:]) | (ranks_K[:-1] > lengths_M1)
    top_MK, index_MK, rank_K = more_MK[:, :width], index_MK[:, :width], ranks_K[:width]
    if falls_MK.all():  # no ties, as with most scores: a third of the work
        one_MK = torch.ones_like(index_MK)
        return Ranking(rank_K, values_ML.gather(1, index_MK), (rank_K - 1).expand_as(index_MK), one_MK - 1, one_MK)
    rising_MK = -top_MK  # searchsorted needs ascending values
    first_MK = torch.searchsorted(rising_MK, rising_MK)
    end_MK = torch.searchsorted(rising_MK, rising_MK, right=True).minimum(lengths_M1)
    size_MK = end_MK - first_MK
    sums_MK1 = F.pad(values_ML.gather(1, index_MK).cumsum(-1), (1, 0))
    mean_MK = (sums_MK1.gather(1, end_MK) - sums_MK1.gather(1, first_MK)) / size_MK
    # The last block may continue past rank K or hold padding, so its mean is taken over the whole list.
    last_M1 = top_MK[:, -1:]
    tied_ML = (scores_ML == last_M1) & mask_ML
    last_mean_M1 = torch.where(tied_ML, values_ML, 0.0).sum(-1, keepdim=True) / tied_ML.sum(-1, keepdim=True)
    mean_MK = torch.where(top_MK == last_M1, last_mean_M1, mean_MK)
    expected_MK = torch.where(rank_K <= lengths_M1, mean_MK, 0.0)
    return Ranking(rank_K, expected_MK, first_MK, rank_K - 1 - first_MK, size_MK)


def hazard(ranking: Ranking) -> Tensor:
    """The chance, [M, K], that a rank holds a relevant document, given that no rank before it does.

    The values of the ranking are 1 for relevant documents and 0 for others, and it has all ranks.
    """
    left_MK = (ranking.size_MK - ranking.drawn_MK).clamp(min=1)
    return (ranking.expected_MK * ranking.size_MK / left_MK).clamp(max=1)


def survival(scores_ML: Tensor, stops_ML: Tensor, mask_ML: Tensor, width: int) -> Tensor:
    """The expected chance that none of the first p documents stops a user, for p from 0 to `width`, shape [M, P].

    A block of tied documents is built up document by document. `mean_MP` has the mean, over all choices of p of its
    documents, of the product of their 1 - stop: with the n-th it is `((n - p) mean_p + p (1 - stop) mean_{p - 1}) / n`.
    """
    at_end_M1 = scores_ML.topk(width).values[:, -1:]
    wide = int((scores_ML >= at_end_M1).sum(-1).max())  # where the last block ends
    top_ML, index_ML = scores_ML.topk(wide)
    passes_ML, there_ML = 1 - stops_ML.gather(1, index_ML), mask_ML.gather(1, index_ML)
    new_ML = F.pad(top_ML[:, 1:] != top_ML[:, :-1], (1, 0), value=True)
    p_P = torch.arange(width + 1, device=scores_ML.device)
    survival_MP = stops_ML.new_ones(len(scores_ML), width + 1)
    before_M1, mean_MP = survival_MP[:, :1], survival_MP
    first_M1 = n_M1 = p_P.new_zeros(len(scores_ML), 1)  # documents before the block, and those of it so far
    for place in range(wide):
        new_M1, there_M1, passes_M1 = (each[:, place : place + 1] for each in (new_ML, there_ML, passes_ML))
        end_M1 = first_M1 + n_M1
        before_M1 = torch.where(new_M1, survival_MP.gather(1, end_M1.clamp(max=width)), before_M1)
        first_M1, n_M1 = torch.where(new_M1, end_M1, first_M1), torch.where(new_M1, 0, n_M1) + there_M1
        mean_MP = torch.where(new_M1, (p_P == 0).double(), mean_MP)
        longer_MP = ((n_M1 - p_P) * mean_MP + p_P * passes_M1 * F.pad(mean_MP[:, :-1], (1, 0))) / n_M1.clamp(min=1)
        mean_MP = torch.where(there_M1, longer_MP, mean_MP)  # padding may tie with documents of score -inf
        of_block_MP = mean_MP.gather(1, (p_P - first_M1).clamp(min=0).minimum(n_M1))
        # Past its end the block's whole product stands, until the next block replaces it.
        survival_MP = torch.where(p_P > first_M1, before_M1 * of_block_MP, survival_MP)
    return survival_MP


def chunks(
    scores_N: Tensor, values_N: Tensor, offsets_Q1: Tensor, k: int = 1
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields group numbers, scores (padding -inf), values (padding 0) and mask, for groups of similar length."""
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if scores_N.isnan().any():
        raise ValueError("scores contain NaN, so that no ranking is defined")
    for chunk in _padded(offsets_Q1, SLOTS_PER_CHUNK):
        padding_ML = ~chunk.mask_ML
        scores_ML = scores_N[chunk.rows_ML].masked_fill_(padding_ML, -torch.inf)
        values_ML = values_N[chunk.rows_ML].masked_fill_(padding_ML, 0.0)
        yield chunk.groups_M, scores_ML, values_ML, chunk.mask_ML


@lru_cache(maxsize=1)  # all metrics of a batch come one after the other, with the same tensor of offsets
def _padded(offsets_Q1: Tensor, slots: int) -> list[Chunk]:
    return list(length_chunks(offsets_Q1, budget=slots, quadratic=False))


def undefined(offsets_Q1: Tensor) -> Tensor:
    """One NaN per group; empty groups keep it."""
    return torch.full((len(offsets_Q1) - 1,), torch.nan, dtype=torch.float64, device=offsets_Q1.device)
