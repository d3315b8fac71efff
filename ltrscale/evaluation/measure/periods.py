"""The test periods of an evaluation: the metric of each, its fall, its drift, and whether drift foretold the loss.

Shapes: P periods, S permutations.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ltrscale.arrays import Doubles
from ltrscale.bundle_manifest import read_bundle_manifest
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.split import with_periods_named
from ltrscale.evaluation.measure.drift import (
    MUCH,
    SOME,
    ByPeriod,
    DriftCorrelation,
    FeatureDrift,
    PeriodDrift,
    measure_drift,
)
from ltrscale.evaluation.measure.report import Evaluation, MethodResult
from ltrscale.evaluation.measure.settings import POSITIONS, EvaluateConfig
from ltrscale.evaluation.pages import columns_against, with_error
from ltrscale.evaluation.statistics.summarise import Summary
from ltrscale.ranking.choices import metric_label
from ltrscale.reports import charts
from ltrscale.reports.document import Block, Chart, LeftOut, Points, Table, TableRow, Text, cell
from ltrscale.stages.provenance import Provenance

_Z = 1.96
_FEWEST_PERIODS = 5
"""With fewer periods, no order of them has a probability below 5%."""
_EXACT, _PERMUTATIONS = 7, 10_000
_NAMED_FEATURES, _DRAWN = 5, 3


def measure_periods(config: EvaluateConfig, methods: Sequence[MethodResult]) -> ByPeriod:
    """Measure the drift of the test periods, and put it beside the metrics of the methods.

    Raises:
        InputError: data sets or bundles are missing or do not fit.
    """
    drift = measure_drift(config)
    urls = {url for split in config.splits.by_name.values() for url in split.data}
    known = sorted({period for url in urls for period in open_dataset(url).manifest.periods})
    ends = {method.name: _trained_until(method.trials[0].url, config) for method in methods}
    since = {
        name: {period: bisect_right(known, period) - bisect_right(known, end) for period in drift.periods}
        for name, end in ends.items()
    }
    foretold = tuple(_correlations(methods, drift, config.primary))
    return drift.model_copy(update={"trained_until": ends, "since": since, "foretold": foretold})


def _trained_until(url: str, config: EvaluateConfig) -> str:
    """The last period that a bundle was trained on; the training split's if the bundle does not state it."""
    made_by = {} if url in (*config.scores.values(), POSITIONS) else read_bundle_manifest(url).get("made_by", {})
    splits = validate(Provenance, made_by, url).config.splits
    names = (splits[0].periods if splits else None) or with_periods_named(config.splits.train).periods or ()
    return max(item.rpartition("..")[2] for item in names)


def _correlations(methods: Sequence[MethodResult], drift: ByPeriod, primary: str) -> Iterator[DriftCorrelation]:
    """The correlation of each measure of drift with each method's metric."""
    for method in methods:
        means = {period: scope.summaries[primary].mean for period, scope in method.periods.items()}
        with_metric = [(drift.periods[period], mean) for period, mean in means.items() if mean is not None]
        loss_P = np.array([-mean for _, mean in with_metric])
        of_measures = {"features": [period.median_psi for period, _ in with_metric]}
        if all(method.name in period.spreads for period, _ in with_metric):
            of_measures["scores"] = [period.spreads[method.name].psi for period, _ in with_metric]
        for measure, values in of_measures.items():
            correlation, p = _rank_correlation(np.array(values), loss_P)
            yield DriftCorrelation(
                measure=measure, method=method.name, periods=len(with_metric), correlation=correlation, p=p
            )


def _rank_correlation(one_P: Doubles, other_P: Doubles) -> tuple[float | None, float | None]:
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


def period_blocks(evaluation: Evaluation) -> Iterator[Block]:
    """The metric by period, and drift if it was measured, of an evaluation with slices by period."""
    primary, label = evaluation.primary, metric_label(evaluation.primary)
    curves = {
        method.name: {period: scope.summaries[primary] for period, scope in method.periods.items()}
        for method in evaluation.methods
    }
    several = any(len(curve) > 1 for curve in curves.values())
    yield from map(Text, _falls_said(curves, primary))
    yield _metric_table(evaluation)
    if several:
        rows = [row for name, curve in curves.items() for row in charts.curve_rows(name, curve)]
        spec = charts.lines(rows, x="period", y=label, ordinal=True, order=list(curves))
        yield Chart(spec, f"{label} by period, with 95% intervals", "decay")
    if (found := evaluation.by_period) is not None:
        yield Text(drifted(found))
        yield from map(Text, _lacking_said(found))
        yield _drift_table(found)
        if several:
            yield _drift_chart(found)
        yield Points(_HOW_TO_READ, caption="How to read drift", folded=True)
        yield from _foretold_blocks(found, label)
    elif evaluation.drift_failed is not None:
        yield LeftOut(f"drift: {evaluation.drift_failed}")


def _fallen(means: Sequence[Summary]) -> tuple[float, float] | None:
    """The fall of a metric along a line through all periods, and its noise: the half of its 95% interval."""
    known = [
        (x, s.mean, (s.high - s.low) / (2 * _Z))
        for x, s in enumerate(means)
        if s.mean is not None and s.low is not None and s.high is not None
    ]
    if len(known) < 2:
        return None
    x_P, mean_P, error_P = np.array(known, np.float64).T
    weight_P = 1 / np.maximum(error_P, 1e-12) ** 2
    centred_P = x_P - np.average(x_P, weights=weight_P)
    spread = float(weight_P @ centred_P**2)
    slope = float(weight_P @ (centred_P * mean_P)) / spread
    rest_P = mean_P - np.average(mean_P, weights=weight_P) - slope * centred_P
    # the noise is larger where the means spread around the line by more than their intervals say
    more = float(weight_P @ rest_P**2) / max(1, len(known) - 2)
    span = float(x_P[-1] - x_P[0])
    return -slope * span, _Z * span * math.sqrt(max(1.0, more) / spread)


def _falls_said(curves: Mapping[str, Mapping[str, Summary]], metric: str) -> Iterator[str]:
    """One sentence on methods with a fall of the metric beyond its noise, and one on the other falls."""
    found = {name: fall for name, points in curves.items() if (fall := _fallen([*points.values()])) is not None}
    if not found:
        return
    periods = [*next(iter(curves.values()))]
    span, label = f"From {periods[0]} to {periods[-1]}", metric_label(metric)
    stated = {name: f"{name} by {with_error(*fall)}" for name, fall in found.items()}
    falling = [name for name, (fall, _) in found.items() if fall > 0]
    beyond = [name for name in falling if found[name][0] > found[name][1]]
    if beyond:
        yield f"{span} {label} falls by more than its noise: {', '.join(stated[name] for name in beyond)}."
    if within := [name for name in falling if name not in beyond]:
        yield (
            f"{span} {label} falls by less than its noise, the half of a 95% interval, which is no sign of decay: "
            f"{', '.join(stated[name] for name in within)}."
        )
    if not falling:
        yield f"{span} {label} falls for no method."


def _metric_table(evaluation: Evaluation) -> Table:
    """The primary metric of each method and period."""
    primary, found = evaluation.primary, evaluation.by_period
    return Table.from_rows(
        [
            {
                "method": method.name,
                "period": period,
                **({} if found is None else {"since training": found.since[method.name][period]}),
                "groups": scope.summaries[primary].groups,
                f"{metric_label(primary)} [95%]": scope.summaries[primary],
                **columns_against(primary, evaluation.baseline, scope),
            }
            for method in evaluation.methods
            for period, scope in method.periods.items()
        ]
    )


def _drift_table(found: ByPeriod) -> Table:
    """The drift of each period, with training first, and the index of the features that drifted most."""
    features = [name for name, *_ in found.largest()[:_NAMED_FEATURES]]
    periods = {"training": found.train, **found.periods}
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
    if not feature.present:
        return f"{feature.psi:.3f}, not in its files"
    shares = {"missing": feature.missing, "unknown": feature.unknown}
    return "".join([f"{feature.psi:.3f}", *(f", {share:.2%} {name}" for name, share in shares.items() if share)])


def _drift_chart(found: ByPeriod) -> Chart:
    """The index of the features that drifted most, and the median of all, by period."""
    most = [name for name, *_ in found.largest()[:_DRAWN]]
    median = f"median of {len(found.train.features)}"
    rows = [
        {"x": period, "y": value, "series": name}
        for period, drift in found.periods.items()
        for name, value in [*((name, drift.features[name].psi) for name in most), (median, drift.median_psi)]
    ]
    return Chart(
        charts.lines(rows, x="period", y="PSI", ordinal=True, zero=True, order=[*most, median]),
        "Drift: the population stability index of the features that drifted most, and the median of all; below "
        f"{SOME:g} is usually read as none, above {MUCH:g} as much",
        "drift",
    )


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


def drifted(drift: ByPeriod) -> str:
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


def _lacking_said(found: ByPeriod) -> Iterator[str]:
    """A sentence on each feature that the files of some periods lack."""
    for name, of_training in found.train.features.items():
        lacking = [period for period, drift in found.periods.items() if not drift.features[name].present]
        places = [f"{1 - of_training.present:.0%} of the training periods"] if of_training.present < 1 else []
        if places := places + ([f"the test periods {', '.join(lacking)}"] if lacking else []):
            yield f"{name} is not in the files of {' and of '.join(places)}: a missing value in every document."


def _foretold_blocks(found: ByPeriod, label: str) -> Iterator[Block]:
    """Whether drift foretold the loss of the metric."""
    n = max(correlation.periods for correlation in found.foretold)
    if n < _FEWEST_PERIODS:
        n_periods = "1 period" if n == 1 else f"{n} periods"
        few = f"fewer than {_FEWEST_PERIODS} cannot tell a relation from chance. Evaluate more periods."
        yield Text(f"Whether drift foretold the loss cannot be judged: {n_periods}, where {few}")
        return
    yield Text(
        f"Did drift foretell the loss? Spearman's rank correlation, over periods, of drift with the loss of {label}: 1 "
        "where more drift was always more loss. features is the median PSI, scores the PSI of scores. p is over "
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
        for f in found.foretold
    ]
    yield Table.from_rows(rows)
