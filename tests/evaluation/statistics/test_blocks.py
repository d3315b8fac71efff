"""Sums over blocks of groups: equal to those of the groups, in any parts, and intervals that mean the same."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ltrscale.arrays import Doubles
from ltrscale.draws import uniforms
from ltrscale.evaluation.statistics import blocks as module
from ltrscale.evaluation.statistics.blocks import Blocks, Tally, block_numbers, bootstrap_means, sign_flip_p
from ltrscale.evaluation.statistics.crossed import crossed_means
from ltrscale.evaluation.statistics.summarise import scopes

GROUPS = 3000


def made(seed: int, trials: int = 1, groups: int = GROUPS) -> tuple[NDArray[np.int64], Doubles]:
    """Ids and values [Q, T, 2]; the groups differ, so do the trials, and a third leaves the second metric undefined."""
    rng = np.random.default_rng(seed)
    values_QTM = rng.beta(2, 2, (groups, 1, 2)) + 0.1 * rng.normal(size=(groups, trials, 2))
    values_QTM[rng.random(groups) < 1 / 3, :, 1] = np.nan
    return rng.permutation(10 * groups)[:groups], values_QTM


def added(gids_Q: NDArray[np.int64], values_QTM: Doubles, cuts: list[int]) -> Blocks:
    """The blocks of groups that arrive in parts."""
    tally = Tally(*values_QTM.shape[1:])
    for first, last in zip([0, *cuts], [*cuts, len(gids_Q)], strict=True):
        numbers_Q = block_numbers(gids_Q[first:last], first=first, groups=len(gids_Q))
        tally.add(numbers_Q, Blocks.from_values(values_QTM[first:last]))
    return tally.blocks()


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OWN_BLOCK", 1024)
    monkeypatch.setattr(module, "_BLOCKS", 512)


def test_few_groups_are_their_own_blocks_and_keep_their_values() -> None:
    gids_Q, values_QTM = made(0, trials=3)
    for blocks in (added(gids_Q, values_QTM, [10, 10, 700]), Blocks.from_values(values_QTM)):
        np.testing.assert_array_equal(blocks.values_BTM(), values_QTM)
        assert blocks.groups == GROUPS


@pytest.mark.usefixtures("few_blocks")
def test_sums_are_those_of_a_slow_loop() -> None:
    gids_Q, values_QTM = made(1, trials=2)
    sums: dict[int, Doubles] = {}
    defined: dict[int, NDArray[np.int64]] = {}
    for gid, values_TM in zip(gids_Q, values_QTM, strict=True):
        (block,) = block_numbers(np.array([gid]), first=0, groups=GROUPS).tolist()
        sums[block] = sums.get(block, np.zeros((2, 2))) + np.nan_to_num(values_TM, nan=0.0)
        defined[block] = defined.get(block, np.zeros(2, np.int64)) + ~np.isnan(values_TM[0])
    found = added(gids_Q, values_QTM, [1, 500, 2999])
    assert 400 < len(sums) <= 512
    np.testing.assert_allclose(found.sums_BTM, [sums[block] for block in sorted(sums)], rtol=1e-12)
    np.testing.assert_array_equal(found.defined_BM, [defined[block] for block in sorted(sums)])
    means_TM = np.nanmean(values_QTM, axis=0)
    np.testing.assert_allclose(np.nanmean(found.values_BTM(), axis=0), means_TM, rtol=1e-12)


@pytest.mark.usefixtures("few_blocks")
def test_any_parts_give_the_same_bits() -> None:
    gids_Q, values_QTM = made(11, trials=2)
    whole = added(gids_Q, values_QTM, [])
    for cuts in ([1, 2, 2999], list(range(7, GROUPS, 7))):
        np.testing.assert_array_equal(added(gids_Q, values_QTM, cuts).sums_BTM, whole.sums_BTM)


@pytest.mark.usefixtures("few_blocks")
def test_memory_is_that_of_the_blocks_with_a_group() -> None:
    gids_Q, values_QTM = made(2)
    few, many = added(gids_Q[:40], values_QTM[:40], []), added(gids_Q, values_QTM, [])
    more = added(np.arange(30 * GROUPS), np.tile(values_QTM, (30, 1, 1)), [])
    assert len(few.sums_BTM) == 40
    assert len(many.sums_BTM) <= len(more.sums_BTM) == 512


def ends(values_QM: Doubles, seed: int) -> Doubles:
    """The interval of each column from the bootstrap of groups."""
    (means_SM,) = bootstrap_means([Blocks.from_values(values_QM[:, None])], samples=4000, seed=seed)
    return np.quantile(means_SM, [0.025, 0.975], axis=0)


def poisson_ends(gids_Q: NDArray[np.int64], values_QM: Doubles, seed: int) -> Doubles:
    """Slow: each group counts a Poisson number of times in each resample, drawn by its id (Hanley and MacGibbon)."""
    chances = np.cumsum(np.exp(-1) / np.array([1, 1, 2, 6, 24, 120, 720, 5040]))
    means = []
    for resample in range(2000):
        times_Q = np.searchsorted(chances, uniforms((seed, resample), gids_Q))
        defined_QM = ~np.isnan(values_QM)
        means.append(times_Q @ np.nan_to_num(values_QM, nan=0.0) / (times_Q @ defined_QM))
    return np.quantile(np.array(means), [0.025, 0.975], axis=0)


@pytest.mark.slow
@pytest.mark.usefixtures("few_blocks")
def test_intervals_of_blocks_are_those_of_groups_and_of_the_poisson_bootstrap() -> None:
    gids_Q, values_Q1M = made(3)
    blocks = added(gids_Q, values_Q1M, [])
    (means_SM,) = bootstrap_means([blocks], samples=4000, seed=0)
    of_blocks = np.quantile(means_SM, [0.025, 0.975], axis=0)
    of_groups, of_poisson = ends(values_Q1M[:, 0], 1), poisson_ends(gids_Q, values_Q1M[:, 0], 2)
    width_M = of_groups[1] - of_groups[0]
    # 512 blocks know a deviation to 3%, that is an end to 1.6% of the width; resamples add 1% and 1.5%
    assert (np.abs(of_blocks - of_groups) < 0.06 * width_M).all()
    assert (np.abs(of_poisson - of_groups) < 0.06 * width_M).all()


@pytest.mark.usefixtures("few_blocks")
def test_a_few_groups_among_many_have_their_own_interval() -> None:
    gids_Q, values_Q1M = made(4)
    blocks = block_numbers(gids_Q, first=0, groups=GROUPS)
    rare = Tally(1, 2)
    rare.add(blocks[:60], Blocks.from_values(values_Q1M[:60]))
    of_groups = ends(values_Q1M[:60, 0], 1)
    among_all = bootstrap_means([added(gids_Q, values_Q1M, []), rare.blocks()], samples=4000, seed=0)
    for means_SM in (among_all[1], *bootstrap_means([rare.blocks()], samples=4000, seed=0)):
        of_blocks = np.quantile(means_SM, [0.025, 0.975], axis=0)
        assert (np.abs(of_blocks - of_groups) < 0.15 * (of_groups[1] - of_groups[0])).all()


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("groups", [60, GROUPS])
def test_all_slices_have_the_same_resamples_and_signs(groups: int) -> None:
    """A slice with all groups has the figures of all, one of some depends on its own groups alone."""
    gids_Q, values_QTM = made(12, groups=groups)
    numbers_Q = block_numbers(gids_Q, first=0, groups=groups)
    some = Tally(1, 2)
    some.add(numbers_Q[::3], Blocks.from_values(values_QTM[::3]))
    whole, part = added(gids_Q, values_QTM, []), some.blocks()
    for test in (bootstrap_means, sign_flip_p):
        of_whole, of_part, again = test([whole, part, whole], samples=200, seed=3)
        np.testing.assert_array_equal(again, of_whole)
        np.testing.assert_array_equal(test([whole], samples=200, seed=3)[0], of_whole)
        (alone,) = test([part], samples=200, seed=3, numbers_B=whole.numbers_B)
        np.testing.assert_array_equal(alone, of_part)
        shifted = replace(whole, sums_BTM=whole.sums_BTM + 1)
        np.testing.assert_array_equal(test([shifted, part], samples=200, seed=3)[1], of_part)


def slow_means(blocks: Blocks, numbers_B: NDArray[np.int64], samples: int, seed: int) -> Doubles:
    """One draw after the other, by the numbers of the blocks."""
    rng, means = np.random.default_rng(seed), []
    sums = dict(zip(blocks.numbers_B.tolist(), blocks.sums_BTM[:, 0], strict=True))
    defined = dict(zip(blocks.numbers_B.tolist(), blocks.defined_BM, strict=True))
    for _ in range(samples):
        drawn = [numbers_B[rng.integers(len(numbers_B))] for _ in numbers_B]
        means.append(sum(sums.get(b, 0) for b in drawn) / sum(defined.get(b, 0) for b in drawn))
    return np.array(means)


@pytest.mark.slow
def test_a_slice_has_the_interval_of_its_groups_among_all_that_are_drawn() -> None:
    """A resample has more or fewer of the slice's groups: their number is a sample, too."""
    _, values_QTM = made(13, groups=80)
    some = Tally(1, 2)
    some.add(np.arange(80)[::2], Blocks.from_values(values_QTM[::2]))
    (found_SM,) = bootstrap_means([some.blocks()], samples=4000, seed=0, numbers_B=np.arange(80))
    slow_SM = slow_means(some.blocks(), np.arange(80), 4000, 1)
    expected, ends_2M = (np.quantile(means_SM, [0.025, 0.5, 0.975], axis=0) for means_SM in (slow_SM, found_SM))
    assert (np.abs(ends_2M - expected) < 0.06 * (expected[2] - expected[0])).all()


@pytest.mark.usefixtures("few_blocks")
def test_intervals_and_tests_of_blocks_keep_their_size() -> None:
    rng, repetitions = np.random.default_rng(5), 300
    values_QM = rng.exponential(size=(2000, repetitions)) - 1  # experiments side by side, with mean 0
    blocks = added(np.arange(2000), values_QM[:, None], [])
    (means_SM,) = bootstrap_means([blocks], samples=500, seed=6)
    low_M, high_M = np.quantile(means_SM, [0.025, 0.975], axis=0)
    assert 0.91 <= ((low_M <= 0) & (high_M >= 0)).mean() <= 0.98
    (p_M,) = sign_flip_p([blocks], samples=500, seed=7)
    assert 0.02 <= (p_M < 0.05).mean() <= 0.085


def test_a_draw_from_many_blocks_serves_eight_resamples_that_are_as_good_as_independent() -> None:
    rng, repetitions = np.random.default_rng(14), 300
    values_QM = rng.exponential(size=(module._ROTATED, repetitions))
    (means_SM,) = bootstrap_means([Blocks.from_values(values_QM[:, None])], samples=4000, seed=15)
    low_M, high_M = np.quantile(means_SM, [0.025, 0.975], axis=0)
    assert 0.91 <= ((low_M <= 1) & (high_M >= 1)).mean() <= 0.98
    np.testing.assert_allclose(means_SM.mean(axis=0), values_QM.mean(axis=0), rtol=0.005)
    errors_M = values_QM.std(axis=0) / module._ROTATED**0.5
    assert (means_SM.std(axis=0) / errors_M).mean() == pytest.approx(1, abs=0.01)
    # the resamples of one draw, which lie an eighth of a part apart
    part = module._DRAWN // module._ROTATED
    of_draws_M = (
        means_SM[: 4000 // part * part].reshape(-1, 8, part // 8, repetitions) - means_SM.mean(axis=0)
    ) / errors_M
    together = np.einsum("dtsm,dusm->tum", of_draws_M, of_draws_M) / (len(of_draws_M) * part // 8)
    assert np.abs(together.mean(axis=2) - np.eye(8)).max() < 0.02


@pytest.mark.slow
@pytest.mark.usefixtures("few_blocks")
def test_draws_of_labels_are_crossed_with_blocks_as_with_groups() -> None:
    gids_Q, values_QTM = made(6, trials=6)
    of_blocks, of_groups = crossed_means(added(gids_Q, values_QTM, [7]).values_BTM()), crossed_means(values_QTM)
    np.testing.assert_allclose(of_blocks.mean_M, of_groups.mean_M, rtol=1e-12)
    np.testing.assert_allclose(of_blocks.std_error_M, of_groups.std_error_M, rtol=0.1)  # 512 blocks: 3%
    rng = np.random.default_rng(8)
    steady_QTM = np.round(rng.random((GROUPS, 1, 300)), 2) + 0.02 * rng.normal(size=(1, 6, 300))
    covered = crossed_means(added(gids_Q, steady_QTM, []).values_BTM()).interval()
    assert 0.91 <= ((covered[0] <= 0.5) & (covered[1] >= 0.5)).mean() <= 0.98


@pytest.mark.usefixtures("few_blocks")
def test_methods_are_compared_by_blocks_as_by_groups() -> None:
    gids_Q, values_QTM = made(9, trials=2)
    better_QTM = values_QTM + 0.01 + 0.1 * np.random.default_rng(10).normal(size=values_QTM.shape)
    both_QTM = np.concatenate([values_QTM, better_QTM], axis=1)
    blocks = added(gids_Q, both_QTM, [])
    found = []
    for table in (blocks, Blocks.from_values(both_QTM)):
        halves = [replace(table, sums_BTM=sums) for sums in np.split(table.sums_BTM, 2, axis=1)]
        found.append(scopes([halves], ["map", "mrr"], baseline=0, samples=2000, seed=0)[0][1])
    for metric in ("map", "mrr"):
        one, other = (scope.comparisons[metric] for scope in found)
        assert one.difference == pytest.approx(other.difference, rel=1e-9)
        assert other.low is not None
        assert other.high is not None
        assert [one.low, one.high] == pytest.approx([other.low, other.high], abs=0.08 * (other.high - other.low))
        mine, theirs = (scope.summaries[metric] for scope in found)
        assert (mine.groups, mine.undefined) == (theirs.groups, theirs.undefined)
        assert mine.as_zero == pytest.approx(theirs.as_zero)
