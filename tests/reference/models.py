"""List contexts of one list, with loops over documents and heads; weights come from the module under test.

Shapes: L documents, D embedding, F features (numeric ones), P inducing points.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ltrscale.models.attention import (
    DASALC,
    Attention,
    RankFormer,
    SetRank,
    _AttentionBlock,
    _InducedBlock,
    _SelfAttentionBlock,
)
from ltrscale.models.contexts import DLCM, GSF


def attend(layer: Attention, queries: Tensor, keys: Tensor) -> Tensor:
    """Vaswani et al. 2017, equation 1 and section 3.2.2: one query and one head at a time."""
    rows = []
    for query in queries:
        heads = []
        for head in range(layer.heads):
            q = _head(layer.query(query), head, layer.heads)
            ks = [_head(layer.key(key), head, layer.heads) for key in keys]
            vs = [_head(layer.value(key), head, layer.heads) for key in keys]
            exps = [((q * k).sum() / math.sqrt(len(q))).exp() for k in ks]
            heads.append(sum(e / sum(exps) * v for e, v in zip(exps, vs, strict=True)))
        rows.append(layer.output(torch.cat(heads)))
    return torch.stack(rows)


def dasalc(module: DASALC, x_LF: Tensor, h_LD: Tensor) -> Tensor:
    """QIN21, equations 9 to 11, residual and first layer as in TF-Ranking."""
    a = module.input(x_LF).relu()
    for attention, norm in zip(module.attention, module.norms, strict=True):
        assert isinstance(attention, Attention)
        a = norm(a + attend(attention, a, a))
    a = module.project(a)
    if module.cross:
        return torch.stack([((1 + a_i) * h_i).clamp(min=0) for a_i, h_i in zip(a, h_LD, strict=True)])
    return torch.cat([h_LD, a], dim=1)


def rankformer(module: RankFormer, h_LD: Tensor) -> tuple[Tensor, Tensor]:
    """BUYL23, section 5, through torch's own Transformer with the same weights: documents and the list."""
    width = module.list_width
    config = module.config
    layer = torch.nn.TransformerEncoderLayer(
        width, config.heads, config.feedforward, activation="gelu", norm_first=True, batch_first=True, dtype=h_LD.dtype
    )
    encoder = torch.nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False).eval()
    for theirs, ours in zip(encoder.layers, module.layers, strict=True):
        attention = ours.attention
        projections = [attention.query, attention.key, attention.value]
        biases = [p.weight.new_zeros(width) if p.bias is None else p.bias for p in projections]
        state = {
            "self_attn.in_proj_weight": torch.cat([p.weight for p in projections]),
            "self_attn.in_proj_bias": torch.cat(biases),
        }
        for name, part in (
            ("self_attn.out_proj", attention.output),
            ("linear1", ours.first),
            ("linear2", ours.second),
            ("norm1", ours.attention_norm),
            ("norm2", ours.feedforward_norm),
        ):
            state |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
        theirs.load_state_dict(state)
    tokens = torch.cat([module.input(h_LD), module.token[None]])
    z = encoder(tokens[None])[0]
    return torch.stack([torch.cat([z_i, z[-1]]) for z_i in z[:-1]]), z[-1]


def setrank(module: SetRank, h_LD: Tensor, ranks: Sequence[int] | None) -> Tensor:
    """Pang et al. 2020: MAB, MSAB, IMSAB and ordinal embeddings."""
    x = module.input(h_LD)
    if ranks is not None:
        assert module.ranks is not None
        table = module.ranks.weight
        x = torch.stack([x_i + table[min(rank, len(table) - 1)] for x_i, rank in zip(x, ranks, strict=True)])
    for block in module.blocks:
        if isinstance(block, _InducedBlock):
            x = _mab(block.spread, x, _mab(block.collect, block.points_PD, x))
        else:
            assert isinstance(block, _SelfAttentionBlock)
            x = _mab(block.block, x, x)
    return x


def dlcm(module: DLCM, x_LF: Tensor, h_LD: Tensor, order: Sequence[int]) -> Tensor:
    """Ai et al. 2018: `o_i . tanh(W_k s + b_k)`; `order` names the documents from the first to the last."""
    inputs = torch.cat([x_LF, h_LD], dim=1)
    gru = module.gru
    state = torch.zeros(gru.hidden_size, dtype=h_LD.dtype)
    outputs = {}
    for i in reversed(order):
        (ir, iz, in_), (hr, hz, hn) = (
            (weight @ value + bias).chunk(3)
            for weight, value, bias in (
                (gru.weight_ih_l0, inputs[i], gru.bias_ih_l0),
                (gru.weight_hh_l0, state, gru.bias_hh_l0),
            )
        )
        reset, update = (ir + hr).sigmoid(), (iz + hz).sigmoid()
        state = (1 - update) * (in_ + reset * hn).tanh() + update * state
        outputs[i] = state
    weight = module.compare.weight.view(len(state), -1, len(state))
    bias = module.compare.bias.view(len(state), -1)
    units = range(bias.shape[1])
    rows = [[outputs[i] @ (weight[:, k] @ state + bias[:, k]).tanh() for k in units] for i in range(len(order))]
    return torch.stack([torch.stack(row) for row in rows])


def gsf(module: GSF, h_LD: Tensor, windows: Sequence[Sequence[int]]) -> Tensor:
    """Ai et al. 2019: mean of a document's blocks over the groups and places that contain it."""
    size = module.config.size
    # the first layer of a group as one matrix over its documents' embeddings side by side
    first = torch.cat(module.places.weight.chunk(size), dim=1)
    blocks: dict[int, list[Tensor]] = {i: [] for i in range(len(h_LD))}
    for window in windows:
        hidden = first @ torch.cat([h_LD[i] for i in window]) + module.bias
        for i, block in zip(window, module.network(hidden).chunk(size), strict=True):
            blocks[i].append(block)
    return torch.stack([sum(found) / len(found) for found in blocks.values()])


def _mab(block: _AttentionBlock, x: Tensor, y: Tensor) -> Tensor:
    h = block.attention_norm(x + attend(block.attention, x, y))
    out: Tensor = block.feedforward_norm(h + block.feedforward(h))
    return out


def _head(values: Tensor, head: int, heads: int) -> Tensor:
    return values.chunk(heads)[head]
