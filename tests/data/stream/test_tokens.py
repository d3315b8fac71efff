"""Token lists in streams: they follow their queries and documents, and cost nothing where no model reads them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
import torch
from dataset_columns import add_column
from token_columns import BODY, FIELDS, SIZE, SPECIAL, TITLE, add_tokens, check, lists_of, text

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.dataset.tokens import LISTS, Vocabulary, lengths_of
from ltrscale.data.stream.batches import GroupStream, Position, StreamConfig, iterate
from ltrscale.data.stream.memory import Memory
from ltrscale.data.stream.readers import RowGroupReader
from ltrscale.data.stream.windows import Decoder
from ltrscale.errors import InputError

Make = Callable[..., Any]
LENGTHS = {"a": [[3, 1], [4, 2, 2], [1]], "b": [[5], [1, 3], [2, 2]]}
VOCABULARY = Vocabulary(size=SIZE, special=SPECIAL)
ALL = {"query": ["words"], "document": ["title", "body"]}


@pytest.fixture(scope="module")
def texts(make_dataset: Make) -> str:
    made = make_dataset(LENGTHS, is_labelled=lambda gid: gid % 3 != 1)
    add_tokens(made.url, [length for period in LENGTHS.values() for group in chain(period) for length in group])
    return str(made.url)


def choose(url: str, *, labelled: bool = False) -> Selection:
    return select(Split(data=(url,)), labelled=labelled)


def steps(stream: GroupStream, epoch: int = 0, start: Any = None) -> list[QueryGroups]:
    return [b for step in stream.epoch(epoch, start) for b in step.micro_batches.values() if b is not None]


def same_batch(one: QueryGroups | None, other: QueryGroups | None) -> bool:
    """Whether two micro-batches are equal, bit by bit; None is that of a stream that has run out."""
    if one is None or other is None:
        return one is other
    return all(map(torch.equal, one.tensors(), other.tensors()))


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("repeats", [False, True])
def test_tokens_follow_their_queries_and_documents(
    texts: str, labelled: bool, repeats: bool, read: RowGroupReader
) -> None:
    selection = choose(texts, labelled=labelled).reading(**ALL)
    config = StreamConfig(docs_per_batch=6, streams=2, window=2, steps_per_epoch=20 if repeats else None)
    seen = 0
    for groups in steps(GroupStream(selection, config, reader=read)):
        check(groups)
        seen += groups.n_groups
    assert seen >= selection.n_groups


def test_workers_serve_the_same_batches_and_a_resumed_epoch_goes_on(texts: str) -> None:
    selection = choose(texts).reading(**ALL)
    config = StreamConfig(docs_per_batch=10, streams=2)
    alone = list(GroupStream(selection, config).epoch(0))
    for rank in (0, 1):
        for one, other in zip(alone, GroupStream(selection, config, rank=rank, world=2).epoch(0), strict=False):
            batch, same = one.micro_batches[rank], other.micro_batches[rank]
            assert same_batch(batch, same)
    start = {stream: Position(*position) for stream, position in alone[1].positions.items()}
    rest = list(GroupStream(selection, config).epoch(0, start))
    assert len(rest) == len(alone) - 2
    for one, other in zip(alone[2:], rest, strict=True):
        for stream, batch in one.micro_batches.items():
            again = other.micro_batches[stream]
            assert same_batch(batch, again)


def test_groups_in_memory_keep_their_tokens(texts: str) -> None:
    selection = choose(texts, labelled=True).reading(**ALL)
    memory = Memory(selection)
    stream = GroupStream(selection, StreamConfig(docs_per_batch=6), memory=memory)
    for epoch in range(2):
        for groups in steps(stream, epoch):
            check(groups)
    held = [rows for window in memory.groups.values() for rows in window.tokens.values()]
    assert all(len(rows.ids_T) == rows.lengths_R.sum() for rows in held)


def test_regrouped_documents_keep_their_tokens(texts: str) -> None:
    selection = choose(texts).reading(document=["title", "body"])
    stream = GroupStream(selection, StreamConfig(docs_per_batch=6, regroup=True))
    found = sorted(
        (groups.features_NF[n].tolist(), [lists_of(groups.document_tokens[name])[n] for name in ("title", "body")])
        for groups in steps(stream)
        for n in range(groups.n_documents)
    )
    plain = sorted(
        (groups.features_NF[n].tolist(), [lists_of(groups.document_tokens[name])[n] for name in ("title", "body")])
        for groups in iterate(selection)
        for n in range(groups.n_documents)
    )
    assert found == plain
    with pytest.raises(InputError, match="regroup mixes the documents of queries, whose texts"):
        GroupStream(choose(texts).reading(**ALL), StreamConfig(regroup=True))


def test_a_model_without_tokens_reads_no_column_of_them(texts: str) -> None:
    plain, reading = (Decoder(selection).columns for selection in (choose(texts), choose(texts).reading(**ALL)))
    columns = {column for field in FIELDS for column in field.columns}
    assert not columns & {*plain}
    assert columns < {*reading}
    assert {*Decoder(choose(texts).reading(document=["body"])).columns} - {*plain} == {*BODY.columns}
    (groups,) = iterate(choose(texts))
    assert not groups.query_tokens
    assert not groups.document_tokens


def test_a_field_that_is_not_there_is_named(texts: str, make_dataset: Make) -> None:
    with pytest.raises(InputError, match="no tokens 'titel' of each document; did you mean 'title'"):
        choose(texts).reading(document=["titel"])
    plain = make_dataset(LENGTHS, seed=2).url
    with pytest.raises(InputError, match="no tokens 'title' of each document; there are none of one vocabulary"):
        choose(plain).reading(document=["title"])
    both = select(Split(data=(texts, plain)), labelled=False)
    assert both.token_fields == ()


BAD = {
    "a token outside the vocabulary": (
        TITLE.column,
        lambda gid: [SIZE] * (gid + 1),
        rf"token {SIZE} is not in the vocabulary",
    ),
    "a negative token": (TITLE.column, lambda gid: [-1] * (gid + 1), "token -1 is not in the vocabulary"),
    "a row without a list": (TITLE.column, lambda _: None, "a list of int32 in every row"),
    "a length too many": (lengths_of(TITLE.column), lambda _: [1] * 3, "one list of tokens for each document"),
    "lengths of other tokens": (lengths_of(TITLE.column), lambda _: [7], "do not add up"),
}


@pytest.mark.parametrize("name", BAD)
def test_columns_that_do_not_fit_are_named(name: str, make_dataset: Make) -> None:
    column, value, message = BAD[name]
    made = make_dataset({"a": [[1, 1]]}, seed=3)
    lists = {gid: text(TITLE, gid, 0) for gid in made.groups}
    columns = {TITLE.column: lists.__getitem__, lengths_of(TITLE.column): lambda gid: [len(lists[gid])]}
    for each, known in columns.items():
        add_column(made.url, each, LISTS, value if each == column else known)
    selection = choose(made.url)
    with_title = replace(selection, tokens=(TITLE,), vocabulary=VOCABULARY)
    with pytest.raises(InputError, match=rf"column 'document_tokens_title' cannot be used: .*{message}"):
        list(iterate(with_title))


def test_a_column_of_another_type_is_named(make_dataset: Make) -> None:
    made = make_dataset({"a": [[1, 1]]}, seed=4)
    for column in TITLE.columns:
        add_column(made.url, column, pa.list_(pa.int64()), lambda _: [1])
    selection = replace(choose(made.url), tokens=(TITLE,), vocabulary=VOCABULARY)
    with pytest.raises(InputError, match=r"column 'document_tokens_title' cannot be used: it is list<"):
        list(iterate(selection))
