"""Searches of a shop as data frames: numbers, text, missing values, groups without labels."""

import numpy as np
import pandas as pd

COLUMNS = {"query": "search", "label": "bought", "item": "product"}
"""Uses of the columns, beside the features."""


def searches(count: int, seed: int, *, labelled: float = 0.8) -> pd.DataFrame:
    """Some searches, each with 2 to 12 products; products are bought for their price, by shop."""
    rng = np.random.default_rng(seed)
    lengths_Q = rng.integers(2, 13, count)
    n = int(lengths_Q.sum())
    frame = pd.DataFrame(
        {
            "search": np.repeat([f"search {seed}-{i}" for i in range(count)], lengths_Q),
            "product": [f"p{i}" for i in range(n)],
            "price": rng.lognormal(3, 1, n),
            "clicks": rng.integers(0, 50, n),
            "sale": rng.random(n) < 0.3,
            "shop": rng.choice(["north", "south", "east", "7"], n),
            "kind": pd.Categorical(rng.choice(["tent", "lamp"], n)),
            "shown": pd.Timestamp("2026-01-05") + pd.to_timedelta(np.repeat(np.arange(count), lengths_Q), "h"),
        }
    )
    worth_N = -np.log(frame["price"]) * np.where(frame["shop"] == "south", -1, 1) + rng.normal(size=n)
    frame["bought"] = np.digitize(worth_N, [-2, 2]).astype(float)
    frame.loc[rng.random(n) < 0.1, ["price"]] = np.nan
    frame.loc[rng.random(n) < 0.1, ["shop"]] = None
    frame.loc[np.repeat(rng.random(count) >= labelled, lengths_Q), "bought"] = np.nan
    return frame
