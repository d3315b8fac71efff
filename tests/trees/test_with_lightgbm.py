"""LightGBM grows the same trees from streamed data as from the whole matrix; the objectives added to it."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import lightgbm as lgb
import numpy as np
import pyarrow as pa
import pytest
import torch
from dataset_columns import add_column
from labelled_groups import NAMES, Groups, WriteDataset, read, splits_of
from numpy.typing import NDArray
from small_trainers import grow_trees

from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle
from ltrscale.bundle.boosters import renumber
from ltrscale.bundle.opened import Scorer
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits
from ltrscale.errors import InputError
from ltrscale.runtime.workers import WorkerContext
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.data import read_labelled
from ltrscale.trees.library import QuantisedConfig, watching
from ltrscale.trees.with_lightgbm import _softmax_objective

FEATURES = [Feature(name="brand", kind="categorical"), Feature(name="a"), Feature(name="b")]
CONFIG = LightGBMConfig(num_trees=15, num_threads=1, min_data_in_leaf=5, early_stopping_rounds=None)


def make_groups(rng: np.random.Generator, count: int) -> Groups:
    """A category, a number that is often 0, and one that is often missing; relevance depends on all three."""
    found: Groups = []
    for _ in range(count):
        length = int(rng.integers(1, 12))
        x_LF = np.column_stack([rng.choice([3, 70, 5_000_000], length), rng.normal(size=(length, 2))])
        labels_L = np.clip(np.round(x_LF[:, 1] + (x_LF[:, 0] == 70) + np.abs(x_LF[:, 2])), 0, 4)
        x_LF[rng.random(length) < 0.3, 2] = np.nan
        x_LF[rng.random(length) < 0.2, 1] = 0.0
        found.append((x_LF.astype(np.float32), labels_L.astype(np.float32)))
    return found


@pytest.fixture
def splits(write_dataset: WriteDataset) -> Splits:
    rng = np.random.default_rng(0)
    return splits_of(write_dataset({name: make_groups(rng, 90) for name in NAMES}, FEATURES))


def train(splits: Splits, out: Path, config: LightGBMConfig) -> Bundle:
    return grow_trees(config, splits, str(out))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["lambdarank", "rank_xendcg", "regression"])
def test_streamed_bins_give_the_trees_of_the_whole_matrix(splits: Splits, tmp_path: Path, objective: str) -> None:
    config = CONFIG.replace(objective=objective, feature_fraction=0.7, bagging_fraction=0.8)
    found_N = train(splits, tmp_path / "out", config).scorer()(read(splits.test)).numpy()
    np.testing.assert_array_equal(found_N, direct(splits, {}, config))
    assert len(np.unique(found_N)) > 50


CODES = {0: np.float32([3, 70, 5_000_000])}


def direct(
    splits: Splits, changes: Mapping[str, object], config: LightGBMConfig = CONFIG, **fields: object
) -> NDArray[np.float64]:
    """Scores of the test documents by LightGBM on the whole matrix, with settings under its own names over others."""
    groups, test = read(splits.train), read(splits.test)
    assert groups.labels_N is not None
    parameters = config.parameters(config.gains(4)) | changes
    data = lgb.Dataset(
        renumber(groups.features_NF.numpy(), CODES),
        groups.labels_N.numpy(),
        group=groups.lengths_Q.numpy(),
        categorical_feature=[0],
        params=parameters,
        **fields,
    )
    booster = lgb.train(parameters, data, config.num_trees)
    return np.asarray(booster.predict(renumber(test.features_NF.numpy(), CODES)))


BY_SETS = {"max_cat_to_onehot": 1, "min_data_per_group": 20}
"""Splits the three codes of the category as LightGBM splits many codes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "option"),
    [
        ({"bagging_fraction": 0.5, "bagging_freq": 1}, {"bagging_by_query": True}),
        ({}, {"extra_trees": True}),
        ({}, {"lambda_l1": 2.0}),
        ({}, {"max_cat_to_onehot": 1}),
        (BY_SETS, {"cat_smooth": 200.0}),
        (BY_SETS, {"cat_l2": 100.0}),
        (BY_SETS, {"min_data_per_group": 150}),
    ],
    ids=lambda value: "-".join(value),
)
def test_an_option_is_that_of_lightgbm(
    splits: Splits, tmp_path: Path, without: Mapping[str, object], option: Mapping[str, object]
) -> None:
    given = {key: value for key, value in {**without, **option}.items() if key != "bagging_freq"}
    found_N = train(splits, tmp_path / "out", CONFIG.replace(**given)).scorer()(read(splits.test)).numpy()
    np.testing.assert_array_equal(found_N, direct(splits, {**without, **option}))
    assert not np.array_equal(found_N, direct(splits, without))


def test_monotone_features_are_named_and_bind_scores(splits: Splits, tmp_path: Path) -> None:
    """Relevance rises with `a`, so that falling scores take the constraint; the library counts features by place."""
    config = CONFIG.replace(monotone={"a*": -1, "b": 1})
    scorer = train(splits, tmp_path / "out", config).scorer()
    test = read(splits.test)
    expected_N = direct(splits, {"monotone_constraints": [0, -1, 1]})
    np.testing.assert_array_equal(scorer(test).numpy(), expected_N)

    def swept(scorer: Scorer, column: int) -> NDArray[np.float64]:
        """Differences of the scores of some documents as a feature rises."""
        values, n = torch.linspace(-3, 3, 60), 20
        x_VNF = test.features_NF[:n].nan_to_num(0.0).repeat(len(values), 1, 1)
        x_VNF[:, :, column] = values[:, None]
        scores_VN = scorer(QueryGroups(x_VNF.flatten(0, 1), torch.tensor([0, n * len(values)]))).view(-1, n)
        return scores_VN.diff(dim=0).numpy()

    assert (swept(scorer, 1) <= 0).all()
    assert (swept(scorer, 2) >= 0).all()
    free = train(splits, tmp_path / "free", CONFIG).scorer()
    assert (swept(free, 1) > 0).any()
    assert (swept(free, 2) < 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["cegb_penalty_feature_coupled", "cegb_penalty_feature_lazy"])
def test_costs_of_features_are_named_and_paid(splits: Splits, tmp_path: Path, key: str) -> None:
    dear, little = (1e6, 3.0) if key.endswith("coupled") else (1e3, 0.01)
    config = CONFIG.replace(**{key: {"brand": dear, "a*": little}})
    bundle = train(splits, tmp_path / "out", config)
    np.testing.assert_array_equal(bundle.scorer()(read(splits.test)).numpy(), direct(splits, {key: [dear, little, 0]}))
    assert {*bundle.leans_on()} <= {"a", "b"}
    with pytest.raises(InputError, match=f"{key}: no feature matches 'aa'; the nearest is 'a'"):
        train(splits, tmp_path / "other", CONFIG.replace(**{key: {"aa": 1}}))


@pytest.mark.parametrize(
    ("monotone", "message"),
    [
        ({"aa": 1}, "monotone: no feature matches 'aa'; the nearest is 'a'"),
        ({"brand": 1}, "monotone: 'brand' matches 'brand', whose codes have no order; narrow it"),
        ({"a": 1, "numeric": -1}, "monotone: 'a' has both directions; let 'numeric' not match it"),
    ],
)
def test_what_cannot_be_monotone_is_named(
    splits: Splits, tmp_path: Path, monotone: Mapping[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        train(splits, tmp_path / "out", CONFIG.replace(monotone=monotone))


@pytest.mark.slow
def test_unbiased_trees_take_the_positions_of_the_data(splits: Splits, tmp_path: Path) -> None:
    rng, groups = np.random.default_rng(2), read(splits.train)
    positions_N = np.concatenate([1 + rng.permutation(length) for length in groups.lengths_Q.tolist()])
    assert groups.ids_Q is not None
    shown = dict(zip(groups.ids_Q.tolist(), np.split(positions_N, groups.offsets_Q1[1:-1]), strict=True))
    add_column(splits.train.data[0], "positions", pa.list_(pa.float32()), shown.get)
    config = CONFIG.replace(unbiased=True, bias_regularization=0.5)
    found_N = train(splits, tmp_path / "out", config).scorer()(read(splits.test)).numpy()
    changes = {"lambdarank_position_bias_regularization": 0.5}
    np.testing.assert_array_equal(found_N, direct(splits, changes, position=positions_N))
    assert not np.array_equal(found_N, direct(splits, {}))
    unregularised_N = direct(splits, {}, position=positions_N)
    assert not np.array_equal(found_N, unregularised_N)


def test_document_weights_count(splits: Splits) -> None:
    train_groups, codes = read_labelled(select(splits.train, labelled=True), "train")
    validation, _ = read_labelled(select(splits.validation, labelled=True), "validation")
    weights_N = np.random.default_rng(1).uniform(0.1, 3, len(train_groups.labels_N))
    weighted = replace(train_groups, weights_N=weights_N)
    with watching(CONFIG, validation, "lightgbm", WorkerContext()) as watch:
        text = CONFIG.boost(weighted, validation, codes, watch)
    test_NF = renumber(read(splits.test).features_NF.numpy(), CODES)
    found_N = lgb.Booster(model_str=text.decode()).predict(test_NF)
    np.testing.assert_array_equal(found_N, direct(splits, {}, weight=weights_N))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_softmax_objective_is_the_derivative_of_the_cross_entropy(temperature: float) -> None:
    rng = np.random.default_rng(1)
    offsets_Q1 = np.array([0, 4, 5, 11])
    targets_N, scores_N = rng.normal(size=(2, 11)) * 3
    objective = _softmax_objective(targets_N, offsets_Q1, temperature)
    gradient_N, hessian_N = objective(scores_N, None)

    def loss(scores: torch.Tensor) -> torch.Tensor:
        parts = itertools.pairwise(offsets_Q1)
        targets = torch.from_numpy(targets_N) / temperature
        return -sum(
            (targets[a:b].softmax(0) * scores[a:b].log_softmax(0)).sum()
            for a, b in parts  # type: ignore[arg-type]
        )

    scores = torch.from_numpy(scores_N).requires_grad_()
    (expected_N,) = torch.autograd.grad(loss(scores), scores)
    np.testing.assert_allclose(gradient_N, expected_N.numpy(), atol=1e-12)
    diagonal_N = torch.autograd.functional.hessian(loss, scores.detach()).diagonal()
    np.testing.assert_allclose(hessian_N, diagonal_N.numpy(), atol=1e-12)


@pytest.mark.slow
def test_the_softmax_student_comes_close_to_its_target(splits: Splits, tmp_path: Path) -> None:
    config = CONFIG.replace(objective="softmax", num_trees=200, lambda_l2=0.0)
    bundle = train(splits, tmp_path / "out", config)
    groups = read(splits.train)
    assert groups.labels_N is not None
    scores_N = bundle.scorer()(groups).numpy()
    gradient_N, _ = _softmax_objective(groups.labels_N.double().numpy(), groups.offsets_Q1.numpy(), 1.0)(scores_N, None)
    before_N, _ = _softmax_objective(groups.labels_N.double().numpy(), groups.offsets_Q1.numpy(), 1.0)(
        0 * scores_N, None
    )
    assert np.abs(gradient_N).mean() < 0.3 * np.abs(before_N).mean()


def test_gains_of_your_own(splits: Splits, tmp_path: Path) -> None:
    gains = (0.0, 1.0, 1.5, 2.0, 10.0)
    text = train(splits, tmp_path / "own", CONFIG.replace(label_gain=gains)).content.decode()
    assert "[label_gain: 0,1,1.5,2,10]" in text
    assert CONFIG.replace(label_gain="linear").gains(200)[200] == 200
    with pytest.raises(
        InputError, match=r"^train: group \d+ has label [34], and gains are for integers from 0 to 2; .*"
    ):
        train(splits, tmp_path / "short", CONFIG.replace(label_gain=gains[:3]))


@pytest.mark.slow
def test_quantised_targets_are_what_trees_are_grown_on(splits: Splits, tmp_path: Path) -> None:
    """Labels 0 to 4 in two grades are 0 and 1, the upper one for labels from 2; validation labels stay as they are."""
    bundle = train(splits, tmp_path / "two", CONFIG.replace(targets=QuantisedConfig(grades=2)))
    train_groups, codes = read_labelled(select(splits.train, labelled=True), "train")
    validation, _ = read_labelled(select(splits.validation, labelled=True), "validation")
    targets = replace(train_groups, labels_N=(train_groups.labels_N >= 2) * 1.0)
    with watching(CONFIG, validation, "lightgbm", WorkerContext()) as watch:
        expected = CONFIG.boost(targets, validation, codes, watch)
    assert bundle.content == expected
    assert "[label_gain: 0,1,3,7,15]" in expected.decode()


def test_without_early_stopping_all_trees_are_kept(splits: Splits, tmp_path: Path) -> None:
    bundle = train(splits, tmp_path / "out", CONFIG)
    assert bundle.metrics["trees"] == bundle.content.decode().count("\nTree=") == CONFIG.num_trees
