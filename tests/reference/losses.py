"""Ranking losses of one list, with loops."""

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from reference.metrics import ideal_dcg

Labels = Sequence[float]


def lambdarank(
    scores_L: Tensor, labels: Labels, sigma: float = 1.0, truncation: int | None = None, normalise: str = "ideal"
) -> Tensor:
    """One list; a tied block has its first rank for the truncation and shares its mean discount."""
    lightgbm = normalise == "lightgbm"
    scores = scores_L.tolist()
    first, discount = [], []
    for score in scores:
        higher, equal = sum(s > score for s in scores), sum(s == score for s in scores)
        first.append(higher + 1)
        ranks = range(higher + 1, higher + equal + 1)
        discount.append(sum(1 / math.log2(1 + rank) for rank in ranks) / equal)
    total, lambdas = scores_L.sum() * 0, 0.0
    for i, j in pairs(labels):
        if truncation is None or min(first[i], first[j]) <= truncation:
            weight = abs(2 ** labels[i] - 2 ** labels[j]) * abs(discount[i] - discount[j])
            weight /= ideal_dcg(labels, truncation if lightgbm else None)
            if lightgbm:
                weight /= 0.01 + abs(scores[i] - scores[j])
            lambdas += sigma * weight * sigmoid(-sigma * (scores[i] - scores[j]))
            total = total + weight * logistic(sigma * (scores_L[i] - scores_L[j]))
    return total * math.log2(1 + 2 * lambdas) / (2 * lambdas) if lightgbm and lambdas else total


def lightgbm_objective(
    scores: Sequence[float], labels: Labels, sigma: float, truncation: int
) -> tuple[list[float], list[float]]:
    """Gradients and hessians of LightGBM's lambdarank objective, for scores without ties (rank_objective.hpp)."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    rank = {i: r for r, i in enumerate(order)}
    gradients, hessians, total = [0.0] * len(scores), [0.0] * len(scores), 0.0
    for i, j in pairs(labels):
        if min(rank[i], rank[j]) >= truncation:
            continue
        swap = abs(1 / math.log2(2 + rank[i]) - 1 / math.log2(2 + rank[j]))
        change = (2 ** labels[i] - 2 ** labels[j]) * swap / ideal_dcg(labels, truncation)
        change /= 0.01 + abs(scores[i] - scores[j])
        chance = sigmoid(-sigma * (scores[i] - scores[j]))
        total += 2 * sigma * change * chance
        gradients[i] -= sigma * change * chance
        gradients[j] += sigma * change * chance
        for document in (i, j):
            hessians[document] += sigma**2 * change * chance * (1 - chance)
    factor = math.log2(1 + total) / total if total > 0 else 1.0
    return [factor * g for g in gradients], [factor * h for h in hessians]


def ranknet(scores_L: Tensor, labels: Labels, sigma: float = 1.0) -> Tensor:
    total = scores_L.sum() * 0
    for i, j in pairs(labels):
        total = total + logistic(sigma * (scores_L[i] - scores_L[j]))
    return total


def hinge(scores_L: Tensor, labels: Labels) -> Tensor:
    total = scores_L.sum() * 0
    for i, j in pairs(labels):
        total = total + torch.relu(1 - (scores_L[i] - scores_L[j])) / len(list(pairs(labels)))
    return total


def softmax_negatives(scores_L: Tensor, labels: Labels, weights: Sequence[float], threshold: float = 1.0) -> Tensor:
    """SUN23 equation 4, every positive against all the negatives."""
    positives = [i for i, y in enumerate(labels) if y >= threshold]
    negatives = [i for i, y in enumerate(labels) if y < threshold]
    total = scores_L.sum() * 0
    for i in positives:
        total = total - weights[i] * scores_L[[i, *negatives]].log_softmax(0)[0] / len(positives)
    return total


def sigmoid_cross_entropy(scores_L: Tensor, labels: Labels, weights: Sequence[float], highest: float = 1.0) -> Tensor:
    total = scores_L.sum() * 0
    for score, label, weight in zip(scores_L, labels, weights, strict=True):
        total = total + weight * (-label / highest * score + logistic(-score))
    return total


def squared_error(scores_L: Tensor, labels: Labels, weights: Sequence[float], *, standardise: bool = False) -> Tensor:
    labels = standardised(labels) if standardise else labels
    total = scores_L.sum() * 0
    for score, label, weight in zip(scores_L, labels, weights, strict=True):
        total = total + weight * (score - label) ** 2
    return total


def standardised(labels: Labels) -> Labels:
    if not labels:
        return labels
    mean, deviation = statistics.fmean(labels), statistics.pstdev(labels)
    return [(label - mean) / deviation if deviation else 0.0 for label in labels]


def softmax(scores_L: Tensor, labels: Labels, weights: Sequence[float]) -> Tensor:
    total = scores_L.sum() * 0
    for i, (label, weight) in enumerate(zip(labels, weights, strict=True)):
        total = total - weight * label * (scores_L[i] - scores_L.logsumexp(0))
    return total


def attention_allocation(scores_L: Tensor, labels: Labels, weights: Sequence[float]) -> Tensor:
    if len(set(labels)) < 2:
        return scores_L.sum() * 0
    deserved = [math.exp(y) if y > 0 else 0.0 for y in labels]
    return softmax(scores_L, [e / sum(deserved) for e in deserved], weights)


def list_net(scores_L: Tensor, labels: Labels, temperature: float = 1.0, *, standardise: bool = False) -> Tensor:
    if len(set(labels)) < 2:
        return scores_L.sum() * 0
    powers = [math.exp(y / temperature) for y in (standardised(labels) if standardise else labels)]
    return softmax(scores_L, [power / sum(powers) for power in powers], [1.0] * len(labels))


def list_mle(scores_L: Tensor, labels: Labels) -> Tensor:
    total = scores_L.sum() * 0
    for i, label in enumerate(labels):
        lower = [j for j, y in enumerate(labels) if y < label]
        total = total - scores_L[[i, *lower]].log_softmax(0)[0]
    return total


def approx_ndcg(scores_L: Tensor, labels: Labels, temperature: float) -> Tensor:
    loss = scores_L.sum() * 0
    if not any(labels):
        return loss
    loss = loss + 1
    for i, label in enumerate(labels):
        rank = 1 + sum(torch.sigmoid((scores_L[j] - scores_L[i]) / temperature) for j in range(len(labels)) if j != i)
        loss = loss - (2**label - 1) / ideal_dcg(labels) / torch.log2(1 + torch.as_tensor(rank))
    return loss


def ordinal(logits_C: Tensor, grade: float) -> Tensor:
    total = logits_C.sum() * 0
    for threshold, logit in enumerate(logits_C, start=1):
        total = total + logistic(logit if grade >= threshold else -logit)
    return total


def pairs(labels: Labels) -> Iterator[tuple[int, int]]:
    """Pairs (i, j) where i has the higher label."""
    return ((i, j) for i, j in product(range(len(labels)), repeat=2) if labels[i] > labels[j])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def logistic(margin: Tensor) -> Tensor:
    return torch.logaddexp(torch.zeros_like(margin), -margin)
