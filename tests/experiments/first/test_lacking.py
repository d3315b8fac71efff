"""`jobs.init` on logs of which rows, files or columns lack something: the config runs, or one line says why not."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command_lines import run_here
from shop_languages import LANGUAGES, named, searches

from ltrscale.config import load, to_check
from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.errors import InputError
from ltrscale.experiments.first.init import InitJob
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.prepare import PrepareJob


def begun(folder: Path, *parts: pd.DataFrame, **settings: Any) -> tuple[PrepareJob, ColumnMapping]:
    """The prepare.yaml of a log in some files, and its uses of columns."""
    (folder / "log").mkdir()
    for number, part in enumerate(parts):
        part.to_csv(folder / "log" / f"W{number}.csv", index=False, sep=";", decimal=",")
    InitJob(file=str(folder / "log"), out=str(folder / "out"), **settings).run()
    job = load(PrepareJob, str(folder / "out" / "prepare.yaml"))
    assert isinstance(job.prepare.source, Items)
    return job, job.prepare.source.columns


def prepared(job: PrepareJob) -> Dataset:
    job.run()
    return open_dataset(job.out)


@pytest.mark.slow
@pytest.mark.parametrize("late", [("f1",), ("f1", "rang"), ("f1", "f2", "im_warenkorb")])
def test_a_column_that_later_files_add_is_a_feature_that_the_others_lack(
    late: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log = named(searches(0), "German")
    half = int(np.flatnonzero(log["suchanfrage_id"].diff())[len(log) // 25])
    job, columns = begun(tmp_path, log[:half].drop(columns=[*late]), log[half:])
    assert (columns.query, columns.item, columns.label) == ("suchanfrage_id", "artikel_nr", "gekauft")
    assert {*columns.optional} == {name for name in late if name.startswith("f")}, "a place is none"
    assert not {"rang", "im_warenkorb"} & {*columns.features, *columns.categorical}
    said = "".join(caplog.messages)
    assert all(f"{name} is missing from" in said for name in columns.optional)
    assert all(f"{name} is not in all files, and not used" in said for name in late if name not in columns.optional)
    manifest = prepared(job).manifest
    assert manifest.accounting.rows_kept == len(log)
    missing = {
        feature.name: summary.missing for feature, summary in zip(manifest.features, manifest.summaries, strict=True)
    }
    assert {name: n for name, n in missing.items() if n} == dict.fromkeys(columns.optional, half)


def test_a_role_that_a_file_lacks_is_one_line(tmp_path: Path) -> None:
    log = searches(0)
    with pytest.raises(InputError, match=r"W1\.csv: label: column 'purchased' is missing, which other files have"):
        begun(tmp_path, log[:2000], log[2000:].drop(columns="purchased"), label="purchased")


def test_a_file_of_another_kind_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"W1\.csv: column '\w+' is missing, which .*W0\.csv has; name files of one"):
        begun(tmp_path, searches(0), searches(0)[["product_id", "f1", "f2"]].drop_duplicates())


@pytest.mark.slow
def test_rows_without_a_judgement_count_0_and_are_marked(tmp_path: Path) -> None:
    log = searches(0)[["search_id", "searched_at", "product_id", "f1", "f3"]].copy()
    rng = np.random.default_rng(0)
    log["judgment"] = rng.integers(0, 4, len(log)).astype(object)
    log.loc[rng.random(len(log)) < 0.48, "judgment"] = None
    job, columns = begun(tmp_path, log)
    assert (columns.label, columns.unjudged) == ("judgment", 0)
    assert any("unjudged: 0" in line for line in to_check([str(tmp_path / "out" / "prepare.yaml")]))
    manifest = prepared(job).manifest
    assert manifest.accounting.rows_rejected == 0
    assert manifest.counts().labelled > 390, "all but lists without any"
    assert load(PipelineJob, str(tmp_path / "out" / "pipeline.yaml")).data == job.out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clicked", "w3"])
def test_clicks_that_are_1_or_nothing_train(name: str, tmp_path: Path) -> None:
    log = searches(0)[["search_id", "searched_at", "product_id", "position", "clicked", "f1"]]
    log = log.assign(clicked=log["clicked"].where(log["clicked"] > 0)).rename(columns={"clicked": name})
    job, columns = begun(tmp_path, log)
    assert (columns.label, columns.unjudged) == (name, 0)
    manifest = prepared(job).manifest
    assert manifest.label_counts["1"] == searches(0)["clicked"].sum()
    assert {*manifest.label_counts} == {"0", "1"}


@pytest.mark.slow
def test_text_grades_are_written_with_what_has_none(tmp_path: Path) -> None:
    log = searches(0)[["search_id", "searched_at", "product_id", "f1"]].copy()
    log["label"] = np.random.default_rng(0).choice(["Exact", "Partial", "Irrelevant", "Broken"], len(log))
    job, columns = begun(tmp_path, log)
    assert columns.grades == {"Irrelevant": 0, "Partial": 1, "Exact": 2, "Broken": None}
    assert any(
        "higher is better; Broken has none" in line for line in to_check([str(tmp_path / "out" / "prepare.yaml")])
    )
    assert {*prepared(job).manifest.label_counts} == {"0", "1", "2"}


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0.05, 0.6, 1.0])
def test_a_column_that_is_hardly_read_costs_no_rows_and_no_share_is_above_1(bad: float, tmp_path: Path) -> None:
    """Numbers in the lines by which types are known, and words in the others."""
    log = searches(0).drop(columns=["clicked", "in_cart"])
    first, rng = np.arange(len(log)) < 1000, np.random.default_rng(0)
    for name in ("weight", "height", "depth"):
        log[name] = np.where(first | (rng.random(len(log)) > bad), "7", "unknown")
    job, columns = begun(tmp_path, log)
    assert job.prepare.max_rejected <= 1
    assert ("weight" in columns.features) == (bad < 0.2)
    text = (tmp_path / "out" / "prepare.yaml").read_text()
    assert ("of its values cannot be read" in text) == (bad > 0.2)
    assert prepared(job).manifest.accounting.rows_kept > 0.8 * len(log)


def test_a_log_of_which_nothing_is_left_names_the_roles_and_no_config(tmp_path: Path) -> None:
    log = searches(0)[["search_id", "searched_at", "product_id", "position", "clicked"]]
    with pytest.raises(InputError) as error:
        begun(tmp_path, log.assign(shop=1))
    assert "no column is left for a ranker to read: search_id is the query, product_id is the item" in str(error.value)
    assert "shop: the same value in every row" in str(error.value)
    assert "prepare.yaml" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_rows_are_not_merged_where_another_column_may_be_the_item(tmp_path: Path) -> None:
    log = searches(1)[["search_id", "searched_at", "position", "seller_no", "purchased", "f1"]]
    job, columns = begun(tmp_path, log.rename(columns={"seller_no": "product_id"}))
    assert (columns.item, job.prepare.duplicates) == ("product_id", "reject")
    marked = to_check([str(tmp_path / "out" / "prepare.yaml")])
    assert any("duplicates: reject" in line for line in marked)
    with pytest.raises(InputError, match="duplicate_document"):
        job.run()


@pytest.mark.slow
def test_places_and_the_directory_are_named_on_the_command_line(tmp_path: Path) -> None:
    log = searches(0).rename(columns={"position": "w"})
    log["v"] = log["w"]
    log.to_csv(tmp_path / "log.csv", index=False)
    run_here("init", "log.csv", "--out", "mine", "--set", "positions=v", cwd=tmp_path)
    job = load(PrepareJob, str(tmp_path / "mine" / "prepare.yaml"))
    assert isinstance(job.prepare.source, Items)
    assert job.prepare.source.columns.positions == "v"


@pytest.mark.slow
@pytest.mark.parametrize("language", [*LANGUAGES])
def test_a_shop_of_any_language_gets_configs_that_run(language: str, tmp_path: Path) -> None:
    job, columns = begun(tmp_path, named(searches(0), language))
    query, time, item, _, place, _, _, bought = LANGUAGES[language]
    found = (columns.query, columns.time, columns.item, columns.positions, columns.label)
    assert found == (query, time, item, place, bought)
    assert prepared(job).manifest.accounting.rows_rejected == 0
