"""Cutting, joining and filtering RowBlocks: rows keep their texts, and memory holds only the parts in use."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preparing import prepare, rejections_of

from ltrscale.ingest import items, letor, lines
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.lines import Lines
from ltrscale.ingest.rows import RawTexts, RowBlock, RowTexts, concat, cut, keep


def block_of(texts: RawTexts | None, lines: list[int], file: str = "log") -> RowBlock:
    one_N = np.ones(len(lines), np.float32)
    ids = pa.array(["q"] * len(lines), pa.string())
    return RowBlock(file, np.array(lines, np.int64), ids, one_N[:, None], one_N, texts=texts)


def piece_of(kind: str, first: int, n: int) -> RowBlock:
    """Rows with the text `row <line>`, from the lines of a text or the rows of a Parquet batch."""
    lines = list(range(first, first + n))
    if kind == "text":
        return block_of(Lines("".join(f"row {line}\r\n" for line in lines).encode(), first), lines)
    batch = pa.record_batch({"at": pa.array([f"row {line}" for line in lines], pa.string())})
    return block_of(RowTexts(batch, np.array(lines, np.int64)), lines)


def texts_of(rows: RowBlock) -> list[str]:
    assert rows.texts is not None
    return [rows.texts(line) for line in rows.lines_N.tolist()]


@given(
    kind=st.sampled_from(["text", "parquet"]),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    kept=st.lists(st.booleans(), min_size=20, max_size=20),
    bounds=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_rows_keep_their_texts(kind: str, sizes: list[int], kept: list[bool], bounds: tuple[int, int]) -> None:
    firsts = np.cumsum([7, *sizes[:-1]]).tolist()
    rows = concat([piece_of(kind, first, n) for first, n in zip(firsts, sizes, strict=True)])
    rows = concat([cut(rows, 0, len(rows) // 2), cut(rows, len(rows) // 2, len(rows))])
    rows = keep(rows, np.array(kept[: len(rows)], bool))
    start, stop = sorted(min(bound, len(rows)) for bound in bounds)
    rows = cut(rows, start, stop)
    shown = "row {}" if kind == "text" else '{{"at": "row {}"}}'
    assert texts_of(rows) == [shown.format(line) for line in rows.lines_N.tolist()]


def test_documents_of_one_row_share_its_text() -> None:
    batch = pa.record_batch({"docs": [["a", "b"], ["c"]]})
    rows = block_of(RowTexts(batch, np.array([4, 5])), [4, 4, 5])
    assert texts_of(rows) == ['{"docs": ["a", "b"]}'] * 2 + ['{"docs": ["c"]}']


def test_texts_are_cut_at_a_thousand_characters() -> None:
    assert Lines(("ü" * 5000 + "\n").encode(), 1)(1) == "ü" * 1000
    assert len(RowTexts(pa.record_batch({"a": ["x" * 5000]}), np.array([1]))(1)) == 1000
    short = {"x" * (i % 3) + chr(0x100 + i): [i] for i in range(500)}
    whole = json.dumps({name: value for name, [value] in short.items()}, ensure_ascii=False)
    assert RowTexts(pa.record_batch(short), np.array([1]))(1) == whole[:1000]
    assert Lines(b"a\xff\n", 1)(1) == "a\ufffd"


def test_rows_of_several_files_or_without_texts_have_none_together() -> None:
    first, second = piece_of("text", 1, 2), piece_of("text", 3, 2)
    assert concat([first, block_of(None, [3])]).texts is None
    second.file = "other"
    assert concat([first, second]).texts is None


AFTER_PARSING = {"infinite", "bad_label", "duplicate_document", "returning_query", "group_too_long"}
LETOR = {"kind": "letor"}
COLUMNS = {"query": "q", "item": "d", "label": "y", "features": ["f*"]}
ITEMS = {"kind": "items", "columns": COLUMNS}
Row = tuple[str, str, float, float]


def dirty_rows() -> list[Row]:
    """Rows of (query, document, label, feature) that break every rule, in groups of 1 to 40."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for query in [*range(60), 3, 8]:
        length = 40 if query % 20 == 9 else int(rng.integers(1, 30))
        for i in range(length):
            value = math.inf if rng.random() < 0.03 else round(float(rng.random()), 4)
            label = -1.0 if rng.random() < 0.03 else float(rng.integers(3))
            document = f"d{i - 1}" if rng.random() < 0.03 and i else f"d{i}"
            rows.append((f"q{query}", document, label, value))
    return rows


def quarantined(folder: Path, source: Mapping[str, Any], **settings: Any) -> list[dict[str, Any]]:
    config = {"inputs": str(folder / "log*"), "source": source, "max_rejected": 1, "max_group": 30, **settings}
    dataset = prepare(PrepareConfig.model_validate(config), str(folder / "out"))
    found = rejections_of(dataset)
    assert {row["rule"] for row in found} >= AFTER_PARSING
    return found


@pytest.fixture(params=[1, 100, 1 << 22])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers with blocks of about this many bytes, so that groups span blocks."""
    monkeypatch.setattr(letor, "_BLOCK_BYTES", request.param)
    monkeypatch.setattr(lines, "_BLOCK", request.param)
    monkeypatch.setattr(letor, "_PIECE", max(1, request.param // 3))
    monkeypatch.setattr(items, "_ROWS", max(1, request.param // 20))


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_letor_rows_are_shown_as_they_were_written(tmp_path: Path) -> None:
    lines = ["# a comment", ""]
    for query, document, label, value in dirty_rows():
        lines.append(f"{label:g}  qid:{query} 1:{value} 2:NULL \t#docid = {document} é ")
        lines += [f"1 qid:{query} 1:x 2:3", ""] if len(lines) % 17 == 0 else []
    (tmp_path / "log.txt").write_text("\r\n".join(lines) + "\r\n")
    for row in quarantined(tmp_path, LETOR):
        assert row["text"] == lines[row["line"] - 1], row


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_rows_with_group_sizes_are_shown_as_they_were_written(tmp_path: Path) -> None:
    rows = dirty_rows()[:-1]
    lines = [f"{label:g} 1:{value}  #docid = {document}" for _, document, label, value in rows]
    (tmp_path / "log.txt").write_text("\n".join(lines))
    sizes = Counter(row[0] for row in rows)
    (tmp_path / "sizes").write_text("\n".join(map(str, sizes.values())))
    inputs = [{"path": str(tmp_path / "log.txt"), "group_sizes": str(tmp_path / "sizes")}]
    config = {"inputs": inputs, "source": {**LETOR, "dense": False, "n_features": 2}, "max_rejected": 1}
    dataset = prepare(PrepareConfig.model_validate({**config, "max_group": 30}), str(tmp_path / "out"))
    found = rejections_of(dataset)
    assert {"infinite", "bad_label", "duplicate_document", "group_too_long"} <= {row["rule"] for row in found}
    for row in found:
        assert row["text"] == lines[row["line"] - 1], row


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.slow
def test_csv_rows_are_shown_as_they_were_written(tmp_path: Path) -> None:
    lines = ["f1,note,q,y,d"]
    for query, document, label, value in dirty_rows():
        lines.append(f'{value},"a, ""note""",{query},{label:g},{document}')
        lines += ["", "x"] if len(lines) % 17 == 0 else []
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    for row in quarantined(tmp_path, ITEMS):
        if row["rule"] in AFTER_PARSING:
            assert row["text"] == lines[row["line"] - 1], row
        else:
            assert row["text"] == f"1 columns where the header has 5: {lines[row['line'] - 1]}"


def table_of(rows: list[Row]) -> pa.Table:
    return pa.table(
        {name: list(column) for name, column in zip(("q", "d", "y", "f1"), zip(*rows, strict=True), strict=True)}
    )


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_parquet_rows_are_shown_as_json(tmp_path: Path) -> None:
    table = table_of(dirty_rows())
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=100)
    rows = table.to_pylist()
    for row in quarantined(tmp_path, ITEMS):
        assert json.loads(row["text"]) == rows[row["line"] - 1], row


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.binary_view()], ids=str)
def test_text_of_any_type_is_shown(tmp_path: Path, kind: pa.DataType) -> None:
    table = table_of(dirty_rows())
    for name in ("q", "d"):
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(pa.binary()).cast(kind))
    pq.write_table(table, tmp_path / "log.parquet")
    for row in quarantined(tmp_path, ITEMS):
        assert f"{table['d'][row['line'] - 1].as_py()}" in row["text"]


def test_sorted_rows_are_shown_as_parsed(tmp_path: Path) -> None:
    rows = [row for row in dirty_rows() if row[0] != "q8"]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    pq.write_table(table_of(rows), tmp_path / "log.parquet")
    config = {"inputs": str(tmp_path / "log.parquet"), "source": ITEMS, "max_rejected": 1, "sort": True}
    dataset = prepare(PrepareConfig.model_validate(config), str(tmp_path / "out"))
    found = rejections_of(dataset)
    assert {"infinite", "bad_label", "duplicate_document"} == {row["rule"] for row in found}
    for row in found:
        query, document, label, value = rows[row["line"] - 1]
        assert row["text"] == f"{label:g} qid:{query} 1:{value:g} # {document}"


def test_a_document_of_a_group_is_shown_before_the_row_of_the_group(tmp_path: Path) -> None:
    rows = [
        {"query_id": "a", "features": [1.0, 2.0, math.inf, 4.0], "labels": [0.0, 1.0]},
        {"query_id": "b", "features": [math.inf, 2.0], "labels": [1.0]},
        {"query_id": "c", "features": [1.0] * 8, "labels": [0.0] * 4},
        {"query_id": "a", "features": [1.0, 2.0, 3.0, 4.0], "labels": [0.0, 1.0]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    source = {"kind": "groups", "columns": {"n_features": 2, "labels": "labels"}}
    config = {"inputs": str(tmp_path / "log.parquet"), "source": source, "max_rejected": 1, "max_group": 3}
    dataset = prepare(PrepareConfig.model_validate(config), str(tmp_path / "out"))
    found = rejections_of(dataset)
    assert [(row["line"], row["rule"], row["text"]) for row in sorted(found, key=lambda row: int(row["line"]))] == [
        (1, "infinite", f"1 qid:a 1:inf in {json.dumps(rows[0])}"),
        (2, "infinite", json.dumps(rows[1])),
        (3, "group_too_long", json.dumps(rows[2])),
        (4, "returning_query", json.dumps(rows[3])),
    ]
