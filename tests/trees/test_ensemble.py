"""Ensembles: the greedy choice against a slow one, the content of the bundle, and resuming an interrupted job."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled_groups import NAMES, Groups, WriteDataset, mean_ndcg, read, splits_of
from numpy.typing import NDArray

from ltrscale import config as configs
from ltrscale.bundle import load
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.split import Splits
from ltrscale.errors import InputError
from ltrscale.trees import gbdt
from ltrscale.trees.gbdt import GBDTJob, _forward_selection

COMMON = {"num_trees": 10, "num_threads": 1, "seed": 3}
DRAWING = {
    "lightgbm": {"kind": "lightgbm", "min_data_in_leaf": 5, "feature_fraction": 0.5, **COMMON},
    "xgboost": {"kind": "xgboost", "colsample_bytree": 0.5, **COMMON},
}


@pytest.fixture(scope="module")
def splits(write_dataset: WriteDataset) -> Splits:
    rng = np.random.default_rng(0)

    def groups() -> Groups:
        found: Groups = []
        for _ in range(60):
            x_LF = rng.normal(size=(rng.integers(2, 10), 4))
            labels_L = np.clip(np.round(x_LF.sum(1) / 2 + rng.normal(size=len(x_LF)) + 1), 0, 4)
            found.append((x_LF.astype(np.float32), labels_L.astype(np.float32)))
        return found

    return splits_of(write_dataset({name: groups() for name in NAMES}, [Feature(name=f"x{i}") for i in range(4)]))


def job(splits: Splits, out: Path, library: str = "lightgbm", **ensemble: int) -> GBDTJob:
    values = {"out": str(out), "splits": splits.model_dump(), "gbdt": DRAWING[library], "ensemble": ensemble}
    return configs.validate(GBDTJob, values, "job")


def slow_choice(scores_CN: NDArray[np.float64], truth_N: NDArray[np.float64], most: int) -> list[int]:
    """Slow: all means along the greedy path; the first best one counts."""

    def value(models: list[int]) -> float:
        return -float(np.square(np.mean(scores_CN[models], axis=0) - truth_N).sum())

    way: list[list[int]] = [[]]
    while len(way[-1]) < most:
        options = [[*way[-1], c] for c in range(len(scores_CN)) if c not in way[-1]]
        way.append(max(options, key=value))
    return max(way[1:], key=value)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_forward_selection_is_greedy_and_keeps_the_best_on_the_way(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    truth_N = rng.normal(size=5)
    scores_CN = truth_N + rng.normal(size=(n, 5))
    most = int(rng.integers(1, n + 1))
    taken, value, alone = _forward_selection(scores_CN, lambda s_N: -float(np.square(s_N - truth_N).sum()), most=most)
    assert taken == slow_choice(scores_CN, truth_N, most)
    assert len(set(taken)) == len(taken) <= most
    assert value >= alone == max(-float(np.square(s_N - truth_N).sum()) for s_N in scores_CN)
    assert value == pytest.approx(-float(np.square(scores_CN[taken].mean(0) - truth_N).sum()))


@pytest.mark.slow
@pytest.mark.parametrize("library", DRAWING)
def test_the_bundle_is_the_mean_of_the_chosen(splits: Splits, tmp_path: Path, library: str) -> None:
    job(splits, tmp_path / "out", library, candidates=4, most=3).run()
    bundle = load(str(tmp_path / "out"))
    candidates = [load(str(tmp_path / "out" / "candidates" / f"seed-{seed}")) for seed in (3, 4, 5, 6)]
    assert len({candidate.content for candidate in candidates}) == 4
    chosen = [next(c for c in candidates if c.content == content) for content in bundle.contents.values()]
    assert 1 <= len(chosen) == bundle.metrics["models"] <= 3
    assert bundle.forest is not None
    assert list(bundle.contents) == list(bundle.forest.files())

    validation = read(splits.validation)
    mean_N = torch.stack([candidate.scorer(threads=1)(validation) for candidate in chosen]).mean(0)
    scores_N = bundle.scorer(threads=1)(validation)
    torch.testing.assert_close(scores_N, mean_N, rtol=0, atol=1e-12)
    value = mean_ndcg(scores_N, validation)
    assert bundle.metrics["validation_ndcg@5"] == pytest.approx(value)
    singles = [candidate.metrics["validation_ndcg@5"] for candidate in candidates]
    assert bundle.metrics["validation_ndcg@5_best_single"] == pytest.approx(max(singles))  # type: ignore[type-var]
    assert value >= max(singles) - 1e-12  # type: ignore[operator,type-var]


def written(job: GBDTJob, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The directories that a job logs as written."""
    caplog.clear()
    with caplog.at_level("INFO", logger="ltrscale"):
        job.run()
    return [text.split("writing ")[1] for record in caplog.records if "writing " in (text := record.getMessage())]


@pytest.mark.slow
def test_an_interrupted_job_goes_on_and_no_candidate_is_trained_twice(
    splits: Splits, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    grow = gbdt.grow

    def dies(config, *arguments):  # type: ignore[no-untyped-def]
        if config.seed == 5:
            raise RuntimeError("lost power")
        return grow(config, *arguments)

    monkeypatch.setattr(gbdt, "grow", dies)
    with pytest.raises(RuntimeError, match="lost power"):
        job(splits, out, candidates=3, most=2).run()
    monkeypatch.setattr(gbdt, "grow", grow)
    assert written(job(splits, out, candidates=3, most=2), caplog) == [str(out), f"{out}/candidates/seed-5"]
    assert written(job(splits, out, candidates=3, most=2), caplog) == []
    assert written(job(splits, out, candidates=3, most=1), caplog) == [str(out)]
    assert written(job(splits, out, candidates=4, most=1), caplog) == [str(out), f"{out}/candidates/seed-6"]


@pytest.mark.parametrize(
    ("library", "changes", "remedy"),
    [
        ("lightgbm", {"feature_fraction": 1.0}, "lower feature_fraction or bagging_fraction"),
        ("xgboost", {"colsample_bytree": 1.0}, "lower colsample_bytree or subsample"),
    ],
)
def test_candidates_that_would_be_equal_are_refused(
    splits: Splits, tmp_path: Path, library: str, changes: dict[str, float], remedy: str
) -> None:
    values = {"out": str(tmp_path), "splits": splits.model_dump(), "gbdt": {**DRAWING[library], **changes}}
    configs.validate(GBDTJob, values, "job")
    with pytest.raises(InputError, match=f"all candidates are equal; {remedy}"):
        configs.validate(GBDTJob, {**values, "ensemble": {}}, "job")
