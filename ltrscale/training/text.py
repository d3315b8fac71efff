"""What a training on text takes from its surroundings: the vocabulary of the data, and initial weights.

Initial weights lie at any URL in Hugging Face's format: `config.json` and `model.safetensors` of a BERT.
Nothing is downloaded and nothing is unpickled.
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
    """The same groups with the token fields that an encoder reads.

    Raises:
        InputError: the data lack one.
    """
    fields = encoder.reads_tokens
    return selection.reading(query=fields.query, document=fields.document) if any(fields) else selection


def fitted_to(network: NetworkConfig, selection: Selection) -> NetworkConfig:
    """The network with the vocabulary of the data and, if it has initial weights, with their sizes.

    Args:
        network: with an encoder of any kind; one of features is returned unchanged.
        selection: of the training split.

    Raises:
        InputError: the data have no vocabulary or another one than the config says, the vocabulary lacks a special
            token, or the initial weights are of another architecture or of fewer tokens.
    """
    encoder = network.encoder
    if not isinstance(encoder, CrossEncoderConfig):
        return network
    with_tokens(selection, encoder)  # raises if a field is missing
    vocabulary = _vocabulary(selection)
    if network.initial is not None:
        bert = encoder.bert
        where = storage.join(network.initial, _CONFIG)
        sizes, rows = bert_config(_json(where), where=where, dropout=bert.dropout, pooler=bert.pooler)
        if rows < vocabulary.size:
            raise InputError(
                f"{where}: its vocabulary has {rows:,} tokens, and that of the data {vocabulary.size:,}; prepare the "
                "data with the vocabulary of these weights"
            )
        if encoder.max_tokens > sizes.positions:
            raise InputError(
                f"{where}: has {sizes.positions} positions, and network.encoder.max_tokens is {encoder.max_tokens}; "
                "lower it"
            )
        encoder, vocabulary = encoder.replace(bert=sizes.model_dump()), vocabulary.replace(size=rows)
    if encoder.vocabulary not in (None, vocabulary):
        raise InputError("network.encoder.vocabulary is not that of the data; leave it empty")
    return network.replace(encoder=encoder.replace(vocabulary=vocabulary.model_dump()).model_dump())


def _vocabulary(selection: Selection) -> TokenNumbers:
    there = selection.vocabulary
    assert there is not None  # the selection has token fields
    for name in ("cls", "sep", "mask"):
        if name not in there.special:
            raise InputError(f"the vocabulary of the data has no special token {name!r}; prepare the data with one")
    special = {name: there.special[name] for name in ("cls", "sep", "mask")}
    return TokenNumbers(size=there.size, sha256=there.sha256, **special)


def load_initial(encoder: Encoder, initial: str | None) -> None:
    """Load the initial weights of an encoder's transformer, if there are any; other parts keep their random ones.

    Raises:
        InputError: a file is missing or damaged, or a tensor is missing, unexpected or of another shape.
    """
    if initial is None:
        return
    assert isinstance(encoder, CrossEncoder)
    where = storage.join(initial, _WEIGHTS)
    try:
        tensors = safetensors.torch.load(storage.read_bytes(where))
    except SafetensorError as error:
        raise InputError(f"{where}: no safetensors ({error}); copy it again") from error
    bert = encoder.bert
    bert.load_state_dict(bert_weights(tensors, bert.config, bert.tokens.num_embeddings, where=where))


def _json(where: str) -> dict[str, object]:
    try:
        values = json.loads(storage.read_bytes(where))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no JSON ({error}); copy it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{where}: no JSON object; copy it again")
    return values
