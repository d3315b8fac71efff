"""The gate: may a candidate replace the bundle in production, by an evaluation of both and the drift of its periods?"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ltrscale.config import Config
from ltrscale.evaluation.decay import Decay
from ltrscale.evaluation.drift import MUCH
from ltrscale.evaluation.evaluate import EvaluateConfig
from ltrscale.evaluation.pages import Findings, against, bullets, markdown
from ltrscale.evaluation.report import Evaluation
from ltrscale.evaluation.slices import ALL
from ltrscale.evaluation.summarise import Comparison
from ltrscale.markdown import code
from ltrscale.ranking.choices import metric_label

PRODUCTION, CANDIDATE = "production", "candidate"
"""Names of the two methods in the evaluation."""
_NAMED = 3


class Bounds(Config):
    """What a candidate must keep to; every difference is candidate minus production, in the primary metric."""

    margin: float = Field(default=0.005, ge=0)
    """Over all groups, the lower end of the 95% interval of the difference must be above minus this: not worse by more,
    with confidence (non-inferiority). 0 asks for a candidate that is better with confidence."""
    slice_margin: float = Field(default=0.01, ge=0)
    """On no slice may the candidate be worse than production by more than this, as `slices_by` judges."""
    slices_by: Literal["shown", "mean", "excluded"] = "shown"
    """What breaks the bound of a slice. `shown`: the upper end of the interval is below minus the margin, so that worse
    is shown. `mean`: the difference itself is, which chance alone does on small slices. `excluded`: the lower end is,
    so that worse is not excluded, which needs many groups on every slice. The default is the first, as slices are many;
    the report names those where worse is not excluded."""
    groups: int = Field(default=100, ge=1)
    """Groups that define the metric, fewer of which make no verdict: smaller slices are not judged, and a candidate
    judged on fewer groups in all is refused."""
    drifted: float | None = Field(default=0.25, ge=0, le=1)
    """Share of the candidate's features that may have a population stability index above .25 in a period; null for
    any. Features of the time, such as the weekday, drift between any two short periods."""
    score_psi: float | None = Field(default=MUCH, ge=0)
    """Largest index of the spread of the candidate's scores in a period, against validation; null for any."""


class Check(Config):
    """One bound and whether it holds."""

    bound: Literal["groups", "margin", "slice_margin", "drifted", "score_psi"]
    where: str
    """The slice or the period."""
    holds: bool
    reason: str
    """What was found and what was asked, in one line."""


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

    @property
    def reasons(self) -> list[str]:
        """What was found at each bound that is broken."""
        return [check.reason for check in self.checks if not check.holds]


def judge(evaluation: Evaluation, found: Decay, bounds: Bounds) -> Verdict:
    """Check the bounds of a candidate against an evaluation with production as its baseline, and against drift."""
    (candidate,) = (method for method in evaluation.methods if method.name == CANDIDATE)
    compared = {name: scope.comparisons.get(evaluation.primary) for name, scope in candidate.slices.items()}
    counts = {name: scope.summaries[evaluation.primary].groups for name, scope in candidate.slices.items()}
    judged = {name: c for name, c in compared.items() if name != ALL and c and counts[name] >= bounds.groups}
    slices = [_of_slice(name, c, evaluation.primary, bounds) for name, c in judged.items()]
    held = {check.where for check in slices if check.holds}
    checks = (
        *_overall(compared[ALL], counts[ALL], evaluation.primary, bounds),
        *slices,
        *_drift(found, bounds),
    )
    return Verdict(
        passed=all(check.holds for check in checks),
        primary=evaluation.primary,
        checks=checks,
        not_judged=tuple(name for name in compared if name != ALL and name not in judged),
        not_excluded=tuple(name for name, c in judged.items() if name in held and _low(c) < -bounds.slice_margin),
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


def _of_slice(name: str, compared: Comparison, primary: str, bounds: Bounds) -> Check:
    ends = {"shown": ("upper end", _high(compared)), "mean": ("difference", compared.difference)}
    what, value = ends.get(bounds.slices_by, ("lower end", _low(compared)))
    return Check(
        bound="slice_margin",
        where=name,
        holds=value >= -bounds.slice_margin,
        reason=f"slice {name}: {_stated(compared, primary)}; bounds.slice_margin asks for its {what} to be at least "
        f"{-bounds.slice_margin:g}",
    )


def _drift(found: Decay, bounds: Bounds) -> Iterator[Check]:
    for period, drift in found.drift.periods.items():
        if bounds.drifted is not None:
            most = ", ".join(f"{name} {drift.features[name].psi:.2f}" for name in drift.drifted[:_NAMED])
            count = f"{len(drift.drifted)} of {len(drift.features)} features have a PSI above {MUCH:g}"
            asked = f"bounds.drifted asks for at most {bounds.drifted:.0%}"
            holds = len(drift.drifted) <= bounds.drifted * len(drift.features)
            reason = f"period {period}: {count}{f' ({most})' if most else ''}; {asked}"
            yield Check(bound="drifted", where=period, holds=holds, reason=reason)
        if bounds.score_psi is not None:
            value = drift.spreads[CANDIDATE].psi
            asked = f"bounds.score_psi asks for at most {bounds.score_psi:g}"
            reason = f"period {period}: the spread of the candidate's scores has a PSI of {value:.3f}; {asked}"
            yield Check(bound="score_psi", where=period, holds=value <= bounds.score_psi, reason=reason)


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
    if verdict.not_judged:
        lines.append(f"Too few groups for a verdict: {', '.join(map(code, verdict.not_judged))}.")
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
