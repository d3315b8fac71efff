"""Oversampling: groups are served as often as configured, for any workers and any layout of files."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from dataset_columns import add_column

from ltrscale import config
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.errors import InputError

Make = Callable[..., Any]
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
