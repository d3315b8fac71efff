"""Augmentations: their distribution, the entries they keep, their randomness; each form of mixup is its formula."""

import math
from collections import Counter

import pytest
import torch
from config_variations import keys_without_effect
from torch import Tensor

from jobs.bench.pretend import counting, pretending
from ltrscale.batch import QueryGroups, group_index, to_offsets
from ltrscale.config import kind_of, members
from ltrscale.pretext.augment import (
    MIXUPS,
    AnyAugmentConfig,
    Augmentation,
    AugmentConfig,
    ComposeConfig,
    Draw,
    GaussianConfig,
    MarginalConfig,
    Mixup,
    MixupConfig,
    SingleAugmentConfig,
    SwapInBatchConfig,
    SwapInGroupConfig,
    ZeroingConfig,
    permute_columns,
)

MIXUP_NUMERIC_F = torch.tensor([True, True, True, False])


def mix(x_NF: Tensor, amount: float, *forms: Mixup, seed: int = 0) -> Tensor:
    draw = Draw(MIXUP_NUMERIC_F, torch.tensor([0, len(x_NF)]), torch.Generator().manual_seed(seed))
    return MixupConfig(amount=amount, forms=forms or MIXUPS).view(x_NF, draw)


def documents_mixup(n: int) -> Tensor:
    """Float64: the document's number n as n, exp(n), -n, and as a category."""
    number_N = torch.arange(n, dtype=torch.float64)
    return torch.stack([number_N, (number_N / n).exp(), -number_N - 1, number_N], 1)


def test_linear_mixup_is_on_the_line_between_two_documents() -> None:
    x_NF = documents_mixup(N)
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
    x_NF = documents_mixup(N)
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
    x_NF = documents_mixup(N)
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
    x_NF = documents_mixup(N) + 0.5
    view_NF = mix(x_NF, 0.5)
    of_form_3N = torch.stack([(view_NF == mix(x_NF, 0.5, form)).all(1) for form in MIXUPS])  # the same draws
    assert of_form_3N.any(0).all()
    assert (of_form_3N.double().mean(1) - 1 / 3).abs().max() < 5 * 0.5 / math.sqrt(N)


@pytest.mark.parametrize("amount", [0.3, 1.0])
def test_categories_are_those_of_one_of_the_two_whatever_the_form(amount: float) -> None:
    x_NF = documents_mixup(N)
    view_NF = mix(x_NF, amount)
    assert torch.equal(view_NF[:, 3], view_NF[:, 3].round())
    swapped = (view_NF[:, 3] != x_NF[:, 3]).double().mean()
    assert float(swapped) == pytest.approx(amount / 2, abs=5 * 0.5 / math.sqrt(N))


@pytest.mark.slow
def test_partners_are_the_other_documents_of_the_batch_and_equally_likely() -> None:
    source_N = torch.cat([mix(documents_mixup(4), 1.0, "binary", seed=seed)[:, 3] for seed in range(4000)]).view(
        4000, 4
    )
    for own in range(4):
        counts = torch.stack([(source_N[:, own] == other).double().mean() for other in range(4) if other != own])
        assert (counts - 0.5 / 3).abs().max() < 5 * math.sqrt(1 / 6 / 4000)


@pytest.mark.parametrize("forms", [("linear",), ("geometric",), ("binary",), MIXUPS])
def test_a_document_alone_and_no_document_stay(forms: tuple[Mixup, ...]) -> None:
    for n in (0, 1):
        x_NF = documents_mixup(n) + 0.3
        torch.testing.assert_close(mix(x_NF, 0.9, *forms), x_NF, rtol=1e-12, atol=0)


NUMERIC_F = torch.tensor([True] * 6 + [False] * 2)
CONFIGS: list[AnyAugmentConfig] = [
    ZeroingConfig(probability=0.3),
    GaussianConfig(scale=0.5),
    SwapInGroupConfig(probability=0.3),
    SwapInBatchConfig(probability=0.3),
    MarginalConfig(probability=0.3),
    MarginalConfig(probability=0.3, fixed_count=True),
    MixupConfig(amount=0.6),
    ComposeConfig(steps=(SwapInGroupConfig(probability=0.2), ZeroingConfig(probability=0.1), MixupConfig(amount=0.2))),
]
CONFIGS += [cls() for cls in members(SingleAugmentConfig) if cls not in map(type, CONFIGS)]
WEAKEST: list[AnyAugmentConfig] = [
    ZeroingConfig(probability=0),
    GaussianConfig(scale=0),
    SwapInGroupConfig(probability=0),
    SwapInBatchConfig(probability=0),
    MarginalConfig(probability=0),
    MarginalConfig(probability=0.12, fixed_count=True),  # of 8 features
    MixupConfig(amount=0),
    ComposeConfig(steps=(ZeroingConfig(probability=0), MixupConfig(amount=0))),
]
N = 20_000
SIGMA = 5 / math.sqrt(N)


@pytest.mark.parametrize("cls", members(AugmentConfig), ids=kind_of)
def test_every_key_of_a_config_means_something(cls: type[Augmentation]) -> None:
    configs = [config for config in CONFIGS if isinstance(config, cls)]
    assert keys_without_effect(configs, lambda config: view(documents(100), config)) == set()


def offsets_of(n: int) -> Tensor:
    """Offsets of groups of 1, 0, 2, 3, 4, ... documents."""
    lengths, left = [min(n, 1), 0], n - min(n, 1)
    while left:
        lengths.append(min(len(lengths), left))
        left -= lengths[-1]
    return to_offsets(torch.tensor(lengths))


def marginals() -> Tensor:
    """A sample of values that no document has."""
    values_SF = -torch.rand(50, 8, generator=torch.Generator().manual_seed(2)) - 1
    values_SF[:, 6:] = values_SF[:, 6:].mul(10).floor().abs() + 100
    return values_SF


def view(x_NF: Tensor, config: AnyAugmentConfig, seed: int = 0, offsets_Q1: Tensor | None = None) -> Tensor:
    offsets_Q1 = offsets_of(len(x_NF)) if offsets_Q1 is None else offsets_Q1
    return config.view(x_NF, Draw(NUMERIC_F, offsets_Q1, torch.Generator().manual_seed(seed), marginals()))


def documents(n: int = N) -> Tensor:
    """Random features without a zero; the last two columns are vocabulary indices."""
    x_NF = torch.randn(n, 8, generator=torch.Generator().manual_seed(1)).abs() + 0.1
    x_NF[:, 6:] = x_NF[:, 6:].ceil()
    return x_NF


def addresses(n: int = N) -> Tensor:
    """Values that identify their document and column: 10 n + f."""
    return 10 * torch.arange(n, dtype=torch.float64)[:, None] + torch.arange(8)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_the_input_stays_and_the_generator_decides(config: AnyAugmentConfig) -> None:
    x_NF = documents(100)
    before_NF = x_NF.clone()
    assert torch.equal(view(x_NF, config, seed=3), view(x_NF, config, seed=3))
    assert not torch.equal(view(x_NF, config, seed=3), view(x_NF, config, seed=4))
    assert torch.equal(x_NF, before_NF)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_which_entries_change_does_not_depend_on_their_values(config: AnyAugmentConfig) -> None:
    """Otherwise the second of two views would depend on the values in the batch."""
    states = []
    for x_NF in (documents(100), documents(100) + 1):
        generator = torch.Generator().manual_seed(3)
        config.view(x_NF, Draw(NUMERIC_F, offsets_of(100), generator, marginals()))
        states.append(generator.get_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_type_and_shape_are_kept(config: AnyAugmentConfig, dtype: torch.dtype, n: int) -> None:
    view_NF = view(documents(n).to(dtype), config)
    assert view_NF.dtype == dtype
    assert view_NF.shape == (n, 8)
    assert view_NF.isfinite().all()


@pytest.mark.parametrize("config", WEAKEST)
def test_strength_zero_gives_the_input_as_a_new_tensor(config: AnyAugmentConfig) -> None:
    x_NF = documents(100)
    same_NF = view(x_NF, config)
    assert torch.equal(same_NF, x_NF)
    assert same_NF.data_ptr() != x_NF.data_ptr()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_categories_stay_indices_of_their_own_vocabulary(config: AnyAugmentConfig) -> None:
    x_NF = documents(2000)
    x_NF[:, 7] += 20
    for column in (6, 7):
        valid = {0.0, *x_NF[:, column].tolist(), *marginals()[:, column].tolist()}
        assert set(view(x_NF, config)[:, column].tolist()) <= valid


@pytest.mark.parametrize("probability", [0.003, 0.1, 0.7])
def test_zeroing_hits_every_column_at_its_rate_and_leaves_the_rest(probability: float) -> None:
    x_NF = documents()
    y_NF = view(x_NF, ZeroingConfig(probability=probability))
    zeroed_NF = y_NF == 0
    assert torch.equal(y_NF[~zeroed_NF], x_NF[~zeroed_NF])
    spread = math.sqrt(probability * (1 - probability) / len(x_NF))
    assert (zeroed_NF.double().mean(0) - probability).abs().max() < 5 * spread


def test_zeroing_draws_entries_independently() -> None:
    zeroed_NF = (view(documents(), ZeroingConfig(probability=0.5)) == 0).double()
    correlation_FF = torch.corrcoef(torch.cat([zeroed_NF, zeroed_NF.roll(1, 0)], 1).T)
    correlation_FF.fill_diagonal_(0)
    assert correlation_FF.abs().max() < 5 / math.sqrt(len(zeroed_NF))


def test_zeroing_with_probability_one_clears_everything_infinite_values_too() -> None:
    x_NF = documents(10)
    x_NF[0, 0], x_NF[1, 1] = torch.inf, torch.nan
    assert not view(x_NF, ZeroingConfig(probability=1)).any()


def test_gaussian_noise_has_its_scale_and_leaves_categories_alone() -> None:
    x_NF = documents()
    noise_NF = view(x_NF, GaussianConfig(scale=0.5)) - x_NF
    assert not noise_NF[:, 6:].any()
    noise_NF = noise_NF[:, :6].double()
    assert noise_NF.mean(0).abs().max() < 5 * 0.5 / math.sqrt(len(x_NF))
    assert (noise_NF.std(0) / 0.5 - 1).abs().max() < 5 / math.sqrt(2 * len(x_NF))
    assert (noise_NF**4).mean() / (noise_NF**2).mean() ** 2 == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("probability", [0.1, 0.7])
@pytest.mark.parametrize("kind", [SwapInGroupConfig, SwapInBatchConfig])
def test_swapping_takes_the_columns_value_of_another_document_of_the_group(
    probability: float, kind: type[SwapInGroupConfig] | type[SwapInBatchConfig]
) -> None:
    x_NF, offsets_Q1 = addresses(), to_offsets(torch.tensor([1] * 50 + [N - 350 - 50, 0, 300, 50]))
    view_NF = view(x_NF, kind(probability=probability), offsets_Q1=offsets_Q1)
    source_NF, column_NF = view_NF.long() // 10, view_NF.long() % 10
    changed_NF = view_NF != x_NF
    assert torch.equal(column_NF, torch.arange(8).expand(N, 8))
    alone_N = torch.arange(N) < 50
    if kind is SwapInGroupConfig:
        group_N = group_index(offsets_Q1)
        assert torch.equal(group_N[source_NF], group_N[:, None].expand(N, 8))
        assert not changed_NF[alone_N].any()
    else:
        assert changed_NF[alone_N].any()
        alone_N[:] = False
    assert (changed_NF[~alone_N].double().mean(0) - probability).abs().max() < SIGMA * 0.5


def test_all_other_documents_of_a_group_are_equally_likely_and_columns_are_drawn_apart() -> None:
    x_NF, offsets_Q1 = addresses(4 * 5000), torch.arange(0, 4 * 5000 + 1, 4)
    source_NF = view(x_NF, SwapInGroupConfig(probability=1), offsets_Q1=offsets_Q1).long() // 10
    step_NF = (source_NF - torch.arange(N)[:, None]) % 4
    shares = torch.stack([(step_NF == step).double().mean(0) for step in range(4)])
    assert not shares[0].any()
    assert (shares[1:] - 1 / 3).abs().max() < SIGMA * 0.5
    both = torch.stack([(step_NF[:, 0] == a) & (step_NF[:, 1] == b) for a in (1, 2, 3) for b in (1, 2, 3)])
    assert (both.double().mean(1) - 1 / 9).abs().max() < SIGMA * 0.5


def test_a_groups_swaps_stay_when_other_groups_change() -> None:
    x_NF, offsets_Q1 = documents(100), to_offsets(torch.tensor([40, 60]))
    other_NF = torch.cat([x_NF[:40], x_NF[40:] + 5])
    views = [
        view(values_NF, SwapInGroupConfig(probability=0.5), offsets_Q1=offsets_Q1) for values_NF in (x_NF, other_NF)
    ]
    assert torch.equal(views[0][:40], views[1][:40])


@pytest.mark.parametrize("probability", [0.3, 0.9])
@pytest.mark.parametrize("fixed_count", [False, True])
def test_corrupted_values_come_from_the_training_marginal_of_their_column(
    probability: float, fixed_count: bool
) -> None:
    x_NF, marginals_SF = documents(), marginals()
    view_NF = view(x_NF, MarginalConfig(probability=probability, fixed_count=fixed_count))
    changed_NF = view_NF != x_NF
    for column, allowed_S in zip(range(8), marginals_SF.T, strict=True):
        drawn = Counter(view_NF[changed_NF[:, column], column].tolist())
        expected = Counter(allowed_S.tolist())
        assert set(drawn) == set(expected)
        for value, count in expected.items():
            share = drawn[value] / drawn.total()
            assert share == pytest.approx(count / 50, abs=5 * math.sqrt(count / 50 / drawn.total()))
    rate = math.floor(probability * 8) / 8 if fixed_count else probability
    assert (changed_NF.double().mean(0) - rate).abs().max() < SIGMA * 0.5
    assert (changed_NF.sum(1) == math.floor(probability * 8)).all() == fixed_count


def test_values_of_one_document_are_drawn_from_different_training_documents() -> None:
    marginals_SF = addresses(1000)
    draw = Draw(NUMERIC_F, torch.tensor([0, 50]), torch.Generator().manual_seed(0), marginals_SF)
    view_NF = MarginalConfig(probability=1).view(addresses(50), draw)
    assert all(len(set(row)) > 4 for row in (view_NF.long() // 10).tolist())


@pytest.mark.parametrize(("rate", "n_features", "count"), [(0.29, 100, 29), (0.6, 5, 3), (0.99, 5, 4), (1.0, 5, 5)])
def test_a_fixed_count_is_the_rate_rounded_down(rate: float, n_features: int, count: int) -> None:
    draw = Draw(torch.ones(n_features, dtype=torch.bool), torch.tensor([0, 30]), torch.Generator().manual_seed(0))
    draw = draw._replace(marginals_SF=torch.ones(3, n_features))
    view_NF = MarginalConfig(probability=rate, fixed_count=True).view(torch.zeros(30, n_features), draw)
    assert view_NF.sum(1).tolist() == [count] * 30


def test_marginals_must_be_there() -> None:
    with pytest.raises(ValueError, match="needs marginals_SF"):
        MarginalConfig().view(documents(3), Draw(NUMERIC_F, torch.tensor([0, 3]), torch.Generator()))
    assert {config.kind for config in CONFIGS if config.needs_marginals} == {"marginal"}
    assert ComposeConfig(steps=(ZeroingConfig(), MarginalConfig())).needs_marginals


def test_a_composition_applies_its_steps_in_order() -> None:
    x_NF = documents(200)
    steps = (SwapInBatchConfig(probability=0.5), GaussianConfig(scale=1), ZeroingConfig(probability=0.3))
    generator = torch.Generator().manual_seed(0)
    one_by_one_NF = x_NF
    for step in steps:
        one_by_one_NF = step.view(one_by_one_NF, Draw(NUMERIC_F, offsets_of(200), generator))
    assert torch.equal(view(x_NF, ComposeConfig(steps=steps)), one_by_one_NF)
    zeros = [(view(x_NF, ComposeConfig(steps=order))[:, :6] == 0).any() for order in (steps, steps[::-1])]
    assert zeros == [True, False]  # noise on a zero leaves none


def assert_permuted_apart(permuted_NF: Tensor) -> None:
    assert torch.equal(permuted_NF.sort(0).values, addresses(500))
    source_NF = permuted_NF.long() // 10
    assert all((source_NF[:, a] == source_NF[:, b]).sum() < 10 for a in range(8) for b in range(a))
    assert (source_NF == torch.arange(500)[:, None]).sum(0).max() < 10


def test_permuted_columns_keep_their_values_and_are_permuted_apart() -> None:
    assert_permuted_apart(permute_columns(addresses(500), generator=torch.Generator().manual_seed(0)))


def test_a_gpu_permutes_all_columns_at_once() -> None:
    with pretending() as device:
        there_NF = addresses(500).to(device)
        with counting() as counted:
            permuted_NF = permute_columns(there_NF, generator=torch.Generator().manual_seed(0)).cpu()
    assert counted.counts.launches <= 4
    assert_permuted_apart(permuted_NF)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_gpu_is_asked_for_nothing_and_gives_the_same_view_from_the_same_draws(config: AnyAugmentConfig) -> None:
    groups = QueryGroups(documents(100), torch.tensor([0, 1, 40, 100]))
    expected_NF = view(groups.features_NF, config, offsets_Q1=groups.offsets_Q1)
    with pretending() as device:
        there, values_SF = groups.to(device), marginals().to(device)
        draw = Draw(NUMERIC_F.to(device), there.offsets_Q1, torch.Generator().manual_seed(0), values_SF)
        with counting() as counted:
            view_NF = config.view(there.features_NF, draw)
    assert not counted.counts.waits
    torch.testing.assert_close(view_NF.cpu(), expected_NF)
