"""A log of clicks with times and readers, and features of its history."""

import random
from typing import Any

Row = dict[str, Any]
FEATURES: dict[str, Row] = {
    "shown": {"kind": "count", "by": ["item"], "window": "1m"},
    "clicks": {"kind": "count", "of": "clicked", "by": ["item"]},
    "clicks_1m": {"kind": "count", "of": "clicked", "by": ["item"], "window": "1m"},
    "spent": {"kind": "count", "of": "price", "by": ["user"], "half_life": "30s"},
    "ctr": {"kind": "rate", "of": "clicked", "by": ["item", "user"], "smooth": 2, "prior": 0.25},
    "per_click": {"kind": "rate", "of": "price", "per": "clicked", "by": ["item"], "half_life": "41.5m"},
    "mean": {"kind": "rate", "of": "price", "by": ["user"], "window": "1h"},
    "last": {"kind": "last", "of": "clicked", "by": ["item"]},
    "first": {"kind": "first", "by": ["user"], "window": "1m"},
}
COLUMNS = {"query": "query", "item": "item", "label": "clicked", "features": ["price"], "time": "time", "period": "day"}


def log(n: int = 60, seed: int = 0) -> list[Row]:
    """Queries of three items, two minutes apart, some within the same second."""
    rng = random.Random(seed)
    rows = []
    for query in range(n):
        time, user = 1_700_000_000 + query // 2 * 120, rng.choice([1, 2, 3])
        rows += [
            {"query": f"q{query}", "time": time, "item": item, "user": user, "clicked": float(rng.random() < 0.4)}
            | {"price": rng.randrange(1, 900) / 8}
            for item in rng.sample("abcdef", 3)
        ]
    return rows
