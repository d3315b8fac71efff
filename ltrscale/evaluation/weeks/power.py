"""The power of a gate: how often it passes or refuses a candidate, and how many groups that takes."""

import math
from collections.abc import Mapping
from typing import Literal, Self

from scipy.special import ndtr, ndtri

from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.shown import AS_SHOWN
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.statistics.summarise import Comparison, Summary
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.document import Document, Table, Text

TAIL = 0.025
"""Chance of a difference beyond one end of a 95% interval."""
_POWER = 0.8
_CORRELATIONS = (0.5, 0.7, 0.8, 0.9, 0.95)
Refuse = Literal["unproven", "worse"]
"""Whom a gate refuses, see `Bounds.refuse`."""


class Power(Config):
    """What a gate can tell apart: how often a candidate passes or fails it, by the normal approximation.

    Of one that is as good as production, how often it passes `margin`; with `refuse: worse` of one that is worse by
    `margin`, how often it is refused. Both are the same number.
    """

    margin: float
    deviation: float
    """Standard deviation of the difference of a group."""
    groups: int
    passes: float
    """The probability at so many groups; of being refused with `refuse: worse`."""
    needed: int | None
    """Groups for a probability of .8; None for a margin of 0, which equal rankers hold once in 40 times at any size."""
    refuse: Refuse = "unproven"

    @classmethod
    def of(cls, margin: float, deviation: float, groups: int, refuse: Refuse = "unproven") -> Self:
        """`Phi(margin sqrt(Q) / deviation - z_.975)`, and the Q at which it is .8 (Julious 2004, section 5).

        Example:
            >>> [round(Power.of(0.005, 0.249, groups).passes, 2) for groups in (1_000, 3_000, 10_000)]
            [0.09, 0.19, 0.52]
            >>> Power.of(0.005, 0.249, 1_000).needed
            19466
        """
        if deviation == 0 or margin == 0:
            certain = margin > 0
            passes, needed = (1.0, 1) if certain else (TAIL if deviation else 0.0, None)
        else:
            passes = float(ndtr(margin * math.sqrt(groups) / deviation + ndtri(TAIL)))
            needed = math.ceil(((ndtri(_POWER) - ndtri(TAIL)) * deviation / margin) ** 2)
        return cls(margin=margin, deviation=deviation, groups=groups, passes=passes, needed=needed, refuse=refuse)

    @property
    def more(self) -> int | None:
        """Groups that are lacking for a probability of .8; None where no number is enough."""
        return None if self.needed is None else max(0, self.needed - self.groups)

    @property
    def stated(self) -> str:
        """In a sentence."""
        told = {
            "unproven": f"A candidate as good as production passes bounds.margin {self.margin:g}",
            "worse": f"A candidate worse than production by bounds.margin {self.margin:g} is refused",
        }
        return (
            f"{told[self.refuse]} with a probability of {self.passes:.2f} at {self.groups:,} groups; {self._enough} "
            f"(the difference of a group deviates by {self.deviation:.3f})"
        )

    @property
    def _enough(self) -> str:
        if self.needed is None:
            return "no number of groups changes that"
        lacking = f"needs {self.more:,} more groups" if self.more else "needs no more groups"
        return f"{_POWER} takes {self.needed:,}: the gate {lacking}"


def deviation_of(compared: Comparison | Summary, groups: int) -> float:
    """Standard deviation of the values of one group, from the 95% interval of their mean."""
    assert compared.low is not None
    assert compared.high is not None
    return (compared.high - compared.low) / (2 * -float(ndtri(TAIL))) * math.sqrt(groups)


def foreseen(evaluation: Evaluation, margin: float, refuse: Refuse = "unproven") -> dict[str, Power]:
    """What the margin asks of the number of groups, by what the deviation of a difference is taken from.

    That is each comparison of two bundles in the evaluation. Of one method alone the deviation s of its metric is
    known, and that of a difference is `s sqrt(2 (1 - r))`, if a candidate deviates as much and correlates by r.

    Raises:
        InputError: the evaluation has several methods, and compares no two of one bundle each.
    """
    primary = evaluation.primary
    of_methods = {method.name: method.slices[ALL] for method in evaluation.methods if method.name != AS_SHOWN}
    if len(of_methods) == 1:
        ((_, scope),) = of_methods.items()
        summary = scope.summaries[primary]
        if summary.low is None or len(summary.trials) > 1:
            raise InputError(f"{primary}: no test group defines it for one bundle; choose other periods in splits.test")
        deviation = deviation_of(summary, summary.groups)
        return {
            f"a correlation of {r:g}": Power.of(margin, deviation * math.sqrt(2 * (1 - r)), summary.groups, refuse)
            for r in _CORRELATIONS
        }
    single = {name for name, scope in of_methods.items() if len(scope.summaries[primary].trials) == 1}
    powers = {
        f"{name} against {evaluation.baseline}": Power.of(margin, deviation_of(c, groups), groups, refuse)
        for name, scope in of_methods.items()
        if {name, evaluation.baseline} <= single
        and (c := scope.comparisons.get(primary)) is not None
        and (groups := scope.summaries[primary].groups)
    }
    if not powers:
        raise InputError("plan_from: the evaluation compares no two methods of one bundle each; name another one")
    return powers


def document(found: Mapping[str, Power], primary: str) -> Document:
    """A row for each deviation that a difference may have; of these there is at least one."""
    first = next(iter(found.values()))
    told = "one worse by the margin is refused" if first.refuse == "worse" else "an equal candidate passes"
    header = ["deviation as of", "deviation", "groups", told, f"groups for {_POWER}"]
    rows = [
        [name, f"{p.deviation:.3f}", f"{p.groups:,}", f"{p.passes:.2f}", "-" if p.needed is None else f"{p.needed:,}"]
        for name, p in found.items()
    ]
    margin = f"bounds.margin {first.margin:g} in {metric_label(primary)}, bounds.refuse {first.refuse}:"
    return Document("Groups that a margin needs", [Text(margin), Table(header, rows)])
