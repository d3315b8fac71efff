"""The SQL of an export gives the rows of a log the features that training had, and the scores."""

import json
from pathlib import Path
from typing import Any

import duckdb
import lightgbm
import numpy as np
import pandas as pd
import pytest
from exported_models import trees
from timed_log import COLUMNS, FEATURES, log

from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.scoring.predict import PredictJob
from ltrscale.serving.export import ExportJob

WEEK = 7 * 86_400


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four weeks of a log, its data set, trees, and their export."""
    home = tmp_path_factory.mktemp("history")
    rows: list[dict[str, Any]] = []
    for week in range(4):
        start = 1_767_000_000 - 1_700_000_000 + week * WEEK
        rows += [{**row, "query": f"{week}-{row['query']}", "time": row["time"] + start} for row in log(seed=week)]
    pd.DataFrame(rows).astype({"time": "datetime64[s]"}).to_parquet(home / "log.parquet")
    source = {"kind": "items", "columns": {**COLUMNS, "period": "week"}, "history": {"features": FEATURES}}
    prepare = {"inputs": str(home / "log.parquet"), "source": source}
    validate(PrepareJob, {"out": str(home / "data"), "prepare": prepare}, "here").run()
    trees(home / "trees", str(home / "data"), "lightgbm", min_data_in_leaf=5)
    export = {"out": str(home / "export"), "bundle": str(home / "trees"), "data": str(home / "data")}
    validate(ExportJob, export, "here").run()
    return home


def by_sql(home: Path) -> pd.DataFrame:
    """The log with the features of history, as a service computes them."""
    with duckdb.connect() as connection:
        for table in ("rows", "events"):
            connection.read_parquet(str(home / "log.parquet")).create_view(table)
        statement = (home / "export" / "history.duckdb.sql").read_text().rstrip(";\n")
        return connection.sql(f"SELECT * FROM ({statement}) ORDER BY query, item").df()


@pytest.mark.slow
def test_the_statement_gives_the_features_of_training_and_the_scores(made: Path) -> None:
    rows, data = by_sql(made), str(made / "data")
    names = [feature.name for feature in open_dataset(data).manifest.features]
    batches = [*iterate(select(Split(data=(data,)), labelled=False))]
    prepared_NF = np.concatenate([batch.features_NF.numpy() for batch in batches])
    raw_NF = rows[names].to_numpy(np.float32)
    np.testing.assert_array_equal(*(each[np.lexsort(each.T)] for each in (prepared_NF, raw_NF)))
    rows.to_parquet(made / "rows.parquet")
    ranking = {"out": str(made / "ranked"), "bundle": str(made / "trees"), "inputs": str(made / "rows.parquet")}
    validate(PredictJob, ranking, "here").run()
    ranked = pd.concat(map(pd.read_parquet, sorted((made / "ranked").rglob("*.parquet"))))
    scores = lightgbm.Booster(model_file=str(made / "export" / "model.txt")).predict(raw_NF, raw_score=True)
    mine = dict(zip(zip(rows["query"], rows["item"], strict=True), scores, strict=True))
    theirs = dict(zip(zip(ranked["query_id"], ranked["item_id"], strict=True), ranked["score"], strict=True))
    assert mine.keys() == theirs.keys()
    np.testing.assert_allclose([theirs[key] for key in mine], [*mine.values()], rtol=1e-6)


@pytest.mark.slow
def test_an_export_is_checked_with_raw_rows_that_have_the_features(made: Path) -> None:
    assert "history.duckdb.sql" in (made / "export" / "README.md").read_text()
    by_sql(made).to_parquet(made / "rows.parquet")
    settings = {"bundle": str(made / "trees"), "data": str(made / "data"), "raw": str(made / "rows.parquet")}
    validate(ExportJob, {"out": str(made / "checked"), **settings}, "here").run()
    with_rows, without = (json.loads((made / name / "parity.json").read_text()) for name in ("checked", "export"))
    assert with_rows["raw"]["documents"] == 720
    assert without["raw"] is None  # the rows of the log have no features of history
