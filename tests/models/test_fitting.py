"""Laws of gathering statistics in parts: no cut, order or tree of merges matters; against numpy and slow oracles."""

import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ltrscale.arrays import Moments
from ltrscale.draws import splitmix64
from ltrscale.models.fitting import FeatureStatistics, Sample, ValueCounts, Wanted, quantiles

Rows = NDArray[np.float32]
T = TypeVar("T", ValueCounts, Sample, FeatureStatistics)


def documents(n: int, seed: int = 0) -> Rows:
    """Columns with a long tail, a shift, few values, codes; a tenth missing; one always missing, one constant."""
    rng = np.random.default_rng(seed)
    x_NF = np.stack(
        [
            np.exp(rng.normal(size=n) * 2),
            rng.normal(size=n) + 1e4,
            rng.integers(0, 3, n) - 1.0,
            rng.zipf(1.5, n).clip(max=(1 << 24) - 1),
            np.full(n, np.nan),
            np.full(n, 0.1),
        ],
        axis=1,
    ).astype(np.float32)
    x_NF[:, :4][rng.random((n, 4)) < 0.1] = np.nan
    return x_NF


NUMERIC = (True, True, True, False, True, True)


def pieces(n: int, cuts: Sequence[float]) -> list[slice]:
    """Consecutive parts of n documents, some of them empty."""
    bounds = [0, *sorted(round(cut * n) for cut in cuts), n]
    return [slice(first, last) for first, last in itertools.pairwise(bounds)]


def merged(parts: list[T], order: NDArray[np.int64]) -> T:
    """Merge neighbours in a random tree."""
    for place in order:
        at = int(place) % (len(parts) - 1)
        parts[at].merge(parts.pop(at + 1))
    return parts[0]


cuts = st.lists(st.floats(0, 1), max_size=6)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.slow
@given(cuts, seeds)
def test_statistics_do_not_depend_on_cuts_and_merges(cuts: list[float], seed: int) -> None:
    x_NF = documents(500)
    wanted_ones = [{"discrete_up_to": 3}, {"most_codes": 3}, {"log1p": True}, {"sample": 50}]
    for wanted in (Wanted(NUMERIC, **each) for each in wanted_ones):  # type: ignore[arg-type]
        whole = FeatureStatistics(wanted)
        whole.add(0, x_NF)
        parts = []
        for piece in pieces(len(x_NF), cuts):
            parts.append(FeatureStatistics(wanted))
            parts[-1].add(piece.start, x_NF[piece])
        actual = merged(parts, np.random.default_rng(seed).integers(0, 100, len(parts) - 1))
        assert actual.documents == whole.documents == 500
        assert np.array_equal(actual.moments.count_F, whole.moments.count_F)
        np.testing.assert_allclose(actual.moments.mean_F, whole.moments.mean_F, rtol=1e-12)
        np.testing.assert_allclose(actual.moments.squares_F, whole.moments.squares_F, rtol=1e-9, atol=1e-25)
        for column, vocabulary in whole.vocabularies.items():
            expected, found = vocabulary.codes(), actual.vocabularies[column].codes()
            assert (expected is None) == (found is None)
            assert expected is None or np.array_equal(found, expected)
        assert actual.hashed == whole.hashed
        for column, seen in whole.seen.items():
            assert np.array_equal(seen.codes(), np.unique(x_NF[~np.isnan(x_NF[:, column]), column]))
            assert np.array_equal(actual.seen[column].codes(), seen.codes())
        if wanted.sample:
            assert np.array_equal(actual.sample.rows_MF(), whole.sample.rows_MF(), equal_nan=True)


@pytest.mark.parametrize("log1p", [False, True])
@pytest.mark.parametrize("n", [1, 2, 40_000])
def test_moments_are_those_of_numpy(n: int, log1p: bool) -> None:
    x_NF = documents(n)
    y_NF = (np.copysign(np.log1p(np.abs(x_NF)), x_NF) if log1p else x_NF).astype(np.float64)
    moments = Moments.from_values(x_NF, log1p=log1p)
    assert np.array_equal(moments.count_F, (~np.isnan(y_NF)).sum(0))
    seen = moments.count_F > 0
    np.testing.assert_allclose(moments.mean_F[seen], np.nanmean(y_NF[:, seen], 0), rtol=1e-12)
    std_F = np.nanstd(y_NF[:, seen], 0)
    expected_F = np.where(std_F > 1e-7 * np.abs(np.nanmean(y_NF[:, seen], 0)), std_F, 1.0)
    np.testing.assert_allclose(moments.scale_F()[seen], expected_F, rtol=1e-9)
    assert moments.mean_F[~seen].tolist() == [0] * (~seen).sum()
    assert moments.scale_F()[~seen].tolist() == [1] * (~seen).sum()


def test_a_small_deviation_beside_a_large_mean_is_kept() -> None:
    x_N1 = (2.0**24 + 40 * np.random.default_rng(0).integers(0, 2, (100_000, 1))).astype(np.float32)
    moments = reduce(Moments.merge, (Moments.from_values(part) for part in np.array_split(x_N1, 37)))
    assert moments.scale_F()[0] == pytest.approx(float(x_N1.astype(np.float64).std()), rel=1e-9)


@given(st.lists(st.lists(st.integers(0, 30), max_size=20), min_size=1, max_size=8), st.integers(1, 40), seeds)
def test_a_vocabulary_counts_exactly(parts: list[list[int]], limit: int, seed: int) -> None:
    counted = Counter(code for part in parts for code in part)
    by_frequency = sorted(counted, key=lambda code: (-counted[code], code))

    def gather(at_most: int | None) -> ValueCounts:
        vocabularies = []
        for part in parts:
            vocabularies.append(ValueCounts(at_most))
            vocabularies[-1].add(np.array([*part, math.nan], np.float32))
        return merged(vocabularies, np.random.default_rng(seed).integers(0, 100, len(parts) - 1))

    codes_V, kept_V = gather(None).codes(), gather(None).codes(limit)
    assert codes_V is not None
    assert kept_V is not None
    assert codes_V.tolist() == sorted(counted)
    assert kept_V.tolist() == sorted(by_frequency[:limit])
    assert (gather(limit).codes() is None) == (len(counted) > limit)


def test_negative_zero_is_zero() -> None:
    for values in ([0.0, -0.0], [-0.0, 0.0]):
        vocabulary = ValueCounts()
        vocabulary.add(np.array(values, np.float32))
        codes_V = vocabulary.codes()
        assert codes_V is not None
        assert [str(code) for code in codes_V.tolist()] == ["0.0"]


def bytes_of(value: object) -> int:
    return len(pickle.dumps(value))


def test_a_vocabulary_is_as_large_as_its_codes_however_many_documents() -> None:
    vocabulary, largest = ValueCounts(), 0
    codes_N = np.arange(5000, dtype=np.float32)
    for _ in range(50):
        part = ValueCounts()
        part.add(codes_N)
        vocabulary.merge(part)
        largest = max(largest, bytes_of(vocabulary))
    assert largest < 2.2 * 12 * len(codes_N)


def test_no_value_is_kept_of_a_feature_with_too_many() -> None:
    vocabulary = ValueCounts(at_most=3)
    for first in range(0, 1000, 10):
        vocabulary.add(np.arange(first, first + 10, dtype=np.float32))
        assert bytes_of(vocabulary) < bytes_of(ValueCounts()) + 300
    few = ValueCounts(at_most=3)
    few.add(np.array([1.0], np.float32))
    few.merge(vocabulary)
    assert few.codes() is None


def lowest_hashes(n: int, size: int) -> list[int]:
    keys_N = splitmix64(np.zeros(n, np.uint64), np.arange(n, dtype=np.uint64))
    return np.argsort(keys_N)[:size].tolist()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("size", [1, 7, 300, 2000, 5000])
@pytest.mark.parametrize("n", [500, 1999, 2000, 4001])
def test_the_sample_is_of_the_lowest_hashes(n: int, size: int, known: bool) -> None:
    numbers_N = np.arange(n)
    parts = []
    for piece in np.array_split(numbers_N, 23):
        parts.append(Sample(size, n if known else None))
        parts[-1].add(piece, piece[:, None].astype(np.float32))
    whole = merged(parts, np.random.default_rng(0).integers(0, 100, 22))
    assert whole.rows_MF()[:, 0].tolist() == lowest_hashes(n, size)


def test_a_part_keeps_its_share_of_the_sample() -> None:
    n, size = 1_000_000, 10_000
    sample = Sample(size, n)
    sample.add(np.arange(50_000), np.zeros((50_000, 1), np.float32))
    assert 450 < len(sample.rows_MF()) < 700
    unaware = Sample(size)
    unaware.add(np.arange(50_000), np.zeros((50_000, 1), np.float32))
    assert len(unaware.rows_MF()) == size


def test_quantiles_are_those_of_numpy() -> None:
    x_MF = documents(999)
    for n_quantiles in (2, 10, 256, 3000):
        actual_FK = quantiles(x_MF, n_quantiles).numpy()
        for feature, column_M in enumerate(x_MF.T):
            seen = column_M[~np.isnan(column_M)].astype(np.float64)
            expected_K = np.quantile(seen, np.linspace(0, 1, n_quantiles)) if len(seen) else np.zeros(n_quantiles)
            np.testing.assert_allclose(actual_FK[feature], expected_K, rtol=1e-6)


def uniform_value(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(x)  # a long tail, whose distribution function is known


@pytest.mark.parametrize(("name", "rank"), [("uniform", np.asarray), ("long tail", uniform_value)])
def test_sampled_quantiles_have_the_error_that_is_promised(
    name: str, rank: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> None:
    n, size = 400_000, 10_000
    u_N = np.random.default_rng(1).random(n)
    x_N = u_N if name == "uniform" else np.exp(u_N)
    sample = Sample(size, n)
    for piece in np.array_split(np.arange(n), 9):
        sample.add(piece, x_N[piece, None].astype(np.float32))
    found_K = rank(quantiles(sample.rows_MF(), 101).numpy()[0].astype(np.float64))
    probabilities_K = np.linspace(0, 1, 101)
    error_K = np.abs(found_K - probabilities_K)
    assert error_K.max() < 4 / (2 * math.sqrt(size))
    standard_K = np.sqrt(probabilities_K * (1 - probabilities_K) / size)
    assert 0.3 < np.mean((error_K / standard_K.clip(min=1e-9))[1:-1]) < 1.5
