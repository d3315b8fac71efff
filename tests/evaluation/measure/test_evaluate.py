"""Evaluation: every figure by hand, draws of labels, policies, committed scores and what is refused."""

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from linear_teacher import linear_teacher
from numpy.typing import NDArray
from small_trainers import grow_trees
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import BundleFacts, load, save_ranker
from ltrscale.config import kind_of, members, validate
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.data.stream.scored import committed
from ltrscale.errors import InputError
from ltrscale.evaluation.measure import measuring
from ltrscale.evaluation.measure.evaluate import _Basis, evaluate
from ltrscale.evaluation.measure.page import document, leaderboard
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.evaluation.statistics.crossed import crossed_means
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.ranking import graded, metrics
from ltrscale.ranking.choices import MetricConfig
from ltrscale.ranking.graded import rbp
from ltrscale.ranking.libraries import LetorMAPConfig, LetorMeanNDCGConfig, LetorNDCGConfig, LetorPrecisionConfig
from ltrscale.ranking.loss import Loss, SigmoidConfig
from ltrscale.ranking.losses import SoftmaxConfig
from ltrscale.reports.findings import print_report
from ltrscale.reports.render import table
from ltrscale.scoring.score import ScoreJob
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob

Groups = list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]
WriteDataset = Callable[[Mapping[str, Groups], list[Feature]], str]
FEATURES = [Feature(name=name) for name in ("x", "y", "flag")]
PERIODS = ("2026-W01", "2026-W02", "2026-W03", "2026-W04")


def make_groups(rng: np.random.Generator, count: int) -> Groups:
    """Labels follow the first feature with noise; a fifth of the groups has no relevant document, some no labels."""
    found: Groups = []
    for i in range(count):
        x_LF = rng.normal(size=(rng.integers(1, 15), 3)).astype(np.float32)
        x_LF[:, 2] = (rng.random(len(x_LF)) < 0.03).astype(np.float32)
        labels_L = np.clip(np.round(x_LF[:, 0] + rng.normal(size=len(x_LF))), 0, 3).astype(np.float32)
        found.append((x_LF, None if i % 10 == 9 else labels_L * (i % 5 != 0)))
    return found


@pytest.fixture(scope="module")
def splits(write_dataset: WriteDataset) -> Splits:
    rng = np.random.default_rng(0)
    url = write_dataset({period: make_groups(rng, 80) for period in PERIODS}, FEATURES)
    parts = {"train": PERIODS[:1], "validation": PERIODS[1:2], "test": PERIODS[2:]}
    return Splits.model_validate({name: {"data": url, "periods": periods} for name, periods in parts.items()})


def network(
    url: Path, splits: Splits, *, seed: int, features: list[Feature] = FEATURES, loss: Loss | None = None
) -> str:
    """A small network with random weights."""
    groups = list(iterate(select(splits.train, labelled=True), docs_per_batch=1000))
    transform = fit_transform((g.features_NF for g in groups), ["numeric"] * 3, TransformConfig())
    torch.manual_seed(seed)
    network = Architecture(transform=transform.config, encoder=ResNetConfig(width=8), head=HeadConfig())
    ranker = Ranker(network, transform)
    settings = {} if loss is None else {"loss": loss.model_dump(mode="json")}
    about = BundleFacts(config=settings, features=features, dataset_hash="", metrics={}, made_by={})
    save_ranker(str(url), ranker, about)
    return str(url)


@pytest.fixture(scope="module")
def config(splits: Splits, tmp_path_factory: pytest.TempPathFactory) -> EvaluateConfig:
    folder = tmp_path_factory.mktemp("bundles")
    trees = LightGBMConfig(num_trees=5, num_threads=1)
    grow_trees(trees, splits, str(folder / "gbdt"))
    return EvaluateConfig.model_validate(
        {
            "models": {
                "gbdt": str(folder / "gbdt"),
                "network": [network(folder / f"net{seed}", splits, seed=seed) for seed in range(3)],
            },
            "splits": splits,
            "outliers": {"gap": None, "known": {"flag": {"at_least": 1}}},
            "resamples": 500,
            "docs_per_batch": 300,
        }
    )


@pytest.fixture(scope="module")
def evaluated(config: EvaluateConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, Path]:
    out = tmp_path_factory.mktemp("out") / "evaluation"
    return evaluate(config, str(out), made_by={"stage": "evaluate"}), out


KNOWN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **{f"ndcg@{k}": partial(metrics.ndcg, k=k) for k in (1, 5, 10)},
    "mrr": metrics.mrr,
    "map": metrics.average_precision,
    "precision@5": partial(metrics.precision, k=5),
}
KEYED = ("rbp(persistence=0.5)@5",)
OTHERS = [cls for cls in members(MetricConfig) if kind_of(cls) not in {name.partition("@")[0] for name in KNOWN}]
METRICS = KNOWN | {
    metric.name: metric.values
    for cls in OTHERS
    for metric in (cls.made(k=k) for k in ((1, 5, 10) if cls.needs_cutoff() else (None,)))
}


def values_by_hand(config: EvaluateConfig, url: str) -> dict[str, list[float]]:
    """Slow: every metric, one group at a time, and whether some scores are so near that rounding may order them."""
    found: dict[str, list[float]] = {}
    scorer = load(url).scorer()
    for batch in iterate(select(config.splits.test, labelled=True), docs_per_batch=10_000):
        for q in range(batch.n_groups):
            one = batch.select(torch.tensor([q]))
            assert one.labels_N is not None
            what = (scorer(one), one.labels_N, one.offsets_Q1)
            gaps = what[0].sort().values.diff()
            found.setdefault("near", []).append(bool(((gaps > 0) & (gaps < 1e-5)).any()))
            for name, metric in METRICS.items():
                found.setdefault(name, []).append(metric(*what).item())
    return found


@pytest.mark.slow
def test_every_group_and_mean_is_that_of_the_metrics(
    config: EvaluateConfig, evaluated: tuple[Evaluation, Path]
) -> None:
    evaluation, out = evaluated
    rows = pq.read_table(out / "groups.parquet").to_pylist()
    assert len(rows) == 4 * evaluation.test.groups == 4 * 144  # 2 periods of 80 groups, a tenth without labels
    by_method: dict[str, list[dict[str, list[float]]]] = {}
    for method, urls in config.models.items():
        for trial, url in enumerate(urls):
            expected = values_by_hand(config, url)
            near_Q = np.array(expected.pop("near"))
            assert near_Q.mean() < 0.1
            by_method.setdefault(method, []).append(expected)
            mine = [row for row in rows if (row["method"], row["trial"]) == (method, trial)]
            for name, values in expected.items():
                got = [math.nan if row[name] is None else row[name] for row in mine]
                expected[name] = np.where(near_Q, got, values).tolist()
                np.testing.assert_allclose(got, expected[name], atol=1e-6)
    for result in evaluation.methods:
        for name, summary in result.slices["all"].summaries.items():
            values_tQ = np.array([trial[name] for trial in by_method[result.name]])
            means_t = np.nanmean(values_tQ, axis=1)
            assert summary.trials == pytest.approx(tuple(means_t), abs=1e-6)
            assert summary.mean == pytest.approx(means_t.mean(), abs=1e-6)
            assert summary.groups == (~np.isnan(values_tQ[0])).sum()
            assert summary.groups + summary.undefined == 144
            assert summary.undefined >= 16
            assert summary.as_zero == pytest.approx(np.nan_to_num(values_tQ, nan=0).mean(), abs=1e-6)
            assert summary.as_one == pytest.approx(np.nan_to_num(values_tQ, nan=1).mean(), abs=1e-6)
            assert summary.low is not None
            assert summary.high is not None
            assert summary.low <= summary.mean <= summary.high  # equal where a metric is 1 on every group
            if result.name == "network":
                assert summary.std_error == pytest.approx(means_t.std(ddof=1) / math.sqrt(3), abs=1e-6)
            else:
                assert summary.std_error is None


@pytest.mark.slow
def test_outlier_groups_are_those_with_the_flag(config: EvaluateConfig, evaluated: tuple[Evaluation, Path]) -> None:
    evaluation, out = evaluated
    rows = [row for row in pq.read_table(out / "groups.parquet").to_pylist() if row["method"] == "gbdt"]
    flagged: dict[int, bool] = {}
    for batch in iterate(select(config.splits.test, labelled=True), docs_per_batch=10_000):
        assert batch.ids_Q is not None
        for q, gid in enumerate(batch.ids_Q.tolist()):
            flagged[gid] = bool((batch.select(torch.tensor([q])).features_NF[:, 2] >= 1).any())
    assert {row["gid"]: "outliers" in row["slices"] for row in rows} == flagged
    assert 0 < sum(flagged.values()) < 144
    outliers = [row["ndcg@5"] for row in rows if "outliers" in row["slices"] and row["ndcg@5"] is not None]
    summary = evaluation.methods[0].slices["outliers"].summaries["ndcg@5"]
    assert summary.groups == len(outliers)
    assert summary.mean == pytest.approx(np.mean(outliers))
    assert evaluation.test.slices["outliers"] == sum(flagged.values())
    assert {row["period"] for row in rows} == {"2026-W03", "2026-W04"}
    assert (
        json.loads((out / "outliers.json").read_text())["data"] == select(config.splits.validation, labelled=False).hash
    )


@pytest.mark.slow
def test_comparison_is_paired_and_against_the_baseline(evaluated: tuple[Evaluation, Path]) -> None:
    evaluation, _ = evaluated
    gbdt, net = evaluation.methods
    assert gbdt.slices["all"].comparisons == {}
    for scope in ("all", "outliers"):
        for name, comparison in net.slices[scope].comparisons.items():
            means = [method.slices[scope].summaries[name].mean for method in (net, gbdt)]
            assert comparison.difference == pytest.approx(means[0] - means[1])
            assert comparison.low <= comparison.difference <= comparison.high
    worse = net.slices["all"].comparisons["ndcg@5"]  # random weights against trees that learned
    assert worse.high < 0
    assert worse.p < 0.01


@pytest.mark.slow
def test_a_method_compared_with_itself_shows_no_difference(config: EvaluateConfig, tmp_path: Path) -> None:
    same = config.replace(models={"gbdt": config.models["gbdt"], "again": config.models["gbdt"]})
    comparison = evaluate(same, str(tmp_path / "out"), made_by={}).methods[1].slices["all"]
    assert {(c.difference, c.low, c.high, c.p, c.p_holm) for c in comparison.comparisons.values()} == {(0, 0, 0, 1, 1)}


@pytest.mark.slow
def test_the_result_does_not_depend_on_batches_and_repeats(
    config: EvaluateConfig, evaluated: tuple[Evaluation, Path], tmp_path: Path
) -> None:
    again = evaluate(config.replace(docs_per_batch=41), str(tmp_path / "out"), made_by={})
    for ours, theirs in zip(again.methods, evaluated[0].methods, strict=True):
        for name, summary in ours.slices["all"].summaries.items():
            assert summary.mean == pytest.approx(theirs.slices["all"].summaries[name].mean, abs=1e-6)
            assert summary.low == pytest.approx(theirs.slices["all"].summaries[name].low, abs=1e-6)


@pytest.mark.slow
def test_lists_without_a_label_are_not_scored_and_change_no_figure(
    config: EvaluateConfig, evaluated: tuple[Evaluation, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, forward = [], Ranker.forward

    def counting(ranker: Ranker, groups: QueryGroups) -> Tensor:
        assert groups.labels_N is not None
        scored.append(torch.segment_reduce(groups.labels_N, "max", offsets=groups.offsets_Q1).min().item())
        return forward(ranker, groups)

    monkeypatch.setattr(Ranker, "forward", counting)
    evaluate(config, str(tmp_path / "few"), made_by={})
    assert min(scored) > 0
    monkeypatch.setattr(_Basis, "needs_every_list", True)
    every = evaluate(config, str(tmp_path / "every"), made_by={})
    assert min(scored) == 0
    for ours, theirs in zip(every.methods, evaluated[0].methods, strict=True):
        assert ours.slices.keys() == theirs.slices.keys()
        for name in ours.slices:
            for metric, summary in ours.slices[name].summaries.items():
                assert summary.mean == pytest.approx(theirs.slices[name].summaries[metric].mean, abs=1e-6)


def leaders(evaluation: Evaluation) -> str:
    """The table of methods as reports have it."""
    return table(leaderboard(evaluation))


@pytest.mark.slow
def test_directory_reads_back_and_the_report_says_it_all(
    config: EvaluateConfig, evaluated: tuple[Evaluation, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation, out = evaluated
    assert Evaluation.read(str(out)) == evaluation
    manifest = storage.read_manifest(str(out))
    assert manifest is not None
    assert manifest["made_by"] == {"stage": "evaluate"}
    assert (out / "ndcg.png").read_bytes()[:4] == b"\x89PNG"
    text = (out / "report.md").read_text()
    assert leaders(evaluation) in text
    trees, networks = evaluation.methods
    (of_trees,) = trees.trials
    assert of_trees.labelled_groups == select(config.splits.train, labelled=True).n_groups
    assert [trial.labelled_groups for trial in networks.trials] == [None] * 3
    for part in ("NDCG@10", "MRR", "MAP", "P@5", "Holm", "flag: >= 1", "](ndcg.png)", "144 labelled query groups"):
        assert part in text
    print_report(str(out), document(Evaluation.read(str(out)), str(out)))
    assert leaders(evaluation) in capsys.readouterr().out


def drawn_trees(splits: Splits, folder: Path, *, seeds: range, trees: int, **sizes: Any) -> list[str]:
    """Bundles of trees by the stage that records where they come from, each on another draw of labels."""
    urls = [str(folder / f"{trees}-{seed}") for seed in seeds]
    for seed, url in zip(seeds, urls, strict=True):
        drawn = {name: splits.by_name[name].replace(labelled_seed=seed, **sizes) for name in ("train", "validation")}
        GBDTJob(out=url, splits=splits.replace(**drawn), gbdt=LightGBMConfig(num_trees=trees, num_threads=1)).run()
    return urls


@pytest.mark.slow
@pytest.mark.parametrize("draws", [4, 5])
def test_draws_of_labels_are_known_from_the_bundles(
    config: EvaluateConfig, splits: Splits, tmp_path: Path, draws: int
) -> None:
    seeds, sizes = range(draws), {"labelled_groups": 30}
    few = drawn_trees(splits, tmp_path, seeds=seeds, trees=1, **sizes)
    many = drawn_trees(splits, tmp_path, seeds=seeds, trees=20, **sizes)
    same = config.replace(models={"gbdt": few, "more": many[::-1], "network": config.models["network"]})
    out = tmp_path / "out"
    base, more, fixed = evaluate(same, str(out), made_by={}).methods
    of_base, of_more, of_fixed = ([trial.labels for trial in method.trials] for method in (base, more, fixed))
    assert of_base == of_more[::-1]
    assert len(set(of_base)) == draws
    assert of_fixed == [None] * 3
    assert {(trial.labelled_groups, trial.validation_groups) for trial in base.trials} == {(30, 30)}
    rows = pq.read_table(out / "groups.parquet").to_pylist()
    values = {
        method: [
            [math.nan if row["ndcg@5"] is None else row["ndcg@5"] for row in rows if row_is(row, method, trial)]
            for trial in range(draws)
        ]
        for method in ("gbdt", "more")
    }
    differences_tQ = np.subtract(values["more"][::-1], values["gbdt"])
    found, text = more.slices["all"].comparisons["ndcg@5"], (out / "report.md").read_text()
    assert found.difference == pytest.approx(np.nanmean(differences_tQ))
    assert (found.draws, fixed.slices["all"].comparisons["ndcg@5"].draws) == (draws, draws)
    if draws == 4:
        assert (found.low, found.p) == (None, None)
        assert "Cannot judge: fewer than 5 shared draws of labels (more 4, network 4); add seeds." in text
        assert "(cannot judge)" in text
    else:
        expected = crossed_means(differences_tQ.T[..., None])
        assert found.p == pytest.approx(expected.p()[0])
        assert f" {expected.detectable()[0]:.4f} |" in text
        assert "Cannot judge" not in text
    assert "Bundles that do not state their labels count as trained on the same ones." in text


def row_is(row: Mapping[str, Any], method: str, trial: int) -> bool:
    return bool((row["method"], row["trial"]) == (method, trial))


@pytest.mark.slow
def test_seeds_are_no_draws_where_all_labels_are_used(config: EvaluateConfig, splits: Splits, tmp_path: Path) -> None:
    urls = drawn_trees(splits, tmp_path, seeds=range(2), trees=2)
    alone = config.replace(models={"gbdt": urls})
    (method,) = evaluate(alone, str(tmp_path / "out"), made_by={}).methods
    assert len({trial.labels for trial in method.trials}) == 1
    assert method.slices["all"].summaries["ndcg@5"].draws == 1
    text = (tmp_path / "out" / "report.md").read_text()
    assert "They speak of these labels only" in text


@pytest.mark.slow
def test_groups_of_equal_labels_may_be_left_out(
    config: EvaluateConfig, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    groups = [group for group in make_groups(np.random.default_rng(1), 60) if group[1] is not None]
    for labels in ([2, 2, 2], [1], [0, 0]):  # the last one has no NDCG anyway
        groups.append((np.random.default_rng(2).normal(size=(len(labels), 3)).astype(np.float32), np.float32(labels)))
    test = {"data": write_dataset({"2026-W05": groups}, FEATURES)}
    wholly = config.replace(splits={**config.splits.model_dump(), "test": test})
    of_all, of_fewer = (
        evaluate(c, str(tmp_path / str(i)), made_by={})
        for i, c in enumerate((wholly, wholly.replace(leave_out_constant=True)))
    )
    relevant = sum(labels_L is not None and labels_L.any() for _, labels_L in groups)
    constant = sum(labels_L is not None and labels_L.any() and len(set(labels_L)) == 1 for _, labels_L in groups)
    assert constant >= 2
    for before, after in zip(of_all.methods, of_fewer.methods, strict=True):
        whole, fewer = (method.slices["all"].summaries["ndcg@5"] for method in (before, after))
        assert (whole.groups, fewer.groups) == (relevant, relevant - constant)
        assert fewer.undefined == len(groups) - fewer.groups
        # any order of equal labels is ideal
        assert whole.mean * whole.groups == pytest.approx(fewer.mean * fewer.groups + constant)  # type: ignore[operator]
    sentence = "So is a group whose labels are all equal"
    assert [sentence in (tmp_path / name / "report.md").read_text() for name in "01"] == [False, True]
    assert Evaluation.read(str(tmp_path / "1")).leave_out_constant
    with pytest.raises(ValueError, match="LETOR's script counts every group"):
        wholly.replace(leave_out_constant=True, policy="letor4")


@pytest.mark.slow
def test_letor_s_policy_stands_beside_ours(
    config: EvaluateConfig,
    evaluated: tuple[Evaluation, Path],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    evaluation = evaluate(config.replace(policy="letor4"), str(out), made_by={})
    ours, both = evaluated[0].methods[0].slices["all"], evaluation.methods[0].slices["all"]
    assert {name: both.summaries[name].mean for name in ours.summaries} == pytest.approx(
        {name: summary.mean for name, summary in ours.summaries.items()}
    )
    scorer = load(config.models["gbdt"][0]).scorer()
    batch = next(iter(iterate(select(config.splits.test, labelled=True), docs_per_batch=10_000)))
    assert batch.n_groups == 144
    assert batch.labels_N is not None
    scored = (scorer(batch), batch.labels_N, batch.offsets_Q1)
    letor = [*(LetorNDCGConfig(k=k) for k in (1, 5, 10)), LetorMeanNDCGConfig(), LetorMAPConfig()]
    expected = {metric.name: metric.values(*scored) for metric in (*letor, LetorPrecisionConfig())}
    found = {name: summary.mean for name, summary in both.summaries.items() if name not in ours.summaries}
    assert found == pytest.approx({name: values.mean().item() for name, values in expected.items()})
    assert {both.summaries[name].undefined for name in found} == {0}
    text = (out / "report.md").read_text()
    for part in ("LETOR MeanNDCG", "LETOR P@5", "LETOR figures follow LETOR 4.0's evaluation script"):
        assert part in text
        assert part not in (evaluated[1] / "report.md").read_text()
    shown = leaderboard(evaluation)
    at = shown.header.index("LETOR NDCG@1")
    (row,) = [row for row in shown.rows if row[0] == "gbdt"]
    assert row[at : at + 3] == [f"{both.summaries[f'letor_ndcg@{k}'].mean:.4f}" for k in (1, 5, 10)]


def test_without_outliers_and_baseline(config: EvaluateConfig, tmp_path: Path) -> None:
    quiet = config.replace(
        outliers={"gap": None, "known": {"flag": {"at_least": 9}}},
        baseline=None,
        models={"only": config.models["gbdt"]},
    )
    evaluation = evaluate(quiet, str(tmp_path / "out"), made_by={})
    summary = evaluation.methods[0].slices["outliers"].summaries["ndcg@5"]
    assert (summary.mean, summary.low, summary.trials, summary.groups, summary.as_one) == (None, None, (None,), 0, None)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Outlier-NDCG@5" not in text
    assert "p (Holm)" not in text


@pytest.mark.slow
def test_features_in_another_order_change_nothing(
    config: EvaluateConfig, evaluated: tuple[Evaluation, Path], reorder: Any, tmp_path: Path
) -> None:
    (url,) = config.splits.test.data
    other = reorder(url, [FEATURES[2], Feature(name="more"), FEATURES[0], FEATURES[1]])
    for moved in ({"test", "validation"}, {"test"}):
        splits = {name: {**config.splits.by_name[name].model_dump(), "data": other} for name in moved}
        there = config.replace(splits={**config.splits.model_dump(), **splits})
        if moved == {"test"}:
            with pytest.raises(InputError, match="of its 4 features are not in the validation split: 'more'"):
                evaluate(there, str(tmp_path / "no"), made_by={})
            continue
        found = evaluate(there, str(tmp_path / "out"), made_by={})
        assert found.methods == evaluated[0].methods


def test_bad_settings_and_bundles_are_named(config: EvaluateConfig, splits: Splits, tmp_path: Path) -> None:
    plain = config.model_dump(mode="json")
    for change, message in (
        ({"baseline": "gbtd"}, "baseline 'gbtd' is not among the models gbdt, network"),
        ({"primary_cutoff": 3}, r"primary_cutoff 3 is not in ndcg_at \[1, 5, 10\]"),
        ({"models": {"gbdt": []}}, "models.gbdt has no bundle"),
        ({"ndcg_at": [0, 5]}, r"ndcg_at\.0: Input should be greater than or equal to 1"),
        ({"precision_at": [-1]}, r"precision_at\.0: Input should be greater than or equal to 1"),
    ):
        with pytest.raises(InputError, match=message):
            validate(EvaluateConfig, {**plain, **change}, "evaluate")
    renamed = [Feature(name="x"), Feature(name="z"), Feature(name="flag")]
    other = network(tmp_path / "other", splits, seed=0, features=renamed)
    with pytest.raises(InputError, match="1 of its 3 features are not in the data: 'z'"):
        evaluate(config.replace(models={"gbdt": [other]}), str(tmp_path / "out"), made_by={})
    assert not storage.exists(str(tmp_path / "out"))
    with pytest.raises(InputError, match="no evaluation is committed"):
        Evaluation.read(str(tmp_path / "out"))


def test_scores_that_are_no_numbers_are_an_error(config: EvaluateConfig, splits: Splits, tmp_path: Path) -> None:
    groups = list(iterate(select(splits.train, labelled=True), docs_per_batch=1000))
    transform = fit_transform((g.features_NF for g in groups), ["numeric"] * 3, TransformConfig())
    network = Architecture(transform=transform.config, encoder=ResNetConfig(width=8), head=HeadConfig())
    ranker = Ranker(network, transform)
    for weight in ranker.head.parameters():
        torch.nn.init.constant_(weight, math.inf)
    diverged = str(tmp_path / "diverged")
    about = BundleFacts(config={}, features=FEATURES, dataset_hash="", metrics={}, made_by={})
    save_ranker(diverged, ranker, about)
    with pytest.raises(InputError, match="diverged: gives scores that are not finite"):
        evaluate(config.replace(models={"gbdt": [diverged]}), str(tmp_path / "out"), made_by={})


@pytest.mark.slow
def test_gains_of_one_s_own_and_the_highest_grade_are_evaluated_and_stated(
    config: EvaluateConfig, evaluated: tuple[Evaluation, Path], tmp_path: Path
) -> None:
    own = config.replace(
        models={"gbdt": config.models["gbdt"]}, gains=[0, 1, 1, 9], grades=3, relevant_from=2, metrics=KEYED
    )
    found = evaluate(own, str(tmp_path / "own"), made_by={})
    batch = next(iter(iterate(select(config.splits.test, labelled=True), docs_per_batch=10_000)))
    assert batch.labels_N is not None
    lists = (load(config.models["gbdt"][0]).scorer()(batch), batch.labels_N, batch.offsets_Q1)
    expected = {
        "gain_ndcg@5": metrics.gain_ndcg(lists[0], torch.tensor([0, 1, 1, 9])[batch.labels_N.long()], lists[2], k=5),
        "err@5": graded.err(*lists, k=5, grades=3),
        "recall@5": metrics.recall(*lists, k=5, threshold=2),
        "rbp": rbp(*lists, threshold=2),
        "rbp(persistence=0.5)@5": rbp(*lists, k=5, persistence=0.5, threshold=2),
    }
    means = {name: summary.mean for name, summary in found.methods[0].slices["all"].summaries.items()}
    assert {name: means[name] for name in expected} == pytest.approx(
        {name: values_Q.nanmean().item() for name, values_Q in expected.items()}
    )
    assert set(found.policies) == set(means)
    assert "gain 0, 1, 1, 9 by label" in found.policies["gain_ndcg@5"]
    assert "persistence 0.5; " in found.policies["rbp(persistence=0.5)@5"]
    text = (tmp_path / "own" / "report.md").read_text()
    assert all(policy in text for policy in found.policies.values())
    assert set(evaluated[0].policies) == set(means) - {*(f"gain_ndcg@{k}" for k in (1, 5, 10)), *KEYED}
    for gains, said in (([0, 1, 2], "no gain for label 3"), ("column", "needs the column `gains`")):
        with pytest.raises(InputError, match=f"evaluate.gains.*{said}"):
            evaluate(own.replace(gains=gains), str(tmp_path / "bad"), made_by={})


@pytest.mark.slow
def test_calibration_is_of_pointwise_losses_and_of_clicks_alone(
    config: EvaluateConfig,
    splits: Splits,
    write_dataset: WriteDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = {"clicks": SigmoidConfig(), "scaled": SigmoidConfig(highest_label=4), "softmax": SoftmaxConfig()}
    urls = {name: network(tmp_path / name, splits, seed=1, loss=loss) for name, loss in losses.items()}
    groups = make_groups(np.random.default_rng(5), 40)
    clicked = [(x_LF, None if y_L is None else np.minimum(y_L, 1)) for x_LF, y_L in groups]
    url = write_dataset({"2026-W05": clicked, "2026-W06": groups}, FEATURES)

    def tested_on(periods: str) -> EvaluateConfig:
        test = {"data": url, "periods": periods}
        return config.replace(models=urls, baseline=None, splits={**config.splits.model_dump(), "test": test})

    on_clicks = tested_on("2026-W05")
    found = evaluate(on_clicks, str(tmp_path / "on_clicks"), made_by={})
    (batch,) = iterate(select(on_clicks.splits.test, labelled=True), docs_per_batch=10_000)
    assert batch.labels_N is not None
    p_N = load(urls["clicks"]).scorer()(batch).sigmoid()
    calibrated, *others = (method.trials[0].calibration for method in found.methods)
    assert others == [None, None]
    assert calibrated is not None
    expected_N = F.binary_cross_entropy(p_N, batch.labels_N)
    assert calibrated.log_loss == pytest.approx(expected_N.item(), rel=1e-5)
    assert (calibrated.documents, calibrated.predicted) == (batch.n_documents, pytest.approx(p_N.mean().item()))
    text = (tmp_path / "on_clicks" / "report.md").read_text()
    assert "## Calibration" in text
    assert calibrated.reference is not None
    assert re.search(rf"\| +{calibrated.error:.4f} \| +{calibrated.reference:.4f} \|", text)
    monkeypatch.setattr(measuring, "_VALUES", 50)  # many parts
    in_parts = evaluate(on_clicks, str(tmp_path / "parts"), made_by={})
    assert in_parts.methods[0].trials[0].calibration == calibrated
    graded = evaluate(tested_on("2026-W05..2026-W06"), str(tmp_path / "g"), made_by={})
    assert graded.methods[0].trials[0].calibration is None
    assert "## Calibration" not in (tmp_path / "g" / "report.md").read_text()
    assert Evaluation.read(str(tmp_path / "on_clicks")) == found


WEIGHTS = [1.0, -2.0]


@pytest.fixture(scope="module")
def scored(write_dataset: WriteDataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A data set in which every third group is unlabelled, a teacher, and its scores."""
    rng = np.random.default_rng(0)

    def groups(count: int) -> Groups:
        lengths = rng.integers(1, 9, count)
        labels = [rng.integers(0, 3, n).astype(np.float32) if i % 3 else None for i, n in enumerate(lengths)]
        return [(rng.normal(size=(n, 2)).astype(np.float32), y) for n, y in zip(lengths, labels, strict=True)]

    url = write_dataset({period: groups(30) for period in "abcd"}, [Feature(name="x"), Feature(name="y")])
    folder = tmp_path_factory.mktemp("scored")
    teacher = linear_teacher(str(folder / "teacher"), url, WEIGHTS)
    ScoreJob(bundle=teacher, data=url, out=str(folder / "scores")).run()
    return url, teacher, str(folder / "scores")


@pytest.mark.parametrize("labelled", [False, True])
def test_documents_get_their_scores_in_any_order_and_batch(scored: tuple[str, str, str], labelled: bool) -> None:
    url, _, scores = scored
    split = Split(data=(url,), periods=("b..c",), labelled_fraction=0.5 if labelled else 1.0)
    look_up = committed(scores, split)
    shuffled = GroupStream(select(split, labelled=labelled), StreamConfig(docs_per_batch=20), rank=0)
    batches = [batch for step in shuffled.epoch(1) for batch in step.micro_batches.values() if batch is not None]
    assert len(batches) > 3
    for groups in batches:
        expected_N = groups.features_NF.double() @ torch.tensor(WEIGHTS, dtype=torch.float64)
        torch.testing.assert_close(look_up(groups), expected_N, atol=1e-5, rtol=1e-5)


def test_groups_without_scores_are_not_found(scored: tuple[str, str, str], tmp_path: Path) -> None:
    url, _, scores = scored
    known = committed(scores, Split(data=(url,), periods=("b",)))
    other = next(iterate(select(Split(data=(url,), periods=("c",)), labelled=False), docs_per_batch=50))
    assert known.find(other) is None
    own = next(iterate(select(Split(data=(url,), periods=("b",)), labelled=False), docs_per_batch=50))
    assert own.ids_Q is not None
    shorter = QueryGroups(own.features_NF[:1], torch.tensor([0, 1]), ids_Q=own.ids_Q[own.lengths_Q > 1][:1])
    assert known.find(shorter) is None
    with pytest.raises(InputError, match="period 'b' is not scored there"):
        committed(str(tmp_path), Split(data=(url,), periods=("b",)))


def test_scores_are_evaluated_as_the_bundle_that_gave_them(scored: tuple[str, str, str], tmp_path: Path) -> None:
    url, teacher, scores = scored
    named = {"train": "a", "validation": "b", "test": "c"}
    values = {
        "models": {"bundle": teacher},
        "scores": {"scores": scores},
        "splits": {name: {"data": url, "periods": period} for name, period in named.items()},
        "baseline": "scores",
        "resamples": 100,
    }
    config = EvaluateConfig.model_validate(values)
    first, second = evaluate(config, str(tmp_path / "out"), made_by={}).methods
    assert (first.name, second.name) == ("scores", "bundle")
    assert first.slices["all"].summaries == second.slices["all"].summaries
    assert second.slices["all"].comparisons["ndcg@5"].difference == 0
    with pytest.raises(ValueError, match="models and scores both have a method 'bundle'"):
        EvaluateConfig.model_validate({**values, "scores": {"bundle": scores}, "baseline": None})


@pytest.mark.slow
def test_committed_scores_have_the_same_figures_in_any_parts(
    scored: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _, scores = scored
    splits = {"train": {"data": url, "periods": "a"}, "validation": {"data": url, "periods": "b"}}
    splits["test"] = {"data": url, "periods": "c..d"}
    values = {"scores": {"one": scores, "two": scores}, "splits": splits, "baseline": "one"}
    config = EvaluateConfig.model_validate({**values, "resamples": 100, "outliers": {"gap": None}})
    whole = evaluate(config, str(tmp_path / "whole"), made_by={})
    monkeypatch.setattr(measuring, "_DOCUMENTS", 10)
    evaluate(config, str(tmp_path / "parts"), made_by={})
    order = [("method", "ascending"), ("gid", "ascending")]
    one, other = (pq.read_table(tmp_path / out / "groups.parquet").sort_by(order) for out in ("whole", "parts"))
    assert one.num_rows == 2 * whole.test.groups == 80
    for name in one.column_names:
        if name in ("gid", "period", "documents", "slices", "method", "trial"):
            assert one[name].combine_chunks().equals(other[name].combine_chunks())
        else:
            np.testing.assert_allclose(one[name].to_numpy(), other[name].to_numpy(), rtol=1e-12)
    (batch,) = iterate(select(config.splits.test, labelled=True), docs_per_batch=10_000)
    assert batch.labels_N is not None
    expected_Q = metrics.ndcg(committed(scores, config.splits.test)(batch), batch.labels_N, batch.offsets_Q1, k=5)
    np.testing.assert_allclose(one["ndcg@5"].to_numpy()[: len(expected_Q)], expected_Q.numpy(), rtol=1e-12)


def test_scores_of_another_number_of_documents_are_an_error(scored: tuple[str, str, str], tmp_path: Path) -> None:
    url, _, scores = scored
    shutil.copytree(scores, tmp_path / "scores")
    (file,) = (tmp_path / "scores" / "period=c").glob("*.parquet")
    source = pq.ParquetFile(pa.BufferReader(file.read_bytes()))
    with pq.ParquetWriter(file, source.schema_arrow) as writer:
        for number in range(source.num_row_groups):
            table = source.read_row_group(number)
            at = table.column_names.index("scores")
            fewer = pa.array([of_group[:1] for of_group in table["scores"].to_pylist()], table.schema[at].type)
            writer.write_table(table.set_column(at, table.schema[at], fewer))
    named = {"train": "a", "validation": "b", "test": "c"}
    splits = {name: {"data": url, "periods": period} for name, period in named.items()}
    values = {"scores": {"short": str(tmp_path / "scores")}, "splits": splits, "baseline": None}
    with pytest.raises(InputError, match="does not have a score for each document of the test groups"):
        evaluate(EvaluateConfig.model_validate(values), str(tmp_path / "out"), made_by={})


@pytest.mark.slow
def test_names_that_javascript_knows_and_control_characters_cost_no_result(
    config: EvaluateConfig, tmp_path: Path
) -> None:
    first, second = config.models.values()
    names = ("constructor", "a\x00\x1b")
    slices = {"toString": "n_documents > 3", "hasOwnProperty\n": "n_documents > 5"}
    hostile = config.replace(models=dict(zip(names, (first, second), strict=True)), slices=slices, baseline=names[0])
    found = evaluate(hostile, str(tmp_path / "out"), made_by={"stage": "evaluate"})
    assert tuple(method.name for method in found.methods) == names
    assert storage.read_manifest(str(tmp_path / "out")) is not None
    assert "![" in (tmp_path / "out" / "report.md").read_text()


class TestWithoutCharts:
    """Where nothing can be drawn."""

    @pytest.fixture(autouse=True)
    def no_chart_is_left_out(self) -> None:
        """All are."""

    @pytest.mark.slow
    def test_the_figures_are_committed(
        self, config: EvaluateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("ltrscale.reports.drawing._PROGRAM", "raise SystemExit(3)")
        out = tmp_path / "out"
        found = evaluate(config, str(out), made_by={"stage": "evaluate"})
        assert Evaluation.read(str(out)) == found
        assert sum("cannot be drawn" in message for message in caplog.messages) == 2
        report = (out / "report.md").read_text()
        assert report.count("*Left out: the chart of ") == 2
        assert "![" not in report
        assert [path.name for path in out.glob("*.png")] == []
