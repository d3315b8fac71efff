"""Slow, obvious oracles: each formula as it is written, one list at a time, with loops.

Metrics take ties at their word: they average over every order that the ties allow. Losses are float64 torch scalars,
so that autograd gives the gradient of the plain loop.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product

import torch
from torch import Tensor

Order = Sequence[int]


def orders(scores: Sequence[float]) -> Iterator[list[int]]:
    """Every order of the documents in which no score rises."""
    blocks = [[i for i, s in enumerate(scores) if s == level] for level in sorted(set(scores), reverse=True)]
    for arranged in product(*(permutations(block) for block in blocks)):
        yield [i for block in arranged for i in block]


def expectation(value: Callable[[Order], float], scores: Sequence[float]) -> float:
    values = [value(order) for order in orders(scores)]
    return sum(values) / len(values)


def dcg(labels: Sequence[float], order: Order, k: int | None = None) -> float:
    return sum((2 ** labels[i] - 1) / math.log2(1 + rank) for rank, i in enumerate(order[:k], start=1))


def ideal_dcg(labels: Sequence[float], k: int | None = None) -> float:
    return dcg(labels, sorted(range(len(labels)), key=lambda i: -labels[i]), k)


def ndcg(scores: Sequence[float], labels: Sequence[float], k: int) -> float:
    if not any(labels):
        return math.nan
    return expectation(lambda order: dcg(labels, order, k) / ideal_dcg(labels, k), scores)


def mrr(scores: Sequence[float], labels: Sequence[float], threshold: float = 1.0) -> float:
    def value(order: Order) -> float:
        return next(1 / rank for rank, i in enumerate(order, start=1) if labels[i] >= threshold)

    return expectation(value, scores) if any(y >= threshold for y in labels) else math.nan


def average_precision(scores: Sequence[float], labels: Sequence[float], threshold: float = 1.0) -> float:
    def value(order: Order) -> float:
        found, total = 0, 0.0
        for rank, i in enumerate(order, start=1):
            if labels[i] >= threshold:
                found += 1
                total += found / rank
        return total / found

    return expectation(value, scores) if any(y >= threshold for y in labels) else math.nan


def precision(scores: Sequence[float], labels: Sequence[float], k: int, threshold: float = 1.0) -> float:
    def value(order: Order) -> float:
        return sum(labels[i] >= threshold for i in order[:k]) / min(k, len(labels))

    return expectation(value, scores) if any(y >= threshold for y in labels) else math.nan


def lambdarank(scores_L: Tensor, labels: Sequence[float], sigma: float = 1.0, truncation: int | None = None) -> Tensor:
    """One list; a tied block stands at its first rank for the truncation and shares its mean discount."""
    scores = scores_L.tolist()
    first, discount = [], []
    for score in scores:
        higher, equal = sum(s > score for s in scores), sum(s == score for s in scores)
        first.append(higher + 1)
        ranks = range(higher + 1, higher + equal + 1)
        discount.append(sum(1 / math.log2(1 + rank) for rank in ranks) / equal)
    total = scores_L.sum() * 0
    for i, j in product(range(len(scores)), repeat=2):
        if labels[i] > labels[j] and (truncation is None or min(first[i], first[j]) <= truncation):
            weight = abs(2 ** labels[i] - 2 ** labels[j]) * abs(discount[i] - discount[j]) / ideal_dcg(labels)
            margin = sigma * (scores_L[i] - scores_L[j])
            total = total + weight * torch.logaddexp(torch.zeros_like(margin), -margin)
    return total


def cosine(a_D: Tensor, b_D: Tensor) -> Tensor:
    return (a_D @ b_D) / (a_D.norm() * b_D.norm())


def simclr_rank(z0_LD: Tensor, z1_LD: Tensor, temperature: float) -> Tensor:
    """HOU24 formula 3 for the documents of one group, both views summed, shape [L]."""
    views = [*z0_LD, *z1_LD]
    length = len(z0_LD)
    losses = []
    for i in range(length):
        loss = z0_LD.new_zeros(())
        for own, positive in ((i, length + i), (length + i, i)):
            others = torch.stack([cosine(views[own], view) / temperature for v, view in enumerate(views) if v != own])
            loss = loss - cosine(views[own], views[positive]) / temperature + others.logsumexp(0)
        losses.append(loss)
    return torch.stack(losses) if losses else z0_LD.new_zeros(0)
