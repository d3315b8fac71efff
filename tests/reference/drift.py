"""Bins and divergence of two samples, value by value."""

import math
from collections import Counter
from collections.abc import Sequence


def number_bins(training: Sequence[float]) -> list[float]:
    """Where bins begin: the first value, each at which a tenth of the values is reached, one above the last."""
    known = sorted(x for x in training if not math.isnan(x))
    starts: list[float] = []
    reached = -1
    for below, start in ((known.index(x), x) for x in sorted(set(known))):
        if 10 * below // len(known) > reached:
            reached = 10 * below // len(known)
            starts.append(start)
    return [*starts, math.nextafter(known[-1], math.inf)] if known else []


def number_bin(value: float, starts: Sequence[float]) -> str:
    """Missing, or the number of bins that begin at or below the value."""
    return "missing" if math.isnan(value) else str(sum(start <= value for start in starts))


def code_bin(value: float, training: Sequence[float]) -> str:
    """Missing, unknown, one of the nine most frequent codes (of equally frequent ones the smaller), or another."""
    if math.isnan(value):
        return "missing"
    counts = Counter(x for x in training if not math.isnan(x))
    if value not in counts:
        return "unknown"
    frequent = sorted(counts, key=lambda code: (-counts[code], code))[:9]
    return str(value) if value in frequent else "other"


def psi(one: Sequence[str], other: Sequence[str]) -> float:
    """The population stability index of two samples of bins, with half a count more in each."""
    bins, counts = sorted({*one, *other}), (Counter(one), Counter(other))
    shares = [[(of[b] + 0.5) / (sum(of.values()) + 0.5 * len(bins)) for b in bins] for of in counts]
    return sum((p - q) * math.log(p / q) for p, q in zip(*shares, strict=True))
