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

from ltrscale.config import validate
from ltrscale.errors import InputError
from ltrscale.ingest.categories import encode
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.rows import Rejection, RowBlock, concat


def read(path: Path, **fields: Any) -> tuple[RowBlock, list[Rejection]]:
    mapping = ColumnMapping.model_validate({"query": "q", "features": ["*"], **fields})
    blocks = list(Items(columns=mapping).read(str(path)))
    return concat(blocks), [one for block in blocks for one in block.rejected]


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
    assert [feature.name for feature in Items(columns=mapping).features_of(str(path))] == ["f"]


def test_the_types_of_a_file_with_a_short_header_are_those_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("q,f\na,1\n")
    source = Items(columns=ColumnMapping(query="q", features=("*",)))
    assert [feature.name for feature in source.features_of(str(path))] == ["f"]


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
    assert len(read(tmp_path / "log.tsv", item="d")[1]) == 3
