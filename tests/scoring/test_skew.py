"""What rows to score have that training had not: known differences are named with their figures, chance is not."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.bundle.contents import Reference
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError
from ltrscale.scoring.skew import Skew, find_skew

FEATURES = [
    *(Feature(name=name) for name in ("price", "sales", "age", "rating", "never", "same")),
    Feature(name="shop", kind="categorical"),
    Feature(name="item", kind="categorical"),
]
PRICE, SALES, AGE, RATING, NEVER, SAME, SHOP, ITEM = range(8)
Rows = NDArray[np.float32]


def some(lists: int, seed: int) -> tuple[Rows, NDArray[np.int64]]:
    """Rows of lists of 1 to 12: a heavy tail, a value for a whole list, missing ones, an open set of items."""
    rng = np.random.default_rng(seed)
    lengths_Q = rng.integers(1, 13, lists)
    n = int(lengths_Q.sum())
    age_Q = np.where(rng.random(lists) < 0.1, np.nan, rng.integers(0, 24, lists))
    columns = [
        rng.lognormal(3, 1, n),
        rng.lognormal(0, 3, n).round(),
        np.repeat(age_Q, lengths_Q),
        np.where(rng.random(n) < 0.4, np.nan, rng.normal(4, 0.5, n)),
        np.full(n, np.nan),
        np.zeros(n),
        np.repeat(rng.integers(1, 9, lists), lengths_Q),
        rng.zipf(1.3, n) % (1 << 20),
    ]
    return np.stack(columns, 1).astype(np.float32), lengths_Q


def groups(rows_NF: Rows, lengths_Q: NDArray[np.int64]) -> QueryGroups:
    return QueryGroups(torch.from_numpy(rows_NF), to_offsets(torch.from_numpy(lengths_Q)))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.of(groups(*some(4000, 0)), FEATURES)


def check(reference: Reference, change: Callable[[Rows], object], lists: int = 400) -> list[Skew]:
    """The findings of further rows with a change made in place."""
    rows_NF, _ = some(lists, 1)
    change(rows_NF)
    return find_skew(reference, rows_NF, lists=lists)


def test_the_reference_is_what_a_slow_count_says(reference: Reference) -> None:
    rows_NF, lengths_Q = some(4000, 0)
    list_N = np.repeat(np.arange(len(lengths_Q)), lengths_Q)
    assert reference.lists == 4000
    for f, feature in enumerate(reference.features):
        known = [float(x) for x in rows_NF[:, f] if x == x]
        assert feature.missing == pytest.approx(1 - len(known) / len(rows_NF))
        if feature.kind == "numeric":
            ordered = sorted(known)
            wanted = [ordered[round(p * (len(known) - 1))] for p in (0, 0.05, 0.5, 0.95, 1)] if known else []
            assert feature.quantiles == pytest.approx(wanted)
            continue
        lists_of: dict[float, set[int]] = {}
        for x, q in zip(rows_NF[:, f].tolist(), list_N.tolist(), strict=True):
            lists_of.setdefault(x, set()).add(q)
        assert feature.codes == tuple(sorted(lists_of))
        alone = sum(len(lists_of[x]) == 1 for x in rows_NF[:, f].tolist())
        assert feature.new == pytest.approx(alone / len(rows_NF))
        assert (feature.new > 0.05) == (f == ITEM)
    assert Reference.model_validate_json(reference.model_dump_json()) == reference


@pytest.mark.parametrize("lists", [1, 5, 40, 1000])
def test_chance_is_not_named(reference: Reference, lists: int) -> None:
    small = Reference.of(groups(*some(30, 7)), FEATURES)
    for seed in range(10, 40):
        rows_NF, _ = some(lists, seed)
        assert find_skew(reference, rows_NF, lists=lists) == []
        assert find_skew(small, rows_NF, lists=lists) == []


def test_the_rows_of_training_are_not_named_whatever_their_order(reference: Reference) -> None:
    rows_NF, lengths_Q = some(4000, 0)
    assert find_skew(reference, rows_NF, lists=4000) == []
    order = np.random.default_rng(0).permutation(len(lengths_Q))
    start = np.cumsum(lengths_Q) - lengths_Q
    shuffled_NF = np.concatenate([rows_NF[start[q] : start[q] + lengths_Q[q]] for q in order])
    assert Reference.of(groups(shuffled_NF, lengths_Q[order]), FEATURES) == reference


def test_a_feature_that_is_missing_in_all_rows_is_named(reference: Reference) -> None:
    def change(x_NF: Rows) -> None:
        x_NF[:, [PRICE, SHOP]] = np.nan

    found = check(reference, change)
    assert {(each.feature, each.kind, each.now, each.training) for each in found} == {
        ("price", "missing", 1.0, 0.0),
        ("shop", "missing", 1.0, 0.0),
    }
    assert str(found[0]) == f"{found[0].feature}: missing in 100% of the documents, in training in 0%"


def test_a_feature_that_is_missing_much_more_often_is_named(reference: Reference) -> None:
    def change(share: float, column: int) -> Callable[[Rows], None]:
        def take(x_NF: Rows) -> None:
            x_NF[np.random.default_rng(3).random(len(x_NF)) < share, column] = np.nan

        return take

    for column, share, named in (
        (PRICE, 0.05, True),
        (RATING, 0.5, True),
        (RATING, 0.05, False),
        (PRICE, 0.004, False),
    ):
        found = check(reference, change(share, column), lists=1000)
        assert [each.kind for each in found] == ["missing"] * named, (column, share)
    (found_,) = check(reference, change(0.5, RATING), lists=1000)
    assert (found_.training, found_.now) == pytest.approx((0.4, 0.7), abs=0.02)


def test_a_new_category_in_two_percent_is_named_by_its_text(reference: Reference) -> None:
    rows_NF, _ = some(1000, 1)
    rows_NF[np.random.default_rng(3).random(len(rows_NF)) < 0.02, SHOP] = 77
    (found,) = find_skew(reference, rows_NF, lists=1000, names={"shop": {"kayaks": 77, "tents": 3}})
    assert (found.feature, found.kind, found.training) == ("shop", "category", 0.0)
    assert found.now == pytest.approx(0.02, abs=0.005)
    assert "'kayaks'" in str(found)
    assert "have a category that training lacks, most often 77;" in str(find_skew(reference, rows_NF, lists=1000)[0])


def test_more_new_items_than_training_lets_expect_are_named(reference: Reference) -> None:
    expected = reference.features[ITEM].new
    rng = np.random.default_rng(5)
    for share, named in ((expected, False), (3 * expected, True)):
        rows_NF, _ = some(400, 1)
        rows_NF[:, ITEM] = 1
        rows_NF[rng.random(len(rows_NF)) < share, ITEM] = (1 << 20) + 5
        assert [each.feature for each in find_skew(reference, rows_NF, lists=400)] == ["item"] * named


@pytest.mark.parametrize(
    ("column", "change", "kind"),
    [
        (PRICE, lambda x_N: x_N * 100, "range"),
        (PRICE, lambda x_N: np.where(np.arange(len(x_N)) % 15 == 0, -9999, x_N), "range"),
        (PRICE, lambda x_N: x_N * 1.6, None),
        (PRICE, lambda x_N: x_N / 100, "range"),
        (SALES, lambda x_N: x_N * 1000 + 1000, "scale"),  # within training's range, whose tail is heavy
        (SALES, lambda x_N: x_N * 2, None),
        (SAME, lambda x_N: x_N + 1, "range"),
        (NEVER, lambda x_N: np.zeros(len(x_N)), None),  # training knows no value, so no range
    ],
)
def test_another_range_or_scale_is_named(
    reference: Reference, column: int, change: Callable[[Rows], Rows], kind: str | None
) -> None:
    rows_NF, _ = some(400, 1)
    rows_NF[:, column] = change(rows_NF[:, column])
    found = find_skew(reference, rows_NF, lists=400)
    assert [(each.feature, each.kind) for each in found] == ([(FEATURES[column].name, kind)] if kind else [])
    if kind == "scale":
        assert found[0].now == pytest.approx(np.median(rows_NF[:, column]))
        assert found[0].training == reference.features[column].quantiles[2]


def test_what_differs_most_comes_first(reference: Reference) -> None:
    rows_NF, _ = some(400, 1)
    rows_NF[::8, SHOP] = 99
    rows_NF[::2, PRICE] = np.nan
    rows_NF[:, SAME] = 5
    assert [each.feature for each in find_skew(reference, rows_NF, lists=400)] == ["same", "price", "shop"]


def test_how_many_lists_it_takes() -> None:
    """The numbers of the module's text."""
    rows_NF = np.arange(10_000, dtype=np.float32)[:, None].repeat(2, axis=1) % 100
    features = [Feature(name="price"), Feature(name="shop", kind="categorical")]
    known = Reference.of(groups(rows_NF, np.ones(10_000, np.int64)), features)
    missing_NF, high_NF, new_NF = (rows_NF[:100].copy() for _ in range(3))
    missing_NF[:, 0] = np.nan
    high_NF[:, 0] = np.where(np.arange(100) % 2, 50, 99)
    new_NF[:2, 1] = 500
    for changed_NF, enough in ((missing_NF, 2), (high_NF, 17), (new_NF, 168)):
        assert find_skew(known, changed_NF, lists=enough - 1) == []
        assert len(find_skew(known, changed_NF, lists=enough)) == 1


def test_rows_of_other_features_are_one_line(reference: Reference) -> None:
    with pytest.raises(InputError, match=r"shape \(3, 2\), and the reference has 8 features; give one column for each"):
        find_skew(reference, np.zeros((3, 2), np.float32), lists=1)
    assert find_skew(reference, np.zeros((0, 8), np.float32), lists=0) == []


def test_findings_are_plain_data(reference: Reference) -> None:
    def cents(x_NF: Rows) -> None:
        x_NF[:, PRICE] *= 100

    (found,) = check(reference, cents)
    assert json.loads(found.model_dump_json()).keys() == {"feature", "kind", "now", "training", "said"}


@pytest.mark.parametrize("fill", [0.0, 4.0, -1.0])
def test_a_value_that_is_filled_in_all_rows_is_named_as_missing(fill: float) -> None:
    def filled(lists: int, seed: int) -> tuple[Rows, NDArray[np.int64]]:
        rows_NF, lengths_Q = some(lists, seed)
        rows_NF[:, RATING] = np.where(np.isnan(rows_NF[:, RATING]), np.float32(fill), rows_NF[:, RATING])
        return rows_NF, lengths_Q

    known = Reference.of(groups(*filled(4000, 0)), FEATURES, {"rating": fill})
    (rating,) = (feature for feature in known.features if feature.name == "rating")
    assert 0.3 < rating.missing < 0.5
    assert rating.quantiles[0] > 1, "the number that fills is no value"
    rows_NF, _ = filled(400, 1)
    assert find_skew(known, rows_NF, lists=400) == []
    for lost in (fill, np.nan):
        rows_NF[:, RATING] = lost
        (found,) = find_skew(known, rows_NF, lists=400)
        assert (found.feature, found.kind, found.now) == ("rating", "missing", 1.0)
        assert str(found).startswith(f"rating: missing, or {fill:g} as where it is missing, in 100% of the documents")
