"""`jobs.weekly`, killed anywhere and given again, leaves what an undisturbed one leaves, and the files of others."""

import json
import shutil
from pathlib import Path

import pytest
import shop
from killing import found_in, job_killed_before

from ltrscale.config import validate
from ltrscale.experiments.weekly import WeeklyJob
from ltrscale.ingest.prepare import PrepareJob

FEATURES = ["list_price", "margin", "rating", "n_reviews", "in_stock", "text_match", "sales_30d"]
COLUMNS = {"query": "search_id", "item": "product_id", "label": "purchased", "time": "searched_at"}
SOURCE = {"kind": "items", "columns": {**COLUMNS, "features": FEATURES}}
PREPARE = {"source": SOURCE, "sort": True, "duplicates": "keep_first", "max_rejected": 0.03}
SPLITS = {"train": "all but last 2", "validation": "last 1 but 1", "test": "last 1"}
TREES = {"num_trees": 30, "num_leaves": 8, "min_data_in_leaf": 5, "num_threads": 1}
OTHERS = (".labels-backup.20261127", "data/notes/.draft.20260101", "data/.crc.deadbeef", "weekly/weeks/.old.deadbeef")
NEVER = 10**9


def made(start: Path, place: Path, change: int) -> dict[str, str]:
    """Put week 12 into service, killed before a change and given again; what is there then, but for times."""
    shutil.rmtree(place, ignore_errors=True)  # the same place each time, since files name it
    shutil.copytree(start, place)
    prepare = {**PREPARE, "inputs": str(place / "log.csv")}
    validate(PrepareJob, {"out": str(place / "data"), "prepare": prepare}, "test").run()
    pipeline = {
        "out": str(place / "models"),
        "data": str(place / "data"),
        "splits": {name: {"periods": of} for name, of in SPLITS.items()},
        "methods": {"trees": {"kind": "gbdt", "gbdt": TREES}},
        "evaluate": {"baseline": None, "resamples": 200},
    }
    (place / "pipeline.yaml").write_text(json.dumps(pipeline))
    for name in OTHERS:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)
    places = {"out": "weekly", "pipeline": "pipeline.yaml", "inputs": "W12.csv"}
    settings = {key: str(place / name) for key, name in places.items()} | {"bounds": {"refuse": "worse"}}
    (place / "weekly.json").write_text(json.dumps(settings))
    was_killed = job_killed_before(change, place, "jobs.weekly", "--config", str(place / "weekly.json"))
    assert was_killed == (change < NEVER), "it makes fewer changes"
    if was_killed:
        validate(WeeklyJob, settings, "test").run()
    assert [(place / name).read_text() for name in OTHERS] == [*OTHERS]
    return {name: content for name, content in found_in(place).items() if name != "weekly/service.json"}  # its time


@pytest.mark.nightly
@pytest.mark.parametrize("change", [10, 40, 70, 100, 130, 160, 190, 220])
def test_weekly_leaves_what_an_undisturbed_one_leaves(tmp_path: Path, change: int) -> None:
    (tmp_path / "start").mkdir()
    shop.weeks(6, 11, 400).to_csv(tmp_path / "start" / "log.csv", index=False)
    shop.weeks(12, 12, 400).to_csv(tmp_path / "start" / "W12.csv", index=False)
    twin = made(tmp_path / "start", tmp_path / "shop", NEVER)
    assert made(tmp_path / "start", tmp_path / "shop", change) == twin
