"""What several evaluations say together: those of the folds of a collection, and those on several goals.

Every query is in the test part of one fold. Publications on such collections report means over folds, so the report has
them too, with their standard error. Comparisons use the test queries of all folds together, which is far stronger than
five comparisons on a fifth of the queries each.

By several goals, a method dominates another if its mean is at least as high on every goal and higher on one. Those that
no other dominates are the trade-offs to choose from.

Shapes: Q groups of a fold or of all, t trials of a method, M metrics.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Self

import numpy as np

from ltrscale.arrays import Doubles
from ltrscale.config import Strict
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.report import Evaluation, read_group_metrics
from ltrscale.evaluation.measure.slices import ALL
from ltrscale.evaluation.pages import (
    ComparedMethods,
    columns_against,
    cutoffs,
    how_to_read,
    metric_table,
    verdicts,
    with_error,
)
from ltrscale.evaluation.statistics.blocks import Blocks
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.statistics.summarise import Scope, Summary, scopes
from ltrscale.progress import Report
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Points, Section, Table, Text, cell
from ltrscale.reports.findings import Findings, ReportStage, commit_report
from ltrscale.stages.inputs import OutputUrl
from ltrscale.stages.stage import Origin, Settings

_OF_EVALUATIONS = set(ComparedMethods.model_fields)
"""Fields that the summary copies from its evaluations, which agree in them."""


class _FoldMeans(Strict):
    """A metric of one method, fold by fold; None where no group defines it."""

    folds: tuple[float | None, ...]
    """The mean of each fold over its groups and trials."""
    mean: float | None
    """Mean over the folds where the metric is defined."""
    std_error: float | None
    """Standard error of that mean, from the spread of the folds."""


class _CrossvalMethod(Strict):
    """The results of one method, by metric."""

    name: str
    folds: dict[str, _FoldMeans]
    pooled: Scope
    """Results over the test groups of all folds together."""


class Crossval(ComparedMethods):
    """`metrics.json` of a cross-validation."""

    called: ClassVar = "a cross-validation"
    made_by_job: ClassVar = "jobs.pipeline"
    folds: dict[str, int]
    """Test groups of each fold, by its name."""
    trials: int
    """Number of trials of each method and fold."""
    methods: tuple[_CrossvalMethod, ...]


class FoldSummary(ReportStage):
    """Summarise the evaluations of all folds."""

    stage: ClassVar = "crossval"
    evaluations: dict[str, OutputUrl]
    """Directory of each fold's evaluation."""
    seed: int

    def identity(self) -> Settings:
        """The folds in their order, the evaluation of each, and the seed of the intervals."""
        return {"folds": [*self.evaluations], "evaluations": [*self.evaluations.values()], "seed": self.seed}

    def page(self) -> Document:
        """The report of the committed findings."""
        return document(Crossval.read(self.out))

    def work(self, origin: Origin, report: Report) -> None:
        """Summarise, and commit the report; the number of resamples is that of the evaluations.

        Raises:
            InputError: an evaluation is missing, has other methods, metrics or settings than the first, or the same
                test groups as another.
        """
        folds = {fold: Evaluation.read(url) for fold, url in self.evaluations.items()}
        _check_alike(folds)
        values = [read_group_metrics(url, folds[fold]) for fold, url in self.evaluations.items()]
        result = _joint(folds, values, self.seed)
        commit_report(self.out, result, document(result), made_by=origin)
        for method in result.methods:
            report({"method": method.name, **{metric: means.mean for metric, means in method.folds.items()}})


def _check_alike(evaluations: Mapping[str, Evaluation]) -> None:
    """Check that the folds differ in their test groups and in nothing else."""
    first, *_ = evaluations
    tested: dict[str, str] = {}
    for fold, evaluation in evaluations.items():
        if _in_common(evaluation) != _in_common(evaluations[first]):
            raise InputError(f"folds {first} and {fold} were evaluated with other methods or settings; run both again")
        if (other := tested.setdefault(evaluation.test.hash, fold)) != fold:
            raise InputError(f"folds {other} and {fold} have the same test groups; give each fold its own inputs")


def _in_common(evaluation: Evaluation) -> tuple[object, ...]:
    methods = [(method.name, *method.slices[ALL].summaries) for method in evaluation.methods]
    return methods, _draws(evaluation), evaluation.model_dump(include=_OF_EVALUATIONS)


def _draws(evaluation: Evaluation) -> list[list[str | None]]:
    """The draw of labels of each trial of each method, by number: folds draw from other groups, so ids never match."""
    labels = [[trial.labels for trial in method.trials] for method in evaluation.methods]
    numbers = {draw: str(number) for number, draw in enumerate(dict.fromkeys(itertools.chain(*labels)))}
    return [[numbers[draw] for draw in of_method] for of_method in labels]


def _joint(evaluations: Mapping[str, Evaluation], values_FK: Sequence[Sequence[Doubles]], seed: int) -> Crossval:
    first = next(iter(evaluations.values()))
    names = [method.name for method in first.methods]
    metrics = list(first.methods[0].slices[ALL].summaries)
    sizes = [len(of_fold[0]) for of_fold in values_FK]
    (pooled,) = scopes(
        [[Blocks.from_values(np.concatenate(of_folds)) for of_folds in zip(*values_FK, strict=True)]],
        metrics,
        baseline=None if first.baseline is None else names.index(first.baseline),
        samples=first.resamples,
        seed=seed,
        labels_K=_draws(first),
        folds_Q=np.repeat(np.arange(len(sizes)), sizes),
    )
    methods = []
    for k, name in enumerate(names):
        of_folds = [evaluation.methods[k].slices[ALL].summaries for evaluation in evaluations.values()]
        means = {metric: _fold_means([summaries[metric].mean for summaries in of_folds]) for metric in metrics}
        methods.append(_CrossvalMethod(name=name, folds=means, pooled=pooled[k]))
    return Crossval(
        folds={fold: evaluation.test.groups for fold, evaluation in evaluations.items()},
        trials=len(first.methods[0].trials),
        methods=tuple(methods),
        **first.model_dump(include=_OF_EVALUATIONS),
    )


def _fold_means(folds: Sequence[float | None]) -> _FoldMeans:
    defined = [value for value in folds if value is not None]
    return _FoldMeans(
        folds=tuple(folds),
        mean=float(np.mean(defined)) if defined else None,
        std_error=float(np.std(defined, ddof=1)) / math.sqrt(len(defined)) if len(defined) > 1 else None,
    )


def document(crossval: Crossval) -> Document:
    """The report: means over folds, and comparisons over the test groups of all folds together."""
    folds = ", ".join(f"{fold} {groups:,}" for fold, groups in crossval.folds.items())
    together = f"{len(crossval.folds)} folds with {sum(crossval.folds.values()):,} labelled test groups together"
    shows = f"{metric_label(crossval.primary)} of each method, fold by fold"
    pooled = {"all": {method.name: method.pooled for method in crossval.methods}}
    by_fold = [
        {
            "metric": metric_label(metric),
            "method": m.name,
            **dict(zip(crossval.folds, (of := m.folds[metric]).folds, strict=True)),
            "mean": of.mean,
            "std. error": of.std_error,
        }
        for metric in crossval.methods[0].folds
        for m in crossval.methods
    ]
    sections = [
        Section("How to read the tables", [Points(_how_to_read(crossval))]),
        Section("Fold by fold", [Table.from_rows(by_fold)]),
        Section("All test groups together", [metric_table(pooled, crossval.baseline)]),
    ]
    opening = [Text(f"{together}: {folds}."), *_table_of_methods(crossval), Chart(_chart(crossval), shows, "folds")]
    return Document("Cross-validation", opening, sections)


def _table_of_methods(crossval: Crossval) -> Iterator[Block]:
    """The table of methods, and what the comparisons can show."""
    yield Table.from_rows(
        [
            {
                "method": method.name,
                **{
                    metric_label(metric): with_error(method.folds[metric].mean, method.folds[metric].std_error)
                    for metric in cutoffs(method.folds)
                },
                **columns_against(crossval.primary, crossval.baseline, method.pooled),
            }
            for method in crossval.methods
        ]
    )
    compared = {method.name: method.pooled.comparisons.get(crossval.primary) for method in crossval.methods}
    if shown := verdicts(compared):
        yield Points(shown)


def _chart(crossval: Crossval) -> charts.Spec:
    """The primary metric of each method: a dot a fold, and one for the mean over folds."""
    rows = []
    for method in crossval.methods:
        of_folds = method.folds[crossval.primary]
        values = {**dict(zip(crossval.folds, of_folds.folds, strict=True)), "mean over folds": of_folds.mean}
        rows += [{"name": method.name, "series": fold, "mean": value} for fold, value in values.items()]
    return charts.interval_chart(rows, title=f"{metric_label(crossval.primary)} of each fold")


def _how_to_read(crossval: Crossval) -> list[str]:
    return [
        "Figures are means over folds ± their standard error; a fold's figure is the mean over its test groups"
        f"{f' and {crossval.trials} trials' if crossval.trials > 1 else ''}.",
        "Differences, their intervals and p are over the test groups of all folds together. Draws of labels are "
        "counted within a fold, for each fold draws from its own training groups. Models of different folds share "
        "training queries, which nothing here accounts for.",
        *how_to_read(crossval, (method.pooled for method in crossval.methods)),
    ]


class TradeOff(Strict):
    """A method's primary metric on the labels of each goal."""

    method: str
    of_goals: dict[str, Summary]
    dominated_by: str | None
    """A method that is at least as good by every goal and better by one; None on the front."""

    @property
    def means(self) -> list[float]:
        """The mean on each goal."""
        return [-1.0 if summary.mean is None else summary.mean for summary in self.of_goals.values()]


class Front(Findings):
    """`front.json` of a comparison on several goals."""

    called: ClassVar = "a front"
    made_by_job: ClassVar = "jobs.pipeline"
    file: ClassVar = "front.json"
    primary: str
    trade_offs: tuple[TradeOff, ...]

    @property
    def kept(self) -> list[TradeOff]:
        """The methods on the front, by the first goal."""
        return sorted((t for t in self.trade_offs if t.dominated_by is None), key=lambda t: t.means, reverse=True)

    @classmethod
    def from_evaluations(cls, evaluations: Mapping[str, Evaluation]) -> Self:
        """The front of the methods of several evaluations, one on the labels of each goal.

        Raises:
            InputError: they are of other methods, or in another primary metric.
        """
        first = next(iter(evaluations.values()))
        found: dict[str, dict[str, Summary]] = {method.name: {} for method in first.methods}
        for goal, evaluation in evaluations.items():
            if [m.name for m in evaluation.methods] != [*found] or evaluation.primary != first.primary:
                raise InputError(f"{goal}: its evaluation has other methods or another metric; run both again")
            for method in evaluation.methods:
                found[method.name][goal] = method.slices[ALL].summaries[first.primary]
        alone = [TradeOff(method=name, of_goals=of, dominated_by=None) for name, of in found.items()]
        trade_offs = tuple(each.replace(dominated_by=_dominating(each, alone)) for each in alone)
        return cls(primary=first.primary, trade_offs=trade_offs)


def _dominating(one: TradeOff, others: Sequence[TradeOff]) -> str | None:
    """The first method that dominates one.

    Example:
        >>> of = dict(low=None, high=None, trials=(), std_error=None, groups=9, undefined=0, as_zero=None, as_one=None)
        >>> figures = {"a": (0.5, 0.2), "b": (0.4, 0.2), "c": (0.1, 0.3)}
        >>> goals = {m: {str(g): Summary(mean=v, **of) for g, v in enumerate(vs)} for m, vs in figures.items()}
        >>> offs = [TradeOff(method=m, of_goals=each, dominated_by=None) for m, each in goals.items()]
        >>> [_dominating(each, offs) for each in offs]
        [None, 'a', None]
    """
    for other in others:
        pairs = [*zip(other.means, one.means, strict=True)]
        if all(theirs >= own for theirs, own in pairs) and any(theirs > own for theirs, own in pairs):
            return other.method
    return None


class FrontSummary(ReportStage):
    """Compare the methods by several goals at once."""

    stage: ClassVar = "front"
    evaluations: dict[str, OutputUrl]
    """Directory of the evaluation on each goal."""

    def page(self) -> Document:
        """The report of the committed findings."""
        return front_page(Front.read(self.out))

    def work(self, origin: Origin, report: Report) -> None:
        """Compare, and commit the report."""
        front = Front.from_evaluations({goal: Evaluation.read(url) for goal, url in self.evaluations.items()})
        commit_report(self.out, front, front_page(front), made_by=origin)
        for each in front.kept:
            report({"method": each.method, **dict(zip(each.of_goals, each.means, strict=True))})


def front_page(front: Front) -> Document:
    """The table of trade-offs, and a chart of each goal against the first."""
    label, kept = metric_label(front.primary), front.kept
    names = ", ".join(trade_off.method for trade_off in kept)
    opening = [
        Text(f"{len(kept)} of {len(front.trade_offs)} methods are dominated by no other: {names}."),
        _table(front),
    ]
    draws = min(summary.draws for each in front.trade_offs for summary in each.of_goals.values())
    few = [f"With fewer than {FEWEST_DRAWS} draws of labels, intervals are of the test groups alone."]
    points = [
        f"{label} on the labels of each goal, with 95% intervals over draws of labels and test groups.",
        "A method dominates another if its means are at least as high for every goal, and one is higher.",
        *(few if draws < FEWEST_DRAWS else []),
    ]
    return Document(
        "Trade-offs between goals", [*opening, *_charts(front, label)], [Section("How to read", [Points(points)])]
    )


def _table(front: Front) -> Block:
    rest = [each for each in front.trade_offs if each.dominated_by is not None]
    return Table.from_rows(
        [
            {
                "method": each.method,
                **{goal: cell(summary) for goal, summary in each.of_goals.items()},
                "dominated by": each.dominated_by or "-",
            }
            for each in (*front.kept, *rest)
        ]
    )


def _charts(front: Front, label: str) -> Iterator[Block]:
    x, *others = front.trade_offs[0].of_goals
    for y in others:
        rows = [
            charts.tradeoff_row(each.method, each.of_goals[x], each.of_goals[y], faded=each.dominated_by is not None)
            for each in front.trade_offs
        ]
        spec = charts.tradeoffs(rows, x=f"{label} of {x}", y=f"{label} of {y}")
        yield Chart(spec, f"{label} of each method for {x} and {y}", f"front-{x}-{y}")
