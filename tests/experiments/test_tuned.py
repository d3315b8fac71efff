"""Methods whose settings a search chooses for each sample of labelled groups."""

from pathlib import Path
from typing import Any

import pytest

from ltrscale import bundle
from ltrscale.config import validate
from ltrscale.data.dataset.split import Splits
from ltrscale.experiments.methods.base import SeedRun, check_methods
from ltrscale.experiments.methods.composed import AnyMethod, TunedMethod
from ltrscale.experiments.methods.single import GBDTMethod, NeuralMethod
from ltrscale.runtime.workers import ONE
from ltrscale.tuning import tune
from ltrscale.tuning.history import History, Trial, best
from ltrscale.tuning.tune import TuneJob

WEEKS = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
TREES = {"num_trees": 8, "num_threads": 1, "num_leaves": 4}
SPACE = {"gbdt.num_leaves": {"low": 2, "high": 32, "integer": True}, "gbdt.learning_rate": {"low": 0.01, "high": 0.5}}

NETWORK = {
    "network": {"encoder": {"kind": "mlp", "hidden": [16]}}, "head_epochs": 0, "epochs": 4,
    "stream": {"docs_per_batch": 400}, "optimizer": {"learning_rate": 1e-2},
}  # fmt: skip


def splits(data: str, *, draw: int = 0) -> Splits:
    named = {name: {"data": data, "periods": periods} for name, periods in WEEKS.items()}
    named["train"] = {**named["train"], "labelled_fraction": 0.2, "labelled_seed": draw}
    return validate(Splits, named, "test")


def seed_run(data: str, out: Path, *, trials: int = 6, draw: int = 0, space: dict[str, Any] | None = None) -> SeedRun:
    methods: dict[str, AnyMethod] = {
        "gbdt": GBDTMethod.model_validate({"gbdt": TREES}),
        "tuned": TunedMethod.model_validate({"of": "gbdt", "space": space or SPACE, "trials": trials}),
    }
    return SeedRun(methods, splits(data, draw=draw), 3, ONE, str(out))


def history(out: Path) -> list[Trial]:
    return History(str(out / "tuned" / "search")).trials()


@pytest.mark.slow
def test_the_model_is_that_of_the_best_trial_and_trial_0_is_the_method(synthetic_dataset: str, tmp_path: Path) -> None:
    made = seed_run(synthetic_dataset, tmp_path)
    model = bundle.load(made.model("tuned"))
    records = history(tmp_path)
    values = [record.result.value for record in records]
    leader = best(records)
    assert leader is not None
    assert len(set(values)) > 2, "equal trials would hide a mistake"
    assert model.metrics["validation_ndcg@5"] == max(value for value in values if value is not None)
    chosen = bundle.load(str(tmp_path / "tuned" / "search" / "trials" / f"{leader.number:05d}" / "model"))
    assert model.contents == chosen.contents
    first = bundle.load(str(tmp_path / "tuned" / "search" / "trials" / "00000" / "model"))
    assert first.contents == bundle.load(made.model("gbdt")).contents


@pytest.mark.slow
@pytest.mark.parametrize("of", ["one", "three"])
def test_validation_chooses_between_a_linear_and_a_deep_head(synthetic_dataset: str, tmp_path: Path, of: str) -> None:
    """Whichever the method itself has, which is trial 0, the model is that of the better head, byte by byte."""
    methods: dict[str, AnyMethod] = {
        name: NeuralMethod.model_validate({"finetune": {**NETWORK, "head": {"layers": layers, "width": 16}}})
        for name, layers in (("one", 1), ("three", 3))
    }
    space = {"finetune.head.layers": {"choices": [1, 3]}}
    methods["tuned"] = TunedMethod.model_validate({"of": of, "space": space, "trials": 4})
    made = SeedRun(methods, splits(synthetic_dataset), 3, ONE, str(tmp_path))
    models = {name: bundle.load(made.model(name)) for name in methods}
    records = history(tmp_path)
    assert {record.params["finetune.head.layers"] for record in records} == {1, 3}
    values = {name: models[name].metrics["validation_ndcg@5"] for name in ("one", "three")}
    assert values["one"] != values["three"], "equal heads would hide a mistake"
    assert models["tuned"].contents == models[max(values, key=lambda name: values[name])].contents


@pytest.mark.slow
def test_a_search_in_two_parts_ends_as_one_and_an_ended_one_trains_nothing(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    once = bundle.load(seed_run(synthetic_dataset, whole).model("tuned"))
    seed_run(synthetic_dataset, parts, trials=2).model("tuned")
    (parts / "tuned" / "search" / "trials" / "00001" / "result.json").unlink()  # as if it had been killed
    twice = bundle.load(seed_run(synthetic_dataset, parts).model("tuned"))
    assert [record.params for record in history(whole)] == [record.params for record in history(parts)]
    assert once.contents == twice.contents

    def refuse(*_: object, **__: object) -> float:
        raise AssertionError("an ended search runs a trial")

    monkeypatch.setattr(tune, "_run_trial", refuse)
    seed_run(synthetic_dataset, parts).model("tuned")


@pytest.mark.slow
def test_another_draw_of_labels_or_another_space_is_another_search(synthetic_dataset: str, tmp_path: Path) -> None:
    seed_run(synthetic_dataset, tmp_path / "a", trials=3).model("tuned")
    seed_run(synthetic_dataset, tmp_path / "b", trials=3, draw=1).model("tuned")
    values = [[record.result.value for record in history(tmp_path / name)] for name in "ab"]
    assert values[0][0] != values[1][0], "both learnt from the same labels"
    seed_run(synthetic_dataset, tmp_path / "a", trials=3, draw=1).model("tuned")
    assert [record.result.value for record in history(tmp_path / "a")] == values[1]
    leaves = {"gbdt.num_leaves": SPACE["gbdt.num_leaves"]}
    seed_run(synthetic_dataset, tmp_path / "a", trials=2, space=leaves).model("tuned")
    assert [sorted(record.params) for record in history(tmp_path / "a")][1:] == [["gbdt.num_leaves"]]


@pytest.mark.parametrize(
    ("of", "is_right"),
    [("gbdt", True), ("network", True), ("second", False), ("ensemble", False), ("tuned", False), ("nothing", False)],
)
def test_a_tuned_method_is_of_a_single_model_that_starts_from_no_other(of: str, is_right: bool) -> None:
    methods: dict[str, AnyMethod] = {
        "gbdt": GBDTMethod(),
        "network": NeuralMethod(),
        "second": NeuralMethod(starts_from="network"),
        "ensemble": GBDTMethod.model_validate({"gbdt": {"feature_fraction": 0.5}, "ensemble": {"candidates": 3}}),
        "tuned": TunedMethod.model_validate({"of": of, "space": SPACE}),
    }
    if is_right:
        check_methods(methods, ONE)
    else:
        with pytest.raises(ValueError, match=f"methods.tuned.of: '{of}' is not"):
            check_methods(methods, ONE)


@pytest.mark.nightly
@pytest.mark.ray
def test_trials_here_are_those_of_ray_tune(synthetic_dataset: str, tmp_path: Path) -> None:
    job = {"kind": "gbdt", "gbdt": TREES, "splits": splits(synthetic_dataset).model_dump()}
    values = {"job": job, "space": SPACE, "trials": 4, "search": {"startup": 2}}
    under_tune, here = (validate(TuneJob, {**values, "out": str(tmp_path / name)}, "test") for name in ("a", "b"))
    under_tune.run()
    here.best_here()

    def records(name: str) -> list[tuple[object, float | None]]:
        trials = History(str(tmp_path / name)).trials()
        return [(trial.params, trial.result.value) for trial in trials]

    assert records("a") == records("b")
