"""CSV as different tools and countries write it: separators, decimal marks, encodings, booleans."""

import gzip
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preparing import prepare
from source_blocks import blocks_of, features_of, rows_of

from ltrscale.config import validate
from ltrscale.errors import InputError
from ltrscale.ingest.categories import encode
from ltrscale.ingest.csv_lines import Dialect, csv_schema
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.profile import dialect_of
from ltrscale.ingest.rows import Rejection, RowBlock
from ltrscale.ingest.tables import Join


def read(path: Path, **fields: Any) -> tuple[RowBlock, list[Rejection]]:
    mapping = ColumnMapping.model_validate({"query": "q", "features": ["*"], **fields})
    return rows_of(Items(columns=mapping), path)


def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "q": [f"münchen {i // 10}" for i in range(500)],
            "d": [f"straße {i}, nr; {i}\t|" for i in range(500)],
            "price": rng.lognormal(3, 2, 500),
            "delta": np.where(rng.random(500) < 0.1, np.nan, rng.normal(size=500)),
            "city": rng.choice(["köln", "paris", "łódź"], 500),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("log.csv", {}),
        ("log.tsv", {}),
        ("log.tsv", {"decimal": ","}),
        ("log.csv", {"delimiter": ";", "decimal": ","}),
        ("log.csv", {"decimal": ","}),
        ("log.csv", {"encoding": "utf-16"}),
        ("log.csv", {"encoding": "utf-16-be"}),
        ("log.csv", {"encoding": "iso8859-2"}),
        ("log.csv", {"encoding": "utf-8-sig"}),
        ("log.csv", {"delimiter": "|", "encoding": "cp1250", "decimal": ","}),
    ],
)
def test_a_log_is_the_same_however_it_is_written(
    tmp_path: Path, name: str, fields: dict[str, str], packed: str
) -> None:
    log = table()
    usual = "\t" if name == "log.tsv" else ";" if fields.get("decimal") == "," else ","
    text = log.to_csv(None, index=False, sep=fields.get("delimiter", usual), decimal=fields.get("decimal", "."))
    path = tmp_path / (name + packed)
    data = text.encode(fields.get("encoding", "utf-8"))
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress, "": bytes}[packed](data))
    rows, rejected = read(path, item="d", categorical=["city"], **fields)
    (tmp_path / "plain.csv").write_text(log.to_csv(index=False))
    expected, _ = read(tmp_path / "plain.csv", item="d", categorical=["city"])
    assert rejected == []
    assert rows.query_ids_N.to_pylist() == log["q"].tolist()
    assert rows.doc_ids_N is not None
    assert rows.doc_ids_N.to_pylist() == log["d"].tolist()
    np.testing.assert_array_equal(rows.features_NF, expected.features_NF)
    np.testing.assert_array_equal(rows.features_NF[:, :2], log[["delta", "price"]].to_numpy(np.float32))


def test_a_point_is_no_decimal_mark_where_a_comma_is(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("q;f\na;1,5\na;1.5\na;-2e3\na;\n")
    rows, [rejection] = read(path, decimal=",")
    np.testing.assert_array_equal(rows.features_NF[:, 0], [1.5, -2000, np.nan])
    assert rejection.text == "column 'f' is not a number: a;1.5"


def test_bytes_that_an_encoding_does_not_define_reject_their_line(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"q,f\na\xe4,1\nb\x81,2\nc,3\n")
    rows, [rejection] = read(path, encoding="cp1252")
    assert rows.query_ids_N.to_pylist() == ["aä", "c"]
    assert (rejection.line, rejection.rule) == (3, "unparsable")


def test_a_file_that_is_not_in_the_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"q,f\na,1\n\n")
    with pytest.raises(InputError, match=r"log\.csv: not text in utf-16 .*; set the encoding that it has"):
        read(path, encoding="utf-16")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoding": "utf-9"}, "encoding: no encoding of text that Python knows; write it as utf-8 or cp1252"),
        ({"encoding": "rot13"}, "encoding: no encoding of text that Python knows"),
        ({"decimal": ",", "delimiter": ","}, "decimal and delimiter are both a comma"),
    ],
)
def test_forms_that_cannot_be_meant_are_one_line(fields: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate(ColumnMapping, {"query": "q", "features": ["*"], **fields}, "columns")


@pytest.mark.parametrize("words", [("true", "false"), ("True", "False"), ("YES", "NO"), ("t", "f"), ("Y", "n")])
def test_words_for_booleans_are_numbers(tmp_path: Path, words: tuple[str, str]) -> None:
    chosen = random.Random(0).choices([*words, ""], k=50)
    path = tmp_path / "log.csv"
    path.write_text("q,y,f\n" + "".join(f"a,{word},{word}\n" for word in chosen))
    rows, rejected = read(path, label="y")
    assert rejected == []
    expected = [np.nan if not word else float(word == words[0]) for word in chosen]
    np.testing.assert_array_equal(rows.labels_N, np.array(expected, np.float32))
    np.testing.assert_array_equal(rows.features_NF[:, 0], np.array(expected, np.float32))


def test_a_word_that_is_no_boolean_rejects_its_line(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("q,f\n" + "a,true\na,false\n" * 600 + "a,maybe\na,1\n")
    rows, [rejection] = read(path)
    assert rejection.text == "column 'f' is not true or false: a,maybe"
    assert rows.features_NF[-1, 0] == 1


@pytest.mark.parametrize("values", [["NO", "NO"], ["F", "M"], ["yes", "no", "maybe"], ["t", "n"]])
def test_a_column_that_may_be_something_else_stays_text(tmp_path: Path, values: list[str]) -> None:
    path = tmp_path / "log.csv"
    path.write_text("q,f,c\n" + "".join(f"a,1,{value}\n" for value in values))
    mapping = ColumnMapping(query="q", features=("*",))
    assert [feature.name for feature in features_of(Items(columns=mapping), path)] == ["f"]


def test_booleans_as_a_category_keep_their_codes(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("q,c\na,true\na,false\n")
    rows, _ = read(path, features=[], categorical=["c"])
    np.testing.assert_array_equal(rows.features_NF[:, 0], encode(pa.array(["true", "false"])))


def test_without_quotes_a_quote_is_a_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text('q\td\tx\n"a\tsaid "no"\t1\na"b\t"\t2\nc\td\n')
    rows, rejected = read(tmp_path / "log.tsv", item="d", quotes=False)
    assert rows.query_ids_N.to_pylist() == ['"a', 'a"b']
    assert rows.doc_ids_N is not None
    assert rows.doc_ids_N.to_pylist() == ['said "no"', '"']
    assert [(one.line, one.found) for one in rejected] == [(4, "2 columns where the header has 3")]
    with pytest.raises(InputError, match="no column is left as a feature"):  # with quotes, no line has a number
        read(tmp_path / "log.tsv", item="d")


ROWS = "s1;d7;0.5;1\ns1;d8;0.25;0\ns2;d7;0.5;0\n"
NAMES = ("q", "item", "price", "clicked")


@pytest.mark.parametrize(
    "first",
    [
        "s1;d7;0.5;1",  # a number that no column is named by
        "1185869;0;0;1",  # as judgements of TREC are written
        "1;2;2;1",
        "s1;d7;1;2",  # numbers that may be names, beside a text that comes again
        "shoes;red;cheap;no",
    ],
)
def test_a_first_line_that_is_a_row_is_no_header(tmp_path: Path, first: str) -> None:
    path = tmp_path / "log.csv"
    again = ";".join(reversed(first.split(";"))) if ";" in first else first
    path.write_text(f"{first}\n{again}\n{first}9\n")
    message = r"log\.csv: line 1 is a row and no line of column names .* name the 4 columns: source\.columns\.header"
    with pytest.raises(InputError, match=message):
        read(path, query="item", delimiter=";")


@pytest.mark.parametrize("header", ["q,1,2,3", "0,1,2,q", "q,clicked,price,click", "q,,nan,x", "q"])
def test_names_may_be_the_numbers_of_columns(tmp_path: Path, header: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{header}\n{header}\n" + "a,1,2,3\n" * 2)  # as where files were put together
    assert csv_schema(str(path), Dialect()).names == header.split(",")


def test_a_log_without_a_header_is_that_with_one(tmp_path: Path) -> None:
    (tmp_path / "named.csv").write_text(f"{';'.join(NAMES)}\n{ROWS}")
    (tmp_path / "plain.csv").write_text(ROWS)
    fields = {"item": "item", "label": "clicked", "delimiter": ";"}
    expected, _ = read(tmp_path / "named.csv", **fields)
    rows, rejected = read(tmp_path / "plain.csv", header=NAMES, **fields)
    assert rejected == []
    assert rows.lines_N.tolist() == [1, 2, 3]
    assert (rows.query_ids_N, rows.doc_ids_N) == (expected.query_ids_N, expected.doc_ids_N)
    np.testing.assert_array_equal(rows.features_NF, expected.features_NF)
    np.testing.assert_array_equal(rows.labels_N, expected.labels_N)


@pytest.mark.parametrize(
    ("header", "message"),
    [(NAMES[1:], "line 1 has 4 columns and header 3 names"), (NAMES, "line 1 has the names that header gives")],
)
def test_a_header_that_does_not_fit_is_named(tmp_path: Path, header: tuple[str, ...], message: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{';'.join(NAMES)}\n{ROWS}")
    with pytest.raises(InputError, match=message):
        read(path, query=header[0], header=header, delimiter=";")


def test_a_table_without_a_header_joins_a_log_that_has_one(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("q,item,price\na,1,0.5\na,2,0.25\n")
    (tmp_path / "stock.csv").write_text("1,7\n2,9\n2.5,7\n")
    join = Join(path=str(tmp_path / "stock.csv"), key=("item",), columns=("left",), header=("item", "left"))
    source = Items(columns=ColumnMapping(query="q", features=("price", "left")), joins=(join,))
    [block] = blocks_of(source, tmp_path / "log.csv")
    np.testing.assert_array_equal(block.features_NF, np.array([[0.5, 7], [0.25, 9]], np.float32))


def test_the_index_of_a_data_frame_is_no_numeric_column_of_a_star(tmp_path: Path) -> None:
    log = table()
    for name in ("twice.csv", "once.csv"):
        log.to_csv(tmp_path / name)
        log = pd.read_csv(tmp_path / name)
    log.to_csv(tmp_path / "log.csv")
    assert csv_schema(str(tmp_path / "log.csv"), Dialect()).names[:3] == ["", "Unnamed: 0.1", "Unnamed: 0"]
    features = features_of(Items(columns=ColumnMapping(query="q", features=("*",))), tmp_path / "log.csv")
    assert [feature.name for feature in features] == ["delta", "price"]


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            "q,f\nmünchen,1\n",
            r"is not text in UTF-8\).*; set prepare\.source\.columns\.encoding if .* such as cp1252, mend",
        ),
        ("größe,q,f\n1,a,1\n", r"line 1 is no line of column names in UTF-8; .* needs encoding: cp1252"),
    ],
)
def test_the_error_of_another_encoding_names_the_key(tmp_path: Path, head: str, message: str) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(head.encode("cp1252"))
    source = {"kind": "items", "columns": {"query": "q", "features": ["f"]}}
    with pytest.raises(InputError, match=message):
        prepare(validate(PrepareConfig, {"inputs": str(path), "source": source}, "prepare"), str(tmp_path / "out"))
    source["columns"]["encoding"] = "cp1252"
    made = prepare(validate(PrepareConfig, {"inputs": str(path), "source": source}, "prepare"), str(tmp_path / "out"))
    assert made.manifest.counts().documents == 1


def test_the_error_of_a_label_of_words_names_grades(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("q,f,event\na,1,view\na,2,cart\n")
    with pytest.raises(
        InputError, match=r"column 'event' \(label\) should hold numbers and is string; .* as grades: \{"
    ):
        read(path, label="event")


NUMBER_TEXTS = st.one_of(
    st.text("0123456789.+-eE_ \uff11\u0663xinfatyINF,", max_size=8),
    st.floats().map(str),
    st.sampled_from(["1_7555", "\uff11\uff12", "infinity", "-inf", "1e400", "0x10", " 1", "1e", "1.5.2", "1d"]),
)


@given(text=NUMBER_TEXTS)
def test_what_looks_like_a_number_is_what_is_read_as_one(text: str) -> None:
    try:
        pa.array([text.strip()]).cast(pa.float32())
        read_as_one = True
    except pa.ArrowInvalid:
        read_as_one = False
    assert Dialect().number(text) == read_as_one


def test_a_line_end_within_quotes_is_said_where_it_is_met(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log.csv"
    log = table().assign(d=lambda frame: [f"two\nlines, {i}" if i % 50 == 0 else d for i, d in enumerate(frame["d"])])
    log.to_csv(path, index=False)
    rows, rejected = read(path, item="d")
    assert len(rows) == 490
    found = {one.line: one.found for one in rejected}
    assert [line for line, why in found.items() if why.startswith("a quoted field that does not end in its line")] == [
        2 + 51 * i for i in range(10)
    ]
    assert len(found) == 20
    assert dialect_of(str(path)) == Dialect()
    assert "10 of its first lines end within quotes" in caplog.text
