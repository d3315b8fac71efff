"""MicroBatchNorm: laws, and torch's own BatchNorm1d as the oracle."""

import pytest
import torch
from torch import Tensor, nn

from ltrscale.models.batch_norm import MicroBatchNorm, moments, update_running_statistics


def rows(n: int, width: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator) * torch.linspace(0.1, 30, width) + 100


@pytest.mark.parametrize("affine", [True, False])
def test_micro_batch_norm_is_torchs_when_a_step_is_one_batch(affine: bool) -> None:
    ours, theirs = MicroBatchNorm(7, affine=affine), nn.BatchNorm1d(7, affine=affine)
    if affine:
        nn.init.uniform_(theirs.weight)
        nn.init.uniform_(theirs.bias)
        theirs_state = theirs.state_dict()
        ours.load_state_dict({name: theirs_state[name] for name in ours.state_dict()})
    for step in range(3):
        x_ND, y_ND = rows(50, seed=step).requires_grad_(), rows(50, seed=step).requires_grad_()
        out_ND, expected_ND = ours(x_ND), theirs(y_ND)
        torch.testing.assert_close(out_ND, expected_ND)
        out_ND.square().sum().backward()
        expected_ND.square().sum().backward()
        torch.testing.assert_close(x_ND.grad, y_ND.grad)
        update_running_statistics([ours], moments([ours]))
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.eval()(rows(5)), theirs.eval()(rows(5)))


@pytest.mark.parametrize("sizes", [[40], [20, 20], [1, 37, 2], [1] * 40])
def test_running_statistics_of_micro_batches_are_those_of_one_batch(sizes: list[int]) -> None:
    x_ND = rows(40)
    norm = MicroBatchNorm(7)
    for part_ND in x_ND.split(sizes):
        norm(part_ND)
    update_running_statistics([norm], moments([norm]), momentum=0.3)
    variance_D = x_ND.double().var(0)
    torch.testing.assert_close(norm.running_mean.double(), 0.3 * x_ND.double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.running_var.double(), 0.7 + 0.3 * variance_D, rtol=1e-5, atol=0)
    assert not moments([norm]).any()


def test_moments_of_workers_add_up() -> None:
    x_ND = rows(40)
    whole, first, second = (MicroBatchNorm(7) for _ in range(3))
    whole(x_ND)
    first(x_ND[:10])
    second(x_ND[10:])
    update_running_statistics([first], moments([first]) + moments([second]))
    update_running_statistics([whole], moments([whole]))
    torch.testing.assert_close(first.running_var, whole.running_var)
    torch.testing.assert_close(first.running_mean, whole.running_mean)


def test_a_micro_batch_of_one_document_is_normalised_with_running_statistics() -> None:
    norm = MicroBatchNorm(7)
    norm(rows(30))
    update_running_statistics([norm], moments([norm]))
    one_1D = rows(1, seed=5).requires_grad_()
    out_1D = norm(one_1D)
    assert torch.equal(out_1D, norm.eval()(one_1D))
    out_1D.sum().backward()
    assert one_1D.grad is not None
    assert one_1D.grad.abs().min() > 0
    seen = moments([norm])
    assert seen[0] == 1
    torch.testing.assert_close(seen[1:8], one_1D[0].double())
    torch.testing.assert_close(seen[8:], one_1D[0].double().square())


def test_no_document_and_no_step_change_nothing() -> None:
    norm = MicroBatchNorm(7)
    assert norm(torch.zeros(0, 7)).shape == (0, 7)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    update_running_statistics([norm], moments([norm]))
    norm.eval()(rows(20))
    assert not moments([norm]).any()
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_one_document_in_a_step_moves_the_mean_only() -> None:
    norm = MicroBatchNorm(2)
    norm(torch.tensor([[10.0, 20.0]]))
    update_running_statistics([norm], moments([norm]))
    assert norm.running_mean.tolist() == pytest.approx([1.0, 2.0])
    assert norm.running_var.tolist() == [1.0, 1.0]


def test_running_variance_survives_a_large_mean() -> None:
    norm = MicroBatchNorm(1)
    x_N1 = torch.tensor([[4096.0], [4096.5]] * 500)
    for part in x_N1.split(100):
        norm(part)
    update_running_statistics([norm], moments([norm]), momentum=1.0)
    assert norm.running_var.item() == pytest.approx(float(x_N1.double().var()), rel=1e-3)


def test_norm_takes_bfloat16() -> None:
    norm = MicroBatchNorm(7)
    out_ND = norm((rows(64) - 100).bfloat16()).detach()
    assert out_ND.dtype == torch.bfloat16
    torch.testing.assert_close(out_ND.float().std(0), torch.ones(7), rtol=0, atol=0.02)
    update_running_statistics([norm], moments([norm]))
    assert norm.running_mean.dtype == torch.float32
