"""Codes of categorical features as trees see them."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.bundle.boosters import catboost_table, renumber

CODES = st.one_of(st.integers(0, 12).map(float), st.just(math.nan))


@given(known=st.sets(st.integers(0, 12)), values=st.lists(st.tuples(CODES, st.floats(-9, 9, width=32)), max_size=20))
def test_known_codes_become_their_place_and_others_missing(known: set[int], values: list[tuple[float, float]]) -> None:
    features_NF = np.array(values, np.float32).reshape(-1, 2)
    before_NF = features_NF.copy()
    vocabulary = sorted(known)
    found_NF = renumber(features_NF, {0: np.array(vocabulary, np.float32)})
    expected = [vocabulary.index(int(code)) if code in known else math.nan for code, _ in values]
    np.testing.assert_array_equal(found_NF[:, 0], np.array(expected, np.float32))
    np.testing.assert_array_equal(found_NF[:, 1], before_NF[:, 1])
    np.testing.assert_array_equal(features_NF, before_NF)


def test_without_categories_nothing_is_copied() -> None:
    features_NF = np.ones((3, 2), np.float32)
    assert renumber(features_NF, {}) is features_NF
    assert catboost_table(features_NF, {}) is features_NF


@given(codes=st.lists(st.one_of(st.integers(0, 3).map(float), st.just(math.nan)), min_size=1, max_size=12))
def test_catboost_gets_categories_by_number_and_missing_ones_by_name(codes: list[float]) -> None:
    renumbered_NF = np.column_stack([np.arange(len(codes)), codes]).astype(np.float32)
    table = catboost_table(renumbered_NF, {1: np.arange(4, dtype=np.float32)})
    assert list(table[1]) == ["missing" if math.isnan(code) else str(int(code)) for code in codes]
    assert list(table[0]) == list(range(len(codes)))
