"""Draws, compared with the slow way to the same numbers."""

import numpy as np
import pytest

from ltrscale.draws import among_first, mix, permutation


@pytest.mark.parametrize(
    ("n", "k"), [(0, 0), (1, 0), (1, 1), (5, 2), (1000, 0), (1000, 1), (1000, 999), (600_000, 1), (600_000, 123_456)]
)
def test_the_first_of_a_permutation_need_no_sorting(n: int, k: int) -> None:
    expected = np.zeros(n, np.bool_)
    expected[permutation(n, "a", 3)[:k]] = True
    assert np.array_equal(among_first(n, k, "a", 3), expected)


@pytest.mark.parametrize("n", [0, 1, 2, 100_000])
def test_a_permutation_is_that_of_a_stable_sort(n: int) -> None:
    bits = np.random.PCG64(mix("a", 3)).random_raw(n)
    assert permutation(n, "a", 3).tolist() == np.argsort(bits, kind="stable").tolist()
