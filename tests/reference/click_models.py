"""Click models and propensities of one list or a few counts, with loops over everything that is hidden."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from scipy.optimize import minimize

Clicks = tuple[bool, ...]
Story = tuple[float, list[bool], list[bool], Clicks]
"""Probability, what was examined, what satisfied, what was clicked."""


def patterns(n: int) -> Iterator[Clicks]:
    """All patterns of clicks."""
    return itertools.product((False, True), repeat=n)


def ubm(attraction: Sequence[float], examination: Sequence[Sequence[float]], clicks: Clicks) -> float:
    """Probability of a pattern; `examination[p][last]` with the position of the last click, 0 for none."""
    probability, last = 1.0, 0
    for p, clicked in enumerate(clicks):
        click = attraction[p] * examination[p][last]
        probability *= click if clicked else 1 - click
        last = p + 1 if clicked else last
    return probability


def dbn_stories(attraction: Sequence[float], satisfaction: Sequence[float], going_on: float) -> Iterator[Story]:
    """All that can happen to a user of a DBN: pass each position, or click there, be satisfied or not, and leave."""

    def go(p: int, probability: float, examined: list[bool], satisfied: list[bool], clicks: Clicks) -> Iterator[Story]:
        rest = len(attraction) - p
        if rest == 0:
            yield probability, examined, satisfied, clicks
            return
        a, s = attraction[p], satisfaction[p]
        for clicked, content, chance in ((False, False, 1 - a), (True, True, a * s), (True, False, a * (1 - s))):
            now = [*examined, True], [*satisfied, content], (*clicks, clicked)
            stay = 0.0 if content else going_on
            if rest > 1 and stay > 0:
                yield from go(p + 1, probability * chance * stay, *now)
            if rest == 1 or stay < 1:
                leave = 1.0 if rest == 1 else 1 - stay
                never = [False] * (rest - 1)
                yield probability * chance * leave, now[0] + never, now[1] + never, now[2] + tuple(never)

    yield from go(0, 1.0, [], [], ())


def marginals(probability: Callable[[Clicks], float], n: int) -> list[float]:
    """The probability of a click at each position, summed over all patterns."""
    return [sum(probability(clicks) for clicks in patterns(n) if clicks[p]) for p in range(n)]


def conditionals(probability: Callable[[Clicks], float], clicks: Clicks) -> list[float]:
    """The probability of a click at each position given those above, as ratios of sums over all patterns."""
    found = []
    for p in range(len(clicks)):
        above = [other for other in patterns(len(clicks)) if other[:p] == clicks[:p]]
        total = sum(map(probability, above))
        found.append(sum(probability(other) for other in above if other[p]) / total)
    return found


def all_pairs(counts: dict[tuple[int, int], tuple[int, int]], positions: int) -> list[float]:
    """AllPairs (Agarwal et al. 2019) by a search without slopes; `counts[document, position]` = shown, clicked."""
    sides: dict[tuple[int, int], list[float]] = {}
    for (d, p), (shown, clicked) in counts.items():
        for q in range(positions):
            if q != p and (d, q) in counts:
                weight = shown * counts[d, q][0] / (shown + counts[d, q][0])
                side = sides.setdefault((p, q), [0.0, 0.0])
                side[0] += weight * clicked / shown
                side[1] += weight * (1 - clicked / shown)
    links = sorted({(min(pair), max(pair)) for pair in sides})

    def loss(logits: Sequence[float]) -> float:
        probability = [1 / (1 + math.exp(-x)) for x in logits]
        total = 0.0
        for (p, q), (clicked, missed) in sides.items():
            z = probability[p] * probability[positions + links.index((min(p, q), max(p, q)))]
            total -= clicked * math.log(z) + missed * math.log(1 - z)
        return total

    start = [0.0] * (positions + len(links))
    options = {"maxiter": 100_000, "maxfev": 100_000, "xatol": 1e-9, "fatol": 1e-12, "adaptive": True}
    for _ in range(4):
        start = minimize(loss, start, method="Nelder-Mead", options=options).x
    values = [1 / (1 + math.exp(-x)) for x in start[:positions]]
    return [value / values[0] for value in values]


def product_likelihood(
    cells: Sequence[tuple[int, int, float, float]], attraction: Sequence[float], examination: Sequence[float]
) -> float:
    """Log-likelihood of counts (pair, place, shown, clicked) under a click of attraction times examination."""
    total = 0.0
    for pair, place, shown, clicked in cells:
        z = min(max(attraction[pair] * examination[place], 1e-12), 1 - 1e-12)
        total += clicked * math.log(z) + (shown - clicked) * math.log(1 - z)
    return total


def linked_parts(counts: dict[tuple[int, int], tuple[int, int]], positions: int, fewest: int) -> list[list[int]]:
    """Positions, from 1, in parts linked by documents, by walking from position to position."""
    places: dict[int, set[int]] = {}
    for d, p in counts:
        places.setdefault(d, set()).add(p)

    def linked(p: int, q: int) -> bool:
        both = [d for d, seen in places.items() if p in seen and q in seen]
        clicked = all(sum(counts[d, at][1] for d in both) > 0 for at in (p, q))
        return p != q and len(both) >= fewest and clicked

    left = sorted({p for _, p in counts})
    parts = []
    while left:
        part, waiting = {left[0]}, [left[0]]
        while waiting:
            p = waiting.pop()
            for q in range(positions):
                if q not in part and linked(p, q):
                    part.add(q)
                    waiting.append(q)
        parts.append(sorted(p + 1 for p in part))
        left = [p for p in left if p not in part]
    return parts
