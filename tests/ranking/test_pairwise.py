"""Pairwise losses: LightGBM's own objective, and special properties of each; their laws are in test_laws."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise as neighbours
from typing import Literal

import lightgbm
import numpy as np
import pytest
import torch
from ranking.laws import assert_same, random_lists, value_and_gradient
from reference import losses as reference
from torch import Tensor

from ltrscale.batch import to_offsets
from ltrscale.ranking import pairwise
from ltrscale.ranking.loss import has_pairs, over_lists
from ltrscale.ranking.pairwise import hinge, lambdarank, ranknet, softmax_negatives

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def test_groups_with_pairs() -> None:
    lists = random_lists(0, [3, 0, 1, 2, 40])
    labels_N = lists[1].clone()
    labels_N[4:6] = 2.0
    assert has_pairs(labels_N, lists[2]).tolist() == [True, False, False, False, True]
    assert has_pairs(labels_N.long(), lists[2]).tolist() == [True, False, False, False, True]
    assert has_pairs(torch.zeros(0), torch.tensor([0, 0])).tolist() == [False]


def test_equal_scores_have_weight_zero_in_lambdarank() -> None:
    for normalise in ("ideal", "lightgbm"):
        loss_Q, grad_N = value_and_gradient(
            lambda s, y, offsets, _: lambdarank(s, y, offsets, normalise=normalise),  # noqa: B023
            *(torch.zeros(5), torch.arange(5.0), torch.tensor([0, 5]), torch.ones(5)),
        )
        assert loss_Q.tolist() == [0.0]
        assert grad_N.tolist() == [0.0] * 5


def test_gains_up_to_2_to_the_28_keep_their_precision_in_float32() -> None:
    scores_N, labels_N, offsets_Q1, weights_N = random_lists(5, [900, 120, 30])
    labels_N[:900] *= 7
    scores_N = scores_N.float()  # the same ranks in both

    def loss(scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor, _: Tensor) -> Tensor:
        return lambdarank(scores_N, labels_N, offsets_Q1)

    exact_Q, exact_N = value_and_gradient(loss, scores_N.double(), labels_N, offsets_Q1, weights_N)
    loss_Q, grad_N = value_and_gradient(loss, scores_N, labels_N, offsets_Q1, weights_N)
    torch.testing.assert_close(loss_Q.double(), exact_Q, rtol=1e-4, atol=0)
    torch.testing.assert_close(grad_N.double(), exact_N, rtol=1e-3, atol=1e-7)


def test_ranknet_and_hinge_use_the_order_of_labels_alone() -> None:
    scores_N, labels_N, offsets_Q1, weights_N = random_lists(9, [30, 12])
    near_N = 1 + labels_N * 1e-12  # apart in float64 only
    for function in (ranknet, hinge):

        def loss(s: Tensor, y: Tensor, offsets: Tensor, _: Tensor, function: Loss = function) -> Tensor:
            return function(s, y, offsets)

        expected = value_and_gradient(loss, scores_N.float(), labels_N, offsets_Q1, weights_N)
        assert_same(value_and_gradient(loss, scores_N.float(), near_N, offsets_Q1, weights_N), expected)
        assert_same(value_and_gradient(loss, scores_N.float(), -1 / near_N, offsets_Q1, weights_N), expected)


@pytest.mark.parametrize("truncation", [None, 1, 4])
@pytest.mark.parametrize("normalise", ["ideal", "lightgbm"])
def test_bounds_in_place_of_counts_that_a_gpu_would_wait_for_change_nothing(
    normalise: Literal["ideal", "lightgbm"], truncation: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores_N, labels_N, offsets_Q1, weights_N = random_lists(3, [30, 1, 7, 12])
    scores_N = (2 * scores_N).round() / 2  # ties, also across the truncation

    def values() -> list[tuple[Tensor, Tensor]]:
        losses: list[Loss] = [partial(lambdarank, normalise=normalise, truncation=truncation), ranknet, hinge]
        return [
            value_and_gradient(lambda s, y, offsets, _: loss(s, y, offsets), scores_N, labels_N, offsets_Q1, weights_N)  # noqa: B023
            for loss in losses
        ]

    expected = values()
    monkeypatch.setattr(pairwise, "most", lambda _, bound: bound)
    for actual, of_counts in zip(values(), expected, strict=True):
        assert_same(actual, of_counts)


@pytest.mark.slow
@pytest.mark.parametrize("length", [300, 9_000])
def test_values_and_gradients_do_not_depend_on_the_number_of_threads(length: int) -> None:
    lists = random_lists(3, [length, 40, length // 2])
    lists = (lists[0].float(), *lists[1:])

    def values(threads: int) -> list[Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            functions = [partial(lambdarank, truncation=5), lambdarank, ranknet, hinge]
            each = [value_and_gradient(lambda s, y, offsets, _: f(s, y, offsets), *lists) for f in functions]  # noqa: B023
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        return [tensor for pair in each for tensor in pair]

    for alone, together in zip(values(1), values(4), strict=True):
        assert torch.equal(alone, together)


def test_a_block_of_pairs_is_no_work_for_several_threads() -> None:
    seen: list[int] = []

    def solve(lists: pairwise.RankedLists, _: bool) -> tuple[Tensor, Tensor]:
        seen.append(torch.get_num_threads())
        return lists.scores_ML.sum(1), torch.zeros_like(lists.scores_ML)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        over_lists(torch.zeros(3), torch.zeros(3), torch.tensor([0, 3]), solve)
        assert (seen, torch.get_num_threads()) == ([1], 2)
        with pytest.raises(IndexError):  # and after an error
            over_lists(torch.zeros(3), torch.zeros(2), torch.tensor([0, 3]), solve)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_pairs_outside_the_truncation_are_never_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    formed, blocks = [], pairwise.row_blocks

    def counted(values_ML: Tensor, rows: int) -> Iterator[slice]:
        formed.append(rows)
        return blocks(values_ML, rows)

    monkeypatch.setattr(pairwise, "row_blocks", counted)
    scores_N, labels_N, offsets_Q1, _ = random_lists(5, [2000])
    lambdarank(scores_N, labels_N, offsets_Q1, truncation=30)
    lambdarank(scores_N.round(), labels_N, offsets_Q1, truncation=30)  # a block of ties is inside as a whole
    tied = int((scores_N.round() >= scores_N.round().sort(descending=True).values[29]).sum())
    assert formed == [30, tied]


@pytest.mark.parametrize(("sigma", "truncation"), [(1.0, 100), (2.0, 3)])
def test_the_lightgbm_option_has_the_gradient_of_its_formula(sigma: float, truncation: int) -> None:
    scores_N, labels_N, offsets_Q1, _ = random_lists(10, [30, 1, 7])
    scores_N.requires_grad_()
    loss_Q = lambdarank(scores_N, labels_N, offsets_Q1, sigma=sigma, truncation=truncation, normalise="lightgbm")
    grad_N = torch.autograd.grad(loss_Q.sum(), scores_N)[0]
    expected = [
        reference.lightgbm_objective(scores_N[a:b].tolist(), labels_N[a:b].tolist(), sigma, truncation)[0]
        for a, b in neighbours(offsets_Q1.tolist())
    ]
    expected_N = torch.tensor([gradient for of_list in expected for gradient in of_list], dtype=torch.float64)
    torch.testing.assert_close(grad_N, expected_N, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("truncation", [3, 100])
def test_the_formula_is_what_lightgbm_computes(l2: float, truncation: int) -> None:
    """Leaf values of real stumps, -sum of gradients / (sum of hessians + l2), with the scores as initial scores.

    Each stump splits the documents at random, so that both leaves sum many of them; l2 proves the scale.
    """
    lengths = [12, 25, 8]
    scores_N, labels_N, offsets_Q1, _ = random_lists(11, lengths)
    terms = [
        reference.lightgbm_objective(scores_N[a:b].tolist(), labels_N[a:b].tolist(), 2.0, truncation)
        for a, b in neighbours(offsets_Q1.tolist())
    ]
    gradients = np.concatenate([gradient for gradient, _ in terms])
    hessians = np.concatenate([hessian for _, hessian in terms])
    settings = {"objective": "lambdarank", "sigmoid": 2.0, "lambdarank_truncation_level": truncation, "lambda_l2": l2}
    settings |= {"num_leaves": 2, "min_data_in_leaf": 1, "min_data_in_bin": 1, "learning_rate": 1.0}
    for seed in range(20):
        x_N1 = np.random.default_rng(seed).integers(0, 2, (len(scores_N), 1)).astype(np.float64)
        data = lightgbm.Dataset(x_N1, labels_N.numpy(), group=lengths, init_score=scores_N.numpy())
        tree = lightgbm.train(settings | {"num_threads": 1, "verbose": -1}, data, num_boost_round=1)
        leaf_N = np.asarray(tree.predict(x_N1, pred_leaf=True)).ravel()
        for leaf in (0, 1):
            mine = leaf_N == leaf
            expected = -gradients[mine].sum() / (hessians[mine].sum() + l2)
            assert tree.get_leaf_output(0, leaf) == pytest.approx(expected, rel=1e-3, abs=1e-4)  # a table of sigmoids


def drawn(labels: list[float], copies: int, negatives: int, weights: list[float]) -> Counter[tuple[int, ...]]:
    """Counts of the drawn sets, read off the nonzero gradients, over copies of a list of equal scores."""
    length = len(labels)
    scores_N = torch.zeros(copies * length, dtype=torch.float64, requires_grad=True)
    loss_Q = softmax_negatives(
        scores_N,
        torch.tensor(labels).repeat(copies),
        to_offsets(torch.full((copies,), length)),
        generator=torch.Generator().manual_seed(3),
        negatives=negatives,
        weights_N=torch.tensor(weights, dtype=torch.float64).repeat(copies),
    )
    pushes_QL = torch.autograd.grad(loss_Q.sum(), scores_N)[0].view(copies, length)
    taken = min(negatives, sum(y < 1 for y in labels))
    share = 1 / (1 + taken) / sum(y >= 1 for y in labels)
    torch.testing.assert_close(pushes_QL[pushes_QL > 0], torch.full_like(pushes_QL[pushes_QL > 0], share))
    return Counter(tuple(row.nonzero()[:, 0].tolist()) for row in (pushes_QL > 0))


def test_every_set_of_negatives_is_equally_likely_for_each_positive() -> None:
    labels = [0.0, 2.0, 0.0, 0.0, 1.0, 0.0]
    for weights in ([1.0, 1.0, 1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]):  # one positive at a time
        counts = drawn(labels, 6000, 2, weights)
        assert set(counts) == {(0, 2), (0, 3), (0, 5), (2, 3), (2, 5), (3, 5)}
        assert all(abs(count - 1000) < 150 for count in counts.values())  # five standard deviations
        assert set(drawn(labels, 50, 9, weights)) == {(0, 2, 3, 5)}


def test_two_positives_of_a_list_draw_apart() -> None:
    """Both read two of four negatives from random places of one shuffle, so a quarter of lists have equal draws."""
    copies = 4000
    scores_N = torch.zeros(6 * copies, dtype=torch.float64, requires_grad=True)
    labels_N, offsets_Q1 = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]).repeat(copies), torch.arange(copies + 1) * 6
    draw = torch.Generator().manual_seed(4)
    loss_Q = softmax_negatives(scores_N, labels_N, offsets_Q1, generator=draw, negatives=2)
    pushes_QL = torch.autograd.grad(loss_Q.sum(), scores_N)[0].view(copies, 6)[:, 2:]
    twice = ((pushes_QL > 0.3).sum(1) == 2).double().mean()
    assert twice.item() == pytest.approx(0.25, abs=0.035)  # five standard deviations


def test_draws_depend_on_the_generator_alone() -> None:
    scores_N, labels_N, offsets_Q1, _ = random_lists(12, [40, 30])

    def loss(seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return softmax_negatives(scores_N, labels_N, offsets_Q1, generator=draw, negatives=3)

    assert torch.equal(loss(0), loss(0))
    assert not torch.equal(loss(0), loss(1))


def test_no_negatives_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        softmax_negatives(
            torch.zeros(2), torch.zeros(2), torch.tensor([0, 2]), generator=torch.Generator(), negatives=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ranknet", "hinge"])
def test_rax_agrees(name: str) -> None:
    rax = pytest.importorskip("rax")
    jax = pytest.importorskip("jax")
    scores_N, labels_N, offsets_Q1, _ = random_lists(13, [30, 6])
    ours_Q = (ranknet if name == "ranknet" else hinge)(scores_N, labels_N, offsets_Q1)
    theirs = rax.pairwise_logistic_loss if name == "ranknet" else rax.pairwise_hinge_loss
    reduce = jax.numpy.sum if name == "ranknet" else jax.numpy.mean  # over the pairs of a list
    with jax.enable_x64(True):
        for q, (a, b) in enumerate(neighbours(offsets_Q1.tolist())):
            expected = theirs(jax.numpy.asarray(scores_N[a:b].numpy()), labels_N[a:b].numpy(), reduce_fn=reduce)
            assert float(expected) == pytest.approx(ours_Q[q].item(), rel=1e-10)
