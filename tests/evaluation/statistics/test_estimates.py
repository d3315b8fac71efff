"""Laws of what a study says: estimates against crossed means, what designs would see, curves and their crossovers."""

import math

import numpy as np
import pytest
from nightly import nightly
from reference.crossed import drawn

from ltrscale.evaluation.statistics.crossed import crossed_means
from ltrscale.evaluation.statistics.estimates import Drawn, Spread, crossovers, estimate


def found_share(groups: float, draws: float, *, n_groups: int, n_draws: int, difference: float) -> float:
    """How often a difference is found where groups and draws have these standard deviations."""
    values_QTM = drawn(13, (n_groups, n_draws, 4000), groups=groups, draws=draws, rest=0.0)
    return float((crossed_means(values_QTM + difference).p() < 0.05).mean())


@pytest.mark.slow
@pytest.mark.parametrize("difference", [nightly(0.05), 0.08, 0.12])
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


@pytest.mark.slow
def test_more_groups_lower_what_differs_from_group_to_group_between_draws() -> None:
    """Neither groups nor draws differ as a whole, so as many times of either do the same."""
    values_QT = drawn(15, (300, 6, 1), groups=0.0, draws=0.0, rest=0.5)[..., 0]
    spread = Spread.from_values(values_QT)
    assert spread is not None
    assert spread.both > 0.5 * (spread.both + spread.draws + spread.groups)
    times = Spread(0.0, 0.0, 300, 0.5**2 / 300).times_for(0.02, 6, more="groups")
    assert times is not None
    values_QTM = drawn(16, (round(300 * times), 6, 2000), groups=0.0, draws=0.0, rest=0.5)
    assert (crossed_means(values_QTM + 0.02).p() < 0.05).mean() > 0.75


def test_what_a_design_sees_follows_from_its_own_spread() -> None:
    for groups, draws in ((0.02, 0.1), (0.3, 0.02)):
        values_QT = drawn(14, (300, 6, 1), groups=groups, draws=draws, rest=0.1)[..., 0]
        spread = Spread.from_values(values_QT)
        assert spread is not None
        of_six, of_twelve = spread.detectable(np.array([6, 12]))
        assert of_six == pytest.approx(crossed_means(values_QT[..., None]).detectable()[0], rel=0.02)
        assert of_twelve < of_six
    assert Spread.from_values(np.ones((1, 6))) is Spread.from_values(np.ones((6, 1))) is None


NUMBERS = (30, 100, 300, 1000)


def drawn_at(
    mean: float, rng: np.random.Generator, *, draws: int = 8, groups: int = 300, of_draws: float = 0.01
) -> Drawn:
    """Differences with variance between groups, between draws, and of both together."""
    group_Q1, draw_1T = rng.normal(size=(groups, 1)), rng.normal(size=(1, draws))
    rest_QT = rng.normal(size=(groups, draws))
    return Drawn(tuple(range(draws)), (mean + 0.1 * group_Q1 + of_draws * draw_1T + 0.05 * rest_QT)[..., None])


def curve(means: list[float], rng: np.random.Generator, **how: float) -> list[tuple[float, Drawn]]:
    return [(n, drawn_at(mean, rng, **how)) for n, mean in zip(NUMBERS, means, strict=True)]  # type: ignore[arg-type]


def first_draws(of: Drawn, n: int) -> Drawn:
    return Drawn(of.draws[:n], of.values_QTP[:, :n], of.pretrainings)


def exact(values: list[float], draws: int = 6) -> list[tuple[float, Drawn]]:
    """A curve without any noise."""
    return [(n, Drawn(tuple(range(draws)), np.full((5, draws, 1), v))) for n, v in zip(NUMBERS, values, strict=True)]


def test_an_estimate_is_the_crossed_mean_and_fewer_than_five_draws_judge_nothing() -> None:
    rng = np.random.default_rng(0)
    many = drawn_at(0.05, rng)
    means, found = crossed_means(many.values_QTP), estimate(many)
    assert found is not None
    low_M, high_M = means.interval()
    assert (found.mean, found.low, found.high) == (means.mean_M[0], low_M[0], high_M[0])
    assert found.over_draws == pytest.approx(np.std(many.values_QTP.mean(axis=(0, 2)), ddof=1) / math.sqrt(8))
    assert found.verdict == "above"
    worse = estimate(Drawn(many.draws, -many.values_QTP))
    assert worse is not None
    assert worse.verdict == "below"
    few = estimate(first_draws(many, 4))
    assert few is not None
    assert (few.low, few.high, few.p, few.detectable, few.verdict) == (None, None, None, None, "open")
    assert estimate(Drawn((0,), np.full((3, 1, 1), np.nan))) is None


def test_an_open_difference_has_what_would_see_it_and_a_decided_one_has_not() -> None:
    rng = np.random.default_rng(0)
    open_QT = np.linspace(-0.05, 0.07, 8) + rng.normal(scale=0.01, size=(300, 8))
    decided, unsure = estimate(drawn_at(0.05, rng)), estimate(Drawn(tuple(range(8)), open_QT[..., None]))
    assert decided is not None
    assert unsure is not None
    assert (decided.verdict, decided.needs) == ("above", None)
    assert unsure.verdict == "open"
    assert unsure.needs is not None
    assert unsure.needs.draws is not None
    assert unsure.needs.draws > unsure.draws
    assert unsure.needs.groups is None, "the draws alone hide it"
    deviation = open_QT.mean(axis=0).std(ddof=1)
    assert unsure.needs.draws == pytest.approx((3.3 * deviation / 0.01) ** 2, rel=0.2)
    few = estimate(Drawn(tuple(range(4)), open_QT[:, :4, None]))
    assert few is not None
    assert few.needs is None, "fewer than five draws judge nothing"
    same = estimate(Drawn(tuple(range(5)), np.zeros((4, 5, 1))))
    assert same is not None
    assert (same.verdict, same.needs) == ("open", None), "nothing separates methods that are the same"


def test_differences_are_of_the_draws_that_both_have() -> None:
    values_QTP = np.arange(8.0).reshape(2, 4, 1)
    one, other = Drawn((0, 1, 2, 5), values_QTP), Drawn((5, 1, 7), np.ones((2, 3, 1)))
    both = one.minus(other)
    assert both is not None
    assert both.draws == (1, 5)
    assert both.values_QTP[..., 0].tolist() == [[0.0, 2.0], [4.0, 6.0]]
    assert one.minus(Drawn((9,), np.ones((2, 1, 1)))) is None


def test_differences_are_of_the_pretrainings_that_both_have() -> None:
    values_QTP = np.arange(12.0).reshape(2, 2, 3)
    three, two = Drawn((0, 1), values_QTP, (0, 1, 2)), Drawn((0, 1), values_QTP[..., [0, 2]], (0, 2))
    same = three.minus(two)
    assert same is not None
    assert same.pretrainings == (0, 2)
    assert not same.values_QTP.any(), "the same encoder is subtracted from itself, whichever others there are"
    none = three.minus(Drawn((0, 1), np.ones((2, 2, 1))))
    assert none is not None
    assert (none.pretrainings, none.values_QTP.tolist()) == ((0, 1, 2), (values_QTP - 1).tolist())
    assert three.minus(Drawn((0, 1), values_QTP[..., :1], (7,))) is None


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
        noise_QTP = drawn_at(0.0, rng, of_draws=0.05).values_QTP
        return Drawn(tuple(range(8)), noise_QTP - noise_QTP.mean() + mean)

    (wide,) = crossovers([(30, around(0.001)), (1000, around(-0.2))])
    assert wide.low is None
    assert wide.high is not None
    assert 30 < wide.at < wide.high < 1000
    few = [(n, first_draws(d, 4)) for n, d in exact([0.2, 0.1, -0.1, -0.2])]
    (unjudged,) = crossovers(few)
    assert unjudged.low is None
    assert unjudged.high is None


def test_a_curve_is_of_the_draws_and_pretrainings_that_all_numbers_have() -> None:
    """Of more draws at one number its mean would have two values, and the curve would change its sign between them."""
    many_QTP = np.full((5, 20, 1), -0.1)
    many_QTP[:, :5] = 0.3
    assert many_QTP.mean() < 1e-9
    few = Drawn(tuple(range(5)), np.full((5, 5, 1), 0.2))
    below = Drawn(tuple(range(20)), many_QTP - 0.01)
    assert crossovers([(10, below), (100, below), (1000, few)]) == ()
    assert crossovers([(10, few), (100, Drawn((7,), np.full((5, 1, 1), -0.2)))]) == (), "no draw in common"
    crossed = [Drawn(tuple(range(5)), np.full((5, 5, n), value), names) for n, value, names in (
        (3, 0.2, (0, 1, 2)), (1, 0.2, None), (2, -0.2, (1, 2)),
    )]  # fmt: skip
    (found,) = crossovers(list(zip(NUMBERS[:3], crossed, strict=True)))
    assert NUMBERS[1] < found.at < NUMBERS[2]


@pytest.mark.nightly
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
