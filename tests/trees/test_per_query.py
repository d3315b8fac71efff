"""Trees on features standardised within each query group: the same in training and in every kind of bundle."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labelled_groups import NAMES, Groups, WriteDataset, mean_ndcg, read, splits_of
from numpy.typing import NDArray
from sklearn.decomposition import PCA, TruncatedSVD
from small_trainers import grow_trees

from ltrscale import config as configs
from ltrscale.batch import QueryGroups, standardise_groups
from ltrscale.bundle import Bundle, load
from ltrscale.bundle.views import raw
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits
from ltrscale.errors import InputError
from ltrscale.serving.trees import trees_of
from ltrscale.trees import semi
from ltrscale.trees.configs import CatBoostConfig, GBDTConfig, LightGBMConfig, XGBoostConfig
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.trees.semi import SemiConfig, SemiJob
from ltrscale.trees.stacking import StackConfig, StackedJob, StackMember

FEATURES = [Feature(name="a"), Feature(name="brand", kind="categorical"), Feature(name="b"), Feature(name="c")]
COMMON = {"num_trees": 8, "num_threads": 1, "early_stopping_rounds": None, "per_query": True}
LIGHTGBM = LightGBMConfig(min_data_in_leaf=5, feature_fraction=0.5, **COMMON)
LIBRARIES = [LIGHTGBM, XGBoostConfig(**COMMON), CatBoostConfig(**COMMON)]


def make_groups(rng: np.random.Generator, count: int) -> Groups:
    """Within a group the first feature is the label; its level and scale in the group drown this between groups."""
    found: Groups = []
    for _ in range(count):
        x_LF = rng.normal(size=(rng.integers(4, 12), 4))
        labels_L = np.clip(np.round(x_LF[:, 0] + x_LF[:, 2] / 2 + 1), 0, 4)
        x_LF[:, [0, 2]] = 100 * rng.normal() + x_LF[:, [0, 2]] * rng.exponential()
        x_LF[:, 1] = rng.choice([3, 5_000_000], len(x_LF))
        x_LF[rng.random(len(x_LF)) < 0.2, 2] = np.nan
        found.append((x_LF.astype(np.float32), labels_L.astype(np.float32)))
    return found


def standardised(groups: Groups) -> Groups:
    def one(x_LF: NDArray[np.float32]) -> NDArray[np.float32]:
        y_LF = standardise_groups(torch.from_numpy(x_LF), torch.tensor([0, len(x_LF)])).numpy()
        y_LF[:, 1] = x_LF[:, 1]
        return y_LF

    return [(one(x_LF), labels_L) for x_LF, labels_L in groups]


@pytest.fixture(scope="module")
def both(write_dataset: WriteDataset) -> tuple[Splits, Splits]:
    """The same groups, raw and standardised."""
    rng = np.random.default_rng(0)
    data = {name: make_groups(rng, 80) for name in NAMES}
    urls = [write_dataset(made, FEATURES) for made in (data, {name: standardised(data[name]) for name in NAMES})]
    return splits_of(urls[0]), splits_of(urls[1])


def train(config: GBDTConfig, splits: Splits, out: Path) -> Bundle:
    return grow_trees(config, splits, str(out))


def check_scores_raw_features(bundle: Bundle, splits: Splits) -> None:
    """The bundle reaches on raw features the metric of its training."""
    groups = read(splits.validation)
    value = mean_ndcg(bundle.scorer(threads=1)(groups), groups)
    assert bundle.metrics["validation_ndcg@5"] == pytest.approx(value, abs=1e-12)
    assert value > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("config", LIBRARIES, ids=lambda config: config.kind)
def test_trees_are_those_of_standardised_data(both: tuple[Splits, Splits], tmp_path: Path, config: GBDTConfig) -> None:
    raw, ready = both
    ours = train(config, raw, tmp_path / "ours")
    theirs = train(config.replace(per_query=False), ready, tmp_path / "theirs")
    assert ours.content == theirs.content
    assert torch.equal(ours.scorer()(read(raw.test)), theirs.scorer()(read(ready.test)))
    check_scores_raw_features(ours, raw)
    plain = train(config.replace(per_query=False), raw, tmp_path / "plain")
    assert float(plain.metrics["validation_ndcg@5"] or 1) < float(ours.metrics["validation_ndcg@5"] or 0)


def test_level_and_scale_of_a_feature_in_a_group_and_other_groups_do_not_matter(
    both: tuple[Splits, Splits], tmp_path: Path
) -> None:
    bundle, groups = train(LIGHTGBM, both[0], tmp_path / "out"), read(both[0].test)
    scores_N, scorer = bundle.scorer(threads=1)(groups), bundle.scorer(threads=1)
    for q in (0, 3, 7):
        a, b = groups.offsets_Q1[q : q + 2].tolist()
        x_LF, offsets_Q1 = groups.features_NF[a:b].clone(), torch.tensor([0, b - a])
        for factor in (1, 4):  # powers of two, so that nothing is rounded
            x_LF[:, [0, 2, 3]] *= factor
            assert torch.equal(scorer(QueryGroups(x_LF, offsets_Q1)), scores_N[a:b])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"pca": 2}, {"pca": 2, "pca_scaled": False, "pseudo_labels": {"grades": 5}}], ids=str
)
def test_semi_supervised_trees(both: tuple[Splits, Splits], tmp_path: Path, settings: dict[str, Any]) -> None:
    config = SemiConfig.model_validate({"gbdt": LIGHTGBM.model_dump(), **settings})
    SemiJob(out=str(tmp_path), splits=both[0], semi=config).work({}, lambda _: None)
    check_scores_raw_features(load(str(tmp_path)), both[0])


def test_components_of_features_that_are_not_scaled_are_those_of_scikit_learn(both: tuple[Splits, Splits]) -> None:
    selection = select(both[0].train, labelled=False)
    view = raw(selection.features, per_query=LIGHTGBM.per_query)
    projection = semi._fit_projection(selection, 2, view, scaled=False)
    columns_NG = view.columns(read(both[0].train))
    z_NC = np.nan_to_num(columns_NG[:, [0, 2, 3]].astype(np.float64))
    z_NC -= z_NC.mean(0)  # groups with missing values leave a mean that is not quite 0
    for theirs in (PCA(2), TruncatedSVD(2, algorithm="arpack")):
        expected_NK = theirs.fit_transform(z_NC)
        ours_NK = projection(columns_NG)
        signs_K = np.sign((ours_NK * expected_NK).sum(0))
        np.testing.assert_allclose(ours_NK, expected_NK * signs_K, atol=1e-5)


@pytest.mark.slow
def test_an_ensemble(both: tuple[Splits, Splits], tmp_path: Path) -> None:
    values = {"out": str(tmp_path), "splits": both[0].model_dump(), "gbdt": LIGHTGBM.model_dump()}
    configs.validate(GBDTJob, {**values, "ensemble": {"candidates": 3, "most": 2}}, "job").run()
    check_scores_raw_features(load(str(tmp_path)), both[0])


def test_a_stack(both: tuple[Splits, Splits], tmp_path: Path) -> None:
    member = StackMember(bundle=train(LIGHTGBM.replace(num_trees=1), both[0], tmp_path / "member").url)
    config = StackConfig.model_validate({"features": ["c", "a"], "gbdt": LIGHTGBM.model_dump()})
    out = str(tmp_path / "out")
    StackedJob(out=out, splits=both[0], stack=config, members={"m": member}).work({}, lambda _: None)
    check_scores_raw_features(load(out), both[0])


def test_what_does_not_fit_is_named(both: tuple[Splits, Splits], tmp_path: Path) -> None:
    bundle = train(LIGHTGBM, both[0], tmp_path / "out")
    with pytest.raises(InputError, match=r"features standardised per query.*which lightgbm cannot express"):
        trees_of(bundle, {}, to="lightgbm", libraries=["lightgbm"])
    first = LIGHTGBM.replace(per_query=False).model_dump()
    values = {"gbdt": LIGHTGBM.model_dump(), "pseudo_labels": {"grades": 5}, "first": first}
    with pytest.raises(InputError, match="set per_query in both, or in neither"):
        configs.validate(SemiConfig, values, "semi")
