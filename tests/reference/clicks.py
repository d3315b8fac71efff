"""Simulated feedback and cleaned clicks of one list, with loops; exact probabilities instead of draws."""

import math
from collections.abc import Sequence


def rho(grade: float, top: float) -> float:
    """BUYL23, eq. 10."""
    return (2**grade - 1) / (2**top - 1)


def binary(grade: float, sharpness: float, tau: float) -> float:
    """P(y = 1) of HOU24, A.2.4."""
    return 1 / (1 + math.exp(-sharpness * (grade - tau)))


def intents(grades: Sequence[float], top: float, kappa: float) -> list[float]:
    """P(T = 0, 1, 2) of BUYL23, eq. 11."""
    best = rho(max(grades), top)
    return [1 - best, (1 - kappa) * best, kappa * best]


def implicit(grades: Sequence[float], top: float, kappa: float, epsilon: float) -> list[list[float]]:
    """P(y = 0, 1, 2) of each document by BUYL23, eq. 12, summed over the intents of eq. 11."""
    table = []
    for grade in grades:
        probabilities = [0.0, 0.0, 0.0]
        for intent, p_intent in enumerate(intents(grades, top, kappa)):
            buy = rho(grade, top) if intent == 2 else 0.0
            click = epsilon + (1 - epsilon) * rho(grade, top) if intent >= 1 else 0.0
            probabilities[2] += p_intent * buy
            probabilities[1] += p_intent * (1 - buy) * click
            probabilities[0] += p_intent * (1 - buy) * (1 - click)
        table.append(probabilities)
    return table


def pbm(grades: Sequence[float], positions: Sequence[int], top: float, eta: float, epsilon: float) -> list[float]:
    """P(click) of each document: examined at its position, and attractive."""
    return [
        (1 / position) ** eta * (epsilon + (1 - epsilon) * rho(grade, top))
        for grade, position in zip(grades, positions, strict=True)
    ]


def cascade(grades: Sequence[float], positions: Sequence[int], top: float, epsilon: float) -> list[float]:
    """P(click) of each document: it is attractive, and no document above it is."""
    clicks, going_on = [0.0] * len(grades), 1.0
    for i in sorted(range(len(grades)), key=lambda i: positions[i]):
        attractive = epsilon + (1 - epsilon) * rho(grades[i], top)
        clicks[i] = going_on * attractive
        going_on *= 1 - attractive
    return clicks


def ratio_weights(lists: Sequence[Sequence[tuple[int, float]]], depth: int, alpha: float) -> list[float]:
    """SUN23, eq. 2, from lists of (position, click)."""
    ratios = []
    for position in range(1, depth + 1):
        clicks = [click for shown in lists for at, click in shown if at == position]
        ratios.append(sum(clicks) / len(clicks))
    return [(ratios[0] / ratio) ** alpha for ratio in ratios]


def refined(clicks: Sequence[float], feature: Sequence[float], delta: float, temperature: float) -> list[float]:
    """Softmax of (delta click + feature) / temperature."""
    logits = [(delta * c + f) / temperature for c, f in zip(clicks, feature, strict=True)]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]
