"""The transformer of exports gives the features that `prepare` makes of the same rows, bit for bit, or its reasons."""

import ast
import csv
import gzip
import inspect
import json
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature, open_dataset
from ltrscale.data.dataset.origin import read_as
from ltrscale.errors import InputError
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.serving import raw, raw_rows
from ltrscale.serving.columns import reading_raw

Row = Mapping[str, Any]
TABLE = {
    "item": ["a", "b", "7"],
    "weight": [1.5, None, 0.1],
    "maker": ["x", None, "löwe"],
    "new": [True, False, None],
    "owner": [123456789, 123456790, None],
}


def prepared(folder: Path, log: Path, columns: Mapping[str, Any], **settings: Any) -> str:
    joins, more = settings.pop("joins", ()), {"max_rejected": 1, **settings}
    source = {"kind": "items", "columns": {"query": "q", **columns}, "joins": joins}
    config = {"inputs": str(log), "source": source, **more}
    validate(PrepareJob, {"out": str(folder / "data"), "prepare": config}, "test").run()
    return str(folder / "data")


def transformer(data: str, folder: Path) -> raw_rows.RawRows:
    """The recipe for a model of all features of a data set."""
    dataset = open_dataset(data)
    bundle: Any = SimpleNamespace(url="bundle", features=dataset.manifest.features, read_as=read_as(dataset))
    files = raw.write_raw(bundle, [feature.name for feature in dataset.manifest.features])
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return raw_rows.RawRows(json.loads(files["raw_rows.json"]), {}, folder)


def by_prepare(data: str) -> tuple[dict[str, list[bytes]], dict[str, tuple[str, str]]]:
    """The features of each kept row, by its query, and rule and finding of the others."""
    manifest = open_dataset(data).manifest
    kept = {}
    for file in manifest.files:
        table = pq.read_table(storage.listed_file(data, file.path), columns=["query_id", "features"])
        kept |= dict(zip(table["query_id"].to_pylist(), map(bits, table["features"].to_pylist()), strict=True))
    lost = {}
    for path in manifest.quarantine:
        table = pq.read_table(storage.join(data, path)).to_pylist()
        lost |= {row["query_id"]: (row["rule"], row["found"]) for row in table}
    return kept, lost


def bits(values: Iterable[float]) -> list[bytes]:
    """The values in single precision; all NaNs are one."""
    return [b"nan" if value != value else struct.pack("<f", value) for value in values]


def check(rows: Sequence[Any], data: str, folder: Path, queries: Sequence[str]) -> int:
    """Compare each row; returns how many of them `prepare` has rejected."""
    kept, lost = by_prepare(data)
    assert len(rows) == len(queries) == len({*queries}) == len(kept) + len(lost)
    agree(transformer(data, folder), dict(zip(queries, rows, strict=True)), kept, lost)
    return len(lost)


def agree(
    make: raw_rows.RawRows,
    rows: Mapping[str, Any],
    kept: Mapping[str, list[bytes]],
    lost: Mapping[str, tuple[str, str]],
) -> None:
    """The rows have the features that `prepare` kept, or its reasons."""
    for query, row in rows.items():
        if query in kept:
            values = make.features(row)
            assert bits(values) == kept[query], (query, row)
            assert values == pytest.approx([struct.unpack("<f", struct.pack("<f", v))[0] for v in values], nan_ok=True)
        else:
            with pytest.raises(raw_rows.RowError) as error:
                make.features(row)
            assert (error.value.rule, str(error.value)) == lost[query], (query, row)


def one_changed(usual: Row, tried: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The usual row, and rows with one other value each."""
    rows = [dict(usual)] * 1000  # the lines that decide on the types
    rows += [{**usual, name: value} for name, values in tried.items() for value in values]
    return [{"q": f"q{i}", **row} for i, row in enumerate(rows)]


NUMBERS = [
    *("", "NULL", "nan", "NaN", "NAN", "null", "-nan", "nan(1)", "None", "N/A", "-", ".", "1e", "0x10", "1_0", "1 1"),
    *("+1", "-1", " 1", "1 ", "\t2", "1e5", "1E+5", ".5", "5.", "00012", "-0", "0"),
    *("1e-46", "1e-45", "7e-46", "1e-400"),
    *("16777217", "16777217.0000000001", "16777219", "16777216.999999999999999999", "0.1", "0.10000000149011612"),
    *("3.4028234663852886e38", "3.4028235677973366e38", "3.40282356779733642752e38", "1.00000005960464477539062500001"),
    *("1.000000059604644775390625", "1.00000005960464477539062499999", "7.006492321624085354618e-46", "1\u0661"),
    *("1e39", "-1e39", f"1e{10**20}", f"-1e-{10**20}", "inf", "-Infinity", "+iNf", "infinit", "1.5f", "true"),
    *("1.5.2", "12,5", "1.234,5"),
]
WORDS = ["true", "TRUE", "False", "f", "Y", "no", "1", "0", "tRue", " true", "2", "1.0", "", "NULL", "ja"]
TEXTS = [
    *("7", "07", "-1", "16777215", "16777216", "7.0", "berlin", "Löwe", "", "NULL", "nan", " 7", "true", "1e3"),
    *("a,b", 'a "quote"', "\u0667", "😀"),
]
TIMES = [
    *("2026-01-06", "2026-01-06 10:15", "2026-01-06T10:15:11.9", "2026-01-06T10:15:11,5", "2026-01-06T23:59:59Z"),
    *("2026-01-06 10:15:11+01", "2026-01-06 10:15:11-0130", "20260106", "2026-W02", "1767657600", "1767657600123"),
    *("1767657600123456789", "9999-12-31", "0000-00-00", "0000-01-01", "soon", "", "NULL", "-3600", "1e30", "nan"),
    *("2026-03-29 02:30", "2026-10-25 02:30", "2026-10-25 03:30", "1969-12-31 23:59:59.5", " 2026-01-06 ", "inf"),
    *("20260230", "20260106.0", "2026-01-05 00:00:00 UTC", "2026-01-05T10:00:00.5 GMT", "2026-01-05 10:00:00 -0130"),
    *("1_767657600", "\uff11767657600", "2026-01-0\u0665", "Mon, 05 Jan 2026 10:00:00 GMT", "2026-01-05 UTC"),
]
COLUMNS = {
    "time": "at",
    "features": ["price", "stock", "size"],
    "categorical": ["brand", "shop", "flag"],
    "dates": {"listed": ["days_before", "weekday", "hour"], "at": ["hour"]},
}
USUAL = {
    "at": "2026-01-07 12:00:00",
    "price": "12.5",
    "stock": "yes",
    "size": "3",
    "brand": "acme",
    "shop": "12",
    "flag": "true",
    "listed": "2025-12-01",
    "unused": "x,y",
}
TRIED = {
    "price": NUMBERS,
    "size": ["", "1", "x"],
    "stock": WORDS,
    "brand": TEXTS,
    "shop": TEXTS,
    "flag": WORDS,
    "listed": TIMES,
    "at": TIMES,
}


def write_csv(path: Path, rows: Sequence[Row], delimiter: str = ",", encoding: str = "utf-8") -> None:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.slow
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
@pytest.mark.parametrize("infinite", ["reject", "missing"])
def test_rows_of_csv(zone: str, infinite: str, tmp_path: Path) -> None:
    rows = one_changed({**USUAL, "stock": "yes"}, TRIED)
    rows[1]["stock"] = "no"  # both words, so that they are booleans
    write_csv(tmp_path / "log.csv.gz", rows)
    data = prepared(tmp_path, tmp_path / "log.csv.gz", {**COLUMNS, "time_zone": zone}, infinite=infinite)
    make = transformer(data, tmp_path)
    read = list(make.read(tmp_path / "log.csv.gz"))
    assert read == rows
    assert check(read, data, tmp_path, [row["q"] for row in rows]) > 30


@pytest.mark.slow
def test_rows_of_csv_with_a_decimal_comma_other_formats_and_fills(tmp_path: Path) -> None:
    usual = {**USUAL, "at": "07.01.2026 12:00", "listed": "1.12.2025", "price": "12,5", "size": "3,25"}
    times = ["06.01.2026", "29.03.2026 02:30", "2026-01-06", "6/1/2026", "", "1767657600", "31.02.2026", " 1.1.2026 "]
    times += ["0\uff16.01.2026", "Mon, 05 Jan 2026 10:00:00 GMT", "Mon, 05 Jan 2026 10:00:00 UTC"]
    rows = one_changed(usual, {**TRIED, "listed": times, "at": times, "size": ["", "1,5", "1.5"]})
    rows[1]["stock"] = "no"
    write_csv(tmp_path / "log.csv", rows, ";")
    formats = ["%d.%m.%Y %H:%M", "%d.%m.%Y", "%a, %d %b %Y %H:%M:%S %Z", "iso"]
    fill = {"price": "median", "numeric": -1.1}
    columns = {**COLUMNS, "decimal": ",", "time_format": formats, "time_zone": "Europe/Berlin", "fill": fill}
    data = prepared(tmp_path, tmp_path / "log.csv", columns)
    assert open_dataset(data).manifest.fills["price"] == 12.5
    assert (
        check(list(transformer(data, tmp_path).read(tmp_path / "log.csv")), data, tmp_path, [r["q"] for r in rows]) > 30
    )


@pytest.mark.slow
def test_rows_of_csv_without_a_header(tmp_path: Path) -> None:
    rows = one_changed({**USUAL, "stock": "true"}, {"price": NUMBERS})
    write_csv(tmp_path / "log.csv", rows)
    text = (tmp_path / "log.csv").read_text().partition("\n")[2]
    (tmp_path / "log.csv").write_text(text)
    data = prepared(tmp_path, tmp_path / "log.csv", {**COLUMNS, "header": list(rows[0])})
    read = list(transformer(data, tmp_path).read(tmp_path / "log.csv"))
    assert read == rows
    assert check(read, data, tmp_path, [row["q"] for row in rows]) > 5


def test_many_numbers_of_csv_are_rounded_once(tmp_path: Path) -> None:
    """Digits around the middle between two numbers in single precision, where two roundings differ from one."""
    rng = np.random.default_rng(0)
    below = rng.integers(0, 0x7F7FFFFF, 400).astype(np.uint32).view(np.float32)
    middles = (below.astype(np.float64) + np.nextafter(below, np.float32(np.inf)).astype(np.float64)) / 2
    exact = [Decimal(float(middle)) for middle in middles]
    tiny = [value.scaleb(-30) for value in exact]
    texts = [f"{value + sign * much:f}" for value, much in zip(exact, tiny, strict=True) for sign in (-1, 0, 1)]
    rows = [{"q": f"q{i}", "x": text} for i, text in enumerate(texts)]
    write_csv(tmp_path / "log.csv", rows)
    data = prepared(tmp_path, tmp_path / "log.csv", {"features": ["x"]})
    assert check(rows, data, tmp_path, [row["q"] for row in rows]) == 0


@pytest.mark.slow
def test_rows_of_json_lines(tmp_path: Path) -> None:
    usual = {
        "at": "2026-01-07 12:00:00",
        "price": 12.5,
        "stock": True,
        "size": 3,
        "brand": "acme",
        "shop": 12,
        "flag": False,
        "listed": "2025-12-01",
        "part": 1.5,
    }
    some = [None, True, 1, 0, -1, 2.5, 7.0, "7", "", "NULL", [1], {"a": 1}, 16777217, 123456789012345678, 1e39]
    some += [10**400, -(10**400)]
    tried = {name: some for name in usual if name not in ("listed", "at")}
    rows = one_changed(usual, {**tried, "listed": [None, *TIMES, 5], "at": [None, *TIMES]})
    rows += [{"q": f"lacks{i}", **{n: v for n, v in usual.items() if n != name}} for i, name in enumerate(usual)]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = prepared(tmp_path, tmp_path / "log.jsonl", {**COLUMNS, "categorical": ["brand", "shop", "flag", "part"]})
    make, (kept, lost) = transformer(data, tmp_path), by_prepare(data)
    read: dict[str, Any] = {row["q"]: row for row in make.read(tmp_path / "log.jsonl")}  # type: ignore[index]
    for query in [
        q for q, (_, found) in lost.items() if "values that fit" in found
    ]:  # a list, a fraction: Arrow's words
        with pytest.raises(raw_rows.RowError):
            make.features(read.pop(query))
        lost.pop(query)
    agree(make, {query: row for query, row in read.items() if query in {*kept, *lost}}, kept, lost)
    assert len(lost) > 40


OLD = datetime(1950, 7, 1, 0, 0, 0, 5)
SUMMER = datetime(2025, 6, 1, tzinfo=timezone(timedelta(hours=1)))
PARQUET: dict[str, tuple[pa.DataType, list[Any]]] = {
    "price": (pa.float64(), [12.5, None, np.nan, 1e39, -np.inf, 0.1, 16777217.0]),
    "size": (pa.int64(), [3, None, 16777217, 9007199791611905, 2**53 + 2**29 + 1, -(2**62) - 1]),
    "stock": (pa.bool_(), [True, False, None]),
    "cost": (pa.decimal128(30, 4), [Decimal("1.1000"), None, Decimal("16777217.0001"), Decimal("-99999999999.9999")]),
    "half": (pa.float16(), [np.float16(1.5), None]),
    "brand": (pa.dictionary(pa.int8(), pa.string()), ["acme", None, "7", "", "NULL", "löwe"]),
    "shop": (pa.int32(), [12, None, -1, 16777215, 16777216]),
    "flag": (pa.bool_(), [True, False, None]),
    "part": (pa.float32(), [1.5, None, np.nan, 7.0, 0.1, -0.0, 1e20, np.inf]),
    "code": (pa.binary(), [b"acme", None, b"\xff", b"7"]),
    "exact": (pa.decimal128(10, 2), [Decimal("1.50"), None, Decimal("7.00")]),
    "born": (pa.date32(), [date(2026, 1, 6), None]),
    "listed": (pa.timestamp("us"), [datetime(2025, 12, 1), None, datetime(2026, 3, 29, 2, 30), OLD]),
    "sent": (pa.timestamp("ms", "Europe/Berlin"), [datetime(2025, 12, 1, tzinfo=UTC), None, SUMMER]),
    "day": (pa.date32(), [date(2025, 12, 1), None, date(1969, 12, 31)]),
    "epoch": (pa.int64(), [1767657600, None, 1767657600123, -5, 2**62]),
    "at": (pa.timestamp("ns"), [datetime(2026, 1, 7, 12), None, datetime(2026, 10, 25, 2, 30)]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("formats", [["iso"], ["%Y", "iso"]])
def test_rows_of_parquet(formats: list[str], tmp_path: Path) -> None:
    usual = {name: values[0] for name, (_, values) in PARQUET.items()}
    rows = one_changed(usual, {name: values[1:] for name, (_, values) in PARQUET.items()})
    kinds = {"q": pa.string(), **{name: kind for name, (kind, _) in PARQUET.items()}}
    table = pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()})
    pq.write_table(table, tmp_path / "log.parquet")
    columns = {
        "time": "at",
        "time_zone": "Europe/Berlin",
        "features": ["price", "size", "stock", "cost", "half"],
        "categorical": ["brand", "shop", "flag", "part", "code", "exact", "born"],
        "dates": {name: ["days_before", "weekday", "hour"] for name in ("listed", "sent", "day", "epoch")},
        "time_format": formats,
    }
    data = prepared(tmp_path, tmp_path / "log.parquet", columns)
    read = pq.read_table(tmp_path / "log.parquet").to_pylist()
    assert check(read, data, tmp_path, [row["q"] for row in rows]) > 3


@pytest.mark.slow
@pytest.mark.parametrize("rows_kept", ["matched", "all"])
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_joined_tables(form: str, rows_kept: str, tmp_path: Path) -> None:
    path, log = tmp_path / f"items.{form}", tmp_path / "log.csv"
    table = pa.table(TABLE)
    if form == "parquet":
        pq.write_table(table, path)
    elif form == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    else:
        write_csv(path, table.to_pylist())
    rows = [{"q": f"q{i}", "item": item, "x": "1"} for i, item in enumerate(["a", "b", "7", "c", "", "07", "A"])]
    write_csv(log, rows)
    fill = {"fill": {"weight": 0.1, "maker": "none"}} if rows_kept == "all" else {}
    joins = [{"path": str(path), "key": "item", "columns": [*TABLE][1:], "rows": rows_kept, **fill}]
    columns = {"features": ["x", "weight", "new"], "categorical": ["maker", "item", "owner"]}
    data = prepared(tmp_path, log, columns, joins=joins)
    (tmp_path / "export").mkdir()
    rejected = check(rows, data, tmp_path / "export", [row["q"] for row in rows])
    assert rejected == (4 if rows_kept == "matched" else 0)
    assert (tmp_path / "export" / "raw_rows_1.jsonl").exists()


def _vector_rows(*, nan: bool) -> list[dict[str, Any]]:
    """Vectors that can be read, some of them missing, and some of another length, of no numbers or with a gap."""
    rng = np.random.default_rng(0)
    lists: list[Any] = [row.tolist() for row in rng.normal(size=(60, 7))]
    lists[:5] = [None, [0.0] * 7, [-0.0] * 7, [16777217.0, 2.0**53, 3, 4, 5, 6, 7], [1e-46, 7e-46, 0.1, 1e30, 3, 0, 1]]
    lists[5:9] = [[0.5] * 6, [], [0.5, None, 3, 4, 5, 6, 7], [float("nan") if nan else 1] * 7]
    others = [lists[-i] for i in range(len(lists))]
    return [
        {"q": f"q{i}", "emb": one, "asked": other} for i, (one, other) in enumerate(zip(lists, others, strict=True))
    ]


VECTORS = {
    "vectors": {"emb": 7},
    "similarities": {"cosine": [["asked", "emb"]], "dot": [["asked", "emb"]]},
    "fill": {"emb.*": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["double", "float", "fixed", "json", "csv"])
def test_vectors_and_how_alike_two_are(form: str, tmp_path: Path) -> None:
    rows = _vector_rows(nan=form != "json")
    if form == "json":
        rows += [{"q": "t", "emb": "x"}, {"q": "u", "emb": [0.5] * 6 + ["x"]}, {"q": "v", "emb": [0.5] * 6 + [True]}]
        rows = [
            {"q": f"usual{i}", "emb": [0.5] * 7, "asked": None} for i in range(1000)
        ] + rows  # the lines that decide on the types
        log = tmp_path / "log.jsonl"
        log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif form == "csv":
        others = ["x", "[1 2 3 4 5 6 7]", " [.5, +1e3,-0,inf,1,1,1] ", "[1,2,3,4,5,6,x]", "[1_0,2,3,4,5,6,7]"]
        others += ["[nan 1]", "1,2"]
        rows += [{"q": f"t{i}", "emb": text, "asked": None} for i, text in enumerate(others)]
        rows = [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]
        write_csv(log := tmp_path / "log.csv", rows)
    else:
        size = 7 if form == "fixed" else -1
        kind = pa.list_(pa.float32() if form == "float" else pa.float64(), size)
        rows = [row for row in rows if size < 0 or all(row[n] is None or len(row[n]) == size for n in ("emb", "asked"))]
        log = tmp_path / "log.parquet"
        columns = {name: pa.array([row[name] for row in rows], kind) for name in ("emb", "asked")}
        pq.write_table(pa.table({"q": [row["q"] for row in rows], **columns}), log)
        rows = pq.read_table(log).to_pylist()
    data = prepared(tmp_path, log, VECTORS)
    assert check(rows, data, tmp_path, [row["q"] for row in rows]) >= 3
    make = transformer(data, tmp_path)
    usual = [row for row in rows if row["q"] in ("q20", "q21", "q22")]
    if form == "csv":
        return
    arrays = [{name: value if name == "q" else np.array(value) for name, value in row.items()} for row in usual]
    assert [*map(make.features, arrays)] == [*map(make.features, usual)]


def test_a_table_that_joins_may_have_vectors_unless_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"item": ["a", "b"], "emb": [[0.5, 0.1], None]}), tmp_path / "items.parquet")
    rows = [{"q": f"q{i}", "item": item} for i, item in enumerate("abac")]
    write_csv(tmp_path / "log.csv", rows)
    joins = [{"path": str(tmp_path / "items.parquet"), "key": "item", "columns": "emb"}]
    data = prepared(tmp_path, tmp_path / "log.csv", {"vectors": {"emb": 2}}, joins=joins)
    (tmp_path / "export").mkdir()
    assert check(rows, data, tmp_path / "export", [row["q"] for row in rows]) == 1
    monkeypatch.setattr(raw, "_MOST_NUMBERS", 1)
    make = transformer(data, tmp_path)
    assert make.recipe["joins"][0]["table"] is None
    assert make.features({"item": "a", "emb": [0.5, 0.25]}) == [0.5, 0.25]
    with pytest.raises(raw_rows.RowError, match=r"column 'emb' is not a list of numbers \('0\.5'\)"):
        make.features({"item": "a", "emb": "0.5"})


def test_a_table_with_too_many_rows_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "_MOST_ROWS", 2)
    pq.write_table(pa.table(TABLE), tmp_path / "items.parquet")
    write_csv(tmp_path / "log.csv", [{"q": "q0", "item": "a"}])
    joins = [{"path": str(tmp_path / "items.parquet"), "key": "item", "columns": ["weight"]}]
    make = transformer(prepared(tmp_path, tmp_path / "log.csv", {"features": ["weight"]}, joins=joins), tmp_path)
    assert make.recipe["joins"][0]["table"] is None
    assert make.features({"item": "a", "weight": 1.5}) == [1.5]
    with pytest.raises(raw_rows.RowError, match="no column 'weight'"):
        make.features({"item": "a"})


def test_values_of_python_count_as_what_the_log_has_as_text(tmp_path: Path) -> None:
    rows = one_changed(USUAL, {})
    rows[1]["stock"] = "no"
    write_csv(tmp_path / "log.csv", rows)
    make = transformer(prepared(tmp_path, tmp_path / "log.csv", COLUMNS), tmp_path)
    typed = {"at": datetime(2026, 1, 7, 12), "price": 12.5, "stock": True, "size": np.int32(3), "shop": 12}
    assert make.features({**USUAL, **typed, "listed": date(2025, 12, 1)}) == make.features(USUAL)
    assert bits(make.features({**USUAL, "price": None})) == bits(make.features({**USUAL, "price": float("nan")}))
    with pytest.raises(
        raw_rows.RowError, match="'flag' is text in the log \\(True\\); give the text that stands there"
    ):
        make.features({**USUAL, "flag": True})
    with pytest.raises(raw_rows.RowError, match="no column 'brand'; give None where it has no value"):
        make.features({name: value for name, value in USUAL.items() if name != "brand"})


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_a_row_may_lack_what_a_file_may_lack(ending: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"q": f"q{i}", "x": i / 3, "late": i / 7, "kind": f"k{i}"} for i in range(6)]
    columns = {"features": ["x", "late"], "categorical": ["kind"], "optional": ["late", "kind"]}
    (tmp_path / "log").mkdir()
    for number, part in enumerate(([{"q": row["q"], "x": row["x"]} for row in rows[:3]], rows[3:])):
        path = tmp_path / "log" / f"{number}.{ending}"
        if ending == "csv":
            write_csv(path, part)
        elif ending == "parquet":
            pq.write_table(pa.Table.from_pylist(part), path)
        else:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in part))
    data = prepared(tmp_path, tmp_path / "log", columns)
    apart = transformer(data, tmp_path)
    kept, _ = by_prepare(data)
    for row in (*({"q": row["q"], "x": row["x"]} for row in rows[:3]), *rows[3:]):
        given = {name: str(value) for name, value in row.items()} if ending == "csv" else row
        assert bits(apart.features(given)) == kept[row["q"]]


def test_a_whole_number_with_a_point_has_the_code_of_training(tmp_path: Path) -> None:
    values = ["3.0", "3", "-1.0", "-0.0", "16777216.0", "3.00", "03.0", "3.5", "9" * 17 + ".0", "acme"]
    rows = [{"q": f"q{i}", "x": "1", "c": value} for i, value in enumerate(values)]
    write_csv(tmp_path / "log.csv", rows)
    data = prepared(tmp_path, tmp_path / "log.csv", {"features": ["x"], "categorical": ["c"]})
    assert check(rows, data, tmp_path, [row["q"] for row in rows]) == 0
    kept, _ = by_prepare(data)
    assert kept["q0"] == kept["q1"] == bits([1, 3])


def test_lines_are_rows_where_prepare_has_rows(tmp_path: Path) -> None:
    rows = [{"q": f"q{i}", "x": "1", "c": f'a, "b" {i}'} for i in range(3)]
    write_csv(tmp_path / "log.csv", rows)
    bad = [
        *(b'n1,1,"a""b"', b'n2,2,12" lamp', b'n3,3,"a"b', b"n4,4", b'n5,5,"open', b"", b"n6,6,\xff", b"n7,7,l\rr"),
        *(b'n9,9,"two', b'lines"', b'n10,"a"b,c', b'n11,"a"","c"', b"n12,a\0,c", b'"n13', b'n14,"a","b","c"'),
        b'n8,"8",""',
    ]
    with (tmp_path / "log.csv").open("ab") as file:
        file.write(b"\n".join(bad))
    data = prepared(tmp_path, tmp_path / "log.csv", {"features": ["x"], "categorical": ["c"]})
    make, kept = transformer(data, tmp_path), by_prepare(data)[0]
    found, reasons = {}, {}
    for number, row in make.numbered(tmp_path / "log.csv"):
        try:
            found[row["q"] if isinstance(row, dict) else ""] = bits(make.features(row))
        except raw_rows.RowError as error:
            reasons[number] = str(error)
    assert found == kept
    assert list(found) == ["q0", "q1", "q2", "n1", "n8"]
    manifest = open_dataset(data).manifest
    lost = [row for path in manifest.quarantine for row in pq.read_table(storage.join(data, path)).to_pylist()]
    assert reasons == {row["line"]: row["found"] for row in lost}


def test_lines_that_are_no_rows_are_errors(tmp_path: Path) -> None:
    write_csv(tmp_path / "log.csv", [{"q": f"q{i}", "x": "1"} for i in range(9)])
    make = transformer(prepared(tmp_path, tmp_path / "log.csv", {"features": ["x"]}), tmp_path)
    (tmp_path / "new.csv").write_text("q,x\na,1,2\nb,3\n")
    (tmp_path / "new.jsonl").write_text('{"q": "a"\n[1]\n' + "[" * 10**5)
    (tmp_path / "empty.csv").write_text("\n")
    with pytest.raises(raw_rows.RowError, match=r"empty\.csv: no line of column names \(the file is empty\)"):
        list(make.read(tmp_path / "empty.csv"))
    first, second, *others = [*make.read(tmp_path / "new.csv"), *make.read(tmp_path / "new.jsonl")]
    with pytest.raises(raw_rows.RowError, match="3 columns where the header has 2"):
        make.features(first)
    assert make.features(second) == [3.0]
    assert [str(other) for other in others] == ["not a JSON object"] * 3


NESTED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([10**400, -(10**400), "1e400"]),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(), values, max_size=2),
    max_leaves=3,
)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_any_value_of_json_gives_features_or_the_reason_why_not(form: str, tmp_path: Path) -> None:
    usual = {**USUAL, "price": 12.5, "size": 3, "stock": True, "emb": [0.5, 1.0], "item": "a"}
    rows = [{"q": f"q{i}", **usual} for i in range(9)]
    pq.write_table(pa.table(TABLE), tmp_path / "items.parquet")
    if form == "csv":
        write_csv(tmp_path / "log.csv", rows)
    elif form == "jsonl":
        (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    joins = [{"path": str(tmp_path / "items.parquet"), "key": "item", "columns": ["weight"]}]
    columns = {**COLUMNS, "features": ["price", "stock", "size", "weight"], "vectors": {"emb": 2}}
    make = transformer(prepared(tmp_path, tmp_path / f"log.{form}", columns, joins=joins), tmp_path)

    @settings(derandomize=True, deadline=None)
    @given(st.sampled_from([*usual]), NESTED)
    @example("price", 10**400)
    @example("emb", [1, 10**400])
    @example("at", {})
    def law(name: str, value: Any) -> None:
        try:
            found = make.inputs({**usual, name: value})
        except raw_rows.RowError:
            return
        assert [type(each) for each in found] == [float] * len(make.names)

    law()


def test_any_csv_text_gives_rows_or_the_reason_why_not(tmp_path: Path) -> None:
    write_csv(tmp_path / "log.csv", [{"q": f"q{i}", "x": "1"} for i in range(9)])
    make = transformer(prepared(tmp_path, tmp_path / "log.csv", {"features": ["x"]}), tmp_path)

    @settings(derandomize=True, deadline=None)
    @given(st.lists(st.sampled_from([*'q,x\n";1\r\0', "q,x\n", "\ud800", "x" * 200_000])).map("".join))
    @example("")
    @example('q,"x\na,1')
    def law(text: str) -> None:
        (tmp_path / "new.csv").write_bytes(text.encode(errors="surrogatepass"))
        try:
            for row in make.read(tmp_path / "new.csv"):
                make.features(row)
        except raw_rows.RowError:
            return

    law()


def test_the_folder_of_a_file_does_not_decide_on_its_form(tmp_path: Path) -> None:
    (folder := tmp_path / "logs.tsv.d").mkdir()
    write_csv(folder / "log.csv", rows := [{"q": f"q{i}", "x": str(i)} for i in range(9)])
    data = prepared(tmp_path, folder / "log.csv", {"features": ["x"]})
    assert list(transformer(data, tmp_path).read(folder / "log.csv")) == rows


def test_rows_that_are_no_items_have_no_transformer(synthetic_dataset: str) -> None:
    dataset = open_dataset(synthetic_dataset)
    features = dataset.manifest.features
    bundle: Any = SimpleNamespace(url="bundle", features=features, read_as={})
    assert raw.write_raw(bundle, [features[0].name]) == {}


def test_a_model_of_features_that_the_rows_lack_has_no_transformer(tmp_path: Path) -> None:
    """As those that `jobs.relabel` makes of texts: an export has the model alone."""
    write_csv(tmp_path / "log.csv", [{"q": "a", "x": "1"}])
    dataset = open_dataset(prepared(tmp_path, tmp_path / "log.csv", {"features": ["x"]}))
    features = (*dataset.manifest.features, Feature(name="bm25_title"))
    bundle: Any = SimpleNamespace(url="bundle", features=features, read_as=read_as(dataset))
    assert raw.write_raw(bundle, ["x", "bm25_title"]) == {}
    assert raw.write_raw(bundle, ["x"]) != {}


def test_a_record_of_the_rows_that_was_changed_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    write_csv(log, [{"q": "a", "f": "1"}, {"q": "a", "f": "2"}])
    dataset = open_dataset(prepared(tmp_path, log, {"features": ["f"]}))
    features, made = dataset.manifest.features, read_as(dataset)
    changed: Any = SimpleNamespace(url="bundle", features=features, read_as={**made, "raw": {"rows": "tables"}})
    with pytest.raises(InputError, match=r"^bundle: read_as of its config\.json: "):
        reading_raw(changed, ["f"])
    no_items = {**made, "source": {"kind": "letor"}}
    changed = SimpleNamespace(url="bundle", features=features, read_as=no_items)
    assert reading_raw(changed, ["f"]) is None


def test_the_file_needs_python_3_9_alone() -> None:
    code = inspect.getsource(raw_rows)
    tree = ast.parse(code, feature_version=(3, 9))
    names = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)
    done = subprocess.run([sys.executable, "-I", "-S", "-"], input=code, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_older_pythons_read_the_same_times() -> None:
    """Python before 3.11 reads some forms of ISO 8601 alone, so the file has a reader of its own for it."""
    zones = ["", "Z", "+01", "-0130", "+01:30", "+01:30:15"]
    clocks = ["", "T10", " 10:15", "T10:15:11", "T10:15:11.5", "T101511", "T10:15:11,123456789", "T25:00", "T10:1"]
    for day in ("2026-01-06", "20260106", "2026-W02", "2026W023", "2026-W02-3", "2026-1-6", "2026-02-30", "soon", ""):
        for text in (f"{day}{clock}{zone}" for clock in clocks for zone in (zones if clock else [""])):
            try:
                expected = datetime.fromisoformat(text)
            except ValueError:
                with pytest.raises(ValueError):  # noqa: PT011
                    raw_rows.iso_time(text)
                continue
            assert raw_rows.iso_time(text) == expected, text
            assert raw_rows.iso_time(text).utcoffset() == expected.utcoffset()


def test_a_fill_that_a_model_does_not_know_is_refused(tmp_path: Path) -> None:
    write_csv(tmp_path / "log.csv", [{"q": "a", "x": "", "c": "y"}])
    with pytest.raises(InputError, match="fill: 'c' is a category"):
        prepared(tmp_path, tmp_path / "log.csv", {"features": ["x"], "categorical": ["c"], "fill": {"c": 1}})
    with pytest.raises(InputError, match="fill: 'x' has no value, so no median; give a number"):
        prepared(tmp_path, tmp_path / "log.csv", {"features": ["x"], "fill": {"x": "median"}})
