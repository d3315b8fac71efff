"""Propensities are recovered from clicks of known users, to a stated error, and agree with slow oracles."""

import itertools

import numpy as np
import pytest
from click_sessions import Truth, position_based, random_halves
from nightly import nightly
from reference import click_models as oracle

from ltrscale.arrays import Doubles
from ltrscale.clicks import propensity
from ltrscale.clicks.models import Cells, Sessions, count
from ltrscale.clicks.propensity import (
    Estimate,
    _CellCurve,
    _dense,
    _slope,
    click_ratios,
    expectation_maximisation,
    harvest,
    jackknife,
    judged_by_clicks,
    overlap,
    slope_of,
    without,
)

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


@pytest.mark.nightly
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


@pytest.mark.slow
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


def test_harvesting_that_ends_before_its_maximum_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    minimize, cells = propensity.minimize, count(position_based(0, queries=10, impressions=10).sessions)
    monkeypatch.setattr(propensity, "minimize", lambda *of, **how: minimize(*of, **how | {"options": {"maxiter": 1}}))
    harvest(cells, 10)
    (record,) = caplog.records
    assert record.message.startswith("clicks: harvested propensities have not converged after 1 rounds: ")


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


def some_sessions(seed: int, *, positions: int = 5, documents: int = 30, sessions: int = 60) -> Sessions:
    rng = np.random.default_rng(seed)
    pairs_SP = rng.integers(-3, documents, (sessions, positions)).clip(-1)
    clicks_SP = (rng.random(pairs_SP.shape) < 0.4) & (pairs_SP >= 0)
    return Sessions(pairs_SP, clicks_SP, np.arange(sessions), documents)


def counted(sessions: Sessions) -> dict[tuple[int, int], tuple[int, int]]:
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    for pairs, clicks in zip(sessions.pairs_SP.tolist(), sessions.clicks_SP.tolist(), strict=True):
        for p, (pair, clicked) in enumerate(zip(pairs, clicks, strict=True)):
            if pair >= 0:
                shown, before = counts.get((pair, p), (0, 0))
                counts[pair, p] = shown + 1, before + clicked
    return counts


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_a_loop(seed: int) -> None:
    sessions = some_sessions(seed)
    columns = (column.tolist() for column in count(sessions))
    found = {(pair, place): (shown, clicked) for pair, place, shown, clicked in zip(*columns, strict=True)}
    assert found == counted(sessions)
    assert count(sessions.take(np.zeros(len(sessions), np.bool_))).pair_M.tolist() == []


@pytest.mark.parametrize(("seed", "fewest"), [(0, 1), (0, 2), (1, 3), (2, 4), (3, 3), (4, 4), (5, 9)])
def test_parts_are_those_of_a_walk_over_links(seed: int, fewest: int) -> None:
    sessions = some_sessions(seed)
    found, counts = overlap(count(sessions), 5, pairs_per_link=fewest), counted(sessions)
    assert found.parts == oracle.linked_parts(counts, 5, fewest)
    assert found.connected == (len(found.parts) == 1)
    documents = {pair for pair, _ in counts}
    several = {pair for pair in documents if sum(pair == d for d, _ in counts) > 1}
    assert (found.pairs, found.several) == (len(documents), len(several))
    shown = sum(n for n, _ in counts.values())
    assert found.impressions == pytest.approx(sum(n for (d, _), (n, _) in counts.items() if d in several) / shown)


def test_each_document_at_its_position_links_nothing() -> None:
    pairs_SP = np.tile(np.arange(4), (50, 1))
    sessions = Sessions(pairs_SP, np.ones_like(pairs_SP, np.bool_), np.zeros(50, np.int64), 4)
    found = overlap(count(sessions), 4, pairs_per_link=1)
    assert not found.connected
    assert found.parts == [[1], [2], [3], [4]]
    assert (found.several, found.impressions) == (0, 0.0)


def test_a_position_that_is_never_shown_does_not_count() -> None:
    cells = Cells(np.array([0, 0]), np.array([0, 2]), np.ones(2), np.ones(2))
    assert overlap(cells, 4, pairs_per_link=1).parts == [[1, 3]]
    assert overlap(cells, 4, pairs_per_link=1).connected


def test_a_single_position_is_not_connected() -> None:
    cells = Cells(np.array([0, 1]), np.array([0, 0]), np.ones(2), np.ones(2))
    assert not overlap(cells, 1, pairs_per_link=1).connected


def test_folds_keep_queries_whole() -> None:
    sessions = Sessions(np.array([[0, 1], [2, -1], [1, 0]]), np.zeros((3, 2), np.bool_), np.array([4, 5, 4]), 4)
    assert sessions.folds_D(3).tolist() == [1, 1, 2, 0]
    shown_DP, rate_DP = _dense(count(sessions), 2)
    assert shown_DP.tolist() == [[1, 1], [1, 1], [1, 0]]
    assert not rate_DP.any()


def with_labels(trust: float, curve: _CellCurve, noise: float = 0.1) -> Estimate:
    truth = position_based(3, queries=400, trust=trust, noise=noise)
    good_D, poor_D = truth.relevance_D > 0.4, truth.relevance_D < 0.15
    return slope_of(count(truth.sessions), good_D, poor_D, 10, truth.sessions.folds_D(10), curve)


@pytest.mark.slow
@pytest.mark.parametrize("curve", [harvest, click_ratios])
def test_labels_show_trust(curve: _CellCurve) -> None:
    strong, weak, none = (with_labels(trust, curve) for trust in (0.6, 0.3, 0.0))
    assert strong.high[0] < 0
    assert strong.values[0] < weak.values[0] < none.values[0]


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_position_bias_and_noise_alone_are_no_trust(noise: float) -> None:
    _, low, high = with_labels(0.0, harvest, noise)
    assert low[0] < 0 < high[0]


@pytest.mark.slow
def test_clicks_of_one_half_show_trust_where_documents_move_far() -> None:
    found = {}
    for trust in (0.0, 0.6):
        truth = position_based(4, queries=500, trust=trust, jitter=5.0)
        half_S = random_halves(truth.sessions)
        good_D, poor_D = judged_by_clicks(truth.sessions.take(half_S))
        assert not (good_D & poor_D).any()
        assert truth.relevance_D[good_D].mean() > 1.5 * truth.relevance_D[poor_D].mean()
        cells = count(truth.sessions.take(~half_S))
        found[trust] = slope_of(cells, good_D, poor_D, 10, truth.sessions.folds_D(10), harvest)
    assert found[0.6].high[0] < 0
    assert found[0.0].low[0] < 0 < found[0.0].high[0]


def test_a_slope_is_that_of_a_weighted_regression() -> None:
    assert np.isnan(_slope(np.array([1.0, 0.0, np.nan]), np.array([1.0, 0.5, 0.3]), np.ones(3)))
    assert _slope(np.array([1.0, 0.5, 9.0]), np.array([1.0, 0.25, 0.3]), np.array([1.0, 1, 0])) == pytest.approx(-1.0)
    rng = np.random.default_rng(0)
    good_P, poor_P, weights_P = rng.uniform(0.1, 1, (3, 8))
    fitted = np.polyfit(np.log(np.arange(1, 9)), np.log(poor_P / good_P), 1, w=np.sqrt(weights_P))
    assert _slope(good_P, poor_P, weights_P) == pytest.approx(fitted[0])
