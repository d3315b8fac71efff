"""Laws of all list contexts."""

from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from config_variations import keys_without_effect
from ranking.laws import LargestTensor
from reference import models as reference
from reference.lists import WIDTH, apply, make, make_lists, shuffled
from torch import Tensor, nn

from jobs.bench.pretend import counting, pretending
from ltrscale.batch import QueryGroups
from ltrscale.config import Config, kind_of, members, validate
from ltrscale.errors import InputError
from ltrscale.models import contexts as context_module
from ltrscale.models.attention import DASALC, DASALCConfig, RankFormerConfig, SetRank, SetRankConfig
from ltrscale.models.choices import ContextConfig
from ltrscale.models.contexts import (
    DLCM,
    GSF,
    Contextual,
    DLCMConfig,
    GSFConfig,
    ListContext,
    _content_keys,
    _stride_numbers,
)

LENGTHS = [5, 0, 1, 9, 3, 9, 2, 0]

CASES: dict[str, ContextConfig] = {
    "dasalc": DASALCConfig(width=8, heads=3, layers=2),
    "dasalc of the encoder's width": DASALCConfig(width=WIDTH, layers=1),
    "dasalc beside": DASALCConfig(width=4, layers=1, cross=False),
    "rankformer": RankFormerConfig(heads=2, feedforward=10, layers=2, dropout=0.0),
    "rankformer of its own width": RankFormerConfig(width=9, heads=3, feedforward=10, layers=1, dropout=0.0),
    "setrank": SetRankConfig(width=8, heads=2, blocks=2),
    "setrank by positions": SetRankConfig(width=8, heads=2, blocks=1, initial_rank="positions", ranks=4),
    "setrank induced": SetRankConfig(width=8, heads=4, blocks=2, inducing=3),
    "setrank induced by feature": SetRankConfig(
        width=8, heads=1, blocks=1, inducing=2, initial_rank="feature", feature=2
    ),
    "dlcm": DLCMConfig(state=7, units=3),
    "dlcm by feature": DLCMConfig(state=5, units=2, features=False, initial_rank="feature", feature=3),
    "gsf": GSFConfig(size=2, hidden=(9, 7), width=4, activation="elu"),
    "gsf pairs": GSFConfig(size=2, hidden=(9,), width=4, strides=None, activation="elu"),
    "gsf triples": GSFConfig(size=3, hidden=(9,), width=4, strides=3, activation="elu"),
    "gsf single": GSFConfig(size=1, hidden=(9,), width=4, activation="elu"),
}
ORACLED = tuple(CASES)
CASES |= {kind_of(cls): cls() for cls in members(ContextConfig) if kind_of(cls) not in {c.kind for c in CASES.values()}}
every_context = pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())


def value_and_gradients(module: ListContext, groups: QueryGroups, h_ND: Tensor) -> tuple[Contextual, list[Tensor]]:
    """Outputs, and the gradients by h and all parameters of a sum that weighs each output differently."""
    h_ND = h_ND.detach().requires_grad_()
    out = apply(module, groups, h_ND)
    loss = sum(
        (part * torch.linspace(-1, 2, part.numel(), device=part.device).view_as(part).cos()).sum()
        for part in out
        if part is not None
    )
    assert isinstance(loss, Tensor)
    return out, list(torch.autograd.grad(loss, [h_ND, *module.parameters()]))


def parts(groups: QueryGroups, h_ND: Tensor) -> list[tuple[QueryGroups, Tensor]]:
    """Each list as a separate batch."""
    return [
        (groups.select(torch.tensor([q])), h_ND[a:b]) for q, (a, b) in enumerate(pairwise(groups.offsets_Q1.tolist()))
    ]


def oracle(module: ListContext, groups: QueryGroups, h_LD: Tensor) -> Tensor:
    """Slow: the documents of one list, with plain loops."""
    x_LF, length = groups.features_NF, groups.n_documents
    if isinstance(module, DASALC):
        return reference.dasalc(module, module.features(x_LF), h_LD)
    if isinstance(module, SetRank):
        ranks = None if module.ranks is None else _ranks(groups, module.config.feature)
        return reference.setrank(module, h_LD, ranks)
    if isinstance(module, DLCM):
        ranks = _ranks(groups, module.config.feature)
        order = sorted(range(length), key=ranks.__getitem__)
        features = h_LD.new_zeros(length, 0) if module.features is None else module.features(x_LF)
        return reference.dlcm(module, features, h_LD, order)
    if isinstance(module, GSF):
        return reference.gsf(module, h_LD, _windows(module, x_LF))
    return reference.rankformer(module, h_LD)[0]


def _ranks(groups: QueryGroups, feature: int | None) -> list[int]:
    assert groups.positions_N is not None
    values = groups.positions_N if feature is None else -groups.features_NF[:, feature]
    return [sum(other < value for other in values.tolist()) for value in values.tolist()]


def _windows(module: GSF, x_LF: Tensor) -> list[list[int]]:
    """All ordered pairs if the sample holds all of them, else windows in the order of keys, at several strides."""
    length, size = len(x_LF), module.config.size
    strides = module.config.strides or length
    if size == 2 and 1 < length <= strides + 1:
        return [list(pair) for pair in permutations(range(length), 2)]
    order = _content_keys(x_LF).argsort().tolist()
    return [
        [order[(start + place * stride) % length] for place in range(size)]
        for stride in _stride_numbers(length, size, module.config.strides)
        for start in range(length)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLED)
def test_every_list_is_what_plain_loops_give(name: str) -> None:
    module = make(CASES[name])
    groups, h_ND = make_lists(LENGTHS)
    out, gradients = value_and_gradients(module, groups, h_ND)
    assert out.documents_ND.shape == (len(h_ND), module.width)
    h_ND.requires_grad_()
    single = [oracle(module, one, h_LD) for one, h_LD in parts(groups, h_ND) if len(h_LD)]
    torch.testing.assert_close(out.documents_ND, torch.cat(single), rtol=1e-10, atol=1e-10)
    if out.lists_QD is None:  # RankFormer's lists and gradient have a test of their own
        expected = torch.cat(single)
        weights = torch.linspace(-1, 2, expected.numel()).view_as(expected).cos()
        expected_h = torch.autograd.grad((expected * weights).sum(), h_ND)[0]
        torch.testing.assert_close(gradients[0], expected_h, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("cls", members(ContextConfig), ids=kind_of)
def test_every_key_of_a_config_means_something(cls: type[Config]) -> None:
    groups, h_ND = make_lists([*LENGTHS, 14])

    def trace(config: Any) -> Tensor:
        torch.manual_seed(0)
        module = make(config)
        outputs = [*apply(module, groups, h_ND), *apply(module.train(), groups, h_ND)]
        return torch.cat([part.flatten() for part in outputs if part is not None]).detach()

    assert keys_without_effect([config for config in CASES.values() if isinstance(config, cls)], trace) == set()


@pytest.mark.slow
@every_context
def test_documents_may_come_in_any_order(config: ContextConfig) -> None:
    module = make(config)
    groups, h_ND = make_lists([*LENGTHS, 40])
    moved, moved_ND, order_N = shuffled(groups, h_ND)
    out, moved_out = apply(module, groups, h_ND), apply(module, moved, moved_ND)
    assert not torch.equal(order_N, torch.arange(len(order_N)))
    torch.testing.assert_close(moved_out.documents_ND, out.documents_ND[order_N], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(moved_out.lists_QD, out.lists_QD, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@every_context
def test_other_lists_change_nothing_even_if_they_are_not_finite(config: ContextConfig) -> None:
    module = make(config)
    groups, h_ND = make_lists(LENGTHS)
    alone = [apply(module, one, h_LD) for one, h_LD in parts(groups, h_ND)]
    first = slice(0, LENGTHS[0])
    groups.features_NF[first, 0] = torch.nan
    h_ND[first] = torch.inf
    together = apply(module, groups, h_ND)
    rest_ND = torch.cat([out.documents_ND for out in alone[1:]])
    torch.testing.assert_close(together.documents_ND[LENGTHS[0] :], rest_ND, rtol=1e-10, atol=1e-10)
    if together.lists_QD is not None:
        assert together.lists_QD.shape == (groups.n_groups, module.list_width)
        rest_QD = torch.cat([out.lists_QD for out in alone[1:] if out.lists_QD is not None])
        torch.testing.assert_close(together.lists_QD[1:], rest_QD, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@every_context
@pytest.mark.parametrize("budget", [1, 40, 10**9])
def test_how_lists_are_put_into_chunks_changes_neither_value_nor_gradient(
    config: ContextConfig, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(config).train()
    groups, h_ND = make_lists(LENGTHS)
    torch.manual_seed(0)  # GSF shuffles
    out, gradients = value_and_gradients(module, groups, h_ND)
    monkeypatch.setattr(context_module, "PAIRS_PER_CHUNK", budget)
    monkeypatch.setattr(context_module, "DOCUMENTS_PER_CHUNK", budget)
    torch.manual_seed(0)
    other, other_gradients = value_and_gradients(module, groups, h_ND)
    torch.testing.assert_close(other, out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(other_gradients, gradients, rtol=1e-10, atol=1e-10)


@every_context
def test_gradients_are_finite_and_reach_every_parameter(config: ContextConfig) -> None:
    module = make(config).train()
    _, gradients = value_and_gradients(module, *make_lists(LENGTHS))
    for name, gradient in zip(["h", *dict(module.named_parameters())], gradients, strict=True):
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


@pytest.mark.slow
@every_context
@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 0], [0, 1, 0, 1]], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_short_and_empty_lists(config: ContextConfig, lengths: list[int], training: bool) -> None:
    module = make(config).train(training)
    groups, h_ND = make_lists(lengths)
    out = apply(module, groups, h_ND.requires_grad_())
    assert out.documents_ND.shape == (sum(lengths), module.width)
    assert (out.lists_QD is None) == (module.list_width == 0)
    outputs = [part for part in out if part is not None]
    assert all(part.isfinite().all() for part in outputs)
    torch.cat([part.flatten() for part in outputs]).sum().backward()
    assert h_ND.grad is None or h_ND.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.slow
@every_context
def test_a_long_list_pads_no_other_and_needs_no_square_of_its_length(config: ContextConfig) -> None:
    module = make(config).float().train()
    groups, h_ND = make_lists([2000, *[5] * 200], dtype=torch.float32)
    with LargestTensor() as largest:
        value_and_gradients(module, groups, h_ND)
    # 3,000 documents; one padding of all lists would have 400,000 slots, one matrix of the long list 4,000,000 entries
    assert 3000 * WIDTH <= largest.numel <= 3300 * 50


@pytest.mark.slow
@every_context
def test_weights_travel_as_a_state(config: ContextConfig) -> None:
    module, other = make(config, seed=0), make(config, seed=1)
    groups, h_ND = make_lists(LENGTHS)
    out = apply(module, groups, h_ND)
    assert not torch.allclose(apply(other, groups, h_ND).documents_ND, out.documents_ND)
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(apply(other, groups, h_ND), out, rtol=0, atol=0)


@pytest.mark.slow
@every_context
def test_half_precision_is_close(config: ContextConfig) -> None:
    module = make(config).float()
    groups, h_ND = make_lists(LENGTHS, dtype=torch.float32)
    out = apply(module, groups, h_ND)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = apply(module, groups, h_ND)
    torch.testing.assert_close(half.documents_ND.float(), out.documents_ND, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "config",
    [
        DASALCConfig(width=8, layers=1, dropout=0.4),
        RankFormerConfig(feedforward=8, layers=1, dropout=0.4),
        SetRankConfig(width=8, heads=2, blocks=1, dropout=0.4),
        GSFConfig(dropout=0.4),
        GSFConfig(),
    ],
    ids=lambda config: config.kind,
)
def test_training_follows_the_seed_and_inference_is_deterministic(config: ContextConfig) -> None:
    module = make(config).train()
    groups, h_ND = make_lists([30, 20])

    def seeded(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return apply(module, groups, h_ND).documents_ND

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.allclose(seeded(1), seeded(2))
    module.eval()
    assert torch.equal(seeded(1), seeded(2))


def test_settings_that_do_not_fit_are_refused() -> None:
    class Holder(Config):
        context: ContextConfig | None = None

    with pytest.raises(InputError, match="heads: 3 does not divide the width 8"):
        validate(Holder, {"context": {"kind": "setrank", "width": 8, "heads": 3}}, "here")
    with pytest.raises(InputError, match="heads: 2 does not divide the width 9"):
        validate(Holder, {"context": {"kind": "rankformer", "width": 9, "heads": 2}}, "here")
    for kind in ("setrank", "dlcm"):
        with pytest.raises(InputError, match="feature: give the number"):
            validate(Holder, {"context": {"kind": kind, "initial_rank": "feature"}}, "here")
        with pytest.raises(InputError, match="is not used with initial_rank positions"):
            validate(Holder, {"context": {"kind": kind, "initial_rank": "positions", "feature": 1}}, "here")
    with pytest.raises(InputError, match="greater than or equal to 1"):
        validate(Holder, {"context": {"kind": "gsf", "hidden": [4, 0]}}, "here")


class PlainGRU(nn.Module):
    """The formulas of torch's GRU, of which the kernel for GPUs runs on nothing else."""

    def __init__(self, gru: nn.GRU) -> None:
        super().__init__()
        self.weights = gru

    def forward(self, x_MLD: Tensor) -> tuple[Tensor, None]:
        inputs = F.linear(x_MLD, self.weights.weight_ih_l0, self.weights.bias_ih_l0)
        state_MA, outputs = inputs.new_zeros(len(inputs), self.weights.hidden_size), []
        for input_M in inputs.unbind(1):
            reset, update, new = input_M.chunk(3, 1)
            of_state = F.linear(state_MA, self.weights.weight_hh_l0, self.weights.bias_hh_l0).chunk(3, 1)
            candidate_MA = (new + (reset + of_state[0]).sigmoid() * of_state[2]).tanh()
            state_MA = torch.lerp(candidate_MA, state_MA, (update + of_state[1]).sigmoid())
            outputs.append(state_MA)
        return torch.stack(outputs, 1), None


@pytest.mark.slow
@every_context
def test_a_gpu_gives_the_same_values_and_is_asked_for_nothing(config: ContextConfig) -> None:
    module, launches = make(config), []
    if isinstance(module, DLCM):
        module.gru = PlainGRU(module.gru)
    for lengths in ([3, 0, 1, 3, 1], [3, 0, 1, 3, 1] * 3):
        groups, h_ND = make_lists(lengths)
        out, gradients = value_and_gradients(module.cpu(), groups, h_ND)
        with pretending() as device:
            there, h_there_ND = groups.to(device), h_ND.to(device)
            module.to(device)
            with counting() as counted:
                out_there, gradients_there = value_and_gradients(module, there, h_there_ND)
            with counting() as in_training:
                value_and_gradients(module.train(), there, h_there_ND)
            module.eval()
        assert not counted.counts.waits | in_training.counts.waits
        launches.append((counted.counts.launches, in_training.counts.launches))
        for here, far in zip((*out, *gradients), (*out_there, *gradients_there), strict=True):
            assert (here is None) == (far is None)
            if here is not None and far is not None:
                torch.testing.assert_close(far.cpu(), here)
    assert launches[0] == launches[1]
