"""Roles are the same whatever language a shop names its columns in, and under names that say nothing."""

import functools
import string
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shop_languages import LANGUAGES, guessed, named, searches

from ltrscale.ingest.guess import Guess
from ltrscale.ingest.names import label_points, plain_name, word_grades

made = functools.cache(searches)


def roles_of(found: Guess) -> list[str | None]:
    """The columns of query, time, item, position and label."""
    columns = (found.query, found.time, found.item, found.positions, found.label)
    return [None if column is None else column.name for column in columns]


def used(found: Guess) -> set[str]:
    return {column.name for column in (*found.features, *found.categorical)}


def check(found: Guess, names: Sequence[str]) -> None:
    """Each role has its column, and what users did is no feature."""
    query, time, item, seller, place, clicked, cart, bought = names
    assert roles_of(found) == [query, time, item, place, bought]
    assert not used(found) & {place, clicked, cart, bought}
    assert {"f1", "f2", "f3", "f4", seller} <= used(found)


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_roles_are_the_same_in_ten_languages_and_without_names(language: str, shuffled: bool) -> None:
    log = named(made(0), language)
    found = guessed(log.sample(frac=1, random_state=1) if shuffled else log)
    check(found, LANGUAGES[language])
    if language == "none":
        doubts = {role: choice.doubt for role, choice in found.choices.items() if choice.doubt}
        assert {*doubts} == {"label", "positions"}, "what only structure speaks for is marked"
    else:
        assert found.label.is_label  # type: ignore[arg-type]
        assert {role for role, choice in found.choices.items() if choice.doubt} == {"label"}


nonsense = st.text(string.ascii_lowercase[9:], min_size=3, max_size=6).filter(lambda word: not label_points(word))
eight = st.lists(nonsense, min_size=8, max_size=8, unique_by=plain_name)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(eight, st.integers(0, 3), st.randoms(use_true_random=False))
def test_nonsense_names_and_any_order_of_columns_give_the_same_roles(names: list[str], seed: int, random) -> None:  # type: ignore[no-untyped-def]
    names = [f"{name}{number}" for number, name in enumerate(names)]  # no word of any language
    log = made(seed).rename(columns=dict(zip(LANGUAGES["English"], names, strict=True)))
    order = [*log.columns]
    random.shuffle(order)
    check(guessed(log[order]), names)


@pytest.mark.slow
@pytest.mark.parametrize("language", ["English", "German", "none"])
def test_an_item_of_a_large_catalogue_is_not_taken_for_its_seller(language: str) -> None:
    """Of 60,000 items hardly one comes twice, while a seller comes in many lists and now and then twice in one."""
    log = named(made(2, items=60_000, sellers=900), language)
    names = LANGUAGES[language]
    pairs = log.groupby([names[0], names[3]]).size()
    assert (pairs - 1).sum() > 10, "a seller that would merge rows of different items"
    assert roles_of(guessed(log))[2] == names[2]


def test_what_comes_again_by_chance_is_no_item_and_one_that_is_named_so_is_a_doubt() -> None:
    log = made(1)[["search_id", "position", "seller_no", "purchased", "f1"]]
    assert guessed(log).item is None
    found = guessed(log.rename(columns={"seller_no": "product_id"}))
    assert found.item is not None
    assert "as often as by chance" in found.choices["item"].doubt


JUDGED = (
    "esci_label",
    "relevance_label",
    "median_relevance",
    "judgment",
    "is_relevant",
    "rating",
    "Bewertung",
    "相关度",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", JUDGED)
def test_a_judgement_by_any_usual_name_is_the_label(name: str) -> None:
    rng = np.random.default_rng(0)
    log = made(0)[["search_id", "product_id", "f1", "f2", "f3", "f4"]].copy()
    log[name] = rng.choice([0, 1, 2, 3], len(log), p=[0.4, 0.3, 0.2, 0.1]) if name != "is_relevant" else 0
    log.loc[rng.random(len(log)) < 0.3, name] = 1
    found = guessed(log)
    assert found.label is not None
    assert found.label.name == name


def test_an_item_s_own_rating_or_label_is_a_feature() -> None:
    log = made(0, items=300)[["search_id", "product_id", "f1"]].copy()
    stars_N = log["product_id"] // 17 % 5 + 1
    log["rating"], log["energy_label"] = stars_N, np.array(list("ABCDE"))[stars_N - 1]
    log["clicked"] = (np.random.default_rng(0).random(len(log)) < 0.2).astype(int)
    for each in (log, log.drop(columns="clicked")):
        found = guessed(each)
        assert (found.label and found.label.name) == ("clicked" if "clicked" in each else None)
        assert {"rating", "energy_label"} <= used(found)


@pytest.mark.parametrize("words", [("no", "yes"), (0, 1), (False, True)])
def test_without_a_label_each_flag_is_asked_about(words: tuple[object, object]) -> None:
    log = made(0, items=300)[["search_id", "product_id", "f1", "f2"]].copy()
    flag_N = np.random.default_rng(1).random(len(log)) < 0.6
    log["zz"] = [words[int(flag)] for flag in flag_N]
    found = guessed(log)
    assert found.label is None
    assert {*found.asked} == {"zz"}, "f2 is the item's own"
    assert "0 or 1, and no column looks like a label" in found.asked["zz"]


def test_words_that_grade_are_a_label_by_any_name() -> None:
    rng = np.random.default_rng(0)
    log = made(0, items=300)[["search_id", "product_id", "f1"]].copy()
    log["zz"] = rng.choice(["Exact", "Substitute", "Complement", "Irrelevant"], len(log))
    log["colour"] = rng.choice(["red", "blue", "green"], len(log))
    found = guessed(log)
    assert (found.label and found.label.name) == "zz"
    assert found.choices["label"].doubt


@pytest.mark.parametrize(
    ("words", "grades"),
    [
        ("Exact Substitute Complement Irrelevant", [3, 2, 1, 0]),
        ("E S C I", [3, 2, 1, 0]),
        ("Perfect Excellent Good Fair Bad", [4, 3, 2, 1, 0]),
        ("Exact Partial Irrelevant", [2, 1, 0]),
        ("Exact Partial", [2, 1]),
        ("Highly_Relevant Relevant Partially_Relevant Not_Relevant", [3, 2, 1, 0]),
        ("angezeigt geklickt im_Warenkorb gekauft", [0, 1, 2, 3]),
        ("vu cliqué panier achat", [0, 1, 2, 3]),
        ("浏览 点击 加购 购买", [0, 1, 2, 3]),
        ("ja nein", [1, 0]),
        ("0 1 2.5 10", [0, 1, 2.5, 10]),
        ("3.0 1.0 -", [3, 1, None]),
        ("Exact whatever", [1, None]),
        ("rot blau", [None, None]),
        ("-1 2000 1", [None, None, 1]),
    ],
)
def test_words_have_the_grades_that_they_say_and_unknown_ones_have_none(words: str, grades: list[float | None]) -> None:
    assert [*word_grades(words.split()).values()] == grades


def test_a_place_is_what_counts_the_rows_and_not_what_ranks_the_item() -> None:
    log = made(0)[["search_id", "product_id", "position", "clicked", "f1"]].rename(columns={"position": "rang"})
    log["rank"] = log["product_id"] // 17 % 900  # of sales: the item's own
    assert roles_of(guessed(log))[3] == "rang"
    holes = log.drop(columns="rank").sample(frac=0.97, random_state=0).sort_index()  # some rows are lost
    assert roles_of(guessed(holes.rename(columns={"rang": "w"})))[3] == "w"
