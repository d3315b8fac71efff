"""The results of a distillation, teacher, students and directly trained trees side by side, and their report.

Shapes: Q groups, t trials of a method, M metrics.
"""

from collections.abc import Mapping
from typing import ClassVar

from ltrscale.config import Strict
from ltrscale.evaluation.measure.agreement import Agreement
from ltrscale.evaluation.measure.page import how_to_read_it
from ltrscale.evaluation.measure.report import Evaluation, read_group_metrics
from ltrscale.evaluation.measure.slices import ALL, OUTLIERS
from ltrscale.evaluation.pages import columns_against, cutoffs, with_interval
from ltrscale.evaluation.statistics.blocks import Blocks
from ltrscale.evaluation.statistics.summarise import Comparison, scopes
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Chart, Document, Points, Section, Table, TableRow, Text, cell
from ltrscale.reports.findings import Findings

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


class Distillation(Findings):
    """`metrics.json` of a distillation."""

    called: ClassVar = "a distillation"
    made_by_job: ClassVar = "jobs.distill"
    evaluation: Evaluation
    """How well all methods rank, the teacher included."""
    against_teacher: dict[str, Comparison]
    """The primary metric against the teacher by method, on the groups that define it; none for the teacher itself."""
    agreement: Agreement
    """How well the methods agree with the teacher."""
    costs: dict[str, ServingCost]
    """By method, as far as it has a bundle."""


def gather_distillation(
    evaluation_url: str, agreement_url: str, costs: Mapping[str, ServingCost], *, seed: int
) -> Distillation:
    """Join the evaluation, agreement and costs of the same methods, and compare each method with the teacher.

    The evaluation covers all methods, including the teacher; `costs` covers the methods that have a bundle.

    Raises:
        InputError: evaluation or agreement are not committed there.
    """
    evaluation, agreement = Evaluation.read(evaluation_url), Agreement.read(agreement_url)
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
    compared = {name: scope.comparisons.get(primary) for name, scope in zip(names, with_teacher, strict=True)}
    return Distillation(
        evaluation=evaluation,
        against_teacher={name: comparison for name, comparison in compared.items() if comparison is not None},
        agreement=agreement,
        costs=dict(costs),
    )


def _side_by_side(found: Distillation) -> Table:
    """One row per method: NDCG, difference from the baseline, outlier groups, agreement, size and speed."""
    evaluation, models = found.evaluation, found.agreement.models
    primary, measures = evaluation.primary, next(iter(models.values()))
    rows: list[TableRow] = []
    for method in evaluation.methods:
        scope, cost, agreement = method.slices[ALL], found.costs.get(method.name), models.get(method.name, {})
        rows.append(
            {
                "method": method.name,
                **{metric_label(name): scope.summaries[name].mean for name in cutoffs(scope.summaries)},
                **columns_against(primary, evaluation.baseline, scope),
                f"{metric_label(primary)} - {TEACHER} [95%]": with_interval(found.against_teacher.get(method.name)),
                f"Outlier-{metric_label(primary)}": method.slices[OUTLIERS].summaries[primary].mean,
                **{f"{name} [95%]": cell(agreement.get(name), ".3f") for name in measures},
                "groups": None if cost is None else cost.trained_on,
                "MB": None if cost is None else f"{cost.bytes / 1e6:.2f}",
                "docs/s": None if cost is None else f"{cost.documents_per_second:,.0f}",
            }
        )
    return Table.from_rows(rows)


def document(found: Distillation, links: Mapping[str, str]) -> Document:
    """The report; `links` maps descriptions of further reports and files to their places."""
    opening = (Text(found.evaluation.test.described), _side_by_side(found), _chart(found))
    sections = (
        Section("How to read the table", [Points(_how_to_read(found))]),
        Section("More", [Points([f"{page}: {link}" for page, link in links.items()])]),
    )
    return Document("Distillation", opening, sections)


def _how_to_read(found: Distillation) -> list[str]:
    return [
        *how_to_read_it(found.evaluation),
        f"tau is Kendall's tau-b with the teacher, overlap@K the share of the first K documents that both have: means "
        f"over those of the {found.agreement.groups:,} test groups, labelled or not, that define them.",
        "groups are the query groups that a method was trained on, students with the teacher's scores. MB is weights "
        "or trees in the bundle, docs/s what one thread scores in a second of processor time.",
    ]


def _chart(found: Distillation) -> Chart:
    """The primary metric of each method with its 95% interval."""
    evaluation, label = found.evaluation, metric_label(found.evaluation.primary)
    kinds = {TEACHER: "teacher", evaluation.baseline: "baseline"}
    rows = [
        charts.interval_row(
            method.name, method.slices[ALL].summaries[evaluation.primary], series=kinds.get(method.name, "method")
        )
        for method in evaluation.methods
    ]
    spec = charts.interval_chart(rows, title=label, order=["teacher", "baseline", "method"])
    return Chart(spec, f"{label} of each method", "methods")
