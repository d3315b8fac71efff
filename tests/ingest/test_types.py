"""Columns of any type: those that nothing reads are left out, and stand in nobody's way."""

import datetime
import decimal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_blocks import blocks_of

from ltrscale.api.frames import prepare_tables, rows_as_table
from ltrscale.data import columns as cols
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import guess
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.profile import files_of, first_columns
from ltrscale.ingest.roles import structured
from ltrscale.ingest.structure import read_structure

N = 6
USES = {"query": "q", "label": "y"}
BASE = {"q": list("aabbcc"), "y": [0, 1] * 3, "f": [0.5, 2.0, 0.25, 3.0, 7.5, 1.0]}
UUIDS = [uuid.UUID(int=(255 << 120) + i) for i in range(N)]


def stored(kind: pa.BaseExtensionType, values: list[Any]) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


ARROW: dict[str, tuple[pa.Array, str]] = {
    "uuid": (stored(pa.uuid(), [each.bytes for each in UUIDS]), "categorical"),
    "json": (stored(pa.json_(), ['{"a": 1}', "2"] * 3), "categorical"),
    "bool8": (stored(pa.bool8(), [0, 1] * 3), "features"),
    "opaque": (stored(pa.opaque(pa.int64(), "t", "v"), [1] * N), ""),
    "tensor": (stored(pa.fixed_shape_tensor(pa.float32(), [2]), [[1.0, 2.0]] * N), ""),
    "interval": (pa.array([pa.MonthDayNano([1, 2, 3])] * N), ""),
    "duration": (pa.array([datetime.timedelta(i) for i in range(N)]), ""),
    "time32": (pa.array([datetime.time(i) for i in range(N)], pa.time32("s")), ""),
    "time64": (pa.array([datetime.time(i) for i in range(N)], pa.time64("ns")), ""),
    "half": (pa.array(np.arange(N).astype(np.float16)), "features"),
    **{
        f"decimal{bits}": (pa.array([decimal.Decimal(i) for i in range(N)], kind), "features")
        for bits, kind in {
            32: pa.decimal32(5, 1),
            64: pa.decimal64(9, 1),
            128: pa.decimal128(38, 1),
            256: pa.decimal256(60, 1),
        }.items()
    },
    "bytes": (pa.array([each.bytes for each in UUIDS], pa.binary(16)), ""),
    "text in bytes": (pa.array([b"x", b"y"] * 3), "categorical"),
    "views": (pa.array(["x", "y"] * 3, pa.string_view()), "categorical"),
    "runs of texts": (pa.RunEndEncodedArray.from_arrays([3, N], ["a", "b"]), "categorical"),
    "runs of numbers": (pa.RunEndEncodedArray.from_arrays([3, N], [1.5, 2.5]), "features"),
    "dictionary of dates": (pa.array([datetime.date(2026, 1, 1)] * N).dictionary_encode(), "categorical"),
    "struct": (pa.array([{"a": i} for i in range(N)]), ""),
    "map": (pa.array([[("a", i)] for i in range(N)], pa.map_(pa.string(), pa.int64())), ""),
    "list view": (pa.array([[i] for i in range(N)], pa.list_view(pa.int64())), ""),
    "list of intervals": (pa.array([[pa.MonthDayNano([1, 2, 3])]] * N), ""),
    "union": (pa.UnionArray.from_sparse(pa.array([0] * N, pa.int8()), [pa.array(range(N))]), ""),
    "null": (pa.nulls(N), ""),
}


def frame(values: Any) -> pd.DataFrame:
    return pd.DataFrame(BASE).assign(z=values)


PANDAS: dict[str, tuple[Any, str]] = {
    "period": (pd.period_range("2026-01", periods=N, freq="M"), ""),
    "interval": (pd.interval_range(0, N), ""),
    "cut": (pd.cut(pd.Series([1, 2, 3, 4, 5, 6]), 2), ""),
    "sparse": (pd.arrays.SparseArray([0, 0, 1.5, 0, 2, 0], fill_value=0), "features"),
    "sparse integers": (pd.arrays.SparseArray([0, 0, 1, 0, 2, 0]), "features"),
    "complex": (np.arange(N) * 1j, ""),
    "longdouble": (np.arange(N).astype(np.longdouble), "features"),
    "timedelta": (pd.to_timedelta(np.arange(N), "D"), ""),
    "Int64": (pd.array([1, None, 3, 4, 5, 6], "Int64"), "features"),
    "boolean": (pd.array([True, None] * 3, "boolean"), "features"),
    "uuids": (UUIDS, "categorical"),
    "sets": ([{1}] * N, ""),
}
POLARS: dict[str, tuple[pl.Series, str]] = {
    "Int128": (pl.Series("z", range(N), dtype=pl.Int128), "features"),
    "Duration": (pl.Series("z", range(N), dtype=pl.Duration), ""),
    "Time": (pl.Series("z", range(N)).cast(pl.Time), ""),
    "Object": (pl.Series("z", [object()] * N, dtype=pl.Object), ""),
    "Enum": (pl.Series("z", ["x", "y"] * 3, dtype=pl.Enum(["x", "y"])), "categorical"),
    "Array": (pl.Series("z", [[1, 2]] * N, dtype=pl.Array(pl.Int64, 2)), ""),
    "Decimal": (pl.Series("z", ["1.5"] * N).cast(pl.Decimal(10, 2)), "features"),
}
DUCKDB = {
    "uuid()": "categorical",
    "interval 1 day": "",
    "range::hugeint": "features",
    "range::varint": "",
    "'1010'::bit": "",
    "timetz '10:00:00+01'": "",
    "{'a': range}": "",
    "map {'a': range}": "",
    "union_value(k := range)": "",
    "['x', 'y'][1 + range % 2]::enum('x', 'y')": "categorical",
    "'{}'::json": "categorical",
    "blob '\\xFF'": "",
    "timestamp_ns '2026-01-01'": "",
}
FRAMES: list[Any] = [
    *(pytest.param(lambda v=v: pa.table({**BASE, "z": v}), use, id=f"arrow {n}") for n, (v, use) in ARROW.items()),
    *(pytest.param(lambda v=v: frame(v), use, id=f"pandas {n}") for n, (v, use) in PANDAS.items()),
    *(
        pytest.param(lambda v=v: pl.DataFrame(BASE).with_columns(v), u, id=f"polars {n}")
        for n, (v, u) in POLARS.items()
    ),
    *(pytest.param(lambda sql=sql: duckdb_table(sql), use, id=f"duckdb {sql}") for sql, use in DUCKDB.items()),
]


def duckdb_table(sql: str) -> pa.Table:
    values = duckdb.sql(f"select {sql} as z from range({N})").to_arrow_table()
    return pa.table({**BASE, "z": values["z"]})


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "use"), FRAMES)
def test_a_column_of_any_type_is_a_feature_or_left_out(rows: Callable[[], Any], use: str, tmp_path: Path) -> None:
    table, found = rows_as_table(rows(), None, None, USES)
    assert {key for key in ("features", "categorical") if "z" in found[key]} == ({use} if use else set())
    prepare_tables({"all": table}, found, {"max_rejected": 0}, str(tmp_path / "data"))
    assert open_dataset(str(tmp_path / "data")).manifest.counts().documents == N


def test_addresses_of_objects_are_never_read() -> None:
    objects = pl.Series("z", [object()] * N, dtype=pl.Object)
    table, _ = rows_as_table(pl.DataFrame(BASE).with_columns(objects), None, None, USES)
    assert "z" not in table.column_names  # Arrow has them as bytes, which are UTF-8 on some days


def guessed_of(table: pa.Table, path: Path) -> None:
    """What `jobs.init` does of the columns of a file."""
    pq.write_table(table, path)
    columns = first_columns(files_of([str(path)], Dialect()), Dialect(), 1000)
    seen = read_structure([str(path)], structured(columns), Dialect())
    found = guess(columns, seen, USES, "log")
    assert found.query.name == "q"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (values, _) in ARROW.items() if name not in ("list of intervals",)])
def test_a_first_look_at_a_file_passes_over_what_it_cannot_read(name: str, tmp_path: Path) -> None:
    table = pa.table({**BASE, "z": ARROW[name][0]})
    try:
        pq.write_table(table, tmp_path / "tried.parquet")
    except pa.ArrowNotImplementedError:  # no file can hold it
        assert not cols.is_kept(table.schema.field("z").type) or name.startswith("runs")
        return
    guessed_of(table, tmp_path / "log.parquet")


SIMPLE = [
    *(pa.null(), pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.string(), pa.large_binary()),
    *(pa.binary(4), pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("us"), pa.timestamp("s"), pa.duration("ns")),
    *(pa.timestamp("ns", "Europe/Berlin"), pa.decimal32(3), pa.decimal256(50, 2), pa.month_day_nano_interval()),
    *(pa.string_view(), pa.binary_view(), pa.uuid(), pa.json_(), pa.bool8(), pa.opaque(pa.int8(), "t", "v")),
]
KINDS = st.recursive(
    st.sampled_from(SIMPLE),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        inner.map(lambda kind: pa.struct([("a", kind)])),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
        st.sampled_from([pa.string(), pa.int16(), pa.date32()]).map(lambda kind: pa.dictionary(pa.int8(), kind)),
        inner.map(lambda kind: pa.sparse_union([pa.field("a", kind)])),
    ),
    max_leaves=3,
)


@pytest.mark.slow
@given(kind=KINDS)
def test_what_is_kept_can_be_written_and_looked_at(kind: pa.DataType, tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = cols.plain(pa.table({**BASE, "z": pa.nulls(N, kind)}))
    table, found = rows_as_table(plain, None, None, USES)
    assert found["features"][:1] == ["f"]
    assert ("z" in table.column_names) == cols.is_kept(plain.schema.field("z").type)
    guessed_of(table, tmp_path_factory.mktemp("kinds") / "log.parquet")


def test_uuids_of_a_file_are_their_text_whoever_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    rows = ", ".join(f"('{each}'::uuid, {i})" for i, each in enumerate(UUIDS))
    duckdb.sql(f"copy (select * from (values {rows}) t(q, f)) to '{path}'")
    [block] = blocks_of(Items(columns=ColumnMapping(query="q", features=("f",))), path)
    assert block.query_ids_N.to_pylist() == [str(each) for each in UUIDS]
    assert not block.rejected


@pytest.mark.parametrize("rows", [pa.table([[1], [2]], ["a", "a"]), pd.DataFrame([[1, 2]], columns=[1, "1"])])
def test_a_name_that_two_columns_have_is_named(rows: Any) -> None:
    with pytest.raises(InputError, match=r"X: 2 columns are named '[a1]'; rename all but one"):
        rows_as_table(rows, None, [1], {})


def test_a_use_of_a_column_that_nothing_reads_is_named() -> None:
    with pytest.raises(InputError, match=r"X: column 'z' is month_day_nano_interval, which no use reads; convert it"):
        rows_as_table(pa.table({**BASE, "z": ARROW["interval"][0]}), None, None, {**USES, "features": ["f", "z"]})
