"""Masking in the views: rates by name, pattern and kind; every view of every method; nothing where all rates are 0."""

import math
import typing

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.config import kind_of, members
from ltrscale.errors import InputError
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.encoders import MLPConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.pretext.augment import (
    AnyAugmentConfig,
    Draw,
    GaussianConfig,
    MarginalConfig,
    MaskConfig,
    MixupConfig,
    SwapInGroupConfig,
    ZeroingConfig,
)
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.objective import Objective, Pretrainer

Kinds = list[typing.Literal["numeric", "categorical"]]
KINDS: Kinds = ["numeric", "numeric", "categorical", "categorical", "categorical"]
NAMES = ["f_age", "f_pop", "c_os", "c_id", "c_device"]
OFFSETS = torch.tensor([0, 4, 12, 20])
MASKED = [cls for cls in members(FeatureMethodConfig) if kind_of(cls) != "vime"]


def test_a_name_comes_before_a_pattern_before_the_kind() -> None:
    def rates(**settings: object) -> list[float]:
        return MaskConfig.model_validate(settings).rates(KINDS, NAMES, {"c_id"})

    assert rates() == [0, 0, 0, 0.8, 0]
    assert rates(identifying=0) == [0] * 5
    assert rates(categories=0.3) == [0, 0, 0.3, 0.8, 0.3]
    assert rates(categories=0.9) == [0, 0, 0.9, 0.9, 0.9]
    assert rates(numbers=0.3) == [0.3, 0.3, 0, 0.8, 0]
    assert rates(numbers=0.3, identifying=0) == [0.3, 0.3, 0, 0, 0]
    assert rates(numbers=0.3, categories=0.4, columns={"f_a*": 0.1, "f_pop": 0}) == [0.1, 0, 0.4, 0.8, 0.4]
    assert rates(columns={"c_id": 0, "f_age": 0.2}) == [0.2, 0, 0, 0, 0]
    assert rates(columns={"c_*": 0.5}) == [0, 0, 0.5, 0.5, 0.5]
    assert rates(columns={"c_d*": 0.1, "c_*": 0.5, "c_os": 0.2, "*e": 0.7}) == [0.7, 0, 0.2, 0.5, 0.7]
    assert rates(columns={"*e": 0.7, "c_os": 0.2, "c_*": 0.5, "c_d*": 0.1}) == [0.7, 0, 0.2, 0.5, 0.7]


def test_a_name_that_looks_like_a_pattern_is_a_name() -> None:
    config = MaskConfig(columns={"f[1]": 0.5, "*": 0.1})
    assert config.rates(["numeric"] * 3, ["f[1]", "f1", "*"]) == [0.5, 0, 0.1]


@pytest.mark.parametrize("key", ["c_divice", "x_*"])
def test_an_unknown_feature_is_an_error_that_names_the_nearest(key: str) -> None:
    with pytest.raises(InputError, match=rf"pretrain\.mask\.columns: .* '{key[:2]}.*the nearest is '[cf]_"):
        MaskConfig(columns={key: 0.5}).rates(KINDS, NAMES)


@pytest.mark.parametrize(
    "wrong", [{"numbers": 2}, {"categories": 1.1}, {"identifying": -0.1}, {"columns": {"f_age": 2}}, {"rate": 1}]
)
def test_rates_are_shares(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        MaskConfig.model_validate(wrong)


def test_each_entry_is_masked_by_itself_at_its_features_rate() -> None:
    n, rates_F = 20_000, torch.tensor([0.0, 0.1, 0.8, 1.0])
    draw = Draw(torch.ones(4, dtype=torch.bool), torch.tensor([0, n]), torch.Generator().manual_seed(0), None, rates_F)
    hidden_NF = (draw.masked(torch.ones(n, 4)) == 0).double()
    assert (hidden_NF.mean(0) - rates_F).abs().max() < 5 * 0.5 / math.sqrt(n)
    assert hidden_NF[:, 0].sum() == 0
    assert hidden_NF[:, 3].sum() == n
    both = (hidden_NF[:, 1] * hidden_NF[:, 2]).mean(), (hidden_NF[1:, 2] * hidden_NF[:-1, 2]).mean()
    assert both == pytest.approx((0.08, 0.64), abs=5 * 0.5 / math.sqrt(n))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"numbers": 0.3}, [0.3, 0.3, 0, 0.8, 0]),
        ({"numbers": 0.1, "categories": 0.6, "identifying": 0}, [0.1, 0.1, 0.6, 0.6, 0.6]),
        ({"numbers": 0.5, "columns": {"f_age": 0.9, "c_*": 0.2}}, [0.9, 0.5, 0.2, 0.2, 0.2]),
        ({"numbers": 1, "columns": {"f_pop": 0}}, [1, 0, 0, 0.8, 0]),
    ],
)
def test_each_kind_is_masked_at_its_rate_and_a_named_feature_at_its_own(
    settings: dict[str, object], expected: list[float]
) -> None:
    n, rates_F = 20_000, torch.tensor(MaskConfig.model_validate(settings).rates(KINDS, NAMES, {"c_id"}))
    numeric_F = torch.tensor([kind == "numeric" for kind in KINDS])
    draw = Draw(numeric_F, torch.tensor([0, n]), torch.Generator().manual_seed(1), rates_F=rates_F)
    hidden_NF = (draw.masked(torch.ones(n, 5)) == 0).double()
    assert (hidden_NF.mean(0) - torch.tensor(expected)).abs().max() < 5 * 0.5 / math.sqrt(n)


def groups() -> QueryGroups:
    x_NF = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    x_NF[:, 2:] = torch.stack([torch.arange(20) % 3, torch.arange(20), torch.arange(20) % 5], 1)
    return QueryGroups(x_NF, OFFSETS)


def pretrainer(method: Objective, augmentation: AnyAugmentConfig, rates: list[float] | None) -> Pretrainer:
    torch.manual_seed(1)
    config = TransformConfig(numeric="standard")
    transform = fit_transform([groups().features_NF], KINDS, config)
    marginals_SF = transform(groups().features_NF, OFFSETS)
    network = NetworkConfig(transform=config, encoder=MLPConfig(hidden=(8,)))
    rates_F = None if rates is None else torch.tensor(rates)
    return Pretrainer(transform, network, method, augmentation, marginals_SF, rates_F).eval()


def seen(model: Pretrainer) -> list[Tensor]:
    """The inputs of the encoder, with the generator's last state as the last tensor."""
    inputs: list[Tensor] = []
    model.encoder.register_forward_pre_hook(lambda _, given: inputs.append(given[0].clone()))
    generator = torch.Generator().manual_seed(5)
    model(groups(), generator)
    return [*inputs, generator.get_state()]


@pytest.mark.parametrize("cls", members(FeatureMethodConfig), ids=kind_of)
def test_without_a_rate_above_0_views_and_draws_are_those_without_a_mask(cls: type[Objective]) -> None:
    without, with_zeros = (seen(pretrainer(cls(), ZeroingConfig(probability=0.3), r)) for r in (None, [0.0] * 5))
    assert len(without) == len(with_zeros)
    assert all(map(torch.equal, without, with_zeros))


@pytest.mark.parametrize("cls", MASKED, ids=kind_of)
def test_every_random_view_of_every_method_is_masked(cls: type[Objective]) -> None:
    inputs = seen(pretrainer(cls(), ZeroingConfig(probability=0), [1.0, 0, 0, 1.0, 0]))[:-1]
    if kind_of(cls) == "scarf":  # the other one is the document as it is
        assert inputs[0].count_nonzero(0).all()
        inputs = inputs[1:]
    for view_NF in inputs:
        assert not view_NF[:, [0, 3]].any()
        assert view_NF.any()


@pytest.mark.parametrize(
    "augmentation",
    [GaussianConfig(), SwapInGroupConfig(probability=0.5), MixupConfig(amount=0.5), MarginalConfig(probability=0.5)],
    ids=lambda config: config.kind,
)
def test_the_mask_comes_after_the_augmentation_and_both_views_have_their_own(augmentation: AnyAugmentConfig) -> None:
    (simclr_rank, *_) = members(FeatureMethodConfig)
    first_NF, second_NF, _ = seen(pretrainer(simclr_rank(), augmentation, [1.0, 0, 0, 0.5, 0]))
    assert not first_NF[:, 0].any()
    assert first_NF[:, 1].all()  # noise, but no mask
    hidden = [(view_NF[:, 3] == 0) for view_NF in (first_NF, second_NF)]
    assert all(0 < int(h.sum()) < 20 for h in hidden)
    assert not torch.equal(*hidden)
