"""The whole pipeline on a small synthetic log, and the stages that a second run skips."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from dataset_changes import add_period, with_renamed_files
from synthetic_columns import COLUMN_MAPPING
from written_directories import written_directories

from ltrscale import bundle, storage
from ltrscale import config as configs
from ltrscale.errors import InputError
from ltrscale.experiments import pipeline as pipelines
from ltrscale.experiments.pipeline import PipelineJob

ROOT = Path(__file__).resolve().parents[2]


def small(out: Path, *changes: str) -> PipelineJob:
    """A small version of the shipped quick start."""
    stages = ("simclr_rank", "simsiam")
    return configs.load(
        PipelineJob,
        str(ROOT / "jobs" / "configs" / "start" / "demo.yaml"),
        [
            f"out={out}",
            "seeds=[0]",
            "synthetic.groups_per_week=60",
            "synthetic.n_features=8",
            "splits.train.labelled_fraction=0.5",
            "methods.gbdt.gbdt.num_trees=20",
            *(f"methods.{name}.pretrain.epochs=1" for name in stages),
            *(f"methods.{name}.finetune.head_epochs=1" for name in stages),
            *(f"methods.{name}.finetune.epochs=2" for name in (*stages, "no_pretraining")),
            "evaluate.resamples=200",
            *changes,
        ],
    )


def test_the_config_of_the_weeks_is_looked_for_beside_the_directory_of_the_pipeline(
    synthetic_dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "weekly_command", str)
    places = {"/x": "/weekly.yaml", "x": "./weekly.yaml", "a/x/": "a/weekly.yaml", "s3://b/x": "s3://b/weekly.yaml"}
    for out, config in places.items():
        *_, last = pipelines.after_pipeline("model", synthetic_dataset, out, refitted=None, evaluation=None)
        assert last == f"when the next period is there: {config}"


@pytest.mark.slow
def test_a_pipeline_runs_once_and_then_only_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    first = written_directories(small(out))
    models = [f"seed-0/{name}/model" for name in ("gbdt", "no_pretraining", "simclr_rank", "simsiam")]
    assert set(models) <= set(first)
    assert "evaluation" in first
    printed = capsys.readouterr().out
    for word in ("gbdt", "no_pretraining", "simclr_rank", "simsiam", "NDCG@10", "undefined"):
        assert word in printed
    check_evaluation(out / "evaluation")

    assert written_directories(small(out)) == []
    changed = written_directories(small(out, "methods.simsiam.finetune.epochs=3"))
    assert changed == ["seed-0/simsiam/model", "evaluation"]
    fewer = ["splits.train.labelled_fraction=0.25", "methods.simsiam.finetune.epochs=3"]
    # pretraining reads no labels and is not repeated
    assert set(written_directories(small(out, *fewer))) == {*models, "evaluation"}
    again = written_directories(small(out, *fewer, "seeds=[0, 1]"))
    assert set(again) == {*(name.replace("seed-0", "seed-1") for name in models), "evaluation"}
    own = written_directories(small(out, *fewer, "seeds=[0, 1]", "pretrain_once=false"))
    encoders = [f"seed-1/{name}/pretrained" for name in ("simclr_rank", "simsiam")]
    assert set(own) == {*encoders, *(folder.replace("pretrained", "model") for folder in encoders), "evaluation"}


@pytest.mark.nightly
def test_a_period_that_no_split_reads_changes_nothing(synthetic_dataset: str, tmp_path: Path) -> None:
    data, elsewhere = (with_renamed_files(synthetic_dataset, tmp_path / name) for name in ("data", "elsewhere"))
    trees = {"num_trees": 3, "num_threads": 1}
    finetune = {"head_epochs": 1, "epochs": 1, "stream": {"docs_per_batch": 500}}
    pretrain = {"network": {"encoder": {"width": 8, "blocks": 1}}, "epochs": 1}
    methods = {
        "trees": {"kind": "gbdt", "gbdt": trees},
        "semi": {"kind": "semi_gbdt", "semi": {"pca": 2, "gbdt": trees}},
        "tuned": {"kind": "neural", "pretrain": pretrain, "finetune": finetune},
        "plain": {"kind": "neural", "finetune": finetune},
        "mean": {"kind": "combined", "parts": ["tuned", "plain"], "combine": {"how": "concat", "epochs": 1}},
        "stack": {"kind": "stack", "members": ["trees"], "stack": {"folds": 2, "gbdt": trees}},
    }
    weeks = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}

    def comparison(data: str, out: Path) -> PipelineJob:
        values = {
            "out": str(out),
            "data": data,
            "splits": {name: {"periods": periods} for name, periods in weeks.items()},
            "methods": methods,
            "evaluate": {"baseline": None, "resamples": 100},
        }
        return configs.validate(PipelineJob, values, "test")

    assert len(written_directories(comparison(data, tmp_path / "out"))) == 10
    for url in (data, elsewhere):
        add_period(url, "2025-W52", like="2026-W02")
    assert written_directories(comparison(data, tmp_path / "out")) == []
    comparison(elsewhere, tmp_path / "again").run()
    for name in methods:
        made, again = (bundle.load(str(tmp_path / out / "seed-0" / name / "model")) for out in ("out", "again"))
        assert made.contents == again.contents
        assert (made.metrics, made.dataset_hash) == (again.metrics, again.dataset_hash)


def check_evaluation(folder: Path) -> None:
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    assert metrics
    assert "NDCG" in (folder / "report.md").read_text()
    groups = pq.read_table(folder / "groups.parquet")
    per_method = groups.num_rows / 4
    assert per_method == groups.filter([m == "gbdt" for m in groups["method"].to_pylist()]).num_rows
    resolved = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    assert set(resolved["evaluate"]["models"]) == {"gbdt", "no_pretraining", "simclr_rank", "simsiam"}


def test_all_methods_of_a_seed_share_their_labelled_groups_and_seeds_differ(tmp_path: Path) -> None:
    config = small(tmp_path)
    one, two = (config.splits.drawn(seed) for seed in (0, 1))
    assert one.train.labelled_seed != two.train.labelled_seed
    assert one.test == two.test
    assert one.validation == two.validation


def test_a_sample_of_the_validation_labels_is_drawn_with_the_training_labels(tmp_path: Path) -> None:
    config = small(tmp_path, "splits.validation.labelled_groups=7", "splits.validation.labelled_seed=20")
    drawn = [config.splits.drawn(seed).validation for seed in (0, 3)]
    assert [split.labelled_seed for split in drawn] == [20, 23]
    assert [split.labelled_groups for split in drawn] == [7, 7]


def test_too_few_streams_for_the_workers_are_named_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"methods.no_pretraining has 2 streams for 3 workers"):
        small(tmp_path, "workers=3")
    assert not storage.exists(str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["prepare=null", "data=data/shop"], "synthetic makes a log that must be prepared"),
        (["evaluate.ndcg_at=[1, 10]"], r"primary_cutoff 5 is not in ndcg_at \[1, 10\]; add it"),
        (["splits.test.labels=relevance"], "splits.test.labels: leave it out; evaluate_on says"),
        (["evaluate.baseline=tree"], "'tree' is not among the methods .*; or set null"),
    ],
)
def test_settings_that_nothing_would_read_are_named_before_anything_runs(
    changes: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        small(tmp_path, *changes)


@pytest.mark.slow
def test_labels_to_test_on_that_are_missing_are_named_before_training(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"evaluate_on: .*data has no 'relevance', which relabelled data sets have"):
        small(tmp_path / "out", "evaluate_on=[labels, relevance]").run()
    assert not (tmp_path / "out" / "seed-0").exists()


def pipeline(**changes: object) -> PipelineJob:
    """A config that tests only validate."""
    values: dict[str, object] = {
        "out": "runs/x",
        "data": "data/x",
        "splits": {name: {"periods": name} for name in ("train", "validation", "test")},
        "methods": {"gbdt": {"kind": "gbdt"}},
    }
    return configs.validate(PipelineJob, {**values, **changes}, "test")


@pytest.mark.parametrize("changes", [{"data": None}, {"prepare": {"source": {"kind": "letor"}}}])
def test_data_comes_from_one_place(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="set data to a prepared data set, or prepare to make one; not"):
        pipeline(**changes)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"kind": "neural", "pretrained_as": "x"}, "methods.new.pretrained_as 'x' is not a method that pretrains"),
        ({"kind": "neural", "pretrained_as": "gbdt"}, "'gbdt' is not a method that pretrains"),
        ({"kind": "neural", "pretrained_as": "plain"}, "'plain' is not a method that pretrains"),
        ({"kind": "neural", "pretrained_as": "new"}, "'new' is not a method that pretrains"),
        ({"kind": "neural", "pretrain": {}, "pretrained_as": "vime"}, "exclude each other"),
        ({"kind": "combined", "parts": ["plain", "x"]}, "methods.new.parts: 'x' is not a neural method"),
        ({"kind": "combined", "parts": ["gbdt", "plain"]}, "methods.new.parts: 'gbdt' is not a neural method"),
        ({"kind": "combined", "parts": ["plain"]}, "parts"),
        ({"kind": "ensemble", "of": "gbdt"}, "methods.new.runs: these trees draw nothing at random"),
        ({"kind": "ensemble", "of": "new"}, "methods.new.of: 'new' is not a neural method"),
        ({"kind": "neural", "finetune": {"epochs": 0}}, "methods.new.finetune.epochs is 0, which is probing"),
        ({"kind": "neural", "finetune": {"projector_layers": 1}}, "methods.new.finetune.projector_layers asks for 1"),
        ({"kind": "neural", "pretrain": {}, "finetune": {"projector_layers": 3}}, "projector that has 2; lower it"),
        ({"kind": "neural", "pretrained_as": "vime", "finetune": {"projector_layers": 1}}, "that has 0; lower it"),
        ({"kind": "neural", "starts_from": "gbdt"}, "methods.new.starts_from: 'gbdt' is not a neural method"),
        ({"kind": "neural", "starts_from": "new"}, "methods.new.starts_from leads from new and back"),
        ({"kind": "neural", "pretrain": {}, "starts_from": "plain"}, "pretrain and starts_from exclude each other"),
        ({"kind": "neural", "starts_from": "plain", "leave_out": "a"}, "starts_from brings the features"),
        ({"kind": "gbdt", "learns_from": "clicks"}, "learns_from 'clicks' is not in learn_from, which is empty"),
    ],
)
def test_methods_build_on_methods_that_exist(method: dict[str, object], message: str) -> None:
    others = {
        "gbdt": {"kind": "gbdt"},
        "plain": {"kind": "neural"},
        "vime": {"kind": "neural", "pretrain": {"method": {"kind": "vime"}}},
    }
    with pytest.raises(InputError, match=message):
        pipeline(methods={**others, "new": method})


def test_methods_that_build_on_others_are_taken() -> None:
    siam = {"kind": "neural", "pretrain": {"method": {"kind": "simsiam"}}}
    probe = {"kind": "neural", "pretrained_as": "siam", "finetune": {"epochs": 0, "projector_layers": 2}}
    joined = {"kind": "combined", "parts": ["siam", "probe"]}
    methods = {"gbdt": {"kind": "gbdt"}, "probe": probe, "siam": siam, "joined": joined}
    assert list(pipeline(methods=methods).methods) == list(methods)  # what a method builds on may stand after it


@pytest.mark.nightly
def test_methods_built_on_others_are_trained_once_on_relabelled_data(tmp_path: Path) -> None:
    finetune = {"head_epochs": 1, "epochs": 1, "stream": {"docs_per_batch": 500}}
    binary = {"kind": "binary_feedback", "sharpness": 4, "tau": 0.5, "periods": ["2026-W01", "2026-W02", "2026-W03"]}
    values = {
        "out": str(tmp_path / "out"),
        "synthetic": {"weeks": 4, "groups_per_week": 60, "mean_documents": 8, "n_features": 6, "labelled": 0.8},
        "prepare": {"source": {"kind": "items", "columns": COLUMN_MAPPING}},
        "relabel": {"steps": [binary]},
        "splits": {
            "train": {"periods": "2026-W01..2026-W02"},
            "validation": {"periods": "2026-W03"},
            "test": {"periods": "2026-W04"},
        },
        "methods": {
            "ensemble": {"kind": "ensemble", "of": "probed", "runs": 2},
            "joined": {"kind": "combined", "parts": ["tuned", "probed"], "combine": {"how": "concat", "epochs": 1}},
            "probed": {"kind": "neural", "pretrained_as": "tuned", "finetune": {**finetune, "epochs": 0}},
            "tuned": {
                "kind": "neural",
                "pretrain": {"network": {"encoder": {"width": 8, "blocks": 1}}, "epochs": 1},
                "finetune": finetune,
            },
        },
        "evaluate": {"baseline": "tuned", "resamples": 200},
        "evaluate_on": ["labels", "relevance"],
    }
    config = configs.validate(PipelineJob, values, "test")
    written = written_directories(config)
    assert written == [
        "data-log", "data", "relabelled", "seed-0/tuned/pretrained", "seed-0/probed/model",
        "seed-0/runs/1/probed/model", "seed-0/ensemble/model", "seed-0/tuned/model", "seed-0/joined/model",
        "evaluation", "evaluation-relevance",
    ]  # fmt: skip
    for folder, column in (("evaluation", "labels"), ("evaluation-relevance", "relevance")):
        resolved = yaml.safe_load((tmp_path / "out" / folder / "run" / "config.yaml").read_text())
        assert resolved["evaluate"]["splits"]["test"]["labels"] == column
        methods = pq.read_table(tmp_path / "out" / folder / "groups.parquet")["method"].to_pylist()
        assert set(methods) == set(config.methods)
    run, own = (
        bundle.load(str(tmp_path / "out" / "seed-0" / name)) for name in ("runs/1/probed/model", "probed/model")
    )
    assert run.content != own.content
    assert torch.equal(run.encoder().linear.weight, own.encoder().linear.weight)  # both probe one pretrained encoder
    assert written_directories(config) == []


@pytest.mark.nightly
def test_a_network_learns_clicks_then_labels_and_a_stack_reads_both(tmp_path: Path) -> None:
    """As SUN23: what has only learnt clicks is trained once, also for the folds of the stack over it; judgements that
    the stack does not learn from choose its epoch."""
    finetune = {"head_epochs": 1, "epochs": 1, "stream": {"docs_per_batch": 500}}
    network = {"transform": {"numeric": "standard"}, "encoder": {"width": 8, "blocks": 1}}
    clicks = {"kind": "clicks", "ranking": "random", "depth": 8, "periods": ["2026-W01", "2026-W02"]}
    judged = {"number": 0, "of": 3}
    held_out = {"periods": "2026-W03", "fold": {**judged, "held_out": True}}
    log = {"train": {"periods": "2026-W01..2026-W02"}, "validation": held_out}
    values = {
        "out": str(tmp_path / "out"),
        "synthetic": {"weeks": 4, "groups_per_week": 60, "mean_documents": 8, "n_features": 6, "labelled": 0.8},
        "prepare": {"source": {"kind": "items", "columns": COLUMN_MAPPING}},
        "learn_from": {"clicks": {"relabel": {"steps": [clicks]}, "splits": log}},
        "splits": {
            "train": {"periods": "2026-W03", "fold": judged},
            "validation": held_out,
            "test": {"periods": "2026-W04"},
        },
        "methods": {
            "clicked": {"kind": "neural", "learns_from": "clicks", "finetune": {**finetune, "network": network}},
            "judged": {"kind": "neural", "starts_from": "clicked", "finetune": {**finetune, "keep_head": True}},
            "stack": {
                "kind": "stack",
                "members": ["clicked", "judged"],
                "stack": {"folds": 2, "gbdt": {"num_trees": 3}},
            },
        },
        "evaluate": {"baseline": "clicked", "resamples": 200},
    }
    config = configs.validate(PipelineJob, values, "test")
    written = written_directories(config)
    assert written == [
        "data-log", "data", "learn-from/clicks", "seed-0/clicked/model", "seed-0/judged/model",
        "seed-0/folds/0-of-2/judged/model", "seed-0/folds/1-of-2/judged/model", "seed-0/stack/model", "evaluation",
    ]  # fmt: skip
    first, then = (bundle.load(str(tmp_path / "out" / "seed-0" / name / "model")) for name in ("clicked", "judged"))
    assert str(tmp_path / "out" / "learn-from" / "clicks") in str(first.made_by)
    assert first.url in str(then.made_by)
    assert written_directories(config) == []
