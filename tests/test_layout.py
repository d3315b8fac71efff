"""Laws of layouts: ways there and back, chunks for a GPU, what is made ahead; chunks for a CPU are in test_batch."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jobs.bench.pretend import counting, pretending
from ltrscale import layout as layouts
from ltrscale.batch import QueryGroups, group_index, joined, length_chunks, repeated, to_offsets
from ltrscale.layout import CHUNKS_ON_A_GPU, best_cuts, layout

lengths = st.lists(st.integers(0, 9), max_size=12)


@given(lengths, st.integers(1, 60), st.booleans())
def test_padding_and_back_gives_every_value_and_gradient_back(
    lengths_Q: list[int], budget: int, quadratic: bool
) -> None:
    offsets_Q1 = to_offsets(torch.tensor(lengths_Q, dtype=torch.int64))
    values_N2 = torch.randn(sum(lengths_Q), 2, dtype=torch.float64, requires_grad=True)
    chunks = length_chunks(offsets_Q1, budget=budget, quadratic=quadratic)
    padded_S2 = chunks.pad(values_N2, 7.0)
    assert torch.equal(padded_S2[~chunks.mask_S], torch.full_like(padded_S2[~chunks.mask_S], 7.0))
    back_N2 = chunks.ragged(chunks.split(padded_S2))
    assert torch.equal(back_N2, values_N2)
    weights_N2 = torch.randn_like(values_N2)
    (back_N2 * weights_N2).sum().backward()
    assert values_N2.grad is not None
    assert torch.equal(values_N2.grad, weights_N2)
    padded_S2 = chunks.pad(values_N2)
    (gradient_N2,) = torch.autograd.grad((padded_S2 * chunks.pad(weights_N2, 5.0)).sum(), values_N2)
    assert torch.equal(gradient_N2, weights_N2)  # padding has no gradient, whatever stands there


@given(lengths)
def test_sums_by_group_are_those_of_a_loop(lengths_Q: list[int]) -> None:
    offsets_Q1 = to_offsets(torch.tensor(lengths_Q, dtype=torch.int64))
    values_N = torch.arange(float(sum(lengths_Q)))
    chunks = length_chunks(offsets_Q1, budget=20)
    sums = [values_ML.sum(1) for values_ML in chunks.split(chunks.pad(values_N))]
    expected = [float(part.sum()) for part in values_N.split(lengths_Q)] if lengths_Q else []
    assert chunks.by_group(sums, len(lengths_Q)).tolist() == expected


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.sampled_from([1, 2]))
def test_chunks_of_a_gpu_have_the_least_padding_that_their_number_allows(lengths_G: list[int], power: int) -> None:
    sorted_G = np.sort(np.array(lengths_G, np.int64))

    def padded(ends: list[int]) -> int:
        return sum((end - first) * int(sorted_G[end - 1]) ** power for first, end in pairwise([0, *ends]))

    ends = best_cuts(sorted_G, power, 10**12)
    assert ends[-1] == len(sorted_G)
    assert len(ends) <= CHUNKS_ON_A_GPU
    places = (np.flatnonzero(np.diff(sorted_G)) + 1).tolist()
    number = min(CHUNKS_ON_A_GPU - 1, len(places))
    if len(places) <= 10:
        assert padded(ends) == min(padded([*cuts, len(sorted_G)]) for cuts in combinations(places, number))


def test_a_gpu_has_one_empty_chunk_where_no_list_has_a_document() -> None:
    chunks = layouts.ListLayout(np.array([0, 0, 0]), torch.device("meta")).chunks(100, True)
    assert chunks.shapes == ((0, 1),)
    assert not list(chunks)


def test_a_chunk_of_a_gpu_beyond_the_memory_is_cut_again() -> None:
    ends = best_cuts(np.full(10, 4, np.int64), 2, budget=50)
    assert ends == [3, 6, 9, 10]
    assert best_cuts(np.full(2, 9, np.int64), 2, budget=50) == [1, 2]  # a list beyond it is alone


def test_a_batch_that_was_moved_is_known_and_what_was_asked_is_made_ahead() -> None:
    groups = QueryGroups(torch.zeros(5, 1), torch.tensor([0, 2, 2, 5]))

    def use(offsets_Q1: torch.Tensor) -> list[torch.Tensor]:
        single = group_index(joined(offsets_Q1))
        return [group_index(offsets_Q1), single, repeated(offsets_Q1, 2), length_chunks(offsets_Q1, budget=9).slots_N]

    with pretending() as device:
        first, second = groups.to(device), groups.to(device)
        with counting() as counted:
            use(first.offsets_Q1)
        assert counted.counts.waits.total() == 0
        assert counted.counts.copies > 0
        layout(second.offsets_Q1).make(layout(first.offsets_Q1).asked())
        with counting() as counted:
            made = use(second.offsets_Q1)
        assert counted.counts.copies == 0
        assert [values.cpu().tolist() for values in made] == [values.tolist() for values in use(groups.offsets_Q1)]
        with counting() as counted:  # offsets that nobody has passed are asked for
            assert group_index(torch.tensor([0, 1, 3]).to(device)).cpu().tolist() == [0, 1, 1]
        assert counted.counts.waits.total() == 3  # for their copy to the device, their values, and the result
        assert len(list(layout(first.offsets_Q1).tensors())) > 5


def test_offsets_on_a_cpu_may_change_in_place() -> None:
    offsets_Q1 = torch.tensor([0, 2, 3])
    assert group_index(offsets_Q1).tolist() == [0, 0, 1]
    offsets_Q1.numpy()[1] = 1
    assert group_index(offsets_Q1).tolist() == [0, 1, 1]


def test_a_layout_lives_no_longer_than_its_offsets() -> None:
    before = len(layouts._LAYOUTS)
    offsets_Q1 = torch.tensor([0, 2, 3])
    group_index(joined(offsets_Q1))
    assert len(layouts._LAYOUTS) == before + 2
    del offsets_Q1
    assert len(layouts._LAYOUTS) == before


@given(lengths, st.integers(1, 30))
def test_groups_are_joined_at_their_borders_into_lists_of_similar_size(lengths_Q: list[int], documents: int) -> None:
    offsets_Q1 = to_offsets(torch.tensor(lengths_Q, dtype=torch.int64))
    n, longest = sum(lengths_Q), max(lengths_Q, default=0)
    found = joined(offsets_Q1, documents).tolist()
    assert (found[0], found[-1]) == (0, n)
    assert set(found) <= set(offsets_Q1.tolist())
    sizes = [b - a for a, b in pairwise(found)]
    assert all(sizes) or n == 0
    assert len(sizes) <= max(1, -(-n // documents))
    assert all(size < documents + max(longest, 1) for size in sizes)
    assert joined(offsets_Q1).tolist() == [0, n]


@pytest.mark.parametrize("device", ["meta"])
def test_devices_without_memory_of_their_own_have_a_block_too(device: str) -> None:
    chunks = layouts.ListLayout(np.array([0, 2, 5]), torch.device(device)).chunks(1, True)
    assert chunks.shapes == ((1, 2), (1, 3))
