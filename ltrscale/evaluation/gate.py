"""The job of the gate in front of production: evaluate both bundles by period, and judge them by the bounds.

out/evaluation      production and candidate on the test split, its periods and its slices; skipped if up to date
out/evaluation-GOAL the same on the labels of a goal
out/report.md       the verdict, with verdict.json
out/plan            production alone, if only a plan is asked for
"""

import math
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from ltrscale.config import Config, Operational
from ltrscale.data.dataset.columns import GoalName
from ltrscale.data.dataset.manifest import one_view, open_dataset
from ltrscale.data.dataset.split import SplitsWithTest, Texts, with_relative_named
from ltrscale.errors import InputError, Refused
from ltrscale.evaluation.bounds import (
    Bounds,
    GoalBounds,
    Power,
    Refuse,
    check_leaks,
    deviation_of,
    goal_checks,
    judge,
    verdict_blocks,
)
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import AS_SHOWN, CANDIDATE, PRODUCTION, EvaluateConfig, EvaluateSettings
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.statistics.lifts import POWER_ASKED
from ltrscale.evaluation.statistics.summarise import Scope
from ltrscale.late import Late
from ltrscale.origin import made_by, result_of
from ltrscale.ranking.choices import metric_label
from ltrscale.reports.document import Document, Table, TableRow, Text
from ltrscale.reports.findings import commit_report, print_report
from ltrscale.reports.render import REPORT
from ltrscale.stages.inputs import content_of
from ltrscale.stages.runs import recorded
from ltrscale.storage import join

if TYPE_CHECKING:
    from ltrscale import bundle
    from ltrscale.ingest import leaks
else:
    bundle, leaks = Late("ltrscale.bundle"), Late("ltrscale.ingest.leaks")

_CORRELATIONS = (0.5, 0.7, 0.8, 0.9, 0.95)


class GateJob(Config):
    """Compare a candidate with the bundle in production, and refuse it if a bound is broken."""

    fixed: ClassVar = {"drift": {"documents": 1_000_000}}

    out: Operational[str]
    """Directory for everything; read `out/report.md` first."""
    production: str
    """Bundle in use."""
    candidate: str | None = None
    """Bundle that may replace it; a plan needs none."""
    splits: SplitsWithTest
    """Both are compared on `test`, the newest periods, on which neither may have been trained. Drift is measured from
    `train`, and drift of scores from `validation`."""
    evaluate: EvaluateSettings = EvaluateSettings(baseline=None)
    """Metrics and slices, as for jobs.evaluate, always by period. Bounds refer to NDCG at `primary_cutoff`."""
    bounds: Bounds = Bounds()
    """What the candidate must keep to."""
    goals: dict[GoalName, GoalBounds] = Field(default_factory=dict, exclude_if=operator.not_)
    """Bounds on further goals of the test data set, such as {click: {margin: 0.01}}: both are compared on the labels of
    each too, in out/evaluation-GOAL, and one broken bound refuses the candidate."""
    plan: bool = False
    """Before there is a candidate: state how many groups `bounds.margin` needs, and give no verdict."""
    plan_from: str | None = None
    """Directory of an evaluation, or `out/evaluation` of an earlier gate, with comparisons of two bundles that show how
    far rankers differ on a group. Without it `plan` measures production alone on `splits.test`, and gives the numbers
    for several correlations that a candidate may have with it."""
    ray: Operational[bool] = False
    """Measure parts of the test split in parallel on a Ray cluster, a CPU each; the verdict is the same."""

    @model_validator(mode="after")
    def _plans_or_compares(self) -> "GateJob":
        if self.candidate is None and not self.plan:
            raise ValueError("candidate: name the bundle that may replace production; or ask for a plan with --plan")
        if self.plan_from is not None and not self.plan:
            raise ValueError("plan_from: is read with --plan only; leave it out, or ask for a plan")
        if self.evaluate.baseline is not None:
            raise ValueError("evaluate.baseline: leave it out; the candidate is compared with production")
        return self

    def _config(self, candidate: Mapping[str, Texts]) -> EvaluateConfig:
        """The evaluation of production and a candidate, or of production alone."""
        models = {PRODUCTION: (self.production,), **candidate}
        return EvaluateConfig(**self.evaluate.model_dump(), models=models, splits=self.splits)

    @one_view()
    def run(self) -> None:
        """Evaluate and commit the verdict, or print the plan; skips what is up to date.

        Raises:
            Refused: a bound is broken; names each of them.
            InputError: as `EvaluateJob`; a pattern of the bounds matches no feature; or `plan_from` names no evaluation
                that compares two bundles.
        """
        job = with_relative_named(self)
        if job.plan:
            job._print_plan()
        else:
            job._judge()

    def _judge(self) -> None:
        assert self.candidate is not None
        config = self._config({CANDIDATE: (self.candidate,)}).replace(baseline=PRODUCTION, by_period=True)
        place = join(self.out, "evaluation")
        with recorded(self.out, self, "gate"):
            moving = self.bounds.find_moving(open_dataset(config.splits.train.data[0]).manifest.features)
            looks = leaks.examine_features(
                config.splits.test, k=config.primary_cutoff, relevant_from=config.relevant_from
            )
            leaking = list(check_leaks(looks, bundle.load(self.candidate), self.bounds.expected))
            EvaluateJob(out=place, evaluate=config, ray=self.ray).run(show=False)
            of_goals = {goal: self._evaluated(goal, config) for goal in self.goals}
            on_goals = [
                check
                for goal, bounds in self.goals.items()
                for check in goal_checks(goal, Evaluation.read(of_goals[goal]), bounds)
            ]
            verdict = judge(Evaluation.read(place), self.bounds, [*on_goals, *leaking], moving)
            title = f"Gate: {'passed' if verdict.passed else 'refused'}"
            bundles = f"{PRODUCTION} {self.production} and {CANDIDATE} {self.candidate}"
            made_from = [f"Compared: {bundles}. The figures are those of {join(place, REPORT)}."]
            report = Document(title, list(verdict_blocks(verdict)), made_from=made_from)
            inputs = {url: content_of(url) for url in (place, *of_goals.values())}
            origin = made_by("gate", self._judged_by, inputs)
            commit_report(self.out, verdict, report, made_by=origin)
        print_report(self.out, report)
        if not verdict.passed:
            raise Refused(*verdict.reasons)

    @property
    def _judged_by(self) -> Config | dict[str, Any]:
        """The bounds, and those of the goals if there are any."""
        if not self.goals:
            return self.bounds
        of_goals = {goal: result_of(bounds).model_dump() for goal, bounds in self.goals.items()}
        return {"bounds": result_of(self.bounds).model_dump(), "goals": of_goals}

    def _evaluated(self, goal: str, config: EvaluateConfig) -> str:
        """Compare both on the labels of a goal; returns the directory of the evaluation."""
        out = join(self.out, f"evaluation-{goal}")
        splits = config.splits.replace(test=config.splits.test.replace(labels=goal))
        job = EvaluateJob(out=out, evaluate=config.replace(splits=splits, by_period=False), ray=self.ray)
        job.run(show=False)
        return out

    def _print_plan(self) -> None:
        """Print how many groups the margin needs, from an existing evaluation or from production alone."""
        url = self.plan_from or join(self.out, "plan")
        if self.plan_from is None:
            EvaluateJob(
                out=url, evaluate=self._config({}).replace(slices={}, slice_by=(), by_period=False), ray=self.ray
            ).run(show=False)
        evaluation = Evaluation.read(url)
        powers = _foreseen(evaluation, self.bounds.margin, self.bounds.refuse)
        print_report(url, _plan_page(powers, evaluation.primary))


_Deviations = dict[str, tuple[float, int]]
"""The deviation of a group's difference and the number of groups, by their source."""


def _foreseen(evaluation: Evaluation, margin: float, refuse: Refuse = "unproven") -> dict[str, Power]:
    """How many groups the margin needs, by the source of a difference's deviation: comparisons, or a method alone."""
    scopes = {method.name: method.slices[ALL] for method in evaluation.methods if method.name != AS_SHOWN}
    if len(scopes) == 1:
        deviations = _of_correlations(evaluation.primary, *scopes.values())
    else:
        deviations = _of_comparisons(evaluation, scopes)
    return {name: Power.from_margin(margin, *of, refuse) for name, of in deviations.items()}


def _of_correlations(primary: str, alone: Scope) -> _Deviations:
    """Of a candidate that deviates as much as production, and correlates with it by r: `s sqrt(2 (1 - r))`."""
    summary = alone.summaries[primary]
    if (bundles := len(summary.trials)) != 1:
        raise InputError(f"plan_from: the evaluation's only method has {bundles} bundles; name one where it has one")
    if summary.low is None:
        raise InputError(f"{primary}: no test group defines it; choose other periods in splits.test")
    deviation = deviation_of(summary, summary.groups)
    return {f"a correlation of {r:g}": (deviation * math.sqrt(2 * (1 - r)), summary.groups) for r in _CORRELATIONS}


def _of_comparisons(evaluation: Evaluation, scopes: Mapping[str, Scope]) -> _Deviations:
    """Of each method's comparison with the baseline, where both are one bundle."""
    primary, baseline = evaluation.primary, evaluation.baseline
    single = {name: scope for name, scope in scopes.items() if len(scope.summaries[primary].trials) == 1}
    found = {
        f"{name} against {baseline}": (deviation_of(compared, groups), groups)
        for name, scope in single.items()
        if baseline in single
        and (compared := scope.comparisons.get(primary)) is not None
        and (groups := scope.summaries[primary].groups)
    }
    if not found:
        raise InputError("plan_from: the evaluation compares no two methods of one bundle each; name another one")
    return found


def _plan_page(powers: Mapping[str, Power], primary: str) -> Document:
    """A row for each deviation that a difference may have; `powers` is not empty."""
    first = next(iter(powers.values()))
    passes = "one worse by the margin is refused" if first.refuse == "worse" else "an equal candidate passes"
    rows: list[TableRow] = [
        {
            "deviation as of": name,
            "deviation": f"{p.deviation:.3f}",
            "groups": p.groups,
            passes: f"{p.passes:.2f}",
            f"groups for {POWER_ASKED}": p.needed,
        }
        for name, p in powers.items()
    ]
    margin = f"bounds.margin {first.margin:g} in {metric_label(primary)}, bounds.refuse {first.refuse}:"
    return Document("Groups that a margin needs", [Text(margin), Table.from_rows(rows)])
