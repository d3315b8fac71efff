"""The gate: may a candidate replace the bundle in production, by an evaluation of both and the drift of its periods?"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from ltrscale.config import Config
from ltrscale.data.dataset.split import Texts
from ltrscale.errors import InputError
from ltrscale.evaluation.decay import Decay
from ltrscale.evaluation.drift import MUCH
from ltrscale.evaluation.evaluate import EvaluateConfig
from ltrscale.evaluation.pages import Findings, against, bullets, markdown, number
from ltrscale.evaluation.report import Evaluation
from ltrscale.evaluation.shown import AS_SHOWN
from ltrscale.evaluation.slices import ALL
from ltrscale.evaluation.summarise import Comparison, Summary, holm
from ltrscale.markdown import code
from ltrscale.ranking.choices import metric_label

PRODUCTION, CANDIDATE = "production", "candidate"
"""Names of the two methods in the evaluation."""
_NAMED = 3
_TAIL = 0.025
"""Chance of a difference beyond one end of a 95% interval."""
_POWER = 0.8
_CORRELATIONS = (0.5, 0.7, 0.8, 0.9, 0.95)


class Bounds(Config):
    """What a candidate must keep to; every difference is candidate minus production, in the primary metric."""

    margin: float = Field(default=0.005, ge=0)
    """Over all groups, the lower end of the 95% interval of the difference must be above minus this: not worse by more,
    with confidence (non-inferiority). 0 asks for a candidate that is better with confidence."""
    slice_margin: float = Field(default=0.01, ge=0)
    """On no slice may the candidate be worse than production by more than this, as `slices_by` judges."""
    slices_by: Literal["shown", "mean", "excluded"] = "shown"
    """What breaks the bound of a slice. `shown`: worse by more than the margin is shown, as by an upper end of the
    interval below minus the margin, with a p value that is adjusted by Holm for the number of slices. `mean`: the
    difference itself is below, which chance alone does on small slices. `excluded`: the lower end is, so that worse is
    not excluded, which needs many groups on every slice. The default is the first, as slices are many; the report names
    those where worse is not excluded."""
    groups: int = Field(default=100, ge=1)
    """Groups that define the metric, fewer of which make no verdict: smaller slices are not judged, and a candidate
    judged on fewer groups in all is refused."""
    drifted: float | None = Field(default=0.25, ge=0, le=1)
    """Share of the candidate's features that may have a population stability index above .25 in a period, beyond what
    chance gives; null for any. Features of the time, such as the weekday, drift between any two short periods."""
    score_psi: float | None = Field(default=MUCH, ge=0)
    """Largest index of the spread of the candidate's scores in a period, against validation, beyond what chance gives;
    null for any."""
    expected: Texts = ()
    """Features that are known when the list is shown, although they rank, alone, nearly as the labels do, or are there
    for relevant documents only. A candidate that leans on another such feature is refused: it may be known only
    after the click. Patterns, as in `leave_out`."""
    drift_groups: int = Field(default=200, ge=1)
    """Groups, labelled or not, of a period and of what it is compared with, fewer of which make no verdict on drift: an
    index is then above .25 by chance."""


class Check(Config):
    """One bound and whether it holds."""

    bound: Literal["groups", "margin", "slice_margin", "expected", "drifted", "score_psi"]
    where: str
    """The slice, the period or the feature."""
    holds: bool
    reason: str
    """What was found and what was asked, in one line."""


class Power(Config):
    """How often a candidate that is as good as production passes `margin`, by the normal approximation."""

    margin: float
    deviation: float
    """Standard deviation of the difference of a group."""
    groups: int
    passes: float
    """The probability at so many groups."""
    needed: int | None
    """Groups for a probability of .8; None for a margin of 0, which equal rankers hold once in 40 times at any size."""

    @classmethod
    def of(cls, margin: float, deviation: float, groups: int) -> Self:
        """`Phi(margin sqrt(Q) / deviation - z_.975)`, and the Q at which it is .8 (Julious 2004, section 5).

        Example:
            >>> [round(Power.of(0.005, 0.249, groups).passes, 2) for groups in (1_000, 3_000, 10_000)]
            [0.09, 0.19, 0.52]
            >>> Power.of(0.005, 0.249, 1_000).needed
            19466
        """
        if deviation == 0 or margin == 0:
            certain = margin > 0
            passes, needed = (1.0, 1) if certain else (_TAIL if deviation else 0.0, None)
        else:
            passes = float(ndtr(margin * math.sqrt(groups) / deviation + ndtri(_TAIL)))
            needed = math.ceil(((ndtri(_POWER) - ndtri(_TAIL)) * deviation / margin) ** 2)
        return cls(margin=margin, deviation=deviation, groups=groups, passes=passes, needed=needed)

    @property
    def stated(self) -> str:
        """In a sentence."""
        enough = "no number of groups changes that" if self.needed is None else f"{_POWER} takes {self.needed:,} groups"
        return (
            f"A candidate as good as production passes bounds.margin {self.margin:g} with a probability of "
            f"{self.passes:.2f} at {self.groups:,} groups; {enough} (the difference of a group deviates by "
            f"{self.deviation:.3f})"
        )


class Verdict(Findings):
    """`verdict.json` of a gate."""

    called: ClassVar = "a verdict"
    made_by_job: ClassVar = "jobs.gate"
    file: ClassVar = "verdict.json"
    passed: bool
    primary: str
    checks: tuple[Check, ...]
    not_judged: tuple[str, ...]
    """Slices with too few groups."""
    not_excluded: tuple[str, ...]
    """Slices that hold their bound where it is not excluded that the candidate is worse by more than the margin."""
    drift_not_judged: tuple[str, ...] = ()
    """Periods with too few groups to judge a bound on drift, or compared with too few."""
    power: Power | None = None
    """What the margin asks of the number of groups; None if nothing could be compared."""

    @property
    def reasons(self) -> list[str]:
        """What was found at each bound that is broken."""
        return [check.reason for check in self.checks if not check.holds]


def judge(evaluation: Evaluation, found: Decay, bounds: Bounds, leaks: Iterable[Check] = ()) -> Verdict:
    """Check the bounds of a candidate against an evaluation with production as its baseline, and against drift.

    `leaks` are the checks of the features that it leans on; see `leaks.check_leaks`.
    """
    (candidate,) = (method for method in evaluation.methods if method.name == CANDIDATE)
    compared = {name: scope.comparisons.get(evaluation.primary) for name, scope in candidate.slices.items()}
    counts = {name: scope.summaries[evaluation.primary].groups for name, scope in candidate.slices.items()}
    judged = {name: c for name, c in compared.items() if name != ALL and c and counts[name] >= bounds.groups}
    slices = list(_of_slices(judged, counts, evaluation.primary, bounds))
    drift = list(_drift(found, bounds))
    of_drift = sum(bound is not None for bound in (bounds.drifted, bounds.score_psi))
    in_period = Counter(check.where for check in drift)
    held = {check.where for check in slices if check.holds}
    groups, difference = counts[ALL], compared[ALL]
    power = None if difference is None else Power.of(bounds.margin, _deviation(difference, groups), groups)
    checks = (
        *_overall(difference, groups, evaluation.primary, bounds),
        *slices,
        *leaks,
        *drift,
    )
    return Verdict(
        passed=all(check.holds for check in checks),
        primary=evaluation.primary,
        checks=checks,
        not_judged=tuple(name for name in compared if name != ALL and name not in judged),
        not_excluded=tuple(name for name, c in judged.items() if name in held and _low(c) < -bounds.slice_margin),
        drift_not_judged=tuple(period for period in found.drift.periods if in_period[period] < of_drift),
        power=power,
    )


def _overall(compared: Comparison | None, groups: int, primary: str, bounds: Bounds) -> Iterator[Check]:
    asked = f"bounds.groups asks for {bounds.groups:,}"
    enough = compared is not None and groups >= bounds.groups
    yield Check(bound="groups", where=ALL, holds=enough, reason=f"{groups:,} groups define {primary}; {asked}")
    if compared is not None:
        yield Check(
            bound="margin",
            where=ALL,
            holds=_low(compared) > -bounds.margin,
            reason=f"all groups: {_stated(compared, primary)}; bounds.margin asks for a lower end above "
            f"{-bounds.margin:g}",
        )


def _of_slices(
    judged: Mapping[str, Comparison], groups: Mapping[str, int], primary: str, bounds: Bounds
) -> Iterator[Check]:
    p_M = np.array([_worse_p(c, groups[name], bounds.slice_margin) for name, c in judged.items()])
    for (name, compared), p in zip(judged.items(), holm(p_M).tolist(), strict=True):
        stated = f"slice {name}: {_stated(compared, primary)}"
        if bounds.slices_by == "shown":
            holds = p >= _TAIL
            asked = (
                f"worse by more than bounds.slice_margin {bounds.slice_margin:g} has p {number(p)} (Holm, "
                f"slices: {len(judged)}), and is shown below {_TAIL}"
            )
        else:
            ends = {"mean": ("difference", compared.difference), "excluded": ("lower end", _low(compared))}
            what, value = ends[bounds.slices_by]
            holds = value >= -bounds.slice_margin
            asked = f"bounds.slice_margin asks for its {what} to be at least {-bounds.slice_margin:g}"
        yield Check(bound="slice_margin", where=name, holds=holds, reason=f"{stated}; {asked}")


def _worse_p(compared: Comparison, groups: int, margin: float) -> float:
    """One-sided p of a difference that is at least minus the margin: below .025 where the upper end lies below it.

    Student's t, with the error that the upper half of the 95% interval has: percentiles of resamples do not reach the
    small probabilities that many slices need.
    """
    beyond, half = -margin - compared.difference, _high(compared) - compared.difference
    if half <= 0:  # all groups differ alike
        return float(beyond <= 0)
    return float(stdtr(groups - 1, stdtrit(groups - 1, _TAIL) * beyond / half))


def _drift(found: Decay, bounds: Bounds) -> Iterator[Check]:
    train = found.drift.train
    for period, drift in found.drift.periods.items():
        if bounds.drifted is not None and min(train.groups, drift.groups) >= bounds.drift_groups:
            most = ", ".join(f"{name} {drift.features[name].psi:.2f}" for name in drift.drifted[:_NAMED])
            count = f"{len(drift.drifted)} of {len(drift.features)} features have a PSI above {MUCH:g} beyond chance"
            asked = f"bounds.drifted asks for at most {bounds.drifted:.0%}"
            holds = len(drift.drifted) <= bounds.drifted * len(drift.features)
            reason = f"period {period}: {count}{f' ({most})' if most else ''}; {asked}"
            yield Check(bound="drifted", where=period, holds=holds, reason=reason)
        scores, before = drift.spreads[CANDIDATE], train.spreads[CANDIDATE]
        lists = min(drift.groups if of.lists is None else of.lists for of in (scores, before))
        if bounds.score_psi is not None and lists >= bounds.drift_groups:
            stated = (
                f"the spread of the candidate's scores has a PSI of {scores.psi:.3f}, {scores.chance:.3f} by chance"
            )
            asked = f"bounds.score_psi asks for at most {bounds.score_psi:g} beyond chance"
            holds = scores.psi - scores.chance <= bounds.score_psi
            yield Check(bound="score_psi", where=period, holds=holds, reason=f"period {period}: {stated}; {asked}")


def _deviation(found: Comparison | Summary, groups: int) -> float:
    """Standard deviation of the values of one group, from the 95% interval of their mean."""
    assert found.low is not None
    assert found.high is not None
    return (found.high - found.low) / (2 * -float(ndtri(_TAIL))) * math.sqrt(groups)


def foreseen(evaluation: Evaluation, margin: float) -> dict[str, Power]:
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
        deviation = _deviation(summary, summary.groups)
        return {
            f"a correlation of {r:g}": Power.of(margin, deviation * math.sqrt(2 * (1 - r)), summary.groups)
            for r in _CORRELATIONS
        }
    single = {name for name, scope in of_methods.items() if len(scope.summaries[primary].trials) == 1}
    found = {
        f"{name} against {evaluation.baseline}": Power.of(margin, _deviation(c, groups), groups)
        for name, scope in of_methods.items()
        if {name, evaluation.baseline} <= single
        and (c := scope.comparisons.get(primary)) is not None
        and (groups := scope.summaries[primary].groups)
    }
    if not found:
        raise InputError("plan_from: the evaluation compares no two methods of one bundle each; name another one")
    return found


def plan_table(found: Mapping[str, Power]) -> str:
    """A row for each deviation that a difference may have."""
    header = ["deviation as of", "deviation", "groups", "an equal candidate passes", f"groups for {_POWER}"]
    rows = [
        [name, f"{p.deviation:.3f}", f"{p.groups:,}", f"{p.passes:.2f}", "-" if p.needed is None else f"{p.needed:,}"]
        for name, p in found.items()
    ]
    return markdown(header, rows)


def _low(compared: Comparison) -> float:
    assert compared.low is not None  # two bundles are two methods of one draw each, which have an interval
    return compared.low


def _high(compared: Comparison) -> float:
    assert compared.high is not None
    return compared.high


def _stated(compared: Comparison, primary: str) -> str:
    return f"{metric_label(primary)} {against(compared)[0]}"


def table(verdict: Verdict) -> str:
    """A row for each bound."""
    rows = [[check.bound, check.where, "holds" if check.holds else "BROKEN", check.reason] for check in verdict.checks]
    return markdown(["bound", "where", "verdict", "found and asked"], rows)


def page(verdict: Verdict, config: EvaluateConfig, links: Sequence[str]) -> str:
    """The verdict in Markdown; `links` are places of the reports that it rests on."""
    bundles = " and ".join(f"{name} {code(urls[0])}" for name, urls in config.models.items())
    lines = [f"Differences in {metric_label(verdict.primary)} are candidate minus production, with 95% intervals."]
    if verdict.power is not None:
        lines.append(f"{verdict.power.stated}.")
    if verdict.not_judged:
        lines.append(f"Too few groups for a verdict: {', '.join(map(code, verdict.not_judged))}.")
    if verdict.drift_not_judged:
        lines.append(f"Too few groups for a verdict on drift: {', '.join(map(code, verdict.drift_not_judged))}.")
    if verdict.not_excluded:
        slices = ", ".join(map(code, verdict.not_excluded))
        lines.append(f"Worse by more than the margin is neither shown nor excluded, for want of groups: {slices}.")
    parts = [
        f"# Gate: {'passed' if verdict.passed else 'refused'}",
        f"Compared: {bundles}. The figures are those of {' and '.join(map(code, links))}.",
        *([bullets(map(code, verdict.reasons))] if verdict.reasons else []),
        bullets(lines),
        table(verdict),
    ]
    return "\n\n".join(parts) + "\n"
