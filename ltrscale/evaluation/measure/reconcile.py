"""Why another program's figure differs from ours: a metric by our rules and by those of other programs.

From our rules to a program's, one rule is switched after the other, in the order of `Rules`, and the change of the
mean is that rule's part of the difference. The parts add up to the difference; in another order single parts may
differ, as a rule for ties matters less where float32 makes none.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import Field, field_validator
from torch import Tensor

from ltrscale import storage
from ltrscale.config import Config, Operational
from ltrscale.evaluation.measure.group_file import GROUPS
from ltrscale.evaluation.measure.scored_lists import ListSource, ScoredLists
from ltrscale.evaluation.pages import number
from ltrscale.progress import Report, progress
from ltrscale.ranking.choices import metric_label, metric_named
from ltrscale.ranking.libraries import KINDS, POLICIES, PROGRAMS, Policy, under
from ltrscale.ranking.metric import Metric, Rules
from ltrscale.reports.document import Block, Document, Points, Section, Table, Text
from ltrscale.reports.findings import Findings, print_report, write_report
from ltrscale.stages.stage import Origin, Stage

_SAME = 1e-12
"""Values of a group that differ by less are equal: rounding."""


class ReconcileJob(Stage):
    """Report which rules explain the difference between our figures and those of other programs."""

    stage: ClassVar = "reconcile"
    out: Operational[str]
    """Directory of the report."""
    source: ListSource
    """Where scores and labels are: a `table`, a `bundle` on a split, or committed `scores`."""
    metrics: tuple[str, ...] = Field(("ndcg@5", "ndcg@10", "map", "mrr", "precision@5"), min_length=1)
    """Our metrics by name: ndcg, precision, recall or success with @K, map or mrr."""
    relevant_from: float = Field(1.0, gt=0)
    """Lowest label of a relevant document under our rules, except for NDCG. Other programs have rules of their own."""
    programs: tuple[Literal[PROGRAMS], ...] = ()  # type: ignore[valid-type]
    """Programs to compare with; empty for all."""
    groups_shown: int = Field(3, ge=1)
    """Groups to show for each rule: those whose value it changes most."""

    @field_validator("metrics")
    @classmethod
    def _have_rules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if metric_named(name).kind not in KINDS:
                raise ValueError(f"{name}: no program's rules are known; take one of {', '.join(KINDS)}")
        return names

    def run(self) -> bool:
        """Make the report, and print its table."""
        ran = super().run()
        print_report(self.out, document(Reconciliation.read(self.out)))
        return ran

    def inputs(self) -> dict[str, str]:
        """Content of what the source reads."""
        return self.source.inputs()

    def work(self, origin: Origin, report: Report) -> None:
        """Compare, and commit the report."""
        reconcile(self, made_by=origin, report=report)


class ChangedGroup(Config):
    """A group whose value a rule changes; None where it is left out."""

    query: str
    before: float | None
    after: float | None


class RuleSwitch(Config):
    """One rule switched from ours to the program's, with all rules before it switched already."""

    rule: str
    ours: str
    theirs: str
    part: float
    """Its part of the difference: the mean after the switch minus the mean before it."""
    groups: int
    """Groups whose value it changes."""
    shown: tuple[ChangedGroup, ...]
    """Those that it changes most."""


class Reconciled(Config):
    """A metric by a program's rules."""

    program: str
    spelled: str
    """The metric as the program spells it."""
    policy: str
    figure: float | None
    """The mean over groups by its rules; None if no group has a value, as those below."""
    difference: float | None
    """Its figure minus ours, the sum of all parts."""
    steps: tuple[RuleSwitch, ...]


class OfMetric(Config):
    """A metric by our rules and by those of each program that has it."""

    metric: str
    policy: str
    figure: float | None
    undefined: int
    """Groups without a relevant document, which our mean leaves out."""
    programs: tuple[Reconciled, ...]


class Reconciliation(Findings):
    """`metrics.json` of a reconciliation."""

    called: ClassVar = "a reconciliation"
    made_by_job: ClassVar = "jobs.reconcile"
    groups: int
    documents: int
    tied: int
    """Groups in which documents with different labels have the same score."""
    metrics: tuple[OfMetric, ...]


def reconcile(job: ReconcileJob, *, made_by: Origin, report: Report) -> Reconciliation:
    """Compute each metric by our rules and by those of other programs, and commit which rules explain the differences.

    The directory holds `report.md`, `metrics.json` and `groups.parquet`, with every value of every group.

    Args:
        job: names the directory.
        made_by: origin, recorded in the manifest.
        report: receives our figures and the differences.

    Raises:
        InputError: the table, the bundle or the scores cannot be used.
    """
    lists = job.source.lists()
    columns: dict[str, Tensor] = {}
    found = []
    with progress("reconcile", len(job.metrics)) as advance:
        for name in job.metrics:
            found.append(_of_metric(metric_named(name, threshold=job.relevant_from), lists, job, columns))
            advance(1)
    result = Reconciliation(
        groups=len(lists.queries), documents=len(lists.scores_N), tied=_tied(lists), metrics=tuple(found)
    )
    with storage.Commit(job.out) as commit:
        with commit.file(GROUPS) as path:
            values = {name: pa.array(v.numpy(), mask=v.isnan().numpy()) for name, v in columns.items()}
            pq.write_table(
                pa.table({"query": lists.queries, "documents": lists.offsets_Q1.diff().numpy(), **values}), path
            )
        write_report(commit, result, document(result))
        commit.finish({"made_by": made_by})
    for of_metric in result.metrics:
        report({"metric": of_metric.metric, "figure": of_metric.figure})
    return result


def _tied(lists: ScoredLists) -> int:
    """Groups with documents of equal scores and different labels."""
    order_N = torch.arange(len(lists.scores_N))
    for key_N in (lists.labels_N, lists.scores_N, lists.group_N):
        order_N = order_N[key_N[order_N].argsort(stable=True)]
    scores_N, labels_N, group_N = (v[order_N] for v in (lists.scores_N, lists.labels_N, lists.group_N))
    pairs = (scores_N[1:] == scores_N[:-1]) & (group_N[1:] == group_N[:-1]) & (labels_N[1:] != labels_N[:-1])
    return len(set(group_N[1:][pairs].tolist()))


def _mean(values_Q: Tensor) -> float | None:
    """The mean over the groups that are not left out; None if there are none."""
    known_Q = values_Q[~values_Q.isnan()]
    return float(known_Q.mean()) if len(known_Q) else None


def _of_metric(metric: Metric, lists: ScoredLists, job: ReconcileJob, columns: dict[str, Tensor]) -> OfMetric:
    """A metric by our rules and each program's; `columns` receives the values of all groups."""
    ours_Q = _values(Rules(), metric, lists)
    columns[metric.name] = ours_Q
    programs = []
    for policy in POLICIES:
        if policy.kind == metric.kind and policy.program in (job.programs or PROGRAMS):
            reconciled, values_Q = _reconciled(policy, metric, lists, ours_Q, job.groups_shown)
            columns[f"{policy.program} {reconciled.spelled}"] = values_Q
            programs.append(reconciled)
    return OfMetric(
        metric=metric.name,
        policy=metric.policy,
        figure=_mean(ours_Q),
        undefined=int(ours_Q.isnan().sum()),
        programs=tuple(programs),
    )


def _values(rules: Rules, metric: Metric, lists: ScoredLists) -> Tensor:
    return under(rules, metric, lists.scores_N, lists.labels_N, lists.offsets_Q1, lists.names_N)


def _reconciled(
    policy: Policy, metric: Metric, lists: ScoredLists, ours_Q: Tensor, shown: int
) -> tuple[Reconciled, Tensor]:
    """Switch the rules of a program one after the other; returns the values of all groups too."""
    rules, before_Q, steps = Rules(), ours_Q, []
    for name, theirs in policy.rules:
        if name not in metric.affected_by() or theirs == (mine := getattr(rules, name)):
            continue
        rules = rules.replace(**{name: theirs})
        after_Q = _values(rules, metric, lists)
        steps.append(_step(name, (mine, theirs), before_Q, after_Q, lists.queries, shown))
        before_Q = after_Q
    figure, own = _mean(before_Q), _mean(ours_Q)
    return Reconciled(
        program=policy.program,
        spelled=policy.spelled.format(k=metric.model_dump().get("k")),
        policy=policy.rules.text(metric.affected_by()),
        figure=figure,
        difference=None if figure is None or own is None else figure - own,
        steps=tuple(steps),
    ), before_Q


def _step(
    rule: str, values: tuple[str, str], before_Q: Tensor, after_Q: Tensor, queries: Sequence[str], shown: int
) -> RuleSwitch:
    """One switched rule: its part of the difference, and the groups that it changes most."""
    change_Q = (after_Q.nan_to_num(nan=-1) - before_Q.nan_to_num(nan=-1)).abs()  # no metric is -1
    changed = int((change_Q > _SAME).sum())
    most = change_Q.argsort(descending=True, stable=True)[: min(shown, changed)].tolist()

    def value(values_Q: Tensor, q: int) -> float | None:
        return None if values_Q[q].isnan() else float(values_Q[q])

    return RuleSwitch(
        rule=rule,
        ours=values[0],
        theirs=values[1],
        part=(_mean(after_Q) or 0.0) - (_mean(before_Q) or 0.0),
        groups=changed,
        shown=tuple(ChangedGroup(query=queries[q], before=value(before_Q, q), after=value(after_Q, q)) for q in most),
    )


def document(found: Reconciliation) -> Document:
    """The report: a row for each program and metric, and the groups that show each difference."""
    intro = (
        f"{found.groups:,} query groups, {found.documents:,} documents; {found.tied:,} groups have documents of equal "
        "scores and different labels. Each program's figure is computed by its rules. Rules are switched from ours to "
        f"the program's in this order: {', '.join(Rules.model_fields)}; the change of the mean at each switch is that "
        "rule's part, and the parts add up to the difference. In brackets are the groups whose value changes."
    )
    sections = [
        Section(
            f"{metric_label(each.metric)}: the groups that show it",
            [Text(f"Ours: {each.policy}."), *map(_groups, each.programs)],
        )
        for each in found.metrics
    ]
    return Document("Reconciliation", [Text(intro), _explained(found)], sections)


def _explained(found: Reconciliation) -> Table:
    """A row for each program and metric, with the rules that explain its difference from ours."""
    rows = []
    for each in found.metrics:
        rows.append([metric_label(each.metric), "ours", "-", number(each.figure), "-", "-"])
        for program in each.programs:
            difference = "-" if program.difference is None else f"{program.difference:+.4f}"
            why = [f"{s.rule} {s.theirs} {s.part:+.4f} ({s.groups:,})" for s in program.steps if s.groups]
            figures = [number(program.figure), difference, ", ".join(why) or "the same rules here"]
            rows.append([metric_label(each.metric), program.program, program.spelled, *figures])
    return Table(["metric", "program", "spelled", "figure", "- ours", "explained by"], rows)


def _groups(program: Reconciled) -> Block:
    """The groups that each rule of a program changes most."""
    lines = []
    for step in program.steps:
        shown = "; ".join(f"{g.query} {number(g.before)} to {number(g.after)}" for g in step.shown)
        if shown:
            lines.append(f"{step.rule}, {step.ours} to {step.theirs}, {step.part:+.4f}: {shown}")
    text = f"{program.program} {program.spelled}: {program.policy}"
    return Points(lines, caption=text) if lines else Text(f"{text}.")
