"""Tables that join the rows of a log: by a key, with rows that the log keeps or rejects named."""

import csv
import gzip
import math
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from preparing import prepare, rejected, rows_of

from ltrscale.data.dataset.manifest import Dataset
from ltrscale.errors import InputError
from ltrscale.ingest.categories import encode
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.source import Needs

LOG = "q,d,x\na,1,0.5\na,2,1.5\nb,2,2.5\nb,3,3.5\n"
DOCUMENTS = "doc,price,name\n2,20,two\n1,10,one\n3,,three\n4,40,four\n"
GRADES = "q,d,grade\na,1,2\nb,3,1\n"
COLUMNS = {"query": "q", "item": "d", "label": "grade", "features": ["x", "cost"], "categorical": ["name"]}
JOINS: list[dict[str, Any]] = [
    {"path": "documents.csv", "key": {"d": "doc"}, "columns": {"cost": "price", "name": "name"}},
    {"path": "grades.csv", "key": ["q", "d"], "columns": "grade", "rows": "all", "fill": {"grade": 0}},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("log", LOG), ("documents", DOCUMENTS), ("grades", GRADES)):
        (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


def made(folder: Path, *joins: dict[str, Any], columns: Any = COLUMNS, out: str = "set") -> Dataset:
    tables = [{**join, "path": str(folder / join["path"])} for join in joins]
    source = {"kind": "items", "columns": columns, "joins": tables}
    config = {"inputs": str(folder / "log.csv"), "source": source, "max_rejected": 0.9}
    return prepare(PrepareConfig.model_validate(config), str(folder / out))


def test_columns_of_tables_are_as_good_as_those_of_the_log(folder: Path) -> None:
    joined = made(folder, *JOINS)
    lines = ["q,d,x,cost,name,grade", "a,1,0.5,10,one,2", "a,2,1.5,20,two,0", "b,2,2.5,20,two,0", "b,3,3.5,,three,1"]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    plain = made(folder, out="plain")
    assert joined.manifest.hash == plain.manifest.hash
    assert joined.manifest.counts().labelled == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_a_table_may_have_any_format_and_several_files(kind: str, folder: Path) -> None:
    first = made(folder, *JOINS).manifest.hash
    table = pa.Table.from_pylist(list(csv.DictReader(DOCUMENTS.splitlines())))
    prices = pa.array([float(value) if value else None for value in table["price"].to_pylist()])
    table = table.set_column(1, "price", prices)
    (folder / "documents").mkdir()
    for i, part in enumerate((table.slice(0, 2), table.slice(2))):
        path = folder / "documents" / f"part-{i}.{kind}"
        match kind:
            case "csv":
                part.to_pandas().to_csv(path, index=False)
            case "parquet":
                pq.write_table(part, path)
            case _:
                part.to_pandas().to_json(path, orient="records", lines=True)
    assert made(folder, {**JOINS[0], "path": "documents"}, JOINS[1], out="other").manifest.hash == first


def test_rows_without_a_key_of_the_table_are_named(folder: Path) -> None:
    (folder / "documents.csv").write_text("doc,price,name\n2,20,two\n1,10,one\n")
    assert rejected(made(folder, *JOINS)) == [(5, "not_joined", f"d '3' is not in {folder / 'documents.csv'}")]


def test_rows_with_a_key_of_a_table_can_be_left_out(folder: Path) -> None:
    (folder / "out.csv").write_text("q,d\na,1\n")
    left_out = {"path": "out.csv", "key": ["q", "d"], "rows": "unmatched"}
    dataset = made(folder, left_out, *JOINS)
    assert rejected(dataset) == [(2, "not_joined", f"q, d 'a, 1' is in {folder / 'out.csv'}")]
    assert dataset.manifest.counts().documents == 3


def test_a_changed_table_makes_the_data_set_anew(folder: Path) -> None:
    first = made(folder, *JOINS).manifest
    assert made(folder, *JOINS).manifest == first
    (folder / "grades.csv").write_text(GRADES + "a,2,1\n")
    assert made(folder, *JOINS).manifest.hash != first.hash


BAD: list[tuple[dict[str, Any], str]] = [
    ({"path": "documents.csv", "key": "d", "columns": ["cost"]}, "no column 'd'; its columns are doc, price, name"),
    ({"path": "documents.csv", "key": {"e": "doc"}, "columns": {}}, "no column 'e', which joins"),
    ({**JOINS[0], "columns": {"cost": "prize", "name": "name"}}, "no column 'prize'; did you mean 'price'"),
    ({**JOINS[0], "columns": {"x": "price"}}, "column 'x' is there already"),
    ({**JOINS[0], "path": "twice.csv"}, "doc '1' is there twice"),
    ({**JOINS[0], "path": "broken.csv"}, r"line 3: .*a table that joins must be whole"),
]


@pytest.mark.parametrize(("join", "message"), BAD)
def test_a_table_that_does_not_fit_is_named(join: dict[str, Any], message: str, folder: Path) -> None:
    (folder / "twice.csv").write_text("doc,price,name\n1,1,a\n2,2,b\n1,3,c\n")
    (folder / "broken.csv").write_text("doc,price,name\n1,1,a\n2,b\n")
    with pytest.raises(InputError, match=message):
        made(folder, join, JOINS[1])


BIG = 123456789
"""Whole numbers from here on are 8 apart in single precision."""


def write_big(folder: Path) -> None:
    """A log whose sellers have ids that single precision merges, and two tables, one found by the other."""
    rows = [f"{i // 2},{i},{i * 0.5},{BIG + i}" for i in range(20)]
    (folder / "log.csv").write_text("\n".join(["q,d,x,seller", *rows]) + "\n")
    rows = [f"{BIG + i},{i},{1767657600 + 60 * i},{BIG + 100 + i}" for i in range(-5, 30)]
    (folder / "sellers.csv").write_text("\n".join(["seller,rating,since,region", *rows]) + "\n")
    rows = [f"{BIG + 100 + i},{10 * i}" for i in range(-5, 30)]
    (folder / "regions.csv").write_text("\n".join(["region,size", *rows]) + "\n")


def features_by_name(dataset: Dataset) -> dict[str, list[float]]:
    names = [feature.name for feature in dataset.manifest.features]
    columns: dict[str, list[float]] = {name: [] for name in names}
    for row in rows_of(dataset):
        for i, value in enumerate(row["features"]):
            columns[names[i % len(names)]].append(value)
    return columns


@pytest.mark.parametrize("features", [["*"], ["seller*", "rating", "size"]])
def test_a_key_is_no_number_where_a_pattern_matches_it(features: list[str], folder: Path) -> None:
    write_big(folder)
    sellers = {"path": "sellers.csv", "key": "seller", "columns": ["rating", "region"]}
    regions = {"path": "regions.csv", "key": "region", "columns": "size"}
    dataset = made(folder, sellers, regions, columns={"query": "q", "item": "d", "features": features})
    found = features_by_name(dataset)
    assert found["rating"] == list(range(20))
    assert found["size"] == [10 * i for i in range(20)]
    assert not {"seller", "region"} & {*found}


@pytest.mark.parametrize("name", ["seller", "region"])
def test_a_key_of_csv_that_is_named_as_a_number_is_refused(name: str, folder: Path) -> None:
    write_big(folder)
    sellers = {"path": "sellers.csv", "key": "seller", "columns": ["rating", "region"]}
    regions = {"path": "regions.csv", "key": "region", "columns": "size"}
    columns = {"query": "q", "item": "d", "features": ["size", name]}
    with pytest.raises(InputError, match=rf"s?.csv: column '{name}' is used as a number and also as a key"):
        made(folder, sellers, regions, columns=columns)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_what_is_no_number_keeps_its_digits(kind: str, folder: Path) -> None:
    write_big(folder)
    sellers = pd.read_csv(folder / "sellers.csv")
    if kind == "parquet":
        sellers.to_parquet(folder / "sellers.parquet")
    if kind == "jsonl":
        sellers.to_json(folder / "sellers.jsonl", orient="records", lines=True)
    columns: dict[str, Any] = {"query": "q", "item": "d", "features": ["rating"], "categorical": ["region"]}
    columns |= {"meta": ["seller"], "time": "since", "period": "hour", "dates": {"since": ["hour"]}}
    taken = {"path": f"sellers.{kind}", "key": "seller", "columns": ["rating", "region", "since"]}
    dataset = made(folder, taken, columns=columns)
    found = features_by_name(dataset)
    assert found["region"] == encode(pa.array([str(BIG + 100 + i) for i in range(20)])).tolist()
    assert len({*found["region"]}) == 20
    assert [row["meta_seller"] for row in rows_of(dataset)] == [str(BIG + 2 * i) for i in range(10)]
    in_meta = made(folder, taken, columns={**columns, "meta": ["since"]}, out="meta")
    assert [int(row["meta_since"]) for row in rows_of(in_meta)] == [1767657600 + 120 * i for i in range(10)]


def test_text_that_begins_late_or_is_in_one_file_only(folder: Path) -> None:
    rows = [f"{i // 2},{i},{i * 0.5}" for i in range(1200)]
    (folder / "log.csv").write_text("\n".join(["q,d,x", *rows]) + "\n")
    (folder / "sizes").mkdir()
    for number, part in enumerate((range(1100), range(1100, 1200))):
        rows = [f"{i},{'sale' if i > 1050 else ''},{i if number == 0 else 'XL'}" for i in part]
        (folder / "sizes" / f"{number}.csv").write_text("\n".join(["d,promotion,size", *rows]) + "\n")
    columns = {"query": "q", "item": "d", "features": ["x"], "categorical": ["promotion", "size"]}
    dataset = made(folder, {"path": "sizes", "key": "d", "columns": ["promotion", "size"]}, columns=columns)
    found = features_by_name(dataset)
    sale, large = encode(pa.array(["sale", "XL"])).tolist()
    assert found["size"] == [*range(1100), *[large] * 100]
    assert np.isnan(found["promotion"][:1051]).all()
    assert found["promotion"][1051:] == [sale] * 149


TYPES: list[tuple[pa.Array, pa.Array, str]] = [
    (pa.array([1, 2]), pa.array([None, 4.0]), ""),
    (pa.array([None, 2.0]), pa.array([3, 4], pa.int8()), ""),
    (pa.nulls(2), pa.array(["x", "y"]), ""),
    (pa.array([1, 2]), pa.array(["x", "y"]), "b.parquet: column 'b' is string where it is int64 in .*a.parquet; write"),
    (pa.array([1.5, 2]), pa.array([2**53 + 1, 2]), "b.parquet: column 'b' is int64 here and double elsewhere"),
]


@pytest.mark.parametrize(("first", "second", "message"), TYPES)
def test_files_of_a_table_may_differ_where_nothing_is_lost(
    first: pa.Array, second: pa.Array, message: str, folder: Path
) -> None:
    (folder / "table").mkdir()
    for name, docs, values in (("a", ["1", "2"], first), ("b", ["3", "4"], second)):
        pq.write_table(pa.table({"d": docs, "b": values}), folder / "table" / f"{name}.parquet")
    columns = {"query": "q", "item": "d", "features": ["x"], "categorical": ["b"]}
    with pytest.raises(InputError, match=message) if message else nullcontext():
        dataset = made(folder, {"path": "table", "key": "d", "columns": "b"}, columns=columns)
        values = [*first.to_pylist(), *second.to_pylist()]
        expected = encode(pa.array([None if v is None else str(v).removesuffix(".0") for v in values]))
        np.testing.assert_array_equal(features_by_name(dataset)["b"], expected[[0, 1, 1, 2]])


def test_scoring_needs_no_table_of_labels(folder: Path) -> None:
    dataset = made(folder, *JOINS)
    tables = [{**join, "path": str(folder / join["path"])} for join in JOINS]
    source = PrepareConfig.model_validate(
        {"inputs": "x", "source": {"kind": "items", "columns": COLUMNS, "joins": tables}}
    ).source
    needed = source.for_scoring(Needs(dataset.manifest.features))
    assert needed.kind == "items"
    assert [join.path for join in needed.joins] == [str(folder / "documents.csv")]


def judgements(path: Path) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    with gzip.open(path, "rt") as stream:
        for row in csv.DictReader(stream, delimiter="\t"):
            found[row["qid"]][row["docid"]] = int(row["grade"])
    return found


def dcg(gains: list[int]) -> float:
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:10]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "period", "queries", "expected"), [("nfcorpus", "test", 325, 0.307), ("cranfield", "all", 225, 0.366)]
)
def test_the_order_of_bm25_has_its_known_quality(
    name: str,
    period: str,
    queries: int,
    expected: float,
    shared_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ideal is that of all judged documents, found by BM25 or not; a query without any found counts 0."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    settings = yaml.safe_load((root / "jobs" / "configs" / "data" / f"prepare-{name}.yaml").read_text())["prepare"]
    del settings["source"]["columns"]["tokens"]
    prepare(PrepareConfig.model_validate(settings), str(tmp_path / "set"))
    grades = judgements(shared_data / "text" / name / "qrels.tsv.gz")
    values = []
    tables = [pq.read_table(path, partitioning=None) for path in sorted((tmp_path / "set").glob(f"period={period}/*"))]
    for row in (row for table in tables for row in table.to_pylist()):
        order = np.argsort(-np.array(row["features"]), kind="stable")
        gains = [2 ** int(row["labels"][i]) - 1 for i in order]
        assert [grades[row["query_id"]].get(doc, 0) for doc in row["doc_ids"]] == row["labels"]
        ideal = dcg(sorted((2**grade - 1 for grade in grades[row["query_id"]].values()), reverse=True))
        values.append(dcg(gains) / ideal)
    assert sum(values) / queries == pytest.approx(expected, abs=5e-4)
