"""Simulated impressions: users see interleaved lists of rankers and click, group by group.

All random numbers are functions of (seed, group id, number of the impression, place of the document), so that neither
batches nor the order of groups matter. A user's draws are the same for all lists of an impression.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, R rankers, P pairs, M methods, I impressions of some groups with
D documents, I1 = I + 1 offsets.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.draws import open_uniforms, random_bits, uniforms
from ltrscale.evaluation.interleaving.credit import (
    balanced,
    balanced_credit,
    debiased_weights,
    interleaved_positions,
    list_totals,
    team_credit,
    team_draft,
)
from ltrscale.simulate.ragged import offsets, place_in_group
from ltrscale.simulate.users import User

METHODS: Final = ("team_draft", "balanced", "debiased", "separate")
"""The ways to compare two rankers; `separate` shows each user one ranking, as an A/B test does."""
_BLOCK_DOCUMENTS = 1 << 20


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
    """Two rankers by number. With `flipped` the coins fall for the other one, so that exchanging them changes none."""

    one: int
    other: int
    flipped: bool = False


class RankedGroups(NamedTuple):
    """Query groups with the chance of a click on each document, if it is examined, and the scores of each ranker."""

    ids_Q: Ints
    offsets_Q1: Ints
    attraction_N: Doubles
    scores_RN: Doubles


class Credits(NamedTuple):
    """Impressions of each group, and over them, by pair and method, the sums of both credits and of a square.

    The square is that of the difference in credit, and for `separate` the sum of both squares.
    """

    impressions_Q: Ints
    sums_QPM3: Doubles


def simulate(lists: RankedGroups, pairs: Sequence[Pair], traffic: Traffic) -> Credits:
    """Show interleaved lists of all pairs of rankers to users, and credit their clicks.

    A group has `floor(per_group + u)` impressions, u uniform. Documents with equal scores have a random order, the same
    for all rankers and impressions of a group. Memory is that of about a million documents, or of the impressions of
    one group.
    """
    n_Q = np.floor(traffic.per_group + uniforms((traffic.seed, "impressions"), lists.ids_Q)).astype(np.int64)
    places_N = np.arange(lists.offsets_Q1[-1]) - np.repeat(lists.offsets_Q1[:-1], np.diff(lists.offsets_Q1))
    ties_N = uniforms((traffic.seed, "ties"), np.repeat(lists.ids_Q, np.diff(lists.offsets_Q1)), places_N)
    ranks_RN = np.stack([place_in_group(lists.offsets_Q1, -scores_N, ties_N) for scores_N in lists.scores_RN])
    sums_QPM3 = np.zeros((len(n_Q), len(pairs), len(METHODS), 3))
    for groups in _blocks(n_Q * np.diff(lists.offsets_Q1)):
        if n_Q[groups].any():
            seen = _Seen(lists, ranks_RN, places_N, groups, n_Q[groups], traffic)
            for p, pair in enumerate(pairs):
                sums_QPM3[groups, p] = seen.sums(pair)
    return Credits(n_Q, sums_QPM3)


def _blocks(documents_Q: Ints) -> Iterator[slice]:
    """Consecutive groups whose impressions fit into a block; a group that does not is one alone."""
    block_Q, first = np.cumsum(documents_Q) // _BLOCK_DOCUMENTS, 0
    for _, members in itertools.groupby(block_Q.tolist()):
        last = first + sum(1 for _ in members)
        yield slice(first, last)
        first = last


class _Seen:
    """The impressions of some groups."""

    def __init__(
        self, lists: RankedGroups, ranks_RN: Ints, places_N: Ints, groups: slice, n_Q: Ints, traffic: Traffic
    ) -> None:
        first, last = lists.offsets_Q1[[groups.start, groups.stop]]
        self.offsets_Q1 = lists.offsets_Q1[groups.start : groups.stop + 1] - first
        self.ranks_RN, self.traffic, self.n_groups = ranks_RN[:, first:last], traffic, len(n_Q)
        self.group_I = np.repeat(np.arange(len(n_Q)), n_Q)
        self.offsets_I1 = offsets(np.diff(self.offsets_Q1)[self.group_I])
        lengths_I = np.diff(self.offsets_I1)
        self.rows_D = np.arange(self.offsets_I1[-1]) + np.repeat(
            self.offsets_Q1[self.group_I] - self.offsets_I1[:-1], lengths_I
        )
        self.number_I = np.arange(len(self.group_I)) - np.repeat(np.cumsum(n_Q) - n_Q, n_Q)
        self.ids_I = lists.ids_Q[groups][self.group_I]
        self.keys_D = (
            np.repeat(self.ids_I, lengths_I),
            np.repeat(self.number_I, lengths_I),
            places_N[first:last][self.rows_D],
        )
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
        positions_D, teams_D = team_draft(
            self._ranks(pair)[:, self.rows_D], self.offsets_I1, coins_D, depth=self.traffic.depth
        )
        return team_credit(self._clicks(positions_D), teams_D, self.offsets_I1)

    def _balanced(self, pair: Pair) -> tuple[Doubles, Doubles]:
        """Balanced and debiased credit for the same clicks on the same lists."""
        ranks_2N, depth = self._ranks(pair), self.traffic.depth
        weights_2N = debiased_weights(ranks_2N, self.offsets_Q1, eta=self.traffic.eta, depth=depth)
        first_I = self._coins(pair, "balanced", self.ids_I, self.number_I)
        first_D = np.repeat(first_I, np.diff(self.offsets_I1))
        positions_D = interleaved_positions(balanced(ranks_2N, self.offsets_Q1)[first_D, self.rows_D], depth)
        clicked_D = self._clicks(positions_D)
        return (
            balanced_credit(clicked_D, ranks_2N[:, self.rows_D], positions_D, self.offsets_I1),
            list_totals(clicked_D * weights_2N[:, self.rows_D], self.offsets_I1),
        )

    def _separate(self, pair: Pair) -> Doubles:
        """Clicks on each ranker's own list."""
        positions_2N = interleaved_positions(self._ranks(pair) + 1, self.traffic.depth)
        return np.stack(
            [list_totals(self._clicks(positions_N[self.rows_D]), self.offsets_I1) for positions_N in positions_2N]
        )

    def _ranks(self, pair: Pair) -> Ints:
        return self.ranks_RN[[pair.one, pair.other]]

    def _coins(self, pair: Pair, purpose: str, *counters: Ints) -> Ints:
        """0 where the first ranker of the pair begins."""
        bits = random_bits((self.traffic.seed, purpose), *counters) >> np.uint64(63)
        return np.asarray(bits.astype(np.int64) ^ pair.flipped)

    def _clicks(self, positions_D: Doubles) -> Bools:
        return self.traffic.user.clicks(self.draw_D, self.attraction_D, positions_D, self.offsets_I1)
