"""XGBoost: streamed bins, external memory, group weights and its model file, against XGBoost on the whole matrix."""

import itertools
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st
from labelled_groups import Groups, WriteDataset
from numpy.typing import NDArray

from ltrscale.bundle import boosters
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.runtime.workers import WorkerContext
from ltrscale.trees import data as tree_data
from ltrscale.trees import with_xgboost
from ltrscale.trees.configs import XGBoostConfig
from ltrscale.trees.data import BinCodes, Labelled, check_labels, read_labelled
from ltrscale.trees.library import watching
from ltrscale.trees.with_xgboost import _pages

CONFIG = XGBoostConfig(num_trees=8, max_leaves=8, early_stopping_rounds=None, num_threads=1)
FEATURES = [Feature(name="c", kind="categorical"), Feature(name="x"), Feature(name="y")]
Read = tuple[Labelled, BinCodes, Labelled]


@pytest.fixture(scope="module")
def splits(write_dataset: WriteDataset) -> Read:
    """Groups with a categorical feature and missing values, read in many small batches."""
    rng = np.random.default_rng(0)

    def groups(count: int) -> Groups:
        found: Groups = []
        for _ in range(count):
            n = int(rng.integers(1, 12))
            x_LF = np.column_stack([1_000_000 + rng.integers(0, 15, n), rng.normal(size=(n, 2))])
            labels_L = np.clip(np.round(x_LF[:, 1] + x_LF[:, 0] % 3), 0, 4)
            x_LF[rng.random(x_LF.shape) < 0.1] = np.nan
            found.append((x_LF.astype(np.float32), labels_L.astype(np.float32)))
        return found

    url = write_dataset({"train": groups(300), "validation": groups(50)}, FEATURES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_data, "_DOCS_PER_BATCH", 100)
        train, codes = read_labelled(select(Split(data=(url,), periods=("train",)), labelled=True), "train")
        validation, _ = read_labelled(select(Split(data=(url,), periods=("validation",)), labelled=True), "validation")
    return train, codes, validation


def model_of(config: XGBoostConfig, splits: Read, train: Labelled | None = None, batch: int = 100) -> bytes:
    whole, codes, validation = splits
    streamed = replace(train or whole, kept=None)  # in batches of this size
    with watching(config, validation, "xgboost", WorkerContext()) as watch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_data, "_DOCS_PER_BATCH", batch)
        return config.boost(streamed, validation, codes, watch)


def directly(
    config: XGBoostConfig,
    splits: Read,
    weights: NDArray[np.float64] | None = None,
    changes: Mapping[str, object] | None = None,
    order_N: NDArray[np.int64] | None = None,
) -> xgb.Booster:
    """The same trees by XGBoost on the whole matrix; `changes` are settings under XGBoost's names."""
    train, codes, _ = splits
    order_N = np.arange(len(train.labels_N)) if order_N is None else order_N
    rows_NF = np.concatenate(list(train.rows(codes.known())))[order_N]
    by_group = {"group": train.lengths_Q} if config.objective != "reg:squarederror" else {}
    data = xgb.QuantileDMatrix(
        rows_NF,
        train.labels_N[order_N],
        weight=weights,
        feature_types=["c", "q", "q"],
        enable_categorical=True,
        max_bin=config.max_bin,
        **by_group,
    )
    return xgb.train(config.parameters() | (changes or {}), data, config.num_trees)


def scores_of(model: bytes, splits: Read) -> NDArray[np.float64]:
    train, codes, _ = splits
    booster = xgb.Booster(model_file=bytearray(model))
    rows_NF = np.concatenate(list(train.rows(codes.known())))
    return np.asarray(booster.inplace_predict(rows_NF, predict_type="margin"), np.float64)


def direct_scores(booster: xgb.Booster, splits: Read) -> NDArray[np.float64]:
    return scores_of(bytes(booster.save_raw("json")), splits)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["rank:ndcg", "rank:pairwise", "reg:squarederror"])
def test_streamed_trees_are_those_of_the_whole_matrix(splits: Read, objective: str) -> None:
    config = XGBoostConfig.model_validate({**CONFIG.model_dump(), "objective": objective})
    expected_N = direct_scores(directly(config, splits), splits)
    assert len(np.unique(expected_N)) > 20
    np.testing.assert_allclose(scores_of(model_of(config, splits), splits), expected_N, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "theirs"),
    [
        ({"reg_alpha": 3.0}, {"reg_alpha": 3.0}),
        ({"monotone": {"x": -1}}, {"monotone_constraints": "(0,-1,0)"}),
        ({"pair_method": "mean"}, {"lambdarank_pair_method": "mean", "lambdarank_num_pair_per_sample": 1}),
        ({"pair_method": "mean", "pairs": 4}, {"lambdarank_pair_method": "mean", "lambdarank_num_pair_per_sample": 4}),
        ({"truncation": 2}, {"lambdarank_pair_method": "topk", "lambdarank_num_pair_per_sample": 2}),
    ],
    ids=lambda value: "-".join(value),
)
def test_an_option_is_that_of_xgboost(splits: Read, option: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    found_N = scores_of(model_of(CONFIG.replace(**option), splits), splits)
    expected_N = direct_scores(directly(CONFIG, splits, changes=theirs), splits)
    np.testing.assert_allclose(found_N, expected_N, atol=1e-6)
    assert not np.allclose(found_N, direct_scores(directly(CONFIG, splits), splits), atol=1e-3)


def test_unbiased_trees_see_each_group_in_the_order_of_its_positions(splits: Read) -> None:
    train, codes, validation = splits
    clicks_N = (train.labels_N > 2).astype(np.float64)
    clicked = replace(train, labels_N=clicks_N), codes, validation
    rng = np.random.default_rng(3)
    positions_N = np.concatenate([rng.permutation(n) + 1 for n in train.lengths_Q]).astype(np.float32)
    order_N = np.array(
        [a + place for a, b in itertools.pairwise(train.offsets_Q1) for place in np.argsort(positions_N[a:b])]
    )
    config = CONFIG.replace(unbiased=True)
    shown = replace(clicked[0], positions_N=positions_N)
    found_N = scores_of(model_of(config, clicked, shown), clicked)
    expected = directly(CONFIG, clicked, changes={"lambdarank_unbiased": True}, order_N=order_N)
    np.testing.assert_allclose(found_N, direct_scores(expected, clicked), atol=1e-6)
    in_file_order = directly(CONFIG, clicked, changes={"lambdarank_unbiased": True})
    assert not np.allclose(found_N, direct_scores(in_file_order, clicked), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("option", [{}, {"objective": "reg:squarederror"}, {"subsample": 0.5}], ids=str)
def test_trees_from_external_memory_are_those_from_memory(
    splits: Read, option: Mapping[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages hold the batches that bins in memory are made of, for XGBoost's borders depend a little on these."""
    monkeypatch.setattr(with_xgboost, "_PAGE", 1)
    monkeypatch.setattr(with_xgboost.storage.scratch, "directory", lambda: nullcontext(tmp_path))
    files: set[str] = set()
    grow = with_xgboost._grow

    def looking(*given: Any) -> xgb.Booster:
        files.update(path.name for path in tmp_path.iterdir())
        return grow(*given)

    monkeypatch.setattr(with_xgboost, "_grow", looking)
    config = CONFIG.replace(**option)
    from_memory = model_of(config, splits)
    assert not files
    assert model_of(config.replace(external_memory=True), splits) == from_memory
    assert len(files) == 2, "of the training and of the validation groups"
    assert not list(tmp_path.iterdir()), "they are deleted"


@given(lengths=st.lists(st.integers(1, 9), max_size=12), documents=st.integers(1, 30))
def test_a_page_joins_chunks_up_to_its_size(lengths: list[int], documents: int) -> None:
    rows_NF = np.arange(sum(lengths), dtype=np.float32)[:, None]
    pages = list(_pages(iter(np.split(rows_NF, np.cumsum(lengths)[:-1]) if lengths else []), documents))
    assert all(documents <= len(page) < documents + 9 for page in pages[:-1])
    np.testing.assert_array_equal(np.concatenate([np.empty((0, 1), np.float32), *pages]), rows_NF)


def test_the_device_is_passed_with_its_number() -> None:
    assert CONFIG.parameters()["device"] == "cpu"
    assert CONFIG.parameters(device=torch.device("cuda", 1))["device"] == "cuda:1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(splits: Read) -> None:
    assert model_of(CONFIG.replace(device="auto"), splits) == model_of(CONFIG, splits)
    with pytest.raises(InputError, match=r"^device: cuda is asked for and torch sees 0 GPUs; set device to auto"):
        model_of(CONFIG.replace(device="cuda"), splits)


def test_an_xgboost_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert with_xgboost.has_cuda(), "the wheel of PyPI is built with CUDA"
    assert CONFIG.replace(device="cuda").check_device() == torch.device("cuda", 0)
    monkeypatch.setattr(xgb, "build_info", lambda: {"USE_CUDA": False})
    message = r"^device: cuda is asked for and this XGBoost was built without CUDA; set device to cpu$"
    with pytest.raises(InputError, match=message):
        CONFIG.replace(device="cuda").check_device()


def test_ranking_weights_groups_by_the_mean_of_their_documents(splits: Read) -> None:
    train = splits[0]
    weights_N = np.random.default_rng(1).uniform(0.1, 3.0, len(train.labels_N))
    weighted = replace(train, weights_N=weights_N)
    model = model_of(CONFIG, splits, weighted, batch=10_000)  # XGBoost's own borders depend a little on the batches
    means_Q = [weights_N[a:b].mean() for a, b in zip(train.offsets_Q1, train.offsets_Q1[1:], strict=False)]
    expected_N = direct_scores(directly(CONFIG, splits, np.array(means_Q)), splits)
    np.testing.assert_allclose(scores_of(model, splits), expected_N, atol=1e-6)
    assert not np.allclose(scores_of(model_of(CONFIG, splits), splits), expected_N)


def test_squared_error_weights_documents(splits: Read) -> None:
    config = CONFIG.replace(objective="reg:squarederror")
    weights_N = np.random.default_rng(1).uniform(0.1, 3.0, len(splits[0].labels_N))
    model = model_of(config, splits, replace(splits[0], weights_N=weights_N))
    expected_N = direct_scores(directly(config, splits, weights_N), splits)
    np.testing.assert_allclose(scores_of(model, splits), expected_N, atol=1e-6)


def test_the_model_file_carries_the_codes(splits: Read) -> None:
    model = model_of(CONFIG, splits)
    (codes,) = json.loads(json.loads(model)["learner"]["attributes"]["codes"])
    assert codes == list(range(1_000_000, 1_000_015))
    train = splits[0]
    score = boosters.scorer("xgboost", {"one": model, "two": model}, train.view, threads=1)
    (groups,) = iterate(train.selection, docs_per_batch=1 << 20)
    np.testing.assert_array_equal(score(groups).numpy(), scores_of(model, splits))


def test_codes_of_few_documents_are_seldom_split_on_by_default(write_dataset: WriteDataset) -> None:
    """Labels follow x alone; the category has 300 codes of five documents each, by which chance can be learnt."""
    rng = np.random.default_rng(0)

    def group() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        x_LF = np.column_stack([rng.integers(0, 300, 10), rng.normal(size=(10, 2))]).astype(np.float32)
        return x_LF, (x_LF[:, 1] + rng.normal(size=10) > 1).astype(np.float32)

    url = write_dataset({"train": [group() for _ in range(150)]}, FEATURES)
    train, codes = read_labelled(select(Split(data=(url,), periods=("train",)), labelled=True), "train")

    def splits_by_category(config: XGBoostConfig) -> int:
        model = json.loads(model_of(config, (train, codes, train)))
        trees = model["learner"]["gradient_booster"]["model"]["trees"]
        return sum(len(tree["categories_nodes"]) for tree in trees)

    plain = XGBoostConfig(num_trees=3, num_threads=1)
    assert splits_by_category(plain) < splits_by_category(plain.replace(min_child_weight=0.1)) / 3


def test_linear_gains_take_labels_beyond_the_exponential_ones(splits: Read) -> None:
    tenfold = replace(splits[0], labels_N=splits[0].labels_N * 10)
    with pytest.raises(InputError, match=r"train: group [0-9]+ has label 40, .*gbdt.label_gain"):
        check_labels(tenfold, CONFIG.highest_label())
    linear = CONFIG.replace(label_gain="linear")
    check_labels(tenfold, linear.highest_label())
    model = model_of(linear, splits)
    assert not np.allclose(scores_of(model, splits), scores_of(model_of(CONFIG, splits), splits))
