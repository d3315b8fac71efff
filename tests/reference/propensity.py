"""Click weights and the dual learning losses of one list, with loops."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def cross_entropy(logits_L: Tensor, targets: Sequence[float]) -> Tensor:
    """`-sum_i t_i log(exp(x_i) / sum_j exp(x_j))`."""
    total = logits_L.sum() * 0
    for i, target in enumerate(targets):
        total = total - target * torch.log(torch.exp(logits_L[i]) / sum(torch.exp(x) for x in logits_L))
    return total


def dla_ranking_loss(scores_L: Tensor, clicks: Sequence[float], examination: Sequence[float], clip: float) -> Tensor:
    """Weights by the softmax of the examination logits, against that of a first position with logit 0."""
    total = 1 + sum(map(math.exp, examination))
    first, others = 1 / total, [math.exp(logit) / total for logit in examination]
    weights = [min(clip, first / other) for other in others]
    return cross_entropy(scores_L, [click * weight for click, weight in zip(clicks, weights, strict=True)])


def dla_propensity_loss(
    examination_L: Tensor, clicks: Sequence[float], positions: Sequence[float], scores: Sequence[float], clip: float
) -> Tensor:
    """Documents with position NaN are skipped; positions of a list must differ."""
    shown = [i for i, position in enumerate(positions) if not math.isnan(position)]
    if not shown:
        return examination_L.sum() * 0
    total = sum(math.exp(scores[i]) for i in shown)
    relevance = {i: math.exp(scores[i]) / total for i in shown}
    first = min(shown, key=lambda i: positions[i])
    targets = [clicks[i] * min(clip, relevance[first] / relevance[i]) for i in shown]
    return cross_entropy(examination_L[shown], targets)
