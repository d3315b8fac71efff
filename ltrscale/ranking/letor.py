"""LETOR 4.0's evaluation script as functions over ragged groups: for comparison with published figures only.

The script's policy differs from that of `ltrscale.ranking.metrics` in five ways, each of which changes the mean:
- a group without a relevant document counts as 0;
- documents with equal scores keep the order of the input;
- the discount of NDCG is 1 at ranks 1 and 2, and 1 / log2(r) at every later rank r;
- NDCG@k of a list shorter than k is 0, even if its order is perfect: the script computes NDCG only at the ranks that
  the list has. Half of MQ2008's lists have 8 documents or fewer, which is why its published NDCG@10 is about half of
  its NDCG@5;
- precision at k divides by k whatever the length of the list.

Gains are 2^y - 1. Rules: `Eval-Score-4.0.pl` of Jun Xu and Tie-Yan Liu, in its version of 2009-04-24 (Qin and Liu,
Introducing LETOR 4.0 Datasets, 2013). LETOR 3.0's script gives the same values on lists of k documents or more.
Values are float64 whatever the type of the scores; scores may be infinite but not NaN.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ltrscale.batch import length_chunks
from ltrscale.ranking.metrics import Metric
from ltrscale.ranking.ranked import SLOTS_PER_CHUNK
from ltrscale.ranking.rules import Rules

LETOR = Rules(ties="input", discount="letor", short="zero", undefined="zero")
"""The script's rules for NDCG."""


class LetorNDCGConfig(Metric):
    """NDCG of LETOR's script.

    Source: `Eval-Score-4.0.pl` of LETOR 4.0.
    Proof: loop.
    """

    kind: Literal["letor_ndcg"] = "letor_ndcg"
    label: ClassVar[str] = "LETOR NDCG"
    rules: ClassVar[Rules] = LETOR
    ruled_by: ClassVar[tuple[str, ...]] = ("gain", "discount", "ideal", "short")
    k: int = Field(5, ge=1)
    """Cut-off: the first ranks that count."""

    def of(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """See `letor_ndcg`."""
        return letor_ndcg(scores_N, labels_N, offsets_Q1, k=self.k)


def letor_ndcg(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, k: int) -> Tensor:
    """NDCG@k of LETOR's script, shape [Q].

    `DCG@k = sum over ranks r <= k of (2^y - 1) / log2(max(2, r))` divided by the DCG@k of the best order (`NDCG` and
    `DCG` in the script); 0 where the group has no relevant document or fewer than k documents.

    Raises:
        ValueError: k is below 1, or a score is NaN.

    Example:
        >>> scores, labels = torch.tensor([3.0, 1.0, 2.0, 5.0]), torch.tensor([2.0, 1.0, 0.0, 1.0])
        >>> letor_ndcg(scores, labels, torch.tensor([0, 3, 4]), k=2)  # (3 + 0) / (3 + 1); one document is below k
        tensor([0.7500, 0.0000], dtype=torch.float64)
    """
    _check_cutoff(k)
    values_Q = _zeros(offsets_Q1)
    for groups_M, ndcg_ML, _ in _ndcg_at_all_ranks(scores_N, labels_N, offsets_Q1):
        if ndcg_ML.shape[1] >= k:
            values_Q[groups_M] = ndcg_ML[:, k - 1]
    return values_Q


class LetorMeanNDCGConfig(Metric):
    """The mean of NDCG over all ranks, as in LETOR's script.

    Source: `Eval-Score-4.0.pl` of LETOR 4.0.
    Proof: loop.
    """

    kind: Literal["letor_mean_ndcg"] = "letor_mean_ndcg"
    label: ClassVar[str] = "LETOR MeanNDCG"
    rules: ClassVar[Rules] = LETOR
    ruled_by: ClassVar[tuple[str, ...]] = ("gain", "discount", "ideal")

    def of(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """See `letor_mean_ndcg`."""
        return letor_mean_ndcg(scores_N, labels_N, offsets_Q1)


def letor_mean_ndcg(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """MeanNDCG of LETOR's script, shape [Q]: the mean of NDCG@1 to NDCG@n, where n is the group's document count.

    Raises:
        ValueError: a score is NaN.

    Example:
        >>> letor_mean_ndcg(torch.tensor([3.0, 2.0]), torch.tensor([0.0, 1.0]), torch.tensor([0, 2]))  # (0 + 1) / 2
        tensor([0.5000], dtype=torch.float64)
    """
    values_Q = _zeros(offsets_Q1)
    for groups_M, ndcg_ML, mask_ML in _ndcg_at_all_ranks(scores_N, labels_N, offsets_Q1):
        values_Q[groups_M] = ndcg_ML.sum(-1) / mask_ML.sum(-1)
    return values_Q


class LetorMAPConfig(Metric):
    """Average precision of LETOR's script.

    Source: `Eval-Score-4.0.pl` of LETOR 4.0.
    Proof: loop.
    """

    kind: Literal["letor_map"] = "letor_map"
    label: ClassVar[str] = "LETOR MAP"
    rules: ClassVar[Rules] = LETOR
    threshold: float = Field(1.0, gt=0)
    """Documents are relevant from this label on."""

    def of(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """See `letor_average_precision`."""
        return letor_average_precision(scores_N, labels_N, offsets_Q1, threshold=self.threshold)


def letor_average_precision(
    scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, threshold: float = 1.0
) -> Tensor:
    """Average precision of LETOR's script, shape [Q]; its mean over groups is MAP.

    The mean precision at the ranks of the documents with label >= threshold; 0 where no document is relevant. In the
    script of LETOR 3.0 and 4.0, labels from 1 on are relevant; in that of MSLR-WEB, labels from 2 on.

    Raises:
        ValueError: a score is NaN.

    Example:
        >>> letor_average_precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 3]))
        tensor([0.8333], dtype=torch.float64)
    """
    values_Q = _zeros(offsets_Q1)
    for groups_M, relevant_ML, _ in _ranked((labels_N >= threshold).double(), scores_N, offsets_Q1):
        rank_L = torch.arange(1, relevant_ML.shape[1] + 1, device=relevant_ML.device)
        total_M = (relevant_ML * relevant_ML.cumsum(-1) / rank_L).sum(-1)
        values_Q[groups_M] = total_M / relevant_ML.sum(-1).clamp(min=1)
    return values_Q


class LetorPrecisionConfig(Metric):
    """Precision of LETOR's script.

    Source: `Eval-Score-4.0.pl` of LETOR 4.0.
    Proof: loop.
    """

    kind: Literal["letor_precision"] = "letor_precision"
    label: ClassVar[str] = "LETOR P"
    cut_as_precision: ClassVar[bool] = True
    rules: ClassVar[Rules] = LETOR.replace(short="padded")
    ruled_by: ClassVar[tuple[str, ...]] = ("short",)
    k: int = Field(5, ge=1)
    """Cut-off: the first ranks that count."""
    threshold: float = Field(1.0, gt=0)
    """Documents are relevant from this label on."""

    def of(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """See `letor_precision`."""
        return letor_precision(scores_N, labels_N, offsets_Q1, k=self.k, threshold=self.threshold)


def letor_precision(
    scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, k: int, threshold: float = 1.0
) -> Tensor:
    """P@k of LETOR's script, shape [Q]: documents with label >= threshold among the first k ranks, divided by k.

    Ranks past the end of a list count as not relevant. `threshold` is as in `letor_average_precision`.

    Raises:
        ValueError: k is below 1, or a score is NaN.

    Example:
        >>> letor_precision(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 1.0]), torch.tensor([0, 2]), k=4)
        tensor([0.5000], dtype=torch.float64)
    """
    _check_cutoff(k)
    values_Q = _zeros(offsets_Q1)
    for groups_M, relevant_ML, _ in _ranked((labels_N >= threshold).double(), scores_N, offsets_Q1):
        values_Q[groups_M] = relevant_ML[:, :k].sum(-1) / k
    return values_Q


def _ndcg_at_all_ranks(
    scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields group numbers, NDCG at each rank (0 past the end of a list) and mask, for groups of similar length."""
    gains_N = torch.exp2(labels_N.double()).sub_(1)
    for groups_M, gains_ML, mask_ML in _ranked(gains_N, scores_N, offsets_Q1):
        rank_L = torch.arange(1, gains_ML.shape[1] + 1, device=gains_ML.device)
        discounts_L = 1 / torch.log2(rank_L.clamp(min=2).double())
        ideal_ML = (gains_ML.sort(descending=True).values * discounts_L).cumsum(-1)
        dcg_ML = (gains_ML * discounts_L).cumsum(-1)
        yield groups_M, torch.where(mask_ML & (ideal_ML > 0), dcg_ML / ideal_ML, 0.0), mask_ML


def _ranked(values_N: Tensor, scores_N: Tensor, offsets_Q1: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields group numbers, values by falling score (0 past the end of a list) and mask, for groups of similar length.

    The sort is stable: equal scores keep the order of the input, and padding stays behind documents with score -inf.
    """
    if scores_N.isnan().any():
        raise ValueError("scores contain NaN, so that no ranking is defined")
    for chunk in length_chunks(offsets_Q1, budget=SLOTS_PER_CHUNK, quadratic=False):
        scores_ML = scores_N[chunk.rows_ML].masked_fill_(~chunk.mask_ML, -torch.inf)
        values_ML = values_N[chunk.rows_ML].masked_fill_(~chunk.mask_ML, 0.0)
        order_ML = scores_ML.sort(dim=-1, descending=True, stable=True).indices
        yield chunk.groups_M, values_ML.gather(1, order_ML), chunk.mask_ML


def _check_cutoff(k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")


def _zeros(offsets_Q1: Tensor) -> Tensor:
    """One 0 per group; empty groups keep it."""
    return torch.zeros(len(offsets_Q1) - 1, dtype=torch.float64, device=offsets_Q1.device)
