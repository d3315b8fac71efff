"""Agreement of rankings: scipy's tau-b, overlaps over all orders of ties, and laws."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau
from torch import Tensor

from ltrscale.batch import to_offsets
from ltrscale.evaluation.measure import agreement
from ltrscale.evaluation.measure.agreement import kendall_tau, top_overlap


def rankings(seed: int, lengths: list[int], *, values: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of two rankings with many ties and some correlation, and offsets."""
    generator = torch.Generator().manual_seed(seed)
    one_N = torch.randint(0, values, (sum(lengths),), generator=generator).double()
    other_N = one_N + torch.randint(0, values, one_N.shape, generator=generator)
    return one_N, -other_N if seed % 2 else other_N, to_offsets(torch.tensor(lengths))


@pytest.mark.parametrize("pairs", [7, 1 << 21])
@pytest.mark.parametrize("seed", range(4))
def test_tau_is_that_of_scipy(seed: int, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_PAIRS", pairs)
    lengths = [5, 1, 0, 2, 30, 2, 3, 8, 8, 4]
    one_N, other_N, offsets_Q1 = rankings(seed, lengths, values=3 + 10 * seed)
    one_N[-4:] = 0.5  # ranks nothing
    found = kendall_tau(one_N, other_N.float(), offsets_Q1).tolist()
    for tau, (a, b) in zip(found, itertools.pairwise(offsets_Q1.tolist()), strict=True):
        expected = kendalltau(one_N[a:b], other_N[a:b]).statistic if b - a > 1 else math.nan
        assert tau == pytest.approx(expected, abs=1e-12, nan_ok=True)


def expected_overlap(one: list[float], other: list[float], k: int) -> float:
    """Slow: the mean overlap over all orders of tied documents."""

    def firsts(scores: list[float]) -> list[set[int]]:
        orders = itertools.permutations(range(len(scores)))
        return [set(o[:k]) for o in orders if all(scores[a] >= scores[b] for a, b in itertools.pairwise(o))]

    return float(np.mean([len(a & b) / k for a in firsts(one) for b in firsts(other)]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [1, 1 << 18])
def test_overlap_is_the_mean_over_all_orders_of_ties(seed: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_SLOTS", slots)
    one_N, other_N, offsets_Q1 = rankings(seed, [5, 1, 4, 0, 5, 3], values=3)
    for k in (1, 2, 3):
        found = top_overlap(one_N, other_N, offsets_Q1, k=k).tolist()
        for share, (a, b) in zip(found, itertools.pairwise(offsets_Q1.tolist()), strict=True):
            expected = expected_overlap(one_N[a:b].tolist(), other_N[a:b].tolist(), k) if b - a > k else math.nan
            assert share == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_empty_input_gives_empty_output() -> None:
    nothing, offsets_Q1 = torch.zeros(0), torch.tensor([0])
    assert kendall_tau(nothing, nothing, offsets_Q1).shape == (0,)
    assert top_overlap(nothing, nothing, offsets_Q1, k=1).shape == (0,)


@pytest.mark.slow
def test_a_hundred_thousand_groups_are_done_in_no_time() -> None:
    one_N, other_N, offsets_Q1 = rankings(0, [24] * 100_000, values=1000)
    assert kendall_tau(one_N, other_N, offsets_Q1).mean() > 0.4  # a loop over them would pass the test's time limit
