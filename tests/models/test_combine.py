"""Combined rankers: their scores, their trained parameters, and bundles that score the same."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError
from ltrscale.models.batch_norm import MicroBatchNorm
from ltrscale.models.encoders import MLPConfig, ResNetConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.models.ranker import Architecture, ConcatRanker, HeadConfig, MeanRanker, Ranker

FEATURES = tuple(Feature(name=f"f{i}") for i in range(4))


def documents(n: int = 30, seed: int = 0) -> QueryGroups:
    x_NF = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return QueryGroups(x_NF, torch.tensor([0, n // 3, n]), (x_NF[:, 0] > 0).float())


def rankers() -> list[Ranker]:
    """Two different networks."""
    torch.manual_seed(0)
    config = TransformConfig(numeric="standard")
    transform = fit_transform([documents(seed=1).features_NF], ["numeric"] * 4, config)
    one = Architecture(transform=config, encoder=ResNetConfig(width=6, blocks=1), head=HeadConfig(layers=2, width=5))
    two = Architecture(transform=config, encoder=MLPConfig(hidden=(7, 3)), head=HeadConfig(layers=1))
    return [Ranker(one, transform).eval(), Ranker(two, transform).eval()]


def test_the_mean_is_the_mean_of_the_scores() -> None:
    parts, groups = rankers(), documents()
    expected_N = (parts[0](groups) + parts[1](groups)) / 2
    torch.testing.assert_close(MeanRanker(parts)(groups), expected_N)


def test_concatenation_normalises_the_last_embeddings_of_all_parts() -> None:
    parts, groups = rankers(), documents()
    model = ConcatRanker(parts).train()
    joint_ND = torch.cat([parts[0].head[:-1](parts[0].embed(groups).documents_ND), parts[1].embed(groups)[0]], 1)
    assert joint_ND.shape == (30, 5 + 3)
    expected_N = model.head(nn.BatchNorm1d(8, affine=False)(joint_ND)).squeeze(-1)
    torch.testing.assert_close(model(groups), expected_N, rtol=1e-4, atol=1e-5)


def test_only_the_linear_layer_of_a_concatenation_is_trained() -> None:
    model = ConcatRanker(rankers(), dropout=0.5).train()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    assert not any(part.training for part in model.parts)
    model(documents()).sum().backward()
    assert all(p.grad is None for p in model.parts.parameters())
    touched = [m for m in model.modules() if isinstance(m, MicroBatchNorm) and m.seen]
    assert touched == [model.norm]


@pytest.mark.parametrize("how", ["mean", "concat"])
def test_a_bundle_holds_all_parts(how: str, tmp_path: Path) -> None:
    groups, parts = documents(), rankers()
    model = (MeanRanker(parts) if how == "mean" else ConcatRanker(parts, dropout=0.3)).eval()
    about = bundle.BundleFacts(config={}, features=FEATURES, dataset_hash="", metrics={}, made_by={})
    bundle.save_ranker(str(tmp_path / "out"), model, about)
    opened = bundle.load(str(tmp_path / "out"))
    assert opened.held == model.architecture
    assert torch.equal(opened.scorer()(groups), model(groups).detach())
    with pytest.raises(InputError, match="holds several rankers; name a bundle with an encoder"):
        bundle.load(str(tmp_path / "out"), bundle.EncoderBundle)
