"""Sessions of users whose behaviour is known: rankers that move documents, position bias, noise and trust."""

from typing import NamedTuple

import numpy as np

from ltrscale.clicks.sessions import Bools, Doubles, Sessions


class Truth(NamedTuple):
    """Sessions, and how they came about."""

    sessions: Sessions
    examination_P: Doubles
    relevance_D: Doubles
    """Probability that a document is found relevant, without noise."""
    poor_P: Doubles
    """Probability of a click by position on an irrelevant document, relative to the first position."""


def position_based(
    seed: int,
    *,
    queries: int = 300,
    documents: int = 15,
    impressions: int = 60,
    positions: int = 10,
    eta: float = 1.0,
    noise: float = 0.1,
    trust: float = 0.0,
    jitter: float = 2.0,
    skill: float = 0.1,
) -> Truth:
    """A position-based user of a ranker that knows relevance up to noise of deviation `skill`, and moves documents."""
    rng = np.random.default_rng(seed)
    relevance_QD = rng.beta(1, 3, (queries, documents))
    place_QD = np.argsort(np.argsort(-(relevance_QD + rng.normal(0, skill, relevance_QD.shape)), axis=1), axis=1)
    moved_QID = place_QD[:, None] + jitter * rng.normal(size=(queries, impressions, documents))
    order_QIP = np.argsort(moved_QID, axis=2)[:, :, :positions]
    pairs_SP = (order_QIP + np.arange(queries)[:, None, None] * documents).reshape(-1, positions)
    place_P = np.arange(1, positions + 1)
    attraction_SP = noise + (1 - noise) * relevance_QD.ravel()[pairs_SP]
    examination_P, trust_P = (1 / place_P) ** eta, trust / place_P
    perceived_SP = trust_P + (1 - trust_P) * attraction_SP
    clicks_SP = rng.random(pairs_SP.shape) < examination_P * perceived_SP
    sessions = Sessions(pairs_SP, clicks_SP, np.repeat(np.arange(queries), impressions), queries * documents)
    poor_P = examination_P * (trust_P + (1 - trust_P) * noise)
    return Truth(sessions, examination_P, relevance_QD.ravel(), poor_P / max(poor_P[0], 1e-12))


def random_halves(sessions: Sessions, seed: int = 0) -> Bools:
    """Which sessions are in the first half."""
    return np.asarray(np.random.default_rng(seed).random(len(sessions)) < 0.5)
