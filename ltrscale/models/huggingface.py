"""BERT's sizes and weights under the names that Hugging Face gives them.

Pure functions of what `config.json` and `model.safetensors` hold; `ltrscale.training.network` reads the files.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ltrscale.errors import InputError
from ltrscale.models.bert import BertConfig

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
    """The sizes of a `config.json`, with a dropout and a pooler of one's own, and the size of its vocabulary.

    Args:
        values: its content.
        where: its path, for messages.
        dropout: as in `BertConfig`.
        pooler: as in `BertConfig`.

    Raises:
        InputError: it is no BERT, or one of another architecture, or a size is missing.

    Example:
        >>> bert_config({"model_type": "roberta"}, where="config.json", dropout=0.1, pooler="cls")
        Traceback (most recent call last):
        ltrscale.errors.InputError: config.json: model_type is 'roberta', and only 'bert' can be read; name another ...
    """
    for key, allowed in _EXPECTED.items():
        if (found := values.get(key)) not in allowed:
            raise InputError(
                f"{where}: {key} is {found!r}, and only {allowed[0]!r} can be read; name another directory"
            )
    for key in (*_SIZES.values(), "vocab_size"):
        if not isinstance(values.get(key), int | float):
            raise InputError(f"{where}: {key} is {values.get(key)!r} and not a number; name a directory of a BERT")
    sizes = {ours: values[theirs] for ours, theirs in _SIZES.items()}
    return BertConfig.model_validate({**sizes, "dropout": dropout, "pooler": pooler}), values["vocab_size"]


def bert_weights(
    tensors: Mapping[str, Tensor], config: BertConfig, vocabulary: int, *, where: str
) -> dict[str, Tensor]:
    """The state of a `Bert` from the tensors of a `model.safetensors`, in float32.

    The bias of the keys is left out: it changes no output.

    Args:
        tensors: by name, with or without the prefix `bert.`.
        config: sizes, as `bert_config` gives them.
        vocabulary: rows of the token embedding.
        where: the file, for messages.

    Raises:
        InputError: a tensor is missing, unexpected or of another shape; names it.
    """
    left = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    shapes = _shapes(config, vocabulary)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in left:
            raise InputError(f"{where}: tensor {name!r} is missing; name a directory with the weights of a BERT")
        tensor = left.pop(name)
        if tuple(tensor.shape) != shape:
            found, expected = list(tensor.shape), list(shape)
            raise InputError(f"{where}: tensor {name!r} has shape {found}, and by config.json it has {expected}")
        return tensor.float()

    state = {}
    for ours, theirs in shapes.items():
        state[ours] = torch.cat([take(name, shape) for name, shape in theirs.items()])
    unexpected = [name for name in left if not name.endswith("self.key.bias") and not name.startswith(_UNUSED)]
    if unexpected:
        raise InputError(f"{where}: tensor {unexpected[0]!r} is unexpected in a BERT of {config.layers} layers")
    return state


def _shapes(config: BertConfig, vocabulary: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """For each of our tensors the names and shapes of theirs, which are put end to end."""
    d, hidden = config.width, config.feedforward or 4 * config.width
    rows = {"tokens": vocabulary, "positions": config.positions, "types": 2}
    names: dict[str, dict[str, tuple[int, ...]]] = {
        f"{ours}.weight": {f"{_OUTSIDE[ours]}.weight": (n, d)} for ours, n in rows.items()
    }

    def add(ours: str, theirs: str, weight: tuple[int, ...]) -> None:
        names[f"{ours}.weight"] = {f"{theirs}.weight": weight}
        names[f"{ours}.bias"] = {f"{theirs}.bias": weight[:1]}

    add("norm", _OUTSIDE["norm"], (d,))
    if config.pooler == "tanh":
        add("pooler", _OUTSIDE["pooler"], (d, d))
    inside = {"output": (d, d), "attention_norm": (d,), "first": (hidden, d), "second": (d, hidden)}
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"encoder.layer.{i}"
        attention = f"{theirs}.attention.self"
        names[f"{ours}.qkv.weight"] = {f"{attention}.{part}.weight": (d, d) for part in ("query", "key", "value")}
        for part in ("query", "value"):
            names[f"{ours}.{part}_bias"] = {f"{attention}.{part}.bias": (d,)}
        for name, weight in {**inside, "feedforward_norm": (d,)}.items():
            add(f"{ours}.{name}", f"{theirs}.{_INSIDE[name]}", weight)
    return names
