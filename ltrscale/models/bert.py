"""BERT's encoder over ragged token sequences, and the mapping of its sizes and weights to Hugging Face's names.

Only attention pads, in buckets of similar lengths. The functions for Hugging Face take the contents of `config.json`
and `model.safetensors`; `ltrscale.training.fitting` reads the files.

Shapes: T tokens, S sequences, S1 = S + 1 offsets, D embedding, H heads, E width of a head; M sequences of a bucket, L
slots of each.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from ltrscale.batch import group_index, length_chunks
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.layout import Chunks, layout
from ltrscale.models.contexts import PAIRS_PER_CHUNK
from ltrscale.models.layers import Dropout, Layers, Size, Stack

VARLEN = importlib.util.find_spec("torch.nn.attention.varlen") is not None
"""Whether this torch has attention over ragged sequences; it takes only half precision on a GPU."""


class BertConfig(Config):
    """Sizes of a BERT (Devlin et al. 2019): post-norm layers, learned positions, token types, GELU."""

    layers: Layers = 3
    """Transformer layers; SUN23 has 3 or 12."""
    width: Size = 768
    """Size of a token's embedding; SUN23 has 768."""
    heads: Size = 12
    """Attention heads; they share the width, so their number must divide it. SUN23 has 12."""
    feedforward: Size | None = None
    """Size of the hidden layer of each layer's feed-forward network; four times the width by default."""
    positions: Size = 512
    """Positions with an embedding, so the longest sequence."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout of embeddings and of the outputs of attention and feed-forward network; a multiple of 1/256 on a CPU.
    Attention weights have none: attention over ragged sequences has none on a GPU."""
    pooler: Literal["cls", "tanh"] = "cls"
    """The embedding of a sequence: its first token's, as in SUN23, or `tanh(linear(..))` of that, BERT's own."""
    epsilon: float = Field(1e-12, gt=0)
    """Added to the variance in each norm."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide the width {self.width}; choose numbers that do")
        return self


@dataclass(frozen=True)
class _Sequences:
    """The offsets of a batch's sequences, and their buckets for attention, computed once for all layers."""

    offsets_S1: Tensor

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return layout(self.offsets_S1).longest

    @cached_property
    def chunks(self) -> Chunks:
        """All sequences in buckets; on a CPU `PAIRS_PER_CHUNK` bounds the padded attention matrices of each."""
        return length_chunks(self.offsets_S1, budget=PAIRS_PER_CHUNK)

    @cached_property
    def masks(self) -> list[Tensor | None]:
        """For each bucket, True where a slot [M, L] holds a token; None if its sequences are equally long."""
        ends = [m for m, _ in self.chunks.shapes]
        lengths_S = np.sort(layout(self.offsets_S1).lengths_Q)  # chunks begin with the shortest
        of_chunks = np.split(lengths_S[len(lengths_S) - sum(ends) :], np.cumsum(ends)[:-1])
        masks = self.chunks.split(self.chunks.mask_S)
        return [
            None if (lengths_M == length).all() else mask_ML
            for lengths_M, (_, length), mask_ML in zip(of_chunks, self.chunks.shapes, masks, strict=True)
        ]

    @cached_property
    def positions_T(self) -> Tensor:
        """The place of each token in its sequence, from 0."""
        sequence_T = group_index(self.offsets_S1)
        return torch.arange(len(sequence_T), device=sequence_T.device) - self.offsets_S1[sequence_T]


def _ragged_attention(qkv_T3HE: Tensor, sequences: _Sequences) -> Tensor:
    """`softmax(Q_h K_h' / sqrt(E)) V_h` over the tokens of each sequence, shape [T, H, E]."""
    if not len(qkv_T3HE):
        return qkv_T3HE[:, 2]
    if VARLEN and qkv_T3HE.is_cuda and qkv_T3HE.dtype in (torch.float16, torch.bfloat16):
        query_THE, key_THE, value_THE = qkv_T3HE.unbind(1)
        return _on_gpu(query_THE, key_THE, value_THE, sequences)
    chunks, parts = sequences.chunks, []
    for qkv_ML3HE, mask_ML in zip(chunks.split(chunks.pad(qkv_T3HE, None)), sequences.masks, strict=True):
        query, key, value = qkv_ML3HE.transpose(1, 3).unbind(2)
        mask = None if mask_ML is None else mask_ML[:, None, None, :]
        parts.append(F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2))
    return chunks.ragged(parts)


def _on_gpu(query_THE: Tensor, key_THE: Tensor, value_THE: Tensor, sequences: _Sequences) -> Tensor:
    """Torch's attention over ragged sequences; a sequence's output has the same bits whatever else is in the batch."""
    from torch.nn.attention.varlen import varlen_attn

    bounds_S1, longest = sequences.offsets_S1.int(), sequences.longest
    out = varlen_attn(query_THE, key_THE, value_THE, bounds_S1, bounds_S1, longest, longest, num_splits=1)
    assert isinstance(out, Tensor)
    return out


class BertLayer(nn.Module):
    """`x = norm(x + drop(output(attention(x))))`, then `x = norm(x + drop(second(gelu(first(x)))))`.

    Keys have no bias: it would shift all scores of a query equally, which does not change their softmax.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.feedforward or 4 * config.width
        self.heads = config.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.query_bias = nn.Parameter(torch.zeros(width))
        self.value_bias = nn.Parameter(torch.zeros(width))
        self.output = nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.attention_norm = nn.LayerNorm(width, eps=config.epsilon)
        self.feedforward_norm = nn.LayerNorm(width, eps=config.epsilon)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_TD: Tensor, sequences: _Sequences) -> Tensor:
        """Apply the layer to the tokens of all sequences."""
        bias = torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])
        qkv = F.linear(x_TD, self.qkv.weight, bias)
        qkv_T3HE = qkv.view(len(x_TD), 3, self.heads, x_TD.shape[1] // self.heads)
        attended_TD = self.output(_ragged_attention(qkv_T3HE, sequences).flatten(1))
        x_TD = self.attention_norm(x_TD + self.dropout(attended_TD))
        added_TD = self.dropout(self.second(F.gelu(self.first(x_TD))))
        return self.feedforward_norm(x_TD + added_TD)


class Bert(Stack):
    """BERT without a head (Devlin et al. 2019), on concatenated sequences of any lengths.

    A sequence's output depends on that sequence only. All layers except attention work on single tokens, so their cost
    does not depend on how lengths differ.
    """

    def __init__(self, config: BertConfig, vocabulary: int) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.types = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.width, config.width) if config.pooler == "tanh" else None
        self.apply(initialise)

    def forward(self, ids_T: Tensor, types_T: Tensor, offsets_S1: Tensor) -> Tensor:
        """Embeddings [T, D] of the tokens of all sequences.

        Args:
            ids_T: tokens, below the size of the vocabulary.
            types_T: 0 or 1, the part of the sequence that each token belongs to.
            offsets_S1: offsets of the sequences, none longer than `positions`.
        """
        sequences = _Sequences(offsets_S1)
        x_TD = self.tokens(ids_T) + self.positions(sequences.positions_T) + self.types(types_T)
        x_TD = self.dropout(self.norm(x_TD))
        for layer in self.layers:
            x_TD = layer(x_TD, sequences)
        return x_TD

    def pool(self, h_TD: Tensor, offsets_S1: Tensor) -> Tensor:
        """The embedding [S, D] of each sequence from its first token's; no sequence is empty."""
        first_SD: Tensor = h_TD.index_select(0, offsets_S1[:-1])
        if self.pooler is not None:
            first_SD = self.pooler(first_SD).tanh()
        return first_SD


def initialise(module: nn.Module) -> None:
    """BERT's initial weights: normal with deviation .02; biases 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


_SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feedforward": "intermediate_size",
    "positions": "max_position_embeddings",
    "epsilon": "layer_norm_eps",
}
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("bert",),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "type_vocab_size": (2,),
}
_OUTSIDE = {
    "tokens": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense",
}
_INSIDE = {
    "output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "first": "intermediate.dense",
    "second": "output.dense",
    "feedforward_norm": "output.LayerNorm",
}
_UNUSED = ("cls.", "classifier.", "qa_outputs.", "pooler.", "embeddings.position_ids")
"""Parts that a ranker does not have: heads of other tasks, and the pooler unless the ranker asks for it."""


def bert_config(
    values: Mapping[str, Any], *, where: str, dropout: float, pooler: Literal["cls", "tanh"]
) -> tuple[BertConfig, int]:
    """The sizes of a `config.json`, with the given dropout and pooler, and the size of its vocabulary.

    Raises:
        InputError: it is not a BERT of this architecture, or a size is missing.

    Example:
        >>> bert_config({"model_type": "roberta"}, where="config.json", dropout=0.1, pooler="cls")
        Traceback (most recent call last):
        ltrscale.errors.InputError: config.json: model_type is 'roberta', and only 'bert' can be read; name another ...
    """
    for key, allowed in _EXPECTED.items():
        if (value := values.get(key)) not in allowed:
            raise InputError(
                f"{where}: {key} is {value!r}, and only {allowed[0]!r} can be read; name another directory"
            )
    for key in (*_SIZES.values(), "vocab_size"):
        if not isinstance(values.get(key), int | float):
            raise InputError(f"{where}: {key} is {values.get(key)!r} and not a number; name a directory of a BERT")
    sizes = {field: values[config_key] for field, config_key in _SIZES.items()}
    return BertConfig.model_validate({**sizes, "dropout": dropout, "pooler": pooler}), values["vocab_size"]


def bert_weights(
    tensors: Mapping[str, Tensor], config: BertConfig, vocabulary: int, *, where: str
) -> dict[str, Tensor]:
    """The state of a `Bert` from the tensors of a `model.safetensors`, in float32.

    The bias of the keys is left out: it changes no output.

    Raises:
        InputError: a tensor is missing, unexpected or of another shape; names it.
    """
    remaining = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    shapes = _shapes(config, vocabulary)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in remaining:
            raise InputError(f"{where}: tensor {name!r} is missing; name a directory with the weights of a BERT")
        tensor = remaining.pop(name)
        if tuple(tensor.shape) != shape:
            actual, expected = list(tensor.shape), list(shape)
            raise InputError(f"{where}: tensor {name!r} has shape {actual}, and by config.json it has {expected}")
        return tensor.float()

    state = {}
    for target, sources in shapes.items():
        state[target] = torch.cat([take(name, shape) for name, shape in sources.items()])
    unexpected = [name for name in remaining if not name.endswith("self.key.bias") and not name.startswith(_UNUSED)]
    if unexpected:
        raise InputError(f"{where}: tensor {unexpected[0]!r} is unexpected in a BERT of {config.layers} layers")
    return state


def _shapes(config: BertConfig, vocabulary: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """For each of our tensors, the names and shapes of the file's tensors that it concatenates."""
    d, hidden = config.width, config.feedforward or 4 * config.width
    rows = {"tokens": vocabulary, "positions": config.positions, "types": 2}
    names: dict[str, dict[str, tuple[int, ...]]] = {
        f"{target}.weight": {f"{_OUTSIDE[target]}.weight": (n, d)} for target, n in rows.items()
    }

    def add(target: str, source: str, weight: tuple[int, ...]) -> None:
        names[f"{target}.weight"] = {f"{source}.weight": weight}
        names[f"{target}.bias"] = {f"{source}.bias": weight[:1]}

    add("norm", _OUTSIDE["norm"], (d,))
    if config.pooler == "tanh":
        add("pooler", _OUTSIDE["pooler"], (d, d))
    inside = {"output": (d, d), "attention_norm": (d,), "first": (hidden, d), "second": (d, hidden)}
    for i in range(config.layers):
        target, source = f"layers.{i}", f"encoder.layer.{i}"
        attention = f"{source}.attention.self"
        names[f"{target}.qkv.weight"] = {f"{attention}.{part}.weight": (d, d) for part in ("query", "key", "value")}
        for part in ("query", "value"):
            names[f"{target}.{part}_bias"] = {f"{attention}.{part}.bias": (d,)}
        for name, weight in {**inside, "feedforward_norm": (d,)}.items():
            add(f"{target}.{name}", f"{source}.{_INSIDE[name]}", weight)
    return names
