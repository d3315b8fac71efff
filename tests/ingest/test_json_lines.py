"""JSON lines: types, rows and rejected lines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from news_log import NEWS
from source_blocks import blocks_of, features_of, rows_of

from ltrscale.data.columns import is_id, is_number
from ltrscale.errors import InputError
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.items import Items
from ltrscale.ingest.json_lines import json_schema
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.profile import files_of, first_columns
from ltrscale.ingest.rows import Rejection, RowBlock


def read_json(path: Path, mapping: ColumnMapping, **more: Any) -> tuple[RowBlock, list[Rejection]]:
    return rows_of(Items(columns=mapping), path, **more)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log.jsonl", "log.ndjson.gz", "log.jsonl.xz"])
def test_a_log_of_json_lines_is_that_of_parquet(shared_data: Path, tmp_path: Path, name: str) -> None:
    [source] = (shared_data / "news" / "sample").rglob("part-0.parquet")
    table = pq.read_table(source, partitioning=None).slice(0, 500)
    table.to_pandas().to_json(tmp_path / name, orient="records", lines=True, date_format="iso", double_precision=15)
    pq.write_table(table, tmp_path / "log.parquet")
    mapping = ColumnMapping(**NEWS, meta=("session_id",))
    expected, _ = read_json(tmp_path / "log.parquet", mapping)
    rows, rejected = read_json(tmp_path / name, mapping, rows=200)
    assert rejected == []
    np.testing.assert_allclose(rows.features_NF, expected.features_NF, rtol=1e-6)
    np.testing.assert_array_equal(rows.labels_N, expected.labels_N)
    np.testing.assert_array_equal(rows.lines_N, expected.lines_N)
    assert (rows.query_ids_N, rows.doc_ids_N) == (expected.query_ids_N, expected.doc_ids_N)
    assert rows.periods_N == expected.periods_N
    assert rows.columns["meta_session_id"].equals(expected.columns["meta_session_id"])


def test_types_are_those_of_the_values(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    values = [
        {"i": 1, "f": 1, "b": True, "s": "x", "n": None, "l": [1], "d": {}, "m": 1, "late": None},
        {"i": 2, "f": 1.5, "b": False, "s": None, "n": None, "l": None, "d": {"a": 1}, "m": "x", "new": 3},
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in values) + "not json\n[1]\n")
    found = {field.name: str(field.type) for field in json_schema(str(path))}
    kinds = {"i": "int64", "f": "double", "b": "bool", "s": "string", "n": "null", "l": "list<item: null>"}
    assert found == kinds | {"d": "struct<>", "m": "int64", "late": "null", "new": "int64"}
    assert [each.name for each in features_of(Items(columns=ColumnMapping(query="s", features=("*",))), path)] == [
        *("b", "f", "i", "m", "new")
    ]


def test_rejected_lines_name_line_column_and_text(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = ['{"q":"a","f":1,"y":true}'] * 3
    lines += [
        "",
        "{",
        '["a"]',
        '{"q":"a","f":"1"}',
        '{"q":7,"f":1}',
        '{"q":"a"}{"q":"b"}',
        '{"f":2}',
        '{"q":"b","f":1.5}',
    ]
    path.write_text("\n".join(lines))
    rows, rejected = read_json(path, ColumnMapping(query="q", label="y", features=("f",)))
    assert rows.lines_N.tolist() == [1, 2, 3, 11]
    np.testing.assert_array_equal(rows.features_NF[:, 0], [1, 1, 1, 1.5])
    np.testing.assert_array_equal(rows.labels_N, [1, 1, 1, np.nan])
    assert [one.line for one in rejected] == [5, 6, 7, 8, 9, 10]
    assert {(one.rule, one.rows) for one in rejected} == {("unparsable", 1)}
    shown = {one.line: one.text for one in rejected}
    assert shown[7] == 'column \'f\' is string here and number elsewhere: {"q":"a","f":"1"}'
    assert shown[8] == 'column \'q\' is number here and string elsewhere: {"q":7,"f":1}'
    assert shown[10].startswith("column 'q' has no value: ")
    assert [one.query_id for one in rejected] == ["", "", "a", "7", "", ""]


@pytest.mark.parametrize(
    ("text", "message"), [("", "the file is empty"), ("[\n1\n]\n", "no line is a JSON object; one object per line")]
)
def test_a_file_without_objects_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_json(path, ColumnMapping(query="q", features=("f",)))


NUMBERS = st.none() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=3) | st.just([1]) | st.booleans()
TEXTS = st.none() | st.integers(-(2**60), 2**60) | st.text(max_size=3)
LINES = st.fixed_dictionaries({}, optional={"q": TEXTS, "c": TEXTS, "f": NUMBERS}).map(json.dumps)


@pytest.mark.slow
@given(lines=st.lists(LINES | st.text('{}[]"q:1, \0\r', max_size=9), max_size=8), batch_rows=st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_line_is_lost_and_rows_are_what_the_standard_library_reads(
    lines: list[str], batch_rows: int, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    text = "\n".join(['{"q": "a", "f": 1, "c": "x"}', *lines, '{"q": "z", "f": 2.5, "c": "y"}'])
    path.write_bytes(text.encode())
    try:
        source = Items(columns=ColumnMapping(query="q", item="c", features=("f",)))
        blocks = blocks_of(source, path, rows=batch_rows)
    except InputError:  # most values of a column are lists, or text where numbers should be
        kinds = {field.name: field.type for field in json_schema(str(path))}
        assert not is_number(kinds["f"]) or not is_id(kinds["q"]) or not is_id(kinds["c"])
        return
    physical = text.split("\n")
    seen = [line for block in blocks for line in [*block.lines_N.tolist(), *(one.line for one in block.rejected)]]
    assert sorted(seen) == [i for i, line in enumerate(physical, 1) if line not in ("", "\r")]
    for block in blocks:
        assert len(block) + len(block.rejected) <= batch_rows
        assert block.doc_ids_N is not None
        for line, query, doc, value in zip(
            block.lines_N.tolist(),
            block.query_ids_N.to_pylist(),
            block.doc_ids_N.to_pylist(),
            block.features_NF[:, 0],
            strict=True,
        ):
            expected = json.loads(physical[line - 1])
            texts = [None if expected.get(key) is None else str(expected[key]) for key in ("q", "c")]
            assert [query, doc] == texts
            number = expected.get("f")
            with np.errstate(over="ignore"):  # beyond float32 it is infinite
                np.testing.assert_array_equal(value, np.float32("nan" if number is None else number))


def test_a_huge_number_is_infinite_or_rejected(tmp_path: Path) -> None:
    frame = pd.DataFrame({"q": ["a"] * 3, "f": [1.0, 1e300, 2.0]})
    frame.to_json(tmp_path / "log.jsonl", orient="records", lines=True)
    rows, rejected = read_json(tmp_path / "log.jsonl", ColumnMapping(query="q", features=("f",)))
    assert (rows.features_NF[:, 0].tolist(), rejected) == ([1, np.inf, 2], [])


def test_nan_of_json_is_a_missing_value_of_any_type(tmp_path: Path) -> None:
    """Python writes it for whatever a data frame lacks."""
    rows = [
        {"q": f"s{i // 5}", "c": "a NaN, b" if i % 2 else np.nan, "f": i / 7 if i % 3 else np.nan} for i in range(50)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"q": "z", "c": "\n{"q": "z", "f": NaN}\n')
    block, [rejection] = read_json(path, ColumnMapping(query="q", features=("f",), categorical=("c",), meta=("c",)))
    assert rejection.line == 51
    assert block.columns["meta_c"].to_pylist() == ["a NaN, b" if i % 2 else None for i in range(50)] + [None]
    assert np.isnan(block.features_NF).mean(axis=0).tolist() == pytest.approx([18 / 51, 26 / 51])
    looked_at = {column.name: column for column in first_columns(files_of([str(path)], Dialect()), Dialect(), 1000)}
    assert [(looked_at[name].missing, looked_at[name].bad) for name in "fc"] == [(18 / 51, 0), (26 / 51, 0)]
    pq.write_table(pa.table({"q": ["a"] * 3, "f": [1.0, np.nan, None]}), tmp_path / "log.parquet")
    [_, column] = first_columns(files_of([str(tmp_path / "log.parquet")], Dialect()), Dialect(), 1000)
    assert (column.missing, column.bad) == (2 / 3, 0)
