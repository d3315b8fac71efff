"""Propensities are recovered from clicks of known users, to a stated error, and agree with slow oracles."""

import itertools

import numpy as np
import pytest
from click_sessions import Truth, position_based, random_halves
from nightly import nightly
from reference import click_models as oracle

from ltrscale.arrays import Doubles
from ltrscale.clicks.propensity import (
    Estimate,
    click_ratios,
    expectation_maximisation,
    harvest,
    jackknife,
    without,
)
from ltrscale.clicks.sessions import Cells, count

WITHIN = {0.0: 0.1, 0.5: 0.1, 1.0: 0.25, 2.0: 0.45}
"""The largest error of a logarithm of ten harvested propensities, by eta, from 18,000 lists of 300 queries."""


CORNERS = {(0.0, 0.0), (0.0, 0.3), (1.0, 0.1), (2.0, 0.0), (2.0, 0.3)}
GRID = [case if case in CORNERS else nightly(*case) for case in itertools.product(WITHIN, (0.0, 0.1, 0.3))]
"""Values of eta and of noise: the corners and the middle, and the others at night."""


def harvested(truth: Truth) -> Estimate:
    cells, folds_D = count(truth.sessions), truth.sessions.folds_D(10)
    return jackknife(lambda fold: harvest(without(cells, folds_D, fold), 10), 10)


def by_em(truth: Truth, impressions: float = 20) -> Doubles:
    half_S = random_halves(truth.sessions)
    halves = count(truth.sessions.take(half_S)), count(truth.sessions.take(~half_S))
    return expectation_maximisation(halves, 10, impressions=impressions)


def error(values_P: Doubles, truth: Truth) -> float:
    return float(np.abs(np.log(values_P / truth.examination_P)).max())


@pytest.mark.slow
@pytest.mark.parametrize(("eta", "noise"), GRID)
def test_propensities_are_recovered_although_the_ranker_puts_relevance_on_top(eta: float, noise: float) -> None:
    truth = position_based(1, eta=eta, noise=noise)
    estimate = harvested(truth)
    assert error(estimate.values, truth) < WITHIN[eta]
    assert error(by_em(truth), truth) < 1.5 * WITHIN[eta]
    assert error(click_ratios(count(truth.sessions), 10), truth) > 0.4


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    held = []
    for seed in range(12):
        truth = position_based(seed, queries=100, impressions=40)
        _, low, high = harvested(truth)
        held.append(((low <= truth.examination_P) & (truth.examination_P <= high))[1:])
    assert 0.88 < np.mean(held) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("eta", "trust"), [(1.0, 0.3), (1.0, 0.6), (0.5, 0.3)])
def test_with_trust_they_lie_between_those_of_relevant_and_of_irrelevant_documents(eta: float, trust: float) -> None:
    truth = position_based(1, eta=eta, trust=trust)
    values_P = harvested(truth).values
    assert (values_P < 1.1 * truth.examination_P).all()
    assert (values_P > truth.poor_P / 1.1).all()


@pytest.mark.slow
def test_em_is_biased_with_few_impressions_and_its_correction_takes_most_of_that_away() -> None:
    truth = position_based(0, queries=1000, impressions=20, jitter=3.0)
    cells = count(truth.sessions)
    twice = Cells(cells.pair_M, cells.place_M, 2 * cells.shown_M, 2 * cells.clicked_M)
    uncorrected = expectation_maximisation((cells, cells), 10, impressions=1)  # both halves alike: nothing to correct
    assert error(by_em(truth, impressions=1), truth) < 0.6 * error(uncorrected, truth)
    np.testing.assert_allclose(expectation_maximisation((twice, twice), 10, impressions=1), uncorrected, rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_harvesting_is_the_maximum_that_a_search_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cells, counts = [], {}
    for d, p in itertools.product(range(12), range(3)):
        if rng.random() < 0.7:
            shown = int(rng.integers(1, 30))
            clicked = int(rng.binomial(shown, 0.6 / (p + 1)))
            cells.append((d, p, shown, clicked))
            counts[d, p] = shown, clicked
    pair, place, shown_M, clicked_M = map(np.array, zip(*cells, strict=True))
    found = harvest(Cells(pair, place, shown_M.astype(float), clicked_M.astype(float)), 3)
    np.testing.assert_allclose(found, oracle.all_pairs(counts, 3), rtol=2e-3)


def test_harvesting_does_not_depend_on_which_documents_stand_where() -> None:
    """Documents of one position only, however good, change nothing; click ratios move."""
    truth = position_based(0, queries=40)
    cells = count(truth.sessions)
    more = Cells(
        np.append(cells.pair_M, truth.sessions.pairs + np.arange(50)),
        np.append(cells.place_M, np.zeros(50, np.int64)),
        np.append(cells.shown_M, np.full(50, 1e4)),
        np.append(cells.clicked_M, np.full(50, 1e4)),
    )
    np.testing.assert_allclose(harvest(more, 10), harvest(cells, 10), rtol=1e-9)
    assert click_ratios(more, 10)[-1] < 0.7 * click_ratios(cells, 10)[-1]


def test_positions_that_nothing_links_to_the_first_have_no_propensity() -> None:
    cells = Cells(np.array([0, 0, 1, 1]), np.array([0, 1, 2, 3]), np.full(4, 100.0), np.array([50.0, 25, 50, 25]))
    np.testing.assert_allclose(harvest(cells, 4), [1, 0.5, np.nan, np.nan], rtol=1e-4)
    alone = Cells(np.arange(3), np.arange(3), np.full(3, 100.0), np.full(3, 10.0))
    assert np.isnan(harvest(alone, 3)).all()
    assert np.isnan(expectation_maximisation((alone, alone), 3, impressions=1)).all()


def test_the_jackknife_of_a_mean_has_the_usual_error() -> None:
    values = np.random.default_rng(0).normal(3, 1, 12)
    found = jackknife(lambda fold: np.delete(values, [] if fold is None else fold).mean(keepdims=True), 12, log=False)
    half = 2.200985 * values.std(ddof=1) / np.sqrt(12)
    np.testing.assert_allclose(np.concatenate(found), [values.mean(), values.mean() - half, values.mean() + half])
