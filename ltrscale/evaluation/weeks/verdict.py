"""The gate: may a candidate replace the bundle in production, by an evaluation of both and the drift of its periods?

A candidate must also not lean on a feature that may be a leak: `ltrscale.ingest.outcome` finds such features and asks
about them; `bounds.expected` has the answer.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from ltrscale.bundle import Bundle, boosters
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature, matching
from ltrscale.data.dataset.split import Texts
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import CANDIDATE
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.pages import against, number
from ltrscale.evaluation.statistics.blocks import holm
from ltrscale.evaluation.statistics.summarise import Comparison, Summary
from ltrscale.evaluation.weeks.decay import Decay
from ltrscale.evaluation.weeks.drift import MUCH, Drift, PeriodDrift
from ltrscale.ingest.outcome import ASK, questions
from ltrscale.ranking.alone import SingleFeature
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.document import Block, Points, Table
from ltrscale.reports.findings import Findings
from ltrscale.storage import join


def importances_of(bundle: Bundle) -> dict[str, float] | None:
    """The importance of each column that trees see, the highest first; None for a network."""
    if (forest := bundle.forest) is None:
        return None
    feature_names = tuple(feature.name for feature in bundle.features)
    features_seen = feature_names if forest.sees is None else forest.sees  # a stack may see none
    names = [*features_seen, *(f"component {i}" for i in range(forest.projection)), *forest.members]
    models = {join(bundle.url, name): content for name, content in bundle.contents.items()}
    shares = boosters.importances(forest.library, models, len(names))
    return dict(sorted(zip(names, shares.tolist(), strict=True), key=lambda pair: -pair[1]))


def leaning(bundle: Bundle) -> Mapping[str, float | None]:
    """The features that a ranker leans on, with their importance to plain trees.

    A network, or trees that see components or other rankers' scores, lean on every feature that they read.
    """
    shares: dict[str, float | None] = dict.fromkeys(feature.name for feature in bundle.features)
    if bundle.forest is None or bundle.forest.projection or bundle.forest.members:
        return shares
    return {name: share for name, share in (importances_of(bundle) or {}).items() if share > 0}


_MOST_NAMED = 3
TAIL = 0.025
"""Chance of a difference beyond one end of a 95% interval."""
POWER_ASKED = 0.8
Refuse = Literal["unproven", "worse"]
"""Which candidates a gate refuses, see `Bounds.refuse`."""


class Bounds(Config):
    """What a candidate must keep to; every difference is candidate minus production, in the primary metric."""

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
    drifted: float | None = Field(default=0.25, ge=0, le=1)
    """Share of the candidate's features that may have a population stability index above .25 in a period, beyond what
    chance gives; null for any. Features of the time, such as the weekday, drift between any two short periods."""
    feature_psi: float | None = Field(default=None, ge=0)
    """Largest index that a single feature may have in a period, beyond what chance gives; null for any. A feature in
    another unit, or that has gone missing, has 5 to 20; one with a mean that moved by a standard deviation, about 1."""
    moving: Texts = ()
    """Features whose drift is no sign of a fault, such as the weekday or a price in a sale: `drifted` and `feature_psi`
    ignore them. Patterns, as in `leave_out`."""
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


class Power(Config):
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
            needed = math.ceil(((ndtri(POWER_ASKED) - ndtri(TAIL)) * deviation / margin) ** 2)
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
    assert compared.low is not None
    assert compared.high is not None
    return (compared.high - compared.low) / (2 * -float(ndtri(TAIL))) * math.sqrt(groups)


class Check(Config):
    """One bound and whether it holds."""

    bound: Literal["groups", "margin", "slice_margin", "expected", "drifted", "feature_psi", "score_psi"]
    where: str
    """The slice, the period or the feature."""
    holds: bool
    reason: str
    """What was found and what was required, in one line."""


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
    """Slices that hold their bound, although the candidate may be worse there by more than the margin."""
    drift_not_judged: tuple[str, ...] = ()
    """Periods with too few groups to judge a bound on drift, or compared with too few."""
    power: Power | None = None
    """What the margin requires of the number of groups; None if nothing could be compared."""

    @property
    def reasons(self) -> list[str]:
        """What was found at each broken bound."""
        return [check.reason for check in self.checks if not check.holds]


def judge(evaluation: Evaluation, decay: Decay, bounds: Bounds, leaks: Iterable[Check] = ()) -> Verdict:
    """Check the bounds of a candidate against an evaluation with production as its baseline, and against drift.

    `leaks` are the checks of the features it leans on; see `check_leaks`.
    """
    (candidate,) = (method for method in evaluation.methods if method.name == CANDIDATE)
    compared = {name: scope.comparisons.get(evaluation.primary) for name, scope in candidate.slices.items()}
    counts = {name: scope.summaries[evaluation.primary].groups for name, scope in candidate.slices.items()}
    judged = {name: c for name, c in compared.items() if name != ALL and c and counts[name] >= bounds.groups}
    slices = list(_of_slices(judged, counts, evaluation.primary, bounds))
    drift = list(of_drift(decay.drift, bounds))
    asked_of_drift = sum(bound is not None for bound in (bounds.drifted, bounds.feature_psi, bounds.score_psi))
    in_period = Counter(check.where for check in drift)
    held = {check.where for check in slices if check.holds}
    groups, difference = counts[ALL], compared[ALL]
    power = None
    if difference is not None:
        power = Power.of(bounds.margin, deviation_of(difference, groups), groups, bounds.refuse)
    checks = (*_overall(difference, groups, evaluation.primary, bounds, power), *slices, *leaks, *drift)
    return Verdict(
        passed=all(check.holds for check in checks),
        primary=evaluation.primary,
        checks=checks,
        not_judged=tuple(name for name in compared if name != ALL and name not in judged),
        not_excluded=tuple(name for name, c in judged.items() if name in held and _low(c) < -bounds.slice_margin),
        drift_not_judged=tuple(period for period in decay.drift.periods if in_period[period] < asked_of_drift),
        power=power,
    )


def _overall(
    compared: Comparison | None, groups: int, primary: str, bounds: Bounds, power: Power | None
) -> Iterator[Check]:
    demand = f"bounds.groups asks for {bounds.groups:,}"
    enough = compared is not None and groups >= bounds.groups
    yield Check(bound="groups", where=ALL, holds=enough, reason=f"{groups:,} groups define {primary}; {demand}")
    if compared is not None:
        demand = f"bounds.margin asks for a lower end above {-bounds.margin:g}"
        not_worse = bounds.refuse == "worse" and _high(compared) >= 0
        holds = not_worse or _low(compared) > -bounds.margin
        if bounds.refuse == "worse":
            demand += ", or for an upper end of at least 0 (bounds.refuse: worse)"
        elif not holds and power is not None and power.more:
            demand += f"; needs {power.more:,} more groups to let an equal candidate pass four times in five"
        reason = f"all groups: {_in_words(compared, primary)}; {demand}"
        yield Check(bound="margin", where=ALL, holds=holds, reason=reason)


def _of_slices(
    judged: Mapping[str, Comparison], groups: Mapping[str, int], primary: str, bounds: Bounds
) -> Iterator[Check]:
    p_M = np.array([_worse_p(c, groups[name], bounds.slice_margin) for name, c in judged.items()])
    for (name, compared), p in zip(judged.items(), holm(p_M).tolist(), strict=True):
        finding = f"slice {name}: {_in_words(compared, primary)}"
        if bounds.slices_by == "shown":
            holds = p >= TAIL
            demand = (
                f"worse by more than bounds.slice_margin {bounds.slice_margin:g} has p {number(p)} (Holm, "
                f"slices: {len(judged)}), and is shown below {TAIL}"
            )
        else:
            ends = {"mean": ("difference", compared.difference), "excluded": ("lower end", _low(compared))}
            name_of_end, value = ends[bounds.slices_by]
            holds = value >= -bounds.slice_margin
            demand = f"bounds.slice_margin asks for its {name_of_end} to be at least {-bounds.slice_margin:g}"
        yield Check(bound="slice_margin", where=name, holds=holds, reason=f"{finding}; {demand}")


def _worse_p(compared: Comparison, groups: int, margin: float) -> float:
    """One-sided p of a difference that is at least minus the margin: below .025 if the upper end is below it."""
    # Student's t with the error of the interval's upper half: percentiles of resamples do not reach the small
    # probabilities that many slices need.
    beyond, half = -margin - compared.difference, _high(compared) - compared.difference
    if half <= 0:  # all groups differ alike
        return float(beyond <= 0)
    return float(stdtr(groups - 1, stdtrit(groups - 1, TAIL) * beyond / half))


def of_drift(drift: Drift, bounds: Bounds, method: str = CANDIDATE) -> Iterator[Check]:
    """The bounds on drift, for each period with enough groups; the scores are those of `method`."""
    train = drift.train
    for period, later in drift.periods.items():
        if min(train.groups, later.groups) >= bounds.drift_groups:
            yield from _feature_checks(period, later, bounds)
        scores, before = later.spreads[method], train.spreads[method]
        lists = min(scores.lists, before.lists)
        if bounds.score_psi is not None and lists >= bounds.drift_groups:
            finding = (
                f"the spread of the {method}'s scores has a PSI of {scores.psi:.3f}, {scores.chance:.3f} by chance"
            )
            demand = f"bounds.score_psi asks for at most {bounds.score_psi:g} beyond chance"
            holds = scores.psi - scores.chance <= bounds.score_psi
            yield Check(bound="score_psi", where=period, holds=holds, reason=f"period {period}: {finding}; {demand}")


def _feature_checks(period: str, drift: PeriodDrift, bounds: Bounds) -> Iterator[Check]:
    kinds = {name: "numeric" if d.unknown is None else "categorical" for name, d in drift.features.items()}
    features = [Feature.model_validate({"name": name, "kind": kind}) for name, kind in kinds.items()]
    moving = {feature.name for pattern in bounds.moving for feature in matching(pattern, features, key="bounds.moving")}
    judged = {name: d for name, d in drift.features.items() if name not in moving}
    drifted = [name for name in drift.drifted if name in judged]
    if bounds.drifted is not None:
        most = ", ".join(f"{name} {judged[name].psi:.2f}" for name in drifted[:_MOST_NAMED])
        count = f"{len(drifted)} of {len(judged)} features have a PSI above {MUCH:g} beyond chance"
        demand = f"bounds.drifted asks for at most {bounds.drifted:.0%}"
        holds = len(drifted) <= bounds.drifted * len(judged)
        reason = f"period {period}: {count}{f' ({most})' if most else ''}; {demand}"
        yield Check(bound="drifted", where=period, holds=holds, reason=reason)
    if bounds.feature_psi is not None:
        beyond = {name: d.psi - d.chance for name, d in judged.items()}
        broken = [name for name in drifted if beyond[name] > bounds.feature_psi]
        worst = broken[:_MOST_NAMED] or sorted(beyond, key=lambda name: -beyond[name])[:1]
        finding = ", ".join(f"{name} has a PSI of {judged[name].psi:.2f}" for name in worst) or "no feature is judged"
        demand = f"bounds.feature_psi asks for at most {bounds.feature_psi:g} beyond chance (a fault, or bounds.moving)"
        yield Check(bound="feature_psi", where=period, holds=not broken, reason=f"period {period}: {finding}; {demand}")


def check_leaks(features: Sequence[SingleFeature], candidate: Bundle, expected: Collection[str]) -> Iterator[Check]:
    """One check for each suspicious feature that the candidate leans on, or a single check that holds.

    `expected` are patterns of features that are known when the list is shown, even if they rank well.

    Raises:
        InputError: a pattern matches no feature of the data.
    """
    renamed = [Feature(name=feature.name) for feature in features]
    allowed = {f.name for pattern in expected for f in matching(pattern, renamed, key="bounds.expected")}
    used, questions_by_name = leaning(candidate), questions(features)
    for name in [name for name in questions_by_name if name in used]:
        share = used[name]
        gain = "" if share is None else f", and has {share:.0%} of the candidate's gain"
        finding = questions_by_name[name].removesuffix(f": {ASK}") + gain
        if name in allowed:
            yield Check(bound="expected", where=name, holds=True, reason=f"{finding}; bounds.expected names it")
        else:
            remedy = f"{ASK} If so, name it in bounds.expected; else train without it (leave_out)"
            yield Check(bound="expected", where=name, holds=False, reason=f"{finding}: {remedy}")
    if not any(name in used for name in questions_by_name):
        first = next((feature for feature in features if feature.name in used), None)
        best = "" if first is None else f"; the best, {first.name}, reaches NDCG@{first.k} {first.ndcg:.3f}"
        finding = "no feature of the candidate ranks as the labels do by itself, or is there for relevant ones only"
        yield Check(bound="expected", where=ALL, holds=True, reason=f"{finding}{best}")


def _low(compared: Comparison) -> float:
    assert compared.low is not None  # two bundles are two methods of one draw each, which have an interval
    return compared.low


def _high(compared: Comparison) -> float:
    assert compared.high is not None
    return compared.high


def _in_words(compared: Comparison, primary: str) -> str:
    return f"{metric_label(primary)} {against(compared)[0]}"


def verdict_blocks(verdict: Verdict) -> Iterator[Block]:
    """Broken bounds, a row for each bound, and what cannot be judged."""
    if verdict.reasons:
        yield Points(verdict.reasons)
    rows = [[check.bound, check.where, "holds" if check.holds else "broken", check.reason] for check in verdict.checks]
    yield Table(["bound", "where", "verdict", "found and asked"], rows)
    lines = [f"Differences in {metric_label(verdict.primary)} are candidate minus production, with 95% intervals."]
    if verdict.power is not None:
        lines.append(f"{verdict.power.stated}.")
    if verdict.not_judged:
        lines.append(f"Too few groups for a verdict: {', '.join(verdict.not_judged)}.")
    if verdict.drift_not_judged:
        lines.append(f"Too few groups for a verdict on drift: {', '.join(verdict.drift_not_judged)}.")
    if verdict.not_excluded:
        slices = ", ".join(verdict.not_excluded)
        lines.append(f"Worse by more than the margin is neither shown nor excluded, for want of groups: {slices}.")
    yield Points(lines)
