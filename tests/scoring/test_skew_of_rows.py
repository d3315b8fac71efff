"""Skew at predict, on the shop's log: what differs from training is named in one line, and refused on demand."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import shop

from ltrscale import bundle
from ltrscale.bundle.contents import reference_of, sample_of
from ltrscale.config import validate
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.errors import Refused
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.scoring.predict import PredictJob
from ltrscale.scoring.skew import find_skew
from ltrscale.training.combine import CombineJob, FeatureJob
from ltrscale.training.finetune import FinetuneJob
from ltrscale.trees.ensemble import AverageJob
from ltrscale.trees.gbdt import GBDTJob
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


@pytest.mark.parametrize("number", [6, 7, 8, 9])
def test_nothing_is_said_of_a_clean_week(home: Path, tmp_path: Path, said: Any, number: int) -> None:
    predict(home, week(number), tmp_path / "out", refuse=True)
    assert said() == []


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


def test_a_column_without_values_and_a_new_category_are_named(home: Path, tmp_path: Path, said: Any) -> None:
    rows = week(8)
    rows["text_match"] = np.nan
    rows.loc[np.random.default_rng(0).random(len(rows)) < 0.03, "category"] = "kayaks"
    predict(home, rows, tmp_path / "out")
    missing, category = said()
    assert missing == "predict: 2026-W08: text_match: missing in 100% of the documents, in training in 0%"
    assert "category: 3" in category
    assert "have a category that training lacks, most often 'kayaks'; 0% were to be expected" in category


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


def test_only_the_kinds_that_are_named_are_refused(home: Path, tmp_path: Path, said: Any) -> None:
    rows = week(8)
    rows["text_match"] = np.nan
    predict(home, rows, tmp_path / "out", refuse=["category", "range"])
    assert len(said()) == 1
    assert list((tmp_path / "out").rglob("*.parquet"))
    with pytest.raises(Refused, match="text_match: missing"):
        predict(home, rows, tmp_path / "none", refuse=["missing"])


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


def test_few_lists_are_said_to_be_few(home: Path, tmp_path: Path, said: Any) -> None:
    rows = week(8)
    rows = rows[rows["search_id"].isin(rows["search_id"].unique()[:3])]
    predict(home, rows, tmp_path / "out", refuse=True)
    assert said() == ["predict: 2026-W08: 3 lists are too few to compare with training"]


def test_periods_that_are_ranked_already_are_not_named_again(home: Path, tmp_path: Path, said: Any) -> None:
    predict(home, week(13), tmp_path / "out")
    predict(home, week(13), tmp_path / "out", refuse=True)
    assert len(said()) == 1


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


def test_a_few_labels_do_not_shrink_the_reference(home: Path) -> None:
    data = splits(home)
    data["train"]["labelled_groups"] = 40
    job = {"out": str(home / "few"), "splits": data, "gbdt": {"num_trees": 2, "num_threads": 1, "min_data_in_leaf": 5}}
    validate(GBDTJob, job, "test").run()
    few = bundle.load(str(home / "few")).reference
    assert few is not None
    assert few.lists > 40


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
