"""Ranking metrics over ragged groups: one value per group, NaN where a group has no defined value.

One policy holds for all metrics. Documents with equal scores come in random order, and the value is the expectation
over that order, so it never depends on the order of the input. A group without a relevant document has no defined
value. A list shorter than k is evaluated at its length. Values are float64 whatever the type of the scores; scores
may be infinite, and one of -inf ranks last (Rax gives it no rank); labels are finite, not negative, and where gains are
2^y - 1 at most 1,000; a score that is NaN, and k below 1, is a ValueError.

A ranking metric sees only the order of the scores. If a pointwise loss makes the sigmoid of a score a probability, its
calibration can be checked against the clicks: by the log loss, and by the error of the mean probability over bins. Both
come from sums that add up over batches, however the data are split.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group and the first K ranks; B fine
bins of the score, b bins, C sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from ltrscale.arrays import HIGHEST_LABEL
from ltrscale.config import Strict
from ltrscale.late import Late
from ltrscale.ranking.metric import FirstRanks, Metric, Threshold

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from ltrscale import batch
    from ltrscale.ranking import ranked
else:
    torch, F = Late("torch"), Late("torch.nn.functional")
    batch, ranked = Late("ltrscale.batch"), Late("ltrscale.ranking.ranked")


def ndcg(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, k: int) -> Tensor:
    """Normalised discounted cumulative gain of the first k ranks, shape [Q].

    `DCG@k = sum over ranks r <= k of (2^y - 1) / log2(1 + r)`, divided by the DCG@k of the best order of the whole
    list (Järvelin and Kekäläinen 2002, with the exponential gain of Burges et al. 2005).

    Example:
        >>> scores, labels = torch.tensor([3.0, 1.0, 1.0, 5.0]), torch.tensor([2.0, 1.0, 0.0, 0.0])
        >>> ndcg(scores, labels, torch.tensor([0, 3, 4]), k=2)  # a tie at rank 2; a group without relevance
        tensor([0.9131,    nan], dtype=torch.float64)
    """
    return _ndcg(scores_N, labels_N, offsets_Q1, k, exponential_gain)


class NDCGConfig(Metric):
    """Normalised discounted cumulative gain of the first ranks.

    Source: Järvelin and Kekäläinen 2002, gain of Burges et al. 2005.
    Proof: laws; mean over all orders that ties allow; scikit-learn, `trec_eval`.
    """

    kind: Literal["ndcg"] = "ndcg"
    function = staticmethod(ndcg)
    definition: ClassVar[str] = "NDCG is the discounted gain of the first k ranks, divided by that of the best order."
    ruled_by: ClassVar[tuple[str, ...]] = ("gain", "discount", "ideal", "short")
    k: FirstRanks = 5

    def divisor(self, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The ideal DCG."""
        return ideal_dcg(exponential_gain(labels_N), offsets_Q1, k=self.k)


def gain_ndcg(scores_N: Tensor, gains_N: Tensor, offsets_Q1: Tensor, *, k: int) -> Tensor:
    """NDCG of the first k ranks for given gains, shape [Q]; NaN where no gain is above 0.

    Example:
        >>> gain_ndcg(torch.tensor([2.0, 1.0]), torch.tensor([5.0, 20.0]), torch.tensor([0, 2]), k=1)
        tensor([0.2500], dtype=torch.float64)
    """
    return _ndcg(scores_N, gains_N.double(), offsets_Q1, k, lambda gains: gains)


def _ndcg(scores_N: Tensor, values_N: Tensor, offsets_Q1: Tensor, k: int, gain: Callable[[Tensor], Tensor]) -> Tensor:
    """NDCG for gains that rise with the values, from 0 at 0."""
    values_Q = ranked.undefined(offsets_Q1)
    for ranking in ranked.rankings(scores_N, values_N, offsets_Q1, k):
        # Gain and discount separate, so the expected DCG is the DCG of the expected gains.
        gains_MK = ranking.expected(gain(ranking.values_ML if ranking.tied else ranking.values_ML[:, :k]), k)
        ideal_MK = gain(ranking.best_ML[:, :k].contiguous())
        discounts_K = rank_discounts(gains_MK.shape[1], scores_N.device)
        values_Q[ranking.groups_M] = gains_MK @ discounts_K / (ideal_MK @ discounts_K)  # 0 / 0 without relevance
    return values_Q


def ideal_dcg(gains_N: Tensor, offsets_Q1: Tensor, *, k: int) -> Tensor:
    """DCG of the k highest gains of each group in falling order, shape [Q]; 0 for an empty group.

    Raises:
        ValueError: k is below 1.

    Example:
        >>> ideal_dcg(torch.tensor([1.0, 3.0, 0.0]), torch.tensor([0, 2, 3]), k=1)
        tensor([3., 0.], dtype=torch.float64)
    """
    ideal_Q = gains_N.new_zeros(len(offsets_Q1) - 1, dtype=torch.float64)
    for ranking in ranked.rankings(gains_N, gains_N, offsets_Q1, k):
        best_MK = ranking.best_ML[:, :k].double()
        ideal_Q[ranking.groups_M] = best_MK @ rank_discounts(best_MK.shape[1], gains_N.device)
    return ideal_Q


def mrr(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, threshold: float = 1.0) -> Tensor:
    """Reciprocal rank of the first document with label >= threshold, shape [Q].

    With ties, documents are drawn without replacement: rank p holds the first relevant one with chance
    `h_p = r / (documents of the block not yet drawn)`, r of them relevant, given that no relevant one came before.

    Example:
        >>> mrr(torch.tensor([3.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0, 3]))  # (1/2 + 1/3) / 2
        tensor([0.4167], dtype=torch.float64)
    """
    values_Q = ranked.undefined(offsets_Q1)
    for ranking in ranked.rankings(scores_N, labels_N, offsets_Q1):
        relevant_ML = (ranking.values_ML >= threshold).double()
        hazard_ML = ranked.hazard(ranking, relevant_ML)
        none_before_ML = F.pad((1 - hazard_ML).cumprod(-1), (1, -1), value=1.0)
        value_M = (none_before_ML * hazard_ML / ranking.rank_L).sum(-1)
        values_Q[ranking.groups_M] = torch.where(ranking.best_ML[:, 0] >= threshold, value_M, torch.nan)
    return values_Q


class MRRConfig(Metric):
    """Reciprocal rank of the first relevant document.

    Proof: laws; mean over all orders that ties allow; `trec_eval`.
    """

    kind: Literal["mrr"] = "mrr"
    function = staticmethod(mrr)
    threshold: Threshold = 1.0


def average_precision(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, threshold: float = 1.0) -> Tensor:
    """Mean, over the documents with label >= threshold, of the precision at their ranks, shape [Q].

    Its mean over groups is MAP. Take a block of e tied documents, r of them relevant, that starts after b documents,
    R of them relevant. Rank p of the block holds a relevant document with probability r / e. If it does, the expected
    number of relevant documents up to p is `R + 1 + (p - 1 - b) (r - 1) / (e - 1)`, by the mean of a hypergeometric
    draw.

    Example:
        >>> average_precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 3]))
        tensor([0.8333], dtype=torch.float64)
    """
    values_Q = ranked.undefined(offsets_Q1)
    for ranking in ranked.rankings(scores_N, labels_N, offsets_Q1):
        relevant_ML = (ranking.values_ML >= threshold).double()
        expected_ML, size_ML = ranking.expected(relevant_ML), ranking.size_ML
        before_ML = F.pad(expected_ML.cumsum(-1), (1, 0)).gather(1, ranking.first_ML)
        others_ML = expected_ML * size_ML - 1
        found_ML = before_ML + 1 + ranking.drawn_ML * others_ML / (size_ML - 1).clamp(min=1)
        total_M = (expected_ML * found_ML / ranking.rank_L).sum(-1)
        values_Q[ranking.groups_M] = total_M / relevant_ML.sum(-1)  # 0 / 0 where nothing is relevant
    return values_Q


class MAPConfig(Metric):
    """Average precision, whose mean over groups is MAP.

    Proof: laws; mean over all orders that ties allow; `trec_eval`.
    """

    kind: Literal["map"] = "map"
    function = staticmethod(average_precision)
    threshold: Threshold = 1.0

    def divisor(self, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The number of relevant documents."""
        return batch.sum_by_group((labels_N >= self.threshold).double(), offsets_Q1)


def precision(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, k: int, threshold: float = 1.0) -> Tensor:
    """Share of documents with label >= threshold among the first min(k, length) ranks, shape [Q].

    Example:
        >>> precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 3]), k=2)
        tensor([0.5000], dtype=torch.float64)
    """
    values_Q = ranked.undefined(offsets_Q1)
    for ranking in ranked.rankings(scores_N, labels_N, offsets_Q1, k):
        relevant_ML = (ranking.values_ML >= threshold).double()
        value_M = ranking.expected(relevant_ML, k).sum(-1) / ranking.lengths_M.clamp(max=k)
        values_Q[ranking.groups_M] = torch.where(ranking.best_ML[:, 0] >= threshold, value_M, torch.nan)
    return values_Q


class PrecisionConfig(Metric):
    """Share of relevant documents among the first ranks.

    Proof: laws; mean over all orders that ties allow; `trec_eval`.
    """

    kind: Literal["precision"] = "precision"
    function = staticmethod(precision)
    label: ClassVar[str] = "P"
    cut_as_precision: ClassVar[bool] = True
    ruled_by: ClassVar[tuple[str, ...]] = ("short",)
    k: FirstRanks = 5
    threshold: Threshold = 1.0


def recall(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, k: int, threshold: float = 1.0) -> Tensor:
    """Share of the documents with label >= threshold that are among the first k ranks, shape [Q].

    It stays below 1 for a group with more than k of them.

    Example:
        >>> recall(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 3]), k=2)
        tensor([0.5000], dtype=torch.float64)
    """
    values_Q = ranked.undefined(offsets_Q1)
    for ranking in ranked.rankings(scores_N, labels_N, offsets_Q1, k):
        relevant_ML = (ranking.values_ML >= threshold).double()
        found_M = ranking.expected(relevant_ML, k).sum(-1)
        values_Q[ranking.groups_M] = found_M / relevant_ML.sum(-1)  # 0 / 0 where nothing is relevant
    return values_Q


class RecallConfig(Metric):
    """Share of the relevant documents that are among the first ranks.

    Proof: laws; mean over all orders that ties allow; `trec_eval`.
    """

    kind: Literal["recall"] = "recall"
    function = staticmethod(recall)
    label: ClassVar[str] = "Recall"
    definition: ClassVar[str] = "Recall@k is the share of a group's relevant documents that the first k ranks have."
    normalised: ClassVar[bool] = False
    k: FirstRanks = 5
    threshold: Threshold = 1.0

    def divisor(self, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The number of relevant documents."""
        return batch.sum_by_group((labels_N >= self.threshold).double(), offsets_Q1)


def success(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, k: int, threshold: float = 1.0) -> Tensor:
    """1 for a document with label >= threshold among the first k ranks, else 0, shape [Q].

    With ties it is the probability of such a document. If m of a block of e documents, r of them relevant, enter the
    first k ranks, none of these m is relevant with probability `C(e - r, m) / C(e, m)`.

    Example:
        >>> success(torch.zeros(3), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 3]), k=2)  # 1 - C(2, 2) / C(3, 2)
        tensor([0.6667], dtype=torch.float64)
    """
    values_Q = ranked.undefined(offsets_Q1)
    for ranking in ranked.rankings(scores_N, labels_N, offsets_Q1, k):
        relevant_ML = (ranking.values_ML >= threshold).double()
        # the whole list, because the block at rank k may end beyond k
        hazard_MK = ranked.hazard(ranking, relevant_ML)[:, :k]
        values_Q[ranking.groups_M] = torch.where(
            ranking.best_ML[:, 0] >= threshold, 1 - (1 - hazard_MK).prod(-1), torch.nan
        )
    return values_Q


class SuccessConfig(Metric):
    """Whether a relevant document is among the first ranks; also called hit rate.

    Proof: laws; mean over all orders that ties allow; `trec_eval`.
    """

    kind: Literal["success"] = "success"
    function = staticmethod(success)
    label: ClassVar[str] = "Success"
    definition: ClassVar[str] = "Success@k is 1 if a relevant document is among the first k ranks, else 0."
    k: FirstRanks = 5
    threshold: Threshold = 1.0


class UnfitLabelsError(ValueError):
    """A metric has no gain for some labels, or not for these groups."""


def exponential_gain(labels_N: Tensor, *, waits: bool = True) -> Tensor:
    """The gain `2^y - 1` of labels, float64 (Burges et al. 2005).

    Args:
        labels_N: at most 1,000.
        waits: check labels on a GPU too, which makes the host wait. Training steps skip this, because `prepare` has
            checked the labels of the data set.

    Raises:
        UnfitLabelsError: a label is above 1,000.

    Example:
        >>> exponential_gain(torch.tensor([0.0, 3.0]))
        tensor([0., 7.], dtype=torch.float64)
        >>> exponential_gain(torch.tensor([1024.0]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ltrscale.ranking.metrics.UnfitLabelsError: label 1024 is above 1000, and its gain 2^y - 1 beyond float64; ...
    """
    if (waits or labels_N.is_cpu) and labels_N.numel() and (highest := labels_N.amax().item()) > HIGHEST_LABEL:
        what = f"label {highest:g} is above {HIGHEST_LABEL}, and its gain 2^y - 1 beyond float64"
        raise UnfitLabelsError(f"{what}; give grades, or gains of their own")
    return torch.exp2(labels_N.double()).sub_(1)


def rank_discounts(k: int, device: torch.device | None = None) -> Tensor:
    """The discount `1 / log2(1 + r)` of ranks 1 to k, float64."""
    return 1 / torch.log2(torch.arange(2, k + 2, dtype=torch.float64, device=device))


_LIMIT, _PER_UNIT = 30, 64
_BINS = 2 * _LIMIT * _PER_UNIT + 1


class Calibration(Strict):
    """Probabilities against clicks, over all documents."""

    documents: int
    clicked: float
    """Share of clicked documents."""
    predicted: float
    """Mean probability."""
    log_loss: float
    """Mean of `-log p` of the clicked and `-log(1 - p)` of the other documents, in nats."""
    error: float
    """Expected calibration error: the mean over documents of the distance, in its bin, of mean probability and share
    of clicked documents."""
    reference: float | None = None
    """The error that probabilities which are right would have on average, as clicks are few; None in the first
    reports."""


def tally(scores_N: Tensor, clicks_N: Tensor) -> Tensor:
    """Sums over documents by fine bin of the score, shape [C, B], float64; tallies of several batches add up.

    The sums are the number of documents, their clicks, their probabilities and their log losses. A fine bin is 1/64 of
    a logit wide, so probabilities in it differ by less than 2%; scores beyond 30 share the last one.

    Args:
        scores_N: finite logits.
        clicks_N: 0 or 1.
    """
    logits_N, clicks_N = scores_N.double(), clicks_N.double()
    bin_N = (logits_N.clamp(-_LIMIT, _LIMIT) * _PER_UNIT).round().long() + _LIMIT * _PER_UNIT
    losses_N = F.softplus(logits_N) - logits_N * clicks_N
    sums_CN = torch.stack([torch.ones_like(logits_N), clicks_N, logits_N.sigmoid(), losses_N])
    return sums_CN.new_zeros(len(sums_CN), _BINS).index_add_(1, bin_N, sums_CN)


def calibration(tally_CB: Tensor, *, bins: int = 10) -> Calibration:
    """Log loss and expected calibration error over bins of equal count (Naeini et al. 2015; Nguyen and O'Connor 2015).

    `sum over bins of n_b / N |mean p - mean y|`. Bins have about N / `bins` documents each. Documents of a fine
    bin stay together, in the bin where their middle lies, so the order of the input never matters. As clicks are few,
    the error is above 0 even for correct probabilities: see `reference`.

    Raises:
        ValueError: there is no document.

    Example:
        >>> even = calibration(tally(torch.zeros(4), torch.tensor([0, 1, 0, 1])))
        >>> even.error, round(even.log_loss, 4)
        (0.0, 0.6931)
        >>> round(calibration(tally(torch.full((4,), 1.0986), torch.tensor([0, 1, 0, 1]))).error, 4)  # .75 against .5
        0.25
    """
    counts_B, clicks_B, probabilities_B, losses_B = tally_CB
    n = counts_B.sum()
    if n == 0:
        raise ValueError("calibration needs a document")
    middle_B = counts_B.cumsum(0) - counts_B / 2
    bin_B = (middle_B / n * bins).long().clamp(max=bins - 1)
    columns_CB = torch.stack([counts_B, clicks_B, probabilities_B])
    counts_b, clicks_b, probabilities_b = tally_CB.new_zeros(3, bins).index_add_(1, bin_B, columns_CB)
    return Calibration(
        documents=int(n),
        clicked=float(clicks_B.sum() / n),
        predicted=float(probabilities_B.sum() / n),
        log_loss=float(losses_B.sum() / n),
        error=float((probabilities_b - clicks_b).abs().sum() / n),
        reference=float(_mean_deviation(counts_b, probabilities_b).sum() / n),
    )


def _mean_deviation(counts_b: Tensor, probabilities_b: Tensor) -> Tensor:
    """The mean of `|X - n p|`, X binomial: `2 v (1 - p) P(X = v)`, v = floor(n p) + 1 (Diaconis and Zabell 1991)."""
    n_b = counts_b.clamp(min=1)
    p_b = (probabilities_b / n_b).clamp(0.0, 1.0)
    v_b = (n_b * p_b).floor() + 1
    misses_b = (n_b - v_b).clamp(min=0)
    ways_b = torch.lgamma(n_b + 1) - torch.lgamma(v_b + 1) - torch.lgamma(misses_b + 1)
    chance_b = (ways_b + torch.xlogy(v_b, p_b) + torch.xlogy(misses_b, 1 - p_b)).exp()
    return torch.where((counts_b > 0) & (v_b <= n_b), 2 * v_b * (1 - p_b) * chance_b, 0.0)
