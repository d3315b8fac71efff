"""Transforms of labels into targets for trees: laws, and slow oracles."""

import itertools

import numpy as np
import pytest

from ltrscale.trees.library import QuantisedConfig, StandardisedConfig, make_targets, quantised, standardised

OFFSETS = np.array([0, 3, 4, 9, 12])


def scores_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=OFFSETS[-1]) * 5 + 2


def test_standardised_scores_have_mean_0_and_deviation_1_in_each_group() -> None:
    scores_N = scores_of(0)
    scores_N[9:] = 0.1  # a group of equal scores
    found_N = standardised(scores_N, OFFSETS)
    for first, last in itertools.pairwise(OFFSETS):
        group = scores_N[first:last]
        spread = group.std()
        expected = (group - group.mean()) / spread if spread > 1e-9 else np.zeros(len(group))
        np.testing.assert_allclose(found_N[first:last], expected, atol=1e-12)


@pytest.mark.parametrize("change", [lambda s: 3 * s, lambda s: s - 1e3])
def test_standardised_scores_do_not_depend_on_scale_and_shift(change: object) -> None:
    scores_N = scores_of(1)
    assert callable(change)
    np.testing.assert_allclose(standardised(change(scores_N), OFFSETS), standardised(scores_N, OFFSETS), atol=1e-9)


@pytest.mark.parametrize("bins", ["even", "equal_frequency"])
@pytest.mark.parametrize("grades", [2, 5, 31])
def test_grades_rise_with_the_scores_and_equal_scores_have_equal_grades(bins: str, grades: int) -> None:
    scores_N = np.random.default_rng(2).integers(0, 40, 500).astype(float) ** 2
    grades_N = quantised(scores_N, grades=grades, bins=bins)  # type: ignore[arg-type]
    order = np.argsort(scores_N, kind="stable")
    assert (np.diff(grades_N[order]) >= 0).all()
    assert (np.diff(grades_N[order])[np.diff(scores_N[order]) == 0] == 0).all()
    assert grades_N.min() == 0
    assert grades_N.max() == grades - 1


def test_even_bins_are_of_equal_width() -> None:
    scores_N = np.append(np.random.default_rng(3).uniform(-2, 3, 2000), [-2, 3])
    expected = np.minimum(np.floor((scores_N + 2) / 5 * 31), 30)
    np.testing.assert_array_equal(quantised(scores_N, grades=31, bins="even"), expected)


def test_equal_frequency_bins_hold_equally_many() -> None:
    counts = np.bincount(
        quantised(np.random.default_rng(4).normal(size=3100), grades=31, bins="equal_frequency").astype(int)
    )
    assert counts.tolist() == [100] * 31


@pytest.mark.parametrize("bins", ["even", "equal_frequency"])
def test_scores_without_spread_have_one_grade(bins: str) -> None:
    assert quantised(np.full(5, 0.3), grades=31, bins=bins).tolist() == [0] * 5  # type: ignore[arg-type]
    assert quantised(np.zeros(0), grades=31, bins=bins).tolist() == []  # type: ignore[arg-type]


def test_a_config_chooses() -> None:
    scores_N = scores_of(5)
    assert make_targets(None, scores_N, OFFSETS) is scores_N
    np.testing.assert_array_equal(
        make_targets(StandardisedConfig(), scores_N, OFFSETS), standardised(scores_N, OFFSETS)
    )
    np.testing.assert_array_equal(
        make_targets(QuantisedConfig(grades=4), scores_N, OFFSETS), quantised(scores_N, grades=4, bins="even")
    )
