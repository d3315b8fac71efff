"""`Ranker`: the figures of the jobs, the conventions of scikit-learn, tables of every kind, copies, errors."""

import copy
import gc
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from shopping_frames import COLUMNS, searches
from shopping_log import shopping_log
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.utils.validation import check_is_fitted

import ltrscale
from ltrscale import Ranker, bundle, compare, storage
from ltrscale.api import frames
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.scored import committed
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.origin import digest
from ltrscale.progress import log
from ltrscale.scoring.predict import PredictJob
from ltrscale.scoring.score import ScoreJob
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob
from ltrscale.training.pretrain import PretrainConfig, PretrainJob
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.trees.stacking import StackedJob

TRAIN, VALIDATION, NEW = searches(60, 0), searches(20, 1), searches(25, 2)
FEATURES = {"features": ["clicks", "price", "sale"], "categorical": ["kind", "shop"]}
"""The features that a ranker finds by itself, as a config names them."""
TREES: dict[str, dict[str, Any]] = {
    "lightgbm": {"num_trees": 15, "min_data_in_leaf": 5, "per_query": True, "num_threads": 1},
    "xgboost": {"num_trees": 10, "min_child_weight": 0.1, "num_threads": 1},
    "catboost": {"num_trees": 10, "num_threads": 1},
}
SMALL = {"encoder": {"width": 8, "blocks": 1}}
FINETUNE = {"head_epochs": 1, "epochs": 2, "stream": {"docs_per_batch": 100}}
NETWORK: dict[str, Any] = {
    "pretrain": {"network": SMALL, "epochs": 1, "stream": {"docs_per_batch": 200}},
    "finetune": FINETUNE,
}


def trees(library: str = "lightgbm", **arguments: Any) -> Ranker:
    return Ranker(library, settings={"gbdt": TREES[library]}, **arguments)


@pytest.fixture(scope="module")
def fitted() -> Ranker:
    return trees().fit(TRAIN, validation=VALIDATION, **COLUMNS)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables as data sets that `jobs.prepare` made of files: `shop`, and `new` without labels."""
    folder = tmp_path_factory.mktemp("jobs")
    source: dict[str, Any] = {"kind": "items", "columns": {**COLUMNS, **FEATURES}}
    inputs = []
    for name, frame in {"train": TRAIN, "validation": VALIDATION, "new": NEW.drop(columns="bought")}.items():
        frame.to_parquet(folder / f"{name}.parquet")
        inputs.append({"path": str(folder / f"{name}.parquet"), "period": "all" if name == "new" else name})
    shop = PrepareConfig.model_validate({"inputs": inputs[:2], "source": source})
    PrepareJob(out=str(folder / "shop"), prepare=shop).run()
    del source["columns"]["label"]
    new = PrepareConfig.model_validate({"inputs": inputs[2:], "source": source})
    PrepareJob(out=str(folder / "new"), prepare=new).run()
    return folder


def splits(jobs: Path) -> Splits:
    data = (str(jobs / "shop"),)
    return Splits(train=Split(data=data, periods=("train",)), validation=Split(data=data, periods=("validation",)))


def scores_of_jobs(jobs: Path, model: str, out: str) -> list[float]:
    """The scores that `jobs.score` commits of the new table, in the order of its rows."""
    new = str(jobs / "new")
    ScoreJob(out=out, bundle=model, data=new).run()
    found: list[float] = committed(out, Split(data=(new,))).scores_N.tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("library", TREES)
def test_trees_score_as_those_of_the_jobs(library: str, jobs: Path, tmp_path: Path) -> None:
    if library == "catboost":
        pytest.importorskip("catboost")
    settings = {"kind": library, **TREES[library]}
    job = {"out": str(tmp_path / "model"), "splits": splits(jobs), "gbdt": settings}
    GBDTJob.model_validate(job).run()
    ranker = trees(library).fit(TRAIN, validation=VALIDATION, **COLUMNS)
    scores_N = ranker.predict(NEW)
    assert scores_N.tolist() == scores_of_jobs(jobs, str(tmp_path / "model"), str(tmp_path / "scores"))
    assert len(set(scores_N)) > 20
    assert list(ranker.feature_names_in_) == ["price", "clicks", "sale", "shop", "kind"]  # the order of the table
    in_bundle = [feature.name for feature in bundle.load(ranker.bundle_).features]
    assert in_bundle == [*FEATURES["features"], *FEATURES["categorical"]]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simclr_rank", "neural"])
def test_networks_score_as_those_of_the_jobs(method: str, jobs: Path, tmp_path: Path) -> None:
    start, model = str(tmp_path / "pretrained"), str(tmp_path / "model")
    if method == "simclr_rank":
        pretraining = PretrainConfig.model_validate(NETWORK["pretrain"])
        PretrainJob(out=start, train=splits(jobs).train, pretrain=pretraining).run()
    settings = NETWORK if method == "simclr_rank" else {"finetune": {**FINETUNE, "network": SMALL}}
    finetuning = FinetuneConfig.model_validate(settings["finetune"])
    pretrained = start if method == "simclr_rank" else None
    FinetuneJob(out=model, pretrained=pretrained, splits=splits(jobs), finetune=finetuning).run()
    ranker = Ranker(method, settings=settings).fit(TRAIN, validation=VALIDATION, **COLUMNS)
    assert ranker.predict(NEW).tolist() == scores_of_jobs(jobs, model, str(tmp_path / "scores"))


@pytest.mark.slow
def test_pretraining_on_other_rows_is_that_of_the_jobs(jobs: Path, tmp_path: Path) -> None:
    pretraining = PretrainConfig.model_validate(NETWORK["pretrain"])
    start, model = str(tmp_path / "pretrained"), str(tmp_path / "model")
    PretrainJob(out=start, train=Split(data=(str(jobs / "new"),)), pretrain=pretraining).run()
    finetuning = FinetuneConfig.model_validate(FINETUNE)
    FinetuneJob(out=model, pretrained=start, splits=splits(jobs), finetune=finetuning).run()
    unlabelled = {use: column for use, column in COLUMNS.items() if use != "label"}
    ranker = Ranker("simclr_rank", settings=NETWORK).pretrain(NEW.drop(columns="bought"), **unlabelled)
    ranker.fit(TRAIN, validation=VALIDATION, label="bought")
    assert ranker.predict(NEW).tolist() == scores_of_jobs(jobs, model, str(tmp_path / "scores"))
    with pytest.raises(InputError, match=r"Ranker\('lightgbm'\) does not pretrain; choose a pretext objective"):
        trees().pretrain(NEW, **COLUMNS)


@pytest.mark.slow
def test_an_encoder_serves_only_its_own_pretext_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ltrscale.api.estimator.pretrained", lambda *_: None)
    unlabelled = {use: column for use, column in COLUMNS.items() if use != "label"}
    ranker = Ranker("simclr_rank", settings=NETWORK).pretrain(NEW.drop(columns="bought"), **unlabelled)
    ranker.set_params(method="simsiam")
    with pytest.raises(InputError, match=r"Ranker\('simsiam'\): pretrain was called for 'simclr_rank'; call it again"):
        ranker.fit(TRAIN, validation=VALIDATION, label="bought")
    ranker.set_params(method="neural", settings={"finetune": {**FINETUNE, "network": SMALL}})
    assert ranker.fit(TRAIN, validation=VALIDATION, label="bought").predict(NEW).shape == (len(NEW),)


@pytest.mark.slow
def test_the_score_and_the_comparison_are_the_figures_of_the_evaluation(
    fitted: Ranker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = trees("xgboost").fit(TRAIN, validation=VALIDATION, **COLUMNS)
    fewer = trees().fit(TRAIN, validation=VALIDATION, **COLUMNS, exclude=["clicks"])
    rankers = {"a": fitted, "b": other, "c": fewer}
    found = compare(rankers, NEW, out=str(tmp_path), evaluate={"resamples": 200})
    assert "NDCG@5 - a" in capsys.readouterr().out
    assert "NDCG" in (tmp_path / "evaluation" / "report.md").read_text()
    for ranker, method in zip(rankers.values(), found.methods, strict=True):
        for metric in ("ndcg@5", "ndcg@1", "map"):
            mean = method.slices["all"].summaries[metric].mean
            assert clone_fitted(ranker).set_params(metric=metric).score(NEW) == pytest.approx(mean, abs=1e-12)


READ_OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fill": ({}, {"fill": {"numeric": 2.0}}),
    "infinite": ({"infinite": "missing"}, {}),
    "dates": ({}, {**FEATURES, "dates": {"shown": ["weekday", "hour"]}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("apart", READ_OTHERWISE)
def test_rankers_that_read_their_features_otherwise_are_not_compared(
    apart: str, fitted: Ranker, tmp_path: Path
) -> None:
    prepare, uses = READ_OTHERWISE[apart]
    other = trees(prepare=prepare).fit(TRAIN, **COLUMNS, **uses)
    names = {"a": clone_fitted(fitted), "b": other}
    names["a"].splits_ = other.splits_
    with pytest.raises(InputError, match=rf"b reads its features otherwise than a \({apart}.*fit both alike") as error:
        compare(names, NEW, out=str(tmp_path / "out"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_an_array_of_another_width_is_not_compared(tmp_path: Path) -> None:
    X, y, group = TRAIN[["price", "clicks"]].to_numpy(), TRAIN["bought"].to_numpy(), TRAIN["search"]
    array = trees().fit(X, y, group=group)
    with pytest.raises(InputError, match="X has 3 features, but Ranker is expecting 2 features as input"):
        compare({"a": array}, np.column_stack([group.index, X]), y, group=group, out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def clone_fitted(ranker: Ranker) -> Ranker:
    return copy.deepcopy(ranker)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_give_the_network_of_one() -> None:
    streams = {**FINETUNE, "network": SMALL, "stream": {"docs_per_batch": 100, "streams": 2}}
    one, two = (
        Ranker("neural", settings={"finetune": streams}, workers=workers).fit(TRAIN, validation=VALIDATION, **COLUMNS)
        for workers in (1, 2)
    )
    np.testing.assert_allclose(two.predict(NEW), one.predict(NEW), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_scores_follow_the_order_of_the_rows(fitted: Ranker) -> None:
    scores_N = fitted.predict(NEW)
    mixed = NEW.sample(frac=1, random_state=0)
    np.testing.assert_array_equal(fitted.predict(mixed), scores_N[mixed.index])
    assert fitted.score(mixed) == fitted.score(NEW)
    twice = pd.concat([NEW, NEW.assign(search=NEW["search"] + " again")])
    np.testing.assert_array_equal(fitted.predict(twice), np.tile(scores_N, 2))
    assert fitted.predict(NEW.head(0)).shape == (0,)


@pytest.mark.slow
def test_rows_are_explained_by_what_their_scores_differ_in(fitted: Ranker) -> None:
    scores_N = fitted.predict(NEW)
    explained = fitted.explain(NEW)
    assert len(explained) == (NEW.groupby("search").size() > 1).sum()
    rows = NEW.index[NEW["search"] == NEW["search"].iloc[0]][:2].tolist()
    (one,), (other,) = fitted.explain(NEW, (rows[0], rows[1])), fitted.explain(NEW, (rows[1], rows[0]))
    assert one.difference == pytest.approx(scores_N[rows[0]] - scores_N[rows[1]], rel=1e-5)
    assert other.difference == pytest.approx(-one.difference)
    assert {reason.feature for reason in one.reasons} <= {*FEATURES["features"], *FEATURES["categorical"]}
    assert {r.value for each in explained for r in each.reasons if r.feature == "shop"} <= {*NEW["shop"].astype(str)}
    with pytest.raises(InputError, match="no two rows of one query"):
        fitted.explain(NEW, (0, len(NEW) - 1))
    (named,) = fitted.explain(NEW.assign(code=[f"c{i}" for i in range(len(NEW))]), (rows[0], rows[1]), item="code")
    assert (named.item, named.against) == (f"c{rows[0]}", f"c{rows[1]}")


def test_a_table_without_the_query_column_needs_groups(fitted: Ranker) -> None:
    lengths_Q = NEW.groupby("search", sort=False).size()
    without = NEW.drop(columns="search")
    with pytest.raises(InputError, match=r"X has no query column 'search'; give group, or name its column: query="):
        fitted.predict(without)
    for group in (NEW["search"], lengths_Q, lengths_Q.tolist(), NEW["search"].to_numpy()):
        np.testing.assert_array_equal(fitted.predict(without, group=group), fitted.predict(NEW))
    y = NEW["bought"]
    assert fitted.score(without.drop(columns="bought"), y, group=lengths_Q) == fitted.score(NEW)


def test_other_columns_their_order_and_their_types_do_not_matter(fitted: Ranker) -> None:
    other = NEW[NEW.columns[::-1]].assign(more=1.0, shop=NEW["shop"].astype("category"), kind=NEW["kind"].astype(str))
    np.testing.assert_array_equal(fitted.predict(other), fitted.predict(NEW))
    unseen, missing = (fitted.predict(NEW.assign(shop=shop)) for shop in ("west", None))
    np.testing.assert_array_equal(unseen, missing)
    no_price = NEW.assign(price=pd.Series([None] * len(NEW), dtype=object))
    np.testing.assert_array_equal(fitted.predict(no_price), fitted.predict(NEW.assign(price=np.nan)))


DATES = {"dates": {"shown": ["weekday", "hour"]}, "features": ["clicks", "price"], "categorical": ["kind", "shop"]}
CHANGED: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "as they are": lambda rows: rows,
    "the rows of queries apart": lambda rows: rows.sample(frac=1, random_state=0),
    "one query": lambda rows: rows[rows["search"] == rows["search"].iloc[0]],
    "values missing": lambda rows: rows.assign(price=np.nan, kind=None, shown=pd.NaT),
    "an unseen category": lambda rows: rows.assign(shop="west"),
    "other types": lambda rows: rows.astype({"clicks": str, "price": "float32", "shop": "category"}),
}


def test_the_error_of_an_infinite_number_says_how_to_mark_it_missing(fitted: Ranker) -> None:
    rows = searches(3, 9)
    rows.loc[2, "price"] = np.inf
    with pytest.raises(
        InputError,
        match=r'1 of \d+ rows rejected .*: X:3 infinite .*; prepare=\{"infinite": "missing"\} has Ranker read',
    ):
        fitted.predict(rows)
    reader = copy.deepcopy(fitted).set_params(prepare={"infinite": "missing"})
    rows.loc[2, "price"] = np.nan
    expected = fitted.predict(rows)
    rows.loc[2, "price"] = np.inf
    np.testing.assert_array_equal(reader.predict(rows), expected)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGED)
def test_a_small_table_is_scored_in_memory_as_by_prepare(
    change: str, dated: Ranker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = CHANGED[change](NEW)
    if change == "other types":  # numbers as text are no numbers in either way
        with pytest.raises(InputError, match=r"column 'clicks' .* should hold numbers"):
            dated.predict(rows)
        rows = rows.assign(clicks=NEW["clicks"])
    with monkeypatch.context() as patch:
        patch.setattr(frames, "prepared", None)
        at_once = dated.predict(rows)
    monkeypatch.setattr(frames, "_SMALL", 0)
    np.testing.assert_array_equal(at_once, dated.predict(rows))
    assert len(set(at_once)) > 1 or change == "values missing"


@pytest.fixture(scope="module")
def dated() -> Ranker:
    """Trees that see features of dates too."""
    return trees().fit(TRAIN, validation=VALIDATION, **COLUMNS, **DATES)


def test_arrays_stand_for_the_columns_that_were_named(fitted: Ranker) -> None:
    """A label that is left out of the labels would give the answer away."""
    given = trees().fit(TRAIN, TRAIN["bought"], group=TRAIN["search"], **COLUMNS)
    assert list(given.feature_names_in_) == list(fitted.feature_names_in_)


@pytest.mark.slow
def test_counts_that_training_rows_must_have_are_not_asked_of_rows_to_score(fitted: Ranker) -> None:
    counted = trees(prepare={"expect": {"train": {"documents": len(TRAIN)}}})
    counted.fit(TRAIN, validation=VALIDATION, **COLUMNS)
    assert counted.score(NEW) == fitted.score(NEW)
    with pytest.raises(InputError, match=f"expected {len(TRAIN)} documents"):
        counted.fit(TRAIN[TRAIN["search"] != TRAIN["search"].iloc[0]], validation=VALIDATION, **COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["together", "apart"])
def test_queries_of_several_columns_need_not_lie_together(rows: str) -> None:
    frame = TRAIN.assign(user="u", day=TRAIN["search"].str[-1]).drop(columns="search")
    uses = {"query": "user", "within": ["day"], "label": "bought"}
    both = [frame.assign(user=user) for user in ("u", "v")]
    mixed = pd.concat([each if rows == "together" else each.sample(frac=1, random_state=0) for each in both])
    ranker = trees().fit(mixed.dropna(subset=["bought"]), **uses)
    assert np.isfinite(ranker.predict(mixed)).all()


@pytest.mark.slow
def test_a_copy_shares_no_data_and_lasts_as_long_as_it_is_held() -> None:
    ranker = trees().fit(TRAIN, **COLUMNS)
    one, place = copy.copy(ranker), Path(ranker.bundle_)
    assert not hasattr(one, "splits_")
    ranker.fit(TRAIN, **COLUMNS)
    gc.collect()
    assert pickle.loads(pickle.dumps(one)).predict(NEW).tolist() == one.predict(NEW).tolist()
    del one
    gc.collect()
    assert not place.exists(), "a scratch directory lasts as long as the models in it"


def test_a_new_fit_replaces_the_scorer(fitted: Ranker) -> None:
    ranker = clone_fitted(fitted)
    before = ranker.predict(NEW)
    ranker.fit(TRAIN.assign(bought=-TRAIN["bought"] + 2), validation=VALIDATION, **COLUMNS)
    assert not np.array_equal(ranker.predict(NEW), before)
    np.testing.assert_array_equal(clone_fitted(ranker).predict(NEW), ranker.predict(NEW))


def test_a_long_query_is_named_whichever_way_it_is_read(fitted: Ranker) -> None:
    kept = clone_fitted(fitted).set_params(prepare={"max_group": 3})
    with pytest.raises(InputError, match="group_too_long"):
        kept.predict(NEW)


def test_every_row_has_a_score_where_duplicates_were_merged_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    merging = trees(prepare={"duplicates": "max_label"}).fit(TRAIN, validation=VALIDATION, **COLUMNS)
    twice = pd.concat([NEW, NEW])
    at_once = merging.predict(twice)
    assert len(at_once) == len(twice)
    monkeypatch.setattr(frames, "_SMALL", 0)
    np.testing.assert_array_equal(at_once, merging.predict(twice))


ARROW = pa.Table.from_pandas(TRAIN, preserve_index=False)
TABLES: dict[str, Callable[[], Any]] = {
    "arrow": lambda: ARROW,
    "a stream of arrow": lambda: pa.RecordBatchReader.from_batches(ARROW.schema, ARROW.to_batches()),
    "duckdb": lambda: duckdb.from_arrow(ARROW),
    "pandas with an index": lambda: TRAIN.set_index(np.arange(len(TRAIN)) * 2.0),
    "pandas with its own types": TRAIN.convert_dtypes,
    "polars": lambda: pytest.importorskip("polars").from_arrow(ARROW),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TABLES)
def test_every_kind_of_table_gives_the_same_trees(kind: str, fitted: Ranker) -> None:
    ranker = trees().fit(TABLES[kind](), validation=VALIDATION, **COLUMNS)
    assert trained(ranker) == trained(fitted)


def trained(ranker: Ranker) -> tuple[str, bytes]:
    """The hash of the training data, and the model."""
    opened = bundle.load(ranker.bundle_)
    return opened.dataset_hash, opened.content


@pytest.mark.slow
def test_arrays_are_tables_without_names() -> None:
    X = TRAIN[["price", "clicks"]].to_numpy()
    y, group = TRAIN["bought"].to_numpy(), TRAIN.groupby("search", sort=False).size()
    array = trees().fit(X, y, group=group)
    assert list(array.feature_names_in_) == ["1", "2"]
    frame = TRAIN.rename(columns={"price": "1", "clicks": "2"})[["search", "1", "2", "bought"]]
    named = trees().fit(frame, query="search", label="bought")
    assert trained(array)[1] == trained(named)[1]
    np.testing.assert_array_equal(array.predict(X, group=group), named.predict(frame))
    assert array.score(X, y, group=group) == named.score(frame)
    with pytest.raises(InputError, match="X has no query column; give group"):
        array.predict(X)


@pytest.mark.slow
def test_the_held_out_groups_are_labelled_and_whole() -> None:
    ranker = trees(validation_fraction=0.25).fit(TRAIN, **COLUMNS)
    train, validation = (
        select(split, labelled=False).n_groups for split in (ranker.splits_.train, ranker.splits_.validation)
    )
    labelled = TRAIN.loc[TRAIN["bought"].notna(), "search"].nunique()
    assert validation == select(ranker.splits_.validation, labelled=True).n_groups == round(0.25 * labelled)
    assert train + validation == TRAIN["search"].nunique()
    again = trees(validation_fraction=0.25).fit(TRAIN, **COLUMNS)
    other = trees(validation_fraction=0.25, seed=1).fit(TRAIN, **COLUMNS)
    hashes = [select(r.splits_.validation, labelled=True).hash for r in (ranker, again, other)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.slow
def test_a_saved_ranker_is_a_bundle_that_the_jobs_read(fitted: Ranker, jobs: Path, tmp_path: Path) -> None:
    url, scores_N = str(tmp_path / "saved"), fitted.predict(NEW)
    fitted.save(url)
    loaded = Ranker.load(url)
    assert (repr(loaded), loaded.columns_) == (repr(fitted), fitted.columns_)
    np.testing.assert_array_equal(loaded.predict(NEW), scores_N)
    assert loaded.score(NEW) == fitted.score(NEW)
    assert scores_of_jobs(jobs, url, str(tmp_path / "scores")) == scores_N.tolist()
    of_a_job = Ranker.load(fitted.bundle_)
    np.testing.assert_array_equal(of_a_job.predict(NEW, query="search"), scores_N)
    assert of_a_job.score(NEW, query="search", label="bought") == fitted.score(NEW)
    loaded.save(str(tmp_path / "again"))
    assert digest(storage.listed_in(bundle.read_bundle_manifest(url))) == digest(
        storage.listed_in(bundle.read_bundle_manifest(str(tmp_path / "again")))
    )
    with pytest.raises(InputError, match="the output of prepare is there, which train_gbdt would delete"):
        fitted.save(str(jobs / "shop"))


@pytest.mark.slow
def test_a_bundle_of_a_job_reads_raw_rows_as_those_that_it_learnt_from(tmp_path: Path) -> None:
    log = shopping_log(60)
    new = log[log["search_id"].isin([f"s{i}" for i in range(10)])].drop_duplicates(["search_id", "product_id"])
    # fmt: off
    columns: dict[str, Any] = {
        "query": "search_id", "item": "product_id", "label": "event", "time": "searched_at",
        "grades": {"view": 0, "add_to_cart": 1, "purchase": 2}, "time_format": ["%d.%m.%Y %H:%M", "iso"],
        "features": ["price"], "categorical": ["brand"], "dates": {"listed_on": ["days_before", "weekday"]},
        "positions": "position", "meta": ["user_id"],
    }
    # fmt: on
    log.to_csv(tmp_path / "log.csv", index=False)
    new.drop(columns="event").to_csv(tmp_path / "new.csv", index=False)
    rows = {"sort": True, "duplicates": "max_label", "source": {"kind": "items", "columns": columns}}
    data, model, out = (str(tmp_path / name) for name in ("data", "model", "out"))
    prepared = PrepareConfig.model_validate({"inputs": str(tmp_path / "log.csv"), **rows})
    PrepareJob(out=data, prepare=prepared).run()
    weeks = {"train": "2026-W02..2026-W08", "validation": "2026-W09..2026-W11"}
    parts = {name: {"data": data, "periods": periods} for name, periods in weeks.items()}
    GBDTJob.model_validate({"out": model, "splits": parts, "gbdt": TREES["lightgbm"]}).run()
    PredictJob.model_validate({"bundle": model, "inputs": str(tmp_path / "new.csv"), "out": out}).run()
    ranker, raw = Ranker.load(model), pd.read_csv(tmp_path / "new.csv")
    raw["score"] = ranker.predict(raw.drop(columns=["position", "user_id", "product_id"]))
    ranked = pd.read_parquet(out).merge(raw, left_on=["query_id", "item_id"], right_on=["search_id", "product_id"])
    assert len(ranked) == len(raw)
    assert ranked["score_x"].tolist() == ranked["score_y"].tolist()
    assert raw["score"].nunique() > 10
    with pytest.raises(InputError, match="scores do not depend on item, label; leave out what is not read"):
        ranker.predict(raw, query="search_id", item="product_id", time="searched_at", label="event")
    with pytest.raises(InputError, match="tiem: unknown key; did you mean 'time'"):
        ranker.predict(raw, tiem="searched_at")
    grades = new["event"].map(columns["grades"])
    assert ranker.score(new) == ranker.score(new.drop(columns="event"), grades) > 0.5


@pytest.mark.slow
def test_a_copy_outlives_the_original_and_its_scratch() -> None:
    ranker = trees().fit(TRAIN, validation=VALIDATION, **COLUMNS)
    scores_N, place = ranker.predict(NEW), Path(ranker.bundle_)
    copies = [copy.deepcopy(ranker), pickle.loads(pickle.dumps(ranker))]
    assert place.exists()
    del ranker
    gc.collect()
    assert not place.exists()
    for one in copies:
        np.testing.assert_array_equal(one.predict(NEW), scores_N)
        assert bundle.load(one.bundle_).kind == "trees"


@pytest.mark.slow
def test_a_directory_keeps_what_is_up_to_date(tmp_path: Path) -> None:
    def fit(**arguments: Any) -> list[str]:
        written: list[str] = []
        handler = _Listener(written)
        log.addHandler(handler)
        level = log.level
        log.setLevel("INFO")
        try:
            Ranker("simclr_rank", settings=NETWORK, directory=str(tmp_path / "kept"), **arguments).fit(TRAIN, **COLUMNS)
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
        return [line.partition(":")[0] for line in written]

    assert fit() == ["prepare", "pretrain", "finetune"]
    assert fit() == ["prepare"]
    assert fit(seed=1) == ["prepare", "pretrain", "finetune"]


class _Listener:
    """Collects the lines that name a directory which is written."""

    level = 0

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def handle(self, record: Any) -> None:
        if ": writing " in record.getMessage():
            self.lines.append(record.getMessage())


@pytest.mark.slow
def test_a_ranker_whose_files_another_fit_has_replaced_scores_and_is_not_saved(tmp_path: Path) -> None:
    first = Ranker(settings={"gbdt": {"num_trees": 3}}, directory=str(tmp_path / "one")).fit(TRAIN, **COLUMNS)
    scores_N = first.predict(NEW)
    other = Ranker(settings={"gbdt": {"num_trees": 9}}, directory=str(tmp_path / "one")).fit(TRAIN, **COLUMNS)
    assert not np.array_equal(other.predict(NEW), scores_N)
    np.testing.assert_array_equal(first.predict(NEW), scores_N)
    for use in (lambda: first.save(str(tmp_path / "saved")), lambda: pickle.dumps(first)):
        with pytest.raises(InputError, match="another fit has replaced this ranker's files"):
            use()
    with pytest.raises(InputError, match="another fit has replaced this ranker's files"):
        compare({"a": first, "b": other}, NEW.assign(bought=1.0), out=str(tmp_path / "compared"))
    other.save(str(tmp_path / "saved"))


def test_scikit_learn_clones_and_knows_what_is_fitted(fitted: Ranker) -> None:
    fresh = clone(fitted)
    assert fresh.get_params() == fitted.get_params()
    check_is_fitted(fitted)
    with pytest.raises(NotFittedError, match="not fitted"):
        check_is_fitted(fresh)
    assert hasattr(fitted, "feature_importances_")
    assert not hasattr(fresh, "feature_importances_")
    with pytest.raises(InputError, match=r"this Ranker is not fitted; call fit first, or Ranker\.load"):
        fresh.predict(NEW)


@pytest.mark.slow
def test_scikit_learn_searches_and_cross_validates() -> None:
    folds, names = GroupKFold(2), {"query": "search", "label": "bought"}
    labelled = TRAIN.dropna(subset=["bought"])
    grid = {"settings": [{"gbdt": {**TREES["lightgbm"], "num_leaves": leaves}} for leaves in (2, 8)]}
    search = GridSearchCV(trees(), grid, cv=folds).fit(labelled, groups=labelled["search"], **names)
    assert search.best_params_["settings"] in grid["settings"]
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    values = cross_val_score(search.best_estimator_, labelled, groups=labelled["search"], cv=folds, params=names)
    assert values.mean() == pytest.approx(search.best_score_, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("library", TREES)
def test_importances_are_shares_of_the_gain(library: str) -> None:
    if library == "catboost":
        pytest.importorskip("catboost")
    features = {"features": FEATURES["features"], "categorical": ()} if library == "catboost" else FEATURES
    ranker = trees(library).fit(TRAIN, validation=VALIDATION, **COLUMNS, **features)
    found_F = ranker.feature_importances_
    opened = bundle.load(ranker.bundle_)
    expected_F = reference_gains(library, opened.content, len(found_F))
    by_name = dict(zip(ranker.feature_names_in_, found_F, strict=True))
    in_bundle_F = [by_name[feature.name] for feature in opened.features]
    np.testing.assert_allclose(in_bundle_F, expected_F / expected_F.sum(), rtol=1e-5)
    assert by_name["price"] + by_name.get("shop", 0.0) > 0.5


@pytest.mark.slow
def test_importances_are_in_the_order_of_the_columns(tmp_path: Path) -> None:
    rng, group = np.random.default_rng(0), np.full(60, 6)
    X = rng.normal(size=(360, 12))
    y = (X[:, 2] > 0.8).astype(int)
    array = trees().fit(X, y, group=group)
    frame = pd.DataFrame(X, columns=list("zyxwvutsrqpo"))
    table = trees().fit(frame.assign(day=0, search=np.repeat(range(60), 6)), y, query="search", exclude=["day"])
    array.save(str(tmp_path / "saved"))
    for ranker, names in (
        (array, [str(i + 1) for i in range(12)]),
        (table, list(frame.columns)),
        (Ranker.load(str(tmp_path / "saved")), [str(i + 1) for i in range(12)]),
        (copy.deepcopy(table), list(frame.columns)),
    ):
        assert list(ranker.feature_names_in_) == names
        assert ranker.feature_importances_.argmax() == 2
        chosen = SelectFromModel(ranker, prefit=True, max_features=1, threshold=-np.inf)
        assert chosen.get_support(indices=True).tolist() == [2]
        data = [feature.name for feature in bundle.load(ranker.bundle_).features]
        assert data == sorted(names), "the data set has them as jobs.prepare does"


def test_importances_of_a_feature_of_a_date_stand_at_its_column(dated: Ranker) -> None:
    names = ["price", "clicks", "shop", "kind", "shown.weekday", "shown.hour"]
    assert list(dated.feature_names_in_) == names
    assert len(dated.feature_importances_) == len(names)


@pytest.mark.slow
def test_a_stack_has_no_importances(fitted: Ranker, tmp_path: Path) -> None:
    tables = {"train": pa.Table.from_pandas(NEW), "validation": pa.Table.from_pandas(searches(20, 3))}
    data, stacked = str(tmp_path / "data"), str(tmp_path / "stack")
    frames.prepare_tables(tables, {**COLUMNS, **FEATURES}, {}, data)
    parts = {period: {"data": data, "periods": [period]} for period in tables}
    job = {"out": stacked, "members": {"one": {"bundle": fitted.bundle_}}, "splits": parts}
    StackedJob.model_validate({**job, "stack": {"gbdt": TREES["lightgbm"]}}).run()
    assert not hasattr(Ranker.load(stacked), "feature_importances_")
    assert hasattr(Ranker.load(fitted.bundle_), "feature_importances_")


def reference_gains(library: str, model: bytes, n_features: int) -> Any:
    """Gains summed over the splits of the model's own dump; of CatBoost's, the change of the predictions.

    CatBoost's trees are symmetric: two leaves that differ in one bit, with values v, w and weights a, b, differ in one
    split, which changes predictions by `a (v - m)^2 + b (w - m)^2` with the mean `m` of both.
    """
    gains_F = np.zeros(n_features)
    match library:
        case "lightgbm":
            import lightgbm

            waiting = [
                tree["tree_structure"] for tree in lightgbm.Booster(model_str=model.decode()).dump_model()["tree_info"]
            ]
            while waiting:
                node = waiting.pop()
                if "split_feature" in node:
                    gains_F[node["split_feature"]] += node["split_gain"]
                    waiting += [node["left_child"], node["right_child"]]
        case "xgboost":
            import xgboost

            booster = xgboost.Booster(model_file=bytearray(model))
            for tree in booster.get_dump(with_stats=True, dump_format="json"):
                waiting = [json.loads(tree)]
                while waiting:
                    node = waiting.pop()
                    if "gain" in node:
                        gains_F[int(str(node["split"]).removeprefix("f"))] += node["gain"]
                    waiting += node.get("children", [])
        case "catboost":
            import catboost

            booster = catboost.CatBoost()
            booster.load_model(blob=model)
            with tempfile.TemporaryDirectory() as folder:
                booster.save_model(f"{folder}/model.json", format="json")
                dump = json.loads(Path(folder, "model.json").read_text())
            for tree in dump["oblivious_trees"]:
                values, weights = tree["leaf_values"], tree["leaf_weights"]
                for bit, split in enumerate(tree["splits"]):
                    for leaf in range(len(values)):
                        other = leaf | 1 << bit
                        if other != leaf and weights[leaf] + weights[other]:
                            pair, of_pair = [values[leaf], values[other]], [weights[leaf], weights[other]]
                            mean = np.average(pair, weights=of_pair)
                            gains_F[split["float_feature_index"]] += np.dot(of_pair, np.square(pair - mean))
    return gains_F


@pytest.mark.slow
def test_a_network_has_no_importances() -> None:
    ranker = Ranker("neural", settings={"finetune": {**FINETUNE, "network": SMALL}}).fit(TRAIN, **COLUMNS)
    assert not hasattr(ranker, "feature_importances_")


@pytest.mark.slow
def test_auto_chooses_and_its_ranker_is_saved_like_any_other(tmp_path: Path) -> None:
    ranker = Ranker("auto", minutes=0.4, directory=str(tmp_path / "auto")).fit(TRAIN, validation=VALIDATION, **COLUMNS)
    assert bundle.load(ranker.bundle_).kind == "blend"
    (report,) = (tmp_path / "auto" / "fit" / "auto").glob("*-0/leaderboard/report.md")
    scores_N = ranker.predict(NEW)
    assert np.isfinite(scores_N).all()
    ranker.save(str(tmp_path / "saved"))
    np.testing.assert_array_equal(Ranker.load(str(tmp_path / "saved")).predict(NEW), scores_N)
    assert not hasattr(ranker, "feature_importances_")
    again = ranker.set_params(minutes=0.2).fit(TRAIN[TRAIN["price"] > 1], validation=VALIDATION, **COLUMNS)
    assert again.bundle_ != str(report.parents[1] / "final"), "other rows begin another run"
    assert report.exists()


WRONG: dict[str, tuple[Any, str]] = {
    "auto's settings": (
        lambda: Ranker("auto", settings={"gbdt": {"num_trees": 3}}).fit(TRAIN, **COLUMNS),
        r"Ranker\('auto'\) chooses its methods and settings",
    ),
    "a method in the settings": (
        lambda: Ranker("lightgbm", settings={"gbdt": {"kind": "xgboost"}}).fit(TRAIN, **COLUMNS),
        r"Ranker\('lightgbm'\).settings: their kind is that of another method; give it as method",
    ),
    "a depth": (lambda: trees().explain(NEW, depth=1), "depth is 1; give 2 or more"),
    "a method": (
        lambda: Ranker("lightgmb").fit(TRAIN, **COLUMNS),
        "Ranker.method: 'lightgmb'.* did you mean 'lightgbm'",
    ),
    "a far method": (lambda: Ranker("lambdamart").fit(TRAIN, **COLUMNS), "the methods are lightgbm, .* and . more"),
    "a setting": (
        lambda: Ranker(settings={"gbdt": {"num_leafs": 3}}).fit(TRAIN, **COLUMNS),
        r"Ranker\('lightgbm'\).settings: .*num_leafs: unknown key; did you mean .*num_leaves'",
    ),
    "a metric": (lambda: Ranker(metric="ndgc@5").fit(TRAIN, **COLUMNS), "Ranker: metric: "),
    "a share": (lambda: Ranker(validation_fraction=1).fit(TRAIN, **COLUMNS), "Ranker: validation_fraction: "),
    "an argument": (lambda: Ranker().set_params(methd="xgboost"), "no argument 'methd'; did you mean 'method'"),
    "a use": (lambda: trees().fit(TRAIN, **COLUMNS, exlude=["price"]), "exlude: unknown key; did you mean .*exclude'"),
    "a label": (lambda: trees().fit(TRAIN, query="search"), "X has no label column; give y, or name its column"),
    "labels": (lambda: trees().fit(TRAIN, TRAIN["bought"][1:], query="search"), r"y has the shape \(\d+,\), X has"),
    "groups": (lambda: trees().fit(TRAIN, group=[3, 4], label="bought"), r"group fits no \d+ rows; give a query id"),
    "no features": (lambda: trees().fit(TRAIN[["search", "bought"]], **NAMES), "X has no feature among its columns"),
    "one group": (lambda: trees().fit(TRAIN.head(2), **NAMES), "query groups of X have labels, and one must be left"),
    "a query of two columns": (
        lambda: trees().fit(TRAIN, query=["search", "item"], label="bought"),
        "X has no query column",
    ),
    "a series": (lambda: trees().fit(TRAIN["bought"], TRAIN["bought"], group=[len(TRAIN)]), "the rows are no table|X "),
    "inputs": (
        lambda: Ranker(prepare={"source": {"kind": "items"}}).fit(TRAIN, **COLUMNS),
        "prepare: source follow from X and the uses of its columns; leave them out",
    ),
    "nothing to compare": (lambda: compare({}, TRAIN, out="nowhere"), "compare: no rankers; give at least one"),
    "no table": (lambda: trees().fit([1, 2], [0, 1], group=[2]), "X is a list; give a data frame"),
    "two types": (
        lambda: trees().fit(TRAIN.assign(price=[1.5, "free", *TRAIN["price"][2:]]), **COLUMNS),
        "X: .*column price .*; give all values of the column one type",
    ),
    "rows of unequal length": (lambda: trees().fit([[1, 2], [3]], [0, 1], group=[2]), "X: .* sequence"),
    "a validation of two tables": (
        lambda: trees().fit(TRAIN, validation=(VALIDATION, None, None, None), **COLUMNS),
        "validation has 4 parts; give a table",
    ),
    "labels of a validation that X has in a column": (
        lambda: trees().fit(TRAIN, validation=(VALIDATION, VALIDATION["bought"]), **COLUMNS),
        "validation has another label than X, whose label is column 'bought'; name the columns of both",
    ),
    "no labels of a validation": (
        lambda: trees().fit(TRAIN.drop(columns="bought"), TRAIN["bought"], query="search", validation=VALIDATION),
        "validation has no label column; give y",
    ),
    "no rows": (lambda: trees().fit(TRAIN.head(0), **NAMES), "X has no rows; give some"),
    "our own name": (
        lambda: trees().fit(TRAIN.assign(__label__=1), TRAIN["bought"], query="search"),
        "X: column '__label__' has a name that Ranker gives to a column of its own; rename it",
    ),
    "a feature": (
        lambda: trees().fit(TRAIN, validation=VALIDATION.drop(columns="price"), **COLUMNS),
        "validation: .* 'price'",
    ),
}
NAMES = {"query": "search", "label": "bought"}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named_in_one_line(wrong: str) -> None:
    call, message = WRONG[wrong]
    with pytest.raises(InputError, match=message):
        call()


def test_the_package_alone_imports_nothing_else() -> None:
    code = "import sys, ltrscale; assert not {'torch', 'ray', 'lightgbm', 'pyarrow', 'sklearn'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"Ranker", "compare"} == set(ltrscale.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Rankr'"):
        _ = ltrscale.Rankr


D = 16
FLAT = ["price", *(f"emb.{i}" for i in range(D))]


def embedded(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows with a column of vectors, some of them missing, and the same with a column for each of their numbers."""
    emb_ND = np.random.default_rng(len(frame)).normal(size=(len(frame), D)).astype(np.float32)
    emb_ND[::9] = np.nan
    plain = frame[["search", "product", "bought", "price"]]
    lists = pd.Series([None if np.isnan(row).any() else row for row in emb_ND], dtype=object, index=frame.index)
    return plain.assign(emb=lists), plain.assign(**{name: emb_ND[:, i] for i, name in enumerate(FLAT[1:])})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lightgbm", "network", "embedded numbers"])
def test_a_column_of_vectors_is_as_many_columns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranker() -> Ranker:
        if kind == "lightgbm":
            return trees()
        network = {
            **SMALL,
            **({} if kind == "network" else {"numbers": {"kind": "plr", "frequencies": 4, "embedding": 3}}),
        }
        return Ranker("neural", settings={"finetune": {**FINETUNE, "network": network}})

    (lists, flat), (lists_of, flat_of), (new_lists, new_flat) = map(embedded, (TRAIN, VALIDATION, NEW))
    one = ranker().fit(lists, validation=lists_of, **COLUMNS)
    many = ranker().fit(flat, validation=flat_of, features=FLAT, **COLUMNS)
    assert one.columns_["vectors"] == {"emb": D}
    assert [*one.feature_names_in_] == [*many.feature_names_in_] == FLAT
    assert trained(one) == trained(many)
    scores_N = many.predict(new_flat)
    for frame in (new_lists, pytest.importorskip("polars").from_pandas(new_lists)):
        np.testing.assert_array_equal(one.predict(frame), scores_N)
    assert one.score(new_lists) == many.score(new_flat)
    monkeypatch.setattr(frames, "_SMALL", 0)
    np.testing.assert_array_equal(one.predict(new_lists), scores_N)
    np.testing.assert_array_equal(clone_fitted(one).predict(new_lists), scores_N)


@pytest.mark.slow
def test_a_ranker_compares_two_vectors_of_a_row_and_reads_as_jobs_predict_does(tmp_path: Path) -> None:
    train, validation, new = (embedded(each)[0] for each in (TRAIN, VALIDATION, NEW))
    rng = np.random.default_rng(0)
    for frame in (train, validation, new):
        frame["asked"] = [*rng.normal(size=(len(frame), D)).tolist()]
    uses: dict[str, Any] = {**COLUMNS, "features": ["price"], "similarities": {"cosine": [["asked", "emb"]]}}
    ranker = trees().fit(train, validation=validation, **uses)
    assert [*ranker.feature_names_in_] == ["price", "asked.cosine.emb"]
    scores = dict(zip(new["product"], ranker.predict(new), strict=True))
    rows = new.assign(emb=[None if each is None else each.tolist() for each in new["emb"]])
    rows.to_json(tmp_path / "new.jsonl", orient="records", lines=True, double_precision=15)
    PredictJob.model_validate(
        {"bundle": ranker.bundle_, "inputs": [{"path": str(tmp_path / "new.jsonl"), "period": "new"}]}
        | {"out": str(tmp_path / "ranked")}
    ).run()
    (ranked,) = (tmp_path / "ranked").rglob("*.parquet")
    assert pd.read_parquet(ranked).set_index("item_id")["score"].to_dict() == scores
