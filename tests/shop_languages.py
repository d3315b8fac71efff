"""A shop's log as shops of ten countries name its columns, and under names that say nothing."""

import numpy as np
import pandas as pd
import pyarrow as pa

from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import Guess, guess
from ltrscale.ingest.profile import LogColumn, columns_of
from ltrscale.ingest.structure import Structure, table_structure

LANGUAGES: dict[str, tuple[str, ...]] = {
    "English": ("search_id", "searched_at", "product_id", "seller_no", "position", "clicked", "in_cart", "purchased"),
    "German": (
        "suchanfrage_id",
        "Zeitpunkt",
        "artikel_nr",
        "verkaeufer_nr",
        "rang",
        "geklickt",
        "im_warenkorb",
        "gekauft",
    ),
    "French": ("id_requête", "date", "id_produit", "id_vendeur", "rang", "cliqué", "au_panier", "acheté"),
    "Spanish": ("id_búsqueda", "fecha", "id_producto", "id_vendedor", "posición", "clic", "en_carrito", "comprado"),
    "Italian": (
        "id_ricerca",
        "data_ricerca",
        "id_prodotto",
        "id_venditore",
        "posizione",
        "cliccato",
        "nel_carrello",
        "acquistato",
    ),
    "Portuguese": ("id_busca", "data", "id_produto", "id_vendedor", "posição", "clicado", "no_carrinho", "comprado"),
    "Dutch": (
        "zoekopdracht_id",
        "tijdstip",
        "artikelnummer",
        "verkoper_nr",
        "positie",
        "geklikt",
        "winkelwagen",
        "gekocht",
    ),
    "Polish": ("id_zapytania", "czas", "id_produktu", "id_sprzedawcy", "pozycja", "kliknięcie", "w_koszyku", "zakup"),
    "Japanese": ("検索ID", "検索日時", "商品ID", "店舗ID", "表示順位", "クリック", "カート追加", "購入"),
    "Chinese": ("搜索ID", "搜索时间", "商品编号", "卖家编号", "排名", "点击", "加入购物车", "购买"),
    "none": ("k7", "z3", "b1", "q9", "m2", "x5", "a4", "d8"),
}
"""Names of the list, its time, the item, its seller, the place, what was clicked, put into the cart and bought."""


def searches(seed: int, lists: int = 400, items: int = 2000, *, sellers: int = 120) -> pd.DataFrame:
    """Searches of some items each, shown in the order of a noisy engine; the columns have the English names.

    Beside the roles stand flags and counts that are known before: of the item, of the day and of the match.
    """
    rng = np.random.default_rng([seed, 7])
    length_Q = rng.integers(5, 16, lists)
    query_N = np.repeat(np.arange(lists), length_Q)
    item_N = np.concatenate([rng.choice(items, length, replace=False) for length in length_Q])
    n, seller_I, worth_I = len(query_N), rng.integers(0, sellers, items), rng.normal(size=items)
    match_N = (rng.random(n) < 0.3).astype(int)
    order = np.lexsort((-(worth_I[item_N] + match_N + rng.normal(0, 1.5, n)), query_N))
    item_N, match_N = item_N[order], match_N[order]
    place_N = np.concatenate([np.arange(1, length + 1) for length in length_Q])
    wanted_N = worth_I[item_N] + match_N + rng.normal(size=n)
    clicked_N = (wanted_N > 0.6) & (rng.random(n) < place_N**-0.6)
    cart_N = clicked_N & (rng.random(n) < 0.5)
    at_Q = pd.Timestamp("2026-01-05") + pd.to_timedelta(np.sort(rng.integers(0, 40 * 86_400, lists)), "s")
    return pd.DataFrame(
        {
            "search_id": 70_000 + query_N * 3,
            "searched_at": at_Q.strftime("%Y-%m-%d %H:%M:%S")[query_N],
            "product_id": 5_000_000 + item_N * 17,
            "seller_no": 4000 + seller_I[item_N],
            "position": place_N,
            "clicked": clicked_N.astype(int),
            "in_cart": cart_N.astype(int),
            "purchased": (cart_N & (rng.random(n) < 0.6)).astype(int),
            "f1": np.round(np.exp(worth_I[item_N]) * 20, 2),
            "f2": (item_N % 7 == 0).astype(int),
            "f3": rng.integers(0, 400, n),
            "f4": (rng.random(items) < 0.9).astype(int)[item_N],
        }
    )


def named(log: pd.DataFrame, language: str) -> pd.DataFrame:
    """The log with the names of a language."""
    return log.rename(columns=dict(zip(LANGUAGES["English"], LANGUAGES[language], strict=True)))


def looked_at(log: pd.DataFrame) -> tuple[list[LogColumn], Structure]:
    """The columns of a log in memory, and their structure."""
    table = pa.Table.from_pandas(log, preserve_index=False)
    return columns_of(table, table.schema, Dialect()), table_structure(table)


def guessed(log: pd.DataFrame, **given: str) -> Guess:
    """What `jobs.init` makes of the columns of a log in memory."""
    columns, seen = looked_at(log)
    return guess(columns, seen, given, "log.csv")
