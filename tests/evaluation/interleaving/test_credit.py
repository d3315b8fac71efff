"""Interleaving: lists and credits against loops over all rankings and coins, and what is proved of each method."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from reference import interleaving as slow

from ltrscale.evaluation.interleaving.credit import (
    balanced,
    balanced_credit,
    debiased_weights,
    interleaved_positions,
    team_credit,
    team_draft,
)

Ranking = tuple[int, ...]
ABC, BCA = (0, 1, 2), (1, 2, 0)


def ranks(rankings: Sequence[Ranking]) -> NDArray[np.int64]:
    """The rank of each document, list after list."""
    return np.concatenate([np.argsort(ranking) for ranking in rankings])


def batch(pairs: Sequence[tuple[Ranking, Ranking]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ranks by both rankers and offsets of several lists."""
    ranks_2N = np.stack([ranks([pair[r] for pair in pairs]) for r in (0, 1)])
    return ranks_2N, np.concatenate([[0], np.cumsum([len(a) for a, _ in pairs])])


def all_pairs(length: int) -> list[tuple[Ranking, Ranking]]:
    """All rankings against the identity, and against one other for lists of different lengths."""
    orders = list(itertools.permutations(range(length)))
    return [(orders[0], other) for other in orders] + [(orders[-1], orders[len(orders) // 2])]


PAIRS = [pair for length in (1, 2, 3, 5, 4) for pair in all_pairs(length)]


def lists_of(positions_N: NDArray[np.generic], offsets_Q1: NDArray[np.int64]) -> list[list[int]]:
    return [np.argsort(positions_N[a:b]).tolist() for a, b in itertools.pairwise(offsets_Q1)]


def test_balanced_lists_are_those_of_the_algorithm() -> None:
    ranks_2N, offsets_Q1 = batch(PAIRS)
    for first, positions_N in enumerate(balanced(ranks_2N, offsets_Q1)):
        expected = [slow.balanced(a, b, a_first=first == 0) for a, b in PAIRS]
        # the algorithm ends with one of the rankings, whose last documents the other has no turn for
        found = lists_of(positions_N, offsets_Q1)
        assert [f[: len(e)] for f, e in zip(found, expected, strict=True)] == expected
        assert all(len(f) == len(a) for f, (a, _) in zip(found, PAIRS, strict=True))


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_team_drafts_are_those_of_the_algorithm_for_all_coins(depth: int | None) -> None:
    cases = [(a, b, coins) for a, b in PAIRS for coins in itertools.product((0, 1), repeat=(len(a) + 1) // 2)]
    ranks_2N, offsets_Q1 = batch([(a, b) for a, b, _ in cases])
    coins_N = np.concatenate([np.resize(coins, len(a)) for a, _, coins in cases])
    positions_N, teams_N = team_draft(ranks_2N, offsets_Q1, coins_N, depth=depth)
    for (a, b, coins), start, end in zip(cases, offsets_Q1, offsets_Q1[1:], strict=False):
        expected, team_a, _ = slow.team_draft(a, b, coins)
        drafted = expected[:depth]
        positions = [drafted.index(d) + 1 if d in drafted else np.nan for d in range(len(a))]
        np.testing.assert_array_equal(positions_N[start:end], positions)
        teams = [-1 if d not in drafted else int(d not in team_a) for d in range(len(a))]
        assert teams_N[start:end].tolist() == teams


@pytest.mark.parametrize("depth", [None, 2])
def test_balanced_credit_is_that_of_the_definition_for_all_clicks(depth: int | None) -> None:
    for a, b in all_pairs(4):
        ranks_2N, offsets_Q1 = batch([(a, b)])
        for first in (0, 1):
            positions_N = interleaved_positions(balanced(ranks_2N, offsets_Q1)[first], depth)
            order = [int(d) for d in np.argsort(positions_N) if not np.isnan(positions_N[d])]
            for n in range(len(order) + 1):
                for clicked in itertools.combinations(order, n):
                    clicked_N = np.isin(np.arange(4), clicked)
                    credit_21 = balanced_credit(clicked_N, ranks_2N, positions_N, offsets_Q1)
                    expected = slow.balanced_credit(a, b, order, set(clicked))
                    assert tuple(credit_21[:, 0]) == expected


def expected_credits(
    pair: tuple[Ranking, Ranking], clicks: NDArray[np.float64], *, depth: int | None = None, eta: float = 1
) -> dict[str, NDArray[np.float64]]:
    """Mean credit [2] by method over all coins, for a user who makes one click, on d at p with chance clicks[d, p - 1].

    A table of single clicks is enough where the credit is additive; for balanced interleaving it is the case of one.
    """
    (n, ranks_2N, offsets_Q1) = (len(pair[0]), *batch([pair]))
    weights_2N = debiased_weights(ranks_2N, offsets_Q1, eta=eta, depth=depth)
    of_lists: dict[str, list[NDArray[np.float64]]] = {"balanced": [], "debiased": [], "team_draft": []}

    def over_clicks(positions_N: NDArray[np.float64]) -> list[tuple[NDArray[np.bool_], float]]:
        there = [d for d in range(n) if not np.isnan(positions_N[d])]
        return [(np.arange(n) == d, clicks[d, int(positions_N[d]) - 1]) for d in there]

    for positions_N in balanced(ranks_2N, offsets_Q1):
        each = over_clicks(interleaved_positions(positions_N, depth))
        of_lists["balanced"].append(
            sum(
                p * balanced_credit(c, ranks_2N, interleaved_positions(positions_N, depth), offsets_Q1)[:, 0]
                for c, p in each
            )
        )
        of_lists["debiased"].append(sum(p * weights_2N[:, c][:, 0] for c, p in each))
    for coins in itertools.product((0, 1), repeat=n):
        positions_N, teams_N = team_draft(ranks_2N, offsets_Q1, np.array(coins), depth=depth)
        each = over_clicks(positions_N)
        of_lists["team_draft"].append(sum(p * team_credit(c, teams_N, offsets_Q1)[:, 0] for c, p in each))
    return {method: np.mean(values, axis=0) for method, values in of_lists.items()}


def by_position(attraction: Sequence[float], eta: float) -> NDArray[np.float64]:
    """The chance of a click on each document at each position, by the position-based model."""
    return np.outer(attraction, np.arange(1.0, len(attraction) + 1) ** -eta)


def test_random_clicks_prefer_the_second_ranking_by_two_to_one_in_balanced_interleaving_alone() -> None:
    found = expected_credits((ABC, BCA), np.full((3, 3), 1 / 3), eta=0)
    np.testing.assert_allclose(found["balanced"], [1 / 3, 2 / 3])  # Radlinski, Kurup and Joachims 2008, section 3.3.1
    np.testing.assert_allclose(found["debiased"], found["debiased"][::-1])
    np.testing.assert_allclose(found["team_draft"], found["team_draft"][::-1])


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("depth", [None, 1, 2, 3])
def test_clicks_that_depend_on_the_position_alone_prefer_nobody(eta: float, depth: int | None) -> None:
    biased = 0
    for pair in all_pairs(4):
        found = expected_credits(pair, by_position([0.5] * 4, eta), depth=depth, eta=eta)
        for method in ("debiased", "team_draft"):
            assert found[method][0] == pytest.approx(found[method][1], abs=1e-12), (method, pair)
        biased += abs(found["balanced"][0] - found["balanced"][1]) > 1e-9
    assert (biased > 0) == (depth not in (1, 2))  # two positions are fair


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("depth", [None, 1, 2, 3, 4])
def test_debiased_credit_is_the_clicks_on_the_first_of_each_ranking(eta: float, depth: int | None) -> None:
    attraction = np.random.default_rng(0).random(5)
    for a, b in all_pairs(5)[::3]:
        found = expected_credits((a, b), by_position(attraction, eta), depth=depth, eta=eta)["debiased"]
        lists = [slow.balanced(a, b, a_first)[:depth] for a_first in (True, False)]
        both = set(lists[0]) | set(lists[1]) if depth else set(a)
        reach = max(k for k in range(6) if {*a[:k], *b[:k]} <= both)
        assert reach == 5 or (depth is not None and reach >= (depth + 1) // 2)
        expected = [slow.value(ranking, attraction, lambda p: p**-eta, reach) for ranking in (a, b)]
        np.testing.assert_allclose(found, expected)


def test_debiased_credit_finds_what_team_drafts_cannot() -> None:
    only_c = by_position([0, 0, 1], eta=1)  # bca has c at position 2, abc at 3
    found = expected_credits((ABC, BCA), only_c, eta=1)
    assert found["team_draft"][0] == pytest.approx(found["team_draft"][1])
    np.testing.assert_allclose(found["debiased"], [1 / 3, 1 / 2])


@pytest.mark.parametrize("eta", [0.0, 1.0, 2.0])
def test_debiased_weights_are_bounded(eta: float) -> None:
    ranks_2N, offsets_Q1 = batch(PAIRS)
    assert debiased_weights(ranks_2N, offsets_Q1, eta=eta).max() <= 2**eta + 1e-12
    for depth in (1, 2, 3):
        assert debiased_weights(ranks_2N, offsets_Q1, eta=eta, depth=depth).max() <= 2 * 2**eta + 1e-12


def test_equal_rankings_have_equal_credit_and_exchanged_ones_exchange_it() -> None:
    clicks = np.random.default_rng(1).random((4, 4))
    for a, b in all_pairs(4):
        one, other = (expected_credits(pair, clicks, depth=3) for pair in ((a, b), (b, a)))
        for method, credit_2 in one.items():
            np.testing.assert_allclose(credit_2, other[method][::-1])
            assert a != b or credit_2[0] == pytest.approx(credit_2[1])
