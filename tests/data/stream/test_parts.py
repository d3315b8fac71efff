"""Laws of parts: cut by the manifest only, whole row groups, in order."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.plan import Part, parts_of, run_here

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
