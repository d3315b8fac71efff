"""Adds known token lists to small data sets: every list differs from every other."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from dataset_columns import add_column

from ltrscale import storage
from ltrscale.batch import QueryGroups, Tokens
from ltrscale.data.dataset.columns import LISTS, TokenField, Vocabulary, lengths_of
from ltrscale.data.dataset.manifest import open_dataset

WORDS = TokenField(name="words", of="query", max_tokens=4)
TITLE = TokenField(name="title", of="document", max_tokens=3)
BODY = TokenField(name="body", of="document", max_tokens=3)
FIELDS = (WORDS, TITLE, BODY)
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
SIZE = 100_000


def words(gid: int) -> list[int]:
    """The tokens of a query."""
    return [10 * gid + i for i in range(gid % 5)]


def text(field: TokenField, gid: int, document: int) -> list[int]:
    """The tokens of a document."""
    first = 1000 * gid + 10 * document + (5 if field == BODY else 0)
    return [first + i for i in range((gid + document + len(field.name)) % 4)]


def add_tokens(url: str, lengths: Sequence[int]) -> None:
    """Add three token fields to a data set whose groups have these numbers of documents, by gid."""
    add_column(url, WORDS.column, LISTS, words)
    for field in (TITLE, BODY):
        lists = {gid: [text(field, gid, n) for n in range(length)] for gid, length in enumerate(lengths)}
        flat = {gid: [token for tokens in lists[gid] for token in tokens] for gid in lists}
        add_column(url, field.column, LISTS, flat.__getitem__)
        sizes = {gid: [len(tokens) for tokens in lists[gid]] for gid in lists}
        add_column(url, lengths_of(field.column), LISTS, sizes.__getitem__)
    manifest = open_dataset(url).manifest.replace(tokens=FIELDS, vocabulary=Vocabulary(size=SIZE, special=SPECIAL))
    (Path(url) / storage.MANIFEST).write_text(json.dumps(manifest.model_dump(mode="json")))


def lists_of(tokens: Tokens) -> list[list[int]]:
    """Token lists as plain lists."""
    bounds = tokens.offsets_R1.tolist()
    return [tokens.ids_T[a:b].tolist() for a, b in pairwise(bounds)]


def check(groups: QueryGroups) -> None:
    """Check the tokens of a batch that reads all fields."""
    assert groups.ids_Q is not None
    ids, lengths = groups.ids_Q.tolist(), groups.lengths_Q.tolist()
    assert lists_of(groups.query_tokens["words"]) == [words(gid) for gid in ids]
    for field in (TITLE, BODY):
        expected = [text(field, gid, n) for gid, length in zip(ids, lengths, strict=True) for n in range(length)]
        assert lists_of(groups.document_tokens[field.name]) == expected
