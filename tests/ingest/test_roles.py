"""The structure of a log's columns, and what it says of their roles."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import nightly
from shop_languages import guessed, looked_at

from ltrscale.data.times import instants
from ltrscale.errors import InputError
from ltrscale.ingest import roles
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.evidence import Candidate
from ltrscale.ingest.guess import guess, row_numbers
from ltrscale.ingest.profile import columns_of
from ltrscale.ingest.structure import KeyLists, Structure, table_structure

codes = st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 4)), min_size=1, max_size=30)


@given(codes)
def test_lists_are_measured_as_by_hand(pairs: list[tuple[int, int]]) -> None:
    key_N, other_N = (np.array(side, np.int64) for side in zip(*pairs, strict=True))
    lists, known = KeyLists.from_codes(key_N), [pair for pair in pairs if pair[0] >= 0]
    of = {key: [other for each, other in known if each == key] for key, _ in known}
    keys = [key for key, _ in known]
    assert lists.distinct == len(of)
    assert lists.runs == sum(before != after for before, after in zip([None, *keys], keys, strict=False))
    several = [others for others in of.values() if len(others) > 1]
    assert lists.paired == pytest.approx(sum(map(len, several)) / max(len(known), 1))
    assert lists.constant(other_N) == pytest.approx(np.mean([len({*each}) == 1 for each in several] or [1.0]))
    valued = [[other for other in others if other >= 0] for others in of.values()]
    total = sum(map(len, valued))
    assert lists.repeats(other_N) == pytest.approx(1 - sum(len({*each}) for each in valued) / total if total else 0.0)


def test_rows_stand_together_or_do_not() -> None:
    assert KeyLists.from_codes(np.repeat(np.arange(50), 4)).together == 1.0
    assert KeyLists.from_codes(np.tile(np.arange(50), 4)).together == 0.0


def test_a_row_without_a_part_of_its_key_is_in_no_list() -> None:
    seen = table_structure(pa.table({"who": ["a", "a", None, "b", "a", "a"], "day": [1, 1, 1, 1, None, 2]}))
    assert seen.joined("who", ["day"]).tolist() == [0, 0, -1, 2, -1, 1]


def test_what_comes_again_without_being_an_item_says_nothing_of_lists() -> None:
    """Shuffled, without times or items: clicks and colors come again in every list."""
    rng = np.random.default_rng(4)
    log = pd.DataFrame({"search_id": np.repeat(np.arange(300), 8), "color": rng.choice(["red", "blue"], 2400)})
    log["clicked"] = (rng.random(len(log)) < 0.3).astype(int)
    found = guessed(log.sample(frac=1, random_state=0))
    assert (found.query.name, found.label and found.label.name, found.item) == ("search_id", "clicked", None)


@pytest.mark.parametrize(
    ("values", "formats"),
    [
        (["1001", "1002", "1399"], ()),
        (["20260105", "20260212", "20251231"], ("%Y%m%d",)),
        ([20260105, 20260212, 20251231], ("%Y%m%d",)),
        ([1767571200, 1767571260, 1767657600], ("iso",)),
        ([5.99, 7.25, 12.5], ()),
        ([True, False], ()),
        (["31.12.2025", "05.01.2026"], ("%d.%m.%Y",)),
        (["2024-05-01"] * 1 + [f"2025-01-{d:02}" for d in range(1, 32)] + ["0000-00-00"], ("iso",)),
        (["2025-01-01", "soon", "later"], ()),
    ],
)
def test_times_are_distinguished_from_ids_and_a_bad_stamp_does_not_count(
    values: list[object], formats: tuple[str, ...]
) -> None:
    [column] = columns_of(pa.table({"at": values}), pa.schema([("at", pa.array(values).type)]), Dialect())
    assert column.formats == formats


def test_bad_values_are_counted_by_rows() -> None:
    stamps = ["2025-01-01"] * 60 + [f"2025-02-{d:02}" for d in range(1, 29)] + ["0000-00-00"] * 12
    [column] = columns_of(pa.table({"at": stamps}), pa.schema([("at", pa.string())]), Dialect())
    assert (column.bad, column.missing) == (0.12, 0.0)
    texts = pa.table({"price": ["1.5", "NULL?", None, "2"]})
    [price] = columns_of(texts, pa.schema([("price", pa.float64())]), Dialect())
    assert (price.bad, price.missing) == (0.25, 0.25)


def visits(rng: np.random.Generator, n: int = 80) -> pd.DataFrame:
    lengths = rng.integers(3, 8, n)
    visit_N = np.repeat(np.arange(n), lengths)
    item_N = np.concatenate([rng.choice(40, length, replace=False) for length in lengths])
    return pd.DataFrame({"u": item_N + 500, "v": visit_N * 7, "w": rng.integers(0, 9, len(visit_N))})


def test_runs_of_equal_values_make_lists_whatever_the_names() -> None:
    found = guessed(visits(np.random.default_rng(0)))
    assert (found.query.name, found.item and found.item.name, found.label) == ("v", "u", None)


def test_a_log_in_which_nothing_makes_lists_is_refused_with_the_nearest() -> None:
    log = pd.DataFrame({"row_id": np.arange(50), "price": np.linspace(1, 2, 50), "n": np.arange(50) % 3})
    with pytest.raises(InputError, match=r"log.csv: no column looks like a query's id; .* nearest, but .*--set query="):
        guessed(log)


def test_the_rarest_of_several_labels_is_taken_while_it_has_lists() -> None:
    rng = np.random.default_rng(1)
    log = visits(rng, 400).rename(columns={"u": "item_id", "v": "search_id"})
    log["clicked"] = (rng.random(len(log)) < 0.3).astype(int)
    log["purchased"] = log["clicked"] * (rng.random(len(log)) < 0.3)
    found = guessed(log)
    assert (found.label and found.label.name, found.choices["label"].doubt) == ("purchased", "clicked is as likely")
    assert "clicked" in found.others
    log["purchased"] *= (np.arange(len(log)) < 20).astype(int)
    assert guessed(log).label.name == "clicked"  # type: ignore[union-attr]


def test_what_follows_the_label_is_no_feature_and_what_came_before_is_one() -> None:
    rng = np.random.default_rng(2)
    log = visits(rng).rename(columns={"u": "item_id", "v": "search_id"})
    log["clicked"] = (rng.random(len(log)) < 0.3).astype(int)
    log["pages_read"] = log["clicked"] * rng.integers(1, 5, len(log))
    log["clicks_30d"] = rng.integers(0, 50, len(log))
    log["cart_rate"] = rng.random(len(log))
    found = guessed(log)
    assert "0 wherever clicked is 0" in found.others["pages_read"]
    assert {"clicks_30d", "cart_rate", "w"} == {column.name for column in found.features}


def test_ids_are_categories_where_they_come_often_and_left_out_where_they_do_not() -> None:
    rng = np.random.default_rng(3)
    log = visits(rng, 300).rename(columns={"u": "item_id", "v": "search_id"})
    log["seller_id"] = log["item_id"] % 11 + 7000
    log["batch_id"] = rng.integers(0, 900, len(log)) + 10_000
    log["shelf_id"] = (log["search_id"] % 9) + 300
    log["user_id"] = log["search_id"] // 21
    found = guessed(log)
    assert {column.name for column in found.categorical} == {"seller_id", "shelf_id"}
    assert [column.name for column in found.meta] == ["user_id"]
    assert "things, each in few rows" in found.others["batch_id"]


def test_a_close_call_is_a_doubt() -> None:
    columns, _ = looked_at(pd.DataFrame({"a": [1], "b": [2]}))
    near = [Candidate(columns[0], 4.0, ()), Candidate(columns[1], 2.6, ())]
    clear = [near[0], Candidate(columns[1], 2.4, ())]
    assert [roles._choose_role(each, least=2.0).doubt for each in (near, clear)] == ["b is as likely", ""]  # type: ignore[union-attr]
    assert roles._choose_role(near, least=5.0) is None


def counted_looks(log: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often two columns are looked at together, or formats of times are tried, in a guess."""
    columns, seen = looked_at(log)
    looks = 0

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal looks
            looks += 1
            return function(*args, **kwargs)

        return counted

    with monkeypatch.context() as patched:
        for name in ("constant", "repeats", "having", "spread"):
            patched.setattr(KeyLists, name, counting(getattr(KeyLists, name)))
        for name in ("joined", "numbers", "seconds"):
            patched.setattr(Structure, name, counting(getattr(Structure, name)))
        patched.setattr("ltrscale.ingest.guess.instants", counting(instants))
        guess(columns, seen, {}, "log.csv")
    return looks


DAYS = pd.Timestamp("2026-01-05") + pd.to_timedelta(np.arange(800) // 32, "D")
MANY: dict[str, Callable[[int], Any]] = {
    "f_": lambda i: np.random.default_rng(i).integers(0, 9, 800),
    "word_": lambda i: np.random.default_rng(i).choice(["red", "blue", "green"], 800),
    "item_id_": lambda i: np.random.default_rng(i).integers(0, 300, 800),
    "event_time_": lambda i: (DAYS + pd.Timedelta(i, "h")).strftime("%Y-%m-%d %H:%M"),
    "listed_date_": lambda i: (DAYS - pd.Timedelta(i, "D")).strftime("%d.%m.%Y"),
    "rank_": lambda _: np.tile(np.arange(8), 100),
    "clicked_": lambda i: (np.random.default_rng(i).random(800) < 0.2).astype(int),
    "price_": lambda i: np.random.default_rng(i).random(800),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind if kind in ("f_", "item_id_", "price_") else nightly(kind) for kind in MANY])
def test_the_work_grows_with_the_columns_and_not_with_their_pairs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "search_id": np.arange(800) // 8,
        "product_id": np.random.default_rng(0).integers(0, 300, 800),
        "searched_at": DAYS.strftime("%Y-%m-%d %H:%M"),
        "label": (np.random.default_rng(1).random(800) < 0.3).astype(int),
    }
    logs = {n: pd.DataFrame(known | {f"{kind}{i}": MANY[kind](i) for i in range(n)}) for n in (0, 40, 70, 100)}
    none, some, more, most = (counted_looks(log, monkeypatch) for log in logs.values())
    assert none < some
    assert most - more <= 1.1 * (more - some) + 20


@pytest.mark.slow
def test_a_thing_is_found_among_many_columns_as_among_few() -> None:
    rng = np.random.default_rng(0)
    item_N = rng.integers(0, 200, 2400)
    few = {"sku": [f"p{i}" for i in item_N], "list": np.repeat(np.arange(300), 8)}
    few |= {
        "title": [f"name {i}" for i in item_N],
        "color": [f"c{i % 5}" for i in item_N],
        "y": rng.integers(0, 2, 2400),
    }
    many = {f"f_{i:03}": rng.integers(0, 50, 2400) for i in range(300)} | few
    found = [guessed(pd.DataFrame(columns), query="list", label="y") for columns in (few, many)]
    assert [each.item.name for each in found if each.item] == ["sku", "sku"]
    assert found[0].choices["item"].best.reasons == found[1].choices["item"].best.reasons


def test_the_remedy_names_a_column_to_a_shell() -> None:
    log = pd.DataFrame({"what is; asked": [0.5, 0.25, 0.125], "b": [1.5, 2.5, 3.5]})
    with pytest.raises(InputError, match=r"name it, as --set 'query=what is; asked'$"):
        guessed(log)


def numbered_log(n_rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "search_id": [f"s{i // 10}" for i in range(n_rows)],
            "product_id": rng.integers(0, 40, n_rows),
            "price": rng.random(n_rows).round(3),
            "clicked": (rng.random(n_rows) < 0.2).astype(int),
        }
    )


@pytest.mark.parametrize(
    ("name", "numbers", "left_out"),
    [
        ("Unnamed: 0", lambda n: np.arange(n)[::-1], True),  # of a frame that was sorted after it was written
        ("", lambda n: np.arange(n) * 3, True),
        ("index", np.arange, True),
        ("index", lambda n: np.arange(n) // 10, False),  # such as one of prices
        ("row_id", lambda n: 1 + np.arange(n), True),
        ("zeile", lambda n: 1 + np.arange(n), True),  # by its 1,000 rows
        ("zeile", lambda n: 5 + np.arange(n), False),  # as times may do
        ("zeile", lambda n: np.arange(n) % 500, False),
    ],
)
def test_what_counts_the_rows_has_no_role(name: str, numbers: Callable[[int], Any], left_out: bool) -> None:
    log = numbered_log(1000)
    log.insert(0, name, numbers(len(log)))
    found = guessed(log)
    assert (found.query.name, found.item and found.item.name) == ("search_id", "product_id")
    reason = found.others.get(name, "")
    assert ("a column without a name" in reason or reason == "the number of the row") == left_out
    assert name not in {each.name for each in found.features} or not left_out


def test_row_numbers_may_begin_again_in_each_file_and_few_rows_prove_nothing() -> None:
    log = numbered_log(1000)
    log["z"] = np.arange(len(log)) % 500
    columns, seen = looked_at(log)
    assert not row_numbers(columns, seen)
    assert [*row_numbers(columns, replace(seen, files=(0, 500)))] == ["z"]
    assert not row_numbers(*looked_at(numbered_log(300).assign(z=np.arange(300))))
    assert row_numbers(*looked_at(numbered_log(300).assign(x=np.arange(300)))) == {"x": "the number of the row"}
