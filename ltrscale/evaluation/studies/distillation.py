"""The results of a distillation, teacher, students and directly trained trees side by side, and their report.

Shapes: Q groups, t trials of a method, M metrics.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ltrscale.config import Config
from ltrscale.evaluation.measure.agreement import TAU, Agreement
from ltrscale.evaluation.measure.report import EvaluatedData, Evaluation, Sliced, read_group_metrics
from ltrscale.evaluation.measure.slices import ALL, OUTLIERS
from ltrscale.evaluation.pages import against, columns_against, how_to_read
from ltrscale.evaluation.statistics.blocks import Blocks
from ltrscale.evaluation.statistics.summarise import Comparison, Summary, scopes
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Chart, Charts, Document, Points, Row, Section, Table, Text, cell
from ltrscale.reports.findings import Findings

TEACHER = "teacher"
"""Name of the teacher among the methods."""


class ServingCost(Config):
    """Cost of training and using a method."""

    kind: str
    """Kind of the bundle: neural, trees or feature."""
    bytes: int
    """Size of weights or trees in the bundle."""
    documents_per_second: float
    """Scoring speed on one thread, by processor time."""
    trained_on: int | None
    """Query groups it was trained on, with labels or a teacher's scores; None if its bundle does not state it."""


class DistilledMethod(Sliced):
    """One method: how well it ranks, how well it agrees with the teacher, what it costs."""

    name: str
    against_teacher: Comparison | None
    """The primary metric on the groups that define it; None for the teacher itself, and without such groups."""
    agreement: dict[str, Summary]
    """Agreement with the teacher, by `tau` or `overlap@K`; empty for the teacher itself."""
    cost: ServingCost | None
    """None without a bundle."""


class Distillation(Findings):
    """`metrics.json` of a distillation."""

    called: ClassVar = "a distillation"
    made_by_job: ClassVar = "jobs.distill"
    methods: tuple[DistilledMethod, ...]
    baseline: str
    primary: str
    relevant_from: float
    leave_out_constant: bool
    policies: dict[str, str]
    """What the formula of each metric leaves open, such as ties."""
    resamples: int
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
    with_teacher = scopes(
        [Blocks.of(values_QtM[:, :, [column]]) for values_QtM in read_group_metrics(evaluation_url, evaluation)],
        [primary],
        baseline=names.index(TEACHER),
        samples=evaluation.resamples,
        seed=seed,
        labels_K=[method.labels for method in evaluation.methods],
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
    same = {"baseline", "primary", "relevant_from", "leave_out_constant", "policies", "resamples", "test"}
    return Distillation(methods=methods, agreement_groups=agreement.groups, **evaluation.model_dump(include=same))


def _side_by_side(distillation: Distillation) -> Table:
    """One row per method: NDCG, difference from the baseline, outlier groups, agreement, size and speed."""
    primary = distillation.primary
    cutoffs = [name for name in distillation.methods[0].slices[ALL].summaries if name.startswith("ndcg@")]
    measures = next(list(method.agreement) for method in distillation.methods if method.agreement)
    rows: list[Row] = []
    for method in distillation.methods:
        scope, cost = method.slices[ALL], method.cost
        rows.append(
            {
                "method": method.name,
                **{metric_label(name): scope.summaries[name].mean for name in cutoffs},
                **columns_against(primary, distillation.baseline, scope),
                f"Outlier-{metric_label(primary)}": method.slices[OUTLIERS].summaries[primary].mean,
                **{name: cell(s.mean if (s := method.agreement.get(name)) else None, ".3f") for name in measures},
                "groups": None if cost is None else cost.trained_on,
                "MB": None if cost is None else f"{cost.bytes / 1e6:.2f}",
                "docs/s": None if cost is None else f"{cost.documents_per_second:,.0f}",
            }
        )
    return Table.of(rows)


def findings(distillation: Distillation) -> Iterator[str]:
    """One sentence per finding; it states a difference only if the interval excludes 0."""
    primary = metric_label(distillation.primary)
    teacher = next(method for method in distillation.methods if method.name == TEACHER)
    for method in distillation.methods:
        if method.name != distillation.baseline:
            yield _compared_with(
                method.name, distillation.baseline, primary, method.slices[ALL].comparisons.get(distillation.primary)
            )
            if distillation.test.slices[OUTLIERS]:
                comparison = method.slices[OUTLIERS].comparisons.get(distillation.primary)
                yield f"On outlier groups: {_compared_with(method.name, distillation.baseline, primary, comparison)}"
        if method.name != TEACHER:
            if distillation.baseline != TEACHER and method.name != distillation.baseline:
                yield _compared_with(method.name, TEACHER, primary, method.against_teacher)
            yield from _agreement(method)
            if method.cost and teacher.cost:
                size = method.cost.bytes / teacher.cost.bytes
                speed = method.cost.documents_per_second / teacher.cost.documents_per_second
                yield (
                    f"{method.name} has {size:.2f} times the bytes of the teacher and scores {speed:.2f} times as many "
                    "documents a second on one thread."
                )


def _compared_with(name: str, other: str, metric: str, comparison: Comparison | None) -> str:
    if comparison is None:
        return f"{name} cannot be compared with {other}: no group defines {metric}."
    figures = against(comparison)[0]
    if comparison.low is None or comparison.high is None:
        return f"The draws of labels are too few to judge {name} against {other}: {metric} {figures}."
    if comparison.low > 0 or comparison.high < 0:
        return f"{name} ranks {'better' if comparison.low > 0 else 'worse'} than {other}: {metric} {figures}."
    return f"No difference between {name} and {other} is shown: {metric} {figures} has 0 in its interval."


def _agreement(method: DistilledMethod) -> Iterator[str]:
    tau = method.agreement.get(TAU)
    if tau is None or tau.mean is None or tau.low is None or tau.high is None:
        return
    shares = [
        f"{summary.mean:.1%} of the first {name.partition('@')[2]}"
        for name, summary in method.agreement.items()
        if name != TAU and summary.mean is not None
    ]
    in_common = f"; in common they have {', '.join(shares)}" if shares else ""
    yield f"{method.name} agrees with the teacher to tau = {tau.mean:.3f} [{tau.low:.3f}, {tau.high:.3f}]{in_common}."


def document(distillation: Distillation, links: Mapping[str, str]) -> Document:
    """The report; `links` maps descriptions of further reports and files to their places."""
    test, primary = distillation.test, metric_label(distillation.primary)
    opening = (
        Text(
            f"Test data: {', '.join(test.data)}; {test.groups:,} labelled query groups, {test.documents:,} documents, "
            f"{test.slices[OUTLIERS]:,} outlier groups. {primary} is defined in "
            f"{distillation.methods[0].slices[ALL].summaries[distillation.primary].groups:,} of the groups."
        ),
        _side_by_side(distillation),
        _charts(distillation),
    )
    sections = (
        Section("Findings", [Points(list(findings(distillation)))]),
        Section("How to read the table", [Points(_how_to_read(distillation))]),
        Section("More", [Points([f"{page}: {link}" for page, link in links.items()])]),
    )
    return Document("Distillation", opening, sections)


def _how_to_read(distillation: Distillation) -> list[str]:
    return [
        *how_to_read(distillation, (scope for m in distillation.methods for scope in m.slices.values())),
        f"tau is Kendall's tau-b with the teacher, overlap@K the share of the first K documents that both have, each "
        f"the mean over those of the {distillation.agreement_groups:,} test groups, with and without labels, that "
        "define it: with an order to compare, or with more than K documents. An overlap is expected over the orders of "
        "ties.",
        "groups are the query groups that a method was trained on: students with the teacher's scores, others with "
        "labels.",
        "MB is weights or trees in the bundle, docs/s what one thread scores in a second of processor time; all "
        "methods took turns in one process on the same documents.",
    ]


def _charts(distillation: Distillation) -> Charts:
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
    drawn = [Chart(charts.interval_chart(quality, title=label, order=order), f"{label} of each method", "methods")]
    if agreement:
        spec = charts.interval_chart(agreement, title="tau with the teacher", order=order)
        drawn.append(Chart(spec, "agreement with the teacher", "agreement"))
    if speed:
        spec = charts.interval_chart(speed, title="documents a second", order=order, log=True, unit="~s")
        drawn.append(Chart(spec, "documents a second that one thread scores", "speed"))
    return Charts(drawn)
