"""A metric of one list under any rules, by its formula; with ties by expectation, the mean over all orders."""

import math
import struct
from collections.abc import Sequence

from ltrscale.ranking.metric import Rules
from reference.metrics import Order, expectation


def value(
    rules: Rules,
    kind: str,
    scores: Sequence[float],
    labels: Sequence[float],
    names: Sequence[str],
    *,
    k: int,
    threshold: float,
) -> float:
    if rules.scores == "float32":
        scores = [struct.unpack("f", struct.pack("f", s))[0] for s in scores]
    found = {"threshold": threshold, "from_1": 1.0, "best": max([*labels, 0.5])}[rules.relevant]
    relevant = [y >= found and y > 0 for y in labels]
    if not any(labels if kind == "ndcg" else relevant):
        return {"left_out": math.nan, "zero": 0.0, "one": 1.0}[rules.undefined]
    if rules.short == "zero" and kind in ("ndcg", "precision") and len(labels) < k:
        return 0.0
    if kind == "map" and rules.ties == "block":
        at = [sum(s >= scores[i] for s in scores) for i in range(len(scores)) if relevant[i]]
        hits = [
            sum(r for r, s in zip(relevant, scores, strict=True) if s >= scores[i])
            for i in range(len(scores))
            if relevant[i]
        ]
        return sum(h / a for h, a in zip(hits, at, strict=True)) / sum(relevant)

    def of_order(order: Order) -> float:
        return of_ranking(rules, kind, [labels[i] for i in order], [relevant[i] for i in order], k)

    if rules.ties == "expected":
        return expectation(of_order, scores)
    places = list(range(len(scores)))
    if rules.ties == "item":
        places.sort(key=lambda i: names[i], reverse=True)
    elif rules.ties == "worst":
        places.sort(key=lambda i: labels[i])
    return of_order(sorted(places, key=lambda i: -scores[i]))


def of_ranking(rules: Rules, kind: str, labels: list[float], relevant: list[bool], k: int) -> float:
    hits = [rank for rank, r in enumerate(relevant, start=1) if r]
    match kind:
        case "map":
            return sum((i + 1) / rank for i, rank in enumerate(hits)) / len(hits)
        case "mrr":
            return 1 / hits[0]
        case "precision":
            return sum(relevant[:k]) / (k if rules.short == "padded" else min(k, len(relevant)))
        case "recall":
            return sum(relevant[:k]) / len(hits)
        case "success":
            return float(any(relevant[:k]))

    def dcg(ranking: list[float]) -> float:
        def factor(rank: int) -> float:
            return 1 / math.log2(max(2, rank) if rules.discount == "letor" else rank + 1)

        gains = [2**y - 1 if rules.gain == "exponential" else y for y in ranking]
        return sum(gain * factor(rank) for rank, gain in enumerate(gains, start=1))

    pool = sorted(labels[:k] if rules.ideal == "ranked" else labels, reverse=True)
    best = dcg(pool if rules.ideal == "uncut" else pool[:k])
    return dcg(labels[:k]) / best if best else 0.0
