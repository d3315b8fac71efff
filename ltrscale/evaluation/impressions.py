"""Interleaving: lists made of two rankings, credit for the clicks of simulated users on them, and the lift.

All random numbers are functions of (seed, group id, number of the impression, place of the document), so that neither
batches nor the order of groups matter. A user's draws are the same for all lists of an impression.

Ranks count from 0, positions from 1. The rankers of a pair are 0 and 1; the first axis has both.

Shapes: N documents, Q groups or lists, Q1 = Q + 1 offsets, R rankers, P pairs, M methods, I impressions of some groups
with D documents, I1 = I + 1 offsets; 2 rankers of a pair, or the 2 lists in which either of them comes first.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ltrscale.arrays import Bools, Doubles, Ints, maximum, offsets, place_in_group, runs
from ltrscale.config import Strict
from ltrscale.draws import open_uniforms, random_bits, uniforms
from ltrscale.evaluation.statistics.crossed import Difference
from ltrscale.simulate.users import User, examination

_NOBODY = -1


def _balanced(ranks_2N: Ints, offsets_Q1: Ints) -> Ints:
    """Positions in the two balanced lists, in which rankers add documents in turn, shape [2, N] (Joachims 2003)."""
    # the first 2k positions have the first k documents of both rankings
    turns_2N = ([2 * ranks_2N[first], 2 * ranks_2N[1 - first] + 1] for first in (0, 1))
    return np.stack([place_in_group(offsets_Q1, np.minimum(*turns)) + 1 for turns in turns_2N])


def _team_draft(ranks_2N: Ints, offsets_Q1: Ints, coins_N: Ints, *, depth: int | None = None) -> tuple[Doubles, Ints]:
    """Positions [N] in a team-draft list, and the ranker of each, NaN and -1 if not drafted; a coin a round."""
    starts_Q, lengths_Q = offsets_Q1[:-1], np.diff(offsets_Q1)
    order_2N = np.empty_like(ranks_2N)
    for ranker in (0, 1):
        order_2N[ranker, ranks_2N[ranker] + np.repeat(starts_Q, lengths_Q)] = np.arange(ranks_2N.shape[1])
    next_2Q = np.stack([starts_Q, starts_Q])
    positions_N, teams_N = np.full(ranks_2N.shape[1], np.nan), np.full(ranks_2N.shape[1], _NOBODY)
    for turn in range(min(depth or lengths_Q.max(initial=0), lengths_Q.max(initial=0))):
        lists_M = np.flatnonzero(lengths_Q > turn)
        rankers_M = coins_N[starts_Q[lists_M] + turn // 2] ^ (turn % 2)
        # A list with an open turn has a document left, so a ranker that passes over drafted ones stays in its list.
        waiting = np.arange(len(lists_M))
        while len(waiting):
            at = rankers_M[waiting], lists_M[waiting]
            waiting = waiting[teams_N[order_2N[at[0], next_2Q[at]]] != _NOBODY]
            next_2Q[rankers_M[waiting], lists_M[waiting]] += 1
        picked_M = order_2N[rankers_M, next_2Q[rankers_M, lists_M]]
        positions_N[picked_M], teams_N[picked_M] = turn + 1, rankers_M
    return positions_N, teams_N


def _team_credit(clicked_N: Bools, teams_N: Ints, offsets_Q1: Ints) -> Doubles:
    """Clicks on the documents of each ranker's team, shape [2, Q] (Radlinski, Kurup and Joachims 2008)."""
    return _list_totals(clicked_N & (teams_N == np.array([[0], [1]])), offsets_Q1)


def _balanced_credit(clicked_N: Bools, ranks_2N: Ints, positions_N: Doubles, offsets_Q1: Ints) -> Doubles:
    """Clicks on each ranking's first k, the better rank of the lowest click, shape [2, Q] (Joachims 2003)."""
    lengths_Q = np.diff(offsets_Q1)
    lowest_Q = maximum(np.where(clicked_N, positions_N, 0), offsets_Q1)
    is_lowest_N = clicked_N & (positions_N == np.repeat(lowest_Q, lengths_Q))
    depth_Q = maximum(np.where(is_lowest_N, ranks_2N.min(axis=0), -1), offsets_Q1)
    return _list_totals(clicked_N & (ranks_2N <= np.repeat(depth_Q, lengths_Q)), offsets_Q1)


def _debiased_weights(ranks_2N: Ints, offsets_Q1: Ints, *, eta: float, depth: int | None = None) -> Doubles:
    """The credit of each ranker for a click on each document of a balanced list, shape [2, N]; see docs/methods.md."""
    examined_2N = examination(_interleaved_positions(_balanced(ranks_2N, offsets_Q1), depth), eta=eta)
    propensity_N = examined_2N.mean(axis=0)
    beyond = np.iinfo(np.int64).max
    hidden_N = np.where(propensity_N > 0, beyond, ranks_2N.min(axis=0))
    reach_N = np.repeat(np.minimum.reduceat(hidden_N, offsets_Q1[:-1]), np.diff(offsets_Q1))
    value_2N = np.where(ranks_2N < reach_N, (ranks_2N + 1.0) ** -eta, 0.0)
    return np.asarray(value_2N / np.where(propensity_N > 0, propensity_N, 1.0))


def _interleaved_positions(positions: NDArray[Any], depth: int | None) -> Doubles:
    """Positions that are shown; NaN below the depth."""
    positions = positions.astype(np.float64)
    return positions if depth is None else np.where(positions <= depth, positions, np.nan)


def _list_totals(values_N: NDArray[Any], offsets_Q1: Ints) -> Doubles:
    """Sum of each list's values over the last axis; no list is empty."""
    return np.asarray(np.add.reduceat(values_N, offsets_Q1[:-1], axis=-1, dtype=np.float64))


METHODS: Final = ("team_draft", "balanced", "debiased", "separate")
"""The ways to compare two rankers; `separate` shows each user one ranking, as an A/B test does."""
_DOCUMENTS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Traffic:
    """Who looks at the lists."""

    user: User
    """How a user examines a list."""
    depth: int | None
    """Positions shown; None for all."""
    eta: float
    """Position bias that debiased credit assumes."""
    per_group: float
    """Mean number of impressions of a group."""
    seed: int


class Pair(NamedTuple):
    """Two rankers by number. `flipped` also flips the coins, so that swapping the rankers changes nothing."""

    one: int
    other: int
    flipped: bool = False


class RankedGroups(NamedTuple):
    """Query groups with the click probability of each examined document, and the scores of each ranker."""

    ids_Q: Ints
    offsets_Q1: Ints
    attraction_N: Doubles
    scores_RN: Doubles


class _Credits(NamedTuple):
    """The impressions of each group, and what they add up to by pair and method."""

    impressions_Q: Ints
    sums_QPM3: Doubles
    """Both credits, and the square of their difference; for `separate` the sum of both squares."""


def simulate(lists: RankedGroups, pairs: Sequence[Pair], traffic: Traffic) -> _Credits:
    """Show interleaved lists of all pairs of rankers to users, and credit their clicks.

    A group has `floor(per_group + u)` impressions, u uniform. Documents with equal scores have a random order, the same
    for all rankers and impressions of a group. Memory holds about a million documents, or the impressions of one group.
    """
    n_Q = np.floor(traffic.per_group + uniforms((traffic.seed, "impressions"), lists.ids_Q)).astype(np.int64)
    lengths_Q = np.diff(lists.offsets_Q1)
    places_N = runs(np.zeros_like(n_Q), lengths_Q)
    ties_N = uniforms((traffic.seed, "ties"), np.repeat(lists.ids_Q, lengths_Q), places_N)
    ranks_RN = np.stack([place_in_group(lists.offsets_Q1, -scores_N, ties_N) for scores_N in lists.scores_RN])
    sums_QPM3 = np.zeros((len(n_Q), len(pairs), len(METHODS), 3))
    for groups in _fitting(n_Q * lengths_Q):
        if n_Q[groups].any():
            impressions = _Impressions(lists, ranks_RN, places_N, groups, n_Q[groups], traffic)
            for p, pair in enumerate(pairs):
                sums_QPM3[groups, p] = impressions.sums(pair)
    return _Credits(n_Q, sums_QPM3)


def _fitting(documents_Q: Ints) -> Iterator[slice]:
    """Consecutive groups with impressions that fit into a block; a larger group is alone."""
    block_Q = np.cumsum(documents_Q) // _DOCUMENTS_AT_ONCE
    last_Q = np.flatnonzero(np.diff(block_Q, append=-1)) + 1
    yield from itertools.starmap(slice, itertools.pairwise([0, *last_Q.tolist()]))


class _Impressions:
    """The impressions of some groups: their users' draws are the same for every pair of rankers."""

    def __init__(
        self, lists: RankedGroups, ranks_RN: Ints, places_N: Ints, groups: slice, n_Q: Ints, traffic: Traffic
    ) -> None:
        first, last = lists.offsets_Q1[[groups.start, groups.stop]]
        self.offsets_Q1 = lists.offsets_Q1[groups.start : groups.stop + 1] - first
        self.ranks_RN, self.traffic, self.n_groups = ranks_RN[:, first:last], traffic, len(n_Q)
        self.group_I = np.repeat(np.arange(len(n_Q)), n_Q)
        self.offsets_I1 = offsets(np.diff(self.offsets_Q1)[self.group_I])
        lengths_I = np.diff(self.offsets_I1)
        self.rows_D = runs(self.offsets_Q1[self.group_I], lengths_I)
        self.number_I = runs(np.zeros_like(n_Q), n_Q)
        self.ids_I = lists.ids_Q[groups][self.group_I]
        ids_D, number_D = np.repeat(self.ids_I, lengths_I), np.repeat(self.number_I, lengths_I)
        self.keys_D = ids_D, number_D, places_N[first:last][self.rows_D]
        self.attraction_D = lists.attraction_N[first:last][self.rows_D]
        self.draw_D = open_uniforms((traffic.seed, "click"), *self.keys_D)

    def sums(self, pair: Pair) -> Doubles:
        """Credits and squares of a pair by group and method, shape [Q, M, 3]."""
        credit_M2I = np.stack([self._team_draft(pair), *self._balanced(pair), self._separate(pair)])
        squares_MI = np.square(credit_M2I[:, 0] - credit_M2I[:, 1])
        squares_MI[-1] = np.square(credit_M2I[-1]).sum(axis=0)
        values_M3I = np.concatenate([credit_M2I, squares_MI[:, None]], axis=1)
        flat_I = values_M3I.reshape(-1, len(self.group_I))
        by_group = [np.bincount(self.group_I, values_I, self.n_groups) for values_I in flat_I]
        return np.asarray(np.stack(by_group, axis=-1).reshape(self.n_groups, len(METHODS), 3), np.float64)

    def _team_draft(self, pair: Pair) -> Doubles:
        coins_D = self._coins(pair, "team draft", *self.keys_D)
        positions_D, teams_D = _team_draft(
            self._ranks(pair)[:, self.rows_D], self.offsets_I1, coins_D, depth=self.traffic.depth
        )
        return _team_credit(self._clicks(positions_D), teams_D, self.offsets_I1)

    def _balanced(self, pair: Pair) -> tuple[Doubles, Doubles]:
        """Balanced and debiased credit for the same clicks on the same lists."""
        ranks_2N, depth = self._ranks(pair), self.traffic.depth
        weights_2N = _debiased_weights(ranks_2N, self.offsets_Q1, eta=self.traffic.eta, depth=depth)
        first_I = self._coins(pair, "balanced", self.ids_I, self.number_I)
        first_D = np.repeat(first_I, np.diff(self.offsets_I1))
        positions_D = _interleaved_positions(_balanced(ranks_2N, self.offsets_Q1)[first_D, self.rows_D], depth)
        clicked_D = self._clicks(positions_D)
        return (
            _balanced_credit(clicked_D, ranks_2N[:, self.rows_D], positions_D, self.offsets_I1),
            _list_totals(clicked_D * weights_2N[:, self.rows_D], self.offsets_I1),
        )

    def _separate(self, pair: Pair) -> Doubles:
        """Clicks on each ranker's own list."""
        positions_2N = _interleaved_positions(self._ranks(pair) + 1, self.traffic.depth)
        return np.stack(
            [_list_totals(self._clicks(positions_N[self.rows_D]), self.offsets_I1) for positions_N in positions_2N]
        )

    def _ranks(self, pair: Pair) -> Ints:
        return self.ranks_RN[[pair.one, pair.other]]

    def _coins(self, pair: Pair, purpose: str, *counters: Ints) -> Ints:
        """0 where the first ranker of the pair begins."""
        bits = random_bits((self.traffic.seed, purpose), *counters) >> np.uint64(63)
        return np.asarray(bits.astype(np.int64) ^ pair.flipped)

    def _clicks(self, positions_D: Doubles) -> Bools:
        return self.traffic.user.clicks(self.draw_D, self.attraction_D, positions_D, self.offsets_I1)


def lift(credit_2Q: Doubles) -> Difference:
    """The first ranker's credit minus the second's, as a share of their mean credit.

    `L = sum_q (c_0q - c_1q) / sum_q (c_0q + c_1q) / 2`, a ratio of means over query groups, which are the sample: the
    impressions of one query are not independent. The error is that of the linearised ratio, the mean of
    `L + (c_0q - c_1q - L s_q) / mean(s)` with `s_q` the mean credit of both (Cochran 1977, section 6.4). Exchanging the
    rankers negates it. Interval and p generalise to other queries of the same kind. `credit_2Q` is summed over the
    impressions of each group.
    """
    difference_Q, level_Q = credit_2Q[0] - credit_2Q[1], credit_2Q.mean(axis=0)
    if not level_Q.any():
        return Difference(mean=None, low=None, high=None, p=None)
    ratio = difference_Q.sum() / level_Q.sum()
    return Difference.from_values(ratio + (difference_Q - ratio * level_Q) / level_Q.mean())


class MeasureAgreement(Strict):
    """How far two measures agree on which of two rankers is better, over pairs of rankers."""

    pairs: int
    """Pairs on which both measures have a verdict, right or not."""
    same: int
    """Pairs of these with the same verdict."""
    significant: int
    """Pairs for which both intervals exclude 0."""
    significant_same: int
    """Pairs of these with the same verdict."""
    correlation: float | None
    """Correlation of the differences, `sum xy / sqrt(sum x^2 sum y^2)`, independent of the order within the pairs."""


def measure_agreement(one_P: list[Difference], other_P: list[Difference]) -> MeasureAgreement:
    """The agreement of two measures of the same pairs, such as a metric's difference and the lift of interleaving."""
    means = [(x, y) for x, y in zip(one_P, other_P, strict=True) if x.mean and y.mean]
    significant = [(x, y) for x, y in means if x.excludes_zero and y.excludes_zero]
    values_2P = np.array([(x.mean, y.mean) for x, y in means]).T
    correlation = float(values_2P[0] @ values_2P[1] / math.sqrt((values_2P**2).sum(axis=1).prod())) if means else None

    def same(pairs: list[tuple[Difference, Difference]]) -> int:
        return sum((x.mean or 0) * (y.mean or 0) > 0 for x, y in pairs)

    return MeasureAgreement(
        pairs=len(means),
        same=same(means),
        significant=len(significant),
        significant_same=same(significant),
        correlation=correlation,
    )
