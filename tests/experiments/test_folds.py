"""Cross-validation of small trees on three folds of a made collection, against figures by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from written_directories import written_directories

from ltrscale import storage
from ltrscale.config import kind_of, members, validate
from ltrscale.errors import InputError
from ltrscale.evaluation.statistics.crossed import crossed_means
from ltrscale.evaluation.studies.summaries import Crossval
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.ranking.choices import MetricConfig

FOLDS = ("Fold1", "Fold2", "Fold3")


def write_part(path: Path, groups: int, seed: int) -> None:
    """LETOR text; labels follow the first feature, and every fifth group has no relevant document."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        for group in range(groups):
            for _ in range(rng.integers(2, 12)):
                x = rng.normal(size=3)
                label = 0 if group % 5 == 4 else int(np.clip(round(x[0] + 0.7 * rng.normal()), 0, 2))
                stream.write(f"{label} qid:{group} {' '.join(f'{f + 1}:{v:.3f}' for f, v in enumerate(x))}\n")


def write_folds(folder: Path) -> None:
    for i, fold in enumerate(FOLDS):
        for j, (part, groups) in enumerate((("train", 40), ("vali", 20), ("test", 15 + 5 * i))):
            write_part(folder / fold / f"{part}.txt", groups, seed=10 * i + j)


def settings(folder: Path) -> dict[str, Any]:
    parts = ("train", "vali", "test")
    trees = {"num_leaves": 4, "min_data_in_leaf": 5, "num_threads": 1, "early_stopping_rounds": 5}
    return {
        "out": str(folder / "out"),
        "folds": FOLDS,
        "prepare": {
            "source": {"kind": "letor", "n_features": 3},
            "inputs": [{"path": str(folder / "{fold}" / f"{part}.txt"), "period": part} for part in parts],
        },
        "splits": {"train": {"periods": "train"}, "validation": {"periods": "vali"}, "test": {"periods": "test"}},
        "seeds": [0, 1],
        "methods": {
            "one_tree": {"kind": "gbdt", "gbdt": {**trees, "num_trees": 1, "feature_fraction": 0.4}},
            "gbdt": {"kind": "gbdt", "gbdt": {**trees, "num_trees": 20, "feature_fraction": 0.7}},
        },
        "evaluate": {"baseline": "one_tree", "policy": "letor4", "resamples": 300, "ndcg_at": [1, 5]},
    }


def config(folder: Path, **changes: Any) -> PipelineJob:
    return validate(PipelineJob, {**settings(folder), **changes}, "folds")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Crossval, list[str]]:
    folder = tmp_path_factory.mktemp("crossval")
    write_folds(folder)
    written = written_directories(config(folder))
    return folder, Crossval.read(str(folder / "out" / "summary")), written


def rows_of(folder: Path, fold: str, method: str) -> list[dict[str, Any]]:
    rows = pq.read_table(folder / "out" / fold / "evaluation" / "groups.parquet").to_pylist()
    return [row for row in rows if row["method"] == method]


def by_hand(folder: Path, fold: str, method: str, metric: str) -> list[float]:
    """Each group's mean over its trials; NaN where undefined."""
    values: dict[int, list[float]] = {}
    for row in rows_of(folder, fold, method):
        values.setdefault(row["gid"], []).append(math.nan if row[metric] is None else row[metric])
    assert {len(trials) for trials in values.values()} == {2}
    return [sum(trials) / 2 for trials in values.values()]


@pytest.mark.slow
def test_means_over_folds_and_over_all_test_groups(done: tuple[Path, Crossval, list[str]]) -> None:
    folder, found, _ = done
    assert len(set(found.methods[1].pooled.summaries["map"].trials)) == 2, "equal trials would hide a mistake"
    assert found.folds == {"Fold1": 15, "Fold2": 20, "Fold3": 25}
    assert found.trials == 2
    assert [method.name for method in found.methods] == ["one_tree", "gbdt"]
    metrics = ["ndcg@1", "ndcg@5", "mrr", "map", "precision@5"]
    known = {name.partition("@")[0] for name in metrics}
    others = [cls for cls in members(MetricConfig) if kind_of(cls) not in known]
    metrics += [cls.made(k=k).name for cls in others for k in ((1, 5) if cls.needs_cutoff() else (None,))]
    letor = ["letor_ndcg@1", "letor_ndcg@5", "letor_mean_ndcg", "letor_map", "letor_precision@5"]
    for method in found.methods:
        assert list(method.folds) == metrics + letor
        for metric, means in method.folds.items():
            values = [by_hand(folder, fold, method.name, metric) for fold in FOLDS]
            expected = [float(np.nanmean(of_fold)) for of_fold in values]
            assert means.folds == pytest.approx(expected)
            assert means.mean == pytest.approx(np.mean(expected))
            assert means.std_error == pytest.approx(np.std(expected, ddof=1) / math.sqrt(3))
            pooled = method.pooled.summaries[metric]
            assert pooled.mean == pytest.approx(np.nanmean(np.concatenate(values)))
            undefined = int(np.isnan(np.concatenate(values)).sum())
            assert (pooled.groups, pooled.undefined) == (60 - undefined, undefined)
            assert (undefined == 0) if metric in letor else (undefined >= 12)
            assert pooled.low is not None
            assert pooled.high is not None
            if np.nanstd(np.concatenate(values)) > 0:  # Success@5 is 1 for every group
                assert pooled.low < pooled.mean < pooled.high
            else:
                assert pooled.low == pytest.approx(pooled.mean) == pooled.high


@pytest.mark.slow
def test_the_comparison_is_over_all_test_groups(done: tuple[Path, Crossval, list[str]]) -> None:
    folder, found, _ = done
    baseline, gbdt = found.methods
    assert baseline.pooled.comparisons == {}
    for metric, comparison in gbdt.pooled.comparisons.items():
        pairs = [[by_hand(folder, fold, name, metric) for fold in FOLDS] for name in ("gbdt", "one_tree")]
        differences = np.subtract(*(np.concatenate(of_method) for of_method in pairs))
        assert comparison.difference == pytest.approx(np.nanmean(differences))
        assert comparison.low <= comparison.difference <= comparison.high
        assert comparison.p == comparison.p_holm  # one method is compared
    clear = gbdt.pooled.comparisons["ndcg@5"]
    assert clear.low > 0
    assert clear.p < 0.05


@pytest.mark.nightly
def test_draws_of_labels_are_crossed_with_the_groups_of_their_fold(tmp_path: Path) -> None:
    write_folds(tmp_path)
    splits = settings(tmp_path)["splits"]
    splits["train"] |= {"labelled_fraction": 0.5}
    config(tmp_path, splits=splits, seeds=range(5)).run()
    found = Crossval.read(str(tmp_path / "out" / "summary"))
    for metric, comparison in found.methods[1].pooled.comparisons.items():
        values = {}
        for method in ("one_tree", "gbdt"):
            rows = [row for fold in FOLDS for row in rows_of(tmp_path, fold, method)]
            of_trials = [[row[metric] for row in rows if row["trial"] == trial] for trial in range(5)]
            values[method] = np.array(of_trials, dtype=float).T
        folds_Q = np.repeat(range(3), list(found.folds.values()))
        expected = crossed_means((values["gbdt"] - values["one_tree"])[..., None], folds_Q)
        assert comparison.draws == 5
        assert comparison.p == pytest.approx(expected.p()[0])
        assert [comparison.low, comparison.high] == pytest.approx([end[0] for end in expected.interval()])


@pytest.mark.slow
def test_the_report_says_it_all(done: tuple[Path, Crossval, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, found, _ = done
    summary = folder / "out" / "summary"
    text = (summary / "report.md").read_text()
    gbdt = found.methods[1]
    for part in (
        "3 folds with 60 labelled test groups together: Fold1 15, Fold2 20, Fold3 25.",
        "NDCG@5 - one_tree [95%]",
        "LETOR figures follow LETOR 4.0's evaluation script",
        "a fold's figure is the mean over its test groups and 2 trials",
        "](folds.png)",
        f"{gbdt.folds['ndcg@5'].mean:.4f} ± {gbdt.folds['ndcg@5'].std_error:.4f}",
        f"{gbdt.folds['letor_mean_ndcg'].mean:.4f} ± {gbdt.folds['letor_mean_ndcg'].std_error:.4f}",
        " | ".join(f"{value:.4f}" for value in gbdt.folds["letor_map"].folds),
        f"{gbdt.pooled.comparisons['map'].difference:+.4f} [",
    ):
        assert part in text
    assert (summary / "folds.png").read_bytes()[:4] == b"\x89PNG"
    for name in ("Fold2/run/config.yaml", "summary/run/config.yaml", "run/config.yaml"):
        assert (folder / "out" / name).exists()
    written_directories(config(folder))
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("summary/report.md")
    assert "LETOR MeanNDCG" in printed


@pytest.mark.nightly
def test_only_what_changed_is_run_again(done: tuple[Path, Crossval, list[str]], tmp_path: Path) -> None:
    folder, _, written = done
    assert written[-1] == "summary"
    assert sum(name.endswith("evaluation") for name in written) == 3
    assert written_directories(config(folder)) == []
    again = tmp_path / "again"
    write_folds(again)
    first = config(again, folds=FOLDS[:2])
    written_directories(first)
    three = written_directories(config(again))
    assert all(name.startswith("Fold3/") for name in three[:-1])
    assert three[-1] == "summary"
    assert written_directories(config(again, folds=FOLDS[::-1])) == ["summary"]
    methods = settings(again)["methods"]
    methods["gbdt"]["gbdt"]["num_trees"] = 10
    changed = written_directories(config(again, methods=methods))
    models = [f"{fold}/seed-{seed}/gbdt/model" for fold in FOLDS for seed in (0, 1)]
    assert set(changed) == {*models, *(f"{fold}/evaluation" for fold in FOLDS), "summary"}


def test_the_place_of_the_fold_is_filled_in_everywhere(tmp_path: Path) -> None:
    given = config(tmp_path).for_fold("Fold2")
    assert [entry.path for entry in given.prepare.inputs] == [
        str(tmp_path / "Fold2" / f"{part}.txt") for part in ("train", "vali", "test")
    ]
    assert given.out == str(tmp_path / "out" / "Fold2")


@pytest.mark.nightly
def test_each_kind_of_labels_has_a_summary(tmp_path: Path) -> None:
    write_folds(tmp_path)
    relabel = {"steps": [{"kind": "implicit_feedback", "copies": 2}]}
    changes = {"seeds": [0], "relabel": relabel, "evaluate_on": ["labels", "relevance"]}
    written_directories(config(tmp_path, folds=FOLDS[:2], **changes))
    on_labels, on_relevance = (Crossval.read(str(tmp_path / "out" / f"summary{name}")) for name in ("", "-relevance"))
    for found, name in ((on_labels, "evaluation"), (on_relevance, "evaluation-relevance")):
        for i, fold in enumerate(FOLDS[:2]):
            rows = pq.read_table(tmp_path / "out" / fold / name / "groups.parquet").to_pylist()
            values = [row["map"] for row in rows if row["method"] == "gbdt" and row["map"] is not None]
            assert found.methods[1].folds["map"].folds[i] == pytest.approx(np.mean(values))
    assert on_labels.methods[1].folds["map"] != on_relevance.methods[1].folds["map"]


def test_bad_settings_are_named(tmp_path: Path) -> None:
    plain = settings(tmp_path)
    same = {**plain["prepare"], "inputs": "data/train.txt"}
    for changes, message in (
        ({"folds": ["Fold1", "Fold1"]}, "folds need two or more different names that do not begin with summary"),
        ({"folds": ["Fold1", "summary"]}, "folds need two or more different names that do not begin with summary"),
        ({"folds": ["Fold1"]}, "folds need two or more different names"),
        ({"folds": ["a/b", "c"]}, r"folds\.0: String should match pattern"),
        ({"prepare": same}, r"no text has \{fold\}, so that all folds would be the same"),
        (
            {"splits": {**plain["splits"], "test": None}, "evaluate": {}},
            "splits.test: folds are compared on test groups",
        ),
        ({"pipeline": {"seeds": [1]}}, "pipeline: write what is below it beside folds"),
        ({"match": {"periods": "a"}}, r"match: no longer a key"),
    ):
        with pytest.raises(InputError, match=message):
            config(tmp_path, **changes)


@pytest.mark.slow
def test_folds_with_the_same_test_groups_are_an_error(tmp_path: Path) -> None:
    write_folds(tmp_path)
    for part in ("train", "vali", "test"):
        (tmp_path / "Fold2" / f"{part}.txt").write_bytes((tmp_path / "Fold1" / f"{part}.txt").read_bytes())
    with pytest.raises(InputError, match="folds Fold1 and Fold2 have the same test groups"):
        config(tmp_path, folds=FOLDS[:2]).run()
    assert storage.read_manifest(str(tmp_path / "out" / "summary")) is None
    with pytest.raises(InputError, match="no cross-validation is committed there; make it with"):
        Crossval.read(str(tmp_path / "out" / "summary"))
