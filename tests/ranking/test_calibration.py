"""Calibration against slow loops and scikit-learn, and its laws."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from ltrscale.ranking.metrics import calibration, tally


def slow_error(scores: list[float], clicks: list[float], bins: int) -> float:
    """Documents by rounded score, dealt to bins by the middle of those that share it."""
    of_score: dict[int, list[tuple[float, float]]] = {}
    for s, y in zip(scores, clicks, strict=True):
        of_score.setdefault(round(max(-30.0, min(30.0, s)) * 64), []).append((1 / (1 + math.exp(-s)), y))
    of_bin: dict[int, list[tuple[float, float]]] = {}
    before = 0
    for _, documents in sorted(of_score.items()):
        at = int((before + len(documents) / 2) / len(scores) * bins)
        of_bin.setdefault(at, []).extend(documents)
        before += len(documents)
    return sum(abs(sum(p - y for p, y in documents)) for documents in of_bin.values()) / len(scores)


def made(n: int, seed: int, spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and clicks with their probabilities."""
    generator = torch.Generator().manual_seed(seed)
    scores_N = spread * torch.randn(n, generator=generator, dtype=torch.float64) - 2
    return scores_N, torch.rand(n, generator=generator, dtype=torch.float64).lt(scores_N.sigmoid()).double()


@pytest.mark.parametrize("bins", [1, 10, 37])
@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0, 40.0])
def test_figures_are_those_of_slow_loops(bins: int, spread: float) -> None:
    scores_N, clicks_N = made(500, seed=bins, spread=spread)
    found = calibration(tally(scores_N, clicks_N), bins=bins)
    assert found.error == pytest.approx(slow_error(scores_N.tolist(), clicks_N.tolist(), bins))
    assert (found.documents, found.clicked) == (500, pytest.approx(clicks_N.mean().item()))
    assert found.predicted == pytest.approx(scores_N.sigmoid().mean().item())
    if spread < 10:  # scikit-learn clips probabilities
        assert found.log_loss == pytest.approx(log_loss(clicks_N.numpy(), scores_N.sigmoid().numpy(), labels=[0, 1]))


@pytest.mark.slow
@pytest.mark.parametrize(("documents", "rarer"), [(200, 0.0), (200, 3.0), (2000, 0.0)])
def test_the_reference_is_the_error_of_probabilities_that_are_right(documents: int, rarer: float) -> None:
    """Over many draws of the clicks of the same documents."""
    scores_N = made(documents, seed=7)[0] - rarer
    generator = torch.Generator().manual_seed(8)
    errors = []
    for _ in range(400):
        clicks_N = torch.rand(documents, generator=generator, dtype=torch.float64).lt(scores_N.sigmoid()).double()
        found = calibration(tally(scores_N, clicks_N))
        errors.append(found.error)
    assert found.reference == pytest.approx(np.mean(errors), rel=0.05)
    assert found.reference is not None
    assert found.reference > 0.005


def test_the_reference_is_a_sum_over_all_counts_by_hand() -> None:
    """Ten bins of 3, 1 and no documents; a certain click and a certain miss deviate by nothing."""
    for n, p in ((3, 0.4), (1, 0.25), (7, 0.5), (6, 1 / 3)):
        logit = torch.full((n,), math.log(p / (1 - p)), dtype=torch.float64)
        counts = [math.comb(n, k) * p**k * (1 - p) ** (n - k) * abs(k - n * p) / n for k in range(n + 1)]
        assert calibration(tally(logit, torch.zeros(n))).reference == pytest.approx(sum(counts))
    assert calibration(tally(torch.tensor([80.0, -80.0]), torch.tensor([1.0, 0.0]))).reference == pytest.approx(
        0.0, abs=1e-30
    )


def test_bins_of_distinct_scores_have_equal_counts() -> None:
    scores_N, clicks_N = torch.linspace(-4, 4, 100, dtype=torch.float64), made(100, seed=0)[1]
    p, y = scores_N.sigmoid().numpy(), clicks_N.numpy()
    expected = np.mean([abs(p[a : a + 10].mean() - y[a : a + 10].mean()) for a in range(0, 100, 10)])
    assert calibration(tally(scores_N, clicks_N)).error == pytest.approx(expected)


def test_parts_add_up_and_the_order_does_not_matter() -> None:
    scores_N, clicks_N = made(300, seed=1)
    whole = tally(scores_N, clicks_N)
    parts = tally(scores_N[:70], clicks_N[:70]) + tally(scores_N[70:], clicks_N[70:])
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    for other in (parts, tally(scores_N[shuffled], clicks_N[shuffled])):
        torch.testing.assert_close(other, whole)
    assert calibration(tally(scores_N[:0], clicks_N[:0]) + whole) == calibration(whole)


def test_true_probabilities_are_calibrated_and_shifted_ones_are_not() -> None:
    scores_N, clicks_N = made(100_000, seed=2)
    true, shifted = (calibration(tally(s, clicks_N)) for s in (scores_N, scores_N + 1))
    assert true.error < 0.01 < 0.08 < shifted.error
    assert true.log_loss < shifted.log_loss
    with pytest.raises(ValueError, match="needs a document"):
        calibration(tally(scores_N[:0], clicks_N[:0]))
