"""Tables of lakes: the rows are those that other engines read, and what is new since a version is added."""

import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from preparing import prepare, rows_of

from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import InputFiles, PrepareConfig, list_inputs
from ltrscale.ingest.tables import parquet_schema, read_parquet

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")

from delta_tables import MappedTable  # noqa: E402 - only with deltalake

SCHEMA = pa.schema(
    [("q", pa.string()), ("price paid", pa.float64()), ("y", pa.float64()), ("week", pa.string()), ("day", pa.date32())]
)


def rows(first: int, n: int = 6, **more: list[Any]) -> pa.Table:
    queries = [f"q{first + i // 2}" for i in range(n)]
    return pa.table(
        {"q": queries, "price paid": [float(first + i) for i in range(n)], "y": [i % 2.0 for i in range(n)], **more}
    )


@pytest.fixture
def mapped(tmp_path: Path) -> MappedTable:
    """Four files in three partitions, with other names of columns, deleted rows, and one column more at the end."""
    table = MappedTable(tmp_path / "table", SCHEMA, ["week", "day"])
    weeks = [{"week": "2026-W01", "day": "2026-01-01"}, {"week": "2026-W02", "day": "2026-01-08"}]
    table.append("a 1.parquet", rows(0), weeks[0])
    table.append("b=2%.parquet", rows(100), weeks[1])
    table.delete("a 1.parquet", [0, 1, 5], weeks[0])
    table.append("c.parquet", rows(200), {"week": None, "day": "2026-01-09"})
    table.delete("c.parquet", range(6), {"week": None, "day": "2026-01-09"})
    table.add_column(pa.field("stock", pa.int64()))
    table.append("d.parquet", rows(300, stock=[*range(6)]), weeks[1])
    return table


def served(path: Path, **settings: Any) -> list[dict[str, Any]]:
    """The rows of a table as prepare reads them."""
    found = []
    for file in list_inputs([InputFiles(path=str(path), table="delta", **settings)]):
        for raw in read_parquet(file.url, parquet_schema(file.url, file.lake).names, 4, file.lake):
            found += raw.rows.to_pylist()
    return found


def in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows by their prices, with dates as text."""
    plain = [{k: str(v) if isinstance(v, datetime.date) else v for k, v in row.items()} for row in found]
    return sorted(plain, key=lambda row: float(row["price paid"]))


def test_the_rows_are_those_of_another_engine(mapped: MappedTable) -> None:
    for version in range(1, mapped.version + 1):
        table = deltalake.DeltaTable(mapped.path, version=version)
        query = deltalake.QueryBuilder().register("t", table).execute("SELECT * FROM t")
        found = served(mapped.path, version=version)
        assert in_order(found) == in_order(pa.table(query.read_all()).to_pylist())
    assert [row["stock"] for row in in_order(found)] == [None] * 9 + [*range(6)]
    assert {row["q"] for row in found}.isdisjoint({"q0", "q200"})


@pytest.mark.slow
def test_the_rows_are_those_of_duckdb(mapped: MappedTable) -> None:
    connection = duckdb.connect()
    try:
        connection.execute("LOAD delta")
    except duckdb.Error:
        pytest.skip("DuckDB has no extension for Delta Lake here")
    theirs = connection.sql(f"SELECT * FROM delta_scan('{mapped.path}')").to_arrow_table().to_pylist()
    # of columns with other names DuckDB 1.5 finds no values of partitions
    ours = [{name: row[name] for name in row if name not in mapped.partitions} for row in served(mapped.path)]
    assert in_order(ours) == in_order([{name: row[name] for name in ours[0]} for row in theirs])


def test_partitions_may_have_any_characters_and_columns_may_come_later(tmp_path: Path) -> None:
    table = rows(0, 4, week=["W 1%", "W 1%", "W=2", None], day=[datetime.date(2026, 1, i // 2 + 1) for i in range(4)])
    for part, mode in ((table, "error"), (table.append_column("more", [[1, 2, 3, 4]]), "append")):
        settings = {"partition_by": ["week", "day"], "mode": mode, "schema_mode": "merge" if mode == "append" else None}
        deltalake.write_deltalake(tmp_path / "table", part, **settings)
    whole = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(tmp_path / "table"))
    theirs = pa.table(whole.execute("SELECT * FROM t").read_all()).to_pylist()
    ours = served(tmp_path / "table")
    assert sorted(map(str, in_order(ours))) == sorted(map(str, in_order(theirs)))


def test_a_data_set_of_it_has_its_names_and_partitions(mapped: MappedTable, tmp_path: Path) -> None:
    columns = {"query": "q", "label": "y", "features": ["price paid", "stock"], "period_column": "week"}
    dataset = prepare(config(mapped.path, columns=columns), str(tmp_path / "out"))
    groups = {row["query_id"]: (row["period"], row["features"]) for row in rows_of(dataset)}
    assert groups["q1"][0] == "2026-W01"
    assert groups["q302"] == ("2026-W02", [304.0, 4.0, 305.0, 5.0])
    assert sorted(groups) == ["q1", "q100", "q101", "q102", "q2", "q300", "q301", "q302"]


COLUMNS = {"query": "q", "label": "y", "features": ["f"], "period_column": "week"}


def config(path: Path, columns: dict[str, Any] = COLUMNS, **settings: Any) -> PrepareConfig:
    inputs = [{"path": str(path), "table": "delta", **settings}]
    source = {"kind": "items", "columns": columns}
    return PrepareConfig.model_validate({"inputs": inputs, "source": source, "add": True})


def week(number: int, values: tuple[float, ...] = (1, 2, 3, 4)) -> pa.Table:
    ids = [f"{number}-{i // 2}" for i in range(len(values))]
    table = pa.table({"q": ids, "y": [i % 2.0 for i in range(len(values))], "f": [*map(float, values)]})
    return table.append_column("week", [[f"2026-W{number:02}"] * len(values)])


@pytest.fixture(params=[None, ["week"]], ids=["flat", "partitioned"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two weeks in a table of versions 0 and 1, of which there is a data set."""
    path = tmp_path / "table"
    for number in (1, 2):
        deltalake.write_deltalake(path, week(number), mode="append", partition_by=request.param)
    prepare(config(path), str(tmp_path / "out"))
    return path


def periods(out: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows_of(open_dataset(str(out))):
        found.setdefault(row["period"], []).extend(row["features"])
    return found


def added(table: Path, **settings: Any) -> Dataset:
    return prepare(config(table, **settings), str(table.parent / "out"))


@pytest.mark.slow
def test_what_is_new_since_a_version_is_added(table: Path) -> None:
    deltalake.write_deltalake(table, week(3), mode="append")
    deltalake.write_deltalake(table, week(4), mode="append")
    assert added(table, since=1, version=2).manifest.periods == ["2026-W01", "2026-W02", "2026-W03"]
    dataset = added(table, since=2)
    assert len(dataset.manifest.files) == 4
    assert periods(table.parent / "out") == {key: [1, 2, 3, 4] for key in dataset.manifest.periods}
    with pytest.raises(InputError, match="version 3 is not newer than since = 3; wait for one, or lower since"):
        added(table, since=3)


@pytest.mark.slow
def test_files_that_were_put_together_are_not_new(table: Path) -> None:
    deltalake.DeltaTable(table).optimize.compact()
    deltalake.write_deltalake(table, week(3), mode="append")
    added(table, since=1)
    assert periods(table.parent / "out") == {key: [1, 2, 3, 4] for key in ["2026-W01", "2026-W02", "2026-W03"]}


@pytest.mark.slow
def test_new_files_that_were_put_together_are_new(table: Path) -> None:
    # a week is in two files, which are put together with no older one in a partitioned table
    for part in (week(3).slice(0, 2), week(3).slice(2)):
        deltalake.write_deltalake(table, part, mode="append")
    deltalake.DeltaTable(table).optimize.compact()
    if deltalake.DeltaTable(table).metadata().partition_columns:
        added(table, since=1)
        assert sorted(periods(table.parent / "out")["2026-W03"]) == [1, 2, 3, 4]
    else:
        with pytest.raises(InputError, match="version 4 has put rows from before and after version 1 into the same"):
            added(table, since=1)
        assert added(table, since=1, version=3).manifest.periods[-1] == "2026-W03"


@pytest.mark.slow
def test_a_period_that_was_rewritten_is_named_and_stays(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    deltalake.DeltaTable(table).delete("week = '2026-W01' AND f < 3")
    deltalake.write_deltalake(table, week(3), mode="append")
    deltalake.DeltaTable(table).delete("week = '2026-W02'")
    added(table, since=1)
    assert periods(table.parent / "out") == {key: [1, 2, 3, 4] for key in ["2026-W01", "2026-W02", "2026-W03"]}
    (said,) = [message for message in caplog.messages if "rewritten" in message]
    assert "the table has rewritten rows of 2026-W01, 2026-W02, which stay in" in said


@pytest.mark.slow
def test_a_new_period_that_was_written_with_an_old_one_is_an_error(table: Path) -> None:
    everything = pa.concat_tables([week(number) for number in (1, 2, 3)])
    deltalake.write_deltalake(table, everything, mode="overwrite")
    deltalake.write_deltalake(table, week(4), mode="append")
    with pytest.raises(InputError, match="has written period '2026-W03' together with rows of earlier ones"):
        added(table, since=1)
    assert open_dataset(str(table.parent / "out")).manifest.periods == ["2026-W01", "2026-W02"]


def test_rows_that_are_not_read_are_no_events_of_history(tmp_path: Path) -> None:
    for first in (0, 10):
        row = {"d": "item", "y": 1.0, "f": 0.5}
        found = pa.Table.from_pylist([{**row, "q": f"q{i}", "time": 10**9 + i} for i in range(first, first + 3)])
        deltalake.write_deltalake(tmp_path / "table", found, mode="append")
    deltalake.DeltaTable(tmp_path / "table").delete("q = 'q1'")
    columns = {"query": "q", "item": "d", "label": "y", "features": ["f"], "time": "time"}
    history = {"features": {"earlier": {"kind": "count", "by": "d"}}}
    source = {"kind": "items", "columns": columns, "history": history}
    inputs = {"path": str(tmp_path / "table"), "table": "delta", "since": 0}
    made = prepare(PrepareConfig.model_validate({"inputs": inputs, "source": source}), str(tmp_path / "out"))
    assert [row["features"] for row in rows_of(made)] == [[0.5, 0.0], [0.5, 1.0], [0.5, 2.0]]


@pytest.mark.slow
def test_a_log_that_was_cut_off_is_named(table: Path) -> None:
    deltalake.write_deltalake(table, week(3), mode="append")
    deltalake.write_deltalake(table, week(4), mode="append")
    deltalake.DeltaTable(table).create_checkpoint()
    (table / "_delta_log" / f"{2:020}.json").unlink()
    with pytest.raises(InputError, match=r"its log no longer has version 2|cannot be read as a table"):
        added(table, since=1)


def test_since_is_of_a_delta_table(table: Path) -> None:
    with pytest.raises(ValueError, match="since is a version of a Delta table; set table to delta"):
        InputFiles(path=str(table), table="iceberg", since=1)
