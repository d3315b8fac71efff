"""The power of a gate: how often a candidate passes or fails with a number of groups."""

import math
from typing import Literal, Self

from ltrscale.config import Strict
from ltrscale.evaluation.statistics.summarise import Comparison, Summary
from ltrscale.late import Late

special = Late("scipy.special")

TAIL = 0.025
"""Chance of a difference beyond one end of a 95% interval."""
POWER_ASKED = 0.8
"""The probability for which groups are counted."""
Refuse = Literal["unproven", "worse"]
"""Which candidates a gate refuses, see `Bounds.refuse`."""


class Power(Strict):
    """The power of a gate: how often a candidate passes or fails, by the normal approximation.

    For a candidate as good as production, how often it passes `margin`; with `refuse: worse`, for one worse by
    `margin`, how often it is refused. Both are the same number.
    """

    margin: float
    deviation: float
    """Standard deviation of the difference of a group."""
    groups: int
    passes: float
    """The probability with this many groups; of being refused with `refuse: worse`."""
    needed: int | None
    """Groups for a probability of .8; None for a margin of 0, which equal rankers hold once in 40 times at any size."""
    refuse: Refuse = "unproven"

    @classmethod
    def from_margin(cls, margin: float, deviation: float, groups: int, refuse: Refuse = "unproven") -> Self:
        """`Phi(margin sqrt(Q) / deviation - z_.975)`, and the Q at which it is .8 (Julious 2004, section 5)."""
        if deviation == 0 or margin == 0:
            certain = margin > 0
            passes, needed = (1.0, 1) if certain else (TAIL if deviation else 0.0, None)
        else:
            passes = float(special.ndtr(margin * math.sqrt(groups) / deviation + special.ndtri(TAIL)))
            needed = math.ceil(samples_needed(margin, deviation**2) or 0)
        return cls(margin=margin, deviation=deviation, groups=groups, passes=passes, needed=needed, refuse=refuse)

    @property
    def more(self) -> int | None:
        """Groups still missing for a probability of .8; None where no number is enough."""
        return None if self.needed is None else max(0, self.needed - self.groups)

    @property
    def stated(self) -> str:
        """The power in a sentence."""
        meaning = {
            "unproven": f"A candidate as good as production passes bounds.margin {self.margin:g}",
            "worse": f"A candidate worse than production by bounds.margin {self.margin:g} is refused",
        }
        enough = "no number of groups changes that"
        if self.needed is not None:
            lacking = f"needs {self.more:,} more groups" if self.more else "needs no more groups"
            enough = f"{POWER_ASKED} takes {self.needed:,}: the gate {lacking}"
        return (
            f"{meaning[self.refuse]} with a probability of {self.passes:.2f} at {self.groups:,} groups; {enough} "
            f"(the difference of a group deviates by {self.deviation:.3f})"
        )


def samples_needed(mean: float, variance: float, *, level: float = 2 * TAIL) -> float | None:
    """Independent samples until a two-sided test finds a mean with a probability of .8; None for a mean of 0.

    `((z_{1 - level / 2} + z_.8) / mean)^2 variance` (Cohen 1988).
    """
    return ((special.ndtri(1 - level / 2) + special.ndtri(POWER_ASKED)) / mean) ** 2 * variance if mean else None


def deviation_of(compared: Comparison | Summary, groups: int) -> float:
    """Standard deviation of the values of one group, from the 95% interval of their mean."""
    low, high = interval_of(compared)
    return (high - low) / (2 * -float(special.ndtri(TAIL))) * math.sqrt(groups)


def interval_of(of: Comparison | Summary) -> tuple[float, float]:
    """Both ends of the interval, which methods of one draw each have."""
    assert of.low is not None
    assert of.high is not None
    return of.low, of.high
