"""Stacks: the training groups of each model, and retraining after changes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from written_directories import written_directories

from ltrscale import bundle
from ltrscale import config as configs
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.stages.provenance import check_unseen
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


def splits_of(*, labelled_fraction: float = 1.0, **shared: Any) -> dict[str, Any]:
    splits: dict[str, Any] = {name: {"periods": periods, **shared} for name, periods in WEEKS.items()}
    return {**splits, "train": {**splits["train"], "labelled_fraction": labelled_fraction}}


def pipeline(data: str, out: Path, *, train: dict[str, Any] | None = None, **methods: Any) -> PipelineJob:
    splits = splits_of(labelled_fraction=0.5) if train is None else {**splits_of(), "train": train}
    values = {
        "out": str(out),
        "data": data,
        "splits": splits,
        "methods": methods,
        "evaluate": {"baseline": None, "resamples": 200},
    }
    return configs.validate(PipelineJob, values, "pipeline")


def stack_of(members: Sequence[str] = (), **settings: Any) -> dict[str, Any]:
    bundles = settings.pop("bundles", {})
    stack = {"folds": 2, "gbdt": TREES, **settings}
    return {"kind": "stack", "members": members, "bundles": bundles, "stack": stack}


@pytest.fixture(scope="module")
def trained(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> PipelineJob:
    """A pipeline with a stack, after its run."""
    methods = {"trees": GBDT, "network": NEURAL, "stack": stack_of(["trees", "network"])}
    made = pipeline(synthetic_dataset, tmp_path_factory.mktemp("stack") / "out", **methods)
    made.run()
    return made


@pytest.mark.slow
def test_each_member_is_pretrained_once_and_trained_on_all_folds_and_on_all_but_each(trained: PipelineJob) -> None:
    training = Path(trained.out) / "seed-0"
    made = sorted(
        str(path.parent.relative_to(training))
        for path in training.rglob("config.json")
        if path.parents[1].name != "members"
    )
    expected = ["network/model", "network/pretrained", "stack/model", "trees/model"]
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
def test_a_stack_without_features_has_the_importances_of_its_members(trained: PipelineJob) -> None:
    found = bundle.load(f"{trained.out}/seed-0/stack/model").importances()
    assert found is not None
    assert set(found) == {"trees", "network"}
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.nightly
def test_only_what_changed_is_trained_again_and_a_stack_has_seen_what_its_members_have(trained: PipelineJob) -> None:
    assert written_directories(trained) == []
    methods = trained.model_dump()["methods"]
    with_features = {**methods, "stack": stack_of(["trees", "network"], features="all")}
    assert written_directories(trained.replace(methods=with_features)) == ["seed-0/stack/model", "evaluation"]
    other_trees = {**methods, "trees": {**GBDT, "gbdt": {**TREES, "num_leaves": 7}}}
    trees = [f"seed-0/{folder}trees/model" for folder in ("", "folds/0-of-2/", "folds/1-of-2/")]
    again = written_directories(trained.replace(methods=other_trees))
    assert sorted(again) == sorted([*trees, "seed-0/stack/model", "evaluation"])
    with pytest.raises(InputError, match="period '2026-W02'"):
        check_unseen(
            f"{trained.out}/seed-0/stack/model", Split.model_validate({"data": trained.data, "periods": "2026-W02"})
        )


@pytest.mark.nightly
def test_a_pipeline_compares_a_stack_with_its_members(synthetic_dataset: str, tmp_path: Path) -> None:
    methods = {
        "gbdt": GBDT,
        "semi": SEMI,
        "mean": {"kind": "gbdt", "gbdt": {**TREES, "feature_fraction": 0.5}, "ensemble": {"candidates": 2}},
        "stack": stack_of(["semi", "mean"]),
        "more": stack_of(["semi"], features="all"),
    }
    config = pipeline(synthetic_dataset, tmp_path, **methods)
    written = written_directories(config)
    models = [f"seed-0/{name}/model" for name in ("gbdt", "semi", "mean", "stack", "more")]
    folds = [f"seed-0/folds/{k}-of-2/{name}/model" for k in (0, 1) for name in ("semi", "mean")]
    candidates = {path for path in written if "candidates" in path}
    assert len(candidates) == 6
    assert sorted(set(written) - candidates) == sorted([*models, *folds, "evaluation"])
    assert written_directories(config) == []
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert [[trial["kind"] for trial in method["trials"]] for method in metrics["methods"]] == [["trees"]] * 5


@pytest.mark.nightly
def test_a_ready_bundle_that_has_seen_the_labels_is_refused_with_a_remedy(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    for name, period in (("seen", "2026-W02"), ("old", "2026-W01")):
        splits = splits_of(data=synthetic_dataset)
        train = {"data": synthetic_dataset, "periods": period}
        gbdt = {"out": str(tmp_path / name), "splits": {**splits, "train": train}, "gbdt": TREES}
        configs.validate(GBDTJob, gbdt, "gbdt").run()

    def stacked(prior: str) -> PipelineJob:
        methods = {"trees": GBDT, "stack": stack_of(["trees"], bundles={"prior": str(tmp_path / prior)})}
        return pipeline(synthetic_dataset, tmp_path / "out", train={"periods": "2026-W02"}, **methods)

    with pytest.raises(
        InputError, match=r"bundles.prior: .*seen was trained or selected on labels of the training"
    ) as e:
        stacked("seen").run()
    assert not [path for path in (tmp_path / "out").rglob("*") if "seed-0" in path.parts], "before anything is trained"
    assert "list its method under members" in str(e.value)
    assert "\n" not in str(e.value)
    stacked("old").run()
    assert list(bundle.load(str(tmp_path / "out/seed-0/stack/model")).members) == ["trees", "prior"]


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (stack_of(), "methods.stack: members and bundles are both empty"),
        (stack_of(["gbdt"], bundles={"gbdt": "x"}), "methods.stack.bundles.gbdt has the name of a member"),
        (stack_of(["gbdt", "stack"]), "methods.stack.members: 'stack' is of kind stack; name another method"),
    ],
)
def test_settings_that_do_not_fit_are_named(stack: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        pipeline("x", tmp_path, gbdt=GBDT, stack=stack)
