"""Principal components against scikit-learn, and pseudo-labels: the labels in use, and that no other is read."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import labelled_groups
import numpy as np
import pytest
import torch
from labelled_groups import Groups, WriteDataset, mean_ndcg, read
from sklearn.decomposition import PCA
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import StandardScaler

from ltrscale import config as configs
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle, load
from ltrscale.bundle.views import Projection, raw
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Splits
from ltrscale.data.stream.plan import parts_of
from ltrscale.errors import InputError
from ltrscale.trees import semi
from ltrscale.trees.library import QuantisedConfig
from ltrscale.trees.semi import SemiConfig, SemiJob

FEATURES = [Feature(name="brand", kind="categorical"), *(Feature(name=f"x{i}") for i in range(6))]
TREES = {"kind": "lightgbm", "num_trees": 8, "num_threads": 1, "min_data_in_leaf": 5, "early_stopping_rounds": None}
PSEUDO = {"grades": 31}


def make_groups(rng: np.random.Generator, count: int) -> Groups:
    """A category, four noisy views of one hidden number, a feature far from 0 and a constant one; some are missing."""
    found: Groups = []
    for _ in range(count):
        hidden_L = rng.normal(size=rng.integers(2, 10))
        length = len(hidden_L)
        noisy_LF = hidden_L[:, None] + rng.normal(size=(length, 4))
        others_LF = np.column_stack([1e4 + rng.normal(size=length), np.full(length, 0.1)])
        x_LF = np.column_stack([rng.choice([3, 5_000_000], length), noisy_LF, others_LF])
        x_LF[rng.random(length) < 0.2, 2] = np.nan
        found.append((x_LF.astype(np.float32), np.clip(np.round(hidden_L + 1), 0, 4).astype(np.float32)))
    return found


def data(seed: int = 0, counts: tuple[int, int, int] = (120, 60, 60)) -> dict[str, Groups]:
    rng = np.random.default_rng(seed)
    names = ("train-1", "train-2", "validation", "test")
    return {name: make_groups(rng, count) for name, count in zip(names, (counts[0], *counts), strict=True)}


def splits_of(url: str, fraction: float = 0.25) -> Splits:
    return labelled_groups.splits_of(url, periods="train-1..train-2", labelled_fraction=fraction)


@pytest.fixture(scope="module")
def url(write_dataset: WriteDataset) -> str:
    return write_dataset(data(), FEATURES)


def train(splits: Splits, out: Path, **settings: object) -> Bundle:
    config = SemiConfig.model_validate({"gbdt": TREES, **settings})
    SemiJob(out=str(out), splits=splits, semi=config).work({}, lambda _: None)
    return load(str(out))


def components_of(selection: Selection, number: int) -> Projection:
    return semi._fit_projection(selection, number, raw(selection.features), scaled=True)


def test_components_are_those_of_scikit_learn(url: str) -> None:
    split = splits_of(url).train
    features_NF = read(split, labelled=False).features_NF.numpy()
    projection = components_of(select(split, labelled=False), 4)
    assert projection.features_C.tolist() == [1, 2, 3, 4, 5, 6], "categories have no components"

    imputed_NC = SimpleImputer().fit_transform(features_NF[:, 1:].astype(np.float64))
    z_NC = StandardScaler().fit_transform(imputed_NC)
    theirs = PCA(4).fit(z_NC)
    overlap_KK = projection.components_KC @ theirs.components_.T
    np.testing.assert_allclose(np.abs(overlap_KK), np.eye(4), atol=1e-9)
    expected_NK = theirs.transform(z_NC) * np.sign(overlap_KK.diagonal())
    np.testing.assert_allclose(projection(features_NF), expected_NK, atol=1e-5)
    largest_K = np.abs(projection.components_KC).argmax(axis=1)
    assert (projection.components_KC[np.arange(4), largest_K] > 0).all()


def test_components_do_not_depend_on_how_the_data_is_cut(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    selection = select(splits_of(url).train, labelled=False)
    whole = components_of(selection, 3)
    monkeypatch.setattr(semi, "parts_of", partial(parts_of, values=1))
    assert len([*semi.parts_of(selection)]) == 2
    in_parts = components_of(selection, 3)
    for name in vars(whole):
        np.testing.assert_allclose(getattr(in_parts, name), getattr(whole, name), rtol=1e-10, atol=1e-12)


def test_a_projection_survives_its_file(url: str) -> None:
    projection = components_of(select(splits_of(url).train, labelled=False), 2)
    again = Projection.from_bytes(projection.to_bytes(), 1000)
    for name in vars(projection):
        np.testing.assert_array_equal(getattr(again, name), getattr(projection, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"pca": 2}, {"pseudo_labels": PSEUDO}, {"pca": 2, "pseudo_labels": PSEUDO}], ids=str
)
def test_the_bundle_scores_raw_features_as_it_did_in_training(url: str, tmp_path: Path, settings: dict) -> None:
    bundle = train(splits_of(url), tmp_path / "out", **settings)
    groups = read(splits_of(url).validation)
    value = mean_ndcg(bundle.scorer(threads=1)(groups), groups)
    assert bundle.metrics["validation_ndcg@5"] == pytest.approx(value, abs=1e-12)
    assert bundle.metrics["labelled_groups"] == 60
    assert bundle.metrics.get("pseudo_labelled_groups") == (180 if "pseudo_labels" in settings else None)
    assert value > 0.75


def test_a_component_separates_in_one_split_what_no_feature_does(url: str, tmp_path: Path) -> None:
    """Four noisy views of a number: their first component is less noisy than each of them."""
    stump = {**TREES, "num_trees": 1, "num_leaves": 2}
    with_pca = train(splits_of(url), tmp_path / "pca", pca=1, gbdt=stump)
    text = with_pca.content.decode()
    assert "split_feature=7" in text, "the tree splits on the component"


def test_own_labels_are_kept_and_all_others_are_grades_of_the_first_trees(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown: list[tuple[semi.Labelled, bytes]] = []

    def spy(config, groups, codes, validation, context):  # type: ignore[no-untyped-def]
        result = grow(config, groups, codes, validation, context)
        grown.append((groups, result[0]))
        return result

    grow = semi.grow
    monkeypatch.setattr(semi, "grow", spy)
    splits = splits_of(url)
    train(splits, tmp_path / "out", pseudo_labels=PSEUDO)
    (labelled, first), (everything, _) = grown
    assert len(labelled.ids_Q) == 60
    true = read(splits.train.replace(labelled_fraction=1.0))
    assert true.ids_Q is not None
    assert true.labels_N is not None
    assert everything.ids_Q.tolist() == true.ids_Q.tolist()
    assert everything.offsets_Q1.tolist() == true.offsets_Q1.tolist()
    first_scorer = semi.boosters.scorer("lightgbm", {"first": first}, everything.view, threads=1)
    scores_N = first_scorer(true).numpy()
    own_N = np.repeat(np.isin(true.ids_Q, labelled.ids_Q), true.lengths_Q)
    expected_N = true.labels_N.numpy().astype(np.float64)
    expected_N[~own_N] = QuantisedConfig().from_labels(scores_N[~own_N], np.array([0, (~own_N).sum()]))
    np.testing.assert_array_equal(everything.labels_N, expected_N)
    assert set(everything.labels_N[~own_N]) >= {0.0, 30.0}
    features = np.concatenate(list(everything.rows({})))
    np.testing.assert_array_equal(features, true.features_NF.numpy())


@pytest.mark.slow
def test_labels_that_are_not_in_use_are_not_read(write_dataset: WriteDataset, url: str, tmp_path: Path) -> None:
    """Changing the labels that the sample does not use gives the same bytes."""
    used = read(splits_of(url).train).ids_Q
    assert used is not None
    changed = data()
    gid = 0
    for name in ("train-1", "train-2"):
        for i, (x_LF, labels_L) in enumerate(changed[name]):
            if gid not in used.tolist():
                assert labels_L is not None
                changed[name][i] = (x_LF, 4 - labels_L)
            gid += 1
    other = write_dataset(changed, FEATURES)
    settings = {"pca": 3, "pseudo_labels": {**PSEUDO, "bins": "equal_frequency"}, "first": {**TREES, "num_trees": 3}}
    one, two = (train(splits_of(u), tmp_path / str(i), **settings) for i, u in enumerate((url, other)))
    assert one.contents == two.contents


def test_the_first_trees_are_marked_in_the_report(url: str, tmp_path: Path) -> None:
    records: list[Mapping[str, object]] = []
    config = SemiConfig.model_validate({"gbdt": TREES, "pseudo_labels": PSEUDO, "first": {**TREES, "num_trees": 3}})
    SemiJob(out=str(tmp_path / "out"), splits=splits_of(url), semi=config).work({}, records.append)
    assert [record.get("model") for record in records] == ["first"] * 3 + [None] * 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "neither pca nor pseudo_labels is set"),
        ({"pca": 2, "first": TREES}, "first gives pseudo-labels, which are not asked for"),
        ({"pseudo_labels": PSEUDO, "gbdt": {"relevant_only": True}}, "with pseudo_labels trees learn from all groups"),
        ({"pseudo_labels": {**PSEUDO, "grades": 40}}, r"gains for grades 0 to 31, 40 are asked for; lower grades"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        configs.validate(SemiConfig, settings, "semi")


def test_more_components_than_features_are_named(url: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pca: 7 components of 6 numeric features; lower pca"):
        train(splits_of(url), tmp_path / "out", pca=7)
    assert not (tmp_path / "out").exists()


def test_a_score_does_not_depend_on_what_else_is_in_the_batch(url: str, tmp_path: Path) -> None:
    bundle = train(splits_of(url), tmp_path / "out", pca=3)
    groups, scorer = read(splits_of(url).test), bundle.scorer(threads=1)
    one_by_one = [
        scorer(QueryGroups(groups.features_NF[a:b], torch.tensor([0, b - a])))
        for a, b in zip(groups.offsets_Q1[:-1].tolist(), groups.offsets_Q1[1:].tolist(), strict=True)
    ]
    assert torch.equal(torch.cat(one_by_one), scorer(groups))
