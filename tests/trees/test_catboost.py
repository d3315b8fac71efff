"""CatBoost: its own scores from a bundle, group weights, stopping, and a missing library."""

import sys
from dataclasses import replace
from pathlib import Path

import catboost
import numpy as np
import pandas as pd
import pytest
import torch
from labelled_groups import Groups, WriteDataset
from numpy.typing import NDArray
from small_trainers import grow_trees

from ltrscale.bundle import boosters
from ltrscale.bundle.views import raw
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError, Stopped
from ltrscale.runtime.workers import WorkerContext
from ltrscale.trees import with_catboost
from ltrscale.trees.configs import CatBoostConfig
from ltrscale.trees.data import BinCodes, Labelled, read_labelled
from ltrscale.trees.library import StoppingWatch, watching

CONFIG = CatBoostConfig(num_trees=10, depth=3, learning_rate=0.3, early_stopping_rounds=None, num_threads=1)
Read = tuple[Labelled, BinCodes, Labelled]


@pytest.fixture(scope="module")
def data(write_dataset: WriteDataset) -> str:
    rng = np.random.default_rng(0)

    def groups(count: int) -> Groups:
        found: Groups = []
        for _ in range(count):
            n = int(rng.integers(1, 12))
            x_LF = np.column_stack([rng.normal(size=n), 1_000_000 + rng.integers(0, 6, n), rng.normal(size=n)])
            labels_L = np.clip(np.round(x_LF[:, 0] + x_LF[:, 1] % 3), 0, 4)
            x_LF[rng.random(x_LF.shape) < 0.1] = np.nan
            found.append((x_LF.astype(np.float32), labels_L.astype(np.float32)))
        return found

    features = [Feature(name="x"), Feature(name="c", kind="categorical"), Feature(name="y")]
    return write_dataset({"train": groups(150), "validation": groups(40), "test": groups(1)}, features)


@pytest.fixture(scope="module")
def splits(data: str) -> Read:
    train, codes = read_labelled(select(Split(data=(data,), periods=("train",)), labelled=True), "train")
    validation, _ = read_labelled(select(Split(data=(data,), periods=("validation",)), labelled=True), "validation")
    return train, codes, validation


def model_of(splits: Read, config: CatBoostConfig = CONFIG, context: WorkerContext | None = None) -> bytes:
    train, codes, validation = splits
    with watching(config, validation, "catboost", context or WorkerContext()) as watch:
        return config.boost(train, validation, codes, watch)


def frame(rows_NF: NDArray[np.float32]) -> pd.DataFrame:
    """Features with categories as texts, converted one by one."""
    names = ["missing" if np.isnan(value) else str(int(value)) for value in rows_NF[:, 1]]
    return pd.DataFrame({0: rows_NF[:, 0], 1: names, 2: rows_NF[:, 2]})


def direct(splits: Read, objective: str, weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Scores of the training documents by CatBoost itself."""
    train, codes, _ = splits
    rows = frame(np.concatenate(list(train.rows(codes.known()))))
    group_N = np.repeat(train.ids_Q, train.lengths_Q)
    pool = catboost.Pool(rows, train.labels_N, group_id=group_N, group_weight=weights, cat_features=[1])
    model = catboost.CatBoost(
        {
            "loss_function": objective, "iterations": 10, "depth": 3, "learning_rate": 0.3, "random_seed": 0,
            "thread_count": 1, "l2_leaf_reg": 3.0, "border_count": 254, "rsm": 1.0,
            "allow_writing_files": False, "logging_level": "Silent",
        }
    )  # fmt: skip
    return np.asarray(model.fit(pool).predict(rows))


def scores_of(model: bytes, splits: Read) -> NDArray[np.float64]:
    (groups,) = iterate(splits[0].selection, docs_per_batch=1 << 20)
    return boosters.scorer("catboost", {"model": model}, splits[0].view, threads=1)(groups).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["YetiRank", "QueryRMSE"])
def test_scores_are_those_of_catboost(splits: Read, objective: str) -> None:
    config = CatBoostConfig.model_validate({**CONFIG.model_dump(), "objective": objective})
    expected_N = direct(splits, objective)
    assert len(np.unique(expected_N)) > 20
    np.testing.assert_allclose(scores_of(model_of(splits, config), splits), expected_N, atol=1e-9)


@pytest.mark.slow
def test_groups_are_weighted_by_the_mean_of_their_documents(splits: Read) -> None:
    train, codes, validation = splits
    weights_N = np.random.default_rng(1).uniform(0.1, 3.0, len(train.labels_N))
    weighted = (replace(train, weights_N=weights_N), codes, validation)
    means_Q = np.array([weights_N[a:b].mean() for a, b in zip(train.offsets_Q1, train.offsets_Q1[1:], strict=False)])
    expected_N = direct(splits, "QueryRMSE", np.repeat(means_Q, train.lengths_Q))
    config = CONFIG.replace(objective="QueryRMSE")
    np.testing.assert_allclose(scores_of(model_of(weighted, config), splits), expected_N, atol=1e-9)
    assert not np.allclose(scores_of(model_of(splits, config), splits), expected_N)


@pytest.mark.slow
def test_trees_judged_after_the_last_are_those_judged_one_by_one(splits: Read) -> None:
    """As on a GPU, from which CatBoost calls nobody: the trees after the best are grown and dropped."""
    config = CONFIG.replace(num_trees=60, early_stopping_rounds=3)

    def grow(validation: Labelled | None, *, calls_back: bool) -> tuple[StoppingWatch, bytes]:
        train, codes, _ = splits
        with watching(config, validation, "catboost", WorkerContext()) as watch:
            given = config.parameters(), train, validation, codes, watch
            return watch, with_catboost.boost(*given, stop_on=5, calls_back=calls_back)

    (one_by_one, model), (afterwards, model_afterwards) = (grow(splits[2], calls_back=way) for way in (True, False))
    assert one_by_one.trees == afterwards.trees < 60
    assert one_by_one.kept == afterwards.kept == one_by_one.trees - 3
    np.testing.assert_array_equal(scores_of(model_afterwards, splits), scores_of(model, splits))
    assert grow(None, calls_back=False)[0].kept == 60


def test_on_a_gpu_it_gets_the_task_and_what_it_cannot_take_is_refused(
    splits: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CONFIG.parameters() == CONFIG.parameters(torch.device("cpu"))
    on_gpu = CONFIG.parameters(torch.device("cuda", 1))
    assert (on_gpu["task_type"], on_gpu["devices"]) == ("GPU", "1")
    assert "rsm" not in on_gpu
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match=r"^device: cuda is asked for and torch sees 0 GPUs; "):
            model_of(splits, CONFIG.replace(device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    config = CONFIG.replace(device="cuda")
    assert config.check_device() == torch.device("cuda", 0)
    with pytest.raises(InputError, match=r"^rsm: on a GPU CatBoost has no share of the features; leave it out"):
        config.replace(rsm=0.5).check_device()
    with pytest.raises(InputError, match=r"^border_count: on a GPU CatBoost takes at most 255, not 256; lower it$"):
        config.replace(border_count=256).check_device()
    long = replace(splits[0], offsets_Q1=np.array([0, 5, 1029]), ids_Q=np.array([3, 8]))
    message = r"^train: group 8 has 1,024 documents, YetiRank on a GPU takes 1,023; .* set device to cpu$"
    with pytest.raises(InputError, match=message):
        model_of((long, *splits[1:]), config)


def test_a_request_to_stop_comes_through_the_library(splits: Read) -> None:
    asked = iter([False, False, True])
    with pytest.raises(Stopped, match="asked to stop after 2 trees"):
        model_of(splits, context=WorkerContext(stopping=lambda: next(asked)))


def test_what_it_refuses_to_learn_from_is_said_in_one_line(splits: Read) -> None:
    train, codes, validation = splits
    equal = (replace(train, labels_N=np.ones_like(train.labels_N)), codes, validation)
    with pytest.raises(InputError, match=r"^train: CatBoost finds nothing to learn \(All train targets are equal\); "):
        model_of(equal)


def test_a_missing_library_is_named_before_data_is_read(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "catboost", None)
    one_line = r"^CatBoost is not installed; pip install 'ltrscale\[trees-extra\]'$"
    splits = {name: {"data": data, "periods": name} for name in ("train", "validation", "test")}
    with pytest.raises(InputError, match=one_line):
        grow_trees(CONFIG, Splits.model_validate(splits), str(tmp_path))
    with pytest.raises(InputError, match=one_line):
        boosters.scorer("catboost", {"model": b""}, raw(()), threads=1)
