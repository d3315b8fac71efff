"""The results of a distillation, teacher, students and directly trained trees side by side, and their report.

Shapes: Q groups, t trials of a method, M metrics.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ltrscale.config import Config
from ltrscale.evaluation.measure.agreement import TAU, Agreement
from ltrscale.evaluation.measure.report import EvaluatedData, Evaluation, Sliced
from ltrscale.evaluation.measure.slices import ALL, OUTLIERS
from ltrscale.evaluation.pages import against, against_header, definitions, how_intervals, number
from ltrscale.evaluation.statistics.blocks import Blocks
from ltrscale.evaluation.statistics.summarise import Comparison, Summary, scopes
from ltrscale.evaluation.studies.folds import read_group_metrics
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Chart, Document, Points, Section, Table, Text
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
    """Query groups that it was trained on, with labels or a teacher's scores; None if its bundle does not state it."""


class DistilledMethod(Sliced):
    """One method: how well it ranks, how well it agrees with the teacher, what it costs."""

    name: str
    against_teacher: Comparison | None
    """The primary metric, on the groups that define it; None for the teacher itself, and without such groups."""
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
    """See `Evaluation.policies`."""
    resamples: int
    test: EvaluatedData
    agreement_groups: int
    """Test groups, with and without labels, on which agreement was measured."""


def gather_distillation(
    evaluation_url: str, agreement_url: str, costs: Mapping[str, ServingCost], *, seed: int
) -> Distillation:
    """Join the evaluation, agreement and costs of the same methods, and compare each method with the teacher.

    Args:
        evaluation_url: evaluation of all methods, including the teacher.
        agreement_url: agreement of all other methods with the teacher.
        costs: by method, for methods that have a bundle.
        seed: of the resampling.

    Raises:
        InputError: evaluation or agreement are not committed there.
    """
    evaluation, agreement = Evaluation.read(evaluation_url), Agreement.read(agreement_url)
    assert evaluation.baseline is not None
    primary, names = evaluation.primary, [method.name for method in evaluation.methods]
    column = list(evaluation.methods[0].slices[ALL].summaries).index(primary)
    blocks_K = [Blocks.of(values_QtM[:, :, [column]]) for values_QtM in read_group_metrics(evaluation_url, evaluation)]
    with_teacher = scopes(
        blocks_K,
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
    return Distillation(
        methods=methods,
        baseline=evaluation.baseline,
        primary=primary,
        relevant_from=evaluation.relevant_from,
        leave_out_constant=evaluation.leave_out_constant,
        policies=evaluation.policies,
        resamples=evaluation.resamples,
        test=evaluation.test,
        agreement_groups=agreement.groups,
    )


def _side_by_side(found: Distillation) -> Table:
    """One row per method: NDCG, difference from the baseline, outlier groups, agreement, size and speed."""
    primary = found.primary
    cutoffs = [name for name in found.methods[0].slices[ALL].summaries if name.startswith("ndcg@")]
    measures = next(list(method.agreement) for method in found.methods if method.agreement)
    header = [
        "method", *map(metric_label, cutoffs), *against_header(primary, found.baseline),
        f"Outlier-{metric_label(primary)}", *measures, "groups", "MB", "docs/s",
    ]  # fmt: skip
    rows = []
    for method in found.methods:
        rows.append(
            [
                method.name,
                *(number(method.slices[ALL].summaries[name].mean) for name in cutoffs),
                *against(method.slices[ALL].comparisons.get(primary)),
                number(method.slices[OUTLIERS].summaries[primary].mean),
                *(_mean(method.agreement.get(name)) for name in measures),
                *_cost(method.cost),
            ]
        )
    return Table(header, rows)


def _mean(summary: Summary | None) -> str:
    return "-" if summary is None or summary.mean is None else f"{summary.mean:.3f}"


def _cost(cost: ServingCost | None) -> tuple[str, str, str]:
    if cost is None:
        return "-", "-", "-"
    groups = "-" if cost.trained_on is None else f"{cost.trained_on:,}"
    return groups, f"{cost.bytes / 1e6:.2f}", f"{cost.documents_per_second:,.0f}"


def findings(found: Distillation) -> Iterator[str]:
    """One sentence per finding; it claims a difference only if the interval excludes 0."""
    primary = metric_label(found.primary)
    teacher = next(method for method in found.methods if method.name == TEACHER)
    for method in found.methods:
        if method.name != found.baseline:
            yield _difference(method.name, found.baseline, primary, method.slices[ALL].comparisons.get(found.primary))
            if found.test.slices[OUTLIERS]:
                comparison = method.slices[OUTLIERS].comparisons.get(found.primary)
                yield f"On outlier groups: {_difference(method.name, found.baseline, primary, comparison)}"
        if method.name != TEACHER:
            if found.baseline != TEACHER and method.name != found.baseline:
                yield _difference(method.name, TEACHER, primary, method.against_teacher)
            yield from _agreement(method)
            yield from _cost_against(method, teacher)


def _cost_against(method: DistilledMethod, teacher: DistilledMethod) -> Iterator[str]:
    if method.cost and teacher.cost:
        size = method.cost.bytes / teacher.cost.bytes
        speed = method.cost.documents_per_second / teacher.cost.documents_per_second
        yield (
            f"{method.name} has {size:.2f} times the bytes of the teacher and scores {speed:.2f} times as many "
            "documents a second on one thread."
        )


def _difference(name: str, other: str, metric: str, comparison: Comparison | None) -> str:
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


def document(found: Distillation, links: Mapping[str, str]) -> Document:
    """The report; `links` maps descriptions of further reports and files to their places."""
    test, primary = found.test, metric_label(found.primary)
    shows = f"{primary}, agreement with the teacher and scoring speed of each method"
    opening = (
        Text(
            f"Test data: {', '.join(test.data)}; {test.groups:,} labelled query groups, {test.documents:,} documents, "
            f"{test.slices[OUTLIERS]:,} outlier groups. {primary} is defined in "
            f"{found.methods[0].slices[ALL].summaries[found.primary].groups:,} of the groups."
        ),
        _side_by_side(found),
        Chart(_chart(found), shows, "methods"),
    )
    sections = (
        Section("Findings", [Points(list(findings(found)))]),
        Section("How to read the table", [Points(_how_to_read(found))]),
        Section("More", [Points([f"{what}: {where}" for what, where in links.items()])]),
    )
    return Document("Distillation", opening, sections)


def _how_to_read(found: Distillation) -> list[str]:
    return [
        *definitions(
            found.methods[0].slices[ALL].summaries,
            found.relevant_from,
            leave_out_constant=found.leave_out_constant,
            stated=found.policies,
        ),
        "Differences, intervals and p are paired.",
        *how_intervals((scope for m in found.methods for scope in m.slices.values()), found.resamples),
        f"tau is Kendall's tau-b with the teacher, overlap@K the share of the first K documents that both have, each "
        f"the mean over those of the {found.agreement_groups:,} test groups, with and without labels, that define it: "
        "with an order to compare, or with more than K documents. An overlap is expected over the orders of ties.",
        "groups are the query groups that a method was trained on: students with the teacher's scores, others with "
        "labels.",
        "MB is weights or trees in the bundle, docs/s what one thread scores in a second of processor time; all "
        "methods took turns in one process on the same documents.",
    ]


def _chart(found: Distillation) -> charts.Spec:
    """A row per method: the primary metric and tau with their 95% intervals, and the scoring speed."""
    kinds = {TEACHER: "teacher", found.baseline: "baseline"}
    quality, agreement, speed = [], [], []
    for method in found.methods:
        kind = {"series": kinds.get(method.name, "method")}
        quality.append(charts.interval_row(method.name, method.slices[ALL].summaries[found.primary], **kind))
        if TAU in method.agreement:
            agreement.append(charts.interval_row(method.name, method.agreement[TAU], **kind))
        if method.cost is not None:
            speed.append({"name": method.name, "mean": method.cost.documents_per_second, **kind})
    order = ["teacher", "baseline", "method"]
    parts = [charts.interval_chart(quality, title=metric_label(found.primary), order=order)]
    if agreement:
        parts.append(charts.interval_chart(agreement, title="tau with the teacher", order=order))
    if speed:
        title = "documents a second on one thread"
        parts.append(charts.interval_chart(speed, title=title, order=order, log=True, unit="~s"))
    return charts.chart_row(*parts)
