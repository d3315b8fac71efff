"""SimCLR-Rank, SimCLR, SCARF, SimSiam: value and gradient against the plain loop, and the laws they keep."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranking.laws import LargestTensor
from reference import pretext as reference
from torch import Tensor

from jobs.bench.pretend import pretending
from ltrscale.batch import length_chunks, to_offsets
from ltrscale.pretext import contrast, fused
from ltrscale.pretext.contrast import scarf, simclr_rank
from ltrscale.pretext.objective import simsiam

HALVES = [torch.float16, torch.bfloat16]


def random_views(seed: int, lengths: list[int], width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Two similar views, float64, and the offsets."""
    generator = torch.Generator().manual_seed(seed)
    z0_ND, noise_ND = torch.randn(2, sum(lengths), width, generator=generator, dtype=torch.float64)
    return z0_ND, z0_ND + noise_ND, to_offsets(torch.tensor(lengths))


def value_and_gradient(
    z0_ND: Tensor,
    z1_ND: Tensor,
    offsets_Q1: Tensor,
    *,
    temperature: float,
    autocast: bool = False,
    with_positive: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each document, and the gradients of a sum that weighs every document differently."""
    z0_ND, z1_ND = z0_ND.detach().requires_grad_(), z1_ND.detach().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):  # backward too, which callers should not do
        loss_N = simclr_rank(z0_ND, z1_ND, offsets_Q1, temperature=temperature, with_positive=with_positive)
        grads = torch.autograd.grad((document_weights(len(loss_N)).to(loss_N) * loss_N).sum(), [z0_ND, z1_ND])
    return loss_N.detach(), *grads


def simclr(z0_ND: Tensor, z1_ND: Tensor, *, temperature: float) -> Tensor:
    return simclr_rank(z0_ND, z1_ND, torch.tensor([0, len(z0_ND)]), temperature=temperature)


def scarf_of_all(z_ND: Tensor, corrupted_ND: Tensor, *, temperature: float) -> Tensor:
    return scarf(z_ND, corrupted_ND, torch.tensor([0, len(z_ND)]), temperature=temperature)


def document_weights(n: int) -> Tensor:
    return 1 + torch.sin(torch.arange(n, dtype=torch.float64))


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.sampled_from([0.01, 0.1, 1.0]),
    st.integers(0, 99),
    st.booleans(),
)
def test_value_and_gradient_are_those_of_the_loop_over_groups(
    lengths: list[int], temperature: float, seed: int, with_positive: bool
) -> None:
    z0_ND, z1_ND, offsets_Q1 = random_views(seed, lengths)
    ours = value_and_gradient(z0_ND, z1_ND, offsets_Q1, temperature=temperature, with_positive=with_positive)

    z0_ND.requires_grad_()
    z1_ND = z1_ND.detach().requires_grad_()
    groups = pairwise(offsets_Q1.tolist())
    of_groups = [
        reference.simclr_rank(z0_ND[a:b], z1_ND[a:b], temperature, with_positive=with_positive) for a, b in groups
    ]
    loss_N = torch.cat(of_groups)
    total = (document_weights(len(loss_N)) * loss_N).sum() + 0 * (z0_ND.sum() + z1_ND.sum())
    for actual, expected in zip(ours, (loss_N.detach(), *torch.autograd.grad(total, [z0_ND, z1_ND])), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("temperature", [0.01, 0.1])
@pytest.mark.parametrize("with_positive", [True, False])
def test_what_a_compiler_takes_is_the_same_loss(temperature: float, with_positive: bool) -> None:
    z0_ND, z1_ND, offsets_Q1 = random_views(2, [5, 0, 1, 40, 13, 40, 2])
    expected = value_and_gradient(z0_ND, z1_ND, offsets_Q1, temperature=temperature, with_positive=with_positive)
    z0_ND, z1_ND = z0_ND.detach().requires_grad_(), z1_ND.detach().requires_grad_()
    similar = fused.Similarities(1 / temperature, with_positive, half=False)
    loss_N = fused.info_nce(z0_ND, z1_ND, length_chunks(offsets_Q1, budget=9), similar)
    grads = torch.autograd.grad(document_weights(len(loss_N)) @ loss_N, [z0_ND, z1_ND])
    torch.testing.assert_close((loss_N.detach(), *grads), expected)


def test_float16_rounds_the_gradient_a_fraction_of_what_bfloat16_would() -> None:
    offsets_Q1 = torch.tensor([0, 100])
    z_2ND = torch.randn(2, 100, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    grads = []
    for half in (False, True):
        similar = fused.Similarities(10.0, with_positive=True, half=half)
        loss_N = fused.info_nce(*z_2ND, length_chunks(offsets_Q1, budget=9), similar)
        grads += torch.autograd.grad(loss_N.sum(), z_2ND)
    assert (grads[1] - grads[0]).norm() <= 5e-4 * grads[0].norm()


with_and_without_the_positive = pytest.mark.parametrize("with_positive", [True, False])


@with_and_without_the_positive
def test_gradcheck(with_positive: bool) -> None:
    z0_ND, z1_ND, offsets_Q1 = random_views(1, [4, 0, 1, 3], width=3)
    inputs = (z0_ND.requires_grad_(), z1_ND.detach().requires_grad_())
    assert torch.autograd.gradcheck(
        lambda a, b: simclr_rank(a, b, offsets_Q1, temperature=0.3, with_positive=with_positive), inputs
    )


@pytest.mark.slow
@pytest.mark.parametrize("similarities", [1, 300, 5000])
@with_and_without_the_positive
def test_neither_the_batch_nor_the_size_of_blocks_matters(
    similarities: int, with_positive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    z0_ND, z1_ND, offsets_Q1 = random_views(2, [5, 0, 1, 40, 13, 40, 2])
    alone_N = torch.cat(
        [
            simclr_rank(z0_ND[a:b], z1_ND[a:b], torch.tensor([0, b - a]), temperature=0.1, with_positive=with_positive)
            for a, b in pairwise(offsets_Q1.tolist())
        ]
    )
    _, *expected = value_and_gradient(z0_ND, z1_ND, offsets_Q1, temperature=0.1, with_positive=with_positive)
    monkeypatch.setattr(contrast, "SIMILARITIES_PER_BLOCK", similarities)
    loss_N, *grads = value_and_gradient(z0_ND, z1_ND, offsets_Q1, temperature=0.1, with_positive=with_positive)
    torch.testing.assert_close(loss_N, alone_N)
    torch.testing.assert_close(grads, expected)


def test_documents_of_a_group_have_no_order_and_views_are_interchangeable() -> None:
    z0_ND, z1_ND, offsets_Q1 = random_views(3, [30])
    loss_N = simclr_rank(z0_ND, z1_ND, offsets_Q1, temperature=0.1)
    shuffled_N = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    moved_N = simclr_rank(z0_ND[shuffled_N], z1_ND[shuffled_N], offsets_Q1, temperature=0.1)
    torch.testing.assert_close(moved_N, loss_N[shuffled_N])
    torch.testing.assert_close(simclr_rank(z1_ND, z0_ND, offsets_Q1, temperature=0.1), loss_N)


def test_lengths_of_vectors_do_not_matter() -> None:
    z0_ND, z1_ND, offsets_Q1 = random_views(4, [6, 3])
    scales_N1 = torch.logspace(-6, 6, 9, dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        simclr_rank(z0_ND * scales_N1, z1_ND / scales_N1, offsets_Q1, temperature=0.1),
        simclr_rank(z0_ND, z1_ND, offsets_Q1, temperature=0.1),
    )


@pytest.mark.parametrize("temperature", [0.01, 0.5])
@with_and_without_the_positive
def test_a_document_alone_in_its_group_has_loss_and_gradient_zero(temperature: float, with_positive: bool) -> None:
    z0_ND, z1_ND, offsets_Q1 = random_views(5, [1, 1, 1])
    for values in value_and_gradient(z0_ND, z1_ND, offsets_Q1, temperature=temperature, with_positive=with_positive):
        torch.testing.assert_close(values, torch.zeros_like(values), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("autocast", [False, True])
def test_opposite_views_at_a_small_temperature_are_finite(dtype: torch.dtype, autocast: bool) -> None:
    z0_ND, _, offsets_Q1 = random_views(6, [50, 1, 7])
    z0_ND = z0_ND.to(dtype)
    loss_N, *grads = value_and_gradient(z0_ND, -z0_ND, offsets_Q1, temperature=0.01, autocast=autocast)
    assert loss_N.dtype == torch.float32
    assert loss_N.isfinite().all()
    assert (loss_N[:50] > 200).all()  # a cosine of -1 costs 1 / tau in each view, and the others cost more
    assert all(grad_ND.dtype == dtype and grad_ND.isfinite().all() and grad_ND.any() for grad_ND in grads)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_equal_views_among_opposite_ones_are_finite_without_the_positive(dtype: torch.dtype) -> None:
    """The positive, which is left out, is e^200 times as large as all that is summed."""
    z_ND = torch.tensor([[1.0, 2.0], [-1.0, -2.0], [1.0, 2.0]], dtype=dtype)
    loss_N, *grads = value_and_gradient(z_ND, z_ND, torch.tensor([0, 2, 3]), temperature=0.01, with_positive=False)
    torch.testing.assert_close(loss_N, torch.tensor([-400 + 2 * math.log(2)] * 2 + [0.0]), rtol=1e-3, atol=0)
    assert all(grad_ND.isfinite().all() for grad_ND in grads)


def test_a_document_far_from_everything_leaves_shorter_groups_finite() -> None:
    z_ND = torch.ones(4, 2)
    opposite_ND = z_ND * torch.tensor([-1.0, 1.0, 1.0, 1.0])[:, None]  # only document 0 has opposite views
    for values in value_and_gradient(z_ND, opposite_ND, torch.tensor([0, 1, 3, 4]), temperature=0.01):
        assert values.isfinite().all()


def test_equal_and_zero_vectors_are_finite() -> None:
    z_ND = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    for values in value_and_gradient(z_ND, z_ND, torch.tensor([0, 3, 4]), temperature=0.01):
        assert values.isfinite().all()


def test_a_zero_vector_has_cosine_zero() -> None:
    zero_ND = torch.zeros(4, 3)
    loss_N = simclr_rank(zero_ND, zero_ND, torch.tensor([0, 4]), temperature=0.1)
    torch.testing.assert_close(loss_N, torch.full((4,), 7.0).log() * 2)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_zero_vector_has_gradient_zero(dtype: torch.dtype) -> None:
    z_ND, dead_ND, _ = (values.to(dtype) for values in random_views(16, [6]))
    dead_ND[[1, 4]] = 0
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda d: simclr_rank(d, z_ND, torch.tensor([0, 3, 6]), temperature=0.1),
        lambda d: simclr_rank(z_ND, d, torch.tensor([0, 3, 6]), temperature=0.1),
        lambda d: scarf(d, z_ND, torch.tensor([0, 4, 6]), temperature=0.1),
        lambda d: scarf(z_ND, d, torch.tensor([0, 4, 6]), temperature=0.1),
        lambda d: simsiam(d, z_ND, z_ND, z_ND),
    ]
    for loss in losses:
        (grad_ND,) = torch.autograd.grad(loss(dead_ND.requires_grad_()).sum(), [dead_ND])
        assert grad_ND.isfinite().all()
        assert grad_ND.any(1).tolist() == [True, False, True, True, False, True]


def test_autocast_changes_nothing_and_float32_is_close_to_float64() -> None:
    z0_ND, z1_ND, offsets_Q1 = random_views(7, [60, 9], width=32)
    exact = value_and_gradient(z0_ND, z1_ND, offsets_Q1, temperature=0.05)
    plain = value_and_gradient(z0_ND.float(), z1_ND.float(), offsets_Q1, temperature=0.05)
    cast = value_and_gradient(z0_ND.float(), z1_ND.float(), offsets_Q1, temperature=0.05, autocast=True)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)
    torch.testing.assert_close([values.double() for values in plain], list(exact), rtol=1e-4, atol=1e-4)


def test_what_is_kept_for_backward_does_not_grow_with_the_list_length() -> None:
    def kept(lengths: list[int]) -> int:
        z0_ND, z1_ND, offsets_Q1 = random_views(8, lengths)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()), lambda t: t):
            simclr_rank(z0_ND.requires_grad_(), z1_ND, offsets_Q1, temperature=0.1)
        return sum(sizes)

    assert kept([512]) <= kept([4] * 128)


def test_an_empty_batch_gives_no_values() -> None:
    assert simclr_rank(torch.zeros(0, 3), torch.zeros(0, 3), torch.tensor([0, 0]), temperature=1.0).shape == (0,)


def test_simclr_distinguishes_documents_from_the_whole_batch() -> None:
    z0_ND, z1_ND, _ = random_views(10, [7])
    loss_N = simclr(z0_ND, z1_ND, temperature=0.2)
    torch.testing.assert_close(loss_N, reference.simclr_rank(z0_ND, z1_ND, 0.2), rtol=1e-10, atol=1e-10)
    assert (loss_N[:3] > simclr(z0_ND[:3], z1_ND[:3], temperature=0.2)).all()  # more documents to contrast with


@pytest.mark.parametrize("loss", [simclr, scarf_of_all])
@pytest.mark.parametrize("n", [0, 1])
def test_simclr_and_scarf_of_no_or_one_document_are_zero(loss: Callable[..., Tensor], n: int) -> None:
    z0_ND, z1_ND, _ = random_views(11, [n])
    loss_N = loss(z0_ND.requires_grad_(), z1_ND, temperature=0.1)
    torch.testing.assert_close(loss_N, torch.zeros(n, dtype=torch.float64), rtol=0, atol=1e-12)
    (grad_ND,) = torch.autograd.grad(loss_N.sum(), [z0_ND])
    torch.testing.assert_close(grad_ND, torch.zeros_like(z0_ND), rtol=0, atol=1e-12)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.sampled_from([0.05, 1.0]), st.integers(0, 99))
def test_scarf_is_the_algorithm_in_each_list_and_its_gradient_that_of_the_loop(
    lengths: list[int], temperature: float, seed: int
) -> None:
    z_ND, corrupted_ND, offsets_Q1 = random_views(seed, lengths)
    inputs = [z_ND.requires_grad_(), corrupted_ND.detach().requires_grad_()]
    lists = zip(*(values.split(lengths) for values in inputs), strict=True)
    expected = [reference.scarf(*of_list, temperature) for of_list in lists if len(of_list[0])]
    losses = [
        scarf(*inputs, offsets_Q1, temperature=temperature),
        torch.cat([(inputs[0] * inputs[1]).sum(1)[:0], *expected]),
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-10, atol=1e-10)
    grads = [torch.autograd.grad((document_weights(len(loss_N)) * loss_N).sum(), inputs) for loss_N in losses]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [simclr_rank, scarf])
@pytest.mark.parametrize("lengths", [[9, 10, 11, 12, 13, 14, 15, 16, 20, 3, 1, 0], [40]])
@pytest.mark.parametrize("temperature", [0.001, 0.1])
def test_a_gpu_has_the_values_and_gradients_of_a_cpu_in_tiles_of_any_size(
    loss: Callable[..., Tensor], lengths: list[int], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    z0_ND, z1_ND, offsets_Q1 = random_views(17, lengths, width=2)

    def value_and_gradients(place: torch.device) -> list[Tensor]:
        inputs = [values_ND.detach().to(place).requires_grad_() for values_ND in (z0_ND, z1_ND)]
        loss_N = loss(*inputs, offsets_Q1.to(place), temperature=temperature)
        grads = torch.autograd.grad((document_weights(len(z0_ND)).to(place) * loss_N).sum(), inputs)
        return [values.detach().cpu() for values in (loss_N, *grads)]

    expected = value_and_gradients(torch.device("cpu"))
    with pretending() as device:
        found = [value_and_gradients(device)]
        if len(lengths) == 1:
            monkeypatch.setattr(contrast, "block_entries", lambda _: 25)
            found.append(value_and_gradients(device))
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)


def test_scarf_gradcheck() -> None:
    z_ND, corrupted_ND, _ = random_views(12, [5], width=3)
    inputs = (z_ND.requires_grad_(), corrupted_ND.detach().requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: scarf(a, b, torch.tensor([0, 3, 3, 4, 5]), temperature=0.3), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [simclr, scarf_of_all])
def test_a_batch_in_any_order_and_in_tiles_of_any_size(
    loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    z0_ND, z1_ND, _ = random_views(13, [61])
    order_N = torch.randperm(61, generator=torch.Generator().manual_seed(0))

    def value_and_gradients() -> list[Tensor]:
        inputs = [z0_ND.detach().requires_grad_(), z1_ND.detach().requires_grad_()]
        loss_N = loss(*inputs, temperature=0.02)
        return [loss_N.detach(), *torch.autograd.grad((document_weights(61) * loss_N).sum(), inputs)]

    whole = value_and_gradients()
    moved_N = loss(z0_ND[order_N], z1_ND[order_N], temperature=0.02)
    torch.testing.assert_close(moved_N, whole[0][order_N], rtol=1e-10, atol=1e-10)
    for similarities in (1, 50, 1000, 61 * 61):
        monkeypatch.setattr(contrast, "SIMILARITIES_PER_BLOCK", similarities)
        torch.testing.assert_close(value_and_gradients(), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [simclr, scarf_of_all])
def test_no_tensor_of_a_batch_loss_grows_with_the_square_of_the_batch(loss: Callable[..., Tensor]) -> None:
    def largest(n: int) -> int:
        z0_ND, z1_ND, _ = random_views(14, [n], width=2)
        with LargestTensor() as watch:
            loss(z0_ND.requires_grad_(), z1_ND.requires_grad_(), temperature=0.1).sum().backward()
        return watch.numel

    assert largest(3000) <= contrast.SIMILARITIES_PER_BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("autocast", [False, True])
def test_scarf_is_finite_at_a_small_temperature(dtype: torch.dtype, autocast: bool) -> None:
    z_ND = random_views(15, [40])[0].to(dtype)
    z_ND[:2] = 0
    inputs = [z_ND.requires_grad_(), (-z_ND).detach().requires_grad_()]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss_N = scarf_of_all(*inputs, temperature=0.01)
        grads = torch.autograd.grad(loss_N.sum(), inputs)
    assert loss_N.dtype == torch.float32
    assert loss_N.isfinite().all()
    assert all(grad_ND.dtype == dtype and grad_ND.isfinite().all() and grad_ND.any() for grad_ND in grads)
    plain_N = scarf_of_all(z_ND.detach().float(), -z_ND.detach().float(), temperature=0.01)
    torch.testing.assert_close(loss_N, plain_N, rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("loss", [simclr, scarf_of_all])
def test_batch_losses_refuse_a_temperature_that_is_not_positive(
    loss: Callable[..., Tensor], temperature: float
) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        loss(torch.ones(1, 2), torch.ones(1, 2), temperature=temperature)


def test_simsiam_is_the_formula_and_stops_the_gradient_at_the_projections() -> None:
    p0_ND, p1_ND, z0_ND, z1_ND = (random_views(seed, [6])[0].requires_grad_() for seed in range(4))
    loss_N = simsiam(p0_ND, p1_ND, z0_ND, z1_ND)
    expected = [
        -reference.cosine(p0_ND[n], z1_ND[n].detach()) - reference.cosine(p1_ND[n], z0_ND[n].detach()) for n in range(6)
    ]
    torch.testing.assert_close(loss_N, torch.stack(expected), rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(loss_N.sum(), [p0_ND, p1_ND, z0_ND, z1_ND], allow_unused=True)
    torch.testing.assert_close(grads[:2], torch.autograd.grad(sum(expected), [p0_ND, p1_ND]))
    assert grads[2:] == (None, None)


@pytest.mark.parametrize("dtype", HALVES)
def test_simsiam_in_half_precision_and_with_zero_vectors(dtype: torch.dtype) -> None:
    p_ND = random_views(9, [3])[0].to(dtype)
    p_ND[0] = 0
    p_ND.requires_grad_()
    loss_N = simsiam(p_ND, p_ND, p_ND, p_ND)
    loss_N.sum().backward()
    torch.testing.assert_close(loss_N, torch.tensor([0.0, -2.0, -2.0]))
    assert p_ND.grad is not None
    assert p_ND.grad.isfinite().all()
