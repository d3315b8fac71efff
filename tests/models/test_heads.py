"""Heads: the layers that the papers name."""

import pytest
import torch
from torch import nn

from ltrscale.models.heads import HeadConfig, Projector, ProjectorConfig, mlp_head
from ltrscale.models.layers import Dropout, MicroBatchNorm
from ltrscale.pretext.simsiam import Predictor


def shapes(module: nn.Module) -> list[tuple[int, int, bool]]:
    """Input, output and bias of each linear layer."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return [(m.in_features, m.out_features, m.bias is not None) for m in layers]


def kinds(module: nn.Module) -> list[str]:
    return [type(m).__name__ for m in module.modules() if not list(m.children())]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (HeadConfig(), [(8, 8, True), (8, 8, True), (8, 1, True)]),
        (HeadConfig(layers=1, width=5), [(8, 1, True)]),
        (HeadConfig(layers=2, width=5), [(8, 5, True), (5, 1, True)]),
    ],
)
def test_head_layers(config: HeadConfig, expected: list[tuple[int, int, bool]]) -> None:
    head = mlp_head(config, 8)
    assert shapes(head) == expected
    assert kinds(head).count("ReLU") == config.layers - 1
    assert head(torch.randn(4, 8)).shape == (4, 1)
    assert head(torch.randn(0, 8)).shape == (0, 1)
    assert mlp_head(config, 8, outputs=3)(torch.randn(4, 8)).shape == (4, 3)


def test_dropout_follows_each_hidden_layer_of_a_head_in_training_only() -> None:
    head = mlp_head(HeadConfig(layers=3, dropout=0.25), 8)
    assert kinds(head) == [*["Linear", "ReLU", "Dropout"] * 2, "Linear"]
    assert [m.probability for m in head if isinstance(m, Dropout)] == [0.25, 0.25]
    h_ND = torch.randn(50, 8)
    plain = mlp_head(HeadConfig(layers=3), 8)
    for ours, theirs in zip(head[::3], plain[::2], strict=True):
        ours.load_state_dict(theirs.state_dict())
    assert not torch.equal(head(h_ND), plain(h_ND))
    assert torch.equal(head.eval()(h_ND), plain(h_ND))


def test_an_identity_head_adds_nothing_to_a_non_negative_embedding() -> None:
    h_ND = torch.rand(5, 8)
    head = mlp_head(HeadConfig(layers=5, init="identity"), 8, outputs=2)
    assert torch.equal(head(h_ND), h_ND[:, :2])


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_first_layers_of_a_projector_are_its_hidden_ones(batch_norm: bool) -> None:
    projector = Projector(8, ProjectorConfig(layers=3, width=6, batch_norm=batch_norm)).eval()
    h_ND = torch.randn(5, 8)
    expected_ND = h_ND
    for layers in range(4):
        assert torch.equal(projector.first(layers)(h_ND), expected_ND)
        if layers < 3:
            step = 3 if batch_norm else 2
            expected_ND = projector.layers[layers * step : (layers + 1) * step](expected_ND)


def test_simclr_projector_has_no_bias_and_no_norm() -> None:
    projector = Projector(8, ProjectorConfig(output=3))
    assert shapes(projector) == [(8, 8, False), (8, 8, False), (8, 3, False)]
    assert kinds(projector) == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert projector.width == 3
    assert Projector(8, ProjectorConfig(width=5)).width == 8
    assert shapes(Projector(8, ProjectorConfig(layers=0))) == [(8, 8, False)]


def test_the_layers_of_the_authors_code_have_biases() -> None:
    projector = Projector(8, ProjectorConfig(layers=1, output=3, bias=True))
    assert shapes(projector) == [(8, 8, True), (8, 3, True)]
    assert shapes(Predictor(8, 3, bias=True)) == [(8, 3, False), (3, 8, True)]


def test_simsiam_projector_ends_in_a_norm_without_affine() -> None:
    projector = Projector(8, ProjectorConfig(batch_norm=True))
    linear = ["Linear", "MicroBatchNorm"]
    assert kinds(projector) == [*linear, "ReLU", *linear, "ReLU", *linear]
    norms = [m for m in projector.modules() if isinstance(m, MicroBatchNorm)]
    assert [norm.weight is not None for norm in norms] == [True, True, False]
    z_NP = projector(torch.randn(200, 8))
    torch.testing.assert_close(z_NP.mean(0), torch.zeros(8), rtol=0, atol=1e-5)
    torch.testing.assert_close(z_NP.var(0, correction=0), torch.ones(8), rtol=1e-2, atol=0)


def test_predictor_has_a_bottleneck() -> None:
    predictor = Predictor(136)
    assert shapes(predictor) == [(136, 34, False), (34, 136, False)]
    assert kinds(predictor) == ["Linear", "MicroBatchNorm", "ReLU", "Linear"]
    assert shapes(Predictor(8, 3)) == [(8, 3, False), (3, 8, False)]
