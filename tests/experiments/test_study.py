"""A small study in this process: what is trained once, what failures cost, and figures by hand."""

import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from written_directories import written_directories

from ltrscale import storage
from ltrscale.bundle import load
from ltrscale.config import load as load_config
from ltrscale.config import validate
from ltrscale.errors import InputError, Stopped
from ltrscale.evaluation.statistics.crossed import crossed_means
from ltrscale.evaluation.studies.measured import Measurement
from ltrscale.evaluation.studies.study import Study
from ltrscale.experiments.methods.single import sharing_encoders
from ltrscale.experiments.records import Spent
from ltrscale.experiments.study import StudyJob
from ltrscale.origin import as_text
from ltrscale.stages.runs import heard_by

CONFIGS = Path(__file__).resolve().parents[2] / "jobs" / "configs" / "results"
NETWORK = {"encoder": {"width": 8, "blocks": 1}}
FINETUNE = {"network": NETWORK, "head_epochs": 1, "epochs": 2, "stream": {"docs_per_batch": 500}}
PRETRAIN = {"method": {"kind": "simclr_rank"}, "network": NETWORK, "epochs": 1, "stream": {"docs_per_batch": 2000}}
TREES = {"num_trees": 8, "num_leaves": 4, "min_data_in_leaf": 5}
METHODS = {
    "gbdt": {"kind": "gbdt", "gbdt": TREES},
    "plain": {"kind": "neural", "finetune": {**FINETUNE, "relevant_only": True}},
    "simclr": {"kind": "neural", "pretrain": PRETRAIN, "finetune": FINETUNE},
    "probed": {"kind": "neural", "pretrain": PRETRAIN, "finetune": {**FINETUNE, "head": {"layers": 1}, "epochs": 0}},
}
SPLITS = ("train", "validation", "test")
GRID = [{"labelled": [8, 30], "draws": 2}]
SPACE = {"finetune.optimizer.learning_rate": {"choices": [1e-3, 1e-2]}}


def study(data: str, out: Path, **changes: Any) -> StudyJob:
    values: dict[str, Any] = {
        "out": str(out),
        "data": data,
        "splits": {
            "train": {"periods": "2026-W01..2026-W02"},
            "validation": {"periods": "2026-W03"},
            "test": {"periods": "2026-W04"},
        },
        "methods": METHODS,
        "grid": GRID,
        "control": "plain",
        "evaluate": {"outliers": {"known": {"f_00": {"at_least": 0.5}}, "gap": None}},
        "workers": 0,
        **changes,
    }
    return validate(StudyJob, values, "test")


def names(written: list[str]) -> set[str]:
    """The trained bundles among the directories written, without what is measured and reported."""
    return {name for name in written if name.endswith(("/model", "/pretrained"))}


@pytest.fixture(scope="module")
def done(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """With one thread, as a task of Ray has: other numbers of threads add in another order."""
    out, threads = tmp_path_factory.mktemp("study") / "out", torch.get_num_threads()
    torch.set_num_threads(1)
    written = written_directories(study(synthetic_dataset, out))
    torch.set_num_threads(threads)
    return out, written


def values_of(out: Path, number: int, draw: int, method: str) -> np.ndarray:
    folder = out / "models" / str(number) / f"draw-{draw}" / method / "measured"
    return pq.read_table(folder / "groups.parquet")["ndcg@5"].to_numpy()


@pytest.mark.slow
def test_all_methods_and_numbers_of_a_draw_share_its_own_pretraining(done: tuple[Path, list[str]]) -> None:
    _, written = done
    expected = {f"models/{n}/draw-{d}/{m}/model" for n in (8, 30) for d in (0, 1) for m in METHODS}
    assert names(written) == {*expected, *(f"pretrained/seed-{d}/simclr/pretrained" for d in (0, 1))}
    assert len(names(written)) == len([name for name in written if name.endswith(("/model", "/pretrained"))])


@pytest.mark.slow
def test_figures_are_those_of_the_stored_metrics(done: tuple[Path, list[str]]) -> None:
    out, _ = done
    found = Study.read(str(out / "summary"))
    outliers = {row["gid"]: row["outlier"] for row in pq.read_table(out / "test" / "groups.parquet").to_pylist()}
    gids = pq.read_table(out / "models/8/draw-0/gbdt/measured/groups.parquet")["gid"].to_pylist()
    rows = {"all": np.ones(len(gids), bool), "outliers": np.array([outliers[gid] for gid in gids])}
    assert 0 < rows["outliers"].sum() < len(gids)
    for number in (8, 30):
        drawn = {m: np.stack([values_of(out, number, d, m) for d in (0, 1)], axis=1) for m in METHODS}
        for method in METHODS:
            point = found.find(method, str(number))
            assert point is not None
            for groups, of in rows.items():
                expected = crossed_means(drawn[method][of][:, :, None])
                estimate = point.estimates[groups]["ndcg@5"]  # type: ignore[index]
                assert estimate.mean == pytest.approx(expected.mean_M[0])
                assert (estimate.draws, estimate.groups, estimate.low) == (2, of.sum(), None)
        versus = found.against("gbdt")["simclr"].estimates[str(number)]
        assert versus.mean == pytest.approx((drawn["simclr"] - drawn["gbdt"]).mean())
    assert set(found.against("plain")) == {"simclr", "probed"}, "trees are no share of pretraining"
    read = {m: [load(f"{out}/models/8/draw-{d}/{m}/model").metrics for d in (0, 1)] for m in METHODS}
    assert [metrics["labelled_groups"] for metrics in read["plain"]] == [8, 8]
    others = np.mean([metrics["labelled_groups"] for metrics in read["gbdt"]])
    assert found.trained_on["8"] == others > 8, "groups without a relevant document come along"
    assert f"8 ({others:,.0f} in all)" in (out / "summary" / "report.md").read_text()
    assert found.costs["simclr"].pretraining_minutes is not None
    assert all(cost.scored_documents_per_s for cost in found.costs.values())


@pytest.mark.slow
def test_the_report_has_the_tables_for_which_there_are_methods(done: tuple[Path, list[str]]) -> None:
    out, _ = done
    text = (out / "summary" / "report.md").read_text()
    for words in (
        "fewer than 5 draws cannot judge",
        "Pretraining's own share",
        "HOU24, table 1",
        "linear probing: probed",
        "Percent of gbdt",
        "Outlier-NDCG@5",
        "Training groups with a relevant document: 8 (",
        "all labelled groups of the validation split choose",
    ):
        assert words in text, words
    assert "HOU24, tables 14 and 15" not in text, "there is one augmentation only"
    for picture in ("curves.png", "differences.png"):
        assert picture in text
        assert (out / "summary" / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_of_ray_find_the_figures_of_none(
    synthetic_dataset: str, done: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """All but the cost."""
    here, _ = done
    study(synthetic_dataset, tmp_path / "out", workers={"number": 2, "cpus": 0.5}).run()
    serial, parallel = (Study.read(str(out / "summary")) for out in (here, tmp_path / "out"))
    assert serial.models == serial.planned == 2 * 2 * len(METHODS)
    assert parallel.model_dump(exclude={"costs"}) == serial.model_dump(exclude={"costs"})
    assert set(parallel.costs) == set(serial.costs) == set(METHODS)


@pytest.mark.slow
def test_a_second_run_trains_nothing_and_a_larger_one_only_what_is_new(
    synthetic_dataset: str, done: tuple[Path, list[str]]
) -> None:
    out, _ = done
    assert written_directories(study(synthetic_dataset, out)) == []
    time_before = Spent.read(str(out / "models/8/draw-0/simclr"))
    grid = [*GRID, {"labelled": [8], "draws": 3, "methods": ["gbdt"]}]
    more = written_directories(study(synthetic_dataset, out, grid=grid))
    assert more == ["models/8/draw-2/gbdt/model", "models/8/draw-2/gbdt/measured", "summary"]
    assert Spent.read(str(out / "models/8/draw-0/simclr")) == time_before
    (out / "models/30/draw-1/plain/measured" / storage.MANIFEST).unlink()  # as if killed before it was there
    again, *rest = written_directories(study(synthetic_dataset, out, grid=grid))
    assert again == "models/30/draw-1/plain/measured", "trained nothing again"
    assert rest in (["summary"], [])  # the summary stays if the measured time, too, is the same
    switched = study(synthetic_dataset, out, grid=grid, evaluate={"baseline": "plain"})
    assert written_directories(switched) == ["test", "summary"]


def test_a_model_is_measured_again_where_a_metric_changes_that_keeps_its_name(synthetic_dataset: str) -> None:
    splits = {name: {"data": synthetic_dataset, "periods": f"2026-W0{i}"} for i, name in enumerate(SPLITS, 1)}

    def identity(**evaluate: Any) -> str:
        values = {"out": "x", "bundle": "y", "splits": splits, "evaluate": evaluate, "threads": 1}
        return as_text(validate(Measurement, values, "test").identity())

    changes: list[dict[str, Any]] = [{}, {"grades": 2}, {"gains": [0, 1, 10]}, {"gains": [0, 1, 9]}]
    assert len({identity(**change) for change in changes}) == len(changes)
    assert identity() == identity(grades=4, gains=None)
    assert "grades" not in identity(), "measurements from before these keys were recorded stay up to date"


@pytest.mark.slow
def test_a_moved_study_trains_nothing_again(
    done: tuple[Path, list[str]], synthetic_dataset: str, tmp_path: Path
) -> None:
    first, _ = done
    methods = {**METHODS, "tuned": {"kind": "tuned", "of": "simclr", "space": SPACE, "trials": 2}}
    changes: dict[str, Any] = {"methods": methods, "grid": [{"labelled": [8], "draws": 1}]}
    shutil.copytree(first, tmp_path / "here")
    shutil.rmtree(tmp_path / "here" / "summary")
    study(synthetic_dataset, tmp_path / "here", **changes).run()
    spent = Spent.read(str(tmp_path / "here/models/8/draw-0/tuned"))
    (tmp_path / "here").rename(tmp_path / "there")
    shutil.copytree(synthetic_dataset, tmp_path / "data")
    assert written_directories(study(synthetic_dataset, tmp_path / "there", **changes)) == []
    assert written_directories(study(str(tmp_path / "data"), tmp_path / "there", **changes)) == []
    assert Spent.read(str(tmp_path / "there/models/8/draw-0/tuned")) == spent


@pytest.mark.slow
def test_the_time_of_a_search_adds_up_over_stops(synthetic_dataset: str, tmp_path: Path) -> None:
    plain = {"kind": "neural", "finetune": {**FINETUNE, "epochs": 10}}
    tuned = {"kind": "tuned", "of": "plain", "space": SPACE, "trials": 2}
    config = study(
        synthetic_dataset,
        tmp_path / "out",
        methods={"plain": plain, "tuned": tuned},
        grid=[{"labelled": [30], "draws": 1, "methods": ["tuned"]}],
        control=None,
        evaluate={"baseline": None},
    )
    folder, heard = str(tmp_path / "out/models/30/draw-0/tuned"), list[int]()

    def hear(record: Mapping[str, object]) -> None:
        if "step" in record and isinstance(documents := record["documents"], int):
            heard.append(documents)
            if len(heard) in (5, 15):
                signal.raise_signal(signal.SIGTERM)

    seconds = 0.0
    with heard_by(hear):
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(Stopped):
                config.run()
            spent = Spent.read(folder)
            assert spent is not None
            assert not spent.done
            assert spent.documents == sum(heard)
            assert seconds < spent.seconds <= seconds + time.monotonic() - start
            seconds = spent.seconds
        config.run()
    spent = Spent.read(folder)
    assert spent is not None
    assert spent.done
    assert spent.documents == sum(heard)
    assert spent.seconds > seconds


@pytest.mark.slow
def test_a_failing_method_is_named_and_the_others_are_reported(synthetic_dataset: str, tmp_path: Path) -> None:
    wild = {**FINETUNE, "optimizer": {"kind": "sgd", "learning_rate": 1e30}}
    methods = {
        "gbdt": METHODS["gbdt"],
        "wild": {"kind": "neural", "finetune": wild},
        "plain": METHODS["plain"],
        "mean": {"kind": "combined", "parts": ["plain", "wild"], "combine": {"how": "mean"}},
    }
    config = study(synthetic_dataset, tmp_path / "out", methods=methods, grid=[{"labelled": [30], "draws": 1}])
    few = config.splits.validation.replace(labelled_groups=20)
    config = config.replace(splits=config.splits.replace(validation=few.model_dump()).model_dump())
    with pytest.raises(InputError, match=r"2 tasks failed, the first is models/30/draw-0/wild .*NaN"):
        config.run()
    found = Study.read(str(tmp_path / "out" / "summary"))
    assert {point.method for point in found.points} == {"gbdt", "plain"}
    assert set(found.failed) == {f"models/30/draw-0/{name}" for name in ("wild", "mean")}
    assert "needs models/30/draw-0/wild" in found.failed["models/30/draw-0/mean"]
    text = (tmp_path / "out" / "summary" / "report.md").read_text()
    assert "2 of 4 models are measured" in text
    assert "a score is NaN, training has diverged" in text
    assert "validation labels are a sample (labelled_groups: 20), drawn anew with those of training" in text


def test_validation_labels_shrink_with_the_training_labels_if_asked(synthetic_dataset: str, tmp_path: Path) -> None:
    config = study(synthetic_dataset, tmp_path, validation_share=0.5)
    sized = config.sized(30)
    assert (sized.train.relevant_groups, sized.validation.relevant_groups) == (30, 15)
    share = study(synthetic_dataset, tmp_path, validation_share=0.5, grid=[{"labelled": [0.1]}]).sized(0.1)
    assert (share.train.labelled_fraction, share.validation.labelled_fraction) == (0.1, 0.05)
    full = study(synthetic_dataset, tmp_path, counts="labelled").sized(30)
    assert (full.train.labelled_groups, full.validation.size) == (30, {})


def test_too_many_labels_are_refused_before_anything_is_trained(synthetic_dataset: str, tmp_path: Path) -> None:
    config = study(synthetic_dataset, tmp_path / "out", grid=[{"labelled": [8, 100_000]}])
    with pytest.raises(InputError, match="relevant_groups is 100000; lower it"):
        config.run()
    assert not (tmp_path / "out" / "models").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": [{"labelled": [8, 0.5]}]}, "labelled mixes counts with shares"),
        ({"grid": [{"labelled": [8], "methods": ["gbtd"]}]}, "'gbtd' is not among the methods"),
        ({"control": "none"}, "control 'none' is not among the methods"),
        ({"control": {"simclr": "none"}}, "control.simclr 'none' is not among the methods of the grid, gbdt, plain,"),
        ({"control": {"simlcr": "plain"}}, "control: 'simlcr' is not among the methods gbdt, "),
        (
            {"grid": [{"labelled": [8], "methods": ["gbdt", "simclr"]}], "control": {"simclr": "plain"}},
            "control.simclr 'plain' is not among the methods of the grid, gbdt, simclr; or set null",
        ),
        ({"control": {"gbdt": "plain"}}, "control.gbdt: 'gbdt' is not pretrained, so it has no control"),
        ({"control": {"simclr": "probed"}}, "control 'probed' of 'simclr' is pretrained; name a method that is not"),
        ({"control": "simclr"}, "control 'simclr' of 'simclr' is pretrained; name a method that is not"),
        ({"evaluate": {"baseline": "trees"}}, "evaluate.baseline 'trees' is not among the methods"),
        (
            {"grid": [{"labelled": [8], "methods": ["simclr"]}], "evaluate": {"baseline": "gbdt"}, "control": None},
            "evaluate.baseline 'gbdt' is not among the methods of the grid, simclr; or set null",
        ),
        ({"grid": [{"labelled": [0]}]}, "greater than or equal to 1"),
    ],
)
def test_a_study_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        study("nowhere", Path("nowhere"), **changes)


def test_a_control_is_that_of_all_pretrained_methods_or_of_those_that_are_named() -> None:
    def controls(control: Any) -> dict[str, str]:
        return study("nowhere", Path("nowhere"), control=control).controls

    assert controls("plain") == {"simclr": "plain", "probed": "plain"}
    assert controls({"probed": "plain"}) == {"probed": "plain"}
    assert controls(None) == controls({}) == {}
    part = [{"labelled": [8], "methods": ["gbdt", "plain", "simclr"]}]  # a smaller grid needs no other controls
    both = study("nowhere", Path("nowhere"), control={"simclr": "plain", "probed": "plain"}, grid=part)
    assert both.controls == {"simclr": "plain"}


def test_controls_are_set_and_laid_over_on_the_command_line() -> None:
    def controls(*overrides: str, over: str = "") -> dict[str, str]:
        names = ["study-news.yaml", *filter(None, [over])]
        return load_config(StudyJob, [str(CONFIGS / name) for name in names], overrides).controls

    of_news = controls()
    assert {of_news["simsiam"], of_news["heads"], of_news["simclr_rank_student"]} == {
        "scratch",
        "scratch_heads",
        "scratch_student",
    }
    assert controls("control=null") == {}
    assert controls("control=scratch") == dict.fromkeys([*of_news, "combined"], "scratch")
    assert controls("control.heads=null") == {name: own for name, own in of_news.items() if name != "heads"}
    assert controls("control.heads=scratch") == {**of_news, "heads": "scratch"}
    assert set(controls(over="study-news-finetuning.yaml").values()) == {"scratch_rel_256_3e4"}


def test_a_method_with_a_search_is_tuned_and_so_is_the_mean_of_its_runs() -> None:
    tuned = {"kind": "tuned", "of": "gbdt", "space": {"gbdt.num_leaves": {"choices": [4, 8]}}, "trials": 2}
    methods = {**METHODS, "searched": tuned, "several": {"kind": "ensemble", "of": "searched"}}
    made = study("nowhere", Path("nowhere"), methods=methods).methods
    found = {name: made[name].about(made) for name in ("gbdt", "searched", "several")}
    assert [each.family for each in found.values()] == ["trees"] * 3
    assert [each.tuned for each in found.values()] == [False, True, True]


def test_what_comes_from_pretraining_counts_as_pretrained() -> None:
    """By its teacher, too; trees that learn from networks are neither trees nor networks alone."""
    trees = {"kind": "regression", "trees": TREES}
    taught = {"simclr": {}, "plain": {}, "gbdt": {"student_as": "plain"}}
    students = {f"{of}_student": {"kind": "self_trained", "of": of, **more} for of, more in taught.items()}
    methods = {
        **METHODS,
        **students,
        "plain_of_simclr": {"kind": "self_trained", "of": "simclr", "student_as": "plain"},
        "simclr_of_plain": {"kind": "self_trained", "of": "plain", "student_as": "simclr"},
        "trees_of_trees": {"kind": "self_trained", "of": "gbdt", "runs": 1, "student": trees},
        "trees_of_plain": {"kind": "self_trained", "of": "plain", "student_as": "gbdt", "student": trees},
        "trees_of_simclr": {"kind": "self_trained", "of": "simclr", "student_as": "gbdt", "student": trees},
        "trees_of_several": {"kind": "self_trained", "of": "several", "student_as": "gbdt", "student": trees},
        "several": {"kind": "ensemble", "of": "simclr"},
        "on": {"kind": "neural", "starts_from": "simclr", "finetune": FINETUNE},
        "stack": {"kind": "stack", "members": ["gbdt", "simclr"]},
    }
    methods["gbdt_student"]["runs"] = 1
    made = study("nowhere", Path("nowhere"), methods=methods).methods
    found = {name: method.about(made).family for name, method in made.items()}
    assert found == {
        "gbdt": "trees",
        "plain": "not pretrained",
        "simclr": "pretrained",
        "probed": "pretrained",
        "simclr_student": "pretrained",
        "plain_student": "not pretrained",
        "gbdt_student": "not pretrained",
        "plain_of_simclr": "pretrained",
        "simclr_of_plain": "pretrained",
        "trees_of_trees": "trees",
        "trees_of_plain": "mixed",
        "trees_of_simclr": "mixed",
        "trees_of_several": "mixed",
        "several": "pretrained",
        "on": "pretrained",
        "stack": "mixed",
    }


def test_parts_of_the_grid_join_and_methods_come_after_those_that_they_need() -> None:
    methods = {
        "mean": {"kind": "combined", "parts": ["plain", "simclr"], "combine": {"how": "mean"}},
        **{name: METHODS[name] for name in ("gbdt", "plain", "simclr", "probed")},
    }
    grid = [
        {"labelled": [8, 30], "draws": 2, "methods": ["gbdt"]},
        {"labelled": [30], "draws": 3, "pretrainings": 2, "methods": ["gbdt", "mean"]},
    ]
    cells = study("nowhere", Path("nowhere"), methods=methods, grid=grid, control=None).cells
    crossed = {"simclr": 2, "mean": 2, "gbdt": 1, "plain": 1}
    assert Counter(cell.method for cell in cells if cell.labelled == 30) == {m: 3 * n for m, n in crossed.items()}
    assert len({cell.folder for cell in cells}) == len(cells) == 2 + 3 * 6
    order = [cell.method for cell in cells if (cell.draw, cell.pretraining or 0, cell.labelled) == (0, 0, 30)]
    assert order.index("mean") > max(order.index("plain"), order.index("simclr"))
    assert [cell.draw for cell in cells] == sorted(cell.draw for cell in cells), "draw after draw"


@pytest.mark.slow
def test_pretrainings_that_are_crossed_with_the_draws_are_trained_once_each(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    methods = {
        **METHODS,
        "stack": {"kind": "stack", "members": ["gbdt", "simclr"], "stack": {"folds": 2, "gbdt": TREES}},
    }
    del methods["probed"]
    grid = [{"labelled": [30], "draws": 2, "pretrainings": 2}]
    written = names(written_directories(study(synthetic_dataset, tmp_path / "out", methods=methods, grid=grid)))
    models = {name for name in written if "/folds/" not in name}
    assert models == {
        *(f"pretrained/seed-{p}/simclr/pretrained" for p in (0, 1)),
        *(f"models/30/draw-{d}/{m}/model" for d in (0, 1) for m in ("gbdt", "plain")),
        *(f"models/30/draw-{d}/pretraining-{p}/{m}/model" for d in (0, 1) for p in (0, 1) for m in ("simclr", "stack")),
    }
    found = Study.read(str(tmp_path / "out" / "summary"))
    (share,) = found.against("plain")["simclr"].estimates.values()
    assert (share.draws, share.pretrainings) == (2, 2)
    assert "crossed with 2 pretrainings" in (tmp_path / "out" / "summary" / "report.md").read_text()


def test_a_method_has_as_many_pretrainings_in_all_parts_of_the_grid() -> None:
    grid = [{"labelled": [8, 30], "draws": 2}, {"labelled": [30], "draws": 3, "pretrainings": 3, "methods": ["simclr"]}]
    with pytest.raises(InputError, match=r"simclr at 30 has pretrainings empty in one part and 3 in another"):
        study("nowhere", Path("nowhere"), grid=grid)
    grid[1]["methods"] = ["plain"]  # trees and networks from scratch have none to cross
    study("nowhere", Path("nowhere"), grid=grid)


def test_methods_with_equal_pretraining_share_it() -> None:
    config = study("nowhere", Path("nowhere"))
    shared = json.loads(json.dumps({n: m.model_dump(mode="json") for n, m in sharing_encoders(config.methods).items()}))
    assert shared["probed"]["pretrained_as"] == "simclr"
    assert shared["probed"]["pretrain"] is None
    assert shared["probed"]["finetune"] == config.methods["probed"].model_dump(mode="json")["finetune"]
    assert shared["simclr"]["pretrain"] is not None
