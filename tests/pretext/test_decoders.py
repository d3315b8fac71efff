"""Decoders: their outputs fit the pretext objectives, and VIME and SubTab learn with them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ltrscale.models.encoders import ResNet, ResNetConfig
from ltrscale.models.heads import Projector, ProjectorConfig
from ltrscale.pretext.reconstruct import MAX_CLASSES, DecoderConfig, FeatureDecoder, feature_errors
from ltrscale.pretext.subtab import feature_subsets, subtab, subtab_views
from ltrscale.pretext.vime import VimeDecoder, vime, vime_corrupt

NUMERIC_F = torch.tensor([True, True, False, True])
CARDINALITIES = [4]


def documents(n: int) -> Tensor:
    """Features that predict each other: a factor, its square, its category and its negative."""
    factor_N = torch.randn(n, generator=torch.Generator().manual_seed(0))
    category_N = (factor_N + 2).clamp(0, 3).floor()
    return torch.stack([factor_N, factor_N.square() - 1, category_N, -factor_N], 1)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_decoder_has_an_output_for_each_number_and_each_class(layers: int) -> None:
    decoder = FeatureDecoder(DecoderConfig(layers=layers, width=5), 8, NUMERIC_F, [1000])
    assert decoder(torch.zeros(2, 8)).shape == (2, 3 + MAX_CLASSES)
    x_NF = documents(2)
    assert feature_errors(decoder(torch.zeros(2, 8)), x_NF, NUMERIC_F, [1000]).shape == (2, 4)
    assert sum(isinstance(module, nn.Linear) for module in decoder.modules()) == layers


def test_vimes_estimators_share_nothing() -> None:
    decoder = VimeDecoder(DecoderConfig(), 8, NUMERIC_F, CARDINALITIES)
    decoded_NO, logits_NF = decoder(torch.ones(2, 8))
    assert decoded_NO.shape == (2, 3 + 4)
    assert logits_NF.shape == (2, 4)
    grads = torch.autograd.grad(logits_NF.sum(), list(decoder.parameters()), allow_unused=True)
    names = [name for name, _ in decoder.named_parameters()]
    assert [name for name, grad in zip(names, grads, strict=True) if grad is not None] == [
        name for name in names if name.startswith("mask.")
    ]


def learned(parts: nn.ModuleList, loss: Callable[[torch.Generator], Tensor], steps: int) -> float:
    """The mean loss of the last steps as a share of that of the first steps."""
    optimizer, generator, losses = torch.optim.Adam(parts.parameters(), lr=3e-3), torch.Generator().manual_seed(0), []
    for _ in range(steps):
        loss_N = loss(generator)
        losses.append(float(loss_N.detach().mean()))
        optimizer.zero_grad()
        torch.autograd.backward(loss_N.mean())
        optimizer.step()
    return sum(losses[-5:]) / sum(losses[:5])


def test_vime_learns() -> None:
    torch.manual_seed(0)
    encoder = ResNet(ResNetConfig(width=32, dropout=0), NUMERIC_F, CARDINALITIES)
    decoder = VimeDecoder(DecoderConfig(), encoder.width, NUMERIC_F, CARDINALITIES)
    x_NF = documents(512)

    def loss(generator: torch.Generator) -> Tensor:
        corrupted_NF, changed_NF = vime_corrupt(x_NF, rate=0.3, generator=generator)
        decoded_NO, logits_NF = decoder(encoder(corrupted_NF))
        return vime(decoded_NO, logits_NF, x_NF, changed_NF, NUMERIC_F, CARDINALITIES, alpha=2.0)

    assert learned(nn.ModuleList([encoder, decoder]), loss, steps=80) < 0.4


@pytest.mark.slow
def test_subtab_learns() -> None:
    torch.manual_seed(0)
    encoder = ResNet(ResNetConfig(width=32, dropout=0), NUMERIC_F, CARDINALITIES)
    decoder = FeatureDecoder(DecoderConfig(layers=2), encoder.width, NUMERIC_F, CARDINALITIES)
    projector = Projector(encoder.width, ProjectorConfig(layers=1))
    x_NF, offsets_Q1 = documents(128), torch.tensor([0, 128])
    subsets_KF = feature_subsets(4, subsets=4, overlap=0.75)

    def loss(generator: torch.Generator) -> Tensor:
        views = subtab_views(x_NF, NUMERIC_F, subsets_KF, rate=0.1, noise="swap", scale=0.0, generator=generator)
        h_ND = encoder(views.flatten(0, 1))
        decoded_KNO, z_KNP = (part(h_ND).unflatten(0, views.shape[:2]) for part in (decoder, projector))
        return subtab(decoded_KNO, z_KNP, x_NF, offsets_Q1, NUMERIC_F, CARDINALITIES, temperature=0.1)

    assert learned(nn.ModuleList([encoder, decoder, projector]), loss, steps=80) < 0.5
