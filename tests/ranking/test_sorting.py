"""Losses over a relaxed sort: against plain loops, exact NDCG and other libraries' figures, and their laws."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import nightly
from ranking.laws import LargestTensor
from reference import sorting as reference
from torch import Tensor

from ltrscale.batch import to_offsets
from ltrscale.ranking import sorting
from ltrscale.ranking.losses import mean_under_noise
from ltrscale.ranking.metrics import ndcg
from ltrscale.ranking.sorting import Mode, pirank

MODES: list[Mode] = ["soft", "hard", "straight_through"]
RELAXED: list[Mode] = ["soft", "straight_through"]

document = st.tuples(st.sampled_from([-30.0, -0.5, 0.0, 0.3, 2.0, 2.5]), st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]))
groups = st.lists(st.lists(document, max_size=9), min_size=1, max_size=3)


def random_lists(seed: int, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    scores_N = torch.randn(n, generator=generator, dtype=torch.float64)
    return scores_N, torch.randint(0, 5, (n,), generator=generator), to_offsets(torch.tensor(lengths))


def value_and_gradient(
    scores_N: Tensor,
    labels_N: Tensor,
    offsets_Q1: Tensor,
    *,
    temperature: float = 1.0,
    k: int | None = None,
    depth: int = 1,
    mode: Mode = "soft",
) -> tuple[Tensor, Tensor]:
    """The loss of each group, and the gradient of a sum that weighs every group differently."""
    scores_N = scores_N.detach().requires_grad_()
    loss_Q = pirank(scores_N, labels_N, offsets_Q1, temperature=temperature, k=k, depth=depth, mode=mode)
    weights_Q = torch.arange(1.0, len(loss_Q) + 1, dtype=loss_Q.dtype)
    return loss_Q.detach(), torch.autograd.grad((weights_Q * loss_Q).sum(), scores_N)[0]


@given(
    groups,
    st.sampled_from([0.1, 1.0, 5.0]),
    st.sampled_from([None, 1, 2, 20]),
    st.integers(1, 4),
    st.sampled_from(MODES),
)
@pytest.mark.slow
def test_value_and_gradient_are_those_of_the_plain_loop(
    groups: list[list[tuple[float, float]]], temperature: float, k: int | None, depth: int, mode: Mode
) -> None:
    pairs = torch.tensor([d for group in groups for d in group], dtype=torch.float64).reshape(-1, 2)
    scores_N, labels_N = pairs.T.contiguous()
    if mode == "soft" and depth > 1:  # equal up to rounding, relaxed scores would have either sign's gradient
        scores_N += 0.01 * torch.arange(len(scores_N)).double().sin()
    offsets_Q1 = to_offsets(torch.tensor([len(group) for group in groups]))
    loss_Q, grad_N = value_and_gradient(
        scores_N, labels_N, offsets_Q1, temperature=temperature, k=k, depth=depth, mode=mode
    )

    scores_N.requires_grad_()
    expected_Q = torch.stack(
        [
            reference.pirank(scores_N[a:b], labels_N[a:b].tolist(), temperature, k, depth, mode)
            for a, b in pairwise(offsets_Q1)
        ]
    )
    weights_Q = torch.arange(1.0, len(groups) + 1, dtype=torch.float64)
    torch.testing.assert_close(loss_Q, expected_Q.detach(), rtol=1e-9, atol=1e-10)
    (expected_N,) = torch.autograd.grad(
        (weights_Q * expected_Q).sum() + 0 * scores_N.sum(),
        scores_N,  # the exact sort knows no scores
    )
    torch.testing.assert_close(grad_N, expected_N, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mode", RELAXED)
@pytest.mark.parametrize(("length", "depth"), [(7, 2), (10, 2), (17, 2), (10, 3), (30, 3), (19, 4)])
def test_lists_of_any_length_are_divided_as_the_plain_loop_divides_them(length: int, depth: int, mode: Mode) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(length, [length])
    loss_Q, grad_N = value_and_gradient(scores_N, labels_N, offsets_Q1, k=3, depth=depth, mode=mode)
    scores_N.requires_grad_()
    expected = reference.pirank(scores_N, labels_N.tolist(), 1.0, 3, depth, mode)
    torch.testing.assert_close(loss_Q[0], expected.detach())
    torch.testing.assert_close(grad_N, torch.autograd.grad(expected, scores_N)[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("choices", [1, 700])
def test_neither_the_batch_nor_the_size_of_blocks_matters(
    choices: int, k: int | None, depth: int, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(0, [5, 0, 1, 30, 13, 30, 2])

    def compute(a: int, b: int, offsets_Q1: Tensor) -> tuple[Tensor, Tensor]:
        return value_and_gradient(scores_N[a:b], labels_N[a:b], offsets_Q1, k=k, depth=depth, mode=mode)

    alone = [compute(a, b, torch.tensor([0, b - a])) for a, b in pairwise(offsets_Q1.tolist())]
    monkeypatch.setattr(sorting, "CHOICES_PER_BLOCK", choices)
    loss_Q, grad_N = compute(0, len(scores_N), offsets_Q1)
    torch.testing.assert_close(loss_Q, torch.cat([loss for loss, _ in alone]), rtol=1e-10, atol=1e-10)
    expected_N = torch.cat([(q + 1) * grad for q, (_, grad) in enumerate(alone)])
    torch.testing.assert_close(grad_N, expected_N, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "depth"), [(None, 1), (10, 1), (50, 1), (10, 2)])
def test_no_temporary_grows_with_the_square_of_lengths(
    k: int | None, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(14, [100] * 20 + [400])  # 360,000 pairs
    monkeypatch.setattr(sorting, "CHOICES_PER_BLOCK", 5000)
    with LargestTensor() as largest:
        value_and_gradient(scores_N, labels_N, offsets_Q1, k=k, depth=depth)
    assert largest.numel <= 10_000  # 2,400 documents, 8,400 slots where all are padded


@pytest.mark.parametrize("mode", MODES)
def test_a_flat_sort_does_not_depend_on_the_order_of_the_input(mode: Mode) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(1, [80])
    scores_N = (2 * scores_N).round()
    shuffled_N = torch.randperm(80, generator=torch.Generator().manual_seed(2))
    loss_Q, grad_N = value_and_gradient(scores_N, labels_N, offsets_Q1, k=10, mode=mode)
    moved_Q, moved_N = value_and_gradient(scores_N[shuffled_N], labels_N[shuffled_N], offsets_Q1, k=10, mode=mode)
    torch.testing.assert_close(moved_Q, loss_Q)
    torch.testing.assert_close(moved_N, grad_N[shuffled_N])


@pytest.mark.parametrize("mode", MODES)
def test_divide_and_conquer_depends_only_on_which_documents_share_a_run(mode: Mode) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(2, [9])
    loss_Q, grad_N = value_and_gradient(scores_N, labels_N, offsets_Q1, k=3, depth=2, mode=mode)
    within_N = torch.tensor([7, 8, 6, 1, 0, 2, 3, 5, 4])  # three runs of three: runs and their documents move
    moved_Q, moved_N = value_and_gradient(scores_N[within_N], labels_N[within_N], offsets_Q1, k=3, depth=2, mode=mode)
    torch.testing.assert_close(moved_Q, loss_Q)
    torch.testing.assert_close(moved_N, grad_N[within_N])
    across_N = torch.tensor([3, 1, 2, 0, 4, 5, 6, 7, 8])
    other_Q, _ = value_and_gradient(scores_N[across_N], labels_N[across_N], offsets_Q1, k=3, depth=2, mode=mode)
    assert torch.equal(other_Q, loss_Q) == (mode != "soft")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", RELAXED)
def test_a_shift_changes_nothing(mode: Mode, depth: int) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(3, [20, 50])
    loss_Q, grad_N = value_and_gradient(scores_N, labels_N, offsets_Q1, k=5, depth=depth, mode=mode)
    moved_Q, moved_N = value_and_gradient(scores_N + 123.0, labels_N, offsets_Q1, k=5, depth=depth, mode=mode)
    torch.testing.assert_close(moved_Q, loss_Q)
    torch.testing.assert_close(moved_N, grad_N)


@pytest.mark.slow
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gradcheck(depth: int, k: int | None) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(4, [6, 1, 0, 9])
    scores_N.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: pirank(s, labels_N, offsets_Q1, temperature=0.8, k=k, depth=depth), scores_N
    )


@pytest.mark.parametrize("k", [1, 3, 50])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_without_ties_cold_and_hard_sorts_give_exact_ndcg(depth: int, k: int) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(5, [1, 4, 40, 7])
    labels_N[0] = 1
    exact_Q = 1 - ndcg(scores_N, labels_N, offsets_Q1, k=k)
    for mode, temperature in (("hard", 1.0), ("straight_through", 1.0), ("soft", 1e-6)):
        loss_Q = pirank(scores_N, labels_N, offsets_Q1, temperature=temperature, k=k, depth=depth, mode=mode)
        torch.testing.assert_close(loss_Q, exact_Q, rtol=0, atol=1e-12)
    warm_Q = pirank(scores_N, labels_N, offsets_Q1, temperature=1.0, k=k, depth=depth)
    assert (warm_Q - exact_Q).abs().max() > 0.01


@pytest.mark.parametrize("k", [1, 3, 50])
def test_with_ties_flat_cold_and_hard_sorts_give_exact_ndcg(k: int) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(6, [5, 40, 7])
    scores_N = scores_N.round()
    exact_Q = 1 - ndcg(scores_N, labels_N, offsets_Q1, k=k)
    torch.testing.assert_close(pirank(scores_N, labels_N, offsets_Q1, temperature=1.0, k=k, mode="hard"), exact_Q)
    torch.testing.assert_close(pirank(scores_N, labels_N, offsets_Q1, temperature=1e-6, k=k), exact_Q)


def test_hard_sorts_have_no_gradient_and_flat_straight_through_sorts_that_of_the_relaxed() -> None:
    lists = random_lists(7, [30, 5, 12])
    hard_Q, hard_N = value_and_gradient(*lists, k=8, mode="hard")
    through_Q, through_N = value_and_gradient(*lists, k=8, mode="straight_through")
    assert not hard_N.any()
    assert torch.equal(through_Q, hard_Q)
    torch.testing.assert_close(through_N, value_and_gradient(*lists, k=8)[1])
    assert through_N.any()


def test_a_list_that_is_one_run_is_sorted_once_at_any_depth() -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(8, [2, 1, 2])
    flat_Q, flat_N = value_and_gradient(scores_N, labels_N, offsets_Q1)
    for depth in (2, 3, 70):
        loss_Q, grad_N = value_and_gradient(scores_N, labels_N, offsets_Q1, depth=depth)
        torch.testing.assert_close(loss_Q, flat_Q)
        torch.testing.assert_close(grad_N, flat_N)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("labels", [[0.0] * 4, [2.0, 0.0, 0.0, 0.0]], ids=["all zero", "one relevant"])
@pytest.mark.parametrize("scores", [[0.0] * 4, [1e6, -1e6, 1e6, 0.0], [1e-30] * 4], ids=["tied", "huge", "tiny"])
def test_degenerate_groups_have_finite_values_and_gradients(
    scores: list[float], labels: list[float], depth: int, mode: Mode
) -> None:
    offsets_Q1 = torch.tensor([0, 3, 3, 4])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        loss_Q, grad_N = value_and_gradient(
            torch.tensor(scores, dtype=dtype), torch.tensor(labels), offsets_Q1, temperature=0.1, depth=depth, mode=mode
        )
        assert loss_Q.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert grad_N.dtype == dtype
        assert loss_Q.isfinite().all()
        assert grad_N.isfinite().all()
        assert loss_Q[1:].tolist() == [0.0, 0.0]
        if not any(labels):
            assert loss_Q[0] == 0
            assert not grad_N.any()


def test_an_empty_batch_gives_no_values() -> None:
    scores_N = torch.zeros(0, requires_grad=True)
    empty, cold = (scores_N, torch.zeros(0), torch.tensor([0])), partial(pirank, temperature=1.0)
    for loss_Q in (
        cold(*empty, depth=2),
        mean_under_noise(cold, *empty, samples=8, scale=1.0, generator=torch.Generator()),
    ):
        assert loss_Q.shape == (0,)
        assert torch.autograd.grad(loss_Q.sum(), scores_N)[0].shape == (0,)


def test_float32_is_close_to_float64_on_long_lists() -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(9, [1251, 300])
    scores_N = scores_N.float()  # the same numbers for both
    loss_Q, grad_N = value_and_gradient(scores_N.double(), labels_N, offsets_Q1)
    float_Q, float_N = value_and_gradient(scores_N, labels_N, offsets_Q1)
    torch.testing.assert_close(float_Q.double(), loss_Q, rtol=1e-5, atol=1e-6)
    assert (float_N - grad_N).abs().max() <= 1e-3 * grad_N.abs().max()


def test_huge_scores_of_long_lists_stay_finite_in_float32() -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(9, [1251, 300])
    scores_N = (1e6 * scores_N).float()
    for temperature in (1e-3, 1.0):
        float_Q, float_N = value_and_gradient(scores_N, labels_N, offsets_Q1, temperature=temperature)
        loss_Q, _ = value_and_gradient(scores_N.double(), labels_N, offsets_Q1, temperature=temperature)
        torch.testing.assert_close(float_Q.double(), loss_Q, rtol=0, atol=0.01)
        assert float_N.isfinite().all()


def test_a_far_outlier_costs_the_others_no_precision() -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(10, [400])
    scores_N[7] = 1e6
    scores_N = scores_N.float()
    loss_Q, grad_N = value_and_gradient(scores_N.double(), labels_N, offsets_Q1)
    float_Q, float_N = value_and_gradient(scores_N, labels_N, offsets_Q1)
    torch.testing.assert_close(float_Q.double(), loss_Q, rtol=1e-4, atol=1e-5)
    assert (float_N - grad_N).abs().max() <= 1e-3 * grad_N.abs().max()


def test_neural_sort_ndcg_has_the_values_of_tf_rankings_own_test() -> None:
    """TF-Ranking (losses_impl_test.py, NeuralSortNDCGLoss, temperature 1) returns -NDCG: -0.761571 and -0.956006."""
    scores_N, labels_N = torch.tensor([1.0, 3.0, 2.0, 1.0, 3.0]), torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0])
    loss_Q = pirank(scores_N, labels_N, torch.tensor([0, 3, 5]), temperature=1.0)
    torch.testing.assert_close(loss_Q - 1, torch.tensor([-0.761571, -0.956006]), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("k", [nightly(None), nightly(1), 5])
def test_hard_sorts_agree_with_rax(k: int | None) -> None:
    """Rax relaxes ranks, not the sort; the hard sort must equal its `ndcg_metric` (gain 2^y - 1, topn=k)."""
    rax = pytest.importorskip("rax")
    scores_N, labels_N, offsets_Q1 = random_lists(11, [12, 30])
    loss_Q = pirank(scores_N.float(), labels_N, offsets_Q1, temperature=1.0, k=k, mode="hard")
    for q, (a, b) in enumerate(pairwise(offsets_Q1.tolist())):
        value = rax.ndcg_metric(scores_N[a:b].float().numpy(), labels_N[a:b].float().numpy(), topn=k)
        assert float(loss_Q[q]) == pytest.approx(1 - float(value), abs=1e-5)


def test_noise_of_scale_zero_changes_nothing_and_samples_are_averaged() -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(12, [7, 0, 20])
    loss = partial(pirank, temperature=0.5, k=5)
    silent_Q = mean_under_noise(loss, scores_N, labels_N, offsets_Q1, samples=3, scale=0.0, generator=torch.Generator())
    torch.testing.assert_close(silent_Q, loss(scores_N, labels_N, offsets_Q1))
    many, one = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)

    def draw(generator: torch.Generator, samples: int) -> Tensor:
        lists = scores_N[:1], labels_N[:1] + 1, torch.tensor([0, 1])
        return mean_under_noise(loss, *lists, samples=samples, scale=1.0, generator=generator)

    assert torch.equal(draw(many, 4), draw(one, 4))
    assert torch.equal(many.get_state(), one.get_state())


def test_the_noise_draws_orders_as_plackett_luce_does() -> None:
    """A cold sort of noisy scores ranks a document first with its probability in the softmax of scores / scale."""
    lists = torch.tensor([1.0, 0.0, -0.5]), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 3])
    for scale in (1.0, 2.0):
        cold, draw = partial(pirank, temperature=1e-6, k=1), torch.Generator().manual_seed(0)
        loss_Q = mean_under_noise(cold, *lists, samples=40_000, scale=scale, generator=draw)
        assert float(loss_Q) == pytest.approx(1 - float((lists[0] / scale).softmax(0)[0]), abs=0.01)


def test_the_mean_over_samples_carries_the_gradient() -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(13, [6, 3])
    scores_N.requires_grad_()
    loss = partial(pirank, temperature=1.0)
    assert torch.autograd.gradcheck(
        lambda s: mean_under_noise(
            loss, s, labels_N, offsets_Q1, samples=3, scale=1.0, generator=torch.Generator().manual_seed(1)
        ),
        scores_N,
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive, not 0.0"),
        ({"temperature": math.nan}, "temperature must be positive, not nan"),
        ({"k": 0}, "k must be at least 1, not 0"),
        ({"depth": 0}, "depth must be at least 1, not 0"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, float], message: str) -> None:
    scores_N, labels_N, offsets_Q1 = random_lists(0, [3])
    with pytest.raises(ValueError, match=message):
        pirank(scores_N, labels_N, offsets_Q1, **{"temperature": 1.0, **wrong})
