"""The final model equals one trained on all its groups at once, for as long as validation chose."""

import json
import logging
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_directories import written_directories

from ltrscale import bundle
from ltrscale import config as configs
from ltrscale.data.dataset.disjoint import joined_splits
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError, Stopped
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.experiments.refit import RefitJob
from ltrscale.training.finetune import FinetuneJob
from ltrscale.training.pretrain import PretrainJob
from ltrscale.trees.gbdt import GBDTJob

NETWORK = {"encoder": {"width": 8, "blocks": 1}}
STREAM = {"docs_per_batch": 500, "streams": 2}


def splits(data: str, train: str, chosen_on: str) -> dict[str, dict[str, str]]:
    return {"train": {"data": data, "periods": train}, "validation": {"data": data, "periods": chosen_on}}


def job(cls: Any, out: Path, **values: Any) -> Any:
    return configs.validate(cls, {"out": str(out), **values}, "test")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lightgbm", "xgboost", "catboost"])
def test_trees_are_those_of_all_groups_at_once(synthetic_dataset: str, tmp_path: Path, kind: str) -> None:
    trees = {"kind": kind, "num_trees": 40, "learning_rate": 0.3, "early_stopping_rounds": 3, "num_threads": 1}
    first = job(GBDTJob, tmp_path / "first", gbdt=trees, splits=splits(synthetic_dataset, "2026-W01", "2026-W02"))
    first.run()
    chosen = bundle.load(first.out).count("trees")
    assert chosen is not None
    assert 1 <= chosen < 40
    final = job(RefitJob, tmp_path / "final", bundle=first.out)
    assert final.run()
    assert not final.run()
    fixed = {**trees, "num_trees": chosen, "early_stopping_rounds": None}
    other_weeks = splits(synthetic_dataset, "2026-W01..2026-W02", "2026-W03")
    at_once = job(GBDTJob, tmp_path / "at_once", gbdt=fixed, splits=other_weeks)
    at_once.run()
    made, expected = bundle.load(final.out), bundle.load(at_once.out)
    groups = next(iterate(select(Split(data=(synthetic_dataset,), periods=("2026-W04",)), labelled=True)))
    scores_N, expected_N, first_N = (opened.scorer()(groups) for opened in (made, expected, bundle.load(first.out)))
    assert scores_N.equal(expected_N)
    assert not scores_N.equal(first_N)
    if kind != "catboost":  # its file states which metrics were watched
        assert made.contents == expected.contents
    assert made.count("trees") == chosen
    assert made.dataset_hash == expected.dataset_hash
    assert not [name for name in made.metrics if "validation" in name]


def peaks(head: int, full: int, head_epochs: int) -> Callable[..., float]:
    """A validation whose best epochs are these; it counts its calls."""
    calls = 0

    def validate(*_: object) -> float:
        nonlocal calls
        calls += 1
        epoch, best = (calls, head) if calls <= head_epochs else (calls - head_epochs, full)
        return (0.0 if calls <= head_epochs else 0.5) + (0.01 * epoch if epoch <= best else 0.0)

    return validate


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("is_pretrained", "settings"),
    [
        (True, {}),
        (False, {}),
        (True, {"optimizer": {"learning_rate": 1e-2, "schedule": {"kind": "cosine"}}, "heads": 2}),
        (False, {"average": 0.5, "network": {**NETWORK, "transform": {"numeric": "quantile_normal"}}}),
    ],
    ids=["pretrained", "scratch", "cosine", "average"],
)
def test_a_network_is_that_of_all_groups_at_once(
    synthetic_dataset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_pretrained: bool,
    settings: dict[str, Any],
) -> None:
    encoder = tmp_path / "encoder"
    if is_pretrained:
        pretrain = {"network": NETWORK, "epochs": 1, "stream": STREAM}
        documents = {"data": synthetic_dataset, "periods": "2026-W01"}
        job(PretrainJob, encoder, train=documents, pretrain=pretrain).run()
    finetune = {"network": NETWORK, "head_epochs": 3, "epochs": 4, "stream": STREAM, **settings}
    common = {"finetune": finetune, "pretrained": str(encoder) if is_pretrained else None}
    head_epochs = 3 if is_pretrained else 0

    def trained(name: str, train: str, chosen_on: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr("ltrscale.training.best.validate_ranker", peaks(2, 3, head_epochs))
            made = job(FinetuneJob, tmp_path / name, splits=splits(synthetic_dataset, train, chosen_on), **common)
            made.run()
        return str(made.out)

    first = trained("first", "2026-W01", "2026-W02")
    chosen = [bundle.load(first).count(f"epochs_{phase}") or 0 for phase in ("head", "full")]
    assert chosen == [2 if is_pretrained else 0, 3]
    final = job(RefitJob, tmp_path / "final", bundle=first)
    monkeypatch.setattr("ltrscale.training.best.validate_ranker", None)  # nothing is left to judge with
    final.run()
    expected = bundle.load(trained("at_once", "2026-W01..2026-W02", "2026-W03"))
    made = bundle.load(final.out)
    assert made.contents == expected.contents
    assert made.dataset_hash == expected.dataset_hash
    same = ("phase", "epoch", "epochs_full", "labelled_groups")
    assert [made.metrics[name] for name in same] == [expected.metrics[name] for name in same]
    assert not [name for name in made.metrics if "validation" in name]
    assert "validation" not in (tmp_path / "final" / "run" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_stopped_refit_goes_on(synthetic_dataset: str, tmp_path: Path) -> None:
    finetune = {"network": NETWORK, "epochs": 4, "stream": STREAM}
    first = job(
        FinetuneJob, tmp_path / "first", finetune=finetune, splits=splits(synthetic_dataset, "2026-W01", "2026-W02")
    )
    first.run()
    whole, stopped = (job(RefitJob, tmp_path / name, bundle=first.out) for name in ("whole", "stopped"))
    whole.run()
    steps = []

    def report(record: Any) -> None:
        steps.extend([record["step"]] if "step" in record else [])
        if len(steps) == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped):
        stopped.work({"made_by": "test"}, report)
    stopped.work({"made_by": "test"}, report)
    assert bundle.load(stopped.out).contents == bundle.load(whole.out).contents
    assert steps == sorted(set(steps))


def pipeline(data: str, out: Path, *changes: str) -> PipelineJob:
    values = {
        "out": str(out),
        "data": data,
        "splits": {
            "train": {"periods": "2026-W01"},
            "validation": {"periods": "2026-W02"},
            "test": {"periods": "2026-W03"},
        },
        "methods": {
            "gbdt": {"kind": "gbdt", "gbdt": {"num_trees": 5, "num_threads": 1}},
            "net": {"kind": "neural", "finetune": {"network": NETWORK, "epochs": 1, "stream": STREAM}},
            "tuned": {"kind": "tuned", "of": "gbdt", "trials": 2, "space": {"gbdt.num_leaves": {"choices": [4, 8]}}},
            "mean": {"kind": "gbdt", "gbdt": {"feature_fraction": 0.5}, "ensemble": {"candidates": 2}},
        },
        "evaluate": {"resamples": 100},
    }
    return configs.load(PipelineJob, str(write(out, values)), changes)


def write(out: Path, values: dict[str, Any]) -> Path:
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps(values))
    return path


@pytest.mark.slow
def test_a_pipeline_ends_with_the_commands_that_come_next(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ltrscale")
    trees = {
        name: {"kind": "gbdt", "gbdt": {"num_trees": n, "num_threads": 1}} for name, n in (("one", 1), ("ten", 10))
    }
    changes = [f"methods={json.dumps(trees)}", "evaluate.baseline=one", "splits.test=null"]

    def suggested(out: Path, *more: str) -> dict[str, list[str]]:
        """The arguments of the commands, by the name of the job."""
        caplog.clear()
        pipeline(synthetic_dataset, out, *changes, *more).run()
        commands = [message.split("python -m ")[1] for message in caplog.messages if message.startswith("next, ")]
        return {words[0]: words[1:] for words in map(shlex.split, commands)}

    out = tmp_path / "a place"
    found = suggested(out)
    values = {name: bundle.load(str(out / "seed-0" / name / "model")).metrics["validation_ndcg@5"] for name in trees}
    best = max(values, key=lambda name: float(values[name] or 0))
    assert [*found] == ["jobs.refit", "jobs.score", "jobs.predict"]
    final = configs.load(RefitJob, overrides=found["jobs.refit"][1::2])
    assert (final.bundle, final.out) == (str(out / "seed-0" / best / "model"), str(out / "final" / best))
    options = found["jobs.predict"]
    assert options[options.index("--bundle") + 1] == final.out
    assert suggested(out, f"refit.methods=[{best}]") == {name: found[name] for name in ("jobs.score", "jobs.predict")}
    assert bundle.load(final.out).count("trees")


@pytest.mark.nightly
def test_a_pipeline_makes_final_models_last(synthetic_dataset: str, tmp_path: Path) -> None:
    out, refit = tmp_path / "out", ["refit.methods=[gbdt, net, tuned]"]
    made = written_directories(pipeline(synthetic_dataset, out, *refit))
    finals = [f"final/{name}" for name in ("gbdt", "net", "tuned")]
    assert made[-4:] == ["evaluation", *finals]
    assert written_directories(pipeline(synthetic_dataset, out, *refit)) == []
    before = {name: bundle.load(str(out / name)) for name in finals}
    made = written_directories(pipeline(synthetic_dataset, out, *refit, "refit.test=true"))
    assert made == finals
    for name in finals:
        after = bundle.load(str(out / name))
        assert (after.count("labelled_groups") or 0) > (before[name].count("labelled_groups") or 0)
        evaluate = {"models": {"final": str(out / name)}, "baseline": None, "resamples": 100}
        weeks = {"train": "2026-W01", "validation": "2026-W02", "test": "2026-W03"}
        evaluate["splits"] = {split: {"data": synthetic_dataset, "periods": week} for split, week in weeks.items()}
        with pytest.raises(InputError, match=r"was made from other splits than it is evaluated on.*2026-W03"):
            job(EvaluateJob, tmp_path / "evaluation", evaluate=evaluate).run()


@pytest.mark.slow
def test_a_pipeline_without_a_test_split_trains_on_all_weeks(synthetic_dataset: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    changes = ["splits={train: {periods: 2026-W01..2026-W03}, validation: {periods: 2026-W04}}", "methods.mean=null"]
    changes = [changes[0], "methods={net: {kind: gbdt, gbdt: {num_trees: 5}}}", "refit.methods=[net]"]
    made = written_directories(pipeline(synthetic_dataset, out, *changes))
    assert made == ["seed-0/net/model", "final/net"]
    everything = select(Split(data=(synthetic_dataset,)), labelled=True)
    assert bundle.load(str(out / "final" / "net")).count("labelled_groups") == everything.n_groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["refit.methods=[mean]"], "refit.methods: 'mean' makes several models"),
        (["refit.methods=[gbtd]"], "refit.methods: 'gbtd' is not among the methods gbdt, net"),
        (["refit={methods: [gbdt], test: true}", "splits.test=null"], "refit.test: there is no test split"),
    ],
)
def test_bad_settings_are_named(synthetic_dataset: str, tmp_path: Path, changes: Sequence[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipeline(synthetic_dataset, tmp_path / "out", *changes)


def test_a_bundle_of_another_kind_is_refused(synthetic_dataset: str, tmp_path: Path) -> None:
    documents = {"data": synthetic_dataset, "periods": "2026-W01"}
    pretrain = {"network": NETWORK, "epochs": 1, "stream": STREAM}
    job(PretrainJob, tmp_path / "encoder", train=documents, pretrain=pretrain).run()
    with pytest.raises(InputError, match="made by pretrain; a refit is of one network"):
        job(RefitJob, tmp_path / "final", bundle=str(tmp_path / "encoder")).run()


def test_splits_are_joined_or_refused(synthetic_dataset: str, write_dataset: Any) -> None:
    data = (synthetic_dataset,)
    first, second = Split(data=data, periods=("2026-W01..2026-W02",)), Split(data=data, periods=("2026-W03",))
    both = joined_splits(first, second)
    assert both.periods == ("2026-W01", "2026-W02", "2026-W03")
    counts = [select(split, labelled=True).n_groups for split in (first, second, both)]
    assert counts[0] + counts[1] == counts[2]
    with pytest.raises(InputError, match=r"their labelled_fraction are 0\.5 and 1\.0; set both alike"):
        joined_splits(first.replace(labelled_fraction=0.5), second)
    with pytest.raises(InputError, match="with labelled_groups in each"):
        joined_splits(first.replace(labelled_groups=5), second.replace(labelled_groups=5))
    weeks = [{week: [(np.full((2, 1), 10 * n + i), np.arange(2))] for i, week in enumerate("ab")} for n in range(2)]
    one, other = (write_dataset(groups, [Feature(name="x")]) for groups in weeks)
    apart = joined_splits(Split(data=(one,), periods=("a",)), Split(data=(one,), periods=("b",)))
    assert select(apart, labelled=True).n_groups == 2
    assert select(joined_splits(Split(data=(one,)), Split(data=(other,))), labelled=True).n_groups == 4
    with pytest.raises(InputError, match="periods of equal names"):
        joined_splits(Split(data=(one,), periods=("a",)), Split(data=(other,), periods=("b",)))
