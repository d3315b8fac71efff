"""What rows lack, a label, and what files lack, a column: the config says what it counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing import prepare

from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.source import File, Needs


def prepared(folder: Path, columns: dict[str, Any], **settings: Any) -> Dataset:
    inputs = str(folder / "log")
    config = {"inputs": inputs, "source": {"kind": "items", "columns": columns}, **settings}
    return prepare(PrepareConfig.model_validate(config), str(folder / "data"))


def written(folder: Path, *parts: pd.DataFrame) -> None:
    (folder / "log").mkdir()
    for number, part in enumerate(parts):
        part.to_csv(folder / "log" / f"{number}.csv", index=False)


labels = st.lists(st.lists(st.sampled_from([None, 0, 1, 3]), min_size=1, max_size=5), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(labels)
@pytest.mark.parametrize("unjudged", [0, "unlabelled", "reject"])
def test_rows_without_a_label_count_as_the_config_says(
    unjudged: Any, tmp_path_factory: pytest.TempPathFactory, lists: list[list[int | None]]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    rows = [(f"q{q}", 1.5, label) for q, each in enumerate(lists) for label in each]
    written(folder, pd.DataFrame(rows, columns=["q", "x", "y"]).astype({"y": "Int64"}))
    columns = {"query": "q", "label": "y", "features": ["x"], "unjudged": unjudged}
    data = prepared(folder, columns, max_rejected=1)
    accounting, counts = data.manifest.accounting, data.manifest.counts()
    partly = [each for each in lists if None in each and {*each} != {None}]
    judged = [each for each in lists if None not in each]
    left = [label for each in judged for label in each]
    if unjudged == 0:
        left += [label or 0 for each in partly for label in each]
    elif unjudged == "reject":
        left += [label for each in partly for label in each if label is not None]
    assert accounting.rows_rejected == (sum(each.count(None) for each in partly) if unjudged == "reject" else 0)
    assert counts.labelled == len(judged) + (len(partly) if unjudged != "unlabelled" else 0)
    assert counts.groups == len(lists)
    assert data.manifest.label_counts == {str(y): left.count(y) for y in sorted({*left})}


def test_a_value_without_a_grade_is_no_label(tmp_path: Path) -> None:
    log = pd.DataFrame({"q": list("aaab"), "x": range(4), "y": ["Exact", "Odd", "None", "Odd"]})
    written(tmp_path, log)
    columns = {"query": "q", "label": "y", "features": ["x"], "unjudged": 0}
    data = prepared(tmp_path, {**columns, "grades": {"Exact": 2, "None": 1, "Odd": None}})
    assert (data.manifest.label_counts, data.manifest.counts().labelled) == ({"0": 1, "1": 1, "2": 1}, 1)


def test_too_many_rows_without_a_label_name_the_key(tmp_path: Path) -> None:
    written(tmp_path, pd.DataFrame({"q": list("aab"), "x": range(3), "y": [1, None, 0]}))
    with pytest.raises(
        InputError, match=r"bad_label 1; .*set prepare\.source\.columns\.unjudged to 0, or to unlabelled"
    ):
        prepared(tmp_path, {"query": "q", "label": "y", "features": ["x"]})


PARTS = pd.DataFrame({"q": list("aabb"), "x": [1.0, 2.0, 3.0, 4.0], "kind": list("uvuv"), "late": [5.0, 6.0, 7.0, 8.0]})
OPTIONAL = {"query": "q", "features": ["x", "late"], "categorical": ["kind"], "optional": ["late", "kind"]}


def values(data: Dataset) -> list[list[float]]:
    features = [groups.features_NF for groups in iterate(select(Split(data=data.url), labelled=None))]
    return np.nan_to_num(np.concatenate(features), nan=-1.0).tolist()


@pytest.mark.parametrize("first", [True, False])
def test_an_optional_feature_is_a_missing_value_where_a_file_lacks_it(tmp_path: Path, first: bool) -> None:
    lacking, whole = PARTS[:2].drop(columns=["late", "kind"]), PARTS[2:]
    written(tmp_path, *((lacking, whole) if first else (whole, lacking)))
    data = prepared(tmp_path, OPTIONAL)
    rows = values(data)
    assert [feature.name for feature in data.manifest.features] == ["x", "late", "kind"]
    assert [row[:2] for row in rows] == (
        [[1, -1], [2, -1], [3, 7], [4, 8]] if first else [[3, 7], [4, 8], [1, -1], [2, -1]]
    )
    assert [row[2] for row in rows].count(-1.0) == 2


def test_a_vector_may_be_missing_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    rows = [{"q": f"q{i}", "x": 1.0 * i, "emb": [0.5, i]} for i in range(4)]
    pq.write_table(
        pa.Table.from_pylist([{"q": row["q"], "x": row["x"]} for row in rows[:2]]), tmp_path / "log/0.parquet"
    )
    pq.write_table(pa.Table.from_pylist(rows[2:]), tmp_path / "log/1.parquet")
    columns = {"query": "q", "features": ["x"], "vectors": {"emb": 2}, "optional": ["emb"]}
    assert values(prepared(tmp_path, columns)) == [[0, -1, -1], [1, -1, -1], [2, 0.5, 2], [3, 0.5, 3]]


def test_a_file_that_lacks_a_feature_names_the_key(tmp_path: Path) -> None:
    written(tmp_path, PARTS[:2], PARTS[2:].drop(columns="late"))
    with pytest.raises(InputError, match=r"1\.csv: features: no column is named 'late'; .* under optional"):
        prepared(tmp_path, {**OPTIONAL, "optional": []})


def test_a_pattern_that_finds_more_in_a_later_file_names_the_key(tmp_path: Path) -> None:
    written(tmp_path, PARTS[:2].drop(columns="late"), PARTS[2:])
    with pytest.raises(InputError, match=r"column 'late' \(numeric\) is not among .* and under optional, list it"):
        prepared(tmp_path, {"query": "q", "features": ["*"]})


@pytest.mark.parametrize("name", ["f_*", "price", "q"])
def test_only_a_named_feature_is_optional(name: str) -> None:
    columns = {"query": "q", "features": ["x", "f_*"], "optional": [name]}
    with pytest.raises(InputError, match=r"optional: .* is not named under features, categorical, dates or vectors"):
        validate(PrepareConfig, {"inputs": "x", "source": {"kind": "items", "columns": columns}}, "prepare.yaml")


def test_rows_to_score_may_lack_what_is_optional(tmp_path: Path) -> None:
    written(tmp_path, PARTS)
    data = prepared(tmp_path, {**OPTIONAL, "fill": {"x": 0}})
    source = PrepareConfig.model_validate({"inputs": "x", "source": {"kind": "items", "columns": OPTIONAL}}).source
    reading = source.for_scoring(Needs(data.manifest.features))
    PARTS[["q", "x"]].to_csv(tmp_path / "new.csv", index=False)
    assert reading.missing_columns(File(url=str(tmp_path / "new.csv"))) == []
    PARTS[["q", "late"]].to_csv(tmp_path / "new.csv", index=False)
    assert [each.split()[0] for each in reading.missing_columns(File(url=str(tmp_path / "new.csv")))] == ["'x'"]
    fewer = source.for_scoring(Needs(data.manifest.features[:1]))
    assert fewer.mapping is not None
    assert fewer.mapping.optional == ()
