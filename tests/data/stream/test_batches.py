import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ltrscale import config
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import GID_SPAN, Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, StreamConfig, check_batches, iterate
from ltrscale.data.stream.decoder import Memory
from ltrscale.data.stream.readers import read_direct
from ltrscale.data.stream.windows import Position
from ltrscale.errors import InputError

Make = Callable[..., Any]
Steps = list[dict[int, QueryGroups | None]]


@pytest.fixture(scope="module")
def made(make_dataset: Make) -> Any:
    """Uneven row groups in three files; some groups are much longer than others, a third is unlabelled."""
    rng = np.random.default_rng(0)

    def row_groups(n: int) -> list[list[int]]:
        return [(rng.geometric(0.15, rng.integers(1, 12)) + 30 * (rng.random() < 0.1)).tolist() for _ in range(n)]

    return make_dataset(
        {"a": row_groups(11), "b": row_groups(1), "c": row_groups(17)}, is_labelled=lambda gid: gid % 3 > 0
    )


def choose(made: Any, *, labelled: bool = False, fraction: float = 1.0) -> Selection:
    return select(Split(data=(made.url,), labelled_fraction=fraction), labelled=labelled)


def gids(groups: QueryGroups | None) -> list[int]:
    if groups is None:
        return []
    assert groups.ids_Q is not None
    return groups.ids_Q.tolist()


def global_steps(selection: Selection, settings: StreamConfig, world: int, epoch: int = 0) -> list[list[list[int]]]:
    """The gids of every step's micro-batches, by canonical stream, over all workers."""
    merged: list[list[list[int]]] = []
    for rank in range(world):
        for i, step in enumerate(GroupStream(selection, settings, rank=rank, world=world).epoch(epoch)):
            if i == len(merged):
                merged.append([[] for _ in range(settings.streams)])
            for c, groups in step.micro_batches.items():
                assert c % world == rank
                merged[i][c] = gids(groups)
    return merged


def assert_equal(one: QueryGroups | None, other: QueryGroups | None) -> None:
    if one is None or other is None:
        assert one is other
        return
    for name in ("features_NF", "offsets_Q1", "labels_N", "ids_Q", "weights_N", "positions_N"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


def check_content(groups: QueryGroups, made: Any, *, labelled: bool) -> None:
    for q, gid in enumerate(gids(groups)):
        rows = slice(*groups.offsets_Q1[q : q + 2].tolist())
        assert np.array_equal(groups.features_NF[rows].numpy(), made.groups[gid].features)
        if labelled:
            assert groups.labels_N is not None
            assert np.array_equal(groups.labels_N[rows].numpy(), made.groups[gid].labels)
    assert (groups.labels_N is not None) == labelled


@pytest.mark.slow
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("streams", "window", "budget"), [(1, 1, 1), (1, 8, 40), (3, 2, 204), (4, 100, 300), (7, 3, 1000)]
)
def test_an_epoch_serves_each_group_once_and_whole(
    made: Any, labelled: bool, shuffle: bool, streams: int, window: int, budget: int
) -> None:
    settings = StreamConfig(docs_per_batch=max(budget, streams), streams=streams, window=window, shuffle=shuffle)
    stream = GroupStream(choose(made, labelled=labelled), settings)
    served: list[int] = []
    for step in stream.epoch(3):
        assert list(step.micro_batches) == list(step.positions) == list(range(streams))
        assert any(groups is not None for groups in step.micro_batches.values())
        for groups in filter(None, step.micro_batches.values()):
            check_content(groups, made, labelled=labelled)
            served += gids(groups)
    assert sorted(served) == (made.labelled if labelled else list(made.groups))
    assert stream.groups_per_epoch == len(served)
    if not labelled:  # otherwise an estimate
        assert stream.documents_per_epoch == sum(len(group.features) for group in made.groups.values())


@given(
    streams=st.integers(1, 6),
    window=st.integers(1, 9),
    budget=st.integers(6, 500),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 9),
    labelled=st.booleans(),
)
@settings(max_examples=25, deadline=None)
@pytest.mark.slow
def test_the_global_batches_do_not_depend_on_the_workers(
    made: Any, streams: int, window: int, budget: int, seed: int, epoch: int, labelled: bool
) -> None:
    settings = StreamConfig(docs_per_batch=budget, streams=streams, window=window, seed=seed)
    selection = choose(made, labelled=labelled, fraction=0.8)
    expected = global_steps(selection, settings, 1, epoch)
    assert len({gid for step in expected for gids in step for gid in gids}) == selection.n_groups
    for world in range(2, GroupStream(selection, settings).config.streams + 1):
        assert global_steps(selection, settings, world, epoch) == expected


def test_the_order_changes_with_the_epoch_and_the_seed_only(made: Any) -> None:
    selection = choose(made)
    settings = StreamConfig(docs_per_batch=50, streams=2)
    first = global_steps(selection, settings, 1)
    assert global_steps(choose(made), settings, 1) == first
    assert global_steps(selection, settings, 1, epoch=1) != first
    assert global_steps(selection, settings.replace(seed=1), 1) != first
    still = settings.replace(shuffle=False)
    assert global_steps(selection, still, 1, epoch=1) == global_steps(selection, still, 1)


def test_groups_are_shuffled_within_windows_and_row_groups_between_them(made: Any) -> None:
    selection = choose(made)
    served = [gid for step in global_steps(selection, StreamConfig(docs_per_batch=64, window=4), 1) for gid in step[0]]
    gid_of = itertools.chain.from_iterable([r] * r.groups for r in selection.row_groups)
    row_group = dict(enumerate(gid_of))
    runs = [key for key, _ in itertools.groupby(served, key=lambda gid: row_group[gid])]
    assert len(runs) > 2 * len(selection.row_groups)
    windows = [{row_group[gid] for gid in served[i : i + 5]} for i in range(len(served) - 5)]
    assert max(map(len, windows)) > 2


@pytest.mark.slow
@pytest.mark.parametrize(("streams", "world_before", "world_after"), [(1, 1, 1), (4, 1, 2), (5, 3, 2), (3, 3, 1)])
@pytest.mark.parametrize("labelled", [False, True])
def test_resuming_at_any_step_equals_the_uninterrupted_run(
    made: Any, streams: int, world_before: int, world_after: int, labelled: bool
) -> None:
    settings = StreamConfig(docs_per_batch=70 * streams, streams=streams, window=3, seed=5)
    selection = choose(made, labelled=labelled, fraction=0.7)
    whole = global_run(selection, settings, 1)
    before = [GroupStream(selection, settings, rank=r, world=world_before) for r in range(world_before)]
    runs = [stream.epoch(2) for stream in before]
    positions = dict.fromkeys(range(streams), Position())
    for done in range(len(whole) + 1):
        restored = {int(c): Position(*p) for c, p in json.loads(json.dumps(positions)).items()}
        rest = global_run(selection, settings, world_after, restored)
        assert len(rest) == len(whole) - done
        for one, other in zip(rest, whole[done:], strict=True):
            for c in range(streams):
                assert_equal(one[c], other[c])
        for run in runs:
            step = next(run, None)
            positions |= step.positions if step else {}


def global_run(
    selection: Selection, settings: StreamConfig, world: int, start: dict[int, Position] | None = None
) -> Steps:
    steps: Steps = []
    for rank in range(world):
        for i, step in enumerate(GroupStream(selection, settings, rank=rank, world=world).epoch(2, start)):
            if i == len(steps):
                steps.append(dict.fromkeys(range(settings.streams)))
            steps[i] |= step.micro_batches
    return steps


def test_micro_batches_are_full_across_windows(make_dataset: Make) -> None:
    made = make_dataset({"a": [[1] * 7] * 11})
    sizes = [len(step[0]) for step in global_steps(choose(made), StreamConfig(docs_per_batch=10, window=1), 1)]
    assert sizes == [10] * 7 + [7]


def test_a_micro_batch_takes_what_fits_and_no_less(made: Any) -> None:
    budget = 37
    batches = list(iterate(choose(made), docs_per_batch=budget))
    assert all(batch.n_documents <= budget or batch.n_groups == 1 for batch in batches)
    for batch, following in itertools.pairwise(batches):
        assert batch.n_documents + int(following.lengths_Q[0]) > budget


def test_a_group_above_the_budget_is_alone(make_dataset: Make) -> None:
    made = make_dataset({"a": [[2, 9, 3, 3], [9, 9], [8]]})
    batches = [gids(groups) for groups in iterate(choose(made), docs_per_batch=8)]
    assert batches == [[0], [1], [2, 3], [4], [5], [6]]


def test_iterate_is_file_order(made: Any) -> None:
    for labelled in (False, True):
        batches = list(iterate(choose(made, labelled=labelled), docs_per_batch=100))
        for groups in batches:
            check_content(groups, made, labelled=labelled)
        assert [gid for groups in batches for gid in gids(groups)] == (made.labelled if labelled else list(made.groups))


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.9])
def test_a_labelled_fraction_serves_exactly_the_sample(made: Any, fraction: float) -> None:
    selection = choose(made, labelled=True, fraction=fraction)
    assert selection.kept_labelled is not None
    expected = [gid for gid, kept in zip(made.labelled, selection.kept_labelled, strict=True) if kept]
    assert [gid for groups in iterate(selection) for gid in gids(groups)] == expected
    shuffled = global_steps(selection, StreamConfig(docs_per_batch=140, streams=2), 2)
    assert sorted(gid for step in shuffled for micro_batch in step for gid in micro_batch) == expected


def test_several_data_sets_are_served_with_unique_ids(made: Any, make_dataset: Make) -> None:
    more = make_dataset({"z": [[4, 2], [3]]}, seed=9)
    selection = select(Split(data=(made.url, more.url)), labelled=False)
    batches = list(iterate(selection, docs_per_batch=70))
    served = [gid for groups in batches for gid in gids(groups)]
    assert served == [*range(len(made.groups)), *range(GID_SPAN, GID_SPAN + 3)]
    last = batches[-1]
    assert np.array_equal(last.features_NF[-3:].numpy(), more.groups[2].features)


def test_features_are_served_by_name_and_in_the_order_of_the_first_data_set(
    make_dataset: Make, reorder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = make_dataset({"p": [[3, 1, 4], [1, 5]]})
    two = make_dataset({"q": [[2, 6], [5]]}, seed=1)
    names = {name: Feature(name=name) for name in "abcd"}
    moved = reorder(two.url, [names[name] for name in "cdab"])

    def served(second: str, **chosen: Any) -> list[QueryGroups]:
        selection = select(Split(data=(one.url, second)), labelled=True)
        if chosen:
            selection = selection.serving([names[name] for name in chosen["features"]], whose="a bundle")
        return list(iterate(selection, docs_per_batch=4))

    caplog.set_level("INFO", "ltrscale")
    expected = served(two.url)
    for mine, theirs in zip(served(moved), expected, strict=True):
        assert_equal(mine, theirs)
    assert f"{one.url}: does not read 1 features of {moved}: d" in caplog.text
    for second in (two.url, moved):
        for mine, theirs in zip(served(second, features="cb"), expected, strict=True):
            assert torch.equal(mine.features_NF, theirs.features_NF[:, [2, 1]])
    with pytest.raises(
        InputError, match=r"a bundle: 1 of its 2 features are not in the data: 'd' \(numeric, there mis"
    ):
        served(moved, features="ad")


def test_weights_are_served_where_all_files_have_them_and_nan_without_one(made: Any, make_dataset: Make) -> None:
    weighted = make_dataset({"a": [[2, 3], [4, 1, 2]]}, has_weights=lambda gid: gid != 3)
    for groups in iterate(choose(weighted), docs_per_batch=5):
        for q, gid in enumerate(gids(groups)):
            assert groups.weights_N is not None
            weights = groups.weights_N[groups.offsets_Q1[q] : groups.offsets_Q1[q + 1]]
            expected = weighted.groups[gid].weights
            assert weights.isnan().all() if expected is None else np.array_equal(weights.numpy(), expected)
        assert groups.positions_N is None
    mixed = select(Split(data=(made.url, weighted.url)), labelled=False)
    with pytest.raises(
        InputError, match=r"part-00000.*'weights' is not as in the other files, or in some of them only"
    ):
        list(iterate(mixed))


def test_batches_are_writable_and_share_nothing(made: Any) -> None:
    stream = GroupStream(choose(made, labelled=True), StreamConfig(docs_per_batch=50))
    batches = [step.micro_batches[0] for step in stream.epoch(0)]
    again = [step.micro_batches[0] for step in stream.epoch(0)]
    for groups in batches:
        assert groups is not None
        assert groups.labels_N is not None
        groups.features_NF.fill_(7)
        groups.labels_N.fill_(7)
    for one, other in zip(again, stream.epoch(0), strict=True):
        assert_equal(one, other.micro_batches[0])


def test_only_about_a_window_a_stream_is_held(make_dataset: Make) -> None:
    rng = np.random.default_rng(1)
    made = make_dataset({"a": [rng.integers(1, 9, rng.integers(5, 20)).tolist() for _ in range(60)]})
    selection = choose(made)
    read = 0

    def counting(row_groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[pa.Table]:
        nonlocal read
        for row_group, table in zip(row_groups, read_direct(row_groups, columns), strict=True):
            read += row_group.documents
            yield table

    settings = StreamConfig(docs_per_batch=40, streams=4, window=2)
    largest = max(row_group.documents for row_group in selection.row_groups)
    served = 0
    for step in GroupStream(selection, settings, reader=counting).epoch(0):
        served += sum(groups.n_documents for groups in step.micro_batches.values() if groups is not None)
        assert read - served <= settings.streams * (settings.window + 2) * largest
    assert read == served == selection.n_documents


def test_streams_that_no_worker_or_no_row_group_fills(made: Any, make_dataset: Make) -> None:
    with pytest.raises(InputError, match="set streams to 3"):
        GroupStream(choose(made), StreamConfig(streams=2), world=3)
    small = make_dataset({"a": [[1, 2], [3]]})
    settings = StreamConfig(docs_per_batch=50, streams=5)
    steps = global_steps(choose(small), settings, 5)
    assert len(steps) == 1
    assert sorted(gid for micro_batch in steps[0] for gid in micro_batch) == [0, 1, 2]
    assert sum(micro_batch == [] for micro_batch in steps[0]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("longest", [3, 12, 17, 25, 60, 150])
@pytest.mark.parametrize("budget", [24, 50, 100])
@pytest.mark.parametrize("streams", [1, 2, 6, 8])
def test_a_step_stays_within_the_budget_whatever_the_lists_and_the_workers(
    make_dataset: Make, longest: int, budget: int, streams: int
) -> None:
    lists = [[1 + (7 * i + 5 * j) % longest for j in range(5)] for i in range(9)]
    lists[4][2] = longest
    made = make_dataset({"a": lists})
    selection, settings = choose(made), StreamConfig(docs_per_batch=budget, streams=streams, window=2, seed=3)
    served = GroupStream(selection, settings).config.streams
    assert streams % served == 0
    assert served == 1 or served * longest <= budget
    steps = global_steps(selection, settings, 1)
    length = {gid: len(group.features) for gid, group in made.groups.items()}
    for step in steps:
        groups = [gid for micro_batch in step for gid in micro_batch]
        assert sum(length[gid] for gid in groups) <= budget or len(groups) == 1
    assert sorted(gid for step in steps for micro_batch in step for gid in micro_batch) == list(made.groups)
    for world in range(2, served + 1):
        assert global_steps(selection, settings, world) == steps
    whole = global_run(selection, settings, 1)
    positions: dict[int, Position] = {}
    for done, step in enumerate(GroupStream(selection, settings).epoch(2), start=1):
        positions |= step.positions
        rest = global_run(selection, settings, served, positions)
        assert len(rest) == len(whole) - done
        for one, other in zip(rest, whole[done:], strict=True):
            assert all(gids(one[c]) == gids(other[c]) for c in range(served))


def test_workers_without_a_stream_whose_longest_list_fits_are_refused_with_the_remedy(make_dataset: Make) -> None:
    selection = choose(make_dataset({"a": [[4, 30], [5]]}))
    settings = StreamConfig(docs_per_batch=100, streams=8)
    assert GroupStream(selection, settings, world=2).config.streams == 2
    with pytest.raises(InputError, match=r"up to 30 documents .* room for 2 of 8 streams.* to 120 or more$"):
        GroupStream(selection, settings, world=3)
    GroupStream(selection, settings.replace(docs_per_batch=120), world=3)


def test_the_streams_of_a_period_do_not_depend_on_the_other_periods(make_dataset: Make) -> None:
    made = make_dataset({"a": [[3, 4]], "b": [[90]]})
    settings = StreamConfig(docs_per_batch=40, streams=4)
    streams = {
        periods: GroupStream(select(Split(data=(made.url,), periods=periods), labelled=False), settings).config.streams
        for periods in (("a",), ("b",), ("a", "b"))
    }
    assert streams == {("a",): 4, ("b",): 1, ("a", "b"): 1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"docs_per_batch": 90, "streams": 1}, None),
        ({"docs_per_batch": 360, "streams": 4}, None),
        ({"docs_per_batch": 200, "streams": 4}, "2 of 4 micro-batches, of 100 documents and not 50"),
        ({"docs_per_batch": 80, "streams": 1}, "one above stream.docs_per_batch = 80 is a step of its own"),
        ({"docs_per_batch": 80, "streams": 4}, "1 of 4 micro-batches, of 80 documents and not 20; one above"),
    ],
)
def test_what_long_lists_change_is_said_once(
    make_dataset: Make, settings: dict[str, int], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    selection = choose(make_dataset({"a": [[3, 90], [4]]}))
    check_batches(selection, StreamConfig(**settings), world=1, title="pretraining")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (said is not None)
    if said is not None:
        assert lines[0].startswith("pretraining: groups have up to 90 documents, so ")
        assert said in lines[0]


def test_a_budget_below_a_document_a_stream_is_refused() -> None:
    with pytest.raises(InputError, match="docs_per_batch must be at least streams = 8"):
        config.validate(StreamConfig, {"docs_per_batch": 7, "streams": 8}, "test")
    with pytest.raises(InputError, match="groups_per_batch must be at least streams = 8"):
        config.validate(StreamConfig, {"groups_per_batch": 7, "streams": 8}, "test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": 4}, "15 feature values where the manifest lists 4 documents of 3 features"),
        ({"labelled": 1}, "2 labelled query groups where the manifest lists 1"),
        ({"groups": 3}, "has 2 query groups where the manifest lists 3"),
        ({"index": 1}, "row group 1 has 0 query groups"),
    ],
)
def test_a_file_that_is_not_the_manifests_is_named(make_dataset: Make, change: dict[str, int], message: str) -> None:
    selection = choose(make_dataset({"a": [[2, 3]]}), labelled=True)
    other = selection.only([replace(selection.row_groups[0], **change)])
    with pytest.raises(InputError, match=f"part-00000.*{message}.*; prepare the data set again"):
        list(iterate(other))


@pytest.mark.parametrize(("streams", "most", "budget"), [(1, 1, 1000), (1, 7, 60), (3, 12, 2000)])
def test_batches_counted_in_groups_take_what_fits_of_both_budgets(
    made: Any, streams: int, most: int, budget: int
) -> None:
    settings = StreamConfig(docs_per_batch=budget, groups_per_batch=most, streams=streams, window=3, seed=2)
    selection = choose(made, labelled=True)
    steps = global_run(selection, settings, 1)
    for c in range(streams):
        batches = [step[c] for step in steps if step[c] is not None]
        for groups, following in itertools.pairwise(batches):
            assert groups.n_groups <= most // streams
            assert groups.n_documents <= budget // streams or groups.n_groups == 1
            full = groups.n_groups == most // streams
            assert full or groups.n_documents + int(following.lengths_Q[0]) > budget // streams
    served = [gid for step in steps for groups in step.values() for gid in gids(groups)]
    assert sorted(served) == made.labelled
    for world in range(2, streams + 1):
        assert global_steps(selection, settings, world) == global_steps(selection, settings, 1)
    if budget == 1000:
        assert len(steps) == len(served)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"docs_per_batch": 300, "streams": 1}, 20),
        ({"docs_per_batch": 4000, "groups_per_batch": 6, "streams": 2}, 40),
        ({"docs_per_batch": 5_000, "streams": 1}, 3),
    ],
)
def test_an_epoch_of_several_passes_serves_each_group_as_often_and_has_the_steps(
    made: Any, settings: dict[str, int], steps: int
) -> None:
    config = StreamConfig(**settings, steps_per_epoch=steps, window=3)
    selection = choose(made, labelled=True, fraction=0.1)
    stream = GroupStream(selection, config)
    assert stream.passes > 1
    whole = global_run(selection, config, 1)
    counts = Counter(gid for step in whole for groups in step.values() for gid in gids(groups))
    assert set(counts.values()) == {stream.passes}
    assert len(counts) == selection.n_groups
    assert stream.groups_per_epoch == counts.total()
    least = steps if "groups_per_batch" in settings else 0.7 * steps  # documents are an estimate
    assert least <= len(whole) <= 1.5 * steps + 1
    again = GroupStream(selection, config, memory=Memory(selection))
    for one, other in zip(again.epoch(2), whole, strict=True):
        for c, groups in one.micro_batches.items():
            assert_equal(groups, other[c])


def test_passes_differ_in_order_and_one_pass_is_an_epoch_as_before(made: Any) -> None:
    selection = choose(made, labelled=True, fraction=0.3)
    plain = StreamConfig(docs_per_batch=60, groups_per_batch=1)
    passes = global_steps(selection, plain.replace(steps_per_epoch=2 * selection.n_groups), 1)
    both = [global_steps(selection, plain, 1, epoch) for epoch in (0, 1)]
    assert passes == [*both[0], *both[1]]
    assert both[0] != both[1]
    assert global_steps(selection, plain.replace(steps_per_epoch=1), 1, epoch=1) == both[1]


@pytest.mark.slow
def test_an_epoch_of_several_passes_resumes_at_any_step_with_any_workers(made: Any) -> None:
    settings = StreamConfig(docs_per_batch=140, streams=2, window=3, steps_per_epoch=12)
    selection = choose(made, labelled=True, fraction=0.2)
    whole = global_run(selection, settings, 1)
    positions: dict[int, Position] = {}
    for done, step in enumerate(GroupStream(selection, settings).epoch(2)):
        positions |= step.positions
        rest = global_run(selection, settings, 2, positions)
        for one, other in zip(rest, whole[done + 1 :], strict=True):
            for c in range(2):
                assert_equal(one[c], other[c])
