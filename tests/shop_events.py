"""Six weeks of a shop as its systems write them down, for the way from events to a verdict.

`visits-WEEK.jsonl` has the lists of items, clicks and carts of a week, `orders-WEEK.parquet` its orders, which know no
list; `items.csv` is the item feed. A user examines a place p with the probability p ** -0.5, and clicks and orders by
what the item is worth: its match, rating and price, and whether it is in stock, which the lists tell from week 5 on.
Orders come up to two days later, some of them after the end of the list's week. `ab.csv` is a live test of two
rankings, by the match and by the worth; `users.txt` and `queries.txt` name who and what is to be erased.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from shop import FIRST

WEEKS = [f"2026-W{week:02d}" for week in range(1, 7)]
_ITEMS, _USERS, _PLACES = 60, 90, 8
_WEEK_S = 7 * 86_400


def write_shop(folder: Path, *, lists: int = 100, seed: int = 0) -> None:
    """Write all files, with so many lists a week."""
    folder.mkdir(parents=True)
    items = _feed(np.random.default_rng([seed, 0]))
    items.to_csv(folder / "items.csv", index=False)
    rng = np.random.default_rng([seed, 1])
    log = pd.concat([_shown(items, lists, rng).assign(week=week) for week in range(len(WEEKS))], ignore_index=True)
    log["search"] = [f"{WEEKS[week]}-{search}" for week, search in zip(log["week"], log["search"], strict=True)]
    log["at"] += FIRST.value // 10**9 + _WEEK_S * log["week"]
    _write_by_week(folder, log.join(_acts(log, rng)))
    _live_test(items, np.random.default_rng([seed, 2])).to_csv(folder / "ab.csv", index=False)
    (folder / "users.txt").write_text("u3\nu17\n")
    (folder / "queries.txt").write_text(f"{WEEKS[1]}-5\n{WEEKS[5]}-7\n")


def _feed(rng: np.random.Generator) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "sku": [f"P{number}" for number in range(_ITEMS)],
            "f_price": np.round(rng.lognormal(2.5, 0.5, _ITEMS), 2),
            "f_rating": np.round(rng.uniform(1, 5, _ITEMS), 1),
        }
    )


def _shown(items: pd.DataFrame, lists: int, rng: np.random.Generator, users: int = _USERS) -> pd.DataFrame:
    """A row for each place of each list, in the order of an engine that sees little more than the match."""
    choice_QL = np.argsort(rng.random((lists, _ITEMS)), axis=1)[:, :_PLACES]
    shown = items.iloc[choice_QL.ravel()].reset_index(drop=True)
    shown["search"] = np.repeat(np.arange(lists), _PLACES)
    shown["visitor"] = np.repeat([f"u{user}" for user in rng.integers(0, users, lists)], _PLACES)
    shown["at"] = np.repeat(rng.integers(0, _WEEK_S, lists), _PLACES)
    shown["match"] = np.round(rng.gamma(2.0, 1.0, len(shown)), 3)
    shown["stock"] = rng.integers(0, 2, len(shown))
    shown["worth"] = shown["match"] + 0.8 * shown["f_rating"] - np.log(shown["f_price"]) + 1.5 * shown["stock"] - 4
    shown["engine"] = shown["match"] + rng.gumbel(0, 1, len(shown))
    return _ordered(shown, "engine")


def _ordered(shown: pd.DataFrame, by: str) -> pd.DataFrame:
    shown = shown.sort_values(["search", by], ascending=[True, False], ignore_index=True)
    return shown.assign(place=shown.groupby("search").cumcount() + 1)


def _acts(shown: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Whether each item that was shown is clicked, put into the cart, and ordered."""
    chance_N = 1 / (1 + np.exp(-shown["worth"].to_numpy()))
    click_N = (rng.random(len(shown)) < shown["place"] ** -0.5) & (rng.random(len(shown)) < chance_N)
    cart_N = click_N & (rng.random(len(shown)) < chance_N)
    order_N = cart_N & (rng.random(len(shown)) < 0.6)
    later_N = rng.integers(60, 2 * 86_400, len(shown))
    return pd.DataFrame({"click": click_N, "cart": cart_N, "order": order_N, "later": later_N})


def _write_by_week(folder: Path, log: pd.DataFrame) -> None:
    """Write each event to the file of the week in which it happens; those after the last week are not known yet."""
    ends_at = FIRST.value // 10**9 + _WEEK_S * np.arange(1, len(WEEKS) + 1)
    visits, orders = _visits(log), log.loc[log["order"], ["visitor", "sku", "f_price"]]
    orders = orders.rename(columns={"f_price": "paid"}).assign(paid_at=log["at"] + log["later"])
    for week, begin, end in zip(WEEKS, ends_at - _WEEK_S, ends_at, strict=True):
        lines = [json.dumps(visit) + "\n" for visit in visits if begin <= visit["at"] < end]
        (folder / f"visits-{week}.jsonl").write_text("".join(lines))
        orders[orders["paid_at"].between(begin, end, inclusive="left")].to_parquet(folder / f"orders-{week}.parquet")


def _visits(log: pd.DataFrame) -> list[dict[str, Any]]:
    """The lists, and what was clicked and put into the cart there, every other one without its list."""
    visits: list[dict[str, Any]] = []
    for (week, search, visitor, at), of_list in log.groupby(["week", "search", "visitor", "at"], sort=False):
        products = of_list[["sku", "match", "stock"] if week >= 4 else ["sku", "match"]].to_dict("records")
        visits.append({"at": at, "what": "list", "search": search, "visitor": visitor, "products": products})
        for row in of_list[of_list["click"]].itertuples():
            for what, seconds in [("click", 20), ("add", 50)][: 1 + row.cart]:
                known = {"search": search if row.place % 2 else None, "visitor": visitor}
                visits.append({"at": at + seconds + row.place, "what": what, **known, "products": [{"sku": row.sku}]})
    return visits


def _live_test(items: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """What users did in two weeks with the three best items of each list, half of them by the order of the worth."""
    shown = _shown(items, 1200, rng, users=400)
    arms = {"old": _ordered(shown, "match"), "new": _ordered(shown, "worth")}
    drawn = pd.Series({f"u{user}": ("old", "new")[user % 2] for user in range(400)})
    log = pd.concat([rows[rows["visitor"].map(drawn) == arm].assign(arm=arm) for arm, rows in arms.items()])
    log = log[log["place"] <= 3].reset_index(drop=True)
    acts = _acts(log, rng)
    log["clicks"], log["orders"] = acts["click"].astype(int), acts["order"].astype(int)
    log["revenue"] = (acts["order"] * log["f_price"]).round(2)
    log["day"] = (pd.Timestamp("2026-02-09") + pd.to_timedelta(log["at"] // 43_200, "D")).dt.strftime("%Y-%m-%d")
    by_list = log.groupby(["visitor", "arm", "day", "search"], as_index=False)
    return by_list[["clicks", "orders", "revenue"]].sum()
