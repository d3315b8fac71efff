"""Encoders: laws of all encoders, with torch's own modules and rtdl as oracles."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from config_variations import keys_without_effect
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from jobs.bench.pretend import counting, pretending
from ltrscale.batch import QueryGroups
from ltrscale.config import Config, kind_of, members
from ltrscale.models.batch_norm import MicroBatchNorm, moments, update_running_statistics
from ltrscale.models.choices import EncoderConfig, FeatureEncoderConfig, NetworkConfig
from ltrscale.models.encoders import (
    IdentityConfig,
    IndustrialMLPConfig,
    MLPConfig,
    ResNetConfig,
)
from ltrscale.models.features import FeatureKind, FeatureTransform, TransformConfig, fit_transform
from ltrscale.models.layers import Dropout, Encoder, depths
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer

NO_CATEGORIES = torch.ones(7, dtype=torch.bool)


def rows(n: int, width: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator) * torch.linspace(0.1, 30, width) + 100


class PlainResNet(nn.Module):
    """Gorishniy et al. 2021, equation by equation, with torch's modules."""

    def __init__(self, features: int, config: ResNetConfig, hidden: int) -> None:
        super().__init__()
        d = config.width
        self.linear = nn.Linear(features, d, bias=config.input_bias)
        self.norms = nn.ModuleList(nn.BatchNorm1d(d) for _ in range(config.blocks + 1))
        self.firsts = nn.ModuleList(nn.Linear(d, hidden) for _ in range(config.blocks))
        self.seconds = nn.ModuleList(nn.Linear(hidden, d) for _ in range(config.blocks))
        functions = {"relu": F.relu, "gelu": F.gelu}
        self.act = functions[config.activation]
        self.last = functions[config.last_activation or config.activation]

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for norm, first, second in zip(self.norms, self.firsts, self.seconds, strict=False):
            x = x + second(self.act(first(norm(x))))
        return self.last(self.norms[-1](x))


@pytest.mark.parametrize(
    "settings",
    [
        {"activation": "relu"},
        {"activation": "gelu"},
        {"activation": "gelu", "last_activation": "relu", "input_bias": False},
    ],
    ids=str,
)
def test_resnet_is_the_papers(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = ResNetConfig.model_validate({"width": 12, "blocks": 2, "hidden_factor": 1.5, "dropout": 0, **settings})
    ours, plain = config.build(NO_CATEGORIES, []), PlainResNet(7, config, hidden=18)
    plain.linear.load_state_dict(ours.linear.state_dict())
    for i, block in enumerate(ours.blocks):
        plain.firsts[i].load_state_dict(block.first.state_dict())
        plain.seconds[i].load_state_dict(block.second.state_dict())
    x_NF = (rows(40) - 100) / 10
    h_ND, expected_ND = ours(x_NF), plain(x_NF)
    torch.testing.assert_close(h_ND, expected_ND)
    h_ND.square().sum().backward()
    expected_ND.square().sum().backward()
    torch.testing.assert_close(ours.linear.weight.grad, plain.linear.weight.grad, rtol=1e-4, atol=1e-4)
    for module in ours.modules():
        if isinstance(module, MicroBatchNorm):
            update_running_statistics([module], moments([module]))
    torch.testing.assert_close(ours.eval()(x_NF), plain.eval()(x_NF))


def update(module: nn.Module) -> None:
    """Update the batch norms like the training loop does after a step."""
    for part in module.modules():
        if isinstance(part, MicroBatchNorm):
            update_running_statistics([part], moments([part]))


@pytest.mark.parametrize("training", [True, False])
def test_resnet_is_rtdls(training: bool) -> None:
    """The whole model of Gorishniy et al. is our encoder and a linear layer; both share all weights and statistics."""
    rtdl = pytest.importorskip("rtdl_revisiting_models")
    sizes = {"n_blocks": 3, "d_block": 12, "d_hidden": 18, "d_hidden_multiplier": None}
    theirs = rtdl.ResNet(d_in=7, d_out=2, **sizes, dropout1=0.0, dropout2=0.0)
    ours = ResNetConfig(width=12, blocks=3, hidden_factor=1.5, dropout=0).build(NO_CATEGORIES, [])
    for step in range(3):  # away from fresh running statistics
        theirs((rows(50, seed=step) - 100) / 10)
    ours.linear.load_state_dict(theirs.input_projection.state_dict())
    norms = [(ours.norm, theirs.output.normalization)]
    for block, other in zip(ours.blocks, theirs.blocks, strict=True):
        block.first.load_state_dict(other.linear1.state_dict())
        block.second.load_state_dict(other.linear2.state_dict())
        norms.append((block.norm, other.normalization))
    for norm, other in norms:
        norm.load_state_dict({name: value for name, value in other.state_dict().items() if "num" not in name})
    x_NF = (rows(40, seed=9) - 100) / 10
    h_ND = ours.train(training)(x_NF)
    torch.testing.assert_close(theirs.output.linear(h_ND), theirs.train(training)(x_NF), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_mlp_is_torchs_layers_one_after_the_other(batch_norm: bool) -> None:
    config = MLPConfig(hidden=(9, 4), activation="gelu", dropout=0, batch_norm=batch_norm)
    ours, x_NF = config.build(NO_CATEGORIES, []), (rows(40) - 100) / 10
    first, second = (layer for layer in ours.layers if isinstance(layer, nn.Linear))
    assert len([layer for layer in ours.layers if isinstance(layer, MicroBatchNorm)]) == 2 * batch_norm
    norm = [nn.BatchNorm1d(9), nn.BatchNorm1d(4)] if batch_norm else [nn.Identity(), nn.Identity()]
    expected_ND = F.gelu(norm[1](second(F.gelu(norm[0](first(x_NF))))))
    torch.testing.assert_close(ours(x_NF), expected_ND)
    assert MLPConfig().hidden == (512, 256, 128)


def test_industrial_mlp_normalises_and_drops_at_input_and_hidden_layers() -> None:
    config = IndustrialMLPConfig(width=9, input_dropout=0, dropout=0)
    ours, x_NF = config.build(NO_CATEGORIES, []), rows(40)
    linears = [layer for layer in ours.layers if isinstance(layer, nn.Linear)]
    assert len(linears) == 4
    expected_ND = nn.BatchNorm1d(7)(x_NF)
    for linear in linears:
        expected_ND = F.relu(nn.BatchNorm1d(9)(linear(expected_ND)))
    torch.testing.assert_close(ours(x_NF), expected_ND)
    parts = IndustrialMLPConfig().build(NO_CATEGORIES, []).modules()
    assert [part.probability for part in parts if isinstance(part, Dropout)] == [0.1] * 5
    seen: list[Tensor] = []
    dropping = config.replace(input_dropout=0.5).build(NO_CATEGORIES, [])
    dropping.layers.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    dropping(x_NF)
    assert 0.3 < float((seen[0] == 0).float().mean()) < 0.7


def test_identity_and_one_layer_are_a_linear_model() -> None:
    numeric_F = torch.tensor([True, False])
    encoder = IdentityConfig(embedding=2).build(numeric_F, [3])
    assert encoder.features.table is not None
    table = encoder.features.table.weight
    h_ND = encoder(torch.tensor([[0.5, 2.0], [7.0, 0.0]]))
    assert h_ND.tolist() == [[0.5, *table[2].tolist()], [7.0, 0.0, 0.0]]
    assert not list(IdentityConfig().build(NO_CATEGORIES, []).parameters())
    assert torch.equal(IdentityConfig().build(NO_CATEGORIES, [])(rows(3)), rows(3))


CONFIGS: dict[str, dict[str, Any]] = {
    "identity": {"kind": "identity"},
    "mlp": {"kind": "mlp", "hidden": [9, 6], "batch_norm": True},
    "industrial_mlp": {"kind": "industrial_mlp", "width": 6},
    "resnet": {"kind": "resnet", "width": 6},
    "deepfm": {"kind": "deepfm", "hidden": [9, 6]},
    "deepfm without numeric fields": {"kind": "deepfm", "hidden": [9, 6], "numeric_fields": False},
    "dcnv2": {"kind": "dcnv2", "hidden": [9, 6]},
    "tabm": {"kind": "tabm", "hidden": [9, 6], "members": 3, "batch_norm": True},
    "tabm mini": {"kind": "tabm", "hidden": [9, 6], "members": 3, "structure": "mini"},
    "dcnv2 of low rank": {"kind": "dcnv2", "hidden": [9, 6], "rank": 2, "structure": "parallel"},
}
CONFIGS |= {kind: {"kind": kind} for kind in map(kind_of, members(FeatureEncoderConfig)) if kind not in CONFIGS}
FEATURES = {"both": [True, False, True, False], "numeric": [True] * 4, "categorical": [False] * 4}
every_encoder = pytest.mark.parametrize("name", CONFIGS)
every_input = pytest.mark.parametrize("features", FEATURES)


def make(name: str, features: str = "both", **settings: Any) -> Encoder:
    """An encoder for four features; categorical ones have 5 rows each."""
    torch.manual_seed(0)
    cls = {kind_of(member): member for member in members(FeatureEncoderConfig)}[CONFIGS[name]["kind"]]
    small = {"embedding": 3} if "embedding" in cls.model_fields else {}
    return built(cls.model_validate({**small, **CONFIGS[name], **settings}), features)


def built(config: Any, features: str = "both") -> Encoder:
    torch.manual_seed(0)
    numeric = FEATURES[features]
    kinds: list[FeatureKind] = ["numeric" if is_numeric else "categorical" for is_numeric in numeric]
    return fresh(config, FeatureTransform(TransformConfig(), kinds, [5] * numeric.count(False)))


def fresh(config: Any, transform: FeatureTransform) -> Encoder:
    encoder: Encoder = config.build(transform.numeric_F, transform.cardinalities)
    return encoder


def inputs(n: int, features: str = "both", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x_NF = torch.randn(n, 4, generator=generator)
    codes_NF = torch.randint(0, 5, (n, 4), generator=generator).float()
    return torch.where(torch.tensor(FEATURES[features]), x_NF, codes_NF)


def trained(encoder: Encoder, features: str = "both") -> Encoder:
    """The encoder at inference, with statistics of three steps and every parameter moved from its initial value."""
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for seed in range(3):
        encoder.train()(inputs(30, features, seed))
        update(encoder)
    return encoder.eval()


def trace(config: Config) -> Tensor:
    """The outputs of an encoder away from its initial weights in training, and then at inference."""
    encoder = built(config)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.manual_seed(0)
    h_ND = encoder.train()(inputs(30))
    update(encoder)
    return torch.cat([h_ND.flatten(), encoder.eval()(inputs(30)).flatten()]).detach()


@pytest.mark.slow
@pytest.mark.parametrize("cls", members(FeatureEncoderConfig), ids=kind_of)
def test_every_key_of_a_config_means_something(cls: type[Config]) -> None:
    settings = [config for config in CONFIGS.values() if config["kind"] == kind_of(cls)]
    assert keys_without_effect(map(cls.model_validate, settings), trace) == set()


def test_torchs_own_batch_norm_is_refused_when_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MLPConfig.build

    def build(config: MLPConfig, numeric_F: Tensor, cardinalities: list[int]) -> Encoder:
        encoder = original(config, numeric_F, cardinalities)
        encoder.layers.append(nn.BatchNorm1d(encoder.width))
        return encoder

    monkeypatch.setattr(MLPConfig, "build", build)
    transform = FeatureTransform(TransformConfig(), ["numeric"] * 4, [])
    architecture = Architecture(transform=TransformConfig(), encoder=MLPConfig(), head=HeadConfig())
    message = "torch's BatchNorm1d makes weights depend on the number of workers; take MicroBatchNorm"
    with pytest.raises(ValueError, match=f"^encoder.layers.9: {message}$"):
        Ranker(architecture, transform)
    with pytest.raises(ValueError, match=f"^encoder.layers.9: {message}$"):
        Pretrainer(transform, NetworkConfig(encoder=MLPConfig()), SimCLRRankConfig(), ZeroingConfig())


@pytest.mark.slow
@every_encoder
@every_input
def test_an_embedding_depends_on_its_document_alone_at_inference(name: str, features: str) -> None:
    encoder = trained(make(name, features), features)
    x_NF = inputs(20, features, seed=3)
    whole_ND = encoder(x_NF)
    assert whole_ND.shape == (20, encoder.width)
    alone_ND = torch.cat([encoder(row) for row in x_NF.split(1)])
    torch.testing.assert_close(whole_ND, alone_ND, rtol=1e-5, atol=1e-5)
    order = torch.randperm(20)
    torch.testing.assert_close(encoder(x_NF[order]), whole_ND[order], rtol=1e-5, atol=1e-5)
    assert encoder(x_NF[:0]).shape == (0, encoder.width)


@pytest.mark.slow
@every_encoder
@every_input
def test_every_feature_and_every_parameter_has_a_part(name: str, features: str) -> None:
    encoder = trained(make(name, features), features)
    x_NF = inputs(40, features, seed=3)
    if list(encoder.parameters()):
        encoder(x_NF).square().sum().backward()
    for parameter_name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.any() or not parameter.numel(), parameter_name
    for column in range(4):
        changed_NF = x_NF.clone()
        changed_NF[:, column] = (x_NF[:, column] + 1) % 5
        assert not torch.allclose(encoder(changed_NF), encoder(x_NF))


@every_encoder
def test_training_is_seeded_by_torchs_generator_and_goes_with_one_document(name: str) -> None:
    encoder = make(name)
    embeddings = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        embeddings.append(encoder.train()(inputs(10)))
    assert torch.equal(embeddings[0], embeddings[1])
    drops = any(isinstance(part, Dropout) and part.probability > 0 for part in encoder.modules())
    assert torch.equal(embeddings[0], embeddings[2]) is not drops
    assert encoder(inputs(1)).isfinite().all()


@every_encoder
def test_the_state_of_transform_and_config_rebuild_the_encoder(name: str) -> None:
    x_NF = torch.cat([rows(50, 3), torch.arange(50)[:, None] % 4.0], 1)
    x_NF[:, 1] = torch.arange(50) % 3
    config = TransformConfig(discrete_up_to=3)
    transform = fit_transform([x_NF], ["numeric", "numeric", "numeric", "categorical"], config)
    assert transform.numeric_F.tolist() == [True, False, True, False]
    adapter: TypeAdapter[Any] = TypeAdapter(FeatureEncoderConfig)
    encoder = fresh(adapter.validate_python(CONFIGS[name]), transform)
    again = FeatureTransform.from_state(transform.state_dict(), config)
    rebuilt = fresh(adapter.validate_json(adapter.dump_json(encoder.config)), again)
    rebuilt.load_state_dict(encoder.state_dict())
    assert torch.equal(rebuilt.eval()(again(x_NF)), encoder.eval()(transform(x_NF)))
    assert rebuilt.width == encoder.width == rebuilt(again(x_NF)).shape[1]


def test_configs_are_closed() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(FeatureEncoderConfig)
    for wrong in (
        *({"kind": "transformer"}, {"kind": "identity", "width": 3}, {"kind": "mlp", "hidden": []}),
        *({"kind": "mlp", "hidden": [4, 0]}, {"kind": "mlp", "dropout": 1.0}, {"kind": "industrial_mlp", "layers": 0}),
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_an_encoder_fits_the_transform() -> None:
    x_NF = torch.tensor([[1.0, 5.0], [2.0, 6.0], [math.nan, math.nan]])
    transform = fit_transform([x_NF], ["numeric", "categorical"], TransformConfig())
    encoder = fresh(ResNetConfig(width=4, embedding=3), transform).eval()
    assert encoder.width == 4
    assert encoder.features.width == 4
    assert encoder(transform(x_NF)).shape == (3, 4)


@pytest.mark.parametrize("kind", [kind_of(cls) for cls in members(FeatureEncoderConfig)])
def test_every_parameter_has_one_depth(kind: str) -> None:
    config: Any = TypeAdapter(FeatureEncoderConfig).validate_python({"kind": kind})
    encoder = config.build(torch.tensor([True, True, False]), [5])
    layers = depths(encoder)
    ids = [id(parameter) for layer in layers for parameter in layer]
    assert sorted(ids) == sorted(map(id, encoder.parameters()))
    assert id(encoder.features.table.weight) in map(id, layers[0])
    expected = {"resnet": 5, "identity": 1, "mlp": 4, "industrial_mlp": 5, "deepfm": 4, "dcnv2": 6}
    assert kind not in expected or len(layers) == expected[kind]


@pytest.mark.slow
@pytest.mark.parametrize("config", [cls() for cls in members(FeatureEncoderConfig)], ids=lambda config: config.kind)
def test_a_gpu_gives_the_same_scores_and_is_asked_for_nothing(config: EncoderConfig) -> None:
    kinds: list[FeatureKind] = ["numeric"] * 5 + ["categorical"] * 2
    x_NF = rows(40).round()
    transform = fit_transform([x_NF], kinds, TransformConfig())
    ranker = Ranker(Architecture(transform=transform.config, encoder=config, head=HeadConfig()), transform).eval()
    groups = QueryGroups(x_NF, torch.tensor([0, 10, 40]))
    expected_N = ranker(groups)
    with pretending() as device:
        there = groups.to(device)
        ranker.to(device)
        with counting() as counted:
            scores_N = ranker(there)
            ranker.train()(there).sum().backward()
    assert not counted.counts.waits
    torch.testing.assert_close(scores_N.detach().cpu(), expected_N)
