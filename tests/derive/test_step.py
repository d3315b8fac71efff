"""The common parts of steps: draws that depend only on their counters, grades, places, counts."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from reference import clicks as reference
from scipy import stats

from ltrscale import draws
from ltrscale.arrays import place_in_group
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.derive.step import Changes, changed, check_grades, relabelled
from ltrscale.draws import open_uniforms, random_bits, splitmix64
from ltrscale.errors import InputError
from ltrscale.simulate.users import relevance_probability

Make = Callable[..., GroupBlock]


def test_splitmix_gives_the_published_sequence() -> None:
    """The first outputs for seed 1234567, as in the published test vectors."""
    outputs = splitmix64(np.full(3, 1234567, np.uint64), np.arange(3, dtype=np.uint64))
    assert outputs.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_bits_depend_on_the_counters_and_nothing_else() -> None:
    keys_N, places_N = np.array([5, 5, 9, 2]), np.array([0, 1, 0, 3])
    bits_N = random_bits((3, "click"), keys_N, places_N)
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(random_bits((3, "click"), keys_N[order], places_N[order]), bits_N[order])
    others = [random_bits((4, "click"), keys_N, places_N), random_bits((3, "buy"), keys_N, places_N)]
    assert not set(bits_N.tolist()) & {b for other in others for b in other.tolist()}


def test_uniform_numbers_are_never_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = np.array([0, 2**64 - 1], np.uint64)
    monkeypatch.setattr(draws, "random_bits", lambda *_: extremes)
    low, high = open_uniforms((0, "one"), np.arange(2)).tolist()
    assert 0 < low < high < 1


def test_one_counter_never_gives_the_same_bits_twice() -> None:
    assert len(np.unique(random_bits((0, "labelled"), np.arange(200_000)))) == 200_000


@pytest.mark.parametrize("axis", [0, 1])
def test_draws_are_uniform_and_neighbours_independent(axis: int) -> None:
    keys, places = (x.ravel() for x in np.meshgrid(np.arange(400), np.arange(50), indexing="ij"))
    draws = open_uniforms((0, "click"), keys, places).reshape(400, 50)
    assert 0 < draws.min() < 1e-3 < 1 - 1e-3 < draws.max() < 1
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-3
    along = np.moveaxis(draws, axis, 0)
    pairs = np.histogram2d(along[:-1].ravel(), along[1:].ravel(), bins=10)[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3


def test_relevance_is_the_gain_over_the_highest_gain() -> None:
    for top in (1, 2, 4, 10):
        for grade in range(top + 1):
            assert relevance_probability(np.array([grade]), top=top)[0] == pytest.approx(reference.rho(grade, top))
    with pytest.raises(ValueError, match="above 0"):
        relevance_probability(np.zeros(1), top=0)


def test_places_sort_by_the_first_key_then_the_next() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 8, 30)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    first, second = rng.integers(0, 3, bounds[-1]), rng.random(bounds[-1])
    places = place_in_group(bounds, first, second)
    for a, b in itertools.pairwise(bounds):
        expected = sorted(range(a, b), key=lambda i: (first[i], second[i]))
        assert [places[i] for i in expected] == list(range(b - a))


def test_clicks_follow_labels_only_where_a_group_has_clicks(make_block: Make) -> None:
    block = make_block([[1, 2], [0, 3]], clicks=[[0, 0], None])
    after = relabelled(block, np.array([0.0, 2.0, 1.0, 0.0]))
    np.testing.assert_array_equal(after.columns_N["labels"], [0, 2, 1, 0])
    np.testing.assert_array_equal(after.columns_N["clicks"], [0, 1, np.nan, np.nan])


def test_changes_are_counted_in_documents_and_groups(make_block: Make) -> None:
    before = make_block([[1, 2], [0, 3], None], lengths=[2, 2, 2], weights=[None, [1, 1], None])
    after = before.with_columns(
        labels=np.array([np.nan, np.nan, 0, 3, np.nan, np.nan], np.float32),
        weights=np.array([np.nan, np.nan, 1, 2, np.nan, np.nan], np.float32),
    )
    assert changed(before, after) == (after, Changes(groups_changed=2, documents_changed=3))
    assert changed(before, before) == (before, Changes())


def test_a_label_above_the_highest_grade_is_named(make_block: Make) -> None:
    block = make_block([[1], None, [0, 3]], lengths=[1, 1, 2])
    check_grades(block, 3)
    with pytest.raises(InputError, match="query q2 of period all: label 3 is above max_relevance 2; raise it"):
        check_grades(block, 2)
