import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream import plan
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.plan import Part, parts_of, run_here
from ltrscale.draws import permutation

documents_lists = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


@given(documents_lists, st.integers(1, 9), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_each_row_group_is_dealt_once_and_loads_are_balanced(
    documents: list[int], streams: int, seed: int, epoch: int, shuffle: bool
) -> None:
    dealt = plan.canonical_streams(documents, seed=seed, epoch=epoch, key="k", streams=streams, shuffle=shuffle)
    assert len(dealt) == streams
    assert sorted(i for stream in dealt for i in stream) == list(range(len(documents)))
    loads = [sum(documents[i] for i in stream) for stream in dealt]
    assert max(loads) - min(loads) <= max(documents)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "streams"), [(0, 3), (2, 5), (300, 256), (70_000, 3), (70_000, 300)])
def test_each_row_group_goes_to_the_emptiest_stream(n: int, streams: int) -> None:
    documents = (np.random.default_rng(0).integers(1, 5, n) * 1000).tolist()  # with many ties
    loads, expected = [0] * streams, list[list[int]]([] for _ in range(streams))
    for row_group in permutation(n, "deal", 1, 2, "k").tolist():
        emptiest = loads.index(min(loads))
        expected[emptiest].append(row_group)
        loads[emptiest] += documents[row_group]
    dealt = plan.canonical_streams(documents, seed=1, epoch=2, key="k", streams=streams)
    assert [stream.tolist() for stream in dealt] == expected


def test_the_order_depends_on_seed_epoch_and_key_only() -> None:
    def deal(seed: int = 1, epoch: int = 2, key: str = "k") -> list[list[int]]:
        dealt = plan.canonical_streams([5] * 40, seed=seed, epoch=epoch, key=key, streams=2)
        return [stream.tolist() for stream in dealt]

    assert deal() == deal()
    assert deal() not in (deal(seed=2), deal(epoch=1), deal(key="l"), deal(seed=2, epoch=1))


def test_without_shuffle_one_stream_is_file_order() -> None:
    (stream,) = plan.canonical_streams([3, 9, 1], seed=5, epoch=7, key="k", streams=1, shuffle=False)
    assert stream.tolist() == [0, 1, 2]
    order = plan.window_order(4, seed=5, epoch=7, stream=0, window=0, shuffle=False)
    assert order.tolist() == [0, 1, 2, 3]


@given(st.integers(0, 200), st.integers(0, 5), st.integers(0, 5))
def test_a_window_order_is_a_permutation_that_differs_by_place(n: int, stream: int, window: int) -> None:
    order = plan.window_order(n, seed=0, epoch=0, stream=stream, window=window)
    assert np.array_equal(np.sort(order), np.arange(n))
    if n > 20:
        others = [
            plan.window_order(n, seed=0, epoch=0, stream=stream + 1, window=window),
            plan.window_order(n, seed=0, epoch=0, stream=stream, window=window + 1),
            plan.window_order(n, seed=0, epoch=1, stream=stream, window=window),
            plan.window_order(n, seed=1, epoch=0, stream=stream, window=window),
        ]
        assert not any(np.array_equal(order, other) for other in others)


def test_permutations_are_uniform() -> None:
    counts = np.zeros((4, 4))
    for i in range(4000):
        counts[np.arange(4), plan.permutation(4, "test", i)] += 1
    assert abs(counts / 4000 - 0.25).max() < 0.04  # six standard deviations


def test_orders_never_change_between_versions() -> None:
    assert plan.permutation(8, "golden", 1).tolist() == [6, 0, 2, 7, 1, 4, 3, 5]
    assert plan.step_seed(1, 2, 3) == 7498462444732646219
    assert plan.uniforms(("golden",), np.array([0, 1, 2**40])).tolist() == [
        0.2358484391959017,
        0.9837653156630143,
        0.9968542321138416,
    ]


def splitmix64(state: int) -> int:
    """The next output of the generator, in Python's integers."""
    bits = (state + 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def test_splitmix64_is_the_published_one() -> None:
    # the first outputs for the seed 1234567, as they stand in the tests of other implementations
    states = [(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(3)]
    assert [splitmix64(s) for s in states] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.lists(st.integers(0, 2**62), max_size=20), st.integers(0, 9))
def test_uniforms_are_a_function_of_their_id_alone(ids: list[int], seed: int) -> None:
    uniforms_Q = plan.uniforms(("test", seed), np.array(ids, np.int64))
    start = plan.mix("test", seed)
    assert uniforms_Q.tolist() == [
        (splitmix64((start + gid * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for gid in ids
    ]


def test_uniforms_are_uniform_and_differ_by_what_determines_them() -> None:
    ids_Q = np.arange(20_000)
    uniforms_Q = plan.uniforms(("test", 0), ids_Q)
    counts = np.histogram(uniforms_Q, bins=20, range=(0, 1))[0]
    assert abs(counts - 1000).max() < 190  # six standard deviations
    assert abs(np.corrcoef(uniforms_Q[:-1], uniforms_Q[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(uniforms_Q, plan.uniforms(("test", 1), ids_Q))[0, 1]) < 0.05


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0, 2.75, 1000.0]), max_size=30), st.integers(0, 9), st.integers(0, 9))
def test_groups_are_served_the_whole_times_and_at_most_once_more(times: list[float], seed: int, epoch: int) -> None:
    served_Q = plan.times_served(np.array(times), np.arange(len(times)), seed=seed, epoch=epoch)
    for n, mean in zip(served_Q.tolist(), times, strict=True):
        assert n in {int(mean), int(np.ceil(mean))}


def test_groups_are_served_as_often_as_they_should_be_on_average() -> None:
    ids_Q = np.arange(500)
    total_Q = sum(plan.times_served(np.full(500, 1.3), ids_Q, seed=0, epoch=epoch) for epoch in range(400))
    assert abs(total_Q.mean() / 400 - 1.3) < 0.006  # six standard deviations
    assert abs(total_Q / 400 - 1.3).max() < 0.14  # of every single group, over the epochs


def test_a_document_order_is_a_permutation_that_differs_by_place() -> None:
    place = {"seed": 1, "epoch": 2, "stream": 3, "window": 4}
    order_N = plan.document_order(50, **place)
    assert np.array_equal(np.sort(order_N), np.arange(50))
    for name in place:
        assert not np.array_equal(order_N, plan.document_order(50, **place | {name: 9}))
    assert not np.array_equal(order_N, plan.window_order(50, **place))


def test_step_seeds_are_63_bits_and_distinct() -> None:
    seeds = {plan.step_seed(seed, step, stream) for seed in range(5) for step in range(50) for stream in range(8)}
    assert len(seeds) == 2000
    assert min(seeds) >= 0
    assert 2**62 < max(seeds) < 2**63


@given(st.dictionaries(st.integers(0, 5), st.lists(st.integers(1, 50), max_size=10), max_size=4))
def test_windows_are_read_when_they_are_needed(documents: dict[int, list[int]]) -> None:
    order = plan.read_order(documents)
    assert sorted(order) == sorted((c, w) for c, ws in documents.items() for w in range(len(ws)))
    needed = [sum(documents[c][:w]) for c, w in order]
    assert needed == sorted(needed)
    for c, ws in documents.items():
        assert [w for stream, w in order if stream == c] == list(range(len(ws)))


@given(st.lists(st.integers(0, 1 << 25), max_size=40), st.integers(1, 8))
def test_a_window_is_bounded_in_row_groups_and_in_values(values: list[int], window: int) -> None:
    cut = plan.windows(values, window, values=int)
    assert [value for each in cut for value in each] == values
    for each, following in zip(cut, [*cut[1:], None], strict=False):
        assert 1 <= len(each) <= window
        assert sum(each[:-1]) < window << 22  # so memory holds this and one row group
        assert following is None or len(each) == window or sum(each) >= window << 22  # none ends earlier than it must


Make = Callable[..., Any]


@pytest.fixture(scope="module")
def selection(make_dataset: Make) -> Selection:
    rng = np.random.default_rng(0)
    row_groups = [rng.integers(1, 20, rng.integers(1, 9)).tolist() for _ in range(20)]
    made = make_dataset({"a": row_groups[:13], "b": row_groups[13:]}, is_labelled=lambda gid: gid % 3 == 0)
    return select(Split(data=(made.url,)), labelled=False)


@pytest.mark.parametrize("values", [1, 300, 1000, 10**9])
def test_parts_are_the_selection_in_order(selection: Selection, values: int) -> None:
    parts = [*parts_of(selection, values=values)]
    assert [r for part in parts for r in part.selection.row_groups] == list(selection.row_groups)
    assert [part.documents for part in parts] == [part.selection.n_documents for part in parts]
    assert [part.first for part in parts] == [0, *itertools.accumulate(part.documents for part in parts[:-1])]
    largest = max(r.documents for r in selection.row_groups)
    for part in parts[:-1]:
        assert values <= 3 * part.documents < values + 3 * largest


def test_a_part_numbers_its_documents(selection: Selection) -> None:
    whole_NF = np.concatenate([groups.features_NF.numpy() for groups in iterate(selection)])

    def read(part: Part) -> Any:
        return np.concatenate([groups.features_NF.numpy() for groups in iterate(part.selection)])

    parts = [*parts_of(selection, values=300)]
    assert len(parts) > 5
    for part, features_NF in zip(parts, run_here(read, parts), strict=True):
        assert np.array_equal(features_NF, whole_NF[part.first : part.first + part.documents])


def test_a_part_is_read_when_its_result_is_wanted(selection: Selection) -> None:
    read: list[int] = []

    def note(part: Part) -> int:
        read.append(part.first)
        return part.first

    parts = [*parts_of(selection, values=300)]
    results = run_here(note, parts)
    assert [next(results), next(results)] == read == [part.first for part in parts[:2]]
