"""Stacking: scores are found by group, members never score their training groups, and the bundle is complete."""

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labelled_groups import NAMES, Groups, WriteDataset, mean_ndcg, read, splits_of
from nightly import nightly

from ltrscale.batch import QueryGroups, rows_of
from ltrscale.bundle import Bundle, load, views
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.row_groups import Fold
from ltrscale.data.dataset.selection import only_relevant, select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.scored import DocumentScores, score_selection
from ltrscale.errors import InputError
from ltrscale.trees import stacking
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.trees.stacking import StackConfig, StackedJob, StackMember

FEATURES = [Feature(name="noise"), Feature(name="brand", kind="categorical"), Feature(name="price")]
GREEDY = LightGBMConfig(
    num_trees=40, num_leaves=63, min_data_in_leaf=1, num_threads=1, early_stopping_rounds=None, learning_rate=0.3
)
"""Trees that learn labels by heart."""
STACK = StackConfig(folds=3, gbdt=LightGBMConfig(num_trees=30, num_threads=1, min_data_in_leaf=5))


def make_groups(rng: np.random.Generator, count: int) -> Groups:
    """Labels depend on the brand, not on the noise feature; half of their variation is chance."""
    found: Groups = []
    for _ in range(count):
        length = int(rng.integers(3, 10))
        brand_L = rng.choice([7, 9_000_000], length)
        x_LF = np.column_stack([rng.normal(size=length), brand_L, rng.normal(size=length)])
        labels_L = np.where(rng.random(length) < 0.5, brand_L == 7, rng.random(length) < 0.5)
        found.append((x_LF.astype(np.float32), labels_L.astype(np.float32)))
    return found


@pytest.fixture(scope="module")
def splits(write_dataset: WriteDataset) -> Splits:
    rng = np.random.default_rng(0)
    url = write_dataset({name: make_groups(rng, 90) for name in NAMES}, FEATURES)
    return splits_of(url, labelled_fraction=0.8)


def in_fold(split: Split, number: int, *, held_out: bool) -> Split:
    return split.replace(fold=STACK.fold(number, split, held_out=held_out).model_dump())


@pytest.fixture(scope="module")
def member(splits: Splits, tmp_path_factory: pytest.TempPathFactory) -> StackMember:
    """Trees that memorise their training labels, trained on all folds and on all folds but one."""
    folder = tmp_path_factory.mktemp("member")
    train = {"whole": splits.train} | {str(k): in_fold(splits.train, k, held_out=False) for k in range(STACK.folds)}
    for name, split in train.items():
        of_fold = splits.replace(train=split.model_dump())
        GBDTJob(out=str(folder / name), splits=of_fold, gbdt=GREEDY).run()
    return StackMember(bundle=str(folder / "whole"), folds=tuple(str(folder / str(k)) for k in range(STACK.folds)))


def ids_of(split: Split) -> set[int]:
    ids_Q = read(split).ids_Q
    assert ids_Q is not None
    return set(ids_Q.tolist())


def stack(config: StackConfig, members: Mapping[str, StackMember], splits: Splits, out: Path) -> Bundle:
    StackedJob(out=str(out), splits=splits, stack=config, members=dict(members)).work({}, lambda _: None)
    return load(str(out))


def test_scores_are_found_for_any_groups_in_any_order() -> None:
    rng = np.random.default_rng(1)
    lengths = torch.tensor([3, 1, 4, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    known = DocumentScores(torch.tensor([40, 7, 99, 12]), offsets, torch.from_numpy(rng.normal(size=10)))
    for _ in range(10):
        chosen = torch.from_numpy(rng.permutation(4)[: rng.integers(1, 5)])
        rows, of_chosen = rows_of(offsets, chosen)
        groups = QueryGroups(torch.zeros(len(rows), 1), of_chosen, ids_Q=known.ids_Q[chosen])
        assert torch.equal(known(groups), known.scores_N[rows])
    with pytest.raises(AssertionError, match="not scored"):
        known(QueryGroups(torch.zeros(1, 1), torch.tensor([0, 1]), ids_Q=torch.tensor([8])))
    with pytest.raises(AssertionError, match="scored twice"):
        DocumentScores.joined([known, known])


def out_of_fold(config: StackConfig, name: str, member: StackMember, train: Split) -> DocumentScores:
    return stacking._out_of_fold(name, member, select(train, labelled=True), stacking._folds_of(config, train))


@pytest.mark.slow
def test_every_training_group_is_scored_once_by_a_member_that_was_not_trained_on_it(
    splits: Splits, member: StackMember
) -> None:
    scores = out_of_fold(STACK, "m", member, splits.train)
    assert len(scores.ids_Q) == 72
    assert set(scores.ids_Q.tolist()) == ids_of(splits.train)
    seen_by_none = []
    for number, url in enumerate(member.folds):
        held_out = read(in_fold(splits.train, number, held_out=True))
        assert held_out.ids_Q is not None
        opened = load(url)
        trained_on = ids_of(Split.model_validate(opened.made_by["config"]["splits"][0]))
        assert len(trained_on) == opened.metrics["labelled_groups"] == 48
        assert not trained_on & set(held_out.ids_Q.tolist())
        assert torch.equal(scores(held_out), opened.scorer()(held_out))
        seen_by_none += held_out.ids_Q.tolist()
    assert sorted(seen_by_none) == sorted(ids_of(splits.train))


@pytest.mark.slow
def test_trees_that_leave_out_groups_without_a_relevant_document_need_no_scores_of_them(
    splits: Splits, member: StackMember, tmp_path: Path
) -> None:
    config = STACK.replace(gbdt=STACK.gbdt.replace(relevant_only=True))
    labelled = select(splits.train, labelled=True)
    relevant = only_relevant(labelled)
    ids = {i for groups in iterate(relevant) if groups.ids_Q is not None for i in groups.ids_Q.tolist()}
    assert len(ids) == relevant.n_groups < labelled.n_groups
    scores = stacking._out_of_fold("m", member, relevant, stacking._folds_of(config, splits.train))
    assert set(scores.ids_Q.tolist()) == ids
    assert stack(config, {"by-heart": member}, splits, tmp_path / "out").metrics["labelled_groups"] == len(ids)


def test_a_leak_would_show(splits: Splits, member: StackMember) -> None:
    """Out of fold the member is as bad on training groups as on test groups; in fold it knows their labels."""
    train, test = read(splits.train), read(splits.test)
    whole = load(member.bundle).scorer()
    out_of_fold_value = mean_ndcg(out_of_fold(STACK, "m", member, splits.train)(train), train)
    by_heart = mean_ndcg(whole(train), train)
    assert by_heart > 0.99
    assert abs(out_of_fold_value - mean_ndcg(whole(test), test)) < (by_heart - out_of_fold_value) / 2


@pytest.mark.parametrize("folds", [2, 3])
def test_members_that_have_seen_a_held_out_label_are_noticed(splits: Splits, member: StackMember, folds: int) -> None:
    mixed_up = member.replace(folds=member.folds[1:] + member.folds[:1])
    with pytest.raises(AssertionError, match="has seen held-out labels"):
        out_of_fold(STACK, "m", mixed_up, splits.train)
    whole = member.replace(folds=(member.bundle,) * folds)
    with pytest.raises(AssertionError, match="has seen held-out labels"):
        out_of_fold(STACK.replace(folds=folds), "m", whole, splits.train)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "standardise"),
    [
        *(((), False), ("all", True), (("price", "b*"), True)),
        *(nightly((), True), nightly("all", False), nightly(("price", "b*"), False)),
    ],
    ids=str,
)
def test_the_bundle_is_whole_and_scores_raw_features(
    splits: Splits, member: StackMember, tmp_path: Path, features: tuple[str, ...], standardise: bool
) -> None:
    config = STACK.replace(features=features, standardise=standardise)
    stack(config, {"by-heart": member}, splits, tmp_path / "out")
    for file in json.loads((tmp_path / "out" / "manifest.json").read_text())["files"]:
        target = tmp_path / "moved" / file["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "out" / file["path"], target)
    shutil.copy(tmp_path / "out" / "manifest.json", tmp_path / "moved")
    shutil.rmtree(tmp_path / "out")
    bundle = load(str(tmp_path / "moved"))
    assert bundle.members["by-heart"].contents == load(member.bundle).contents
    groups = read(splits.validation)
    assert bundle.metrics["validation_ndcg@5"] == pytest.approx(mean_ndcg(bundle.scorer(threads=1)(groups), groups))
    alone = mean_ndcg(load(member.bundle).scorer()(groups), groups)
    assert bundle.metrics["validation_ndcg@5_by-heart"] == pytest.approx(alone)
    assert bundle.metrics["labelled_groups"] == 72
    scorer = bundle.scorer(threads=1)
    assert torch.equal(torch.cat([*map(scorer, parts(groups))]), scorer(groups))


def parts(groups: QueryGroups) -> list[QueryGroups]:
    bounds = groups.offsets_Q1.tolist()
    return [QueryGroups(groups.features_NF[a:b], torch.tensor([0, b - a])) for a, b in itertools.pairwise(bounds)]


def test_standardised_scores_need_no_common_scale(splits: Splits, member: StackMember) -> None:
    """Trees do not change if the scores of a member are a hundred times larger."""
    groups, scorer = read(splits.validation), load(member.bundle).scorer()
    nothing = views.View((), lambda groups: np.zeros((groups.n_documents, 0), np.float32))
    plain, loud = (
        views.scored(nothing, {"m": one}, standardise=True).columns(groups)
        for one in (scorer, lambda groups: 100 * scorer(groups) + 7)
    )
    np.testing.assert_allclose(plain, loud, atol=1e-5)


@pytest.mark.slow
def test_a_ready_bundle_scores_all_groups_itself(splits: Splits, member: StackMember, tmp_path: Path) -> None:
    ready = StackMember(bundle=member.bundle)
    scores = out_of_fold(STACK, "ready", ready, splits.train)
    expected = score_selection(select(splits.train, labelled=True), load(member.bundle).scorer(), "m")
    assert torch.equal(scores.scores_N, expected.scores_N)
    bundle = stack(STACK, {"a": member, "b": ready}, splits, tmp_path / "out")
    assert list(bundle.members) == ["a", "b"]


@pytest.mark.slow
def test_members_find_their_features_by_name(splits: Splits, member: StackMember, reorder: Any, tmp_path: Path) -> None:
    """The stack is grown on data whose features are in another order, and scores with them in yet another."""
    (url,), (noise, brand, price) = splits.train.data, FEATURES
    wide = splits.replace(
        **{
            name: {**split.model_dump(), "data": reorder(url, order)}
            for (name, split), order in zip(
                splits.by_name.items(),
                ([price, Feature(name="more"), noise, brand], [noise, Feature(name="more"), brand, price], FEATURES),
                strict=True,
            )
        }
    )
    config = STACK.replace(features=("price",))
    made = stack(config, {"m": StackMember(bundle=member.bundle)}, wide, tmp_path / "out")
    plain = stack(config, {"m": StackMember(bundle=member.bundle)}, splits, tmp_path / "plain")
    assert made.contents == plain.contents
    groups, there = read(wide.validation), select(wide.validation, labelled=True).features
    expected_N = plain.scorer()(read(splits.validation))
    assert torch.equal(made.scorer(features=there)(groups), expected_N)


def test_a_damaged_member_is_named(splits: Splits, member: StackMember, tmp_path: Path) -> None:
    stack(STACK, {"m": member}, splits, tmp_path / "out")
    model = tmp_path / "out" / "members" / "m" / "model.txt"
    model.write_text(model.read_text() + "\n")
    with pytest.raises(InputError, match=r"members/m/model.txt: its content is not what was committed"):
        load(str(tmp_path / "out"))


def test_missing_features_are_named(splits: Splits, member: StackMember, tmp_path: Path) -> None:
    for features, message in (
        (("prize",), r"features: no feature matches 'prize'; the nearest is 'price'"),
        (("price", "price"), "features: 'price' is listed twice; leave one out"),
    ):
        with pytest.raises(InputError, match=message):
            stack(STACK.replace(features=features), {"m": member}, splits, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_groups_of_a_fold_are_dealt_again_but_not_those_within_a_fold() -> None:
    split = Split(data=("x",), fold=Fold(number=0, of=5, held_out=True))
    dealt = STACK.fold(1, split, held_out=True)
    assert dealt.within is not None
    assert (dealt.within.of, dealt.of, dealt.within.held_out) == (5, STACK.folds, True)
    with pytest.raises(InputError, match=r"train\.fold\.within: leave it out"):
        STACK.fold(0, split.replace(fold=dealt.model_dump()), held_out=True)
