"""The encoder of text over ragged sequences, against the same model padded to the longest sequence.

Shapes: S sequences, L tokens of the longest, T tokens, D embedding, E width of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.bench.measure import Row, peak_bytes
from ltrscale.batch import to_offsets
from ltrscale.devices import cpu_seconds
from ltrscale.models.bert import Bert, BertConfig, BertLayer

SEQUENCES = 256
SMALL = BertConfig(layers=2, width=128, heads=2)
VOCABULARY = 8000
MEDIAN, SPREAD, LONGEST = 45, 0.6, 128
"""Tokens of a pair of query and document: lognormal, cut at the longest."""


def bench_text(sequences: int = SEQUENCES) -> list[Row]:
    """Tokens per second and peak memory of a step, forward and backward."""
    return [_speed(sequences), _memory(sequences)]


class _Batch(NamedTuple):
    """Sequences end to end, and the same ones padded."""

    ids_T: Tensor
    types_T: Tensor
    offsets_S1: Tensor
    mask_SL: Tensor


def _batch(sequences: int) -> _Batch:
    generator = torch.Generator().manual_seed(0)
    drawn_S = (torch.randn(sequences, generator=generator) * SPREAD).exp() * MEDIAN
    lengths_S = drawn_S.long().clamp(8, LONGEST)
    tokens = int(lengths_S.sum())
    ids_T = torch.randint(VOCABULARY, (tokens,), generator=generator)
    types_T = torch.randint(2, (tokens,), generator=generator)
    mask_SL = torch.arange(int(lengths_S.max())) < lengths_S[:, None]
    return _Batch(ids_T, types_T, to_offsets(lengths_S), mask_SL)


def _bert() -> Bert:
    torch.manual_seed(0)
    return Bert(SMALL.replace(dropout=0.0), VOCABULARY)


def padded(bert: Bert, batch: _Batch) -> Tensor:
    """Embeddings [T, D] by the same weights on padded sequences, the usual form."""
    mask_SL = batch.mask_SL
    ids_SL, types_SL = (torch.zeros(mask_SL.shape, dtype=torch.int64) for _ in range(2))
    ids_SL[mask_SL], types_SL[mask_SL] = batch.ids_T, batch.types_T
    x_SLD = bert.tokens(ids_SL) + bert.positions(torch.arange(mask_SL.shape[1])) + bert.types(types_SL)
    x_SLD = bert.norm(x_SLD)
    for layer in bert.layers:
        assert isinstance(layer, BertLayer)
        bias = torch.cat([layer.query_bias, torch.zeros_like(layer.query_bias), layer.value_bias])
        qkv = F.linear(x_SLD, layer.qkv.weight, bias)
        query, key, value = qkv.view(*mask_SL.shape, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
        heads_SHLE = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_SL[:, None, None, :])
        x_SLD = layer.attention_norm(x_SLD + layer.output(heads_SHLE.transpose(1, 2).flatten(2)))
        x_SLD = layer.feedforward_norm(x_SLD + layer.second(F.gelu(layer.first(x_SLD))))
    h_TD: Tensor = x_SLD[mask_SL]
    return h_TD


def ragged(bert: Bert, batch: _Batch) -> Tensor:
    """Embeddings [T, D] by the encoder as it is."""
    h_TD: Tensor = bert(batch.ids_T, batch.types_T, batch.offsets_S1)
    return h_TD


def _step(form: Callable[[Bert, _Batch], Tensor], batch: _Batch) -> Callable[[], None]:
    bert = _bert()

    def work() -> None:
        bert.zero_grad()
        torch.autograd.backward(form(bert, batch).square().mean())

    return work


def _speed(sequences: int) -> Row:
    batch = _batch(sequences)
    torch.testing.assert_close(ragged(_bert(), batch), padded(_bert(), batch), rtol=1e-4, atol=1e-4)
    seconds, padded_seconds = cpu_seconds(_step(ragged, batch), _step(padded, batch), repeats=5)
    tokens = len(batch.ids_T)
    return Row(
        name="encoder of text, forward and backward: tokens per second, ragged / padded to the longest",
        ratio=padded_seconds / seconds,
        goal=1.5,
        at_least=True,
        ours=f"{tokens / seconds / 1e3:.1f} k tokens/CPU-s",
        peer=f"{tokens / padded_seconds / 1e3:.1f} k tokens/CPU-s",
        note=f"{sequences} sequences of {tokens / sequences:.0f} tokens on average, the longest "
        f"{batch.mask_SL.shape[1]}; {SMALL.layers} layers of {SMALL.width}",
    )


def _memory(sequences: int) -> Row:
    ours, peer = (peak_bytes(partial(_run, form), 8, [sequences])[0] for form in (ragged, padded))
    return Row(
        name="encoder of text, forward and backward: peak memory, ragged / padded to the longest",
        ratio=ours / peer,
        goal=None,
        at_least=False,
        ours=f"{ours / 1e6:.0f} MB",
        peer=f"{peer / 1e6:.0f} MB",
        note="growth of peak resident memory, one process each",
    )


def _run(form: Callable[[Bert, _Batch], Tensor], sequences: int) -> None:
    _step(form, _batch(sequences))()
