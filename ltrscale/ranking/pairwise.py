"""Pairwise ranking losses over ragged groups; see `ltrscale.ranking.loss` for their inputs and results.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group, and a block of R rows
compared with all L slots; P relevant documents, each in T slots with its negatives.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ltrscale.batch import at_least_float32, group_index, sum_by_group
from ltrscale.ranking.loss import Loss, RankedLists, has_pairs, most, over_ideal, over_lists, row_blocks
from ltrscale.ranking.metrics import exponential_gain

_FAR_BELOW = -1e18
"""A scaled score so large that any margin has logistic 0, but small enough to divide weights without underflow."""


def lambdarank(
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    sigma: float = 1.0,
    truncation: int | None = None,
    normalise: Literal["ideal", "lightgbm"] = "ideal",
) -> Tensor:
    """LambdaRank: pairwise logistic loss weighted by the change of NDCG if the pair were swapped, shape [Q].

    `sum over pairs with y_i > y_j of |G_i - G_j| |D_i - D_j| / IDCG * log(1 + exp(-sigma (s_i - s_j)))` with gain
    `G = 2^y - 1`, discount `D = 1 / log2(1 + rank)`, and the IDCG of the whole list (Burges 2010; this is the loss
    whose gradients are its lambdas). Ranks come from the current scores and carry no gradient. Documents with equal
    scores share the mean discount of their block, so the order of the input never matters. A pair within a block
    therefore has weight 0, and a group whose scores are all equal has loss 0.

    `normalise="lightgbm"` weighs as LightGBM does by default (`lambdarank_norm`): the IDCG is that of the first
    `truncation` ranks, each pair is divided by `0.01 + |s_i - s_j|`, and with S twice the sum of the sizes of all
    pairs' lambdas, the group is multiplied by `log2(1 + S) / S`. Both factors are constants to the gradient, like the
    ranks. If no scores are tied, the gradient is that of LightGBM's objective. The value uses the weights of the
    current step, so it is not comparable between steps.

    `truncation` counts only pairs with a document among this many first ranks (a tied block has its first rank); None
    counts all pairs. A group without a pair has loss 0.

    Example:
        >>> scores = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
        >>> loss = lambdarank(scores, torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0, 2, 3]))
        >>> loss.detach()  # a group in the wrong order, (1 - 1 / log2(3)) log(1 + e), and a group without a pair
        tensor([0.4847, 0.0000])
        >>> loss.sum().backward()
        >>> scores.grad
        tensor([ 0.2698, -0.2698,  0.0000])
    """
    solve = partial(_swaps, sigma=sigma, truncation=truncation, normalise=normalise)
    return over_lists(scores_N, exponential_gain(labels_N, waits=False), offsets_Q1, solve, order="scores")


class LambdaRankConfig(Loss):
    """LambdaRank: pairwise logistic loss weighted by the change of NDCG.

    Source: Burges 2010.
    Proof: laws; trees of a real LightGBM booster.
    """

    kind: Literal["lambdarank"] = "lambdarank"
    function = staticmethod(lambdarank)
    sigma: float = Field(1.0, gt=0)
    """Steepness of the logistic."""
    truncation: int | None = Field(None, ge=1)
    """Only pairs with a document among this many first ranks count; empty for all pairs."""
    normalise: Literal["ideal", "lightgbm"] = "ideal"
    """`lightgbm` also divides by score distances and by the group's summed gradient, as that library does."""


def ranknet(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, *, sigma: float = 1.0) -> Tensor:
    """RankNet: logistic loss of every pair of documents with different labels, shape [Q].

    `sum over pairs with y_i > y_j of log(1 + exp(-sigma (s_i - s_j)))` (Burges et al. 2005; Qin et al. 2021, B.2).
    It is a sum, as in both papers: a long list weighs more than a short one.

    Only the order of labels matters. A group without a pair has loss 0.

    Example:
        >>> labels = torch.tensor([1.0, 0.0, 0.0, 1.0])
        >>> ranknet(torch.zeros(4), labels, torch.tensor([0, 3, 4]))  # two pairs, log(2) each; a single document
        tensor([1.3863, 0.0000])
    """
    return over_pairs(scores_N, labels_N, offsets_Q1, LOGISTIC, sigma=sigma)


class RankNetConfig(Loss):
    """RankNet: logistic loss of every pair in the wrong order.

    Source: Burges et al. 2005; QIN21.
    Proof: laws; rax `pairwise_logistic_loss`.
    """

    kind: Literal["ranknet"] = "ranknet"
    function = staticmethod(ranknet)
    sigma: float = Field(1.0, gt=0)
    """Steepness of the logistic."""


def hinge(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Pairwise hinge, the loss of RankSVM, shape [Q].

    `mean over pairs with y_i > y_j of max(0, 1 - (s_i - s_j))`. Joachims 2002 takes the sum over pairs, where long
    lists outweigh the others; the mean gives every group the same weight, as in Cao et al. 2006. At a margin of
    exactly 1 the gradient is 0.

    Only the order of labels matters. A group without a pair has loss 0.

    Example:
        >>> hinge(torch.tensor([0.0, 0.0, 3.0, 1.0]), torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 3, 4]))
        tensor([2.5000, 0.0000])
    """
    return over_pairs(scores_N, labels_N, offsets_Q1, HINGE, mean=True)


class HingeConfig(Loss):
    """Pairwise hinge, the loss of RankSVM; with an identity encoder and a head of one layer it is that model.

    Source: Joachims 2002.
    Proof: laws; rax `pairwise_hinge_loss`.
    """

    kind: Literal["hinge"] = "hinge"
    function = staticmethod(hinge)


def softmax_negatives(
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    generator: torch.Generator,
    negatives: int = 7,
    threshold: float = 1.0,
    weights_N: Tensor | None = None,
) -> Tensor:
    """Softmax cross entropy of each relevant document against sampled irrelevant ones of its list, shape [Q].

    `mean over documents i with y_i >= threshold of -w_i log(exp(s_i) / (exp(s_i) + sum over T - 1 sampled documents j
    with y_j < threshold of exp(s_j)))` (Sun et al. 2023, equation 4, with the logarithm that the printed one lacks).
    The paper draws one relevant document a query; the mean over all of them is the expectation of that draw.

    Each sample is uniform without replacement; a list with fewer than T - 1 irrelevant documents contributes them all.
    A list is shuffled once, and each of its relevant documents reads it from a random place. So samples of a list
    overlap more evenly than independent ones would, and sampling costs only the documents drawn.

    `negatives` are the T - 1 documents drawn for each relevant one; Sun et al. take 2 of 0 to 4 as the threshold. A
    group without a relevant or without an irrelevant document has loss 0.

    Raises:
        ValueError: negatives is below 1.

    Example:
        >>> scores, labels = torch.tensor([2.0, 1.0, 1.0, 1.0]), torch.tensor([3.0, 0.0, 0.0, 0.0])
        >>> draw = torch.Generator().manual_seed(0)
        >>> softmax_negatives(scores, labels, torch.tensor([0, 4]), generator=draw, negatives=2)  # log(1 + 2 / e)
        tensor([0.5514])
    """
    if negatives < 1:
        raise ValueError(f"negatives must be at least 1, not {negatives}")
    scores_N, groups_N = at_least_float32(scores_N), group_index(offsets_Q1)
    relevant_N = labels_N >= threshold
    # their number would make the host wait for a GPU, so a GPU compares all documents and drops those that do not count
    rows_P = relevant_N.nonzero()[:, 0] if relevant_N.is_cpu else torch.arange(len(labels_N), device=labels_N.device)
    drawn_PT, mask_PT = _draw(relevant_N, rows_P, offsets_Q1, negatives, generator)
    others_PT = torch.where(mask_PT, scores_N.index_select(0, drawn_PT.flatten()).view_as(drawn_PT), -torch.inf)
    loss_P = -torch.cat([scores_N.index_select(0, rows_P)[:, None], others_PT], 1).log_softmax(1)[:, 0]
    if weights_N is not None:
        loss_P = loss_P * weights_N[rows_P]
    loss_P = torch.where(relevant_N[rows_P], loss_P, 0.0)
    total_Q = scores_N.new_zeros(len(offsets_Q1) - 1).index_add(0, groups_N[rows_P], loss_P)
    return total_Q / sum_by_group(relevant_N.to(scores_N.dtype), offsets_Q1).clamp(min=1)


class SoftmaxNegativesConfig(Loss):
    """Softmax of each relevant document against sampled irrelevant ones of its list (SUN23).

    Source: SUN23, equation 4, with the logarithm.
    Proof: laws; frequencies of the draws.
    """

    kind: Literal["softmax_negatives"] = "softmax_negatives"
    function = staticmethod(softmax_negatives)
    weighted: ClassVar[bool] = True
    samples_noise: ClassVar[bool] = True
    negatives: int = Field(7, ge=1, le=1_000_000)
    """Irrelevant documents drawn for each relevant one, T - 1."""
    threshold: float = Field(1.0, gt=0)
    """Documents are relevant from this label on; SUN23 takes 2 of 0 to 4."""

    def counted(self, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """Groups with a relevant and an irrelevant document."""
        return has_pairs(labels_N >= self.threshold, offsets_Q1)


def _draw(
    relevant_N: Tensor, rows_P: Tensor, offsets_Q1: Tensor, negatives: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Irrelevant documents for some documents, shape [P, T - 1], and a mask: False where the group had too few."""
    groups_N = group_index(offsets_Q1)
    # float64: in a large batch, float32 keys would collide, and equal keys keep the order of the input.
    keys_N = torch.rand(len(groups_N), generator=generator, device=groups_N.device, dtype=torch.float64)
    shuffled_N = keys_N.masked_fill(relevant_N, torch.inf).argsort()
    pool_N = shuffled_N[groups_N[shuffled_N].argsort(stable=True)]  # by group, irrelevant documents first
    size_Q = sum_by_group((~relevant_N).long(), offsets_Q1)
    size_P1, first_P1 = size_Q[groups_N[rows_P], None], offsets_Q1[groups_N[rows_P], None]
    slots_T = torch.arange(negatives, device=groups_N.device)
    mask_PT = slots_T < size_P1
    # The keys of relevant documents did not enter the shuffle of the pool, so they can serve as random places.
    start_P1 = (keys_N[rows_P, None] * size_P1).long()
    return pool_N[first_P1 + (start_P1 + slots_T) % size_P1.clamp(min=1)], mask_PT


def _swaps(
    lists: RankedLists, with_slope: bool, *, sigma: float, truncation: int | None, normalise: str
) -> tuple[Tensor, Tensor]:
    """LambdaRank of lists by score: the loss of each, and its slope by the scores (0 unless `with_slope`)."""
    dtype, length, by_lightgbm = lists.scores_ML.dtype, lists.scores_ML.shape[1], normalise == "lightgbm"
    # Padding has the lowest gain and is far below: to beat it costs 0.
    gains_ML = over_ideal(lists.gains_ML.clamp(min=-1), lists.discounts_L, truncation if by_lightgbm else None)
    gains_ML = gains_ML.to(dtype)
    scores_ML = (sigma * lists.scores_ML).masked_fill_(~lists.mask_ML, _FAR_BELOW)
    discounts_ML, first_ML = _discounts(scores_ML, lists)
    near_ML = first_ML < (truncation or length)
    upper_ML = discounts_ML.masked_fill(~near_ML, -torch.inf)
    loss_M, total_M = scores_ML.new_zeros(2, len(scores_ML))
    slope_ML = torch.zeros_like(scores_ML)
    for rows in row_blocks(scores_ML, most(near_ML.sum(1), length)):
        below = slice(rows.start, length)
        leads_MRL = scores_ML[:, None, below] - scores_ML[:, rows, None]  # minus the distance
        # pairs within a block occur twice: the one with the lower document first gets distance and weight 0
        leads_MRL[..., : rows.stop - rows.start].clamp_(max=0)
        weights_MRL = gains_ML[:, rows, None] - gains_ML[:, None, below]
        weights_MRL *= (upper_ML[:, rows, None] - discounts_ML[:, None, below]).clamp_(min=0)
        if by_lightgbm:
            weights_MRL /= 0.01 * sigma - leads_MRL
        wrong_MRL = weights_MRL.clamp(max=0)  # of pairs in the wrong order
        weights_MRL.abs_()
        chance_MRL = leads_MRL.sigmoid()
        # log(1 + exp(-m)) is -log(1 - sigmoid(-|m|)), plus |m| in the wrong order
        loss_MRL = (1 - chance_MRL).log_().mul_(weights_MRL).addcmul_(wrong_MRL, leads_MRL, value=-1)
        loss_M -= loss_MRL.sum((1, 2))
        if with_slope or by_lightgbm:
            pull_MRL = wrong_MRL.addcmul_(weights_MRL, chance_MRL)
            slope_ML[:, rows].sub_(pull_MRL.sum(2))
            slope_ML[:, below].add_(pull_MRL.sum(1))
            if by_lightgbm:
                total_M += pull_MRL.abs_().sum((1, 2))
    if not by_lightgbm:
        return loss_M, slope_ML.mul_(sigma)
    total_M = (2 * sigma**2 * total_M).clamp_(min=torch.finfo(dtype).tiny)
    scale_M = total_M.log1p().div_(total_M).mul_(sigma / math.log(2))
    return loss_M * scale_M, slope_ML.mul_((sigma * scale_M)[:, None])


def _discounts(scores_ML: Tensor, lists: RankedLists) -> tuple[Tensor, Tensor]:
    """Discounts by falling score, averaged over ties, and the place of the first document of each tied block."""
    length = scores_ML.shape[1]
    places_1L = torch.arange(length, device=scores_ML.device)[None]
    tied_ML = (scores_ML[:, 1:] == scores_ML[:, :-1]) & lists.mask_ML[:, 1:]
    if not most(tied_ML.any(), 1):
        return lists.discounts_L.to(scores_ML.dtype)[None], places_1L
    first_ML = F.pad(places_1L[:, 1:].masked_fill(tied_ML, 0), (1, 0)).cummax(1).values
    next_ML = F.pad(places_1L[:, 1:].masked_fill(tied_ML, length), (0, 1), value=length)
    end_ML = next_ML.flip(1).cummin(1).values.flip(1)
    sums_L1 = F.pad(lists.discounts_L.cumsum(0), (1, 0))
    discounts_ML = (sums_L1.take(end_ML) - sums_L1.take(first_ML)) / (end_ML - first_ML)
    return discounts_ML.to(scores_ML.dtype), first_ML


class Penalty(NamedTuple):
    """The cost of a pair as a function of its margin (the lead of the better document), and its derivative."""

    reward: Callable[[Tensor], Tensor]
    """The negative penalty of each margin, as a new tensor."""
    slope: Callable[[Tensor, Tensor], Tensor]
    """The derivative of the penalty, from margins and rewards; it may overwrite both."""


LOGISTIC = Penalty(F.logsigmoid, lambda margins, _: margins.neg_().sigmoid_().neg_())
"""`log(1 + exp(-margin))`."""
HINGE = Penalty(lambda margins: (margins - 1).clamp_(max=0), lambda _, reward: reward.sign_())
"""`max(0, 1 - margin)`."""


def over_pairs(
    scores_N: Tensor, gains_N: Tensor, offsets_Q1: Tensor, penalty: Penalty, *, sigma: float = 1.0, mean: bool = False
) -> Tensor:
    """The sum of a penalty over the pairs with `g_i > g_j`, shape [Q]; the margin is `sigma (s_i - s_j)`.

    Memory is independent of the list length: pairs are taken block by block, forward and backward at once.

    Args:
        scores_N: finite scores. Half precision is computed, and returned, in float32.
        gains_N: finite gains; only their order matters.
        offsets_Q1: offsets of the groups. A group without a pair has loss 0.
        penalty: cost of a pair.
        sigma: scale of the margins.
        mean: divide by the number of pairs.

    Example:
        >>> squared = Penalty(lambda m: -(1 - m).clamp(min=0) ** 2, lambda m, _: -2 * (1 - m).clamp(min=0))
        >>> over_pairs(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), torch.tensor([0, 2]), squared)
        tensor([4.])
    """
    solve = partial(_pairs, penalty=penalty, sigma=sigma, mean=mean)
    return over_lists(scores_N, gains_N, offsets_Q1, solve)


def _pairs(
    lists: RankedLists, with_slope: bool, *, penalty: Penalty, sigma: float, mean: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each list, and its slope by the scores (0 unless `with_slope`)."""
    # Places in the order of gains stand in for the gains: small integers are exact in any floating-point type.
    places_ML = torch.searchsorted(-lists.gains_ML, -lists.gains_ML).to(lists.scores_ML.dtype)
    beaten_ML = torch.where(lists.mask_ML, places_ML, 0)  # nothing beats padding
    # Gains fall along a row, so only the first documents beat another: their rows are enough.
    winners = most((places_ML < beaten_ML.amax(1, keepdim=True)).sum(1), places_ML.shape[1])
    scores_ML = sigma * lists.scores_ML
    loss_M, total_M = scores_ML.new_zeros(2, len(scores_ML))
    slope_ML = torch.zeros_like(scores_ML)
    for rows in row_blocks(scores_ML, winners):
        below = slice(rows.start, None)
        weights_MRL = (beaten_ML[:, None, below] - places_ML[:, rows, None]).clamp_(0, 1)
        margins_MRL = scores_ML[:, rows, None] - scores_ML[:, None, below]
        reward_MRL = penalty.reward(margins_MRL)
        loss_M -= (reward_MRL * weights_MRL).sum((1, 2))
        if mean:
            total_M += weights_MRL.sum((1, 2))
        if with_slope:
            pull_MRL = weights_MRL.mul_(penalty.slope(margins_MRL, reward_MRL))
            slope_ML[:, rows].add_(pull_MRL.sum(2))
            slope_ML[:, below].sub_(pull_MRL.sum(1))
    scale_M = 1 / total_M.clamp(min=1) if mean else torch.ones_like(total_M)
    return loss_M * scale_M, slope_ML * (sigma * scale_M[:, None])
