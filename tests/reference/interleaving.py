"""Interleaving of two rankings of document numbers, with loops, as the papers print the algorithms."""

from collections.abc import Callable, Sequence


def balanced(a: Sequence[int], b: Sequence[int], a_first: bool) -> list[int]:
    """Radlinski, Kurup and Joachims 2008, algorithm 1."""
    shown: list[int] = []
    at_a = at_b = 0
    while at_a < len(a) and at_b < len(b):
        if at_a < at_b or (at_a == at_b and a_first):
            if a[at_a] not in shown:
                shown.append(a[at_a])
            at_a += 1
        else:
            if b[at_b] not in shown:
                shown.append(b[at_b])
            at_b += 1
    return shown


def team_draft(a: Sequence[int], b: Sequence[int], coins: Sequence[int]) -> tuple[list[int], set[int], set[int]]:
    """Algorithm 2 there; a coin for each round, 0 if A picks first."""
    shown: list[int] = []
    team_a: set[int] = set()
    team_b: set[int] = set()
    while len(shown) < len(a):
        a_picks = len(team_a) < len(team_b) or (len(team_a) == len(team_b) and coins[len(shown) // 2] == 0)
        ranking, team = (a, team_a) if a_picks else (b, team_b)
        document = next(d for d in ranking if d not in shown)
        shown.append(document)
        team.add(document)
    return shown, team_a, team_b


def balanced_credit(a: Sequence[int], b: Sequence[int], shown: Sequence[int], clicked: set[int]) -> tuple[int, int]:
    """Section 3.3.1 there: clicks in the first k of each, k the shortest prefix that has the lowest click."""
    if not clicked:
        return 0, 0
    lowest = [d for d in shown if d in clicked][-1]
    k = min(k for k in range(1, len(a) + 1) if lowest in a[:k] or lowest in b[:k])
    return len(clicked & set(a[:k])), len(clicked & set(b[:k]))


def value(ranking: Sequence[int], attraction: Sequence[float], examined: Callable[[int], float], k: int) -> float:
    """Expected clicks on the first k of a ranking, of a user who examines position p with probability examined(p)."""
    return sum(examined(p) * attraction[d] for p, d in enumerate(ranking[:k], start=1))
