import contextlib
import csv
import gzip
import io
import json
import lzma
import math
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from news_log import NEWS
from preparing import prepare
from pydantic import ValidationError
from source_blocks import blocks_of, features_of, rows_of

from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.times import periods
from ltrscale.errors import InputError
from ltrscale.ingest.categories import CategoryEncoder, encode
from ltrscale.ingest.grouplogs import GroupRows
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping, ListColumns
from ltrscale.ingest.rows import Rejection, RowBlock, concat
from ltrscale.ingest.tables import read_parquet

SIMPLE = ColumnMapping(query="q", item="d", label="y", features=("f*",))


def read(url: Path | str, mapping: ColumnMapping = SIMPLE, **more: Any) -> tuple[RowBlock, list[Rejection]]:
    return rows_of(Items(columns=mapping), url, **more)


def write_csv(folder: Path, text: str | bytes, name: str = "log.csv") -> Path:
    path = folder / name
    data = text.encode() if isinstance(text, str) else text
    packed = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(packed(data))
    return path


def write_parquet(folder: Path, columns: dict[str, Any], name: str = "log.parquet", **options: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


# real data


@pytest.mark.slow
def test_documentation_search_csv(shared_data: Path) -> None:
    path = shared_data / "csv" / "msft-docs" / "normalized_features.csv.gz"
    mapping = ColumnMapping(query="query_id", label="grade", features=("*",))
    rows, rejected = read(path, mapping, rows=1_000)
    assert (rows.features_NF.shape, rejected) == ((8_679, 24), [])
    assert rows.lines_N.tolist() == list(range(2, 8_681))
    with gzip.open(path, "rt") as stream:
        expected = list(csv.DictReader(stream))
    assert rows.query_ids_N.to_pylist() == [row["query_id"] for row in expected]
    assert rows.labels_N.tolist() == [float(row["grade"]) for row in expected]
    names = [feature.name for feature in features_of(Items(columns=mapping), path)]
    assert names == sorted(name for name in expected[0] if name not in ("grade", "query_id"))
    features_NF = np.array([[float(row[name]) for name in names] for row in expected], np.float32)
    np.testing.assert_array_equal(rows.features_NF, features_NF)


def test_parts_follow_from_queries_alone(tmp_path: Path) -> None:
    """Other lists of a query, in other files and orders, are in its part; and each part has about as many queries."""
    rng = np.random.default_rng(0)
    queries = [f"q{number}" for number in range(3000)]
    mapping = ColumnMapping(query="q", within=("day",), label="y", features=("f*",), period="part")

    def parts_of(order: list[str], day: int) -> dict[str, str]:
        columns = {"q": order, "day": [day] * len(order), "y": [1.0] * len(order), "f1": rng.normal(size=len(order))}
        rows, rejected = read(write_parquet(tmp_path, columns), mapping)
        assert rejected == []
        assert rows.periods_N is not None
        return dict(zip(order, rows.periods_N.to_pylist(), strict=True))

    parts = parts_of(queries, 1)
    assert parts_of(queries[::-1][:100], 2) == {query: parts[query] for query in queries[-100:]}
    counts = Counter(parts.values())
    assert sorted(counts) == [f"part-{number}" for number in range(1, 7)]
    assert min(counts.values()) > 420
    lists = {"q": queries[:50], "y": [[1.0, 0.0]] * 50, "f1": [[0.1, 0.2]] * 50}
    as_lists = ListColumns(query="q", labels="y", features=("f1",), names=("f1",), period="part")
    rows, _ = rows_of(GroupRows(columns=as_lists), write_parquet(tmp_path, lists))
    assert rows.periods_N is not None
    assert rows.periods_N.to_pylist() == [parts[query] for query in queries[:50] for _ in range(2)]
    with pytest.raises(ValidationError, match="leave one out"):
        ColumnMapping(query="q", features=("f*",), period="part", period_column="day")


SESSIONS = ColumnMapping(**NEWS, meta=("session_id",))


def test_news_parquet(shared_data: Path) -> None:
    [path] = (shared_data / "news" / "sample").rglob("part-0.parquet")
    rows, rejected = read(path, SESSIONS, rows=5_000)
    table = pq.read_table(path, partitioning=None)
    assert rejected == []
    assert rows.lines_N.tolist() == list(range(1, 12_704))
    assert rows.query_ids_N.equals(table["impression_id"].combine_chunks())
    assert pc.count_distinct(rows.query_ids_N).as_py() == 1_070
    assert rows.labels_N.sum() == 720
    assert rows.doc_ids_N is not None
    assert rows.doc_ids_N.equals(table["article_id"].cast(pa.string()).combine_chunks())
    assert rows.periods_N is not None
    assert set(rows.periods_N.to_pylist()) == {"2017-W40"}
    assert rows.columns["meta_session_id"].equals(table["session_id"].combine_chunks())
    names = [name for kind in ("f_", "c_") for name in sorted(table.column_names) if name.startswith(kind)]
    assert rows.features_NF.shape == (12_703, len(names)) == (12_703, 59)
    for i, name in enumerate(names):
        expected = table[name].cast(pa.float32()).fill_null(math.nan).to_numpy()
        np.testing.assert_array_equal(rows.features_NF[:, i], expected, err_msg=name)


@pytest.mark.slow
def test_csv_and_parquet_of_one_log_agree(shared_data: Path, tmp_path: Path) -> None:
    [path] = (shared_data / "news" / "sample").rglob("part-0.parquet")
    table = pq.read_table(path, partitioning=None).slice(0, 2_000)
    text = table.to_pandas().to_csv(index=False)
    one, _ = read(write_parquet(tmp_path, {name: table[name] for name in table.column_names}), SESSIONS)
    two, rejected = read(write_csv(tmp_path, text, "log.csv.xz"), SESSIONS)
    assert rejected == []
    np.testing.assert_allclose(one.features_NF, two.features_NF, rtol=1e-6)
    np.testing.assert_array_equal(one.labels_N, two.labels_N)
    assert (one.query_ids_N, one.periods_N, one.doc_ids_N) == (two.query_ids_N, two.periods_N, two.doc_ids_N)


# CSV: every line is a row or a rejection


def test_values_of_csv(tmp_path: Path) -> None:
    text = "q,d,y,f1,f2,other\n" + "".join(
        f"{row},x\n"
        for row in ['a,,1,1.5,"2"', "a,NULL,,NULL,nan", '"a, b",d,0, 3 ,inf', "1,d,2.5,1e39,-1E-3", "ü,d,0,+1,1e-60"]
    )
    rows, rejected = read(write_csv(tmp_path, text.replace("\n", "\r\n")))
    assert rejected == []
    assert rows.query_ids_N.to_pylist() == ["a", "a", "a, b", "1", "ü"]
    assert rows.doc_ids_N is not None
    assert rows.doc_ids_N.to_pylist() == [None, None, "d", "d", "d"]
    np.testing.assert_array_equal(rows.labels_N, np.array([1, np.nan, 0, 2.5, 0], np.float32))
    expected = [[1.5, 2], [np.nan, np.nan], [3, np.inf], [np.inf, -1e-3], [1, 0]]
    np.testing.assert_array_equal(rows.features_NF, np.array(expected, np.float32))


def test_rejected_lines_name_line_column_and_text(tmp_path: Path) -> None:
    lines = [
        "q,d,y,f1,f2",
        "a,d,1,2,3",
        "",
        "a,d,1,2",
        "a,e,1,abc,3",
        ",e,1,2,3",
        'a,"e,1,2,3',
        "a,e\r,1,2,3",
        "b,e,1,2,3",
    ]
    data = "\n".join(lines).encode() + b"\nb,\xff,1,2,3\nb,e\0,1,2,3\nb,f,x,2,3,\nb,f,1e0,2,3"
    rows, rejected = read(write_csv(tmp_path, data))
    assert rows.lines_N.tolist() == [2, 9, 13]
    assert [one.line for one in rejected] == [4, 5, 6, 7, 8, 10, 11, 12]
    assert {(one.rule, one.rows) for one in rejected} == {("unparsable", 1)}
    shown = {one.line: one.text for one in rejected}
    assert shown[4] == "4 columns where the header has 5: a,d,1,2"
    assert shown[5] == "column 'f1' is not a number: a,e,1,abc,3"
    assert shown[6] == "column 'q' has no value: ,e,1,2,3"
    assert "quote" in shown[7]
    assert "carriage return" in shown[8]
    assert shown[10].startswith("column 'd' is not text in UTF-8: b,")
    assert rejected[1].query_id == "a"


PIECES = st.sampled_from(["a", "1", "2.5", ",", ",", ",", '"', '""', "\r", " ", "é", "\0", "NULL", "x" * 50])


@pytest.mark.slow
@given(
    lines=st.lists(st.lists(PIECES, max_size=9).map("".join), max_size=12),
    end=st.sampled_from(["", "\n"]),
    line_end=st.sampled_from(["\n", "\r\n"]),
    batch_rows=st.integers(1, 9),
)
@example(lines=['a,"x,1,2', '1,y",1,2'], end="\n", line_end="\n", batch_rows=9)
@example(lines=['a,"x""",1,2', 'a,"",1,2', 'a,"x" ,1,2', 'a,x"",1,2'], end="", line_end="\n", batch_rows=9)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_line_is_lost_and_rows_are_what_the_standard_library_reads(
    lines: list[str], end: str, line_end: str, batch_rows: int, tmp_path: Path
) -> None:
    text = line_end.join(["q,d,y,f", *lines]) + end
    # the pieces never make a column of text that begins the file look like a wrong type by themselves: name it exactly
    mapping = ColumnMapping(query="q", item="d", categorical=("f",))
    rows, rejected = read_all(write_csv(tmp_path, text), mapping, batch_rows)
    physical = text.split("\n")[1:]
    expected = {i + 2 for i, line in enumerate(physical) if line.removesuffix("\r")}
    if physical and physical[-1] == "\r":
        expected.add(len(physical) + 1)  # a carriage return that ends the file ends no line
    seen = [*(row[0] for row in rows), *(one.line for one in rejected)]
    assert sorted(seen) == sorted(set(seen))
    assert set(seen) >= expected - {len(physical) + 1}
    assert set(seen) <= expected
    for line, query, doc in rows:
        [fields] = csv.reader([physical[line - 2].removesuffix("\r")], strict=True)
        assert [query, doc] == [fields[0], None if fields[1] in ("", "NULL") else fields[1]]


def read_all(path: Path, mapping: ColumnMapping, batch_rows: int) -> tuple[list[tuple[int, str, str]], list[Rejection]]:
    blocks = blocks_of(Items(columns=mapping), path, rows=batch_rows)
    rows: list[tuple[int, str, str]] = []
    for block in blocks:
        assert len(block) + len(block.rejected) <= batch_rows
        assert block.doc_ids_N is not None
        rows += zip(block.lines_N.tolist(), block.query_ids_N.to_pylist(), block.doc_ids_N.to_pylist(), strict=True)
    return rows, [one for block in blocks for one in block.rejected]


def test_a_column_that_is_mostly_text_is_not_taken_for_numbers(tmp_path: Path) -> None:
    rows = "".join(f"a,d{i},{'oops' if i == 3 else i},title {i},,{i}\n" for i in range(9))
    path = write_csv(tmp_path, "q,d,price,title,empty,y\n" + rows)
    mapping = ColumnMapping(query="q", item="d", label="y", features=("*",))
    assert [feature.name for feature in features_of(Items(columns=mapping), path)] == ["price"]
    kept, rejected = read(path, mapping)
    assert (len(kept), [one.line for one in rejected]) == (8, [5])
    with pytest.raises(
        InputError, match=r"column 'title' \(numeric\) should hold numbers and is string; list it under"
    ):
        features_of(Items(columns=mapping.replace(features=("price", "title"))), path)
    explicit, _ = read(path, mapping.replace(features=("price", "empty")))
    assert np.isnan(explicit.features_NF[:, 1]).all()


@pytest.mark.slow
def test_long_files_are_read_in_blocks_with_their_line_numbers(tmp_path: Path) -> None:
    n = 120_000
    lines = [f"q{i // 10},d{i},{i % 3},{i},{'x' * 60}" for i in range(n)]
    for bad in (7, 70_000, 119_999):
        lines[bad] = "bad"
    path = write_csv(tmp_path, "q,d,y,f,t\n" + "\n".join(lines), "log.csv.gz")
    blocks = blocks_of(Items(columns=SIMPLE), path, rows=50_000)
    assert len(blocks) > 2
    assert [one.line for block in blocks for one in block.rejected] == [9, 70_002, 120_001]
    lines_N = np.concatenate([block.lines_N for block in blocks])
    values_N = np.concatenate([block.features_NF[:, 0] for block in blocks])
    assert len(lines_N) == n - 3
    np.testing.assert_array_equal(lines_N, values_N + 2)


# Parquet rows


def test_types_of_parquet(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path,
        {
            "q": pa.array([7, 7, 8, None], pa.int64()),
            "d": pa.array(["a", "b", "a", "c"]).dictionary_encode(),
            "y": pa.array([1, None, 0, 1], pa.int8()),
            "f.int": pa.array([1, None, 3, 4], pa.int64()),
            "f.bool": pa.array([True, False, None, True]),
            "f.double": pa.array([1.5, math.nan, 1e300, 0]),
            "f.half": pa.array(np.array([1, 2, 3, 4], np.float16)),
            "f.null": pa.nulls(4),
            "f.text": pa.array(["x", "12", None, "x"]),
        },
    )
    mapping = SIMPLE.replace(features=("f.int", "f.bool", "f.*"), categorical=("f.text",))
    rows, [rejection] = read(path, mapping)
    assert rows.query_ids_N.to_pylist() == ["7", "7", "8"]
    assert rows.lines_N.tolist() == [1, 2, 3]
    nan, code = np.nan, encode(pa.array(["x"]))[0]
    expected = [[1, 1, 1.5, 1, nan, code], [nan, 0, nan, 2, nan, 12], [3, nan, np.inf, 3, nan, nan]]
    np.testing.assert_array_equal(rows.features_NF, np.array(expected, np.float32))
    np.testing.assert_array_equal(rows.labels_N, [1, np.nan, 0])
    assert (rejection.line, rejection.rule) == (4, "unparsable")
    assert rejection.text.startswith('column \'q\' has no value: {"q": null, "d": "c", "y": 1,')


def test_bytes_that_are_not_text_are_rejected(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff", b"c", b"d"], pa.binary())
    good = pa.array([b"a", b"b", b"c", b"\xfe\xff"], pa.binary())
    path = write_parquet(tmp_path, {"q": raw, "c": good, "y": [1, 0, 0, 0]})
    rows, rejected = read(path, ColumnMapping(query="q", label="y", categorical=("c",)))
    assert rows.lines_N.tolist() == [1, 3]
    assert [one.line for one in rejected] == [2, 4]
    assert "column 'c' is not text in UTF-8" in rejected[1].text


def test_side_columns_and_meta(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path,
        {
            "q": ["a", "a"],
            "f": [1, 2],
            "pos": [1, 2],
            "clk": [0, None],
            "w": [0.5, 1.0],
            "paid": [9.5, 0],
            "user": ["u", "v"],
        },
    )
    mapping = ColumnMapping(
        query="q", features=("f",), positions="pos", clicks="clk", weights="w", gain="paid", meta=("user", "f")
    )
    rows, _ = read(path, mapping)
    assert {name: column.to_pylist() for name, column in rows.columns.items()} == {
        "positions": [1.0, 2.0],
        "clicks": [0.0, None],
        "weights": [0.5, 1.0],
        "gains": [9.5, 0.0],
        "meta_user": ["u", "v"],
        "meta_f": [1, 2],
    }
    assert np.isnan(rows.labels_N).all()
    assert rows.doc_ids_N is None


def test_collisions_are_counted_once_over_files_that_share_encoders(tmp_path: Path) -> None:
    code = int(encode(pa.array(["berlin"]))[0])
    path = write_parquet(tmp_path, {"q": ["a", "a"], "city": ["berlin", str(code)]})
    mapping = ColumnMapping(query="q", categorical=("city",))
    encoders: dict[str, CategoryEncoder] = {}
    for _ in range(2):
        blocks_of(Items(columns=mapping), path, encoders=encoders)
        assert encoders["city"].collisions == 1


def test_row_groups_and_batches_keep_row_numbers(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, {"q": ["a"] * 1_000, "f": range(1_000)}, row_group_size=300)
    blocks = blocks_of(Items(columns=ColumnMapping(query="q", features=("f",))), path, rows=128)
    assert max(map(len, blocks)) == 128
    rows = concat(blocks)
    assert rows.lines_N.tolist() == list(range(1, 1_001))
    np.testing.assert_array_equal(rows.features_NF[:, 0], np.arange(1_000))


# periods


@pytest.mark.parametrize(
    ("period", "names"),
    [
        ("week", ["2026-W07", "2026-W01", "2020-W53"]),
        ("day", ["2026-02-14", "2025-12-29", "2021-01-03"]),
        ("hour", ["2026-02-14T23", "2025-12-29T00", "2021-01-03T12"]),
    ],
)
def test_every_form_of_a_time_stamp_gives_the_same_period(period: Any, names: list[str]) -> None:
    instants = [datetime(2026, 2, 14, 23, 59, 59), datetime(2025, 12, 29), datetime(2021, 1, 3, 12)]
    seconds = [int(instant.replace(tzinfo=UTC).timestamp()) for instant in instants]
    forms = [pa.array(instants, pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")]
    forms += [form.cast(pa.timestamp("us", "Asia/Tokyo")) for form in forms[2:3]]
    forms += [pa.array([s * 10**digits for s in seconds]) for digits in (0, 3, 6, 9)]
    forms += [pa.array([float(s) for s in seconds]), pa.array([str(s) for s in seconds])]
    forms += [pa.array([instant.isoformat(sep) + zone for instant in instants]) for sep in " T" for zone in ("", "Z")]
    forms += [pa.array([f"{instants[0].isoformat()}+00:00", "2025-12-29", f"{seconds[2]}000"])]
    for form in forms:
        found, bad_N = periods(form, period)
        assert (found.to_pylist(), bad_N.any()) == (names, False), form


@pytest.mark.parametrize(
    "column",
    [
        pa.array([None, 0], pa.int64()),
        pa.array([math.inf, 0.0]),
        pa.array([math.nan, 0.0]),
        pa.array([1e300, 0.0]),
        pa.array(["yesterday", "1970-01-01T00:30Z"]),
        pa.array(["2026-02-30", "0"]),
        pa.array(["", "1970-01-01"]),
        pa.array([-(2**62), 0], pa.timestamp("s")),
    ],
)
def test_time_stamps_that_cannot_be_read(column: pa.Array) -> None:
    found, bad_N = periods(column, "hour")
    assert found.to_pylist() == [None, "1970-01-01T00"]
    assert bad_N.tolist() == [True, False]


def test_rows_with_a_bad_time_stamp_are_rejected(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "q,f,at\na,1,2026-02-14 10:00:00\na,2,soon\na,3,\n")
    rows, rejected = read(path, ColumnMapping(query="q", features=("f",), time="at", period="day"))
    assert rows.periods_N is not None
    assert rows.periods_N.to_pylist() == ["2026-02-14"]
    assert [(one.line, one.query_id) for one in rejected] == [(3, "a"), (4, "a")]
    assert rejected[0].text == "column 'at' is not a time stamp: a,2,soon"


def test_a_period_column_or_path_part(tmp_path: Path) -> None:
    columns = {"q": ["a", "b"], "f": [1, 2], "week": ["W1", None]}
    mapping = ColumnMapping(query="q", features=("f",), period_column="week")
    rows, rejected = read(write_parquet(tmp_path, columns), mapping)
    assert rows.periods_N is not None
    assert (rows.periods_N.to_pylist(), [one.line for one in rejected]) == (["W1"], [2])
    del columns["week"]
    rows, _ = read(write_parquet(tmp_path, columns, "week=2026-02-14T09%3A00/part-0.parquet"), mapping)
    assert (rows.period, rows.periods_N) == ("2026-02-14T09:00", None)


# features and schemas


def test_patterns_exclusions_and_order(tmp_path: Path) -> None:
    names = ["c_b", "f_2", "q", "f_1", "x", "c_a", "y", "name", "f_leak"]
    path = str(write_parquet(tmp_path, {name: ["t"] if name in ("name", "q") else [1] for name in names}))

    def found(**fields: Any) -> list[str]:
        mapping = ColumnMapping(query="q", label="y", **fields)
        return [f"{feature.name}:{feature.kind[0]}" for feature in features_of(Items(columns=mapping), path)]

    assert found(features=("f_*",), exclude=("f_leak",)) == ["f_1:n", "f_2:n"]
    assert found(features=("*",), categorical=("c_*",), exclude=("f_l*",)) == [
        "f_1:n",
        "f_2:n",
        "x:n",
        "c_a:c",
        "c_b:c",
    ]
    assert found(features=("x", "f_2"), categorical=("name",)) == ["x:n", "f_2:n", "name:c"]
    assert found(features=("*",), meta=("x",), exclude=("c_*",)) == ["f_1:n", "f_2:n", "f_leak:n"]
    assert found(features=("x", "f_*", "f_1"), categorical=("name", "c_*")) == [
        *("x:n", "f_2:n", "f_leak:n", "f_1:n", "name:c", "c_a:c", "c_b:c")
    ]
    assert found(features=("*", "c_b"), categorical=("f_*",)) == ["c_a:n", "x:n", "c_b:n", "f_1:c", "f_2:c", "f_leak:c"]


def test_no_pattern_takes_a_column_with_another_use(tmp_path: Path) -> None:
    names = ["user_id", "user_day", "user_at", "user_age", "user_shop", "user_clicks"]
    rows = "".join(f"q,{123456789 + i},{i},{1767657600 + i},{i},{i},0\n" for i in range(3))
    path = write_csv(tmp_path, ",".join(["q", *names]) + "\n" + rows)
    mapping = ColumnMapping(
        query="q",
        within=("user_day",),
        time="user_at",
        clicks="user_clicks",
        meta=("user_id",),
        features=("user_*",),
        categorical=("user_shop",),
    )
    assert [feature.name for feature in features_of(Items(columns=mapping), path)] == ["user_age", "user_shop"]
    kept, rejected = read(path, mapping)
    assert (kept.columns["meta_user_id"].to_pylist(), rejected) == (["123456789", "123456790", "123456791"], [])
    by_kind = mapping.replace(features=("user_age",), categorical=("user_*",))
    names = [feature.name for feature in features_of(Items(columns=by_kind), path)]
    assert names == ["user_age", "user_shop"]


def test_clicks_of_csv_may_be_graded(tmp_path: Path) -> None:
    mapping = ColumnMapping(query="q", features=("f",), label="y", clicks="y", grades={"0": 0, "1": 3})
    kept, rejected = read(write_csv(tmp_path, "q,f,y\na,1,1\na,2,0\n"), mapping)
    assert (kept.labels_N.tolist(), kept.columns["clicks"].to_pylist(), rejected) == ([3, 0], [1, 0], [])


@pytest.mark.parametrize("use", ["meta", "within", "dates"])
def test_a_column_of_csv_is_no_number_and_text_at_once(tmp_path: Path, use: str) -> None:
    columns: dict[str, Any] = {"q": ["a"], "f": [16777217]}
    double = {"dates": {"f": ["hour"]}} if use == "dates" else {use: ("f",)}
    mapping = ColumnMapping.model_validate({"query": "q", "features": ("f",), **double})
    with pytest.raises(InputError, match=r"log.csv: column 'f' is used as a number and also as a key, .*; leave one"):
        read(write_csv(tmp_path, "q,f\na,16777217\n"), mapping)
    (tmp_path / "log.jsonl").write_text('{"q": "a", "f": 16777217}\n')
    for path in (write_parquet(tmp_path, columns), tmp_path / "log.jsonl"):  # both have types
        kept, _ = read(path, mapping)
        assert kept.features_NF[0, 0] == 16777216
        if use == "meta":
            assert kept.columns["meta_f"].to_pylist() == [16777217]
        if use == "within":
            assert kept.query_ids_N.to_pylist() == ["a|16777217"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query": "quary"}, r"log.parquet: no column 'quary' \(query\); did you mean 'query'\?"),
        ({"label": "clicks"}, r"no column 'clicks' \(label\); its columns are query, f_one"),
        ({"features": ("quote",)}, r"no column is named 'quote'; its columns are query, f_one"),
        ({"features": ("f_onne",)}, r"features: no column is named 'f_onne'; did you mean 'f_one'\?"),
        ({"features": ("g_*",)}, r"features: no column is named 'g_\*'"),
        (
            {"features": ("*", "title"), "exclude": ("tw*",)},
            r"column 'title' \(numeric\) should hold numbers and is string; list it under",
        ),
        ({"label": "title"}, r"column 'title' \(label\) should hold numbers and is string"),
        ({"query": "tags"}, r"column 'tags' \(query\) should hold text or whole numbers and is list"),
        ({"categorical": ("tags",)}, r"column 'tags' \(categorical\) should hold single values"),
        ({"time": "tags"}, r"column 'tags' \(time\) should hold time stamps"),
        ({"period_column": "week"}, r"no column 'week' \(period_column\)"),
        ({"features": ("twice",)}, r"2 columns are named 'twice'"),
    ],
)
def test_a_wrong_column_is_one_line_with_its_remedy(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    columns = [pa.array(["a"]), pa.array([1]), pa.array(["t"]), pa.array([["t"]]), pa.array([1]), pa.array([1])]
    table = pa.Table.from_arrays(columns, ["query", "f_one", "title", "tags", "twice", "twice"])
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(InputError, match=message):
        read(tmp_path / "log.parquet", ColumnMapping(**{"query": "query", "features": ("f_one",)} | fields))


@pytest.mark.parametrize("features", ["*", "l*"])
def test_patterns_that_leave_no_column_as_a_feature_are_one_line(tmp_path: Path, features: str) -> None:
    path = write_csv(tmp_path, "q,d,label\na,x,1\na,y,0\n")
    mapping = ColumnMapping(query="q", item="d", label="label", features=(features,))
    with pytest.raises(InputError, match=r"log.csv: no column is left as a feature; .*; name texts under categorical"):
        read(path, mapping)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"features": ("*",), "time": "t", "period_column": "p"},
        {"features": ("y",), "label": "y"},
        {"features": ("q",)},
    ],
)
def test_mappings_that_contradict_themselves(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ColumnMapping(query="q", **fields)


def test_files_must_have_the_features_of_the_first(tmp_path: Path) -> None:
    mapping = ColumnMapping(query="q", features=("f*",))
    features = [Feature(name="f1"), Feature(name="f2")]
    swapped = write_parquet(tmp_path, {"f2": [2], "q": ["a"], "f1": [1.5]}, "swapped.parquet")
    rows, _ = read(swapped, mapping, features=features)
    assert rows.features_NF.tolist() == [[1.5, 2]]
    cases = {
        "missing": ({"f1": [1]}, r"missing.parquet: column 'f2' is missing, which one.parquet has"),
        "other": (
            {"f1": [1], "f2": ["x"]},
            r"other.parquet: column 'f2' \(numeric\) should hold numbers and is string",
        ),
        "extra": (
            {"f1": [1], "f2": [2], "f3": [3]},
            r"extra.parquet: column 'f3' \(numeric\) is not among the features of one",
        ),
    }
    for name, (columns, message) in cases.items():
        path = write_parquet(tmp_path, {"q": ["a"], **columns}, f"{name}.parquet")
        with pytest.raises(InputError, match=message):
            read(path, mapping, features=features, first="one.parquet")
        text = ",".join(["q", *columns]) + "\n" + ",".join(["a", *(str(v[0]) for v in columns.values())]) + "\n"
        with pytest.raises(InputError, match=message.replace("parquet:", "csv:")):
            read(write_csv(tmp_path, text, f"{name}.csv"), mapping, features=features, first="one.parquet")


# files that cannot be read


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    good = write_csv(tmp_path, "q,d,y,f\n" + "a,d,1,2\n" * 5_000, "good.csv.gz").read_bytes()
    (tmp_path / "cut.csv.gz").write_bytes(good[:-20])
    packed = lzma.compress(gzip.decompress(good))
    (tmp_path / "cut.csv.xz").write_bytes(packed[:-30])
    (tmp_path / "flipped.csv.xz").write_bytes(packed[:60] + bytes([packed[60] ^ 4]) + packed[61:])
    (tmp_path / "followed.csv.xz").write_bytes(packed + b"something else")
    (tmp_path / "empty.csv").write_bytes(b"")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "log.txt").write_bytes(b"q,d,y,f\n")
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "text.parquet").write_bytes(b"q,d,y,f\n" * 9)
    whole = write_parquet(tmp_path, {"q": ["a"] * 99, "d": ["b"] * 99, "y": [1] * 99, "f": range(99)}).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    cases = {
        "cut.csv.gz": r"too early, at byte \d+",
        "cut.csv.xz": r"too early, at byte \d+",
        "flipped.csv.xz": r"corrupt xz data at or before byte \d+",
        "followed.csv.xz": rf"corrupt xz data at or before byte {len(packed) + 14} .*, 40008 bytes of text came before",
        "empty.csv": "the file is empty; a CSV file begins with",
        "binary.csv": "line 1 is no line of column names",
        "log.txt": "the name does not end in .parquet",
        "empty.parquet": "the file is empty",
        "text.parquet": "cannot decode the footer before byte 72",
        "cut.parquet": r"cannot decode the footer before byte \d+",
        "none.parquet": "no such file",
        "none.csv": "no such file",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=rf"{name}: .*{message}"):
            read(tmp_path / name)


def test_a_flipped_page_names_row_group_and_row(tmp_path: Path) -> None:
    columns = {"q": [str(i) for i in range(4_000)], "d": ["b"] * 4_000, "y": [1] * 4_000, "f": range(4_000)}
    path = write_parquet(tmp_path, columns, row_group_size=2_000, compression="none", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    second = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data[second.data_page_offset + 200] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"log.parquet: cannot decode row group 1, near row 2001: .*CRC"):
        read(path)


@pytest.mark.slow
def test_damage_to_a_footer_raises_one_line_at_most(tmp_path: Path) -> None:
    columns = {"q": ["a"] * 8, "d": [["b"]] * 8, "y": [1] * 8, "f": range(8)}
    path = write_parquet(tmp_path, columns, row_group_size=4, compression="none")
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    numbers = []
    for at in range(footer, len(whole) - 8, 5):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with contextlib.suppress(InputError):  # one line by its nature; anything else fails the test
            numbers.append([line for batch in read_parquet(str(path), ["y", "f"], 3) for line in batch.lines_N])
    assert numbers
    assert all(lines == [*range(1, 9)] for lines in numbers)


@pytest.mark.parametrize("n", [0, 9, 12])
def test_a_footer_that_counts_other_rows_is_one_line(tmp_path: Path, n: int) -> None:
    path = write_parquet(tmp_path, {"q": ["a"] * 8}, row_group_size=4)
    whole = path.read_bytes()
    for at in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole) - 8):
        damaged = bytearray(whole)
        damaged[at] ^= 2 * (8 ^ n)  # signed numbers are doubled
        with contextlib.suppress(OSError):
            if pq.read_metadata(io.BytesIO(damaged)).num_rows == n:
                path.write_bytes(damaged)
                break
    with pytest.raises(InputError, match=rf"log.parquet: 8 rows where its footer counts {n};"):
        list(read_parquet(str(path), ["q"], 3))


def test_a_header_without_rows(tmp_path: Path) -> None:
    rows, rejected = read(write_csv(tmp_path, "q,d,y,f"), ColumnMapping(query="q", features=("f",)))
    assert (len(rows), rejected) == (0, [])
    rows, rejected = read(write_csv(tmp_path, "\ufeffq,d,y,f\na,b,1,2\n"))
    assert (len(rows), rejected) == (1, [])


# one group a row

GROUPS = ListColumns(names=("a", "b"), labels="labels", docs="doc_ids", period_column="period")
GROUP_TABLE: dict[str, Any] = {
    "query_id": ["x", "y", "z", "x2"],
    "doc_ids": [["d1", "d2"], ["d1"], [], None],
    "features": pa.array([[1, 2, 3, 4], [5, None], [], [7, 8, 9, 0, 1, 2]], pa.list_(pa.float32())),
    "labels": [[1.0, 0.0], None, [], [0.0, 1.0, None]],
    "period": ["p", "p", "p", "r"],
}


def groups(path: Path, mapping: ListColumns = GROUPS, **more: Any) -> tuple[RowBlock, list[Rejection]]:
    blocks = blocks_of(GroupRows(columns=mapping), path, **more)
    rows = concat(blocks)
    rows.starts_N = np.concatenate([block.starts_N for block in blocks if block.starts_N is not None])
    return rows, [one for block in blocks for one in block.rejected]


@pytest.mark.parametrize("batch_groups", [1, 2, 100])
def test_groups_are_split_into_rows(tmp_path: Path, batch_groups: int) -> None:
    path = write_parquet(tmp_path, GROUP_TABLE)
    assert features_of(GroupRows(columns=GROUPS), path) == (Feature(name="a"), Feature(name="b"))
    rows, rejected = groups(path, rows=batch_groups)
    assert rows.query_ids_N.to_pylist() == ["x", "x", "y", "x2", "x2", "x2"]
    assert rows.lines_N.tolist() == [1, 1, 2, 4, 4, 4]
    assert rows.starts_N is not None
    assert rows.starts_N.tolist() == [True, False, True, True, False, False]
    expected = [[1, 2], [3, 4], [5, np.nan], [7, 8], [9, 0], [1, 2]]
    np.testing.assert_array_equal(rows.features_NF, np.array(expected, np.float32))
    np.testing.assert_array_equal(rows.labels_N, [1, 0, np.nan, 0, 1, np.nan])
    assert rows.doc_ids_N is not None
    assert rows.doc_ids_N.to_pylist() == ["d1", "d2", "d1", None, None, None]
    assert rows.periods_N is not None
    assert rows.periods_N.to_pylist() == ["p", "p", "p", "r", "r", "r"]
    assert [(one.line, one.rule, one.rows, one.query_id) for one in rejected] == [(3, "empty_group", 0, "z")]


@pytest.mark.parametrize(
    "inner", [pa.list_(pa.float64()), pa.list_(pa.float32(), 2), pa.large_list(pa.int16())], ids=str
)
def test_a_list_for_each_document(tmp_path: Path, inner: pa.DataType) -> None:
    nested = pa.array([[[1, 2], [3, 4]], [[5, 6]], [], [[7, 8], [9, 0], [1, 2]]], pa.list_(inner))
    rows, rejected = groups(write_parquet(tmp_path, GROUP_TABLE | {"features": nested}))
    assert rows.features_NF.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 0], [1, 2]]
    assert [one.line for one in rejected] == [3]
    if pa.types.is_fixed_size_list(inner):
        free = GROUPS.replace(names=())
        assert [feature.name for feature in features_of(GroupRows(columns=free), tmp_path / "log.parquet")] == [
            "1",
            "2",
        ]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.binary()], ids=str)
def test_text_of_groups_may_have_any_type(tmp_path: Path, kind: pa.DataType) -> None:
    columns = {
        "query_id": pa.array(GROUP_TABLE["query_id"]).cast(kind),
        "doc_ids": pa.array(GROUP_TABLE["doc_ids"], pa.list_(pa.string())).cast(pa.list_(kind)),
    }
    rows, rejected = groups(write_parquet(tmp_path, GROUP_TABLE | columns))
    plain, same = groups(write_parquet(tmp_path, GROUP_TABLE, "plain.parquet"))
    assert rows.query_ids_N.equals(plain.query_ids_N)
    assert rows.doc_ids_N is not None
    assert rows.doc_ids_N.equals(plain.doc_ids_N)
    assert len(rejected) == len(same)


def test_a_column_for_each_feature(tmp_path: Path) -> None:
    columns = GROUP_TABLE | {
        "f_1": [[1, 3], [5], [], [7, 9, 1]],
        "f_2": [[2.0, 4.0], [None], [], [8.0, 0.0, 2.0]],
        "c": [["7", "berlin"], [None], [], ["1", "2", "3"]],
    }
    mapping = GROUPS.replace(names=(), features=("f_*",), categorical=("c",))
    path = write_parquet(tmp_path, columns)
    assert [feature.kind for feature in features_of(GroupRows(columns=mapping), path)] == [
        "numeric",
        "numeric",
        "categorical",
    ]
    rows, _ = groups(path, mapping)
    backwards = dict(reversed(columns.items()))
    other = write_parquet(tmp_path, backwards, "other.parquet")
    assert features_of(GroupRows(columns=mapping), other) == features_of(GroupRows(columns=mapping), path)
    among = mapping.replace(features=("f_*",), categorical=("f_1",))
    assert [feature.name for feature in features_of(GroupRows(columns=among), path)] == ["f_2", "f_1"]
    codes = [7, encode(pa.array(["berlin"]))[0], np.nan, 1, 2, 3]
    expected = [[1, 2], [3, 4], [5, np.nan], [7, 8], [9, 0], [1, 2]]
    np.testing.assert_array_equal(rows.features_NF, np.column_stack([np.array(expected, np.float32), codes]))


@pytest.mark.slow
def test_a_data_set_can_be_prepared_again(shared_data: Path, tmp_path: Path) -> None:
    log = prepare(
        PrepareConfig(inputs=(str(shared_data / "news" / "sample"),), source=Items(columns=SESSIONS)),
        str(tmp_path / "one"),
    )
    features = log.manifest.features
    again = ListColumns(
        names=tuple(feature.name for feature in features),
        categorical=tuple(feature.name for feature in features if feature.kind == "categorical"),
        labels="labels",
        docs="doc_ids",
        period_column="period",
        meta=("meta_session_id",),
    )
    config = PrepareConfig(inputs=(str(tmp_path / "one/*/*.parquet"),), source=GroupRows(columns=again))
    copy = prepare(config, str(tmp_path / "two"))
    assert copy.manifest.features == features
    assert copy.manifest.accounting == log.manifest.accounting
    one, two = (pq.read_table(Path(made.url) / made.manifest.files[0].path) for made in (log, copy))
    assert one.drop_columns("features").equals(two.drop_columns("features"))
    features_of_one, features_of_two = (table["features"].combine_chunks().flatten().to_numpy() for table in (one, two))
    np.testing.assert_array_equal(features_of_one, features_of_two)  # NaN equals NaN


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()], ids=str)
def test_a_column_of_bytes_is_one_of_lists(tmp_path: Path, kind: pa.DataType) -> None:
    values = [
        None if row is None else np.array(row, np.float32).tobytes() for row in GROUP_TABLE["features"].to_pylist()
    ]
    rows, rejected = groups(write_parquet(tmp_path, GROUP_TABLE | {"features": pa.array(values, kind)}))
    plain, same = groups(write_parquet(tmp_path, GROUP_TABLE, "plain.parquet"))
    np.testing.assert_array_equal(rows.features_NF, plain.features_NF)
    assert [(each.line, each.rule) for each in rejected] == [(each.line, each.rule) for each in same]
    values[1] = b"12345"
    path = write_parquet(tmp_path, GROUP_TABLE | {"features": pa.array(values, kind)}, "damaged.parquet")
    with pytest.raises(
        InputError, match=r"damaged\.parquet: cannot decode the rows from 1 on: row 1 has features of 5"
    ):
        groups(path)


def test_lists_that_do_not_agree_are_rejected(tmp_path: Path) -> None:
    columns = {
        "query_id": ["odd", "labels", "docs", None, "good", "bytes"],
        "features": [[1.0, 2, 3], [1.0, 2], [1.0, 2, 3, 4], [1.0, 2, 3, 4, 5, 6], [1.0, 2], [1.0, 2]],
        "labels": [[1], [1, 1], [1, 1], [1, 1, 1], [2], [1]],
        "doc_ids": pa.array([[b"d"], [b"d"], [b"d"], None, [b"d"], [b"\xff"]], pa.list_(pa.binary())),
        "period": ["p"] * 6,
    }
    rows, rejected = groups(write_parquet(tmp_path, columns))
    assert rows.query_ids_N.to_pylist() == ["good"]
    assert [(one.line, one.rule, one.rows) for one in rejected] == [
        (1, "feature_count", 1),
        (2, "unparsable", 1),
        (3, "unparsable", 2),
        (4, "unparsable", 3),
        (6, "unparsable", 1),
    ]
    nested = pa.array([[[1, 2, 3]], [[1]], [[1, 2], [1, 2]], [[1, 2], None, [3, 4]], [[1, 2]], [[1, 2]]])
    _, rejected = groups(write_parquet(tmp_path, columns | {"features": nested}))
    assert [one.line for one in rejected if one.rule == "feature_count"] == [1, 2, 4]
    assert json.loads(rejected[0].text.partition(": ")[2])["query_id"] == "odd"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"names": ()}, "set n_features or names"),
        ({"names": (), "features": ("query_id",)}, r"column 'query_id' \(features\) should hold lists of numbers"),
        ({"features": ("feature",)}, "no column 'feature' .*did you mean 'features'"),
        ({"labels": "query_id"}, r"column 'query_id' \(labels\) should hold lists of numbers and is string"),
        ({"clicks": "doc_ids"}, r"column 'doc_ids' \(list of clicks\)"),
        ({"categorical": ("c",)}, "categorical: no feature is named 'c'"),
        ({"names": (), "features": ("f_*", "g")}, r"no column is named 'f_\*'"),
    ],
)
def test_wrong_group_columns_are_one_line(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        groups(write_parquet(tmp_path, GROUP_TABLE), GROUPS.replace(**fields))


def test_group_files_must_have_the_features_of_the_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"its 2 features are not those of one\.parquet"):
        groups(write_parquet(tmp_path, GROUP_TABLE), features=[Feature(name="a")], first="one.parquet")
    mapping, features = GROUPS.replace(names=(), features=("f*", "fb")), [Feature(name="fb"), Feature(name="fa")]
    there = {"fa": [[1.0, 2.0], [3.0], [], [4.0, 5.0, 6.0]], "fb": [[2.0, 4.0], [6.0], [], [8.0, 10.0, 12.0]]}
    columns = {name: values for name, values in GROUP_TABLE.items() if name != "features"}
    rows, _ = groups(write_parquet(tmp_path, columns | there), mapping, features=features)
    assert rows.features_NF.tolist() == [[2 * i, i] for i in range(1, 7)]
    lacking = write_parquet(tmp_path, columns | {"fb": there["fb"], "fc": there["fa"]}, "lacking.parquet")
    with pytest.raises(InputError, match=r"lacking\.parquet: column 'fa' is missing, which one\.parquet has"):
        groups(lacking, mapping, features=features, first="one.parquet")
