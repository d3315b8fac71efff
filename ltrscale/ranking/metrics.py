"""Ranking metrics over ragged groups: one value per group, NaN where a group has no defined value.

One policy holds for all metrics. Documents with equal scores come in random order, and the value is the expectation
over that order, so it never depends on the order of the input. A group without a relevant document has no defined
value. A list shorter than k is evaluated at its length. Values are float64 whatever the type of the scores; scores
may be infinite but not NaN, and labels are finite and not negative.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group and the first K ranks.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ltrscale.batch import Chunk, length_chunks
from ltrscale.config import Config

SLOTS_PER_CHUNK = 1 << 15
"""Padded documents ranked at once: the temporaries of a chunk then stay in the cache."""


class Metric(Config):
    """A metric as a config selects it. It may have a cut-off `k` and a `threshold`, the lowest relevant label."""

    kind: str
    label: ClassVar[str] = ""
    """The name in tables, without the cut-off; the kind in capitals by default."""
    definition: ClassVar[str] = ""
    """One sentence that defines the metric in reports, without the policy that all metrics share."""
    normalised: ClassVar[bool] = True
    """Whether the best order has value 1 whatever the labels."""

    @classmethod
    def made(cls, *, k: int, threshold: float = 1.0) -> Self:
        """Creates the metric; a value that it has no field for is ignored."""
        values = {"k": k, "threshold": threshold}
        return cls.model_validate({name: value for name, value in values.items() if name in cls.model_fields})

    @classmethod
    def has_cutoff(cls) -> bool:
        """Whether the metric has a cut-off, as `ndcg@5` has."""
        return "k" in cls.model_fields

    @property
    def name(self) -> str:
        """The kind, with the cut-off if the metric has one.

        Example:
            >>> NDCGConfig(k=10).name, MRRConfig().name
            ('ndcg@10', 'mrr')
        """
        return f"{self.kind}@{self.model_dump()['k']}" if self.has_cutoff() else self.kind

    def of(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The value of each group, shape [Q]; NaN where it is undefined."""
        raise NotImplementedError


class NDCGConfig(Metric):
    """Normalised discounted cumulative gain of the first ranks.

    Source: Järvelin and Kekäläinen 2002, gain of Burges et al. 2005.
    Proof: laws; mean over all orders that ties allow; scikit-learn, `trec_eval`.
    """

    kind: Literal["ndcg"] = "ndcg"
    definition: ClassVar[str] = (
        "NDCG has gain 2^y - 1 and discount 1 / log2(1 + rank), the ideal taken from the full list; lists shorter than "
        "the cut-off are evaluated at their length."
    )
    k: int = Field(5, ge=1)
    """Cut-off: the first ranks that count."""

    def of(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """See `ndcg`."""
        return ndcg(scores_N, labels_N, offsets_Q1, k=self.k)


def ndcg(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, k: int) -> Tensor:
    """Normalised discounted cumulative gain of the first k ranks, shape [Q].

    `DCG@k = sum over ranks r <= k of (2^y - 1) / log2(1 + r)`, divided by the DCG@k of the best order of the whole
    list (Järvelin and Kekäläinen 2002, with the exponential gain of Burges et al. 2005).

    Raises:
        ValueError: k is below 1, or a score is NaN.

    Example:
        >>> scores, labels = torch.tensor([3.0, 1.0, 1.0, 5.0]), torch.tensor([2.0, 1.0, 0.0, 0.0])
        >>> ndcg(scores, labels, torch.tensor([0, 3, 4]), k=2)  # a tie at rank 2; a group without relevance
        tensor([0.9131,    nan], dtype=torch.float64)
    """
    gains_N = torch.exp2(labels_N.double()).sub_(1)
    values_Q = _undefined(offsets_Q1)
    for groups_M, scores_ML, gains_ML, mask_ML in _chunks(scores_N, gains_N, offsets_Q1, k):
        width = min(k, scores_ML.shape[1])
        discounts_K = rank_discounts(width, scores_N.device)
        ideal_MK = gains_ML.topk(width).values
        # Gain and discount separate, so the expected DCG is the DCG of the expected gains.
        dcg_M = _rank(scores_ML, gains_ML, mask_ML, width).expected_MK @ discounts_K
        values_Q[groups_M] = dcg_M / (ideal_MK @ discounts_K)  # 0 / 0 where nothing is relevant
    return values_Q


class MRRConfig(Metric):
    """Reciprocal rank of the first relevant document.

    Proof: laws; mean over all orders that ties allow; `trec_eval`.
    """

    kind: Literal["mrr"] = "mrr"
    threshold: float = Field(1.0, gt=0)
    """Documents are relevant from this label on."""

    def of(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """See `mrr`."""
        return mrr(scores_N, labels_N, offsets_Q1, threshold=self.threshold)


def mrr(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, threshold: float = 1.0) -> Tensor:
    """Reciprocal rank of the first document with label >= threshold, shape [Q].

    Among tied documents, the chance that rank p holds the first relevant one follows from drawing without replacement:
    `h_p = r / (documents of the block not yet drawn)`, r of them relevant, given that no relevant one came before.

    Raises:
        ValueError: a score is NaN.

    Example:
        >>> mrr(torch.tensor([3.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0, 3]))  # (1/2 + 1/3) / 2
        tensor([0.4167], dtype=torch.float64)
    """
    values_Q = _undefined(offsets_Q1)
    relevant_N = (labels_N >= threshold).double()
    for groups_M, scores_ML, relevant_ML, mask_ML in _chunks(scores_N, relevant_N, offsets_Q1):
        ranking = _rank(scores_ML, relevant_ML, mask_ML, scores_ML.shape[1])
        left_MK = (ranking.size_MK - ranking.drawn_MK).clamp(min=1)
        hazard_MK = (ranking.expected_MK * ranking.size_MK / left_MK).clamp(max=1)
        none_before_MK = F.pad((1 - hazard_MK).cumprod(-1), (1, -1), value=1.0)
        value_M = (none_before_MK * hazard_MK / ranking.rank_K).sum(-1)
        values_Q[groups_M] = torch.where(relevant_ML.any(-1), value_M, torch.nan)
    return values_Q


class MAPConfig(Metric):
    """Average precision, whose mean over groups is MAP.

    Proof: laws; mean over all orders that ties allow; `trec_eval`.
    """

    kind: Literal["map"] = "map"
    threshold: float = Field(1.0, gt=0)
    """Documents are relevant from this label on."""

    def of(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """See `average_precision`."""
        return average_precision(scores_N, labels_N, offsets_Q1, threshold=self.threshold)


def average_precision(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, threshold: float = 1.0) -> Tensor:
    """Mean, over the documents with label >= threshold, of the precision at their ranks, shape [Q].

    Its mean over groups is MAP. Take a block of e tied documents, r of them relevant, that starts after b documents,
    R of them relevant. Rank p of the block holds a relevant document with probability r / e. If it does, the expected
    number of relevant documents up to p is `R + 1 + (p - 1 - b) (r - 1) / (e - 1)`, by the mean of a hypergeometric
    draw.

    Raises:
        ValueError: a score is NaN.

    Example:
        >>> average_precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 3]))
        tensor([0.8333], dtype=torch.float64)
    """
    values_Q = _undefined(offsets_Q1)
    relevant_N = (labels_N >= threshold).double()
    for groups_M, scores_ML, relevant_ML, mask_ML in _chunks(scores_N, relevant_N, offsets_Q1):
        ranking = _rank(scores_ML, relevant_ML, mask_ML, scores_ML.shape[1])
        before_MK = F.pad(ranking.expected_MK.cumsum(-1), (1, 0)).gather(1, ranking.first_MK)
        others_MK = ranking.expected_MK * ranking.size_MK - 1
        found_MK = before_MK + 1 + ranking.drawn_MK * others_MK / (ranking.size_MK - 1).clamp(min=1)
        total_M = (ranking.expected_MK * found_MK / ranking.rank_K).sum(-1)
        values_Q[groups_M] = total_M / relevant_ML.sum(-1)  # 0 / 0 where nothing is relevant
    return values_Q


class PrecisionConfig(Metric):
    """Share of relevant documents among the first ranks.

    Proof: laws; mean over all orders that ties allow; `trec_eval`.
    """

    kind: Literal["precision"] = "precision"
    label: ClassVar[str] = "P"
    k: int = Field(5, ge=1)
    """Cut-off: the first ranks that count."""
    threshold: float = Field(1.0, gt=0)
    """Documents are relevant from this label on."""

    def of(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """See `precision`."""
        return precision(scores_N, labels_N, offsets_Q1, k=self.k, threshold=self.threshold)


def precision(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, k: int, threshold: float = 1.0) -> Tensor:
    """Share of documents with label >= threshold among the first min(k, length) ranks, shape [Q].

    Raises:
        ValueError: k is below 1, or a score is NaN.

    Example:
        >>> precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 3]), k=2)
        tensor([0.5000], dtype=torch.float64)
    """
    values_Q = _undefined(offsets_Q1)
    relevant_N = (labels_N >= threshold).double()
    for groups_M, scores_ML, relevant_ML, mask_ML in _chunks(scores_N, relevant_N, offsets_Q1, k):
        width = min(k, scores_ML.shape[1])
        found_M = _rank(scores_ML, relevant_ML, mask_ML, width).expected_MK.sum(-1)
        value_M = found_M / mask_ML.sum(-1).clamp(max=k)
        values_Q[groups_M] = torch.where(relevant_ML.any(-1), value_M, torch.nan)
    return values_Q


def rank_discounts(k: int, device: torch.device | None = None) -> Tensor:
    """The discount `1 / log2(1 + r)` of ranks 1 to k, float64."""
    return 1 / torch.log2(torch.arange(2, k + 2, dtype=torch.float64, device=device))


class _Ranking(NamedTuple):
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


def _rank(scores_ML: Tensor, values_ML: Tensor, mask_ML: Tensor, width: int) -> _Ranking:
    """Rank by falling score; padding has score -inf and value 0, so it may tie with documents of score -inf."""
    lengths_M1 = mask_ML.sum(-1, keepdim=True)
    # One rank more, which shows a block that continues past rank K.
    more_MK, index_MK = scores_ML.topk(min(width + 1, scores_ML.shape[1]))
    ranks_K = torch.arange(1, more_MK.shape[1] + 1, device=scores_ML.device)
    falls_MK = (more_MK[:, :-1] > more_MK[:, 1:]) | (ranks_K[:-1] > lengths_M1)
    top_MK, index_MK, rank_K = more_MK[:, :width], index_MK[:, :width], ranks_K[:width]
    if falls_MK.all():  # no ties, as with most scores: a third of the work
        one_MK = torch.ones_like(index_MK)
        return _Ranking(rank_K, values_ML.gather(1, index_MK), (rank_K - 1).expand_as(index_MK), one_MK - 1, one_MK)
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
    return _Ranking(rank_K, expected_MK, first_MK, rank_K - 1 - first_MK, size_MK)


def _chunks(
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


def _undefined(offsets_Q1: Tensor) -> Tensor:
    """One NaN per group; empty groups keep it."""
    return torch.full((len(offsets_Q1) - 1,), torch.nan, dtype=torch.float64, device=offsets_Q1.device)
