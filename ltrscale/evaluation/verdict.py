"""The verdict of a live test: an A/B test or an interleaving, from its log.

Shapes: M goals.
"""

import datetime
import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.config import Config, Strict
from ltrscale.errors import InputError, Refused, suggestion
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.statistics.blocks import holm
from ltrscale.evaluation.statistics.crossed import or_none
from ltrscale.evaluation.statistics.lifts import samples_needed
from ltrscale.evaluation.verdict_log import Goal, LiveLog, LiveUsers, LogAccount, add_up
from ltrscale.late import Late
from ltrscale.progress import Report
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Figure, Points, Section, Table, TableRow, cell
from ltrscale.reports.findings import Findings, ReportStage, commit_report
from ltrscale.stages.inputs import OutputUrl, hashes_of
from ltrscale.stages.stage import Origin

special = Late("scipy.special")

_LEVEL = 0.05
_WRONG = 0.001
"""A sample ratio with a lower p is refused: many tests are looked at, and faults are rarely subtle."""


class SampleRatio(Strict):
    """What chance gave each arm, against the shares that were planned."""

    counted: str
    counts: dict[str, int]
    shares: dict[str, float]
    p: float
    """Of a chi-square test."""

    @property
    def stated(self) -> str:
        """The counts and the test in words."""
        counts = ", ".join(f"{arm} has {n:,} (planned {self.shares[arm]:.1%})" for arm, n in self.counts.items())
        return f"of the {self.counted}, {counts}; p {self.p:.2g}, refused below {_WRONG:g}"


class GoalLift(Strict):
    """What an arm does to a goal, against the control."""

    goal: str
    arm: str
    base: float | None
    """The control's mean of a user; in interleaving, the mean of both. None if nothing is counted."""
    difference: Figure
    lift: Figure
    """The difference as a share of the base; unknown where the base is not clearly above 0."""
    p: float | None
    """None with fewer than two users of an arm."""
    p_holm: float | None = None
    """Adjusted for all goals and arms."""

    @property
    def sign(self) -> Literal["raises", "lowers", "open"]:
        """What is shown at a level of 5% over all goals."""
        if self.p_holm is None or self.p_holm >= _LEVEL:
            return "open"
        return "raises" if (self.difference.mean or 0) > 0 else "lowers"

    @property
    def amount(self) -> str:
        """The lift in words, or the difference where it is unknown."""
        return cell(self.difference, "+.4g") if self.lift.mean is None else cell(self.lift, "+.1%")


class PlannedGoal(Strict):
    """What it takes to find a lift of a goal."""

    goal: str
    base: float | None
    needed: int | None
    """Users of all arms together; None for a goal that nobody has, or one user alone."""


class LiveVerdict(Findings):
    """`metrics.json` of the verdict of a live test, or of its plan."""

    called: ClassVar = "a verdict of a live test"
    made_by_job: ClassVar = "jobs.verdict"
    test: str
    """A/B test or interleaving."""
    arms: tuple[str, ...]
    """The control is the first."""
    account: LogAccount
    users: dict[str, int]
    until: datetime.date | None
    ratio: SampleRatio | None = None
    """None where the log cannot show it."""
    wrong: tuple[str, ...] = ()
    """Faults of the randomisation; no goal is judged with any."""
    goals: tuple[GoalLift, ...] = ()
    plan: tuple[PlannedGoal, ...] = ()
    effect: float | None = None
    """The least lift of a plan; None for a verdict."""
    metric: str | None = None
    """The offline metric."""
    foreseen: dict[str, Figure] = Field(default_factory=dict)
    """The difference of each arm in the offline metric."""

    @property
    def early(self) -> bool:
        """Whether the log ends before the test was to end."""
        days = self.account.days
        return self.effect is None and self.until is not None and days is not None and days[1] < self.until

    @property
    def sentences(self) -> list[str]:
        """The verdict in plain words."""
        if self.effect is not None:
            return [*self._planned(self.effect)]
        if self.wrong:
            return ["No verdict: the users were not drawn as planned.", *self.wrong]
        if self.early:
            assert self.account.days is not None
            return [
                f"No verdict yet: the log ends on {self.account.days[1]}, and the test on {self.until}. Who looks at a "
                "difference before, and stops when it pleases, finds one that is not there far more often than in one "
                "test of 20."
            ]
        return [*map(self._against, self.arms[1:]), *self._foresight()]

    def _against(self, arm: str) -> str:
        """What an arm does to all goals."""
        of_arm = [goal for goal in self.goals if goal.arm == arm]
        verbs = {"raises": "it raises", "lowers": "it lowers", "open": "it is not shown to change"}
        by_sign = {sign: [f"{g.goal} ({g.amount})" for g in of_arm if g.sign == sign] for sign in verbs}
        parts = [f"{verbs[sign]} {', '.join(goals)}" for sign, goals in by_sign.items() if goals]
        return f"{arm} against {self.arms[0]}: {'; '.join(parts)}."

    def _foresight(self) -> Iterator[str]:
        """Whether the offline metric had the sign of what users did."""
        for arm, figure in self.foreseen.items():
            shown = {goal.goal: goal.sign for goal in self.goals if goal.arm == arm and goal.sign != "open"}
            offline = "raises" if (figure.mean or 0) > 0 else "lowers"
            right = [goal for goal, sign in shown.items() if sign == offline]
            foresaw = f"foresaw the sign of {', '.join(right) or 'none'} (goals with a sign: {len(shown)})"
            yield (
                f"{self.metric} of {arm} - {self.arms[0]} is {cell(figure, '+.4f')} offline: it "
                f"{foresaw if figure.excludes_zero else 'had no sign to go by'}."
            )

    def _planned(self, effect: float) -> Iterator[str]:
        needed = {goal.goal: goal.needed for goal in self.plan if goal.needed is not None}
        has, days = sum(self.users.values()), self.account.days
        span = f" in {(days[1] - days[0]).days + 1} days" if days else ""
        if needed:
            yield (
                f"A lift of {effect:.1%} in every goal takes {max(needed.values()):,} users in all arms together, each "
                f"to be found with a probability of .8 at a level of 5% over all goals; this log has {has:,}{span}."
            )
        if unknown := [goal.goal for goal in self.plan if goal.goal not in needed]:
            yield f"This log does not say how many users {', '.join(unknown)} takes: too few of its {has:,} have any."


class Offline(Config):
    """What an evaluation said of the arms before."""

    evaluation: OutputUrl
    """Directory of an evaluation that compares the rankers of the arms, with one of them as `evaluate.baseline`."""
    methods: dict[str, str] = Field(default_factory=dict)
    """The method of each arm, by arm, where the names differ."""


class VerdictJob(ReportStage):
    """Judge a live test by its log: lifts of goals with intervals over users, if users were drawn as planned."""

    stage: ClassVar = "verdict"
    log: Annotated[LiveLog, Field(discriminator="kind")]
    """What happened: `ab`, where each user has an arm, or `interleaving`, where lists are made of two."""
    arms: dict[str, Annotated[float, Field(gt=0, le=1e9)]] = Field(min_length=2)
    """The arms with their planned shares of users, such as `{old: 1, new: 1}`."""
    control: str
    """The arm that the others are compared with."""
    goals: dict[str, Goal] = Field(min_length=1)
    """What is to rise, by name, such as `{orders: orders}`. p is adjusted for their number: name few."""
    start: datetime.date | None = None
    """First day, in UTC; earlier rows are left out."""
    until: datetime.date | None = None
    """Last day, as planned before the start, in UTC: later rows are left out, and there is no verdict before it."""
    plan: float | None = Field(default=None, gt=0, le=10)
    """Before the start: the least lift to find, such as 0.02, with a log of the past. Gives the users that it takes."""
    offline: Offline | None = None
    """An evaluation of the same rankers: did its primary metric foresee the sign?"""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.log.time is None and (self.start or self.until):
            raise ValueError("log.time: start and until need the column of the time")
        if self.log.time is not None and self.until is None and self.plan is None:
            raise ValueError("until: name the last day that was planned, so that a look before it is no verdict")
        if self.control not in self.arms:
            raise ValueError(
                f"control: {self.control!r} is no arm; {suggestion(self.control, self.arms, 'the arms are')}"
            )
        if self.offline is not None and (odd := self.offline.methods.keys() - self.arms.keys()):
            raise ValueError(
                f"offline.methods: {min(odd)!r} is no arm; {suggestion(min(odd), self.arms, 'the arms are')}"
            )
        self.log.check(self.arms, self.goals)
        return self

    @property
    def shares(self) -> dict[str, float]:
        """The planned share of each arm, the control first."""
        names = sorted(self.arms, key=lambda arm: arm != self.control)
        return {arm: self.arms[arm] / sum(self.arms.values()) for arm in names}

    def page(self) -> Document:
        """The report of the committed findings."""
        return document(LiveVerdict.read(self.out))

    def inputs(self) -> dict[str, str]:
        """The files of the log, and the evaluation."""
        files = [url for path in self.log.inputs for url in storage.list_files(path)]
        return hashes_of(self) | {url: storage.fingerprint(url) for url in files}

    def run(self, *, show: bool = True) -> bool:
        """Judge and commit, unless that is up to date; raises `Refused` if users were not drawn as planned."""
        ran = super().run(show=show)
        if wrong := LiveVerdict.read(self.out).wrong:
            raise Refused(*wrong)
        return ran

    def work(self, origin: Origin, report: Report) -> None:
        """Add the log up by user, and commit the verdict.

        Raises:
            InputError: as `add_up`; or the evaluation does not compare the arms.
        """
        result = self.judged(
            add_up(self.log, self.goals, [*self.shares], (self.start, self.until), planned=self.plan is not None)
        )
        commit_report(self.out, result, document(result), made_by=origin)
        for goal in result.goals:
            report({"arm": goal.arm, "goal": goal.goal, "lift": goal.lift.mean, "p_holm": goal.p_holm})

    def judged(self, found: LiveUsers) -> LiveVerdict:
        """The verdict on what users add up to; without goals if they were not drawn as planned, or before the end."""
        names = self.shares if len(found.moments) == len(self.arms) else ("all",)
        users = {name: int(of_arm.n_M[0]) for name, of_arm in zip(names, found.moments, strict=True)}
        result = LiveVerdict(
            test=self.log.called, arms=tuple(self.shares), account=found.account, users=users, until=self.until
        )
        if self.plan is not None:
            return result.replace(effect=self.plan, plan=tuple(self._planned(found, self.plan)))
        ratio = self._sample_ratio(found)
        result = result.replace(ratio=ratio, wrong=tuple(self._wrong(found, ratio)))
        if result.wrong or result.early:
            return result
        return result.replace(goals=tuple(self._lifts(found)), **self._foresight())

    def _planned(self, found: LiveUsers, effect: float) -> Iterator[PlannedGoal]:
        """The users that each goal takes, all goals being judged together."""
        level = _LEVEL / len(self.goals) / (len(self.arms) - 1)
        base_M, variance_M = self.log.noise(found.moments[0], [*self.shares.values()])
        for goal, base, variance in zip(self.goals, base_M.tolist(), variance_M.tolist(), strict=True):
            known = base > 0 and not math.isnan(variance)
            needed = samples_needed(effect * base, variance, level=level) if known else None
            yield PlannedGoal(goal=goal, base=or_none(base), needed=None if needed is None else math.ceil(needed))

    def _sample_ratio(self, found: LiveUsers) -> SampleRatio | None:
        """A chi-square test of the numbers that chance gave the arms; None where the log does not show them."""
        if not found.by_chance:
            return None
        counts_A = np.array([found.by_chance.get(a, 0) for a in range(len(self.arms))])
        shares = self.shares
        expected_A = counts_A.sum() * np.array([*shares.values()])
        p = float(special.chdtrc(len(shares) - 1, ((counts_A - expected_A) ** 2 / expected_A).sum()))
        counts = dict(zip(shares, counts_A.tolist(), strict=True))
        return SampleRatio(counted=self.log.drawn, counts=counts, shares=shares, p=p)

    def _wrong(self, found: LiveUsers, ratio: SampleRatio | None) -> Iterator[str]:
        """The faults of the randomisation, each with its counts and what to do."""
        if ratio is not None and ratio.p < _WRONG:
            yield f"ratio: {ratio.stated}: an arm is not drawn as planned, or its rows get lost; find out which first"
        if (n := found.overlap[0]) > 0:
            yield (
                f"overlap: {n:,} {self.log.twice}, such as {found.overlap[1]!r}; draw by the column log.user, or "
                "leave out their rows if you know why"
            )

    def _lifts(self, found: LiveUsers) -> Iterator[GoalLift]:
        """Each goal by each arm, with p values adjusted for all that are known."""
        judged = []
        for arm, lifts in zip([*self.shares][1:], self.log.lifts(found.moments), strict=True):
            columns = lifts.base_M, lifts.p(), lifts.difference_M, *lifts.interval(), *lifts.relative()
            for goal, figures in zip(self.goals, np.stack(columns, axis=1).tolist(), strict=True):
                base, p, *ends = map(or_none, figures)
                difference, lift = (dict(zip(Figure.model_fields, of, strict=True)) for of in (ends[:3], ends[3:]))
                judged.append(GoalLift(goal=goal, arm=arm, base=base, difference=difference, lift=lift, p=p))
        adjusted = iter(holm(np.array([goal.p for goal in judged if goal.p is not None])).tolist())
        return (goal.replace(p_holm=None if goal.p is None else next(adjusted)) for goal in judged)

    def _foresight(self) -> dict[str, Any]:
        """The difference of each arm in the primary metric of the evaluation."""
        if self.offline is None:
            return {}
        evaluation, url = Evaluation.read(self.offline.evaluation), self.offline.evaluation
        scopes = {method.name: method.slices[ALL] for method in evaluation.methods}
        names = {arm: self.offline.methods.get(arm, arm) for arm in self.shares}
        if missing := [name for name in names.values() if name not in scopes]:
            hint = suggestion(missing[0], scopes, "its methods are")
            raise InputError(f"offline.methods: {url} has no method {missing[0]!r}; {hint}")
        control, *others = names.values()
        foreseen = {}
        for arm, other in zip([*self.shares][1:], others, strict=True):
            compared = scopes[other].comparisons.get(evaluation.primary) if evaluation.baseline == control else None
            if compared is None:
                raise InputError(
                    f"offline.evaluation: {url} does not compare {other} with {control}; evaluate again with "
                    f"evaluate.baseline={control}"
                )
            foreseen[arm] = compared.figure
        return {"metric": metric_label(evaluation.primary), "foreseen": foreseen}


def document(result: LiveVerdict) -> Document:
    """The report: the verdict, the lift of each goal, and the account."""
    opening: list[Block] = [Points(result.sentences), *_goal_blocks(result)]
    account = result.account
    of_rows = {"rows": account.rows, "used": account.used, **{f"left out: {k}": n for k, n in account.left_out.items()}}
    of_users = {f"users, {name}": n for name, n in result.users.items()}
    rows: list[TableRow] = [{"of the log": name, "count": n} for name, n in {**of_rows, **of_users}.items()]
    opening.append(Table.from_rows(rows))
    sections = [Section("How to read the figures", [Points(list(_explained(result)))])]
    made_from = [f"Log: {account.files}" + (f", {' to '.join(map(str, account.days))}." if account.days else ".")]
    return Document(f"Verdict: {result.test}", opening, sections, made_from)


def _goal_blocks(result: LiveVerdict) -> Iterator[Block]:
    """The lifts of a verdict, or the users of a plan."""
    if result.plan:
        yield Table.from_rows([{"goal": p.goal, "base": p.base, "users needed": p.needed} for p in result.plan])
    if result.goals:
        yield Table.from_rows(
            [
                {
                    "arm": g.arm,
                    "goal": g.goal,
                    "base": g.base,
                    "difference [95%]": cell(g.difference, "+.4f"),
                    "lift [95%]": cell(g.lift, "+.1%"),
                    "p": g.p,
                    "p (Holm)": g.p_holm,
                    "shown": g.sign,
                }
                for g in result.goals
            ]
        )
        lifts = [charts.interval_row(f"{g.goal}: {g.arm}", g.lift, series=g.arm) for g in result.goals]
        spec = charts.interval_chart(lifts, title="lift and its 95% interval", at=0.0, unit="%")
        yield Chart(spec, "lift of each goal by each arm", "lift")


def _explained(result: LiveVerdict) -> Iterator[str]:
    yield (
        "Users are the sample: all rows of one are added up. Intervals are those of Student's t with Welch's degrees "
        "(A/B tests), for ratios by the delta method; the interval of a lift is Fieller's, and excludes 0 where that "
        "of the difference does. p is adjusted by Holm for all goals and arms, and alone decides what is shown."
    )
    if result.effect is not None:
        return
    ratio = "was not checked, for the log does not show it" if result.ratio is None else result.ratio.stated
    yield f"Sample ratio: {ratio}."
    if result.until is None:
        yield "No end was named. The verdict holds if it was planned before the start, and this is the only look."
