"""Interleaving: one list made of two rankings, and the credit that each of them has for the clicks on it.

Ranks count from 0, positions from 1. The rankers of a pair are 0 and 1; the first axis has both.

Shapes: N documents, Q lists, Q1 = Q + 1 offsets, 2 rankers, or the 2 lists in which either of them comes first.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.simulate.ragged import place_in_group
from ltrscale.simulate.users import examination

_NOBODY = -1


def balanced(ranks_2N: Ints, offsets_Q1: Ints) -> Ints:
    """Positions of the documents in both lists of balanced interleaving, shape [2, N] (Joachims 2003).

    The rankers take turns, and each adds its next document unless the list has it. In list f ranker f begins, so its
    document of rank r has turn 2r and the other's turn 2r + 1; a document comes at the earlier of its two turns. The
    first 2k positions therefore have the first k documents of both rankings.

    Args:
        ranks_2N: ranks of each document by both rankers.
        offsets_Q1: offsets of the lists.

    Example:
        >>> balanced(np.array([[0, 1, 2], [2, 0, 1]]), np.array([0, 3])).tolist()  # rankings abc and bca
        [[1, 2, 3], [2, 1, 3]]
    """
    turns_2N = ([2 * ranks_2N[first], 2 * ranks_2N[1 - first] + 1] for first in (0, 1))
    return np.stack([place_in_group(offsets_Q1, np.minimum(*turns)) + 1 for turns in turns_2N])


def team_draft(ranks_2N: Ints, offsets_Q1: Ints, coins_N: Ints, *, depth: int | None = None) -> tuple[Doubles, Ints]:
    """Positions of the documents in a team-draft list, NaN if not drafted, and the ranker of each, both of shape [N].

    In every round a coin says which ranker picks first; each picks its best document that is not in the list yet, and
    the document joins its team (Radlinski, Kurup and Joachims 2008, algorithm 2).

    Args:
        ranks_2N: ranks of each document by both rankers.
        offsets_Q1: offsets of the lists.
        coins_N: the ranker that picks first in round t of a list, at place t of the list.
        depth: positions to fill; None for all.

    Returns:
        Positions, and teams, which are -1 for documents that were not drafted.

    Example:
        >>> ranks_2N, coins_N = np.array([[0, 1, 2], [2, 0, 1]]), np.array([0, 1, 0])
        >>> [part.tolist() for part in team_draft(ranks_2N, np.array([0, 3]), coins_N)]
        [[1.0, 2.0, 3.0], [0, 1, 1]]
    """
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


def team_credit(clicked_N: Bools, teams_N: Ints, offsets_Q1: Ints) -> Doubles:
    """Clicks on the documents of each ranker's team, shape [2, Q] (Radlinski, Kurup and Joachims 2008).

    Example:
        >>> team_credit(np.array([True, False, True]), np.array([0, 1, 0]), np.array([0, 3])).tolist()
        [[2.0], [0.0]]
    """
    return list_totals(clicked_N & (teams_N == np.array([[0], [1]])), offsets_Q1)


def balanced_credit(clicked_N: Bools, ranks_2N: Ints, positions_N: Doubles, offsets_Q1: Ints) -> Doubles:
    """Clicks that each ranking would have had at equal depth, shape [2, Q] (Joachims 2003).

    The depth k is the better of the two ranks of the lowest clicked document; a ranker has the clicks on its own first
    k. Clicks at random can prefer a ranker: of the rankings abc and bca the second wins two lists of three.

    Args:
        clicked_N: the clicks.
        ranks_2N: ranks of each document by both rankers.
        positions_N: positions in the list that was shown; NaN for documents that were not.
        offsets_Q1: offsets of the lists.

    Example:
        >>> abc_bca, positions_N = np.array([[0, 1, 2], [2, 0, 1]]), np.array([1.0, 2.0, 3.0])
        >>> balanced_credit(np.array([False, False, True]), abc_bca, positions_N, np.array([0, 3])).tolist()
        [[0.0], [1.0]]
    """
    lengths_Q = np.diff(offsets_Q1)
    lowest_Q = np.maximum.reduceat(np.where(clicked_N, positions_N, 0), offsets_Q1[:-1])
    is_lowest_N = clicked_N & (positions_N == np.repeat(lowest_Q, lengths_Q))
    depth_Q = np.maximum.reduceat(np.where(is_lowest_N, ranks_2N.min(axis=0), -1), offsets_Q1[:-1])
    return list_totals(clicked_N & (ranks_2N <= np.repeat(depth_Q, lengths_Q)), offsets_Q1)


def debiased_weights(ranks_2N: Ints, offsets_Q1: Ints, *, eta: float, depth: int | None = None) -> Doubles:
    """The credit of each ranker for a click on each document of a balanced list, shape [2, N].

    Counterfactual credit, after the idea of Bi et al. (2022): what the click says about a list of the ranker alone, by
    inverse propensities. With the examination `e(p) = p^-eta` and the positions `p_0`, `p_1` in the two lists,

        weight_r(d) = e(rank_r(d) + 1) 1{rank_r(d) < k} / mean(e(p_0(d)), e(p_1(d)))

    where e is 0 below `depth`, and k is the largest depth whose documents of both rankings are all shown in one of the
    lists. If documents are clicked with probability `e(p) a(d)`, for any a, the expected credit is the expected number
    of clicks on the ranker's own first k: the mean over coin and clicks leaves `sum over d of a(d) e(rank_r(d) + 1)`.
    So clicks that do not depend on the document prefer nobody, and the better list wins in the end. As a document is
    at most at twice its better position, weights are at most `2^eta`, or twice that if one list alone shows it.

    Args:
        ranks_2N: ranks of each document by both rankers.
        offsets_Q1: offsets of the lists.
        eta: strength of the users' position bias.
        depth: positions that are shown; None for all.

    Example:
        >>> debiased_weights(np.array([[0, 1, 2], [2, 0, 1]]), np.array([0, 3]), eta=1).round(3).tolist()
        [[1.333, 0.667, 1.0], [0.444, 1.333, 1.5]]
    """
    examined_2N = examination(interleaved_positions(balanced(ranks_2N, offsets_Q1), depth), eta=eta)
    propensity_N = examined_2N.mean(axis=0)
    beyond = np.iinfo(np.int64).max
    hidden_N = np.where(propensity_N > 0, beyond, ranks_2N.min(axis=0))
    reach_N = np.repeat(np.minimum.reduceat(hidden_N, offsets_Q1[:-1]), np.diff(offsets_Q1))
    value_2N = np.where(ranks_2N < reach_N, (ranks_2N + 1.0) ** -eta, 0.0)
    return np.asarray(value_2N / np.where(propensity_N > 0, propensity_N, 1.0))


def interleaved_positions(positions: NDArray[Any], depth: int | None) -> Doubles:
    """Positions that are shown; NaN below the depth."""
    positions = positions.astype(np.float64)
    return positions if depth is None else np.where(positions <= depth, positions, np.nan)


def list_totals(values_N: NDArray[Any], offsets_Q1: Ints) -> Doubles:
    """Sum of each list's values over the last axis; no list is empty."""
    return np.asarray(np.add.reduceat(values_N, offsets_Q1[:-1], axis=-1, dtype=np.float64))
