"""Counts and overlap of positions, against loops over sets of documents."""

import numpy as np
import pytest
from reference import click_models as oracle

from ltrscale.clicks.overlap import dense, overlap
from ltrscale.clicks.sessions import Cells, Sessions, count


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
    shown_DP, rate_DP = dense(count(sessions), 2)
    assert shown_DP.tolist() == [[1, 1], [1, 1], [1, 0]]
    assert not rate_DP.any()
