"""The mean of several runs of trees, and of tuned methods: members differ, are the single runs, and are averaged."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import nightly

from ltrscale import bundle
from ltrscale.config import validate
from ltrscale.data.dataset.row_groups import Fold
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.experiments.methods.base import SeedRun, check_methods
from ltrscale.experiments.methods.composed import AnyMethod, EnsembleMethod, TunedMethod
from ltrscale.experiments.methods.single import GBDTMethod, NeuralMethod
from ltrscale.ranking.choices import metric_named
from ltrscale.runtime.workers import ONE
from ltrscale.trees.gbdt import AverageJob
from ltrscale.tuning.history import History, trials_by_value

WEEKS = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
TREES: dict[str, Any] = {"num_trees": 8, "num_threads": 1, "num_leaves": 4, "feature_fraction": 0.5}
SPACE = {"gbdt.num_leaves": {"low": 2, "high": 32, "integer": True}}
NETWORK = {
    "network": {"encoder": {"kind": "mlp", "hidden": [16]}}, "head_epochs": 0, "epochs": 2,
    "stream": {"docs_per_batch": 400}, "optimizer": {"learning_rate": 1e-2},
}  # fmt: skip
METHODS: dict[str, Any] = {
    "gbdt": GBDTMethod.model_validate({"gbdt": TREES}),
    "xgboost": GBDTMethod.model_validate({"gbdt": {"kind": "xgboost", "num_trees": 8, "colsample_bytree": 0.5}}),
    "network": NeuralMethod.model_validate({"finetune": NETWORK}),
    "tuned": TunedMethod.model_validate({"of": "gbdt", "space": SPACE, "trials": 3}),
    "tuned_network": TunedMethod.model_validate(
        {"of": "network", "space": {"finetune.optimizer.learning_rate": {"low": 0.003, "high": 0.03}}, "trials": 2}
    ),
}


def seed_run(data: str, out: Path, of: str) -> SeedRun:
    splits = {name: {"data": data, "periods": periods} for name, periods in WEEKS.items()}
    methods: dict[str, AnyMethod] = {**METHODS, "mean": EnsembleMethod(of=of, runs=3)}
    check_methods(methods, ONE)
    return SeedRun(methods, validate(Splits, splits, "test"), 3, ONE, str(out))


@pytest.mark.slow
@pytest.mark.parametrize("of", ["gbdt", *map(nightly, ("xgboost", "tuned")), "tuned_network"])
def test_the_scores_are_the_mean_of_those_of_different_runs(synthetic_dataset: str, tmp_path: Path, of: str) -> None:
    made = seed_run(synthetic_dataset, tmp_path, of)
    mean = bundle.load(made.model("mean"))
    urls = [tmp_path / of / "model", tmp_path / "runs/1" / of / "model", tmp_path / "runs/2" / of / "model"]
    runs = [bundle.load(str(url)) for url in urls]
    assert len({run.content for run in runs}) == 3
    assert runs[0].contents == bundle.load(seed_run(synthetic_dataset, tmp_path / "alone", of).model(of)).contents
    validation = select(Split(data=(synthetic_dataset,), periods=(WEEKS["validation"],)), labelled=True)
    parts = list(iterate(validation, docs_per_batch=2**20))
    for groups in parts:
        expected_N = torch.stack([run.scorer()(groups).double() for run in runs]).mean(dim=0)
        torch.testing.assert_close(mean.scorer()(groups).double(), expected_N, rtol=1e-5, atol=1e-6)
    ndcg_Q = torch.cat([metric_named("ndcg@5").values_on(mean.scorer()(groups), groups) for groups in parts])
    assert mean.metrics["validation_ndcg@5"] == pytest.approx(ndcg_Q.double().nanmean().item(), abs=1e-6)


@pytest.mark.slow
def test_members_may_lack_a_fold_each_or_be_the_best_trials(synthetic_dataset: str, tmp_path: Path) -> None:
    made = seed_run(synthetic_dataset, tmp_path, "tuned")
    kinds = {"folded": {"of": "gbdt", "over": "folds"}, "leading": {"of": "tuned", "runs": 2, "over": "trials"}}
    methods = {**made.methods, **{name: EnsembleMethod.model_validate(of) for name, of in kinds.items()}}
    check_methods(methods, ONE)
    made = replace(made, methods=methods)
    folded = bundle.load(made.model("folded"))
    runs = [bundle.load(str(tmp_path / "folds" / f"{k}-of-3" / "gbdt" / "model")) for k in range(3)]
    assert set(folded.contents.values()) == {run.content for run in runs}
    every = select(made.splits.train, labelled=True).n_groups
    assert sum(every - (run.count("labelled_groups") or 0) for run in runs) == every, "each group is left out once"
    leading = bundle.load(made.model("leading"))
    trials = trials_by_value(History(str(tmp_path / "tuned" / "search")).trials())
    best = [bundle.load(str(tmp_path / "tuned" / place / "model")) for place in (".", "leaders/1")]
    assert set(leading.contents.values()) == {run.content for run in best}
    assert [run.config["num_leaves"] for run in best] == [t.params["gbdt.num_leaves"] for t in trials[:2]]
    with pytest.raises(ValueError, match=r"methods.bad.over: trials are those of a search, and 'gbdt' is not of kind"):
        check_methods({**methods, "bad": EnsembleMethod(of="gbdt", over="trials")}, ONE)


def test_folds_of_a_split_that_is_a_fold_lie_within_it(synthetic_dataset: str, tmp_path: Path) -> None:
    """As a member of a stack, a mean of folds sees nothing of the stack's own held-out fold."""
    made = seed_run(synthetic_dataset, tmp_path, "gbdt")
    outer = made.without(Fold(number=0, of=4))
    folded = EnsembleMethod(of="gbdt", runs=2, over="folds")
    held_out = select(made.splits.train.replace(fold={"number": 0, "of": 4, "held_out": True}), labelled=True)
    assert held_out.kept_labelled is not None
    for fold in folded.folds_in(outer):
        kept = select(outer.without(fold).splits.train, labelled=True).kept_labelled
        assert kept is not None
        assert not (kept & held_out.kept_labelled).any()


@pytest.mark.nightly
@pytest.mark.parametrize("of", ["tuned", "tuned_network"])
def test_runs_of_a_tuned_method_have_the_settings_of_one_search(
    synthetic_dataset: str, tmp_path: Path, of: str
) -> None:
    seed_run(synthetic_dataset, tmp_path, of).model("mean")
    searches = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("search"))
    assert searches == [Path(of) / "search"]
    assert len(History(str(tmp_path / of / "search")).trials()) == METHODS[of].trials
    settings = [dict(bundle.load(str(tmp_path / folder / of / "model")).config) for folder in (".", "runs/1", "runs/2")]
    assert len({each.pop("seed") for each in settings}) == 3
    assert settings[0] == settings[1] == settings[2]


@pytest.mark.slow
def test_a_mean_is_up_to_date_until_a_run_changes(synthetic_dataset: str, tmp_path: Path) -> None:
    made = seed_run(synthetic_dataset, tmp_path, "gbdt")
    url = Path(made.model("mean"))
    sizes = [len(content) for content in bundle.load(str(url)).contents.values()]
    before = (url / "manifest.json").stat().st_mtime_ns
    made.model("mean")
    assert (url / "manifest.json").stat().st_mtime_ns == before
    other: dict[str, AnyMethod] = {
        **made.methods,
        "gbdt": GBDTMethod.model_validate({"gbdt": {**TREES, "num_trees": 5}}),
    }
    SeedRun(other, made.splits, 3, ONE, str(tmp_path)).model("mean")
    runs = [bundle.load(str(tmp_path / folder / "gbdt" / "model")) for folder in (".", "runs/1", "runs/2")]
    assert [len(run.content) for run in runs] != sizes
    assert bundle.load(str(url)).metrics["trees"] == sum(int(run.metrics["trees"] or 0) for run in runs) <= 15


def test_trees_that_draw_nothing_are_refused_or_named(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    still = GBDTMethod.model_validate({"gbdt": {**TREES, "feature_fraction": 1}})
    methods: dict[str, AnyMethod] = {"gbdt": still, "mean": EnsembleMethod(of="gbdt")}
    with pytest.raises(ValueError, match=r"methods.mean.runs: these trees draw nothing at random"):
        check_methods(methods, ONE)
    several = GBDTMethod.model_validate({"gbdt": TREES, "ensemble": {"candidates": 2}})
    with pytest.raises(ValueError, match=r"methods.mean.of: 'gbdt' is not a neural method, nor another of one model"):
        check_methods({**methods, "gbdt": several}, ONE)
    made = seed_run(synthetic_dataset, tmp_path, "gbdt")
    run = made.model("gbdt")
    with caplog.at_level(logging.WARNING):
        AverageJob(out=str(tmp_path / "same"), bundles=(run, run), splits=made.splits).run()
    assert "some of the 2 runs are equal trees" in caplog.text
