"""The order that was shown as a method: its figures by hand, its place in every report, and the errors without it."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from dataset_columns import add_column
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference.metrics import expected_dcg, ideal_dcg
from small_trainers import grow_trees

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.split import Splits
from ltrscale.errors import InputError
from ltrscale.evaluation.gate import GateJob
from ltrscale.evaluation.measure.evaluate import evaluate
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.measuring import order_shown
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import AS_SHOWN, EvaluateConfig
from ltrscale.experiments.report.make import ReportJob
from ltrscale.experiments.report.sources import Sources
from ltrscale.trees.configs import LightGBMConfig

Groups = list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]
WriteDataset = Callable[[Mapping[str, Groups], list[Feature]], str]
FEATURES = [Feature(name=name) for name in ("x", "y")]
PERIODS = ("2026-W01", "2026-W02", "2026-W03", "2026-W04")
PER_PERIOD = 40


def position_lists() -> list[list[float] | None]:
    """Shuffled places; some documents without one, some at the same, some groups without any."""
    rng = np.random.default_rng(1)
    lists: list[list[float] | None] = []
    for gid, length in enumerate(lengths()):
        places = (rng.permutation(length) + 1).astype(float)
        places[rng.random(length) < 0.2] = math.nan
        lists.append(None if gid % 7 == 6 else np.minimum(places, 8).tolist())
    return lists


def lengths() -> list[int]:
    rng = np.random.default_rng(0)
    return [int(n) for n in rng.integers(1, 10, len(PERIODS) * PER_PERIOD)]


@pytest.fixture(scope="module")
def splits(write_dataset: WriteDataset) -> Splits:
    rng, sizes = np.random.default_rng(2), iter(lengths())
    data: dict[str, Groups] = {}
    for period in PERIODS:
        x_QLF = [rng.normal(size=(next(sizes), 2)).astype(np.float32) for _ in range(PER_PERIOD)]
        data[period] = [(x_LF, np.clip(np.round(x_LF[:, 0]), 0, 3).astype(np.float32)) for x_LF in x_QLF]
    url = write_dataset(data, FEATURES)
    places = position_lists()
    add_column(url, "positions", pa.list_(pa.float32()), lambda gid: places[gid])
    return splits_on(url)


def splits_on(url: str) -> Splits:
    parts = {"train": PERIODS[:1], "validation": PERIODS[1:2], "test": PERIODS[2:]}
    return Splits.model_validate({name: {"data": url, "periods": periods} for name, periods in parts.items()})


@pytest.fixture(scope="module")
def config(splits: Splits, tmp_path_factory: pytest.TempPathFactory) -> EvaluateConfig:
    models = {}
    for name, trees in (("few", 1), ("many", 20)):
        models[name] = [str(tmp_path_factory.mktemp("bundles") / name)]
        settings = LightGBMConfig(num_trees=trees, num_threads=1, min_data_in_leaf=5)
        grow_trees(settings, splits, models[name][0])
    values: dict[str, Any] = {"models": models, "splits": splits, "resamples": 200, "baseline": AS_SHOWN}
    values |= {"outliers": {"gap": None}, "slice_by": ["period"], "docs_per_batch": 50}
    return EvaluateConfig.model_validate(values)


@pytest.fixture(scope="module")
def evaluated(config: EvaluateConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, str]:
    out = str(tmp_path_factory.mktemp("out") / "evaluation")
    EvaluateJob(out=out, evaluate=config).run(show=False)
    return Evaluation.read(out), out


@given(st.lists(st.one_of(st.integers(1, 6).map(float), st.just(math.nan)), min_size=1, max_size=12))
def test_documents_come_by_position_and_without_one_last_and_tied(places: list[float]) -> None:
    groups = QueryGroups(torch.zeros(len(places), 1), torch.tensor([0, len(places)]), positions_N=torch.tensor(places))
    scores = order_shown(groups).tolist()
    for i, one in enumerate(places):
        for j, other in enumerate(places):
            before = (math.isnan(other) and not math.isnan(one)) or one < other
            assert (scores[i] > scores[j]) == before
    assert all(map(math.isfinite, scores))


@pytest.mark.slow
def test_its_figures_are_those_by_hand_in_all_groups_and_slices(
    evaluated: tuple[Evaluation, str],
) -> None:
    found, places = evaluated[0], position_lists()
    rng, sizes = np.random.default_rng(2), lengths()
    labels = [np.clip(np.round(rng.normal(size=(n, 2)).astype(np.float32)[:, 0]), 0, 3) for n in sizes]
    values: dict[str, list[float]] = {period: [] for period in PERIODS[2:]}
    for gid in range(2 * PER_PERIOD, 4 * PER_PERIOD):
        own = places[gid] or [math.nan] * sizes[gid]
        scores = [-100.0 if math.isnan(place) else -place for place in own]
        gains = [math.log2(1 + 2.0**y - 1) for y in labels[gid]]  # the oracle's gain is 2^y - 1
        ideal = ideal_dcg(gains, 5)
        if ideal:
            values[PERIODS[gid // PER_PERIOD]].append(expected_dcg(scores, gains, 5) / ideal)
    (shown,) = (method for method in found.methods if method.name == AS_SHOWN)
    every = [value for of_period in values.values() for value in of_period]
    assert shown.slices["all"].summaries["ndcg@5"].mean == pytest.approx(np.mean(every))
    for period, of_period in values.items():
        summary = shown.slices[f"period={period}"].summaries["ndcg@5"]
        assert summary.mean == pytest.approx(np.mean(of_period))
        assert summary.low is not None
    missing = sum(math.isnan(p) for gid in range(80, 160) for p in (places[gid] or [math.nan] * sizes[gid]))
    assert found.test.unshown == missing


@pytest.mark.slow
def test_it_is_a_baseline_like_any_and_the_page_says_that_labels_favour_it(
    evaluated: tuple[Evaluation, str], config: EvaluateConfig, tmp_path: Path
) -> None:
    found, out = evaluated
    assert [method.name for method in found.methods] == ["few", "many", AS_SHOWN]
    assert found.methods[-1].kinds == {"order shown"}
    of_many, of_itself = (method.slices["all"].comparisons for method in found.methods[1:])
    assert of_itself == {}
    assert of_many["ndcg@5"].difference > 0.1
    assert of_many["ndcg@5"].p_holm is not None
    text = (Path(out) / "report.md").read_text()
    assert "such as clicks, favour it" in text
    assert f"{found.test.unshown:,} documents have no position" in text
    other = evaluate(config.replace(baseline="few", as_shown=False), str(tmp_path / "out"), made_by={})
    assert [method.name for method in other.methods] == ["few", "many"]
    assert "favour it" not in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
def test_without_positions_there_is_no_such_row_and_no_such_baseline(
    config: EvaluateConfig, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    data = {p: [(rng.normal(size=(4, 2)).astype(np.float32), np.eye(4, dtype=np.float32)[0])] * 9 for p in PERIODS}
    urls = {"none": write_dataset(data, FEATURES), "empty": write_dataset(data, FEATURES)}
    add_column(urls["empty"], "positions", pa.list_(pa.float32()), lambda _: None)
    for name, url in urls.items():
        there = config.replace(splits=splits_on(url).model_dump(), baseline=None)
        found = evaluate(there, str(tmp_path / name), made_by={})
        assert [method.name for method in found.methods] == ["few", "many"]
        with pytest.raises(InputError, match=r"evaluate.baseline as_shown: .* no positions; map .* columns.positions"):
            evaluate(there.replace(baseline=AS_SHOWN), str(tmp_path / name), made_by={})
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"as_shown": False}, "'as_shown' is not among"),
        ({"models": {AS_SHOWN: "x"}}, "rename"),
        ({"models": {"few": "positions"}}, r"write that directory as \./positions"),  # it would be the order shown
    ]
    for wrong, said in mistakes:
        with pytest.raises(ValueError, match=said):
            config.replace(**wrong)


@pytest.mark.slow
def test_lists_of_a_data_set_without_positions_are_in_random_order_beside_one_with_them(
    config: EvaluateConfig, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    """Whichever of the two comes first; a group without a position is one more of those without the column."""
    rng = np.random.default_rng(4)
    data = {p: [(rng.normal(size=(4, 2)).astype(np.float32), np.eye(4, dtype=np.float32)[0])] * 9 for p in PERIODS}
    without, null = write_dataset(data, FEATURES), write_dataset(data, FEATURES)
    add_column(null, "positions", pa.list_(pa.float32()), lambda _: None)
    (url,) = config.splits.test.data
    found = []
    for i, urls in enumerate(([url, without], [without, url], [url, null])):
        splits = {**config.splits.model_dump(), "test": {"data": urls, "periods": PERIODS[2:]}}
        found.append(evaluate(config.replace(splits=splits), str(tmp_path / str(i)), made_by={}))
    alone = evaluate(config, str(tmp_path / "alone"), made_by={})
    (at_random,) = {expected_dcg([0.0] * 4, [1.0, 0.0, 0.0, 0.0], 5)}  # the ideal is 1
    of_url, n = alone.methods[-1].slices["all"].summaries["ndcg@5"], 2 * 9
    assert of_url.mean is not None
    defined = of_url.groups
    for each in found:
        assert [method.name for method in each.methods] == ["few", "many", AS_SHOWN]
        summary = each.methods[-1].slices["all"].summaries["ndcg@5"]
        assert summary.mean == pytest.approx((of_url.mean * defined + at_random * n) / (defined + n))
        assert each.test.unshown == alone.test.unshown + 4 * n


@pytest.mark.nightly
def test_gate_and_report_live_with_it(
    config: EvaluateConfig, evaluated: tuple[Evaluation, str], tmp_path: Path
) -> None:
    (production,), (candidate,) = config.models.values()
    job = GateJob.model_validate(
        {
            "out": str(tmp_path / "gate"),
            "production": production,
            "candidate": candidate,
            "splits": config.splits,
            "evaluate": {"baseline": None, "resamples": 200, "outliers": {"gap": None}},
            "bounds": {"groups": 10, "margin": 0.5, "expected": ["x"]},
        }
    )
    job.run()
    judged = Evaluation.read(str(tmp_path / "gate" / "evaluation"))
    assert [method.name for method in judged.methods] == ["production", "candidate", AS_SHOWN]
    job.replace(plan=True, out=str(tmp_path / "plan")).run()
    job.replace(plan=True, plan_from=str(tmp_path / "gate" / "evaluation"), out=str(tmp_path / "from")).run()
    assert {*Sources.open(evaluated[1]).compared()} == {"few", "many"}  # though it is the baseline
    assert Sources.open(evaluated[1], (AS_SHOWN, "many")).compared() == (AS_SHOWN, "many")
    ReportJob(out=str(tmp_path / "report"), evaluation=evaluated[1], compare=(AS_SHOWN, "many")).run()
    assert AS_SHOWN in (tmp_path / "report" / "report.html").read_text()
