"""Laws of means over crossed groups and draws: slow sums, scipy at the edges, coverage, power, invariances, curves."""

import math

import numpy as np
import pytest
import scipy.stats
from reference import crossed as slow

from ltrscale.arrays import Doubles
from ltrscale.evaluation.statistics.crossed import (
    FEWEST_DRAWS,
    Drawn,
    Means,
    Spread,
    crossed_means,
    crossovers,
    estimate,
    looks_skewed,
)

REPETITIONS = 1000


def drawn(
    seed: int, shape: tuple[int, int, int], *, groups: float, draws: float, rest: float, skewed: bool = False
) -> Doubles:
    """Experiments side by side [Q, T, M] with mean 0: effects of groups, of draws and of both together."""
    rng, (q, t, m) = np.random.default_rng(seed), shape

    def effect(*size: int) -> Doubles:
        return rng.gamma(4.0, 0.5, size=size) - 2.0 if skewed else rng.normal(size=size)  # variance 1, skewness 1 or 0

    return groups * effect(q, 1, m) + draws * effect(1, t, m) + rest * effect(q, t, m)


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
        assert means.p()[0] == pytest.approx(expected.pvalue), name
        assert [end[0] for end in means.interval()] == pytest.approx([interval.low, interval.high]), name


def test_groups_and_draws_are_alike_and_their_order_does_not_matter() -> None:
    values_QTM = drawn(4, (8, 6, 20), groups=0.6, draws=0.2, rest=1.0)
    means = crossed_means(values_QTM)
    same(crossed_means(values_QTM.swapaxes(0, 1)), means)
    rng = np.random.default_rng(5)
    same(crossed_means(values_QTM[rng.permutation(8)][:, rng.permutation(6)]), means)
    scaled = crossed_means(3 * values_QTM + 1)
    same(scaled, Means(3 * means.mean_M + 1, 3 * means.std_error_M, means.df_M))


LITTLE_REST = {"groups": 0.1, "draws": 0.1, "rest": 0.1}


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("n_draws", [5, 10, 20])
def test_intervals_cover_a_known_difference_where_the_draws_dominate(n_draws: int, skewed: bool) -> None:
    values_QTM = 0.02 + drawn(6, (150, n_draws, REPETITIONS), **LITTLE_REST, skewed=skewed)
    covered = coverage(crossed_means(values_QTM), 0.02)
    least = 0.93 - 0.01 * skewed  # skewness 1 costs Student's t about 1%
    assert (0.90 if n_draws == 5 else least) <= covered <= 0.97


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


def skewed_by(name: str, n_draws: int) -> Doubles:
    """Designs whose draws dominate, and are normal or exponential."""
    rng = np.random.default_rng(13)
    size = (1, n_draws, 2 * REPETITIONS)
    draws_1TM = rng.exponential(size=size) - 1 if name == "exponential" else rng.normal(size=size)
    return 0.1 * draws_1TM + drawn(14, (60, n_draws, 2 * REPETITIONS), groups=0.1, draws=0.0, rest=0.1)


@pytest.mark.parametrize("n_draws", [5, 10, 20])
def test_symmetric_draws_look_skewed_once_in_twenty_and_skewed_ones_more_often(n_draws: int) -> None:
    normal, exponential = (looks_skewed(skewed_by(name, n_draws)).mean() for name in ("normal", "exponential"))
    assert 0.03 <= normal <= 0.07
    assert exponential >= {5: 0.12, 10: 0.3, 20: 0.6}[n_draws]


@pytest.mark.parametrize(("n_draws", "least", "most"), [(5, 0.86, 0.90), (10, 0.90, 0.94), (20, 0.92, 0.96)])
def test_skewed_draws_cost_the_coverage_that_reports_state(n_draws: int, least: float, most: float) -> None:
    assert least <= coverage(crossed_means(skewed_by("exponential", n_draws))) <= most


def test_skewness_of_folds_is_pooled_and_draws_that_do_not_vary_have_none() -> None:
    rng, folds_Q = np.random.default_rng(15), np.repeat([0, 1, 2], 20)
    draws_FTM = rng.normal(size=(3, 6, 4 * REPETITIONS))
    pooled = looks_skewed(draws_FTM[folds_Q], folds_Q)
    assert 0.03 <= pooled.mean() <= 0.07
    slow = scipy.stats.skew(draws_FTM, axis=1).mean(axis=0) / (6 * 4 / (7 * 9) / 3) ** 0.5
    np.testing.assert_array_equal(pooled, np.abs(slow) > scipy.stats.norm.ppf(0.975))
    assert not looks_skewed(np.full((5, 6, 1), 0.1)).any()
    gaps_QTM = np.concatenate([draws_FTM, np.full((1, 6, draws_FTM.shape[2]), np.nan)])
    np.testing.assert_array_equal(looks_skewed(gaps_QTM), looks_skewed(draws_FTM))
    assert not looks_skewed(draws_FTM[:, :4]).any(), "fewer than five draws are not judged at all"


@pytest.mark.slow
@pytest.mark.parametrize(("n_draws", "groups", "rest"), [(5, 0.1, 0.1), (5, 0.0, 0.1), (10, 0.1, 0.1), (20, 0.1, 0.1)])
def test_a_detectable_difference_is_found_as_often_as_it_says(n_draws: int, groups: float, rest: float) -> None:
    values_QTM = drawn(11, (100, n_draws, 4 * REPETITIONS), groups=groups, draws=0.1, rest=rest)
    difference = float(np.median(crossed_means(values_QTM).detectable()))
    assert (crossed_means(values_QTM + difference).p() < 0.05).mean() == pytest.approx(0.8, abs=0.02)


def found_share(groups: float, draws: float, *, n_groups: int, n_draws: int, difference: float) -> float:
    """How often a difference is found where groups and draws have these standard deviations."""
    values_QTM = drawn(13, (n_groups, n_draws, 4 * REPETITIONS), groups=groups, draws=draws, rest=0.0)
    return float((crossed_means(values_QTM + difference).p() < 0.05).mean())


@pytest.mark.slow
@pytest.mark.parametrize("difference", [0.05, 0.08, 0.12])
def test_as_many_draws_as_are_foreseen_find_a_difference_and_fewer_do_not(difference: float) -> None:
    n_draws = Spread(0.1**2, 0.1**2 / 100, 100).draws_for(difference)
    assert n_draws is not None
    power = {n: found_share(0.1, 0.1, n_groups=100, n_draws=n, difference=difference) for n in (n_draws - 2, n_draws)}
    assert power[n_draws] >= 0.79
    assert power[n_draws - 2] < 0.81


def test_as_many_labels_or_groups_as_are_foreseen_find_a_difference() -> None:
    spread = Spread(0.1**2, 0.1**2 / 100, 100)
    labels, groups = (
        spread.times_for(0.08, 6, more="labels"),
        Spread(0.02**2, 0.1**2 / 20, 20).times_for(0.05, 6, more="groups"),
    )
    assert labels is not None
    assert groups is not None
    assert min(labels, groups) > 1.2
    of_labels = found_share(0.1, 0.1 / labels**0.5, n_groups=100, n_draws=6, difference=0.08)
    of_groups = found_share(0.1, 0.02, n_groups=round(20 * groups), n_draws=6, difference=0.05)
    assert (of_labels, of_groups) == (pytest.approx(0.8, abs=0.02), pytest.approx(0.8, abs=0.02))
    assert spread.times_for(0.02, 6, more="labels") is None, "the groups alone hide it"
    assert spread.draws_for(0.02) is None
    assert spread.times_for(0.02, 6, more="groups") is None, "the draws alone hide it"


def test_what_a_design_sees_follows_from_its_own_spread() -> None:
    for groups, draws in ((0.02, 0.1), (0.3, 0.02)):
        values_QT = drawn(14, (300, 6, 1), groups=groups, draws=draws, rest=0.1)[..., 0]
        spread = Spread.of(values_QT)
        assert spread is not None
        assert spread.detectable(6) == pytest.approx(crossed_means(values_QT[..., None]).detectable()[0], rel=0.02)
        assert spread.detectable(12) < spread.detectable(6)
    assert Spread.of(np.ones((1, 6))) is Spread.of(np.ones((6, 1))) is None


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


NUMBERS = (30, 100, 300, 1000)


def drawn_at(
    mean: float, rng: np.random.Generator, *, draws: int = 8, groups: int = 300, of_draws: float = 0.01
) -> Drawn:
    """Differences with variance between groups, between draws, and of both together."""
    group_Q1, draw_1T = rng.normal(size=(groups, 1)), rng.normal(size=(1, draws))
    rest_QT = rng.normal(size=(groups, draws))
    return Drawn(tuple(range(draws)), mean + 0.1 * group_Q1 + of_draws * draw_1T + 0.05 * rest_QT)


def curve(means: list[float], rng: np.random.Generator, **how: float) -> list[tuple[float, Drawn]]:
    return [(n, drawn_at(mean, rng, **how)) for n, mean in zip(NUMBERS, means, strict=True)]  # type: ignore[arg-type]


def exact(values: list[float], draws: int = 6) -> list[tuple[float, Drawn]]:
    """A curve without any noise."""
    return [(n, Drawn(tuple(range(draws)), np.full((5, draws), v))) for n, v in zip(NUMBERS, values, strict=True)]


def test_an_estimate_is_the_crossed_mean_and_fewer_than_five_draws_judge_nothing() -> None:
    rng = np.random.default_rng(0)
    many = drawn_at(0.05, rng)
    means, found = crossed_means(many.values_QT[:, :, None]), estimate(many)
    assert found is not None
    low_M, high_M = means.interval()
    assert (found.mean, found.low, found.high) == (means.mean_M[0], low_M[0], high_M[0])
    assert found.over_draws == pytest.approx(np.std(many.values_QT.mean(axis=0), ddof=1) / math.sqrt(8))
    assert found.verdict == "above"
    worse = estimate(Drawn(many.draws, -many.values_QT))
    assert worse is not None
    assert worse.verdict == "below"
    few = estimate(many.of([0, 1, 2, 3]))
    assert few is not None
    assert (few.low, few.high, few.p, few.detectable, few.verdict) == (None, None, None, None, "open")
    assert estimate(Drawn((0,), np.full((3, 1), np.nan))) is None


def test_an_open_difference_has_what_would_see_it_and_a_decided_one_has_not() -> None:
    rng = np.random.default_rng(0)
    open_QT = np.linspace(-0.05, 0.07, 8) + rng.normal(scale=0.01, size=(300, 8))
    decided, unsure = estimate(drawn_at(0.05, rng)), estimate(Drawn(tuple(range(8)), open_QT))
    assert decided is not None
    assert unsure is not None
    assert (decided.verdict, decided.needs) == ("above", None)
    assert unsure.verdict == "open"
    assert unsure.needs is not None
    assert unsure.needs.draws is not None
    assert unsure.needs.draws > unsure.draws
    assert unsure.needs.groups is None, "the draws alone hide it"
    deviation = open_QT.mean(axis=0).std(ddof=1)
    assert unsure.needs.draws == pytest.approx((2.9 * deviation / 0.01) ** 2, rel=0.2)
    few = estimate(Drawn(tuple(range(4)), open_QT[:, :4]))
    assert few is not None
    assert few.needs is None, "fewer than five draws judge nothing"
    same = estimate(Drawn(tuple(range(5)), np.zeros((4, 5))))
    assert same is not None
    assert (same.verdict, same.needs) == ("open", None), "nothing tells methods apart that are the same"


def test_differences_are_of_the_draws_that_both_have() -> None:
    values_QT = np.arange(8.0).reshape(2, 4)
    one, other = Drawn((0, 1, 2, 5), values_QT), Drawn((5, 1, 7), np.ones((2, 3)))
    both = one.minus(other)
    assert both is not None
    assert both.draws == (1, 5)
    assert both.values_QT.tolist() == [[0.0, 2.0], [4.0, 6.0]]
    assert one.minus(Drawn((9,), np.ones((2, 1)))) is None


def test_a_crossover_is_interpolated_in_the_logarithm() -> None:
    (found,) = crossovers(exact([0.2, 0.1, -0.1, -0.2]))
    assert found.at == pytest.approx(math.sqrt(100 * 300))
    assert found.falls
    assert found.low == pytest.approx(found.at, rel=0.05)
    assert found.high == pytest.approx(found.at, rel=0.05)
    (rises,) = crossovers(exact([-0.3, 0.1, 0.1, 0.2]))
    assert rises.at == pytest.approx(math.exp(math.log(30) + 0.75 * math.log(100 / 30)))
    assert not rises.falls
    assert [x.falls for x in crossovers(exact([0.1, -0.1, 0.1, -0.1]))] == [True, False, True]


def test_no_crossover_in_the_range_is_an_answer() -> None:
    assert crossovers(exact([0.1, 0.2, 0.1, 0.3])) == ()
    assert crossovers(exact([0.1, 0.0, 0.0, 0.1])) == (), "touching 0 is no change of sign"
    assert crossovers(exact([0.1, 0.2, 0.1, 0.3])[:1]) == ()
    (through,) = crossovers(exact([0.1, 0.0, 0.0, -0.1]))
    assert 100 <= through.at <= 300


def test_ends_are_open_where_the_data_do_not_settle_them() -> None:
    rng = np.random.default_rng(1)

    def around(mean: float) -> Drawn:
        noise_QT = drawn_at(0.0, rng, of_draws=0.05).values_QT
        return Drawn(tuple(range(8)), noise_QT - noise_QT.mean() + mean)

    (wide,) = crossovers([(30, around(0.001)), (1000, around(-0.2))])
    assert wide.low is None
    assert wide.high is not None
    assert 30 < wide.at < wide.high < 1000
    few = [(n, d.of([0, 1, 2, 3])) for n, d in exact([0.2, 0.1, -0.1, -0.2])]
    (unjudged,) = crossovers(few)
    assert unjudged.low is None
    assert unjudged.high is None


@pytest.mark.slow
def test_the_interval_contains_the_true_crossover_as_often_as_it_says() -> None:
    rng, truth, hits, found = np.random.default_rng(2), math.sqrt(100 * 300), 0, 0
    for _ in range(300):
        crossed = crossovers(curve([0.06, 0.02, -0.02, -0.06], rng, of_draws=0.02, groups=150))
        (nearest,) = sorted(crossed, key=lambda x: abs(math.log(x.at / truth)))[:1] or (None,)
        if nearest is not None:
            found += 1
            hits += (nearest.low or 0) <= truth <= (nearest.high or math.inf)
    assert found > 290
    assert 0.9 <= hits / found <= 0.99
