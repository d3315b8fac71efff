"""Metrics by their formulas; with ties, the average over every order that the ties allow."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product

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


def expected_dcg(scores: Sequence[float], labels: Sequence[float], k: int) -> float:
    return expectation(lambda order: dcg(labels, order, k), scores) if any(labels) else math.nan


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


def recall(scores: Sequence[float], labels: Sequence[float], k: int, threshold: float = 1.0) -> float:
    total = sum(y >= threshold for y in labels)

    def value(order: Order) -> float:
        return sum(labels[i] >= threshold for i in order[:k]) / total

    return expectation(value, scores) if total else math.nan


def success(scores: Sequence[float], labels: Sequence[float], k: int, threshold: float = 1.0) -> float:
    def value(order: Order) -> float:
        return float(any(labels[i] >= threshold for i in order[:k]))

    return expectation(value, scores) if any(y >= threshold for y in labels) else math.nan


def err(scores: Sequence[float], labels: Sequence[float], k: int, grades: int) -> float:
    def value(order: Order) -> float:
        reads_on, total = 1.0, 0.0
        for rank, i in enumerate(order[:k], start=1):
            satisfied = (2 ** min(labels[i], grades) - 1) / 2**grades
            total += reads_on * satisfied / rank
            reads_on *= 1 - satisfied
        return total

    return expectation(value, scores) if any(labels) else math.nan


def rbp(
    scores: Sequence[float], labels: Sequence[float], k: int | None, persistence: float, threshold: float = 1.0
) -> float:
    def value(order: Order) -> float:
        return (1 - persistence) * sum(persistence**rank for rank, i in enumerate(order[:k]) if labels[i] >= threshold)

    return expectation(value, scores) if any(y >= threshold for y in labels) else math.nan
