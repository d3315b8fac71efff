"""`jobs.init`: from a log as it lies to configs that run."""

import re
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nightly import nightly
from shopping_log import shopping_log

from ltrscale import bundle
from ltrscale.config import load
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError
from ltrscale.experiments.auto.auto import AutoJob
from ltrscale.experiments.first.init import InitJob
from ltrscale.experiments.methods.single import NeuralMethod
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.experiments.refit import RefitSettings
from ltrscale.experiments.study import StudyJob
from ltrscale.ingest.prepare import PrepareJob


def start(path: Path, **settings: Any) -> PrepareJob:
    """The config that `jobs.init` writes for a file, with paths below the file's folder."""
    out = path.parent / "out"
    InitJob(file=str(path), out=str(out), **settings).run()
    return load(PrepareJob, str(out / "prepare.yaml"))


@pytest.mark.slow
def test_a_log_gives_configs_that_run(tmp_path: Path) -> None:
    log = shopping_log()
    log.to_csv(tmp_path / "shop.csv", index=False)
    job = start(tmp_path / "shop.csv")
    columns = job.prepare.source.columns.model_dump(exclude_defaults=True)  # type: ignore[union-attr]
    assert columns == {
        "query": "search_id",
        "item": "product_id",
        "label": "event",
        "grades": {"view": 0, "add_to_cart": 1, "purchase": 2},
        "time": "searched_at",
        "time_format": ("%d.%m.%Y %H:%M", "iso"),
        "positions": "position",
        "clicks": "clicked",
        "gain": "revenue",
        "meta": ("user_id",),
        "features": ("price", "in_stock"),
        "categorical": ("brand",),
        "dates": {"listed_on": ("days_before",)},
    }
    text = (tmp_path / "out" / "prepare.yaml").read_text()
    for name, reason in {
        "shop": "the same value in every row",
        "title": "text",
    }.items():
        assert f"# not used: {name}, {reason}" in text
    assert (job.prepare.sort, job.prepare.duplicates) == (True, "max_label")
    job.run()
    manifest = open_dataset(job.out).manifest
    assert manifest.accounting.rows_rejected == 0
    grades = log["event"].map({"view": 0, "add_to_cart": 1, "purchase": 2})
    best = grades.groupby([log["search_id"], log["product_id"]]).max()
    assert manifest.label_counts == {f"{y:g}": n for y, n in best.value_counts().sort_index().items()}
    pipeline = load(PipelineJob, str(tmp_path / "out" / "pipeline.yaml"))
    assert pipeline.data == job.out
    periods = [pipeline.splits.train.periods, pipeline.splits.validation.periods, pipeline.splits.test.periods]
    assert periods == [("2026-W02..2026-W09",), ("2026-W10",), ("2026-W11",)]
    without = load(PipelineJob, str(tmp_path / "out" / "pipeline.yaml"), ["methods.pretrained=null"])
    assert [*without.methods] == ["trees", "scratch"]
    scratch, pretrained = (pipeline.methods[name] for name in ("scratch", "pretrained"))
    assert isinstance(scratch, NeuralMethod)
    assert isinstance(pretrained, NeuralMethod)
    assert pretrained.pretrain is not None
    assert scratch.finetune.network == pretrained.pretrain.network, "only pretraining makes the difference"
    final = tmp_path / "final.yaml"
    final.write_text((tmp_path / "out" / "pipeline.yaml").read_text().replace("# refit:", "refit:"))
    assert load(PipelineJob, str(final)).refit == RefitSettings(methods=("trees",))


@pytest.mark.slow
@pytest.mark.parametrize(("searches", "study"), [nightly(400, True), (60, False)])
def test_how_long_the_pipeline_takes_and_why_there_is_no_study_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, searches: int, study: bool
) -> None:
    caplog.set_level("INFO")
    log = shopping_log(searches)
    log.to_csv(tmp_path / "shop.csv", index=False)
    start(tmp_path / "shop.csv")
    written = {path.stem: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert ("pipeline" in written, "study" in written) == (True, study)
    differ = int((log.groupby("search_id")["event"].nunique() > 1).sum())
    takes = "pipeline.yaml: About 1 minute on two cores (trees 0.0, "
    assert any(message.startswith(f"init: {takes}") for message in caplog.messages)
    why = "init: study.yaml: from how many " if study else f"init: no study.yaml: {differ} queries whose labels differ"
    assert any(message.startswith(why) for message in caplog.messages)
    assert not any("next: python -m jobs.study" in message for message in caplog.messages), "it is no step of the way"
    if study:
        config = load(StudyJob, str(tmp_path / "out" / "study.yaml"))
        assert config.grid[0].labelled == (100,)
        assert (config.data, config.splits.test.periods) == (str(tmp_path / "out" / "data"), ("2026-W11",))


@pytest.mark.nightly
def test_the_pipeline_that_is_written_runs_on_numbers_of_any_scale(tmp_path: Path) -> None:
    log = shopping_log()
    log["views"] = np.random.default_rng(0).lognormal(0, 8, len(log))
    log["margin"] = np.where(log["in_stock"] == "true", -999.0, log["price"] * 1e9)
    log.to_csv(tmp_path / "shop.csv", index=False)
    job = start(tmp_path / "shop.csv")
    assert {"views", "margin"} <= {*job.prepare.source.columns.features}  # type: ignore[union-attr]
    job.run()
    few = [
        "methods.pretrained.pretrain.epochs=1",
        "methods.pretrained.finetune.epochs=1",
        "methods.scratch.finetune.epochs=1",
        "methods.trees.gbdt.num_trees=5",
    ]
    load(PipelineJob, str(tmp_path / "out" / "pipeline.yaml"), few).run()
    report = (tmp_path / "out" / "models" / "evaluation" / "report.md").read_text()
    assert all(f"\n| {name} " in report for name in ("trees", "scratch", "pretrained"))


@pytest.mark.nightly
def test_a_search_engine_s_score_is_the_baseline_and_the_stack_rises_with_it(tmp_path: Path) -> None:
    rng, log = np.random.default_rng(0), shopping_log()
    log["bm25 (title)"] = rng.gamma(2, 3, len(log)).round(4)
    log["BM25"] = (log["bm25 (title)"] + 4 * log["clicked"] + rng.gamma(2, 3, len(log))).round(4)
    log.to_csv(tmp_path / "shop.csv", index=False)
    start(tmp_path / "shop.csv").run()
    few = [f"methods.{name}.finetune.epochs=2" for name in ("scratch", "pretrained")]
    few += ["methods.trees.gbdt.num_trees=5", "methods.stack.stack.gbdt.num_trees=20", "evaluate.resamples=200"]
    few += ["methods.pretrained.pretrain.epochs=1", "methods.stack.stack.folds=2"]
    pipeline = load(PipelineJob, str(tmp_path / "out" / "pipeline.yaml"), few)
    assert pipeline.evaluate.baseline == "engine"
    pipeline.run()
    models = {name: bundle.load(f"{pipeline.out}/seed-0/{name}/model") for name in ("engine", "stack")}
    assert [feature.name for feature in models["engine"].features] == ["BM25"]
    trees = lightgbm.Booster(model_str=models["stack"].content.decode())
    columns_NC = rng.normal(size=(500, trees.num_feature())) * 5
    assert trees.num_feature() == 3
    before_N = trees.predict(columns_NC)
    assert before_N.std() > 0
    for column in range(3):
        after_N = trees.predict(columns_NC + 2.0 * (np.arange(3) == column))
        assert (after_N >= before_N).all()
        assert (after_N > before_N).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("export.json.d/shop.csv", {"sep": ";", "decimal": ",", "encoding": "cp1252"}),
        ("shop.csv", {"sep": "|", "encoding": "utf-16"}),
        nightly("shop.tsv.gz", {"sep": "\t"}),
        nightly("shop.jsonl", None),
        ("shop.parquet", None),
    ],
)
def test_the_guess_is_the_same_however_the_log_is_written(
    tmp_path: Path, name: str, options: dict[str, str] | None
) -> None:
    log = shopping_log()
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if options is not None:
        log.to_csv(path, index=False, **options)  # type: ignore[call-overload]
    elif path.suffix == ".parquet":
        log.to_parquet(path, index=False)
    else:
        log.to_json(path, orient="records", lines=True)
    job = start(path)
    plain = tmp_path / "plain"
    plain.mkdir()
    log.to_csv(plain / "shop.csv", index=False)
    found, expected = (
        one.prepare.source.columns.model_dump(exclude={"delimiter", "decimal", "encoding"})  # type: ignore[union-attr]
        for one in (job, start(plain / "shop.csv"))
    )
    extra = {"features": (*found.pop("features"),), "categorical": (*found.pop("categorical"),)}
    # the words true and false are a category where the format says that they are text
    assert {*extra["features"], *extra["categorical"]} == {*expected.pop("features"), *expected.pop("categorical")}
    assert found == expected
    job.run()
    assert open_dataset(job.out).manifest.accounting.rows_rejected == 0


@pytest.mark.slow
def test_a_single_day_is_no_range_and_no_date_of_yaml(tmp_path: Path) -> None:
    log = shopping_log(60)
    days = {f"{1 + i % 3:02}.02.2026": i for i in range(3)}
    queries = log["search_id"].str.removeprefix("s").astype(int) % 3
    log["searched_at"] = queries.map(dict(zip(days.values(), days, strict=True))) + " 12:00"
    log.drop(columns="listed_on").to_csv(tmp_path / "shop.csv", index=False)
    start(tmp_path / "shop.csv")
    splits = load(PipelineJob, str(tmp_path / "out" / "pipeline.yaml")).splits
    assert splits.test is not None
    periods = [split.periods for split in (splits.train, splits.validation, splits.test)]
    assert periods == [("2026-02-01",), ("2026-02-02",), ("2026-02-03",)]


def small_log(time_format: str, date_format: str, *, minutes: int = 5 * 24 * 60, apart: int = 0) -> pd.DataFrame:
    """Searches of five rows, `minutes` from one to the next and `apart` from row to row, with the dates of items."""
    rng = np.random.default_rng(0)
    listed = pd.Timestamp("2025-01-01") + pd.to_timedelta(rng.integers(0, 300, 30), "D")
    rows = []
    for query in range(60):
        at = pd.Timestamp("2026-01-05 08:00") + pd.Timedelta(query * minutes, "m")
        for i, item in enumerate(rng.choice(30, 5, replace=False)):
            shown = (at + pd.Timedelta(i * apart, "m")).strftime(time_format)
            date = listed[item].strftime(date_format)
            rows.append((f"s{query}", f"i{item}", shown, date, round(float(rng.random()), 3), int(i == query % 5)))
    names = ["search_id", "item_id", "event_time", "listed_date", "price", "clicked"]
    return pd.DataFrame(rows, columns=names)


@pytest.mark.slow
def test_the_formats_of_all_times_are_tried_in_an_order_that_reads_each(tmp_path: Path) -> None:
    log = small_log("%Y-%m-%d %H:%M:%S", "%Y%m%d")
    log.to_csv(tmp_path / "log.csv", index=False)
    job = start(tmp_path / "log.csv")
    columns = job.prepare.source.columns  # type: ignore[union-attr]
    assert columns.time_format == ("%Y%m%d", "iso")
    assert columns.dates == {"listed_date": ("days_before",)}  # type: ignore[union-attr]
    job.run()
    manifest = open_dataset(job.out).manifest
    days = (pd.to_datetime(log["event_time"]) - pd.to_datetime(log["listed_date"])) / pd.Timedelta(1, "D")
    [summary] = [s for f, s in zip(manifest.features, manifest.summaries, strict=True) if f.name.startswith("listed")]
    assert (summary.minimum, summary.maximum) == pytest.approx((days.min(), days.max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("time_format", "date_format", "read"),
    [
        ("%d/%m/%Y", "%m/%d/%Y", False),
        ("%m/%d/%Y %H:%M", "%d/%m/%Y %H:%M", False),
        ("%d/%m/%Y %H:%M", "%m/%d/%Y", True),
        ("%d.%m.%Y", "%m/%d/%Y", True),
    ],
)
def test_a_date_that_the_format_of_the_time_would_misread_is_left_out_with_the_reason(
    tmp_path: Path, time_format: str, date_format: str, read: bool
) -> None:
    log = small_log(time_format, date_format)
    log.to_csv(tmp_path / "log.csv", index=False)
    job = start(tmp_path / "log.csv")
    columns = job.prepare.source.columns  # type: ignore[union-attr]
    formats = (time_format, date_format) if read else (time_format,)
    assert columns.time_format == formats
    assert [*columns.dates] == ["listed_date"] * read  # type: ignore[union-attr]
    reason = f"# not used: listed_date, a date in {date_format}, which {time_format} of event_time reads as another one"
    assert (reason in (tmp_path / "out" / "prepare.yaml").read_text()) == (not read)
    job.run()
    assert open_dataset(job.out).manifest.accounting.rows_rejected == 0


@pytest.mark.slow
def test_the_periods_of_a_pipeline_are_those_of_the_first_rows_of_lists(tmp_path: Path) -> None:
    """The last list begins at 12:55 and has rows after 13:00, an hour without a list of its own."""
    log = small_log("%Y-%m-%d %H:%M:%S", "%Y-%m-%d", minutes=5, apart=4)
    assert log["event_time"].max() == "2026-01-05 13:11:00"
    log.to_csv(tmp_path / "log.csv", index=False)
    job = start(tmp_path / "log.csv")
    job.run()
    splits = load(PipelineJob, str(tmp_path / "out" / "pipeline.yaml")).splits
    assert splits.test is not None
    assert splits.test.periods == ("2026-01-05T12",)
    assert open_dataset(job.out).manifest.periods == [f"2026-01-05T{hour:02}" for hour in range(8, 13)]
    check_disjoint(splits.on(job.out))


@pytest.mark.slow
def test_columns_that_are_named_are_not_guessed(tmp_path: Path) -> None:
    shopping_log().to_csv(tmp_path / "shop.csv", index=False)
    job = start(tmp_path / "shop.csv", label="revenue", time="listed_on")
    columns = job.prepare.source.columns
    assert (columns.label, columns.time) == ("revenue", "listed_on")  # type: ignore[union-attr]
    cuts = columns.grades  # type: ignore[union-attr]
    assert isinstance(cuts, tuple)
    assert 0 < cuts[0] < cuts[-1] < shopping_log()["revenue"].max()


@pytest.mark.parametrize("name", ["prepare", "pipeline"])
def test_configs_that_are_there_are_named_before_anything_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    there = tmp_path / "out" / f"{name}.yaml"
    there.write_text("# edited\n")
    with pytest.raises(InputError, match=rf"{name}\.yaml: it is there already; go on with it, or remove it"):
        start(tmp_path / "no such log.csv")
    assert there.read_text() == "# edited\n"
    assert [*(tmp_path / "out").iterdir()] == [there]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"query": "serch_id"}, "query: no column 'serch_id' is left; did you mean 'search_id'"),
        ({"label": "purchased"}, r"label: no column 'purchased' is left; the columns are product_id, .* and 4 more$"),
        ({"file": "none.csv"}, "no file there"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    shopping_log(20).to_csv(tmp_path / "shop.csv", index=False)
    with pytest.raises(InputError, match=message):
        InitJob(**{"file": str(tmp_path / "shop.csv"), "out": str(tmp_path / "out"), **settings}).run()
    assert not (tmp_path / "out").exists()


def test_without_a_label_or_times_only_the_data_set_is_planned(tmp_path: Path) -> None:
    log = shopping_log(20).drop(columns=["event", "clicked", "revenue", "searched_at", "listed_on"])
    log.to_csv(tmp_path / "shop.csv", index=False)
    job = start(tmp_path / "shop.csv")
    assert not (tmp_path / "out" / "pipeline.yaml").exists()
    job.run()
    assert open_dataset(job.out).manifest.counts().labelled == 0


@pytest.mark.slow
@pytest.mark.parametrize("times", ["none", "one day"])
def test_a_log_without_times_is_divided_by_its_queries(
    tmp_path: Path, times: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = shopping_log(60).drop(columns=["listed_on", *(["searched_at"] if times == "none" else [])])
    if times != "none":
        log["searched_at"] = "01.02.2026 09:30"
    log.to_csv(tmp_path / "shop.csv", index=False)
    with caplog.at_level("INFO", "ltrscale"):
        job = start(tmp_path / "shop.csv")
    assert "queries are dealt to six parts at random" in caplog.text
    job.run()
    manifest = open_dataset(job.out).manifest
    assert manifest.periods == [f"part-{number}" for number in range(1, 7)]
    pipeline = load(PipelineJob, str(tmp_path / "out" / "pipeline.yaml"))
    assert pipeline.splits.test is not None
    named = [split.periods for split in pipeline.splits.by_name.values()]
    assert named == [("part-1..part-4",), ("part-5",), ("part-6",)]
    assert not (tmp_path / "out" / "weekly.yaml").exists()
    chosen = AutoJob(out=str(tmp_path / "auto"), data=job.out).resolved()
    assert [split.periods for split in chosen.by_name.values()] == [
        ("part-1", "part-2", "part-3", "part-4"),
        ("part-5",),
        ("part-6",),
    ]


def wide_log(path: Path, features: int) -> Path:
    """A log with many features, in six searches of six rows."""
    rng = np.random.default_rng(0)
    columns = {"search_id": np.arange(36) // 6, "label": rng.integers(0, 2, 36)}
    columns |= {f"f_{i:05}": rng.integers(0, 9, 36) for i in range(features)}
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.nightly
@pytest.mark.slow
def test_a_wide_log_has_progress_lines_and_the_names_of_all_features(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("ltrscale.progress._EVERY_S", 0.0)
    job = start(wide_log(tmp_path / "wide.parquet", 2100))
    columns = job.prepare.source.columns
    assert [*columns.features] == [f"f_{i:05}" for i in range(2100)]  # type: ignore[union-attr]
    assert any(re.match(r"columns: .* columns \(50%\)", message) for message in caplog.messages)
    assert any(re.match(r"features alone: .* features \(", message) for message in caplog.messages)
    job.run()
    assert open_dataset(job.out).manifest.accounting.rows_kept == 36


@pytest.mark.nightly
def test_more_columns_than_a_config_can_name_are_one_line(tmp_path: Path) -> None:
    log = wide_log(tmp_path / "wide.parquet", 40_000)
    with pytest.raises(
        InputError, match=r"wide.parquet: 40,002 columns are more than a config can name in its 524,288 b"
    ):
        start(log)
    assert not (tmp_path / "out").exists()


def with_vectors(log: pd.DataFrame) -> pd.DataFrame:
    """The log with a vector of each product and one of each search, a few of them missing, and with tokens."""
    rng = np.random.default_rng(0)
    of_query = {query: rng.normal(size=8).tolist() for query in log["search_id"].unique()}
    emb = [[*rng.normal(size=8)] for _ in range(len(log))]
    emb[::50] = [None] * len(emb[::50])
    query_emb = log["search_id"].map(of_query)
    query_emb[::50] = None
    tokens = [rng.integers(1, 1000, 4).tolist() for _ in range(len(log))]
    return log.assign(emb=emb, query_emb=query_emb, tokens=tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log.parquet", "log.jsonl"])
def test_lists_of_numbers_are_vectors_and_the_first_config_runs(tmp_path: Path, name: str) -> None:
    log = with_vectors(shopping_log(60).drop(columns="listed_on"))
    if name.endswith("parquet"):
        log.to_parquet(tmp_path / name, index=False)
    else:
        log.to_json(tmp_path / name, orient="records", lines=True)
    job = start(tmp_path / name)
    columns = job.prepare.source.mapping
    assert columns is not None
    assert columns.vectors == {"emb": 8, "query_emb": 8}
    assert columns.similarities == {"cosine": (("query_emb", "emb"),)}
    text = (tmp_path / "out" / "prepare.yaml").read_text()
    assert "        emb: 8 # lists of 8 numbers, 2% missing\n" in text
    assert re.search(
        r'similarities: {"cosine": \[\["query_emb", "emb"\]\]} # CHECK: do both come from one model\?', text
    )
    assert "# not used: tokens, no single value that can be read" in text
    job.run()
    manifest = open_dataset(job.out).manifest
    names = [f"{of}.{i}" for of in ("emb", "query_emb") for i in range(8)] + ["query_emb.cosine.emb"]
    made = [feature.name for feature in manifest.features if "emb" in feature.name]
    assert made == names
    assert manifest.accounting.rows_rejected == 0
    assert manifest.summaries[[each.name for each in manifest.features].index(names[-1])].missing > 0


@pytest.mark.slow
def test_vectors_of_another_length_are_counted_among_the_rows_that_cannot_be_used(tmp_path: Path) -> None:
    log = with_vectors(shopping_log(60))
    log["emb"] = [each[:3] if i % 40 == 1 else each for i, each in enumerate(log["emb"])]
    log["tags"] = [[0.5] * (i % 3) for i in range(len(log))]
    log.to_parquet(tmp_path / "log.parquet", index=False)
    job = start(tmp_path / "log.parquet")
    assert job.prepare.source.mapping is not None
    assert "tags" not in job.prepare.source.mapping.vectors
    assert "emb cannot be read in 2." in (tmp_path / "out" / "prepare.yaml").read_text()
    job.run()
    rules = open_dataset(job.out).manifest.accounting.rules
    assert rules == {"unparsable": sum(i % 40 == 1 and i % 50 != 0 for i in range(len(log)))}


@pytest.mark.slow
def test_configs_never_lie_among_the_files_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    shopping_log(60).to_csv(tmp_path / "logs" / "a.csv", index=False)
    for out in ("logs", "logs/configs"):
        with pytest.raises(InputError, match=f"{out}: it lies in logs, whose files are the log; set --out"):
            InitJob(file="logs", out=out).run()
    InitJob(file="logs").run()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["a.csv"]
    load(PrepareJob, "logs-ranker/prepare.yaml").run()
    monkeypatch.chdir(tmp_path / "logs")
    with pytest.raises(InputError, match=r"it lies in \., whose files are the log"):
        InitJob(file=".").run()
