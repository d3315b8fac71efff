"""The measures of exact match: TF, IDF, TF-IDF, BM25 and query likelihood, by the statistics of a collection of texts.

Shapes: N documents, Q queries (groups), T tokens, R lists, V ids of the vocabulary, P pairs of a document and a token
of its query (one for each time that the query has the token), U pairs of a document and one of its different tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ltrscale.arrays import Doubles, Ints

MEASURES = ("tf", "idf", "tf_idf", "bm25", "lm_jm", "lm_dir", "lm_abs")
"""The measures, in the order of their columns."""


_K1, _B = 1.2, 0.75
"""BM25: how soon further occurrences of a token stop counting, and how much length counts; the values of Lucene."""
_LAMBDA, _MU, _DELTA = 0.1, 2000.0, 0.7
"""Language models of Zhai and Lafferty: weight of the collection (.1 is theirs for short queries), tokens of the
collection that are added to each document, and what is taken from the count of each token."""


class TokenLists(NamedTuple):
    """Lists of tokens, end to end; list r has `ids_T[offsets_R1[r]:offsets_R1[r + 1]]`."""

    ids_T: Ints
    offsets_R1: Ints


@dataclass(frozen=True)
class Collection:
    """Statistics of a collection of texts: for each token the documents that have it, and its occurrences."""

    documents: int
    frequency_V: Ints
    occurrences_V: Ints

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return int(self.occurrences_V.sum())

    def idf(self, tokens_P: Ints) -> Doubles:
        """`log(1 + (D - df + 1/2) / (df + 1/2))` of each token, as in Lucene: never below 0.

        Example:
            >>> Collection(3, np.array([3, 1]), np.array([5, 1])).idf(np.array([0, 1])).round(3).tolist()
            [0.134, 0.981]
        """
        df_P = self.frequency_V[tokens_P]
        return np.asarray(np.log1p((self.documents - df_P + 0.5) / (df_P + 0.5)))

    def probability(self, tokens_P: Ints) -> Doubles:
        """The share of each token in the collection, with one occurrence added to each: never 0."""
        return np.asarray((self.occurrences_V[tokens_P] + 1) / (self.tokens + len(self.occurrences_V)))


def _distinct(texts: TokenLists, size: int) -> tuple[Ints, Ints, Ints]:
    """The different tokens of each text: its number [U], the token [U] and how often it occurs there [U], sorted."""
    text_T = np.repeat(np.arange(len(texts.offsets_R1) - 1), np.diff(texts.offsets_R1))
    keys_U, counts_U = np.unique(text_T * size + texts.ids_T, return_counts=True)
    texts_U, tokens_U = np.divmod(keys_U, size)
    return texts_U, tokens_U, counts_U


def collect(texts: TokenLists, size: int) -> Collection:
    """The statistics of some texts over a vocabulary of this size."""
    _, tokens_U, counts_U = _distinct(texts, size)
    occurrences_V = np.bincount(tokens_U, weights=counts_U, minlength=size).astype(np.int64)
    return Collection(len(texts.offsets_R1) - 1, np.bincount(tokens_U, minlength=size), occurrences_V)


def merge(one: Collection, other: Collection) -> Collection:
    """The statistics of two collections that share no text."""
    return Collection(
        one.documents + other.documents,
        one.frequency_V + other.frequency_V,
        one.occurrences_V + other.occurrences_V,
    )


def match_measures(
    queries: TokenLists, documents: TokenLists, query_N: Ints, collection: Collection
) -> Mapping[str, Doubles]:
    """All measures of all documents for their queries, by the names of `MEASURES`, each of shape [N].

    A token that a query has twice counts twice. With c the count of token t in document d of |d| tokens, |d|' of them
    different, mean length m, and p(t) the share of t in the collection, a measure is the sum over the query's tokens of

        tf      c
        idf     idf(t) if c > 0
        tf_idf  c idf(t)
        bm25    idf(t) c / (c + k1 (1 - b + b |d| / m))                Robertson and Zaragoza 2009, as in Lucene
        lm_jm   log((1 - lambda) c / |d| + lambda p(t))                Zhai and Lafferty 2001, Jelinek-Mercer
        lm_dir  log((c + mu p(t)) / (|d| + mu))                        Dirichlet
        lm_abs  log(max(c - delta, 0) / |d| + delta |d|' / |d| p(t))   absolute discounting

    The last three are log p(t) in an empty document. A query without tokens has 0 everywhere. The collection may
    lack some of the tokens.
    """
    size, n = len(collection.frequency_V), len(query_N)
    lengths_Q = np.diff(queries.offsets_R1)
    document_P = np.repeat(np.arange(n), lengths_Q[query_N])
    first_P = np.repeat(np.cumsum(lengths_Q[query_N]) - lengths_Q[query_N], lengths_Q[query_N])
    tokens_P = queries.ids_T[queries.offsets_R1[query_N][document_P] + np.arange(len(document_P)) - first_P]
    texts_U, tokens_U, counts_U = _distinct(documents, size)
    keys_U, keys_P = texts_U * size + tokens_U, document_P * size + tokens_P
    place_P = np.minimum(np.searchsorted(keys_U, keys_P), max(len(keys_U) - 1, 0))
    has_P = keys_U[place_P] == keys_P if len(keys_U) else np.zeros(len(keys_P), bool)
    count_P = np.where(has_P, counts_U[place_P], 0).astype(np.float64) if len(keys_U) else np.zeros(len(keys_P))

    lengths_N = np.diff(documents.offsets_R1).astype(np.float64)
    length_P, different_P = lengths_N[document_P], np.bincount(texts_U, minlength=n)[document_P]
    idf_P, p_P = collection.idf(tokens_P), collection.probability(tokens_P)
    mean = collection.tokens / max(collection.documents, 1) or 1.0
    pull_P = _K1 * (1 - _B + _B * length_P / mean)
    empty_P, some_P = length_P == 0, np.maximum(length_P, 1)
    discounted_P = np.maximum(count_P - _DELTA, 0) / some_P + _DELTA * different_P / some_P * p_P
    values_P = {
        "tf": count_P,
        "idf": np.where(has_P, idf_P, 0.0),
        "tf_idf": count_P * idf_P,
        "bm25": np.where(has_P, idf_P * count_P / np.where(has_P, count_P + pull_P, 1.0), 0.0),
        "lm_jm": np.log(np.where(empty_P, p_P, (1 - _LAMBDA) * count_P / some_P + _LAMBDA * p_P)),
        "lm_dir": np.log((count_P + _MU * p_P) / (length_P + _MU)),
        "lm_abs": np.log(np.where(empty_P, p_P, discounted_P)),
    }
    sums = {name: np.bincount(document_P, weights=values_P[name], minlength=n) for name in MEASURES}
    return {name: values_N.astype(np.float64) for name, values_N in sums.items()}
