"""Small ranking problems, each with its own law of relevance, on which a network learns to rank from examples.

A problem has features and grades of short lists. Its first lists are examples; a network that has read these ranks the
others (`ltrscale/models/in_context.py`). Problems share only what ranking problems have in common: features that show
the same few causes, features of a list alone, counts, flags and heavy tails, scores that rise with relevance, and few
relevant documents. A document has D factors z, and

    z   = sqrt(s) a_q + sqrt(1 - s) b_n                    s is the share of a factor that a list has in common   (1)
    x_f = g_f(sqrt(1 - o_f) (z M)_f + sqrt(o_f) e_f)       features: mixes of factors, noise of their own, shapes (2)
    u   = sum_p w_p c_p + noise                            utility: terms c_p linear in z and x, steps, and trees,
                                                           a network or products                                 (3)

with a, b, e normal and everything else drawn for the problem. Labels are grades that cut u at quantiles, or at most
one click a list. Nothing is fitted to real data.

Shapes: B problems, Q lists of the same lengths in each, N documents, F features, D factors, K blocks of features, T
trees, P depth of a tree, H units, X products.
"""

import math
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.random import Generator, default_rng
from pydantic import Field, model_validator
from torch import Tensor

from ltrscale.arrays import Doubles, Ints, maximum, offsets
from ltrscale.config import Config

_SHORTEST, _LONGEST = 4, 40  # documents of a list


class ProblemsConfig(Config):
    """Sizes of synthetic ranking problems; a pair is a range, both ends included."""

    examples: tuple[int, int] = (8, 130)
    """Lists with labels to learn from; drawn evenly on a logarithmic scale."""
    questions: int = Field(24, ge=1)
    """Lists to rank."""
    features: tuple[int, int] = (4, 140)
    """Features of a document; drawn evenly on a logarithmic scale."""
    documents: tuple[int, int] = (700, 2400)
    """Most documents of a problem, drawn on a logarithmic scale; longer lists are shortened."""
    values: int = Field(240_000, ge=1)
    """Feature values of all problems that are drawn at once; these are at least 2."""
    at_once: int = Field(12, ge=2)
    """Most problems that are drawn at once."""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        for name, least in (("examples", 2), ("features", 2), ("documents", 1)):
            low, high = getattr(self, name)
            if not least <= low <= high:
                raise ValueError(f"{name}: two rising numbers, the first at least {least}")
        if self.documents[0] < (needed := _SHORTEST * (self.examples[1] + self.questions)):
            raise ValueError(f"documents: at least {needed}, so that every list has {_SHORTEST}")
        return self


class Problems(NamedTuple):
    """B problems whose lists have the same lengths: features [B, N, F], labels [B, N], offsets [Q + 1].

    The first `n_examples` lists are examples, with `n_read` documents.
    """

    features_BNF: Tensor
    labels_BN: Tensor
    offsets_Q1: Tensor
    n_examples: int

    @property
    def n_read(self) -> int:
        """Documents of the examples."""
        return int(self.offsets_Q1[self.n_examples])


def problems(config: ProblemsConfig, *, seed: int, number: int) -> Problems:
    """Some problems; they depend on the settings, the seed and this number alone."""
    rng = default_rng([seed, number])
    n_examples, most = _between(rng, *config.examples), _between(rng, *config.documents)
    n_features = _between(rng, *config.features)
    offsets_Q1 = offsets(_lengths(rng, n_examples + config.questions, most))
    n_problems = min(config.at_once, max(2, config.values // int(offsets_Q1[-1] * n_features)))
    drawn = [_problem(rng, offsets_Q1, n_features) for _ in range(n_problems)]
    features_BNF, labels_BN = (torch.from_numpy(np.stack(part).astype(np.float32)) for part in zip(*drawn, strict=True))
    return Problems(features_BNF, labels_BN, torch.from_numpy(offsets_Q1), n_examples)


def _between(rng: Generator, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _lengths(rng: Generator, n_lists: int, most: int) -> Ints:
    """Lengths of lists: pages of results, lists of one length, or lognormal ones; `most` documents together."""
    match rng.integers(3):
        case 0:
            drawn_Q = rng.choice([8, 8, 8, 16, 30], n_lists)
        case 1:
            drawn_Q = np.full(n_lists, rng.integers(5, 21))
        case _:
            drawn_Q = np.exp(rng.normal(math.log(rng.integers(6, 20)), 0.5, n_lists))
    lengths_Q = drawn_Q.clip(_SHORTEST, _LONGEST).astype(np.int64)
    while lengths_Q.sum() > most:
        lengths_Q = (0.8 * lengths_Q).astype(np.int64).clip(min=_SHORTEST)
    return lengths_Q


def _problem(rng: Generator, offsets_Q1: Ints, n_features: int) -> tuple[Doubles, Doubles]:
    """Features [N, F] and labels [N] of one problem."""
    factors_ND = _factors(rng, offsets_Q1)
    cause_NF = _mixed(rng, factors_ND, offsets_Q1, n_features)
    x_NF = _shaped(rng, cause_NF)
    if rng.random() < 0.35:  # as LETOR's features are
        x_NF = _scaled_by_list(x_NF, offsets_Q1)
        cause_NF = cause_NF if rng.random() < 0.5 else _standard(x_NF)
    utility_N = _utility(rng, factors_ND, cause_NF, x_NF, offsets_Q1)
    return x_NF, _clicks(rng, utility_N, offsets_Q1) if rng.random() < 0.25 else _grades(rng, utility_N)


def _factors(rng: Generator, offsets_Q1: Ints) -> Doubles:
    """The factors of documents, formula (1); in some problems with heavy tails."""
    n_documents, n_factors = int(offsets_Q1[-1]), int(rng.integers(2, 9))
    share_D = rng.beta(1, 3, n_factors)
    of_lists_ND = _values_by_list(rng, offsets_Q1, n_factors)
    factors_ND = np.sqrt(share_D) * of_lists_ND + np.sqrt(1 - share_D) * rng.normal(size=(n_documents, n_factors))
    if rng.random() < 0.3:  # Student's t with four degrees of freedom
        factors_ND = factors_ND / np.sqrt(rng.chisquare(4, (n_documents, 1)) / 4)
    return factors_ND


def _values_by_list(rng: Generator, offsets_Q1: Ints, columns: int) -> Doubles:
    """Normal values [N, columns] that are equal within a list."""
    return np.asarray(rng.normal(size=(len(offsets_Q1) - 1, columns)).repeat(np.diff(offsets_Q1), axis=0))


def _mixed(rng: Generator, factors_ND: Doubles, offsets_Q1: Ints, n_features: int) -> Doubles:
    """Features before their shape, formula (2): those of a block mix the factors alike, and some show a list alone."""
    n_documents, n_factors = factors_ND.shape
    n_blocks = int(rng.integers(max(2, n_features // 8), n_features + 1))
    block_F = rng.integers(n_blocks, size=n_features)
    is_mixed_DK = rng.random((n_factors, n_blocks)) < rng.choice([0.2, 0.4, 0.7])
    mixed_NK = factors_ND @ (rng.normal(size=(n_factors, n_blocks)) * is_mixed_DK)
    own_F = rng.beta(1, rng.choice([1, 2, 4]), n_features)  # the share of own noise
    own_F = np.where(rng.random(n_features) < rng.choice([0.0, 0.2, 0.5]), 1.0, own_F)
    mixed_NF = (mixed_NK / (mixed_NK.std(0) + 1e-3))[:, block_F]
    x_NF = np.sqrt(1 - own_F) * mixed_NF + np.sqrt(own_F) * rng.normal(size=(n_documents, n_features))
    if rng.random() < 0.6:
        x_NF = _alike(rng, x_NF, factors_ND)
    if rng.random() < 0.5:
        x_NF = np.where(rng.random(n_features) < 0.1, _values_by_list(rng, offsets_Q1, n_features), x_NF)
    return np.asarray(x_NF)


def _alike(rng: Generator, x_NF: Doubles, factors_ND: Doubles) -> Doubles:
    """Features with a common part, as all features of how well a document fits its query have."""
    n_features = x_NF.shape[1]
    common_N = _standard(factors_ND @ rng.normal(size=factors_ND.shape[1]))
    share_F = rng.uniform(0.5, 1) * rng.beta(math.exp(rng.uniform(-1, 3)), 1, n_features)
    sign_F = np.where(rng.random(n_features) < rng.choice([0, 0.1, 0.4]), -1, 1)
    return np.asarray(np.sqrt(share_F) * sign_F * common_N[:, None] + np.sqrt(1 - share_F) * x_NF)


def _shaped(rng: Generator, cause_NF: Doubles) -> Doubles:
    """Give each feature one of eight shapes, unless all stay plain."""
    x_NF = cause_NF.copy()
    if rng.random() < 0.2:
        return x_NF
    shape_F = rng.integers(8, size=x_NF.shape[1])
    for shape in range(1, 8):
        x_NF[:, shape_F == shape] = _shape(rng, shape, x_NF[:, shape_F == shape])
    return x_NF


def _shape(rng: Generator, shape: int, x_NF: Doubles) -> Doubles:
    """Amounts, values that are mostly 0, counts, bounded scores, flags, or distances."""
    match shape:
        case 1:
            return np.exp(x_NF * rng.uniform(0.5, 1.5))
        case 2:
            return (x_NF - rng.normal()).clip(min=0)
        case 3:
            return np.round(x_NF * rng.uniform(0.5, 2))
        case 4:
            return np.tanh(2 * x_NF)
        case 5:
            return np.asarray(x_NF > 0.7 * rng.normal(), np.float64)
        case 6:
            return np.expm1(1.5 * (x_NF - 0.5).clip(min=0))
        case _:
            return np.abs(x_NF) if rng.random() < 0.4 else x_NF


def _scaled_by_list(x_NF: Doubles, offsets_Q1: Ints) -> Doubles:
    """Features from 0 to 1 in each list; 0 where a list has equal values."""
    lengths_Q = np.diff(offsets_Q1)
    low_NF = np.minimum.reduceat(x_NF, offsets_Q1[:-1]).repeat(lengths_Q, axis=0)
    high_NF = maximum(x_NF, offsets_Q1).repeat(lengths_Q, axis=0)
    return np.asarray((x_NF - low_NF) / np.maximum(high_NF - low_NF, 1e-6))


def _standard(x_NF: Doubles) -> Doubles:
    return np.asarray((x_NF - x_NF.mean(0)) / (x_NF.std(0) + 1e-6))


def _utility(rng: Generator, factors_ND: Doubles, cause_NF: Doubles, x_NF: Doubles, offsets_Q1: Ints) -> Doubles:
    """Utility [N], formula (3), with noise of documents and of lists; in half of the problems features help only."""
    n_factors, n_features = factors_ND.shape[1], x_NF.shape[1]
    signed = np.abs if rng.random() < 0.5 else np.asarray
    weights_D = signed(rng.normal(size=n_factors)) * (rng.random(n_factors) < 0.7) + 0.01
    weights_F = signed(rng.normal(size=n_features)) * (rng.random(n_features) < rng.choice([0.05, 0.2, 0.6]))
    weights_F[rng.integers(n_features)] += 1
    seen_NF = _standard(x_NF).clip(-4, 4) if rng.random() < 0.5 else cause_NF
    steps_NF = np.tanh(2 * (cause_NF - rng.normal(size=n_features)))
    terms = [
        factors_ND @ weights_D,
        seen_NF @ weights_F,
        steps_NF @ (weights_F * signed(rng.normal(size=n_features))),
        _curved(rng, factors_ND, cause_NF, x_NF),
    ]
    weights = rng.exponential(size=len(terms)) ** 2
    weights /= np.linalg.norm(weights)
    pairs = zip(weights, terms, strict=True)
    u_N = _within_lists(np.sum([w * _within_lists(term_N, offsets_Q1) for w, term_N in pairs], axis=0), offsets_Q1)
    u_N = u_N.clip(-4, 4) + math.exp(rng.uniform(math.log(0.3), math.log(2.5))) * rng.normal(size=len(u_N))
    return np.asarray(u_N / u_N.std() + rng.uniform() * _values_by_list(rng, offsets_Q1, 1)[:, 0])


def _curved(rng: Generator, factors_ND: Doubles, cause_NF: Doubles, x_NF: Doubles) -> Doubles:
    """A term [N] that is not linear: trees on features or on factors, a small network, or products of features."""
    match rng.integers(4):
        case 0:
            read_NF = x_NF if rng.random() < 0.5 else cause_NF
            return _trees(rng, read_NF, int(rng.integers(1, 30)), int(rng.integers(1, 4)))
        case 1:
            read_NF, units = factors_ND if rng.random() < 0.5 else cause_NF, int(rng.integers(4, 16))
            weights_FH = rng.normal(size=(read_NF.shape[1], units)) * 2 / math.sqrt(read_NF.shape[1])
            return np.asarray(np.tanh(read_NF @ weights_FH + rng.normal(size=units)) @ rng.normal(size=units))
        case 2:
            one_X, other_X = rng.integers(x_NF.shape[1], size=(2, int(rng.integers(1, 6))))
            return np.asarray((cause_NF[:, one_X] * cause_NF[:, other_X]) @ rng.normal(size=len(one_X)))
        case _:
            return _trees(rng, factors_ND, int(rng.integers(1, 20)), 2)


def _trees(rng: Generator, x_NF: Doubles, n_trees: int, depth: int) -> Doubles:
    """Sum [N] of trees whose level p asks the same question everywhere: is this feature above a document's value?"""
    n_documents, n_features = x_NF.shape
    feature_TP = rng.integers(n_features, size=(n_trees, depth))
    bound_TP = x_NF[rng.integers(n_documents, size=(n_trees, depth)), feature_TP]
    leaf_NT = (x_NF[:, feature_TP] > bound_TP) @ (1 << np.arange(depth))
    values_TL = rng.normal(size=(n_trees, 1 << depth))
    return np.asarray(values_TL[np.arange(n_trees), leaf_NT].sum(1))


def _within_lists(values_N: Doubles, offsets_Q1: Ints) -> Doubles:
    """Values minus their list's mean, with deviation 1 over all documents."""
    lengths_Q = np.diff(offsets_Q1)
    centred_N = values_N - (np.add.reduceat(values_N, offsets_Q1[:-1]) / lengths_Q).repeat(lengths_Q)
    return np.asarray(centred_N / (centred_N.std() + 1e-6))


def _grades(rng: Generator, utility_N: Doubles) -> Doubles:
    """Grades 0 to 2 as in LETOR, 0 and 1, or 0 to 4: shares of the documents with the highest utility."""
    match rng.choice(3, p=[0.6, 0.27, 0.13]):
        case 0:
            share = rng.uniform(0.08, 0.35)
            shares = [share, share * rng.uniform(0.15, 0.6)]
        case 1:
            shares = [rng.uniform(0.04, 0.3)]
        case _:
            shares = rng.uniform(0.02, 0.6, 4).tolist()
    return np.asarray(np.sum([utility_N > np.quantile(utility_N, 1 - share) for share in shares], axis=0), np.float64)


def _clicks(rng: Generator, utility_N: Doubles, offsets_Q1: Ints) -> Doubles:
    """At most one click a list, which a document gets by a softmax of its utility; some lists have none."""
    chance_N = rng.uniform(0.7, 2) * utility_N + rng.gumbel(size=len(utility_N))
    lengths_Q = np.diff(offsets_Q1)
    has_one_Q = rng.random(len(lengths_Q)) < rng.uniform(0.3, 1)
    is_first_N = chance_N == maximum(chance_N, offsets_Q1).repeat(lengths_Q)
    return np.asarray(is_first_N & has_one_Q.repeat(lengths_Q), np.float64)
