"""Stages: errors, the files that let the same command run again, and which bundles share a draw of labels."""

import json
from pathlib import Path
from typing import Any

import pytest
from dataset_changes import add_period, with_renamed_files

from ltrscale import config as configs
from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError
from ltrscale.evaluation.measure import evaluate as evaluating
from ltrscale.evaluation.measure.evaluate import evaluate
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.origin import made_by
from ltrscale.stages.inputs import bundle_hashes
from ltrscale.stages.provenance import Provenance
from ltrscale.training.combine import CombineJob
from ltrscale.training.finetune import FinetuneJob
from ltrscale.trees.gbdt import GBDTJob

SPLITS = {
    "train": {"data": ("one",), "periods": ("a",), "labelled_fraction": 0.1},
    "validation": {"data": ("one",), "periods": ("b",)},
}


def labels(*, content: str = "hash", url: str = "one", **changes: dict[str, Any]) -> str | None:
    splits = [Split(**{**SPLITS[name], "data": (url,), **changes.get(name, {})}) for name in SPLITS]
    identity = {"config": {}, "splits": [split.model_dump(mode="json") for split in splits]}
    origin = json.loads(json.dumps(made_by("finetune", identity, {url: content})))
    return validate(Provenance, origin, "bundle").labels()


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"labelled_seed": 1}},
        {"train": {"labelled_fraction": 0.2}},
        {"train": {"labelled_fraction": 1.0, "labelled_groups": 7}},
        {"train": {"labelled_fraction": 1.0, "relevant_groups": 7}},
        {"train": {"labels": "relevance"}},
        {"train": {"periods": ("c",)}},
        {"train": {"fold": {"number": 0, "of": 5}}},
        {"validation": {"labelled_groups": 7}},
        {"content": "other"},
    ],
)
def test_other_labels_are_another_draw(changes: dict[str, Any]) -> None:
    assert labels(**changes) != labels()


def test_the_place_of_the_data_and_seeds_of_nothing_are_no_draw() -> None:
    assert labels(url="two") == labels()
    assert labels(validation={"labelled_seed": 5}) == labels()
    everything = {"labelled_fraction": 1.0}
    assert labels(train={**everything, "labelled_seed": 1}) == labels(train=everything)
    first = {"labelled_sample": "first"}
    assert labels(train={**first, "labelled_seed": 1}) == labels(train=first)


def test_bundles_of_no_labels_state_none() -> None:
    assert validate(Provenance, {}, "bundle").labels() is None
    pretrained = {"stage": "pretrain", "config": {"splits": [{"data": ["one"]}]}, "inputs": {"one": "hash"}}
    assert validate(Provenance, pretrained, "bundle").labels() is None


def splits(data: str, *, train: str, validation: str, test: str) -> dict[str, Any]:
    periods = {"train": train, "validation": validation, "test": test}
    return {name: {"data": data, "periods": period} for name, period in periods.items()}


@pytest.fixture(scope="module")
def trees(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Trees trained on the first two weeks and chosen on the third."""
    out = str(tmp_path_factory.mktemp("trees") / "model")
    where = splits(synthetic_dataset, train="2026-W01..2026-W02", validation="2026-W03", test="2026-W04")
    gbdt = {"num_trees": 3, "num_threads": 1}
    validate(GBDTJob, {"out": out, "splits": where, "gbdt": gbdt}, "test").run()
    return out


def evaluation(out: Path, trees: str, where: dict[str, Any]) -> EvaluateJob:
    evaluate = {"models": {"gbdt": trees}, "splits": where, "resamples": 100}
    return validate(EvaluateJob, {"out": str(out), "evaluate": evaluate}, "test")


@pytest.mark.slow
def test_a_bundle_is_not_tested_on_what_it_was_made_from(
    synthetic_dataset: str, trees: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for train, validation, test, taken in (
        ("2026-W01", "2026-W03", "2026-W02", "train and test both take period '2026-W02'"),
        ("2026-W01", "2026-W02", "2026-W03", "validation and test both take period '2026-W03'"),
    ):
        leaking = splits(synthetic_dataset, train=train, validation=validation, test=test)
        with pytest.raises(InputError, match=taken) as error:
            evaluation(tmp_path / "report", trees, leaking).run()
        assert str(error.value).startswith(f"{trees} was made from other splits")
    assert not storage.exists(str(tmp_path / "report"))
    sound = splits(synthetic_dataset, train="2026-W01", validation="2026-W03", test="2026-W04")
    evaluation(tmp_path / "report", trees, sound).run()
    assert "NDCG@5" in capsys.readouterr().out


@pytest.mark.slow
def test_a_bundle_is_not_tested_on_what_its_parts_were_made_from(synthetic_dataset: str, tmp_path: Path) -> None:
    finetune = {"network": {"encoder": {"kind": "identity"}}, "head": {"layers": 1}, "epochs": 1}
    elsewhere = splits(synthetic_dataset, train="2026-W04", validation="2026-W03", test="2026-W02")
    for name, pretrained in (("first", None), ("second", str(tmp_path / "first"))):
        where = elsewhere if name == "first" else {**elsewhere, "train": elsewhere["test"], "test": elsewhere["train"]}
        job = {"out": str(tmp_path / name), "pretrained": pretrained, "splits": where, "finetune": finetune}
        validate(FinetuneJob, job, "test").run()
    sound = splits(synthetic_dataset, train="2026-W01", validation="2026-W03", test="2026-W04")
    combined = {"out": str(tmp_path / "mean"), "bundles": [str(tmp_path / "first")], "splits": {**sound}}
    validate(CombineJob, combined, "test").run()
    for name in ("second", "mean"):
        with pytest.raises(InputError, match=r"first was made from other splits .* train and test both take"):
            evaluation(tmp_path / "report", str(tmp_path / name), sound).run()


@pytest.mark.slow
def test_a_bundle_outlives_the_data_it_was_made_from(trees: str, tmp_path: Path, synthetic_dataset: str) -> None:
    with storage.Commit(str(tmp_path / "moved")) as commit:
        origin = storage.read_manifest(trees)
        assert origin is not None
        for name in ("config.json", "model.txt"):
            with commit.file(name) as path:
                path.write_bytes(storage.read_bytes(storage.join(trees, name)))
        for split in origin["made_by"]["config"]["splits"]:
            split["data"] = [str(tmp_path / "gone")]
        commit.finish({name: value for name, value in origin.items() if name != "files"})
    sound = splits(synthetic_dataset, train="2026-W01", validation="2026-W02", test="2026-W04")
    evaluation(tmp_path / "report", str(tmp_path / "moved"), sound).run()


@pytest.mark.slow
def test_an_evaluation_reads_what_it_began_with(
    synthetic_dataset: str, trees: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = with_renamed_files(synthetic_dataset, tmp_path / "data")
    where = splits(data, train="2026-W01..2026-W02", validation="2026-W03", test="2026-W04..2026-W05")
    add_period(data, "2026-W05", like="2026-W02")
    began = select(Split.model_validate(where["test"]), labelled=True).hash

    def growing(*arguments: Any, **named: Any) -> object:
        add_period(data, "2026-W04b", like="2026-W02")
        return evaluate(*arguments, **named)

    monkeypatch.setattr(evaluating, "evaluate", growing)
    evaluation(tmp_path / "report", trees, where).run()
    assert Evaluation.read(str(tmp_path / "report")).test.hash == began
    monkeypatch.undo()
    evaluation(tmp_path / "report", trees, where).run()  # not up to date: the range has a period more now
    assert Evaluation.read(str(tmp_path / "report")).test.periods == ("2026-W04", "2026-W04b", "2026-W05")


def test_a_directory_that_is_no_bundle_is_named(synthetic_dataset: str, trees: str, tmp_path: Path) -> None:
    assert list(bundle_hashes([trees])) == [trees]
    with pytest.raises(InputError, match="not a bundle but 'ltrscale-dataset'"):
        bundle_hashes([synthetic_dataset])
    with pytest.raises(InputError, match="no bundle is committed there"):
        bundle_hashes([str(tmp_path)])


@pytest.mark.slow
def test_what_prepare_leaves_makes_the_same_data_set_again(tmp_path: Path) -> None:
    columns = {"query": "query_id", "item": "item_id", "label": "label", "time": "event_time", "features": ["f_*"]}
    values = {
        "out": str(tmp_path / "data"),
        "prepare": {"source": {"kind": "items", "columns": columns}},
        "synthetic": {"weeks": 1, "groups_per_week": 5, "n_features": 3},
    }
    job = validate(PrepareJob, values, "test")
    job.run()
    again = configs.load(PrepareJob, str(tmp_path / "data" / "run" / "config.yaml"), [f"out={tmp_path / 'again'}"])
    assert again.replace(out=job.out) == job
    again.run()
    one, two = (open_dataset(str(tmp_path / name)).manifest.hash for name in ("data", "again"))
    assert one == two


def test_prepare_does_not_replace_a_model(trees: str) -> None:
    values = {"out": trees, "prepare": {"inputs": __file__, "source": {"kind": "letor"}}}
    with pytest.raises(InputError, match="the output of train_gbdt is there, which prepare would delete"):
        validate(PrepareJob, values, "test").run()
    assert bundle_hashes([trees])
