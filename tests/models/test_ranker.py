"""The ranker: its heads, its parts together, and the start from a pretrained encoder."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.models.attention import DASALCConfig, RankFormerConfig
from ltrscale.models.batch_norm import MicroBatchNorm
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.encoders import MLPConfig
from ltrscale.models.features import FeatureTransform, TransformConfig, fit_transform
from ltrscale.models.layers import Dropout
from ltrscale.models.ranker import Architecture, HeadConfig, Projector, ProjectorConfig, Ranker, mlp_head
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer, _Predictor
from ltrscale.pretext.reconstruct import VimeConfig


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


def test_simclr_projector_has_no_norm_and_biases_in_the_authors_code_alone() -> None:
    projector = Projector(8, ProjectorConfig(output=3))
    assert shapes(projector) == [(8, 8, False), (8, 8, False), (8, 3, False)]
    assert kinds(projector) == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert projector.width == 3
    assert Projector(8, ProjectorConfig(width=5)).width == 8
    assert shapes(Projector(8, ProjectorConfig(layers=0))) == [(8, 8, False)]
    assert shapes(Projector(8, ProjectorConfig(layers=1, output=3, bias=True))) == [(8, 8, True), (8, 3, True)]


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
    predictor = _Predictor(136)
    assert shapes(predictor) == [(136, 34, False), (34, 136, False)]
    assert kinds(predictor) == ["Linear", "MicroBatchNorm", "ReLU", "Linear"]
    assert shapes(_Predictor(8, 3, bias=True)) == [(8, 3, False), (3, 8, True)]


KINDS = ["numeric", "numeric", "numeric", "categorical"]


def documents() -> QueryGroups:
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(12, 4, generator=generator)
    x_NF[:, 3] = torch.randint(0, 3, (12,), generator=generator)
    return QueryGroups(x_NF, torch.tensor([0, 5, 6, 12]))


def transform() -> FeatureTransform:
    return fit_transform([documents().features_NF], KINDS, TransformConfig(numeric="standard"))  # type: ignore[list-item]


def architecture(**changes: object) -> Architecture:
    parts = {"transform": TransformConfig(numeric="standard"), "encoder": MLPConfig(hidden=(8,)), "head": HeadConfig()}
    return Architecture.model_validate({**parts, **changes})


def test_noise_moves_numbers_in_training_only() -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []
    ranker = Ranker(architecture(noise=0.5), transform())
    ranker.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    plain_NF = ranker.transform(documents().features_NF)
    ranker.eval()(documents())
    ranker.train()(documents())
    assert torch.equal(seen[0], plain_NF)
    assert torch.equal(seen[1][:, 3], plain_NF[:, 3])
    assert 0.2 < (seen[1] - plain_NF)[:, :3].std() < 0.8


def test_a_list_head_needs_a_context_that_embeds_lists() -> None:
    for context in (None, DASALCConfig(width=4, heads=2)):
        with pytest.raises(ValueError, match=r"set context\.kind to rankformer"):
            Ranker(architecture(context=context, grades=3), transform())
    ranker = Ranker(architecture(context=RankFormerConfig(), grades=3), transform()).eval()
    scores = ranker.score(documents())
    assert scores.grades_QC is not None
    assert (scores.scores_N.shape, scores.grades_QC.shape) == ((12,), (3, 3))


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_pretrained_encoder_is_taken_over_with_layers_of_its_projector(layers: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = NetworkConfig(transform=TransformConfig(numeric="standard"), encoder=MLPConfig(hidden=(8,)))
    method = SimCLRRankConfig(projector=ProjectorConfig(layers=2, width=10, output=3))
    model = Pretrainer(transform(), network, method, ZeroingConfig()).eval()
    features = [Feature(name=str(i), kind=kind) for i, kind in enumerate(KINDS)]  # type: ignore[arg-type]
    about = bundle.BundleFacts(config={}, features=features, dataset_hash="", metrics={}, made_by={})
    bundle.save_pretrained(str(tmp_path / "out"), model, about)
    opened = bundle.load(str(tmp_path / "out"))
    made = architecture(projector=method.projector, projector_layers=layers)
    ranker = Ranker(made, opened.transform()).eval()
    opened.initialise(ranker)
    h_ND = model.encoder(model.transform(documents().features_NF))
    expected_ND = model.projector.first(layers)(h_ND)
    assert torch.equal(ranker.embed(documents()).documents_ND, expected_ND)
    assert expected_ND.shape[1] == (10 if layers else 8)
    with pytest.raises(ValueError, match="projector_layers is 3, the projector has 2 hidden layers"):
        architecture(projector=method.projector, projector_layers=3)


def test_a_method_without_a_projector_leaves_a_bundle_too(tmp_path: Path) -> None:
    network = NetworkConfig(transform=TransformConfig(numeric="standard"), encoder=MLPConfig(hidden=(8,)))
    model = Pretrainer(transform(), network, VimeConfig(), ZeroingConfig()).eval()
    features = [Feature(name=str(i), kind=kind) for i, kind in enumerate(KINDS)]  # type: ignore[arg-type]
    about = bundle.BundleFacts(config={}, features=features, dataset_hash="", metrics={}, made_by={})
    bundle.save_pretrained(str(tmp_path / "out"), model, about)
    opened = bundle.load(str(tmp_path / "out"))
    x_NF = opened.transform()(documents().features_NF)
    assert torch.equal(opened.encoder().eval()(x_NF), model.encoder(x_NF))
