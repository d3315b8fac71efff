"""The order of one feature as a method: a bundle like any other, which learns nothing."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from reference import metrics as oracle
from written_directories import written_directories

from ltrscale.batch import QueryGroups
from ltrscale.bundle import FeatureOrder, load, order_scorer
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.studies.study import Study
from ltrscale.evaluation.studies.summaries import Crossval
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.experiments.study import StudyJob
from ltrscale.scoring.score import ScoreJob

SPLITS = {
    "train": {"periods": "2026-W01..2026-W02"},
    "validation": {"periods": "2026-W03"},
    "test": {"periods": "2026-W04"},
}
TREES = {"kind": "gbdt", "gbdt": {"num_trees": 3, "num_threads": 1}}


@pytest.fixture(scope="module")
def feature(synthetic_dataset: str) -> str:
    """A numeric feature that about one document in twenty lacks."""
    manifest = open_dataset(synthetic_dataset).manifest
    assert manifest.summaries
    pairs = zip(manifest.features, manifest.summaries, strict=True)
    twentieth = manifest.counts().documents / 20
    return min((abs(s.missing - twentieth), f.name) for f, s in pairs if f.kind == "numeric" and s.missing)[1]


def pipeline(data: str, out: Path, methods: dict[str, Any], **changes: Any) -> PipelineJob:
    evaluate = {"baseline": "by_value", "resamples": 100}
    values = {"out": str(out), "data": data, "splits": SPLITS, "methods": methods, "evaluate": evaluate, **changes}
    return validate(PipelineJob, values, "test")


@pytest.mark.parametrize("ascending", [False, True])
def test_documents_are_in_the_order_of_the_feature_and_those_without_it_last(ascending: bool) -> None:
    values_N = torch.randn(200, generator=torch.Generator().manual_seed(0)) * 1e6
    missing_N = torch.arange(200) % 7 == 3
    groups = QueryGroups(values_N.masked_fill(missing_N, torch.nan)[:, None], torch.tensor([0, 90, 200]))
    scores_N = order_scorer(FeatureOrder(feature="x", ascending=ascending))(groups)
    assert scores_N.isfinite().all()
    sign = 1 if ascending else -1
    expected = sorted(range(200), key=lambda i: (1, 0.0) if missing_N[i] else (0, sign * float(values_N[i])))
    # a stable sort keeps the input's order among the missing ones, which therefore must be equal
    assert scores_N.argsort(descending=True, stable=True).tolist() == expected


@pytest.mark.nightly
def test_a_pipeline_takes_it_as_baseline(synthetic_dataset: str, feature: str, tmp_path: Path) -> None:
    methods = {
        "gbdt": TREES,
        "by_value": {"kind": "feature", "feature": feature},
        "reversed": {"kind": "feature", "feature": feature, "ascending": True},
    }
    config = pipeline(synthetic_dataset, tmp_path, methods, seeds=[0, 1])
    assert len(written_directories(config)) == 7
    assert written_directories(config) == []
    found = Evaluation.read(str(tmp_path / "evaluation"))
    assert found.baseline == "by_value"
    assert [method.kinds for method in found.methods] == [{"trees"}, {"feature"}, {"feature"}]
    report = (tmp_path / "evaluation" / "report.md").read_text()
    assert "NDCG@5 - by_value [95%]" in report
    rows = pq.read_table(tmp_path / "evaluation" / "groups.parquet").to_pylist()
    measured = {(row["method"], row["trial"], row["gid"]): row["ndcg@5"] for row in rows}
    some_missing = 0
    for labels, values, gid in lists(synthetic_dataset, feature, "2026-W04"):
        if (missing := int(np.isnan(values).sum())) > 4:
            continue  # the oracle averages over every order of them
        some_missing += missing > 0
        for name, sign in (("by_value", 1), ("reversed", -1)):
            expected = oracle.ndcg([-math.inf if math.isnan(v) else sign * v for v in values], labels, 5)
            for trial in (0, 1):
                found_here = measured[name, trial, gid]
                assert (math.nan if found_here is None else found_here) == pytest.approx(expected, nan_ok=True)
    assert some_missing > 5


def lists(data: str, feature: str, period: str) -> list[tuple[list[float], list[float], int]]:
    """Labels, values of a feature and number of the labelled groups of a period."""
    selection = select(Split(data=(data,), periods=(period,)), labelled=True)
    column = [f.name for f in selection.features].index(feature)
    found = []
    for groups in iterate(selection):
        assert groups.labels_N is not None
        assert groups.ids_Q is not None
        bounds = groups.offsets_Q1.tolist()
        for gid, first, end in zip(groups.ids_Q.tolist(), bounds, bounds[1:], strict=False):
            found.append((groups.labels_N[first:end].tolist(), groups.features_NF[first:end, column].tolist(), gid))
    return found


@pytest.mark.slow
def test_its_bundle_states_validation_metrics_and_scores_other_data(
    synthetic_dataset: str, feature: str, tmp_path: Path
) -> None:
    config = pipeline(synthetic_dataset, tmp_path / "out", {"by_value": {"kind": "feature", "feature": feature}})
    config.run()
    bundle = load(url := str(tmp_path / "out" / "seed-0" / "by_value" / "model"))
    assert [f.name for f in bundle.features] == [feature]
    assert bundle.contents == {}
    expected = [
        oracle.ndcg([-math.inf if math.isnan(v) else v for v in values], labels, 5)
        for labels, values, _ in lists(synthetic_dataset, feature, "2026-W03")
        if np.isnan(values).sum() <= 7
    ]
    assert bundle.metrics["validation_ndcg@5"] == pytest.approx(np.nanmean(expected), rel=1e-4)
    score = {"out": str(tmp_path / "scores"), "bundle": url, "data": synthetic_dataset, "periods": "2026-W04"}
    validate(ScoreJob, score, "test").run()
    (file,) = (tmp_path / "scores" / "period=2026-W04").glob("*.parquet")
    scores = dict(zip(*pq.read_table(file, columns=["gid", "scores"]).to_pydict().values(), strict=True))
    for _, values, gid in lists(synthetic_dataset, feature, "2026-W04"):
        lowest = float(np.finfo(np.float32).min)
        assert scores[gid] == [lowest if math.isnan(v) else v for v in values]
    with pytest.raises(InputError, match="holds the order of a feature; name the bundle of one network that scores"):
        bundle.ranker()


@pytest.mark.slow
def test_a_study_has_its_line(synthetic_dataset: str, feature: str, tmp_path: Path) -> None:
    values = {
        "out": str(tmp_path),
        "data": synthetic_dataset,
        "splits": SPLITS,
        "methods": {"by_value": {"kind": "feature", "feature": feature}, "gbdt": TREES},
        "grid": [{"labelled": [20, 40], "draws": 2}],
        "evaluate": {"baseline": "by_value"},
        "workers": 0,
    }
    validate(StudyJob, values, "test").run()
    found = Study.read(str(tmp_path / "summary"))
    points = [found.find("by_value", number) for number in ("20", "40")]
    means = {point.estimates["all"]["ndcg@5"].mean for point in points if point is not None}
    assert len(points) == 2
    assert len(means) == 1, "labels change nothing"


@pytest.mark.slow
def test_a_comparison_on_folds_has_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for fold in ("Fold1", "Fold2"):
        for part in ("train", "vali", "test"):
            lines = []
            for group in range(25):
                for _ in range(6):
                    x = rng.normal(size=2)
                    lines.append(f"{int(x[0] > 0.5)} qid:{group} 1:{x[0]:.3f} 2:{x[1]:.3f}\n")
            (tmp_path / f"{fold}-{part}.txt").write_text("".join(lines))
    parts = ("train", "vali", "test")
    inputs = [{"path": str(tmp_path / f"{{fold}}-{part}.txt"), "period": part} for part in parts]
    methods = {"first": {"kind": "feature", "feature": "1"}, "second": {"kind": "feature", "feature": "2"}}
    values = {
        "out": str(tmp_path / "out"),
        "folds": ["Fold1", "Fold2"],
        "prepare": {"source": {"kind": "letor", "n_features": 2}, "inputs": inputs},
        "splits": {"train": {"periods": "train"}, "validation": {"periods": "vali"}, "test": {"periods": "test"}},
        "methods": methods,
        "evaluate": {"baseline": "second", "resamples": 100},
    }
    validate(PipelineJob, values, "test").run()
    first, second = Crossval.read(str(tmp_path / "out" / "summary")).methods
    assert first.folds["ndcg@5"].mean == 1, "labels are a threshold of the first feature"
    assert second.folds["ndcg@5"].mean < 0.9
    assert first.pooled.comparisons["ndcg@5"].low > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ff_03", r"methods.by_value.feature: there is no numeric feature 'ff_03'; the nearest is 'f_03'"),
        ("c_00", r"methods.by_value.feature: there is no numeric feature 'c_00'; the nearest is 'f_00'"),
    ],
)
def test_an_unknown_feature_is_refused_before_anything_is_trained(
    synthetic_dataset: str, tmp_path: Path, name: str, message: str
) -> None:
    methods = {"gbdt": TREES, "by_value": {"kind": "feature", "feature": name}}
    with pytest.raises(InputError, match=message):
        pipeline(synthetic_dataset, tmp_path, methods).run()
    assert not (tmp_path / "seed-0").exists()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"kind": "stack", "members": ["by_value"]}, "other.members: 'by_value' is of kind feature; name another"),
        ({"kind": "self_trained", "of": "by_value"}, "other.of: 'by_value' is of kind feature; name another method"),
        ({"kind": "ensemble", "of": "by_value"}, "'by_value' is not a neural method"),
    ],
)
def test_methods_that_train_others_refuse_it(tmp_path: Path, method: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipeline("data", tmp_path, {"by_value": {"kind": "feature", "feature": "x"}, "other": method})
