"""Reconciliation: tables are read whole or refused, parts add up, and each rule is named where it alone differs."""

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from linear_teacher import linear_teacher
from numpy.typing import NDArray

from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.reconcile import ReconcileJob, Reconciliation, TableSource
from ltrscale.ranking.choices import metric_named
from ltrscale.ranking.libraries import POLICIES, under
from ltrscale.scoring.score import ScoreJob

Rows = list[tuple[str, str, float, float]]  # query, item, label, score
Groups = list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]
WriteDataset = Callable[[Mapping[str, Groups], list[Feature]], str]


def table_of(rows: Rows) -> pa.Table:
    return pa.table(dict(zip(("query", "item", "label", "score"), zip(*rows, strict=True), strict=True)))


def write(folder: Path, rows: Rows) -> str:
    path = folder / "scores.parquet"
    pq.write_table(table_of(rows), path)
    return str(path)


def run(folder: Path, rows: Rows, **settings: object) -> Reconciliation:
    job = {"out": str(folder / "out"), "source": {"kind": "table", "path": write(folder, rows)}, **settings}
    ReconcileJob.model_validate(job).run()
    return Reconciliation.read(str(folder / "out"))


def random_rows(groups: int) -> Rows:
    rng = np.random.default_rng(0)
    rows = [
        (f"q{q:02}", f"d{rng.integers(10**9)}", float(rng.choice(4, p=[0.7, 0.15, 0.1, 0.05])), float(rng.integers(6)))
        for q in range(groups)
        for _ in range(rng.integers(1, 12))
    ]
    return [rows[i] for i in rng.permutation(len(rows))]  # the rows of a query lie apart


def test_parquet_and_csv_are_read_alike_and_groups_are_whole(tmp_path: Path) -> None:
    rows = [(f"0{q[1:]}", *rest) for q, *rest in random_rows(9)]  # names that numbers would change
    parquet = write(tmp_path, rows)  # type: ignore[arg-type]
    pyarrow.csv.write_csv(table_of(rows), tmp_path / "scores.csv")  # type: ignore[arg-type]
    (tmp_path / "scores.csv.gz").write_bytes(gzip.compress((tmp_path / "scores.csv").read_bytes()))
    expected: dict[str, list[tuple[str, float, float]]] = {}
    for query, item, label, value in rows:
        expected.setdefault(str(query), []).append((str(item), float(label), float(value)))
    for path in (parquet, str(tmp_path / "scores.csv"), str(tmp_path / "scores.csv.gz")):
        lists = TableSource(path=path).lists()
        assert lists.queries == list(expected)
        documents = [document for of_query in expected.values() for document in of_query]
        assert lists.offsets_Q1.diff().tolist() == [len(of_query) for of_query in expected.values()]
        assert lists.labels_N.tolist() == [label for _, label, _ in documents]
        assert lists.scores_N.tolist() == [value for *_, value in documents]
        by_name = sorted(range(len(documents)), key=lambda n: documents[n][0])
        assert lists.names_N.argsort().tolist() == by_name


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([("q", "a", 1, 1.0)], {"score": "scor"}, "no column 'scor'; did you mean 'score'"),
        ([("q", "a", 1, 1.0), ("q", "b", None, 1.0)], {}, "row 2: label is missing"),
        ([("q", "a", 1, 0.5), ("q", "b", 1, float("inf"))], {}, "row 2: score is missing or not finite"),
        ([("q", "a", 1, float("nan")), ("q", "b", 1, None)], {}, "no row has a score, so that nothing is ranked"),
        ([("q", "a", 1, 0.5), ("q", "b", float("nan"), 0.5)], {}, "row 2: label is missing"),
        ([("q", "a", -1, 1.0)], {}, "row 1: label is below 0"),
        ([("q", "a", 1, 1.0), (None, "b", 1, 1.0)], {}, "row 2: query is missing"),
        ([("q", "a", 1, 1.0), ("r", "a", 1, 1.0), ("q", "a", 0, 1.0)], {}, "row 1: its query has item 'a' in another"),
        ([("q", "a", "x", 1.0)], {}, "column 'label' has values that are no numbers"),
    ],
)
def test_a_bad_table_is_one_line_that_names_the_row(
    tmp_path: Path, rows: Rows, settings: dict[str, str], said: str
) -> None:
    with pytest.raises(InputError, match=f"scores.parquet: {said}"):
        TableSource(path=write(tmp_path, rows), **settings).lists()  # type: ignore[arg-type]
    (tmp_path / "other.parquet").write_text("query,item\n")
    with pytest.raises(InputError, match="neither Parquet nor CSV as its name says"):
        TableSource(path=str(tmp_path / "other.parquet")).lists()


@pytest.mark.slow
def test_parts_add_up_and_figures_are_those_of_the_rules(tmp_path: Path) -> None:
    names = ("ndcg@3", "map", "mrr", "precision@3", "recall@3", "success@3")
    found = run(tmp_path, random_rows(40), metrics=names, relevant_from=2)
    lists = TableSource(path=str(tmp_path / "scores.parquet")).lists()
    scored = (lists.scores_N, lists.labels_N, lists.offsets_Q1)
    values = pq.read_table(tmp_path / "out" / "groups.parquet")
    assert sum(len(each.programs) for each in found.metrics) == len(POLICIES)
    for each in found.metrics:
        metric = metric_named(each.metric, threshold=2)
        own_Q = metric.values(*scored)
        assert each.figure == pytest.approx(own_Q.nanmean().item())
        assert each.undefined == int(own_Q.isnan().sum()) > 0
        of_kind = [policy for policy in POLICIES if policy.kind == metric.kind]
        for program, policy in zip(each.programs, of_kind, strict=True):
            theirs_Q = under(policy.rules, metric, *scored, lists.names_N)
            assert program.figure == pytest.approx(theirs_Q.nanmean().item())
            assert values[f"{program.program} {program.spelled}"].to_pylist() == theirs_Q.tolist()
            assert program.difference == pytest.approx(sum(step.part for step in program.steps))
            assert program.difference != pytest.approx(0, abs=1e-4)
            for step in program.steps:
                assert (step.groups > 0) == bool(step.shown)
    print_at = (tmp_path / "out" / "report.md").read_text()
    assert "### " not in print_at
    assert "- ties, " in print_at


def test_a_label_whose_gain_is_beyond_float64_is_refused(tmp_path: Path) -> None:
    rows = [("q", "a", 1024.0, 2.0), ("q", "b", 0.0, 1.0)]
    with pytest.raises(InputError, match=r"label 1024 is above 1000, and its gain 2\^y - 1 beyond float64; give"):
        run(tmp_path, rows, metrics=["ndcg@5"])
    (of_map,) = run(tmp_path, rows, metrics=["map"], programs=["LightGBM"]).metrics
    assert of_map.figure == 1.0


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_row_without_a_score_was_not_retrieved(tmp_path: Path, missing: float | None) -> None:
    """By hand: two of three relevant documents were retrieved, at ranks 1 and 3 of 3; of the other query, none."""
    judged = [("q", "a", 1.0, 3.0), ("q", "b", 0.0, 2.0), ("q", "c", 1.0, 1.0), ("q", "d", 1.0, missing)]
    rows = [*judged, ("q", "e", 0.0, missing), ("r", "a", 1.0, missing)]
    names = ("map", "recall@3", "precision@5", "mrr", "ndcg@3")
    found = run(tmp_path, rows, metrics=names, programs=["trec_eval"])  # type: ignore[arg-type]
    assert (found.documents, found.not_retrieved, found.groups) == (6, 3, 2)
    discounts = [1 / np.log2(1 + rank) for rank in (1, 2, 3)]
    theirs = [(1 + 2 / 3) / 3, 2 / 3, 2 / 5, 1.0, (discounts[0] + discounts[2]) / sum(discounts)]
    assert [2 * each.programs[0].figure for each in found.metrics] == pytest.approx(theirs)
    assert "6 documents, of which 3 were not retrieved" in (tmp_path / "out" / "report.md").read_text()


# For each rule a table in which it alone separates a program from us, and the query that shows it.
EASY: Rows = [("easy", "a", 1, 2.0), *(("easy", f"b{i}", 0, 0.5 - i) for i in range(5))]
CASES: dict[tuple[str, str, str], tuple[str, Rows]] = {
    ("ties", "LightGBM", "input"): ("ndcg@5", [("q", "a", 0, 1.0), ("q", "b", 1, 1.0)]),
    ("ties", "trec_eval", "item"): ("mrr", [("q", "a", 0, 1.0), ("q", "b", 1, 1.0)]),
    ("ties", "CatBoost", "worst"): ("mrr", [("q", "a", 1, 1.0), ("q", "b", 0, 1.0)]),
    ("ties", "scikit-learn", "block"): ("map", [("q", "a", 1, 1.0), ("q", "b", 0, 1.0)]),
    ("gain", "scikit-learn", "linear"): ("ndcg@5", [("q", "a", 1, 2.0), ("q", "b", 3, 1.0)]),
    ("undefined", "LightGBM", "one"): (
        "map",
        [("q", "a", 0, 2.0), ("q", "b", 0, 1.0), ("r", "a", 0, 2.0), ("r", "b", 1, 1.0)],
    ),
    ("undefined", "ranx", "zero"): ("mrr", [("q", "a", 0, 2.0), ("q", "b", 0, 1.0)]),
    ("short", "ranx", "padded"): ("precision@5", [("q", "a", 1, 2.0), ("q", "b", 0, 1.0)]),
    ("short", "LETOR 4.0", "zero"): ("ndcg@5", [("q", "a", 1, 2.0), ("q", "b", 0, 1.0)]),
    ("relevant", "allRank", "best"): ("mrr", [("q", "a", 1, 2.0), ("q", "b", 3, 1.0)]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "case"), CASES.items(), ids=map("-".join, CASES))
def test_one_rule_explains_a_case_and_its_query_shows_it(
    rule: tuple[str, str, str], case: tuple[str, Rows], tmp_path: Path
) -> None:
    (name, program, theirs), (metric, rows) = rule, case
    (found,) = run(tmp_path, [*EASY, *rows], metrics=[metric], programs=[program]).metrics
    for each in found.programs:
        if each.spelled.startswith("ndcg_burges") or each.spelled.endswith("-"):
            continue
        (step,) = [step for step in each.steps if step.groups]
        assert (step.rule, step.theirs, step.groups) == (name, theirs, 1)
        assert [shown.query for shown in step.shown] == ["q"]
        assert each.difference == pytest.approx(step.part)
        assert abs(step.part) > 0.02
    # without the query that shows it, the program agrees with us
    (found,) = run(tmp_path, EASY, metrics=[metric], programs=[program]).metrics
    assert {each.difference for each in found.programs} == {0.0}


@pytest.mark.slow
def test_a_bundle_committed_scores_and_a_table_of_them_agree(write_dataset: WriteDataset, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    groups: Groups = [
        (rng.normal(size=(n, 2)).astype(np.float32), rng.integers(0, 3, n).astype(np.float32))
        for n in rng.integers(1, 9, 20)
    ]
    url = write_dataset({"a": groups}, [Feature(name="x"), Feature(name="y")])
    teacher = linear_teacher(str(tmp_path / "teacher"), url, [1.0, -2.0])
    ScoreJob(bundle=teacher, data=url, out=str(tmp_path / "scores")).run()
    (batch,) = iterate(select(Split(data=(url,)), labelled=True), docs_per_batch=10_000)
    assert batch.labels_N is not None
    queries = torch.arange(20).repeat_interleave(batch.lengths_Q).tolist()
    scores_N = batch.features_NF.double() @ torch.tensor([1.0, -2.0], dtype=torch.float64)
    items = [f"{n:05}" for n in range(len(queries))]
    rows = list(zip(map(str, queries), items, batch.labels_N.tolist(), scores_N.tolist(), strict=True))
    expected = run(tmp_path, rows)
    for source in ({"kind": "bundle", "bundle": teacher}, {"kind": "scores", "scores": str(tmp_path / "scores")}):
        job = {"out": str(tmp_path / "why" / str(source["kind"])), "source": {**source, "split": {"data": url}}}
        ReconcileJob.model_validate(job).run()
        found = Reconciliation.read(job["out"])  # type: ignore[arg-type]
        figures = [[program.figure for program in each.programs] for each in found.metrics]
        assert figures == [[program.figure for program in each.programs] for each in expected.metrics]


def test_metrics_without_known_rules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"err@5: no program's rules are known; take one of ndcg, map"):
        ReconcileJob.model_validate({"source": {"kind": "table", "path": "x"}, "metrics": ["err@5"]})
