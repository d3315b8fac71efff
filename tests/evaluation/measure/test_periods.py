"""Falls over periods: the line through the means, its noise, and what is said of both."""

import numpy as np
import pytest

from ltrscale.evaluation.measure.periods import _fallen, _falls_said
from ltrscale.evaluation.statistics.summarise import Summary


def summary(mean: float | None, error: float = 0.01) -> Summary:
    low, high = (None, None) if mean is None else (mean - 1.96 * error, mean + 1.96 * error)
    return Summary(
        mean=mean, low=low, high=high, trials=(mean,), std_error=None, groups=9, undefined=0, as_zero=mean, as_one=mean
    )


def weeks(*means: float | None) -> dict[str, Summary]:
    return {f"W{i:02d}": summary(mean) for i, mean in enumerate(means)}


def test_two_periods_are_their_difference() -> None:
    fall = _fallen([summary(0.55, 0.03), summary(0.5, 0.04)])
    assert fall == pytest.approx((0.05, 1.96 * 0.05))
    assert _fallen([summary(0.55), summary(None)]) is None


def test_a_line_without_noise_has_the_error_of_its_slope_and_one_with_more_noise_a_larger_one() -> None:
    x = np.arange(6)
    straight = _fallen([summary(0.6 - 0.01 * i) for i in x])
    assert straight == pytest.approx((0.05, 1.96 * 5 * 0.01 / np.sqrt(((x - x.mean()) ** 2).sum())))
    wild = _fallen([summary(0.6 - 0.01 * i + 0.05 * (-1) ** i) for i in x])
    assert wild is not None
    assert straight is not None
    assert wild[1] > 4 * straight[1]


def test_intervals_of_falls_contain_no_fall_in_nineteen_of_twenty() -> None:
    rng, n = np.random.default_rng(0), 400
    found = [_fallen([summary(float(mean)) for mean in rng.normal(0.5, 0.01, 8)]) for _ in range(n)]
    beyond = [fall for fall in found if fall is not None and abs(fall[0]) > fall[1]]
    assert 0.01 * n < len(beyond) < 0.08 * n


def test_a_fall_smaller_than_its_noise_is_called_so() -> None:
    curves = {"small": weeks(0.55, 0.545), "large": weeks(0.55, 0.45), "rises": weeks(0.5, 0.55)}
    assert [*_falls_said(curves, "ndcg@5")] == [
        "From W00 to W01 NDCG@5 falls by more than its noise: large by 0.1000 ± 0.0277.",
        "From W00 to W01 NDCG@5 falls by less than its noise, the half of a 95% interval, which is no sign of decay: "
        "small by 0.0050 ± 0.0277.",
    ]
    assert [*_falls_said({"rises": curves["rises"]}, "ndcg@5")] == ["From W00 to W01 NDCG@5 falls for no method."]
    assert [*_falls_said({"one": weeks(0.5)}, "ndcg@5")] == []
