"""The kernel of all metrics: groups in padded chunks, ranked once for all metrics, and expected values under ties.

Documents with equal scores come in random order, so a rank holds an expectation. That is enough for a metric that is
linear in the values at the ranks. One that stops at a document also needs the chance that none before it stopped.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group, the first K ranks, and P =
K + 1 numbers of documents.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ltrscale.batch import length_chunks

SLOTS_PER_CHUNK = 1 << 15
"""Padded documents ranked at once: the temporaries of a chunk then stay in the cache."""
_KEPT = 1 << 18
"""The ranking of a batch up to this many documents is kept for the next metric; it takes about 50 bytes each."""


def falling_order(keys_ML: Tensor, *, stable: bool = False) -> Tensor:
    """The slots of each row in order of falling keys, none of them NaN; equal keys keep their order only if `stable`.

    Example:
        >>> falling_order(torch.tensor([[1.0, 3.0, 2.0]]))
        tensor([[1, 2, 0]])
    """
    if not keys_ML.is_cpu:
        return keys_ML.argsort(descending=True, stable=stable)
    return torch.from_numpy(np.argsort(-_as_numpy(keys_ML), axis=1, stable=stable))


def best_first(values_ML: Tensor, k: int) -> Tensor:
    """The k highest values of each row in falling order, or all if there are fewer.

    Example:
        >>> best_first(torch.tensor([[1.0, 3.0, 2.0]]), 2)
        tensor([[3., 2.]])
    """
    k = min(k, values_ML.shape[1])
    if not values_ML.is_cpu:
        return values_ML.topk(k).values
    rising = np.sort(_as_numpy(values_ML), axis=1)
    return torch.from_numpy(rising[:, : -k - 1 : -1].copy()).to(values_ML.dtype)


def _as_numpy(values: Tensor) -> np.ndarray:
    """As NumPy array: its vectorised sort is many times as fast as PyTorch's on a CPU."""
    return (values if values.dtype in (torch.float32, torch.float64) else values.double()).numpy()


@dataclass(frozen=True, eq=False)
class Ranking:
    """Groups of similar length with their documents by falling score, padding last.

    Tied documents are a block: `first_ML` counts the documents before the block of a rank, `end_ML` those up to its
    end. Metrics share a ranking, so none may change it.
    """

    groups_M: Tensor
    """Numbers of the groups."""
    lengths_M: Tensor
    values_ML: Tensor
    """The values that were ranked, such as labels; 0 in padding."""
    mask_ML: Tensor
    """True where a rank holds a document."""
    rank_L: Tensor
    """1, 2, 3, ..."""
    first_ML: Tensor
    end_ML: Tensor
    tied: bool
    """Whether some block has several documents."""

    @cached_property
    def best_ML(self) -> Tensor:
        """The values in falling order; padding (0) comes last if no value is negative."""
        return best_first(self.values_ML, self.values_ML.shape[1])

    @property
    def drawn_ML(self) -> Tensor:
        """Documents of a rank's block before the rank."""
        return self.rank_L - 1 - self.first_ML

    @property
    def size_ML(self) -> Tensor:
        """Documents of a rank's block."""
        return self.end_ML - self.first_ML

    def expected(self, values_ML: Tensor, k: int | None = None) -> Tensor:
        """The expected value at each of the first k ranks, or at all, shape [M, K]; 0 past the end of the list.

        Args:
            values_ML: by rank, such as a function of the field `values_ML`; 0 in padding.
            k: number of ranks, capped at the length of the lists.
        """
        if not self.tied:
            return values_ML[:, :k].contiguous()  # products with slices would differ in their last bits
        first_MK, end_MK = self.first_ML[:, :k], self.end_ML[:, :k]
        sums_ML1 = F.pad(values_ML.cumsum(-1), (1, 0))
        mean_MK = (sums_ML1.gather(1, end_MK) - sums_ML1.gather(1, first_MK)) / (end_MK - first_MK)
        return torch.where(self.mask_ML[:, :k], mean_MK, 0.0)


def hazard(ranking: Ranking, relevant_ML: Tensor) -> Tensor:
    """The chance, [M, L], that a rank holds a relevant document (value 1), given that no rank before it does."""
    expected_ML = ranking.expected(relevant_ML)
    if not ranking.tied:
        return expected_ML
    size_ML = ranking.size_ML
    left_ML = (size_ML - ranking.drawn_ML).clamp(min=1)
    return (expected_ML * size_ML / left_ML).clamp(max=1)


def survival(ranking: Ranking, stops_ML: Tensor, k: int) -> Tensor:
    """The expected chance that none of the first p documents stops a user, for p from 0 to k, shape [M, P].

    A block of tied documents is built up one by one. `mean_MP` is the mean of the product of 1 - stop over all choices
    of p of its documents; adding the n-th gives `((n - p) mean_p + p (1 - stop) mean_{p - 1}) / n`.
    """
    width = min(k, stops_ML.shape[1])
    passes_ML = 1 - stops_ML
    if not ranking.tied:
        return F.pad(passes_ML[:, :width].cumprod(-1), (1, 0), value=1.0)
    p_P = torch.arange(width + 1, device=stops_ML.device)
    survival_MP = stops_ML.new_ones(len(stops_ML), width + 1)
    before_M1, mean_MP = survival_MP[:, :1], survival_MP
    n_M1 = p_P.new_zeros(len(stops_ML), 1)  # documents of the block so far
    for place in range(int(ranking.end_ML[:, width - 1].max())):  # where the last block ends
        of_place = slice(place, place + 1)
        first_M1, there_M1, passes_M1 = (x[:, of_place] for x in (ranking.first_ML, ranking.mask_ML, passes_ML))
        new_M1 = first_M1 == place
        before_M1 = torch.where(new_M1, survival_MP.gather(1, first_M1.clamp(max=width)), before_M1)
        n_M1 = torch.where(new_M1, 0, n_M1) + there_M1
        mean_MP = torch.where(new_M1, (p_P == 0).double(), mean_MP)
        longer_MP = ((n_M1 - p_P) * mean_MP + p_P * passes_M1 * F.pad(mean_MP[:, :-1], (1, 0))) / n_M1.clamp(min=1)
        mean_MP = torch.where(there_M1, longer_MP, mean_MP)  # padding may tie with documents of score -inf
        of_block_MP = mean_MP.gather(1, (p_P - first_M1).clamp(min=0).minimum(n_M1))
        # past the block's end its whole product stays, until the next block replaces it
        survival_MP = torch.where(p_P > first_M1, before_M1 * of_block_MP, survival_MP)
    return survival_MP


_kept: list[tuple[tuple[Tensor, ...], list[Ranking]]] = []
"""Copies of the tensors that were ranked last, and their ranking."""


def rankings(scores_N: Tensor, values_N: Tensor, offsets_Q1: Tensor, k: int = 1) -> Iterable[Ranking]:
    """The groups ranked by score, in chunks of similar length, without empty groups.

    The last ranking is kept, so consecutive metrics of one batch of usual size share it.

    Raises:
        ValueError: k is below 1, or a score is NaN.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if len(scores_N) > _KEPT:
        return _ranked(scores_N, values_N, offsets_Q1)
    batch = scores_N.detach(), values_N.detach(), offsets_Q1
    for kept, ranked in _kept:
        if all(map(_same, batch, kept)):
            return ranked
    ranked = list(_ranked(*batch))
    _kept[:] = [(tuple(tensor.clone() for tensor in batch), ranked)]  # one assignment, because other threads read it
    return ranked


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _ranked(scores_N: Tensor, values_N: Tensor, offsets_Q1: Tensor) -> Iterator[Ranking]:
    lowest = scores_N.amin().item() if len(scores_N) else 0.0  # NaN if any score is
    if math.isnan(lowest):
        raise ValueError("scores contain NaN, so that no ranking is defined")
    lengths_Q = offsets_Q1.diff()
    for groups_M, rows_ML, mask_ML in length_chunks(offsets_Q1, budget=SLOTS_PER_CHUNK, quadratic=False):
        padding_ML = ~mask_ML
        scores_ML = scores_N.take(rows_ML).masked_fill_(padding_ML, -torch.inf)
        # Padding comes after documents of score -inf, so the mask is valid for ranks too.
        index_ML = falling_order(scores_ML, stable=lowest == -math.inf)
        scores_ML = scores_ML.gather(1, index_ML)
        values_ML = values_N.take(rows_ML.gather(1, index_ML)).masked_fill_(padding_ML, 0)
        lengths_M = lengths_Q[groups_M]
        rank_L = torch.arange(1, scores_ML.shape[1] + 1, device=scores_N.device)
        first_ML, end_ML = (rank_L - 1).expand_as(index_ML), rank_L.expand_as(index_ML)
        if tied := bool(((scores_ML[:, 1:] == scores_ML[:, :-1]) & mask_ML[:, 1:]).any()):
            first_ML, end_ML = _blocks(scores_ML)
            end_ML = end_ML.minimum(lengths_M[:, None])
        yield Ranking(groups_M, lengths_M, values_ML, mask_ML, rank_L, first_ML, end_ML, tied)


def _blocks(scores_ML: Tensor) -> tuple[Tensor, Tensor]:
    """The slots before the block of equal scores of each slot, and those up to its end; scores fall in each row."""
    width = scores_ML.shape[1]
    place_L = torch.arange(1, width, device=scores_ML.device)
    new_ML = scores_ML[:, 1:] != scores_ML[:, :-1]
    first_ML = F.pad(place_L.where(new_ML, 0), (1, 0)).cummax(1).values
    ends_ML = F.pad(place_L.where(new_ML, width), (0, 1), value=width)
    return first_ML, ends_ML.flip(1).cummin(1).values.flip(1)


def undefined(offsets_Q1: Tensor) -> Tensor:
    """One NaN per group; empty groups keep it."""
    return torch.full((len(offsets_Q1) - 1,), torch.nan, dtype=torch.float64, device=offsets_Q1.device)
