"""Laws of means over crossed groups, draws and pretrainings: slow sums, scipy at the edges, coverage, invariances."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from reference import crossed as slow
from reference.crossed import drawn

from ltrscale.arrays import Doubles
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS, Means, _errors_to_promise, crossed_means

REPETITIONS = 1000


def coverage(means: Means, truth: float = 0.0) -> float:
    low_M, high_M = means.interval()
    return float(((low_M <= truth) & (truth <= high_M)).mean())


def same(one: Means, other: Means) -> None:
    np.testing.assert_allclose(one.mean_M, other.mean_M, atol=1e-12)
    np.testing.assert_allclose(one.std_error_M, other.std_error_M, atol=1e-12)
    np.testing.assert_allclose(one.df_M, other.df_M, rtol=1e-9)


@pytest.mark.parametrize("draws", [0.0, 0.3, 3.0])
def test_it_is_the_sum_by_hand(draws: float) -> None:
    values_QTM = drawn(0, (7, 4, 30), groups=0.5, draws=draws, rest=1.0) + 0.2
    means = crossed_means(values_QTM)
    expected = [slow.mean_error_df([values_QTM[:, :, m].tolist()]) for m in range(30)]
    found = zip(means.mean_M, means.std_error_M, means.df_M, strict=True)
    np.testing.assert_allclose(list(found), expected, rtol=1e-9)
    if draws == 0.0:  # both cases of the estimate occur: draws that vary less than the rest, and more
        below = [slow.mean_squares(values_QTM[:, :, m].tolist()) for m in range(30)]
        assert 0 < sum(d < rest for _, (d, _), (rest, _) in below) < 30


def test_folds_have_draws_of_their_own_and_undefined_groups_are_no_groups() -> None:
    values_QTM = drawn(1, (30, 3, 5), groups=0.5, draws=0.5, rest=1.0)
    folds_Q = np.random.default_rng(2).permutation(np.repeat([7, 3, 5], [8, 10, 12]))
    values_QTM[::4, :, 2] = np.nan
    means = crossed_means(values_QTM, folds_Q)
    for m in range(5):
        kept = [values_QTM[folds_Q == fold, :, m] for fold in (3, 5, 7)]
        tables = [table[~np.isnan(table[:, 0])].tolist() for table in kept]
        found = means.mean_M[m], means.std_error_M[m], means.df_M[m]
        np.testing.assert_allclose(found, slow.mean_error_df(tables), rtol=1e-9)
    without = np.flatnonzero(~np.isnan(values_QTM[:, 0, 2]))
    one = crossed_means(values_QTM[without][:, :, [2]], folds_Q[without])
    np.testing.assert_allclose(one.std_error_M, means.std_error_M[2], rtol=1e-12)


def test_a_fold_in_which_no_group_defines_a_column_adds_nothing() -> None:
    values_QTM = drawn(1, (30, 5, 4), groups=0.5, draws=0.5, rest=1.0)
    folds_Q = np.repeat([0, 1, 2], 10)
    values_QTM[20:] = np.nan
    same(crossed_means(values_QTM, folds_Q), crossed_means(values_QTM[:20], folds_Q[:20]))


def test_where_one_side_does_not_vary_it_is_student_s_test_of_the_other() -> None:
    rng = np.random.default_rng(3)
    groups_Q, draws_T = rng.normal(0.3, 1, size=12), rng.normal(0.3, 1, size=6)
    tables = {
        "draws": (np.tile(draws_T, (9, 1)), draws_T),
        "groups": (np.tile(groups_Q[:, None], (1, 4)), groups_Q),
        "one draw": (groups_Q[:, None], groups_Q),
    }
    for name, (values_QT, sample) in tables.items():
        means, expected = crossed_means(values_QT[..., None]), scipy.stats.ttest_1samp(sample, 0.0)
        interval = expected.confidence_interval(0.95)
        assert means.df_M[0] == pytest.approx(expected.df), name
        assert means.mean_M[0] / means.std_error_M[0] == pytest.approx(expected.statistic), name
        if name == "draws":  # their skewness counts, too
            assert means.p()[0] == pytest.approx(slow.hall_p(sample.tolist())), name
        else:
            assert means.p()[0] == pytest.approx(expected.pvalue), name
            assert [end[0] for end in means.interval()] == pytest.approx([interval.low, interval.high]), name


def test_groups_and_draws_are_alike_and_their_order_does_not_matter() -> None:
    values_QTM = drawn(4, (8, 6, 20), groups=0.6, draws=0.2, rest=1.0)
    means = crossed_means(values_QTM)
    same(crossed_means(values_QTM.swapaxes(0, 1)), means)
    rng = np.random.default_rng(5)
    same(crossed_means(values_QTM[rng.permutation(8)][:, rng.permutation(6)]), means)
    scaled = crossed_means(3 * values_QTM + 1)
    same(scaled, replace(means, mean_M=3 * means.mean_M + 1, std_error_M=3 * means.std_error_M))
    mirrored = crossed_means(-values_QTM)
    np.testing.assert_allclose(mirrored.p(), means.p(), rtol=1e-9)
    np.testing.assert_allclose(mirrored.interval()[0], -means.interval()[1], rtol=1e-9)


def test_one_pretraining_is_none_and_copies_of_it_add_nothing() -> None:
    values_QTM = drawn(4, (8, 6, 20), groups=0.6, draws=0.2, rest=1.0)
    means = crossed_means(values_QTM)
    same(crossed_means(values_QTM[:, :, None]), means)
    copied = crossed_means(np.repeat(values_QTM[:, :, None], 3, axis=2))
    same(copied, means)
    np.testing.assert_allclose(copied.skewness_M, means.skewness_M, atol=1e-12)


@pytest.mark.slow
def test_pretrainings_are_a_third_sample() -> None:
    rng = np.random.default_rng(16)
    values_QTPM = rng.normal(size=(5, 4, 3, 20)) + rng.normal(size=(5, 1, 3, 20)) + rng.normal(size=(1, 4, 3, 20))
    values_QTPM += rng.normal(size=(1, 1, 3, 20))
    means = crossed_means(values_QTPM)
    for m in range(20):
        found = means.mean_M[m], means.std_error_M[m], means.df_M[m]
        np.testing.assert_allclose(found, slow.three_way(values_QTPM[..., m].tolist()), rtol=1e-9)
    same(crossed_means(values_QTPM.swapaxes(0, 2)), means)


LITTLE_REST = {"groups": 0.1, "draws": 0.1, "rest": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("n_draws", [5, 10, 20])
def test_intervals_cover_a_known_difference_where_the_draws_dominate(n_draws: int, skewed: bool) -> None:
    values_QTM = 0.02 + drawn(6, (150, n_draws, REPETITIONS), **LITTLE_REST, skewed=skewed)
    covered = coverage(crossed_means(values_QTM), 0.02)
    least = 0.93 - 0.01 * skewed  # skewness 1 costs Student's t about 1%
    assert (0.90 if n_draws == 5 else least) <= covered <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("n_draws", [5, 10, 20])
@pytest.mark.parametrize(
    ("groups", "draws", "rest", "most"),
    [(0.2, 0.02, 0.1, 0.97), (0.1, 0.004, 0.1, 0.98), (0.2, 0.0, 0.1, 0.97), (0.02, 0.0, 0.2, 0.995)],
)
def test_intervals_cover_wherever_the_variance_lies(
    groups: float, draws: float, rest: float, most: float, n_draws: int
) -> None:
    values_QTM = drawn(7, (150, n_draws, REPETITIONS), groups=groups, draws=draws, rest=rest)
    assert 0.93 <= coverage(crossed_means(values_QTM)) <= most


def test_intervals_over_folds_cover() -> None:
    folds_Q = np.repeat(np.arange(5), 30)
    groups_QTM = drawn(8, (150, FEWEST_DRAWS, REPETITIONS), groups=0.1, draws=0.0, rest=0.1)
    draws_FTM = 0.1 * np.random.default_rng(9).normal(size=(5, FEWEST_DRAWS, REPETITIONS))
    assert 0.93 <= coverage(crossed_means(groups_QTM + draws_FTM[folds_Q], folds_Q)) <= 0.98


def test_groups_alone_miss_what_the_draws_do() -> None:
    values_QTM = drawn(6, (150, 5, REPETITIONS), **LITTLE_REST)
    assert coverage(crossed_means(values_QTM.mean(axis=1, keepdims=True))) < 0.5


def test_p_is_uniform_without_a_difference_and_its_5_percent_is_the_interval() -> None:
    means = crossed_means(drawn(10, (100, 10, REPETITIONS), **LITTLE_REST))
    assert scipy.stats.kstest(means.p(), "uniform").pvalue > 0.01
    low_M, high_M = means.interval()
    np.testing.assert_array_equal(means.p() < 0.05, (low_M > 0) | (high_M < 0))


@pytest.mark.parametrize("skewness", [1e-300, 2.5e-19, 1e-12, -1e-9])
def test_hardly_any_skewness_is_none(skewness: float) -> None:
    """Rounding gives two draws some 1e-19, and `(cbrt(1 + x) - 1) / x` of that is 0 instead of 1/3."""
    means = crossed_means(drawn(4, (20, 5, 8), groups=0.5, draws=1.0, rest=1.0))
    none, hardly = (replace(means, skewness_M=np.full(8, value)) for value in (0.0, skewness))
    np.testing.assert_allclose(hardly.interval(), none.interval(), rtol=1e-7)
    np.testing.assert_allclose(hardly.p(), none.p(), rtol=1e-7)


def test_two_draws_have_the_interval_of_their_error() -> None:
    values_QTM = drawn(5, (40, 2, 50), groups=0.5, draws=1.0, rest=1.0)
    for folds_Q in (None, np.arange(40) // 8):
        means = crossed_means(values_QTM, folds_Q)
        low_M, high_M = means.interval()
        np.testing.assert_allclose((high_M - low_M) / 2, scipy.stats.t.ppf(0.975, means.df_M) * means.std_error_M)


def skewed_by(name: str, n_draws: int) -> Doubles:
    """Designs whose draws dominate, and are normal or exponential."""
    rng = np.random.default_rng(13)
    size = (1, n_draws, 2 * REPETITIONS)
    draws_1TM = rng.exponential(size=size) - 1 if name == "exponential" else rng.normal(size=size)
    return 0.1 * draws_1TM + drawn(14, (60, n_draws, 2 * REPETITIONS), groups=0.1, draws=0.0, rest=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("n_draws", [5, 10, 20])
def test_symmetric_draws_look_skewed_once_in_twenty_and_skewed_ones_more_often(n_draws: int) -> None:
    normal, exponential = (
        crossed_means(skewed_by(name, n_draws)).skewed_M.mean() for name in ("normal", "exponential")
    )
    assert 0.03 <= normal <= 0.07
    assert exponential >= {5: 0.12, 10: 0.3, 20: 0.6}[n_draws]


@pytest.mark.parametrize(("n_draws", "least", "most"), [(5, 0.88, 0.92), (10, 0.91, 0.95), (20, 0.92, 0.96)])
def test_skewed_draws_cost_the_coverage_that_reports_state(n_draws: int, least: float, most: float) -> None:
    assert least <= coverage(crossed_means(skewed_by("exponential", n_draws))) <= most


def test_skewness_of_folds_is_pooled_and_draws_that_do_not_vary_have_none() -> None:
    rng, folds_Q = np.random.default_rng(15), np.repeat([0, 1, 2], 20)
    draws_FTM = rng.normal(size=(3, 6, 4 * REPETITIONS))
    pooled = crossed_means(draws_FTM[folds_Q], folds_Q).skewed_M
    assert 0.03 <= pooled.mean() <= 0.07
    slow = scipy.stats.skew(draws_FTM, axis=1).mean(axis=0) / (6 * 4 / (7 * 9) / 3) ** 0.5
    np.testing.assert_array_equal(pooled, np.abs(slow) > scipy.stats.norm.ppf(0.975))
    assert not crossed_means(np.full((5, 6, 1), 0.1)).skewed_M.any()
    gaps_QTM = np.concatenate([draws_FTM, np.full((1, 6, draws_FTM.shape[2]), np.nan)])
    np.testing.assert_array_equal(crossed_means(gaps_QTM).skewed_M, crossed_means(draws_FTM).skewed_M)
    assert not crossed_means(draws_FTM[:, :4]).skewed_M.any(), "fewer than five draws are not judged at all"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_draws", "groups", "rest"), [(5, 0.1, 0.1), (5, 0.0, 0.1), (5, 1.0, 0.1), (10, 0.1, 0.1), (20, 0.1, 0.1)]
)
def test_a_promise_is_kept_as_often_as_it_says(n_draws: int, groups: float, rest: float) -> None:
    shape = (100, n_draws, 4 * REPETITIONS)
    first, again = (drawn(seed, shape, groups=groups, draws=0.1, rest=rest) for seed in (11, 19))
    promised_M = crossed_means(first).detectable()
    assert (crossed_means(again + promised_M).p() < 0.05).mean() == pytest.approx(0.8, abs=0.02)


@pytest.mark.slow
def test_promises_are_those_of_a_bisection_to_1e_6() -> None:
    """At every sixth of the points between which promises are interpolated."""
    inverse_G = np.linspace(0, 1.5, 97)[::6]
    df_G = 1 / np.maximum(inverse_G, 1e-6)
    with np.errstate(divide="ignore"):
        promised_G = _errors_to_promise(1 / inverse_G) / (1 + 0.175 * inverse_G)
    np.testing.assert_allclose(promised_G, [slow.promise(df) for df in df_G], rtol=1e-6)


def test_promises_grow_below_one_degree_of_freedom() -> None:
    errors_M = _errors_to_promise(np.array([0.67, 0.8, 1.0, 4.0, np.inf, np.nan]))
    assert (np.diff(errors_M[:5]) < 0).all()
    assert np.isnan(errors_M[5])


@pytest.mark.slow
@pytest.mark.parametrize("of_pretrainings", [0.0, 0.0014, 0.003, 0.005])
@pytest.mark.parametrize("n_pretrainings", [3, 5])
def test_intervals_cover_a_known_share_of_pretraining(n_pretrainings: int, of_pretrainings: float) -> None:
    shape, m = (100, 10, n_pretrainings), 2 * REPETITIONS
    rng = np.random.default_rng(17)
    share_QTPM = 0.004 + 0.015 * rng.normal(size=(100, 1, 1, m)) + 0.003 * rng.normal(size=(1, 10, 1, m))
    share_QTPM = share_QTPM + of_pretrainings * rng.normal(size=(1, 1, n_pretrainings, m))
    share_QTPM = share_QTPM + 0.02 * rng.normal(size=(*shape, m))
    assert 0.93 <= coverage(crossed_means(share_QTPM), 0.004) <= 0.99
    if of_pretrainings >= 0.003:  # one encoder that serves all draws, as if there were no other
        assert coverage(crossed_means(share_QTPM[:, :, :1]), 0.004) < 0.8


def test_of_one_draw_and_many_groups_the_detectable_difference_is_that_of_a_normal_variable() -> None:
    means = crossed_means(drawn(12, (4000, 1, 50), groups=1.0, draws=0.0, rest=0.0))
    np.testing.assert_allclose(means.detectable(), 2.8016 * means.std_error_M, rtol=1e-3)


def test_edges_without_a_difference_and_without_groups() -> None:
    nothing = crossed_means(np.zeros((6, 5, 1)))
    assert [float(end[0]) for end in (*nothing.interval(), nothing.p(), nothing.detectable())] == [0, 0, 1, 0]
    certain = crossed_means(np.ones((6, 5, 1)))
    assert [float(end[0]) for end in (*certain.interval(), certain.p())] == [1, 1, 0]
    for few in (np.empty((0, 5, 1)), np.full((4, 5, 1), np.nan), np.ones((1, 5, 1))):
        means = crossed_means(few)
        assert np.isnan([*means.std_error_M, *means.df_M, *means.p(), *means.detectable()]).all()
    assert crossed_means(np.ones((1, 5, 1))).mean_M[0] == 1.0
