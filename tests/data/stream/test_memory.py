"""Groups that are kept in memory: the same steps as without, and nothing is read twice."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from dataset_columns import add_column

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import RowGroup, Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, MicroBatches, Position, StreamConfig, iterate
from ltrscale.data.stream.memory import Memory, memory_for
from ltrscale.data.stream.readers import RowGroupReader

Make = Callable[..., Any]
EPOCHS = 3


@pytest.fixture(scope="module")
def made(make_dataset: Make) -> Any:
    """Row groups of several files with a third of their groups unlabelled, weights, and a column of repeats."""
    rng = np.random.default_rng(0)
    row_groups = [rng.integers(1, 20, rng.integers(1, 9)).tolist() for _ in range(30)]
    periods = {"a": row_groups[:13], "b": row_groups[13:14], "c": row_groups[14:]}
    made = make_dataset(periods, is_labelled=lambda gid: gid % 3 > 0, has_weights=lambda gid: gid % 2 > 0)
    add_column(made.url, "meta_times", pa.float64(), lambda gid: (0.0, 1.0, 2.5)[gid % 3])
    return made


class Counting:
    """A reader that counts the row groups that it reads."""

    def __init__(self, read: RowGroupReader) -> None:
        self.read, self.counts = read, Counter[RowGroup]()

    def __call__(self, row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
        self.counts.update(row_groups)
        return self.read(row_groups, columns)


def choose(made: Any, fraction: float) -> Selection:
    return select(Split(data=(made.url,), labelled_fraction=fraction), labelled=True)


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


@pytest.mark.filterwarnings(r"ignore:.* is deprecated:DeprecationWarning:ray\.data\.context")
@pytest.mark.parametrize(("fraction", "repeat"), [(0.2, None), (1.0, {"by": "meta_times"})])
def test_steps_are_the_same_from_memory_and_each_row_group_is_read_once(
    made: Any, read: RowGroupReader, fraction: float, repeat: dict[str, str] | None
) -> None:
    selection, world = choose(made, fraction), 2
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
        assert kept == sum(map(selection.served_groups, memory.groups))  # no more than is served


def test_a_run_resumes_into_an_empty_memory_at_any_step(made: Any) -> None:
    selection, config = choose(made, 0.5), StreamConfig(docs_per_batch=60, streams=2, window=3)
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


def test_what_is_done_to_a_batch_does_not_reach_the_memory(made: Any) -> None:
    selection = choose(made, 1.0)
    memory, expected = Memory(selection), list(iterate(selection, docs_per_batch=50))
    for _ in range(2):
        for one, other in zip(iterate(selection, docs_per_batch=50, memory=memory), expected, strict=True):
            check_batches(one, other)
            for values in one.tensors():
                values.zero_()


def test_the_memory_keeps_no_buffer_of_a_table(made: Any) -> None:
    selection = choose(made, 0.2)
    memory = Memory(selection)
    held = sum(groups.n_documents for groups in iterate(selection, memory=memory))
    owned = [view for groups in memory.groups.values() for view in groups.features]
    assert all(view.base is None for view in owned)
    assert sum(map(len, owned)) == held * len(selection.features)


def test_groups_without_labels_and_groups_above_the_budget_are_not_kept(made: Any) -> None:
    labelled = choose(made, 1.0)
    gigabytes = 4e-9 * labelled.n_documents * len(labelled.features)
    assert memory_for(labelled, gigabytes * 1.001) is not None
    assert memory_for(labelled, gigabytes * 0.999) is None
    assert memory_for(labelled, 0) is None
    assert memory_for(select(Split(data=(made.url,)), labelled=False), 1e9) is None
