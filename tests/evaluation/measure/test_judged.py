"""Metrics against the judgements of whole queries: relevant documents outside a list are missed."""

import csv
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from preparing import prepare
from reference import metrics as oracle

from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.config import members, validate
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.measuring import Judged, Measuring, values_of
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.evaluation.measure.slices import Slicer
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.experiments.study import StudyJob
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ranking.choices import MetricConfig, metric_class
from ltrscale.ranking.graded import ClickNDCGConfig, GainNDCGConfig
from ltrscale.ranking.metric import Metric

METRICS: list[Metric] = [cls.made(k=k) for cls in members(MetricConfig) for k in (1, 3)]
METRICS.append(GainNDCGConfig(k=3, gains=(0, 1, 10, 11, 12)))
ROOT = Path(__file__).resolve().parents[3]


def slow(metric: Metric, scores: list[float], own: list[float], judged: list[float]) -> float:
    """The metric of a list, by the formula, where `judged` has the labels of all judged documents of the query."""
    k = metric.model_dump().get("k", 1)
    if not any(judged):
        return math.nan
    if metric.kind == "gain_ndcg":
        gains = [math.log2(1 + (0, 1, 10, 11, 12)[int(y)]) for y in own]  # the oracle's gain is 2^y - 1
        best = [math.log2(1 + (0, 1, 10, 11, 12)[int(y)]) for y in judged]
        return oracle.expected_dcg(scores, gains, k) / oracle.ideal_dcg(best, k) if any(own) else 0.0
    if not any(own):
        return 0.0
    relevant = sum(y >= 1 for y in judged)
    match metric.kind:
        case "ndcg":
            return oracle.expected_dcg(scores, own, k) / oracle.ideal_dcg(judged, k)
        case "map":  # the sum of precisions at relevant documents, divided by the relevant ones that there are
            return oracle.average_precision(scores, own) * sum(y >= 1 for y in own) / relevant
        case "recall":
            return oracle.expectation(lambda order: sum(own[i] >= 1 for i in order[:k]) / relevant, scores)
        case "mrr":
            return oracle.mrr(scores, own)
        case "precision":
            return oracle.precision(scores, own, k)
        case "success":
            return oracle.success(scores, own, k)
        case "dcg":
            return oracle.expected_dcg(scores, own, k)
        case "err":
            return oracle.err(scores, own, k, 4)
        case "rbp":
            return oracle.rbp(scores, own, k, 0.8)
    raise AssertionError(f"{metric.kind}: state here its value where a query's judgements count")


def random_groups(seed: int, *, outside: bool) -> tuple[QueryGroups, list[list[float]], list[list[float]], Judged]:
    """Groups with tied scores, their lists, the labels of all judged documents, and these as `Judged`."""
    rng = np.random.default_rng(seed)
    own = [rng.choice([0, 0, 0, 1, 2, 4], size=rng.integers(1, 6)).astype(float).tolist() for _ in range(40)]
    more = [rng.choice([0, 1, 3, 4], size=rng.integers(0, 4)).astype(float).tolist() if outside else [] for _ in own]
    both = [rng.permutation([*a, *b]).tolist() for a, b in zip(own, more, strict=True)]
    both[7], own[7] = [], [0.0]  # a query without judgements
    labels_N = torch.tensor([y for labels in own for y in labels], dtype=torch.float32)
    groups = QueryGroups(
        torch.zeros(len(labels_N), 1),
        to_offsets(torch.tensor([len(labels) for labels in own])),
        labels_N=labels_N,
        ids_Q=torch.arange(40) * 3,
    )
    order = rng.permutation(40)  # the judgements come in another order than the groups
    judged = Judged(
        ids_Q=torch.arange(40) * 3,
        place_Q=torch.from_numpy(np.argsort(order)),
        labels_J=torch.tensor([y for q in order for y in both[q]], dtype=torch.float32),
        offsets_P1=to_offsets(torch.tensor([len(both[q]) for q in order])),
    )
    return groups, own, both, judged


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_metric_equals_its_formula_with_all_judged_documents(metric: Metric) -> None:
    groups, own, both, judged = random_groups(0, outside=True)
    scores_N = torch.randint(0, 4, (groups.n_documents,), generator=torch.Generator().manual_seed(1)).double()
    (found_Q,) = judged.values([metric], scores_N, groups)
    bounds = groups.offsets_Q1.tolist()
    expected = [slow(metric, scores_N[bounds[q] : bounds[q + 1]].tolist(), own[q], both[q]) for q in range(40)]
    assert found_Q.tolist() == pytest.approx(expected, nan_ok=True)
    assert 0 < sum(math.isnan(value) for value in expected) < 10
    assert 0 < sum(value == 0 for value in expected) < 40


def test_where_the_lists_have_all_judged_documents_nothing_changes() -> None:
    groups, _, _, judged = random_groups(2, outside=False)
    scores_N = torch.randn(groups.n_documents, generator=torch.Generator().manual_seed(3)).double()
    found_MQ = judged.values(METRICS, scores_N, groups)
    expected_MQ = torch.stack([metric.values_on(scores_N, groups) for metric in METRICS])
    torch.testing.assert_close(found_MQ, expected_MQ, rtol=1e-12, atol=0, equal_nan=True)


def test_queries_without_a_list_count_for_labels_and_not_for_clicks() -> None:
    """One has a relevant document, and the other has none."""
    settings, clicks = EvaluateSettings(baseline=None), {f"click_ndcg@{k}": ClickNDCGConfig(k=k) for k in (1, 3)}
    ids_Q, places_Q, offsets_P1 = torch.tensor([-2, -1]), torch.tensor([0, 1]), torch.tensor([0, 1, 2, 2])
    judged = Judged(ids_Q, places_Q, torch.tensor([1.0, 0.0]), offsets_P1, ((-2, "c"), (-1, "c")))
    detector = OutlierDetector(data="", features=(), gap=None, share=0.0, rules={})
    measuring = Measuring(
        models=("a", "b"),
        scores={},
        slicer=Slicer({}, (), detector, 1, frozenset(), stored=(), needs_features=False),
        metrics=partial(values_of, metrics=settings.measured, settings=settings, judged=judged),
        features=(),
        docs_per_batch=1,
        on_clicks=partial(values_of, metrics=clicks, settings=settings),
    )
    ((period, groups),) = judged.without_list()
    found = measuring.without_list(period, groups)
    expected_MQ = np.full((len(settings.measured) + len(clicks), 2), np.nan)
    expected_MQ[: len(settings.measured), 0] = 0.0
    np.testing.assert_array_equal(found.values_TMQ, np.stack([expected_MQ] * 2))
    assert found.values_TMQ.dtype == np.float64
    assert (found.gids_Q.tolist(), found.documents_Q.tolist()) == ([-2, -1], [0, 0])


def test_labels_that_are_not_the_judgements_are_refused() -> None:
    groups, own, _, judged = random_groups(4, outside=True)
    first = next(q for q, labels in enumerate(own) if any(labels))
    assert groups.labels_N is not None
    raised_N = torch.where(groups.labels_N > 0, 9.0, 0.0)
    groups = QueryGroups(groups.features_NF, groups.offsets_Q1, raised_N, groups.ids_Q)
    with pytest.raises(
        InputError, match=f"judged: group {3 * first} has more relevance in its list than all judgements"
    ):
        judged.values([metric_class("ndcg").made(k=5)], torch.zeros(groups.n_documents), groups)


QUERIES, DOCUMENTS = 24, 30


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Candidates of a bad search, and all judgements; every sixth query has no candidate."""
    folder, rng = tmp_path_factory.mktemp("searched"), np.random.default_rng(0)
    with (folder / "judged.csv").open("w") as judged, (folder / "lists.csv").open("w") as lists:
        one, two = csv.writer(judged), csv.writer(lists)
        one.writerow(["query", "document", "grade", "split", "score"])
        two.writerow(["query", "document", "grade", "split", "score"])
        for split in ("train", "dev", "test"):
            for q in range(QUERIES):
                grades = rng.choice([0, 0, 0, 0, 1, 2], size=DOCUMENTS)
                grades[0] = 1
                scores = rng.normal(size=DOCUMENTS).round(4) + grades
                for d in range(DOCUMENTS):
                    row = [f"{split}-{q}", f"d{d}", grades[d], split, scores[d]]
                    if grades[d] or d % 2:
                        one.writerow(row)
                    if q % 6 and scores[d] > 0.9:
                        two.writerow(row)
    columns = {"query": "query", "item": "document", "label": "grade", "period_column": "split", "features": ["score"]}
    for name in ("lists", "judged"):
        source = {"kind": "items", "columns": columns}
        config = {"inputs": str(folder / f"{name}.csv"), "source": source}
        prepare(PrepareConfig.model_validate(config), str(folder / name))
    return folder


def comparison(folder: Path, out: Path, **evaluate: Any) -> PipelineJob:
    values = {
        "out": str(out),
        "data": str(folder / "lists"),
        "splits": {"train": {"periods": "train"}, "validation": {"periods": "dev"}, "test": {"periods": "test"}},
        "methods": {
            "best": {"kind": "feature", "feature": "score"},
            "worst": {"kind": "feature", "feature": "score", "ascending": True},
        },
        "evaluate": {"baseline": "best", "resamples": 100, "judged": str(folder / "judged"), **evaluate},
    }
    return validate(PipelineJob, values, "test")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return [row for row in csv.DictReader(stream) if row["split"] == "test"]


@pytest.mark.slow
def test_an_evaluation_counts_what_the_search_has_missed(searched: Path, tmp_path: Path) -> None:
    comparison(searched, tmp_path).run()
    found = Evaluation.read(str(tmp_path / "evaluation"))
    judged, lists = (rows(searched / f"{name}.csv") for name in ("judged", "lists"))
    expected: dict[str, list[float]] = {"ndcg@5": [], "recall@5": [], "map": []}
    for q in range(QUERIES):
        grades = [float(row["grade"]) for row in judged if row["query"] == f"test-{q}"]
        ranked = sorted((row for row in lists if row["query"] == f"test-{q}"), key=lambda row: -float(row["score"]))
        own = [float(row["grade"]) for row in ranked]
        for name in expected:
            metric = metric_class(name).made(k=5)
            expected[name].append(slow(metric, [-float(i) for i in range(len(own))], own, grades))
    summaries = found.methods[0].slices["all"].summaries
    for name, values in expected.items():
        assert summaries[name].mean == pytest.approx(np.mean(values))
        assert (summaries[name].groups, summaries[name].undefined) == (QUERIES, 0)
        assert values[::6] == [0.0] * (QUERIES // 6)
    assert (found.test.groups, found.test.unlisted) == (QUERIES, QUERIES // 6)
    groups = pq.read_table(tmp_path / "evaluation" / "groups.parquet").to_pylist()
    assert sum(row["gid"] < 0 and row["ndcg@5"] == 0 for row in groups) == 2 * QUERIES // 6
    report = (tmp_path / "evaluation" / "report.md").read_text()
    for words in (
        "ideal at k from all judged documents",
        "what is not listed is missed",
        "4 of the groups are queries",
    ):
        assert words in report
    comparison_ = found.methods[1].slices["all"].comparisons["ndcg@5"]
    assert comparison_.high < 0, "queries without a list are in both, and do not hide the difference"


@pytest.mark.slow
def test_trec_eval_counts_the_same(searched: Path, tmp_path: Path) -> None:
    """With -c, which counts queries without a list."""
    pytrec_eval = pytest.importorskip("pytrec_eval")
    comparison(searched, tmp_path).run()
    judged: dict[str, dict[str, int]] = {}
    scored: dict[str, dict[str, float]] = {}
    for row in rows(searched / "judged.csv"):
        judged.setdefault(row["query"], {})[row["document"]] = int(row["grade"])
    for row in rows(searched / "lists.csv"):
        scored.setdefault(row["query"], {})[row["document"]] = float(row["score"])
    values = pytrec_eval.RelevanceEvaluator(judged, {"map", "recip_rank", "recall.5"}).evaluate(scored)
    summaries = Evaluation.read(str(tmp_path / "evaluation")).methods[0].slices["all"].summaries
    for theirs, ours in {"map": "map", "recip_rank": "mrr", "recall_5": "recall@5"}.items():
        assert summaries[ours].mean == pytest.approx(sum(of[theirs] for of in values.values()) / QUERIES)


@pytest.mark.slow
def test_judgements_that_change_are_judged_anew(searched: Path, tmp_path: Path) -> None:
    comparison(searched, tmp_path).run()
    before = (tmp_path / "evaluation" / "metrics.json").read_bytes()
    comparison(searched, tmp_path, judged=None).run()
    after = Evaluation.read(str(tmp_path / "evaluation"))
    assert (tmp_path / "evaluation" / "metrics.json").read_bytes() != before
    assert (after.test.groups, after.test.unlisted) == (QUERIES * 5 // 6, 0)
    assert "what is not listed" not in (tmp_path / "evaluation" / "report.md").read_text()


@pytest.mark.slow
def test_a_query_that_is_there_twice_and_a_sample_are_refused(searched: Path, tmp_path: Path) -> None:
    inputs = []
    for period in ("dev", "test"):
        (tmp_path / f"{period}.txt").write_text("1 qid:7 1:0.5\n")
        inputs.append({"path": str(tmp_path / f"{period}.txt"), "period": period})
    config = {"inputs": inputs, "source": {"kind": "letor", "n_features": 1}}
    prepare(PrepareConfig.model_validate(config), url := str(tmp_path / "twice"))
    with pytest.raises(InputError, match="has query '7' twice in the periods of the test split; keep one"):
        Judged.read(url, Split(data=(str(searched / "lists"),), periods=("dev", "test")))
    with pytest.raises(InputError, match=r"let splits\.test have no sample and no fold"):
        Judged.read(url, Split(data=(str(searched / "lists"),), periods=("test",), labelled_fraction=0.5))


@pytest.mark.parametrize("other", [{"policy": "letor4"}, {"leave_out_constant": True}, {"gains": "column"}])
def test_policies_that_know_no_judgements_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="judged: no part of leave_out_constant, policy letor4 or gains column"):
        validate(EvaluateSettings, {"judged": "data", **other}, "test")


def test_a_study_refuses_judgements() -> None:
    values = {
        "out": "x",
        "splits": {name: {"data": "x"} for name in ("train", "validation", "test")},
        "methods": {"gbdt": {"kind": "gbdt"}},
        "grid": [{"labelled": [1]}],
        "evaluate": {"judged": "x"},
    }
    with pytest.raises(InputError, match=r"evaluate\.judged: a study does not read it"):
        validate(StudyJob, values, "test")


@pytest.mark.nightly
@pytest.mark.slow
def test_bm25_has_its_known_quality_on_nfcorpus(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (shared_data / "text" / "nfcorpus").exists()
    monkeypatch.chdir(ROOT)
    for name in ("prepare-nfcorpus", "prepare-nfcorpus-judged"):
        settings = yaml.safe_load((ROOT / "jobs" / "configs" / "data" / f"{name}.yaml").read_text())["prepare"]
        settings["source"]["columns"].pop("tokens", None)
        prepare(PrepareConfig.model_validate(settings), str(tmp_path / name))
    values = {
        "out": str(tmp_path / "out"),
        "data": str(tmp_path / "prepare-nfcorpus"),
        "splits": {"train": {"periods": "train"}, "validation": {"periods": "dev"}, "test": {"periods": "test"}},
        "methods": {"bm25": {"kind": "feature", "feature": "score"}},
        "evaluate": {"baseline": None, "resamples": 100, "judged": str(tmp_path / "prepare-nfcorpus-judged")},
    }
    validate(PipelineJob, values, "test").run()
    found = Evaluation.read(str(tmp_path / "out" / "evaluation"))
    summary = found.methods[0].slices["all"].summaries["ndcg@10"]
    assert (found.test.groups, found.test.unlisted) == (325, 26)
    assert summary.mean == pytest.approx(0.307, abs=5e-4)


def test_only_what_the_user_chose_is_blamed_on_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = QueryGroups(torch.zeros(2, 1), torch.tensor([0, 2]), labels_N=torch.tensor([0.0, 3.0]))
    metrics, settings = {"gain_ndcg@3": GainNDCGConfig(k=3, gains=(0, 1))}, EvaluateSettings()
    with pytest.raises(InputError, match=r"^evaluate\.gains has no gain for label 3"):
        values_of(torch.zeros(2), groups, metrics, settings)

    def defect(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(GainNDCGConfig, "values_on", defect)
    with pytest.raises(ValueError, match=r"^a defect$"):
        values_of(torch.zeros(2), groups, metrics, settings)
