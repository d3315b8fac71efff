"""The cross-encoder: a transformer over query and document, joined with the dense features.

Shapes: N documents, Q groups, F features, D embedding, P pieces of all sequences, T tokens of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, Tokens
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.layout import layout, registered_offsets, send
from ltrscale.models.bert import Bert, BertConfig
from ltrscale.models.layers import Encoder, EncoderSettings, FeatureEmbedding, Sizes, TokenFields, hidden_layers

TOKENS_AT_ONCE = 1 << 16
"""Tokens that are embedded together at inference, so that memory does not grow with the batch."""

FieldNames = Annotated[tuple[str, ...], Field(min_length=1)]

_IDS = 1 << 31
"""Token ids are int32."""


class TokenNumbers(Config):
    """Size of a vocabulary, and the numbers of its special tokens."""

    size: int = Field(ge=1, le=_IDS)
    """Rows of the token embedding."""
    cls: int = Field(ge=0, lt=_IDS)
    """The token before a query."""
    sep: int = Field(ge=0, lt=_IDS)
    """The token after each field."""
    mask: int = Field(ge=0, lt=_IDS)
    """The token that hides another in masked language modelling."""
    sha256: str = ""
    """Hash of the file that the tokens come from."""

    @model_validator(mode="after")
    def _has_them(self) -> Self:
        if max(self.cls, self.sep, self.mask) >= self.size:
            raise ValueError(f"a special token is not below the size of the vocabulary, {self.size}")
        return self


class Pairs(NamedTuple):
    """The token sequence of each document with its query, end to end."""

    ids_T: Tensor
    types_T: Tensor
    """0 up to the end of the query, 1 after it."""
    text_T: Tensor
    """True for tokens of a field, False for [CLS] and [SEP]."""
    offsets_N1: Tensor


def _pairs_of(groups: QueryGroups, config: "CrossEncoderConfig") -> Pairs:
    """The sequences `[CLS] query [SEP] title [SEP] body [SEP]` of all documents; an empty field keeps its [SEP]."""
    assert config.vocabulary is not None
    n, device = groups.n_documents, groups.offsets_Q1.device
    # A sequence is a row of pieces, each a run of the pool: [CLS], [SEP], then the tokens of one field after the other.
    # The pieces are laid out on the CPU, which knows all lengths, so a GPU need not synchronise.
    group_N = np.arange(groups.n_groups).repeat(layout(groups.offsets_Q1).lengths_Q)
    zeros_N, ones_N = np.zeros(n, np.int64), np.ones(n, np.int64)
    left_N = zeros_N + config.max_tokens - 1 - len(config.query) - len(config.document)
    pool, size = [send(np.array([config.vocabulary.cls, config.vocabulary.sep]), device)], 2
    pieces, types, text = [(zeros_N, ones_N)], [0], [0]  # starts in the pool and lengths of a piece, for all documents
    for of_query, name in [*((True, name) for name in config.query), *((False, name) for name in config.document)]:
        tokens = _tokens_of(groups, name, of_query=of_query)
        starts_N, lengths_N = layout(tokens.offsets_R1).offsets_Q1[:-1], layout(tokens.offsets_R1).lengths_Q
        if of_query:
            starts_N, lengths_N = starts_N[group_N], lengths_N[group_N]
        taken_N = np.minimum(lengths_N, left_N)
        left_N = left_N - taken_N
        pieces += [(starts_N + size, taken_N), (ones_N, ones_N)]  # the field and a [SEP]
        types, text = [*types, *[int(not of_query)] * 2], [*text, 1, 0]
        pool, size = [*pool, tokens.ids_T.long()], size + len(tokens.ids_T)
    starts_P, lengths_P = (np.stack(values, 1).ravel() for values in zip(*pieces, strict=True))
    bounds_P1 = np.concatenate([[0], lengths_P.cumsum()])
    # each piece repeats its values for its tokens; a token's place in the pool is its own number plus its piece's shift
    of_pieces = np.stack([lengths_P, starts_P - bounds_P1[:-1], np.tile(types, n), np.tile(text, n)])
    lengths, *values = send(of_pieces, device)
    n_tokens = int(bounds_P1[-1])
    shift_T, types_T, text_T = torch.stack(values).repeat_interleave(lengths, 1, output_size=n_tokens)
    places_T = shift_T + torch.arange(n_tokens, device=device)
    offsets_N1 = registered_offsets(bounds_P1[:: len(pieces)].copy(), device)
    return Pairs(torch.cat(pool)[places_T], types_T, text_T.bool(), offsets_N1)


def _tokens_of(groups: QueryGroups, name: str, *, of_query: bool) -> Tokens:
    fields = groups.query_tokens if of_query else groups.document_tokens
    if name not in fields:
        raise InputError(
            f"the model reads the token field {name!r} of the {'query' if of_query else 'documents'}, and the data has "
            f"{sorted(fields) or 'none'}; prepare the data with it, or name others in network.encoder"
        )
    return fields[name]


class CrossEncoder(Encoder):
    """`[BERT(query, document), hidden layers(features)]` (SUN23, section 2.1).

    A document's embedding depends on the document and its query only. At inference documents are embedded in parts of
    at most `TOKENS_AT_ONCE` tokens.

    Raises:
        InputError: the config has no vocabulary.
    """

    def __init__(self, config: "CrossEncoderConfig", numeric_F: Tensor, cardinalities: Sequence[int]) -> None:
        super().__init__()
        if config.vocabulary is None:
            raise InputError("encoder.vocabulary is empty: a cross_encoder needs data with token fields")
        self.config: CrossEncoderConfig = config
        self.bert = Bert(config.bert, config.vocabulary.size)
        self.width = config.bert.width
        self.features, self.wide = None, nn.Sequential()
        if config.features is not None:
            self.features = FeatureEmbedding(numeric_F, cardinalities, config.embedding)
            self.wide = hidden_layers(
                self.features.width, config.features, activate="relu", dropout=config.bert.dropout
            )
            self.width += config.features[-1]

    def forward(self, x_NF: Tensor) -> Tensor:
        """Not supported; call `embed`."""
        raise NotImplementedError("a cross-encoder reads the tokens of a batch; call embed")

    def embed(self, x_NF: Tensor, groups: QueryGroups) -> Tensor:
        """Embeddings [N, D] from transformed features and the tokens of the same documents."""
        text_ND = self._embed_text(self.pairs(groups))
        if self.features is None:
            return text_ND
        return torch.cat([text_ND, self.wide(self.features(x_NF))], dim=1)

    def pairs(self, groups: QueryGroups) -> Pairs:
        """The token sequences of all documents."""
        return _pairs_of(groups, self.config)

    def _embed_text(self, pairs: Pairs) -> Tensor:
        values_N1, parts = layout(pairs.offsets_N1).offsets_Q1, []
        for first, last in pairwise([0, len(values_N1) - 1] if torch.is_grad_enabled() else _cuts(values_N1)):
            begin, end = values_N1[[first, last]].tolist()
            offsets_M1 = registered_offsets(values_N1[first : last + 1] - begin, pairs.ids_T.device)
            h_TD = self.bert(pairs.ids_T[begin:end], pairs.types_T[begin:end], offsets_M1)
            parts.append(self.bert.pool(h_TD, offsets_M1))
        return torch.cat(parts)


class CrossEncoderConfig(EncoderSettings):
    """A BERT over query and document, joined with the projected dense features ("wide and deep").

    Source: SUN23, section 2.1.
    Proof: transformers' `BertModel`; a loop over documents.
    """

    kind: Literal["cross_encoder"] = "cross_encoder"
    encoder: ClassVar = CrossEncoder
    bert: BertConfig = BertConfig()
    """Sizes of the transformer; those of `network.initial` replace them."""
    query: FieldNames = ("query",)
    """Token fields of the query, in order."""
    document: FieldNames = ("title", "body")
    """Token fields of the document, in order."""
    max_tokens: int = Field(128, ge=4, le=1_000_000)
    """Tokens that it reads of a pair, with [CLS] and a [SEP] after each field. Longer pairs are cut from the end of the
    last field, then of the field before it, and of the query last; the special tokens stay."""
    features: Sizes | None = (64,)
    """Sizes of the hidden layers that project the dense features; empty reads the text alone."""
    vocabulary: TokenNumbers | None = None
    """The vocabulary of the tokens; empty takes that of the training data."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        fields = (*self.query, *self.document)
        if self.max_tokens > self.bert.positions:
            raise ValueError(f"max_tokens: {self.max_tokens} is above bert.positions, {self.bert.positions}")
        if self.max_tokens < 2 + len(fields):
            raise ValueError(f"max_tokens: {self.max_tokens} leaves no room for text beside {1 + len(fields)} specials")
        if len(set(fields)) < len(fields):
            raise ValueError("a token field is named twice in query and document")
        return self

    @property
    def reads_tokens(self) -> TokenFields:
        return TokenFields(self.query, self.document)


def _cuts(offsets_N1: NDArray[np.int64]) -> list[int]:
    """Bounds of runs of documents, each of at most `TOKENS_AT_ONCE` tokens or a single document."""
    last, cuts = len(offsets_N1) - 1, [0]
    while cuts[-1] < last:
        limit = offsets_N1[cuts[-1]] + TOKENS_AT_ONCE
        fitting = int(offsets_N1.searchsorted(limit, side="right")) - 1
        cuts.append(max(fitting, cuts[-1] + 1))
    return cuts if last else [0, 0]
