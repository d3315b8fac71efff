"""A German shop's log as its team has it, for walks from raw files to weekly training: python tests/german_shop.py OUT.

It writes `logs/2026-W01.csv` to `W11.csv` and, outside that folder, `2026-W12.csv` and `2026-W13.csv`, the weeks that
come after. It is the log of `shop` as such a team would export it: `;` between fields, decimal commas, cp1252, days as
31.12.2025, `ja` and `nein`; German names of columns, a seller's number that comes again in every list, a discount that
is logged from week 6 on, a picture's embedding as a list in brackets, revenue in cents. One search in ten has no click.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import shop

DISCOUNT_FROM = 6
"""The first week whose file has the column `rabatt`."""
SIZE = 8
"""Numbers of an embedding."""
_NAMES = {
    "session_id": "sitzung_nr",
    "search_id": "such_nr",
    "user_id": "kunde_nr",
    "searched_at": "gesucht_am",
    "product_id": "artikel_nr",
    "item_name": "bezeichnung",
    "category": "warengruppe",
    "brand": "marke",
    "seller_id": "verkaeufer_nr",
    "list_price": "preis",
    "margin": "marge",
    "rating": "bewertung",
    "n_reviews": "anz_bewertungen",
    "listed_on": "eingestellt_am",
    "device": "geraet",
    "in_stock": "lieferbar",
    "text_match": "treffer_guete",
    "sales_30d": "verkauft_30_tage",
    "position": "rang",
    "page_seconds": "verweildauer",
    "clicked": "geklickt",
    "added_to_cart": "in_warenkorb",
    "purchased": "gekauft",
    "revenue": "umsatz_cent",
}
_GROUPS = ("Zelte", "Lampen", "Stiefel", "Jacken", "Rucksäcke", "Kocher", "Seile", "Karten")


def week(number: int, searches: int, *, seed: int = 0) -> pd.DataFrame:
    """So many searches of a week of 2026, the numbers as numbers; a search's rows stand together."""
    log = shop.weeks(number, number, searches, broken=0, seed=seed)
    log = log.sort_values(["searched_at", "search_id", "position"], kind="stable").reset_index(drop=True)
    rng = np.random.default_rng([seed, number, 3])
    log = _with_clicks(log, rng)
    for name, form in {"searched_at": "%d.%m.%Y %H:%M:%S", "listed_on": "%d.%m.%Y"}.items():
        log[name] = pd.to_datetime(log[name], errors="coerce").dt.strftime(form)
    log["in_stock"] = log["in_stock"].map({"true": "ja", "false": "nein"})
    log["category"] = log["category"].map(dict(zip(shop._CATEGORIES, _GROUPS, strict=True)))
    log["list_price"] = log["list_price"].astype(float)
    log["revenue"] = np.round(100 * log["list_price"] * log["purchased"].astype(float)).astype(int)
    log["bild_vektor"] = _embeddings(log)
    if number >= DISCOUNT_FROM:
        log["rabatt"] = np.where(rng.random(len(log)) < 0.3, rng.integers(1, 8, len(log)) * 5, 0)
    return log.rename(columns=_NAMES)


def write(log: pd.DataFrame, path: Path) -> Path:
    """A week as a CSV file that Excel opens in Germany."""
    log.to_csv(path, sep=";", decimal=",", index=False, encoding="cp1252")
    return path


def _with_clicks(log: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """The log with a click on the first place of most searches without one, so that one in ten has none."""
    clicks_N = log.groupby("search_id")["clicked"].transform("sum")
    none_N = clicks_N == 0
    silent = log.loc[none_N, "search_id"].unique()
    wanted = max(0, len(silent) - log["search_id"].nunique() // 10)
    chosen = rng.choice(silent, wanted, replace=False)
    first_N = ~log["search_id"].duplicated() & log["search_id"].isin(chosen)
    return log.assign(clicked=np.where(first_N, 1, log["clicked"]))


def _embeddings(log: pd.DataFrame) -> list[str]:
    """A picture's embedding for each row: its group's direction and the article's own."""
    group_N = log["category"].map({name: i for i, name in enumerate(_GROUPS)}).to_numpy()
    article_N = log["product_id"].str[1:].astype(int).to_numpy() - 100_000
    rng = np.random.default_rng(5)
    groups, articles = rng.normal(0, 1, (len(_GROUPS), SIZE)), rng.normal(0, 0.5, (article_N.max() + 1, SIZE))
    return [str(vector.round(4).tolist()) for vector in groups[group_N] + articles[article_N]]


def main(out: Path, searches: int) -> None:
    """Write the first 11 weeks, and each of the next two."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    for number in range(1, 14):
        folder = out / "logs" if number <= 11 else out
        write(week(number, searches), folder / f"2026-W{number:02d}.csv")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the files")
    parser.add_argument("--searches", type=int, default=300, help="searches a week")
    arguments = parser.parse_args()
    main(arguments.out, arguments.searches)
