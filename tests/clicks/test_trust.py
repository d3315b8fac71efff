"""Signs of trust: found where users trust the order, and not found where they do not."""

import numpy as np
import pytest
from click_sessions import position_based, random_halves

from ltrscale.clicks.propensity import Estimate, click_ratios, harvest
from ltrscale.clicks.sessions import count
from ltrscale.clicks.trust import CellCurve, judged_by_clicks, slope, slope_of


def with_labels(trust: float, curve: CellCurve, noise: float = 0.1) -> Estimate:
    truth = position_based(3, queries=400, trust=trust, noise=noise)
    good_D, poor_D = truth.relevance_D > 0.4, truth.relevance_D < 0.15
    return slope_of(count(truth.sessions), good_D, poor_D, 10, truth.sessions.folds_D(10), curve)


@pytest.mark.slow
@pytest.mark.parametrize("curve", [harvest, click_ratios])
def test_labels_show_trust(curve: CellCurve) -> None:
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
    assert np.isnan(slope(np.array([1.0, 0.0, np.nan]), np.array([1.0, 0.5, 0.3]), np.ones(3)))
    assert slope(np.array([1.0, 0.5, 9.0]), np.array([1.0, 0.25, 0.3]), np.array([1.0, 1, 0])) == pytest.approx(-1.0)
    rng = np.random.default_rng(0)
    good_P, poor_P, weights_P = rng.uniform(0.1, 1, (3, 8))
    fitted = np.polyfit(np.log(np.arange(1, 9)), np.log(poor_P / good_P), 1, w=np.sqrt(weights_P))
    assert slope(good_P, poor_P, weights_P) == pytest.approx(fitted[0])
