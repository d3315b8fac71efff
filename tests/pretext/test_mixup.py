"""Mixup: each form is its formula, categories are never averaged, partners and shares have their distribution."""

import math

import pytest
import torch
from torch import Tensor

from ltrscale.pretext.augment import MIXUPS, Mixup, mixup, random_below

NUMERIC_F = torch.tensor([True, True, True, False])
N = 20_000


def mix(x_NF: Tensor, amount: float, *forms: Mixup, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return mixup(x_NF, NUMERIC_F, amount=amount, forms=forms or MIXUPS, generator=generator)


def documents(n: int) -> Tensor:
    """Float64: the document's number n as n, exp(n), -n, and as a category."""
    number_N = torch.arange(n, dtype=torch.float64)
    return torch.stack([number_N, (number_N / n).exp(), -number_N - 1, number_N], 1)


def test_linear_mixup_is_on_the_line_between_two_documents() -> None:
    x_NF = documents(N)
    view_NF = mix(x_NF, 0.6, "linear")
    # the first and third column have the same share of the partner, whose number follows from a category swap
    torch.testing.assert_close(view_NF[:, 2], -view_NF[:, 0] - 1)
    swapped_N = view_NF[:, 3] != x_NF[:, 3]
    partner_N, own_N = view_NF[swapped_N, 3], x_NF[swapped_N, 3]
    share_N = (partner_N - view_NF[swapped_N, 0]) / (partner_N - own_N)
    assert share_N.min() >= 0.4 - 1e-9
    assert share_N.max() <= 1
    expected_N = share_N * x_NF[swapped_N, 1] + (1 - share_N) * x_NF[partner_N.long(), 1]
    torch.testing.assert_close(view_NF[swapped_N, 1], expected_N)


def test_geometric_mixup_of_positive_values_is_a_weighted_geometric_mean_and_linear_elsewhere() -> None:
    x_NF = documents(N)
    x_NF[:, 0] = x_NF[:, 1].square()
    geometric_NF, linear_NF = mix(x_NF, 0.6, "geometric"), mix(x_NF, 0.6, "linear")
    torch.testing.assert_close(geometric_NF[:, 0], geometric_NF[:, 1].square())  # a power of a product
    swapped_N = geometric_NF[:, 3] != x_NF[:, 3]
    partner_N, own_N = geometric_NF[swapped_N, 3], x_NF[swapped_N, 3]
    share_N = (partner_N / N - geometric_NF[swapped_N, 1].log()) / (partner_N / N - own_N / N)
    assert share_N.min() >= 0.4 - 1e-6
    assert share_N.max() <= 1 + 1e-6
    assert torch.equal(geometric_NF[:, 2], linear_NF[:, 2])  # negative values, the same draws


def test_values_of_different_signs_and_zeros_are_mixed_linearly() -> None:
    for a, b in ((1.0, -1.0), (0.0, 2.0), (-1.0, -3.0), (0.0, 0.0)):
        x_NF = torch.tensor([[a] * 4, [b] * 4])
        assert torch.equal(mix(x_NF, 0.9, "geometric"), mix(x_NF, 0.9, "linear"))


def test_binary_mixup_takes_each_value_from_one_of_the_two() -> None:
    x_NF = documents(N)
    view_NF = mix(x_NF, 0.8, "binary")
    source_NF = torch.stack([view_NF[:, 0], view_NF[:, 1].log() * N, -view_NF[:, 2] - 1, view_NF[:, 3]], 1).round()
    own_NF = source_NF == torch.arange(N)[:, None]
    other_NF = source_NF.masked_fill(own_NF, -1)
    partner_N1 = other_NF.max(1, keepdim=True).values
    assert ((other_NF == partner_N1) | own_NF).all()  # one partner for all features
    assert (own_NF.double().mean(0) - 0.6).abs().max() < 5 * 0.5 / math.sqrt(N)  # the mean of U(.2, 1)
    both = (own_NF[:, 0] & own_NF[:, 1]).double().mean()
    assert float(both) == pytest.approx((1 - 0.2**3) / 3 / 0.8, abs=5 * 0.5 / math.sqrt(N))  # E[lambda^2]: one share


def test_every_document_is_mixed_in_one_form_and_each_form_is_drawn_for_a_third() -> None:
    x_NF = documents(N) + 0.5
    view_NF = mix(x_NF, 0.5)
    of_form_3N = torch.stack([(view_NF == mix(x_NF, 0.5, form)).all(1) for form in MIXUPS])  # the same draws
    assert of_form_3N.any(0).all()
    assert (of_form_3N.double().mean(1) - 1 / 3).abs().max() < 5 * 0.5 / math.sqrt(N)


@pytest.mark.parametrize("amount", [0.3, 1.0])
def test_categories_are_those_of_one_of_the_two_whatever_the_form(amount: float) -> None:
    x_NF = documents(N)
    view_NF = mix(x_NF, amount)
    assert torch.equal(view_NF[:, 3], view_NF[:, 3].round())
    swapped = (view_NF[:, 3] != x_NF[:, 3]).double().mean()
    assert float(swapped) == pytest.approx(amount / 2, abs=5 * 0.5 / math.sqrt(N))


def test_partners_are_the_other_documents_of_the_batch_and_equally_likely() -> None:
    source_N = torch.cat([mix(documents(4), 1.0, "binary", seed=seed)[:, 3] for seed in range(4000)]).view(4000, 4)
    for own in range(4):
        counts = torch.stack([(source_N[:, own] == other).double().mean() for other in range(4) if other != own])
        assert (counts - 0.5 / 3).abs().max() < 5 * math.sqrt(1 / 6 / 4000)


@pytest.mark.parametrize("forms", [("linear",), ("geometric",), ("binary",), MIXUPS])
def test_a_document_alone_and_no_document_stay(forms: tuple[Mixup, ...]) -> None:
    for n in (0, 1):
        x_NF = documents(n) + 0.3
        torch.testing.assert_close(mix(x_NF, 0.9, *forms), x_NF, rtol=1e-12, atol=0)


def test_wrong_settings_are_refused() -> None:
    for amount in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="amount between 0 and 1"):
            mix(documents(2), amount)
    with pytest.raises(ValueError, match="at least one form"):
        mixup(documents(2), NUMERIC_F, amount=0.5, forms=(), generator=torch.Generator())


def test_random_numbers_below_a_bound_are_uniform_and_never_reach_it() -> None:
    bound = torch.tensor([[1], [3], [1000]])
    drawn = random_below(bound, (3, 30_000), torch.Generator().manual_seed(0))
    assert drawn.min() == 0
    assert drawn.max(1).values.tolist() == [0, 2, 999]
    shares = torch.stack([(drawn[1] == value).double().mean() for value in range(3)])
    assert (shares - 1 / 3).abs().max() < 5 * 0.5 / math.sqrt(30_000)
