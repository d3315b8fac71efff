"""A shop's log as a new user has it, for walks from the raw file to ranked items: python tests/shop.py DIRECTORY.

It writes `log.csv`, the first weeks in one shuffled file, and `2026-W12.csv` and `2026-W13.csv`, the weeks that come
after. The flaws are those of real logs: `session_id` stands before `search_id`, one stamp of `listed_on` is bad, 2% of
the rows are broken, `page_seconds` is known only after the click, the place on the page biases every label, and prices
are 60% higher from week 10 on. In week 13 prices are in cents, which a gate must refuse.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

FIRST = pd.Timestamp("2025-12-29")
"""The Monday of 2026-W01."""
BIAS = 0.7
"""A place p of the page is examined with the probability p ** -BIAS."""
LABELS = ("clicked", "added_to_cart", "purchased")
_ITEMS = 4000
_CATEGORIES = ("tents", "lamps", "boots", "jackets", "packs", "stoves", "ropes", "maps")
_BRANDS = ("acme", "löwe", "zeta", "nord", "fjäll", "alto", "kite", "mono", "orca", "puma", "rava", "sato")


def weeks(first: int, last: int, searches: int, *, broken: float = 0.02, seed: int = 0) -> pd.DataFrame:
    """So many searches in each of some weeks of 2026, shuffled; the columns are text as in a CSV file.

    A week is the same whichever others are made with it.
    """
    made = [_week(number, searches, seed) for number in range(first, last + 1)]
    log = pd.concat(made, ignore_index=True)
    rng = np.random.default_rng([seed, first, last, 2])
    return _break(log.iloc[rng.permutation(len(log))].reset_index(drop=True), broken, rng)


def _catalogue(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng([seed, 0])
    category = rng.integers(0, len(_CATEGORIES), _ITEMS)
    reviews = rng.geometric(0.03, _ITEMS) - 1
    names = [f"{_BRANDS[i % 12].title()} {_CATEGORIES[c][:-1]} no. {i}" for i, c in enumerate(category)]
    listed = pd.Timestamp("2024-03-01") + pd.to_timedelta(rng.integers(0, 650, _ITEMS), "D")
    items = pd.DataFrame(
        {
            "product_id": [f"P{100_000 + i}" for i in range(_ITEMS)],
            "item_name": names,
            "category": np.array(_CATEGORIES)[category],
            "brand": np.array(_BRANDS)[np.arange(_ITEMS) % 12],
            "seller_id": rng.integers(1001, 1400, _ITEMS),
            "list_price": np.round(rng.lognormal(3.2, 0.8, _ITEMS), 2),
            "margin": np.round(rng.normal(0.1, 0.15, _ITEMS), 3),
            "rating": np.where(reviews > 0, np.round(np.clip(rng.normal(3.9, 0.6, _ITEMS), 1, 5), 1), np.nan),
            "n_reviews": reviews,
            "listed_on": listed.strftime("%Y-%m-%d"),
        }
    )
    items.loc[7, "listed_on"] = "0000-00-00"
    return items


def _week(number: int, searches: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng([seed, 1, number])
    items, length_Q = _catalogue(seed), rng.integers(4, 20, searches)
    query_N = np.repeat(np.arange(searches), length_Q)
    n = len(query_N)
    wanted_N = rng.integers(0, len(_CATEGORIES), searches)[query_N]
    of_category = [np.flatnonzero(items["category"] == name) for name in _CATEGORIES]
    random_N = rng.integers(0, _ITEMS, n)
    matches_N = rng.random(n) < 0.7
    choice_N = np.array([of_category[c][i % len(of_category[c])] for c, i in zip(wanted_N, random_N, strict=True)])
    log = items.iloc[np.where(matches_N, choice_N, random_N)].reset_index(drop=True)
    visit_Q = np.cumsum(rng.random(searches) < 0.6)
    start_V = FIRST + pd.to_timedelta((number - 1) * 7 * 1440 + rng.integers(0, 7 * 1440 - 60, visit_Q[-1] + 1), "m")
    at_Q = start_V[visit_Q] + pd.to_timedelta(rng.integers(0, 3600, searches), "s")
    log.insert(0, "session_id", [f"v{number:02d}-{v}" for v in visit_Q[query_N]])
    log.insert(1, "search_id", [f"s{number:02d}-{q}" for q in query_N])
    log.insert(2, "user_id", [f"u{v % 9000}" for v in visit_Q[query_N]])
    log.insert(3, "searched_at", at_Q.strftime("%Y-%m-%d %H:%M:%S")[query_N])
    log["device"] = rng.choice(["phone", "desktop", "tablet"], searches, p=[0.6, 0.33, 0.07])[query_N]
    log["in_stock"] = np.where(rng.random(n) < 0.9, "true", "false")
    log["text_match"] = np.round(rng.gamma(2.0, 1.0, n) + 2.0 * (log["category"] == np.array(_CATEGORIES)[wanted_N]), 3)
    log["list_price"] = np.round(log["list_price"] * (1.6 if number >= 10 else 1.0) * rng.normal(1, 0.03, n), 2)
    log["sales_30d"] = rng.poisson(2 + 0.15 * log["n_reviews"])
    log = log.drop_duplicates(["search_id", "product_id"]).reset_index(drop=True)
    return _shown(log, rng, cents=number == 13)


def _shown(log: pd.DataFrame, rng: np.random.Generator, *, cents: bool) -> pd.DataFrame:
    """With the places that a noisy engine gave, and what users did there."""
    n = len(log)
    usual = log["list_price"] / log.groupby("category")["list_price"].transform("median")
    worth_N = (
        0.7 * log["text_match"]
        - 1.1 * np.log(usual)
        + 0.9 * (log["rating"].fillna(3.0) - 3.5)
        + 0.8 * (log["in_stock"] == "true")
        + 0.5 * (log["brand"].isin(["nord", "fjäll"]) & (log["device"] == "desktop"))
        - 0.6 * (np.log(usual) ** 2) * (log["device"] == "phone")
    )
    engine_N = 0.5 * log["text_match"] + 0.15 * np.log1p(log["sales_30d"]) + rng.gumbel(0, 0.7, n)
    log["position"] = engine_N.groupby(log["search_id"]).rank(ascending=False, method="first").astype(int)
    clicked_N = (rng.random(n) < log["position"] ** -BIAS) & (rng.random(n) < _chance(worth_N - 4.5))
    carted_N = clicked_N & (rng.random(n) < _chance(worth_N - 5.0))
    bought_N = carted_N & (rng.random(n) < 0.55)
    seconds_N = np.where(clicked_N, rng.gamma(3.0, 15.0 + 20.0 * bought_N, n), rng.random(n) < 0.01)
    log["page_seconds"] = np.round(seconds_N, 1)
    for name, value_N in zip(LABELS, (clicked_N, carted_N, bought_N), strict=True):
        log[name] = value_N.astype(int)
    log["revenue"] = np.where(bought_N, log["list_price"], 0.0)
    if cents:
        log[["list_price", "revenue"]] *= 100
    return log


def _chance(logit_N: pd.Series) -> NDArray[np.float64]:
    chance_N: NDArray[np.float64] = 1 / (1 + np.exp(-np.asarray(logit_N, float)))
    return chance_N


def _break(log: pd.DataFrame, share: float, rng: np.random.Generator) -> pd.DataFrame:
    """Some rows as broken writers leave them: no query, words for a number, an impossible time."""
    log = log.astype(dict.fromkeys(("list_price", "searched_at", "purchased", "search_id"), object))
    bad = rng.choice(len(log), round(share * len(log)), replace=False)
    flaws = (
        ("search_id", None),
        ("list_price", "NULL?"),
        ("searched_at", "2026-13-45 99:00:00"),
        ("purchased", "yes?"),
    )
    for rows, (name, value) in zip(np.array_split(bad, len(flaws)), flaws, strict=True):
        log.loc[rows, name] = value
    return log


def main(out: Path, searches: int) -> None:
    """Write the first 11 weeks, and each of the next two."""
    out.mkdir(parents=True, exist_ok=True)
    weeks(1, 11, searches).to_csv(out / "log.csv", index=False)
    for number in (12, 13):
        weeks(number, number, searches).to_csv(out / f"2026-W{number}.csv", index=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the files")
    parser.add_argument("--searches", type=int, default=5500, help="searches a week (5500: 60,500 in 11 weeks)")
    arguments = parser.parse_args()
    main(arguments.out, arguments.searches)
