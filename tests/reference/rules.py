"""A metric of one list under any rules, by its formula; with ties by expectation, the mean over all orders.

What was not retrieved is judged and has no rank: as in trec_eval, it counts in the ideal and among the relevant.
"""

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
    retrieved: Sequence[bool] | None = None,
) -> float:
    if rules.scores == "float32":
        scores = [struct.unpack("f", struct.pack("f", s))[0] for s in scores]
    found = {"threshold": threshold, "from_1": 1.0, "best": max([*labels, 0.5])}[rules.relevant]
    relevant = [y >= found and y > 0 for y in labels]
    if not any(labels if kind == "ndcg" else relevant):
        return {"left_out": math.nan, "zero": 0.0, "one": 1.0}[rules.undefined]
    judged, n_relevant, places = labels, sum(relevant), list(range(len(labels)))
    if retrieved is not None:
        places = [i for i in places if retrieved[i]]
        scores, labels, names, relevant = ([of[i] for i in places] for of in (scores, labels, names, relevant))
        places = list(range(len(places)))
    if rules.short == "zero" and kind in ("ndcg", "precision") and len(labels) < k:
        return 0.0
    if kind == "map" and rules.ties == "block":
        at = [sum(s >= scores[i] for s in scores) for i in range(len(scores)) if relevant[i]]
        hits = [
            sum(r for r, s in zip(relevant, scores, strict=True) if s >= scores[i])
            for i in range(len(scores))
            if relevant[i]
        ]
        return sum(h / a for h, a in zip(hits, at, strict=True)) / n_relevant

    def order_value(order: Order) -> float:
        ranking = [labels[i] for i in order], [relevant[i] for i in order]
        return ranking_value(rules, kind, *ranking, k, judged=judged, n_relevant=n_relevant)

    if rules.ties == "expected":
        return expectation(order_value, scores)
    if rules.ties == "item":
        places.sort(key=lambda i: names[i], reverse=True)
    elif rules.ties == "worst":
        places.sort(key=lambda i: labels[i])
    return order_value(sorted(places, key=lambda i: -scores[i]))


def ranking_value(
    rules: Rules,
    kind: str,
    labels: list[float],
    relevant: list[bool],
    k: int,
    *,
    judged: Sequence[float],
    n_relevant: int,
) -> float:
    hits = [rank for rank, r in enumerate(relevant, start=1) if r]
    match kind:
        case "map":
            return sum((i + 1) / rank for i, rank in enumerate(hits)) / n_relevant
        case "mrr":
            return 1 / hits[0] if hits else 0.0
        case "precision":
            return sum(relevant[:k]) / (k if rules.short == "padded" else max(1, min(k, len(relevant))))
        case "recall":
            return sum(relevant[:k]) / n_relevant
        case "success":
            return float(any(relevant[:k]))

    def dcg(ranking: list[float]) -> float:
        def factor(rank: int) -> float:
            return 1 / math.log2(max(2, rank) if rules.discount == "letor" else rank + 1)

        gains = [2**y - 1 if rules.gain == "exponential" else y for y in ranking]
        return sum(gain * factor(rank) for rank, gain in enumerate(gains, start=1))

    pool = sorted(labels[:k] if rules.ideal == "ranked" else judged, reverse=True)
    best = dcg(pool if rules.ideal == "uncut" else pool[:k])
    return dcg(labels[:k]) / best if best else 0.0
