"""Lifts of live tests: statsmodels as the oracle, what the test of a share of the base says, and simulated users."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from statsmodels.regression.linear_model import WLS
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import NormalIndPower
from statsmodels.stats.proportion import confint_proportions_2indep, proportions_ztest
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

from ltrscale.evaluation.statistics.blocks import holm
from ltrscale.evaluation.statistics.lifts import Lifts, UserMoments, samples_needed

Values = NDArray[np.float64]


def moments(x_MU: Values, y_MU: Values | None = None) -> UserMoments:
    """Of M columns of users; y is 1 for each user if it is not given."""
    y_MU = np.ones_like(x_MU) if y_MU is None else y_MU
    n, x_M, y_M = x_MU.shape[-1], x_MU.mean(-1), y_MU.mean(-1)
    off_x, off_y = x_MU - x_M[..., None], y_MU - y_M[..., None]
    products = ((a * b).sum(-1) / (n - 1) for a, b in ((off_x, off_x), (off_y, off_y), (off_x, off_y)))
    return UserMoments(np.full(x_M.shape, float(n)), x_M, y_M, *products)


def test_means_are_those_of_statsmodels() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.lognormal(1, 1, 300), rng.lognormal(1.1, 1, 200)
    lifts = Lifts.between(moments(old[None]), moments(new[None]))
    compared = CompareMeans(DescrStatsW(new), DescrStatsW(old))
    assert np.ravel(lifts.interval()) == pytest.approx(compared.tconfint_diff(usevar="unequal"))
    assert lifts.p() == pytest.approx(compared.ttest_ind(usevar="unequal")[1])


def test_proportions_are_those_of_statsmodels() -> None:
    counts, n = (310, 250), 5_000
    new, old = (np.repeat([1.0, 0.0], [count, n - count])[None] for count in counts)
    lifts = Lifts.between(moments(old), moments(new))
    wald = confint_proportions_2indep(counts[0], n, counts[1], n, method="wald")
    assert np.ravel(lifts.interval()) == pytest.approx(wald, abs=1e-5)
    score = confint_proportions_2indep(counts[0], n, counts[1], n, compare="ratio", method="score")
    assert np.ravel(lifts.relative()[1:]) == pytest.approx(np.array(score) - 1, abs=0.005)
    assert lifts.p() == pytest.approx(proportions_ztest(counts, (n, n))[1], rel=0.02)


def test_a_ratio_over_sessions_is_that_of_a_regression_with_errors_by_user() -> None:
    rng = np.random.default_rng(1)
    arm_U, sessions_U = rng.integers(0, 2, 800), 1 + rng.poisson(3, 800)
    rate_U = rng.gamma(2, 0.3, 800) * (1 + 0.2 * arm_U)
    clicks_U = rng.poisson(rate_U * sessions_U).astype(float)
    control, other = (moments(clicks_U[None, arm_U == a], sessions_U[None, arm_U == a].astype(float)) for a in (0, 1))
    lifts = Lifts.between(control, other)
    exog = np.stack([np.ones(800), arm_U], axis=1)
    fit = WLS(clicks_U / sessions_U, exog, weights=sessions_U).fit()
    robust = fit.get_robustcov_results("cluster", groups=np.arange(800), use_correction=False)
    assert lifts.difference_M == pytest.approx(robust.params[1])
    assert np.sqrt(lifts.variance_M) == pytest.approx(robust.bse[1], rel=2e-3)  # it divides by n, not by n - 1


@pytest.mark.slow
def test_p_values_and_samples_are_those_of_statsmodels() -> None:
    p_M = np.random.default_rng(2).random(9) ** 3
    assert holm(p_M) == pytest.approx(multipletests(p_M, method="holm")[1])
    n_each = NormalIndPower().solve_power(effect_size=0.2, alpha=0.05 / 3, power=0.8)
    assert samples_needed(0.2, 2.0, level=0.05 / 3) == pytest.approx(n_each, rel=1e-4)


@given(st.integers(0, 2**32 - 1), st.floats(-0.9, 3.0), st.booleans())
def test_an_interval_has_the_shares_that_the_test_of_the_difference_does_not_reject(
    seed: int, effect: float, within: bool
) -> None:
    rng = np.random.default_rng(seed)
    old_U, new_U = rng.exponential(size=(2, 40)) * np.array([[1], [1 + effect]])
    if within:
        lifts = Lifts.within(moments((new_U - old_U)[None], (new_U + old_U)[None] / 2))
    else:
        lifts = Lifts.between(moments(old_U[None]), moments(new_U[None]))
    (low,), (high,) = lifts.interval()
    lift, *ends = (float(values_M[0]) for values_M in lifts.relative())
    assert (low <= 0 <= high) == (lifts.p()[0] >= 0.05)
    if not np.isnan(lift):
        assert ends[0] <= lift <= ends[1]
        assert (ends[0] <= 0 <= ends[1]) == (low <= 0 <= high)
        for end in ends:
            variance_M = lifts.variance_M - 2 * end * lifts.covariance_M + end**2 * lifts.base_variance_M
            there = lifts._replace(difference_M=lifts.difference_M - end * lifts.base_M, variance_M=variance_M)
            assert there.p() == pytest.approx(0.05)


def test_nothing_that_varies_or_counts_gives_no_alarm() -> None:
    nothing, same = np.zeros((1, 9)), np.ones((1, 9))
    assert Lifts.between(moments(nothing), moments(nothing)).p() == 1
    assert Lifts.between(moments(same), moments(2 * same)).p() == 0
    assert np.isnan(Lifts.between(moments(nothing), moments(same)).relative()).all()
    assert np.isnan(Lifts.between(moments(same, nothing), moments(same, nothing)).p()).all()


DRAWS, USERS = 1_000, 400


def interleaved(share: float, seed: int) -> tuple[UserMoments, UserMoments]:
    """Clicks and orders of users, in 1,000 draws; a user clicks much or little, and mostly items of one ranking."""
    rng = np.random.default_rng(seed)
    rate_DU, part_DU = rng.gamma(0.7, 4.0, (DRAWS, USERS)), rng.beta(12 * share, 12 * (1 - share), (DRAWS, USERS))
    clicks = [rng.poisson(rate_DU * of_arm_DU).astype(float) for of_arm_DU in (part_DU, 1 - part_DU)]
    orders = [rng.binomial(each.astype(int), 0.2).astype(float) for each in clicks]
    both = ((new - old, (new + old) / 2) for new, old in (clicks, orders))
    clicked, ordered = (moments(*each) for each in both)
    return clicked, ordered


@pytest.mark.parametrize("share", [0.5, 0.53])
def test_intervals_of_interleaving_cover_the_lift_as_often_as_they_say(share: float) -> None:
    for of_goal in interleaved(share, seed=1):
        _, low_D, high_D = Lifts.within(of_goal).relative()
        assert 0.93 <= np.mean((low_D <= 4 * (share - 0.5)) & (4 * (share - 0.5) <= high_D)) <= 0.97


def test_equal_rankings_give_at_most_one_false_alarm_in_twenty_interleavings() -> None:
    p_DM = np.stack([Lifts.within(of_goal).p() for of_goal in interleaved(0.5, seed=2)], axis=1)
    assert np.mean([holm(p_M).min() < 0.05 for p_M in p_DM]) <= 0.05


def test_equal_arms_give_at_most_one_false_alarm_in_twenty_tests_and_intervals_cover() -> None:
    rng = np.random.default_rng(3)
    sessions = [1.0 + rng.poisson(2, (DRAWS, users)) for users in (500, 250)]
    revenue = [rng.poisson(0.3 * n) * rng.lognormal(1, 1, n.shape) for n in sessions]
    pairs = [(moments(value), moments(value, n)) for value, n in zip(revenue, sessions, strict=True)]
    found = [Lifts.between(*arms) for arms in zip(*pairs, strict=True)]
    p_DM = np.stack([lifts.p() for lifts in found], axis=1)
    assert np.mean([holm(p_M).min() < 0.05 for p_M in p_DM]) <= 0.05
    for lifts in found:
        _, low_D, high_D = lifts.relative()
        assert 0.93 <= np.mean((low_D <= 0) & (high_D >= 0)) <= 0.97


def test_the_users_of_a_plan_find_the_lift_with_its_power() -> None:
    rng, base, lift = np.random.default_rng(4), 0.1, 0.2
    needed = samples_needed(lift * base, base * (1 - base) * 4)
    assert needed is not None
    n = round(needed / 2)
    old, new = (rng.binomial(1, rate, (400, n)).astype(float) for rate in (base, base * (1 + lift)))
    found = np.mean(Lifts.between(moments(old), moments(new)).p() < 0.05)
    assert found == pytest.approx(0.8, abs=3 * (0.8 * 0.2 / 400) ** 0.5)
