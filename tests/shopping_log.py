"""A log of a shop as it may lie somewhere, for `jobs.init`."""

import numpy as np
import pandas as pd


def shopping_log(searches: int = 120) -> pd.DataFrame:
    """Events of searches in ten weeks: unsorted, with repeated items, dates, booleans, text, three kinds of label."""
    rng = np.random.default_rng(0)
    items = pd.DataFrame(
        {
            "product_id": [f"p{i}" for i in range(80)],
            "title": [
                f"A long text of words on product {i}, which says a lot about it and much more" for i in range(80)
            ],
            "price": np.round(rng.lognormal(3, 1, 80), 2),
            "brand": rng.choice(["acme", "löwe", "zeta"], 80),
            "listed_on": pd.Timestamp("2025-01-01") + pd.to_timedelta(rng.integers(0, 300, 80), "D"),
        }
    )
    shown = []
    for i in range(searches):
        rows = items.iloc[rng.choice(80, rng.integers(4, 9), replace=False)].copy()
        at = pd.Timestamp("2026-01-05") + pd.to_timedelta(int(rng.integers(0, 70 * 24 * 60)), "m")
        likes = rng.normal(size=len(rows)) - rows["price"].rank() / 4
        rows = rows.assign(
            search_id=f"s{i}",
            user_id=f"u{i // 3}",
            searched_at=at.strftime("%d.%m.%Y %H:%M"),
            position=range(1, len(rows) + 1),
            in_stock=rng.choice(["true", "false"], len(rows)),
            event=np.where(likes > 0, "purchase", np.where(likes > -1, "add_to_cart", "view")),
            clicked=(likes > -1.5).astype(int),
            revenue=np.where(likes > 0, rows["price"], 0.0),
            shop="one",
        )
        shown.append(rows)
    log = pd.concat(shown)
    log["listed_on"] = log["listed_on"].dt.strftime("%Y-%m-%d")
    log = pd.concat([log, log.sample(20, random_state=1).assign(event="view")])
    return log.sample(frac=1, random_state=2)
