"""Attention, DASALC, RankFormer and SetRank; the laws that they share with other contexts are in test_contexts."""

import pytest
import torch
from reference import models as reference
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.errors import InputError
from ltrscale.models.attention import (
    DASALC,
    Attention,
    DASALCConfig,
    RankFormer,
    RankFormerConfig,
    SetRank,
    SetRankConfig,
)
from ltrscale.models.contexts import Lists

NUMERIC = torch.ones(3, dtype=torch.bool)


def lists(lengths: list[int], width: int) -> tuple[QueryGroups, Tensor]:
    generator = torch.Generator().manual_seed(0)
    n = sum(lengths)
    features_NF = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    groups = QueryGroups(features_NF, to_offsets(torch.tensor(lengths)), positions_N=torch.arange(n, 0, -1).double())
    return groups, torch.randn(n, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
def test_attention_is_torchs_multi_head_attention(bias: bool) -> None:
    torch.manual_seed(0)
    ours = Attention(8, 8, heads=2, head_width=4, bias=bias).double()
    theirs = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    layers = (ours.query, ours.key, ours.value)
    if bias:
        nn.init.normal_(ours.query.bias)
        nn.init.normal_(ours.value.bias)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
        zero = torch.zeros(8, dtype=torch.float64)
        theirs.in_proj_bias.copy_(torch.cat([zero if layer.bias is None else layer.bias for layer in layers]))
        theirs.out_proj.load_state_dict(ours.output.state_dict())
    x, y = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 7, 8, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([[7], [1], [4]])
    expected = theirs(x, y, y, key_padding_mask=~mask, need_weights=False)[0]

    def apply(mask_ML: Tensor | None) -> Tensor:
        out: Tensor = ours(x.flatten(0, 1), y.flatten(0, 1), Lists([(3, 5)], [None]), Lists([(3, 7)], [mask_ML]))
        return out.unflatten(0, (3, 5))

    torch.testing.assert_close(apply(mask), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(apply(None), theirs(x, y, y, need_weights=False)[0], rtol=1e-12, atol=1e-12)


def test_attention_weights_are_dropped_in_training_only() -> None:
    torch.manual_seed(0)
    attention = Attention(4, 4, heads=1, head_width=4, dropout=0.5)
    x_SD, there = torch.randn(12, 4), Lists([(2, 6)], [torch.ones(2, 6, dtype=torch.bool)])
    assert not torch.equal(attention(x_SD, x_SD, there, there), attention(x_SD, x_SD, there, there))
    attention.eval()
    assert torch.equal(attention(x_SD, x_SD, there, there), attention(x_SD, x_SD, there, there))


# DASALC


def test_a_silent_attention_leaves_the_encoders_embedding() -> None:
    module = DASALC(DASALCConfig(width=4, layers=1), 5, NUMERIC, []).double()
    assert isinstance(module.project, nn.Linear)
    nn.init.zeros_(module.project.weight)
    nn.init.zeros_(module.project.bias)
    groups, h_ND = lists([3, 2], 5)
    torch.testing.assert_close(module(groups.features_NF, h_ND, groups).documents_ND, h_ND.relu())


def test_dasalc_projects_where_widths_differ_and_takes_any_number_of_heads() -> None:
    assert isinstance(DASALC(DASALCConfig(width=5, heads=3), 5, NUMERIC, []).project, nn.Identity)
    assert DASALC(DASALCConfig(width=4, heads=3), 5, NUMERIC, []).width == 5
    assert DASALC(DASALCConfig(width=4, cross=False), 5, NUMERIC, []).width == 9
    attention = DASALC(DASALCConfig(width=4, heads=3), 5, NUMERIC, []).attention[0]
    assert isinstance(attention, Attention)
    assert attention.query.weight.shape == (12, 4)  # heads of the layer's width, equation 10


# RankFormer


@pytest.mark.parametrize(("heads", "width"), [(1, None), (2, None), (3, 9)])
def test_rankformer_is_torchs_transformer_with_a_token(heads: int, width: int | None) -> None:
    torch.manual_seed(1)
    config = RankFormerConfig(width=width, heads=heads, feedforward=12, layers=3)
    module = RankFormer(config, 6, NUMERIC, []).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    groups, h_ND = lists([4, 0, 1, 7], 6)
    out = module(groups.features_NF, h_ND, groups)
    a = 0
    for q, length in enumerate([4, 0, 1, 7]):
        documents = out.documents_ND[a : a + length]
        a += length
        if length == 0:
            continue
        expected, expected_list = reference.rankformer(module, h_ND[a - length : a])
        torch.testing.assert_close(documents, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(out.lists_QD[q], expected_list, rtol=1e-10, atol=1e-10)
    alone = module(groups.features_NF[:0], h_ND[:0], QueryGroups(groups.features_NF[:0], torch.tensor([0, 0])))
    torch.testing.assert_close(out.lists_QD[1], alone.lists_QD[0])


def test_rankformer_learns_from_lists_and_from_documents() -> None:
    module = RankFormer(RankFormerConfig(feedforward=8, layers=2, dropout=0.0), 4, NUMERIC, []).double()
    groups, h_ND = lists([3, 5], 4)
    h_ND.requires_grad_()
    out = module(groups.features_NF, h_ND, groups)
    gradient = torch.autograd.grad(out.lists_QD[0].square().sum(), h_ND, retain_graph=True)[0]
    assert gradient[:3].all()
    assert not gradient[3:].any()
    gradient = torch.autograd.grad(out.documents_ND[4].square().sum(), h_ND)[0]
    assert gradient[3:].all()
    assert not gradient[:3].any()


def test_heads_that_do_not_divide_the_encoders_width_are_an_error() -> None:
    with pytest.raises(InputError, match=r"context\.heads: 4 does not divide the encoder's width 6"):
        RankFormer(RankFormerConfig(heads=4), 6, NUMERIC, [])


# SetRank


def test_setrank_without_initial_ranks_ignores_the_order() -> None:
    torch.manual_seed(0)
    module = SetRank(SetRankConfig(width=8, heads=2, blocks=1), 5, NUMERIC, []).double()
    groups, h_ND = lists([4, 3], 5)
    without = QueryGroups(groups.features_NF, groups.offsets_Q1)
    out = module(groups.features_NF, h_ND, groups).documents_ND
    assert torch.equal(module(groups.features_NF, h_ND, without).documents_ND, out)


def test_ranks_beyond_the_table_share_its_last_row_and_no_document_is_lost() -> None:
    torch.manual_seed(0)
    config = SetRankConfig(width=8, heads=2, blocks=1, initial_rank="positions", ranks=3)
    module = SetRank(config, 5, NUMERIC, []).double()
    groups, h_ND = lists([6], 5)

    def out(positions: list[float]) -> Tensor:
        moved = QueryGroups(groups.features_NF, groups.offsets_Q1, positions_N=torch.tensor(positions))
        documents: Tensor = module(groups.features_NF, h_ND, moved).documents_ND
        return documents

    first = out([1, 2, 3, 4, 5, 6])
    assert first.shape == (6, 8)
    torch.testing.assert_close(out([1, 2, 6, 3, 4, 5]), first)
    assert ((out([2, 1, 3, 4, 5, 6]) - first).abs().amax(1) > 1e-6).all()


def test_inducing_points_make_the_work_linear() -> None:
    config = SetRankConfig(width=8, heads=2, blocks=2, inducing=3)
    module = SetRank(config, 5, NUMERIC, [])
    groups, h_ND = lists([50], 5)
    calls = []
    for part in module.modules():
        if isinstance(part, Attention):
            part.register_forward_hook(lambda _m, given, _o: calls.append(tuple(map(len, given[:2]))))
    module(groups.features_NF.float(), h_ND.float(), groups)
    assert calls == [(3, 50), (50, 3)] * 2
