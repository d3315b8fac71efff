"""Listwise ranking losses over ragged groups; see `ltrscale.ranking.loss` for their inputs and results.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, C grades above the lowest, S samples; in a chunk of M groups, L
slots a group, and a block of R rows compared with all L slots.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ltrscale.batch import (
    at_least_float32,
    group_index,
    length_chunks,
    repeated,
    standardise_by_group,
    sum_by_group,
)
from ltrscale.layout import Chunk
from ltrscale.ranking.loss import Loss, RankedLists, Scored, has_pairs, most, over_ideal, over_lists, row_blocks
from ltrscale.ranking.metrics import exponential_gain

SORTED_PER_CHUNK = 1 << 16
"""Padded documents that ListMLE sorts at once."""


def softmax(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, weights_N: Tensor | None = None) -> Tensor:
    """Listwise softmax cross entropy, shape [Q].

    `-sum over documents of w_i y_i log(exp(s_i) / sum over j of exp(s_j))` (Qin et al. 2021, B.2; Buyl et al. 2023,
    equation 1). Labels are not normalised: a list with much relevance weighs more than one with little.

    A group without relevance, or of one document, has loss 0.

    Example:
        >>> labels = torch.tensor([2.0, 0.0, 0.0])
        >>> softmax(torch.zeros(3), labels, torch.tensor([0, 2, 3]))  # 2 log(2); nothing relevant
        tensor([1.3863, 0.0000])
    """
    targets_N = labels_N if weights_N is None else labels_N * weights_N
    return _cross_entropy(scores_N, targets_N, offsets_Q1)


class SoftmaxConfig(Loss):
    """Listwise softmax cross entropy.

    Source: QIN21; BUYL23, equation 1.
    Proof: laws; rax `softmax_loss`.
    """

    kind: Literal["softmax"] = "softmax"
    function = staticmethod(softmax)
    weighted: ClassVar[bool] = True
    dual: ClassVar[bool] = True
    needs_relevance: ClassVar[bool] = True


def attention_allocation(
    scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, weights_N: Tensor | None = None
) -> Tensor:
    """Cross entropy between the attention that documents deserve and the softmax of the scores, shape [Q].

    `-sum over documents of w_i t_i log(exp(s_i) / sum over j of exp(s_j))` with targets `t = e(y_i) / sum over j of
    e(y_j)`, where `e(y) = exp(y)` for y > 0 and 0 otherwise (Ai et al. 2018, the loss of DLCM and SetRank; Sun et al.
    2023, equation 1 with the logarithm that the printed one lacks). An irrelevant document deserves no attention:
    under a plain softmax of the labels, the many irrelevant documents of a long list would take most of the attention.
    A group of equal labels has no order to learn and gets loss 0, although the formula would pull its scores together.

    Use `softmax` for labels that already are targets summing to 1, such as clicks refined by a feature (Sun et al.
    2023, section 2.2); this loss would flatten them.

    Labels of 0 and below mean irrelevant.

    Example:
        >>> labels = torch.tensor([3.0, 3.0, 0.0])
        >>> scores = torch.tensor([1.0, 0.0, 0.0])
        >>> attention_allocation(scores, labels, torch.tensor([0, 2, 3]))  # all labels equal; a single document
        tensor([0., 0.])
        >>> attention_allocation(scores, labels, torch.tensor([0, 3]))  # log(e + 2) - 1 / 2
        tensor([1.0514])
    """
    labels_N = labels_N.to(at_least_float32(scores_N).dtype)
    relevant_N = labels_N > 0
    counts_N = relevant_N & has_pairs(labels_N, offsets_Q1)[group_index(offsets_Q1)]
    attention_N = _log_softmax(torch.where(relevant_N, labels_N, -torch.inf), offsets_Q1).exp()
    targets_N = torch.where(counts_N, attention_N, 0.0)  # a group without relevance has no softmax
    return _cross_entropy(scores_N, targets_N if weights_N is None else targets_N * weights_N, offsets_Q1)


class AttentionAllocationConfig(Loss):
    """Cross entropy between the share of attention that documents deserve by label and their softmax (SUN23).

    Source: Ai et al. 2018, whom SUN23 follow.
    Proof: laws; rax `softmax_loss`.
    """

    kind: Literal["attention_allocation"] = "attention_allocation"
    function = staticmethod(attention_allocation)
    weighted: ClassVar[bool] = True


def list_net(
    scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, temperature: float = 1.0, standardise: bool = False
) -> Tensor:
    """Cross entropy between the softmax of the labels and that of the scores, shape [Q].

    `-sum over documents of t_i log(exp(s_i) / sum over j of exp(s_j))` with targets `t = softmax(y / T)` (Cao et al.
    2007, section 4). Scores equal to the labels over T have the least loss, so a student learns its teacher's
    distribution over the list. A group of equal labels has loss 0, as in `attention_allocation`.

    Labels may be negative. T is in units of the labels, or of their standard deviation with `standardise`.

    Raises:
        ValueError: the temperature is not positive.

    Example:
        >>> labels = torch.tensor([0.0, math.log(3), 7.0])
        >>> list_net(torch.zeros(3), labels, torch.tensor([0, 2, 3]))  # log(2); a single document
        tensor([0.6931, 0.0000])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    labels_N = labels_N.double()
    counts_N = has_pairs(labels_N, offsets_Q1)[group_index(offsets_Q1)]
    if standardise:
        labels_N = standardise_by_group(labels_N, offsets_Q1)
    targets_N = _log_softmax(labels_N / temperature, offsets_Q1).exp()
    targets_N = torch.where(counts_N, targets_N, 0.0).to(at_least_float32(scores_N).dtype)
    return _cross_entropy(scores_N, targets_N, offsets_Q1)


class ListNetConfig(Loss):
    """Cross entropy between the softmax of labels that are a teacher's scores and that of the scores (ListNet).

    Source: Cao et al. 2007, the top-one model.
    Proof: laws; rax `softmax_loss`.
    """

    kind: Literal["list_net"] = "list_net"
    function = staticmethod(list_net)
    temperature: float = Field(1.0, gt=0)
    """Divisor of the labels: below 1 the first documents count more."""
    standardise: bool = False
    """Standardise labels per query group first, so that their scale does not matter."""


def list_mle(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """ListMLE: likelihood of the order of the labels under the Plackett-Luce model, shape [Q].

    `-sum over documents of log(exp(s_i) / (exp(s_i) + sum over j with y_j < y_i of exp(s_j)))` (Xia et al. 2008).
    Without ties, as the paper assumes, this is its loss. Tied documents do not compete here: each should precede all
    documents with lower labels (Zhu and Klabjan 2020). Random tie-breaking would demand an arbitrary order, and the
    loss would depend on the order of the input.

    Time is O(sum of L log L).

    Only the order of labels matters. A group with fewer than two different labels has loss 0.

    Example:
        >>> labels = torch.tensor([2.0, 1.0, 0.0, 1.0, 1.0])
        >>> list_mle(torch.zeros(5), labels, torch.tensor([0, 3, 5]))  # log(3) + log(2); no order among equals
        tensor([1.7918, 0.0000])
    """
    scores_N = at_least_float32(scores_N)
    groups, losses = [offsets_Q1.new_zeros(0)], [scores_N[:0]]
    for chunk in length_chunks(offsets_Q1, budget=SORTED_PER_CHUNK, quadratic=False):
        groups.append(chunk.groups_M)
        losses.append(_list_mle(scores_N, labels_N, chunk))
    return scores_N.new_zeros(len(offsets_Q1) - 1).index_copy(0, torch.cat(groups), torch.cat(losses))


class ListMLEConfig(Loss):
    """ListMLE: likelihood of the best order under the Plackett-Luce model.

    Source: Xia et al. 2008.
    Proof: laws; rax `listmle_loss`, `unique_softmax_loss`.
    """

    kind: Literal["list_mle"] = "list_mle"
    function = staticmethod(list_mle)


def approx_ndcg(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, temperature: float = 0.1) -> Tensor:
    """ApproxNDCG: 1 - NDCG with ranks smoothed by sigmoids, shape [Q].

    `1 - 1 / IDCG * sum over documents of (2^y_i - 1) / log2(1 + rank_i)` with
    `rank_i = 1 + sum over j != i of sigmoid((s_j - s_i) / T)` (Qin et al. 2010; Qin et al. 2021, B.2, print its
    negative without the 1). It tends to 1 - NDCG as T falls, if no scores are tied.

    Time is O(sum over groups of L times relevant documents); matrices of pairs are freed block by block.

    T is in units of the scores. A group without relevance has loss 0.

    Raises:
        ValueError: the temperature is not positive.

    Example:
        >>> labels = torch.tensor([1.0, 0.0, 0.0])
        >>> approx_ndcg(torch.zeros(3), labels, torch.tensor([0, 2, 3]))  # rank 1.5 of two; nothing relevant
        tensor([0.2435, 0.0000])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    gains_N = exponential_gain(labels_N, waits=False)
    return over_lists(scores_N, gains_N, offsets_Q1, lambda lists, slope: _approx_ndcg(lists, temperature, slope))


class ApproxNDCGConfig(Loss):
    """ApproxNDCG: NDCG with ranks smoothed by sigmoids.

    Source: Qin et al. 2010; QIN21.
    Proof: laws; rax's ranks in `ndcg_metric`; exact NDCG as T falls.
    """

    kind: Literal["approx_ndcg"] = "approx_ndcg"
    function = staticmethod(approx_ndcg)
    needs_relevance: ClassVar[bool] = True
    temperature: float = Field(0.1, gt=0)
    """Temperature of the sigmoids, in units of the scores."""


def mean_under_noise(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    samples: int,
    scale: float,
    generator: torch.Generator,
) -> Tensor:
    """The mean of a loss over copies of the lists, each with its own Gumbel noise on the scores, shape [Q].

    `mean over samples of loss(s + scale g)` with `g = -log(-log(u))`, u uniform (Bruch et al. 2020; Qin et al. 2021,
    B.2). For scale 1 this estimates the expected loss of lists drawn from the Plackett-Luce model of the scores.

    Scale 0 gives the loss itself.

    Raises:
        ValueError: samples is below 1.

    Example:
        >>> scores, labels, offsets = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([0, 2])
        >>> draw = torch.Generator().manual_seed(0)
        >>> loss = mean_under_noise(approx_ndcg, scores, labels, offsets, samples=1000, scale=1.0, generator=draw)
        >>> bool(approx_ndcg(scores, labels, offsets) > loss)  # noise sometimes corrects a list in the wrong order
        True
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}")
    scores_N = at_least_float32(scores_N)
    # -log of an exponential variable is a Gumbel variable; the clamp keeps a draw of exactly 0 from becoming infinite.
    waits_SN = scores_N.new_empty(samples, len(scores_N)).exponential_(generator=generator)
    noisy_SN = scores_N - scale * waits_SN.clamp(min=torch.finfo(waits_SN.dtype).tiny).log()
    offsets_SQ1 = repeated(offsets_Q1, samples)
    return loss(noisy_SN.flatten(), labels_N.repeat(samples), offsets_SQ1).view(samples, len(offsets_Q1) - 1).mean(0)


class NoisyLoss(Loss):
    """The base of losses of scores with Gumbel noise; its function computes the loss of a copy."""

    needs_relevance: ClassVar[bool] = True
    samples: int = Field(8, ge=1, le=1000)
    """Noisy copies of each list."""
    scale: float = Field(1.0, ge=0)
    """Factor of the Gumbel noise."""

    def losses(self, scored: Scored) -> Tensor:
        """See `mean_under_noise`."""
        settings = {name: value for name, value in self if name not in NoisyLoss.model_fields}
        return mean_under_noise(
            partial(self.function, **settings),
            *scored.lists,
            samples=self.samples,
            scale=self.scale,
            generator=scored.generator,
        )


class GumbelApproxNDCGConfig(NoisyLoss):
    """ApproxNDCG of scores with Gumbel noise, a mean over samples.

    Source: Bruch et al. 2020.
    Proof: laws; order frequencies of Plackett-Luce.
    """

    kind: Literal["gumbel_approx_ndcg"] = "gumbel_approx_ndcg"
    function = staticmethod(approx_ndcg)
    temperature: float = Field(0.1, gt=0)
    """Temperature of the sigmoids, in units of the scores."""


def ordinal(logits_QC: Tensor, grades_Q: Tensor) -> Tensor:
    """Ordinal regression of the quality of whole lists, shape [Q].

    `sum over thresholds c = 1 .. C of BCE(sigmoid(logit_c), [grade >= c])` (Buyl et al. 2023, equations 5 and 6,
    where a list's grade is its highest label). Half precision is computed, and returned, in float32.

    Raises:
        ValueError: the shapes do not match.

    Example:
        >>> ordinal(torch.tensor([[2.0, -1.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0]))
        tensor([0.4402, 1.3863])
    """
    if logits_QC.ndim != 2 or grades_Q.shape != logits_QC.shape[:1]:
        raise ValueError(f"logits {list(logits_QC.shape)} and grades {list(grades_Q.shape)} must be [Q, C] and [Q]")
    logits_QC = at_least_float32(logits_QC)
    reached_QC = grades_Q[:, None] >= torch.arange(1, logits_QC.shape[1] + 1, device=logits_QC.device)
    return -F.logsigmoid(torch.where(reached_QC, logits_QC, -logits_QC)).sum(1)


def _log_softmax(scores_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    groups_N = group_index(offsets_Q1)
    # Without the group's largest score, exp would overflow; it cancels out, so it needs no gradient.
    top_Q = scores_N.new_full((len(offsets_Q1) - 1,), -torch.inf).scatter_reduce(0, groups_N, scores_N.detach(), "amax")
    shifted_N = scores_N - top_Q[groups_N]
    return shifted_N - sum_by_group(shifted_N.exp(), offsets_Q1).index_select(0, groups_N).log()


def _cross_entropy(scores_N: Tensor, targets_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    scores_N = at_least_float32(scores_N)
    return sum_by_group(-targets_N.to(scores_N.dtype) * _log_softmax(scores_N, offsets_Q1), offsets_Q1)


def _list_mle(scores_N: Tensor, labels_N: Tensor, chunk: Chunk) -> Tensor:
    """ListMLE by running sums over documents sorted by rising label."""
    labels_ML, order_ML = torch.where(chunk.mask_ML, labels_N[chunk.rows_ML].double(), torch.inf).sort()
    scores_ML = scores_N[chunk.rows_ML.gather(1, order_ML)]
    lower_ML = torch.searchsorted(labels_ML, labels_ML)  # number of documents with lower labels
    lower_scores_ML = scores_ML.logcumsumexp(1).gather(1, (lower_ML - 1).clamp(min=0))
    loss_ML = -F.logsigmoid(scores_ML - lower_scores_ML)  # log(1 + exp(lower - score))
    return torch.where(chunk.mask_ML & (lower_ML > 0), loss_ML, 0.0).sum(1)


def _approx_ndcg(lists: RankedLists, temperature: float, with_slope: bool) -> tuple[Tensor, Tensor]:
    """The loss of each list, and its slope by the scores (0 unless `with_slope`)."""
    # Only relevant documents, which come first, add to the loss: their rows are enough.
    relevant = most((lists.gains_ML > 0).sum(-1), lists.gains_ML.shape[1])
    gains_ML = over_ideal(lists.gains_ML, lists.discounts_L).clamp(min=0).to(lists.scores_ML.dtype)
    scaled_ML = lists.scores_ML / temperature
    above_ML = torch.where(lists.mask_ML, scaled_ML, -torch.inf)  # padding ranks above nothing
    loss_M = lists.gains_ML[:, 0].gt(0).to(scaled_ML.dtype)
    slope_ML = torch.zeros_like(scaled_ML)
    for block in row_blocks(scaled_ML, relevant):
        above_MRL = torch.sigmoid(above_ML[:, None] - scaled_ML[:, block, None])
        rank_MR = 0.5 + above_MRL.sum(2)  # not 1: the sum includes sigmoid(0), the document against itself
        depth_MR = torch.log2(1 + rank_MR)
        loss_M -= (gains_ML[:, block] / depth_MR).sum(1)
        if with_slope:
            cost_MR = gains_ML[:, block] / (depth_MR.square() * (1 + rank_MR) * (math.log(2) * temperature))
            pull_MRL = above_MRL.mul_(1 - above_MRL).mul_(cost_MR[..., None])
            slope_ML += pull_MRL.sum(1)
            slope_ML[:, block] -= pull_MRL.sum(2)
    return loss_M, slope_ML
