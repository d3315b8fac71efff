"""Embeddings of numbers: formulas by hand, the authors' package, and the laws of every encoder behind them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from config_variations import keys_without_effect
from pydantic import ValidationError
from reference import encoders as reference
from small_trainers import finetuned, pretrain, splits
from torch import Tensor, nn

from ltrscale import bundle
from ltrscale.batch import QueryGroups, standardise_groups
from ltrscale.config import Config, kind_of, members
from ltrscale.data.dataset.selection import select
from ltrscale.data.stream.batches import iterate
from ltrscale.experiments.distill import MLPStudent
from ltrscale.models.batch_norm import MicroBatchNorm, moments, update_running_statistics
from ltrscale.models.choices import NetworkConfig, NumbersConfig
from ltrscale.models.features import FeatureKind, FeatureTransform, TransformConfig, fit_transform
from ltrscale.models.layers import depths
from ltrscale.models.numbers import PLEConfig, PLRConfig, _PiecewiseLinear
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.pretrain import PretrainConfig

KINDS: list[FeatureKind] = ["numeric", "categorical", "numeric", "numeric", "numeric"]
OFFSETS = torch.tensor([0, 4, 4, 5, 20])


def features(n: int = 20, seed: int = 0) -> Tensor:
    """A heavy tail, a category, a feature that is mostly 0, a constant one, and one with missing values."""
    generator = torch.Generator().manual_seed(seed)
    x_NF = torch.randn(n, 5, generator=generator)
    x_NF[:, 0] = x_NF[:, 0].exp() * 10
    x_NF[:, 1] = torch.randint(0, 3, (n,), generator=generator)
    x_NF[:, 2] *= torch.rand(n, generator=generator) < 0.3
    x_NF[:, 3] = 7.0
    x_NF[torch.rand(n, generator=generator) < 0.3, 4] = torch.nan
    return x_NF


def fitted(config: TransformConfig = TransformConfig(), bins: int = 6) -> FeatureTransform:  # noqa: B008
    return fit_transform([features(300, seed=1)], KINDS, config, bins=bins)


@pytest.mark.parametrize("numeric", ["none", "log1p", "standard", "log1p_standard", "quantile_normal"])
def test_bins_lie_between_quantiles_of_transformed_values_and_follow_the_formula(numeric: str) -> None:
    transform = fitted(TransformConfig.model_validate({"numeric": numeric, "clip": 1e6}))
    known_NF = transform(features(300, seed=1))
    for column in (0, 2, 3):  # nothing is missing; rounding may tell a quantile from its neighbour
        expected = torch.quantile(known_NF[:, column], torch.linspace(0, 1, 7))
        close = {"rtol": 0.05, "atol": 0.05} if numeric != "none" else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(transform.edges_FB1[column], expected, **close)
    x_NF = transform(torch.cat([features(), 50 * features(seed=3)]))
    numbers = _PiecewiseLinear(PLEConfig(bins=6, embedding=0), transform)
    inputs_ND = numbers(x_NF, torch.tensor([0, 40]))
    assert numbers.numeric_F.tolist() == [True] * 24 + [False]
    assert torch.equal(inputs_ND[:, -1], x_NF[:, 1])
    for row, x_F in zip(inputs_ND, x_NF, strict=True):
        values = [reference.piecewise_linear(float(x_F[f]), transform.edges_FB1[f].tolist()) for f in (0, 2, 3, 4)]
        torch.testing.assert_close(row[:-1], torch.tensor(values).flatten(), rtol=1e-4, atol=1e-4)
    assert (inputs_ND[:, 12:18] == 0).all()  # the constant feature


def test_a_value_far_beyond_a_narrow_last_bin_is_clipped_as_a_plain_number_is() -> None:
    x_NF = torch.cat([torch.linspace(0, 1, 90), 1 + 1e-6 * torch.rand(30)])[:, None]
    transform = fit_transform([x_NF], ["numeric"], TransformConfig(numeric="none", clip=10), bins=4)
    numbers = _PiecewiseLinear(PLEConfig(bins=4, embedding=0), transform)
    beyond_NB = numbers(torch.tensor([[-1e3], [1.5], [2.0]]), torch.tensor([0, 3]))
    assert beyond_NB[1:].tolist() == [[1.0, 1.0, 1.0, 10.0]] * 2
    assert beyond_NB[0].tolist() == [-10.0, 0.0, 0.0, 0.0]


def test_a_learnt_embedding_is_one_linear_layer_for_each_feature() -> None:
    transform = fitted()
    x_NF = transform(features())
    for config in (PLEConfig(bins=6, embedding=4), PLRConfig(frequencies=3, sigma=0.5, embedding=4)):
        numbers = config.build(transform)
        weight_PBE, bias_PE = numbers.linear.weight, numbers.linear.bias
        actual_NPE = numbers(x_NF, OFFSETS)[:, :16].unflatten(1, (4, 4))
        for p, f in enumerate((0, 2, 3, 4)):
            if isinstance(config, PLEConfig):
                inner = [reference.piecewise_linear(float(x), transform.edges_FB1[f].tolist()) for x in x_NF[:, f]]
            else:
                inner = [reference.periodic(float(x), numbers.frequencies_PK[p].tolist()) for x in x_NF[:, f]]
            expected_NE = (torch.tensor(inner) @ weight_PBE[p] + bias_PE[p]).relu()
            torch.testing.assert_close(actual_NPE[:, p], expected_NE, rtol=1e-4, atol=1e-4)


def test_they_are_those_of_the_authors() -> None:
    theirs = pytest.importorskip("rtdl_num_embeddings")
    x_NF = torch.randn(200, 3)
    kinds: list[FeatureKind] = ["numeric"] * 3
    transform = fit_transform([x_NF], kinds, TransformConfig(numeric="none"), bins=8)
    new_NF, one = torch.randn(50, 3) * 2, torch.tensor([0, 50])
    edges = list(transform.edges_FB1)
    encoding = theirs.PiecewiseLinearEncoding(edges)
    ours = _PiecewiseLinear(PLEConfig(bins=8, embedding=0), transform)
    torch.testing.assert_close(ours(new_NF, one), encoding(new_NF), rtol=1e-4, atol=1e-4)
    ple, module = (
        PLEConfig(bins=8, embedding=5).build(transform),
        theirs.PiecewiseLinearEmbeddings(edges, 5, activation=True, version="A"),
    )
    module.linear.weight.data, module.linear.bias.data = ple.linear.weight.data, ple.linear.bias.data
    torch.testing.assert_close(ple(new_NF, one), module(new_NF).flatten(1), rtol=1e-4, atol=1e-4)
    plr = PLRConfig(frequencies=4, embedding=5).build(transform)
    module = theirs.PeriodicEmbeddings(3, 5, n_frequencies=4, frequency_init_scale=0.1, activation=True, lite=False)
    module.periodic.weight.data = plr.frequencies_PK.data
    module.linear.weight.data, module.linear.bias.data = plr.linear.weight.data, plr.linear.bias.data
    torch.testing.assert_close(plr(new_NF, one), module(new_NF).flatten(1), rtol=1e-4, atol=1e-4)
    assert PLRConfig(frequencies=2000, sigma=0.3).build(transform).frequencies_PK.std().item() == pytest.approx(
        0.3, rel=0.05
    )


@pytest.mark.parametrize(
    "config", [PLEConfig(bins=6, embedding=3), PLRConfig(frequencies=2, embedding=3)], ids=lambda c: c.kind
)
def test_gradients_are_those_of_finite_differences(config: Any) -> None:
    torch.manual_seed(0)
    transform = fitted()
    numbers = config.build(transform).double()
    parameters = dict(numbers.named_parameters())
    x_NF = transform(features(6)).double()

    def output(*values: Tensor) -> Tensor:
        named = dict(zip(parameters, values, strict=True))
        inputs_ND: Tensor = torch.func.functional_call(numbers, named, (x_NF, torch.tensor([0, 6])))
        return inputs_ND

    assert torch.autograd.gradcheck(output, tuple(parameters.values()))


NETWORKS: dict[str, dict[str, Any]] = {
    "lists": {"numbers": {"kind": "plain", "within_lists": True}},
    "ple": {"numbers": {"kind": "ple", "bins": 6, "embedding": 3}},
    "bins": {"numbers": {"kind": "ple", "bins": 6, "embedding": 0}},
    "plr": {"numbers": {"kind": "plr", "frequencies": 3, "embedding": 2}},
    "plr and lists": {"numbers": {"kind": "plr", "frequencies": 3, "within_lists": True}},
    "ple and deepfm": {
        "numbers": {"kind": "ple", "bins": 6, "embedding": 3},
        "encoder": {"kind": "deepfm", "hidden": [8]},
    },
    "ple and tabm": {
        "numbers": {"kind": "ple", "bins": 6, "embedding": 3},
        "encoder": {"kind": "tabm", "hidden": [8], "members": 3, "batch_norm": True},
    },
}


def ranker(network: dict[str, Any]) -> Ranker:
    """At inference, with statistics of three steps and parameters moved from their initial values."""
    torch.manual_seed(0)
    config = NetworkConfig.model_validate({"encoder": {"kind": "resnet", "width": 8, "blocks": 1}, **network})
    architecture = Architecture(
        transform=config.transform, numbers=config.numbers, encoder=config.encoder, head=HeadConfig(layers=2)
    )
    made = Ranker(architecture, fitted(config.transform))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    norms = [part for part in made.modules() if isinstance(part, MicroBatchNorm)]
    for seed in range(3):
        made.train()(QueryGroups(features(seed=seed), OFFSETS))
        update_running_statistics(norms, moments(norms)) if norms else None
    return made.eval()


@pytest.mark.parametrize("name", NETWORKS)
def test_order_of_documents_and_other_lists_change_no_score(name: str) -> None:
    made, x_NF = ranker(NETWORKS[name]), features(seed=5)
    scores_N = made(QueryGroups(x_NF, OFFSETS))
    assert scores_N.shape == (20,)
    assert scores_N.isfinite().all()
    order = torch.cat([torch.randperm(4), torch.tensor([4]), 5 + torch.randperm(15)])
    torch.testing.assert_close(made(QueryGroups(x_NF[order], OFFSETS)), scores_N[order], rtol=1e-4, atol=1e-4)
    alone_N = made(QueryGroups(x_NF[5:], torch.tensor([0, 15])))
    torch.testing.assert_close(alone_N, scores_N[5:], rtol=1e-4, atol=1e-4)
    assert made(QueryGroups(x_NF[:0], torch.tensor([0, 0]))).shape == (0,)
    other_N = made(QueryGroups(x_NF, torch.tensor([0, 20])))  # the same documents as one list
    assert torch.allclose(other_N, scores_N, rtol=1e-4, atol=1e-4) is not made.architecture.reads_lists


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_learns_and_has_one_depth(name: str) -> None:
    made = ranker(NETWORKS[name])
    made(QueryGroups(features(200), torch.tensor([0, 90, 200]))).square().sum().backward()
    for parameter_name, parameter in made.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.any(), parameter_name
    layers = depths(made.encoder)
    ids = [id(parameter) for layer in layers for parameter in layer]
    assert sorted(ids) == sorted(map(id, made.encoder.parameters()))
    plain = ranker({k: v for k, v in NETWORKS[name].items() if k != "numbers"})
    assert len(layers) == len(depths(plain.encoder))  # embeddings of numbers are no layer of their own


def test_features_within_their_list_stand_beside_the_features() -> None:
    transform = fitted()
    x_NF = transform(features())
    numbers = NETWORKS["lists"]["numbers"]
    embedding = NetworkConfig.model_validate({"numbers": numbers}).numbers.build(transform)
    assert embedding is not None
    x_NP = x_NF[:, [0, 2, 3, 4]]
    assert torch.equal(embedding(x_NF, OFFSETS), torch.cat([x_NP, standardise_groups(x_NP, OFFSETS), x_NF[:, 1:2]], 1))
    assert embedding.numeric_F.tolist() == [True] * 8 + [False]


def trace(config: Any) -> Tensor:
    """The inputs that an encoder gets from an embedding of numbers."""
    torch.manual_seed(0)
    transform = fitted(bins=config.fitted_bins)
    numbers, x_NF = config.build(transform), transform(features())
    return x_NF if numbers is None else numbers(x_NF, OFFSETS).detach()


@pytest.mark.parametrize("cls", members(NumbersConfig), ids=kind_of)
def test_every_key_of_a_config_means_something(cls: type[Config]) -> None:
    assert keys_without_effect([cls()], trace) == set()


def test_the_default_adds_nothing() -> None:
    network = NetworkConfig()
    transform = fitted(bins=0)
    assert "edges_FB1" not in transform.state_dict()
    assert type(network.build(transform)) is type(network.encoder.build(transform.numeric_F, transform.cardinalities))
    assert not Architecture(transform=network.transform, encoder=network.encoder).reads_lists


def test_what_does_not_fit_together_is_refused() -> None:
    for values, message in (
        ({"numbers": {"kind": "ple"}, "transform": {"per_query": True}}, "set numbers.within_lists instead"),
        ({"numbers": {"kind": "plr"}, "encoder": {"kind": "cross_encoder"}}, "takes its features plain"),
        ({"numbers": {"kind": "trees"}}, "trees"),
    ):
        with pytest.raises(ValidationError, match=message):
            NetworkConfig.model_validate(values)
    with pytest.raises(ValueError, match=r"numbers\.bins is 5, the transform has 6 bins"):
        _PiecewiseLinear(PLEConfig(bins=5), fitted())
    with pytest.raises(ValidationError, match="within_lists needs whole lists"):
        MLPStudent.model_validate({"finetune": {"network": {"numbers": {"within_lists": True}}}})


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [{"kind": "resnet", "width": 8, "blocks": 1}, {"kind": "tabm", "hidden": [8]}])
def test_it_travels_from_pretraining_over_finetuning_to_scores(
    encoder: dict[str, Any], synthetic_dataset: str, tmp_path: Path
) -> None:
    network = {"encoder": encoder, "numbers": {"kind": "ple", "bins": 5, "within_lists": True}}
    train, _, test = splits(synthetic_dataset)
    config = PretrainConfig.model_validate({"network": network, "epochs": 1, "stream": {"streams": 2}})
    pretrain(config, train, str(tmp_path / "p"), origin={}, report=lambda _: None)
    settings = FinetuneConfig(head=HeadConfig(layers=1), head_epochs=0, epochs=1, projector_layers=1)
    finetuned(synthetic_dataset, tmp_path / "r", settings, str(tmp_path / "p"))
    opened = bundle.load(str(tmp_path / "r"))
    (architecture,) = opened.parts
    assert architecture.numbers == config.network.numbers
    assert architecture.reads_lists
    before = bundle.load(str(tmp_path / "p"), bundle.EncoderBundle).transform()
    assert torch.equal(bundle.load(str(tmp_path / "r"), bundle.EncoderBundle).transform().edges_FB1, before.edges_FB1)
    groups = next(iter(iterate(select(test, labelled=False))))
    assert opened.scorer()(groups).isfinite().all()
    n = {"resnet": 8, "tabm": 16 * 8}[encoder["kind"]]
    assert bundle.load(str(tmp_path / "p"), bundle.PretrainedBundle).embedder()(groups).shape == (groups.n_documents, n)
