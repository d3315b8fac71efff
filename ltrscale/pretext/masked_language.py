"""Masked language modelling: restore hidden tokens of query and document, one value per hidden token.

Shapes: N documents, T tokens of all sequences, M hidden tokens, D embedding, V tokens of the vocabulary.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ltrscale.models.bert import initialise
from ltrscale.models.cross_encoder import CrossEncoder, Pairs, TokenNumbers
from ltrscale.models.encoder import Encoder
from ltrscale.pretext.augment import Draw
from ltrscale.pretext.objective import AddedModules, Objective, Pretrainer

MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that become [MASK] and a random token; the others stay as they are (Devlin et al.)."""


class MaskedLanguageConfig(Objective):
    """Masked language modelling: restore hidden tokens of query and document from the others.

    Source: Devlin et al. 2019, section 3.1.
    Proof: loop; frequencies of the draws.
    """

    kind: Literal["masked_language"] = "masked_language"
    reads_tokens: ClassVar[bool] = True
    rate: float = Field(0.15, gt=0, le=1)
    """Share of the tokens of queries and documents to restore. Of these 80% become [MASK], 10% a random token, and 10%
    stay."""

    def added_modules(self, encoder: Encoder, numeric_F: Tensor, cardinalities: Sequence[int]) -> AddedModules:  # noqa: ARG002
        """A decoder of tokens; no projector."""
        assert isinstance(encoder, CrossEncoder)
        return AddedModules(decoder=_TokenDecoder(encoder.config.bert.width, encoder.bert.tokens.num_embeddings))

    def summed(self, net: Pretrainer, x_NF: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The summed loss of the hidden tokens, and their number."""
        encoder = net.encoder
        assert isinstance(encoder, CrossEncoder)
        assert isinstance(net.decoder, _TokenDecoder)
        assert draw.groups is not None
        losses_M, there_M = _masked_language(
            encoder, net.decoder, encoder.pairs(draw.groups), draw.generator, rate=self.rate
        )
        return losses_M.sum(), there_M.sum()


class _TokenDecoder(nn.Module):
    """BERT's head: `norm(gelu(linear(h)))` times the transposed token embedding, plus a bias for each token."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.dense.apply(initialise)

    def forward(self, h_MD: Tensor, tokens_VD: Tensor) -> Tensor:
        """Logits [M, V] of tokens; `tokens_VD` is the encoder's embedding (tied weights)."""
        logits_MV: Tensor = F.linear(self.norm(F.gelu(self.dense(h_MD))), tokens_VD, self.bias)
        return logits_MV


class _Hidden(NamedTuple):
    """Sequences with hidden tokens."""

    ids_T: Tensor
    rows_M: Tensor
    """Places of the tokens to restore."""
    there_M: Tensor
    """True where there is such a token; only a GPU has spare places."""


def _hide(pairs: Pairs, vocabulary: TokenNumbers, generator: torch.Generator, *, rate: float) -> _Hidden:
    """Hide tokens of texts, each at this rate; a GPU has spare places, so it need not report their number."""
    chosen_T, how_T = torch.rand(2, len(pairs.ids_T), generator=generator, device=pairs.ids_T.device)
    random_T = torch.randint(vocabulary.size, how_T.shape, generator=generator, device=how_T.device)
    hidden_T = pairs.text_T & (chosen_T < rate)
    kept_T = torch.where(how_T < MASKED + RANDOM, random_T, pairs.ids_T)
    ids_T = torch.where(hidden_T, torch.where(how_T < MASKED, vocabulary.mask, kept_T), pairs.ids_T)
    if hidden_T.device.type == "cpu":
        rows_M = hidden_T.nonzero()[:, 0]
        return _Hidden(ids_T, rows_M, torch.ones_like(rows_M, dtype=torch.bool))
    n = len(hidden_T)
    places = min(n, math.ceil(n * rate + 8 * math.sqrt(n * rate)) + 8)
    number_T = torch.where(hidden_T, hidden_T.cumsum(0) - 1, places).clamp_(max=places)  # without a place: last
    rows_M = torch.zeros(places + 1, dtype=torch.int64, device=hidden_T.device)
    rows_M = rows_M.scatter_(0, number_T, torch.arange(n, device=hidden_T.device))[:-1]
    return _Hidden(ids_T, rows_M, torch.arange(places, device=hidden_T.device) < hidden_T.sum())


def _masked_language(
    encoder: CrossEncoder, decoder: _TokenDecoder, pairs: Pairs, generator: torch.Generator, *, rate: float
) -> tuple[Tensor, Tensor]:
    """Cross entropies of hidden tokens [M] (Devlin et al. 2019, section 3.1), and True where a place has a token."""
    assert encoder.config.vocabulary is not None
    ids_T, rows_M, there_M = _hide(pairs, encoder.config.vocabulary, generator, rate=rate)
    h_TD = encoder.bert(ids_T, pairs.types_T, pairs.offsets_N1)
    logits_MV = decoder(h_TD.index_select(0, rows_M), encoder.bert.tokens.weight)
    return F.cross_entropy(logits_MV.float(), pairs.ids_T[rows_M], reduction="none") * there_M, there_M
