"""Laws of the resampling: exact small cases, coverage, size of the test, and agreement with scipy.

And of the choice between it and the crossed test: by the draws of labels that methods have and share.
"""

import itertools

import numpy as np
import pytest
import scipy.stats
from numpy.typing import NDArray

from ltrscale.arrays import Doubles
from ltrscale.evaluation.pages import verdicts
from ltrscale.evaluation.statistics.blocks import Blocks, holm
from ltrscale.evaluation.statistics.blocks import bootstrap_means as means_over_blocks
from ltrscale.evaluation.statistics.blocks import sign_flip_p as flips_of_blocks
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS, crossed_means
from ltrscale.evaluation.statistics.summarise import PATTERNS, Scope, judged_together, scopes


def bootstrap_means(values_QM: Doubles, *, samples: int, seed: int) -> Doubles:
    """With each group as a block."""
    (means_SM,) = means_over_blocks([Blocks.from_values(values_QM[:, None])], samples=samples, seed=seed)
    return means_SM


def sign_flip_p(differences_QM: Doubles, *, samples: int, seed: int) -> Doubles:
    """With each group as a block."""
    (p_M,) = flips_of_blocks([Blocks.from_values(differences_QM[:, None])], samples=samples, seed=seed)
    return p_M


def test_bootstrap_agrees_with_scipy() -> None:
    values_Q = np.random.default_rng(0).gamma(2.0, size=200)
    means_S = bootstrap_means(values_Q[:, None], samples=20_000, seed=1)[:, 0]
    expected = scipy.stats.bootstrap((values_Q,), np.mean, n_resamples=20_000, method="percentile", rng=2)
    interval = expected.confidence_interval
    np.testing.assert_allclose(np.quantile(means_S, [0.025, 0.975]), [interval.low, interval.high], rtol=0.01)


def test_bootstrap_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    values_QM = rng.exponential(size=(80, 300))  # 300 experiments side by side; the mean is 1
    low_M, high_M = np.quantile(bootstrap_means(values_QM, samples=2000, seed=4), [0.025, 0.975], axis=0)
    assert 0.90 <= ((low_M <= 1) & (high_M >= 1)).mean() <= 0.97


def test_bootstrap_leaves_undefined_groups_out() -> None:
    values_QM = np.array([[1.0, np.nan], [np.nan, 4.0], [3.0, 4.0], [np.nan, 4.0]])
    means_SM = bootstrap_means(values_QM, samples=4000, seed=0)
    np.testing.assert_array_equal(means_SM[~np.isnan(means_SM[:, 1]), 1], 4.0)
    drawn = ~np.isnan(means_SM[:, 0])
    assert (~drawn).mean() == pytest.approx(0.5**4, abs=0.015)  # neither of the two defined groups is drawn
    assert means_SM[drawn, 0].mean() == pytest.approx(2.0, abs=0.05)
    assert np.isnan(bootstrap_means(np.empty((0, 2)), samples=5, seed=0)).all()


def test_bootstrap_draws_the_same_groups_for_all_columns_and_seeds_repeat() -> None:
    values_Q = np.random.default_rng(5).normal(size=30)
    means_SM = bootstrap_means(np.stack([values_Q, values_Q + 1], axis=1), samples=100, seed=6)
    np.testing.assert_allclose(means_SM[:, 1] - means_SM[:, 0], 1.0, atol=1e-12)
    again_SM = bootstrap_means(np.stack([values_Q, values_Q], axis=1), samples=100, seed=6)
    np.testing.assert_array_equal(again_SM[:, 0], means_SM[:, 0])
    assert (bootstrap_means(values_Q[:, None], samples=100, seed=7)[:, 0] != means_SM[:, 0]).any()


def test_blocks_cut_the_resamples_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ltrscale.evaluation.statistics.blocks._DRAWN", 70)
    means_SM = bootstrap_means(np.arange(10.0)[:, None], samples=101, seed=0)
    assert means_SM.shape == (101, 1)
    assert not np.isnan(means_SM).any()
    assert means_SM.std() > 0


def test_sign_flip_agrees_with_all_patterns() -> None:
    differences_Q = np.random.default_rng(8).normal(0.4, 1.0, size=10)
    sums = [abs(np.dot(signs, differences_Q)) for signs in itertools.product((-1, 1), repeat=10)]
    exact = np.mean(np.array(sums) >= abs(differences_Q.sum()) - 1e-12)
    assert sign_flip_p(differences_Q[:, None], samples=50_000, seed=9)[0] == pytest.approx(exact, abs=0.01)


def test_sign_flip_p_is_uniform_without_a_difference_and_small_with_one() -> None:
    null_QM = np.random.default_rng(10).standard_t(4, size=(60, 400))
    p_M = sign_flip_p(null_QM, samples=1000, seed=11)
    assert scipy.stats.kstest(p_M, "uniform").pvalue > 0.01
    assert (sign_flip_p(null_QM + 2.0, samples=1000, seed=11) == 1 / 1001).all()


def test_sign_flip_is_two_sided_ignores_undefined_groups_and_knows_no_difference() -> None:
    differences_Q = np.random.default_rng(12).normal(0.3, 1.0, size=40)
    gaps_Q = np.where(np.arange(40) < 20, differences_Q, np.nan)
    zeros_Q = np.where(np.arange(40) < 20, differences_Q, 0.0)
    columns_QM = np.stack([differences_Q, -differences_Q, gaps_Q, zeros_Q, np.zeros(40)], axis=1)
    p_M = sign_flip_p(columns_QM, samples=5000, seed=13)
    assert p_M[0] == p_M[1]
    assert p_M[2] == p_M[3]
    assert p_M[4] == 1.0
    assert (sign_flip_p(np.empty((0, 2)), samples=10, seed=0) == 1.0).all()


def test_holm_by_hand_and_order() -> None:
    np.testing.assert_allclose(holm(np.array([0.5, 0.02, 0.02, 0.9])), [1.0, 0.08, 0.08, 1.0])
    p_M = np.random.default_rng(14).uniform(size=6)
    order_M = np.random.default_rng(15).permutation(6)
    np.testing.assert_array_equal(holm(p_M)[order_M], holm(p_M[order_M]))
    assert (holm(p_M) >= p_M).all()


def compared(values_K: list[Doubles], labels_K: list[str], *, folds_Q: NDArray[np.int64] | None = None) -> list[Scope]:
    """Each method's values of one metric [Q, t] as scopes; a letter of `labels_K` is a trial's draw of labels."""
    (of_methods,) = scopes(
        [[Blocks.from_values(values_Qt[..., None]) for values_Qt in values_K]],
        ["map"],
        baseline=0,
        samples=400,
        seed=0,
        labels_K=[list(labels) for labels in labels_K],
        folds_Q=folds_Q,
    )
    return of_methods


def two_methods(draws: int, *, seed: int = 16) -> list[Doubles]:
    """Values of two methods, [Q, t] each, on the same draws, which matter to both."""
    rng = np.random.default_rng(seed)
    of_draws_t = rng.normal(scale=0.3, size=(1, draws))
    return [of_draws_t + rng.normal(shift, 1.0, size=(40, draws)) for shift in (0.0, 0.4)]


def test_several_draws_are_compared_by_the_crossed_test_of_the_paired_differences() -> None:
    worse_Qt, better_Qt = two_methods(6)
    shuffled = [4, 2, 0, 1, 5, 3]
    base, scope = compared([worse_Qt, better_Qt[:, shuffled]], ["abcdef", "ecabfd"])
    expected = crossed_means((better_Qt - worse_Qt)[..., None])
    found = scope.comparisons["map"]
    ends = [float(end[0]) for end in expected.interval()]
    assert [found.difference, found.low, found.high] == pytest.approx([expected.mean_M[0], *ends])
    assert (found.p, found.p_holm) == pytest.approx((expected.p()[0], expected.p()[0]))
    assert (found.detectable, found.draws) == (pytest.approx(expected.detectable()[0]), 6)
    mean = crossed_means(worse_Qt[..., None]).interval()
    summary = base.summaries["map"]
    assert [summary.low, summary.high, summary.draws] == pytest.approx([mean[0][0], mean[1][0], 6])


def test_a_difference_of_skewed_draws_is_marked_and_named() -> None:
    worse_Qt, better_Qt = two_methods(6)
    one_is_rare_t = np.array([0.0, 0.1, -0.1, 0.05, 8.0, 0.0])
    for off_t, skewed in ((0.0, False), (one_is_rare_t, True)):
        (_, scope) = compared([worse_Qt, better_Qt + off_t], ["abcdef", "abcdef"])
        assert scope.comparisons["map"].skewed == skewed
        lines = verdicts({"better": scope.comparisons["map"]})
        assert any("look skewed in 1 of 1 differences (better)" in line for line in lines) == skewed


@pytest.mark.parametrize("draws", range(2, FEWEST_DRAWS + 1))
def test_fewer_than_five_draws_judge_nothing(draws: int) -> None:
    assert FEWEST_DRAWS == 5
    labels = "abcde"[:draws]
    found = compared(two_methods(draws), [labels, labels])[1].comparisons["map"]
    given = [x is not None for x in (found.low, found.high, found.p, found.p_holm, found.detectable)]
    assert given == [draws == FEWEST_DRAWS] * 5
    assert found.draws == draws


def test_trials_of_the_same_labels_are_one_draw() -> None:
    worse_Qt, better_Qt = two_methods(12)
    same = compared([worse_Qt, better_Qt], ["a" * 12, "a" * 12])[1].comparisons["map"]
    means = [values_Qt.mean(axis=1, keepdims=True) for values_Qt in (worse_Qt, better_Qt)]
    alone = compared(means, ["a", "b"])[1].comparisons["map"]
    assert same.model_dump() == pytest.approx(alone.model_dump())
    assert same.p == sign_flip_p(means[1] - means[0], samples=400, seed=0)[0]
    seeds = compared([worse_Qt, better_Qt], ["abcdef" * 2, "abcdef" * 2])[1].comparisons["map"]
    by_draw = [(values_Qt[:, :6] + values_Qt[:, 6:]) / 2 for values_Qt in (worse_Qt, better_Qt)]
    assert seeds == compared(by_draw, ["abcdef", "abcdef"])[1].comparisons["map"]


def test_methods_are_paired_by_the_draws_that_both_have() -> None:
    worse_Qt, better_Qt = two_methods(8)
    found = compared([worse_Qt[:, :7], better_Qt[:, 1:]], ["abcdefg", "bcdefgh"])[1].comparisons["map"]
    both = compared([worse_Qt[:, 1:7], better_Qt[:, 1:7]], ["bcdefg", "bcdefg"])[1].comparisons["map"]
    assert found == both
    assert found.draws == 6
    none = compared([worse_Qt, better_Qt], ["abcdefgh", "ijklmnop"])[1].comparisons["map"]
    assert (none.draws, none.p, none.low) == (0, None, None)
    assert none.difference == pytest.approx(better_Qt.mean() - worse_Qt.mean())
    # a method of one draw is a fixed reference
    fixed = compared([worse_Qt[:, :1], better_Qt], ["a", "abcdefgh"])[1].comparisons["map"]
    expected = crossed_means((better_Qt - worse_Qt[:, :1])[..., None])
    assert (fixed.draws, fixed.p) == (8, pytest.approx(expected.p()[0]))


def test_holm_counts_the_methods_that_are_judged() -> None:
    base_Qt, one_Qt = two_methods(6)
    other_Qt, few_Qt = two_methods(6, seed=17)
    found = [
        scope.comparisons["map"]
        for scope in compared([base_Qt, one_Qt, other_Qt, few_Qt[:, :3]], ["abcdef", "abcdef", "abcdef", "abc"])[1:]
    ]
    assert found[2].p is None
    p = [one.p for one in found[:2]]
    assert None not in p
    assert [one.p_holm for one in found[:2]] == pytest.approx(holm(np.array(p, dtype=float)).tolist())


@pytest.mark.slow
def test_a_clear_difference_stands_among_many_slices_however_few_resamples() -> None:
    """150 comparisons by 400 patterns alone had p = 150 / 401 at the least."""
    rng, names = np.random.default_rng(18), [f"s{i}" for i in range(150)]
    both = [[rng.normal(0, 1, (40, 1, 1)), rng.normal(3.0 * (name == "s0"), 1, (40, 1, 1))] for name in names]
    slices = [list(map(Blocks.from_values, of_slice)) for of_slice in both]
    by_slice = scopes(slices, ["map"], baseline=0, samples=400, seed=0, together=len(names))
    found = judged_together(dict(zip(names, by_slice, strict=True)))
    p = [found[name][1].comparisons["map"].p_holm for name in names]
    assert p[0] == pytest.approx(1 / PATTERNS)
    assert min(value or 0 for value in p[1:]) > 0.05


def test_each_fold_has_draws_of_its_own() -> None:
    worse_Qt, better_Qt = two_methods(6)
    folds_Q = np.repeat([0, 1], [25, 15])
    scope = compared([worse_Qt, better_Qt], ["abcdef", "abcdef"], folds_Q=folds_Q)[1]
    expected = crossed_means((better_Qt - worse_Qt)[..., None], folds_Q)
    assert scope.comparisons["map"].p == pytest.approx(expected.p()[0])
    low, high = (float(end[0]) for end in crossed_means(better_Qt[..., None], folds_Q).interval())
    assert (scope.summaries["map"].low, scope.summaries["map"].high) == pytest.approx((low, high))
