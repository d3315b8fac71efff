"""The verdict of a live test, and its report."""

import datetime
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from ltrscale.config import Strict
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Figure, Points, Section, Table, TableRow, cell
from ltrscale.reports.findings import Findings

LEVEL = 0.05
WRONG = 0.001
"""A sample ratio with a lower p is refused: many tests are looked at, and faults are rarely subtle."""


class LogAccount(Strict):
    """The rows of a log: rows = used + left out, each for one reason."""

    files: str
    rows: int
    used: int
    left_out: dict[str, int]
    days: tuple[datetime.date, datetime.date] | None
    """The first and the last day of all rows; None without times."""


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
        return f"of the {self.counted}, {counts}; p {self.p:.2g}, refused below {WRONG:g}"


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
        if self.p_holm is None or self.p_holm >= LEVEL:
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
