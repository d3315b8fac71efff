"""Stacks as a job and as a method of a pipeline: the training groups of each model, and retraining after changes."""

import json
from pathlib import Path
from typing import Any

import pytest
from written_directories import written_directories

from ltrscale import bundle
from ltrscale import config as configs
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate import EvaluateJob
from ltrscale.evaluation.verdict import importances_of
from ltrscale.experiments.methods.choices import StackJob
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.stages.unseen import check_unseen
from ltrscale.trees.gbdt import GBDTJob

WEEKS = {"train": ("2026-W01", "2026-W02"), "validation": ("2026-W03",), "test": ("2026-W04",)}
TREES = {"kind": "lightgbm", "num_trees": 10, "num_threads": 1, "min_data_in_leaf": 5}
NETWORK = {"encoder": {"kind": "resnet", "width": 8, "blocks": 1}}
NEURAL = {
    "kind": "neural",
    "pretrain": {"method": {"kind": "simsiam"}, "network": NETWORK, "epochs": 1, "stream": {"docs_per_batch": 800}},
    "finetune": {"network": NETWORK, "head_epochs": 1, "epochs": 1, "stream": {"docs_per_batch": 800}},
}
GBDT = {"kind": "gbdt", "gbdt": TREES}
SEMI = {"kind": "semi_gbdt", "semi": {"pca": 2, "pseudo_labels": {"grades": 31}, "gbdt": TREES}}


def splits_of(data: str, **train: Any) -> dict[str, Any]:
    splits = {name: {"data": data, "periods": periods} for name, periods in WEEKS.items()}
    return {**splits, "train": {**splits["train"], **train}}


def job(data: str, out: Path, **changes: Any) -> StackJob:
    values = {
        "out": str(out),
        "splits": splits_of(data, labelled_fraction=0.5),
        "members": {"trees": GBDT, "network": NEURAL},
        "stack": {"folds": 2, "gbdt": TREES},
        **changes,
    }
    return configs.validate(StackJob, values, "job")


@pytest.fixture(scope="module")
def stack(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> StackJob:
    """A trained stack."""
    made = job(synthetic_dataset, tmp_path_factory.mktemp("stack") / "out")
    made.run()
    return made


@pytest.mark.slow
def test_each_member_is_pretrained_once_and_trained_on_all_folds_and_on_all_but_each(stack: StackJob) -> None:
    training = Path(stack.out) / "training"
    made = sorted(str(path.parent.relative_to(training)) for path in training.rglob("config.json"))
    expected = ["network/model", "network/pretrained", "trees/model"]
    assert made == sorted(
        [*expected, *(f"folds/{k}-of-2/{name}/model" for k in (0, 1) for name in ("network", "trees"))]
    )
    for name in ("network", "trees"):
        whole, *of_folds = (
            bundle.load(str(training / f / name / "model")) for f in ("", "folds/0-of-2", "folds/1-of-2")
        )
        groups = [int(opened.metrics["labelled_groups"] or 0) for opened in of_folds]
        assert sum(groups) == whole.metrics["labelled_groups"]
        assert abs(groups[0] - groups[1]) <= 1
        folds = [Split.model_validate(opened.made_by["config"]["splits"][0]).fold for opened in of_folds]
        assert [(fold.number, fold.held_out) for fold in folds if fold] == [(0, False), (1, False)]


@pytest.mark.slow
def test_a_stack_without_features_has_the_importances_of_its_members(stack: StackJob) -> None:
    found = importances_of(bundle.load(stack.out))
    assert found is not None
    assert set(found) == {"trees", "network"}
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.slow
def test_a_stack_is_evaluated_like_any_bundle_and_only_what_changed_is_trained_again(
    stack: StackJob, capsys: pytest.CaptureFixture[str]
) -> None:
    itself = f"stack: writing {stack.out}"
    assert written_directories(stack) == []
    with_features = stack.replace(stack={**stack.stack.model_dump(), "features": "all"})
    assert written_directories(with_features) == [itself]
    members = {**stack.model_dump()["members"], "trees": {**GBDT, "gbdt": {**TREES, "num_leaves": 7}}}
    again = written_directories(stack.replace(members=members))
    trees = [f"training/{folder}trees/model" for folder in ("", "folds/0-of-2/", "folds/1-of-2/")]
    assert sorted(again) == sorted([itself, *trees])

    out = Path(stack.out).parent / "evaluation"
    models = {"stack": stack.out, "trees": f"{stack.out}/training/trees/model"}
    evaluate = {"models": models, "splits": stack.splits.model_dump(), "baseline": "trees", "resamples": 200}
    configs.validate(EvaluateJob, {"out": str(out), "evaluate": evaluate}, "evaluate").run()
    assert "| stack" in capsys.readouterr().out
    with pytest.raises(InputError, match="period '2026-W02'"):
        check_unseen(stack.out, Split.model_validate({"data": stack.splits.train.data, "periods": "2026-W02"}))


@pytest.mark.slow
def test_a_pipeline_compares_a_stack_with_its_members(synthetic_dataset: str, tmp_path: Path) -> None:
    values = {
        "out": str(tmp_path),
        "data": synthetic_dataset,
        "splits": splits_of("", labelled_fraction=0.5),
        "methods": {
            "gbdt": GBDT,
            "semi": SEMI,
            "mean": {"kind": "gbdt", "gbdt": {**TREES, "feature_fraction": 0.5}, "ensemble": {"candidates": 2}},
            "stack": {"kind": "stack", "members": ["semi", "mean"], "stack": {"folds": 2, "gbdt": TREES}},
            "more": {"kind": "stack", "members": ["semi"], "stack": {"folds": 2, "features": "all", "gbdt": TREES}},
        },
        "evaluate": {"resamples": 200},
    }
    for split in values["splits"].values():  # type: ignore[attr-defined]
        del split["data"]
    config = configs.validate(PipelineJob, values, "pipeline")
    written = written_directories(config)
    models = [f"seed-0/{name}/model" for name in ("gbdt", "semi", "mean", "stack", "more")]
    folds = [f"seed-0/folds/{k}-of-2/{name}/model" for k in (0, 1) for name in ("semi", "mean")]
    candidates = {path for path in written if "candidates" in path}
    assert len(candidates) == 6
    assert sorted(set(written) - candidates) == sorted([*models, *folds, "evaluation"])
    assert written_directories(config) == []
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert [method["kinds"] for method in metrics["methods"]] == [["trees"]] * 5


@pytest.mark.slow
def test_a_ready_bundle_that_has_seen_the_labels_is_refused_with_a_remedy(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    splits = {**splits_of(synthetic_dataset), "train": {"data": synthetic_dataset, "periods": "2026-W02"}}
    old = {**splits, "train": {"data": synthetic_dataset, "periods": "2026-W01"}}
    for name, of in (("seen", splits), ("old", old)):
        gbdt = {"out": str(tmp_path / name), "splits": of, "gbdt": TREES}
        configs.validate(GBDTJob, gbdt, "gbdt").run()
    plain = {"splits": splits, "members": {"trees": GBDT}}
    with pytest.raises(
        InputError, match=r"bundles.prior: .*seen was trained or selected on labels of the training"
    ) as e:
        job(synthetic_dataset, tmp_path / "out", **plain, bundles={"prior": str(tmp_path / "seen")}).run()
    assert "list its method under members" in str(e.value)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()
    job(synthetic_dataset, tmp_path / "out", **plain, bundles={"prior": str(tmp_path / "old")}).run()
    assert list(bundle.load(str(tmp_path / "out")).members) == ["trees", "prior"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"members": {}}, "members and bundles are both empty"),
        ({"bundles": {"trees": "x"}}, "bundles.trees has the name of a member"),
        ({"members": {"a": {"kind": "combined", "parts": ["b", "c"]}}}, "members.a.parts: 'b' is not a neural method"),
        ({"workers": 2}, "members.network has 1 streams for 2 workers"),
        ({"members": {"a": {"kind": "stack", "members": ["b"]}}}, "members: 'a' is of kind stack; name another"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        job("x", tmp_path, **changes)


def test_a_stack_in_a_pipeline_is_made_of_other_methods() -> None:
    methods = {"gbdt": GBDT, "stack": {"kind": "stack", "members": ["gbdt", "stack"]}}
    values = {"out": "x", "data": "x", "splits": {n: {} for n in ("train", "validation", "test")}, "methods": methods}
    with pytest.raises(InputError, match=r"methods.stack.members: 'stack' is of kind stack; name another method"):
        configs.validate(PipelineJob, values, "pipeline")
    assert isinstance(configs.validate(PipelineJob, {**values, "methods": {"gbdt": GBDT}}, "x").splits, Splits)
