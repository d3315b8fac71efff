"""The verdict of a gate: may a candidate replace the bundle in production, by an evaluation of both by period?

A candidate must also not lean on a feature that may be a leak: `ltrscale.ingest.leaks` finds such features and asks
about them; `bounds.expected` has the answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from ltrscale.config import Config, Strict
from ltrscale.data.dataset.manifest import Feature, matching
from ltrscale.data.dataset.split import Texts
from ltrscale.evaluation.measure.drift import MUCH, ByPeriod, PeriodDrift
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import CANDIDATE
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.pages import with_interval
from ltrscale.evaluation.statistics.blocks import holm
from ltrscale.evaluation.statistics.lifts import POWER_ASKED, TAIL, samples_needed
from ltrscale.evaluation.statistics.summarise import Comparison, Summary
from ltrscale.late import Late
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.document import Block, Points, Table, cell
from ltrscale.reports.findings import Findings

if TYPE_CHECKING:
    from ltrscale.bundle import Bundle
    from ltrscale.ingest import leaks
    from ltrscale.ranking.single_feature import SingleFeature
else:
    leaks = Late("ltrscale.ingest.leaks")
special = Late("scipy.special")

_MOST_NAMED = 3
Refuse = Literal["unproven", "worse"]
"""Which candidates a gate refuses, see `Bounds.refuse`."""


class GoalBounds(Config):
    """What a candidate must keep to in the metric of some labels; every difference is candidate minus production."""

    refuse: Refuse = "unproven"
    """Which side has the burden of proof over all groups. `unproven` refuses a candidate that is not shown to keep
    `margin`, which takes many groups, and suits another kind of model. `worse` refuses one that is shown to be worse,
    and accepts the rest: for routine retrains, because the model in use gets older meanwhile. See docs/weeks.md for how
    often each errs."""
    margin: float = Field(default=0.005, ge=0)
    """Over all groups, the lower end of the 95% interval of the difference must be above minus this: with confidence,
    not worse by more (non-inferiority). 0 asks for a candidate that is better with confidence. With `refuse: worse` it
    is enough that the upper end is not below 0."""
    slice_margin: float = Field(default=0.01, ge=0)
    """The candidate may not be worse than production by more than this on any slice, as judged by `slices_by`."""
    slices_by: Literal["shown", "mean", "excluded"] = "shown"
    """What breaks the bound of a slice. `shown`: the candidate is shown to be worse by more than the margin: the upper
    end of the interval is below minus the margin, with a p value adjusted by Holm for the number of slices. `mean`: the
    difference itself is below, which happens by chance on small slices. `excluded`: the lower end is below, so worse is
    not excluded; this bound needs many groups on every slice. The default is `shown`, because there are many slices;
    the report names those where worse is not excluded."""
    groups: int = Field(default=100, ge=1)
    """The fewest groups with a defined metric that allow a verdict: smaller slices are not judged, and a candidate
    judged on fewer groups in all is refused."""


class Bounds(GoalBounds):
    """What a candidate must keep to in the primary metric of the test labels, and in drift and leaks."""

    drifted: float | None = Field(default=0.25, ge=0, le=1)
    """Share of the candidate's features that may have a population stability index above .25 in a period, beyond what
    chance gives; null for any. Features of the time, such as the weekday, drift between any two short periods."""
    feature_psi: float | None = Field(default=None, ge=0)
    """Largest index that a single feature may have in a period, beyond what chance gives; null for any. A feature in
    another unit, or that has gone missing, has 5 to 20; one with a mean that moved by a standard deviation, about 1."""
    moving: Texts = ()
    """Features whose drift is no sign of a fault, such as the weekday or a price in a sale: `drifted` and `feature_psi`
    ignore them. Patterns of features of the data set, as in `leave_out`, whether or not a ranker reads them."""
    score_psi: float | None = Field(default=MUCH, ge=0)
    """Largest index of the spread of the candidate's scores in a period, against validation, beyond what chance gives;
    null for any."""
    expected: Texts = ()
    """Features that are known when the list is shown, although alone they rank nearly as well as the labels, or exist
    for relevant documents only. A candidate that leans on another such feature is refused: it may be known only after
    the click. Patterns, as in `leave_out`."""
    drift_groups: int = Field(default=200, ge=1)
    """The fewest groups, labelled or not, in a period and in its reference that allow a verdict on drift: with fewer,
    an index is above .25 by chance."""

    def find_moving(self, features: Sequence[Feature]) -> frozenset[str]:
        """The names of the features of the data set that `moving` means.

        Raises:
            InputError: a pattern matches none of them.
        """
        return frozenset(f.name for pattern in self.moving for f in matching(pattern, features, key="bounds.moving"))


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


def deviation_of(compared: Comparison | Summary, groups: int) -> float:
    """Standard deviation of the values of one group, from the 95% interval of their mean."""
    low, high = interval_of(compared)
    return (high - low) / (2 * -float(special.ndtri(TAIL))) * math.sqrt(groups)


def interval_of(of: Comparison | Summary) -> tuple[float, float]:
    """Both ends of the interval, which methods of one draw each have."""
    assert of.low is not None
    assert of.high is not None
    return of.low, of.high


_Bound = Literal["groups", "margin", "slice_margin", "expected", "drifted", "feature_psi", "score_psi"]
"""The key of `Bounds` that a check is of."""


class Check(Strict):
    """One bound and whether it holds."""

    bound: _Bound
    where: str
    """The slice, the period or the feature."""
    holds: bool
    reason: str
    """What was found and what was required, in one line."""


class GateVerdict(Findings):
    """`verdict.json` of a gate."""

    called: ClassVar = "a gate's verdict"
    made_by_job: ClassVar = "jobs.gate"
    file: ClassVar = "verdict.json"
    passed: bool
    primary: str
    checks: tuple[Check, ...]
    not_judged: tuple[str, ...]
    """Slices with too few groups."""
    not_excluded: tuple[str, ...]
    """Slices that hold their bound, although the candidate may be worse there by more than the margin."""
    drift_not_judged: tuple[str, ...] = ()
    """Periods with too few groups to judge a bound on drift, or compared with too few."""
    power: Power | None = None
    """What the margin requires of the number of groups; None if nothing could be compared."""

    @property
    def reasons(self) -> list[str]:
        """What was found at each broken bound."""
        return [check.reason for check in self.checks if not check.holds]


def judge(
    evaluation: Evaluation, bounds: Bounds, further: Iterable[Check] = (), moving: Collection[str] = ()
) -> GateVerdict:
    """Check the bounds of a candidate against an evaluation by period with production as its baseline.

    `further` are the checks of other goals and of the features it leans on, see `goal_checks` and `check_leaks`;
    `moving` are the names of those that may drift, see `Bounds.find_moving`.

    Raises:
        InputError: drift could not be measured.
    """
    primary, periods = evaluation.primary, evaluation.drift()
    compared = _compared(evaluation)
    difference, groups = compared.pop(ALL)
    judged = _large_enough(compared, bounds)
    slices, drift = list(_slice_checks(judged, primary, bounds)), list(drift_checks(periods, bounds, moving))
    asked_of_drift = sum(bound is not None for bound in (bounds.drifted, bounds.feature_psi, bounds.score_psi))
    in_period = Counter(check.where for check in drift)
    power = None
    if difference is not None:
        power = Power.from_margin(bounds.margin, deviation_of(difference, groups), groups, bounds.refuse)
    checks = (*_overall(difference, groups, primary, bounds, power), *slices, *further, *drift)
    held = [check.where for check in slices if check.holds]
    return GateVerdict(
        passed=all(check.holds for check in checks),
        primary=primary,
        checks=checks,
        not_judged=tuple(name for name in compared if name not in judged),
        not_excluded=tuple(name for name in held if interval_of(judged[name][0])[0] < -bounds.slice_margin),
        drift_not_judged=tuple(period for period in periods.periods if in_period[period] < asked_of_drift),
        power=power,
    )


_Compared = dict[str, tuple[Comparison | None, int]]
"""The difference from production in the primary metric, and the groups that define it, by slice."""


def _compared(evaluation: Evaluation) -> _Compared:
    (candidate,) = (method for method in evaluation.methods if method.name == CANDIDATE)
    primary = evaluation.primary
    return {
        name: (scope.comparisons.get(primary), scope.summaries[primary].groups)
        for name, scope in candidate.slices.items()
    }


def _large_enough(compared: _Compared, bounds: GoalBounds) -> dict[str, tuple[Comparison, int]]:
    return {name: (c, n) for name, (c, n) in compared.items() if c is not None and n >= bounds.groups}


def goal_checks(goal: str, evaluation: Evaluation, bounds: GoalBounds) -> Iterator[Check]:
    """The bounds on the metric of a goal, over all groups and on slices, from an evaluation on its labels."""
    compared, primary = _compared(evaluation), evaluation.primary
    overall = _overall(*compared.pop(ALL), primary, bounds, None)
    for check in (*overall, *_slice_checks(_large_enough(compared, bounds), primary, bounds)):
        yield check.replace(where=f"{goal}: {check.where}", reason=f"goal {goal}: {check.reason}")


def _check(bound: _Bound, where: str, holds: bool, found: str, asked: str) -> Check:
    return Check(bound=bound, where=where, holds=holds, reason=f"{found}; {asked}")


def _difference(where: str, compared: Comparison, primary: str) -> str:
    return f"{where}: {metric_label(primary)} {with_interval(compared)}"


def _overall(
    compared: Comparison | None, groups: int, primary: str, bounds: GoalBounds, power: Power | None
) -> Iterator[Check]:
    enough = compared is not None and groups >= bounds.groups
    found = f"{groups:,} groups define {primary}"
    yield _check("groups", ALL, enough, found, f"bounds.groups asks for {bounds.groups:,}")
    if compared is None:
        return
    low, high = interval_of(compared)
    holds = low > -bounds.margin or (bounds.refuse == "worse" and high >= 0)
    asked = f"bounds.margin asks for a lower end above {-bounds.margin:g}"
    if bounds.refuse == "worse":
        asked += ", or for an upper end of at least 0 (bounds.refuse: worse)"
    elif not holds and power is not None and power.more:
        asked += f"; needs {power.more:,} more groups to let an equal candidate pass four times in five"
    yield _check("margin", ALL, holds, _difference("all groups", compared, primary), asked)


def _slice_checks(judged: Mapping[str, tuple[Comparison, int]], primary: str, bounds: GoalBounds) -> Iterator[Check]:
    margin = bounds.slice_margin
    p_M = np.array([_worse_p(compared, groups, margin) for compared, groups in judged.values()])
    for (name, (compared, _)), p in zip(judged.items(), holm(p_M).tolist(), strict=True):
        if bounds.slices_by == "shown":
            holds = p >= TAIL
            asked = (
                f"worse by more than bounds.slice_margin {margin:g} has p {cell(p)} (Holm, slices: {len(judged)}), "
                f"and is shown below {TAIL}"
            )
        else:
            ends = {"mean": ("difference", compared.difference), "excluded": ("lower end", interval_of(compared)[0])}
            end, value = ends[bounds.slices_by]
            holds, asked = value >= -margin, f"bounds.slice_margin asks for its {end} to be at least {-margin:g}"
        yield _check("slice_margin", name, holds, _difference(f"slice {name}", compared, primary), asked)


def _worse_p(compared: Comparison, groups: int, margin: float) -> float:
    """One-sided p of a difference that is at least minus the margin: below .025 if the upper end is below it."""
    # Student's t with the error of the interval's upper half: percentiles of resamples do not reach the small
    # probabilities that many slices need.
    beyond, half = -margin - compared.difference, interval_of(compared)[1] - compared.difference
    if half <= 0:  # all groups differ alike
        return float(beyond <= 0)
    return float(special.stdtr(groups - 1, special.stdtrit(groups - 1, TAIL) * beyond / half))


def drift_checks(drift: ByPeriod, bounds: Bounds, moving: Collection[str], method: str = CANDIDATE) -> Iterator[Check]:
    """The bounds on drift, for each period with enough groups; the scores are those of `method`.

    Features with a name in `moving` may drift; see `Bounds.find_moving`.
    """
    for period, later in drift.periods.items():
        if min(drift.train.groups, later.groups) >= bounds.drift_groups:
            yield from _feature_checks(period, later, bounds, moving)
        spread, limit = later.spreads[method], bounds.score_psi
        if limit is not None and min(spread.lists, drift.train.spreads[method].lists) >= bounds.drift_groups:
            found = f"the spread of the {method}'s scores has a PSI of {spread.psi:.3f}, {spread.chance:.3f} by chance"
            asked = f"bounds.score_psi asks for at most {limit:g} beyond chance"
            yield _check("score_psi", period, spread.beyond <= limit, f"period {period}: {found}", asked)


def _feature_checks(period: str, drift: PeriodDrift, bounds: Bounds, moving: Collection[str]) -> Iterator[Check]:
    judged = {name: feature for name, feature in drift.features.items() if name not in moving}
    drifted = [name for name in drift.drifted if name in judged]
    if bounds.drifted is not None:
        most = ", ".join(f"{name} {judged[name].psi:.2f}" for name in drifted[:_MOST_NAMED])
        count = f"{len(drifted)} of {len(judged)} features have a PSI above {MUCH:g} beyond chance"
        found = f"period {period}: {count}{f' ({most})' if most else ''}"
        holds = len(drifted) <= bounds.drifted * len(judged)
        yield _check("drifted", period, holds, found, f"bounds.drifted asks for at most {bounds.drifted:.0%}")
    if (limit := bounds.feature_psi) is not None:
        by_drift = sorted(judged, key=lambda name: -judged[name].beyond)
        broken = [name for name in by_drift if judged[name].beyond > limit]
        worst = broken[:_MOST_NAMED] or by_drift[:1]
        found = ", ".join(f"{name} has a PSI of {judged[name].psi:.2f}" for name in worst) or "no feature is judged"
        asked = f"bounds.feature_psi asks for at most {limit:g} beyond chance (a fault, or bounds.moving)"
        yield _check("feature_psi", period, not broken, f"period {period}: {found}", asked)


def check_leaks(features: Sequence[SingleFeature], candidate: Bundle, expected: Collection[str]) -> Iterator[Check]:
    """One check for each suspicious feature that the candidate leans on, or a single check that holds.

    `expected` are patterns of features that are known when the list is shown, even if they rank well.

    Raises:
        InputError: a pattern matches no feature of the data.
    """
    known = [Feature(name=feature.name) for feature in features]
    allowed = {f.name for pattern in expected for f in matching(pattern, known, key="bounds.expected")}
    used = candidate.leans_on()
    asked = {name: question for name, question in leaks.questions(features).items() if name in used}
    for name, question in asked.items():
        share = used[name]
        gain = "" if share is None else f", and has {share:.0%} of the candidate's gain"
        found, holds = question.removesuffix(f": {leaks.ASK}") + gain, name in allowed
        remedy = f"{leaks.ASK} If so, name it in bounds.expected; else train without it (leave_out)"
        reason = f"{found}; bounds.expected names it" if holds else f"{found}: {remedy}"
        yield Check(bound="expected", where=name, holds=holds, reason=reason)
    if not asked:
        first = next((feature for feature in features if feature.name in used), None)
        best = "" if first is None else f"; the best, {first.name}, reaches NDCG@{first.k} {first.ndcg:.3f}"
        found = "no feature of the candidate ranks as the labels do by itself, or is there for relevant ones only"
        yield Check(bound="expected", where=ALL, holds=True, reason=f"{found}{best}")


def verdict_blocks(verdict: GateVerdict) -> Iterator[Block]:
    """Broken bounds, a row for each bound, and what cannot be judged."""
    if verdict.reasons:
        yield Points(verdict.reasons)
    yield Table.from_rows(
        [
            {
                "bound": c.bound,
                "where": c.where,
                "verdict": "holds" if c.holds else "broken",
                "found and asked": c.reason,
            }
            for c in verdict.checks
        ]
    )
    lines = [f"Differences in {metric_label(verdict.primary)} are candidate minus production, with 95% intervals."]
    if verdict.power is not None:
        lines.append(f"{verdict.power.stated}.")
    named = {
        "Too few groups for a verdict": verdict.not_judged,
        "Too few groups for a verdict on drift": verdict.drift_not_judged,
        "Worse by more than the margin is neither shown nor excluded, for want of groups": verdict.not_excluded,
    }
    lines += [f"{what}: {', '.join(names)}." for what, names in named.items() if names]
    yield Points(lines)
