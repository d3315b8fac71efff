"""Features of history know what their definition says, nothing of the future, and are the same in SQL elsewhere."""

import math
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlglot
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing import rows_of
from pydantic import ValidationError
from reference import history as reference
from timed_log import COLUMNS, FEATURES, log

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.errors import InputError
from ltrscale.ingest import history_log, items
from ltrscale.ingest.history import HistoryConfig, select_known
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.items import Items
from ltrscale.ingest.prepare import PrepareJob

Row = dict[str, Any]
CONFIG = HistoryConfig.model_validate({"features": FEATURES})
DOUBLE = pa.float64()
SCHEMA = pa.schema(
    {"row": pa.int64(), "time": pa.timestamp("us"), "item": pa.string(), "user": pa.int64(), "clicked": DOUBLE}
    | {"price": DOUBLE}
)
FEW = settings(max_examples=15)  # a statement takes DuckDB longer to plan than to run
CONNECTION = duckdb.connect(config={"threads": 2})
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "time": st.one_of(st.integers(0, 200), st.integers(0, 10**7)).map(lambda s: 1_700_000_000 + s),
            "item": st.sampled_from(["a", "b", None]),
            "user": st.sampled_from([1, 2, None]),
            "clicked": st.sampled_from([0.0, 1.0, None]),
            "price": st.sampled_from([0.0, 2.5, 0.1, 7.0, None]),
        }
    ),
    min_size=1,
    max_size=12,
)


def known(
    rows: Sequence[Row], events: Sequence[Row], config: HistoryConfig = CONFIG, sql: str | None = None
) -> dict[str, list[Any]]:
    """The features of rows, in float32, by a statement in DuckDB's dialect."""
    with CONNECTION.cursor() as connection:
        for name, of in (("rows", rows), ("events", events)):
            listed = [{**each, "row": i, "time": each["time"] * 10**6} for i, each in enumerate(of)]
            connection.register(name, pa.Table.from_pylist(listed, SCHEMA))
        query = sql or select_known(config.passes(), "time", "rows.*")
        table = connection.sql(f"SELECT * FROM ({query}) ORDER BY row").to_arrow_table()
    return {name: np.float32(table[name].cast(pa.float64()).fill_null(math.nan)).tolist() for name in config.features}


def expected(rows: Sequence[Row], events: Sequence[Row], config: HistoryConfig = CONFIG) -> dict[str, list[float]]:
    times = {"delay": config.delay or "0s", "step": config.step}
    features = {name: each.model_dump() for name, each in config.features.items()}
    return {name: [reference.feature(each, row, events, **times) for row in rows] for name, each in features.items()}


def assert_same(found: Mapping[str, Sequence[float]], wanted: Mapping[str, Sequence[float]], ulp: int = 1) -> None:
    """Equal as float32 numbers, but for the last digit of sums that are rounded otherwise."""
    for name, values in wanted.items():
        np.testing.assert_array_max_ulp(np.float32(found[name]), np.float32(values), maxulp=ulp)


@pytest.mark.slow
@FEW
@given(rows=ROWS, events=ROWS, step=st.sampled_from(["1s", "1m"]), delay=st.sampled_from([None, "20s"]))
def test_features_are_as_defined(rows: list[Row], events: list[Row], step: str, delay: str | None) -> None:
    config = CONFIG.replace(step=step, delay=delay)
    assert_same(known(rows, events, config), expected(rows, events, config))
    assert_same(known(rows, rows, config), expected(rows, rows, config))


@pytest.mark.slow
@FEW
@given(rows=ROWS, events=ROWS, later=ROWS)
def test_an_event_of_the_future_changes_nothing_before_it(rows: list[Row], events: list[Row], later: list[Row]) -> None:
    last = max(row["time"] for row in rows)
    future = [{**event, "time": last + event["time"] - 1_700_000_000} for event in later]  # also at the same time
    assert_same(known(rows, events + future), known(rows, events), ulp=0)


@pytest.mark.slow
@FEW
@given(rows=ROWS, events=ROWS, seed=st.integers(0, 99))
def test_the_order_of_rows_and_events_changes_nothing(rows: list[Row], events: list[Row], seed: int) -> None:
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    shuffled = known([rows[i] for i in order], random.Random(seed).sample(events, len(events)))
    before = known(rows, events)
    assert_same(shuffled, {name: [values[i] for i in order] for name, values in before.items()}, ulp=0)


@pytest.mark.slow
def test_the_exported_statements_give_the_same() -> None:
    rows, events = log(), log(seed=1)
    of_bigquery = CONFIG.sql("time", "bigquery")
    assert "UNIX_MICROS(" in of_bigquery
    assert "EPOCH_US" not in of_bigquery
    for text in (CONFIG.sql("time", "duckdb"), sqlglot.transpile(of_bigquery, read="bigquery", write="duckdb")[0]):
        assert_same(known(rows, events, sql=text.rstrip(";\n")), known(rows, events), ulp=0)


def test_names_of_columns_are_data() -> None:
    name = 'a "b" `c`; -- d'
    config = HistoryConfig.model_validate({"features": {name: {"kind": "count", "by": {"item": "item"}}}})
    rows = [{"time": 5, "item": "a"}, {"time": 7, "item": "a"}]
    assert known(rows, rows, config) == {name: [0.0, 1.0]}
    assert sqlglot.parse_one(config.sql("time", "bigquery"), dialect="bigquery").named_selects[-1] == name


@pytest.mark.parametrize("name", ["t", "b", "k0", "f1", "v0", "one"])
def test_features_may_have_any_name(name: str) -> None:
    features = {"x": {"kind": "count", "by": "item", "half_life": "1d"}, "y": {"kind": "last", "by": "item"}}
    rows = [{"time": 5, "item": "a"}, {"time": 7, "item": "a"}]
    found = known(rows, rows, HistoryConfig.model_validate({"features": features}))
    config = HistoryConfig.model_validate({"features": {name: features["x"], "y": features["y"]}})
    assert_same(known(rows, rows, config), {name: found["x"], "y": found["y"]}, ulp=0)
    assert found["y"][1] == 2


def config_of(*paths: Path, history: Row, **more: Any) -> PrepareConfig:
    source = {"kind": "items", "columns": COLUMNS, "history": history}
    return validate(PrepareConfig, {"inputs": [str(path) for path in paths], "source": source, **more}, "here")


def write(path: Path, rows: Sequence[Row]) -> Path:
    pq.write_table(pa.Table.from_pylist([*rows]), path)
    return path


def prepared(config: PrepareConfig, out: Path, *, ray: bool = False) -> Dataset:
    PrepareJob(out=str(out), prepare=config, ray=ray).run()
    return open_dataset(str(out))


def features_in(dataset: Dataset) -> dict[tuple[str, str], list[float]]:
    """The features by query and item, without the price."""
    count, found = len(dataset.manifest.features), {}
    for group in rows_of(dataset):
        values = np.float32(group["features"]).reshape(-1, count)[:, 1:]
        found |= {(group["query_id"], doc): row.tolist() for doc, row in zip(group["doc_ids"], values, strict=True)}
    return found


@pytest.mark.slow
def test_a_data_set_has_the_features_of_its_own_rows(tmp_path: Path) -> None:
    rows = log()
    paths = [write(tmp_path / f"{i}.parquet", rows[start : start + 60]) for i, start in enumerate((0, 60, 120))]
    found = features_in(prepared(config_of(*paths, history={"features": FEATURES}), tmp_path / "out"))
    wanted = expected(rows, rows)
    by_row = [[values[i] for values in wanted.values()] for i in range(len(rows))]
    for row, values in zip(rows, by_row, strict=True):
        np.testing.assert_array_max_ulp(np.float32(found[row["query"], row["item"]]), np.float32(values))
    assert np.isfinite(by_row).mean() > 0.6
    # the events of files do not depend on which file they are in, nor on the order of the files
    other = [write(tmp_path / f"other-{i}.parquet", rows[a:b]) for i, (a, b) in enumerate(((90, 180), (0, 90)))]
    again = prepared(config_of(*other, history={"features": FEATURES}), tmp_path / "again")
    np.testing.assert_equal(features_in(again), found)


@pytest.mark.slow
def test_text_is_read_as_the_log_is_and_lines_that_are_refused_keep_their_places(tmp_path: Path) -> None:
    rows = log()
    broken = {40: "q13,soon,a,1,1,3.5", 90: "q30,1700000000,a,1,1,much", 91: "not a row"}
    lines = [",".join(str(value) for value in row.values()) for row in rows]
    for at, line in broken.items():
        lines.insert(at, line)
    (tmp_path / "log.csv").write_text("query,time,item,user,clicked,price\n" + "\n".join(lines) + "\n")
    more = {"history": {"features": FEATURES}, "max_rejected": 0.5}
    found = features_in(prepared(config_of(tmp_path / "log.csv", **more), tmp_path / "out"))
    whole = write(tmp_path / "log.parquet", rows)
    wanted = features_in(prepared(config_of(whole, history={"features": FEATURES}), tmp_path / "whole"))
    np.testing.assert_equal(found, wanted)


def test_a_block_may_have_refused_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "_ROWS", 4)
    lines = [",".join(str(value) for value in row.values()) for row in log()[:6]]
    for name, of in (("a", [*lines, *["not a row"] * 9]), ("b", ["not a row"])):
        (tmp_path / f"{name}.csv").write_text("query,time,item,user,clicked,price\n" + "\n".join(of) + "\n")
    both = config_of(tmp_path / "a.csv", tmp_path / "b.csv", history={"features": FEATURES}, max_rejected=0.9)
    assert len(features_in(prepared(both, tmp_path / "out"))) == 6


@pytest.mark.slow
def test_a_file_that_comes_while_features_are_computed_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = log()
    write(tmp_path / "1.parquet", rows[:90])
    write_known = history_log._write_known

    def with_another_file(*arguments: Any) -> Any:
        write(tmp_path / "0.parquet", rows[90:])
        return write_known(*arguments)

    monkeypatch.setattr(history_log, "_write_known", with_another_file)
    config = config_of(tmp_path / "*.parquet", history={"features": FEATURES})
    assert len(features_in(prepared(config, tmp_path / "out"))) == 90
    assert len(features_in(prepared(config, tmp_path / "out"))) == len(rows)


@pytest.mark.slow
def test_events_may_be_another_table_with_other_names(tmp_path: Path) -> None:
    rows, events = log(), log(seed=1)
    path = write(tmp_path / "log.parquet", rows)
    names = {"time": "at", "item": "article", "user": "reader", "clicked": "clicks", "price": "paid"}
    other = [{names.get(name, name): value for name, value in event.items()} for event in events]
    write(tmp_path / "events.parquet", other)
    features = {
        name: {
            **each,
            "by": {column: names[column] for column in each["by"]},
            **{use: names[each[use]] for use in ("of", "per") if use in each},
        }
        for name, each in FEATURES.items()
    }
    history = {"events": str(tmp_path / "events.parquet"), "time": "at", "features": features}
    found = features_in(prepared(config_of(path, history=history), tmp_path / "out"))
    wanted = expected(rows, events)
    for i, row in enumerate(rows):
        values = np.float32([of[i] for of in wanted.values()])
        np.testing.assert_array_max_ulp(np.float32(found[row["query"], row["item"]]), values)


@pytest.mark.slow
def test_periods_are_added_with_the_events_before_them(tmp_path: Path) -> None:
    rows = [{**row, "time": row["time"] + (i > 90) * 86_400} for i, row in enumerate(log(n=62))]
    cut = next(i for i, row in enumerate(rows) if row["query"] == "q31")
    first, second = rows[:cut], [{**row, "time": row["time"] + 86_400} for row in rows[cut:]]
    for name, part in (("a", first), ("b", second)):
        write(tmp_path / f"{name}.parquet", part)
    history = {"events": str(tmp_path / "*.parquet"), "features": FEATURES}
    for name in "ab":
        config = config_of(tmp_path / f"{name}.parquet", history=history, add=True)
        added = prepared(config, tmp_path / "out")
    whole = prepared(config_of(tmp_path / "a.parquet", tmp_path / "b.parquet", history=history), tmp_path / "whole")
    np.testing.assert_equal(features_in(added), features_in(whole))
    with pytest.raises(InputError, match=r"name them as source\.history\.events"):
        config_of(tmp_path / "a.parquet", history={"features": FEATURES}, add=True)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_tasks_on_ray_give_the_same_files(tmp_path: Path) -> None:
    rows = log()
    paths = [write(tmp_path / f"{i}.parquet", rows[start : start + 90]) for i, start in enumerate((0, 90))]
    config = config_of(*paths, history={"features": FEATURES})
    here, there = (prepared(config, tmp_path / name, ray=ray) for name, ray in (("here", False), ("there", True)))
    np.testing.assert_equal(features_in(there), features_in(here))
    assert hashes(tmp_path / "here-history") == hashes(tmp_path / "there-history")


def hashes(url: Path) -> list[str]:
    return sorted(storage.listed_in(storage.read_manifest(str(url))).values())


@pytest.mark.slow
def test_history_is_made_once_and_again_when_its_rows_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_log, "_BATCH_ROWS", 7)
    path = write(tmp_path / "log.parquet", log())
    config = config_of(path, history={"features": FEATURES})
    first = features_in(prepared(config, tmp_path / "out"))
    before = hashes(tmp_path / "out-history")
    prepared(config.replace(max_rejected=0.5), tmp_path / "out")
    assert hashes(tmp_path / "out-history") == before
    shutil.rmtree(tmp_path / "out-history")
    prepared(config.replace(max_rejected=0.5), tmp_path / "out")  # up to date
    assert not (tmp_path / "out-history").exists()
    write(path, log(seed=3))
    assert features_in(prepared(config, tmp_path / "out")).keys() != first.keys()
    assert hashes(tmp_path / "out-history") != before


def test_rows_that_changed_after_their_history_was_made_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "log.parquet", log())
    job = PrepareJob(out=str(tmp_path / "out"), prepare=config_of(path, history={"features": FEATURES}))
    assert job._first is not None
    job._first.run()
    write(path, log(n=70))
    monkeypatch.setattr(history_log.HistoryLog, "run", lambda _: False)
    with pytest.raises(InputError, match="other rows than when its history was made"):
        job.work({}, lambda _: None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"time": "at"}, "time is that of events"),
        ({"features": {"c": {"kind": "count", "by": "item", "window": "1h", "half_life": "1h"}}}, "not both"),
        ({"features": {"c": {"kind": "count", "by": []}}}, "at least 1"),
        ({"features": {"c": {"kind": "count", "by": "item", "of": "item"}}}, "also under by"),
        ({"features": {"c": {"kind": "last", "by": "item", "half_life": "1h"}}}, "half_life"),
        ({"features": {"c": {"kind": "count", "by": "item", "window": "0d"}}}, "window"),
        ({"features": {}}, "at least 1"),
        ({"features": {name: {"kind": "count", "by": "item"} for name in ("ctr", "CTR")}}, "differ only in case"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: Row, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        HistoryConfig.model_validate({"features": FEATURES, **changes})


def test_columns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", log())

    def refused(feature: Row, name: str = "c") -> str:
        with pytest.raises(InputError) as error:
            prepared(config_of(path, history={"features": {name: feature}}), tmp_path / "out")
        return str(error.value)

    assert "no column 'brand' (id)" in refused({"kind": "count", "by": "brand"})
    assert "'query' (number) should hold numbers" in refused({"kind": "count", "by": "item", "of": "query"})
    assert "'user' has the name of a feature of history" in refused({"kind": "count", "by": "item"}, "user")
    with pytest.raises(ValidationError, match=r"columns\.time"):
        Items.model_validate({"columns": {**COLUMNS, "time": None}, "history": {"features": FEATURES}})
