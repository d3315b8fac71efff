"""Small batches of query groups with tokens, and small cross-encoders that read them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ltrscale.batch import QueryGroups, Tokens, to_offsets
from ltrscale.models.cross_encoder import CrossEncoder, CrossEncoderConfig, TokenNumbers
from ltrscale.models.features import FeatureTransform, TransformConfig, fit_transform

VOCABULARY = TokenNumbers(size=60, cls=2, sep=3, mask=4)
SMALL: dict[str, Any] = {
    "kind": "cross_encoder",
    "bert": {"layers": 2, "width": 8, "heads": 2, "positions": 40, "dropout": 0.0},
    "max_tokens": 16,
    "features": [6],
    "vocabulary": VOCABULARY.model_dump(),
}


def token_lists(rows: int, longest: int, generator: torch.Generator) -> Tokens:
    """Random lists of no to `longest` tokens, none of them special."""
    lengths_R = torch.randint(0, longest + 1, (rows,), generator=generator)
    ids_T = torch.randint(5, VOCABULARY.size, (int(lengths_R.sum()),), generator=generator)
    return Tokens(ids_T.int(), to_offsets(lengths_R))


def text_groups(lengths: Sequence[int] = (5, 1, 6, 4), seed: int = 0) -> QueryGroups:
    """Groups with labels, positions, three numbers and a category, and a query, titles and bodies."""
    generator, n = torch.Generator().manual_seed(seed), sum(lengths)
    x_NF = torch.randn(n, 4, generator=generator)
    x_NF[:, 3] = torch.randint(0, 3, (n,), generator=generator)
    places = [torch.arange(1.0, length + 1) for length in lengths]
    return QueryGroups(
        x_NF,
        to_offsets(torch.tensor(lengths)),
        torch.randint(0, 3, (n,), generator=generator).float(),
        torch.arange(len(lengths)),
        torch.rand(n, generator=generator) + 0.5,
        torch.cat(places),
        query_tokens={"query": token_lists(len(lengths), 4, generator)},
        document_tokens={"title": token_lists(n, 5, generator), "body": token_lists(n, 15, generator)},
    ).checked()


def text_transform() -> FeatureTransform:
    """A transform of the features of `text_groups`."""
    kinds: Any = ["numeric"] * 3 + ["categorical"]
    return fit_transform([text_groups().features_NF], kinds, TransformConfig(numeric="standard"))


def text_config(**settings: Any) -> CrossEncoderConfig:
    """The settings of a small cross-encoder."""
    return CrossEncoderConfig.model_validate({**SMALL, **settings})


def text_encoder(**settings: Any) -> CrossEncoder:
    """A small cross-encoder whose parameters are not at their initial values."""
    transform = text_transform()
    torch.manual_seed(0)
    encoder = text_config(**settings).build(transform.numeric_F, transform.cardinalities)
    assert isinstance(encoder, CrossEncoder)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return encoder


def lists_of(tokens: Tokens) -> list[list[int]]:
    """Token lists as plain lists."""
    return [part.tolist() for part in tokens.ids_T.split(tokens.lengths_R.tolist())]


def embedded(encoder: CrossEncoder, groups: QueryGroups) -> Tensor:
    """The embeddings of a batch."""
    return encoder.embed(text_transform()(groups.features_NF), groups)
