"""A shop's revenue from the raw log to the metric: a gain of its own, which nothing trains on; weights that warn."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import shop
import torch
from numpy.typing import NDArray
from preparing import prepare
from small_trainers import finetune, grow_trees

from ltrscale import storage
from ltrscale.api.estimator import Ranker
from ltrscale.bundle import load
from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits
from ltrscale.data.stream import batches
from ltrscale.data.stream.batches import check_weights, iterate
from ltrscale.derive.relabel import RelabelConfig, RelabelJob
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate import evaluate
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.ingest import validate
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ranking.metrics import gain_ndcg
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.trees.configs import CatBoostConfig, GBDTConfig, LightGBMConfig, XGBoostConfig

COLUMNS = {
    "query": "search_id",
    "item": "product_id",
    "label": "purchased",
    "features": ["text_match", "list_price", "rating", "n_reviews", "sales_30d", "margin"],
    "time": "searched_at",
    "positions": "position",
}
SMALL = {"encoder": {"kind": "resnet", "width": 8, "blocks": 1}}
TREES: list[GBDTConfig] = [
    LightGBMConfig(num_trees=8, num_threads=1),
    XGBoostConfig(num_trees=8, num_threads=1),
    CatBoostConfig(num_trees=8, num_threads=1),
]


@pytest.fixture(scope="module")
def log() -> pd.DataFrame:
    """Searches with a purchase and others; of what was not bought, half has no revenue at all."""
    made = shop.weeks(1, 3, 250, broken=0).reset_index(drop=True)
    made.loc[(made["purchased"] == 0) & (made.index % 2 == 0), "revenue"] = np.nan
    return made


def prepared(log: pd.DataFrame, folder: Path, **columns: str) -> Dataset:
    folder.mkdir(parents=True)
    log.to_csv(folder / "log.csv", index=False)
    source = {"kind": "items", "columns": {**COLUMNS, **columns}}
    config = {"inputs": str(folder / "log.csv"), "source": source, "sort": True, "max_rejected": 0.01}
    return prepare(PrepareConfig.model_validate(config), str(folder / "data"))


def splits_of(dataset: Dataset) -> Splits:
    periods = dict(zip(("train", "validation", "test"), dataset.manifest.periods, strict=True))
    return Splits.model_validate({name: {"data": dataset.url, "periods": each} for name, each in periods.items()})


@pytest.fixture(scope="module")
def datasets(log: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """The log without its revenue, with it as a gain, and with it as a weight."""
    folder = tmp_path_factory.mktemp("shop")
    revenue: dict[str, dict[str, str]] = {"plain": {}, "gain": {"gain": "revenue"}, "weights": {"weights": "revenue"}}
    zero = log.fillna({"revenue": 0})
    return {n: prepared(zero if n == "weights" else log, folder / n, **columns) for n, columns in revenue.items()}


@pytest.fixture(scope="module")
def trees(datasets: dict[str, Dataset], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("trees") / "gbdt")
    grow_trees(TREES[0], splits_of(datasets["gain"]), out)
    return out


def evaluation_of(trees: str, data: Dataset, **settings: Any) -> EvaluateConfig:
    about = {"models": {"gbdt": trees}, "splits": splits_of(data), "resamples": 100, "outliers": {"gap": None}}
    return EvaluateConfig.model_validate({**about, "gains": "column", **settings})


@pytest.mark.slow
def test_revenue_from_the_log_is_the_gain_of_the_metric(
    log: pd.DataFrame, datasets: dict[str, Dataset], trees: str, tmp_path: Path
) -> None:
    config = evaluation_of(trees, datasets["gain"])
    found = evaluate(config, str(tmp_path / "out"), made_by={})
    (batch,) = iterate(select(config.splits.test, labelled=True), docs_per_batch=100_000)
    assert batch.gains_N is not None
    assert batch.labels_N is not None
    week = log[log["search_id"].str.startswith("s03")]
    assert batch.gains_N.nansum().item() == pytest.approx(week["revenue"].sum(), rel=1e-6)
    assert batch.gains_N.isnan().sum().item() == week["revenue"].isna().sum()
    own_N = torch.where(batch.labels_N > 0, batch.gains_N, 0.0)  # what was not bought brought nothing
    expected_Q = gain_ndcg(load(trees).scorer()(batch), own_N, batch.offsets_Q1, k=5)
    summary = found.methods[0].slices["all"].summaries["gain_ndcg@5"]
    assert summary.mean == pytest.approx(expected_Q.nanmean().item())
    assert summary.groups == week.groupby("search_id")["revenue"].max().gt(0).sum()
    assert summary.mean != pytest.approx(found.methods[0].slices["all"].summaries["ndcg@5"].mean, abs=1e-3)
    assert "gain of the column \\`gains\\`, 0 where it has none" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("config", TREES, ids=lambda config: config.kind)
def test_no_trees_learn_from_a_gain(config: GBDTConfig, datasets: dict[str, Dataset], tmp_path: Path) -> None:
    models = {}
    for name, data in datasets.items():
        grow_trees(config, splits_of(data), str(tmp_path / name))
        models[name] = load(str(tmp_path / name)).content
    assert models["gain"] == models["plain"]
    assert models["weights"] != models["plain"]


@pytest.mark.slow
def test_weights_of_0_are_a_warning_before_training_with_the_remedy(
    log: pd.DataFrame,
    datasets: dict[str, Dataset],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "_weight_warnings", {})
    train = {name: select(splits_of(data).train, labelled=True) for name, data in datasets.items()}
    assert [check_weights(train[name]) for name in ("plain", "gain")] == ["", ""]
    with caplog.at_level("WARNING", logger="ltrscale"):
        for number in range(2):  # a search says it once
            grow_trees(TREES[0], splits_of(datasets["weights"]), f"{tmp_path}/{number}")
    week = log[log["search_id"].str.startswith("s01")]
    zeros, n = int((week["purchased"] == 0).sum()), len(week)
    (line,) = [record.message for record in caplog.records if record.message.startswith("weights: ")]
    assert f"{zeros:,} of {n:,} documents ({zeros / n:.1%}) have weight 0, among them all {zeros:,} of label 0" in line
    assert "columns.gain in prepare, not columns.weights" in line


@pytest.mark.slow
def test_networks_are_warned_of_weights_that_they_train_on_and_of_no_others(
    datasets: dict[str, Dataset], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_weight_warnings", {})
    splits = splits_of(datasets["weights"])
    for name, debias in (("plain", None), ("weighed", {"kind": "weights"})):
        settings = {"loss": {"kind": "softmax"}, "debias": debias, "epochs": 1, "head_epochs": 1, "network": SMALL}
        config = FinetuneConfig.model_validate(settings)
        with caplog.at_level("WARNING", logger="ltrscale"):
            finetune(
                config,
                splits.train,
                splits.validation,
                str(tmp_path / name),
                pretrained=None,
                origin={"stage": name},
                report=lambda _: None,
            )
        assert ("have weight 0" in caplog.text) == (debias is not None)


@pytest.mark.slow
@pytest.mark.parametrize(("use", "rule"), [("gain", "bad_gain"), ("weights", "bad_weight")])
def test_a_negative_gain_or_weight_is_a_rejected_row_that_is_named(
    log: pd.DataFrame, tmp_path: Path, use: str, rule: str
) -> None:
    first, second = log.index[log["search_id"] == log.loc[0, "search_id"]][:2]
    wrong = log.copy()
    wrong.loc[first, "revenue"], wrong.loc[second, "revenue"] = -3.5, np.inf
    data, found = prepared(wrong, tmp_path / "wrong", **{use: "revenue"}), f"{use.removesuffix('s')} -3.5"
    assert data.manifest.accounting.rules == {rule: 1, "infinite": 1}
    (file,) = data.manifest.quarantine
    rows = pq.read_table(storage.join(data.url, file)).to_pylist()
    lines = {row["rule"]: (row["line"], row["found"]) for row in rows}
    assert lines[rule] == (first + 2, found)
    assert lines["infinite"][0] == second + 2  # the header is the first line
    with pytest.raises(InputError, match=rf"{rule} 1; .*{found}"):
        prepared(wrong.iloc[:50], tmp_path / "few", **{use: "revenue"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (np.tile([1.0, -1.0], 40), r"bad_weight 40; .*\(weight -1\)"),
        (np.tile([1, -2], 40), r"bad_weight 40; .*\(weight -2\)"),
        (np.tile([1.0, np.inf], 40), "infinite 40; .*weights"),
        (np.zeros(80), "train: all 64 documents have weight 0, so there is nothing to learn"),
    ],
)
def test_a_ranker_refuses_weights_that_are_none(weights: NDArray[np.float64], said: str) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"q": np.repeat(np.arange(20), 4), "price": rng.random(80), "w": weights})
    frame["y"] = (frame["price"] > 0.5).astype(int)
    with pytest.raises(InputError, match=said):
        Ranker("lightgbm").fit(frame, query="q", label="y", weights="w")


@pytest.mark.slow
def test_a_data_set_that_was_prepared_without_the_rule_is_refused(
    log: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "_NOT_NEGATIVE", {})
    data = prepared(log.assign(revenue=-2.0), tmp_path / "log", weights="revenue")
    with pytest.raises(InputError, match="train: a document has weight -2; prepare the data again"):
        check_weights(select(splits_of(data).train, labelled=True))


@pytest.mark.slow
def test_a_relabelled_data_set_keeps_gains_and_random_negatives_have_none(
    datasets: dict[str, Dataset], tmp_path: Path
) -> None:
    def gains_of(url: str) -> list[list[float] | None]:
        files = (Path(url) / file.path for file in open_dataset(url).manifest.files)
        return [gains for file in files for gains in pq.ParquetFile(file).read()["gains"].to_pylist()]

    before = gains_of(datasets["gain"].url)
    negatives = {"kind": "random_negatives", "extra": 2, "replace_unseen": False}
    steps = {"same": {"kind": "labelled_fraction", "fraction": 0.5}, "more": negatives}
    for name, step in steps.items():
        config = RelabelConfig.model_validate({"steps": [step]})
        out = str(tmp_path / name)
        RelabelJob(relabel=config, data=datasets["gain"].url, out=out).work({"stage": "relabel"}, lambda _: None)
        added = [0.0, 0.0] if name == "more" else []
        for old, new in zip(before, gains_of(out), strict=True):
            np.testing.assert_array_equal(new, old and [*old, *added])  # null where no document has one
