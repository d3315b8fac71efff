"""Tokens follow their queries and documents; groups in memory give the same steps; others are repeated as asked."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from dataset_columns import add_column
from token_columns import BODY, FIELDS, SIZE, SPECIAL, TITLE, add_tokens, check, lists_of, text

from ltrscale import config
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.columns import LISTS, Vocabulary, lengths_of
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, MicroBatches, StreamConfig, iterate
from ltrscale.data.stream.decoder import Decoder, Memory, memory_for
from ltrscale.data.stream.readers import RowGroupReader
from ltrscale.data.stream.windows import Position
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


def choose_tokens(url: str, *, labelled: bool = False) -> Selection:
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
    selection = choose_tokens(texts, labelled=labelled).reading(**ALL)
    config = StreamConfig(docs_per_batch=6, streams=2, window=2, steps_per_epoch=20 if repeats else None)
    seen = 0
    for groups in steps(GroupStream(selection, config, reader=read)):
        check(groups)
        seen += groups.n_groups
    assert seen >= selection.n_groups


def test_workers_serve_the_same_batches_and_a_resumed_epoch_goes_on(texts: str) -> None:
    selection = choose_tokens(texts).reading(**ALL)
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
    selection = choose_tokens(texts, labelled=True).reading(**ALL)
    memory = Memory(selection)
    stream = GroupStream(selection, StreamConfig(docs_per_batch=6), memory=memory)
    for epoch in range(2):
        for groups in steps(stream, epoch):
            check(groups)
    held = [lists for window in memory.groups.values() for lists in window.tokens.values()]
    assert all(len(lists.values) == len(lists.flatten()) for lists in held)


def test_regrouped_documents_keep_their_tokens(texts: str) -> None:
    selection = choose_tokens(texts).reading(document=["title", "body"])
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
        GroupStream(choose_tokens(texts).reading(**ALL), StreamConfig(regroup=True))


def test_a_model_without_tokens_reads_no_column_of_them(texts: str) -> None:
    plain, reading = (
        Decoder(selection).columns for selection in (choose_tokens(texts), choose_tokens(texts).reading(**ALL))
    )
    columns = {column for field in FIELDS for column in field.columns}
    assert not columns & {*plain}
    assert columns < {*reading}
    assert {*Decoder(choose_tokens(texts).reading(document=["body"])).columns} - {*plain} == {*BODY.columns}
    (groups,) = iterate(choose_tokens(texts))
    assert not groups.query_tokens
    assert not groups.document_tokens


def test_a_field_that_is_not_there_is_named(texts: str, make_dataset: Make) -> None:
    with pytest.raises(InputError, match="no tokens 'titel' of each document; did you mean 'title'"):
        choose_tokens(texts).reading(document=["titel"])
    plain = make_dataset(LENGTHS, seed=2).url
    with pytest.raises(InputError, match="no tokens 'title' of each document; there are none of one vocabulary"):
        choose_tokens(plain).reading(document=["title"])
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
    selection = choose_tokens(made.url)
    with_title = replace(selection, tokens=(TITLE,), vocabulary=VOCABULARY)
    with pytest.raises(InputError, match=rf"column 'document_tokens_title' cannot be used: .*{message}"):
        list(iterate(with_title))


def test_a_column_of_another_type_is_named(make_dataset: Make) -> None:
    made = make_dataset({"a": [[1, 1]]}, seed=4)
    for column in TITLE.columns:
        add_column(made.url, column, pa.list_(pa.int64()), lambda _: [1])
    selection = replace(choose_tokens(made.url), tokens=(TITLE,), vocabulary=VOCABULARY)
    with pytest.raises(InputError, match=r"column 'document_tokens_title' cannot be used: it is list<"):
        list(iterate(selection))


EPOCHS = 3


@pytest.fixture(scope="module")
def made_memory(make_dataset: Make) -> Any:
    """Row groups of several files with a third of their groups unlabelled, weights, and a column of repeats."""
    rng = np.random.default_rng(0)
    row_groups = [rng.integers(1, 20, rng.integers(1, 9)).tolist() for _ in range(30)]
    periods = {"a": row_groups[:13], "b": row_groups[13:14], "c": row_groups[14:]}
    made_memory = make_dataset(periods, is_labelled=lambda gid: gid % 3 > 0, has_weights=lambda gid: gid % 2 > 0)
    add_column(made_memory.url, "meta_times", pa.float64(), lambda gid: (0.0, 1.0, 2.5)[gid % 3])
    return made_memory


class Counting:
    """A reader that counts the row groups that it reads."""

    def __init__(self, read: RowGroupReader) -> None:
        self.read, self.counts = read, Counter[RowGroup]()

    def __call__(self, row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
        self.counts.update(row_groups)
        return self.read(row_groups, columns)


def choose(made_memory: Any, fraction: float) -> Selection:
    return select(Split(data=(made_memory.url,), labelled_fraction=fraction), labelled=True)


def assert_equal(one: MicroBatches, other: MicroBatches) -> None:
    assert one.positions == other.positions
    assert one.micro_batches.keys() == other.micro_batches.keys()
    for c, groups in one.micro_batches.items():
        check_batches(groups, other.micro_batches[c])


def check_batches(one: QueryGroups | None, other: QueryGroups | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.weights_N is not None
        for a, b in zip(one.tensors(), other.tensors(), strict=True):
            assert torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:.* is deprecated:DeprecationWarning:ray\.data\.context")
@pytest.mark.parametrize(("fraction", "repeat"), [(0.2, None), (1.0, {"by": "meta_times"})])
def test_steps_are_the_same_from_memory_and_each_row_group_is_read_once(
    made_memory: Any, read: RowGroupReader, fraction: float, repeat: dict[str, str] | None
) -> None:
    selection, world = choose(made_memory, fraction), 2
    config = StreamConfig.model_validate({"docs_per_batch": 90, "streams": 3, "window": 4, "repeat": repeat})
    for rank in range(world):
        reader, memory = Counting(read), Memory(selection)
        stream = GroupStream(selection, config, rank=rank, world=world, reader=reader, memory=memory)
        before = reader.counts.copy()  # of the survey of repeats
        anew = GroupStream(selection, config, rank=rank, world=world)
        for epoch in range(EPOCHS):
            for one, other in zip(stream.epoch(epoch), anew.epoch(epoch), strict=True):
                assert_equal(one, other)
        counts = reader.counts - before
        assert set(counts.values()) == {1}
        assert counts.keys() == memory.groups.keys() <= set(selection.row_groups)
        for _ in stream.epoch(EPOCHS):
            pass
        kept = sum(len(groups.offsets_Q1) - 1 for groups in memory.groups.values())
        assert kept == sum(
            int(selection.kept(row_group).sum()) for row_group in memory.groups
        )  # no more than is served


def test_a_run_resumes_into_an_empty_memory_at_any_step(made_memory: Any) -> None:
    selection, config = choose(made_memory, 0.5), StreamConfig(docs_per_batch=60, streams=2, window=3)
    whole = list(GroupStream(selection, config).epoch(1))
    assert len(whole) > 4
    for done, step in enumerate(whole):
        positions = {int(c): Position(*p) for c, p in json.loads(json.dumps(step.positions)).items()}
        memory = Memory(selection)
        stream = GroupStream(selection, config, memory=memory)
        rest = list(stream.epoch(1, positions))
        for one, other in zip(rest, whole[done + 1 :], strict=True):
            assert_equal(one, other)
        for one, other in zip(stream.epoch(1), whole, strict=True):  # half of it from memory
            assert_equal(one, other)


def test_what_is_done_to_a_batch_does_not_reach_the_memory(made_memory: Any) -> None:
    selection = choose(made_memory, 1.0)
    memory, expected = Memory(selection), list(iterate(selection, docs_per_batch=50))
    for _ in range(2):
        for one, other in zip(iterate(selection, docs_per_batch=50, memory=memory), expected, strict=True):
            check_batches(one, other)
            for values in one.tensors():
                values.zero_()


def test_the_memory_keeps_no_buffer_of_a_table(made_memory: Any) -> None:
    selection = choose(made_memory, 0.2)
    memory = Memory(selection)
    held = sum(groups.n_documents for groups in iterate(selection, memory=memory))
    owned = [view for groups in memory.groups.values() for view in groups.features]
    assert all(view.base is None for view in owned)
    assert sum(map(len, owned)) == held * len(selection.features)


def test_groups_without_labels_and_groups_above_the_budget_are_not_kept(made_memory: Any) -> None:
    labelled = choose(made_memory, 1.0)
    gigabytes = 4e-9 * labelled.n_documents * len(labelled.features)
    assert memory_for(labelled, gigabytes * 1.001) is not None
    assert memory_for(labelled, gigabytes * 0.999) is None
    assert memory_for(labelled, 0) is None
    assert memory_for(select(Split(data=(made_memory.url,)), labelled=False), 1e9) is None


CLASSES = ("high", "mid", None, "low")
TIMES = (0.0, 1.0, 2.5, 0.5, 3.0)


def class_of(gid: int) -> str | None:
    return CLASSES[gid % len(CLASSES)]


def times_of(gid: int) -> float:
    return TIMES[gid % len(TIMES)]


def lengths(row_groups: int, groups: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 7, groups).tolist() for _ in range(row_groups)]


@pytest.fixture(scope="module")
def made(make_dataset: Make) -> Any:
    """100 groups, a third unlabelled, with columns of classes, repeat counts and codes."""
    made = make_dataset({"a": lengths(12, 5), "b": lengths(8, 5)}, is_labelled=lambda gid: gid % 3 > 0)
    add_column(made.url, "meta_frequency", pa.string(), class_of)
    add_column(made.url, "meta_times", pa.float64(), times_of)
    add_column(made.url, "meta_code", pa.int32(), lambda gid: gid % 4)
    return made


def stream(
    made: Any, repeat: dict[str, Any], *, labelled: bool = False, fraction: float = 1.0, **options: Any
) -> GroupStream:
    where = {key: options.pop(key) for key in ("rank", "world") if key in options}
    settings = config.validate(StreamConfig, {"docs_per_batch": 40, "repeat": repeat, **options}, "test")
    return GroupStream(
        select(Split(data=(made.url,), labelled_fraction=fraction), labelled=labelled), settings, **where
    )


def served(stream: GroupStream, epoch: int = 0) -> list[list[list[int]]]:
    """The gids of each micro-batch, by step and stream."""
    steps = []
    for step in stream.epoch(epoch):
        micro_batches = step.micro_batches.values()
        assert all(groups is None or groups.ids_Q is not None for groups in micro_batches)
        steps.append([groups.ids_Q.tolist() if groups else [] for groups in micro_batches])
    return steps


def counts(stream: GroupStream, epoch: int = 0) -> Counter[int]:
    return Counter(gid for step in served(stream, epoch) for gids in step for gid in gids)


@pytest.mark.parametrize(("streams", "window"), [(1, 100), (3, 1), (4, 2)])
@pytest.mark.parametrize("labelled", [False, True])
def test_groups_of_a_class_are_served_as_often_as_it_says_and_others_once(
    made: Any, labelled: bool, streams: int, window: int
) -> None:
    repeat = {"by": "meta_frequency", "times": {"high": 3, "low": 0}}
    repeated = stream(made, repeat, labelled=labelled, streams=streams, window=window)
    times = {"high": 3, "low": 0}
    gids = made.labelled if labelled else list(made.groups)
    expected = {gid: times.get(class_of(gid) or "", 1) for gid in gids}
    found = counts(repeated)
    assert found == Counter({gid: n for gid, n in expected.items() if n})
    assert repeated.groups_per_epoch == sum(expected.values()) == found.total()


@pytest.mark.slow
def test_a_column_of_numbers_says_itself_how_often(made: Any) -> None:
    repeated = stream(made, {"by": "meta_times"})
    totals: Counter[int] = Counter()
    for epoch in range(60):
        found = counts(repeated, epoch)
        totals += found
        for gid in made.groups:
            assert int(times_of(gid)) <= found[gid] <= int(np.ceil(times_of(gid)))
    assert repeated.groups_per_epoch == sum(map(times_of, made.groups)) == 140
    assert totals.total() / 60 == pytest.approx(140, abs=2.5)  # six standard deviations
    assert all(totals[gid] / 60 == pytest.approx(times_of(gid), abs=0.4) for gid in made.groups)
    documents = sum(len(group.features) * times_of(gid) for gid, group in made.groups.items())
    assert repeated.documents_per_epoch == pytest.approx(documents, rel=0.1)  # an estimate


def test_whole_numbers_name_classes_too(made: Any) -> None:
    found = counts(stream(made, {"by": "meta_code", "times": {2: 4}}))
    assert found == Counter({gid: 4 if gid % 4 == 2 else 1 for gid in made.groups})


def test_repeats_are_served_whole_and_apart(made: Any) -> None:
    batches = [
        groups
        for step in stream(made, {"by": "meta_frequency", "times": {"high": 3}}, window=100).epoch(0)
        for groups in step.micro_batches.values()
        if groups
    ]
    gids = [gid for groups in batches for gid in groups.ids_Q.tolist()]  # type: ignore[union-attr]
    assert sum(a == b for a, b in itertools.pairwise(gids)) < 6  # shuffled like other groups
    for groups in batches:
        for q, gid in enumerate(groups.ids_Q.tolist()):  # type: ignore[union-attr]
            rows = slice(*groups.offsets_Q1[q : q + 2].tolist())
            assert np.array_equal(groups.features_NF[rows].numpy(), made.groups[gid].features)


def test_times_depend_on_seed_epoch_and_group_only(made: Any, make_dataset: Make) -> None:
    repeat = {"by": "meta_times"}
    first = counts(stream(made, repeat))
    for other in ({"streams": 4, "window": 1}, {"docs_per_batch": 7}, {"shuffle": False}):
        assert counts(stream(made, repeat, **other)) == first
    assert counts(stream(made, repeat), epoch=1) != first
    assert counts(stream(made, repeat, seed=1)) != first
    apart = make_dataset({"z": lengths(1, 100)}, seed=3)
    add_column(apart.url, "meta_times", pa.float32(), times_of)
    assert counts(stream(apart, repeat)) == first


@pytest.mark.parametrize("world", [2, 3])
def test_the_global_batches_do_not_depend_on_the_workers(made: Any, world: int) -> None:
    repeat, options = {"by": "meta_times"}, {"streams": 4, "window": 2, "labelled": True, "fraction": 0.8}
    whole = served(stream(made, repeat, **options))
    merged: list[list[list[int]]] = [[[] for _ in range(4)] for _ in whole]
    for rank in range(world):
        for step, found in zip(merged, served(stream(made, repeat, rank=rank, world=world, **options)), strict=False):
            for c, gids in zip(range(rank, 4, world), found, strict=True):
                step[c] = gids
    assert merged == whole


def test_resuming_at_any_step_equals_the_uninterrupted_run(made: Any) -> None:
    repeated = stream(made, {"by": "meta_times"}, streams=2, window=2)
    whole = served(repeated, 5)
    positions = [step.positions for step in repeated.epoch(5)]
    for done, start in enumerate(positions, 1):
        rest = [
            [g.ids_Q.tolist() if g else [] for g in step.micro_batches.values()]  # type: ignore[union-attr]
            for step in repeated.epoch(5, start)
        ]
        assert rest == whole[done:]


def test_windows_of_which_nothing_is_served_are_skipped(make_dataset: Make) -> None:
    made = make_dataset({"a": [[2, 3], [4, 1], [1], [2, 2], [3]]})
    add_column(made.url, "meta_times", pa.int8(), lambda gid: int(gid in (2, 5)))
    for streams in (1, 2, 5):
        repeated = stream(made, {"by": "meta_times"}, streams=streams, window=1, shuffle=False)
        assert counts(repeated) == Counter([2, 5])
        assert repeated.groups_per_epoch == 2
    assert served(stream(made, {"by": "meta_times"}, window=1, shuffle=False)) == [[[2, 5]]]


def test_repeated_groups_are_regrouped_with_their_documents(made: Any) -> None:
    repeat = {"by": "meta_frequency", "times": {"high": 2}}
    rows: Counter[bytes] = Counter()
    for step in stream(made, repeat, regroup=True).epoch(0):
        for groups in filter(None, step.micro_batches.values()):
            rows.update(row.tobytes() for row in groups.features_NF.numpy())
    expected = {
        row.tobytes(): 2 if class_of(gid) == "high" else 1 for gid, g in made.groups.items() for row in g.features
    }
    assert rows == Counter(expected)


@pytest.mark.parametrize(
    ("repeat", "message"),
    [
        ({"by": "meta_frequenci"}, r"part-00000.*no column 'meta_frequenci'; the nearest is 'meta_frequency'"),
        (
            {"by": "meta_frequency"},
            r"part-00000.*row group 0: column 'meta_frequency' is string and no number; say under",
        ),
        ({"by": "meta_frequency", "times": {"hihg": 2}}, r"has no value 'hihg'; the nearest is 'high'"),
        ({"by": "meta_code", "times": {0: 0, 1: 0, 2: 0, 3: 0}}, r"no query group is served; raise some of its times"),
        ({"by": "query_id"}, "repeat.by"),
        ({"by": "meta_code", "times": {0: -1}}, r"repeat\.times\.0.*greater than or equal to 0"),
        ({"by": "meta_code", "times": {0: 1001}}, r"repeat\.times\.0.*less than or equal to 1000"),
    ],
)
def test_what_cannot_be_used_is_named_before_anything_is_served(
    made: Any, repeat: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        stream(made, repeat)


@pytest.mark.parametrize("value", [None, -0.5, float("nan"), 1e6])
def test_a_number_that_is_no_repeat_count_is_named(make_dataset: Make, value: float | None) -> None:
    made = make_dataset({"a": [[1, 1], [1, 1]]})
    add_column(made.url, "meta_times", pa.float64(), lambda gid: value if gid == 3 else 1.0)
    message = rf"part-00000.*row group 1: column 'meta_times' of query group 3 is {value}; it must be from 0 to 1,000"
    with pytest.raises(InputError, match=message):
        stream(made, {"by": "meta_times"})


def test_a_data_set_without_any_such_column_says_how_to_get_one(make_dataset: Make) -> None:
    with pytest.raises(InputError, match=r"the data set has no meta_\* column; prepare it with `columns.meta`"):
        stream(make_dataset({"a": [[1]]}), {"by": "meta_times"})
