"""Distillation end to end on real parts: students, comparison, export, resumption, and errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
import torch
from dataset_changes import add_period, with_renamed_files
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.arrays import Doubles
from ltrscale.batch import QueryGroups
from ltrscale.bundle import load
from ltrscale.config import validate
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.experiments.distill import Distillation, DistillJob
from ltrscale.scoring.score import ScoreJob
from ltrscale.serving.export import ExportJob
from ltrscale.serving.trees import LightGBMFormat
from ltrscale.training.finetune import FinetuneJob
from ltrscale.trees.gbdt import GBDTJob

PERIODS = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
TREES = {"num_trees": 12, "num_leaves": 8, "num_threads": 1}


def splits(data: str, **periods: str) -> dict[str, Any]:
    return {name: {"data": data, "periods": period} for name, period in {**PERIODS, **periods}.items()}


def listwise_teacher(out: Path, data: str, **periods: str) -> str:
    finetune = {
        "network": {"encoder": {"kind": "mlp", "hidden": [16]}},
        "context": {"kind": "rankformer", "layers": 1, "heads": 1, "feedforward": 16},
        "head": {"layers": 1},
        "loss": {"kind": "softmax"},
        "optimizer": {"learning_rate": 3e-3},
        "epochs": 3,
    }
    job = {"out": str(out), "splits": splits(data, **periods), "finetune": finetune}
    validate(FinetuneJob, job, "test").run()
    return str(out)


@pytest.fixture(scope="module")
def teacher(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return listwise_teacher(tmp_path_factory.mktemp("teacher") / "model", synthetic_dataset)


def job(out: Path, data: str, **changes: object) -> DistillJob:
    values = {
        "out": str(out),
        "data": data,
        "splits": {name: {"periods": period} for name, period in PERIODS.items()},
        "students": {
            "softmax": {"kind": "softmax", "trees": TREES},
            "mlp": {"kind": "mlp", "finetune": {"network": {"encoder": {"hidden": [16]}}, "epochs": 2}},
        },
        "direct": {**TREES, "num_trees": 5},
        "evaluate": {"resamples": 100, "ndcg_at": [5]},
        **changes,
    }
    values["splits"]["train"] |= {"labelled_fraction": 0.2}  # type: ignore[index]
    return validate(DistillJob, values, "test")


@pytest.fixture(scope="module")
def distilled(teacher: str, synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("distilled") / "out"
    job(out, synthetic_dataset, teacher=teacher).run()
    return out


def found_in(out: Path) -> Distillation:
    return Distillation.model_validate_json((out / "metrics.json").read_bytes())


def committed_files(out: Path) -> dict[str, float]:
    """All files except run directories, which a second run also writes to."""
    return {str(path): path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "run" not in path.parts}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_period_that_is_added_on_the_way_is_not_read(
    synthetic_dataset: str, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = with_renamed_files(synthetic_dataset, tmp_path / "data")
    read = select(Split(data=(data,), periods=(PERIODS["train"],)), labelled=False).n_groups

    run = ScoreJob.run

    def run_and_add(job: ScoreJob) -> bool:
        ran = run(job)
        add_period(data, "2026-W01b", like="2026-W02")
        return ran

    monkeypatch.setattr(ScoreJob, "run", run_and_add)
    job(tmp_path / "out", data, teacher=teacher, students={"softmax": {"kind": "softmax", "trees": TREES}}).run()
    assert load(str(tmp_path / "out" / "students" / "softmax")).metrics["labelled_groups"] == read


@pytest.mark.slow
def test_all_methods_stand_side_by_side(distilled: Path, teacher: str, synthetic_dataset: str) -> None:
    found = found_in(distilled)
    names = [method.name for method in found.evaluation.methods]
    assert names == ["teacher", "softmax", "mlp", "direct"]
    assert found.evaluation.baseline == "direct"
    whole = select(Split(data=(synthetic_dataset,), periods=("2026-W04",)), labelled=False)
    assert found.agreement.groups == whole.n_groups > found.evaluation.test.groups
    for name in names:
        cost = found.costs[name]
        assert cost.bytes > 0 < cost.documents_per_second
        url = {"teacher": teacher, "direct": str(distilled / "direct")}.get(name)
        bundle = load(url or str(distilled / "students" / name))
        assert (cost.kind, cost.trained_on) == (bundle.kind, bundle.metrics["labelled_groups"])
    assert [*found.agreement.models] == [*found.against_teacher] == names[1:]
    report = (distilled / "report.md").read_text()
    for words in ("| method ", "NDCG@5 - direct [95%]", "tau", "overlap@5", "MB", "docs/s", "NDCG@5 - teacher [95%]"):
        assert words in report
    assert (distilled / "methods.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_students_learn_from_all_groups_and_direct_trees_from_the_labelled(
    distilled: Path, synthetic_dataset: str
) -> None:
    train = Split(data=(synthetic_dataset,), periods=(PERIODS["train"],))
    everything, labelled = (select(train, labelled=labels).n_groups for labels in (False, True))
    for name in ("softmax", "mlp"):
        assert load(str(distilled / "students" / name)).metrics["labelled_groups"] == everything
    assert load(str(distilled / "direct")).metrics["labelled_groups"] == round(0.2 * labelled)


@pytest.mark.slow
def test_the_teacher_s_scores_are_evaluated_as_its_bundle_is(
    distilled: Path, teacher: str, synthetic_dataset: str
) -> None:
    from ltrscale.ranking.metrics import ndcg

    selection = select(Split(data=(synthetic_dataset,), periods=("2026-W04",)), labelled=True)
    groups = QueryGroups.concat(list(iterate(selection, docs_per_batch=100)))
    assert groups.labels_N is not None
    scores_N = load(teacher).scorer()(groups)
    mean = float(ndcg(scores_N, groups.labels_N, groups.offsets_Q1, k=5).nanmean())
    (evaluated, *_) = Evaluation.read(str(distilled / "evaluation")).methods
    assert (evaluated.name, evaluated.kinds) == ("teacher", {"scores"})
    assert evaluated.slices["all"].summaries["ndcg@5"].mean == pytest.approx(mean, abs=1e-6)


@pytest.mark.slow
def test_a_second_run_does_nothing_and_a_change_only_what_follows_from_it(
    distilled: Path, teacher: str, synthetic_dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(distilled, out, copy_function=shutil.copy2)
    for path in out.rglob("manifest.json"):  # inputs are named by where they are
        path.write_text(path.read_text().replace(str(distilled), str(out)))
    before = committed_files(out)
    job(out, synthetic_dataset, teacher=teacher).run()
    assert committed_files(out) == before
    assert "| teacher" in capsys.readouterr().out
    students = {"softmax": {"kind": "softmax", "trees": {**TREES, "num_trees": 13}}}
    job(out, synthetic_dataset, teacher=teacher, students=students).run()
    changed = {name for name, when in committed_files(out).items() if before.get(name) != when}
    tops = {Path(name).relative_to(out).parts[:2] for name in changed}
    expected = {("students", "softmax"), ("export", "softmax"), ("report.md",), ("metrics.json",), ("manifest.json",)}
    assert expected <= tops
    assert not {part[0] for part in tops} & {"scores", "direct"}
    assert ("students", "mlp") not in tops
    assert [method.name for method in found_in(out).evaluation.methods] == ["teacher", "softmax", "direct"]


@pytest.mark.slow
def test_committed_scores_need_no_teacher(distilled: Path, synthetic_dataset: str, tmp_path: Path) -> None:
    scores = scores_of(tmp_path / "gone", distilled, tmp_path)
    students = {"softmax": {"kind": "softmax", "trees": TREES}}
    job(tmp_path / "out", synthetic_dataset, scores=scores, students=students, direct=None).run()
    found, other = found_in(tmp_path / "out"), found_in(distilled)
    (of_teacher, of_student), (as_before, *_) = found.evaluation.methods, other.evaluation.methods
    assert (of_teacher.name, of_student.name, found.evaluation.baseline) == ("teacher", "softmax", "teacher")
    assert [*found.costs] == ["softmax"]
    assert of_teacher.slices["all"].summaries == as_before.slices["all"].summaries
    assert found.agreement.models["softmax"] == other.agreement.models["softmax"]
    assert not storage.exists(str(tmp_path / "out" / "scores"))


def scores_of(teacher: object, distilled: Path, folder: Path) -> str:
    """The committed scores of a distillation, attributed to this bundle."""
    shutil.copytree(distilled / "scores", folder / "scores")
    paths = list(folder.glob(f"scores/period=*/{storage.HIDDEN_MANIFEST}"))
    assert paths
    for path in paths:
        manifest = json.loads(path.read_text())
        manifest["made_by"]["config"]["bundle"] = str(teacher)
        path.write_text(json.dumps(manifest))
    return str(folder / "scores")


@pytest.mark.slow
@pytest.mark.parametrize("taken", ["train", "validation"])
def test_a_teacher_that_has_seen_the_test_period_is_refused(
    taken: str, synthetic_dataset: str, distilled: Path, tmp_path: Path
) -> None:
    seen = {"train": "2026-W01", "validation": "2026-W03", "test": "2026-W02", taken: "2026-W04"}
    teacher = listwise_teacher(tmp_path / "teacher", synthetic_dataset, **seen)
    with pytest.raises(InputError, match=f"{taken} and test both take period '2026-W04'"):
        job(tmp_path / "out", synthetic_dataset, teacher=teacher).run()
    assert not (tmp_path / "out" / "scores").exists()
    scores = scores_of(teacher, distilled, tmp_path)
    with pytest.raises(InputError, match=f"{taken} and test both take period '2026-W04'"):
        job(tmp_path / "out", synthetic_dataset, scores=scores).run()
    student = GBDTJob.model_validate({"out": str(tmp_path / "student"), "splits": splits(synthetic_dataset)})
    train = student.splits.train.replace(scores=scores)
    trees = {"objective": "softmax", **TREES, "num_trees": 1}
    student.replace(splits=student.splits.replace(train=train.model_dump()).model_dump(), gbdt=trees).run()
    evaluate = {"models": {"student": student.out}, "baseline": None, "splits": student.splits.model_dump()}
    with pytest.raises(InputError, match=f"{taken} and test both take period '2026-W04'"):
        validate(EvaluateJob, {"out": str(tmp_path / "report"), "evaluate": evaluate}, "test").run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "name a teacher, or the scores"),
        ({"teacher": "a", "scores": "b"}, "not both"),
        ({"teacher": "a", "evaluate": {"baseline": "gbdt"}}, "evaluate.baseline: leave it out"),
        ({"teacher": "a", "students": {"direct": {"kind": "softmax"}}}, "uses this name for another method"),
        ({"teacher": "a", "students": {"x": {"kind": "mlp", "finetune": {"context": {"kind": "dasalc"}}}}}, "dasalc"),
        ({"teacher": "a", "students": {"x": {"kind": "softmax", "trees": {"temprature": 2}}}}, "did you mean"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        job(tmp_path, "data", **changes)


def test_periods_that_are_not_scored_are_reported_before_anything_is_trained(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"is not scored there; score .* with jobs.score"):
        job(tmp_path / "out", synthetic_dataset, scores=str(tmp_path / "none")).run()
    assert not (tmp_path / "out" / "students").exists()


def by_the_card(folder: Path, names: list[str], features_NF: NDArray[np.float32]) -> Doubles:
    """Scores computed from the exported files with LightGBM, by the steps of the README."""
    columns = json.loads((folder / "features.json").read_text())["columns"]
    matrix = np.full((len(features_NF), len(columns)), np.nan)
    for column in columns:
        for row, value in enumerate(features_NF[:, names.index(column["name"])]):
            if column["kind"] == "numeric":
                matrix[row, column["column"]] = value
            elif value in column["codes"]:
                matrix[row, column["column"]] = column["codes"].index(value)
    booster = lightgbm.Booster(model_file=str(folder / "model.txt"))
    return np.asarray(booster.predict(matrix, raw_score=True))


@pytest.mark.slow
def test_the_steps_on_the_card_of_an_export_give_the_bundles_scores(distilled: Path, synthetic_dataset: str) -> None:
    bundle = load(str(distilled / "students" / "softmax"))
    names = [feature.name for feature in bundle.features]
    groups = next(iterate(select(Split(data=(synthetic_dataset,)), labelled=False), docs_per_batch=600))
    categorical = [i for i, feature in enumerate(bundle.features) if feature.kind == "categorical"]
    assert categorical
    features_NF = groups.features_NF.clone()
    features_NF[::7, categorical] = 123_456  # a code that was never seen
    features_NF[::5] = torch.nan
    strange = QueryGroups(features_NF, groups.offsets_Q1)
    scores_N = by_the_card(distilled / "export" / "softmax", names, features_NF.numpy())
    np.testing.assert_array_equal(scores_N, bundle.scorer()(strange).numpy())
    test = select(Split(data=(synthetic_dataset,), periods=("2026-W04",)), labelled=False)
    parity = json.loads((distilled / "export" / "softmax" / "parity.json").read_text())
    assert (parity["documents"], parity["largest_difference"]) == (test.n_documents, 0.0)


@pytest.mark.slow
def test_an_export_whose_scores_differ_is_not_published(
    distilled: Path, synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = str(distilled / "students" / "softmax")
    wanted = validate(ExportJob, {"out": str(tmp_path / "out"), "bundle": bundle, "data": synthetic_dataset}, "test")
    honest = LightGBMFormat.readers
    with monkeypatch.context() as patch:  # columns in the wrong order
        patch.setattr(LightGBMFormat, "readers", lambda *given: (lambda x_NG: honest(*given)[0](x_NG[:, ::-1]),))
        with pytest.raises(
            InputError, match=r"scores up to .* away .* more than the tolerance of 1e-09; nothing is published"
        ):
            wanted.run()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run"]  # its log
    wanted.run()
    before = committed_files(tmp_path / "out")
    assert {Path(name).name for name in before} >= {"model.txt", "features.json", "parity.json", "README.md"}
    wanted.run()
    assert committed_files(tmp_path / "out") == before


@pytest.mark.slow
def test_networks_are_not_exported(teacher: str, synthetic_dataset: str, tmp_path: Path) -> None:
    wanted = {"out": str(tmp_path / "out"), "bundle": teacher, "data": synthetic_dataset}
    with pytest.raises(InputError, match="a bundle of kind neural, and lightgbm takes trees of lightgbm only"):
        validate(ExportJob, wanted, "test").run()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run"]  # its log
