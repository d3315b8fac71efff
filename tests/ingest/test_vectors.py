"""Columns of vectors: one of D numbers is D columns, to the byte, whatever holds it; and how alike two of a row are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from source_blocks import blocks_of, features_of

from ltrscale.api.frames import prepare_tables, to_raw_table, with_features
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature, Manifest, open_dataset
from ltrscale.errors import InputError
from ltrscale.ingest.items import Items
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.ingest.rows import RowBlock, concat
from ltrscale.ingest.source import File, Needs

D, N = 64, 300
QUERIES = np.repeat([f"q{i}" for i in range(N // 10)], 10)
EMB_ND = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
EMB_ND[7, 3] = 0.1  # no number in double precision, and written as 0.1 by some
MISSING = [5, 40, 41]
VECTORS = [None if i in MISSING else row for i, row in enumerate(EMB_ND.tolist())]
LOG = {"q": QUERIES.tolist(), "y": (np.arange(N) % 3).tolist(), "price": np.arange(N).astype(np.float64).tolist()}
NAMES = [f"emb.{i}" for i in range(D)]
FLAT = {name: [None if v is None else v[i] for v in VECTORS] for i, name in enumerate(NAMES)}


def write(folder: Path, columns: Mapping[str, Any], name: str = "log.parquet") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        pq.write_table(pa.table(dict(columns)), folder / name)
    elif name.endswith(".csv"):
        pd.DataFrame(dict(columns)).to_csv(folder / name, index=False)
    else:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / name)


def prepared(folder: Path, log: str, **uses: Any) -> Manifest:
    columns = {"query": "q", "label": "y", "features": ["price"], **uses}
    prepare = {"inputs": log, "source": {"kind": "items", "columns": columns}}
    validate(PrepareJob, {"out": str(folder / "data"), "prepare": prepare}, "test").run()
    return open_dataset(str(folder / "data")).manifest


def read(log: str, **uses: Any) -> tuple[RowBlock, list[str]]:
    """The rows of a file as one block, and what was found of the others."""
    mapping = ColumnMapping.model_validate({"query": "q", "features": ["price"], **uses})
    blocks = blocks_of(Items(columns=mapping), log, rows=64)
    return concat(blocks), [each.found for block in blocks for each in block.rejected]


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The data set of 64 columns."""
    folder = tmp_path_factory.mktemp("flat")
    columns = {**LOG, **{name: pa.array(values, pa.float32()) for name, values in FLAT.items()}}
    return prepared(folder, write(folder, columns), features=["price", *NAMES])


def _hashes(of: Manifest) -> list[str]:
    return [file.sha256 for file in of.files]


ARROW = {
    "list": pa.list_(pa.float32()),
    "large list": pa.large_list(pa.float32()),
    "fixed-size list": pa.list_(pa.float32(), D),
    "list of doubles": pa.list_(pa.float64()),
    "tensor": pa.fixed_shape_tensor(pa.float32(), [D]),
}


def _array(kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.ExtensionArray.from_storage(kind, pa.array(VECTORS, kind.storage_type))
    return pa.array(VECTORS, kind)


TEXTS = {
    "json": lambda row: row,
    "csv": str,
    "text": lambda row: np.array2string(np.array(row, np.float32), max_line_width=10**6, floatmode="unique"),
}
"""Files of text: arrays of JSON, lists as Python writes them in CSV, and as numpy does, in Parquet."""


@pytest.mark.slow
@pytest.mark.parametrize("form", [*ARROW, *TEXTS])
def test_a_column_of_64_is_64_columns_byte_for_byte(form: str, flat: Manifest, tmp_path: Path) -> None:
    emb = [row and TEXTS[form](row) for row in VECTORS] if form in TEXTS else _array(ARROW[form])
    log = write(tmp_path, {"emb": emb, **LOG}, {"json": "log.jsonl", "csv": "log.csv"}.get(form, "log.parquet"))
    one = prepared(tmp_path, log, vectors={"emb": D})
    assert one.features == flat.features == tuple(Feature(name=name) for name in ("price", *NAMES))
    assert (one.hash, _hashes(one), one.summaries) == (flat.hash, _hashes(flat), flat.summaries)
    assert one.summaries[1].missing == len(MISSING)


def _pandas(dtype: Any) -> pd.DataFrame:
    rows = [None if row is None else np.array(row, dtype) for row in VECTORS]
    return pd.DataFrame(LOG).assign(emb=pd.Series(rows, dtype=object))


FRAMES = {
    "pandas, arrays": lambda: _pandas(np.float32),
    "pandas, lists": lambda: pd.DataFrame(LOG).assign(emb=pd.Series(VECTORS, dtype=object)),
    "polars, List": lambda: pl.DataFrame({**LOG, "emb": pl.Series(VECTORS, dtype=pl.List(pl.Float32))}),
    "a tensor": lambda: pa.table({**LOG, "emb": _array(ARROW["tensor"])}),
    "polars, Array": lambda: pl.DataFrame({**LOG, "emb": pl.Series(VECTORS, dtype=pl.Array(pl.Float32, D))}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FRAMES)
def test_frames_have_the_same_bytes_and_name_no_features(form: str, flat: Manifest, tmp_path: Path) -> None:
    table = to_raw_table(FRAMES[form]())
    columns = with_features({"query": "q", "label": "y"}, table)
    assert columns["vectors"] == {"emb": D}
    prepare_tables({"all": table}, columns, {}, str(tmp_path / "data"))
    assert _hashes(open_dataset(str(tmp_path / "data")).manifest) == _hashes(flat)


def test_lists_of_other_lengths_and_with_gaps_are_rejected_and_counted(tmp_path: Path) -> None:
    lists = [[1.0, 2.5], [1.0], None, [3.0, 4.0, 5.0], [], [1.0, None], [float("nan"), 1.0], [6.0, 7.0]]
    columns = {"q": ["a"] * 8, "price": range(8), "emb": pa.array(lists, pa.list_(pa.float32()))}
    rows, found = read(write(tmp_path, columns), vectors={"emb": 2})
    assert rows.features_NF[:, 0].tolist() == [0, 2, 7]
    np.testing.assert_array_equal(rows.features_NF[:, 1:], [[1, 2.5], [np.nan, np.nan], [6, 7]])
    numbers = [f"column 'emb' has {n} numbers, not 2" for n in (1, 3, 0)]
    assert found == [*numbers, *["column 'emb' lacks a number in its list"] * 2]
    with pytest.raises(InputError, match=r"5 of 8 rows rejected.*unparsable 5.*has 1 numbers, not 2"):
        prepared(tmp_path, write(tmp_path, {**columns, "y": [0] * 8}), vectors={"emb": 2})


def test_values_of_json_that_are_no_numbers_are_rejected_with_the_column(tmp_path: Path) -> None:
    values = [None] * 1000 + [[0.5, 1], "x", ["x", 1], [True, False], 3, [[1], [2]], {"a": 1}, [2, 3]]
    columns = {"q": ["a"] * len(values), "price": range(len(values)), "emb": values}
    rows, found = read(write(tmp_path, columns, "log.jsonl"), vectors={"emb": 2})
    assert rows.features_NF[1000:].tolist() == [[1000, 0.5, 1], [1007, 2, 3]]
    assert np.isnan(rows.features_NF[:1000, 1:]).all()
    assert found == [
        "column 'emb' is string here and array elsewhere ('x')",
        "column 'emb' is a list of strings here and a list of numbers elsewhere (['x', 1])",
        "column 'emb' is a list of booleans here and a list of numbers elsewhere ([True, False])",
        "column 'emb' is number here and array elsewhere (3)",
        "column 'emb' is a list of arrays here and a list of numbers elsewhere ([[1], [2]])",
        "column 'emb' is object here and array elsewhere ({'a': 1})",
    ]


@pytest.mark.slow
def test_infinite_numbers_follow_the_rule_of_all_features(tmp_path: Path) -> None:
    emb = pa.array([[1.0, np.inf], [1.0, 2.0], [1e39, 1.0]] * 4, pa.list_(pa.float64()))
    log = write(tmp_path, {"q": ["a"] * 12, "y": [0, 1, 0] * 4, "price": range(12), "emb": emb, "other": emb})
    uses = {"query": "q", "label": "y", "similarities": {"dot": [["emb", "other"]], "cosine": [["emb", "other"]]}}
    for vectors in ({}, {"emb": 2}):
        prepare: dict[str, Any] = {"inputs": log, "max_rejected": 1, "source": {"kind": "items", "columns": {**uses}}}
        prepare["source"]["columns"]["vectors"] = vectors
        out = str(tmp_path / f"data{len(vectors)}")
        validate(PrepareJob, {"out": out, "prepare": prepare}, "test").run()
        assert open_dataset(out).manifest.accounting.rules == {"infinite": 8}
        validate(PrepareJob, {"out": out, "prepare": {**prepare, "infinite": "missing"}}, "test").run()
        manifest = open_dataset(out).manifest
        assert manifest.accounting.rows_kept == 12
        assert [each.missing for each in manifest.summaries[-2:]] == [8, 8]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 64, 1030])
def test_similarities_are_those_of_numpy(size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(size)
    one_ND, other_ND = rng.normal(size=(2, 200, size)).astype(np.float32)
    one_ND[0], other_ND[1] = 0, 0
    one, other = [*one_ND.tolist()], [*other_ND.tolist()]
    one[2], other[3] = None, None
    columns = {"q": ["a"] * 200, "price": range(200), "asked": pa.array(one), "emb": pa.array(other)}
    pairs = {"cosine": [["asked", "emb"]], "dot": [["asked", "emb"], ["emb", "asked"]]}
    rows, found = read(write(tmp_path, columns), similarities=pairs)
    cosine_N, dot_N, again_N = rows.features_NF[:, 1:].T
    x_ND, y_ND = one_ND.astype(np.float64), other_ND.astype(np.float64)
    np.testing.assert_allclose(dot_N[4:], (x_ND * y_ND).sum(1)[4:], rtol=1e-6, atol=1e-9)
    norms_N = np.linalg.norm(x_ND, axis=1) * np.linalg.norm(y_ND, axis=1)
    np.testing.assert_allclose(cosine_N[4:], (x_ND * y_ND).sum(1)[4:] / norms_N[4:], rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(dot_N, again_N)
    assert dot_N[:2].tolist() == [0, 0]
    assert np.isnan([*cosine_N[:4], *dot_N[2:4]]).all()
    assert found == []


def test_vectors_of_two_lengths_cannot_be_compared(tmp_path: Path) -> None:
    columns = {"q": ["a"] * 3, "price": range(3), "asked": [[1.5, 2], [1.5, 2, 3], None], "emb": [[1.5, 2.0]] * 3}
    rows, found = read(write(tmp_path, columns), similarities={"dot": [["asked", "emb"]]})
    np.testing.assert_array_equal(rows.features_NF, [[0, 6.25], [2, np.nan]])
    assert found == ["columns 'asked' and 'emb' have 3 and 2 numbers"]


def test_a_table_that_joins_may_have_the_vectors(tmp_path: Path) -> None:
    log = write(tmp_path, {"q": ["a", "a", "b"], "item": ["x", "y", "x"], "price": [1.0, 2.0, 3.0]})
    table = write(tmp_path, {"item": ["x", "y"], "emb": [[1.5, 2.5], [3.5, 4.5]]}, "items.jsonl")
    source = Items.model_validate(
        {
            "columns": {"query": "q", "features": ["price"], "vectors": {"emb": 2}},
            "joins": [{"path": table, "key": "item", "columns": "emb"}],
        }
    )
    features = features_of(source, log)
    (block,) = blocks_of(source, log, features=features)
    assert block.features_NF.tolist() == [[1, 1.5, 2.5], [2, 3.5, 4.5], [3, 1.5, 2.5]]


def test_scoring_reads_the_vectors_that_the_model_reads(tmp_path: Path) -> None:
    mapping = ColumnMapping.model_validate(
        {
            "query": "q",
            "label": "y",
            "features": ["price"],
            "vectors": {"emb": 3, "other": 2},
            "similarities": {"cosine": [["emb", "far"]], "dot": [["emb", "near"]]},
        }
    )
    features = [Feature(name=name) for name in ("price", "emb.0", "emb.2", "emb.dot.near")]
    columns = Items(columns=mapping).for_scoring(Needs(features)).columns
    assert columns.vector_columns == {"emb": 3, "near": None}
    row = {"q": ["a"], "price": [1.0], "emb": [[1.5, 2.0, 3.0]], "near": [[1.0, 1.0, 0.0]]}
    log = write(tmp_path, row)
    source = Items(columns=columns)
    assert [*features_of(source, log)] == features
    (block,) = blocks_of(source, log, features=features)
    assert block.features_NF.tolist() == [[1, 1.5, 3, 3.5]]
    assert Items(columns=mapping).missing_columns(File(url=log)) == [
        "'y' (label)",
        "'other' (vectors)",
        "'far' (vectors)",
    ]


def test_a_text_that_is_no_list_of_numbers_is_rejected_with_the_text(tmp_path: Path) -> None:
    texts = ["[1.5, 2]", " [3 -4e0] ", "", "[1]", "[]", "[1, x]", "[1,,2]", "1, 2", "[1, 2", "[1_0, 2]", "[1, None]"]
    columns = {"q": ["a"] * len(texts), "price": range(len(texts)), "emb": texts}
    rows, found = read(write(tmp_path, columns, "log.csv"), vectors={"emb": 2})
    np.testing.assert_array_equal(rows.features_NF[:, 1:], [[1.5, 2], [3, -4], [np.nan, np.nan]])
    numbers = [f"column 'emb' has {n} numbers, not 2" for n in (1, 0)]
    gap, no_list = "column 'emb' lacks a number in its list", "column 'emb' is not a list of numbers"
    assert found == [
        *numbers,
        gap,
        numbers[0].replace("1", "3"),
        f"{no_list} ('1, 2')",
        f"{no_list} ('[1, 2')",
        gap,
        gap,
    ]


@pytest.mark.slow
def test_fills_take_the_numbers_of_a_vector_as_a_group(tmp_path: Path) -> None:
    manifest = prepared(tmp_path, write(tmp_path, {**LOG, "emb": VECTORS}), vectors={"emb": D}, fill={"emb.*": 0.5})
    assert manifest.fills == dict.fromkeys(NAMES, 0.5)
    assert manifest.summaries[1].missing == 0


WRONG = {
    "features": r"log\.parquet: column 'emb' \(numeric\) should hold numbers and is fixed_size_list.*; "
    r"its numbers are features as vectors: \{emb: 2\}",
    "categorical": r"column 'tags' \(categorical\).*as vectors: \{tags: LENGTH\}",
    "size": r"column 'emb' has 2 numbers in each row, where vectors states 3; write vectors: \{emb: 2\}",
    "number": r"column 'price' \(vectors\) should hold lists of numbers, or their text and is double",
    "absent": r"no column 'embs' \(vectors\).*'emb'",
    "taken": r"column 'f\.0' has the name of a feature of vectors; rename it, or drop it there",
}


@pytest.mark.parametrize(
    ("wrong", "uses"),
    [
        ("features", {"features": ["emb"]}),
        ("categorical", {"categorical": ["tags"]}),
        ("size", {"vectors": {"emb": 3}}),
        ("number", {"vectors": {"price": 3}}),
        ("absent", {"similarities": {"dot": [["embs", "emb"]]}}),
        ("taken", {"vectors": {"f": 1}}),
    ],
)
def test_errors_name_the_column_and_what_to_write(wrong: str, uses: Any, tmp_path: Path) -> None:
    emb = pa.array([[1.5, 2.0]], pa.list_(pa.float32(), 2))
    log = write(tmp_path, {"q": ["a"], "price": [1.0], "emb": emb, "tags": [[1, 2]], "f": [[1.0]], "f.0": [1.0]})
    with pytest.raises(InputError, match=WRONG[wrong]):
        read(log, **uses)


def test_a_vector_is_not_compared_with_itself() -> None:
    with pytest.raises(ValidationError, match="similarities compares 'emb' with itself; name two columns"):
        ColumnMapping.model_validate({"query": "q", "similarities": {"cosine": [["emb", "emb"]]}})


def test_a_pattern_takes_no_column_of_vectors(tmp_path: Path) -> None:
    log = write(tmp_path, {"q": ["a"], "e1": [1.0], "emb": [[1.5, 2.0]], "eold": [[0.5, 1.0]]})
    uses = {"query": "q", "features": ["e*"], "vectors": {"emb": 2}, "similarities": {"dot": [["emb", "eold"]]}}
    features = features_of(Items(columns=ColumnMapping.model_validate(uses)), log)
    assert [each.name for each in features] == ["e1", "emb.0", "emb.1", "emb.dot.eold"]
