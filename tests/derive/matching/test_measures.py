"""Measures of exact match: equal to the slow formulas and to bm25s, for any texts."""

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import matching as slow

from ltrscale.derive.matching.measures import MEASURES, Smoothing, TokenLists, collect, match_measures, merge

SIZE = 12
texts = st.lists(st.integers(0, SIZE - 1), max_size=8)


def lists(values: list[list[int]]) -> TokenLists:
    flat = np.array([token for value in values for token in value], np.int64)
    return TokenLists(flat, np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int64))


@given(st.lists(st.tuples(texts, st.lists(texts, max_size=4)), min_size=1, max_size=4), st.lists(texts, min_size=1))
def test_all_measures_are_those_of_the_slow_formulas(
    groups: list[tuple[list[int], list[list[int]]]], known: list[list[int]]
) -> None:
    documents = [document for _, documents in groups for document in documents]
    query_N = np.repeat(np.arange(len(groups)), [len(documents) for _, documents in groups])
    smoothing = Smoothing(k1=0.9, b=0.4, jelinek_mercer=0.3, dirichlet=50, discount=0.5)
    queries, collection = lists([query for query, _ in groups]), collect(lists(known), SIZE)
    found = match_measures(queries, lists(documents), query_N, collection, smoothing)
    assert tuple(found) == MEASURES
    constants = smoothing.model_dump()
    for n, (q, document) in enumerate(zip(query_N.tolist(), documents, strict=True)):
        expected = slow.measures(groups[q][0], document, known, SIZE, **constants)
        assert {name: values[n] for name, values in found.items()} == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.lists(texts, min_size=1), st.lists(texts, min_size=1))
def test_collections_add_up(one: list[list[int]], other: list[list[int]]) -> None:
    both, parts = collect(lists(one + other), SIZE), merge(collect(lists(one), SIZE), collect(lists(other), SIZE))
    assert both.documents == parts.documents
    np.testing.assert_array_equal(both.frequency_V, parts.frequency_V)
    np.testing.assert_array_equal(both.occurrences_V, parts.occurrences_V)


def test_bm25_is_that_of_bm25s() -> None:
    rng = np.random.default_rng(0)
    size = 500
    documents = [rng.zipf(1.3, rng.integers(1, 60)).clip(max=size - 1).tolist() for _ in range(300)]
    queries = [rng.choice(size // 4, 6).tolist() for _ in range(20)]
    library = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    library.index([list(map(str, document)) for document in documents], show_progress=False)
    collection = collect(lists(documents), size)
    for query in queries:
        found = match_measures(lists([query]), lists(documents), np.zeros(300, np.int64), collection, Smoothing())[
            "bm25"
        ]
        np.testing.assert_allclose(found, library.get_scores(list(map(str, query))), rtol=1e-5, atol=1e-6)


@given(st.permutations(range(5)))
def test_the_order_of_documents_does_not_matter(order: list[int]) -> None:
    documents, collection = [[1, 2], [], [2, 2, 3], [5], [1, 1]], collect(lists([[1, 2], [2, 3]]), SIZE)
    query_N = np.zeros(5, np.int64)
    plain = match_measures(lists([[2, 2, 7]]), lists(documents), query_N, collection, Smoothing())
    moved = match_measures(lists([[2, 2, 7]]), lists([documents[i] for i in order]), query_N, collection, Smoothing())
    for name in MEASURES:
        np.testing.assert_array_equal(moved[name], plain[name][order])
