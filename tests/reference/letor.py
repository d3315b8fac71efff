"""LETOR 4.0's evaluation script, rule by rule: one ranked list of labels at a time, NDCG at the ranks of the list."""

import math
from collections.abc import Sequence


def ranked(scores: Sequence[float], labels: Sequence[float]) -> list[float]:
    """Labels by falling score; the script sorts lines that are in the order of the file, stably."""
    lines = list(range(len(scores)))
    return [labels[i] for i in sorted(lines, key=lambda i: -scores[i])]


def dcg(ranking: Sequence[float], ranks: int) -> list[float]:
    """DCG at each of the first ranks; ranks past the end of the list hold label 0."""
    found: list[float] = []
    total = 0.0
    for position in range(ranks):
        label = ranking[position] if position < len(ranking) else 0.0
        gain = 2.0**label - 1
        total += gain if position < 2 else gain * math.log(2.0) / math.log(position + 1.0)
        found.append(total)
    return found


def ndcg_list(scores: Sequence[float], labels: Sequence[float]) -> list[float]:
    """NDCG at every rank of the list."""
    ranking = ranked(scores, labels)
    own, best = dcg(ranking, len(ranking)), dcg(sorted(ranking, reverse=True), len(ranking))
    return [d / b if b != 0 else 0.0 for d, b in zip(own, best, strict=True)]


def ndcg(scores: Sequence[float], labels: Sequence[float], k: int) -> float:
    """The value that a group adds to the sum for position k; 0 if its list is shorter."""
    values = ndcg_list(scores, labels)
    return values[k - 1] if k <= len(values) else 0.0


def mean_ndcg(scores: Sequence[float], labels: Sequence[float]) -> float:
    values = ndcg_list(scores, labels)
    return sum(values) / len(values) if values else 0.0


def average_precision(scores: Sequence[float], labels: Sequence[float], threshold: float = 1.0) -> float:
    relevant, total = 0, 0.0
    for position, label in enumerate(ranked(scores, labels)):
        if label >= threshold:
            relevant += 1
            total += relevant / (position + 1)
    return total / relevant if relevant else 0.0


def precision(scores: Sequence[float], labels: Sequence[float], k: int, threshold: float = 1.0) -> float:
    ranking = ranked(scores, labels)
    relevant = 0
    for position in range(k):
        label = ranking[position] if position < len(ranking) else 0.0
        relevant += label >= threshold
    return relevant / k
