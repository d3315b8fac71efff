"""Decay: a metric by period after the end of training, the drift of each period, and whether drift predicted the loss.

Shapes: P periods, S permutations.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ltrscale.bundle import read_bundle_manifest
from ltrscale.bundle.contents import Provenance
from ltrscale.config import Operational, Strict, validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.split import with_periods_named
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate import EvaluateJob
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import POSITIONS, EvaluateConfig
from ltrscale.evaluation.pages import ReportStage, columns_against
from ltrscale.evaluation.statistics.summarise import Scope
from ltrscale.evaluation.weeks.drift import MUCH, SOME, Drift, DriftSettings, FeatureDrift, PeriodDrift, measure_drift
from ltrscale.evaluation.weeks.falls import falls_said
from ltrscale.progress import Report
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, Document, Points, Section, Table, TableRow, Text, cell
from ltrscale.reports.findings import Findings, commit_report
from ltrscale.stages.stage import Origin, OutputUrl, bundle_hashes, dataset_hashes, hashes_of
from ltrscale.storage import join

_FEWEST_PERIODS = 5
"""With fewer periods, no order of them has a probability below 5%."""
_EXACT, _PERMUTATIONS = 7, 10_000
_NAMED_FEATURES, _DRAWN = 5, 3
_SINCE = "periods since the end of training"
_BESIDE = 0.03


class PeriodPoint(Strict):
    """A period of a curve."""

    period: str
    since: int
    """Periods since the last one of training, among those that the data sets have."""
    scope: Scope
    """Metrics of the period's groups, and comparisons with the baseline."""


class PeriodCurve(Strict):
    """The metric of one method by period."""

    trained_until: str
    """The last period that its first bundle was trained on; the training split's if the bundle does not state it."""
    points: tuple[PeriodPoint, ...]


class DriftCorrelation(Strict):
    """How well a measure of drift, which needs no labels, ranked the periods by a method's metric."""

    measure: str
    method: str
    periods: int
    correlation: float | None
    """Spearman's rank correlation of drift and the loss of the metric; 1 if more drift always meant more loss. None for
    fewer than five periods, or without differences."""
    p: float | None
    """Two-sided p value over permutations of the periods."""


class Decay(Findings):
    """`metrics.json` of a drift report."""

    called: ClassVar = "a drift report"
    made_by_job: ClassVar = "jobs.drift"
    primary: str
    baseline: str | None
    curves: dict[str, PeriodCurve]
    drift: Drift
    foretold: tuple[DriftCorrelation, ...]


class DriftJob(DriftSettings, ReportStage):
    """Report the metrics of an evaluation by period, and the drift of its periods from training."""

    stage: ClassVar = "drift"
    out: Operational[str]
    """Directory of the report."""
    evaluation: OutputUrl
    """Directory that jobs.evaluate made with `slice_by: [period]`; its splits, bundles and settings are used."""

    def page(self) -> Document:
        """The report of the committed findings."""
        return document(Decay.read(self.out), self.evaluation)

    def inputs(self) -> dict[str, str]:
        """Content of the evaluation, its data sets and its bundles."""
        splits = self._evaluated.splits
        data = dataset_hashes([splits.train, splits.validation, splits.test])
        return hashes_of(self) | data | bundle_hashes(self._evaluated.bundles)

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Measure drift, and commit the report."""
        result = decay(Evaluation.read(self.evaluation), self._evaluated, measure_drift(self._evaluated, self))
        commit_report(self.out, result, document(result, self.evaluation), made_by=origin)

    @cached_property
    def _evaluated(self) -> EvaluateConfig:
        return EvaluateConfig.recorded(self.evaluation)


def measured_weeks(out: str, config: EvaluateConfig, settings: DriftSettings, *, ray: bool) -> tuple[Evaluation, Decay]:
    """Evaluate and measure drift, in `out/evaluation` and `out/drift`, as their jobs do; skips what is up to date."""
    evaluation, drift = join(out, "evaluation"), join(out, "drift")
    EvaluateJob(out=evaluation, evaluate=config, ray=ray).run(show=False)
    DriftJob(out=drift, evaluation=evaluation, **settings.model_dump()).run(show=False)
    return Evaluation.read(evaluation), Decay.read(drift)


def decay(evaluation: Evaluation, config: EvaluateConfig, drift: Drift) -> Decay:
    """Put the metrics of each period beside the drift of the same test periods.

    Raises:
        InputError: the evaluation is not sliced by period.
    """
    lacking = [period for period in drift.periods if f"period={period}" not in evaluation.test.slices]
    if len(lacking) == len(drift.periods):
        raise InputError("the evaluation has no slices by period; evaluate again with evaluate.slice_by=[period]")
    urls = {url for split in config.splits.by_name.values() for url in split.data}
    all_periods = sorted({period for url in urls for period in open_dataset(url).manifest.periods})
    curves = {}
    for method in evaluation.methods:
        end = _trained_until(method.trials[0].url, config)
        points = tuple(
            PeriodPoint(
                period=period,
                since=bisect_right(all_periods, period) - bisect_right(all_periods, end),
                scope=method.slices[f"period={period}"],
            )
            for period in drift.periods
            if period not in lacking  # no group of it has labels
        )
        curves[method.name] = PeriodCurve(trained_until=end, points=points)
    return Decay(
        primary=evaluation.primary,
        baseline=evaluation.baseline,
        curves=curves,
        drift=drift,
        foretold=tuple(_correlations(curves, drift, evaluation.primary)),
    )


def _trained_until(url: str, config: EvaluateConfig) -> str:
    """The last period that a bundle was trained on; the training split's if the bundle does not state it."""
    made_by = {} if url in (*config.scores.values(), POSITIONS) else read_bundle_manifest(url).get("made_by", {})
    splits = validate(Provenance, made_by, url).config.splits
    names = (splits[0].periods if splits else None) or with_periods_named(config.splits.train).periods or ()
    return max(item.rpartition("..")[2] for item in names)


def _correlations(curves: Mapping[str, PeriodCurve], drift: Drift, primary: str) -> Iterator[DriftCorrelation]:
    """The correlation of each measure of drift with each method's metric."""
    for method, curve in curves.items():
        means = {point.period: point.scope.summaries[primary].mean for point in curve.points}
        with_metric = [(drift.periods[period], mean) for period, mean in means.items() if mean is not None]
        loss_P = np.array([-mean for _, mean in with_metric])
        of_measures = {"features": [period.median_psi for period, _ in with_metric]}
        if all(method in period.spreads for period, _ in with_metric):
            of_measures["scores"] = [period.spreads[method].psi for period, _ in with_metric]
        for measure, values in of_measures.items():
            correlation, p = _rank_correlation(np.array(values), loss_P)
            yield DriftCorrelation(
                measure=measure, method=method, periods=len(with_metric), correlation=correlation, p=p
            )


def _rank_correlation(one_P: NDArray[np.float64], other_P: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Spearman's rank correlation, with two-sided p over orders; None for fewer than five values, or equal ones."""
    n = len(one_P)
    if n < _FEWEST_PERIODS or len(set(one_P)) == 1 or len(set(other_P)) == 1:
        return None, None
    from scipy.stats import rankdata  # imported late: it takes a second, and few evaluations have so many periods

    one_P, other_P = ((rankdata(x_P) - (n + 1) / 2) for x_P in (one_P, other_P))
    one_P, other_P = (x_P / math.sqrt(float(x_P @ x_P)) for x_P in (one_P, other_P))
    correlation = float(one_P @ other_P)
    if n <= _EXACT:
        orders_SP = np.array(list(itertools.permutations(range(n))))
    else:  # the observed order is one of them, so that p is never 0
        random_SP = np.random.default_rng(0).permuted(np.tile(np.arange(n), (_PERMUTATIONS, 1)), axis=1)
        orders_SP = np.concatenate([np.arange(n)[None], random_SP])
    as_far_S = np.abs(one_P[orders_SP] @ other_P) >= abs(correlation) * (1 - 1e-9)  # equal sums differ by rounding
    return correlation, float(as_far_S.mean())


def drifted(drift: Drift) -> str:
    """A sentence on the features with the largest indices, which a median over many features hides."""
    if not drift.train.features:
        return "No feature is read, so none can drift."
    largest = drift.largest()
    median = max(period.median_psi for period in drift.periods.values())
    much = [each for each in largest if each[2] > SOME][:_NAMED_FEATURES]
    features = ", ".join(f"{name} {value:.3f} in {period}" for name, period, value in much or largest[:1])
    context = f"the median of the {len(largest)} features is at most {median:.4f}"
    if not much:
        return f"No feature has drifted: the largest PSI is that of {features}, and {context}."
    return f"Features that drifted most, by their PSI: {features}; {context}."


def _fell(result: Decay) -> Iterator[Text]:
    """Which methods fell over the periods, and whether by more than their noise."""
    means = {
        method: {point.period: point.scope.summaries[result.primary] for point in curve.points}
        for method, curve in result.curves.items()
    }
    yield from map(Text, falls_said(means, result.primary))


def _metric_table(result: Decay) -> Table:
    """The primary metric of each method and period."""
    return Table.from_rows(
        [
            {
                "method": method,
                "period": point.period,
                "since training": point.since,
                "groups": point.scope.summaries[result.primary].groups,
                f"{metric_label(result.primary)} [95%]": point.scope.summaries[result.primary],
                **columns_against(result.primary, result.baseline, point.scope),
            }
            for method, curve in result.curves.items()
            for point in curve.points
        ]
    )


def _drift_table(result: Decay) -> Table:
    """The drift of each period, with training first, and the index of the features that drifted most."""
    features = [name for name, *_ in result.drift.largest()[:_NAMED_FEATURES]]
    periods = {"training": result.drift.train, **result.drift.periods}
    return Table.from_rows([_drift_row(name, period, features) for name, period in periods.items()], form=".3f")


def _drift_row(name: str, period: PeriodDrift, features: Sequence[str]) -> TableRow:
    labels = period.labels
    return {
        "period": name,
        "groups": period.groups,
        "documents": period.documents,
        "list length": f"{period.length:.1f}",
        "groups with labels": None if labels is None else labels.groups,
        "relevant documents": None if labels is None else f"{labels.documents:.2%}",
        "groups with one": None if labels is None else f"{labels.relevant:.2%}",
        "PSI of lengths": period.length_psi,
        "median PSI": period.median_psi,
        f"PSI > {MUCH:g} beyond chance": f"{len(period.drifted)} of {len(period.features)}",
        **{f"PSI of scores: {method}": spread.psi for method, spread in period.spreads.items()},
        **{f"PSI of feature {name}": _feature_cell(period.features[name]) for name in features},
    }


def _feature_cell(feature: FeatureDrift) -> str:
    shares = {"missing": feature.missing, "unknown": feature.unknown}
    return "".join([f"{feature.psi:.3f}", *(f", {share:.2%} {name}" for name, share in shares.items() if share)])


def document(result: Decay, evaluation: str) -> Document:
    """The report: metrics by period and drift; `evaluation` is the URL of the evaluation."""
    label = metric_label(result.primary)
    ends = ", ".join(f"{name} {curve.trained_until}" for name, curve in result.curves.items())
    opening: tuple[Block, ...] = (
        Text(f"{label} and its intervals are those of {evaluation}. The last periods of training: {ends}."),
        *_fell(result),
        _metric_table(result),
        Text(drifted(result.drift)),
        _drift_table(result),
        *_period_curves(result),
    )
    sections = (
        Section("How to read the tables", [Points(_HOW_TO_READ)]),
        Section("Did drift foretell the loss?", list(_prediction_blocks(result))),
    )
    return Document(f"{label} and drift by period", opening, sections)


_HOW_TO_READ = (
    f"PSI is the population stability index: below {SOME:g} is usually read as no drift, above {MUCH:g} as much. It "
    "compares features and list lengths with training. Missing values, values outside training's range and codes that "
    "training lacks are bins of their own. The number of features above that is counted beyond what chance gives: "
    "without drift the index is about (bins - 1) (1 / n + 1 / m) for n and m lists. Of features the table has those of "
    "the largest index, with their shares of missing values and unknown codes; metrics.json has all.",
    "PSI of scores compares the standard deviation of the scores within a list with that on the validation split. It "
    "warns without labels that a model separates documents less, or more, than it did; not that it is wrong.",
    "Drift is that of all groups, labelled or not, and of the features that some model reads.",
)


def _prediction_blocks(result: Decay) -> Iterator[Block]:
    n = max(correlation.periods for correlation in result.foretold)
    if n < _FEWEST_PERIODS:
        n_periods = "1 period" if n == 1 else f"{n} periods"
        few = f"fewer than {_FEWEST_PERIODS} cannot tell a relation from chance. Evaluate more periods."
        yield Text(f"Cannot judge: {n_periods}, where {few}")
        return
    yield Text(
        f"Spearman's rank correlation, over periods, of drift with the loss of {metric_label(result.primary)}: 1 where "
        "more drift was always more loss. features is the median PSI, scores the PSI of scores. p is over "
        "permutations of the periods and not adjusted for the number of rows. Whatever grows with time correlates with "
        "a metric that falls with time, so a high value over consecutive periods is no sign of a cause."
    )
    rows: list[TableRow] = [
        {
            "drift of": f.measure,
            "method": f.method,
            "periods": f.periods,
            "correlation": cell(f.correlation, "+.2f"),
            "p": f.p,
        }
        for f in result.foretold
    ]
    yield Table.from_rows(rows)


def _period_curves(result: Decay) -> tuple[Chart, Chart]:
    """The metric of each method by periods since training, and the drift of features."""
    label, middle = metric_label(result.primary), (len(result.curves) - 1) / 2
    metrics = [
        row
        for i, (method, curve) in enumerate(result.curves.items())
        for row in charts.curve_rows(  # methods are shifted sideways so that they do not hide each other
            method, {p.since + _BESIDE * (i - middle): p.scope.summaries[result.primary] for p in curve.points}
        )
    ]
    ticks = sorted({point.since for curve in result.curves.values() for point in curve.points})
    most = [name for name, *_ in result.drift.largest()[:_DRAWN]]
    median = f"median of {len(result.drift.train.features)}"
    indices = [
        {"x": period, "y": value, "series": name}
        for period, drift in result.drift.periods.items()
        for name, value in [*((name, drift.features[name].psi) for name in most), (median, drift.median_psi)]
    ]
    return (
        Chart(
            charts.lines(metrics, x=_SINCE, y=label, ticks=ticks, order=list(result.curves)),
            f"{label} by {_SINCE}, with 95% intervals; dots side by side belong to one period",
            "decay",
        ),
        Chart(
            charts.lines(indices, x="period", y="PSI", ordinal=True, zero=True, order=[*most, median]),
            "Drift: the population stability index of the features that drifted most, and the median of all; below "
            f"{SOME:g} is usually read as none, above {MUCH:g} as much",
            "drift",
        ),
    )
