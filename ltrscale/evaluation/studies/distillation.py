"""The results of a distillation, teacher, students and directly trained trees side by side, and their report.

Shapes: Q groups, t trials of a method, M metrics.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ltrscale.config import Strict
from ltrscale.evaluation.measure.agreement import TAU, Agreement
from ltrscale.evaluation.measure.report import EvaluatedData, Evaluation, read_group_metrics
from ltrscale.evaluation.measure.slices import ALL, OUTLIERS
from ltrscale.evaluation.pages import ComparedMethods, columns_against, cutoffs, how_to_read, with_interval
from ltrscale.evaluation.statistics.blocks import Blocks
from ltrscale.evaluation.statistics.summarise import Comparison, Scope, Summary, scopes
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Points, Section, Table, TableRow, Text, cell

TEACHER = "teacher"
"""Name of the teacher among the methods."""


class ServingCost(Strict):
    """Cost of training and using a method."""

    kind: str
    """Kind of the bundle: neural, trees or feature."""
    bytes: int
    """Size of weights or trees in the bundle."""
    documents_per_second: float
    """Scoring speed on one thread, by processor time."""
    trained_on: int | None
    """Query groups it was trained on, with labels or a teacher's scores; None if its bundle does not state it."""


class DistilledMethod(Strict):
    """One method: how well it ranks, how well it agrees with the teacher, what it costs."""

    name: str
    slices: dict[str, Scope]
    """By slice of the evaluation."""
    against_teacher: Comparison | None
    """The primary metric on the groups that define it; None for the teacher itself, and without such groups."""
    agreement: dict[str, Summary]
    """Agreement with the teacher, by `tau` or `overlap@K`; empty for the teacher itself."""
    cost: ServingCost | None
    """None without a bundle."""


class Distillation(ComparedMethods):
    """`metrics.json` of a distillation."""

    called: ClassVar = "a distillation"
    made_by_job: ClassVar = "jobs.distill"
    methods: tuple[DistilledMethod, ...]
    baseline: str
    test: EvaluatedData
    agreement_groups: int
    """Test groups, with and without labels, on which agreement was measured."""


def gather_distillation(
    evaluation_url: str, agreement_url: str, costs: Mapping[str, ServingCost], *, seed: int
) -> Distillation:
    """Join the evaluation, agreement and costs of the same methods, and compare each method with the teacher.

    The evaluation covers all methods, including the teacher; `costs` covers the methods that have a bundle.

    Raises:
        InputError: evaluation or agreement are not committed there.
    """
    evaluation, agreement = Evaluation.read(evaluation_url), Agreement.read(agreement_url)
    assert evaluation.baseline is not None
    primary, names = evaluation.primary, [method.name for method in evaluation.methods]
    column = list(evaluation.methods[0].slices[ALL].summaries).index(primary)
    of_primary = [values_QtM[:, :, [column]] for values_QtM in read_group_metrics(evaluation_url, evaluation)]
    (with_teacher,) = scopes(
        [[*map(Blocks.from_values, of_primary)]],
        [primary],
        baseline=names.index(TEACHER),
        samples=evaluation.resamples,
        seed=seed,
        labels_K=[[trial.labels for trial in method.trials] for method in evaluation.methods],
    )
    methods = tuple(
        DistilledMethod(
            name=method.name,
            slices=method.slices,
            against_teacher=scope.comparisons.get(primary),
            agreement=agreement.models.get(method.name, {}),
            cost=costs.get(method.name),
        )
        for method, scope in zip(evaluation.methods, with_teacher, strict=True)
    )
    same = {*ComparedMethods.model_fields, "test"}
    return Distillation(methods=methods, agreement_groups=agreement.groups, **evaluation.model_dump(include=same))


def _side_by_side(distillation: Distillation) -> Table:
    """One row per method: NDCG, difference from the baseline, outlier groups, agreement, size and speed."""
    primary = distillation.primary
    measures = next(list(method.agreement) for method in distillation.methods if method.agreement)
    rows: list[TableRow] = []
    for method in distillation.methods:
        scope, cost = method.slices[ALL], method.cost
        rows.append(
            {
                "method": method.name,
                **{metric_label(name): scope.summaries[name].mean for name in cutoffs(scope.summaries)},
                **columns_against(primary, distillation.baseline, scope),
                f"{metric_label(primary)} - {TEACHER} [95%]": with_interval(method.against_teacher),
                f"Outlier-{metric_label(primary)}": method.slices[OUTLIERS].summaries[primary].mean,
                **{name: cell(s.mean if (s := method.agreement.get(name)) else None, ".3f") for name in measures},
                "groups": None if cost is None else cost.trained_on,
                "MB": None if cost is None else f"{cost.bytes / 1e6:.2f}",
                "docs/s": None if cost is None else f"{cost.documents_per_second:,.0f}",
            }
        )
    return Table.from_rows(rows)


def document(distillation: Distillation, links: Mapping[str, str]) -> Document:
    """The report; `links` maps descriptions of further reports and files to their places."""
    test, primary = distillation.test, metric_label(distillation.primary)
    opening: tuple[Block, ...] = (
        Text(
            f"{test.described} {primary} is defined in "
            f"{distillation.methods[0].slices[ALL].summaries[distillation.primary].groups:,} of the groups."
        ),
        _side_by_side(distillation),
        *_charts(distillation),
    )
    sections = (
        Section("How to read the table", [Points(_how_to_read(distillation))]),
        Section("More", [Points([f"{page}: {link}" for page, link in links.items()])]),
    )
    return Document("Distillation", opening, sections)


def _how_to_read(distillation: Distillation) -> list[str]:
    return [
        *how_to_read(distillation, (scope for m in distillation.methods for scope in m.slices.values())),
        f"tau is Kendall's tau-b with the teacher, overlap@K the share of the first K documents that both have: means "
        f"over those of the {distillation.agreement_groups:,} test groups, labelled or not, that define them.",
        "groups are the query groups that a method was trained on, students with the teacher's scores. MB is weights "
        "or trees in the bundle, docs/s what one thread scores in a second of processor time.",
    ]


def _charts(distillation: Distillation) -> Iterator[Chart]:
    """A row per method: the primary metric and tau with their 95% intervals, and the scoring speed."""
    kinds = {TEACHER: "teacher", distillation.baseline: "baseline"}
    quality, agreement, speed = [], [], []
    for method in distillation.methods:
        kind = {"series": kinds.get(method.name, "method")}
        quality.append(charts.interval_row(method.name, method.slices[ALL].summaries[distillation.primary], **kind))
        if TAU in method.agreement:
            agreement.append(charts.interval_row(method.name, method.agreement[TAU], **kind))
        if method.cost is not None:
            speed.append({"name": method.name, "mean": method.cost.documents_per_second, **kind})
    order, label = ["teacher", "baseline", "method"], metric_label(distillation.primary)
    spec = charts.interval_chart(quality, title=label, order=order)
    yield Chart(spec, f"{label} of each method", "methods")
    if agreement:
        spec = charts.interval_chart(agreement, title="tau with the teacher", order=order)
        yield Chart(spec, "agreement with the teacher", "agreement")
    if speed:
        spec = charts.interval_chart(speed, title="documents a second", order=order, log=True, unit="~s")
        yield Chart(spec, "documents a second that one thread scores", "speed")
