"""What rows to score have that training had not: known differences are named with their figures, chance is not.

Skew at predict, on the shop's log: what differs from training is named in one line, and refused on demand.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import shop
import torch
from numpy.typing import NDArray

from ltrscale import bundle
from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.bundle.reference import Reference, reference_of, sample_of
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError, Refused
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.scoring.predict import PredictJob
from ltrscale.scoring.skew import Skew, find_skew
from ltrscale.training.combine import CombineJob
from ltrscale.training.finetune import FinetuneJob
from ltrscale.training.untrained import FeatureJob
from ltrscale.trees.gbdt import AverageJob, GBDTJob
from ltrscale.trees.semi import SemiJob
from ltrscale.trees.stacking import StackedJob

SOURCE = {
    "kind": "items",
    "columns": {
        "query": "search_id",
        "item": "product_id",
        "label": "clicked",
        "time": "searched_at",
        "features": ["list_price", "margin", "rating", "n_reviews", "text_match", "sales_30d"],
        "categorical": ["category", "brand", "device", "in_stock"],
    },
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of seven weeks, `data`, and trees, `trees`, trained on the first five."""
    home = tmp_path_factory.mktemp("shop")
    shop.weeks(1, 7, 250).to_csv(home / "log.csv", index=False)
    inputs = {"inputs": str(home / "log.csv"), "sort": True, "max_rejected": 0.1, "source": SOURCE}
    validate(PrepareJob, {"out": str(home / "data"), "prepare": inputs}, "test").run()
    job = {"out": str(home / "trees"), "splits": splits(home), "gbdt": {"num_trees": 3, "num_threads": 1}}
    validate(GBDTJob, job, "test").run()
    return home


def splits(home: Path) -> dict[str, Any]:
    weeks = {"train": "2026-W01..2026-W05", "validation": "2026-W06", "test": "2026-W07"}
    return {name: {"data": str(home / "data"), "periods": periods} for name, periods in weeks.items()}


def week(number: int) -> pd.DataFrame:
    return shop.weeks(number, number, 400, broken=0.0)


def predict(home: Path, rows: pd.DataFrame, out: Path, **settings: Any) -> None:
    rows.to_csv(out.with_suffix(".csv"), index=False)
    job = {"out": str(out), "bundle": str(home / "trees"), "inputs": str(out.with_suffix(".csv")), **settings}
    validate(PredictJob, job, "test").run()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """The lines of skew that were logged so far."""
    caplog.set_level(logging.INFO, "ltrscale")
    return lambda: [m for m in caplog.messages if m.startswith("predict: 2026-") and "training" in m]


@pytest.mark.slow
@pytest.mark.parametrize("number", [6, 7, 8, 9])
def test_nothing_is_said_of_a_clean_week(home: Path, tmp_path: Path, said: Any, number: int) -> None:
    predict(home, week(number), tmp_path / "out", refuse=True)
    assert said() == []


@pytest.mark.slow
def test_week_13_has_its_prices_in_cents(home: Path, tmp_path: Path, said: Any) -> None:
    rows = week(13)
    predict(home, rows, tmp_path / "out")
    (line,) = said()
    assert line.startswith("predict: 2026-W13: list_price: 9")
    assert f"the median is {rows['list_price'].astype(float).median():.4g}, in training 2" in line
    with pytest.raises(Refused, match=r"2026-W13: list_price: .* outside training's range") as refused:
        predict(home, rows, tmp_path / "refused", refuse=True)
    assert str(refused.value).splitlines()[-1].startswith("nothing is ranked; mend the rows, or set refuse=false")
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_a_column_without_values_and_a_new_category_are_named(home: Path, tmp_path: Path, said: Any) -> None:
    rows = week(8)
    rows["text_match"] = np.nan
    rows.loc[np.random.default_rng(0).random(len(rows)) < 0.03, "category"] = "kayaks"
    predict(home, rows, tmp_path / "out")
    missing, category = said()
    assert missing == "predict: 2026-W08: text_match: missing in 100% of the documents, in training in 0%"
    assert "category: 3" in category
    assert "have a category that training lacks, most often 'kayaks'; 0% were to be expected" in category


@pytest.mark.nightly
def test_a_column_without_values_is_named_where_missing_ones_are_filled(home: Path, tmp_path: Path, said: Any) -> None:
    source = {**SOURCE, "columns": {**SOURCE["columns"], "fill": {"rating": "median"}}}
    inputs = {"inputs": str(home / "log.csv"), "sort": True, "max_rejected": 0.1, "source": source}
    validate(PrepareJob, {"out": str(tmp_path / "data"), "prepare": inputs}, "test").run()
    job = {"out": str(tmp_path / "trees"), "splits": splits(tmp_path), "gbdt": {"num_trees": 3, "num_threads": 1}}
    validate(GBDTJob, job, "test").run()
    predict(tmp_path, week(8), tmp_path / "whole", refuse=True)
    predict(tmp_path, week(8).assign(rating=np.nan), tmp_path / "lost")
    (line,) = said()
    assert line.startswith("predict: 2026-W08: rating: missing, or ")
    assert " as where it is missing, in 100% of the documents" in line


@pytest.mark.slow
def test_only_the_kinds_that_are_named_are_refused(home: Path, tmp_path: Path, said: Any) -> None:
    rows = week(8)
    rows["text_match"] = np.nan
    predict(home, rows, tmp_path / "out", refuse=["category", "range"])
    assert len(said()) == 1
    assert list((tmp_path / "out").rglob("*.parquet"))
    with pytest.raises(Refused, match="text_match: missing"):
        predict(home, rows, tmp_path / "none", refuse=["missing"])


@pytest.mark.slow
def test_the_lines_of_a_week_are_ten_and_a_count(home: Path, tmp_path: Path, said: Any) -> None:
    rows = week(8)
    everything = [*SOURCE["columns"]["features"], *SOURCE["columns"]["categorical"]]
    rows[everything] = np.nan
    predict(home, rows, tmp_path / "out")
    assert len(said()) == len(everything) == 10
    rows["rating"] = 1000.0  # another kind, in other weeks
    dates = rows["searched_at"].str.replace("2026-02-", "2026-03-")
    later = rows.assign(searched_at=dates, search_id=rows["search_id"] + "-later")
    for name in ("list_price", "margin", "n_reviews"):
        rows[name] = np.where(np.arange(len(rows)) % 2, 1e9, np.nan)
    with pytest.raises(Refused) as refused:
        predict(home, pd.concat([rows, later]), tmp_path / "two", refuse=True)
    lines = str(refused.value).splitlines()
    assert [line for line in lines if line.endswith("more")] == ["2026-W08: 3 more"]
    assert len(lines) == 10 + 1 + 10 + 1


@pytest.mark.slow
def test_few_lists_are_said_to_be_few(home: Path, tmp_path: Path, said: Any) -> None:
    rows = week(8)
    rows = rows[rows["search_id"].isin(rows["search_id"].unique()[:3])]
    predict(home, rows, tmp_path / "out", refuse=True)
    assert said() == ["predict: 2026-W08: 3 lists are too few to compare with training"]


@pytest.mark.slow
def test_periods_that_are_ranked_already_are_not_named_again(home: Path, tmp_path: Path, said: Any) -> None:
    predict(home, week(13), tmp_path / "out")
    predict(home, week(13), tmp_path / "out", refuse=True)
    assert len(said()) == 1


@pytest.mark.slow
def test_every_bundle_that_scores_records_the_same(home: Path) -> None:
    data, trees = splits(home), str(home / "trees")
    gbdt = {"num_trees": 2, "num_threads": 1}
    small = {"network": {"encoder": {"width": 8, "blocks": 1}}, "head_epochs": 0, "epochs": 1}
    apart = {"train": {**data["train"], "periods": "2026-W06"}, "validation": {**data["train"], "periods": "2026-W07"}}
    validate(GBDTJob, {"out": str(home / "apart"), "splits": apart, "gbdt": gbdt}, "test").run()
    for job, settings in (
        (FinetuneJob, {"finetune": small}),
        (CombineJob, {"bundles": [str(home / "FinetuneJob")], "combine": {"how": "mean"}}),
        (SemiJob, {"semi": {"gbdt": gbdt, "pca": 2}}),
        (AverageJob, {"bundles": [trees, trees]}),
        (StackedJob, {"members": {"trees": {"bundle": str(home / "apart")}}, "stack": {"gbdt": gbdt}}),
        (FeatureJob, {"order": {"feature": "text_match"}}),
    ):
        validate(job, {"out": str(home / job.__name__), "splits": data, **settings}, "test").run()
    wanted = bundle.load(trees).reference
    assert wanted is not None
    assert wanted.lists == select(Split(**data["train"]), labelled=False).n_groups
    for name in ("FinetuneJob", "CombineJob", "SemiJob", "AverageJob", "StackedJob"):
        assert bundle.load(str(home / name)).reference == wanted, name
    of_feature = bundle.load(str(home / "FeatureJob")).reference
    assert of_feature is not None
    assert [f.name for f in of_feature.features] == ["text_match"]


@pytest.mark.slow
def test_a_few_labels_do_not_shrink_the_reference(home: Path) -> None:
    data = splits(home)
    data["train"]["labelled_groups"] = 40
    job = {"out": str(home / "few"), "splits": data, "gbdt": {"num_trees": 2, "num_threads": 1, "min_data_in_leaf": 5}}
    validate(GBDTJob, job, "test").run()
    few = bundle.load(str(home / "few")).reference
    assert few is not None
    assert few.lists > 40


@pytest.mark.slow
def test_nothing_is_said_of_later_lists_of_a_news_log(shared_data: Path, tmp_path: Path) -> None:
    (path,) = (shared_data / "news" / "sample").rglob("*.parquet")
    columns = {"query": "impression_id", "item": "article_id", "label": "clicked", "period_column": "part"}
    columns |= {"features": ["f_*"], "categorical": ["c_*"]}
    rows = pq.ParquetFile(path).read().to_pandas()
    number_N = rows["impression_id"].ne(rows["impression_id"].shift()).cumsum()
    rows["part"] = np.where(number_N <= 700, "before", "after")
    rows.to_parquet(tmp_path / "log.parquet")
    source = {"kind": "items", "columns": columns}
    prepare = {"inputs": str(tmp_path / "log.parquet"), "source": source}
    validate(PrepareJob, {"out": str(tmp_path / "data"), "prepare": prepare}, "test").run()
    before, after = (
        select(Split(data=(str(tmp_path / "data"),), periods=(p,)), labelled=False) for p in ("before", "after")
    )
    groups = sample_of(after)
    assert groups is not None
    assert groups.n_groups > 300
    assert find_skew(reference_of(before), groups.features_NF, lists=groups.n_groups) == []


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
    return Reference.from_groups(groups(*some(4000, 0)), FEATURES)


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


@pytest.mark.slow
@pytest.mark.parametrize("lists", [1, 5, 40, 1000])
def test_chance_is_not_named(reference: Reference, lists: int) -> None:
    small = Reference.from_groups(groups(*some(30, 7)), FEATURES)
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
    assert Reference.from_groups(groups(shuffled_NF, lengths_Q[order]), FEATURES) == reference


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
    known = Reference.from_groups(groups(rows_NF, np.ones(10_000, np.int64)), features)
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

    known = Reference.from_groups(groups(*filled(4000, 0)), FEATURES, {"rating": fill})
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
