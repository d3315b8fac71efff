"""Cleaning of clicks: weights, refined labels and negatives against loops, and the order of the steps."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest
from reference import clicks as reference

from ltrscale.arrays import offsets
from ltrscale.derive.cleaning import (
    ClickOrder,
    RandomNegatives,
    Refine,
    ShownOnly,
    _clicks_of,
    _draw_others,
    _order_labels,
    _propensity_weights,
    _refined_labels,
    _shown_click_ratios,
    _unseen,
    _weighing,
)
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.derive.step import Changes
from ltrscale.errors import InputError

Make = Callable[..., GroupBlock]
Run = Callable[..., list[tuple[GroupBlock, Changes]]]


@pytest.fixture
def log(make_block: Make) -> GroupBlock:
    """Sixty lists of 3 to 7 documents in random order, with fewer clicks further down; every seventh is unlabelled."""
    rng = np.random.default_rng(0)
    labels, positions, lengths = [], [], []
    for q in range(60):
        lengths.append(int(rng.integers(3, 8)))
        positions.append((rng.permutation(lengths[-1]) + 1).tolist())
        clicks = (rng.random(lengths[-1]) < 0.9 / np.array(positions[-1])).astype(float).tolist()
        labels.append(None if q % 7 == 0 else clicks)
    return make_block(labels, lengths=lengths, positions=positions)


def pieces(block: GroupBlock) -> Iterator[GroupBlock]:
    for part in range(3):
        yield block.keep(np.arange(len(block)) % 3 == part)


def test_weights_are_the_click_ratios_of_a_loop(log: GroupBlock) -> None:
    lists = [
        [
            (int(p), float(c))
            for p, c, g in zip(log.columns_N["positions"], log.columns_N["labels"], log.group_N, strict=True)
            if g == q
        ]
        for q in range(60)
        if q % 7
    ]
    ratios = _shown_click_ratios(pieces(log), 4)
    weights = _propensity_weights(ratios, alpha=0.25)
    np.testing.assert_allclose(weights, reference.ratio_weights(lists, 4, 0.25), rtol=1e-12)
    block = log.with_columns(weights=np.full(log.n_documents, np.nan, np.float32))
    ((after, counted),) = _weighing(weights)(block)
    for weight, position, group in zip(
        after.columns_N["weights"], log.columns_N["positions"], log.group_N, strict=True
    ):
        if group % 7 == 0:
            assert np.isnan(weight)
        else:
            assert weight == pytest.approx(weights[min(int(position), 4) - 1])
    assert counted.groups_changed == len(lists)


def test_a_document_that_was_not_shown_has_weight_1(make_block: Make) -> None:
    block = make_block([[1, 0, 0]], positions=[[2, np.nan, 1]], weights=[[5, 5, 5]])
    ((after, _),) = _weighing(np.array([1.0, 3.0, np.nan]))(block)
    np.testing.assert_array_equal(after.columns_N["weights"], [3, 1, 1])


def test_positions_without_clicks_are_named(make_block: Make) -> None:
    for ratios, problem in (
        ([0.5, 0.2, 0.0, 0.1], "position 3 was never clicked, so it has no weight; set depth to 2"),
        ([0.0, 0.2], "position 1 has no click to compare with"),
        ([np.nan, 0.2], "position 1 has no click to compare with"),
    ):
        with pytest.raises(InputError, match=problem):
            _propensity_weights(np.array(ratios), alpha=1)
    np.testing.assert_array_equal(_propensity_weights(np.array([0.4, 0.2, np.nan]), alpha=1), [1, 2, np.nan])
    with pytest.raises(InputError, match="query q0 of period all has no positions"):
        list(_shown_click_ratios([make_block([[1]])], 3))


def test_refined_labels_are_the_softmax_of_a_loop() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 9, 40)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    clicked, feature = rng.random(bounds[-1]) < 0.3, rng.normal(size=bounds[-1]) * 10
    every = np.ones(bounds[-1], dtype=bool)
    labels = _refined_labels(clicked, feature, bounds, delta=2, temperature=0.1, shown_N=every)
    for a, b in itertools.pairwise(bounds):
        np.testing.assert_allclose(labels[a:b], reference.refined(clicked[a:b], feature[a:b], 2, 0.1), atol=1e-12)


def test_a_missing_feature_counts_as_the_smallest_of_the_list() -> None:
    nan, none = np.nan, np.zeros(6, dtype=bool)
    feature = np.array([1.0, nan, 3.0, nan, nan, 2.0])
    filled = np.array([1.0, 1.0, 3.0, 0.0, 0.0, 2.0])
    bounds, every = np.array([0, 3, 5, 6]), np.ones(6, dtype=bool)
    options = {"delta": 2.0, "temperature": 1.0, "shown_N": every}
    np.testing.assert_array_equal(
        _refined_labels(none, feature, bounds, **options), _refined_labels(none, filled, bounds, **options)
    )


def test_refining_keeps_the_clicks_and_leaves_out_what_was_not_shown(make_block: Make, run_step: Run) -> None:
    nan = np.nan
    block = make_block(
        [[0, 1, 0], [1, 0], None], lengths=[3, 2, 1], positions=[[1, 2, nan], None, None], clicks=[None] * 3
    )
    ((after, _),) = run_step(Refine(feature="bm25"), block)
    expected = [*reference.refined([0, 1], [0, 0.1], 2, 0.1), 0, *reference.refined([1, 0], [0.3, 0.4], 2, 0.1), nan]
    np.testing.assert_allclose(after.columns_N["labels"], expected, rtol=1e-6)
    np.testing.assert_array_equal(_clicks_of(after), [0, 1, 0, 1, 0, nan])
    ((twice, _),) = run_step(Refine(feature="bm25"), after)
    np.testing.assert_array_equal(twice.columns_N["labels"], after.columns_N["labels"])


def test_unseen_is_below_the_last_click(log: GroupBlock) -> None:
    found = _unseen(_clicks_of(log), log.columns_N["positions"], log.offsets_Q1)
    for q in range(len(log)):
        rows = np.flatnonzero(log.group_N == q)
        last = max((log.columns_N["positions"][i] for i in rows if log.columns_N["labels"][i] > 0), default=None)
        for i in rows:
            assert found[i] == (last is not None and log.columns_N["positions"][i] > last)
    assert 0 < found.mean() < 1


def test_negatives_stand_in_for_unseen_documents_and_at_the_end(log: GroupBlock, run_step: Run) -> None:
    ones = np.where(np.isnan(log.columns_N["labels"]), np.nan, np.float32(3))
    block = log.with_columns(relevance=log.columns_N["labels"], weights=ones)
    replaced = _unseen(_clicks_of(block), block.columns_N["positions"], block.offsets_Q1)
    ((after, counted),) = run_step(RandomNegatives(extra=2), block, 4)
    labelled = block.present_Q("labels")
    assert after.lengths_Q.tolist() == (block.lengths_Q + 2 * labelled).tolist()
    assert counted.documents_dropped == replaced.sum()
    assert counted.documents_added == replaced.sum() + 2 * labelled.sum()
    for q in range(len(block)):
        old, new = (range(b.offsets_Q1[q], b.offsets_Q1[q + 1]) for b in (block, after))
        negatives = [n >= len(old) or replaced[old[n]] for n in range(len(new))]
        drawn = [int(after.features_NF[n, 0]) for n, negative in zip(new, negatives, strict=True) if negative]
        assert len(set(drawn)) == len(drawn)
        assert not set(drawn) & set(old)
        for i, negative in enumerate(negatives):
            found = [after.columns_N[name][new[i]] for name in ("labels", "relevance", "positions", "weights")]
            if negative:
                np.testing.assert_array_equal(found, [0, 0, np.nan, 1])
                assert (after.features_NF[new[i]] == block.features_NF[int(after.features_NF[new[i], 0])]).all()
            else:
                before = [block.columns_N[name][old[i]] for name in ("labels", "relevance", "positions", "weights")]
                np.testing.assert_array_equal(found, before)


@pytest.mark.slow
def test_every_other_document_is_drawn_equally_often(make_block: Make) -> None:
    block = make_block([[0.0] * n for n in (3, 5, 2)])
    drawn = np.stack([_draw_others(block, np.array([0, 4, 1]), seed) for seed in range(2000)])
    assert set(drawn[:, :4].ravel()) == {0, 1, 2, 8, 9}
    assert set(drawn[:, 4]) == set(range(8))
    np.testing.assert_allclose(np.bincount(drawn[:, :4].ravel())[[0, 1, 2, 8, 9]] / 2000, 4 / 5, atol=0.06)
    np.testing.assert_allclose(np.bincount(drawn[:, 4]) / 2000, 1 / 8, atol=0.04)


def test_documents_repeat_only_when_there_are_too_few(make_block: Make) -> None:
    block = make_block([[0.0] * n for n in (4, 3)])
    for seed in range(50):
        drawn = _draw_others(block, np.array([8, 0]), seed)
        assert sorted(np.bincount(drawn, minlength=7)[4:].tolist()) == [2, 3, 3]
    with pytest.raises(InputError, match="one query group here, so there are no other documents"):
        _draw_others(make_block([[0.0, 1.0]]), np.array([1]), 0)


def test_a_list_has_no_document_twice(make_block: Make, run_step: Run) -> None:
    rng = np.random.default_rng(0)
    ids = [[f"d{i}" for i in rng.permutation(25)[:6]] for _ in range(60)]
    block = make_block((rng.random((60, 6)) < 0.3).astype(float).tolist())
    block = dataclasses.replace(block, doc_ids_N=pa.array([name for each in ids for name in each]))
    ((after, changes),) = run_step(RandomNegatives(replace_unseen=False, extra=6), block)
    assert changes.documents_added == 360
    assert after.doc_ids_N is not None
    found = np.reshape(after.doc_ids_N.to_pylist(), (60, 12))
    assert found[:, :6].tolist() == ids
    assert all(len({*each}) == 12 for each in found.tolist())


def test_other_documents_do_not_depend_on_ids_that_all_differ(make_block: Make) -> None:
    block = make_block([[0.0] * n for n in (3, 5, 2)])
    named = dataclasses.replace(block, doc_ids_N=pa.array([None, *"abcdefgh", None]))
    wanted = np.array([2, 12, 3])
    for seed in range(50):
        np.testing.assert_array_equal(_draw_others(named, wanted, seed), _draw_others(block, wanted, seed))


def test_a_list_with_every_document_of_the_others_is_named(make_block: Make) -> None:
    block = dataclasses.replace(make_block([[0.0] * n for n in (3, 2, 2)]), doc_ids_N=pa.array(list("abcbacb")))
    for seed in range(20):
        drawn = _draw_others(block, np.array([0, 3, 2]), seed)
        assert [block.doc_ids_N[i].as_py() for i in drawn[:3]] == ["c"] * 3  # too few, so that it repeats
        assert [block.doc_ids_N[i].as_py() for i in drawn[3:]] == ["a"] * 2
        with pytest.raises(InputError, match="'q0' has all documents of the other groups here, so there are none"):
            _draw_others(block, np.array([1, 1, 1]), seed)


def test_a_list_without_a_click_keeps_its_documents(make_block: Make, run_step: Run) -> None:
    block = make_block([[0, 0], [0, 1]], positions=[[1, 2], [2, 1]])
    ((after, _),) = run_step(RandomNegatives(), block)
    np.testing.assert_array_equal(after.features_NF[:2, 0], [0, 1])
    assert after.features_NF[2, 0] in (0, 1)
    assert after.features_NF[3, 0] == 3


def test_negatives_before_refining_have_no_share_and_weight_1(make_block: Make, run_step: Run) -> None:
    nan = np.nan
    empty = [None] * 2
    block = make_block([[1, 0, 0], [0, 1]], positions=[[1, 2, 3], [1, 2]], clicks=empty, weights=empty)
    ((with_negatives, _),) = run_step(RandomNegatives(extra=1), block)
    ((refined, _),) = run_step(Refine(feature="bm25", scale="none"), with_negatives)
    np.testing.assert_array_equal(refined.columns_N["labels"][:4], [1, 0, 0, 0])
    np.testing.assert_array_equal(refined.columns_N["positions"][:4], [1, nan, nan, nan])
    ((weighted, _),) = _weighing(np.array([1.0, 2.0]))(refined)
    np.testing.assert_array_equal(weighted.columns_N["weights"], [1, 1, 1, 1, 1, 2, 1])


@pytest.mark.parametrize("seed", range(5))
def test_labels_order_every_pair_as_the_paper_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 30)
    offsets_Q1, n = offsets(lengths), int(lengths.sum())
    clicks, shown = rng.random(n) < 0.3, rng.random(n) < 0.8
    feature = np.where(rng.random(n) < 0.2, np.nan, rng.integers(0, 4, n).astype(float))  # with ties
    labels = _order_labels(clicks, feature, offsets_Q1, shown_N=shown)

    def better(i: int, j: int) -> bool:
        if not shown[i] or not shown[j]:
            return bool(shown[i] and not shown[j])
        if clicks[i] != clicks[j]:
            return bool(clicks[i])
        return bool(feature[i] > feature[j] or (np.isnan(feature[j]) and not np.isnan(feature[i])))

    for first, last in zip(offsets_Q1[:-1].tolist(), offsets_Q1[1:].tolist(), strict=True):
        for i in range(first, last):
            assert labels[i] == (1 + sum(shown[j] and better(i, j) for j in range(first, last)) if shown[i] else 0)
            for j in range(first, last):
                assert (labels[i] > labels[j]) == better(i, j)


def test_the_step_keeps_clicks_and_unlabelled_groups(make_block: Make, run_step: Run) -> None:
    block = make_block([[0, 1, 0], None], lengths=[3, 2], positions=[[1, 2, np.nan], [1, 2]])
    block = block.with_columns(clicks=np.full(5, np.nan, np.float32))
    ((after, changes),) = run_step(ClickOrder(feature="bm25"), block)
    labels = after.columns_N["labels"]
    assert sorted(labels[:3].tolist()) == [0, 1, 2]
    assert labels[1] == 2
    assert labels[2] == 0
    assert np.isnan(labels[3:]).all()
    assert after.columns_N["clicks"][:3].tolist() == [0, 1, 0]
    assert changes.groups_changed == 1


def test_documents_that_were_not_shown_are_dropped(make_block: Make, run_step: Run) -> None:
    block = make_block(
        [[0, 1, 0], None, [1, 0], [0]],
        lengths=[3, 2, 2, 1],
        positions=[[2, 1, np.nan], [1, np.nan], None, [4]],
    )
    ((after, changes),) = run_step(ShownOnly(), block)
    assert after.features_NF[:, 0].tolist() == [0, 1, 3, 4, 5, 6, 7]  # all of a group without positions or labels
    assert after.lengths_Q.tolist() == [2, 2, 2, 1]
    assert (changes.groups_changed, changes.documents_dropped) == (1, 1)
