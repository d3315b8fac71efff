"""Slices and outlier rules pick the groups that pandas picks from the log as it was typed, for each kind of column."""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from linear_teacher import linear_teacher

from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.evaluation.measure.evaluate import evaluate
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import prepare

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
TENTHS = ("0", "0.1", ".3", "0.7", "1.0", "-0.1", "1e39")
LARGE = 1_700_000_000_000_000_000
META: dict[str, tuple[str, ...]] = {
    "ts": (f"{LARGE + 50}", f"{LARGE + 51}", "0", "0.5", f"{2**63}", f"{-(10**30)}", "1e300"),
    "user": (f"{2**60 + 7}", f"{2**63 + 9}", "1.5", "-1"),
    "hits": ("3", "3.0", "2.5", "300", "-1e3"),
    "share": ("0.1", "0.30000001", "0.7", "1"),
    "weight": ("0.1", "0.7", "1", "1e39"),
    "seen": ("3", "2.5"),
}
"""Constants for each column of groups, as a user types them."""


@pytest.fixture(scope="module")
def typed() -> pd.DataFrame:
    """A log of 60 searches with decimals of one digit, and columns of groups of all types that hold numbers."""
    rng, parts = np.random.default_rng(0), []
    for i in range(60):
        n = int(rng.integers(1, 7))
        parts.append(
            pd.DataFrame(
                {
                    "search": f"s{i:02d}",
                    "x": np.round(rng.integers(0, 11, n) / 10, 1),
                    "price": np.where(rng.random(n) < 0.1, np.nan, np.round(rng.integers(0, 11, n) / 10, 1)),
                    "grade": np.round(rng.integers(0, 4, n) / 10, 1),
                    "ts": LARGE + 2 * i,
                    "user": np.uint64(2**60 + i if i % 2 else 2**63 + i),
                    "hits": np.int8(i // 10),
                    "share": np.round(i % 11 / 10, 1),
                    "weight": np.float32(i % 11 / 10),
                    "seen": i % 5 if i % 3 else None,
                }
            )
        )
    return pd.concat(parts, ignore_index=True).astype({"seen": "Int64"})


@pytest.fixture(scope="module")
def data(typed: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A data set for each split: parts of the log, and all of it as the test."""
    columns = {"query": "search", "label": "grade", "features": ["x", "price"], "meta": list(META)}
    found = {}
    for split, below in (("train", "s10"), ("validation", "s20"), ("test", "t")):
        folder = tmp_path_factory.mktemp(split)
        typed[typed["search"] < below].to_parquet(folder / "log.parquet")
        source = {"kind": "items", "columns": columns}
        config = {"inputs": [str(folder / "log.parquet")], "source": source, "period": "all"}
        found[split] = prepare(validate(PrepareConfig, config, "prepare"), str(folder / "data")).url
    return found


def evaluated(data: dict[str, str], out: Path, **keys: Any) -> tuple[Evaluation, dict[int, set[str]]]:
    """An evaluation of all groups, and the slices of each group by its number."""
    values = {
        "models": {"linear": linear_teacher(str(out / "model"), data["train"], [1.0, 0.0])},
        "splits": {split: {"data": url} for split, url in data.items()},
        "baseline": None,
        "resamples": 100,
        "relevant_from": 0.1,
        **keys,
    }
    found = evaluate(EvaluateConfig.model_validate(values), str(out / "evaluation"), made_by={}, report=lambda _: None)
    rows = pq.read_table(out / "evaluation" / "groups.parquet", columns=["gid", "slices"]).to_pylist()
    return found, {row["gid"]: set(row["slices"]) for row in rows}


def compare(column: pd.Series, sign: str, other: Any) -> pd.Series:
    """A comparison of numbers, false where one is missing."""
    with np.errstate(over="ignore"):  # 1e39 beside a float32 is infinite
        holds = OPERATORS[sign](column, other)
    missing = column.isna() | (other.isna() if isinstance(other, pd.Series) else False)
    return holds.fillna(False).astype(bool) & ~missing


def cases(log: pd.DataFrame) -> dict[str, pd.Series]:
    """Conditions with what pandas makes of them for each search."""
    search, found = log["search"], {}
    for sign in OPERATORS:
        for name, column in {"x": log["x"], "price": log["price"], "label": log["grade"]}.items():
            for constant in TENTHS:
                holds = compare(column, sign, float(constant)).groupby(search)
                found[f"any({name} {sign} {constant})"] = holds.any()
                found[f"all({name} {sign} {constant})"] = holds.all()
        for name, constants in META.items():
            for constant in constants:
                value = int(constant) if constant.lstrip("-").isdigit() else float(constant)
                found[f"meta_{name} {sign} {constant}"] = compare(log[name], sign, value).groupby(search).first()
        for name, column in (("share", log["share"]), ("weight", log["weight"]), ("hits", log["hits"])):
            typed = column.astype(str).astype(float)  # a float32 that was typed as 0.1
            found[f"any(x {sign} meta_{name})"] = compare(log["x"], sign, typed).groupby(search).any()
        of_search = log.groupby("search").first()
        found[f"meta_user {sign} meta_ts"] = compare(of_search["user"].astype(object), sign, of_search["ts"])
        for name, grades in (
            ("min", log.groupby("search")["grade"].min()),
            ("max", log.groupby("search")["grade"].max()),
        ):
            found[f"{name}_label {sign} 0.3"] = compare(grades, sign, 0.3)
    return found


def test_a_slice_is_what_pandas_finds_in_the_log_as_it_was_typed(
    typed: pd.DataFrame, data: dict[str, str], tmp_path: Path
) -> None:
    expected = cases(typed)
    slices = {f"c{i}": text for i, text in enumerate(expected)}
    known = {"x": {"at_least": 0.7}, "price": {"below": 0.1}}
    _, found = evaluated(data, tmp_path, slices=slices, outliers={"gap": None, "known": known})
    gids = {row["query_id"]: row["gid"] for row in groups_of(data["test"])}
    wrong = []
    for name, text in slices.items():
        ours = {search for search, gid in gids.items() if name in found[gid]}
        theirs = set(expected[text].index[expected[text]])
        if ours != theirs:
            wrong.append(f"{text}: {len(ours)} groups, pandas finds {len(theirs)}")
    assert wrong == []
    assert sum(0 < holds.sum() < 60 for holds in expected.values()) > 150  # most conditions tell groups apart
    outlier = ((typed["x"] >= 0.7) | (typed["price"] < 0.1)).groupby(typed["search"]).any()
    assert {search for search, gid in gids.items() if "outliers" in found[gid]} == set(outlier.index[outlier])


def groups_of(data: str) -> list[dict[str, Any]]:
    files = [f"{data}/{file.path}" for file in open_dataset(data).manifest.files]
    return [row for path in files for row in pq.read_table(path, columns=["gid", "query_id"]).to_pylist()]


def test_numbers_beyond_2_to_the_53_have_bands_and_labels_a_threshold(
    typed: pd.DataFrame, data: dict[str, str], tmp_path: Path
) -> None:
    found, _ = evaluated(data, tmp_path, slices={"some": "n_relevant > 0"}, slice_by=["meta_ts", "meta_user"])
    assert found.test.slices["meta_ts=500000001.."] == found.test.slices["meta_user=500000001.."] == 60
    assert found.test.slices["some"] == (typed["grade"] >= 0.1).groupby(typed["search"]).any().sum()
