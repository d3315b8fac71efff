"""Searches over jobs: spaces that fit the job, output files, and a killed driver."""

import csv
import io
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from dataset_changes import add_period, with_renamed_files

from ltrscale import bundle, storage
from ltrscale import config as configs
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.selection import select
from ltrscale.errors import InputError, Stopped
from ltrscale.stages.runs import heard_by
from ltrscale.training.finetune import FinetuneJob
from ltrscale.training.pretrain import PretrainJob
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.tuning.history import History, Result, Trial, _Curve
from ltrscale.tuning.searched import PretrainSearch, check_space, given_params, with_params
from ltrscale.tuning.space import AshaConfig, Dimension
from ltrscale.tuning.tune import TuneJob, _run_trial

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150
LEAVES = {"gbdt.num_leaves": {"low": 2, "high": 32, "log": True, "integer": True}}
GBDT = {"kind": "gbdt", "gbdt": {"num_trees": 8, "num_threads": 1}}
SMALL_NETWORK = {"encoder": {"width": 8, "blocks": 1}}


def splits(data: str) -> dict[str, Any]:
    weeks = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
    return {name: {"data": data, "periods": period} for name, period in weeks.items()}


def search(space: Mapping[str, Any], *, data: str = "nowhere", out: str = "nowhere", **values: Any) -> TuneJob:
    job = {**values.pop("job", GBDT), "splits": splits(data)}
    return validate(TuneJob, {"out": out, "job": job, "space": space, **values}, "test")


def pretraining(**values: Any) -> dict[str, Any]:
    pretrain = {
        "method": {"kind": "simclr_rank", "temperature": 0.1},
        "network": SMALL_NETWORK,
        "epochs": 3,
        "stream": {"docs_per_batch": 2000, "streams": 2},
        **values,
    }
    return {"kind": "pretrain", "pretrain": pretrain, "finetune": {"head_epochs": 1, "epochs": 1}}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"gbdt.num_leavs": {"low": 2, "high": 9, "integer": True}}, "did you mean 'gbdt.num_leaves'"),
        ({"gbtd.num_leaves": {"choices": [3]}}, "did you mean 'gbdt'"),
        ({"gbdt.num_leaves": {"low": 1, "high": 9, "integer": True}}, "1 does not fit: .*greater than or equal to 2"),
        ({"gbdt.num_leaves": {"low": 2, "high": 9}}, "takes whole numbers only; add integer: true"),
        ({"gbdt.num_leaves": {"low": 2, "high": 9.5}}, "takes whole numbers only; add integer: true"),
        ({"gbdt.num_leaves": {"low": 2, "high": 32}}, "takes whole numbers only; add integer: true"),
        ({"gbdt.feature_fraction": {"low": 0.5, "high": 1.5}}, "1.5 does not fit"),
        ({"gbdt.kind": {"choices": ["lightgbm", "lightgmb"]}}, "lightgmb does not fit"),
        ({"gbdt.num_leaves.deep": {"choices": [3]}}, "check the dots|does not fit"),
        ({"gbdt.stop_on": {"choices": [3, 5]}}, "changes what trials are compared by"),
        ({"splits.validation.periods": {"choices": ["2026-W04"]}}, "changes what trials are compared by"),
        (
            {"gbdt.num_leaves": {"choices": [3, 4], "when": {"gbdt.kind": "xgboost"}}},
            r"when: never holds \(gbdt.kind xgboost\)",
        ),
        (
            {
                "gbdt.num_leaves": {"choices": [5, 7]},
                "gbdt.min_data_in_leaf": {"choices": [1, 2], "when": {"gbdt.num_leaves": 7}},
                "gbdt.learning_rate": {
                    "choices": [0.1, 0.2],
                    "when": {"gbdt.num_leaves": 5, "gbdt.min_data_in_leaf": 2},
                },
            },
            r"space\.gbdt\.learning_rate\.when: never holds \(gbdt.num_leaves 5, gbdt.min_data_in_leaf 2\)",
        ),
        (
            {
                "gbdt.kind": {"choices": ["lightgbm", "xgboost"]},
                "gbdt.num_leaves": {"low": 2, "high": 9, "integer": True},
            },
            "with xgboost another key of the space has no meaning; give that key a when",
        ),
    ],
)
def test_a_space_that_does_not_fit_is_reported_in_one_line(space: dict[str, Any], message: str) -> None:
    config = search(space)
    with pytest.raises(InputError, match=message) as error:
        check_space(config.job, config.space)
    assert str(error.value).startswith("space.")


def test_nothing_is_written_before_the_space_is_found_to_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean"):
        search({"gbdt.num_leavs": {"choices": [3]}}, out=str(tmp_path / "out")).run()
    assert not (tmp_path / "out").exists()


METHODS = {
    "pretrain.method": {"choices": [{"kind": "simclr_rank"}, {"kind": "simsiam"}]},
    "pretrain.method.temperature": {
        "low": 0.01,
        "high": 1,
        "log": True,
        "when": {"pretrain.method.kind": "simclr_rank"},
    },
    "pretrain.optimizer.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
}


def test_a_key_with_when_counts_only_where_that_holds() -> None:
    config = search(METHODS, job=pretraining())
    check_space(config.job, config.space)
    params = {"pretrain.method.temperature": 0.5, "pretrain.optimizer.learning_rate": 1e-3}
    ranked, used = with_params(config.job, config.space, {"pretrain.method": {"kind": "simclr_rank"}, **params})
    siam, used_by_siam = with_params(config.job, config.space, {"pretrain.method": {"kind": "simsiam"}, **params})
    assert isinstance(ranked, PretrainSearch)
    assert isinstance(siam, PretrainSearch)
    assert ranked.pretrain.method.model_dump()["temperature"] == 0.5
    assert siam.pretrain.method.kind == "simsiam"
    assert siam.pretrain.optimizer.learning_rate == 1e-3
    assert used - used_by_siam == {"pretrain.method.temperature"}
    assert config.job.result() != ranked.result()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_chain_of_conditions_holds_in_every_order_of_its_keys(order: Sequence[int]) -> None:
    chain = [
        ("gbdt.num_leaves", {"choices": [5, 7]}),
        ("gbdt.min_data_in_leaf", {"choices": [1, 2], "when": {"gbdt.num_leaves": 7}}),
        ("gbdt.learning_rate", {"choices": [0.1, 0.2], "when": {"gbdt.min_data_in_leaf": 1}}),
    ]
    config = search(dict(chain[place] for place in order))
    check_space(config.job, config.space)
    params = {"gbdt.num_leaves": 7, "gbdt.min_data_in_leaf": 1, "gbdt.learning_rate": 0.2}
    assert with_params(config.job, config.space, params).used == params.keys()
    assert with_params(config.job, config.space, params | {"gbdt.num_leaves": 5}).used == {"gbdt.num_leaves"}


def test_a_condition_may_be_a_value_of_a_range() -> None:
    leaves = {"gbdt.num_leaves": {"low": 2, "high": 32, "integer": True}}
    for value in (7, 33):
        config = search({**leaves, "gbdt.learning_rate": {"choices": [0.1, 0.2], "when": {"gbdt.num_leaves": value}}})
        with nullcontext() if value == 7 else pytest.raises(InputError, match=r"never holds \(gbdt.num_leaves 33\)"):
            check_space(config.job, config.space)


def test_conditions_that_never_hold_are_found_in_few_tries() -> None:
    """Their number grows with the square of the keys, where every order of the keys would take years."""
    when = {"gbdt.objective": "lambdrank"}
    space = {f"gbdt.key_{n}": {"choices": [1, 2], "when": when} for n in range(12)}
    config = search({**space, "gbdt.objective": {"choices": ["lambdarank", "rank_xendcg"]}})
    with pytest.raises(InputError, match=r"when: never holds \(gbdt.objective lambdrank\)"):
        check_space(config.job, config.space)


def test_a_chain_of_conditions_is_followed() -> None:
    space = {
        "finetune.context": {"choices": [None, {"kind": "rankformer"}]},
        "finetune.list_loss": {"choices": [None, {"alpha": 1}], "when": {"finetune.context.kind": "rankformer"}},
        "finetune.list_loss.alpha": {"low": 0.1, "high": 1, "when": {"finetune.list_loss.alpha": 1}},
    }
    config = search(space, job={"kind": "finetune"})
    check_space(config.job, config.space)


def test_the_settings_as_given_are_a_trial_of_the_space_where_it_contains_them() -> None:
    config = search(METHODS, job=pretraining(optimizer={"learning_rate": 1e-3}))
    params = given_params(config.job, config.space)
    assert params == {
        "pretrain.method": {"kind": "simclr_rank"},
        "pretrain.method.temperature": 0.1,
        "pretrain.optimizer.learning_rate": 1e-3,
    }
    assert with_params(config.job, config.space, params).job.result() == config.job.result()
    siam = search(METHODS, job=pretraining(method={"kind": "simsiam"}, optimizer={"learning_rate": 1e-3}))
    assert given_params(siam.job, siam.space) is not None  # the temperature does not matter
    assert (
        given_params((job := search(METHODS, job=pretraining(optimizer={"learning_rate": 1}))).job, job.space) is None
    )


def test_asha_over_pretraining_needs_encoders_along_the_way() -> None:
    with pytest.raises(InputError, match="keep_every to some epochs"):
        search(METHODS, job=pretraining(), asha={"grace": 1})
    search(METHODS, job=pretraining(keep_every=1), asha={"grace": 1})


def test_a_listener_receives_the_reports_of_its_own_thread(synthetic_dataset: str, tmp_path: Path) -> None:
    heard: list[Mapping[str, object]] = []
    job = search(LEAVES, data=synthetic_dataset).job
    with heard_by(heard.append):
        GBDTJob(out=str(tmp_path / "b"), splits=job.splits, gbdt={"num_trees": 3}).run()  # type: ignore[arg-type]
    GBDTJob(out=str(tmp_path / "c"), splits=job.splits, gbdt={"num_trees": 3}).run()  # type: ignore[arg-type]
    assert heard[0] == {}, "a stage begins to work"
    assert [record["tree"] for record in heard[1:]] == [1, 2, 3]


def test_a_listener_around_a_search_hears_the_trials_too(synthetic_dataset: str, tmp_path: Path) -> None:
    heard: list[Mapping[str, object]] = []
    steps: list[int] = []
    with heard_by(heard.append):
        search(LEAVES, data=synthetic_dataset).job.run(str(tmp_path), lambda step, _: steps.append(step))
    assert [record["tree"] for record in heard if "tree" in record] == steps
    assert len(steps) > 1


def test_curves_of_trials_count_trees_and_epochs_and_hold_the_best_so_far(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    finetune = {
        "kind": "finetune",
        "finetune": {"network": SMALL_NETWORK, "epochs": 3, "stream": {"docs_per_batch": 500}},
    }
    for name, values in (("gbdt", GBDT), ("finetune", finetune)):
        points: list[tuple[int, float]] = []
        job = search(LEAVES, data=synthetic_dataset, job=values).job
        value = job.run(str(tmp_path / name), lambda step, value, points=points: points.append((step, value)))
        steps, values_ = zip(*points, strict=True)
        assert steps == tuple(range(1, len(steps) + 1))
        assert len(steps) >= 3
        assert list(values_) == sorted(values_)
        assert value == pytest.approx(values_[-1])


@pytest.mark.parametrize(("kind", "record"), [("gbdt", {"tree": 3}), ("finetune", {"epoch": 3, "phase": "full"})])
def test_a_record_without_the_metric_is_no_step(kind: str, record: dict[str, Any]) -> None:
    """Such as one of trees without validation groups, which are counted only."""
    job = search(LEAVES, job={"kind": kind}).job
    assert job.step_of(record) is None
    assert job.step_of({**record, job.metric: 0.5}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("cut", [4, 6])
def test_a_trial_that_resumes_has_the_curve_of_one_that_was_never_cut(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """Its best epoch lies before the cut; ASHA hears each of its steps once, with the same value."""
    finetune = {
        "network": SMALL_NETWORK,
        "epochs": 6,
        "patience": 6,
        "optimizer": {"learning_rate": 0.3},  # diverges, so that an early epoch is the best
        "stream": {"docs_per_batch": 500},
        "checkpoint_minutes": 1e-9,
    }
    job = search(LEAVES, data=synthetic_dataset, job={"kind": "finetune", "finetune": finetune}).job
    heard: list[Mapping[str, float]] = []
    monkeypatch.setattr("ray.tune.report", heard.append)

    def run(name: str, *, until: int = 99) -> tuple[list[tuple[int, float]], list[Mapping[str, float]]]:
        curve = _Curve(AshaConfig(grace=1, reduction=2))

        def report(step: int, value: float) -> None:
            curve(step, value)
            if step == until:
                raise Stopped("the process ends")

        heard.clear()
        with suppress(Stopped):
            curve.points.append((99, job.run(str(tmp_path / name), report)))
        return curve.points, [*heard]

    unbroken = run("unbroken")
    values = [value for _, value in unbroken[0]]
    assert values.index(max(values)) + 1 < cut
    run("resumed", until=cut)
    assert run("resumed") == unbroken
    assert run("resumed") == unbroken, "nor does one whose stage had ended lose its curve"


@pytest.mark.slow
def test_encoders_kept_along_the_way_change_nothing_and_are_judged_again_after_a_cut(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    config = search(METHODS, data=synthetic_dataset, job=pretraining(keep_every=1))
    space, trial, points = config.space, str(tmp_path / "trial"), []

    def report(step: int, value: float) -> None:
        points.append((step, value))

    value = _run_trial(config.job, space, {}, trial, report)
    assert [step for step, _ in points] == [1, 2]
    assert isinstance(config.job, PretrainSearch)
    plain = config.job.pretrain.replace(keep_every=None)
    PretrainJob(out=str(tmp_path / "plain"), train=config.job.splits.train, pretrain=plain).run()
    plain_bytes = (tmp_path / "plain" / "weights.safetensors").read_bytes()
    assert (tmp_path / "trial" / "pretrained" / "weights.safetensors").read_bytes() == plain_bytes
    kept = tmp_path / "trial" / "pretrained" / "epochs" / "00002"
    assert bundle.load(str(kept)).kind == "pretrained"
    assert (kept / "weights.safetensors").read_bytes() != plain_bytes
    (tmp_path / "trial" / "finetuned" / storage.MANIFEST).unlink()  # cut off at the very end
    before = list(points)
    points.clear()
    assert _run_trial(config.job, space, {}, trial, report) == value
    assert points == before


@pytest.fixture
def ended(synthetic_dataset: str, tmp_path: Path) -> TuneJob:
    """A finished search, made by hand."""
    config = search(
        {**LEAVES, "gbdt.learning_rate": {"low": 0.1, "high": 0.5}},
        data=synthetic_dataset,
        out=str(tmp_path / "out"),
        trials=5,
    )
    history = History(config.out)
    for number, (leaves, value) in enumerate([(31, 0.3), (4, 0.5), (9, None), (30, 0.4), (12, 0.45)]):
        history.begin(Trial(number=number, params={"gbdt.num_leaves": leaves, "gbdt.learning_rate": 1 / 3}))
        state = "failed" if value is None else "stopped" if number == 4 else "complete"
        history.end(number, Result(state=state, value=value, reason="too many | leaves" if value is None else None))
    return config


def test_a_search_leaves_a_table_a_report_pictures_and_the_best_settings(ended: TuneJob) -> None:
    ended._write_found()
    out = Path(ended.out)
    report = (out / "report.md").read_text()
    assert "5 trials: 3 complete, 1 stopped, 1 failed" in report
    assert "Trial 1: 0.5000; the settings as given (trial 0) have 0.3000, a difference of +0.2000." in report
    assert "- trial 2: too many \\| leaves" in report
    with (out / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[1]["validation_ndcg@5"] == "0.5"
    assert rows[1]["gbdt.num_leaves"] == "4"
    assert float(rows[1]["gbdt.learning_rate"]) == 1 / 3
    for name in ("history.png", "parallel.png", "importances.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert name in report
    best = configs.load(GBDTJob, str(out / "best.yaml"))
    assert best.gbdt.model_dump()["num_leaves"] == 4


def test_a_fresh_search_leaves_nothing_that_the_one_before_wrote(ended: TuneJob) -> None:
    History(ended.out).open(ended.history_identity())
    ended._write_found()
    assert "optuna.journal" in {*storage.below(ended.out)}
    ended.replace(fresh=True).clear()
    assert {*storage.below(ended.out)} == set()


def test_a_search_of_another_space_goes_on_with_the_ended_trials_that_lie_there(
    ended: TuneJob, caplog: pytest.LogCaptureFixture
) -> None:
    History(ended.out).open(ended.history_identity())
    space = {**ended.space, "gbdt.num_leaves": validate(Dimension, {"choices": [4, 9, 30, 60]}, "test")}
    with caplog.at_level(logging.INFO, "ltrscale"):
        ended.replace(space=space, trials=4).run()  # four have ended, so that nothing is left to run
    assert "the space has changed: 4 of the 5 trials go on, 1 lie outside" in caplog.text
    report = (Path(ended.out) / "report.md").read_text()
    assert "4 trials: 3 complete, 1 failed" in report
    assert "1 more lie outside the space, which has changed." in report
    assert "Trial 1: 0.5000" in report
    with pytest.raises(InputError, match=r"differs in space\.gbdt\.num_trees"):
        ended.replace(space={**space, "gbdt.num_trees": ended.space["gbdt.num_leaves"]}).run()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of the dashboard's libraries
def test_optuna_and_its_dashboard_open_the_trials_of_a_search(ended: TuneJob) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    ended._write_found()
    place = JournalStorage(JournalFileBackend(str(Path(ended.out) / "optuna.journal")))
    (name,) = optuna.get_all_study_names(place)
    study = optuna.load_study(study_name=name, storage=place)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "PRUNED"]
    assert study.best_trial.number == 1
    assert study.best_trial.params == {"gbdt.num_leaves": 4, "gbdt.learning_rate": 1 / 3}
    assert study.user_attrs == {"metric": "validation_ndcg@5"}

    dashboard = pytest.importorskip("optuna_dashboard", reason="the extra `dashboard` is not installed")
    answer: list[str] = []
    asked: dict[str, object] = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": "/api/studies",
        "SERVER_NAME": "here",
        "SERVER_PORT": "80",
    }
    asked |= {"wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO(), "wsgi.url_scheme": "http"}
    body = b"".join(dashboard.wsgi(place)(asked, lambda status, *_: answer.append(status)))
    assert answer == ["200 OK"]
    assert [found["study_name"] for found in json.loads(body)["study_summaries"]] == [name]


def test_the_history_of_another_job_or_space_is_not_continued(ended: TuneJob) -> None:
    History(ended.out).open({"other": 1})
    with pytest.raises(InputError, match="holds the history of another search"):
        ended.run()


SPACES = {"gbdt": LEAVES, "finetune": {"finetune.noise": {"choices": [0, 1]}}, "pretrain": METHODS}


@pytest.mark.parametrize("kind", SPACES)
def test_a_search_on_other_data_is_not_continued(synthetic_dataset: str, tmp_path: Path, kind: str) -> None:
    data, out = with_renamed_files(synthetic_dataset, tmp_path / "data"), str(tmp_path / "out")
    job = {"gbdt": GBDT, "finetune": {"kind": "finetune"}, "pretrain": pretraining()}[kind]
    config = search(SPACES[kind], data=data, out=out, job=job)  # type: ignore[arg-type]
    History(out).open(config.history_identity())
    for period in ("2026-W01b", "2026-W09"):  # the first is in the range of the training split
        add_period(data, period, like="2026-W02")
    start = f"{out}: the search there did not read period '2026-W01b' of {data}: name the periods that it read to go on"
    with pytest.raises(InputError) as error:
        config.run()
    assert str(error.value) == f"{start} with it, or remove its history with --fresh"
    job_of = config.job.model_dump(mode="json")
    job_of["splits"]["train"]["periods"] = ["2026-W01", "2026-W02"]
    History(out).open(config.replace(job=job_of).history_identity())


def test_a_later_trial_reads_what_the_first_one_read(synthetic_dataset: str, tmp_path: Path) -> None:
    data = with_renamed_files(synthetic_dataset, tmp_path / "data")
    config = search(LEAVES, data=data)
    hashes = []
    with one_view() as view:
        config.inputs()
    for folder in ("first", "later"):
        _run_trial(config.job, {}, {}, str(tmp_path / folder), lambda *_: None, view=pickle.loads(pickle.dumps(view)))
        hashes.append(bundle.load(str(tmp_path / folder / "model")).dataset_hash)
        add_period(data, "2026-W01b", like="2026-W02")
    assert hashes[0] == hashes[1] == select(config.job.splits.train.replace(data=synthetic_dataset), labelled=True).hash


@pytest.mark.parametrize("kind", ["pretrain", "finetune"])
def test_best_settings_of_networks_are_jobs(kind: str, synthetic_dataset: str, tmp_path: Path) -> None:
    values = pretraining(keep_every=2) if kind == "pretrain" else {"kind": "finetune"}
    job = search(LEAVES, data=synthetic_dataset, job=values).job
    texts = {name: (stage.stage, configs.dump(stage)) for name, stage in job.jobs(str(tmp_path)).items()}
    classes = {"pretrain": PretrainJob, "finetune": FinetuneJob}
    for name, (module, text) in texts.items():
        (tmp_path / name).write_text(text)
        texts[name] = configs.load(classes[module], str(tmp_path / name))  # type: ignore[assignment, type-var]
    if kind == "pretrain":
        assert texts["best-finetune.yaml"].pretrained == texts["best-pretrain.yaml"].out  # type: ignore[attr-defined]


def command(config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "jobs.tune", "--config", str(config), *more]


def records(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("trials/*/result.json"))}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.ray
def test_a_killed_driver_loses_no_ended_trial_and_repeats_none(synthetic_dataset: str, tmp_path: Path) -> None:
    out, path = tmp_path / "out", tmp_path / "tune.yaml"
    data = with_renamed_files(synthetic_dataset, tmp_path / "data")
    config = search(LEAVES, data=data, out=str(out), trials=5, concurrent=2)
    path.write_text(configs.dump(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = tmp_path / "said"
    with said.open("w") as file, subprocess.Popen(command(path), cwd=ROOT, env=environment, stderr=file) as driver:
        while len(records(out)) < 2:
            assert driver.poll() is None, said.read_text()
            time.sleep(0.01)
        driver.send_signal(signal.SIGKILL)
    before = records(out)
    add_period(data, "2026-W09", like="2026-W02")  # which no split reads
    begun = {trial.number: trial.params for trial in History(str(out)).trials()}
    done = subprocess.run(
        command(path), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    after = records(out)
    assert len(after) == 5
    assert {name: after[name] for name in before} == before
    trials = History(str(out)).trials()
    assert [trial.number for trial in trials] == list(range(5))
    assert {number: trials[number].params for number in begun} == begun
    assert len({json.dumps(trial.params) for trial in trials}) == 5
    for name in before:  # the stage of an ended trial ran once
        log = (out / Path(name).parent / "model" / "run" / "log.txt").read_text()
        assert log.count("train_gbdt: writing") == 1
    config.run()  # nothing is left to do
    assert records(out) == after
    best = configs.load(GBDTJob, str(out / "best.yaml"))
    best.run()
    values = [trial.result.value for trial in trials if trial.result.value is not None]
    assert bundle.load(best.out).metrics["validation_ndcg@5"] == max(values)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_network_with_workers_is_trained_from_inside_a_trial(synthetic_dataset: str, tmp_path: Path) -> None:
    """The first trial is stopped; the second gets CPUs only after the workers of the first have ended."""
    finetune = {"network": SMALL_NETWORK, "epochs": 2, "stream": {"docs_per_batch": 500, "streams": 2}}
    space = {"finetune.optimizer.learning_rate": {"low": 1e-8, "high": 1e-2, "log": True}}
    job = {"kind": "finetune", "finetune": finetune, "workers": 2}
    settings = {"trials": 3, "asha": {"grace": 1, "reduction": 2}, "job": job}
    config = search(space, data=synthetic_dataset, out=str(tmp_path / "nested"), **settings)
    history = History(config.out)
    history.open(config.history_identity())
    for number, rate in enumerate((1e-3, 1e-7, 3e-3)):
        history.begin(Trial(number=number, params={"finetune.optimizer.learning_rate": rate}))
    history.end(0, Result(state="complete", value=0.44, curve=((1, 0.44),)))
    config.run()
    _, slow, nested = (trial.result for trial in history.trials())
    assert (slow.state, [step for step, _ in slow.curve]) == ("stopped", [1])
    log = Path(history.folder(1), "model", "run", "log.txt").read_text()
    assert "other trials are better at this step" in log
    assert "Traceback" not in log
    assert nested.state == "complete", nested
    one, _ = with_params(config.job.replace(workers=1), config.space, history.trials()[2].params)
    assert nested.value == pytest.approx(one.run(str(tmp_path / "one"), lambda *_: None), abs=1e-6)
