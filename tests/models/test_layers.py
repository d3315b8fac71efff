"""Dropout and embeddings of categories: laws."""

import math

import pytest
import torch

from ltrscale.models.layers import Dropout, FeatureEmbedding

NO_CATEGORIES = torch.ones(7, dtype=torch.bool)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_drops_its_share(probability: float) -> None:
    torch.manual_seed(0)
    dropout = Dropout(probability)
    x = torch.ones(1000, 301)
    out = dropout(x)
    dropped = round(256 * probability) / 256
    sigma = math.sqrt(dropped * (1 - dropped) / x.numel())
    assert abs(float((out == 0).float().mean()) - dropped) < 5 * sigma
    assert out.unique().tolist() == pytest.approx([0, 1 / (1 - dropped)])
    for axis in (0, 1):  # no byte of a random word is special
        shares = (out == 0).float().mean(axis)
        assert float((shares - dropped).abs().max()) < 6 * math.sqrt(0.25 / x.shape[axis])
    every_eighth = (out.flatten()[: 8 * (x.numel() // 8)].view(-1, 8) == 0).float().mean(0)
    assert float((every_eighth - dropped).abs().max()) < 5 * sigma * math.sqrt(8)


def test_dropout_masks_the_gradient_as_the_value_and_repeats_with_the_seed() -> None:
    dropout = Dropout(0.3)
    x = torch.ones(100, 3, requires_grad=True)
    torch.manual_seed(1)
    out = dropout(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())
    torch.manual_seed(1)
    assert torch.equal(dropout(x), out)
    assert not torch.equal(dropout(x), out)
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert dropout.train()(torch.zeros(0, 3)).shape == (0, 3)


def test_embedding_puts_categories_behind_numbers() -> None:
    numeric_F = torch.tensor([False, True, False, True])
    embedding = FeatureEmbedding(numeric_F, [3, 2], dimensions=4)
    assert embedding.width == 2 + 2 * 4
    assert embedding.table is not None
    weights = embedding.table.weight
    assert weights.shape == (5, 4)
    x_NF = torch.tensor([[0.0, 0.5, 0.0, -1.5], [2.0, 1.0, 1.0, 2.0]])
    out_ND = embedding(x_NF)
    assert out_ND[:, :2].tolist() == [[0.5, -1.5], [1.0, 2.0]]
    assert not out_ND[0, 2:].any()
    assert torch.equal(out_ND[1, 2:], torch.cat([weights[2], weights[4]]))
    assert weights[[1, 2, 4]].all()
    plain = FeatureEmbedding(NO_CATEGORIES, [], dimensions=4)
    x_NF = torch.arange(21.0).view(3, 7)
    assert torch.equal(plain(x_NF), x_NF)
    assert not plain.state_dict()
