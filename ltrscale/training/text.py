"""What an encoder of text takes from the data and from files: the token fields, the vocabulary and initial weights.

Initial weights of a transformer may be at any URL, in Hugging Face's format: `config.json` and `model.safetensors` of a
BERT. Nothing is downloaded and nothing is unpickled.
"""

import json

import safetensors.torch
from safetensors import SafetensorError

from ltrscale import storage
from ltrscale.data.dataset.selection import Selection
from ltrscale.errors import InputError
from ltrscale.models.bert import bert_config, bert_weights
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.cross_encoder import CrossEncoder, CrossEncoderConfig, TokenNumbers
from ltrscale.models.layers import Encoder, EncoderSettings

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def with_tokens(selection: Selection, encoder: EncoderSettings) -> Selection:
    """The same groups with the token fields that the encoder reads.

    Raises:
        InputError: the data lack one.
    """
    fields = encoder.reads_tokens
    return selection.reading(query=fields.query, document=fields.document) if any(fields) else selection


def fitted_to(network: NetworkConfig, selection: Selection) -> NetworkConfig:
    """The network with the vocabulary of the data and the sizes of its initial weights, if any.

    Raises:
        InputError: the data have no vocabulary or one that differs from the config, the vocabulary lacks a special
            token, or the initial weights are of another architecture or of fewer tokens.
    """
    encoder = network.encoder
    if not isinstance(encoder, CrossEncoderConfig):
        return network
    with_tokens(selection, encoder)  # raises if a field is missing
    vocabulary = _vocabulary(selection)
    if network.initial is not None:
        bert = encoder.bert
        path = storage.join(network.initial, _CONFIG)
        sizes, rows = bert_config(_json_object(path), where=path, dropout=bert.dropout, pooler=bert.pooler)
        if rows < vocabulary.size:
            raise InputError(
                f"{path}: its vocabulary has {rows:,} tokens, and that of the data {vocabulary.size:,}; prepare the "
                "data with the vocabulary of these weights"
            )
        if encoder.max_tokens > sizes.positions:
            raise InputError(
                f"{path}: has {sizes.positions} positions, and network.encoder.max_tokens is {encoder.max_tokens}; "
                "lower it"
            )
        encoder, vocabulary = encoder.replace(bert=sizes), vocabulary.replace(size=rows)
    if encoder.vocabulary not in (None, vocabulary):
        raise InputError("network.encoder.vocabulary is not that of the data; leave it empty")
    return network.replace(encoder=encoder.replace(vocabulary=vocabulary))


def _vocabulary(selection: Selection) -> TokenNumbers:
    vocabulary = selection.vocabulary
    assert vocabulary is not None  # the selection has token fields
    for name in ("cls", "sep", "mask"):
        if name not in vocabulary.special:
            raise InputError(f"the vocabulary of the data has no special token {name!r}; prepare the data with one")
    special = {name: vocabulary.special[name] for name in ("cls", "sep", "mask")}
    return TokenNumbers(size=vocabulary.size, sha256=vocabulary.sha256, **special)


def load_initial(encoder: Encoder, initial: str | None) -> None:
    """Load the initial weights of an encoder's transformer, if any; other parts keep their random ones.

    Raises:
        InputError: a file is missing or damaged, or a tensor is missing, unexpected or of another shape.
    """
    if initial is None:
        return
    assert isinstance(encoder, CrossEncoder)
    path = storage.join(initial, _WEIGHTS)
    try:
        tensors = safetensors.torch.load(storage.read_bytes(path))
    except SafetensorError as error:
        raise InputError(f"{path}: no safetensors ({error}); copy it again") from error
    bert = encoder.bert
    bert.load_state_dict(bert_weights(tensors, bert.config, bert.tokens.num_embeddings, where=path))


def _json_object(path: str) -> dict[str, object]:
    try:
        values = json.loads(storage.read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: no JSON ({error}); copy it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: no JSON object; copy it again")
    return values
