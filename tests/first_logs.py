"""Logs of different shape, as they lie somewhere, for `jobs.init`: each maker writes one below a folder."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import german_shop
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import shop


def _items(rng: np.random.Generator, n: int = 60) -> pd.DataFrame:
    columns = {
        "price": np.round(rng.lognormal(3, 1, n), 2),
        "stars": rng.integers(1, 6, n),
        "brand": rng.choice(["acme", "löwe", "zeta"], n),
    }
    return pd.DataFrame(columns)


def _lists(rng: np.random.Generator, lists: int, items: int, least: int = 4, most: int = 9) -> tuple[np.ndarray, ...]:
    """The list and the item of each row; no item comes twice in a list."""
    lengths = rng.integers(least, most, lists)
    query_N = np.repeat(np.arange(lists), lengths)
    return query_N, np.concatenate([rng.choice(items, length, replace=False) for length in lengths])


def shop_log(folder: Path) -> Path:
    """The shop of `tests/shop.py`: shuffled, competing ids, a bad stamp, broken rows."""
    shop.weeks(1, 3, 60).to_csv(folder / "log.csv", index=False)
    return folder / "log.csv"


def german_shop_log(folder: Path) -> Path:
    """The log of `tests/german_shop.py`, a file for each of three weeks: only the later ones have the discount."""
    (folder / "logs").mkdir()
    for number in (5, 6, 7):
        german_shop.write(german_shop.week(number, 60), folder / "logs" / f"2026-W{number:02d}.csv")
    return folder / "logs"


def baskets(folder: Path) -> Path:
    """As Ta-Feng's: customers by day, no label, and no column that names a visit; all ids are integers."""
    rng = np.random.default_rng(0)
    visit_N, item_N = _lists(rng, 300, 400, 3, 12)
    day_V = np.sort(rng.integers(0, 90, 300))
    customer_V = rng.permutation(np.arange(300) % 70) * 37 + 1069
    rows = pd.DataFrame({"v": visit_N, "day": day_V[visit_N], "customer": customer_V[visit_N], "i": item_N})
    rows = rows.sort_values(["day", "customer", "v"], kind="stable").drop_duplicates(["day", "customer", "i"])
    age_C, worth_I = rng.choice(list("ABCDEFGHIJK"), 70), rng.integers(20, 900, 400)
    log = pd.DataFrame(
        {
            "TRANSACTION_DT": (pd.Timestamp("2000-11-01") + pd.to_timedelta(rows["day"], "D")).dt.strftime("%m/%d/%Y"),
            "CUSTOMER_ID": rows["customer"],
            "AGE_GROUP": age_C[(rows["customer"] - 1069) // 37],
            "PRODUCT_SUBCLASS": 100_000 + rows["i"] // 10 * 11,
            "PRODUCT_ID": 4_710_000_000_000 + rows["i"] * 1013,
            "AMOUNT": rng.integers(1, 4, len(rows)),
            "ASSET": worth_I[rows["i"]] - 10,
            "SALES_PRICE": worth_I[rows["i"]],
        }
    )
    log.to_csv(folder / "baskets.csv", index=False)
    return folder / "baskets.csv"


def visits(folder: Path) -> Path:
    """Rows of a visit together, under names that say little; ids are integers, and one row of each has a 1."""
    rng = np.random.default_rng(1)
    visit_N, item_N = _lists(rng, 200, 150)
    start_V = pd.Timestamp("2025-03-01") + pd.to_timedelta(np.sort(rng.integers(0, 80 * 1440, 200)), "m")
    log = pd.DataFrame(
        {
            "col_a": 20_000 + item_N,
            "col_b": 536_000 + visit_N * 3,
            "col_c": rng.integers(1, 20, len(visit_N)),
            "col_d": start_V[visit_N].strftime("%Y-%m-%d %H:%M"),
            "col_e": _items(rng, 150)["price"].to_numpy()[item_N],
        }
    )
    log["col_f"] = (log.groupby("col_b").cumcount() == 0).astype(int)
    log = log.groupby("col_b").sample(frac=1, random_state=3)
    log.to_csv(folder / "visits.csv", index=False)
    return folder / "visits.csv"


def events(folder: Path) -> Path:
    """A row for each event: an item that was bought has been viewed and put into the cart before."""
    rng = np.random.default_rng(2)
    visit_N, item_N = _lists(rng, 150, 60)
    start_V = pd.Timestamp("2025-10-01") + pd.to_timedelta(np.sort(rng.integers(0, 60 * 86_400, 150)), "s")
    rows = []
    for visit, item in zip(visit_N.tolist(), item_N.tolist(), strict=True):
        steps = ("view", "cart", "purchase")[: 1 + int(rng.integers(0, 4) > 2) + int(rng.integers(0, 3) > 1)]
        for step in steps:
            at = start_V[visit] + pd.to_timedelta(len(rows) % 600, "s")
            rows.append((f"{at:%Y-%m-%d %H:%M:%S}", step, 1_000_000 + item * 7, visit))
    log = pd.DataFrame(rows, columns=["event_time", "event_type", "product_id", "visit"])
    shown = _items(rng)[["price", "brand"]].iloc[(log["product_id"] - 1_000_000) // 7]
    log = log.join(shown.reset_index(drop=True))
    log["user_id"] = 520_000_000 + log["visit"] // 2
    log["user_session"] = [f"{visit * 2654435761 % 2**32:08x}-11ee" for visit in log.pop("visit")]
    log.sort_values("event_time", kind="stable").to_csv(folder / "events.csv", index=False)
    return folder / "events.csv"


def impressions(folder: Path) -> Path:
    """A row for each impression, with lists of its documents."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(3, 9, 200)
    items = [rng.choice(60, length, replace=False) for length in lengths]
    start_Q = pd.Timestamp("2026-01-05") + pd.to_timedelta(np.sort(rng.integers(0, 28 * 1440, 200)), "m")
    price_I = rng.lognormal(3, 1, 60)
    table = pa.table(
        {
            "impression_id": [f"i{q}" for q in range(200)],
            "user_id": [f"u{q // 3}" for q in range(200)],
            "shown_at": pa.array(start_Q, pa.timestamp("s")),
            "item_ids": [[f"p{i}" for i in one] for one in items],
            "positions": [list(range(1, length + 1)) for length in lengths],
            "prices": [price_I[one].tolist() for one in items],
            "scores": [rng.normal(size=length).tolist() for length in lengths],
            "clicks": [(rng.random(length) < 0.3).astype(int).tolist() for length in lengths],
        }
    )
    pq.write_table(table, folder / "impressions.parquet")
    return folder / "impressions.parquet"


def hotels(folder: Path) -> Path:
    """As Expedia's: many ids, a click and a booking, what it brought, and a place."""
    rng = np.random.default_rng(4)
    search_N, hotel_N = _lists(rng, 250, 90, 5, 20)
    n = len(search_N)
    hotels = pd.DataFrame({"prop_country_id": rng.integers(1, 9, 90), "prop_starrating": rng.integers(1, 6, 90)})
    start_V = pd.Timestamp("2013-01-07") + pd.to_timedelta(rng.integers(0, 60 * 86_400, 250), "s")
    log = pd.DataFrame({"srch_id": search_N * 2 + 1, "date_time": start_V[search_N].strftime("%Y-%m-%d %H:%M:%S")})
    log["site_id"], log["visitor_location_country_id"] = rng.integers(1, 6, (2, 250))[:, search_N]
    log["prop_country_id"] = hotels["prop_country_id"].to_numpy()[hotel_N]
    log["prop_id"] = 1000 + hotel_N * 13
    log["prop_starrating"] = hotels["prop_starrating"].to_numpy()[hotel_N]
    log["position"] = log.groupby("srch_id").cumcount() + 1
    log["price_usd"] = np.round(rng.lognormal(4.5, 0.5, n), 2)
    log["promotion_flag"] = rng.integers(0, 2, n)
    log["srch_destination_id"] = rng.integers(100, 140, 250)[search_N]
    log["srch_length_of_stay"] = rng.integers(1, 8, 250)[search_N]
    log["random_bool"] = rng.integers(0, 2, 250)[search_N]
    log["click_bool"] = (rng.random(n) < 0.12).astype(int)
    booked_N = (log["click_bool"] == 1) & (rng.random(n) < 0.6)
    log["gross_bookings_usd"] = np.where(booked_N, log["price_usd"] * log["srch_length_of_stay"], np.nan)
    log["booking_bool"] = booked_N.astype(int)
    log.to_csv(folder / "hotels.csv", index=False)
    return folder / "hotels.csv"


def faults(folder: Path) -> Path:
    """Twelve incidents of a plant and their thirteen parts, one of which was at fault: 156 rows."""
    rng = np.random.default_rng(5)
    culprit_V = rng.integers(0, 13, 12)
    rows = [
        (900 + job, f"part {part}", 20 + part % 5, round(float(rng.normal(60, 9)), 1), int(rng.integers(0, 400)))
        for job in range(12)
        for part in range(13)
    ]
    log = pd.DataFrame(rows, columns=["job", "part", "line", "temperature", "hours_since_service"])
    log["fault"] = (np.arange(156) % 13 == culprit_V[np.arange(156) // 13]).astype(int)
    log.to_csv(folder / "faults.csv", index=False)
    return folder / "faults.csv"


def lines(folder: Path) -> Path:
    """JSON lines of a help centre, compressed: epochs in milliseconds, camel case, a key that some lines lack."""
    rng = np.random.default_rng(6)
    query_N, item_N = _lists(rng, 150, 50)
    start_V = 1_767_571_200_000 + np.sort(rng.integers(0, 35 * 86_400_000, 150))
    likes_I = rng.normal(size=50)
    with gzip.open(folder / "helps.jsonl.gz", "wt", encoding="utf-8") as file:
        for query, item in zip(query_N.tolist(), item_N.tolist(), strict=True):
            row = {"requestId": f"r{query:05}", "ts": int(start_V[query]), "searchTerms": f"how to {query % 40}"}
            row |= {"articleId": f"kb-{item}", "title": f"Article {item}", "bm25": round(float(rng.gamma(2, 3)), 3)}
            row |= {"ageDays": 30 + item, "language": ["de", "en"][item % 2]}
            row |= {"helpfulVotes": item * 3} if item % 7 else {}
            row["clicked"] = bool(rng.normal() + likes_I[item] > 1)
            file.write(json.dumps(row) + "\n")
    return folder / "helps.jsonl.gz"


def candidates(folder: Path) -> Path:
    """Lists to rank, without any label or time: the ids of lists and documents are text."""
    rng = np.random.default_rng(7)
    query_N, item_N = _lists(rng, 120, 60)
    items = _items(rng).iloc[item_N].reset_index(drop=True)
    log = pd.DataFrame({"qid": [f"q{q}" for q in query_N], "doc": [f"d{i}" for i in item_N]}).join(items)
    log["score"] = np.round(rng.normal(size=len(log)), 4)
    pq.write_table(pa.Table.from_pandas(log, preserve_index=False), folder / "candidates.parquet")
    return folder / "candidates.parquet"


SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def _shared(*parts: str) -> Callable[[Path], Path]:
    return lambda _: SHARED.joinpath(*parts)


LOGS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "shop": ("made: shuffled CSV, competing ids, broken rows", shop_log),
    "German shop": ("made: `;`, decimal commas, files of weeks, a late column, embeddings", german_shop_log),
    "hotels": ("made: as Expedia's searches", hotels),
    "events": ("made: a row for each view, cart, purchase", events),
    "baskets": ("made: as Ta-Feng's, customers by day", baskets),
    "visits": ("made: visits, names that say nothing", visits),
    "faults": ("made: 12 incidents of 13 parts, 156 rows", faults),
    "help centre": ("made: JSON lines, epochs, camel case", lines),
    "candidates": ("made: Parquet without label or time", candidates),
    "impressions": ("made: Parquet, a row with lists for each impression", impressions),
    "MQ2008": ("LETOR text, a fold's folder", _shared("letor", "MQ2008", "Fold1")),
    "LightGBM's example": ("svmlight text, sizes of groups beside", _shared("letor", "lightgbm-example")),
    "msft-docs": ("CSV, no item, no time", _shared("csv", "msft-docs", "normalized_features.csv.gz")),
    "news": ("Parquet in a folder by hour", _shared("news", "sample")),
    "Cranfield": ("tables of queries, texts, judgements, BM25", _shared("text", "cranfield")),
}
"""Each log's shape and maker."""
