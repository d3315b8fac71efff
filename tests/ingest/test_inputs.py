"""Delta Lake and Iceberg tables, written by their own libraries: the rows of one version."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparing import prepare

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.errors import InputError, UnavailableError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.storage.s3 import PatientS3

ONE = pa.table({"q": ["a", "a"], "f": [1.0, 2.0], "y": [0, 1]})
TWO = pa.table({"q": ["b", "b", "b"], "f": [3.0, 4.0, 5.0], "y": [1, 0, 0]})


def config(path: Path | str, **table: Any) -> PrepareConfig:
    source = {"kind": "items", "columns": {"query": "q", "label": "y", "features": ["f"]}}
    return validate(PrepareConfig, {"inputs": [{"path": str(path), **table}], "source": source}, "prepare")


def fingerprints(config: PrepareConfig) -> dict[str, str]:
    return PrepareJob(out="out", prepare=config).inputs()


def values(dataset: Dataset) -> list[float]:
    tables = [pq.ParquetFile(f"{dataset.url}/{file.path}").read() for file in dataset.manifest.files]
    return sorted(value for table in tables for row in table["features"].to_pylist() for value in row)


class _Delta:
    """A table of two versions."""

    lake = "delta"

    def __init__(self, folder: Path) -> None:
        self.library = pytest.importorskip("deltalake", reason="deltalake is not installed")
        self.path = folder / "table"
        self.library.write_deltalake(self.path, ONE)
        self.library.write_deltalake(self.path, TWO, mode="append")
        self.versions = [0, 1]

    def replace(self) -> None:
        self.library.write_deltalake(self.path, ONE, mode="overwrite")

    def delete(self) -> None:
        self.library.DeltaTable(self.path).delete("f = 4")


class _Iceberg:
    """A table of two snapshots."""

    lake = "iceberg"

    def __init__(self, folder: Path) -> None:
        memory = pytest.importorskip("pyiceberg.catalog.memory", reason="pyiceberg is not installed")
        catalog = memory.InMemoryCatalog("test", warehouse=f"file://{folder}")
        catalog.create_namespace("logs")
        self.table = catalog.create_table("logs.shop", schema=ONE.schema)
        self.path = folder / "logs" / "shop"
        self.versions = []
        for rows in (ONE, TWO):
            self.table.append(rows)
            self.versions.append(self.table.current_snapshot().snapshot_id)

    def replace(self) -> None:
        self.table.overwrite(ONE)

    def delete(self) -> None:
        self.table.delete("f = 4")


Table = _Delta | _Iceberg


@pytest.fixture(params=[_Delta, _Iceberg])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    found: Table = request.param(tmp_path)
    return found


@pytest.mark.slow
def test_the_rows_are_those_of_the_version(table: Table, tmp_path: Path) -> None:
    newest = prepare(config(table.path, table=table.lake), str(tmp_path / "newest"))
    assert values(newest) == [1, 2, 3, 4, 5]
    first = prepare(config(table.path, table=table.lake, version=table.versions[0]), str(tmp_path / "first"))
    assert values(first) == [1, 2]
    table.replace()  # the old files stay in the directory
    assert values(prepare(config(table.path, table=table.lake), str(tmp_path / "newest"))) == [1, 2]
    again = config(table.path, table=table.lake, version=table.versions[1])
    assert values(prepare(again, str(tmp_path / "again"))) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_deleted_rows_are_not_read(table: Table, tmp_path: Path) -> None:
    table.delete()
    assert values(prepare(config(table.path, table=table.lake), str(tmp_path / "out"))) == [1, 2, 3, 5]


def test_the_version_is_part_of_the_identity(table: Table) -> None:
    newest = fingerprints(config(table.path, table=table.lake))
    assert newest == fingerprints(config(table.path, table=table.lake, version=table.versions[1]))
    assert all(stamp.endswith(f" of {table.lake} {table.versions[1]}") for stamp in newest.values())
    first = fingerprints(config(table.path, table=table.lake, version=table.versions[0]))
    assert len(first) == 1
    assert first.items().isdisjoint(newest.items())


def test_a_table_or_version_that_is_not_there_is_named(table: Table, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{table.path}: .*version"):
        fingerprints(config(table.path, table=table.lake, version=77))
    with pytest.raises(InputError, match="nothing"):
        fingerprints(config(tmp_path / "nothing", table=table.lake))


def test_a_renamed_column_of_iceberg_is_refused(tmp_path: Path) -> None:
    table = _Iceberg(tmp_path)
    with table.table.update_schema() as update:
        update.rename_column("f", "g")
    with pytest.raises(InputError, match="column 'g' was renamed or replaced; rewrite the table"):
        fingerprints(config(table.path, table="iceberg"))


@pytest.mark.slow
def test_a_store_of_iceberg_that_does_not_answer_is_no_bad_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyiceberg", reason="pyiceberg is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv(storage.PATIENCE, "0")
    PatientS3.clear_instance_cache()  # an earlier test may have resolved another store
    with pytest.raises(UnavailableError, match=r"1-a\.metadata\.json: cannot read: the store does not answer"):
        fingerprints(config("s3://shop/logs/1-a.metadata.json", table="iceberg"))
    PatientS3.clear_instance_cache()


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match="delta tables are read with deltalake, which is not installed; pip install"):
        fingerprints(config("table", table="delta"))


def test_a_version_without_a_table_is_refused() -> None:
    with pytest.raises(InputError, match="version is that of a table; set table to delta or iceberg"):
        config("log.parquet", version=3)
