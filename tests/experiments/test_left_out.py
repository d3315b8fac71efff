"""Features that a method leaves out: as if the data set never had them, in every stage, method by method."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from written_directories import written_directories

from ltrscale.bundle import load
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.stages.stage import Stage
from ltrscale.training.finetune import FinetuneJob
from ltrscale.training.pretrain import PretrainJob
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.trees.semi import SemiJob
from ltrscale.tuning.searched import GBDTSearch, check_space, given_params, with_params
from ltrscale.tuning.space import Dimension

LEFT_OUT = ["f_1*", "categorical"]
PERIODS = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
TREES = {"num_trees": 4, "num_threads": 1}
NETWORK = {"encoder": {"width": 8, "blocks": 1}}
IN_ORDER = {"docs_per_batch": 300, "shuffle": False, "streams": 1}  # otherwise the order depends on the features' names
FINETUNE = {"network": NETWORK, "head_epochs": 1, "epochs": 1, "stream": IN_ORDER}
PRETRAIN = {"network": NETWORK, "epochs": 1, "stream": IN_ORDER}


@pytest.fixture(scope="module")
def without(synthetic_dataset: str, reorder: Callable[..., str]) -> str:
    """The data set as it would be if it never had the features."""
    features = open_dataset(synthetic_dataset).manifest.features
    kept = [f for f in features if f.kind == "numeric" and not f.name.startswith("f_1")]
    assert 1 < len(kept) < len(features) - 2
    return reorder(synthetic_dataset, kept)


def splits(data: str, **train: object) -> dict[str, Any]:
    found: dict[str, Any] = {name: {"data": data, "periods": periods} for name, periods in PERIODS.items()}
    return {**found, "train": {**found["train"], **train}}


def run(stage: type[Stage], out: Path, **settings: Any) -> str:
    validate(stage, {"out": str(out), **settings}, "test").run()
    return str(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (GBDTJob, {"gbdt": TREES}),
        (GBDTJob, {"gbdt": {"kind": "xgboost", **TREES}}),
        (SemiJob, {"semi": {"pca": 2, "gbdt": TREES}}),
        (FinetuneJob, {"finetune": FINETUNE}),
    ],
    ids=["lightgbm", "xgboost", "semi", "finetune"],
)
def test_leaving_features_out_equals_a_data_set_without_them(
    synthetic_dataset: str, without: str, tmp_path: Path, stage: type[Stage], settings: dict[str, Any]
) -> None:
    found = load(run(stage, tmp_path / "a", splits=splits(synthetic_dataset, leave_out=LEFT_OUT), **settings))
    expected = load(run(stage, tmp_path / "b", splits=splits(without), **settings))
    assert found.features == expected.features == open_dataset(without).manifest.features
    assert found.contents == expected.contents
    test = select(Split(data=(synthetic_dataset,), periods=("2026-W04",)), labelled=False)
    fewer = select(Split(data=(without,), periods=("2026-W04",)), labelled=False)
    scores_N, expected_N = (
        torch.cat([bundle.scorer(features=selection.features)(groups) for groups in iterate(selection)])
        for bundle, selection in ((found, test), (expected, fewer))
    )
    assert torch.equal(scores_N, expected_N)
    assert len(scores_N.unique()) > 10


@pytest.mark.slow
def test_a_pretrained_encoder_reads_what_is_left_and_its_finetuning_too(
    synthetic_dataset: str, without: str, tmp_path: Path
) -> None:
    bundles = []
    for name, data, left_out in (("a", synthetic_dataset, LEFT_OUT), ("b", without, [])):
        train = splits(data, leave_out=left_out)["train"]
        encoder = run(PretrainJob, tmp_path / name / "pretrained", train=train, pretrain=PRETRAIN)
        # splits without leave_out: a pretrained encoder brings its features
        where = {"pretrained": encoder, "splits": splits(data), "finetune": FINETUNE}
        bundles.append(load(run(FinetuneJob, tmp_path / name / "model", **where)))
    assert bundles[0].features == bundles[1].features
    assert bundles[0].contents == bundles[1].contents


@pytest.mark.slow
def test_an_encoder_that_reads_what_is_left_out_is_refused(synthetic_dataset: str, tmp_path: Path) -> None:
    train = splits(synthetic_dataset)["train"]
    encoder = run(PretrainJob, tmp_path / "pretrained", train=train, pretrain=PRETRAIN)
    where = {"pretrained": encoder, "splits": splits(synthetic_dataset, leave_out=["c_*"]), "finetune": FINETUNE}
    with pytest.raises(
        InputError, match=r"pretrained: \d+ of its \d+ features are not in the data: .* leave none out$"
    ):
        run(FinetuneJob, tmp_path / "model", **where)


def test_a_search_may_decide_what_to_leave_out(synthetic_dataset: str) -> None:
    job = validate(GBDTSearch, {"splits": splits(synthetic_dataset)}, "test")
    space = {"splits.train.leave_out": Dimension(choices=([], LEFT_OUT))}
    check_space(job, space)
    assert given_params(job, space) == {"splits.train.leave_out": []}
    made, _ = with_params(job, space, {"splits.train.leave_out": LEFT_OUT})
    assert made.splits == job.splits.leaving_out(LEFT_OUT)


def pipeline(data: str, out: Path, methods: dict[str, Any]) -> PipelineJob:
    evaluate = {"baseline": None, "resamples": 100}
    where = {name: {"periods": periods} for name, periods in PERIODS.items()}
    values = {"out": str(out), "data": data, "splits": where, "methods": methods, "evaluate": evaluate}
    return validate(PipelineJob, values, "test")


@pytest.mark.nightly
def test_one_report_compares_a_method_with_and_without_categories(synthetic_dataset: str, tmp_path: Path) -> None:
    methods = {
        "trees": {"kind": "gbdt", "gbdt": TREES},
        "bare": {"kind": "gbdt", "gbdt": TREES, "leave_out": ["categorical"]},
        "tuned": {"kind": "neural", "leave_out": ["c_*"], "pretrain": PRETRAIN, "finetune": FINETUNE},
        "again": {"kind": "neural", "pretrained_as": "tuned", "finetune": {**FINETUNE, "epochs": 0}},
        "both": {"kind": "combined", "parts": ["tuned", "again"], "combine": {"how": "mean"}},
        "stack": {
            "kind": "stack",
            "members": ["bare", "trees"],
            "stack": {"folds": 2, "features": ["all"], "gbdt": TREES},
        },
    }
    config = pipeline(synthetic_dataset, tmp_path / "out", methods)
    written = written_directories(config)
    read = {name: {f.kind for f in load(f"{config.out}/seed-0/{name}/model").features} for name in methods}
    both = {"numeric", "categorical"}
    few = {"numeric"}
    assert read == {"trees": both, "bare": few, "tuned": few, "again": few, "both": few, "stack": both}
    assert "evaluation" in written
    report = (tmp_path / "out" / "evaluation" / "report.md").read_text()
    assert all(f"\n| {name} " in report for name in methods)
    methods["bare"]["leave_out"] = ["numeric"]
    changed = written_directories(pipeline(synthetic_dataset, tmp_path / "out", methods))
    assert changed[0] == "seed-0/bare/model"
    assert not any("tuned" in name or "trees" in name for name in changed)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            {"bare": {"kind": "gbdt", "leave_out": ["d_*"]}},
            r"methods.bare.leave_out: no feature matches 'd_\*'; the ne",
        ),
        (
            {
                "start": {"kind": "neural", "pretrain": PRETRAIN},
                "bare": {"kind": "neural", "pretrained_as": "start", "leave_out": ["c_*"]},
            },
            "pretrained_as brings the features of its encoder; set leave_out at that method alone",
        ),
        (
            {
                "plain": {"kind": "neural"},
                "bare": {"kind": "neural", "leave_out": ["c_*"]},
                "both": {"kind": "combined", "parts": ["plain", "bare"]},
            },
            "methods.both.parts leave out different features; combine rankers of the same ones",
        ),
    ],
    ids=["unknown", "pretrained", "combined"],
)
def test_what_cannot_be_left_out_is_named_before_anything_is_trained(
    synthetic_dataset: str, tmp_path: Path, methods: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        pipeline(synthetic_dataset, tmp_path / "out", methods).run()
    assert not (tmp_path / "out" / "seed-0").exists()
