"""The grades of a label of words, or of numbers too large to be grades."""

import re
from collections.abc import Mapping, Sequence

from ltrscale.ingest.names import plain_name
from ltrscale.ingest.profile import LogColumn
from ltrscale.ranking.metrics import HIGHEST_LABEL

MOST_GRADES = 32
"""The most distinct values of a label."""

_LEVELS: Sequence[tuple[int, str]] = (
    (
        0,
        r"^(view(ed)?|shown?|impressions?|none|skip(ped)?|ignored?|bad|off_topic|unrelated)$|irrelevan|irrilevan"
        r"|^(not|non|nicht|pas|no|niet|nie)_|^un(passend|wichtig)|^hors_sujet|^nieistotn|^(angezeigt|gezeigt|vue?|visto"
        r"|bekeken|wyswietlon[ey])$|^schlecht$|無関係|関連なし|^不|无关|不相关|^(表示|閲覧|曝光|浏览)$",
    ),
    (
        7,
        r"excellent|(highly|very|extremely|sehr|hoch|tres|muy|molto|muito|zeer|bardzo)_|ausgezeichnet|非常に|高度|非常",
    ),
    (
        3,
        r"partial|partly|somewhat|substitut|moderate|teilweise|ersatz|partiel|parcial|parzial|gedeeltelijk|czesciow|部分",
    ),
    (2, r"complement|marginal|slight|^fair$|^weak|maybe|ergaenz|ausreichend|補完|互补|一般"),
    (1, r"^poor$|^schwach"),
    (
        9,
        r"purchas|^(buy|bought|order|sale|sold)|book(ed|ing)?$|convert|conversion|(^|_)(ge|ver)?kauft?$|bestell|gebucht",
    ),
    (9, r"^achat|^achet|command|^compr|pedido|acquist|gekocht|aankoop|besteld|kupion|zakup|購入|注文|购买|下单|支付"),
    (
        5,
        r"cart|basket|wish|^fav|^save|^like|warenkorb|merk(liste|zettel)|panier|carrit|cesta|carrell|carrinho|winkelwagen",
    ),
    (5, r"koszyk|カート|お気に入り|购物车|加购|收藏"),
    (4, r"click|^open|detail|visit|klick|^cli[cq]|klik|クリック|点击"),
    (8, r"^(exact|perfect|ideal|vital|genau|perfekt|parfait|perfect[oa]|perfett[oa]|perfeit[oa])|完全|完璧"),
    (6, r"^(good|gut|bon|bueno|buono|bom|goed|dobr[ye]|relevant[eo]?|pertinent|trafn[ye]|関連|相关)"),
)
"""The strength of a word, from 0 to 9; the first matching pattern counts."""
_TWO = {
    **dict.fromkeys(("no", "n", "nein", "false", "f", "non", "nao", "nee", "nie", "いいえ", "否", "0", "無"), 0),
    **dict.fromkeys(("yes", "y", "ja", "j", "true", "t", "oui", "si", "sim", "tak", "はい", "是", "1", "有"), 1),
}
_ESCI = {"E": 3, "S": 2, "C": 1, "I": 0}
"""The letters of the shopping queries' judgements: exact, substitute, complement, irrelevant."""


def grades_of(label: LogColumn) -> Mapping[str, float | None] | tuple[float, ...] | None:
    """Grades for a label of words, or of numbers too large to be grades; None for a label that has grades.

    Numeric text has its number as grade, and an unknown word has none.

    Example:
        >>> import pyarrow as pa
        >>> event = LogColumn("event", pa.string(), rows=9, values=("add_to_cart", "view", "purchase"))
        >>> grades_of(event)
        {'view': 0, 'add_to_cart': 1, 'purchase': 2}
    """
    if label.numeric and label.least >= 0 and label.most <= MOST_GRADES:
        return None
    if label.numeric:
        top = max(label.most, 1.0)
        return tuple(dict.fromkeys(float(f"{top * share:.2g}") for share in (0.001, 0.03, 0.3)))
    found = word_grades(label.values)
    known = sorted((grade, value) for value, grade in found.items() if grade is not None)
    return {
        value: found[value] for value in [*(value for _, value in known), *sorted({*found} - {v for _, v in known})]
    }


def word_grades(values: Sequence[str]) -> dict[str, float | None]:
    """A grade for each word, None if it is not known."""
    numbers = {value: _number(value) for value in values}
    if any(number is not None for number in numbers.values()):
        return dict(numbers)
    words = {value: plain_name(value) for value in values}
    for scale in (_TWO, {plain_name(letter): grade for letter, grade in _ESCI.items()}):
        if {*words.values()} <= {*scale}:
            return {value: scale[word] for value, word in words.items()}
    levels = {value: _level(word) for value, word in words.items()}
    ranks = sorted({level for level in levels.values() if level is not None} | {0})  # the least good is still some good
    return {value: None if level is None else ranks.index(level) for value, level in levels.items()}


def are_grades(values: Sequence[str]) -> bool:
    """True if most of some words are known as grades or user actions, and they are not only yes and no."""
    known = [value for value in values if _level(plain_name(value)) is not None]
    return len(known) >= 2 and 2 * len(known) > len(values)


def _level(word: str) -> int | None:
    return next((level for level, pattern in _LEVELS if re.search(pattern, word)), None)


def _number(value: str) -> float | None:
    if not re.fullmatch(r"\d{1,4}([.,]\d+)?", value.strip(), re.ASCII):
        return None
    number = float(value.strip().replace(",", "."))
    whole = int(number)
    return (whole if number == whole else number) if number <= HIGHEST_LABEL else None
