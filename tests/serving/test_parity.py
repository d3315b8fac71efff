"""Exports of a shop's log: raw rows through the transformer and the model give the scores of jobs.predict."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from exported_models import score_alone
from shop import weeks

from ltrscale import storage
from ltrscale.api.estimator import Ranker
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.scoring.predict import PredictJob
from ltrscale.serving import parity as check
from ltrscale.serving import raw
from ltrscale.serving.export import ExportJob
from ltrscale.trees.gbdt import GBDTJob

pytestmark = pytest.mark.slow
NUMBERS = ["list_price", "margin", "rating", "n_reviews", "text_match", "sales_30d"]
MAPPING = {
    "query": "search_id",
    "item": "product_id",
    "label": "clicked",
    "time": "searched_at",
    "dates": {"listed_on": ["days_before"]},
    "features": NUMBERS,
}
CATEGORIES = ["category", "brand", "device", "in_stock", "seller_id"]


def trained(folder: Path, log: Path, columns: Mapping[str, Any]) -> tuple[str, str]:
    """A data set of a log, and trees of it."""
    prepare = {"inputs": str(log), "sort": True, "max_rejected": 0.05, "source": {"kind": "items", "columns": columns}}
    validate(PrepareJob, {"out": str(folder / "data"), "prepare": prepare}, "test").run()
    data = str(folder / "data")
    splits = {"train": {"data": data, "periods": "2026-W01"}, "validation": {"data": data, "periods": "2026-W02"}}
    gbdt = {"num_trees": 12, "num_threads": 1}
    validate(GBDTJob, {"out": str(folder / "trees"), "splits": splits, "gbdt": gbdt}, "test").run()
    return data, str(folder / "trees")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder with a log and new rows, a data set of the log, and trees of it."""
    folder = tmp_path_factory.mktemp("shop")
    weeks(1, 2, 250).to_csv(folder / "log.csv", index=False)
    weeks(3, 3, 80).to_csv(folder / "new.csv", index=False)
    return folder, *trained(folder, folder / "log.csv", {**MAPPING, "categorical": CATEGORIES})


def test_new_raw_rows_have_the_scores_of_predict(shop: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, data, bundle = shop
    assert ExportJob(out=str(tmp_path / "out"), bundle=bundle, data=data, rows=500).run()
    parity = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert parity["raw"] == {"file": str(folder / "log.csv"), "documents": 500, "largest_difference": 0.0}
    log = pandas.read_csv(folder / "new.csv", dtype=str)
    log["alone"] = score_alone(tmp_path / "out", folder / "new.csv")
    ranked = PredictJob(out=str(tmp_path / "ranked"), bundle=bundle, inputs=str(folder / "new.csv"), max_rejected=0.05)
    ranked.run()
    items = pandas.concat(map(pandas.read_parquet, (tmp_path / "ranked").glob("**/*.parquet")))
    both = items.merge(log, left_on=["query_id", "item_id"], right_on=["search_id", "product_id"])
    assert len(both) == len(items) > 0.9 * len(log)
    np.testing.assert_array_equal(both["alone"], both["score"])
    assert both["score"].nunique() > 50
    assert log["alone"].isna().any()  # of rows that cannot be used


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("/ _DAY)", "/ 86399)", r"row \d+: raw_rows.py makes 'listed_on.days_before' [\d.]+, prepare [\d.]+"),
        ("if _NUMBER.fullmatch(text)", "if False", r"row \d+: raw_rows.py refuses it \(column 'list_price' is not a"),
        ('b"category\\0"', 'b"cat\\0"', r"row \d+: raw_rows.py makes 'category'"),
    ],
)
def test_a_transformer_that_differs_is_not_published(
    old: str, new: str, says: str, shop: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = check.write_raw

    def broken(*given: Any) -> Any:
        files = honest(*given)
        assert old.encode() in files[raw.CODE]
        return {**files, raw.CODE: files[raw.CODE].replace(old.encode(), new.encode())}

    monkeypatch.setattr(check, "write_raw", broken)
    _, data, bundle = shop
    with pytest.raises(InputError, match=says):
        ExportJob(out=str(tmp_path / "out"), bundle=bundle, data=data, rows=500).run()
    assert storage.read_manifest(str(tmp_path / "out")) is None


def test_raw_rows_may_be_named_and_must_be_there(shop: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, data, bundle = shop
    job = ExportJob(out=str(tmp_path / "out"), bundle=bundle, data=data, rows=100, raw=str(folder / "new.csv"))
    assert (job.run(), job.run()) == (True, False)
    assert json.loads((tmp_path / "out" / "parity.json").read_text())["raw"]["file"] == str(folder / "new.csv")
    with pytest.raises(InputError, match="gone"):
        job.replace(raw=str(folder / "gone.csv")).run()


def test_the_time_of_a_query_is_printed(
    shop: tuple[Path, str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ltrscale.serving.parity._QUERIES", 50)
    _, data, bundle = shop
    cores = len(os.sched_getaffinity(0))
    job = ExportJob(out=str(tmp_path / "out"), bundle=bundle, data=data, rows=100, measure=True)
    for made in (True, False):  # also if it is up to date
        caplog.clear()
        with caplog.at_level("INFO", "ltrscale"):
            assert job.run() == made
        (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("measure")]
        number = r"p50 \d+\.\d\d ms, p99 \d+\.\d\d ms"
        assert re.search(rf"one query of 100 documents on one core, 50 times: raw rows to scores {number}; ", line), (
            line
        )
        assert len(os.sched_getaffinity(0)) == cores


@pytest.mark.nightly
def test_medians_fill_what_is_missing_for_an_engine_that_knows_no_missing_value(
    shop: tuple[Path, str, str], tmp_path: Path
) -> None:
    folder, _, _ = shop
    with_missing, bundle = trained(tmp_path / "missing", folder / "log.csv", MAPPING)
    with pytest.raises(InputError, match=r"rating is missing in some documents: let prepare fill them"):
        ExportJob(out=str(tmp_path / "no"), to="elasticsearch", bundle=bundle, data=with_missing, rows=500).run()
    columns = {**MAPPING, "fill": {"rating": "median", "numeric": -1}, "fill_periods": ["2026-W01"]}
    data, bundle = trained(tmp_path, folder / "log.csv", columns)
    manifest = open_dataset(data).manifest
    log = pandas.read_csv(folder / "log.csv", dtype=str)
    usable = log[log["searched_at"].between("2025-12-29", "2026-01-05") & log["search_id"].notna()]
    usable = usable[
        usable["list_price"].ne("NULL?") & usable["purchased"].ne("") & usable["listed_on"].ne("0000-00-00")
    ]
    assert manifest.fills["rating"] == float(np.float32(usable["rating"].astype(float).median()))
    assert manifest.fills["margin"] == -1
    assert not any(summary.missing for summary in manifest.summaries)
    out = str(tmp_path / "out")
    assert ExportJob(out=out, to="elasticsearch", bundle=bundle, data=data, rows=500).run()
    parity = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert (parity["raw"]["documents"], parity["missing"]) == (500, 0)
    assert parity["largest_difference"] < 1e-6
    # later periods and rows that are ranked have the same numbers
    more = {"inputs": str(folder / "new.csv"), "sort": True, "max_rejected": 0.05, "add": True}
    other = {**more, "source": {"kind": "items", "columns": {**columns, "fill": {"numeric": 0}}}}
    with pytest.raises(InputError, match=r"missing values of '\S+' are .* there; prepare with the same fill"):
        validate(PrepareJob, {"out": data, "prepare": other}, "test").run()
    more["source"] = {"kind": "items", "columns": columns}
    validate(PrepareJob, {"out": data, "prepare": more}, "test").run()
    assert open_dataset(data).manifest.fills == manifest.fills
    rows = pandas.read_csv(folder / "log.csv").dropna(subset=["search_id"]).query("list_price != 'NULL?'")
    rows = rows[rows["searched_at"].str.startswith("2026-0") & ~rows["searched_at"].str.contains("-13-")]
    rows = rows[rows["listed_on"] != "0000-00-00"].astype({"list_price": float})
    rows = pandas.concat([rows[rows["rating"].isna()].head(5), rows.head(20)]).drop_duplicates()
    ranker = Ranker.load(bundle)
    filled = rows.assign(rating=rows["rating"].fillna(manifest.fills["rating"]))
    assert rows["rating"].isna().any()
    np.testing.assert_array_equal(ranker.predict(rows), ranker.predict(filled))


@pytest.mark.parametrize("limit", ["_MOST_ROWS", "_MOST_NUMBERS"])
def test_raw_rows_have_the_columns_of_a_table_that_is_too_large_to_lie_beside(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    items = pandas.DataFrame({"item": range(50), "emb": [*rng.normal(size=(50, 4))], "weight": rng.random(50)})
    items.to_parquet(tmp_path / "items.parquet")
    log = {"q": np.arange(400) // 10, "item": rng.integers(0, 50, 400), "y": rng.integers(0, 3, 400)}
    pandas.DataFrame({**log, "week": np.where(log["q"] < 20, "a", "b")}).to_csv(tmp_path / "log.csv", index=False)
    columns = {"query": "q", "item": "item", "label": "y", "period_column": "week", "features": ["weight"]}
    joins = [{"path": str(tmp_path / "items.parquet"), "key": "item", "columns": ["weight", "emb"]}]
    source = {"kind": "items", "columns": {**columns, "vectors": {"emb": 4}}, "joins": joins}
    prepare = {"inputs": str(tmp_path / "log.csv"), "duplicates": "keep_first", "source": source}
    data, model = str(tmp_path / "data"), str(tmp_path / "trees")
    validate(PrepareJob, {"out": data, "prepare": prepare}, "test").run()
    splits = {"train": {"data": data, "periods": "a"}, "validation": {"data": data, "periods": "b"}}
    gbdt = {"num_trees": 5, "min_data_in_leaf": 5}
    validate(GBDTJob, {"out": model, "splits": splits, "gbdt": gbdt}, "test").run()
    monkeypatch.setattr(raw, limit, 10)
    ExportJob(out=str(tmp_path / "export"), bundle=model, data=data).run()
    assert not (tmp_path / "export" / "raw_rows_1.jsonl").exists()
    parity = json.loads((tmp_path / "export" / "parity.json").read_text())
    assert parity["raw"]["documents"] == open_dataset(data).manifest.accounting.rows_in
