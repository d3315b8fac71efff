"""Augmentations: their distribution, what they leave alone, and where their randomness comes from."""

import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ltrscale.pretext.augment import AugmentConfig, GaussianConfig, ZeroingConfig, augment

NUMERIC_F = torch.tensor([True] * 6 + [False] * 2)
CONFIGS = [ZeroingConfig(probability=0.3), GaussianConfig(scale=0.5)]


def view(x_NF: Tensor, config: ZeroingConfig | GaussianConfig, seed: int = 0) -> Tensor:
    return augment(x_NF, NUMERIC_F, config, generator=torch.Generator().manual_seed(seed))


def documents(n: int = 20_000) -> Tensor:
    """Random features without a zero; the last two columns are vocabulary indices."""
    x_NF = torch.randn(n, 8, generator=torch.Generator().manual_seed(1)).abs() + 0.1
    x_NF[:, 6:] = x_NF[:, 6:].ceil()
    return x_NF


@pytest.mark.parametrize("config", CONFIGS)
def test_the_input_stays_and_the_generator_decides(config: ZeroingConfig | GaussianConfig) -> None:
    x_NF = documents(100)
    before_NF = x_NF.clone()
    assert torch.equal(view(x_NF, config, seed=3), view(x_NF, config, seed=3))
    assert not torch.equal(view(x_NF, config, seed=3), view(x_NF, config, seed=4))
    assert torch.equal(x_NF, before_NF)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_type_is_kept(config: ZeroingConfig | GaussianConfig, dtype: torch.dtype) -> None:
    assert view(documents(2).to(dtype), config).dtype == dtype


@pytest.mark.parametrize("config", [ZeroingConfig(probability=0), GaussianConfig(scale=0)])
def test_strength_zero_gives_the_input_as_a_new_tensor(config: ZeroingConfig | GaussianConfig) -> None:
    x_NF = documents(100)
    same_NF = view(x_NF, config)
    assert torch.equal(same_NF, x_NF)
    assert same_NF.data_ptr() != x_NF.data_ptr()


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


def test_configs_are_told_apart_by_kind() -> None:
    read = TypeAdapter(AugmentConfig).validate_python
    assert read({"kind": "zeroing", "probability": 0.7}) == ZeroingConfig(probability=0.7)
    assert read({"kind": "gaussian", "scale": 2}) == GaussianConfig(scale=2.0)
    for wrong in ({"kind": "swap"}, {"kind": "zeroing", "probability": 1.1}, {"kind": "gaussian", "scale": -1}):
        with pytest.raises(ValidationError):
            read(wrong)
