"""Falls of a metric over periods, compared with their noise, in words.

Shapes: P periods.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ltrscale.evaluation.pages import with_error
from ltrscale.evaluation.statistics.summarise import Summary
from ltrscale.ranking.choices import metric_label

_Z = 1.96


def fallen(means: Sequence[Summary]) -> tuple[float, float] | None:
    """How far a metric fell from the first period to the last, and the half of that fall's 95% interval, its noise.

    The fall is along the straight line through the means of periods, weighted by their intervals; with two periods it
    is their difference. If several spread around the line by more than their intervals say, the noise is scaled up
    accordingly. None for fewer than two periods with an interval.
    """
    known = [
        (x, s.mean, (s.high - s.low) / (2 * _Z))
        for x, s in enumerate(means)
        if s.mean is not None and s.low is not None and s.high is not None
    ]
    if len(known) < 2:
        return None
    x_P, mean_P, error_P = np.array(known, np.float64).T
    weight_P = 1 / np.maximum(error_P, 1e-12) ** 2
    centred_P = x_P - np.average(x_P, weights=weight_P)
    spread = float(weight_P @ centred_P**2)
    slope = float(weight_P @ (centred_P * mean_P)) / spread
    rest_P = mean_P - np.average(mean_P, weights=weight_P) - slope * centred_P
    more = float(weight_P @ rest_P**2) / max(1, len(known) - 2)
    span = float(x_P[-1] - x_P[0])
    return -slope * span, _Z * span * math.sqrt(max(1.0, more) / spread)


def falls_said(curves: Mapping[str, Mapping[str, Summary]], metric: str) -> Iterator[str]:
    """One sentence on methods with a fall of the metric below its noise, and one on the other falls.

    `curves` are the metric's summaries by method and period, in the order of the periods.
    """
    found = {name: fall for name, points in curves.items() if (fall := fallen([*points.values()])) is not None}
    if not found:
        return
    periods = [*next(iter(curves.values()))]
    span, label = f"From {periods[0]} to {periods[-1]}", metric_label(metric)
    stated = {name: f"{name} by {with_error(*fall)}" for name, fall in found.items()}
    falling = [name for name, (fall, _) in found.items() if fall > 0]
    beyond = [name for name in falling if found[name][0] > found[name][1]]
    if beyond:
        yield f"{span} {label} falls by more than its noise: {', '.join(stated[name] for name in beyond)}."
    if within := [name for name in falling if name not in beyond]:
        yield (
            f"{span} {label} falls by less than its noise, the half of a 95% interval, which is no sign of decay: "
            f"{', '.join(stated[name] for name in within)}."
        )
    if not falling:
        yield f"{span} {label} falls for no method."
