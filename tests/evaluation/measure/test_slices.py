"""Slices by a slow look at every group, as pandas finds them in the log, and their tests."""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from linear_teacher import linear_teacher
from preparing import prepare

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset.files import Counts, DataFile
from ltrscale.data.dataset.manifest import Feature, Manifest, open_dataset
from ltrscale.data.stream.plan import Part
from ltrscale.errors import InputError
from ltrscale.evaluation.measure import measuring
from ltrscale.evaluation.measure.evaluate import evaluate
from ltrscale.evaluation.measure.outliers import Seen
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.evaluation.measure.slices import _bands, in_order
from ltrscale.evaluation.statistics import blocks
from ltrscale.evaluation.statistics.blocks import holm
from ltrscale.evaluation.statistics.summarise import PATTERNS
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.runtime.on_ray import run_with_ray
from ltrscale.scoring.score import ScoreJob

FEATURES = [Feature(name="x"), Feature(name="the price")]
DEVICES = ("ios", "android", None)
Row = dict[str, Any]
CONDITIONS: Mapping[str, tuple[str, Callable[[Row], bool]]] = {
    "long": ("n_documents > 5", lambda row: len(row["labels"]) > 5),
    "mobile": ("meta_device in ['ios', 'android']", lambda row: row["meta_device"] is not None),
    "not ios": ("not meta_device == 'ios'", lambda row: row["meta_device"] != "ios"),
    "bought": ("max_label >= 2", lambda row: max(row["labels"]) >= 2),
    "constant": ("min_label == max_label", lambda row: len(set(row["labels"])) == 1),
    "several": ("n_relevant > 1", lambda row: sum(label >= 1 for label in row["labels"]) > 1),
    "without price": ("any(`the price` is null)", lambda row: any(math.isnan(p) for _, p in row["documents"])),
    "some missing": ("missing", lambda row: any(math.isnan(v) for d in row["documents"] for v in d)),
    "cheap": ("all(`the price` < 1 and label < 2)", lambda row: all(
        p < 1 and label < 2 for (_, p), label in zip(row["documents"], row["labels"], strict=True)
    )),
    "late outliers": ("outlier and period == 'd'", lambda row: row["outlier"] and row["period"] == "d"),
    "new to training": ("drifted", lambda row: row["drifted"]),
    "nobody": ("meta_hits < 0", lambda row: row["meta_hits"] < 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Query groups of four periods, in the order of the files."""
    rng, found = np.random.default_rng(0), []
    for period in "abcd":
        for i in range(40):
            n = int(rng.integers(1, 10))
            documents = rng.normal(size=(n, 2)).astype(np.float32)
            documents[rng.random(n) < 0.05, 1] = np.nan
            labels = rng.integers(0, 3, n) if i % 4 else np.ones(n)
            row = {"period": period, "documents": documents.tolist(), "labels": labels.astype(float).tolist()}
            row |= {"meta_device": DEVICES[i % 3], "meta_hits": i // 2, "meta_share": i / 7}
            found.append(row | {"outlier": bool((documents[:, 0] >= 2).any())})
    known = [d for row in found if row["period"] == "a" for d in row["documents"]]
    ranges = [(min(v), max(v)) for v in ([d[f] for d in known if not math.isnan(d[f])] for f in (0, 1))]
    for row in found:
        row["drifted"] = any(
            v < low or v > high for d in row["documents"] for v, (low, high) in zip(d, ranges, strict=True)
        )
    return [{**row, "gid": gid} for gid, row in enumerate(found)]


@pytest.fixture(scope="module")
def data(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The groups as a data set, with row groups of seven."""
    url, lists = str(tmp_path_factory.mktemp("data") / "set"), pa.list_(pa.float32())
    files = []
    with storage.Commit(url) as commit:
        for period, of_period in itertools.groupby(rows, lambda row: str(row["period"])):
            groups = list(of_period)
            table = pa.table(
                {
                    "gid": pa.array([row["gid"] for row in groups], pa.int64()),
                    "query_id": [f"q{row['gid']}" for row in groups],
                    "features": pa.array([np.ravel(row["documents"]).tolist() for row in groups], lists),
                    "labels": pa.array([row["labels"] for row in groups], lists),
                    "meta_device": pa.array([row["meta_device"] for row in groups]).dictionary_encode(),
                    "meta_hits": [row["meta_hits"] for row in groups],
                    "meta_share": [row["meta_share"] for row in groups],
                }
            )
            with commit.file(f"period={period}/part-00000-{{hash}}.parquet") as path:
                pq.write_table(table, path, row_group_size=7)
            parts = [groups[i : i + 7] for i in range(0, len(groups), 7)]
            counts = [Counts(len(part), sum(len(row["labels"]) for row in part), len(part)) for part in parts]
            longest = max(len(row["labels"]) for row in groups)
            files.append(DataFile(**vars(commit.files[-1]), period=period, longest=longest, row_groups=tuple(counts)))
        commit.finish(Manifest(features=tuple(FEATURES), files=tuple(files)).model_dump(mode="json"))
    return url


@pytest.fixture(scope="module")
def config(data: str, tmp_path_factory: pytest.TempPathFactory) -> EvaluateConfig:
    folder = tmp_path_factory.mktemp("models")
    urls = [
        linear_teacher(str(folder / f"m{i}"), data, weights) for i, weights in enumerate(([1, 0], [0.5, 0], [0, 0]))
    ]
    ScoreJob(bundle=urls[0], data=data, out=str(folder / "scores")).run()
    values = {
        "models": {"gbdt": urls[1], "zero": urls[2]},
        "scores": {"scored": str(folder / "scores")},
        "splits": {
            name: {"data": data, "periods": periods}
            for name, periods in (("train", ["a"]), ("validation", ["b"]), ("test", ["c", "d"]))
        },
        "slices": {name: text for name, (text, _) in CONDITIONS.items()},
        "slice_by": ["period", "meta_device", "meta_hits"],
        "outliers": {"gap": None, "known": {"x": {"at_least": 2}}},
        "resamples": 200,
        "docs_per_batch": 9,
    }
    return EvaluateConfig.model_validate(values)


def run(config: EvaluateConfig, out: Path, **how: Any) -> Evaluation:
    return evaluate(config, str(out), made_by={}, **how)


@pytest.fixture(scope="module")
def evaluated(config: EvaluateConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, Path]:
    out = tmp_path_factory.mktemp("out") / "evaluation"
    return run(config, out), out


def members(rows: list[Row]) -> dict[str, set[int]]:
    """Slow: the gids of the test groups in each slice."""
    tested = [row for row in rows if row["period"] in "cd"]
    found = {"all": {row["gid"] for row in tested}, "outliers": {row["gid"] for row in tested if row["outlier"]}}
    for name, (_, holds) in CONDITIONS.items():
        found[name] = {row["gid"] for row in tested if holds(row)}
    bands = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3..5": (3, 5), "6..10": (6, 10), "11..20": (11, 20)}
    for period in "cd":
        found[f"period={period}"] = {row["gid"] for row in tested if row["period"] == period}
    for device, text in (("android", "android"), ("ios", "ios"), (None, "null")):
        found[f"meta_device={text}"] = {row["gid"] for row in tested if row["meta_device"] == device}
    for text, (low, high) in bands.items():
        found[f"meta_hits={text}"] = {row["gid"] for row in tested if low <= row["meta_hits"] <= high}
    return found


@pytest.mark.slow
def test_slices_have_the_groups_and_means_of_a_slow_look(evaluated: tuple[Evaluation, Path], rows: list[Row]) -> None:
    evaluation, out = evaluated
    expected = members(rows)
    assert list(evaluation.test.slices) == list(expected)
    assert evaluation.test.slices == {name: len(gids) for name, gids in expected.items()}
    assert sum(0 < len(gids) < 80 for gids in expected.values()) > 15
    written = pq.read_table(out / "groups.parquet").to_pylist()
    for method in evaluation.methods:
        of_method = {row["gid"]: row for row in written if row["method"] == method.name}
        assert set(of_method) == expected["all"]
        for name, gids in expected.items():
            if name != "all":
                assert {gid for gid, row in of_method.items() if name in row["slices"]} == gids
            values = [of_method[gid]["ndcg@5"] for gid in gids if of_method[gid]["ndcg@5"] is not None]
            summary = method.slices[name].summaries["ndcg@5"]
            assert summary.groups == len(values)
            assert summary.groups + summary.undefined == len(gids)
            assert summary.mean == (pytest.approx(np.mean(values)) if values else None)


@pytest.mark.slow
def test_p_is_adjusted_over_slices_and_methods(evaluated: tuple[Evaluation, Path]) -> None:
    evaluation, out = evaluated
    others = [method for method in evaluation.methods if method.name != evaluation.baseline]
    found = [method.slices["all"].comparisons["ndcg@5"] for method in others]
    assert [c.p_holm for c in found] == holm(np.array([c.p for c in found], float)).tolist()
    family = [
        scope.comparisons["ndcg@5"]
        for method in others
        for name, scope in method.slices.items()
        if name != "all" and "ndcg@5" in scope.comparisons
    ]
    assert len(family) > 30
    assert [c.p_holm for c in family] == pytest.approx(holm(np.array([c.p for c in family], float)).tolist())
    text = (out / "report.md").read_text()
    assert "## Slices" in text
    assert "- long: n_documents > 5" in text
    assert text.count("| meta_device=null") == 3


class Recorded:
    """Sends each part through pickle, as another process would get it."""

    def __init__(self) -> None:
        self.parts = 0

    def __call__(self, function: Any, parts: Any) -> Any:
        from ray import cloudpickle

        for part in parts:
            self.parts += 1
            work, sent = cloudpickle.loads(cloudpickle.dumps((function, part)))
            yield cloudpickle.loads(cloudpickle.dumps(work(sent)))


def same_files(one: Path, other: Path) -> None:
    tables = [pq.read_table(out / "groups.parquet") for out in (one, other)]
    assert tables[0].equals(tables[1])
    assert (one / "metrics.json").read_bytes() == (other / "metrics.json").read_bytes()


@pytest.mark.nightly
def test_any_parts_and_processes_give_the_same_bits(
    config: EvaluateConfig, evaluated: tuple[Evaluation, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_VALUES", 100)
    apart = Recorded()
    run(config, tmp_path / "apart", run=apart)
    assert apart.parts > 8
    same_files(tmp_path / "apart", evaluated[1])
    monkeypatch.setattr(blocks, "_OWN_BLOCK", 50)
    monkeypatch.setattr(blocks, "_BLOCKS", 32)
    of_blocks = run(config, tmp_path / "blocks", run=Recorded())
    monkeypatch.setattr(measuring, "_VALUES", 1 << 22)
    run(config, tmp_path / "one")
    same_files(tmp_path / "blocks", tmp_path / "one")
    for ours, theirs in zip(of_blocks.methods, evaluated[0].methods, strict=True):
        mine, exact = ours.slices["all"].summaries["ndcg@5"], theirs.slices["all"].summaries["ndcg@5"]
        assert mine.mean == pytest.approx(exact.mean)
        assert mine.low != exact.low


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.slow
def test_tasks_of_ray_give_the_same_bits(
    config: EvaluateConfig,
    evaluated: tuple[Evaluation, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ray_cluster: None,  # noqa: ARG001
) -> None:
    monkeypatch.setattr(measuring, "_VALUES", 100)
    run(config, tmp_path / "out", run=run_with_ray, threads=1)
    same_files(tmp_path / "out", evaluated[1])


@pytest.mark.slow
def test_committed_scores_alone_read_no_features(
    config: EvaluateConfig, evaluated: tuple[Evaluation, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "models": {},
        "baseline": "scored",
        "outliers": {"gap": None},
        "slices": {"long": "n_documents > 5", "mixed": "any(label == 0) and any(label > 0)"},
    }
    alone = validate(EvaluateConfig, {**config.model_dump(mode="json"), **values}, "evaluate")
    seen = []

    def watched(function: Any, parts: Iterable[Part]) -> Any:
        parts = list(parts)
        seen.extend(part.selection.features for part in parts)
        return map(function, parts)

    monkeypatch.setattr(Seen, "from_groups", None)  # no slice asks what training has
    found = run(alone, tmp_path / "out", run=watched).methods[0]
    assert seen == [()]
    before = evaluated[0].methods[0]
    for name in ("all", "long"):
        assert found.slices[name].summaries == before.slices[name].summaries
    monkeypatch.setattr(measuring, "_DOCUMENTS", 50)
    in_parts = run(alone, tmp_path / "parts", run=watched).methods[0].slices["all"].summaries["ndcg@5"]
    assert len(seen) > 4
    assert in_parts.mean == pytest.approx(before.slices["all"].summaries["ndcg@5"].mean)


def test_bad_slices_are_named(config: EvaluateConfig, tmp_path: Path) -> None:
    plain = config.model_dump(mode="json")
    for change, message in (
        ({"slices": {"long": "n_documents >"}}, r"slices\.long: column 14: invalid syntax at the end"),
        ({"slices": {"all": "outlier"}}, "'all' cannot name a slice"),
    ):
        with pytest.raises(InputError, match=message):
            validate(EvaluateConfig, {**plain, **change}, "evaluate")
    for change, message in (
        (
            {"slices": {"phones": "meta_devise == 'ios'"}},
            r"slices\.phones: no column 'meta_devise'; did you mean 'meta_d",
        ),
        ({"slices": {"dear": "`the price` > 1"}}, r"slices\.dear: 'the price' is a column of documents"),
        ({"slice_by": ["meta_hit"]}, "slice_by: no column 'meta_hit'; did you mean 'meta_hits'"),
        ({"slice_by": ["meta_share"]}, "slice_by: meta_share holds fractions"),
    ):
        with pytest.raises(InputError, match=message):
            run(validate(EvaluateConfig, {**plain, **change}, "evaluate"), tmp_path / "no")
    assert storage.read_manifest(str(tmp_path / "no")) is None


def test_slices_of_numbers_are_in_numeric_order_with_negative_ones_first_and_null_last() -> None:
    numbers = pa.array([-7, 0, 1, 4, 8, 15, 3000, 2_000_000_000, None])
    names = [f"n={'null' if band is None else band}" for band in _bands("n", numbers).to_pylist()]
    assert names[0] == "n=below 0"
    assert in_order(names[::-1]) == names


def test_a_column_of_ids_makes_no_slices(
    config: EvaluateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ltrscale.evaluation.measure.slices._MOST_VALUES", 20)
    with pytest.raises(InputError, match="slice_by: query_id has more than 20 values; write conditions under slices"):
        run(config.replace(slice_by=("query_id",)), tmp_path / "no")


def test_too_many_periods_are_refused_before_a_group_is_read(
    config: EvaluateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(function: Any, parts: Iterable[Part]) -> Any:  # noqa: ARG001
        raise AssertionError

    monkeypatch.setattr("ltrscale.evaluation.measure.slices._MOST_VALUES", 0)
    with pytest.raises(InputError, match="slice_by: period has more than 0 values"):
        run(config.replace(slice_by=("period",)), tmp_path / "no", run=reads)


@pytest.mark.slow
def test_p_of_a_slice_is_fine_enough_for_the_number_of_slices(evaluated: tuple[Evaluation, Path]) -> None:
    """The config has 200 resamples, too few for Holm over so many comparisons; all slices have the same patterns."""
    compared = [
        scope.comparisons["ndcg@5"].p
        for method in evaluated[0].methods
        for scope in method.slices.values()
        if "ndcg@5" in scope.comparisons
    ]
    slices = len(evaluated[0].test.slices) - 1
    patterns = PATTERNS * 2 * slices
    assert patterns > 201
    for p in compared:
        steps = (p or 0) * patterns
        assert steps == pytest.approx(round(steps), abs=1e-6)


SIGNS: dict[str, Callable[[Any, Any], Any]] = {
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
def typed_data(typed: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
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


def typed_evaluation(typed_data: dict[str, str], out: Path, **keys: Any) -> tuple[Evaluation, dict[int, set[str]]]:
    """An evaluation of all groups, and the slices of each group by its number."""
    values = {
        "models": {"linear": linear_teacher(str(out / "model"), typed_data["train"], [1.0, 0.0])},
        "splits": {split: {"data": url} for split, url in typed_data.items()},
        "baseline": None,
        "resamples": 100,
        "relevant_from": 0.1,
        **keys,
    }
    found = evaluate(EvaluateConfig.model_validate(values), str(out / "evaluation"), made_by={})
    rows = pq.read_table(out / "evaluation" / "groups.parquet", columns=["gid", "slices"]).to_pylist()
    return found, {row["gid"]: set(row["slices"]) for row in rows}


def compare(column: pd.Series, sign: str, other: Any) -> pd.Series:
    """A comparison of numbers, false where one is missing."""
    with np.errstate(over="ignore"):  # 1e39 beside a float32 is infinite
        holds = SIGNS[sign](column, other)
    missing = column.isna() | (other.isna() if isinstance(other, pd.Series) else False)
    return holds.fillna(False).astype(bool) & ~missing


def cases(log: pd.DataFrame) -> dict[str, pd.Series]:
    """Conditions with what pandas makes of them for each search."""
    search, found = log["search"], {}
    for sign in SIGNS:
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


@pytest.mark.slow
def test_a_slice_is_what_pandas_finds_in_the_log_as_it_was_typed(
    typed: pd.DataFrame, typed_data: dict[str, str], tmp_path: Path
) -> None:
    expected = cases(typed)
    slices = {f"c{i}": text for i, text in enumerate(expected)}
    known = {"x": {"at_least": 0.7}, "price": {"below": 0.1}}
    _, found = typed_evaluation(typed_data, tmp_path, slices=slices, outliers={"gap": None, "known": known})
    gids = {row["query_id"]: row["gid"] for row in groups_of(typed_data["test"])}
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


@pytest.mark.slow
def test_numbers_beyond_2_to_the_53_have_bands_and_labels_a_threshold(
    typed: pd.DataFrame, typed_data: dict[str, str], tmp_path: Path
) -> None:
    found, _ = typed_evaluation(
        typed_data, tmp_path, slices={"some": "n_relevant > 0"}, slice_by=["meta_ts", "meta_user"]
    )
    assert found.test.slices["meta_ts=500000001.."] == found.test.slices["meta_user=500000001.."] == 60
    assert found.test.slices["some"] == (typed["grade"] >= 0.1).groupby(typed["search"]).any().sum()
