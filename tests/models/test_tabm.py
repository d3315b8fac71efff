"""TabM: the authors' package, one member as the plain network, and members that learn each for itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.models.batch_norm import MicroBatchNorm, moments, update_running_statistics
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.encoders import MLPConfig, TabM, TabMConfig, _AdaptedLinear
from ltrscale.models.features import FeatureTransform, TransformConfig
from ltrscale.models.ranker import Architecture, HeadConfig, ProjectorConfig, Ranker, combine_rankers, mlp_head
from ltrscale.pretext.augment import SwapInGroupConfig
from ltrscale.pretext.choices import MethodConfig
from ltrscale.pretext.contrast import ScarfConfig, SimCLRConfig, SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer, SimSiamConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.ranking import RankingObjective

NUMBERS = torch.ones(5, dtype=torch.bool)
OFFSETS = torch.tensor([0, 6, 7, 20])
SMALL = TabMConfig(members=3, hidden=(8, 4), dropout=0)
PLAIN = TransformConfig(numeric="none")


def groups(n: int = 20) -> QueryGroups:
    generator = torch.Generator().manual_seed(0)
    labels_N = torch.randint(0, 3, (n,), generator=generator).float()
    return QueryGroups(torch.randn(n, 5, generator=generator), OFFSETS, labels_N)


def transform() -> FeatureTransform:
    return FeatureTransform(PLAIN, ["numeric"] * 5, [])


def ranker(encoder: Any = SMALL, **parts: Any) -> Ranker:
    torch.manual_seed(0)
    head = parts.pop("head", HeadConfig(layers=2))
    made = Ranker(Architecture(transform=PLAIN, encoder=encoder, head=head, **parts), transform())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


@pytest.mark.parametrize(("structure", "arch_type"), [("full", "tabm"), ("mini", "tabm-mini")])
def test_it_is_the_authors(structure: str, arch_type: str) -> None:
    theirs = pytest.importorskip("tabm")
    config = TabMConfig.model_validate({**SMALL.model_dump(), "structure": structure, "hidden": (8, 8)})
    kinds = {"n_blocks": 2, "d_block": 8, "dropout": 0.0, "activation": "ReLU", "k": 3, "arch_type": arch_type}
    model = theirs.TabM(n_num_features=5, d_out=1, start_scaling_init="random-signs", **kinds)
    ours, head = TabM(config, NUMBERS, []), mlp_head(HeadConfig(layers=1), 8, members=3)
    initial = {
        name: value.abs() for name, value in model.named_parameters() if name.endswith((".r", ".s", "affine.weight"))
    }
    assert all((value == 1).all() for value in initial.values())
    assert (ours.signs.r_MA.abs() == 1).all()
    assert len(ours.signs.r_MA.unique()) == 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for number, block in enumerate(model.backbone.blocks):
            linear, other = ours.layers[3 * number], block[0]
            if isinstance(linear, _AdaptedLinear):
                linear.linear.weight.copy_(other.weight)
                linear.s_MB.copy_(other.s)
                linear.bias_MB.copy_(other.bias)
                (ours.signs.r_MA if linear.r_MA is None else linear.r_MA).copy_(other.r)
            else:
                linear.load_state_dict(other.state_dict())
        if structure == "mini":
            ours.signs.r_MA.copy_(model.backbone.affine.weight)
        head[1].weight.copy_(model.output.weight)
        head[1].bias.copy_(model.output.bias)
    x_NF = torch.randn(7, 5)
    torch.testing.assert_close(head(ours(x_NF)), model(x_NF), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("structure", ["full", "mini"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_one_member_is_the_plain_network(structure: str, batch_norm: bool) -> None:
    settings = {"hidden": (8, 4), "dropout": 0, "batch_norm": batch_norm}
    plain = MLPConfig.model_validate(settings).build(NUMBERS, [])
    one = TabM(TabMConfig.model_validate({**settings, "members": 1, "structure": structure}), NUMBERS, [])
    with torch.no_grad():
        one.signs.r_MA.fill_(1)
        for ours, theirs in zip(one.layers, plain.layers, strict=True):
            if isinstance(ours, _AdaptedLinear):
                ours.linear.weight.copy_(theirs.weight)
                ours.bias_MB.copy_(theirs.bias)
            else:
                ours.load_state_dict(theirs.state_dict())
    x_NF = torch.randn(9, 5)
    torch.testing.assert_close(one(x_NF), plain(x_NF))
    assert (one.width, one.member_width) == (plain.width, plain.width)
    with torch.random.fork_rng(devices=[]):  # none but the CPU's
        whole = ranker(one.config)
    whole.encoder = one
    assert whole.score(groups()).members_NM is None


def test_each_member_has_a_score_and_a_loss_and_their_means_count() -> None:
    model, batch = ranker(), groups()
    scores = model.score(batch)
    assert scores.members_NM is not None
    assert scores.members_NM.shape == (20, 3)
    assert not torch.allclose(scores.members_NM[:, 0], scores.members_NM[:, 1])
    assert torch.equal(model(batch), scores.members_NM.mean(1))
    config = FinetuneConfig()
    loss, count = RankingObjective(model, config)(batch, torch.Generator())
    losses = [RankingObjective(Only(model, m), config)(batch, torch.Generator()) for m in range(3)]  # type: ignore[arg-type]
    assert all(each == count for _, each in losses)
    torch.testing.assert_close(loss, torch.stack([each for each, _ in losses]).mean())


class Only(torch.nn.Module):
    """A ranker of one member of another."""

    def __init__(self, model: Ranker, member: int) -> None:
        super().__init__()
        self.model, self.member = model, member

    def score(self, batch: QueryGroups) -> Any:
        return self.model.score(batch).by_member()[self.member]


def test_a_member_learns_from_its_own_loss_only() -> None:
    model = ranker(head=HeadConfig(layers=1))
    model.score(groups()).by_member()[1].scores_N.sum().backward()
    layer = model.encoder.layers[0]
    for factors_M in (model.encoder.signs.r_MA, layer.s_MB, layer.bias_MB, model.head[1].weight):
        assert factors_M.grad is not None
        assert [bool(of_member.any()) for of_member in factors_M.grad] == [False, True, False]
    assert layer.linear.weight.grad is not None
    assert layer.linear.weight.grad.any()


@pytest.mark.parametrize(
    "method", [SimCLRRankConfig(), SimCLRConfig(), ScarfConfig(), SimSiamConfig()], ids=lambda method: method.kind
)
def test_each_member_contrasts_for_itself(method: MethodConfig) -> None:
    torch.manual_seed(0)
    network = NetworkConfig(transform=PLAIN, encoder=SMALL)
    net = Pretrainer(transform(), network, method, SwapInGroupConfig(), groups().features_NF).eval()
    shared = net.projector
    assert shared is not None
    loss, count = net(groups(), torch.Generator().manual_seed(0))
    assert count == 20

    class Part(torch.nn.Module):
        def __init__(self, member: int) -> None:
            super().__init__()
            self.member = member

        def embed(self, x_NF: Tensor, batch: QueryGroups) -> Tensor:
            h_ND: Tensor = encoder.embed(x_NF, batch).chunk(3, 1)[self.member]
            return h_ND

        members = 1

        def each(self, layers: torch.nn.Module, h_ND: Tensor) -> Tensor:
            z_NP: Tensor = layers(h_ND)
            return z_NP

    encoder, losses = net.encoder, []
    for member in range(3):
        net.encoder = Part(member)  # type: ignore[assignment]
        losses.append(net(groups(), torch.Generator().manual_seed(0))[0])
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [False, True])
def test_layers_of_a_projector_that_finetuning_keeps_are_shared(norm: bool) -> None:
    parts = {"projector": ProjectorConfig(width=6, batch_norm=norm), "projector_layers": 1}
    model = ranker(**parts).eval()
    h_ND = model.encoder.embed(groups().features_NF, groups())
    expected_ND = torch.cat([model.neck(part) for part in h_ND.chunk(3, 1)], 1)
    torch.testing.assert_close(model.embed(groups()).documents_ND, expected_ND)
    assert model.score(groups()).by_member()[0].scores_N.shape == (20,)


def test_norms_of_members_have_their_own_statistics_and_a_score_depends_on_its_document() -> None:
    model = ranker(SMALL.replace(batch_norm=True))
    norms = [part for part in model.modules() if isinstance(part, MicroBatchNorm)]
    assert [len(norm.running_mean) for norm in norms] == [24, 12]
    model.train()(groups())
    update_running_statistics(norms, moments(norms))
    scores_N = model.eval()(groups())
    x_NF, order = groups().features_NF, torch.randperm(20)
    torch.testing.assert_close(model(QueryGroups(x_NF[order], OFFSETS)), scores_N[order])
    alone_N = torch.cat([model(QueryGroups(row, torch.tensor([0, 1]))) for row in x_NF.split(1)])
    torch.testing.assert_close(alone_N, scores_N)


def test_the_last_layers_inputs_of_all_members_stand_side_by_side() -> None:
    model = ranker(head=HeadConfig(layers=2, width=5))
    assert model.last_width == 15
    last_NMD = model.penultimate(groups()).unflatten(1, (3, 5))
    torch.testing.assert_close(model.head[-1](last_NMD).squeeze(-1), model.score(groups()).members_NM)
    combined = combine_rankers([model, ranker(MLPConfig(hidden=(4,)))], how="concat", dropout=0.0).eval()
    assert combined(groups()).shape == (20,)


def test_a_head_may_start_as_the_identity() -> None:
    head = mlp_head(HeadConfig(layers=2, init="identity"), 4, members=3)
    h_ND = torch.rand(5, 12)
    assert torch.equal(head(h_ND).squeeze(-1), h_ND.view(5, 3, 4)[..., 0])


@pytest.mark.parametrize("batch_norm", [False, True])
def test_scoring_with_the_factors_inside_the_weights_gives_what_training_computes(batch_norm: bool) -> None:
    config = TabMConfig(members=3, hidden=(8, 6, 4), dropout=0, batch_norm=batch_norm)
    encoder = ranker(config).encoder.double()
    x_NF = torch.randn(50, 5, dtype=torch.float64)
    for norm in (module for module in encoder.modules() if isinstance(module, MicroBatchNorm)):
        norm.train = lambda _=True, kept=norm: kept  # type: ignore[method-assign]  # running statistics in both
        norm.training = False
    scoring = encoder.eval()(x_NF)
    torch.testing.assert_close(encoder.train()(x_NF), scoring, rtol=1e-12, atol=1e-12)
    assert scoring.std() > 0.01
