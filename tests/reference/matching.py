"""Exact match, slowly: one query token and one document at a time, from the formulas of the papers."""

import math
from collections import Counter
from collections.abc import Sequence


def idf(documents: Sequence[Sequence[int]], token: int) -> float:
    df = sum(token in document for document in documents)
    return math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))


def measures(
    query: Sequence[int],
    document: Sequence[int],
    documents: Sequence[Sequence[int]],
    size: int,
) -> dict[str, float]:
    """All measures of one document for a query, by the statistics of some documents."""
    k1, b, jelinek_mercer, dirichlet, discount = 1.2, 0.75, 0.1, 2000.0, 0.7
    every = [token for other in documents for token in other]
    mean = len(every) / len(documents) if every else 1.0
    counts, length = Counter(document), len(document)
    found = dict.fromkeys(("tf", "idf", "tf_idf", "bm25", "lm_jm", "lm_dir", "lm_abs"), 0.0)
    for token in query:
        c, rarity = counts[token], idf(documents, token)
        p = (every.count(token) + 1) / (len(every) + size)
        found["tf"] += c
        found["tf_idf"] += c * rarity
        if c:
            found["idf"] += rarity
            found["bm25"] += rarity * c / (c + k1 * (1 - b + b * length / mean))
        found["lm_dir"] += math.log((c + dirichlet * p) / (length + dirichlet))
        if length:
            found["lm_jm"] += math.log((1 - jelinek_mercer) * c / length + jelinek_mercer * p)
            found["lm_abs"] += math.log(max(c - discount, 0) / length + discount * len(counts) / length * p)
        else:
            found["lm_jm"] += math.log(p)
            found["lm_abs"] += math.log(p)
    return found
