"""Click models against sums over everything hidden, and fits that find the users who made the clicks."""

import numpy as np
import pytest
from click_sessions import position_based
from reference import click_models as oracle

from ltrscale.arrays import Doubles
from ltrscale.clicks import models
from ltrscale.clicks.models import (
    Cells,
    ClickModel,
    DocumentRatio,
    DynamicBayesian,
    PositionBasedModel,
    PositionRatio,
    Sessions,
    UserBrowsing,
    count,
    fit_product,
    perplexity,
)

P = 4
LIST = np.array([[3, 0, 2, 1]])


def one_list(clicks: oracle.Clicks) -> Sessions:
    return Sessions(LIST, np.array([clicks]), np.zeros(1, np.int64), P)


def parameters(seed: int) -> tuple[Doubles, Doubles]:
    return tuple(np.random.default_rng(seed).uniform(0.1, 0.9, (2, P + 1)))


@pytest.mark.parametrize("clicks", list(oracle.patterns(P)))
def test_user_browsing_is_the_sum_over_patterns(clicks: oracle.Clicks) -> None:
    attraction, _ = parameters(0)
    examination = np.random.default_rng(1).uniform(0.1, 1, (P, P))
    model = UserBrowsing(attraction, examination)

    def probability(pattern: oracle.Clicks) -> float:
        return oracle.ubm(attraction[LIST[0]], examination, pattern)

    check(model, clicks, probability)


@pytest.mark.parametrize("going_on", [1.0, 0.7])
@pytest.mark.parametrize("clicks", list(oracle.patterns(P)))
def test_dynamic_bayesian_is_the_sum_over_stories(clicks: oracle.Clicks, going_on: float) -> None:
    attraction, satisfaction = parameters(2)
    model = DynamicBayesian(attraction, satisfaction, going_on)
    stories = list(oracle.dbn_stories(attraction[LIST[0]], satisfaction[LIST[0]], going_on))
    assert sum(story[0] for story in stories) == pytest.approx(1)

    def probability(pattern: oracle.Clicks) -> float:
        return sum(story[0] for story in stories if story[3] == pattern)

    check(model, clicks, probability)
    matching = [story for story in stories if story[3] == clicks]
    total = sum(story[0] for story in matching)
    examined_SP, satisfied_SP, went_on, could = model.expected(one_list(clicks))
    for found_SP, part in ((examined_SP, 1), (satisfied_SP, 2)):
        expected = [sum(story[0] * story[part][p] for story in matching) / total for p in range(P)]
        np.testing.assert_allclose(found_SP[0], expected, rtol=1e-9)
    free = sum(s[0] * (s[1][p] and not s[2][p]) for s in matching for p in range(P - 1)) / total
    assert could == pytest.approx(free)
    assert went_on == pytest.approx(sum(s[0] * s[1][p] for s in matching for p in range(1, P)) / total)


def check(model: ClickModel, clicks: oracle.Clicks, probability: object) -> None:
    sessions = one_list(clicks)
    before = model.probabilities(sessions, conditional=False)[0]
    given = model.probabilities(sessions, conditional=True)[0]
    np.testing.assert_allclose(before, oracle.marginals(probability, P), rtol=1e-9)  # type: ignore[arg-type]
    np.testing.assert_allclose(given, oracle.conditionals(probability, clicks), rtol=1e-9)  # type: ignore[arg-type]


def test_a_gap_in_a_list_is_passed_over() -> None:
    attraction, satisfaction = parameters(3)
    model = DynamicBayesian(attraction, satisfaction, 0.6)
    whole = Sessions(np.array([[0, 2]]), np.array([[True, False]]), np.zeros(1, np.int64), P)
    gap = Sessions(np.array([[0, -1, 2]]), np.array([[True, False, False]]), np.zeros(1, np.int64), P)
    for conditional in (False, True):
        expected = model.probabilities(whole, conditional=conditional)
        np.testing.assert_allclose(model.probabilities(gap, conditional=conditional)[:, [0, 2]], expected)
    examined_SP, satisfied_SP, *_ = model.expected(gap)
    expected_SP, satisfied, *_ = model.expected(whole)
    np.testing.assert_allclose(examined_SP[:, [0, 2]], expected_SP)
    np.testing.assert_allclose(satisfied_SP[:, [0, 2]], satisfied)


def test_em_never_lowers_the_likelihood_and_ends_at_its_maximum() -> None:
    rng = np.random.default_rng(0)
    pair, place = (part.ravel() for part in np.meshgrid(np.arange(8), np.arange(4), indexing="ij"))
    shown = rng.integers(20, 60, len(pair)).astype(float)
    clicked = rng.binomial(shown.astype(int), rng.uniform(0.2, 0.8, 8)[pair] * (1 / (place + 1))).astype(float)
    attraction_D1, examination_K = fit_product(Cells(pair, place, shown, clicked), 8, 4, smoothing=0.0)
    cells = list(zip(pair.tolist(), place.tolist(), shown.tolist(), clicked.tolist(), strict=True))
    best = oracle.product_likelihood(cells, attraction_D1, examination_K)
    for _ in range(300):
        attraction = attraction_D1 * np.exp(0.05 * rng.normal(size=9))
        examination = examination_K * np.exp(0.05 * rng.normal(size=4))
        assert oracle.product_likelihood(cells, attraction, examination) < best + 1e-3


def test_a_fit_that_ends_before_it_converges_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = position_based(0, queries=20, impressions=10, documents=5, positions=5).sessions
    no_clicks = Cells(np.zeros(2, np.int64), np.arange(2), np.ones(2), np.zeros(2))
    for rounds, said in ((models._ROUNDS, []), (2, ["examination times attraction", "DBN"])):
        monkeypatch.setattr(models, "_ROUNDS", rounds)
        PositionBasedModel.fit(sessions, smoothing=4.0)
        DynamicBayesian.fit(sessions, smoothing=4.0)
        fit_product(no_clicks, 1, 2, smoothing=0.0)
        expected = [f"clicks: {what} has not converged after 2 rounds of EM" for what in said]
        assert [record.message for record in caplog.records] == expected


def test_smoothing_takes_low_positions_for_less_examined_and_predicts_better_for_it() -> None:
    """Why the examinations of PBM are no propensities, though its predictions need the smoothing."""
    truth = position_based(1, eta=0.8, impressions=30, queries=150)
    half_S = np.arange(len(truth.sessions)) % 2 == 0
    fitted, later = truth.sessions.take(half_S), truth.sessions.take(~half_S)
    relative, perplexities = {}, {}
    for smoothing in (0.0, 4.0):
        model = PositionBasedModel.fit(fitted, smoothing=smoothing)
        relative[smoothing] = model.examination_P[-1] / model.examination_P[0]
        perplexities[smoothing] = perplexity(model.probabilities(later, conditional=False), later).overall
    expected = truth.examination_P[-1] / truth.examination_P[0]
    assert relative[4.0] < 0.7 * expected < expected < relative[0.0] < 1.6 * expected
    assert perplexities[4.0] < perplexities[0.0]


def test_the_simplified_model_is_counted_by_hand() -> None:
    pairs_SP = np.array([[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    clicks_SP = np.array([[True, True, False], [False, True, False], [False, False, False]])
    model = DynamicBayesian.simplified(Sessions(pairs_SP, clicks_SP, np.arange(3), 3), smoothing=1e-9)
    np.testing.assert_allclose(model.attraction_D1[:3], [1 / 3, 2 / 3, 0], atol=1e-6)
    np.testing.assert_allclose(model.satisfaction_D1[:2], [0, 1], atol=1e-6)


def drawn(model: ClickModel, seed: int, sessions: int) -> Sessions:
    """Clicks drawn from a model, position by position."""
    rng = np.random.default_rng(seed)
    documents = 12
    pairs_SP = np.argsort(rng.random((sessions, documents)), axis=1)[:, :6]
    found = Sessions(pairs_SP, np.zeros(pairs_SP.shape, np.bool_), np.zeros(sessions, np.int64), documents)
    for p in range(6):
        chance_SP = model.probabilities(found, conditional=True)
        found.clicks_SP[:, p] = rng.random(sessions) < chance_SP[:, p]
    return found


@pytest.mark.slow
def test_the_dynamic_model_is_recovered() -> None:
    rng = np.random.default_rng(5)
    truth = DynamicBayesian(rng.uniform(0.1, 0.7, 13), rng.uniform(0.1, 0.9, 13), 0.75)
    found = DynamicBayesian.fit(drawn(truth, 0, 40_000), smoothing=1.0)
    assert found.continuation == pytest.approx(0.75, abs=0.03)
    np.testing.assert_allclose(found.attraction_D1[:12], truth.attraction_D1[:12], atol=0.03)
    np.testing.assert_allclose(found.satisfaction_D1[:12], truth.satisfaction_D1[:12], atol=0.06)


def test_user_browsing_is_recovered_up_to_scale() -> None:
    rng = np.random.default_rng(6)
    examination = np.sort(rng.uniform(0.2, 1.0, (6, 6)), axis=0)[::-1]
    truth = UserBrowsing(rng.uniform(0.2, 0.8, 13), examination)
    found = UserBrowsing.fit(drawn(truth, 1, 60_000), smoothing=1.0)
    scale = found.relevance_D1[:12].mean() / truth.relevance_D1[:12].mean()
    np.testing.assert_allclose(found.relevance_D1[:12] / scale, truth.relevance_D1[:12], atol=0.04)
    often = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 2), (3, 0), (4, 0)]
    for p, last in often:
        assert found.examination_PL[p, last] * scale == pytest.approx(examination[p, last], abs=0.08)


@pytest.mark.slow
def test_the_model_that_made_the_clicks_predicts_later_ones_best() -> None:
    rng = np.random.default_rng(7)
    attraction, satisfaction = rng.uniform(0.1, 0.8, 13), rng.uniform(0.1, 0.9, 13)
    position = PositionBasedModel(attraction, 1 / np.arange(1, 7))
    dynamic = DynamicBayesian(attraction, satisfaction, 0.8)
    for truth, best in ((position, "pbm"), (dynamic, "dbn")):
        fitted, later = drawn(truth, 2, 20_000), drawn(truth, 3, 20_000)
        models: dict[str, ClickModel] = {
            "position": PositionRatio.fit(fitted),
            "document": DocumentRatio.fit(fitted, smoothing=1.0),
            "pbm": PositionBasedModel.fit(fitted, smoothing=1.0),
            "sdbn": DynamicBayesian.simplified(fitted, smoothing=1.0),
            "dbn": DynamicBayesian.fit(fitted, smoothing=1.0),
        }
        given = {n: perplexity(m.probabilities(later, conditional=True), later).overall for n, m in models.items()}
        assert min(given, key=given.get) == best  # type: ignore[arg-type]
        known = perplexity(truth.probabilities(later, conditional=True), later).overall
        assert given[best] < known + 0.002


def test_a_document_that_was_not_seen_has_the_mean() -> None:
    sessions = position_based(0, queries=30).sessions
    unseen = np.full((1, 10), sessions.pairs)
    later = Sessions(unseen, np.zeros((1, 10), np.bool_), np.zeros(1, np.int64), sessions.pairs)
    model = PositionBasedModel.fit(sessions, smoothing=1.0)
    cells = count(sessions)
    attraction = (cells.clicked_M.sum()) / (cells.shown_M * model.examination_P[cells.place_M]).sum()
    np.testing.assert_allclose(
        model.probabilities(later, conditional=False)[0], model.examination_P * attraction, rtol=0.1
    )


def test_perplexity_is_that_of_a_loop() -> None:
    sessions = position_based(0, queries=5, impressions=3).sessions
    sessions.pairs_SP[0, 3:] = -1
    p_SP = np.random.default_rng(0).random(sessions.pairs_SP.shape)
    bits = [[] for _ in range(10)]
    for s, p in np.ndindex(p_SP.shape):
        if sessions.pairs_SP[s, p] >= 0:
            bits[p].append(-np.log2(p_SP[s, p] if sessions.clicks_SP[s, p] else 1 - p_SP[s, p]))
    found = perplexity(p_SP, sessions)
    assert found.overall == pytest.approx(2 ** np.mean(np.concatenate(bits)))
    np.testing.assert_allclose(found.positions_P, [2 ** np.mean(part) for part in bits])
